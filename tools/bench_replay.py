"""What replaying successes is worth on a problem that is solved once in about 200 samples.

    python tools/bench_replay.py [--seeds 5] [--steps 600] [--algorithms grpo cispo] [--adam]

A tiny random decoder over 14 letters has to write two of them; its problem is the pair whose probability is nearest to
1/200 at first. Each step asks it of P groups of G completions, 64 in all, and makes one update, by the trainer's own
engine, collection and learner; the policy's exact success is computed after it. Prints a table: the share of steps with
an informative group, while success is below 0.01 and after the first success, and the step at which success is 0.9, for
each seed. Both runs of a seed sample alike until the first success.

``grpo`` cuts the gradient at a ratio of 1.2, so that a stored success pushes until the policy has made each of its
tokens that much likelier than when it was sampled; ``cispo`` caps the weight and cuts none. The optimiser is gradient
descent, whose steps are as large as what there is to learn from; ``--adam`` takes AdamW, whose steps are not.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.learner import Forward, Layout, Learner, Moments, Optimiser, Training, create_state, learn, make_update
from jaxrl_llm.learner.objectives import PolicyGradient
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.samples import to_samples
from jaxrl_llm.models import logits
from jaxrl_llm.models.config import Attention, ComputeOptions, ModelConfig
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rewards import Failures, Scores
from jaxrl_llm.rollout import Collect, Engine, Replay, Sampling
from jaxrl_llm.rollout.dynamic_sampling import Sampler, collect
from jaxrl_llm.rollout.groups import AdmissionPolicy, Carryover, GroupSource, informative
from jaxrl_llm.sharding import MeshShape, make_mesh
from jaxrl_llm.tasks import Shuffled
from jaxrl_llm.types import Problem

LETTERS = "abcdefghijklmn"
PROMPT = np.zeros(1, np.int32)
SHAPE = ModelConfig("llama", len(LETTERS), 32, 2, 64, Attention(4, 2, 8))
LENGTH = 2
RARE = 1 / 200
EARLY = 0.01
SOLVED = 0.9


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes:
      seeds: runs of each kind.
      steps: at most.
      prompts: P, how often a step asks the problem.
      group: G.
      algorithms: of ``PRESETS``, without a KL.
      adam: AdamW in place of gradient descent.
    """

    seeds: int = 5
    steps: int = 600
    prompts: int = 8
    group: int = 8
    algorithms: tuple[str, ...] = ("grpo", "cispo")
    adam: bool = False

    @property
    def optimiser(self) -> Optimiser:
        """AdamW, or without its averages, and with an eps far above any gradient, plain descent at the same rate."""
        if self.adam:
            return Optimiser(learning_rate=3e-4)
        return Optimiser(learning_rate=0.01, moments=Moments(b1=0.0, eps=1.0), clip_norm=0.0)


class Spelling:
    """The tokenizer: a letter is a token."""

    def batch_decode(self, rows: Sequence[np.ndarray], skip_special_tokens: bool) -> list[str]:
        """The texts."""
        return ["".join(LETTERS[token] for token in row) for row in rows]


class Exact:
    """The judge: 1 where the text is the answer, else 0."""

    def begin(self, items: Sequence[tuple[Problem, Any]]) -> Callable[[], Scores]:
        """Of each completion."""
        right = np.array([float(completion.text == problem.answer) for problem, completion in items])
        return lambda: Scores(right, right, {"accuracy": right}, Failures())


class Prompts:
    """The one prompt, as token ids; of no task that would have metrics of its own."""

    tasks = ()

    def __getitem__(self, problem: Problem) -> np.ndarray:
        """Whatever is asked."""
        return PROMPT


@dataclasses.dataclass(frozen=True)
class Found:
    """One run.

    Attributes:
      success: of the policy before each step, exact, and after the last one.
      informative: whether a group of each step could teach.
      begun: the step in which the first answer was right; None where none was.
    """

    success: list[float]
    informative: list[bool]
    begun: int | None

    @property
    def solved_at(self) -> int | None:
        """The step that reached ``SOLVED``; None where none did."""
        return len(self.informative) if self.success[-1] >= SOLVED else None

    @property
    def early(self) -> list[bool]:
        """Whether a group could teach, of steps before which success was below ``EARLY``."""
        return [could for could, chance in zip(self.informative, self.success, strict=False) if chance < EARLY]

    @property
    def later(self) -> list[bool]:
        """The same of steps after the first success."""
        return self.informative[self.begun or len(self.informative) :]


@jax.jit
def pairs(model: Any) -> jax.Array:
    """The probability of each pair of letters after the prompt, [14, 14]."""
    count = len(LETTERS)
    rows = jnp.stack([jnp.zeros(count, jnp.int32), jnp.arange(count, dtype=jnp.int32)], axis=1)
    logp = jax.nn.log_softmax(logits(model, rows))
    return jnp.exp(logp[0, 0][:, None] + logp[:, 1])


def sampler_of(model: Any, answer: str, seed: int, options: Options, replay: bool) -> Sampler:
    """One group a step."""
    problem = Problem("pair", ({"role": "user", "content": "?"},), answer, "pairs")
    source = GroupSource(Spelling(), Prompts(), Shuffled((problem,), seed), Exact(), options.group, seed, ())
    settings = Collect(replay=Replay() if replay else None)
    engine = Engine(model, slots=options.prompts * options.group, max_length=8, chunk=LENGTH)
    admission = AdmissionPolicy(options.prompts, options.prompts * options.group, LENGTH, False, settings)
    return Sampler(engine, source, Sampling(max_new_tokens=LENGTH), admission, lambda text: None)


@functools.cache
def training_of(algorithm: Algorithm, optimiser: Optimiser) -> Training:
    """One update a batch."""
    objectives = (PolicyGradient(algorithm),)
    return Training(objectives, make_update(objectives, build(optimiser), learning_rate(optimiser), ComputeOptions()))


def run(options: Options, name: str, seed: int, replay: bool) -> Found:
    """Steps until the policy writes the pair in nine of ten completions, or no step is left."""
    algorithm = dataclasses.replace(PRESETS[name], kl=None, kl_coef=0.0)
    training = training_of(algorithm, options.optimiser)
    model = initialise(SHAPE, jax.random.key(seed))
    chances = np.asarray(pairs(model))
    at = np.unravel_index(np.abs(np.log(chances / RARE)).argmin(), chances.shape)
    sampler = sampler_of(model, "".join(LETTERS[i] for i in at), seed, options, replay)
    settings = Learner(optimiser=options.optimiser)
    mesh = make_mesh(MeshShape(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    forward = Forward(Layout(1, 1 + LENGTH * options.prompts * options.group, LENGTH), ComputeOptions(), 1.0, mesh)
    state = create_state(model, build(settings.optimiser), False, mesh)
    left = Carryover()
    found = Found([float(chances[at])], [], None)
    for step in range(1, options.steps + 1):
        version = int(state.policy.updates)
        batch = collect(sampler, model_of(state), version, left)
        left = batch.left
        rewards = np.stack([group.rewards for group in batch.groups])
        samples, _ = to_samples(algorithm, batch.groups, version, rewards, (), LENGTH, {})
        state, _ = learn(state, samples, settings, forward, (training,), {}, seed)
        found.informative.append(any(informative(group) for group in batch.groups))
        found.success.append(float(pairs(model_of(state))[at]))
        if found.begun is None and batch.metrics["reward/accuracy"] > 0:
            found = dataclasses.replace(found, begun=step)
        if found.solved_at is not None:
            break
    return found


def row(name: str, replay: bool, found: Sequence[Found]) -> str:
    """A line of the table."""
    ends = [one.solved_at for one in found]
    middle = float(np.median([math.inf if end is None else end for end in ends]))
    cells = (
        f"{name}{' with replay' if replay else ''}",
        f"{np.mean([could for one in found for could in one.early]):.2f}",
        f"{np.mean([could for one in found for could in one.later]):.2f}",
        ", ".join("-" if end is None else str(end) for end in ends),
        "-" if math.isinf(middle) else f"{middle:g}",
    )
    return f"| {' | '.join(cells)} |"


def main(options: Options) -> None:
    """Print the table."""
    print("| algorithm | informative below 0.01 | after the first success | steps to 0.9 by seed | median |")
    print("|---|---|---|---|---|")
    for name in options.algorithms:
        for replay in (False, True):
            found = [run(options, name, seed, replay) for seed in range(options.seeds)]
            print(row(name, replay, found), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
