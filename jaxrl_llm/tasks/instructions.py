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
from typing import Any

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


Argument = tuple[Callable[[Any], bool], str]
"""Requirement on an instruction's argument: whether a value meets it, and its description in errors."""


def followed(text: str, fields: Mapping[str, Any]) -> list[bool]:
    """Return for each instruction of a row that ``check_instructions`` accepted whether the text follows it."""
    given = zip(fields[IDS], fields[ARGUMENTS], strict=True)
    return [_follows(text, name, _present(arguments)) for name, arguments in given]


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
        if name in ELSEWHERE:
            raise InputError(
                f"{where}: instruction {name} takes a model or a splitter of sentences, and is not checked here; leave "
                f"such rows out with keep={KEEP!r}"
            )
        if not isinstance(name, str) or name not in CHECKS:
            hint = did_you_mean(str(name), CHECKS, f"choose of {', '.join(CHECKS)}")
            raise InputError(f"{where}: instruction {name!r} is unknown; {hint}")
        if wrong := _wrong(name, given):
            raise InputError(f"{where}: instruction {name} {wrong}; correct the row")


def _wrong(name: str, given: Any) -> str:
    """Describe the error in an instruction's arguments; empty if they are right."""
    if not (given is None or isinstance(given, Mapping)):
        return f"has {given!r} for arguments, which are an object with names"
    present, needed = _present(given), CHECKS[name]
    for argument in present:
        if argument not in needed:
            hint = did_you_mean(argument, needed, f"it has {', '.join(needed) or 'none'}")
            return f"has no argument {argument!r}; {hint}"
    for argument, (fits, described) in needed.items():
        if argument not in present:
            return f"lacks the argument {argument}, {described}"
        if not fits(present[argument]):
            return f"has {argument} {present[argument]!r}, which is not {described}"
    if present.get("nth_paragraph", 0) > present.get("num_paragraphs", 0):
        return f"speaks of paragraph {present['nth_paragraph']} of {present['num_paragraphs']}"
    return ""


def _present(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


COUNT: Argument = (lambda value: type(value) is int and value >= 0, "a whole number from 0 on")
FROM_ONE: Argument = (lambda value: type(value) is int and value >= 1, "a whole number from 1 on")
TEXT: Argument = (_is_text, "a text that is not empty")
TEXTS: Argument = (
    lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value)),
    "a list of texts",
)
LETTER: Argument = (lambda value: _is_text(value) and len(value) == 1, "one character")
RELATION: Argument = (lambda value: value in RELATIONS, " or ".join(map(repr, RELATIONS)))


def _follows(text: str, name: str, given: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction with these arguments."""
    lower, bare = text.lower(), text.strip()
    match name:
        case "keywords:existence":
            return all(word.lower() in lower for word in given["keywords"])
        case "keywords:forbidden_words":
            words = map(re.escape, given["forbidden_words"])
            return not any(re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) for word in words)
        case "keywords:frequency":
            return _holds(lower.count(given["keyword"].strip().lower()), given["frequency"], given["relation"])
        case "keywords:letter_frequency":
            return _holds(lower.count(given["letter"].lower()), given["let_frequency"], given["let_relation"])
        case "length_constraints:number_words":
            return _holds(len(_WORD.findall(text)), given["num_words"], given["relation"])
        case "length_constraints:number_paragraphs":
            return len(_parts(text, "***")) == given["num_paragraphs"]
        case "length_constraints:nth_paragraph_first_word":
            return _nth_paragraph(text, **given)
        case "detectable_content:number_placeholders":
            return len(_PLACEHOLDER.findall(text)) >= given["num_placeholders"]
        case "detectable_content:postscript":
            marker = given["postscript_marker"].strip()
            usual = _POSTSCRIPTS.get(marker)
            return marker.lower() in lower if usual is None else usual.search(text) is not None
        case "detectable_format:number_bullet_lists":
            lines = [line.lstrip() for line in text.split("\n")]
            bullets = [line for line in lines if line[:1] == "-" or (line[:1] == "*" and line[1:2] != "*")]
            return len(bullets) == given["num_bullets"]
        case "detectable_format:number_highlighted_sections":
            marked = [bold or plain for bold, plain in _HIGHLIGHT.findall(text)]
            return sum(bool(part.strip()) for part in marked) >= given["num_highlights"]
        case "detectable_format:multiple_sections":
            heading = re.escape(given["section_spliter"].strip())
            return len(re.findall(rf"{heading}\s?\d", text)) >= given["num_sections"]
        case "detectable_format:title":
            return any(_has_title(line) for line in text.split("\n"))
        case "detectable_format:json_format":
            return _is_json(bare)
        case "detectable_format:constrained_response":
            return any(one in text for one in RESPONSES)
        case "combination:two_responses":
            parts = _parts(text, "******")
            return len(parts) == 2 and parts[0] != parts[1]
        case "combination:repeat_prompt":
            return bare.lower().startswith(given["prompt_to_repeat"].strip().lower())
        case "startend:end_checker":
            return bare.strip('"').lower().endswith(given["end_phrase"].strip().lower())
        case "startend:quotation":
            return len(bare) > 1 and bare[0] == bare[-1] == '"'
        case "change_case:english_capital":
            return text.isupper()
        case "change_case:english_lowercase":
            return text.islower()
        case "change_case:capital_word_frequency":
            count = sum(word.isupper() for word in _JOINED_WORD.findall(text))
            return _holds(count, given["capital_frequency"], given["capital_relation"])
    return "," not in text  # punctuation:no_comma


def _holds(count: int, bound: int, relation: str) -> bool:
    return count >= bound if relation == "at least" else count < bound


def _parts(text: str, divider: str) -> list[str]:
    """Return the parts between dividers, without an empty first or last one; none if another is empty."""
    first, *rest = (part.strip() for part in text.split(divider))
    return [] if "" in rest[:-1] else [part for part in (first, *rest) if part]


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"').lower()
    end = next((at for at, letter in enumerate(word) if letter in _ENDS_A_WORD), len(word))
    return word[:end] == first_word.lower()


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return 0 <= begin < end and bool(line[begin:end].strip("<> \t"))


def _is_json(text: str) -> bool:
    fence = _FENCE.match(text)
    try:
        json.loads(text[fence.end() if fence else 0 :].removesuffix("```"))
    except (ValueError, RecursionError):  # the latter where thousands of brackets are open
        return False
    return True


CHECKS: dict[str, Mapping[str, Argument]] = {
    "keywords:existence": {"keywords": TEXTS},
    "keywords:forbidden_words": {"forbidden_words": TEXTS},
    "keywords:frequency": {"keyword": TEXT, "frequency": COUNT, "relation": RELATION},
    "keywords:letter_frequency": {"letter": LETTER, "let_frequency": COUNT, "let_relation": RELATION},
    "length_constraints:number_words": {"num_words": COUNT, "relation": RELATION},
    "length_constraints:number_paragraphs": {"num_paragraphs": FROM_ONE},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": FROM_ONE,
        "nth_paragraph": FROM_ONE,
        "first_word": TEXT,
    },
    "detectable_content:number_placeholders": {"num_placeholders": COUNT},
    "detectable_content:postscript": {"postscript_marker": TEXT},
    "detectable_format:number_bullet_lists": {"num_bullets": COUNT},
    "detectable_format:number_highlighted_sections": {"num_highlights": COUNT},
    "detectable_format:multiple_sections": {"section_spliter": TEXT, "num_sections": COUNT},
    "detectable_format:title": {},
    "detectable_format:json_format": {},
    "detectable_format:constrained_response": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": TEXT},
    "startend:end_checker": {"end_phrase": TEXT},
    "startend:quotation": {},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "change_case:capital_word_frequency": {"capital_frequency": COUNT, "capital_relation": RELATION},
    "punctuation:no_comma": {},
}
"""The arguments that each of IFEval's instructions takes, by its id; all are needed."""
