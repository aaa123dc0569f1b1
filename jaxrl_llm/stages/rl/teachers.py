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
from jaxrl_llm.stages.rl.shared_credit import by_token
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
    """

    run: configs.Run
    loaded: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forwards: Mapping[str, Forward] = dataclasses.field(default_factory=dict)
    policy: Any = None
    vocab: int = 0
    name = DISTILLATION

    @classmethod
    def of(cls, run: configs.Run) -> Self | None:
        """See ``Ingredient``."""
        own = run.scoring.distillation
        if own is None:
            return None
        signal = own.divergence
        losses = () if isinstance(signal, SampledKL) else (DivergenceLoss(own.weight, signal, own.names),)
        loads = tuple(name for name in own.names if not is_base(name, run))
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
            around.progress.status(f"loading {name}")
            loaded[name] = load_teacher(name, self.run, own, around.tokenizer)
        vocab = config_of(self.run.model).vocab_size
        return dataclasses.replace(self, loaded=loaded, forwards=forwards, policy=forward, vocab=vocab)

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
            zeros = np.zeros(len(sample.tokens), np.float32)
            if not self.objectives:
                sample = by_token(sample, zeros)
            if self.top_k:
                top = np.zeros((len(zeros), self.top_k), np.int32), np.zeros((len(zeros), self.top_k + 1), np.float32)
                sample = with_top(sample, top)
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
            base = is_base(name, self.run)
            model = None if base else teacher_shapes(find(name), self.run, own)
            label = "teacher" if number == 1 else f"teacher {number}"
            role = "policy" if base else ""
            found.append(Pass(label, own, samples, self._output(), 1, role, model, copies=int(not base)))
        return found

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Give the policy's update the teachers that it runs."""
        if not self.runs_in_update:
            return training
        given = {name: Teacher(model, self.forwards[name].compute) for name, model in self.loaded.items()}
        return [dataclasses.replace(one, teachers=given) if one.role == "policy" else one for one in training]

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Leave the metrics of rewards out of a run that has none."""
        plays = any(task.plays for task in configs.tasks_in(self.run.task))
        if self.run.scoring.rewards or plays:
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
            told = self._told(state, every, each)
            if self.top_k:
                found = [with_top(sample, top) for sample, top in zip(every, told, strict=True)]
            else:
                found, measured = self._valued(state, every, told)
        ends = np.cumsum(sizes).tolist()
        return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)], measured

    def _told(self, state: TrainState, samples: Sequence[Sample], numbers: Sequence[int]) -> list[Any]:
        """Return the output of each sample's teacher, of its prompt and tokens."""
        told: list[Any] = [None] * len(samples)
        for number, name in enumerate(self.settings.names):
            places = [place for place, own in enumerate(numbers) if own == number]
            if not places:
                continue
            model = state.policy.base if self.loaded[name] is None else self.loaded[name]
            asked = [samples[place] for place in places]
            found = self.forwards[name].by_sample(model, asked, self._output())
            for place, one in zip(places, found, strict=True):
                told[place] = one
        return told

    def _output(self) -> Any:
        return TopOutput(self.top_k, self.vocab) if self.top_k else "logp"

    def _valued(
        self, state: TrainState, samples: Sequence[Sample], told: Sequence[np.ndarray]
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples with the teacher's advantages added, and how far the policy is from it."""
        own = self.settings
        ref: Sequence[Any] = [None] * len(samples)
        if own.needs_reference:
            ref = self.policy.by_sample(model_of(state, "reference"), samples)
        valued, far, count = [], 0.0, 0
        for sample, theirs, before in zip(samples, told, ref, strict=True):
            logp = sample.arrays["sampler_logp"]
            advantages = own.weight * own.divergence.advantages(logp, theirs, before)
            advantages = np.where(sample.mask, advantages, 0).astype(np.float32)
            valued.append(by_token(sample, np.float32(advantage_of(sample)) + advantages))
            far += float(np.sum((logp - theirs)[sample.mask], dtype=np.float64))
            count += int(sample.mask.sum())
        return valued, {f"{DISTILLATION}/kl": far / count if count else math.nan}

    def _number(self, sample: Sample, batch: RolloutBatch) -> int:
        """Return the number of a sample's teacher; given texts have the first."""
        return 0 if sample.place is None else self.settings.number_of(batch.groups[sample.place[0]].problem.task)

    def _with_number(self, sample: Sample, number: int) -> Sample:
        if len(self.settings.names) == 1 or not self.runs_in_update:
            return sample
        return dataclasses.replace(sample, scalars=sample.scalars | {WHICH: float(number)})


def with_top(sample: Sample, top: Any) -> Sample:
    """Return the sample with its teacher's most likely tokens, int32[t, k], and their log-probabilities [t, k + 1]."""
    ids, logp = top
    return dataclasses.replace(sample, arrays=sample.arrays | {"teacher_ids": ids, "teacher_logp": logp})
