"""The world of one episode: its environment and tools, with limits, and its answers to the model's replies."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.calls import Parsed
from jaxrl_llm.environments.checks import checked_copy, checked_reset, checked_step, finite, readable
from jaxrl_llm.environments.duck_typed import DuckTyped
from jaxrl_llm.environments.environment import Environment, Message, Step, has
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.threads import NOTHING, Call, Caller, Outcome, place
from jaxrl_llm.environments.tool_calls import Result, in_order, make_calls, name_in
from jaxrl_llm.environments.tools import Tool
from jaxrl_llm.tasks.messages import joined, name_of


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer of the world to one reply.

    Attributes:
      messages: what the model reads next; at an end they are only shown.
      reward: of this turn.
      end: empty if the episode goes on, else one of ``ENDS``.
      metrics: of the environment's step, and counts ``tool_errors/unknown``, ``/raised``, ``/timeout``, ``/unparsed``.
      tool_calls: calls made in this turn.
      tool_errors: those of them that failed.
      error: one line about an end that is a failure.
      state: of the environment's step.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    end: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""
    state: str = ""


@dataclasses.dataclass
class Tally:
    """The replies and calls of an episode so far, against its limits."""

    turns: int = 0
    calls: int = 0
    parse_errors: int = 0

    def taken(self, asked: Sequence[Any], limits: Limits) -> list[Any]:
        """Count the calls of a reply, and return those that may still be made."""
        calls = list(asked[: limits.max_tool_calls - self.calls if limits.max_tool_calls else None])
        self.calls += len(calls)
        return calls

    def unparsed(self, error: str, limits: Limits) -> Answer:
        """Count a reply with a call that cannot be read, and return the answer to it."""
        self.parse_errors += 1
        said = limits.shortened(f"The tool call could not be read: {readable(error)}")
        end = "max_turns" if self.turns >= limits.max_turns else ""
        end = "parse_error" if self.parse_errors > limits.max_parse_errors else end
        shown = ({"role": "user", "content": said},)
        return Answer(shown, end=end, metrics={"tool_errors/unparsed": 1.0}, tool_errors=1)


class World:
    """One episode's living side; used from one thread at a time.

    The environment is made, called and closed on a thread of the episode's own. Calls of one reply are answered in
    their order: functions run at the same time, methods of an environment one after the other.

    Args:
      environment: an environment, or the callable that makes it.
      row: what its ``reset`` gets; environments get a copy.
      seed: of its draws.
      limits: of the episode.
      functions: tools in addition to the environment's own, by name.

    Attributes:
      tools: schemas for the chat template, known after ``reset``.
      error: one line about the last failure; empty without one.
    """

    def __init__(
        self,
        environment: Environment | Callable[[], Environment],
        row: Mapping[str, Any],
        seed: int,
        limits: Limits,
        functions: Mapping[str, Tool] = NOTHING,
    ):
        self.environment: Any = environment if isinstance(environment, Environment) else None
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.error = ""
        self._make: Any = environment
        self._row, self._seed, self._limits, self._functions = row, seed, limits, functions
        self._tally = Tally()
        self._caller = Caller()

    def reset(self, messages: Sequence[Message]) -> tuple[list[Message], Answer]:
        """Begin the episode; return the whole prompt, and an answer that has an end if the environment failed.

        A first user message of the environment is joined to a last user message of the row.
        """
        prompt = [dict(message) for message in messages]
        if self.environment is None:
            made = self._call(self._make)
            if made.status != "ok":
                return prompt, self._failure(made, "making the environment")
            self.environment = made.value
        row = _copied(dict(self._row))
        outcome = self._call(functools.partial(self.environment.reset, row, self._seed), checked_reset)
        if outcome.status != "ok":
            return prompt, self._failure(outcome, "reset")
        self.tools = (*self.environment.tools, *(tool.schema for tool in self._functions.values()))
        return joined(prompt, outcome.value, self.environment.joint), Answer()

    def reply(self, parsed: Parsed) -> Answer:
        """Answer one reply of the model.

        A tool that is unknown, raises or takes too long is answered with the error, and the episode goes on. A reply
        without calls completes the episode, unless the environment has a ``step``.
        """
        self._tally.turns += 1
        if parsed.error:
            return self._tally.unparsed(parsed.error, self._limits)
        message = _copied(parsed.message)
        asked = list(message.pop("tool_calls", None) or ())
        calls = self._tally.taken(asked, self._limits)
        steps = self.steps
        # The environment's step answers calls of its own tools: all, if the model was offered none.
        names = [*map(name_of, self.environment.tools)]
        own = [index for index, call in enumerate(calls) if steps and (not self.tools or name_in(call) in names)]
        results = self._results({index: call for index, call in enumerate(calls) if index not in own})
        answer = Answer()
        if steps and (own or not asked):
            answer = self._stepped(message, [calls[index] for index in own], len(own) == len(calls))
        errors = [one.error for one in results.values() if one.error]
        end = answer.end
        if not end and not asked and not answer.messages:
            end = "completed"
        if not end and len(asked) > len(calls):
            end = "max_tool_calls"
        if not end and self._tally.turns >= self._limits.max_turns:
            end = "max_turns"
        return dataclasses.replace(
            answer,
            messages=in_order(calls, {index: one.message for index, one in results.items()}, answer.messages),
            end=end,
            metrics={**answer.metrics, **{f"tool_errors/{kind}": float(errors.count(kind)) for kind in errors}},
            tool_calls=len(calls),
            tool_errors=len(errors),
        )

    @property
    def steps(self) -> bool:
        """Whether the environment answers replies without calls; if not, such a reply is the model's last."""
        return has(self.environment, "step")

    def reward(self) -> float | None:
        """Return the reward of an environment after TRL's interface: NaN if it has none to give or fails (``error``
        says why); None for other environments."""
        get = self.environment.reward if isinstance(self.environment, DuckTyped) else None
        if get is None:
            return None
        outcome = self._call(get, lambda value: math.nan if value is None else finite(value, "get_reward", nan=True))
        if outcome.status != "ok":
            self._failure(outcome, "get_reward")
            return math.nan
        return outcome.value

    def copy(self) -> "World":
        """Return another world in the same state.

        Raises:
          RuntimeError: the environment failed to copy itself.
        """
        environment = self.environment
        if type(environment) is not Environment:
            outcome = self._call(environment.copy, checked_copy)
            if outcome.status != "ok":
                raise RuntimeError(self._failure(outcome, "copy").error)
            environment = outcome.value
        found = World(environment, self._row, self._seed, self._limits, self._functions)
        found.tools, found._tally = self.tools, dataclasses.replace(self._tally)
        return found

    def close(self) -> str:
        """End the episode; return one line if the environment failed to close, else an empty text."""
        environment, self.environment = self.environment, None
        error = ""
        if environment is not None and has(environment, "close"):
            outcome = self._call(environment.close)
            error = "" if outcome.status == "ok" else self._failure(outcome, "close", type(environment).__name__).error
        self._caller.close()
        return error

    def _call(self, function: Callable[..., Any], finish: Callable[[Any], Any] = lambda value: value) -> Outcome:
        return self._caller.each([Call(function)], self._limits.tool_timeout_s, finish)[0]

    def _failure(self, outcome: Outcome, what: str, kind: str = "") -> Answer:
        """Return the end of an episode with an environment that failed."""
        own = self.environment.instance if isinstance(self.environment, DuckTyped) else self.environment
        kind = kind or ("the environment" if own is None else type(own).__name__)
        self.error = f"{kind}: {what}: {outcome.reason(self._limits.tool_timeout_s)}{place(outcome.error)}"
        return Answer(end="timeout" if outcome.status == "timeout" else "environment_error", error=self.error)

    def _results(self, calls: Mapping[int, Any]) -> dict[int, Result]:
        """Make the calls that tools answer, by place; return their results by place."""
        methods = self.environment.methods if isinstance(self.environment, DuckTyped) else {}
        tools = {**methods, **self._functions}
        others = [name for name in map(name_of, self.environment.tools) if name not in tools]
        results = make_calls(self._caller, list(calls.values()), tools, others, self._limits)
        return dict(zip(calls, results, strict=True))

    def _stepped(self, message: Message, calls: Sequence[Any], alone: bool) -> Answer:
        """Return the answer of the environment's ``step``; ``alone``: nothing else answers the reply."""
        reply = {**message, "tool_calls": list(calls)} if calls else message
        outcome = self._call(functools.partial(self.environment.step, reply), checked_step)
        if outcome.status != "ok":
            return self._failure(outcome, "step")
        step: Step = outcome.value
        if not step.messages and not step.done and alone:
            silent = ValueError("it returned neither messages nor done=True, so the model has nothing to answer")
            return self._failure(Outcome("error", error=silent), "step")
        shown = [
            {**one, "content": self._limits.shortened(one["content"])} if one["role"] == "tool" else one
            for one in step.messages
        ]
        end = ("tool_stopped" if calls else "completed") if step.done else ""
        return Answer(tuple(shown), step.reward, end, step.metrics, state=step.state)


def _copied(value: Any) -> Any:
    """Return a deep copy, so that foreign code cannot change the caller's value; a value nested too deeply as it is."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return value
