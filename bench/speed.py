"""How fast the sampler, the learner, the policy loss and a draw are, on this machine's default device."""

import dataclasses
import functools
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import PRESETS, Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.engine.engine import for_sampling
from jaxrl_llm.engine.sampling import draw, draw_options, to_traced
from jaxrl_llm.errors import require
from jaxrl_llm.learner import (
    Compute,
    Forward,
    Layout,
    Learner,
    Optimiser,
    PolicyGradient,
    Sample,
    Training,
    create_state,
    learn,
    make_update,
    pack,
)  # fmt: skip
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models import layers, load_pretrained
from jaxrl_llm.models.config import Attention, Embeddings, Experts, ModelConfig, Norm, Rope
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.plan.programs import find_model_config
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding.mesh import MeshShape, compiler_options, make_mesh, platform_of
from jaxrl_llm.types import Role, TrainState


def qwen3_shape(width: int, layers: int) -> ModelConfig:
    """A small model of Qwen3's architecture with 8192 words."""
    attention = Attention(width // 64, width // 128, 64, Rope(1e6))
    return ModelConfig("qwen3", 8192, width, layers, 3 * width, attention, Norm(1e-6), embeddings=Embeddings(tied=True))


SHAPES = {"7m": qwen3_shape(256, 6), "20m": qwen3_shape(384, 9)}
SHAPES["7m-experts"] = dataclasses.replace(
    SHAPES["7m"], family="qwen3_moe", experts=Experts(32, 4, SHAPES["7m"].mlp_width // 4, renormalise=True)
)
RANDOM = "random:"
WAVES = 4
"""Requests for each slot."""
ALGORITHM: Algorithm = dataclasses.replace(PRESETS["grpo"], kl_coef=0.0)
ADAM = Optimiser(learning_rate=1e-4, clip_norm=0.0)
LEARNER = Learner(optimiser=ADAM, compute=Compute(microbatch_rows=4, remat="none"))
"""The settings that were fastest on CPUs at 7m."""
GOALS = {"cpu": 5.0, "tpu": 2.5}
"""How often the loss may move its inputs and its gradient."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is sampled or learned from.

    Attributes:
      model: 7m, 20m, 7m-experts (4 of 32 for each token) or ``random:NAME`` of a published shape (random weights), or
        anything that jaxrl-llm loads.
      lengths: equal or long (a long tail, of mean 0.3).
      group: completions of each prompt.
      prompt: tokens of a prompt.
      completion: tokens of the longest completion.
      repeats: timed calls after one that compiles.
    """

    model: str = "7m"
    lengths: Literal["equal", "long"] = "equal"
    group: int = 8
    prompt: int = 32
    completion: int = 128
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Rollout(Work):
    """What is sampled.

    Attributes:
      dtype: of the weights; float32 or bfloat16.
      slots: completions sampled at one time.
      chunk: decode steps in one call.
    """

    dtype: str = "float32"
    slots: int = 64
    chunk: int = 4


@dataclasses.dataclass(frozen=True)
class Update(Work):
    """What is learned from.

    Attributes:
      rows: completions.
      learner: as in a run.
    """

    rows: int = 64
    learner: Learner = LEARNER


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is compiled.

    Attributes:
      rows: B, completions.
      tokens: T, tokens of each.
      presets: their names; empty for all.
    """

    rows: int = 512
    tokens: int = 4096
    presets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Draws:
    """What is drawn from.

    Attributes:
      rows: B.
      vocab: V, of each table.
      repeats: timed calls after one that compiles.
    """

    rows: int = 64
    vocab: tuple[int, ...] = (8192, 49152)
    repeats: int = 30


def model_of(name: str, dtype: str = "float32") -> Decoder:
    """The model that is named: random weights of a shape from the same key always, or a loaded one."""
    shape = SHAPES.get(name)
    if name.startswith(RANDOM):
        shape, _ = find_model_config(name.removeprefix(RANDOM))
    return load_pretrained(name, dtype)[0] if shape is None else initialise(shape, jax.random.key(0), dtype)


def requests(words: int, count: int, work: Work) -> tuple[list[np.ndarray], np.ndarray]:
    """The same for all samplers and learners: prompts int[prompt] below ``words``, group by group, and a length for
    each.
    """
    random = np.random.default_rng(0)
    unique = [random.integers(0, words, work.prompt) for _ in range(-(-count // work.group))]
    share = np.ones(count) if work.lengths == "equal" else random.beta(1, 7 / 3, count)
    limits = np.maximum(1, np.round(share * work.completion)).astype(int)
    return [unique[i // work.group] for i in range(count)], limits


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, list[float]]:
    """Seconds of the first call, which compiles, and of each later one."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1:]


@jax.jit
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of two matrices, as the models compute it."""
    return layers.product("ij,jk->ik", x, y)


def measured_peaks(dtype: str = "float32") -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a matrix product of this type."""
    on_cpu = jax.devices()[0].platform == "cpu"
    size = 2048 if on_cpu else 8192
    large, copy = jnp.ones(1 << (26 if on_cpu else 30), jnp.float32), jax.jit(lambda x: x + 1)
    bandwidth = 2 * large.nbytes / min(timed(functools.partial(copy, large), 5)[1])
    del large
    matrices = [jnp.ones((size, size), dtype)] * 2
    return bandwidth, 2 * size**3 / min(timed(functools.partial(product, *matrices), 5)[1])


def row_of(work: Work, model: Decoder, limits: np.ndarray, first: float, seconds: list[float]) -> dict[str, Any]:
    """What a row says of any work on a model."""
    median = statistics.median(seconds)
    return dataclasses.asdict(work) | {
        "device": jax.devices()[0].device_kind,
        "parameters_m": round(sum(x.size for x in jax.tree.leaves(model)) / 1e6, 2),
        "mean_over_max": round(float(limits.mean()) / work.completion, 3),
        "tokens": int(limits.sum()),
        "seconds": round(median, 5),
        "tokens_per_s": round(limits.sum() / median, 1),
        "compile_s": round(max(first - median, 0), 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def rollout(options: Rollout) -> Iterator[dict[str, Any]]:
    """How fast the sampler is.

    Every request has its length forced by a limit of its own, so that all samplers do the same work. There are four
    requests for each slot, in groups that share a prompt. ``roofline`` is the share that the least possible time has of
    the time taken: the larger of the bytes read (the weights at each of the fewest steps that will do, and the cache of
    the live rows) over the memory's bandwidth, and the tokens' matrix products over their speed, both measured here
    first. ``mbu`` is those bytes a second over that bandwidth. ``compile_s`` is what the first run took longer.
    """
    model = for_sampling(model_of(options.model, options.dtype), jax.default_backend())
    prompts, limits = requests(model.config.vocab_size, WAVES * options.slots, options)
    engine = Engine(model, options.slots, options.prompt + options.completion, options.chunk, group=options.group)

    def once() -> None:
        engine.start(Sampling(max_new_tokens=options.completion))
        engine.submit(prompts, range(len(prompts)), limits.tolist())
        while engine.busy:
            engine.step(model)
        assert sum(len(done.tokens) for _, done in engine.collect()) == limits.sum()

    row = row_of(options, model, limits, *timed(once, options.repeats))
    moved, operations = least_work(model, options.prompt, limits, options.slots)
    bandwidth, speed = measured_peaks(options.dtype)
    yield row | {
        "slot_utilisation": round(float(limits.sum()) / engine.slot_steps, 3),
        "roofline": round(max(moved / bandwidth, operations / speed) / row["seconds"], 3),
        "mbu": round(moved / bandwidth / row["seconds"], 3),
    }


def least_work(model: Decoder, prompt: int, limits: np.ndarray, slots: int) -> tuple[float, float]:
    """Bytes and operations, with every slot in use at every step; the embedding table counts as the head's product."""
    steps = max(int(limits.max()), -(-int(limits.sum()) // slots))
    attention, leaves = model.config.attention, jax.tree.leaves(model)
    weights, size = sum(x.nbytes for x in leaves), sum(x.size for x in leaves)
    column = 2 * model.config.layers * attention.kv_heads * attention.head_dim * leaves[0].dtype.itemsize
    cache = column * float(np.sum(limits * prompt + limits * (limits + 1) / 2))
    return steps * weights + cache, 2.0 * size * int(limits.sum())


class Setup(NamedTuple):
    """What the trainer makes of its settings, on one device."""

    settings: Learner
    training: Training
    forward: Forward

    @property
    def layout(self) -> Layout:
        """Shapes of a microbatch."""
        return self.forward.layout


def set_up(model: Decoder, settings: Learner, prompt: int, completion: int) -> tuple[TrainState, Setup]:
    """A fresh state, and what updates it by completions of at most so many tokens."""
    mesh = make_mesh(MeshShape())
    optimiser = build(settings.optimiser)
    compute = compute_for(settings, model.config, platform_of(mesh), compiler_options(mesh))
    objectives = (PolicyGradient(ALGORITHM),)
    training = Training(objectives, make_update(objectives, optimiser, learning_rate(settings.optimiser), compute))
    forward = Forward(layout_for(settings, compute, prompt + completion, completion, mesh), compute, 1.0, mesh)
    return create_state(model, optimiser, False, mesh, settings.lora), Setup(settings, training, forward)


def samples_of(prompts: list[Any], completions: list[Any], advantages: list[float], group: int) -> list[list[Sample]]:
    """Groups as the trainer hands them to the learner."""
    samples = []
    for prompt, tokens, advantage in zip(prompts, completions, advantages, strict=True):
        every = np.ones(len(tokens), bool)
        arrays = {"sampler_logp": np.zeros(len(tokens), np.float32), "fresh": every}
        ids = np.asarray(prompt, np.int32), np.asarray(tokens, np.int32)
        samples.append(Sample(*ids, every, {"advantages": float(advantage)}, arrays))
    return [samples[i : i + group] for i in range(0, len(samples), group)]


def updated(state: TrainState, groups: list[list[Sample]], setup: Setup) -> tuple[TrainState, dict[str, float]]:
    """One step of learning and its metrics, on the host; the state is donated."""
    with jax.set_mesh(setup.forward.mesh):
        state, metrics = learn(state, groups, setup.settings, setup.forward, (setup.training,), {}, 0)
        return jax.block_until_ready(state), metrics


def update(options: Update) -> Iterator[dict[str, Any]]:
    """How fast and how large the learner's update is.

    The work is one optimiser step of GRPO without a reference on random completions, packed and computed as the trainer
    does it. ``seconds`` is all of ``learn``: packing, transfer, loss, gradient, optimiser and metrics; ``backward_s``
    is loss and gradient of packed data. ``mfu`` is the share of ``seconds`` that the least number of operations would
    take (forward and backward once, a prompt once for its group, the head for completions only) at the speed of a
    matrix product measured here too. ``filled`` is the share of the computed positions that hold a token of a prompt
    (once for its group) or of a completion. ``temp_mb`` is what the compiled update needs beside its arguments.
    """
    model, random = model_of(options.model), np.random.default_rng(1)
    words = model.config.vocab_size
    prompts, limits = requests(words, options.rows, options)
    completions = [random.integers(0, words, limit) for limit in limits]
    groups = samples_of(prompts, completions, random.standard_normal(options.rows).tolist(), options.group)
    state, setup = set_up(model, options.learner, options.prompt, options.completion)
    with jax.set_mesh(setup.forward.mesh):
        packed = put_on_mesh(pack([sample for group in groups for sample in group], setup.layout), setup.forward.mesh)
        compiled = setup.training.update.lower(state, packed, {"temperature": 1.0}).compile().memory_analysis()
        role = functools.partial(Role, opt_state=None, updates=jnp.int32(0), base=state.policy.base)
        given = packed, setup.training.objectives, {"temperature": jnp.float32(1)}, setup.forward.compute
        backward = jax.jit(lambda policy: accumulate(role(policy), *given))
        _, backward_s = timed(lambda: backward(state.policy.params), options.repeats)
    holder = [state]

    def once() -> None:
        holder[0], _ = updated(holder[0], groups, setup)

    row = row_of(options, model, limits, *timed(once, options.repeats))
    _, speed = measured_peaks(options.learner.compute.dtype)
    least = least_operations(model, options.prompt, limits, options.group) / speed
    yield row | {
        "backward_s": round(statistics.median(backward_s), 3),
        "filled": round((limits.sum() + options.rows // options.group * options.prompt) / computed(packed), 3),
        "mfu": round(least / row["seconds"], 3),
        "temp_mb": round(compiled.temp_size_in_bytes / 2**20, 1),
    }


def least_operations(model: Decoder, prompt: int, limits: np.ndarray, group: int) -> float:
    """Of loss and gradient for a dense model: matrix products and causal attention, three times those of a forward
    pass.
    """
    config, attention = model.config, model.config.attention
    head = config.vocab_size * config.width
    inner = sum(x.size for x in jax.tree.leaves(model)) - head * (1 if config.embeddings.tied else 2)
    prompts, completed = len(limits) / group, float(limits.sum())
    pairs = prompts * prompt * (prompt + 1) / 2 + float(np.sum(limits * prompt + limits * (limits + 1) / 2))
    products = inner * (prompts * prompt + completed) + head * completed
    return 6 * products + 12 * config.layers * attention.heads * attention.head_dim * pairs


def computed(packed: Any) -> int:
    """Positions of the rows that are computed, padding included."""
    _, rows, tokens = packed.rows.tokens.shape
    return int(packed.microbatches) * rows * tokens


def loss(options: Loss) -> Iterator[dict[str, Any]]:
    """How many bytes the whole policy loss moves, read off the compiled program: value, gradient and metrics.

    ``passes`` is the compiler's count of bytes accessed over the least there is to do: reading the inputs once and
    writing the gradient. Goals: 5 on CPU, 2.5 on TPU.
    """
    for name in options.presets or PRESETS:
        require(name in PRESETS, f"no preset {name!r}: there are {', '.join(PRESETS)}")
        algorithm, platform = PRESETS[name], jax.devices()[0].platform
        of = jax.ShapeDtypeStruct
        wide, single = of((options.rows, options.tokens), jnp.float32), of((), jnp.float32)
        reads_sampler = algorithm.surrogate.reads_sampler or algorithm.ratio.anchor == "sampler"
        batch = PolicyBatch(
            advantages=wide if algorithm.advantage.by_token else of((options.rows,), jnp.float32),
            mask=of(wide.shape, bool),
            old_logp=wide if algorithm.surrogate.reads_ratio and algorithm.ratio.anchor == "old" else None,
            ref_logp=wide if algorithm.needs_reference and algorithm.kl_in == "loss" else None,
            sampler_logp=wide if reads_sampler or algorithm.correction is not None else None,
        )
        arguments = wide, batch, single, single
        graded = jax.value_and_grad(functools.partial(policy_loss, algorithm), has_aux=True)
        program = jax.jit(graded).lower(*arguments).compile()
        least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments)) + wide.size * 4
        moved, goal = program.cost_analysis()["bytes accessed"], GOALS.get(platform)
        within = None if goal is None else bool(moved <= goal * least)
        sizes = {"least_mb": round(least / 1e6, 1), "moved_mb": round(moved / 1e6, 1)}
        yield {"preset": name, "passes": round(moved / least, 2), "goal": goal, "within_goal": within} | sizes


def sampling(options: Draws) -> Iterator[dict[str, Any]]:
    """What it takes to draw one token for each row from logits.

    Beside the sampler's own draws stand the ways that it does not take: Gumbel noise over the vocabulary, and top-p by
    sorting.
    """

    def gumbel(logits: jax.Array, u: jax.Array) -> jax.Array:
        key = jax.random.key(jax.lax.bitcast_convert_type(u[0], jnp.uint32), impl="threefry2x32")
        return jnp.argmax(logits + jax.random.gumbel(key, logits.shape), axis=-1)

    def by_sorting(logits: jax.Array, u: jax.Array) -> jax.Array:
        order = jnp.argsort(logits, axis=-1, descending=True)
        ordered = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
        running = jnp.cumsum(jnp.where(jnp.cumsum(ordered, axis=-1) - ordered < 0.9, ordered, 0.0), axis=-1)
        at = jnp.sum(running <= (u * running[:, -1])[:, None], axis=-1)
        return jnp.take_along_axis(order, at[:, None], axis=-1)[:, 0]

    rules = {"plain": Sampling(), "top_p": Sampling(top_p=0.9), "min_p": Sampling(min_p=0.05)}
    for vocab in options.vocab:
        random = np.random.default_rng(0)
        logits = jnp.asarray(random.normal(0, 2, (options.rows, vocab)), jnp.float32)
        u = jnp.asarray(random.random(options.rows), jnp.float32)
        ways = {"gumbel": (jax.jit(gumbel), (logits, u)), "top_p by sorting": (jax.jit(by_sorting), (logits, u))}
        for name, rule in rules.items():
            ours = jax.jit(functools.partial(draw, options=draw_options(rule)))
            ways[f"draw: {name}"] = ours, (logits, u, jax.tree.map(jnp.asarray, to_traced(rule)))
        for name, (call, arguments) in ways.items():
            _, seconds = timed(functools.partial(call, *arguments), options.repeats)
            yield {
                "way": name,
                "rows": options.rows,
                "vocab": vocab,
                "median_ms": round(1e3 * statistics.median(seconds), 3),
            }
