"""The tool ``python``: programs in the sandbox, with the names of earlier ones."""

import pytest
from environments.worlds import begun, contents

from jaxrl_llm.environments import Factory
from jaxrl_llm.environments.calls import parse_reply
from jaxrl_llm.environments.examples import PythonTool
from jaxrl_llm.tasks import Task

pytestmark = pytest.mark.sandbox("landlock+seccomp")


class Impatient(PythonTool):
    """A subclass with other limits."""

    timeout_s = 0.3
    memory_mb = 64


@pytest.fixture
def tool():
    found = PythonTool()
    found.reset()
    return found


def test_a_program_sees_what_earlier_ones_defined(tool):
    assert tool.python("import math\nx = 6") == "(no output)"
    assert tool.python("def double(n):\n    return 2 * n\nprint('twice')") == "twice\n"
    assert tool.python("print('now')\ndouble(x) + math.floor(0.5)") == "now\n12\n", "earlier output is not repeated"
    assert tool.python("x += 1\nNone") == "(no output)" and tool.python("x") == "7\n", "each ran once in effect"
    tool.reset()
    assert "NameError: name 'x' is not defined" in tool.python("x")


def test_an_error_is_told_and_changes_nothing(tool):
    tool.python("x = 1")
    said = tool.python("x = 2\nprint('so far')\n1 / 0")
    assert said.startswith("so far\nError: ") and said.endswith("ZeroDivisionError: division by zero")
    assert len(said.splitlines()) <= 5 and "SyntaxError" in tool.python("x =")
    assert tool.python("x") == "1\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "longer than 0.3 seconds"),
        ("[0] * 10**9", "more than 64 MiB of memory"),
        ("open('/etc/passwd').read()", "/etc/passwd"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "Error: "),
        ("import os; os.kill(os.getppid(), 9)", "Error: "),
    ],
)
def test_a_program_has_limits_and_reaches_nothing(code, reason):
    tool = Impatient()
    said = tool.python(code)
    assert said.startswith("Error: ") and reason in said
    assert tool.python("1 + 1") == "2\n"


def test_it_is_an_environment_by_name_and_branches_keep_their_names():
    task = Task([{"prompt": "a", "answer": "1"}], environment=PythonTool)
    assert task.environment == "jaxrl_llm.environments.examples:PythonTool"
    factory = Factory(task.environment)
    (schema,) = factory.tools({})
    assert factory.copyable and schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    world = begun(PythonTool)
    call = '<tool_call>{{"name": "python", "arguments": {{"code": "{}"}}}}</tool_call>'.format
    assert contents(world.reply(parse_reply(call("n = 4"), "plain"))) == ["(no output)"]
    branch = world.copy()
    world.reply(parse_reply(call("n = 5"), "plain"))
    texts = [contents(one.reply(parse_reply(call("n * n"), "plain")))[0].strip() for one in (world, branch)]
    assert texts == ["25", "16"]
