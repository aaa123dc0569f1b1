"""Generated prompts with instructions that can be followed together and checked: see ``instructions.py``."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from jaxrl_llm.errors import InputError, did_you_mean, require
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
    """One kind of instruction.

    Attributes:
      group: a prompt has at most one kind of each group.
      sentence: text in the prompt, with places for the arguments.
    """

    group: str
    sentence: str


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
        require(self.size >= 1, f"source Instructions has size {self.size}; give at least 1")
        for name in (name for name in self.kinds if name not in KINDS):
            hint = did_you_mean(name, KINDS, f"choose of {', '.join(KINDS)}")
            raise InputError(f"source Instructions has no kind {name!r}; {hint}")
        draws = random.Random(self.seed)
        for _ in range(self.size):
            request = draws.choice(REQUESTS).format(draws.choice(TOPICS))
            shuffled = draws.sample(self.kinds or tuple(KINDS), len(self.kinds or KINDS))
            count = draws.randint(1, MOST)
            names: list[str] = []
            for name in shuffled:
                groups = {KINDS[other].group for other in names}
                conflicts = any(frozenset((name, other)) in CONFLICTS for other in names)
                if len(names) < count and KINDS[name].group not in groups and not conflicts:
                    names.append(name)
            arguments = [_drawn(name, draws, request) for name in names]
            sentences = []
            for name, given in zip(names, arguments, strict=True):
                words = {key: " and ".join(value) if isinstance(value, list) else value for key, value in given.items()}
                sentences.append(KINDS[name].sentence.format(**words))
            prompt = ({"role": "user", "content": " ".join([request, *sentences])},)
            yield problem_of(prompt, "", self.label, {IDS: names, ARGUMENTS: arguments})


def _drawn(name: str, draws: random.Random, request: str) -> dict[str, Any]:
    """Draw the arguments, by name, of an instruction of this kind; ``request`` begins its prompt."""
    match name:
        case "keywords:existence":
            return {"keywords": draws.sample(KEYWORDS, 2)}
        case "keywords:forbidden_words":
            return {"forbidden_words": draws.sample(KEYWORDS, 2)}
        case "keywords:frequency":
            keyword = draws.choice(KEYWORDS)
            frequency, relation = _bounded(draws, (2, 5), (2, 4))
            return {"keyword": keyword, "frequency": frequency, "relation": relation}
        case "keywords:letter_frequency":
            frequency, relation = _bounded(draws, (3, 12), (1, 3))
            letter = draws.choice(COMMON if relation == "at least" else RARE)
            return {"letter": letter, "let_frequency": frequency, "let_relation": relation}
        case "length_constraints:number_words":
            count, relation = _bounded(draws, (10, 60), (30, 80))
            return {"num_words": count, "relation": relation}
        case "length_constraints:number_paragraphs":
            return {"num_paragraphs": draws.randint(2, 4)}
        case "length_constraints:nth_paragraph_first_word":
            count = draws.randint(2, 4)
            place = draws.randint(1, count)
            return {"num_paragraphs": count, "nth_paragraph": place, "first_word": draws.choice(OPENINGS)}
        case "detectable_content:number_placeholders":
            return {"num_placeholders": draws.randint(1, 4)}
        case "detectable_content:postscript":
            return {"postscript_marker": draws.choice(("P.S.", "P.P.S"))}
        case "detectable_format:number_bullet_lists":
            return {"num_bullets": draws.randint(2, 5)}
        case "detectable_format:number_highlighted_sections":
            return {"num_highlights": draws.randint(1, 4)}
        case "detectable_format:multiple_sections":
            return {"section_spliter": "Section", "num_sections": draws.randint(2, 4)}
        case "combination:repeat_prompt":
            return {"prompt_to_repeat": request}
        case "startend:end_checker":
            return {"end_phrase": draws.choice(ENDINGS)}
        case "change_case:capital_word_frequency":
            frequency, relation = _bounded(draws, (1, 4), (2, 4))
            return {"capital_frequency": frequency, "capital_relation": relation}
    return {}


def _bounded(draws: random.Random, at_least: tuple[int, int], less_than: tuple[int, int]) -> tuple[int, str]:
    """Draw a relation, and a number from the range for it."""
    relation = draws.choice(RELATIONS)
    return draws.randint(*(at_least if relation == "at least" else less_than)), relation


KINDS: dict[str, Kind] = {
    "keywords:existence": Kind("words", "Use the words {keywords}."),
    "keywords:forbidden_words": Kind("words", "Never use the words {forbidden_words}."),
    "keywords:frequency": Kind("words", "Use the word {keyword} {relation} {frequency} times."),
    "keywords:letter_frequency": Kind(
        "letters", "The letter {letter} must occur {let_relation} {let_frequency} times."
    ),
    "length_constraints:number_words": Kind("length", "Write {relation} {num_words} words."),
    "length_constraints:number_paragraphs": Kind("layout", "Write {num_paragraphs} paragraphs with *** between them."),
    "length_constraints:nth_paragraph_first_word": Kind(
        "layout",
        "Write {num_paragraphs} paragraphs with one empty line between them; paragraph {nth_paragraph} begins with the "
        "word {first_word}.",
    ),
    "detectable_content:number_placeholders": Kind(
        "blanks", "Leave at least {num_placeholders} places open in square brackets, like [name]."
    ),
    "detectable_content:postscript": Kind("end", "Add a postscript that begins with {postscript_marker}"),
    "detectable_format:number_bullet_lists": Kind(
        "layout", "Make {num_bullets} bullet points, on lines that begin with a star."
    ),
    "detectable_format:number_highlighted_sections": Kind(
        "layout", "Put stars around at least {num_highlights} phrases, *like this*."
    ),
    "detectable_format:multiple_sections": Kind(
        "layout", "Make {num_sections} parts, and begin each with {section_spliter} and its number."
    ),
    "detectable_format:title": Kind("title", "Give it a title in double angle brackets, <<like this>>."),
    "detectable_format:json_format": Kind("layout", "Your whole answer must be JSON."),
    "detectable_format:constrained_response": Kind(
        "layout", 'Say "My answer is yes.", "My answer is no." or "My answer is maybe." in these words.'
    ),
    "combination:two_responses": Kind("layout", "Give two different answers with ****** between them."),
    "combination:repeat_prompt": Kind("layout", 'Begin with this sentence, word for word: "{prompt_to_repeat}"'),
    "startend:end_checker": Kind("end", 'End with "{end_phrase}" and nothing after it.'),
    "startend:quotation": Kind("layout", "Put double quotation marks around your whole answer."),
    "change_case:english_capital": Kind("case", "Use capital letters only."),
    "change_case:english_lowercase": Kind("case", "Use no capital letters."),
    "change_case:capital_word_frequency": Kind(
        "case", "Write {capital_relation} {capital_frequency} words in capital letters."
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
