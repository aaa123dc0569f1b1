"""The data of the supervised stages: texts to learn, preferences, steps with labels; loaded as token ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from jaxrl_llm.tasks.learned import Learned, Ranked, Stepped, Text
from jaxrl_llm.tasks.sources import HubDataset, Rows, Table
from jaxrl_llm.tasks.turns import Writer

Row = TypeVar("Row", bound=Learned, covariant=True)


class Data(Protocol[Row]):
    """What ``load_texts`` loads: Texts, Pairs or Steps."""

    source: Any
    template: str
    system: str | None
    suffix: str
    holdout: float
    date: str | None

    @property
    def label(self) -> str:
        """Names it in metrics."""

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Row:
        """One row as token ids."""


@dataclasses.dataclass(frozen=True)
class _Data:
    """What all data of the supervised stages have.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; a prompt is written as that of a Task with the same.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
    """

    source: Table | HubDataset | Rows | Any  # Any: flags leave a class of yours as it is
    template: str = "tokenizer"
    system: str | None = None
    suffix: str = ""
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.source, "read") and not hasattr(self.source, "problems"):
            object.__setattr__(self, "source", Rows(self.source))

    @property
    def label(self) -> str:
        """Names it in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)


@dataclasses.dataclass(frozen=True)
class Texts(_Data):
    """Texts to learn by heart. A row has ``text``, or ``prompt`` and ``completion``, or ``messages``.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; a prompt is written as that of a Task with the same.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      learn: ``completion``, what the assistant says, all of its turns; or ``all``, every token but the first. A row
        with ``text`` is learned as a whole.
    """

    learn: Literal["completion", "all"] = "completion"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Text:
        """One row as token ids."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Pairs(_Data):
    """Preferences. A row has ``prompt``, ``chosen`` and ``rejected``; or only the last two, as chats that share their
    beginning; or ``prompt`` and ``completions``, the best first. It may have a ``margin``.

    Attributes:
      source, template, system, suffix, holdout, name, date: as in Texts.
    """

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Ranked:
        """One row as token ids."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Steps(_Data):
    """Solutions whose steps are labelled. A row has ``prompt``, ``completions`` (the steps) and ``labels``.

    Attributes:
      source, template, system, suffix, holdout, name, date: as in Texts.
      separator: stands between two steps, and belongs to the first.
    """

    separator: str = "\n"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Stepped:
        """One row as token ids."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LoadedTexts(Generic[Row]):
    """The rows: none twice, and no prompt in both parts.

    Attributes:
      train: in the source's order.
      held_out: in the order of their prompts' hashes, so that the first n are a fair sample.
      notes: a line for each thing that happened to them, with counts.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    notes: tuple[str, ...]


def load_texts(data: Data[Row], tokenizer: Any, stop_ids: Sequence[int]) -> LoadedTexts[Row]:
    """Reads the rows, merges equal ones, then splits by a hash of the prompt: the same on every machine.

    Args:
      data: Texts, Pairs or Steps: what is read, and how it is written.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end, ``ModelConfig.tokens.eos``.

    Raises:
      InputError: wrong settings, a source that cannot be read, a row that cannot be used (with file and line), or
        nothing left to train on.
    """
    raise NotImplementedError
