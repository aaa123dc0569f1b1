"""Teachers of a run: loading them, and what they tell of each token of the step's completions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.divergences import SampledKL
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.learner.teaching import DISTILLATION, WHICH, DivergenceLoss, Teacher, TopOutput
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.runs.load import config_of
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.stages.rl.teacher_context import told_prompt
from jaxrl_llm.stages.rl.teacher_models import is_base, load_teacher, run_teacher, teacher_shapes
from jaxrl_llm.stages.stage import Architectures, Pass
from jaxrl_llm.types import TrainState

REWARDS = {f"reward/{name}" for name in ("mean", "std", "zero_std_fraction", "p10", "p50", "p90")}
"""Metrics that a run without rewards does not measure."""
BY_TASK = ("reward", "zero_std_fraction")
"""The same of a task of a mixture."""


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
    name = DISTILLATION

    @classmethod
    def of(cls, run: configs.Run) -> Self | None:
        """See ``Ingredient``."""
        own = run.scoring.distillation
        if own is None:
            return None
        signal = own.divergence
        named = tuple(name for name in own.names if name is not None)
        losses = () if isinstance(signal, SampledKL) else (DivergenceLoss(own.weight, signal, named),)
        loads = tuple(name for name in named if not is_base(name, run))
        return cls(run, objectives=losses, loads=loads)

    @property
    def settings(self) -> Any:
        """The run's ``Distillation``."""
        return self.run.scoring.distillation

    @property
    def top_k(self) -> int:
        """The number of tokens of which the teacher's probabilities are read; 0 where it is not so."""
        return self.settings.top_k

    @property
    def runs_in_update(self) -> bool:
        """Whether the teachers are run with each microbatch of the update, to compare whole distributions."""
        return bool(self.objectives) and not self.top_k

    def prepared(self, around: Around) -> Self:
        """Load the teachers.

        Raises:
          InputError: one that is missing, scores texts, has too few positions or other tokens than the policy.
        """
        forward, loaded = around.forwards["policy"], {}
        forwards = {name: run_teacher(name, self.run, forward, config_of) for name in self.settings.names}
        for name, own in forwards.items():
            if name is None:
                continue
            around.progress.status(f"loading {name}")
            loaded[name] = load_teacher(name, self.run, own, around.tokenizer)
        vocab = config_of(self.run.model).vocab_size
        return dataclasses.replace(
            self, loaded=loaded, forwards=forwards, policy=forward, vocab=vocab, prompts=around.prompts,
            others=tuple(name for name in around.objectives if name != DISTILLATION),
        )  # fmt: skip

    def teachers(self, forward: Forward, find: Architectures) -> dict[str, Teacher] | None:
        """Return the teachers that are run in the update, as shapes."""
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
            if not self.objectives:
                sample = sample.with_arrays(advantages=np.zeros(len(sample.tokens), np.float32))
            if self.top_k:
                sample = with_top(sample, no_top(sample, self.top_k))
            found.append(self._with_number(sample, 0))
        return found

    def passes(
        self, samples: Sequence[Sample], forwards: Mapping[str, Forward], where: Any, find: Architectures
    ) -> Sequence[Pass]:
        """Return the passes of teachers over a step's completions; those that run in the update have none."""
        if self.runs_in_update:
            return ()
        found = []
        for number, name in enumerate(self.settings.names, start=1):
            own = run_teacher(name, self.run, forwards["policy"], find)
            held = name is None or is_base(name, self.run)
            model = None if held else teacher_shapes(find(name), self.run, own)
            label = "teacher" if number == 1 else f"teacher {number}"
            role = (self.settings.own if name is None else "policy") if held else ""
            found.append(Pass(label, own, samples, self._output(), 1, role, model, copies=int(not held)))
        return found

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Give the policy's update the teachers that it runs."""
        if not self.runs_in_update:
            return training
        given = {name: Teacher(model, self.forwards[name].compute) for name, model in self.loaded.items()}
        return [dataclasses.replace(one, teachers=given) if one.role == "policy" else one for one in training]

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Leave the metrics of rewards out of a run that has none."""
        if not configs.without_rewards(self.run):
            return batch
        of_tasks = {f"task/{task.label}/{name}" for task in configs.tasks_in(self.run.task) for name in BY_TASK}
        measured = {name: x for name, x in batch.metrics.items() if name not in REWARDS | of_tasks}
        return dataclasses.replace(batch, metrics=measured)

    def scored(
        self, state: TrainState, samples: list[list[Sample]], batch: RolloutBatch
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Add the teachers' advantages to those of the samples, or their most likely tokens; return metrics."""
        sizes = [len(members) for members in samples]
        every = [sample for members in samples for sample in members]
        each = [self._number(sample, batch) for sample in every]
        found = every = [self._with_number(sample, number) for sample, number in zip(every, each, strict=True)]
        measured: dict[str, float] = {}
        if not self.runs_in_update:
            asked = [self._as_asked(sample, batch) for sample in every]
            told = self._told(state, asked, each)
            if self.settings.context is not None:
                sampled = [
                    one is not None for one, sample in zip(asked, every, strict=True) if sample.place is not None
                ]
                measured[f"{DISTILLATION}/told_fraction"] = float(np.mean(sampled))
            if self.top_k:
                found = [self._with_top(sample, top) for sample, top in zip(every, told, strict=True)]
            else:
                found, numbers = self._valued(state, every, told)
                measured |= numbers
        ends = np.cumsum(sizes).tolist()
        return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)], measured

    def _as_asked(self, sample: Sample, batch: RolloutBatch) -> Sample | None:
        """Return the sample as its teacher reads it, with its context; None where it has none, or none is taught."""
        if sample.place is None:
            taught = bool(self.objectives) and DISTILLATION in (sample.counted_by or (DISTILLATION,))
            return sample if taught else None
        context = self.settings.context
        if context is None:
            return sample
        number, member = sample.place
        prompt = told_prompt(context.template, batch.groups[number], member, self.prompts)
        room = self.run.rollout.max_prompt_tokens + context.max_tokens
        if prompt is None or len(prompt) > room:
            return None
        return dataclasses.replace(sample, prompt=prompt)

    def _told(self, state: TrainState, samples: Sequence[Sample | None], numbers: Sequence[int]) -> list[Any]:
        """Return the output of each sample's teacher, of its prompt and tokens; None for None."""
        told: list[Any] = [None] * len(samples)
        for number, name in enumerate(self.settings.names):
            asked = {place: one for place, one in enumerate(samples) if one is not None and numbers[place] == number}
            if not asked:
                continue
            found = self.forwards[name].by_sample(self._model(name, state), list(asked.values()), self._output())
            for place, one in zip(asked, found, strict=True):
                told[place] = one
        return told

    def _model(self, name: str | None, state: TrainState) -> Any:
        if name is None:
            return model_of(state, self.settings.own)
        return state.policy.base if self.loaded[name] is None else self.loaded[name]

    def _output(self) -> Any:
        return TopOutput(self.top_k, self.vocab) if self.top_k else "logp"

    def _valued(
        self, state: TrainState, samples: Sequence[Sample], told: Sequence[np.ndarray]
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples with the teacher's advantages added, and how far the policy is from it."""
        own = self.settings
        ref: Sequence[Any] = [None] * len(samples)
        if own.divergence.needs_reference:
            ref = self.policy.by_sample(model_of(state, "reference"), samples)
        valued, far, count = [], 0.0, 0
        for sample, theirs, before in zip(samples, told, ref, strict=True):
            if sample.place is None:
                valued.append(sample)
                continue
            logp = sample.arrays["sampler_logp"]
            # A teacher with fewer tokens has no log-probability of the others, which are padding.
            theirs = np.full(len(logp), np.nan, np.float32) if theirs is None else theirs
            counts = sample.mask & ~np.isnan(theirs)
            advantages = own.weight * own.divergence.advantages(logp, theirs, before)
            advantages = np.where(counts, advantages, 0).astype(np.float32)
            valued.append(sample.with_arrays(advantages=np.float32(advantage_of(sample)) + advantages))
            far += float(np.sum((logp - theirs)[counts], dtype=np.float64))
            count += int(counts.sum())
        return valued, {f"{DISTILLATION}/kl": far / count if count else math.nan}

    def _number(self, sample: Sample, batch: RolloutBatch) -> int:
        """Return the number of a sample's teacher; given texts have the first."""
        return 0 if sample.place is None else self.settings.number_of(batch.groups[sample.place[0]].problem.task)

    def _with_number(self, sample: Sample, number: int) -> Sample:
        if len(self.settings.names) == 1 or not self.runs_in_update:
            return sample
        return dataclasses.replace(sample, scalars=sample.scalars | {WHICH: float(number)})

    def _with_top(self, sample: Sample, top: Any) -> Sample:
        """Return the sample with the teacher's most likely tokens; without them its teacher teaches nothing."""
        if top is None:
            return with_top(sample.counting(self.others), no_top(sample, self.top_k))
        return with_top(sample, top)


def no_top(sample: Sample, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return placeholders of a teacher's most likely tokens and their log-probabilities."""
    count = len(sample.tokens)
    return np.zeros((count, k), np.int32), np.zeros((count, k + 1), np.float32)


def with_top(sample: Sample, top: Any) -> Sample:
    """Return the sample with its teacher's most likely tokens, int32[t, k], and their log-probabilities [t, k + 1]."""
    ids, logp = top
    return sample.with_arrays(teacher_ids=ids, teacher_logp=logp)
