"""What JAX compiles: named while it happens, and its seconds counted, which no later step takes again."""

import logging
import threading
import time
from typing import Any

PHASES = "/jax/core/compile/"
"""How JAX's events of tracing, lowering and compiling begin; each is told when it begins and when it has ended."""
PROGRAMS = {
    "run_chunk": "sampling",
    "empty_slots": "sampling",
    "fill_slots": "sampling",
    "extend_prompts": "the reading of prompts",
    "update": "the update",
    "score": "log-probabilities",
    "<lambda>": "a program",
}
"""The large programs by the names of their functions; others are told by those names."""
CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""JAX's event of a program that was read from its cache, within that program's compilation."""
COMPILE = "backend_compile"
DONE = {"jaxpr_trace": "traced", "jaxpr_to_mlir_module": "lowered", COMPILE: "compiled"}
SHORTEST_TOLD_S = 0.3
SHORTEST_KEPT_S = 1.0
"""JAX keeps in its cache what takes at least this long to compile."""

log = logging.getLogger(__name__)


class Compiling:
    """Owner of the listeners that hear of JAX's compilations; a context manager.

    Attributes:
      seconds: that have gone into compilations which have ended, programs read from the cache included.
      read: programs that the cache had.
      compiled: programs that it could have had, and had not.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.read = 0
        self.compiled = 0
        self._reading: set[int] = set()  # threads, within a program that the cache has
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[str, float]]] = {}  # by thread: what is traced may trace other programs

    def __enter__(self) -> "Compiling":
        import jax.monitoring

        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_listener(self._happens)
        jax.monitoring.register_event_duration_secs_listener(self._ends)
        return self

    def __exit__(self, *exception: object) -> None:
        import jax.monitoring

        jax.monitoring.unregister_scalar_listener(self._begins)
        jax.monitoring.unregister_event_listener(self._happens)
        jax.monitoring.unregister_event_duration_listener(self._ends)

    def slower(self, step: int) -> str:
        """That this first step takes longer; empty where all so far that is worth keeping was read from the cache."""
        if self.read > 0 and self.compiled == 0:
            return ""
        return (
            f"step {step} takes longer than those after it: it also compiles its programs, unless JAX's cache has them"
        )

    def now(self) -> tuple[str, float] | None:
        """What is being compiled, and for how many seconds; None while nothing is, or nothing worth telling."""
        with self._lock:
            outermost = [programs[0] for programs in self._open.values() if programs]
        for name, since in outermost:
            if time.monotonic() - since >= SHORTEST_TOLD_S:
                return name, time.monotonic() - since
        return None

    def _begins(self, event: str, value: float, **about: Any) -> None:
        if event.startswith(PHASES) and "fun_name" in about:
            with self._lock:
                self._open.setdefault(threading.get_ident(), []).append((named(about["fun_name"]), time.monotonic()))

    def _happens(self, event: str, **about: Any) -> None:
        if event == CACHE_HIT:
            with self._lock:
                self._reading.add(threading.get_ident())

    def _ends(self, event: str, seconds: float, **about: Any) -> None:
        with self._lock:
            begun = self._open.get(threading.get_ident())
            if not begun or not event.startswith(PHASES) or "fun_name" not in about:
                return
            name, _ = begun.pop()
            what = event.removeprefix(PHASES).removesuffix("_duration")
            read = what == COMPILE and threading.get_ident() in self._reading
            if what == COMPILE:
                self._reading.discard(threading.get_ident())
                self.read += read
                self.compiled += not read and seconds >= SHORTEST_KEPT_S
            if begun:
                return
            self.seconds += seconds
        if seconds >= SHORTEST_TOLD_S:
            done = f"read {name} from JAX's cache" if read else f"{DONE.get(what, what)} {name}"
            log.info("%s in %.1f s", done, seconds)


def named(function: str) -> str:
    """A program in words, by its function as JAX calls it: ``jit(update)`` and ``update`` are the update."""
    function = function.removeprefix("jit(").removesuffix(")")
    return PROGRAMS.get(function, function.strip("_"))
