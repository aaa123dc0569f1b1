"""The settings of runs that learn from data: supervised fine-tuning, preferences, reward models."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.preference import DPO, IPO, KTO, ORPO, SimPO
from jaxrl_llm.config.mixture import tasks_in
from jaxrl_llm.config.run import SEED, Evaluation, Output, Run, check_model
from jaxrl_llm.data.datasets import KINDS, Collected, Pairs, Steps, Texts, Unpaired, check_collected
from jaxrl_llm.environments.environment import Limits
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.settings import RL_RATE, Learner, UsualRate, with_usual_rate
from jaxrl_llm.rules.settings import Rules
from jaxrl_llm.sharding.mesh import MeshShape
from jaxrl_llm.system.setting import FREE, MODEL, RECORDED, Count, Range, Setting, with_parts
from jaxrl_llm.tasks.task import InMemory, Rows, Task


@dataclasses.dataclass(frozen=True)
class BatchSize(Setting):
    """The size of the batch of each step.

    Attributes:
      rows: of the data: texts, pairs, rankings or solutions.
      max_tokens: of a prompt with its completion; ``data.overlong`` decides on longer ones.
    """

    rows: Annotated[int, Count(1)] = 32
    max_tokens: Annotated[int, Count(1)] = 512


@dataclasses.dataclass(frozen=True)
class Answering(Setting):
    """Settings of sampling answers, to test the model on a task and to collect data from it.

    Attributes:
      max_new_tokens: longest completion, the stop token included.
      max_prompt_tokens: longest prompt of an episode, with what its environment says first.
      episode: limits of episodes with an environment or tools.
      slots: completions sampled at one time.
      chunk: decode steps in one compiled call.
      workers: processes for verifiers that may hang or crash; None for as many as this machine has cores, up to 32.
      timeout_s: seconds after which an answer's verification is given up.
    """

    max_new_tokens: Annotated[int, Count(1)] = 256
    max_prompt_tokens: Annotated[int, Count(1)] = 256
    episode: Limits = Limits()
    slots: Annotated[int, Count(1), FREE] = 64
    chunk: Annotated[int, Count(1)] = 16
    workers: Annotated[int | None, Count(1), FREE] = None
    timeout_s: Annotated[float, Range("(0, inf]", words="above 0 seconds"), RECORDED] = 5.0


@dataclasses.dataclass(frozen=True)
class FromData(Setting):
    """Settings shared by all runs that learn from data. All arguments but the model and the data are keywords.

    Attributes:
      model: a Hugging Face directory, a .gguf file, a built-in name, a hub id, or RUN[@STEP].
      data: to learn from.
      batch: the size of each step's batch.
      learner: how it is learned from.
      mesh: how devices are arranged.
      evaluation: tests of the model, besides its measures on held-out data; by default on the task of collected data.
      answering: how answers are sampled.
      output: checkpoints and logs.
      steps: how many.
      seed: decides the order of the data and every other random number.
    """

    model: Annotated[str, MODEL]
    data: Any
    _: dataclasses.KW_ONLY
    batch: BatchSize = BatchSize()
    learner: Learner = Learner()
    mesh: Annotated[MeshShape, FREE] = MeshShape()
    evaluation: Evaluation = Evaluation()
    answering: Answering = Answering()
    output: Output = Output()
    steps: Annotated[int, Count(1), FREE] = 100
    seed: Annotated[int, SEED] = 0
    usual_rate: ClassVar[UsualRate]
    """The learning rate of this kind of run if its optimiser sets none; the defaults of TRL 1.16."""
    rules = Rules()
    """The rules between steps: no phases and no guards."""
    group_field, answer_field = "batch.rows", "answering.max_new_tokens"
    """The fields with the number of rows per step, and with the most tokens of an answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "learner", with_usual_rate(self.learner, self.usual_rate))

    @property
    def longest_row(self) -> int:
        """The least tokens of a packed row."""
        return self.batch.max_tokens + 1

    @property
    def holds_out(self) -> tuple[bool, str]:
        """Whether data is held out for evaluation, and the field that sets how much."""
        source = self.data.source
        return self.data.holdout > 0 or (isinstance(source, Collected) and source.task.holdout > 0), "data.holdout"

    def check(self, run: Any, where: str) -> None:
        """Refuse data that cannot work, and settings of reinforcement learning."""
        kind = type(self).__name__
        source = self.data.source
        check_model(self.model)
        require(
            not self.mesh.rollout,
            f"mesh.rollout {self.mesh.rollout} sets devices aside for sampling, which a {kind} does not need: "
            "set it to 0",
        )
        require(0 <= self.data.holdout < 1, f"data.holdout is a share from 0 to below 1, got {self.data.holdout}")
        if isinstance(source, Collected):
            check_collected(source, KINDS[type(self.data)], "data.source.")
        target_kl = self.learner.target_kl
        require(target_kl is None, f"learner.target_kl {target_kl} is for reinforcement learning: leave it out")
        require(
            not self.output.monitor_kl,
            "output.monitor_kl is for reinforcement learning, whose policy samples what is measured: leave it out",
        )
        require(
            not self.learner.keep_sampling_mask,
            "learner.keep_sampling_mask is for tokens that a sampler drew, and these are data: leave it out",
        )
        require(
            self.learner.routing_replay == "off",
            f"learner.routing_replay {self.learner.routing_replay!r} is for tokens that a sampler drew, and these are "
            "data: leave it out",
        )
        for task in tasks_in(self.evaluation.task):
            tasks.check(task)


@dataclasses.dataclass(frozen=True)
class Supervised(FromData):
    """A supervised fine-tuning run: the model learns to continue prompts as the data does. Fields as in ``FromData``.

    Attributes:
      data: texts; or the model's own right answers (``Texts(Collected(...))``).
    """

    data: Texts
    usual_rate: ClassVar[UsualRate] = UsualRate(2e-5)


@dataclasses.dataclass(frozen=True)
class Preference(FromData):
    """A preference run: the model learns which of two answers is better, or which are good. Else as ``FromData``.

    Attributes:
      model: as in ``FromData``; it is the reference too, of losses that have one.
      data: pairs, or a right and a wrong answer of its own (``Pairs(Collected(...))``); for KTO ``Unpaired``, labelled.
      loss: of each pair; or ``KTO``, of each answer.
    """

    data: Pairs | Unpaired
    loss: DPO | IPO | SimPO | ORPO | KTO = DPO()
    usual_rate: ClassVar[UsualRate] = RL_RATE

    def check(self, run: Any, where: str) -> None:
        """Refuse a loss of pairs on answers with labels, and the reverse."""
        name = type(self.loss).__name__
        unpaired = isinstance(self.data, Unpaired)
        require(
            unpaired or not isinstance(self.loss, KTO),
            "loss KTO learns from answers with labels, and data is Pairs: set data to Unpaired(...), or loss to DPO()",
        )
        require(
            not unpaired or isinstance(self.loss, KTO),
            f"loss {name} compares two answers, and data is Unpaired: set loss to KTO(), or data to Pairs(...)",
        )
        super().check(run, where)


@dataclasses.dataclass(frozen=True)
class RewardModel(FromData):
    """A reward-model run: a model with a scalar head learns to score answers. Other fields as in ``FromData``.

    Attributes:
      model: as in ``FromData``; the head of a language model is drawn by the seed, normal with a deviation of 0.02.
      data: pairs or rankings (Bradley-Terry), or solutions with labelled steps (a process reward model); either may be
        collected from ``model``, which is a language model then.
      evaluation: when it is tested on the data that is held out (``every``, ``limit``).
      centre: of pairs and rankings: weight of the square of the scores' mean, which keeps them around 0.
      score_at: of pairs and rankings: where a score is read: "template", at the last token that the chat template
        writes after the answer, as by transformers and TRL; "stop", at the token that ends it. A cut answer is read at
        its last token.
      bootstrap: learn from as many rows as there are, drawn from them with replacement by the seed: about 63 % of them,
        others in each model of an ensemble.
    """

    data: Pairs | Steps
    centre: Annotated[float, Range("[0, inf)", words="at least 0, and finite")] = 0.0
    score_at: Literal["template", "stop"] = "template"
    bootstrap: bool = False
    usual_rate: ClassVar[UsualRate] = UsualRate(1e-4)

    def check(self, run: Any, where: str) -> None:
        """Refuse settings of another kind of data, and evaluations that a reward model cannot take."""
        if not isinstance(self.data, Pairs):
            require(
                not self.centre,
                f"centre {self.centre} is of pairs and rankings, and data is Steps, whose scores are held by their "
                "labels: leave it out",
            )
            require(
                self.score_at == "template",
                f"score_at {self.score_at} is of pairs and rankings, and data is Steps, whose scores are read where "
                "steps end: leave it out",
            )
        evaluation = self.evaluation
        require(
            evaluation == Evaluation(every=evaluation.every, limit=evaluation.limit),
            "a reward model gives no answers: of evaluation it has every and limit alone, leave the others out",
        )
        super().check(run, where)


Configuration = Run | FromData
"""Every kind of run: of reinforcement learning, or from data."""


def check_start(run: Configuration, carry: bool = False) -> None:
    """Refuse another run's weights as the start of a run that makes its data with its own model, and its place in the
    data (``carry``) for a run that does not sample. InputError names the remedy.
    """
    kind = type(run).__name__
    if carry and not isinstance(run, Run):
        raise InputError(f"--carry is for reinforcement learning, and this is a {kind}: leave it out")
    collects = isinstance(getattr(getattr(run, "data", None), "source", None), Collected)
    require(
        not (collects or isinstance(run, Preference)),
        "--from would begin with other weights than those that the data is made with: give them as --model RUN@STEP",
    )


def dated(run: Any, day: str) -> Any:
    """Return the run with ``day`` as today's date for templates that read the clock, unless its data sets a date."""

    def on_the_day(part: Any) -> Any:
        undated = hasattr(part, "template") and not getattr(part, "date", day)
        return dataclasses.replace(part, date=day) if undated else part

    return with_parts(run, on_the_day)


def wording(run: Any) -> Task | None:
    """Return the wording of the run's prompts (template, system, suffix, date) as a task; None if the run has none."""
    data = getattr(run, "data", None)
    if data is None:
        task = getattr(run, "task", None)
        return task if isinstance(task, Task) else None
    if isinstance(data.source, Collected):
        return data.source.task
    return Task(Rows(InMemory(())), template=data.template, system=data.system, suffix=data.suffix, date=data.date)
