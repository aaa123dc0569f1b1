"""Teachers of a run: loading them, their prompts, and their values of each token of a step's completions."""

import dataclasses
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.kl import SampledKL
from jaxrl_llm.errors import InputError, naming, require
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.learner.objectives import DISTILLATION, TEACHER_INDEX, DivergenceLoss, Teacher, TopOutput
from jaxrl_llm.learner.platform import ATTENTION_PLATFORMS, compute_for, layout_for
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rollout.groups import RolloutBatch
from jaxrl_llm.runs.load import config_of, load_model
from jaxrl_llm.sharding import as_shapes, platform_of, shardings
from jaxrl_llm.stages.ingredients import Ingredient, StageContext
from jaxrl_llm.stages.stage import Architectures, Pass
from jaxrl_llm.tasks import Prompts, encode
from jaxrl_llm.types import Group, TrainState


@dataclasses.dataclass(frozen=True)
class Teachers(Ingredient):
    """The teachers of a run, and how each is run; the fields after ``run`` are set once it is prepared.

    Attributes:
      run: with its settings resolved.
      loaded: the teachers by name, in the dtype that they compute in; None for the base of the policy's own adapter.
      forwards: how each is run, in rows of the policy's shapes.
      policy: how the policy is run, and so its reference.
      vocab: of the policy.
      prompts: writes what a teacher is told.
      others: names of the run's other objectives.
    """

    run: configs.Run
    loaded: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forwards: Mapping[str | None, Forward] = dataclasses.field(default_factory=dict)
    policy: Any = None
    vocab: int = 0
    prompts: Any = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: configs.Run) -> Self | None:
        """See ``Ingredient``."""
        own = run.scoring.distillation
        if own is None:
            return None
        signal = own.divergence
        named = tuple(name for name in own.names if name is not None)
        losses = () if isinstance(signal, SampledKL) else (DivergenceLoss(own.weight, signal, named),)
        return cls(run, objectives=losses)

    @property
    def settings(self) -> Any:
        """The run's ``Distillation``."""
        return self.run.scoring.distillation

    @property
    def runs_in_update(self) -> bool:
        """Whether the teachers are run with each microbatch of the update, to compare whole distributions."""
        return bool(self.objectives) and not self.settings.top_k

    def prepared(self, context: StageContext) -> Self:
        """Load the teachers.

        Raises:
          InputError: one that is missing, scores texts, has too few positions or other tokens than the policy.
        """
        forward, loaded = context.forwards["policy"], {}
        forwards = {name: run_teacher(name, self.run, forward, config_of) for name in self.settings.names}
        for name, own in forwards.items():
            if name is None:
                continue
            context.progress.status(f"loading {name}")
            loaded[name] = load_teacher(name, self.run, own, context.tokenizer)
        vocab = config_of(self.run.model).vocab_size
        return dataclasses.replace(
            self, loaded=loaded, forwards=forwards, policy=forward, vocab=vocab, prompts=context.prompts,
            others=tuple(name for name in context.objectives if name != DISTILLATION),
        )  # fmt: skip

    def in_update(self, forward: Forward, find: Architectures) -> dict[str, Teacher] | None:
        """Return the teachers that are run in the policy's update, as shapes; None if none are.

        Args:
          forward: how the policy is run.
          find: maps the name of a model to its architecture.
        """
        if not self.runs_in_update:
            return None
        found = {}
        for name in self.settings.names:
            own = run_teacher(name, self.run, forward, find)
            model = None if is_base(name, self.run) else teacher_shapes(find(name), self.run, own)
            found[name] = Teacher(model, own.compute)
        return found

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add what the teachers tell of the tokens, as zeros."""
        found = []
        for sample in samples:
            if self.settings.by_policy_gradient:
                sample = sample.with_arrays(advantages=np.zeros(len(sample.tokens), np.float32))
            if self.settings.top_k:
                sample = with_top(sample, no_top(sample, self.settings.top_k))
            found.append(numbered(sample, 0, self.settings))
        return found

    def passes(self, samples: Sequence[Sample], forward: Forward, find: Architectures) -> Sequence[Pass]:
        """Return the passes of teachers over a step's completions; those that run in the update have none."""
        if self.runs_in_update:
            return ()
        found, output = [], output_of(self.settings, find(self.run.model).vocab_size)
        for number, name in enumerate(self.settings.names, start=1):
            own = run_teacher(name, self.run, forward, find)
            held = name is None or is_base(name, self.run)
            model = None if held else teacher_shapes(find(name), self.run, own)
            label = "teacher" if number == 1 else f"teacher {number}"
            role = (self.settings.own if name is None else "policy") if held else ""
            found.append(Pass(label, own, samples, output, 1, role, model, copies=int(not held)))
        return found

    def learning(self, training: Sequence[Training]) -> Sequence[Training]:
        """Give the policy's update the teachers that it runs."""
        if not self.runs_in_update:
            return training
        given = {name: Teacher(model, self.forwards[name].compute) for name, model in self.loaded.items()}
        return [dataclasses.replace(one, teachers=given) if one.role == "policy" else one for one in training]

    def scored(
        self, state: TrainState, samples: list[list[Sample]], batch: RolloutBatch
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Add the teachers' advantages to those of the samples, or their most likely tokens; return metrics."""
        own, every = self.settings, [sample for members in samples for sample in members]
        numbers = [teacher_number(sample, batch, own) for sample in every]
        every = [numbered(sample, number, own) for sample, number in zip(every, numbers, strict=True)]
        measured: dict[str, float] = {}
        if not self.runs_in_update:
            asked = [as_asked(sample, batch, self.run, self.prompts) for sample in every]
            models = [weights_of(name, self.loaded, state, own) for name in own.names]
            told: list[Any] = [None] * len(every)
            for number, (name, model) in enumerate(zip(own.names, models, strict=True)):
                at = [n for n, one in enumerate(asked) if one is not None and numbers[n] == number]
                mine = [asked[n] for n in at]
                found = self.forwards[name].by_sample(model, mine, output_of(own, self.vocab)) if at else []
                for place, one in zip(at, found, strict=True):
                    told[place] = one
            if own.context is not None:
                sampled = [
                    one is not None for one, sample in zip(asked, every, strict=True) if sample.place is not None
                ]
                measured[f"{DISTILLATION}/told_fraction"] = float(np.mean(sampled))
            if own.top_k:
                pairs = zip(every, told, strict=True)
                every = [taught_by_top(sample, top, own.top_k, self.others) for sample, top in pairs]
            else:
                ref = None
                if own.divergence.needs_reference:
                    ref = self.policy.by_sample(model_of(state, "reference"), every)
                every, measured[f"{DISTILLATION}/kl"] = valued(every, told, ref, own)
        rest = iter(every)
        return [[next(rest) for _ in members] for members in samples], measured


def teacher_number(sample: Sample, batch: RolloutBatch, own: configs.Distillation) -> int:
    """Return the number of a sample's teacher; given texts have the first."""
    return 0 if sample.place is None else own.number_of(batch.groups[sample.place[0]].problem.task)


def numbered(sample: Sample, number: int, own: configs.Distillation) -> Sample:
    """Return the sample with the number of its teacher, where the update runs several."""
    if len(own.names) == 1 or own.by_policy_gradient or own.top_k:
        return sample
    return dataclasses.replace(sample, scalars=sample.scalars | {TEACHER_INDEX: float(number)})


def output_of(own: configs.Distillation, vocab: int) -> Any:
    """Return what is read of a teacher at each token, for a policy with so many tokens."""
    return TopOutput(own.top_k, vocab) if own.top_k else "logp"


def weights_of(name: str | None, loaded: Mapping[str, Any], state: TrainState, own: configs.Distillation) -> Any:
    """Return a teacher's weights: loaded ones, the base of the policy's adapter, or the policy's own."""
    if name is None:
        return model_of(state, own.own)
    return state.policy.base if loaded[name] is None else loaded[name]


def as_asked(sample: Sample, batch: RolloutBatch, run: configs.Run, prompts: Any) -> Sample | None:
    """Return the sample as its teacher reads it, with its context; None where it has none, or none is taught.

    ``prompts``: writes what a teacher is told.
    """
    own: Any = run.scoring.distillation
    if sample.place is None:
        taught = not own.by_policy_gradient and DISTILLATION in (sample.counted_by or (DISTILLATION,))
        return sample if taught else None
    if own.context is None:
        return sample
    number, member = sample.place
    prompt = told_prompt(own.context.template, batch.groups[number], member, prompts)
    if prompt is None or len(prompt) > run.rollout.max_prompt_tokens + own.context.max_tokens:
        return None
    return dataclasses.replace(sample, prompt=prompt)


def valued(
    samples: Sequence[Sample], told: Sequence[Any], ref: Sequence[Any] | None, own: Any
) -> tuple[list[Sample], float]:
    """Return the samples with the teacher's advantages added, and how far the policy is from it, nats a token.

    Args:
      samples: of a step.
      told: log-probabilities of each sample's tokens by its teacher; None where it was not asked.
      ref: those by the reference; None if the signal reads none.
      own: the run's ``Distillation``.
    """
    found, far, count = [], 0.0, 0
    for sample, theirs, before in zip(samples, told, ref or [None] * len(samples), strict=True):
        if sample.place is None:
            found.append(sample)
            continue
        logp = sample.arrays["sampler_logp"]
        # A teacher with fewer tokens has no log-probability of the others, which are padding.
        theirs = np.full(len(logp), np.nan, np.float32) if theirs is None else theirs
        counts = sample.mask & ~np.isnan(theirs)
        advantages = own.weight * own.divergence.advantages(logp, theirs, before)
        advantages = np.where(counts, advantages, 0).astype(np.float32)
        found.append(sample.with_arrays(advantages=np.float32(advantage_of(sample)) + advantages))
        far += float(np.sum((logp - theirs)[counts], dtype=np.float64))
        count += int(counts.sum())
    return found, far / count if count else math.nan


def taught_by_top(sample: Sample, top: Any, k: int, others: Sequence[str]) -> Sample:
    """Return the sample with the teacher's most likely tokens; without them its teacher teaches nothing, and the
    ``others``, names of objectives, count it."""
    if top is None:
        return with_top(sample.counting(others), no_top(sample, k))
    return with_top(sample, top)


def no_top(sample: Sample, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return placeholders of a teacher's most likely tokens and their log-probabilities."""
    count = len(sample.tokens)
    return np.zeros((count, k), np.int32), np.zeros((count, k + 1), np.float32)


def with_top(sample: Sample, top: Any) -> Sample:
    """Return the sample with its teacher's most likely tokens, int32[t, k], and their log-probabilities [t, k + 1]."""
    ids, logp = top
    return sample.with_arrays(teacher_ids=ids, teacher_logp=logp)


RIGHT = 1.0
"""The least accuracy of a completion that counts as right."""


def told_prompt(template: str, group: Group, member: int, prompts: Prompts) -> np.ndarray | None:
    """Return the teacher's prompt of a completion, int32[T]; None if it lacks one of the facts.

    Args:
      template: of ``Context``.
      group: of the completion.
      member: its place there.
      prompts: of the policy: the task's chat template writes the teacher's too.
    """
    problem = group.problem
    before, last = problem.prompt[:-1], problem.prompt[-1]
    known = facts(group, member) | {"prompt": last["content"]}
    wanted = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    if not all(known.get(name) for name in wanted):
        return None
    content = template.format(**{name: known[name] for name in wanted})
    told = dataclasses.replace(problem, prompt=(*before, {**last, "content": content}))
    return encode(told, prompts.task(problem.task), prompts.tokenizer)


def facts(group: Group, member: int) -> dict[str, str]:
    """Return the facts about a completion by name; what is unknown is missing."""
    row = {name: str(value) for name, value in group.problem.metadata.items() if value is not None}
    found = row | {"answer": group.problem.answer, "attempt": group.completions[member].text}
    if not np.isnan(group.accuracy[member]):
        found["verdict"] = "right" if group.accuracy[member] >= RIGHT else "wrong"
    others = [place for place in np.flatnonzero(group.accuracy >= RIGHT) if place != member]
    if others:
        found["success"] = group.completions[others[0]].text
    return found


def is_base(name: str | None, run: configs.Run) -> bool:
    """Whether a teacher is the frozen base of the policy's own adapter, which the state holds already."""
    return name == run.model and run.learner.lora.rank > 0


def load_teacher(name: str, run: configs.Run, forward: Forward, tokenizer: Any) -> Decoder | None:
    """Load a teacher in the dtype that it computes in, divided over the mesh as the policy is; None for its own base.

    Raises:
      InputError: it is missing, scores texts, or has other tokens than the policy, whose ``tokenizer`` this is.
    """
    if is_base(name, run):
        return None
    field = field_of(name, run)
    with naming(field):
        model, own = load_model(name, run.learner.compute.dtype, forward.mesh)
    if isinstance(model, ScalarModel):
        raise InputError(f"{field}: {name} is a reward model, which gives no distribution of tokens: take ModelReward")
    require(
        own is None or own.get_vocab() == tokenizer.get_vocab(),
        f"{field}: the tokenizer of {name} is not that of {run.model}: give a teacher that reads the policy's tokens",
    )
    return model


def run_teacher(name: str | None, run: configs.Run, forward: Forward, find: Architectures) -> Forward:
    """Return how a teacher is run: in the rows of the policy, which ``forward`` runs, or in longer ones with a context.

    ``name``: None for the policy itself.

    Raises:
      InputError: it is missing, or has fewer positions or tokens than the run needs.
    """
    settings: Any = run.scoring.distillation
    more = 0 if settings.context is None else settings.context.max_tokens
    longest = run.longest_row + more
    itself = name is None or is_base(name, run)
    field = "scoring.distillation.context" if itself else field_of(name, run)
    if itself and not more:
        return forward
    with naming(field):
        config = find(run.model if name is None else name)
    positions = config.attention.rope.max_positions
    require(
        longest <= positions,
        f"{field}: {name or run.model} was made for {positions} positions, and what a teacher reads has up to "
        f"{longest}: lower rollout.max_new_tokens, rollout.max_prompt_tokens, or the context's max_tokens",
    )
    top_k = settings.top_k
    require(
        top_k < config.vocab_size,
        f"scoring.distillation.divergence.top_k {top_k} leaves no other token of the {config.vocab_size} of "
        f"{name or run.model}: set it to 0 to compare all",
    )
    compute = forward.compute
    attention = "auto" if ATTENTION_PLATFORMS.get(compute.attention) == "gpu" else compute.attention
    own = run.learner.computing(attention=attention, row_tokens=0 if more else forward.layout.row_tokens)
    compute = compute_for(own, config, platform_of(forward.mesh), compute.compiler)
    layout = forward.layout
    if more:
        layout = layout_for(own, compute, longest, run.rollout.max_new_tokens, forward.mesh, config)
    return dataclasses.replace(forward, compute=compute, layout=layout)


def teacher_shapes(config: ModelConfig, run: configs.Run, forward: Forward) -> Decoder:
    """Return a teacher as shapes on the mesh."""
    dtype = jnp.dtype(run.learner.compute.dtype)
    model = jax.eval_shape(lambda: initialise(config, jax.random.key(0), dtype))
    return as_shapes(model, shardings(model, forward.mesh))


def field_of(name: str, run: configs.Run) -> str:
    """Return the setting that names a teacher, for messages."""
    settings = run.scoring.distillation
    first = settings is None or name == settings.teacher
    return f"scoring.distillation.{'teacher' if first else 'by_task'}"
