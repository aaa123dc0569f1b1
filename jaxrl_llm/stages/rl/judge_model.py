"""Judges that answer in words on the devices that sample, each in an engine of its own."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.engine import Backend, backend_for
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Sample
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.rewards.endpoint import Answer, JudgeModel
from jaxrl_llm.rewards.rubric import Pairwise, asks_model
from jaxrl_llm.rollout.respond import Requests, gather
from jaxrl_llm.runs.load import load_model
from jaxrl_llm.stages.stage import Architectures, Pass, run_by
from jaxrl_llm.tasks.chats import Guard
from jaxrl_llm.tasks.template import check_tokenizer, rendered
from jaxrl_llm.types import Completion, Message, Problem

Item = tuple[Problem, Completion]


@dataclasses.dataclass(frozen=True)
class JudgeEngine:
    """A judge on the devices, with slots of its own.

    Attributes:
      settings: of the judge.
      backend: strict, so that an answer does not depend on the questions beside it.
      weights: to answer with.
      tokenizer: of the judge.
      mesh: of the devices.
      status: receives progress messages.
    """

    settings: JudgeModel
    backend: Backend
    weights: Decoder
    tokenizer: Any
    mesh: Mesh
    status: Callable[[str], None]

    def ask(self, chats: Sequence[Sequence[Message]]) -> list[Answer | Exception]:
        """Return the answer to each chat, or why it cannot be asked; equal chats are asked once."""
        prompts = [self.prompt(chat) for chat in chats]
        asked: dict[bytes, np.ndarray] = {}
        for prompt in prompts:
            if len(prompt) <= self.settings.max_prompt_tokens:
                asked.setdefault(prompt.tobytes(), prompt)
        sampling = Sampling(0.0, max_new_tokens=self.settings.max_new_tokens, stop_ids=self.weights.config.tokens.eos)
        requests = Requests(self.backend, sampling)
        if asked:
            requests.submit(list(asked), list(asked.values()), [0] * len(asked))
        with jax.set_mesh(self.mesh):  # of this thread
            found = gather(requests, self.weights, self.tokenizer, lambda text: self.status(f"judging: {text}"))
        self.backend.start(sampling)  # gives its cache back
        answers: list[Answer | Exception] = []
        new = set(asked)
        for prompt in prompts:
            key = prompt.tobytes()
            if key not in asked:
                answers.append(self._too_long(len(prompt)))
                continue
            first = key in new
            new.discard(key)
            size = (len(prompt), found[key].length) if first else (0, 0)
            answers.append(Answer(found[key].text, *map(float, size), cached=not first))
        return answers

    def prompt(self, chat: Sequence[Message]) -> np.ndarray:
        """Return a chat as token ids, int32[T], up to the start of the answer; control tokens that it spells are text.

        Raises:
          InputError: the chat template refuses it.
        """
        guarded = [self._guard(dict(message)) for message in chat]
        text = rendered(guarded, self.settings, self.tokenizer, options=self.options)
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
    """Load a judge with an engine of its own; ``field``: the setting that names it, for messages.

    Raises:
      InputError: it is missing, scores texts, has too few positions, no tokenizer, or a chat template without a
        system message.
    """
    status(f"loading {judge.model}")
    field = f"{field}: judge.model"
    try:
        model, tokenizer = load_model(judge.model, run.learner.compute.dtype, where)
    except InputError as error:
        raise InputError(f"{field}: {error}") from None
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
    found = JudgeEngine(judge, engine, transfer(model), tokenizer, where, status)
    try:
        found.prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    except InputError as error:
        raise InputError(f"{field}: {judge.model}: {error}") from None
    return found


def judge_models(
    run: configs.Run, where: Mesh, status: Callable[[str], None]
) -> dict[Any, Callable[[Sequence[Item]], Any]]:
    """Return ``answered`` by reward, for those that ask a ``JudgeModel``; arguments and errors as of ``judges_of``."""
    engines: dict[JudgeModel, JudgeEngine] = {}
    found: dict[Any, Callable[[Sequence[Item]], Any]] = {}
    for base in filter(asks_model, configs.bases(run)):
        if base.judge not in engines:
            engines[base.judge] = load_judge_model(base.judge, run, f"reward {base.name}", where, status)
        found[base] = functools.partial(answered, base, engines[base.judge])
    return found


def asked_models(run: configs.Run) -> dict[JudgeModel, int]:
    """Return the judges on the run's devices, each with its questions about a completion in training."""
    found: dict[JudgeModel, int] = {}
    for base in configs.bases(run):
        if asks_model(base):
            found[base.judge] = found.get(base.judge, 0) + (2 if isinstance(base, Pairwise) else 1)
    return found


def answered(reward: Any, judge: JudgeEngine, items: Sequence[Item]) -> np.ndarray:
    """Return what a reward makes of a judge's answers: a score with its numbers, or an error, for each completion."""
    found = np.empty(len(items), object)
    found[:] = reward.judge_all(items, judge.ask)
    return found


def judging_passes(run: configs.Run, samples: Sequence[Sample], where: Any, find: Architectures) -> list[Pass]:
    """Return what judges read in a step that has these completions, for the plan: the weights of each, and passes over
    questions and answers at their longest, as many as slots at a time.
    """
    passes = []
    dtype = jnp.dtype(run.learner.compute.dtype)
    for number, (judge, asked) in enumerate(asked_models(run).items(), start=1):
        config = find(judge.model)
        forward = run_by(run.learner, config, where, judge.max_length, judge.max_new_tokens)
        ids, mask = np.zeros(judge.max_new_tokens, np.int32), np.ones(judge.max_new_tokens, bool)
        some = [Sample(np.zeros(judge.max_prompt_tokens, np.int32), ids, mask)] * min(judge.slots, len(samples))
        model = jax.eval_shape(lambda c=config: initialise(c, jax.random.key(0), dtype))
        calls = -(-len(samples) * asked // len(some))
        passes.append(Pass(f"judge model {number}", forward, some, "logp", calls, model=model, copies=1))
    return passes
