"""Generated prompts with instructions that can be followed together and checked: see ``instructions.py``."""

import dataclasses
import random
from collections.abc import Callable, Iterator
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
                conflicts = any({name, other} in CONFLICTS for other in names)
                if len(names) < count and KINDS[name].group not in groups and not conflicts:
                    names.append(name)
            arguments = [DRAWS[name](draws, request) if name in DRAWS else {} for name in names]
            sentences = []
            for name, given in zip(names, arguments, strict=True):
                words = {key: " and ".join(value) if isinstance(value, list) else value for key, value in given.items()}
                sentences.append(KINDS[name].sentence.format(**words))
            prompt = ({"role": "user", "content": " ".join([request, *sentences])},)
            yield problem_of(prompt, "", self.label, {IDS: names, ARGUMENTS: arguments})


def _bounded(
    draws: random.Random, number: str, relation: str, at_least: tuple[int, int], less_than: tuple[int, int]
) -> dict[str, Any]:
    """Draw a relation, and a number from the range for it; return both under these names of arguments."""
    drawn = draws.choice(RELATIONS)
    return {number: draws.randint(*(at_least if drawn == "at least" else less_than)), relation: drawn}


DRAWS: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "keywords:existence": lambda draws, _: {"keywords": draws.sample(KEYWORDS, 2)},
    "keywords:forbidden_words": lambda draws, _: {"forbidden_words": draws.sample(KEYWORDS, 2)},
    "keywords:frequency": lambda draws, _: (
        {"keyword": draws.choice(KEYWORDS)} | _bounded(draws, "frequency", "relation", (2, 5), (2, 4))
    ),
    "keywords:letter_frequency": lambda draws, _: (
        (bound := _bounded(draws, "let_frequency", "let_relation", (3, 12), (1, 3)))
        | {"letter": draws.choice(COMMON if bound["let_relation"] == "at least" else RARE)}
    ),
    "length_constraints:number_words": lambda draws, _: _bounded(draws, "num_words", "relation", (10, 60), (30, 80)),
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
    "change_case:capital_word_frequency": lambda draws, _: _bounded(
        draws, "capital_frequency", "capital_relation", (1, 4), (2, 4)
    ),
}
"""Draws of the arguments, by name, of each kind of instruction that has some, for a prompt that begins with the given
request.
"""

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

CONFLICTS = (
    {"detectable_format:json_format", "startend:end_checker"},
    {"detectable_format:multiple_sections", "change_case:english_lowercase"},
    {"detectable_format:multiple_sections", "change_case:english_capital"},
    {"detectable_format:constrained_response", "change_case:english_lowercase"},
    {"detectable_format:constrained_response", "change_case:english_capital"},
)
"""Pairs of kinds from different groups that no text can follow both of."""
