"""What decides a run that learns from data: supervised fine-tuning, preferences, reward models."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

from jaxrl_llm.algorithms.preference import DPO, IPO
from jaxrl_llm.config.parts import dated, day_of
from jaxrl_llm.config.run import MOVED, Evaluation, Output
from jaxrl_llm.learner.settings import RL_RATE, Learner, Usual, at_usual_rate
from jaxrl_llm.moved import taking_old_names
from jaxrl_llm.sharding.mesh import MeshShape
from jaxrl_llm.tasks.collected import Collected
from jaxrl_llm.tasks.sources import Rows
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.tasks.texts import Pairs, Steps, Texts


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """What each step learns from.

    Attributes:
      rows: of the data: texts, pairs, rankings or solutions.
      max_tokens: of a prompt with its completion; ``overlong`` of the data says what becomes of a longer one.
    """

    rows: int = 32
    max_tokens: int = 512


@dataclasses.dataclass(frozen=True)
class Answering:
    """How answers are sampled, to test the model on a task and to collect data from it.

    Attributes:
      max_new_tokens: longest completion, the stop token included.
      slots: completions sampled at one time.
      chunk: decode steps in one compiled call.
      workers: processes for verifiers that may hang or crash.
      timeout_s: seconds after which an answer's verification is given up.
    """

    max_new_tokens: int = 256
    slots: int = 64
    chunk: int = 16
    workers: int = 2
    timeout_s: float = 5.0


@dataclasses.dataclass(frozen=True)
class FromData:
    """What every run that learns from data says; a kind adds its own. All but the model and the data go by name.

    Attributes:
      model: a Hugging Face directory, a .gguf file, a built-in name, a hub id, or RUN[@STEP].
      data: what it learns from.
      batch: what each step learns from.
      learner: how.
      mesh: how devices are arranged.
      evaluation: when and how the model is tested, beside what it makes of the data that is held out; its task is that
        of collected data where it has none of its own.
      answering: how answers are sampled.
      output: checkpoints and logs.
      steps: how many.
      seed: decides the order of the data and every other random number.
    """

    model: str
    data: Any
    _: dataclasses.KW_ONLY
    batch: BatchSize = BatchSize()
    learner: Learner = Learner()
    mesh: MeshShape = MeshShape()
    evaluation: Evaluation = Evaluation()
    answering: Answering = Answering()
    output: Output = Output()
    steps: int = 100
    seed: int = 0
    usual_rate: ClassVar[Usual]
    """The learning rate of this kind of run where its optimiser names none; those of TRL 1.16."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "learner", at_usual_rate(self.learner, self.usual_rate))

    @property
    def run_dir(self) -> str | None:
        """That of ``output``."""
        return self.output.run_dir


@taking_old_names("output", Output, MOVED)
@dataclasses.dataclass(frozen=True)
class Supervised(FromData):
    """A run of supervised fine-tuning: the model learns to continue prompts as the data does.

    Attributes:
      model, batch, learner, mesh, evaluation, answering, output, steps, seed: as in ``FromData``.
      data: texts; or what the model itself answers rightly (``Texts(Collected(...))``).
    """

    data: Texts
    usual_rate: ClassVar[Usual] = Usual(2e-5)


@taking_old_names("output", Output, MOVED)
@dataclasses.dataclass(frozen=True)
class Preference(FromData):
    """A run that learns from pairs of answers which is better, against the model as it was at the start.

    Attributes:
      model: as in ``FromData``; it is the reference too.
      data: pairs; or a right and a wrong answer of the model's own (``Pairs(Collected(...))``).
      batch, learner, mesh, evaluation, answering, output, steps, seed: as in ``FromData``.
      loss: of each pair.
    """

    data: Pairs
    loss: DPO | IPO = DPO()
    usual_rate: ClassVar[Usual] = RL_RATE


@taking_old_names("output", Output, MOVED)
@dataclasses.dataclass(frozen=True)
class RewardModel(FromData):
    """A run that teaches a model with a scalar head to score answers.

    Attributes:
      model: as in ``FromData``; the head of a language model is drawn by the seed, normal with a deviation of 0.02.
      data: pairs or rankings (Bradley-Terry), or solutions with labelled steps (a process reward model); either may be
        collected from ``model``, which is a language model then.
      evaluation: when it is tested on the data that is held out (``every``, ``limit``).
      batch, learner, mesh, answering, output, steps, seed: as in ``FromData``.
      centre: of pairs and rankings: weight of the square of the scores' mean, which keeps them around 0.
      score_at: of pairs and rankings: where an answer's score is read: "template", at the last token that the chat
        template writes after it, as by transformers and TRL, or "stop", at the token that ends it. An answer that was
        cut off is read at its last token. None is "template" for a new run; an older one goes on with its own.
      bootstrap: learn from as many rows as there are, drawn from them with replacement by the seed: about 63 % of them,
        others in each model of an ensemble.
    """

    data: Pairs | Steps
    centre: float = 0.0
    score_at: Literal["template", "stop"] | None = None
    bootstrap: bool = False
    usual_rate: ClassVar[Usual] = Usual(1e-4)


class AtStart(NamedTuple):
    """What the first start of a run decides where its settings leave it open.

    Attributes:
      day: of that start; see ``dated``.
      score_at: see ``RewardModel``.
      rate: the learning rate; None for what is usual for the kind of run.
    """

    day: str
    score_at: Literal["template", "stop"] = "template"
    rate: float | None = None


def decided_by(begun: Any, today: str) -> AtStart:
    """What the start of this run has decided; ``today`` where it has no day.

    Before kinds of runs had learning rates of their own, that of reinforcement learning was usual for all.
    """
    optimiser = getattr(begun.learner, "optimiser", None)
    rate = float(RL_RATE) if getattr(optimiser, "learning_rate", None) == RL_RATE else None
    return AtStart(day_of(begun) or today, getattr(begun, "score_at", None) or "template", rate)


def as_started(run: Any, at_start: AtStart) -> Any:
    """The run with what its first start has decided in place of what it leaves open."""
    day, place, rate = at_start
    run = dated(run, day)
    if rate is not None:
        run = dataclasses.replace(run, learner=at_usual_rate(run.learner, rate))
    left_open = isinstance(run, RewardModel) and isinstance(run.data, Pairs) and run.score_at is None
    return dataclasses.replace(run, score_at=place) if left_open else run


def wording(run: Any) -> Task | None:
    """How the run's prompts are written, as a task says it; None where the run does not say."""
    data = getattr(run, "data", None)
    if data is None:
        found = getattr(run, "task", None)
        return found if isinstance(found, Task) else None
    if isinstance(data.source, Collected):
        return data.source.task
    return Task(Rows(()), template=data.template, system=data.system, suffix=data.suffix, date=data.date)
