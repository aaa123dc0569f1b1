"""The training format of reward models, and checks that their readers use the same format."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxrl_llm import config as configs
from jaxrl_llm.data import Pairs, Steps
from jaxrl_llm.errors import naming, require
from jaxrl_llm.models.hf import OUR_ATTRIBUTE, is_reward_model
from jaxrl_llm.models.pretrained import hf_attributes
from jaxrl_llm.rewards.functions import ModelReward, StepReward
from jaxrl_llm.runs.load import find_run
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.template import template_fingerprint


@dataclasses.dataclass(frozen=True)
class Taught:
    """The training format of a reward model; a field is None if it is not recorded.

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
        """Return the entries of ``config.json`` that record the format."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def taught_by(run: configs.RewardModel, tokenizer: Any = None) -> Taught:
    """Return the format that a run teaches; without its tokenizer, all but the fingerprint."""
    data = run.data
    if not isinstance(data, Pairs | Steps):  # of a class that is not there any more
        return Taught(score_at=run.score_at)
    template = configs.wording(run).template
    return Taught(
        kind="ranking" if isinstance(data, Pairs) else "steps",
        separator=data.separator if isinstance(data, Steps) else None,
        template=template if template in ("tokenizer", "chatml", "plain") else "own",
        fingerprint=None if tokenizer is None else template_fingerprint(template, tokenizer),
        score_at=None if isinstance(data, Steps) else run.score_at,
    )


def taught(name: str, tokenizer: Any = None) -> Taught | None:
    """Return the training format of a reward model, by its run or directory; None for a model without scores.

    A directory that does not record where scores are read is taken to read them at the end of the template, as
    transformers and TRL do.

    Args:
      name: ``RUN[@STEP]``, or any name that ``load_pretrained`` accepts.
      tokenizer: the model's; None if the template does not matter.

    Raises:
      InputError: nothing has this name, or its config.json has unknown values.
    """
    trained = find_run(name)
    if trained is not None:
        return taught_by(trained.run, tokenizer) if isinstance(trained.run, configs.RewardModel) else None
    attributes = hf_attributes(name)
    if not is_reward_model(attributes):
        return None
    if OUR_ATTRIBUTE not in attributes:
        return Taught(score_at="template")
    said = attributes[OUR_ATTRIBUTE]
    known = {"kind": ("ranking", "steps"), "score_at": ("template", "stop", None)}
    for field, values in known.items():
        found = said.get(field) if isinstance(said, dict) else None
        words = ", ".join(value for value in values if value)
        require(
            found in values,
            f"config.json of {name} has {OUR_ATTRIBUTE}.{field} {found!r}, and this version knows {words}: export the "
            "model again with this version",
        )
    fields = [field.name for field in dataclasses.fields(Taught)]
    return Taught(**{field: said[field] for field in fields if field in said})


@dataclasses.dataclass(frozen=True)
class Reader:
    """A setting that reads a reward model, with the format that it expects.

    Attributes:
      field: precedes the model's name in messages.
      kind: the expected kind of model; None for either.
      remedy: advice for a model of the other kind.
      separator: ends a step; None to use the model's own.
    """

    field: str
    kind: Literal["ranking", "steps"] | None = None
    remedy: str = ""
    separator: str | None = None

    def check(self, name: str) -> None:
        """Refuse a model with another training format; unrecorded fields are not compared.

        Raises:
          InputError: it was trained with another format, or does not exist.
        """
        with naming(self.field.removesuffix(":")):
            found = taught(name)
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
        """Return a line for people on how a model is read that does not record its training format."""
        found = taught(name)
        if found is None or found.kind is not None:
            return []
        read_as = {
            "ranking": "a score of the whole answer, at the last token that the chat template writes",
            "steps": f"scores of steps that end with {self.separator or DEFAULT_SEPARATOR!r}",
            None: "values of the policy's states",
        }
        return [f"{self.field} {name} does not say what it was taught; it is read as {read_as[self.kind]}"]


DEFAULT_SEPARATOR = "\n"
"""The end of a step if neither a model nor its reader gives a separator."""


def readers(run: configs.Run) -> Iterator[tuple[Reader, str]]:
    """Yield every use of a reward model in a run, with the model's name: rewards, constraints, a gate, the judge of
    evaluations.
    """
    for base in configs.bases(run):
        field = f"reward {getattr(base, 'name', '')}:"
        if isinstance(base, ModelReward):
            reader = Reader(field, "ranking", "take StepReward for it, or give a model of whole answers")
            yield from ((reader, path) for path in base.paths)
        elif isinstance(base, StepReward):
            remedy = "take ModelReward for it, or give a process reward model"
            yield Reader(field, "steps", remedy, base.separator), base.path


def untold(run: configs.Run) -> list[str]:
    """Return lines for people on how models without a recorded training format are read; includes a critic's initial
    model.
    """
    critic = run.recipe.critic
    begins = [] if critic is None or critic.model is None else [(Reader("recipe.critic.model"), critic.model)]
    return list(dict.fromkeys(line for reader, name in (*readers(run), *begins) for line in reader.untold(name)))


def check_template(found: Taught | None, name: str, prompts: Mapping[str, Prompts], tokenizer: Any) -> None:
    """Refuse a reward model that was trained with another chat template than those of the tasks.

    Args:
      found: its training format.
      name: of the model, with the setting that names it.
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
