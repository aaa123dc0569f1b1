"""Environments of a task's rows: from a class, a callable, several by name, a text that names one, and tools."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.environments.environment import DuckTyped, Environment, Limits, Tool, can_copy, tools_of
from jaxrl_llm.environments.world import Caller, World
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.tasks.filters import resolve
from jaxrl_llm.tasks.messages import schema_name

COLUMN = "environment"
"""Column of the row that names its environment, where a task has several."""
PROBE_S = 60.0
"""Seconds in which the first instance of an environment must be made."""


class Factory:
    """Environments of one task's rows, as its settings ``environment`` and ``tools`` give them.

    Args:
      environment: a class, a callable without parameters, its ``module:name``, a dict of such by the row's column
        ``environment``, or None for tools alone; it makes an ``Environment``, or an object after TRL's interface.
      tools: functions that every row's model may call, or texts that name them.

    Raises:
      InputError: what is given makes no environment, or a tool has no schema.
    """

    def __init__(self, environment: Any = None, tools: Iterable[Any] = ()):
        require(
            isinstance(tools, Iterable) and not isinstance(tools, (str, Mapping)),
            f"tools is a {type(tools).__name__}: give a list of functions",
        )
        functions = [resolve(tool) if isinstance(tool, str) else tool for tool in tools]
        self.functions: dict[str, Tool] = tools_of(functions)
        self._by_name = isinstance(environment, Mapping)
        environments = dict(environment) if isinstance(environment, Mapping) else {None: environment}
        require(bool(environments), "environment is an empty dict: give at least one environment")
        self._makers = {name: _maker(maker, _label(name)) for name, maker in environments.items()}
        probes = {name: self._probe(name) for name in self._makers}
        self._tools = {name: self._schemas(probe, _label(name)) for name, probe in probes.items()}
        self.copyable = all(can_copy(probe) for probe in probes.values())
        """Whether every environment can be copied, as branches need it."""
        self.rewards = any(isinstance(probe, DuckTyped) and probe.reward is not None for probe in probes.values())
        """Whether an environment has a reward of its own, ``get_reward``."""

    def world(self, row: Mapping[str, Any], seed: int, limits: Limits) -> World:
        """Return the world of an episode of a row; its environment is made on the episode's own thread, at its reset.
        InputError: there are several environments, and the row names none of them.
        """
        visible_row = {name: value for name, value in row.items() if not (self._by_name and name == COLUMN)}
        return World(self._makers[self._name(row)], visible_row, seed, limits, self.functions)

    def tools(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the tools that a row's model may call."""
        return self._tools[self._name(row)]

    def _name(self, row: Mapping[str, Any]) -> Any:
        if not self._by_name:
            return None
        name = row.get(COLUMN)
        if not isinstance(name, Hashable) or name not in self._makers:
            names = ", ".join(map(str, self._makers))
            hint = did_you_mean(str(name), map(str, self._makers), f"it may be {names}")
            raise InputError(f"the row's column {COLUMN} is {name!r}, which the task's environments lack; {hint}")
        return name

    def _probe(self, name: Any) -> Environment:
        caller = Caller()
        outcome = caller.call(self._makers[name], PROBE_S)
        if outcome.status != "ok" and not isinstance(outcome.error, InputError):  # once may be the network's fault
            outcome = caller.call(self._makers[name], PROBE_S)
        if isinstance(outcome.error, InputError):
            raise outcome.error
        require(
            outcome.status == "ok",
            f"{_label(name)} makes no environment ({outcome.reason(PROBE_S)}); give a class or a function without "
            f"parameters that makes one",
        )
        caller.call(outcome.value.close, PROBE_S)
        caller.close()
        return outcome.value

    def _schemas(self, probe: Environment, label: str) -> tuple[Mapping[str, Any], ...]:
        schemas = list(probe.tools)
        names = [schema_name(schema) for schema in schemas]
        require(
            all(names),
            f"{label} has tools without schema: write each as {{'type': 'function', 'function': {{'name': ...}}}}; "
            "functions belong to the task's tools",
        )
        twice = {name for name in names if name in self.functions or names.count(name) > 1}
        require(not twice, f"two tools of {label} are called {', '.join(sorted(twice))}: rename one")
        return (*schemas, *(tool.schema for tool in self.functions.values()))


def _label(name: Any) -> str:
    return "environment" if name is None else f"environment {name!r}"


def _maker(environment: Any, label: str) -> Callable[[], Environment]:
    if isinstance(environment, str):
        environment = resolve(environment)
    if environment is None:
        return Environment
    require(
        callable(environment) and not isinstance(environment, Environment),
        f"{label} is a {type(environment).__name__}: give its class, or a function that makes one, since each "
        f"episode has its own",
    )

    def make() -> Environment:
        instance = environment()
        if isinstance(instance, Environment):
            return instance
        require(
            callable(getattr(type(instance), "reset", None)),
            f"{label} makes a {type(instance).__name__}, which has no method reset: derive it from "
            f"jaxrl_llm.Environment, or give it reset(**row) and methods that are tools",
        )
        return DuckTyped(instance)

    return make
