"""Strict numerics on 8 virtual devices for the whole suite; set before anything imports jax."""

import ctypes
import gc
import os
import re
import signal
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Environment, not jax.config: the processes that some tests start are then held to the same rules.
os.environ.update(
    JAX_NUM_CPU_DEVICES="8",
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
    # Several test processes compile for TPUs that are not there; none of them owns a chip.
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA starts as many threads as there are devices: two programs at once would take them from each other and wait for
# ever.
os.environ.setdefault("PJRT_NPROC", "32")
# 8 devices that share a busy core may wait for each other for long; XLA would end the process after 40 seconds.
PATIENT = ("--xla_cpu_collective_call_terminate_timeout_seconds=600", "--xla_cpu_collective_timeout_seconds=600")
# Workers share the cores already: a program that is split to be compiled by several threads only costs more.
UNSPLIT = "--xla_cpu_parallel_codegen_split_count=1"
# What XLA fuses goes to LLVM at once, not by way of MLIR, and is there in half the time. JAX 0.12 has this choice no
# more, and ends a process that asks for it.
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
DIRECT = ("--xla_cpu_use_fusion_emitters=false",) if JAXLIB < (0, 12) else ()
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *PATIENT, UNSPLIT, *DIRECT)).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
# Tests compile many small programs; jax would keep only those that took a second.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def _hang_up(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


# Tests lose terminals. The processes that they start would not hear of it if this one ignored the signal, as it does
# under nohup, and from when libtpu is loaded unless there is a handler.
signal.signal(signal.SIGHUP, _hang_up)

# What JAX has traced stays for the whole session: looking through all of it for garbage is in vain.
gc.set_threshold(100_000, 20, 100)

import jax  # noqa: E402  after its environment, as what imports it
import pytest  # noqa: E402
from tiny import compiled  # noqa: E402

from jaxrl_llm.plan.machines import compiles_for_gpus  # noqa: E402
from jaxrl_llm.rewards.sandbox import LEVELS, level  # noqa: E402
from jaxrl_llm.telemetry.screens import resident_bytes  # noqa: E402

SOONER = (
    "algorithms", "checkpoints", "cli", "collection", "config", "end_to_end", "engine", "examples", "learner", "models",
    "rewards", "rl", "rollout", "rules", "runs", "sharding", "stages", "system", "tests", "tools", "trainer",
)  # fmt: skip
"""Folders whose programs run once or twice, and so are compiled without XLA's optimisations, but where a module is
``OPTIMISED``."""


@pytest.fixture(autouse=True, scope="module")
def compiled_sooner(request):
    """XLA's optimisations are most of its time."""
    sooner = request.path.parent.name in SOONER and not getattr(request.module, "OPTIMISED", False)
    with compiled(optimised=not sooner):
        yield


ROOM = 3 << 29
"""Bytes by which a process of tests may grow before it lets go of what it has compiled."""
HELD = {"bytes": 0}
"""What this process held when it last let go."""


@pytest.fixture(autouse=True, scope="module")
def room():
    """What files before have compiled goes: 4 MB for a program would come to 6 GB in each process of tests."""
    yield
    if (resident_bytes() or 0) > HELD["bytes"] + ROOM:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the C library would keep it
        HELD["bytes"] = resident_bytes()


@pytest.fixture(autouse=True, scope="module")
def same_cache():
    """The cache is that of all tests again after a module that has had others (``storages.on_another_machine``)."""
    before = os.environ.get("JAXRL_LLM_CACHE")
    yield
    os.environ.pop("JAXRL_LLM_CACHE", None)
    os.environ |= {} if before is None else {"JAXRL_LLM_CACHE": before}


COMPILERS = find_spec("libtpu") is not None and compiles_for_gpus()
"""Whether programs can be compiled for TPUs and GPUs that are not there."""


DEFAULT = "not (slow or campaign or compilers)"
"""The expression of markers in pyproject.toml, which selects the default set."""
WHOLE_FILE = re.compile(r"^pytestmark = .*\b(slow|campaign|compilers)\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """One way to run everything."""
    parser.addoption("--all", action="store_true", help="run all tests, the default set or not")


def pytest_configure(config: pytest.Config) -> None:
    """Of files that are named on the command line all tests run, unless -m says otherwise."""
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
    else:
        asked = [str(one) for one in config.invocation_params.args]
        named = any(".py" in one for one in asked) and not any(one.startswith("-m") for one in asked)
        if config.option.all or named:
            config.option.markexpr = ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes that run tests read the command line anew: give them the expression that this one has decided on."""
    node.workerinput["markexpr"] = node.config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the default set are not even imported for it."""
    return True if config.option.markexpr == DEFAULT and left_out(collection_path) else None


def left_out(path: Path) -> bool:
    """Whether all tests of a file are outside the default set."""
    return path.suffix == ".py" and WHOLE_FILE.search(path.read_text()) is not None


def pytest_collection_finish() -> None:
    """What is imported stays too: ``room`` would look through it again and again."""
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is left out, and how to run it."""
    missing = "missing, so their tests are left out; pip install -e '.[compilers]'"
    left = "" if level() == LEVELS[-1] else "; tests of higher levels are left out"
    lines = [f"compilers of absent TPUs and GPUs: {'installed' if COMPILERS else missing}"] if config.option.all else []
    if config.option.markexpr == DEFAULT:
        texts = {path: path.read_text() for path in Path(__file__).parent.rglob("test_*.py")}
        slow = {path: len(re.findall(r"^ *@pytest\.mark\.slow$", text, re.MULTILINE)) for path, text in texts.items()}
        tests = {path: len(re.findall(r"^ *def test_", text, re.MULTILINE)) for path, text in texts.items()}
        out = sum(tests[path] if left_out(path) else slow[path] for path in texts)
        lines.append(
            f"the default set: {out} of {sum(tests.values())} test functions are left out; pytest --all runs them, "
            "after pip install -e '.[dev]'"
        )
    return [*lines, f"sandbox for programs: {level()}{left}"]


LONGEST = ("whole_runs", "resume", "notebooks", "processes", "planning", "your_own_run", "reranking", "kinds")
"""Files that take longest of all, or that lie behind many short ones by name."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """The longest files and whole runs first: what is last should be short, so that all workers end together."""
    unmatched: dict[str, set[str]] = {}
    for item in items:
        # ``slow(but=(ID, ...))``: these of a function's parameters are in the default set.
        mark = item.get_closest_marker("slow")
        if mark and "but" in mark.kwargs:
            kept = {mark.kwargs["but"]} if isinstance(mark.kwargs["but"], str) else {*mark.kwargs["but"]}
            unmatched.setdefault(item.nodeid.partition("[")[0], set(kept)).discard(item.callspec.id)
            if item.callspec.id in kept:
                item.own_markers = [one for one in item.own_markers if one.name != "slow"]
    if (wrong := {name: ids for name, ids in unmatched.items() if ids}) and "::" not in "".join(config.args):
        raise pytest.UsageError(f"slow(but=...) names parameters that are not there: {wrong}")
    absent = [] if COMPILERS else [item for item in items if item.get_closest_marker("compilers")]
    confined = [(item, mark.args[0]) for item in items if (mark := item.get_closest_marker("sandbox"))]
    if confined:
        absent += [item for item, asked in confined if LEVELS.index(asked) > LEVELS.index(level())]
    if absent:
        items[:] = [item for item in items if item not in absent]
        config.hook.pytest_deselected(items=absent)
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
    whole_runs = ("end_to_end", "tools")
    items.sort(key=lambda one: (ranks.get(one.path.stem, len(ranks)), one.path.parent.name not in whole_runs))
