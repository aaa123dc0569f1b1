"""Small environments to begin with: a calculator for products, and a table to look up."""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, Step
from jaxrl_llm.errors import require
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def in_turns(*contents: str) -> tuple[dict[str, str], ...]:
    """Return messages of user and assistant in turn."""
    return tuple({"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents))


def _product(a: int, b: int) -> tuple[str, ...]:
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"What is {a} * {b}?", call, f"<tool_response>{a * b}</tool_response>", f"The answer is {a * b}."


CALCULATOR = in_turns(*_product(31, 24), *_product(58, 17))
"""Two worked examples: after one, SmolLM2-135M calls the tool with the numbers of the example."""


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of numbers of two digits, to be found with the tool ``multiply``.

    Attributes:
      size: problems, all different.
      seed: of the numbers.
      before: messages before the question; their calls are text, in the form of most chat templates.
    """

    size: int = 512
    seed: int = 0
    before: tuple[dict[str, str], ...] = CALCULATOR
    label: str = "products"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems.

        Raises:
          InputError: there are not so many.
        """
        require(self.size <= 90 * 90, f"Products has size {self.size}: numbers of two digits have {90 * 90} products")
        for index in random.Random(self.seed).sample(range(90 * 90), self.size):
            a, b = 10 + index // 90, 10 + index % 90
            prompt = (*self.before, {"role": "user", "content": f"What is {a} * {b}?"})
            yield problem_of(prompt, str(a * b), self.label, {"a": a, "b": b})


KEYS = ("river", "stone", "cloud", "maple", "tiger", "amber", "piano", "comet", "olive", "cabin", "raven", "cedar")


def _looked_up(name: str, number: int) -> tuple[str, ...]:
    asked = f"Which number does the table hold for {name}?"
    return asked, f"<get>{name}</get>", f"The table holds {number}.", f"The answer is {number}."


LOOKUP = in_turns(*_looked_up("fox", 58), *_looked_up("lamp", 31), *_looked_up("sugar", 74))
"""Three worked examples."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Questions for the table of ``Lookup``.

    Attributes:
      size: problems: names, or pairs of them once there are more problems than names.
      seed: of their order.
    """

    size: int = 128
    seed: int = 0
    label: str = "lookup"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems; only the table has their answers.

        Raises:
          InputError: there are not so many.
        """
        names = [*KEYS, *(f"{one}-{other}" for one in KEYS for other in KEYS if one != other)]
        require(self.size <= len(names), f"Keys has size {self.size}: there are {len(names)} names")
        for name in random.Random(self.seed).sample(names, self.size):
            question = {"role": "user", "content": f"Which number does the table hold for {name}?"}
            yield problem_of((*LOOKUP, question), "", self.label, {"name": name})


class Lookup(Environment):
    """A table of names and numbers, new in each episode: ``<get>name</get>`` is answered with its number.

    The reward is 1 if the last number of the first reply without a ``<get>`` is that of the row's ``name``.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[()]:
        """Draw the number of the row's name."""
        self._name = row["name"]
        self._number = str(random.Random(seed).randint(10, 99))
        return ()

    def step(self, reply: Message) -> Step:
        """Answer a request, or end the episode with the reward."""
        asked = re.search(r"<get>(.*?)</get>", reply["content"])
        if asked is None:
            numbers = re.findall(r"\d+", reply["content"])
            return Step(reward=float(numbers[-1:] == [self._number]), done=True)
        found = self._number if asked[1].strip() == self._name else "nothing"
        return Step([{"role": "user", "content": f"The table holds {found}."}], metrics={"found": found.isdigit()})

    def copy(self) -> "Lookup":
        """Return the same table."""
        other = Lookup()
        other._name, other._number = self._name, self._number
        return other
