"""Data of the supervised stages: texts to learn, preferences, completions or steps with labels. Formats of the rows of
the supervised stages, after TRL's data sets: their columns, and the values in them. The caller adds the row's place to
the errors raised here.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from jaxrl_llm.codec import digest
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.system.setting import Range, check_fields
from jaxrl_llm.tasks.chats import ChatEncoder
from jaxrl_llm.tasks.messages import (
    CALLS,
    OPTIONS,
    TOOLS,
    UNREAD,
    WEIGHT,
    chat_of,
    common_prefix,
    number_in,
    options_of,
    plain_text,
)
from jaxrl_llm.tasks.prompts import content, prompt_key
from jaxrl_llm.tasks.tables import BadRow, clean_row, is_empty, short_repr
from jaxrl_llm.tasks.task import (
    HubDataset,
    Loaded,
    Rows,
    Table,
    Task,
    check,
    check_split,
    check_template_name,
    held_out_keys,
    nearly_equal,
)
from jaxrl_llm.types import Message


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to learn by heart. ``id``: made from the prompt, as a Problem's is; rows of one prompt share it.
    ``prompt``: int32[p], p >= 1, the tokens before the first one that may be learned. ``tokens``: int32[t], those after
    it, with the one that ends the text. ``mask``: bool[t], True where a token is learned. ``where``: place of the row,
    such as ``rows.jsonl:3``.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the text after it."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Text | None":
        """Return the example cut to its first ``most`` tokens; None if none of these is learned."""
        room = max(most - len(self.prompt), 0)
        mask = self.mask[:room]
        return dataclasses.replace(self, tokens=self.tokens[:room], mask=mask) if mask.any() else None


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Completions of one prompt, each better than those after it; two make a preference. ``id``, ``prompt``, ``where``:
    as in Text. ``completions``: int32[t] each, with the token that ends it; at least two, no two equal. ``margin``:
    amount by which the better should win, from the row; 0 if it has none.
    """

    id: str
    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    margin: float
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the longest completion."""
        return len(self.prompt) + max(len(tokens) for tokens in self.completions)

    def cut(self, most: int) -> "Ranked | None":
        """Return the example, each completion cut to ``most`` tokens with its prompt; None if one is empty or two
        equal.
        """
        room = max(most - len(self.prompt), 0)
        parts = tuple(tokens[:room] for tokens in self.completions)
        same = len({part.tobytes() for part in parts}) < len(parts)
        return None if same or not room else dataclasses.replace(self, completions=parts)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A completion that is ``good`` or bad by itself. ``id``, ``prompt``, ``where``: as in Text. ``tokens``: int32[t],
    with the token that ends it.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    good: bool
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the completion."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Judged | None":
        """Return the example cut to its first ``most`` tokens; None if none of the completion is left."""
        room = most - len(self.prompt)
        return dataclasses.replace(self, tokens=self.tokens[:room]) if room > 0 else None


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A completion in steps, with a label of each. ``id``, ``prompt``, ``where``: as in Text. ``tokens``: int32[t], the
    steps, each but the last with its separator, and the token that ends the text. ``ends``: int32[k], rising, the index
    in ``tokens`` of each step's last token, its separator included. ``labels``: float32[k], in [0, 1]; 1 is a right
    step.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray
    labels: np.ndarray
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the steps."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Stepped | None":
        """Return the example cut to the steps that end within its first ``most`` tokens; None without any."""
        count = int(np.sum(self.ends < most - len(self.prompt)))
        if not count:
            return None
        ends = self.ends[:count]
        return dataclasses.replace(self, tokens=self.tokens[: ends[-1] + 1], ends=ends, labels=self.labels[:count])


Example = Text | Ranked | Judged | Stepped


def longest(rows: Iterable[Example]) -> tuple[int, str]:
    """Return the number of tokens of the longest row, and its place; 0 and an empty text without rows."""
    return max(((row.length, row.where) for row in rows), key=lambda pair: pair[0], default=(0, ""))


class RowFormat(NamedTuple):
    """Columns of the rows of a ``kind`` of data. ``sets``: a row has at least one of these sets of columns, and the
    first that it has is read. ``beside``: further columns, read if a row has them.
    """

    kind: str
    sets: tuple[tuple[str, ...], ...]
    beside: tuple[str, ...]


CUT_OFF, END_CUT_OFF = "rejected_cut_off", "completion_cut_off"
"""Columns of pairs and of Unpaired: true if the (worse) completion was truncated, and so has no end of its turn."""
LABEL = "label"
"""Column of unpaired preferences and of texts, as in TRL: true if the completion is a good one."""

TEXTS = RowFormat("Texts", (("messages",), ("prompt", "completion"), ("text",)), (LABEL, OPTIONS, TOOLS))
PAIRS = RowFormat(
    "Pairs",
    (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("prompt", "completions")),
    ("margin", CUT_OFF, OPTIONS, TOOLS),
)
UNPAIRED = RowFormat("Unpaired", (("prompt", "completion", LABEL),), (END_CUT_OFF, OPTIONS, TOOLS))
STEPS = RowFormat("Steps", (("prompt", "completions", "labels"),), (OPTIONS, TOOLS))

ELSEWHERE = {
    "chosen": "Pairs does",
    "rejected": "Pairs does",
    "margin": "Pairs does",
    CUT_OFF: "Pairs does",
    "completions": "Pairs does, as a ranking, and Steps, with labels",
    "labels": "Steps does, for a process reward model",
    END_CUT_OFF: "Unpaired does",
    LABEL: "Unpaired does; or make Pairs of the good and the bad completions of a prompt",
} | dict.fromkeys(UNREAD, "models here read text alone")
"""Columns that change the lesson of a row, so that no kind of data ignores one silently: the kind that reads each, or
the reason why none does.
"""


def columns_of(row: dict[str, Any], form: RowFormat) -> tuple[str, ...]:
    """Return the first set of columns that a row has; a column that holds None counts as absent."""
    has = [name for name, value in row.items() if value is not None]
    reads = {*form.beside, *itertools.chain(*form.sets)}
    for name in has:
        if name in ELSEWHERE and name not in reads and not is_empty(row[name]):
            raise InputError(
                f"the row has {name}, which {form.kind} does not read ({ELSEWHERE[name]}); leave the column out"
            )
    for columns in form.sets:
        if all(name in has for name in columns):
            return columns
    sets = "; or ".join(", ".join(columns) for columns in form.sets)
    raise InputError(f"the row has the columns {', '.join(has) or 'none'}; a row has {sets}")


def flag_of(row: dict[str, Any], column: str) -> bool | None:
    """Return whether a column is true; None if the row lacks it."""
    value = row.get(column)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{column} is {short_repr(value)}; it must be true or false, or leave the column out")


def prompt_messages(value: Any) -> list[Message]:
    """Convert a prompt to chat messages; a text becomes one of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": plain_text(value, "prompt")}]
    chat = chat_of(value, "prompt")
    require(any(message["role"] == "user" for message in chat), "prompt has no message of the user; add one")
    return chat


def answer_messages(value: Any, column: str) -> list[Message]:
    """Convert an answer to messages that begin and end with the assistant's; a text becomes one of them."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": plain_text(value, column)}]
    chat = chat_of(value, column)
    if chat[0]["role"] != "assistant":
        raise InputError(f"{column} begins with a message of the {chat[0]['role']}; it is the assistant's")
    return _check_chat(chat, column)


def split_chat(chat: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split a chat into its prompt and the rest, from the assistant's first message after one of the user on."""
    _check_chat(chat[-1:], "messages")
    user_turns = [at for at, message in enumerate(chat) if message["role"] == "user"]
    require(bool(user_turns), "messages has no message of the user; add one")
    first = next(at for at in range(user_turns[0], len(chat)) if chat[at]["role"] == "assistant")
    return chat[:first], _check_chat(chat[first:], "messages")


def ranking_of(row: dict[str, Any], columns: tuple[str, ...]) -> tuple[list[Message], list[Message], tuple[str, ...]]:
    """Return the prompt, the assistant's message in each completion, best first, and the names of the completions."""
    if "completions" in columns:
        sides = row["completions"]
        if not isinstance(sides, list | tuple) or len(sides) < 2:
            raise InputError("completions is not a list of two or more, the best first")
        names = tuple(f"completions[{index}]" for index in range(len(sides)))
    else:
        sides, names = (row["chosen"], row["rejected"]), ("chosen", "rejected")
    if "prompt" in columns:
        prompt = prompt_messages(row["prompt"])
        rests = [_completion_message(side, prompt, name) for side, name in zip(sides, names, strict=True)]
        return prompt, rests, names
    if any(isinstance(side, str) for side in sides):
        raise InputError("chosen and rejected are text, and the row has no prompt; give it one, or chats")
    chats = [chat_of(side, name) for side, name in zip(sides, names, strict=True)]
    begins = common_prefix(*chats)
    if not begins or len(begins) == len(chats[0]) == len(chats[1]):
        raise InputError(f"chosen and rejected {'are equal' if begins else 'share no prompt'}; correct the row")
    prompt = prompt_messages(begins)
    return prompt, [_completion_message(chat, prompt, name) for chat, name in zip(chats, names, strict=True)], names


def labelled_steps(row: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Return the steps of a solution, and the label of each, in [0, 1]."""
    steps, labels = row["completions"], row["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list | tuple) or not value:
            raise InputError(f"{name} is not a list with entries; give one for each step")
    if len(steps) != len(labels):
        raise InputError(f"the row has {len(steps)} steps in completions and {len(labels)} labels; give each step one")
    texts = [plain_text(step, f"completions[{index}]") for index, step in enumerate(steps)]
    values = []
    for index, label in enumerate(labels):
        value = float(label) if isinstance(label, bool) else number_in(label)
        if value is None or not 0 <= value <= 1:
            raise InputError(f"labels[{index}] is {short_repr(label)}; a label is true, false, or from 0 to 1")
        values.append(value)
    return texts, values


def _completion_message(side: Any, prompt: list[Message], name: str) -> Message:
    """Return the assistant's message in a completion: text, its message, or a chat that repeats the prompt."""
    if isinstance(side, str):
        return {"role": "assistant", "content": plain_text(side, name)}
    chat = chat_of(side, name)
    rest = chat[len(prompt) :] if chat[: len(prompt)] == prompt else chat
    if [message["role"] for message in rest] != ["assistant"]:
        raise InputError(
            f"{name} has {len(rest)} messages after the prompt ({', '.join(m['role'] for m in rest[:4])}); "
            "it is one of the assistant"
        )
    if WEIGHT in rest[0]:
        raise InputError(f"{name} has {WEIGHT} 0, and both sides of a comparison are learned; leave the row out")
    return _check_chat(rest, name)[0]


def _check_chat(chat: list[Message], column: str) -> list[Message]:
    """Check a chat and return it; a message of the assistant with calls may have no text."""
    if chat[-1]["role"] != "assistant":
        raise InputError(f"{column} ends with a message of the {chat[-1]['role']}; the assistant's is learned")
    for message in chat:
        if message["role"] == "assistant" and CALLS not in message:
            plain_text(message["content"], f"the assistant's message in {column}")
    return chat


Row = TypeVar("Row", bound=Example, covariant=True)


@dataclasses.dataclass(frozen=True)
class Data(Generic[Row]):
    """Base of the data of the supervised stages.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; prompts are written as those of a Task with equal settings.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong: handling of a row that is too long for the run: ``refuse``, ``drop``, or ``truncate`` it at its end.
      bad_rows: handling of a row that cannot be used: ``refuse`` or ``drop``.
    """

    source: Table | HubDataset | Rows | Any  # Any: flags leave a class of yours as it is
    template: str = "tokenizer"
    system: str | None = None
    suffix: str = ""
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None
    overlong: Literal["refuse", "drop", "truncate"] = dataclasses.field(default="refuse", kw_only=True)
    bad_rows: Literal["refuse", "drop"] = dataclasses.field(default="refuse", kw_only=True)

    def __post_init__(self) -> None:
        if not hasattr(self.source, "read") and not hasattr(self.source, "problems"):
            object.__setattr__(self, "source", Rows(self.source))

    @property
    def label(self) -> str:
        """Name of the data in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)

    def example(self, row: dict[str, Any], where: str, encoder: ChatEncoder) -> Row:
        """Encode one row as token ids."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Texts(Data[Text]):
    """Texts to learn by heart. A row has ``messages``, or ``prompt`` and ``completion``, or ``text``; if it has several
    of these, the first is read.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; prompts are written as those of a Task with equal settings.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong, bad_rows: handling of a row that is too long for the run, or that cannot be used.
      learn: ``completion``, the assistant's text in all its turns; ``all``, every token but the first; or ``trl``, the
        tokens that TRL's ``SFTTrainer`` learns from a row: no template wraps a ``prompt`` and ``completion`` that are
        text, all of ``messages`` is learned, and so is the template's text after the last turn. A row with ``text`` is
        learned as a whole.
    """

    learn: Literal["completion", "all", "trl"] = "completion"

    def example(self, row: dict[str, Any], where: str, encoder: ChatEncoder) -> Text:
        """Encode one row as token ids; see ``Data``."""
        columns = columns_of(row, TEXTS)
        if flag_of(row, LABEL) is False:
            raise InputError(f"{LABEL} is false, so the text is a bad one, and texts are learned; leave the row out")
        if columns == ("text",):
            text = plain_text(row["text"], "text")
            tokens = encoder.encode_text(text)
            key = prompt_key([{"role": "text", "content": text}])
            return Text(key[:16], tokens[:1], tokens[1:], np.ones(len(tokens) - 1, bool), where)
        if columns == ("messages",):
            prompt, rest = split_chat(chat_of(row["messages"], "messages"))
        else:
            prompt = prompt_messages(row["prompt"])
            rest = answer_messages(row["completion"], "completion")
        if self.learn != "completion" and any(WEIGHT in message for message in (*prompt, *rest)):
            raise InputError(f"a message has {WEIGHT} 0, and learn {self.learn!r} learns all: take learn 'completion'")
        if self.learn == "trl":
            plain = all(isinstance(row.get(name), str) for name in columns)
            tokens, begins = encoder.encode_as_trl(prompt, rest, plain)
            begins = 1 if columns == ("messages",) else max(begins, 1)
            prompt_tokens, tokens = tokens[:begins], tokens[begins:]
            mask = np.ones(len(tokens), bool)
        else:
            prompt_tokens, tokens, mask = encoder.encode_turns(prompt, rest)
        if self.learn == "all":
            tokens = np.concatenate([prompt_tokens[1:], tokens])
            prompt_tokens, mask = prompt_tokens[:1], np.ones(len(tokens), bool)
        if not mask.any():
            raise InputError(f"every message of the assistant has {WEIGHT} 0: nothing is learned; leave the row out")
        return Text(prompt_key(prompt)[:16], prompt_tokens, tokens, mask, where)


@dataclasses.dataclass(frozen=True)
class Pairs(Data[Ranked]):
    """Preferences. A row has ``prompt``, ``chosen`` and ``rejected``; or only the last two, as chats that share their
    beginning; or ``prompt`` and ``completions``, the best first. It may have a ``margin``, a number, and mark with
    ``rejected_cut_off`` that the rejected one was truncated and has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
    """

    def example(self, row: dict[str, Any], where: str, encoder: ChatEncoder) -> Ranked:
        """Encode one row as token ids; see ``Data``."""
        columns = columns_of(row, PAIRS)
        prompt, answers, names = ranking_of(row, columns)
        prefix, prompt_tokens = encoder.encode_prompt(prompt)
        tokens = tuple(encoder.encode_answer(prompt, prefix, answer) for answer in answers)
        if flag_of(row, CUT_OFF):
            tokens = (*tokens[:-1], tokens[-1][: len(tokens[-1]) - len(encoder.ending_ids)])
        for (name, first), (other_name, second) in itertools.combinations(zip(names, tokens, strict=True), 2):
            if np.array_equal(first, second):
                raise InputError(f"{name} and {other_name} are equal; leave the row out, it prefers nothing")
        column = row.get("margin")
        margin = 0.0 if column is None else number_in(column)
        if margin is None:
            raise InputError(f"margin is {short_repr(column)}; it must be a number")
        return Ranked(prompt_key(prompt)[:16], prompt_tokens, tokens, margin, where)


@dataclasses.dataclass(frozen=True)
class Unpaired(Data[Judged]):
    """Completions with labels. A row has ``prompt``, ``completion`` and ``label``, true or false; it may mark with
    ``completion_cut_off`` that the completion was truncated and has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
    """

    def example(self, row: dict[str, Any], where: str, encoder: ChatEncoder) -> Judged:
        """Encode one row as token ids; see ``Data``."""
        columns_of(row, UNPAIRED)
        prompt = prompt_messages(row["prompt"])
        prefix, prompt_tokens = encoder.encode_prompt(prompt)
        answer = answer_messages(row["completion"], "completion")
        if len(answer) > 1:
            raise InputError("completion has several messages, and one answer of the assistant is judged; give one")
        tokens = encoder.encode_answer(prompt, prefix, answer[0])
        if flag_of(row, END_CUT_OFF):
            tokens = tokens[: len(tokens) - len(encoder.ending_ids)]
        return Judged(prompt_key(prompt)[:16], prompt_tokens, tokens, bool(flag_of(row, LABEL)), where)


@dataclasses.dataclass(frozen=True)
class Steps(Data[Stepped]):
    """Solutions with labelled steps. A row has ``prompt``, ``completions`` (the steps) and ``labels``.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
      separator: text between two steps, counted with the first.
    """

    separator: str = "\n"

    def example(self, row: dict[str, Any], where: str, encoder: ChatEncoder) -> Stepped:
        """Encode one row as token ids; see ``Data``."""
        columns_of(row, STEPS)
        prompt = prompt_messages(row["prompt"])
        steps, labels = labelled_steps(row)
        prefix, prompt_tokens = encoder.encode_prompt(prompt)
        steps[0] = encoder.without_opening(prefix, steps[0], self.separator.join(steps))
        last = encoder.without_end(steps[-1])
        pieces = encoder.ids_after(prefix, *(step + self.separator for step in steps[:-1]), last)
        tokens = np.asarray([*itertools.chain(*pieces), *encoder.turn_end], np.int32)
        ends = np.cumsum([len(step) for step in pieces]).astype(np.int32) - np.int32(1)
        return Stepped(prompt_key(prompt)[:16], prompt_tokens, tokens, ends, np.asarray(labels, np.float32), where)


def split_steps(text: str, separator: str) -> list[str]:
    """Split the text at each separator; joined by it, the steps are the text again. No step is blank: a blank one joins
    the step before, or the first one. A blank text has no steps.

    >>> split_steps("a = 1\\n\\nb = 2", "\\n")
    ['a = 1\\n', 'b = 2']
    """
    steps: list[str] = []
    for piece in text.split(separator):
        if steps and (not piece.strip() or not steps[0].strip()):
            steps[-1] += separator + piece
        else:
            steps.append(piece)
    return steps if steps[0].strip() else []


def step_lengths(steps: Sequence[str], separator: str) -> list[int]:
    """Return, for each step, the length of the text up to its end, the separator after it included.

    >>> step_lengths(["a = 1\\n", "b = 2"], "\\n")
    [7, 12]
    """
    lengths = [len(separator.join(steps[:count])) for count in range(1, len(steps) + 1)]
    return [length + len(separator) for length in lengths[:-1]] + lengths[-1:]


RowKind = Literal["texts", "pairs", "unpaired", "steps"]
"""Kinds of rows that are made of collected answers: ``Texts``, ``Pairs``, ``Unpaired`` or ``Steps``."""
KINDS: dict[type, RowKind] = {Texts: "texts", Pairs: "pairs", Unpaired: "unpaired", Steps: "steps"}


@dataclasses.dataclass(frozen=True)
class Collected:
    """Answers of the run's own model, sampled before its first step and kept in the run's directory.

    As ``Texts`` they are right answers (rejection sampling), as ``Pairs`` a right one and a wrong one of one problem,
    as ``Unpaired`` right ones and wrong ones with their labels, as ``Steps`` answers with steps labelled by the share
    of continuations that reach the right result. Unfinished answers never count as right. An episode is right by the
    verifier; without one if its environment's reward is 1.

    Attributes:
      task: the problems, and their verifier; held-out problems are not asked. Its template, system
        message and suffix are those of the data.
      samples: K answers to each problem.
      temperature: of the sampling, above 0.
      top_p: keep the smallest set of most likely tokens that reaches this mass; 1 keeps all.
      limit: maximum number of problems asked; 0 for all.
      keep: of each problem's right answers the ``first``, the ``shortest``, or ``all`` that differ; of pairs, one with
        that answer, or as many as can be made without using an answer twice; of unpaired ones, likewise of the wrong.
      match_length: of pairs: pair answers of similar length, so that length is not a preference; if not, right and
        wrong ones in the order in which they were sampled.
      cut_off: of pairs and unpaired answers: whether truncated ones are among the worse. Their rows are marked
        (``rejected_cut_off``, ``completion_cut_off``), and their end is not learned.
      continuations: of steps: k, sampled from the end of each step but the last.
    """

    task: Task
    samples: int = 8
    temperature: Annotated[float, Range("(0, inf]", words="above 0, so that answers differ")] = 1.0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    limit: Annotated[int, Range("[0, inf]")] = 0
    keep: Literal["first", "shortest", "all"] = "first"
    match_length: bool = False
    cut_off: bool = False
    continuations: Annotated[int, Range("[1, inf]")] = 8

    @property
    def label(self) -> str:
        """Name of the data if it has no name of its own."""
        return self.task.label

    def read(self) -> Iterator[tuple[str, Any]]:
        """Refuse to read rows, since a model has to answer first. InputError: always."""
        raise InputError(f"the answers to {self.label} are collected by a run: train one, or use jaxrl-llm collect")


def load_texts(
    data: Data[Row],
    tokenizer: Any,
    stop_ids: Sequence[int],
    room: Callable[[Row], float] | None = None,
    closes: bool = False,
) -> Loaded[Row]:
    """Read the rows, merge equal ones, then split by a hash of the prompt; equal on every machine. InputError: settings
    are wrong, the source cannot be read, a row cannot be used and is not to be dropped (with file and line), or no row
    is left to train on.

    Args:
      data: Texts, Pairs or Steps.
      stop_ids: tokens at which the model's completions end, ``ModelConfig.tokens.eos``.
      room: most tokens of a row; longer ones are handled by ``data.overlong``, or left for the caller to refuse. None:
        no limit.
      closes: whether answers end as the chat template writes them, for models that score them; no policy learns that.
    """
    check_texts(data)
    bad: list[str] = []
    overlong: list[str] = []
    truncated: list[str] = []
    rows_by_key: dict[str, Any] = {}
    read = 0
    for example in _read_rows(data, tokenizer, stop_ids, closes, bad):
        read += 1
        fitted: Any = example
        most = math.inf if room is None else room(example)
        if example.length > most and data.overlong != "refuse":
            fitted = example.cut(int(most)) if data.overlong == "truncate" else None
            (overlong if fitted is None else truncated).append(f"{example.where}, {example.length} tokens")
        if fitted is not None:
            rows_by_key.setdefault(digest(content(fitted), 64), fitted)
    parts = {"bad dropped": bad, "overlong dropped": overlong, "truncated": truncated}
    counts = [f"{len(rows)} {what} (first: {rows[0]})" for what, rows in parts.items() if rows]
    left_out = f"of {read + len(bad)} rows {', '.join(counts)}" if counts else ""
    notes = [left_out] if left_out else []
    duplicates = read - len(overlong) - len(rows_by_key)
    if duplicates:
        notes.append(f"{duplicates} duplicates of a row merged, {len(rows_by_key)} distinct rows left")
    keys = set(held_out_keys({row.id for row in rows_by_key.values()}, data.holdout))
    train = tuple(row for row in rows_by_key.values() if row.id not in keys)
    held_out = tuple(sorted((row for row in rows_by_key.values() if row.id in keys), key=lambda row: row.id))
    if held_out:
        prompts = []
        for rows in (train, held_out):
            tokens = ([*row.prompt] if len(row.prompt) > 1 else [*row.prompt, *row.tokens] for row in rows)
            prompts.append([text_of(tokenizer, ids) for ids in tokens])
        notes += nearly_equal(*prompts)
    if not train:
        raise InputError(
            f"{data.label} has no row left to train on: {len(rows_by_key)} from the source, {len(held_out)} held out"
            f"{''.join('; ' + note for note in notes)}; give it more rows"
        )
    return Loaded(train, held_out, tuple(notes), left_out)


def _read_rows(data: Data[Row], tokenizer: Any, stop_ids: Sequence[int], closes: bool, bad: list[str]) -> Iterator[Row]:
    """Yield rows as token ids; if the data drops unusable rows, add the reasons to ``bad`` instead of raising."""
    encoder = functools.cache(lambda options: ChatEncoder(data, tokenizer, stop_ids, json.loads(options), closes))
    rows = itertools.starmap(clean_row, data.source.read())
    while True:
        try:
            where, row = next(rows)
            try:
                options = json.dumps(options_of(row))  # templates write schemas in their order
                yield data.example(row, where, encoder(options))
            except InputError as error:
                raise BadRow(f"{where}: {error}") from error
        except StopIteration:
            return
        except BadRow as error:
            if data.bad_rows == "refuse":
                raise
            bad.append(str(error))


def check_texts(data: Data[Any]) -> None:
    """Refuse data of a supervised stage that cannot work, before anything is loaded."""
    if not hasattr(data.source, "read"):
        raise InputError(
            f"a {type(data.source).__name__} makes problems, and {type(data).__name__} needs rows: give a Table, a "
            "HubDataset, rows in memory, or a dataclass with read()"
        )
    check_template_name(data.template)
    check_split(data.holdout, data.date)


def check_collected(source: Collected, kind: RowKind, where: str) -> None:
    """Refuse settings that cannot collect, before anything is loaded. ``where``: prefix of the names of the fields in
    messages, such as ``--``. InputError: names field, value and remedy.
    """
    check(source.task)
    check_fields(source, where)
    least = 2 if kind == "pairs" else 1
    require(source.samples >= least, f"{where}samples must be at least {least} to collect {kind}, got {source.samples}")
    task = source.task
    require(
        not task.plays or (kind == "texts" and task.template != "plain"),
        f"{where}task {task.label} has an environment or tools, and whole episodes are collected: as texts, with a "
        f"chat template (got {kind}, {where}task.template {task.template:.20})",
    )
    if task.verifier == "none" and task.environment is None:
        raise InputError(
            f"{where}task.verifier none leaves nothing to collect by: give the task its answers and a verifier"
        )
