import functools
import re

import pytest
from environments.worlds import USER, Counting, Guess, begun, call, contents, multiply, says

from jaxrl_llm.environments import Environment, Factory, Limits
from jaxrl_llm.errors import InputError

HERE = "environments.worlds"


def names(schemas):
    return [schema["function"]["name"] for schema in schemas]


def test_tools_alone_make_an_environment():
    factory = Factory(tools=[multiply])
    assert names(factory.tools({})) == ["multiply"]
    assert factory.copyable and not factory.rewards


@pytest.mark.parametrize("given", [Guess, lambda: Guess(), functools.partial(Guess), f"{HERE}:Guess"])
def test_a_class_a_callable_and_a_text_make_the_same_environment(given):
    factory = Factory(given, [f"{HERE}:multiply"])
    assert names(factory.tools({})) == ["guess", "hint", "multiply"]
    assert factory.rewards and not factory.copyable


def test_the_row_names_one_of_several_environments_which_does_not_see_the_name():
    factory = Factory({"guess": Guess, "count": Counting}, [multiply])
    assert names(factory.tools({"environment": "guess"})) == ["guess", "hint", "multiply"]
    assert names(factory.tools({"environment": "count"})) == ["peek", "multiply"]
    world = factory.world({"environment": "guess", "secret": 3, "level": 1}, 0, Limits())
    world.reset(USER)
    assert world.environment.instance.kwargs == {"level": 1}
    for row, said in [
        ({}, "is None"),
        ({"environment": ["guess"]}, "is ['guess']"),
        ({"environment": "gues"}, "did you mean guess?"),
    ]:
        with pytest.raises(InputError, match=re.escape(said)):
            factory.world(row, 0, Limits())


def test_a_single_environment_sees_the_column_of_that_name():
    world = begun(Guess, row={"secret": 3, "environment": "x"})
    assert world.environment.instance.kwargs == {"environment": "x"}


def test_each_episode_has_an_instance_of_its_own():
    factory = Factory(Guess)
    worlds = [factory.world({"secret": secret}, 0, Limits()) for secret in (3, 4)]
    for world in worlds:
        world.reset(USER)
    assert [contents(world.reply(says("", call("guess", number=3)))) for world in worlds] == [["right"], ["wrong"]]


class NoReset:
    """Nothing."""


class Needy:
    def __init__(self, server): ...


class Wrong(Environment):
    tools = (multiply,)


class Silent:
    def reset(self): ...

    def act(self): ...


class Hides:
    def reset(self, **kwargs): ...

    def multiply(self) -> int:
        """Multiply."""
        return 0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Guess(), "environment is a Guess: give its class"),
        (Counting(), "environment is a Counting: give its class"),
        (3, "environment is a int: give its class"),
        (NoReset, "environment makes a NoReset, which has no method reset"),
        (lambda: None, "environment makes a NoneType, which has no method reset"),
        (Needy, "environment makes no environment (TypeError: "),
        (lambda: 1 / 0, "environment makes no environment (ZeroDivisionError: division by zero)"),
        ({}, "environment is an empty dict"),
        ({"a": Guess, "b": NoReset}, "environment 'b' makes a NoReset"),
        (f"{HERE}:Gess", "did you mean Guess?"),
        ("nowhere", "names no function"),
        (Wrong, "environment has tools without schema"),
        (Silent, "tool Silent.act has no docstring"),
        (Hides, "two tools of environment are called multiply: rename one"),
    ],
)
def test_what_makes_no_environment_is_refused_on_one_line(environment, said):
    with pytest.raises(InputError) as refused:
        Factory(environment, [multiply])
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("tools", [multiply, "x:y", {"multiply": multiply}])
def test_tools_are_a_list(tools):
    with pytest.raises(InputError, match="give a list of functions"):
        Factory(tools=tools)


def test_the_probe_is_closed():
    closed = []

    class Closing(Environment):
        def close(self):
            closed.append(self)

    Factory(Closing)
    assert len(closed) == 1


def test_an_environment_can_be_copied_if_it_says_so():
    class Copying(Guess):
        def __deepcopy__(self, memo):
            return Copying()

    assert Factory(Counting).copyable and Factory(Copying).copyable
    assert not Factory({"a": Counting, "b": Guess}).copyable
