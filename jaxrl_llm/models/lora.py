"""Low-rank adapters (LoRA, arXiv 2106.09685): ``W + alpha / rank * a @ b`` on top of a frozen model.

Each product is ``x W + alpha / rank (x a) b``, so no gradient of a frozen matrix ever exists: gradients, moments and
checkpoints have the adapter's size. The reference is the base with the initial adapter, which is zero, so
it costs no second copy of the weights. An adapter with a ``scalar`` [D] represents a ``ScalarModel``: its head is
trained directly, and its base may be a language model.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require
from jaxrl_llm.models.config import RESIZED_PARTS, Lora, ModelConfig
from jaxrl_llm.models.decoder import (
    Adapter,
    Decoder,
    add_adapter,
    parameter_shapes,
    scan_layers,
    stack_layers,
    summed_axes,
    to_parameters,
    unstack_layers,
)
from jaxrl_llm.models.heads import ScalarModel, split_head, with_scalar_head
from jaxrl_llm.models.quantised import QuantisedMatrix, quantise
from jaxrl_llm.sharding import platform_of, shardings
from jaxrl_llm.sharding.mesh import device_memory
from jaxrl_llm.sharding.rules import digest_of_checksums, weight_checksums
from jaxrl_llm.types import TrainState


def create_adapter(config: ModelConfig, lora: Lora, key: jax.Array, scalar: Any = None) -> Adapter:
    """Create a float32 adapter that changes nothing yet: ``a`` normal with variance 1 / inputs, ``b`` zero. ``scalar``
    [D] is the initial head of a scalar model; None for a language model. Targets that the model lacks are left out
    (experts are no MLP); InputError where none is left. Each expert has factors of its own.
    """
    shapes = parameter_shapes(config)
    parameters = {}
    for index, (target, like) in enumerate(itertools.product(lora.targets, ("", *RESIZED_PARTS))):
        role, name = target.split("/")
        part = like or role
        if f"blocks.{part}.{name}" not in shapes or RESIZED_PARTS.get(part, part) != role:
            continue
        shape = shapes[f"blocks.{part}.{name}"]
        first = 2 if part == "experts" else 1
        last = first + summed_axes(target)
        outer, inputs, outputs = shape[:first], shape[first:last], shape[last:]
        number, others = divmod(index, 1 + len(RESIZED_PARTS))
        own_key = jax.random.fold_in(key, number + others * len(lora.targets))
        a = jax.random.normal(own_key, (*outer, *inputs, lora.rank)) / math.sqrt(math.prod(inputs))
        parameters.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((*outer, lora.rank, *outputs))}
    targets = ", ".join(lora.targets)
    require(bool(parameters), f"learner.lora.targets {targets}: a {config.family} model has none of them; add attn/q")
    head = {} if scalar is None else {"scalar": jnp.asarray(scalar, jnp.float32)}
    return Adapter(lora.alpha / lora.rank, {"blocks": parameters} | head, lora.merged)


def with_adapter(base: Decoder | None, policy: Any) -> Any:
    """Return the model of ``policy``: itself without a base, or else the base with this adapter in its layers, a
    ``ScalarModel`` if it has a scalar head. Nothing is computed or copied: see ``decoder.linear``.
    """
    if base is None:
        return policy
    parameters_of_policy = to_parameters(policy)
    model = attach_adapter(base, Adapter(policy.scale, parameters_of_policy["blocks"], policy.merged))
    return with_scalar_head(model, parameters_of_policy["scalar"]) if "scalar" in parameters_of_policy else model


def attach_adapter(base: Decoder, adapter: Adapter) -> Decoder:
    """Return the frozen model with factors for the weights of its layers, in place of those that it may have."""
    parameters = to_parameters(base)
    return Decoder(base.config, parameters | {"blocks": parameters["blocks"] | {"adapter": adapter}})


def without_adapter(model: Decoder) -> Decoder:
    """Return the frozen model below an attached adapter, which computes as it does below one."""
    blocks = model.weights.blocks
    return attach_adapter(model, Adapter(1.0, {}, blocks.adapter.merged)) if hasattr(blocks, "adapter") else model


class BasePacker:
    """Packs the matrices of a frozen model one layer after the other, as they are read: ``weights.read_parameters``.

    Attributes:
      checksums: of all arrays as they were read, by path.
      form: the dtype in which they were read, and the kind if some were packed in the checkpoint.
      repacked: matrices that the checkpoint holds packed in another form.
    """

    def __init__(self, lora: Lora):
        self._lora = lora
        self.form = lora.read_dtype
        self.checksums: dict[str, jax.Array] = {}
        self.repacked: set[str] = set()

    def __call__(
        self, config: ModelConfig, path: str, read: Callable[..., Any], read_packed: Callable[..., Any]
    ) -> jax.Array | QuantisedMatrix:
        """Return a parameter, a matrix in its packed form.

        Args:
          read: reads all of it, or the layer of a number, [1, ...].
          read_packed: see ``weights.packed_arrays``; of (kind, layer).
        """
        matrix, kind = path.removeprefix("blocks/"), self._lora.base
        if not self._lora.packs(matrix, config):
            array = read()
            self._count(path, array)
            return array
        outer = int(matrix.startswith("experts/"))
        count, *shape = parameter_shapes(config)[path.replace("/", ".")]
        sizes = tuple(shape[outer:][: summed_axes(matrix)])
        layers = []
        for layer in range(count):
            if arrays := read_packed(kind, layer):
                packed = QuantisedMatrix(kind, sizes, arrays, outer)
                for name, array in arrays.items():
                    self._count(f"{path}/{name}", array, layer)
                self.form = f"{self._lora.read_dtype} {kind}"
            else:
                self.repacked |= set() if arrays is None else {matrix}
                array = read(layer)
                self._count(path, array, layer)
                packed = jax.block_until_ready(pack_stack(kind, matrix, array))
                array.delete()
            layers.append(packed)
        return jax.block_until_ready(jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers))

    def _count(self, path: str, array: jax.Array, layer: int = 0) -> None:
        """Add an array's checksum, as part of a stack from this layer on."""
        found = jax.block_until_ready(weight_checksums(array, layer))
        self.checksums[path] = self.checksums[path] + found if path in self.checksums else found

    def digest(self) -> str:
        """Return the ``weights_digest`` of the model as it was read."""
        return digest_of_checksums(self.checksums)


def pack_stack(kind: str, matrix: str, stack: jax.Array) -> QuantisedMatrix:
    """Pack a stack of a matrix ``part/name``. InputError: its sizes do not allow it."""
    return quantise(kind, stack, summed_axes(matrix), int(matrix.startswith("experts/")))


SEPARATE_SHARE = 0.6
"""The share of a GPU's memory that separate layers, and what the learner stacks of them, may take together."""


def frozen_form(base: Decoder, lora: Lora, mesh: Any) -> Decoder:
    """Return a frozen model in the form in which learner and sampler read it on a mesh: packed by ``Lora.base``, or in
    its dtype. GPUs decode from separate layers where the learner's stack of them fits too: for four layers of 8B and 64
    slots an H100's program moves 4.8 GB a step, and 8.0 GB where they are stacked. CPUs, whose products are float32,
    get float32: widening a layer at each decode step took a fifth of their speed. InputError: it cannot be packed.
    """
    if lora.packed:
        parameters = to_parameters(base)
        for part, matrices in parameters["blocks"].items():
            for name, stack in matrices.items():
                if not isinstance(stack, QuantisedMatrix) and lora.packs(f"{part}/{name}", base.config):
                    matrices[name] = pack_stack(lora.base, f"{part}/{name}", stack)
        return Decoder(base.config, parameters)
    platform = platform_of(mesh)
    if platform == "cpu":
        return jax.tree.map(lambda x: x.astype(jnp.float32), base)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base)) / mesh.shape["fsdp"] / mesh.shape["tensor"]
    fits = 2 * size <= SEPARATE_SHARE * device_memory(mesh)
    return unstack_layers(base) if platform == "gpu" and fits else base


def freeze_base(state: TrainState, lora: Lora, mesh: Any) -> TrainState:
    """Return the state with its frozen base, if it has one, in ``frozen_form``; what that replaces is deleted."""
    base = state.policy.base
    if base is None:
        return state
    frozen = frozen_form(base, lora, mesh)
    frozen = jax.block_until_ready(jax.device_put(frozen, shardings(frozen, mesh)))
    kept = {id(leaf) for leaf in jax.tree.leaves(frozen)}
    for leaf in jax.tree.leaves(base):
        if id(leaf) not in kept:
            leaf.delete()
    return state.with_role("policy", base=frozen)


def policy_shapes(base: Decoder, lora: Lora, mesh: Any) -> Decoder:
    """Return the shapes of the policy on the learner's mesh: ``base``, or its frozen form with an adapter."""
    if not lora.rank:
        return base

    def make(base: Decoder) -> Any:
        adapter = create_adapter(base.config, lora, jax.random.key(0))
        return with_adapter(frozen_form(base, lora, mesh), adapter)

    return jax.eval_shape(make, base)


def merge(model: Decoder | ScalarModel, dtype: Any = jnp.float32) -> Any:
    """Return an ordinary model in ``dtype``: an attached adapter is added to the weights, one layer at a time. Only
    float32 keeps the smallest changes of a bfloat16 base. A model without an adapter is returned unchanged.
    """
    decoder, scalar = split_head(model)
    blocks = decoder.weights.blocks
    if not hasattr(blocks, "adapter"):
        return model
    layer = lambda x, w, inputs: (x, to_parameters(add_adapter(w, dtype)))  # noqa: E731
    stacked = {"blocks": scan_layers(layer, None, decoder.config, stack_layers(decoder), {})[1]}
    outside = {name: x.astype(dtype) for name, x in to_parameters(decoder).items() if name != "blocks"}
    merged = Decoder(decoder.config, outside | stacked)
    return merged if scalar is None else with_scalar_head(merged, scalar.astype(dtype))


def frozen_base(state: TrainState, name: str) -> Any:
    """Return the frozen model that the parameters of a role or of a frozen copy adapt; None for a whole model. An
    adapter without its own base adapts the policy's: no two roles hold the same buffer.
    """
    role = state.roles.get(name)
    params = state.frozen[name] if role is None else role.params
    if not isinstance(params, Adapter):
        return None
    return state.policy.base if role is None or role.base is None else role.base


def model_of(state: TrainState, name: str = "policy") -> Any:
    """Return the model of a role's parameters, or of a frozen copy's; by default the current policy."""
    params = state.roles[name].params if name in state.roles else state.frozen[name]
    return with_adapter(frozen_base(state, name), params)
