"""What slow environments, slow judges and the replay of successes do to whole steps of the trainer."""

import asyncio
import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import Environment, Run, Step, Task, train
from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.config import Output, Scoring
from jaxrl_llm.environments import Limits
from jaxrl_llm.learner import (
    Compute,
    Forward,
    Layout,
    Learner,
    Moments,
    Optimiser,
    Training,
    create_state,
    learn,
    make_update,
)  # fmt: skip
from jaxrl_llm.learner.objectives import PolicyGradient
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.samples import to_samples
from jaxrl_llm.models import logits
from jaxrl_llm.models.config import Attention, ComputeOptions, ModelConfig
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Failures, Scores, code
from jaxrl_llm.rollout import Collect, Engine, EngineOptions, Replay, Rollout, Sampling
from jaxrl_llm.rollout.collect import Sampler, collect_groups
from jaxrl_llm.rollout.groups import AdmissionPolicy, Carryover, GroupSource, informative
from jaxrl_llm.sharding import MeshShape, make_mesh
from jaxrl_llm.tasks import Shuffled
from jaxrl_llm.types import Problem

GROUP = 8
HANGS_S = 20.0


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The work.

    Attributes:
      episodes: of a step, in groups of 8.
      wait_s: seconds that the slow environment takes for its answer.
      timeout_s: time limit of one answer.
      steps: of each run; the first is not timed.
      model: any that jaxrl-llm loads.
    """

    episodes: int = 64
    wait_s: float = 2.0
    timeout_s: float = 6.0
    steps: int = 4
    model: str = "tiny-random"


@dataclasses.dataclass(frozen=True)
class Scored:
    """The work.

    Attributes:
      judge_s: seconds that the slow judge takes for an answer.
      slots: completions sampled at one time.
      tokens: of the longest completion.
      prompts: of a step, each with a group of 8.
      steps: of each run; the first is not timed.
      model: any that jaxrl-llm loads.
    """

    judge_s: float = 1.0
    slots: int = 8
    tokens: int = 256
    prompts: int = 8
    steps: int = 3
    model: str = "tiny-random"


@dataclasses.dataclass(frozen=True)
class Replayed:
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


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """What is graded: so many programs, each by one test and by ten."""

    programs: int = 200


def steps_of(options: Any, prompts: int, slots: int, row_tokens: int, task: Task, rewards: Scoring, **more: Any) -> Any:
    """The rows of a short run of GRPO in groups of 8."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            model=options.model,
            task=task,
            scoring=rewards,
            recipe=GRPO,
            rollout=Rollout(
                prompts=prompts, group=GROUP, max_prompt_tokens=64, engine=EngineOptions(slots=slots), **more
            ),
            learner=Learner(compute=Compute(row_tokens=row_tokens)),
            output=Output(run_dir=folder, trackers=()),
            steps=options.steps,
        )
        return [row for row in train(run).history if row["step"]]


def fastest(rows: Sequence[dict[str, Any]], *names: str) -> dict[str, float]:
    """Seconds of the fastest step after the first."""
    row = min(rows[1:], key=lambda row: row["time/step_s"])
    return {name: round(row[f"time/{name}"], 2) for name in names}


HEARD = itertools.count()
"""Of the replies that a world had to wait for."""


class World(Environment):
    """Says once that it has heard, and ends after the second reply; the row tells how long it takes."""

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """Begin."""
        self.row = row
        self.turns = 0
        return [{"role": "user", "content": "Speak."}]

    def step(self, reply: dict[str, Any]) -> Step:
        """Answer after a while; of as many episodes as the row says, one is never answered."""
        self.turns += 1
        if self.turns == 2:
            return Step(reward=float(len(reply["content"]) % 2), done=True)
        lost = self.row["one_hangs_of"] and next(HEARD) % self.row["one_hangs_of"] == 0
        time.sleep(HANGS_S if lost else self.row["wait_s"])
        return Step([{"role": "user", "content": "Go on."}])


def episodes(options: Episodes) -> Iterator[dict[str, Any]]:
    """What slow worlds cost a step: 64 episodes whose environment answers after two seconds, or one that never answers.

    Three runs of the trainer with the same model, rows and seeds: ``instant``, an environment that answers at once;
    ``slow``, one that takes ``wait_s`` for the one answer that an episode asks for; ``hanging``, as slow, and one
    episode of each step hangs until its time limit ends it. The seconds are those of the fastest step after the first;
    one after another the waits of a step would take ``in_turn_s``.
    """
    found: dict[str, Any] = {}
    prompts = options.episodes // GROUP
    for name, wait_s in (("instant", 0.0), ("slow", options.wait_s), ("hanging", options.wait_s)):
        row = {"wait_s": wait_s, "one_hangs_of": options.episodes if name == "hanging" else 0}
        data = [row | {"prompt": str(n)} for n in range(prompts * options.steps)]
        task = Task(data, environment=World, template="chatml", verifier="none", name="waiting")
        limits = Limits(max_turns=2, max_turn_tokens=16, tool_timeout_s=options.timeout_s)
        sizes = options, prompts, options.episodes, 256
        rows = steps_of(*sizes, task, Scoring(rewards=()), max_new_tokens=96, episode=limits)
        lost = round(sum(row.get("episode/ends/timeout", 0.0) for row in rows) * options.episodes)
        found[name] = fastest(rows, "step_s") | {"timeouts": lost}
    yield dataclasses.asdict(options) | found | {"in_turn_s": options.episodes * options.wait_s}


def scoring(options: Scored) -> Iterator[dict[str, Any]]:
    """What a slow judge costs a step: 64 completions in groups of 8, each judged for a while beside the sampler.

    Two runs of the trainer with the same model, prompts and seeds: ``instant``, a judge that answers at once, and
    ``slow``, one that takes ``judge_s`` for an answer; all its calls of a group wait at one time. The seconds are those
    of the fastest step after the first, of its sampling, and of its waits for scores; scoring one group after the other
    would add ``in_turn_s``.
    """
    found: dict[str, Any] = {}
    for name, judge_s in (("instant", 0.0), ("slow", options.judge_s)):

        async def judge(problem: Any, completion: Any, judge_s: float = judge_s) -> float:
            await asyncio.sleep(judge_s)
            return float(len(completion.tokens) % 2)

        data = [{"prompt": str(n), "answer": "1"} for n in range(options.prompts * options.steps)]
        task = Task(data, template="chatml", verifier="none", name="judged")
        sizes = options, options.prompts, options.slots, 512
        rows = steps_of(*sizes, task, Scoring((judge,), timeout_s=60.0 + judge_s), max_new_tokens=options.tokens)
        found[name] = fastest(rows, "step_s", "rollout_s", "reward_s")
    yield dataclasses.asdict(options) | found | {"in_turn_s": options.prompts * options.judge_s}


def verdicts(options: Verdicts) -> Iterator[dict[str, Any]]:
    """Verdicts a second of the sandbox, on programs that print at once."""
    program = "print(sum(map(int, input().split())))"
    for count in (1, 10):
        grade = functools.partial(code.grade, program, {"inputs": ["1 2"] * count, "outputs": ["3"] * count})
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda _, grade=grade: grade(), range(4)))
            began = time.monotonic()
            found = list(pool.map(lambda _, grade=grade: grade(), range(options.programs)))
        assert all(one.score == 1 for one in found)
        yield {"tests": count, "verdicts_per_s": round(len(found) / (time.monotonic() - began), 1)}


LETTERS = "abcdefghijklmn"
PROMPT = np.zeros(1, np.int32)
SHAPE = ModelConfig("llama", len(LETTERS), 32, 2, 64, Attention(4, 2, 8))
LENGTH = 2
RARE = 1 / 200
EARLY = 0.01
SOLVED = 0.9


class Spelling:
    """The tokenizer: a letter is a token."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **options: bool) -> str:
        """The text."""
        return "".join(LETTERS[token] for token in tokens)


class Exact:
    """The judge: 1 where the text is the answer, else 0."""

    def begin(self, items: Sequence[tuple[Problem, Any]]) -> Callable[[], Scores]:
        """Of each completion."""
        right = np.array([float(completion.text == problem.answer) for problem, completion in items])
        return lambda: Scores(right, right, {"accuracy": right}, Failures(), right < 0)


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


def sampler_of(model: Any, answer: str, seed: int, options: Replayed, replay: bool) -> Sampler:
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


def replayed(options: Replayed, name: str, seed: int, replay: bool) -> Found:
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
        batch = collect_groups(sampler, model_of(state), version, left)
        left = batch.carryover
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


def replay(options: Replayed) -> Iterator[dict[str, Any]]:
    """What replaying successes is worth on a problem that is solved once in about 200 samples.

    A tiny random decoder over 14 letters has to write two of them; its problem is the pair whose probability is nearest
    to 1/200 at first. Each step asks it of P groups of G completions and makes one update, by the trainer's own engine,
    collection and learner; the policy's exact success is computed after it. Rows have the share of steps with an
    informative group, while success is below 0.01 and after the first success, and the step at which success is 0.9,
    for each seed. Both runs of a seed sample alike until the first success.

    ``grpo`` cuts the gradient at a ratio of 1.2, so that a stored success pushes until the policy has made each of its
    tokens that much likelier than when it was sampled; ``cispo`` caps the weight and cuts none. The optimiser is
    gradient descent, whose steps are as large as what there is to learn from; ``--adam`` takes AdamW, whose are not.
    """
    for name in options.algorithms:
        for stores in (False, True):
            runs = [replayed(options, name, seed, stores) for seed in range(options.seeds)]
            ends = [run.solved_at for run in runs]
            middle = float(np.median([np.inf if end is None else end for end in ends]))
            shares = {"early": [could for run in runs for could in run.early]}
            shares |= {"later": [could for run in runs for could in run.later]}
            means = {f"informative_{key}": round(float(np.mean(x)), 2) if x else None for key, x in shares.items()}
            solved = {"solved_at": ends, "median": None if np.isinf(middle) else middle}
            yield {"algorithm": name, "replay": stores, "adam": options.adam} | means | solved
