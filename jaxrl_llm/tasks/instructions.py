"""Checks of instructions that need no model: those of IFEval about the form of a text.

Ids and arguments are those of IFEval's data (arXiv 2311.07911, table 1), and so are the units counted: parts of words
for keywords that must occur, whole words for forbidden ones, runs of letters and digits as words. Three things differ
from its published checker, which needs an English tokenizer, a language detector and regular expressions as keywords: a
keyword is matched as plain text; a text in capital or small letters may be in any language; a word in capital letters
ends where punctuation other than ``- ' . /`` begins.

Each check takes time linear in the text, since a model's completion may be long and odd.
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Fields of a row: ids, and for each the arguments by name; an argument that is None is absent."""
RELATIONS = ("at least", "less than")

Argument = tuple[Callable[[Any], bool], str]
"""Requirement on an instruction's argument: whether a value meets it, and its description in errors."""


def followed(text: str, fields: Mapping[str, Any]) -> list[bool]:
    """Return for each instruction of a row that ``check_instructions`` accepted whether the text follows it."""
    pairs = zip(fields[IDS], fields[ARGUMENTS], strict=True)
    return [_follows(text, name, _set_arguments(arguments)) for name, arguments in pairs]


def check_instructions(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a row with instructions that cannot be checked; ``where``, its place, begins the message."""
    names, arguments = fields.get(IDS), fields.get(ARGUMENTS)
    has_lists = isinstance(names, list | tuple) and names and isinstance(arguments, list | tuple)
    if not has_lists or len(names) != len(arguments):
        raise InputError(
            f"{where}: verifier instructions needs the fields {IDS}, a list of ids, and {ARGUMENTS}, a list with the "
            "arguments of each; complete the row, or take another verifier"
        )
    for name, values in zip(names, arguments, strict=True):
        # IFEval's other instructions, which are not checked here.
        if name in ("language:response_language", "length_constraints:number_sentences"):
            raise InputError(
                f"{where}: instruction {name} takes a model or a splitter of sentences, and is not checked here; leave "
                "such rows out with keep='jaxrl_llm.tasks.filters:checkable_instructions'"
            )
        if not isinstance(name, str) or name not in CHECKS:
            hint = did_you_mean(str(name), CHECKS, f"choose of {', '.join(CHECKS)}")
            raise InputError(f"{where}: instruction {name!r} is unknown; {hint}")
        if wrong := _argument_error(name, values):
            raise InputError(f"{where}: instruction {name} {wrong}; correct the row")


def _argument_error(name: str, arguments: Any) -> str:
    """Describe the error in an instruction's arguments; empty if they are right."""
    if not (arguments is None or isinstance(arguments, Mapping)):
        return f"has {arguments!r} for arguments, which are an object with names"
    values, needed = _set_arguments(arguments), CHECKS[name]
    for argument in values:
        if argument not in needed:
            hint = did_you_mean(argument, needed, f"it has {', '.join(needed) or 'none'}")
            return f"has no argument {argument!r}; {hint}"
    for argument, (fits, described) in needed.items():
        if argument not in values:
            return f"lacks the argument {argument}, {described}"
        if not fits(values[argument]):
            return f"has {argument} {values[argument]!r}, which is not {described}"
    if values.get("nth_paragraph", 0) > values.get("num_paragraphs", 0):
        return f"speaks of paragraph {values['nth_paragraph']} of {values['num_paragraphs']}"
    return ""


def _set_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
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
RELATION: Argument = (lambda value: value in RELATIONS, " or ".join(map(repr, RELATIONS)))


def _follows(text: str, name: str, args: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction with these arguments."""
    lower, bare = text.lower(), text.strip()
    match name:
        case "keywords:existence":
            return all(word.lower() in lower for word in args["keywords"])
        case "keywords:forbidden_words":
            words = map(re.escape, args["forbidden_words"])
            return not any(re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) for word in words)
        case "keywords:frequency":
            return _holds(lower.count(args["keyword"].strip().lower()), args["frequency"], args["relation"])
        case "keywords:letter_frequency":
            return _holds(lower.count(args["letter"].lower()), args["let_frequency"], args["let_relation"])
        case "length_constraints:number_words":
            return _holds(len(re.findall(r"\w+", text)), args["num_words"], args["relation"])
        case "length_constraints:number_paragraphs":
            return len(_parts(text, "***")) == args["num_paragraphs"]
        case "length_constraints:nth_paragraph_first_word":
            return _nth_paragraph(text, **args)
        case "detectable_content:number_placeholders":
            return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= args["num_placeholders"]
        case "detectable_content:postscript":
            marker = args["postscript_marker"].strip()
            usual = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker)
            return marker.lower() in lower if usual is None else re.search(usual, text, re.IGNORECASE) is not None
        case "detectable_format:number_bullet_lists":
            lines = [line.lstrip() for line in text.split("\n")]
            bullets = [line for line in lines if line[:1] == "-" or (line[:1] == "*" and line[1:2] != "*")]
            return len(bullets) == args["num_bullets"]
        case "detectable_format:number_highlighted_sections":
            phrases = [bold or plain for bold, plain in re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)]
            return sum(bool(part.strip()) for part in phrases) >= args["num_highlights"]
        case "detectable_format:multiple_sections":
            heading = re.escape(args["section_spliter"].strip())
            return len(re.findall(rf"{heading}\s?\d", text)) >= args["num_sections"]
        case "detectable_format:title":
            ends = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))
            return any(0 <= begin < end and line[begin:end].strip("<> \t") for line, begin, end in ends)
        case "detectable_format:json_format":
            return _is_json(bare)
        case "detectable_format:constrained_response":
            return any(phrase in text for phrase in ("My answer is yes.", "My answer is no.", "My answer is maybe."))
        case "combination:two_responses":
            parts = _parts(text, "******")
            return len(parts) == 2 and parts[0] != parts[1]
        case "combination:repeat_prompt":
            return bare.lower().startswith(args["prompt_to_repeat"].strip().lower())
        case "startend:end_checker":
            return bare.strip('"').lower().endswith(args["end_phrase"].strip().lower())
        case "startend:quotation":
            return len(bare) > 1 and bare[0] == bare[-1] == '"'
        case "change_case:english_capital":
            return text.isupper()
        case "change_case:english_lowercase":
            return text.islower()
        case "change_case:capital_word_frequency":
            words = re.findall(r"\w+(?:[-'\u2019./]\w+)*", text)
            count = sum(word.isupper() for word in words)
            return _holds(count, args["capital_frequency"], args["capital_relation"])
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
    end = next((at for at, letter in enumerate(word) if letter in ".,?!'\""), len(word))
    return word[:end] == first_word.lower()


def _is_json(text: str) -> bool:
    fence = re.match(r"```(?:json)?", text, flags=re.IGNORECASE)
    try:
        json.loads(text[fence.end() if fence else 0 :].removesuffix("```"))
    except (ValueError, RecursionError):  # the latter where thousands of brackets are open
        return False
    return True


CHECKS: dict[str, Mapping[str, Argument]] = {
    "keywords:existence": {"keywords": TEXTS},
    "keywords:forbidden_words": {"forbidden_words": TEXTS},
    "keywords:frequency": {"keyword": TEXT, "frequency": COUNT, "relation": RELATION},
    "keywords:letter_frequency": {
        "letter": (lambda value: _is_text(value) and len(value) == 1, "one character"),
        "let_frequency": COUNT,
        "let_relation": RELATION,
    },
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


# None of these has a comma or one of the rare letters, and none of the keywords stands in another: what repeats or uses
# them can still do without those.
REQUESTS = (
    "Write about {}.", "Tell me about {}.", "Describe {} to a child.", "Say why people like {}.",
    "Write a letter about {}.", "Make an advertisement for {}.",
)  # fmt: skip
TOPICS = (
    "the sea", "an old bridge", "rain in summer", "a city at night", "bread", "the moon", "a lost dog", "tall trees",
    "a train ride", "winter", "a garden", "music", "the first day of school", "mountains", "a good friend", "breakfast",
    "a river", "birds", "a small island", "the colour blue",
)  # fmt: skip
KEYWORDS = (
    "stone", "window", "silver", "pebble", "market", "candle", "ladder", "thunder", "paper", "orchard", "harbour",
    "mirror", "copper", "meadow", "lantern", "basket",
)  # fmt: skip
OPENINGS = ("today", "perhaps", "once", "later", "still", "maybe")
ENDINGS = ("That is all.", "Do you want to know more?", "The end.", "Ask me again tomorrow.")
COMMON, RARE = "aeinorst", "jqxz"


@dataclasses.dataclass(frozen=True)
class Instructions:
    """Prompts with one to three instructions each, such as "Write about the sea. Do not use any commas."

    The instructions of one prompt do not contradict each other. Use it as ``Task(..., extractor="whole",
    verifier="instructions")``.

    Attributes:
      seed: of the generator.
      size: prompts generated, before duplicates are merged.
      kinds: ids of the instructions to draw from; empty means all.
    """

    seed: int = 0
    size: int = 1000
    kinds: tuple[str, ...] = ()
    label: ClassVar[str] = "instructions"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems; ``metadata`` holds ``instruction_id_list`` and ``kwargs``, as IFEval's rows do."""
        require(self.size >= 1, f"source Instructions has size {self.size}; give at least 1")
        for name in (name for name in self.kinds if name not in KINDS):
            hint = did_you_mean(name, KINDS, f"choose of {', '.join(KINDS)}")
            raise InputError(f"source Instructions has no kind {name!r}; {hint}")
        draws = random.Random(self.seed)
        for _ in range(self.size):
            request = draws.choice(REQUESTS).format(draws.choice(TOPICS))
            shuffled = draws.sample(self.kinds or tuple(KINDS), len(self.kinds or KINDS))
            count = draws.randint(1, 3)
            names: list[str] = []
            for name in shuffled:
                groups = {KINDS[other][0] for other in names}
                conflicts = any({name, other} in CONFLICTS for other in names)
                if len(names) < count and KINDS[name][0] not in groups and not conflicts:
                    names.append(name)
            arguments = [DRAWS[name](draws, request) if name in DRAWS else {} for name in names]
            sentences = []
            for name, values in zip(names, arguments, strict=True):
                words = {key: " and ".join(part) if isinstance(part, list) else part for key, part in values.items()}
                sentences.append(KINDS[name][1].format(**words))
            prompt = ({"role": "user", "content": " ".join([request, *sentences])},)
            yield problem_of(prompt, "", self.label, {IDS: names, ARGUMENTS: arguments})


def _draw_bound(
    draws: random.Random, number: str, relation: str, at_least: tuple[int, int], less_than: tuple[int, int]
) -> dict[str, Any]:
    """Draw a relation, and a number from the range for it; return both under these names of arguments."""
    drawn = draws.choice(RELATIONS)
    return {number: draws.randint(*(at_least if drawn == "at least" else less_than)), relation: drawn}


DRAWS: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "keywords:existence": lambda draws, _: {"keywords": draws.sample(KEYWORDS, 2)},
    "keywords:forbidden_words": lambda draws, _: {"forbidden_words": draws.sample(KEYWORDS, 2)},
    "keywords:frequency": lambda draws, _: (
        {"keyword": draws.choice(KEYWORDS)} | _draw_bound(draws, "frequency", "relation", (2, 5), (2, 4))
    ),
    "keywords:letter_frequency": lambda draws, _: (
        (bound := _draw_bound(draws, "let_frequency", "let_relation", (3, 12), (1, 3)))
        | {"letter": draws.choice(COMMON if bound["let_relation"] == "at least" else RARE)}
    ),
    "length_constraints:number_words": lambda draws, _: _draw_bound(draws, "num_words", "relation", (10, 60), (30, 80)),
    "length_constraints:number_paragraphs": lambda draws, _: {"num_paragraphs": draws.randint(2, 4)},
    "length_constraints:nth_paragraph_first_word": lambda draws, _: {
        "num_paragraphs": (count := draws.randint(2, 4)),
        "nth_paragraph": draws.randint(1, count),
        "first_word": draws.choice(OPENINGS),
    },
    "detectable_content:number_placeholders": lambda draws, _: {"num_placeholders": draws.randint(1, 4)},
    "detectable_content:postscript": lambda draws, _: {"postscript_marker": draws.choice(("P.S.", "P.P.S"))},
    "detectable_format:number_bullet_lists": lambda draws, _: {"num_bullets": draws.randint(2, 5)},
    "detectable_format:number_highlighted_sections": lambda draws, _: {"num_highlights": draws.randint(1, 4)},
    "detectable_format:multiple_sections": lambda draws, _: {
        "section_spliter": "Section",
        "num_sections": draws.randint(2, 4),
    },
    "combination:repeat_prompt": lambda draws, request: {"prompt_to_repeat": request},
    "startend:end_checker": lambda draws, _: {"end_phrase": draws.choice(ENDINGS)},
    "change_case:capital_word_frequency": lambda draws, _: _draw_bound(
        draws, "capital_frequency", "capital_relation", (1, 4), (2, 4)
    ),
}
"""Draws of the arguments, by name, of the kinds of instruction with some, for a prompt that begins with the request."""

KINDS: dict[str, tuple[str, str]] = {
    "keywords:existence": ("words", "Use the words {keywords}."),
    "keywords:forbidden_words": ("words", "Never use the words {forbidden_words}."),
    "keywords:frequency": ("words", "Use the word {keyword} {relation} {frequency} times."),
    "keywords:letter_frequency": ("letters", "The letter {letter} must occur {let_relation} {let_frequency} times."),
    "length_constraints:number_words": ("length", "Write {relation} {num_words} words."),
    "length_constraints:number_paragraphs": ("layout", "Write {num_paragraphs} paragraphs with *** between them."),
    "length_constraints:nth_paragraph_first_word": (
        "layout",
        "Write {num_paragraphs} paragraphs with one empty line between them; paragraph {nth_paragraph} begins with the "
        "word {first_word}.",
    ),
    "detectable_content:number_placeholders": (
        "blanks",
        "Leave at least {num_placeholders} places open in square brackets, like [name].",
    ),
    "detectable_content:postscript": ("end", "Add a postscript that begins with {postscript_marker}"),
    "detectable_format:number_bullet_lists": (
        "layout",
        "Make {num_bullets} bullet points, on lines that begin with a star.",
    ),
    "detectable_format:number_highlighted_sections": (
        "layout",
        "Put stars around at least {num_highlights} phrases, *like this*.",
    ),
    "detectable_format:multiple_sections": (
        "layout",
        "Make {num_sections} parts, and begin each with {section_spliter} and its number.",
    ),
    "detectable_format:title": ("title", "Give it a title in double angle brackets, <<like this>>."),
    "detectable_format:json_format": ("layout", "Your whole answer must be JSON."),
    "detectable_format:constrained_response": (
        "layout",
        'Say "My answer is yes.", "My answer is no." or "My answer is maybe." in these words.',
    ),
    "combination:two_responses": ("layout", "Give two different answers with ****** between them."),
    "combination:repeat_prompt": ("layout", 'Begin with this sentence, word for word: "{prompt_to_repeat}"'),
    "startend:end_checker": ("end", 'End with "{end_phrase}" and nothing after it.'),
    "startend:quotation": ("layout", "Put double quotation marks around your whole answer."),
    "change_case:english_capital": ("case", "Use capital letters only."),
    "change_case:english_lowercase": ("case", "Use no capital letters."),
    "change_case:capital_word_frequency": (
        "case",
        "Write {capital_relation} {capital_frequency} words in capital letters.",
    ),
    "punctuation:no_comma": ("commas", "Do not use any commas."),
}
"""Kinds of instruction by id, all those that can be checked: a group, of which a prompt has at most one kind, and the
sentence in the prompt, with places for the arguments.
"""

CONFLICTS = (
    {"detectable_format:json_format", "startend:end_checker"},
    {"detectable_format:multiple_sections", "change_case:english_lowercase"},
    {"detectable_format:multiple_sections", "change_case:english_capital"},
    {"detectable_format:constrained_response", "change_case:english_lowercase"},
    {"detectable_format:constrained_response", "change_case:english_capital"},
)
"""Pairs of kinds from different groups that no text can follow both of."""
