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
from jaxrl_llm.runs import architecture_of, load_model
from jaxrl_llm.sharding import as_shapes, platform_of, shardings
from jaxrl_llm.stages.ingredients import Ingredient, StageContext
from jaxrl_llm.stages.stage import Architectures, Pass
from jaxrl_llm.tasks import Prompts, encode
from jaxrl_llm.types import Group, TrainState


@dataclasses.dataclass(frozen=True)
class Teachers(Ingredient):
    """The teachers of a run, and how each is run; the fields after ``run`` are set once it is prepared.

    Attributes:
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
        distillation = run.scoring.distillation
        if distillation is None:
            return None
        signal = distillation.divergence
        names = tuple(name for name in distillation.names if name is not None)
        losses = () if isinstance(signal, SampledKL) else (DivergenceLoss(distillation.weight, signal, names),)
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
        """Load the teachers. InputError: one is missing, scores texts, or has too few positions or other tokens."""
        forward, loaded = context.forwards["policy"], {}
        forwards = {name: run_teacher(name, self.run, forward, architecture_of) for name in self.settings.names}
        for name, teacher_forward in forwards.items():
            if name is None:
                continue
            context.progress.status(f"loading {name}")
            loaded[name] = load_teacher(name, self.run, teacher_forward, context.tokenizer)
        vocab = architecture_of(self.run.model).vocab_size
        return dataclasses.replace(
            self, loaded=loaded, forwards=forwards, policy=forward, vocab=vocab, prompts=context.prompts,
            others=tuple(name for name in context.objectives if name != DISTILLATION),
        )  # fmt: skip

    def in_update(self, forward: Forward, find: Architectures) -> dict[str, Teacher] | None:
        """Return the teachers in the update of the policy, which ``forward`` runs, as shapes; None if none are."""
        if not self.runs_in_update:
            return None
        teachers = {}
        for name in self.settings.names:
            teacher_forward = run_teacher(name, self.run, forward, find)
            model = None if is_base(name, self.run) else teacher_shapes(find(name), self.run, teacher_forward)
            teachers[name] = Teacher(model, teacher_forward.compute)
        return teachers

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add what the teachers tell of the tokens, as zeros."""
        planned = []
        for sample in samples:
            if self.settings.by_policy_gradient:
                sample = sample.with_arrays(advantages=np.zeros(len(sample.tokens), np.float32))
            if self.settings.top_k:
                sample = with_top(sample, empty_top(sample, self.settings.top_k))
            planned.append(add_teacher_index(sample, 0, self.settings))
        return planned

    def passes(self, samples: Sequence[Sample], forward: Forward, find: Architectures) -> Sequence[Pass]:
        """Return the passes of teachers over a step's completions; those that run in the update have none."""
        if self.runs_in_update:
            return ()
        passes, output = [], teacher_output(self.settings, find(self.run.model).vocab_size)
        for number, name in enumerate(self.settings.names, start=1):
            teacher_forward = run_teacher(name, self.run, forward, find)
            in_state = name is None or is_base(name, self.run)
            model = None if in_state else teacher_shapes(find(name), self.run, teacher_forward)
            label = "teacher" if number == 1 else f"teacher {number}"
            role = (self.settings.own if name is None else "policy") if in_state else ""
            passes.append(Pass(label, teacher_forward, samples, output, 1, role, model, copies=int(not in_state)))
        return passes

    def learning(self, training: Sequence[Training]) -> Sequence[Training]:
        """Give the policy's update the teachers that it runs."""
        if not self.runs_in_update:
            return training
        teachers = {name: Teacher(model, self.forwards[name].compute) for name, model in self.loaded.items()}
        return [
            dataclasses.replace(trained, teachers=teachers) if trained.role == "policy" else trained
            for trained in training
        ]

    def scored(
        self, state: TrainState, samples: list[list[Sample]], batch: RolloutBatch
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Add the teachers' advantages to those of the samples, or their most likely tokens; return metrics."""
        settings, flat = self.settings, [sample for members in samples for sample in members]
        numbers = [teacher_index(sample, batch, settings) for sample in flat]
        flat = [add_teacher_index(sample, number, settings) for sample, number in zip(flat, numbers, strict=True)]
        metrics: dict[str, float] = {}
        if not self.runs_in_update:
            prompted = [with_teacher_prompt(sample, batch, self.run, self.prompts) for sample in flat]
            outputs: list[Any] = [None] * len(flat)
            for number, name in enumerate(settings.names):
                at = [n for n, sample in enumerate(prompted) if sample is not None and numbers[n] == number]
                model = teacher_weights(name, self.loaded, state, settings)
                output, mine = teacher_output(settings, self.vocab), [prompted[n] for n in at]
                read = self.forwards[name].by_sample(model, mine, output) if at else []
                for n, taught in zip(at, read, strict=True):
                    outputs[n] = taught
            if settings.context is not None:
                sampled = [p is not None for p, sample in zip(prompted, flat, strict=True) if sample.place is not None]
                metrics[f"{DISTILLATION}/told_fraction"] = float(np.mean(sampled))
            if settings.top_k:
                pairs = zip(flat, outputs, strict=True)
                flat = [add_teacher_tokens(sample, top, settings.top_k, self.others) for sample, top in pairs]
            else:
                ref = None
                if settings.divergence.needs_reference:
                    ref = self.policy.by_sample(model_of(state, "reference"), flat)
                flat, metrics[f"{DISTILLATION}/kl"] = add_teacher_advantages(flat, outputs, ref, settings)
        rest = iter(flat)
        return [[next(rest) for _ in members] for members in samples], metrics


def teacher_index(sample: Sample, batch: RolloutBatch, settings: configs.Distillation) -> int:
    """Return the number of a sample's teacher; given texts have the first."""
    return 0 if sample.place is None else settings.number_of(batch.groups[sample.place[0]].problem.task)


def add_teacher_index(sample: Sample, number: int, settings: configs.Distillation) -> Sample:
    """Return the sample with the number of its teacher, where the update runs several."""
    if len(settings.names) == 1 or settings.by_policy_gradient or settings.top_k:
        return sample
    return dataclasses.replace(sample, scalars=sample.scalars | {TEACHER_INDEX: float(number)})


def teacher_output(settings: configs.Distillation, vocab: int) -> Any:
    """Return what is read of a teacher at each token, for a policy with so many tokens."""
    return TopOutput(settings.top_k, vocab) if settings.top_k else "logp"


def teacher_weights(
    name: str | None, loaded: Mapping[str, Any], state: TrainState, settings: configs.Distillation
) -> Any:
    """Return a teacher's weights: loaded ones, the base of the policy's adapter, or the policy's own."""
    if name is None:
        return model_of(state, settings.own)
    return state.policy.base if loaded[name] is None else loaded[name]


def with_teacher_prompt(sample: Sample, batch: RolloutBatch, run: configs.Run, prompts: Any) -> Sample | None:
    """Return the sample as its teacher reads it, with the context from ``prompts``; None without context or teacher."""
    distillation: Any = run.scoring.distillation
    if sample.place is None:
        is_taught = not distillation.by_policy_gradient and DISTILLATION in (sample.counted_by or (DISTILLATION,))
        return sample if is_taught else None
    if distillation.context is None:
        return sample
    number, member = sample.place
    prompt = teacher_prompt(distillation.context.template, batch.groups[number], member, prompts)
    if prompt is None or len(prompt) > run.rollout.max_prompt_tokens + distillation.context.max_tokens:
        return None
    return dataclasses.replace(sample, prompt=prompt)


def add_teacher_advantages(
    samples: Sequence[Sample], teacher_logps: Sequence[Any], ref: Sequence[Any] | None, distillation: Any
) -> tuple[list[Sample], float]:
    """Return the samples with the teacher's advantages added, and how far the policy is from it, nats a token. None are
    ``teacher_logps`` of a sample that was not asked, and ``ref``, the reference's, if the signal reads none.
    """
    with_advantages, distance, count = [], 0.0, 0
    for sample, teacher_logp, ref_logp in zip(samples, teacher_logps, ref or [None] * len(samples), strict=True):
        if sample.place is None:
            with_advantages.append(sample)
            continue
        logp = sample.arrays["sampler_logp"]
        # A teacher with fewer tokens has no log-probability of the others, which are padding.
        teacher_logp = np.full(len(logp), np.nan, np.float32) if teacher_logp is None else teacher_logp
        counts = sample.mask & ~np.isnan(teacher_logp)
        advantages = distillation.weight * distillation.divergence.advantages(logp, teacher_logp, ref_logp)
        advantages = np.where(counts, advantages, 0).astype(np.float32)
        with_advantages.append(sample.with_arrays(advantages=np.float32(advantage_of(sample)) + advantages))
        distance += float(np.sum((logp - teacher_logp)[counts], dtype=np.float64))
        count += int(counts.sum())
    return with_advantages, distance / count if count else math.nan


def add_teacher_tokens(sample: Sample, top: Any, k: int, others: Sequence[str]) -> Sample:
    """Return the sample with its teacher's top tokens; without any, only the objectives ``others`` count it."""
    if top is None:
        return with_top(sample.counting(others), empty_top(sample, k))
    return with_top(sample, top)


def empty_top(sample: Sample, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return placeholders of a teacher's most likely tokens and their log-probabilities."""
    count = len(sample.tokens)
    return np.zeros((count, k), np.int32), np.zeros((count, k + 1), np.float32)


def with_top(sample: Sample, top: Any) -> Sample:
    """Return the sample with its teacher's most likely tokens, int32[t, k], and their log-probabilities [t, k + 1]."""
    ids, logp = top
    return sample.with_arrays(teacher_ids=ids, teacher_logp=logp)


MIN_RIGHT_ACCURACY = 1.0
"""The least accuracy of a completion that counts as right."""


def teacher_prompt(template: str, group: Group, member: int, prompts: Prompts) -> np.ndarray | None:
    """Return the teacher's prompt of the group's completion at place ``member``, int32[T]; None if it lacks a fact of
    the ``template`` (of ``Context``). The task's chat template in ``prompts`` writes the teacher's too.
    """
    problem = group.problem
    before, last = problem.prompt[:-1], problem.prompt[-1]
    facts = known_facts(group, member) | {"prompt": last["content"]}
    fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    if not all(facts.get(name) for name in fields):
        return None
    content = template.format(**{name: facts[name] for name in fields})
    problem_for_teacher = dataclasses.replace(problem, prompt=(*before, {**last, "content": content}))
    return encode(problem_for_teacher, prompts.task(problem.task), prompts.tokenizer)


def known_facts(group: Group, member: int) -> dict[str, str]:
    """Return the facts about a completion by name; what is unknown is missing."""
    row = {name: str(value) for name, value in group.problem.metadata.items() if value is not None}
    facts = row | {"answer": group.problem.answer, "attempt": group.completions[member].text}
    if not np.isnan(group.accuracy[member]):
        facts["verdict"] = "right" if group.accuracy[member] >= MIN_RIGHT_ACCURACY else "wrong"
    right_members = [place for place in np.flatnonzero(group.accuracy >= MIN_RIGHT_ACCURACY) if place != member]
    if right_members:
        facts["success"] = group.completions[right_members[0]].text
    return facts


def is_base(name: str | None, run: configs.Run) -> bool:
    """Whether a teacher is the frozen base of the policy's own adapter, which the state holds already."""
    return name == run.model and run.learner.lora.rank > 0


def load_teacher(name: str, run: configs.Run, forward: Forward, tokenizer: Any) -> Decoder | None:
    """Load a teacher in the dtype that it computes in, divided over the mesh as the policy is; None for its own base.
    InputError: it is missing, scores texts, or has other tokens than the policy, whose ``tokenizer`` this is.
    """
    if is_base(name, run):
        return None
    field = teacher_field(name, run)
    with naming(field):
        model, teacher_tokenizer = load_model(name, run.learner.compute.dtype, forward.mesh)
    if isinstance(model, ScalarModel):
        raise InputError(f"{field}: {name} is a reward model, which gives no distribution of tokens: take ModelReward")
    require(
        teacher_tokenizer is None or teacher_tokenizer.get_vocab() == tokenizer.get_vocab(),
        f"{field}: the tokenizer of {name} is not that of {run.model}: give a teacher that reads the policy's tokens",
    )
    return model


def run_teacher(name: str | None, run: configs.Run, forward: Forward, find: Architectures) -> Forward:
    """Return how a teacher (None: the policy itself) is run: in the rows of the policy, as ``forward``, or in longer
    ones with a context. InputError: it is missing, or has fewer positions or tokens than the run needs.
    """
    settings: Any = run.scoring.distillation
    more = 0 if settings.context is None else settings.context.max_tokens
    longest = run.longest_row + more
    itself = name is None or is_base(name, run)
    field = "scoring.distillation.context" if itself else teacher_field(name, run)
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
    teacher_learner = run.learner.computing(attention=attention, row_tokens=0 if more else forward.layout.row_tokens)
    compute = compute_for(teacher_learner, config, platform_of(forward.mesh), compute.compiler)
    layout = forward.layout
    if more:
        layout = layout_for(teacher_learner, compute, longest, run.rollout.max_new_tokens, forward.mesh, config)
    return dataclasses.replace(forward, compute=compute, layout=layout)


def teacher_shapes(config: ModelConfig, run: configs.Run, forward: Forward) -> Decoder:
    """Return a teacher as shapes on the mesh."""
    dtype = jnp.dtype(run.learner.compute.dtype)
    model = jax.eval_shape(lambda: initialise(config, jax.random.key(0), dtype))
    return as_shapes(model, shardings(model, forward.mesh))


def teacher_field(name: str, run: configs.Run) -> str:
    """Return the setting that names a teacher, for messages."""
    settings = run.scoring.distillation
    first = settings is None or name == settings.teacher
    return f"scoring.distillation.{'teacher' if first else 'by_task'}"
