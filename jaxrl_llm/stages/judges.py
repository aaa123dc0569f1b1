"""Reward models and judges on a run's devices. A reward model is run in packed rows, as the learner runs its models; a
judge that answers in words has an engine of its own.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.preference import solution_score, step_differences
from jaxrl_llm.data.datasets import split_steps, step_lengths
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.engine import Backend, backend_for
from jaxrl_llm.errors import InputError, naming
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.rewards.endpoint import JudgeAnswer, JudgeModel
from jaxrl_llm.rewards.functions import ModelReward, StepReward
from jaxrl_llm.rewards.rubric import Pairwise, asks_model
from jaxrl_llm.rewards.scorer import token_index
from jaxrl_llm.rollout.generation import OpenRequests, generate_all
from jaxrl_llm.runs import load_model
from jaxrl_llm.stages.stage import SCORING_CHUNK, Architectures, Pass, sample_to_score, score_samples, scoring_forward
from jaxrl_llm.stages.taught import check_reward_template, reward_format, reward_model_uses
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.chats import ChatEncoder, Guard, close_completion
from jaxrl_llm.tasks.template import check_tokenizer, render_chat
from jaxrl_llm.types import Completion, Message, Problem

Item = tuple[Problem, Completion]


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A reward model on the devices where it scores.

    Attributes:
      model: in the dtype that it computes in.
      prompts: of each task, by its label.
      closings: tokens that ``close_completion`` writes where a score is read, by task label.
    """

    model: ScalarModel
    forward: Forward
    prompts: Mapping[str, Prompts]
    status: Callable[[str], None]
    closings: Mapping[str, Sequence[int] | None]

    def values(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Return for each completion float32[t + 1]: at place t the value before token t, last the value after all. If
        the model reads on to the end of the chat template, the t tokens include those of the template.
        """
        samples = [
            sample_to_score(
                self.prompts[problem.task][problem], close_completion(completion, self.closings.get(problem.task)), {}
            )
            for problem, completion in items
        ]
        with jax.set_mesh(self.forward.mesh):  # of this thread
            return score_samples(self.forward, self.model, samples, "values", self.status)


def load_judge(
    run: configs.Run,
    path: str,
    field: str,
    where: Mesh,
    tokenizer: Any,
    prompts: Mapping[str, Prompts],
    status: Callable[[str], None],
) -> DeviceModel:
    """Load the reward model ``path`` (RUN[@STEP] or a directory), which the setting ``field`` names, for the
    completions of the run's policy; the other arguments and errors are those of ``load_judges``.
    """
    status(f"loading {path}")
    with naming(field):
        model, model_tokenizer = load_model(path, run.learner.compute.dtype, where)
    if not isinstance(model, ScalarModel):
        raise InputError(f"{field}: {path} is a language model, which gives no score: train a RewardModel")
    check_tokenizer(model_tokenizer, f"{field}: {path}")
    if model_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{field}: the tokens of {path} are not those of {run.model}: give a reward model that reads the policy's "
            "tokens"
        )
    recorded = reward_format(path, model_tokenizer)
    check_reward_template(recorded, f"{field}: {path}", prompts, tokenizer)
    ends: dict[str, Sequence[int] | None] = {}
    if recorded is not None and recorded.score_at == "template":  # else a score is read at the completion's own end
        tasks_read = {label: task_prompts.task(label) for label, task_prompts in prompts.items()}
        ends = {label: ChatEncoder(task, tokenizer, (), {}).closing for label, task in tasks_read.items()}
    more = max((len(closing) - 1 for closing in ends.values() if closing), default=0)  # a stop token is there already
    longest = run.rollout.max_length + more
    positions = model.config.attention.rope.max_positions
    configs.require(
        longest <= positions,
        f"{field}: {path} was made for {positions} positions, and prompts with completions have up to {longest}: lower "
        "max_new_tokens or max_prompt_tokens, or give another reward model",
    )
    forward = scoring_forward(run.learner, model.config, where, longest + 1, run.rollout.max_new_tokens + more + 1)
    return DeviceModel(model, forward, prompts, status, ends)


def load_judges(
    run: configs.Run, where: Mesh, tokenizer: Any, prompts: Mapping[str, Prompts], status: Callable[[str], None]
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """Return functions that compute the rewards of models, by reward: ``final_scores``, ``step_scores``, or the answers
    of a judge; empty without any. ``where``: the mesh that samples; ``prompts``: of each task, by its label.

    Raises:
      InputError: a model that is missing, no reward model, of another format, or of other tokens than the policy.
    """
    for use, path in reward_model_uses(run):
        use.check(path)
    models: dict[str, DeviceModel] = {}
    for use, path in reward_model_uses(run):
        if path not in models:
            models[path] = load_judge(run, path, use.field.removesuffix(":"), where, tokenizer, prompts, status)
    functions: dict[Any, Callable[[Sequence[Item]], Any]] = {}
    for base in configs.bases(run):
        if isinstance(base, ModelReward):
            functions[base] = functools.partial(final_scores, [models[path] for path in base.paths])
        elif isinstance(base, StepReward):
            functions[base] = functools.partial(step_scores, base, models[base.path], tokenizer)
    return functions | load_judge_engines(run, where, status)


def final_scores(models: Sequence[DeviceModel], items: Sequence[Item]) -> np.ndarray:
    """Return the score of each completion by each model, float64[n, m]."""
    scores = [[float(values[-1]) for values in model.values(items)] for model in models]
    return np.asarray(scores, np.float64).T


def judge_passes(run: configs.Run, samples: Sequence[Sample], where: Any, find: Architectures) -> list[Pass]:
    """Return the passes of reward models and judges over the completions of a step, for the plan. Reward models of one
    architecture share a program, and score in chunks of completions.
    """
    models = collections.Counter(find(path) for path in dict.fromkeys(path for _, path in reward_model_uses(run)))
    calls = -(-len(samples) // SCORING_CHUNK)
    some = [sample_to_score(sample.prompt, sample.tokens, {}) for sample in samples[:SCORING_CHUNK]]
    dtype = jnp.dtype(run.learner.compute.dtype)
    passes, rollout = [], run.rollout
    for number, (config, count) in enumerate(models.items(), start=1):
        forward = scoring_forward(run.learner, config, where, rollout.max_length + 1, rollout.max_new_tokens + 1)
        model = jax.eval_shape(lambda c=config: with_scalar_head(initialise(c, jax.random.key(0), dtype)))
        name = "judges" if number == 1 else f"judges {number}"
        passes.append(Pass(name, forward, some, "values", calls * count, model=model, copies=count))
    return [*passes, *engine_passes(run, samples, where, find)]


def step_scores(reward: StepReward, model: DeviceModel, tokenizer: Any, items: Sequence[Item]) -> np.ndarray:
    """Return for each completion ``[(index of a step's last token, value), ...]``, as an array of lists [n]."""
    steps = np.zeros(len(items), object)
    for index, ((_, completion), values) in enumerate(zip(items, model.values(items), strict=True)):
        ends = step_ends(completion, reward.separator, tokenizer)
        scores = 1 / (1 + np.exp(-values[ends + 1].astype(np.float64)))
        if reward.differences:
            scores = step_differences(scores, reward.start)
        steps[index] = [(int(end), float(score)) for end, score in zip(ends, scores, strict=True)]
    return steps


def solution_scores(
    model: DeviceModel,
    items: Sequence[Item],
    by: Literal["score", "product", "minimum", "last"],
    separator: str,
    tokenizer: Any,
) -> np.ndarray:
    """Return one score of each completion, float64[n]: of the whole, or the product, lowest or last of its steps'
    probabilities (arXiv 2305.20050, section 2.6); 0 without a step.
    """
    if by == "score":
        return np.asarray([values[-1] for values in model.values(items)], np.float64)
    steps_of_items = step_scores(StepReward("", separator=separator), model, tokenizer, items)
    probabilities = [np.asarray([probability for _, probability in steps], np.float64) for steps in steps_of_items]
    return np.asarray([solution_score(steps, by) for steps in probabilities], np.float64)


def step_ends(completion: Completion, separator: str, tokenizer: Any) -> np.ndarray:
    """Return the index of each step's last token, int64[k], rising: that of the separator, or of the text's end. Steps
    are those of ``data.datasets.split_steps``: a part of only white space belongs to the step before.
    """
    text = completion.text
    tokens = completion.tokens.tolist()
    ends = step_lengths(split_steps(text, separator), separator)
    return np.asarray(sorted({token_index(text, tokens, end, tokenizer) for end in ends}), np.int64)


@dataclasses.dataclass
class FallingSteps:
    """A stopping rule: a completion ends at the step with which the scores of several steps in a row have fallen.

    A step counts once the next has begun, which fixes its end; the last step of a completion that has ended by itself
    never stops it. So the end of a completion does not depend on when it is checked.

    Attributes:
      model: a process reward model.
      problems: of each completion, by its number.
      separator: ends a step.
      falls: number of consecutive steps, each with a lower score than the one before, that stop it; at least 1.
      seen: number of scored steps of each completion, by its number.
      ends: number of tokens that a stopped completion keeps, by its number.
    """

    model: DeviceModel
    problems: Sequence[Problem]
    separator: str
    falls: int
    tokenizer: Any
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    ends: dict[int, int] = dataclasses.field(default_factory=dict)

    def __call__(self, completions: Mapping[int, Completion]) -> dict[int, int]:
        """Return the number of tokens to keep of each stopped completion; the completions must have their texts."""
        longer = {}
        for number, completion in completions.items():
            complete = len(split_steps(completion.text, self.separator)) - 1
            if number not in self.ends and complete > max(self.falls, self.seen.get(number, 0)):
                longer[number] = completion
        if longer:
            values = self.model.values([(self.problems[number], c) for number, c in longer.items()])
            for (number, completion), step_values in zip(longer.items(), values, strict=True):
                ends = step_ends(completion, self.separator, self.tokenizer)[:-1]
                self.seen[number] = len(ends)
                fallen = first_fall(step_values[ends + 1], self.falls)
                if fallen is not None:
                    self.ends[number] = int(ends[fallen]) + 1
        return {number: self.ends[number] for number in completions if number in self.ends}


def first_fall(scores: Sequence[float], falls: int) -> int | None:
    """Return the index of the score that ends the first ``falls`` consecutive falls; None without any.

    >>> first_fall([0.9, 0.8, 0.85, 0.6, 0.5, 0.4], 2)
    4
    """
    run = 0
    for index in range(1, len(scores)):
        run = run + 1 if scores[index] < scores[index - 1] else 0
        if run == falls:
            return index
    return None


@dataclasses.dataclass(frozen=True)
class JudgeEngine:
    """A judge on the devices, with slots of its own, and its own tokenizer. ``backend`` is strict, so that an answer
    does not depend on the questions beside it.
    """

    settings: JudgeModel
    backend: Backend
    weights: Decoder
    tokenizer: Any
    mesh: Mesh
    status: Callable[[str], None]

    def ask(self, chats: Sequence[Sequence[Message]]) -> list[JudgeAnswer | Exception]:
        """Return the answer to each chat, or why it cannot be asked; equal chats are asked once."""
        prompts = [self.prompt(chat) for chat in chats]
        unique: dict[bytes, np.ndarray] = {}
        for prompt in prompts:
            if len(prompt) <= self.settings.max_prompt_tokens:
                unique.setdefault(prompt.tobytes(), prompt)
        sampling = Sampling(0.0, max_new_tokens=self.settings.max_new_tokens, stop_ids=self.weights.config.tokens.eos)
        requests = OpenRequests(self.backend, sampling)
        if unique:
            requests.submit(list(unique), list(unique.values()), [0] * len(unique))
        with jax.set_mesh(self.mesh):  # of this thread
            status = lambda text: self.status(f"judging: {text}")  # noqa: E731
            completions = generate_all(requests, self.weights, self.tokenizer, status)
        self.backend.start(sampling)  # gives its cache back
        answers: list[JudgeAnswer | Exception] = []
        new = set(unique)
        for prompt in prompts:
            key = prompt.tobytes()
            if key not in unique:
                answers.append(self._too_long(len(prompt)))
                continue
            first = key in new
            new.discard(key)
            size = (len(prompt), completions[key].length) if first else (0, 0)
            answers.append(JudgeAnswer(completions[key].text, *map(float, size), cached=not first))
        return answers

    def prompt(self, chat: Sequence[Message]) -> np.ndarray:
        """Return a chat as token ids, int32[T], up to the start of the answer; control tokens that it spells are text.
        InputError: the chat template refuses it.
        """
        guarded = [self._guard(dict(message)) for message in chat]
        text = render_chat(guarded, self.settings, self.tokenizer, options=self.options)
        return np.asarray(self._guard.ids(text), np.int32)

    @functools.cached_property
    def _guard(self) -> Guard:
        return Guard(self.tokenizer)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the chat template by name."""
        return dict(self.settings.options)

    def _too_long(self, length: int) -> Exception:
        most = self.settings.max_prompt_tokens
        return ValueError(f"a question has {length} tokens, and the judge reads {most}: raise judge.max_prompt_tokens")


def load_judge_model(
    judge: JudgeModel, run: configs.Run, field: str, where: Mesh, status: Callable[[str], None]
) -> JudgeEngine:
    """Load a judge with an engine of its own; ``field``: the setting that names it, for messages. InputError: it is
    missing, scores texts, has too few positions, no tokenizer, or a chat template without a system message.
    """
    status(f"loading {judge.model}")
    field = f"{field}: judge.model"
    with naming(field):
        model, tokenizer = load_model(judge.model, run.learner.compute.dtype, where)
    if isinstance(model, ScalarModel):
        raise InputError(f"{field}: {judge.model} is a reward model, which answers nothing: take ModelReward")
    check_tokenizer(tokenizer, f"{field}: {judge.model}")
    positions = model.config.attention.rope.max_positions
    configs.require(
        judge.max_length <= positions,
        f"{field}: {judge.model} was made for {positions} positions, and judge.max_prompt_tokens with max_new_tokens "
        f"are {judge.max_length}: lower them",
    )
    dtype = jnp.dtype(run.learner.compute.dtype)
    engine, transfer = backend_for(
        model, dtype, where, where, slots=judge.slots, max_length=judge.max_length, strict=True
    )  # fmt: skip
    judge_engine = JudgeEngine(judge, engine, transfer(model), tokenizer, where, status)
    with naming(f"{field}: {judge.model}"):
        judge_engine.prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    return judge_engine


def load_judge_engines(
    run: configs.Run, where: Mesh, status: Callable[[str], None]
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """Return ``judge_completions`` by reward, for those that ask a ``JudgeModel``; see ``load_judges``."""
    engines: dict[JudgeModel, JudgeEngine] = {}
    functions: dict[Any, Callable[[Sequence[Item]], Any]] = {}
    for base in filter(asks_model, configs.bases(run)):
        if base.judge not in engines:
            engines[base.judge] = load_judge_model(base.judge, run, f"reward {base.name}", where, status)
        functions[base] = functools.partial(judge_completions, base, engines[base.judge])
    return functions


def judge_questions(run: configs.Run) -> dict[JudgeModel, int]:
    """Return the judges on the run's devices, each with its questions about a completion in training."""
    questions: dict[JudgeModel, int] = {}
    for base in configs.bases(run):
        if asks_model(base):
            questions[base.judge] = questions.get(base.judge, 0) + (2 if isinstance(base, Pairwise) else 1)
    return questions


def judge_completions(reward: Any, judge: JudgeEngine, items: Sequence[Item]) -> np.ndarray:
    """Return what a reward makes of a judge's answers: a score with its numbers, or an error, for each completion."""
    judgements = np.empty(len(items), object)
    judgements[:] = reward.judge_all(items, judge.ask)
    return judgements


def engine_passes(run: configs.Run, samples: Sequence[Sample], where: Any, find: Architectures) -> list[Pass]:
    """Return what judges read in a step, for the plan: weights, and the longest questions and answers, a slot each."""
    passes = []
    dtype = jnp.dtype(run.learner.compute.dtype)
    for number, (judge, questions) in enumerate(judge_questions(run).items(), start=1):
        config = find(judge.model)
        forward = scoring_forward(run.learner, config, where, judge.max_length, judge.max_new_tokens)
        ids, mask = np.zeros(judge.max_new_tokens, np.int32), np.ones(judge.max_new_tokens, bool)
        some = [Sample(np.zeros(judge.max_prompt_tokens, np.int32), ids, mask)] * min(judge.slots, len(samples))
        model = jax.eval_shape(lambda c=config: initialise(c, jax.random.key(0), dtype))
        calls = -(-len(samples) * questions // len(some))
        passes.append(Pass(f"judge model {number}", forward, some, "logp", calls, model=model, copies=1))
    return passes
