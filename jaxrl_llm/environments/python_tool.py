"""A Python interpreter as a tool: programs of the model run in the sandbox, and each sees what earlier ones defined."""

import json
from typing import Any

from jaxrl_llm.rewards.sandbox import run_python

PROGRAM = """
import ast, contextlib, io, json
names = {"__name__": "__main__"}
earlier, code = json.loads(CODES)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for text in earlier:
        exec(compile(text, "<earlier>", "exec"), names)
tree = ast.parse(code, "<python>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "<python>", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
    if value is not None:
        print(repr(value))
"""
"""Runs the texts of ``CODES``: earlier ones without output, and the last one as an interactive session would."""
REASONS = {
    "timeout": "it took longer than {0.timeout_s:g} seconds",
    "memory": "it used more than {0.memory_mb} MiB of memory",
    "output": "it wrote too much",
}
OWN = '  File "<python>"'
"""The beginning of the last line of a traceback that is about the model's program: it reads what follows."""


class PythonTool:
    """The environment ``Task(environment=PythonTool)``: its tool ``python`` runs a program in the sandbox.

    An episode's state is the text of its programs: those that ended well are run again, without their output, before
    the next one. So no process waits for the model, a branch of an episode is a copy of the texts, and programs should
    be quick: the time of earlier ones counts. What they draw at random is drawn anew, unless they set a seed.

    A subclass may set other limits.

    Attributes:
      timeout_s: seconds for a program with the earlier ones.
      memory_mb: MiB of memory.
    """

    timeout_s: float = 2.0
    memory_mb: int = 256

    def __init__(self) -> None:
        self._earlier: tuple[str, ...] = ()

    def reset(self) -> None:
        """Begin an episode with no names defined."""
        self._earlier = ()

    def python(self, code: str) -> str:
        """Run a Python program. Names that earlier programs defined are still known.

        Args:
            code: The program. What it prints is returned, and the value of its last line.

        Returns:
            The output, or the error.
        """
        found = run_python(
            f"CODES = {json.dumps([self._earlier, code])!r}\n{PROGRAM}",
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
        )
        if found.status == "ok":
            self._earlier = (*self._earlier, code)
            return found.stdout or "(no output)"
        if found.status == "refused":
            raise RuntimeError(found.stderr)
        _, own, told = found.stderr.strip().rpartition(OWN)
        reason = REASONS[found.status].format(self) if found.status in REASONS else f"{own}{told}".strip()
        return f"{found.stdout}Error: {reason}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PythonTool":
        other = type(self)()
        other._earlier = self._earlier
        return other
