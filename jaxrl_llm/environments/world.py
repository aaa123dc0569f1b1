"""The world of one episode: its environment and tools, with limits, and its answers to the model's replies."""

import asyncio
import copy
import ctypes
import dataclasses
import functools
import inspect
import math
import os
import queue
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.environments.calls import ParsedReply
from jaxrl_llm.environments.environment import (
    DuckTyped,
    Environment,
    Limits,
    Step,
    Tool,
    check_copy,
    check_messages,
    check_step,
    finite,
    overrides,
)
from jaxrl_llm.errors import escape_surrogates
from jaxrl_llm.tasks.messages import join_messages, schema_name
from jaxrl_llm.types import Message

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class FunctionCall(NamedTuple):
    """Call of a function, ``async`` or not; ``apart``: on its own thread, at the same time as the others."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = NOTHING
    apart: bool = False


class CallOutcome(NamedTuple):
    """Outcome of a call: ``ok`` with a value, ``error`` (it raised) or ``timeout``."""

    status: str
    value: Any = None
    error: BaseException | None = None

    def reason(self, limit_s: float) -> str:
        return f"not finished after {limit_s:g} s" if self.error is None else format_error(self.error)


class Overdue(BaseException):
    """Raised in a thread that is abandoned, so that a loop of Python code ends."""


def format_error(error: BaseException | None, kind: bool = True) -> str:
    """Format an exception of foreign code on one line, with its class if ``kind`` or if it has no text."""
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())[:500]
    except Exception:  # noqa: BLE001  a person's exception may have a __str__ that raises
        text = ""
    text = escape_surrogates(text)
    return f"{name}: {text}" if kind and text else text or name


class EventLoop:
    """Owner of an event loop on a daemon thread, which all episodes share: ``async`` clients belong to one loop. A call
    that blocks the loop is left with it, and later ones get another. A call that is late is abandoned ``grace_s`` after
    its limit if it is not cancelled; a value until then counts: another call may have held the loop.
    """

    def __init__(self, grace_s: float = 1.0):
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, awaitable: Any, limit_s: float, finish: Callable[[Any], Any]) -> Future[CallOutcome]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(_await_within(awaitable, limit_s, finish), self._loop)

    def abandon_if_blocked(self) -> None:
        """Let the next calls have another loop, unless this one answers."""
        with self._lock:
            loop = self._loop
            alive = threading.Event()
            if loop is not None:
                loop.call_soon_threadsafe(alive.set)
                self._loop = loop if alive.wait(self.grace_s) else None


EVENT_LOOP = EventLoop()
_HANGING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads of calls that ran out of time


def count_hanging() -> int:
    """Return the number of threads whose calls ran out of time and have not ended yet."""
    return sum(thread.is_alive() for thread in _HANGING)


async def _await_within(awaitable: Any, limit_s: float, finish: Callable[[Any], Any]) -> CallOutcome:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return CallOutcome("ok", finish(await awaitable))
    except BaseException as error:  # noqa: BLE001  SystemExit too: it must not end the loop
        return CallOutcome("timeout") if limit.expired() else CallOutcome("error", error=error)


class DaemonThreads:
    """Pool of at most ``most`` daemon threads: unlike in ``concurrent.futures``, no call that hangs delays the exit."""

    def __init__(self, most: int):
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._spare = most

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        self._jobs.put((future := Future(), call, arguments))
        if not self._idle.acquire(blocking=False) and self._spare:
            self._spare -= 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call, arguments = self._jobs.get()
            try:
                future.set_result(call(*arguments))
            except BaseException as error:  # noqa: BLE001  for whoever waits
                future.set_exception(error)
            del future, call, arguments
            self._idle.release()


class _PendingCall:
    """Place of one outcome."""

    def __init__(self, call: FunctionCall, limit_s: float, finish: Callable[[Any], Any], loop: EventLoop):
        self.call = call
        self.loop = loop
        self.limit_s = limit_s
        self.finish = finish
        self.ended = threading.Event()
        self.outcome = CallOutcome("timeout")
        self.awaitable: Any = None
        self.future: Future[CallOutcome] | None = None
        self.late = False

    def run(self) -> None:
        """Call the function; what is to be awaited is kept, and begins at once if the call is apart."""
        try:
            result = self.call.function(**self.call.arguments)
            if inspect.isawaitable(result):
                self.awaitable = result
                if self.call.apart:
                    self.start_awaiting()
            else:
                self.outcome = CallOutcome("ok", self.finish(result))
        except BaseException as error:  # noqa: BLE001  SystemExit too: a tool must not end the program
            self.outcome = CallOutcome("error", error=error)
        self.ended.set()

    def start_awaiting(self) -> None:
        """Begin to wait for what the function returned."""
        if self.awaitable is not None and self.future is None and not self.late:
            self.future = self.loop.submit(self.awaitable, self.limit_s, self.finish)

    def result(self) -> CallOutcome:
        if self.late:
            return CallOutcome("timeout")
        if self.future is None:
            return self.outcome
        try:
            return self.future.result(self.limit_s + self.loop.grace_s)
        except TimeoutError:
            self.future.cancel()
            self.loop.abandon_if_blocked()
            return CallOutcome("timeout")


class Caller:
    """Owner of an episode's thread, started at its first call; used from one thread at a time.

    All calls run there in turn, since many resources belong to one thread, but those ``apart``; what they return to
    await runs on the loop. A call that ran out of time keeps its thread, and the next ones get another. No thread
    blocks the interpreter's exit.
    """

    def __init__(self, loop: EventLoop = EVENT_LOOP):
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[_PendingCall | None] = queue.SimpleQueue()
        self._finalizer: Any = None

    def call(self, function: Callable[..., Any], limit_s: float, arguments: Mapping[str, Any] = NOTHING) -> CallOutcome:
        return self.call_all([FunctionCall(function, arguments)], limit_s)[0]

    def call_all(
        self, calls: Sequence[FunctionCall], limit_s: float, finish: Any = lambda value: value
    ) -> list[CallOutcome]:
        """Make calls, each with a limit in seconds; return their outcomes, with values that ``finish`` made in time."""
        slots = [_PendingCall(call, limit_s, finish, self._loop) for call in calls]
        apart = [(slot, Caller()) for slot in slots if slot.call.apart]
        began = time.monotonic()
        for slot, caller in apart:
            caller._begin(slot)
        for slot in slots:
            if not slot.call.apart:
                self._begin(slot)
                self._end(slot, limit_s)
        for slot, caller in apart:
            caller._end(slot, max(0.0, began + limit_s - time.monotonic()))
            caller.close()
        for slot in slots:
            slot.start_awaiting()
        return [slot.result() for slot in slots]

    def close(self) -> None:
        """Let the thread end once its call is over; a later call starts another."""
        if self._thread is not None:
            self._finalizer()
            self._thread = None

    def _begin(self, slot: _PendingCall) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run_pending, args=(self._jobs,), name="episode", daemon=True)
            self._finalizer = weakref.finalize(self, self._jobs.put, None)
            self._finalizer.atexit = False
            self._thread.start()
        self._jobs.put(slot)

    def _end(self, slot: _PendingCall, limit_s: float) -> None:
        """Wait until the function returns; if it does not in time, leave its thread to it."""
        if not slot.ended.wait(limit_s):
            slot.late = True
            _interrupt(self._thread)
            self.close()


def _run_pending(jobs: queue.SimpleQueue) -> None:
    try:
        while (slot := jobs.get()) is not None:
            slot.run()
    except Overdue:  # it came after the call's end
        return


def _interrupt(thread: threading.Thread | None) -> None:
    """Raise ``Overdue`` in a thread, at its next step of Python code."""
    if thread is not None and thread.ident is not None:
        _HANGING.add(thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Overdue))


class ToolResult(NamedTuple):
    """Message of a tool; ``error``: ``unknown`` (no tool has its name), ``raised``, ``timeout``, or empty."""

    message: Message
    error: str = ""


def make_calls(
    caller: Caller, calls: Sequence[Any], tools: Mapping[str, Tool], step_tools: Iterable[str], limits: Limits
) -> list[ToolResult]:
    """Make the model's calls and return their results, in order; ``step_tools``: names that ``step`` answers."""
    pending = []
    for call in calls:
        tool = tools.get(tool_name(call))
        if tool is not None:
            pending.append(FunctionCall(tool.function, call.get("function", call).get("arguments") or {}, tool.apart))
    outcomes = iter(caller.call_all(pending, limits.tool_timeout_s, lambda value: escape_surrogates(str(value))))
    names = (*step_tools, *tools)
    return [_tool_result(call, next(outcomes) if tool_name(call) in tools else None, names, limits) for call in calls]


def _tool_result(call: Any, outcome: CallOutcome | None, names: Sequence[str], limits: Limits) -> ToolResult:
    name = tool_name(call)
    text, error = "", ""
    if outcome is None:
        text, error = f"Tool {name} not found; there are: {', '.join(names) or 'none'}.", "unknown"
    elif outcome.status == "timeout":
        text, error = f"Tool {name} did not finish within {limits.tool_timeout_s:g} s.", "timeout"
    elif outcome.status == "error":
        text, error = format_error(outcome.error, kind=False), "raised"
    text = str({"error": text}) if error else outcome.value
    message = {"role": "tool", "name": name, "content": limits.shortened(text)}
    if isinstance(call, Mapping) and call.get("id"):
        message["tool_call_id"] = call["id"]
    return ToolResult(message, error)


def tool_name(call: Any) -> str:
    """Return the name of the tool that a call asks for."""
    return schema_name(call) or schema_name({"function": call})


def order_messages(count: int, results: Mapping[int, Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return results by the index of their calls; an environment's tool messages fill the gaps, its others follow."""
    rest = list(messages)
    ordered = []
    for index in range(count):
        if index in results:
            ordered.append(results[index])
        elif rest and rest[0]["role"] == "tool":
            ordered.append(rest.pop(0))
    return (*ordered, *rest)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer of the world to one reply.

    Attributes:
      messages: what the model reads next; at an end they are only shown.
      end: empty if the episode goes on, else one of ``ENDS``.
      metrics: of the environment's step, and counts ``tool_errors/unknown``, ``/raised``, ``/timeout``, ``/unparsed``.
      tool_calls: calls made in this turn, of which ``tool_errors`` failed.
      error: one line about an end that is a failure.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    end: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    error: str = ""
    state: str = ""


class World:
    """One episode's living side; used from one thread at a time. ``environment``, or the callable that makes it, runs
    on a thread of the episode's own; its ``reset`` gets a copy of ``row``. Calls of one reply are answered in their
    order: ``functions``, tools besides its own, run at the same time, its methods one after the other.

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
        self._turns = self._calls = self._parse_errors = 0
        self._caller = Caller()

    def reset(self, messages: Sequence[Message]) -> tuple[list[Message], Answer]:
        """Begin the episode; return the whole prompt, a first user message of the environment joined to the row's last,
        and an answer that has an end if the environment failed.
        """
        prompt = [dict(message) for message in messages]
        if self.environment is None:
            outcome = self._call(self._make)
            if outcome.status != "ok":
                return prompt, self._failure(outcome, "making the environment")
            self.environment = outcome.value
        row = _deep_copy(dict(self._row))
        reset = functools.partial(self.environment.reset, row, self._seed)
        outcome = self._call(reset, lambda value: () if value is None else check_messages(value))
        if outcome.status != "ok":
            return prompt, self._failure(outcome, "reset")
        self.tools = (*self.environment.tools, *(tool.schema for tool in self._functions.values()))
        return join_messages(prompt, outcome.value, self.environment.joint), Answer()

    def reply(self, parsed: ParsedReply) -> Answer:
        """Answer one reply of the model. A tool that is unknown, raises or takes too long is answered with the error,
        and the episode goes on. A reply without calls completes it, unless the environment has a ``step``.
        """
        self._turns += 1
        if parsed.error:
            return self._unparsed(parsed.error)
        message = _deep_copy(parsed.message)
        requested = list(message.pop("tool_calls", None) or ())
        most = self._limits.max_tool_calls
        calls = requested[: most - self._calls if most else None]
        self._calls += len(calls)
        steps = self.steps
        # The environment's step answers calls of its own tools: all, if the model was offered none.
        names = [*map(schema_name, self.environment.tools)]
        offered = [not self.tools or tool_name(call) in names for call in calls]
        step_calls = [index for index in range(len(calls)) if steps and offered[index]]
        results = self._results({index: call for index, call in enumerate(calls) if index not in step_calls})
        answer = Answer()
        if steps and (step_calls or not requested):
            answer = self._stepped(message, [calls[index] for index in step_calls], len(step_calls) == len(calls))
        errors = [tool.error for tool in results.values() if tool.error]
        end = answer.end
        if not end and not requested and not answer.messages:
            end = "completed"
        if not end and len(requested) > len(calls):
            end = "max_tool_calls"
        if not end and self._turns >= self._limits.max_turns:
            end = "max_turns"
        return dataclasses.replace(
            answer,
            messages=order_messages(len(calls), {i: tool.message for i, tool in results.items()}, answer.messages),
            end=end,
            metrics={**answer.metrics, **{f"tool_errors/{kind}": float(errors.count(kind)) for kind in errors}},
            tool_calls=len(calls),
            tool_errors=len(errors),
        )

    @property
    def steps(self) -> bool:
        """Whether the environment answers replies without calls; if not, such a reply is the model's last."""
        return overrides(self.environment, "step")

    def reward(self) -> float | None:
        """Return the reward by TRL's interface, NaN if it has none or fails; None for other environments."""
        get = self.environment.reward if isinstance(self.environment, DuckTyped) else None
        if get is None:
            return None
        outcome = self._call(get, lambda value: math.nan if value is None else finite(value, "get_reward", nan=True))
        if outcome.status != "ok":
            self._failure(outcome, "get_reward")
            return math.nan
        return outcome.value

    def copy(self) -> "World":
        """Return another world in the same state. RuntimeError: the environment failed to copy itself."""
        environment = self.environment
        if type(environment) is not Environment:
            outcome = self._call(environment.copy, check_copy)
            if outcome.status != "ok":
                raise RuntimeError(self._failure(outcome, "copy").error)
            environment = outcome.value
        world = World(environment, self._row, self._seed, self._limits, self._functions)
        world.tools = self.tools
        world._turns, world._calls, world._parse_errors = self._turns, self._calls, self._parse_errors
        return world

    def close(self) -> str:
        """End the episode; return one line if the environment failed to close, else an empty text."""
        environment, self.environment = self.environment, None
        error = ""
        if environment is not None and overrides(environment, "close"):
            outcome = self._call(environment.close)
            error = "" if outcome.status == "ok" else self._failure(outcome, "close", type(environment).__name__).error
        self._caller.close()
        return error

    def _call(self, function: Callable[..., Any], finish: Callable[[Any], Any] = lambda value: value) -> CallOutcome:
        return self._caller.call_all([FunctionCall(function)], self._limits.tool_timeout_s, finish)[0]

    def _failure(self, outcome: CallOutcome, what: str, kind: str = "") -> Answer:
        """Return the end of an episode with an environment that failed."""
        instance = self.environment.instance if isinstance(self.environment, DuckTyped) else self.environment
        kind = kind or ("the environment" if instance is None else type(instance).__name__)
        frames = [] if outcome.error is None else traceback.extract_tb(outcome.error.__traceback__)
        frames = [frame for frame in frames if not frame.filename.startswith(str(Path(__file__).parent) + os.sep)]
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""  # where the foreign code raised
        self.error = f"{kind}: {what}: {outcome.reason(self._limits.tool_timeout_s)}{place}"
        return Answer(end="timeout" if outcome.status == "timeout" else "environment_error", error=self.error)

    def _results(self, calls: Mapping[int, Any]) -> dict[int, ToolResult]:
        """Make the calls that tools answer, by place; return their results by place."""
        methods = self.environment.methods if isinstance(self.environment, DuckTyped) else {}
        tools = {**methods, **self._functions}
        step_tools = [name for name in map(schema_name, self.environment.tools) if name not in tools]
        results = make_calls(self._caller, list(calls.values()), tools, step_tools, self._limits)
        return dict(zip(calls, results, strict=True))

    def _unparsed(self, error: str) -> Answer:
        """Count a reply with a call that cannot be read, and return the answer to it."""
        self._parse_errors += 1
        text = self._limits.shortened(f"The tool call could not be read: {escape_surrogates(error)}")
        end = "max_turns" if self._turns >= self._limits.max_turns else ""
        end = "parse_error" if self._parse_errors > self._limits.max_parse_errors else end
        messages = ({"role": "user", "content": text},)
        return Answer(messages, end=end, metrics={"tool_errors/unparsed": 1.0}, tool_errors=1)

    def _stepped(self, message: Message, calls: Sequence[Any], alone: bool) -> Answer:
        """Return the answer of the environment's ``step``; ``alone``: nothing else answers the reply."""
        reply = {**message, "tool_calls": list(calls)} if calls else message
        outcome = self._call(functools.partial(self.environment.step, reply), check_step)
        if outcome.status != "ok":
            return self._failure(outcome, "step")
        step: Step = outcome.value
        if not step.messages and not step.done and alone:
            silent = ValueError("it returned neither messages nor done=True, so the model has nothing to answer")
            return self._failure(CallOutcome("error", error=silent), "step")
        messages = list(step.messages)
        for index, part in enumerate(messages):
            if part["role"] == "tool":
                messages[index] = {**part, "content": self._limits.shortened(part["content"])}
        end = ("tool_stopped" if calls else "completed") if step.done else ""
        return Answer(tuple(messages), step.reward, end, step.metrics, state=step.state)


def _deep_copy(value: Any) -> Any:
    """Return a deep copy, so that foreign code cannot change the caller's value; a value nested too deeply as it is."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return value
