"""The spellings of one command, read as numbers, switches and choices."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl_llm.cli.dialects.spellings import SPELLINGS
from jaxrl_llm.errors import InputError

SWITCH = {"true": True, "false": False}
NOTHING = ("none", "null")


@dataclasses.dataclass(frozen=True)
class Given:
    """What was typed.

    Attributes:
      texts: values by spelling, as typed.
    """

    texts: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.texts

    def refuse(self, name: str, reason: str) -> NoReturn:
        """InputError that names a spelling that was given."""
        raise InputError(f"{SPELLINGS[name].typed(self.texts[name])}: {reason}")

    def first(self, *names: str) -> str | None:
        """The first of these names that was given."""
        return next((name for name in names if name in self.texts), None)

    def number(self, name: str, default: Any = None, optional: bool = False) -> Any:
        """A finite number; with ``optional`` also None, where ``none`` or ``null`` is given."""
        if name not in self.texts:
            return default
        if optional and self.texts[name].lower() in NOTHING:
            return None
        try:
            value = float(self.texts[name])
        except ValueError:
            value = math.nan
        return value if math.isfinite(value) else self.refuse(name, "expected a number")

    def switch(self, name: str) -> bool | None:
        """True, False, or None where it was not given."""
        if name not in self.texts:
            return None
        return (
            SWITCH[self.texts[name].lower()]
            if self.texts[name].lower() in SWITCH
            else self.refuse(name, "expected True or False")
        )

    def choice(self, name: str, choices: Mapping[str, Any], refused: Mapping[str, str]) -> Any:
        """What the given word stands for; None where there is none. ``refused``: words that are known, and why not."""
        if name not in self.texts:
            return None
        word = self.texts[name]
        if word in refused:
            self.refuse(name, refused[word])
        return choices[word] if word in choices else self.refuse(name, f"expected {', '.join(choices)}")
