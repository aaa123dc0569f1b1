"""How well the default tests catch faults: 60 one-line mutations of the package.

    python tools/mutate.py REV            # draw at REV, apply each to this tree, run the tests; can be resumed
    python tools/mutate.py REV --list     # the mutations alone

The mutations are drawn once, by hashes of the revision: operators, comparisons, numbers off by one, dropped terms and
negations inside functions, at most three in a module, none in the sandbox. One whose line has gone from this tree is
passed over.

First all tests run once with probes in place of mutations, which record the test files that come past each, also in
the processes that they start. A mutation meets the default tests of those files and of its room; if it lives, the other
tests of the files that come past it in these.
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutations"
COUNT, PER_MODULE = 60, 3
SETS = {"default": "not (slow or campaign or compilers)", "rest": "slow or campaign or compilers"}
"""The sets of tests, by the expression of markers that selects each."""
COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
PROBE = """import os
seen = set()
def pytest_runtest_logstart(nodeid, location):
    os.environ["REACHED_TEST"] = nodeid.split("::")[0]
def hit(number):
    test = os.environ.get("REACHED_TEST", "")
    if test and (number, test) not in seen:
        seen.add((number, test))
        try:
            with open(os.path.join(os.environ["REACHED"], str(os.getpid())), "a") as file:
                file.write(f"{number} {test}\\n")
        except (OSError, KeyError):
            pass
"""
NEVER = "jaxrl_llm/sandbox/"
"""Modules that are left as they are: their tests run hostile programs, and a broken sandbox lets these delete files."""


@dataclass(frozen=True)
class Mutation:
    """One line of a module at the revision: its text, the columns (bytes) replaced, and what stands there then."""

    module: str
    line: int
    text: str
    begin: int
    end: int
    new: str

    @property
    def mutated(self) -> str:
        raw = self.text.encode()
        return (raw[: self.begin] + self.new.encode() + raw[self.end :]).decode()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def changes(node: ast.AST, raw: list[bytes]):
    """(begin, end, new) for each way to change a node that stands on one line."""
    text = raw[node.lineno - 1]

    def between(left: ast.AST, right: ast.AST, old: str, new: str):
        at = text.find(old.encode(), left.end_col_offset, right.col_offset)
        if at >= 0:
            yield at, at + len(old), new

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from between(node.left, node.comparators[0], *COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        if not any(isinstance(side, (ast.JoinedStr, ast.Tuple, ast.List)) for side in (node.left, node.right)):
            yield from between(node.left, node.right, *COMPUTED[type(node.op)])
            yield node.left.end_col_offset, node.right.end_col_offset, ""
    elif isinstance(node, ast.BoolOp):
        old = "and" if isinstance(node.op, ast.And) else "or"
        yield from between(node.values[0], node.values[1], old, "or" if old == "and" else "and")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node.col_offset, node.end_col_offset, str(node.value + 1)


def mutations_of(module: str, source: str):
    """Yield all mutations inside functions, not of docstrings, annotations or decorators."""
    raw = [line.encode() for line in source.split("\n")]
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    nodes = {}
    for function in functions:
        for statement in function.body:
            for node in ast.walk(statement):
                if hasattr(node, "lineno") and node.lineno == node.end_lineno:
                    nodes[id(node)] = node
    seen = {}
    for node in nodes.values():
        for begin, end, new in changes(node, raw):
            seen[Mutation(module, node.lineno, raw[node.lineno - 1].decode(), begin, end, new)] = None
    yield from seen


def parses(mutation: Mutation, tree: Path) -> bool:
    """Whether a tree's module is Python with a mutation."""
    lines = (tree / mutation.module).read_text().split("\n")
    lines[place(mutation, tree)] = mutation.mutated
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def drawn(revision: str) -> list[Mutation]:
    """All mutations of the package at a revision in the order in which they are drawn."""
    commit = git("rev-parse", revision).strip()
    found = []
    for module in git("ls-tree", "-r", "--name-only", commit, "jaxrl_llm").split():
        if module.endswith(".py") and not module.startswith(NEVER):
            found += mutations_of(module, git("show", f"{commit}:{module}"))
    return sorted(found, key=lambda one: hashlib.sha256(f"{commit} {asdict(one)}".encode()).digest())


def place(mutation: Mutation, tree: Path) -> int | None:
    """The index of a mutation's line in a tree: the one nearest to where it was; None where it has gone."""
    path = tree / mutation.module
    if not path.exists():
        return None
    lines = path.read_text().split("\n")
    same = [index for index, line in enumerate(lines) if line == mutation.text]
    return min(same, key=lambda index: abs(index + 1 - mutation.line), default=None)


def chosen(revision: str, tree: Path) -> list[Mutation]:
    """The first ``COUNT`` whose lines the tree still has, at most ``PER_MODULE`` in a module."""
    modules, picked, lines = Counter(), [], set()
    for mutation in drawn(revision):
        line = (mutation.module, mutation.line)
        if len(picked) == COUNT:
            break
        fresh = modules[mutation.module] < PER_MODULE and line not in lines
        if fresh and place(mutation, tree) is not None and parses(mutation, tree):
            modules[mutation.module] += 1
            lines.add(line)
            picked.append(mutation)
    return picked


def apply(mutation: Mutation, tree: Path) -> None:
    path = tree / mutation.module
    lines = path.read_text().split("\n")
    lines[place(mutation, tree)] = mutation.mutated
    path.write_text("\n".join(lines))


def probed(mutations: list[Mutation], tree: Path) -> None:
    """Insert before each mutation's statement what records that it was reached."""
    at = {}
    for number, mutation in enumerate(mutations):
        source = (tree / mutation.module).read_text()
        line = place(mutation, tree) + 1
        holds = []
        for node in ast.walk(ast.parse(source)):
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(node, block, None)
                elif_ = (
                    block == "orelse"
                    and isinstance(node, ast.If)
                    and len(statements) == 1
                    and isinstance(statements[0], ast.If)
                )
                if isinstance(statements, list) and not elif_:
                    holds += [
                        one for one in statements if isinstance(one, ast.stmt) and one.lineno <= line <= one.end_lineno
                    ]
        statement = min(holds, key=lambda one: one.end_lineno - one.lineno)
        at.setdefault(mutation.module, []).append((statement.lineno, statement.col_offset, number))
    for module, places in at.items():
        lines = (tree / module).read_text().split("\n")
        for line, column, number in sorted(places, reverse=True):
            lines.insert(line - 1, " " * column + f"__import__('_reached').hit({number})")
        (tree / module).write_text("\n".join(lines))


def copied(name: str) -> Path:
    """A copy of what git knows of this tree, as it is now."""
    target = BUILD / name
    shutil.rmtree(target, ignore_errors=True)
    for file in git("ls-files", "-co", "--exclude-standard").split("\n"):
        if file and (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)
    return target


def pytest(tree: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(BUILD / "jax_cache"))
    env = os.environ | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": cache} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def reached(mutations: list[Mutation], name: str, which: str) -> dict[int, list[str]]:
    """Test files by mutation, of a run of tests (an expression of markers) with probes; kept by a name."""
    kept = BUILD / f"reached_{name}.json"
    if not kept.exists():
        tree, records = copied("probed"), BUILD / f"records_{name}"
        probed(mutations, tree)
        (tree / "_reached.py").write_text(PROBE)
        records.mkdir(parents=True, exist_ok=True)
        _, output = pytest(tree, "-p", "_reached", "-m", which, REACHED=str(records))
        (BUILD / f"reached_{name}.log").write_text(output)
        files = {}
        for record in records.iterdir():
            for line in record.read_text().splitlines():
                number, _, file = line.partition(" ")
                files.setdefault(number, set()).add(file)
        kept.write_text(json.dumps({number: sorted(names) for number, names in files.items()}))
    return {int(number): names for number, names in json.loads(kept.read_text()).items()}


def verdict(mutation: Mutation, number: int, sets: dict[str, dict[int, list[str]]]) -> dict[str, object]:
    """Which set of tests kills a mutation: "default", "rest" or none, and the first test that does."""
    tree = copied("mutated")
    apply(mutation, tree)
    room = str(Path("tests") / Path(mutation.module).relative_to("jaxrl_llm").parent)
    own = [str(path.relative_to(tree)) for path in sorted((tree / room).glob("test_*.py"))] if room != "tests" else []
    for name, which in SETS.items():
        others = [file for file in sets[name].get(number, []) if file not in own and (tree / file).exists()]
        files = own + others
        workers = ["-n0"] if len(files) <= 2 else []
        status, output = pytest(tree, "-x", *workers, "-m", which, *files) if files else (0, "")
        if status not in (0, 5):
            failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return {"killed": name, "by": failed[0][:200] if failed else output[-300:]}
    return {"killed": None, "by": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--list", action="store_true", help="print the mutations alone")
    asked = parser.parse_args()
    command = ["git", "rev-parse", "--verify", "--quiet", f"{asked.revision}^{{commit}}"]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        parser.error(f"no revision {asked.revision} in this repository")
    mutations = chosen(asked.revision, ROOT)
    if asked.list:
        for one in mutations:
            print(f"{one.module}:{one.line}\n-{one.text}\n+{one.mutated}")
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    sets = {name: reached(mutations, name, which) for name, which in SETS.items()}
    records = BUILD / "verdicts.jsonl"
    lines = map(json.loads, records.read_text().splitlines()) if records.exists() else ()
    done = {(line["module"], line["line"], line["begin"], line["new"]): line for line in lines}
    for number, mutation in enumerate(mutations):
        key = (mutation.module, mutation.line, mutation.begin, mutation.new)
        if key not in done:
            began = time.monotonic()
            line = done[key] = {**asdict(mutation), **verdict(mutation, number, sets)}
            line["seconds"] = round(time.monotonic() - began)
            with records.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(number, mutation.module, mutation.line, line["killed"], line["seconds"], flush=True)
    count = Counter(line["killed"] for line in done.values())
    whole = count["default"] + count["rest"]
    print(f"{count['default']} of {whole} that the whole suite kills; {count[None]} live")


if __name__ == "__main__":
    main()
