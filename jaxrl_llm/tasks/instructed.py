"""Generated prompts with instructions that can be followed together and checked: see ``instructions.py``."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.tasks.instructions import ARGUMENTS, IDS, RELATIONS
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem

MOST = 3
"""Maximum number of instructions in a prompt."""
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


class Kind(NamedTuple):
    """Recipe of one kind of instruction.

    Attributes:
      group: a prompt has at most one kind of each group.
      sentence: text in the prompt, with places for the arguments.
      draw: returns the arguments by name, from random numbers and the prompt's request.
    """

    group: str
    sentence: str
    draw: Callable[[random.Random, str], dict[str, Any]] = lambda draws, request: {}


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
        """Yield the problems; ``metadata`` holds ``instruction_id_list`` and ``kwargs``, as IFEval's rows do.

        Raises:
          InputError: a kind is unknown, or the size is below 1.
        """
        if self.size < 1:
            raise InputError(f"source Instructions has size {self.size}; give at least 1")
        for name in (name for name in self.kinds if name not in KINDS):
            hint = did_you_mean(name, KINDS, f"choose of {', '.join(KINDS)}")
            raise InputError(f"source Instructions has no kind {name!r}; {hint}")
        draws = random.Random(self.seed)
        for _ in range(self.size):
            yield self._problem(draws)

    def _problem(self, draws: random.Random) -> Problem:
        request = draws.choice(REQUESTS).format(draws.choice(TOPICS))
        names = _compatible(draws.sample(self.kinds or tuple(KINDS), len(self.kinds or KINDS)), draws.randint(1, MOST))
        arguments = [KINDS[name].draw(draws, request) for name in names]
        sentences = []
        for name, given in zip(names, arguments, strict=True):
            words = {key: " and ".join(value) if isinstance(value, list) else value for key, value in given.items()}
            sentences.append(KINDS[name].sentence.format(**words))
        prompt = ({"role": "user", "content": " ".join([request, *sentences])},)
        return problem_of(prompt, "", self.label, {IDS: names, ARGUMENTS: arguments})


def _compatible(names: list[str], count: int) -> list[str]:
    """Return the first of the names that can be followed together, ``count`` at most."""
    chosen: list[str] = []
    for name in names:
        fits = all(
            KINDS[name].group != KINDS[other].group and frozenset((name, other)) not in CONFLICTS for other in chosen
        )
        if fits and len(chosen) < count:
            chosen.append(name)
    return chosen


def _some(name: str, words: tuple[str, ...] | str) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda draws, request: {name: draws.choice(words)}


def _number(name: str, least: int, most: int) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda draws, request: {name: draws.randint(least, most)}


def _two(name: str) -> Callable[[random.Random, str], dict[str, Any]]:
    return lambda draws, request: {name: draws.sample(KEYWORDS, 2)}


def _bounded(
    names: tuple[str, str], at_least: tuple[int, int], less_than: tuple[int, int]
) -> Callable[[random.Random, str], dict[str, Any]]:
    """Return a ``draw`` of a number and a relation, by their names; the number's range depends on the relation."""

    def draw(draws: random.Random, request: str) -> dict[str, Any]:
        relation = draws.choice(RELATIONS)
        return {names[0]: draws.randint(*(at_least if relation == "at least" else less_than)), names[1]: relation}

    return draw


def _frequency(draws: random.Random, request: str) -> dict[str, Any]:
    words = {"keyword": draws.choice(KEYWORDS)}
    return words | _bounded(("frequency", "relation"), (2, 5), (2, 4))(draws, request)


def _letters(draws: random.Random, request: str) -> dict[str, Any]:
    drawn = _bounded(("let_frequency", "let_relation"), (3, 12), (1, 3))(draws, request)
    return {"letter": draws.choice(COMMON if drawn["let_relation"] == "at least" else RARE)} | drawn


def _first_word(draws: random.Random, request: str) -> dict[str, Any]:
    count = draws.randint(2, 4)
    return {
        "num_paragraphs": count,
        "nth_paragraph": draws.randint(1, count),
        "first_word": draws.choice(OPENINGS),
    }


KINDS: dict[str, Kind] = {
    "keywords:existence": Kind("words", "Use the words {keywords}.", _two("keywords")),
    "keywords:forbidden_words": Kind("words", "Never use the words {forbidden_words}.", _two("forbidden_words")),
    "keywords:frequency": Kind("words", "Use the word {keyword} {relation} {frequency} times.", _frequency),
    "keywords:letter_frequency": Kind(
        "letters", "The letter {letter} must occur {let_relation} {let_frequency} times.", _letters
    ),
    "length_constraints:number_words": Kind(
        "length", "Write {relation} {num_words} words.", _bounded(("num_words", "relation"), (10, 60), (30, 80))
    ),
    "length_constraints:number_paragraphs": Kind(
        "layout", "Write {num_paragraphs} paragraphs with *** between them.", _number("num_paragraphs", 2, 4)
    ),
    "length_constraints:nth_paragraph_first_word": Kind(
        "layout",
        "Write {num_paragraphs} paragraphs with one empty line between them; paragraph {nth_paragraph} begins with the "
        "word {first_word}.",
        _first_word,
    ),
    "detectable_content:number_placeholders": Kind(
        "blanks",
        "Leave at least {num_placeholders} places open in square brackets, like [name].",
        _number("num_placeholders", 1, 4),
    ),
    "detectable_content:postscript": Kind(
        "end", "Add a postscript that begins with {postscript_marker}", _some("postscript_marker", ("P.S.", "P.P.S"))
    ),
    "detectable_format:number_bullet_lists": Kind(
        "layout", "Make {num_bullets} bullet points, on lines that begin with a star.", _number("num_bullets", 2, 5)
    ),
    "detectable_format:number_highlighted_sections": Kind(
        "layout", "Put stars around at least {num_highlights} phrases, *like this*.", _number("num_highlights", 1, 4)
    ),
    "detectable_format:multiple_sections": Kind(
        "layout",
        "Make {num_sections} parts, and begin each with {section_spliter} and its number.",
        lambda draws, request: {"section_spliter": "Section", "num_sections": draws.randint(2, 4)},
    ),
    "detectable_format:title": Kind("title", "Give it a title in double angle brackets, <<like this>>."),
    "detectable_format:json_format": Kind("layout", "Your whole answer must be JSON."),
    "detectable_format:constrained_response": Kind(
        "layout", 'Say "My answer is yes.", "My answer is no." or "My answer is maybe." in these words.'
    ),
    "combination:two_responses": Kind("layout", "Give two different answers with ****** between them."),
    "combination:repeat_prompt": Kind(
        "layout",
        'Begin with this sentence, word for word: "{prompt_to_repeat}"',
        lambda draws, request: {"prompt_to_repeat": request},
    ),
    "startend:end_checker": Kind("end", 'End with "{end_phrase}" and nothing after it.', _some("end_phrase", ENDINGS)),
    "startend:quotation": Kind("layout", "Put double quotation marks around your whole answer."),
    "change_case:english_capital": Kind("case", "Use capital letters only."),
    "change_case:english_lowercase": Kind("case", "Use no capital letters."),
    "change_case:capital_word_frequency": Kind(
        "case",
        "Write {capital_relation} {capital_frequency} words in capital letters.",
        _bounded(("capital_frequency", "capital_relation"), (1, 4), (2, 4)),
    ),
    "punctuation:no_comma": Kind("commas", "Do not use any commas."),
}
"""Kinds of instruction that can be drawn, by id: all those that can be checked."""

CONFLICTS = frozenset(
    frozenset(pair)
    for pair in (
        ("detectable_format:json_format", "startend:end_checker"),
        ("detectable_format:multiple_sections", "change_case:english_lowercase"),
        ("detectable_format:multiple_sections", "change_case:english_capital"),
        ("detectable_format:constrained_response", "change_case:english_lowercase"),
        ("detectable_format:constrained_response", "change_case:english_capital"),
    )
)
"""Pairs of kinds from different groups that no text can follow both of."""
