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
from jaxrl_llm.runs import find_run
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.template import template_fingerprint


@dataclasses.dataclass(frozen=True)
class RewardFormat:
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


def format_of_run(run: configs.RewardModel, tokenizer: Any = None) -> RewardFormat:
    """Return the format that a run teaches; without its tokenizer, all but the fingerprint."""
    data = run.data
    if not isinstance(data, Pairs | Steps):  # of a class that is not there any more
        return RewardFormat(score_at=run.score_at)
    template = configs.wording(run).template
    return RewardFormat(
        kind="ranking" if isinstance(data, Pairs) else "steps",
        separator=data.separator if isinstance(data, Steps) else None,
        template=template if template in ("tokenizer", "chatml", "plain") else "own",
        fingerprint=None if tokenizer is None else template_fingerprint(template, tokenizer),
        score_at=None if isinstance(data, Steps) else run.score_at,
    )


def reward_format(name: str, tokenizer: Any = None) -> RewardFormat | None:
    """Return the training format of a reward model by its name, ``RUN[@STEP]`` or any that ``load_pretrained`` accepts;
    None for a model without scores. Without a record, scores are read at the end of the template, as transformers and
    TRL do. ``tokenizer``: the model's; None if the template does not matter.

    Raises:
      InputError: nothing has this name, or its config.json has unknown values.
    """
    trained = find_run(name)
    if trained is not None:
        return format_of_run(trained.run, tokenizer) if isinstance(trained.run, configs.RewardModel) else None
    attributes = hf_attributes(name)
    if not is_reward_model(attributes):
        return None
    if OUR_ATTRIBUTE not in attributes:
        return RewardFormat(score_at="template")
    attribute = attributes[OUR_ATTRIBUTE]
    allowed = {"kind": ("ranking", "steps"), "score_at": ("template", "stop", None)}
    for field, names in allowed.items():
        entry = attribute.get(field) if isinstance(attribute, dict) else None
        words = ", ".join(filter(None, names))
        require(
            entry in names,
            f"config.json of {name} has {OUR_ATTRIBUTE}.{field} {entry!r}, and this version knows {words}: export the "
            "model again with this version",
        )
    fields = [field.name for field in dataclasses.fields(RewardFormat)]
    return RewardFormat(**{field: attribute[field] for field in fields if field in attribute})


@dataclasses.dataclass(frozen=True)
class RewardModelUse:
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
        """Refuse (InputError) a missing model, or one with another training format, by the recorded fields."""
        with naming(self.field.removesuffix(":")):
            recorded = reward_format(name)
        if recorded is None or recorded.kind is None:
            return
        what = "steps" if recorded.kind == "steps" else "whole answers"
        require(self.kind in (None, recorded.kind), f"{self.field} {name} learned to score {what}: {self.remedy}")
        require(
            recorded.separator is None or self.separator in (None, recorded.separator),
            f"{self.field} {name} learned steps that end with {recorded.separator!r}, and here they end with "
            f"{self.separator!r}: set separator to {recorded.separator!r}, or give another model",
        )

    def untold(self, name: str) -> list[str]:
        """Return a line for people on how a model is read that does not record its training format."""
        recorded = reward_format(name)
        if recorded is None or recorded.kind is not None:
            return []
        read_as = {
            "ranking": "a score of the whole answer, at the last token that the chat template writes",
            "steps": f"scores of steps that end with {self.separator or DEFAULT_SEPARATOR!r}",
            None: "values of the policy's states",
        }
        return [f"{self.field} {name} does not say what it was taught; it is read as {read_as[self.kind]}"]


DEFAULT_SEPARATOR = "\n"
"""The end of a step if neither a model nor its use gives a separator."""


def reward_model_uses(run: configs.Run) -> Iterator[tuple[RewardModelUse, str]]:
    """Yield every use of a reward model in a run, as reward, constraint, gate or judge, with the model's name."""
    for base in configs.bases(run):
        field = f"reward {getattr(base, 'name', '')}:"
        if isinstance(base, ModelReward):
            use = RewardModelUse(field, "ranking", "take StepReward for it, or give a model of whole answers")
            yield from ((use, path) for path in base.paths)
        elif isinstance(base, StepReward):
            remedy = "take ModelReward for it, or give a process reward model"
            yield RewardModelUse(field, "steps", remedy, base.separator), base.path


def format_notes(run: configs.Run) -> list[str]:
    """Return lines for people on how models without a recorded training format are read, an initial critic too."""
    critic = run.recipe.critic
    begins = [] if critic is None or critic.model is None else [(RewardModelUse("recipe.critic.model"), critic.model)]
    return list(dict.fromkeys(line for use, name in (*reward_model_uses(run), *begins) for line in use.untold(name)))


def check_reward_template(
    recorded: RewardFormat | None, name: str, prompts: Mapping[str, Prompts], tokenizer: Any
) -> None:
    """Refuse (InputError) a reward model that was trained with another chat template than the tasks'. ``name``: of the
    model, with its setting; ``prompts``: by the task's label; ``tokenizer``: the policy's.
    """
    if recorded is None or recorded.fingerprint is None:
        return
    for label, task_prompts in prompts.items():
        template = task_prompts.task(label).template
        require(
            template_fingerprint(template, tokenizer) == recorded.fingerprint,
            f"{name} learned from chats in the template {recorded.template}, and task {label} writes others "
            f"(template {template[:40]!r}): give both the same, or take a reward model that was trained with this one",
        )
