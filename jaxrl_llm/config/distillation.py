"""Settings of distillation: a teacher that values each token of a completion."""

import dataclasses
import string
from typing import Annotated, Any, ClassVar

from jaxrl_llm.algorithms.kl import JensenShannon, SampledKL, TeacherSignal
from jaxrl_llm.config.mixture import tasks_in
from jaxrl_llm.data.datasets import Collected, Texts, check_texts
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.system.setting import MODEL, Choice, Range, Setting

NAMED = {
    "policy_gradient": SampledKL(),
    "forward_kl": JensenShannon(0.0),
    "reverse_kl": JensenShannon(1.0),
    "jsd": JensenShannon(0.5),
}
"""Short names of signals."""


@dataclasses.dataclass(frozen=True)
class TaskTeacher:
    """A teacher of one task of a mixture, by the task's name."""

    task: str
    teacher: Annotated[str, MODEL]
    label: ClassVar[str] = "distillation.by_task"


@dataclasses.dataclass(frozen=True)
class Context(Setting):
    """What a teacher is told that the policy is not: SDFT (arXiv 2601.19897), SDPO (arXiv 2601.20802), OPSD.

    Attributes:
      template: replaces the last message before the completion, for the teacher. It names facts in braces:
        ``{prompt}``, that message; ``{answer}``, the problem's reference; ``{attempt}``, the completion itself;
        ``{verdict}``, the verifier's "right" or "wrong"; ``{success}``, another completion of the group that is right;
        or a column of the row. A completion without one of them is not taught.
      max_tokens: more than the prompt may have, for the teacher's. Completions with longer ones are not taught.
    """

    template: str
    max_tokens: Annotated[int, Range("[1, inf]")] = 512

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the names in braces."""
        return tuple(name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None)

    def check(self, run: Any, where: str) -> None:
        """Refuse a template that tells nothing new, and facts that this run does not have."""
        try:
            facts = self.facts
        except ValueError as error:
            raise InputError(f"{where}template has a brace too many ({error}): write {{{{ for one brace") from None
        require(
            "prompt" in facts and len(set(facts)) > 1,
            f"{where}template must name {{prompt}} and another fact, such as {{answer}}, got {self.template[:60]!r}",
        )
        require(
            "success" not in facts or run.rollout.group > 1,
            f"{where}template names {{success}}, another completion of the group, and rollout.group is 1: raise it",
        )
        for task in tasks_in(run.task):
            require(
                not task.plays,
                f"{where}template is written before one completion, and task {task.label} has episodes: leave context "
                "out, and give a teacher",
            )


@dataclasses.dataclass(frozen=True)
class Distillation(Setting):
    """A teacher from which the policy learns on its own completions, in addition to rewards or without any.

    Attributes:
      teacher: a model with the policy's tokens, of any width and family: a run (RUN, RUN@STEP), a directory, a .gguf
        file, a hub id. An adapter's own base takes no second copy. None: the policy itself, told more (``context``).
      divergence: ``SampledKL()``, an advantage for each sampled token, through the recipe's surrogate; or a loss over
        the vocabulary, ``JensenShannon(beta)``. Also "policy_gradient", "forward_kl", "reverse_kl", "jsd", or beta.
      weight: of the advantages, or of the loss.
      by_task: other teachers for some tasks of a mixture.
      lmbda: lambda of GKD (arXiv 2306.13649), the policy's completions as a share of all rows that the divergence is
        computed on; the others are ``texts``. At 0 only ``rollout.prompts`` times ``rollout.group`` texts.
      texts: given texts, of which the teacher's distribution is learned at each token of their completions.
      context: what the teacher is told in addition.
      own: the weights that teach without a ``teacher``: "policy", those that the step begins with; or "reference", the
        frozen copy, which ``recipe.resets.ema`` or ``.reference_every`` moves.
    """

    teacher: Annotated[str | None, MODEL]
    divergence: TeacherSignal = SampledKL()
    weight: Annotated[float, Range("(0, inf)", words="above 0")] = 1.0
    by_task: tuple[TaskTeacher, ...] = ()
    lmbda: Annotated[float, Range("[0, 1]")] = 1.0
    texts: Texts | None = None
    context: Context | None = None
    own: Annotated[str, Choice("policy", "reference")] = "policy"
    label: ClassVar[str] = "distillation.teacher"

    def __post_init__(self) -> None:
        divergence: Any = self.divergence
        if isinstance(divergence, str):
            if divergence not in NAMED:
                meant = did_you_mean(divergence, NAMED, f"give one of {', '.join(NAMED)}, or a number: beta")
                raise InputError(f"distillation.divergence {divergence!r} is unknown: {meant}")
            object.__setattr__(self, "divergence", NAMED[divergence])
        elif isinstance(divergence, (int, float)) and not isinstance(divergence, bool):
            object.__setattr__(self, "divergence", JensenShannon(float(divergence)))
        object.__setattr__(self, "by_task", tuple(self.by_task))

    @property
    def by_policy_gradient(self) -> bool:
        """Whether the teacher gives advantages, rather than a loss."""
        return isinstance(self.divergence, SampledKL)

    @property
    def needs_reference(self) -> bool:
        """Whether a copy of the policy is kept: for a scaled reward, or as the teacher."""
        scaled = isinstance(self.divergence, SampledKL) and self.divergence.needs_reference
        return scaled or (self.teacher is None and self.own == "reference")

    @property
    def top_k(self) -> int:
        """The number of the teacher's most likely tokens that are compared; 0 to compare all, or none."""
        return 0 if isinstance(self.divergence, SampledKL) else self.divergence.top_k

    @property
    def names(self) -> tuple[str | None, ...]:
        """The teachers' names, each once; the first is that of tasks without their own."""
        return tuple(dict.fromkeys((self.teacher, *(teacher.teacher for teacher in self.by_task))))

    def rows_of(self, completions: int) -> int:
        """Return the number of texts of a step with so many completions, or of so many rows if nothing is sampled."""
        return round(completions * (1 - self.lmbda) / self.lmbda) if self.lmbda else completions

    def number_of(self, task: str) -> int:
        """Return the place in ``names`` of the teacher of a task."""
        teacher_by_task = {entry.task: entry.teacher for entry in self.by_task}
        return self.names.index(teacher_by_task.get(task, self.teacher))

    def check(self, run: Any, where: str) -> None:
        """Refuse a missing teacher, teachers of unknown tasks, and settings that wait for a missing reward."""
        require(self.teacher != "", f"{where}teacher is empty: give a model, or the run that makes it")
        self._check_context(where)
        self._check_texts(run, where)
        labels = [task.label for task in tasks_in(run.task)]
        for number, entry in enumerate(self.by_task):
            field = f"{where}by_task[{number}]"
            require(bool(entry.teacher), f"{field}.teacher is empty: give a model, or leave it out")
            require(entry.task in labels, f"{field}.task {entry.task!r} is no task of the run: {', '.join(labels)}")
        twice = [entry.task for entry in self.by_task]
        require(len(set(twice)) == len(twice), f"{where}by_task has two teachers of one task: leave one of them out")
        if not without_rewards(run):
            return
        for field, is_set, remedy in (
            ("recipe.filter_groups", run.recipe.filter_groups, "False"),
            ("recipe.critic", run.recipe.critic, "None, with another estimator"),
            ("scoring.constraints", run.scoring.constraints, "()"),
            ("scoring.gate", run.scoring.gate, "None"),
        ):
            require(
                not is_set,
                f"{field} reads rewards, and scoring.rewards is empty, with a teacher alone: set {field} {remedy}, or "
                "give a reward",
            )

    def _check_context(self, where: str) -> None:
        """Refuse a policy that would teach itself what it knows, and a context where none could be read."""
        require(
            self.teacher is not None or self.context is not None,
            f"{where}teacher None is the policy itself, which learns nothing from what it knows: give a model, or "
            f"{where}context",
        )
        require(
            self.teacher is None or self.own == "policy",
            f"{where}own {self.own} is of a policy that teaches itself, and {where}teacher is {self.teacher}: leave it "
            "out",
        )
        if self.context is None:
            return
        require(
            isinstance(self.divergence, SampledKL) or self.top_k > 0,
            f"{where}context is read in rows of its own, and JensenShannon over all tokens has the policy's: set "
            f"{where}divergence.top_k 100, or leave it out",
        )
        require(self.texts is None, f"{where}texts have no facts for {where}context: leave one of them out")

    def _check_texts(self, run: Any, where: str) -> None:
        """Refuse a share of texts without texts, and texts that nothing would learn from."""
        if self.texts is None:
            require(
                self.lmbda == 1,
                f"{where}lmbda {self.lmbda:g} leaves the others of its rows empty: set {where}texts, or it to 1",
            )
            return
        check_texts(self.texts)
        completions = run.rollout.prompts * run.rollout.group
        for fine, reason, remedy in (
            (
                not isinstance(self.divergence, SampledKL),
                "are sampled by no policy, and SampledKL values sampled tokens",
                f"set {where}divergence forward_kl, or another over the vocabulary",
            ),
            (
                self.rows_of(completions) > 0,
                f"have no row among {completions} completions at lmbda {self.lmbda:g}",
                f"lower {where}lmbda",
            ),
            (
                run.rollout.collect.ptx is None,
                "and rollout.collect.ptx would both be given texts",
                "set rollout.collect.ptx None",
            ),
            (
                not isinstance(self.texts.source, Collected),
                "are collected by no step",
                "write them with jaxrl-llm collect, and give the table",
            ),
        ):
            require(fine, f"{where}texts {reason}: {remedy}, or leave them out")
        if self.lmbda > 0:
            return
        for field, is_set, remedy in (
            ("scoring.rewards", not without_rewards(run), "()"),
            ("recipe.algorithm.kl_coef", run.recipe.algorithm.needs_reference, "0"),
            ("recipe.algorithm.entropy_coef", run.recipe.algorithm.entropy_coef or run.recipe.of_entropy, "0"),
        ):
            require(
                not is_set,
                f"{where}lmbda 0 samples nothing that {field} could be about: set {field} {remedy}, or {where}lmbda "
                "above 0",
            )


def without_rewards(run: Any) -> bool:
    """Whether nothing but a teacher values completions: no reward, and no environment that gives one."""
    return not run.scoring.rewards and not any(task.plays for task in tasks_in(run.task))


def samples_groups(run: Any) -> bool:
    """Whether the policy samples what it learns from: all runs but those that a teacher teaches by texts alone."""
    return run.scoring.distillation is None or run.scoring.distillation.lmbda > 0
