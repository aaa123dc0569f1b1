"""Options of compilers: the learner's programs get them, on absent TPUs too, and unknown ones stop nothing; and what
compilers make of a layer there.
"""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from learner.rollouts import T, one_device, policy_update, rollout
from plan.tinyrun import CONFIG, computing, tiny_run
from tiny import tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.learner import Layout, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh, score
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import Weights, mlp
from jaxrl_llm.models.decoding import decode, empty_cache
from jaxrl_llm.plan.machines import describe_devices, parse_topology
from jaxrl_llm.plan.planning import plan_run
from jaxrl_llm.plan.programs import abstract_model, compile_program, planned_run
from jaxrl_llm.plan.tables import report_lines
from jaxrl_llm.sharding import MeshShape, gather_layer, layout_of, make_mesh
from jaxrl_llm.sharding.mesh import (
    CHIP_OPTIONS,
    REPEATABLE,
    compiler_options,
    supported_options,
    without_compilation_cache,
)

pytestmark = pytest.mark.slow

SLICE = parse_topology("v5p:2x2x1")
UNKNOWN = ("xla_no_such_option", True)


def test_cpus_have_no_options():
    assert compiler_options(make_mesh(tiny_run((1, 8, 1)).mesh)) == ()


def test_the_learners_programs_are_compiled_with_their_options():
    compute = ComputeOptions(compiler=(UNKNOWN,))
    mesh, optimiser = one_device(), Optimiser()
    with jax.set_mesh(mesh):
        data = put_on_mesh(pack(rollout(), Layout(4, 24, T)), mesh)
        with pytest.raises(jax.errors.JaxRuntimeError, match=UNKNOWN[0]):
            score(tiny(), data, jnp.float32(1), compute)
        state = create_state(tiny(), build(optimiser), False, mesh)
        with pytest.raises(jax.errors.JaxRuntimeError, match=UNKNOWN[0]):
            policy_update(PRESETS["dapo"], optimiser, compute)(state, data)


def test_an_option_that_a_compiler_does_not_know_is_left_out_with_a_warning(caplog):
    known = ("xla_embed_ir_in_executable", True)
    with caplog.at_level(logging.WARNING):
        assert supported_options((known, UNKNOWN), jax.devices()[0]) == (known,)
    assert f"does not know {UNKNOWN[0]}: left out" in caplog.text and known[0] not in caplog.text


@pytest.mark.compilers
def test_weights_are_gathered_while_products_run_on_an_absent_tpu():
    devices = describe_devices(SLICE)
    config = dataclasses.replace(CONFIG, width=256, mlp_width=1024)
    run = computing(tiny_run((1, 4, 1)), dtype="bfloat16", attention="xla")
    one = planned_run(run, config, devices)
    assert one.outline.forward.compute.compiler == CHIP_OPTIONS["v5p"], "the installed compiler knows all of them"
    assert "%async-collective-start" in compile_program(one, "update").text
    told = "\n".join(report_lines(plan_run(run, config, SLICE, devices, None, False), ""))
    assert all(f"{name} true" in told for name, _ in CHIP_OPTIONS["v5p"])


@pytest.mark.compilers
def test_an_absent_v5e_knows_its_options():
    mesh = make_mesh(MeshShape(1, 4, 1), describe_devices(parse_topology("v5e:2x2")))
    assert compiler_options(mesh) == (("xla_tpu_scoped_vmem_limit_kib", 24576),)


@pytest.mark.compilers
def test_sums_are_added_in_one_order_on_an_absent_gpu():
    devices = describe_devices(parse_topology("h100:1"))
    one = planned_run(computing(tiny_run((1, 1, 1)), dtype="bfloat16", attention="xla"), CONFIG, devices)
    assert one.outline.forward.compute.compiler == REPEATABLE, "the installed compiler knows it"
    place = SingleDeviceSharding(devices[0])
    table = jax.ShapeDtypeStruct((256, 64), jnp.float32, sharding=place)
    tokens = jax.ShapeDtypeStruct((512,), jnp.int32, sharding=place)
    gradient = jax.grad(lambda table, tokens: jnp.sum(table[tokens] ** 2))
    with without_compilation_cache():
        texts = [
            jax.jit(gradient, compiler_options=dict(options)).lower(table, tokens).compile().as_text()
            for options in ((), REPEATABLE)
        ]
    scatters = [re.findall(r" = f32.* scatter\(.*", text) for text in texts]
    unordered = [[line for line in lines if "unique_indices=true" not in line] for lines in scatters]
    assert unordered[0] and not unordered[1]


@pytest.mark.compilers
def test_decoding_copies_no_keys_on_an_absent_gpu():
    place = SingleDeviceSharding(describe_devices(parse_topology("h100:1"))[0])
    columns, rows, steps = 320, 4, 16
    config = dataclasses.replace(CONFIG, layers=1)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (rows,), (rows,))]
    caches = [jax.eval_shape(lambda n=n: empty_cache(config, rows, n, "bfloat16")) for n in (columns, steps)]
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (abstract_model(config, "bfloat16"), *caches, *integers),
    )
    with without_compilation_cache():
        text = jax.jit(decode).lower(*given).compile().as_text()
    # Two products of one query are merged by joining the keys of the cache with those of the chunk.
    assert f",{columns}]" in text and f",{columns + steps}]" not in text


@pytest.mark.compilers
def test_products_of_a_layers_gradients_are_whole_and_scattered_as_they_are_added():
    """Of 512 rows over fsdp 16 each part would have 32, where a tile has 128."""
    mesh = make_mesh(MeshShape(1, 16, 2), describe_devices(parse_topology("v5p:4x4x2")))
    shapes = {"gate": (512, 2048), "up": (512, 2048), "down": (2048, 512)}
    of_mesh = lambda shape, layout: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout)
    weights = {name: of_mesh(shape, layout_of(f"blocks/0/mlp/{name}", shape, mesh)) for name, shape in shapes.items()}
    layer = Weights({"mlp": weights})
    hidden = of_mesh((16, 512, 512), NamedSharding(mesh, PartitionSpec("fsdp")))
    loss = lambda layer, hidden: jnp.sum(jnp.square(mlp(gather_layer(layer), CONFIG, hidden)))
    with jax.set_mesh(mesh), without_compilation_cache():
        divided = jax.tree.map(lambda x: x.sharding, layer)
        text = jax.jit(jax.grad(loss), out_shardings=divided).lower(layer, hidden).compile().as_text()
    assert "windowed_dot_general" not in text and "all-reduce-scatter" in text
