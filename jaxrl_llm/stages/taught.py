"""What reward models were taught, and whether what reads them asks for that."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.architecture import attributes_of
from jaxrl_llm.models.hf_config import OURS, gives_scores
from jaxrl_llm.rewards.models import ModelReward, StepReward
from jaxrl_llm.tasks import Pairs, Prompts, Steps
from jaxrl_llm.tasks.endings import closing_of
from jaxrl_llm.tasks.template import template_fingerprint
from jaxrl_llm.trained import find_run


@dataclasses.dataclass(frozen=True)
class Taught:
    """What a reward model was taught. None is what nothing says.

    Attributes:
      kind: "ranking", to score whole answers, or "steps".
      separator: ends a step; None for rankings.
      template: name of the chat template that its data were written with; "own" for Jinja text.
      fingerprint: ``tasks.template.template_fingerprint`` of that.
      score_at: as that of ``RewardModel``; None for steps.
    """

    kind: Literal["ranking", "steps"] | None = None
    separator: str | None = None
    template: str | None = None
    fingerprint: str | None = None
    score_at: Literal["template", "stop"] | None = None

    def to_json(self) -> dict[str, str]:
        """What ``config.json`` of a directory holds of it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def taught_by(run: configs.RewardModel, tokenizer: Any = None) -> Taught:
    """What a run teaches; without its tokenizer all but the fingerprint."""
    data = run.data
    if not isinstance(data, Pairs | Steps):  # of a class that is not there any more
        return Taught(score_at=run.score_at or "template")
    template = configs.wording(run).template
    return Taught(
        kind="ranking" if isinstance(data, Pairs) else "steps",
        separator=data.separator if isinstance(data, Steps) else None,
        template=template if template in ("tokenizer", "chatml", "plain") else "own",
        fingerprint=None if tokenizer is None else template_fingerprint(template, tokenizer),
        score_at=None if isinstance(data, Steps) else run.score_at or "template",
    )


def taught(name: str, tokenizer: Any = None) -> Taught | None:
    """What a reward model was taught, by its run or its directory; None for a model that gives no scores.

    A directory that does not say where scores are read is read as it was made: by transformers at the end of the
    template, by an older version of this package at the token that ends an answer.

    Args:
      name: ``RUN[@STEP]``, or whatever ``load_pretrained`` knows.
      tokenizer: the model's; None where the template does not matter.

    Raises:
      InputError: there is nothing of this name, or its config.json cannot be obeyed.
    """
    trained = find_run(name)
    if trained is not None:
        return taught_by(trained.run, tokenizer) if isinstance(trained.run, configs.RewardModel) else None
    attributes = attributes_of(name)
    if not gives_scores(attributes):
        return None
    if OURS not in attributes:
        return Taught(score_at="template" if "transformers_version" in attributes else "stop")
    said = attributes[OURS]
    known = {"kind": ("ranking", "steps"), "score_at": ("template", "stop", None)}
    for field, values in known.items():
        found = said.get(field) if isinstance(said, dict) else None
        words = ", ".join(value for value in values if value)
        require(
            found in values,
            f"config.json of {name} has {OURS}.{field} {found!r}, and this version knows {words}: export the model "
            "again with this version",
        )
    fields = [field.name for field in dataclasses.fields(Taught)]
    return Taught(**{field: said[field] for field in fields if field in said})


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads a reward model.

    Attributes:
      field: stands before the model's name in messages.
      kind: what it takes the model for; None for either.
      remedy: what is better where the model is of the other kind.
      separator: ends a step; None where it takes the model's own.
    """

    field: str
    kind: Literal["ranking", "steps"] | None = None
    remedy: str = ""
    separator: str | None = None

    def check(self, name: str) -> None:
        """Refuse a model that was taught something else; what it does not say is not asked.

        Raises:
          InputError: it was taught something else, or is not there.
        """
        try:
            found = taught(name)
        except InputError as error:
            raise InputError(f"{self.field.removesuffix(':')}: {error}") from None
        if found is None or found.kind is None:
            return
        what = "steps" if found.kind == "steps" else "whole answers"
        require(self.kind in (None, found.kind), f"{self.field} {name} learned to score {what}: {self.remedy}")
        require(
            found.separator is None or self.separator in (None, found.separator),
            f"{self.field} {name} learned steps that end with {found.separator!r}, and here they end with "
            f"{self.separator!r}: set separator to {found.separator!r}, or give another model",
        )

    def untold(self, name: str) -> list[str]:
        """A line for people where a model does not say what it was taught: what it is read as."""
        found = taught(name)
        if found is None or found.kind is not None:
            return []
        ends = "the token that ends it" if found.score_at == "stop" else "the last token that the chat template writes"
        read_as = {
            "ranking": f"a score of the whole answer, at {ends}",
            "steps": f"scores of steps that end with {self.separator or DEFAULT_SEPARATOR!r}",
            None: "values of the policy's states",
        }
        return [f"{self.field} {name} does not say what it was taught; it is read as {read_as[self.kind]}"]


DEFAULT_SEPARATOR = "\n"
"""Ends a step where neither a model nor what reads it says what does."""


def readers(run: configs.Run) -> Iterator[tuple[Reader, str]]:
    """All in a run that scores with reward models, each with the name of one: rewards, constraints, a gate, the judge
    of its evaluations."""
    for base in configs.bases(run):
        field = f"reward {getattr(base, 'name', '')}:"
        if isinstance(base, ModelReward):
            reader = Reader(field, "ranking", "take StepReward for it, or give a model of whole answers")
            yield from ((reader, path) for path in base.paths)
        elif isinstance(base, StepReward):
            remedy = "take ModelReward for it, or give a process reward model"
            yield Reader(field, "steps", remedy, base.separator), base.path


def check_readers(run: configs.Run) -> None:
    """Refuse reward models that were taught something else than what the run reads in them, before they are loaded.

    Raises:
      InputError: names the model and the remedy.
    """
    for reader, name in readers(run):
        reader.check(name)


def untold(run: configs.Run) -> list[str]:
    """Lines for people: what those reward models are read as that do not say what they were taught; also the one that a
    critic begins as."""
    critic = run.recipe.critic
    begins = [] if critic is None or critic.model is None else [(Reader("recipe.critic.model"), critic.model)]
    return list(dict.fromkeys(line for reader, name in (*readers(run), *begins) for line in reader.untold(name)))


def check_template(found: Taught | None, name: str, prompts: Mapping[str, Prompts], tokenizer: Any) -> None:
    """Refuse a reward model that was taught with chats that are written in another way than those of the tasks.

    Args:
      found: what it was taught.
      name: of the model, with what names it.
      prompts: of each task, by its label.
      tokenizer: the policy's.

    Raises:
      InputError: names the task and the remedy.
    """
    if found is None or found.fingerprint is None:
        return
    for label, known in prompts.items():
        template = known.task(label).template
        require(
            template_fingerprint(template, tokenizer) == found.fingerprint,
            f"{name} learned from chats in the template {found.template}, and task {label} writes others (template "
            f"{template[:40]!r}): give both the same, or take a reward model that was trained with this one",
        )


def closings(found: Taught | None, prompts: Mapping[str, Prompts], tokenizer: Any) -> dict[str, list[int] | None]:
    """What ends a completion of each task where a reward model reads its score, by the tasks' labels; None where that
    is the completion's own end. See ``tasks.endings.closed``."""
    if found is None or found.score_at != "template":
        return {}
    return {label: closing_of(known.task(label), tokenizer) for label, known in prompts.items()}
