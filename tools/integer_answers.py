"""Rewrite problems so that each answer is an integer, as DAPO's data does (arXiv 2503.14476, appendix).

    python tools/integer_answers.py problems.jsonl [--out integers.jsonl] [--keep]

A row whose answer is no integer gets a sentence after its question that asks for one, and that integer as its answer:
m/n becomes m + n, a sqrt(b) a + b, and so on (``integer_templates.TEMPLATES``). Rows that are right as they are stay.
What no template has is left out, or kept as it was. Beside the new file lies ``*.changes.jsonl``: each row that was
rewritten, with its old and new answer, template and sentence, and each that was not, with the reason.

For ``Task(Table("integers.jsonl", "question"), verifier="integer")``.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import tyro
from integer_templates import Unsuitable, rewritten

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.paths import check_file, new_file, writable
from jaxrl_llm.tasks import Table, extract, integer

QUESTIONS = ("question", "prompt", "problem")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is rewritten.

    Attributes:
      file: of the problems, .jsonl: one JSON object a line.
      out: of the new ones; None means integer.jsonl for .jsonl in the same place.
      prompt_field: holds text, or chat messages; a dot reaches into a nested record. None means question, prompt or
        problem.
      answer_field: holds text or a number.
      answer_extractor: cuts the answer out of a longer solution; the names are those of Task's extractor.
      id_field: names rows in the list of changes; without it they are named by their line.
      keep: rows that no template has are kept as they were.
    """

    file: Annotated[Path | None, tyro.conf.Positional] = None
    out: Path | None = None
    prompt_field: str | None = None
    answer_field: str = "answer"
    answer_extractor: str = "whole"
    id_field: str = "id"
    keep: bool = False


def found_in(row: Row, field: str) -> Any:
    """What stands in a field, None where nothing does; a dot reaches into a nested record."""
    value: Any = row
    for part in [field] if field in row else field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def replaced(row: Row, field: str, value: Any) -> Row:
    """The row with another value in a field that it has."""
    if field in row:
        return row | {field: value}
    first, _, rest = field.partition(".")
    return row | {first: replaced(row[first], rest, value)}


def asked(prompt: Any, sentence: str) -> Any:
    """The prompt with a sentence after its text, or after that of the last message of the user.

    Raises:
      Unsuitable: it is neither.
    """
    if isinstance(prompt, str):
        return f"{prompt.rstrip()} {sentence}"
    turns = prompt if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt) else []
    asking = [
        at for at, turn in enumerate(turns) if turn.get("role") == "user" and isinstance(turn.get("content"), str)
    ]
    if not asking:
        raise Unsuitable("the prompt is neither text nor a chat in which a user asks")
    last = turns[asking[-1]]
    return [*turns[: asking[-1]], last | {"content": asked(last["content"], sentence)}, *turns[asking[-1] + 1 :]]


def treated(row: Row, prompt_field: str, options: Options) -> tuple[Row, Row | None]:
    """The new row, and what has changed; None where nothing has.

    Raises:
      Unsuitable: it cannot be rewritten.
    """
    given = found_in(row, options.answer_field)
    if isinstance(given, bool) or not isinstance(given, str | int | float) or not str(given).strip():
        raise Unsuitable(f"the field {options.answer_field} holds no answer, but {given!r:.40}")
    answer = extract(str(given), options.answer_extractor)
    if answer is None:
        raise Unsuitable(f"{options.answer_extractor} finds no answer")
    if integer(answer) is not None:
        kept = given if options.answer_extractor == "whole" else answer
        return replaced(row, options.answer_field, kept), None
    new = rewritten(answer)
    prompt = asked(found_in(row, prompt_field), new.sentence)
    change = {"template": new.template, "old": answer, "new": str(new.answer), "sentence": new.sentence}
    return replaced(replaced(row, options.answer_field, str(new.answer)), prompt_field, prompt), change


def places(options: Options) -> tuple[Path, Path]:
    """The files that are read and written.

    Raises:
      InputError: one is missing, or no .jsonl file, or cannot be written.
    """
    path = options.file
    require(path is not None, "no file is given: python tools/integer_answers.py FILE")
    out = options.out or path.with_suffix(".integer.jsonl")
    for place, flag in ((path, "FILE"), (out, "--out")):
        require(place.suffix == ".jsonl", f"{flag} {place} is no .jsonl file: write one JSON object on each line")
    require(out.absolute() != path.absolute(), f"--out {out} is the file itself: give another")
    check_file(out, "--out")
    return path, out


def prompt_field_of(rows: list[tuple[str, Any]], options: Options) -> str:
    """Where the questions stand.

    Raises:
      InputError: a row is no object, or the first has no question or no answer.
    """
    for where, row in rows:
        require(isinstance(row, dict), f"{where} is a {type(row).__name__}; a row is an object with fields")
    where, first = rows[0]
    names = QUESTIONS if options.prompt_field is None else (options.prompt_field,)
    for wanted, flag in ((names, "prompt_field"), ((options.answer_field,), "answer_field")):
        there = any(found_in(first, name) is not None for name in wanted)
        has = ", ".join(first) or "nothing"
        require(there, f"{where} has no {' or '.join(wanted)} (it has {has}): set --{flag}")
    return next(name for name in names if found_in(first, name) is not None)


def outcome(row: Row, prompt_field: str, options: Options) -> tuple[str, Row | None, Row | None]:
    """What became of a row, the new one, and what is told of it; None for nothing."""
    try:
        after, change = treated(row, prompt_field, options)
        return "rewritten" if change else "as they were", after, change
    except Unsuitable as reason:
        told = {"old": str(found_in(row, options.answer_field)), "reason": str(reason)}
        return ("kept", row, told) if options.keep else ("left out", None, told)


def rewrite(options: Options) -> Counter[str]:
    """Writes the new file and the list of changes; counts rows by what became of them.

    Raises:
      InputError: a file cannot be read or written, or its rows lack the fields.
    """
    path, out = places(options)
    rows = list(Table(str(path)).read())
    require(bool(rows), f"{path} has no rows: give one with problems")
    prompt_field = prompt_field_of(rows, options)
    counts: Counter[str] = Counter()
    changes = out.with_suffix(".changes.jsonl")
    with (
        writable(out, "--out"),
        new_file(out) as new,
        new_file(changes) as listed,
        new.open("w", encoding="utf-8") as kept,
        listed.open("w", encoding="utf-8") as report,
    ):
        for where, row in rows:
            status, after, told = outcome(row, prompt_field, options)
            counts[status] += 1
            if after is not None:
                kept.write(json.dumps(after, ensure_ascii=False) + "\n")
            if told is not None:
                named = {"row": where, "id": row.get(options.id_field, where), "status": status}
                report.write(json.dumps(named | told, ensure_ascii=False) + "\n")
    print(f"{out}: {', '.join(f'{count} {status}' for status, count in counts.items())} (see {changes.name})")
    return counts


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 2 for wrong use."""
    options = tyro.cli(Options, args=arguments, description=__doc__, use_underscores=True)
    try:
        rewrite(options)
    except InputError as error:
        print(f"integer_answers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
