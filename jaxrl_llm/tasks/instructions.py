"""Checks of instructions that need no model: those of IFEval about the form of a text.

Ids and arguments are those of IFEval's data (arXiv 2311.07911, table 1), and so are the units counted: parts of words
for keywords that must occur, whole words for forbidden ones, runs of letters and digits as words. Three things differ
from its published checker, which needs an English tokenizer, a language detector and regular expressions as keywords: a
keyword is matched as plain text; a text in capital or small letters may be in any language; a word in capital letters
ends where punctuation other than ``- ' . /`` begins.

Each check takes time linear in the text, since a model's completion may be long and odd.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError, did_you_mean

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Fields of a row: ids, and for each the arguments by name; an argument that is None is absent."""
ELSEWHERE = ("language:response_language", "length_constraints:number_sentences")
"""IFEval's other instructions, which are not checked here."""
KEEP = "jaxrl_llm.tasks.filters:checkable_instructions"
RELATIONS = ("at least", "less than")
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_WORD = re.compile(r"\w+")
_JOINED_WORD = re.compile(r"\w+(?:[-'\N{RIGHT SINGLE QUOTATION MARK}./]\w+)*")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE), "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE)}
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_ENDS_A_WORD = ".,?!'\""


class Argument(NamedTuple):
    """Requirement on an instruction's argument.

    Attributes:
      fits: whether a value meets it.
      name: describes it in errors.
    """

    fits: Callable[[Any], bool]
    name: str


class Check(NamedTuple):
    """Check of one kind of instruction.

    Attributes:
      follows: whether a text, its first argument, follows the instruction; the others are passed by name.
      arguments: requirements by name; all are needed.
    """

    follows: Callable[..., bool]
    arguments: Mapping[str, Argument]


def followed(text: str, fields: Mapping[str, Any]) -> list[bool]:
    """Return for each instruction of a row that ``check_instructions`` accepted whether the text follows it."""
    given = zip(fields[IDS], fields[ARGUMENTS], strict=True)
    return [CHECKS[name].follows(text, **_present(arguments)) for name, arguments in given]


def check_instructions(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a row with instructions that cannot be checked.

    Args:
      fields: of the row.
      where: place of the row; begins the message.

    Raises:
      InputError: the row has no instruction, an unknown one, or one with missing, surplus or wrong arguments.
    """
    names, arguments = fields.get(IDS), fields.get(ARGUMENTS)
    listed = isinstance(names, list | tuple) and names and isinstance(arguments, list | tuple)
    if not listed or len(names) != len(arguments):
        raise InputError(
            f"{where}: verifier instructions needs the fields {IDS}, a list of ids, and {ARGUMENTS}, a list with the "
            "arguments of each; complete the row, or take another verifier"
        )
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(name, str) or name not in CHECKS:
            raise InputError(f"{where}: {_unknown(name)}")
        if wrong := _wrong(name, given):
            raise InputError(f"{where}: instruction {name} {wrong}; mend the row")


def _unknown(name: Any) -> str:
    if name in ELSEWHERE:
        return (
            f"instruction {name} takes a model or a splitter of sentences, and is not checked here; leave such rows "
            f"out with keep={KEEP!r}"
        )
    hint = did_you_mean(str(name), CHECKS, f"choose of {', '.join(CHECKS)}")
    return f"instruction {name!r} is unknown; {hint}"


def _wrong(name: str, given: Any) -> str:
    """Describe the error in an instruction's arguments; empty if they are right."""
    if not (given is None or isinstance(given, Mapping)):
        return f"has {given!r} for arguments, which are an object with names"
    present, needed = _present(given), CHECKS[name].arguments
    for argument in present:
        if argument not in needed:
            hint = did_you_mean(argument, needed, f"it has {', '.join(needed) or 'none'}")
            return f"has no argument {argument!r}; {hint}"
    for argument, kind in needed.items():
        if argument not in present:
            return f"lacks the argument {argument}, {kind.name}"
        if not kind.fits(present[argument]):
            return f"has {argument} {present[argument]!r}, which is not {kind.name}"
    if present.get("nth_paragraph", 0) > present.get("num_paragraphs", 0):
        return f"speaks of paragraph {present['nth_paragraph']} of {present['num_paragraphs']}"
    return ""


def _present(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _whole(least: int) -> Argument:
    return Argument(lambda value: type(value) is int and value >= least, f"a whole number from {least} on")


def _holds(relation: str, count: int, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


COUNT = _whole(0)
TEXT = Argument(_is_text, "a text that is not empty")
TEXTS = Argument(
    lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value)), "a list of texts"
)
LETTER = Argument(lambda value: _is_text(value) and len(value) == 1, "one character")
RELATION = Argument(lambda value: value in RELATIONS, " or ".join(map(repr, RELATIONS)))


def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _holds(relation, text.lower().count(keyword.strip().lower()), frequency)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _holds(let_relation, text.lower().count(letter.lower()), let_frequency)


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(word.isupper() for word in _JOINED_WORD.findall(text))
    return _holds(capital_relation, count, capital_frequency)


def _parts(text: str, divider: str) -> list[str] | None:
    """Return the parts between dividers, without an empty first or last one; None if another is empty."""
    first, *rest = (part.strip() for part in text.split(divider))
    return None if "" in rest[:-1] else [part for part in (first, *rest) if part]


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _parts(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _two_responses(text: str) -> bool:
    parts = _parts(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"').lower()
    end = next((at for at, letter in enumerate(word) if letter in _ENDS_A_WORD), len(word))
    return word[:end] == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    usual = _POSTSCRIPTS.get(marker)
    return marker.lower() in text.lower() if usual is None else usual.search(text) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    lines = (line.lstrip() for line in text.split("\n"))
    return num_bullets == sum(line[:1] == "-" or (line[:1] == "*" and line[1:2] != "*") for line in lines)


def _highlights(text: str, num_highlights: int) -> bool:
    return sum(bool((bold or plain).strip()) for bold, plain in _HIGHLIGHT.findall(text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", text)) >= num_sections


def _title(text: str) -> bool:
    """Whether a line has double angle brackets around something."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


def _json(text: str) -> bool:
    text = text.strip()
    fence = _FENCE.match(text)
    try:
        json.loads(text[fence.end() if fence else 0 :].removesuffix("```"))
    except (ValueError, RecursionError):  # the latter where thousands of brackets are open
        return False
    return True


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": Check(
        lambda text, keywords: all(word.lower() in text.lower() for word in keywords), {"keywords": TEXTS}
    ),
    "keywords:forbidden_words": Check(_forbidden_words, {"forbidden_words": TEXTS}),
    "keywords:frequency": Check(_frequency, {"keyword": TEXT, "frequency": COUNT, "relation": RELATION}),
    "keywords:letter_frequency": Check(
        _letter_frequency, {"letter": LETTER, "let_frequency": COUNT, "let_relation": RELATION}
    ),
    "length_constraints:number_words": Check(
        lambda text, num_words, relation: _holds(relation, len(_WORD.findall(text)), num_words),
        {"num_words": COUNT, "relation": RELATION},
    ),
    "length_constraints:number_paragraphs": Check(_number_paragraphs, {"num_paragraphs": _whole(1)}),
    "length_constraints:nth_paragraph_first_word": Check(
        _nth_paragraph, {"num_paragraphs": _whole(1), "nth_paragraph": _whole(1), "first_word": TEXT}
    ),
    "detectable_content:number_placeholders": Check(
        lambda text, num_placeholders: len(_PLACEHOLDER.findall(text)) >= num_placeholders, {"num_placeholders": COUNT}
    ),
    "detectable_content:postscript": Check(_postscript, {"postscript_marker": TEXT}),
    "detectable_format:number_bullet_lists": Check(_bullets, {"num_bullets": COUNT}),
    "detectable_format:number_highlighted_sections": Check(_highlights, {"num_highlights": COUNT}),
    "detectable_format:multiple_sections": Check(_sections, {"section_spliter": TEXT, "num_sections": COUNT}),
    "detectable_format:title": Check(_title, {}),
    "detectable_format:json_format": Check(_json, {}),
    "detectable_format:constrained_response": Check(lambda text: any(one in text for one in RESPONSES), {}),
    "combination:two_responses": Check(_two_responses, {}),
    "combination:repeat_prompt": Check(
        lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
        {"prompt_to_repeat": TEXT},
    ),
    "startend:end_checker": Check(
        lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
        {"end_phrase": TEXT},
    ),
    "startend:quotation": Check(_quotation, {}),
    "change_case:english_capital": Check(str.isupper, {}),
    "change_case:english_lowercase": Check(str.islower, {}),
    "change_case:capital_word_frequency": Check(
        _capital_words, {"capital_frequency": COUNT, "capital_relation": RELATION}
    ),
    "punctuation:no_comma": Check(lambda text: "," not in text, {}),
}
"""Checks by IFEval's ids."""
