"""An environment: a secret number, and an answer to each guess.

Each episode has an instance of its own, which answers the model's replies until it is done. Nothing goes into the
package: ``Task(rows, environment=Secret, verifier="none")``. ``configs/guessing_smoke.py`` trains a richer one.
"""

import random
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import Environment, Step
from jaxrl_llm.types import Message


class Secret(Environment):
    """The secret is worth 1; the episode ends with it, or after four guesses."""

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[()]:
        """Draw the secret from the seed; the row's prompt is enough to begin with."""
        self.secret, self.guesses = str(random.Random(seed).randrange(10)), 0
        return ()

    def step(self, reply: Message) -> Step:
        """Compare the reply with the secret."""
        self.guesses += 1
        right = reply["content"].strip() == self.secret
        answer = {"role": "user", "content": "right" if right else "no, guess again:"}
        return Step([answer], float(right), done=right or self.guesses == 4)
