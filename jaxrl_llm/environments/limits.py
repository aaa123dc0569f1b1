"""Limits of an episode: a value without arrays, quick to import."""

import dataclasses
from typing import Annotated, Literal

from jaxrl_llm.system.setting import Choice, Count, Range, Setting


@dataclasses.dataclass(frozen=True)
class Limits(Setting):
    """Limits of an episode.

    Attributes:
      max_turns: replies of the model; the calls of the last one are still made.
      max_turn_tokens: tokens of one reply; a longer one is cut there, and the environment answers what there is; 0 for
        no limit but ``rollout.max_new_tokens``.
      max_tool_calls: calls in an episode; those beyond it are not made, and the episode ends; 0 for no limit.
      tool_timeout_s: seconds for a call of a tool, and for each call of the environment.
      max_result_chars: characters of a tool's result that the model sees; a mark says how many are missing.
      cut: the part of a longer result that is left out: its end, middle or start.
      max_parse_errors: replies in an episode that are answered with the reason why their calls cannot be parsed; the
        next one ends it.
      history: where the chat template writes earlier turns otherwise than they were sampled, as by dropping their
        reasoning: "append_only" keeps every token, as no conversation with the template would; "fork" begins a new row
        with what the template writes by now, and the episode learns from all its rows.
    """

    max_turns: Annotated[int, Count(1)] = 8
    max_turn_tokens: Annotated[int, Count(0)] = 0
    max_tool_calls: Annotated[int, Count(0)] = 0
    tool_timeout_s: Annotated[float, Range("(0, inf)")] = 30.0
    max_result_chars: Annotated[int, Count(1)] = 2000
    cut: Annotated[Literal["end", "middle", "start"], Choice("end", "middle", "start")] = "end"
    max_parse_errors: Annotated[int, Count(0)] = 2
    history: Annotated[Literal["append_only", "fork"], Choice("append_only", "fork")] = "append_only"

    def shortened(self, text: str) -> str:
        """Return a text with at most ``max_result_chars`` of its characters."""
        kept = self.max_result_chars
        if len(text) <= kept:
            return text
        mark = f"[{len(text) - kept:,} characters left out]"
        first = {"end": kept, "middle": (kept + 1) // 2, "start": 0}[self.cut]
        return f"{text[:first]}{mark}{text[len(text) - (kept - first) :]}"
