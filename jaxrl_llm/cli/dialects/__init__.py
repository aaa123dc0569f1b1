"""TRL's and verl's spellings of what a recipe says, translated where they say exactly that, and refused elsewhere."""

from jaxrl_llm.cli.dialects.hints import hint
from jaxrl_llm.cli.dialects.spellings import SPELLINGS, Spelling
from jaxrl_llm.cli.dialects.translation import explain, translate

__all__ = ["SPELLINGS", "Spelling", "explain", "hint", "translate"]
