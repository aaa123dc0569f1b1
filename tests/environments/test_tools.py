import functools
import math
from typing import Literal

import pytest
from environments.worlds import Guess, multiply

from jaxrl_llm.environments.environment import methods_of, schema_of, tools_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.messages import schema_name


def search(query: str, kind: Literal["web", "news"] = "web", limit: int | None = None) -> str:
    """Search.

    Args:
      query: what to look for,
        in a few words.
      kind: of pages.
      limit: of results.
    """
    return query


def test_a_schema_has_the_hints_the_docstring_and_what_is_required():
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in a few words."},
                    "kind": {"type": "string", "enum": ["web", "news"], "description": "of pages."},
                    "limit": {"type": "integer", "nullable": True, "description": "of results."},
                },
                "required": ["query"],
            },
            "return": {"type": "string"},
        },
    }


def no_hints(a):
    """Do.

    Args:
      a: it.
    """


def no_docstring(a: int): ...


def no_argument_in_docstring(a: int):
    """Do."""


def many(*args: int):
    """Do."""


def anything(**options: int):
    """Do."""


def by_place(a: int, /):
    """Do.

    Args:
      a: it.
    """


def of_a_class(a: Guess):
    """Do.

    Args:
      a: it.
    """


def unknown_hint(a: "Nowhere"):  # noqa: F821
    """Do.

    Args:
      a: it.
    """


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (no_hints, "tool no_hints has no type hint for a: write a: int"),
        (no_docstring, "tool no_docstring has no docstring"),
        (
            no_argument_in_docstring,
            "no_argument_in_docstring because the docstring has no description for the argument",
        ),
        (many, "tool many takes *args: int, and a model gives arguments by name"),
        (anything, "tool anything takes **options: int"),
        (by_place, "tool by_place takes a: int, and"),
        (of_a_class, "tool of_a_class has no schema (Couldn't convert the type hint"),
        (unknown_hint, "tool unknown_hint has no schema (name 'Nowhere' is not defined)"),
        (lambda a: a, "tool <lambda> has no name that a model could call"),
        (functools.partial(multiply, 2), "tool partial has no name"),
        (Guess, "tool Guess is a class: give a function"),
        (3, "tool int is a int: give a function"),
        (math.sqrt, "tool sqrt takes x, and"),
        (print, "tool print"),
        (dict.get, "tool get takes self"),
    ],
)
def test_what_makes_no_tool_is_refused_on_one_line(tool, said):
    with pytest.raises(InputError) as refused:
        schema_of(tool)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(InputError, match="two tools are called multiply: rename one"):
        tools_of([multiply, multiply])


class Base:
    def inherited(self) -> str:
        """Do what the base does."""
        return "base"

    def overridden(self) -> str:
        """Do what the base does."""
        return "base"


class Odd(Base):
    def __init__(self):
        self.stored = lambda: 1

    def reset(self, **kwargs): ...

    def get_reward(self):
        return 1.0

    @property
    def state(self):
        raise RuntimeError("a property is no tool, and nobody looks at it")

    @functools.cached_property
    def slow_state(self):
        raise RuntimeError

    def _private(self): ...

    def __dunder__(self): ...

    @classmethod
    def made(cls): ...

    @staticmethod
    def double(a: int) -> int:
        """Double.

        Args:
          a: it.
        """
        return 2 * a

    async def later(self) -> str:
        """Do later."""
        return "later"

    def overridden(self) -> str:
        """Do what this class does."""
        return "odd"


def test_public_methods_are_tools_inherited_static_and_async_ones_too():
    found = methods_of(Odd())
    assert set(found) == {"inherited", "overridden", "double", "later"}
    assert found["overridden"].function() == "odd"
    assert found["overridden"].schema["function"]["description"] == "Do what this class does."
    assert found["double"].function(a=2) == 4
    assert not any(tool.apart for tool in found.values())


def test_a_method_that_is_no_tool_is_refused_by_its_class_and_name():
    class Silent:
        def act(self): ...

    with pytest.raises(InputError, match=r"tool Silent\.act has no docstring"):
        methods_of(Silent())


@pytest.mark.parametrize("schema", [None, 3, {}, {"function": 3}, {"function": {"name": 3}}, multiply])
def test_what_is_no_schema_has_no_name(schema):
    assert schema_name(schema) == ""
    assert schema_name(schema_of(multiply)) == "multiply"
