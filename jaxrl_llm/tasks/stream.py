"""Prompt streams: an endless order of problems, a function of the seed and of the results so far. ``Shuffled`` asks the
problems of one task in epochs, ``Scheduled`` by a curriculum, ``Interleaved`` those of several tasks, each with its
exact share. Curricula: which problems a task asks, by how often each was solved. ``drop`` removes problems,
``easy_to_hard`` opens a growing share of the rest, ``prioritised`` sets how the open ones are drawn.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.setting import PATH, Range, Setting
from jaxrl_llm.tasks.tables import nested_field
from jaxrl_llm.types import Group, Problem

Memory = dict[str, Any]
"""Memory of a stream: JSON values and arrays, saved with the run. It is never changed, only replaced."""
OTHERS = "others"
"""Key, in the memory of a run's only task, of the number of prompts that asked other tasks in earlier phases: the
task's own prompts are numbered without them.
"""
COUNTED = "last"
"""Key, in the memory of a task that has had a curriculum, of the prompt that last asked each problem."""
NONE = -1
"""Value in place of a prompt's number if there was no prompt."""
ASKED = "asked"
"""Key, in the memory of a mixture, of the number of prompts asked of each task; the memory of each stream is under
``STREAMS``, and the counts from before the present shares under ``BEFORE``.
"""
STREAMS = "streams"
BEFORE = "before"


class PromptStream(Protocol):
    """Protocol of an order of problems; memory is passed in and returned, so that a resumed run asks equal problems."""

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the problem of prompt ``number`` of the run, counted from 0, and the new memory."""

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory after these groups of answers are scored."""

    def learns(self, memory: Memory) -> bool:
        """Whether what is observed changes what is asked next, or its order in the memory."""
        return True

    def metrics(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Return metrics and events of a step, from the memory before and after it."""
        return {}


@dataclasses.dataclass(frozen=True)
class Shuffled(PromptStream):
    """Stream in epochs, each a fresh permutation of all problems; results do not change it. ``problems``: all of them;
    ``seed``: of the permutations; ``counting``: stream that takes over if an earlier phase had a curriculum: it keeps
    its round and its counts.
    """

    problems: Sequence[Problem]
    seed: int
    counting: PromptStream | None = dataclasses.field(default=None, compare=False)
    _order: dict[int, np.ndarray] = dataclasses.field(default_factory=dict, init=False, compare=False)
    """Cache of the present epoch's permutation, by epoch; one for each stream, however many streams there are."""

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the problem at that position of the stream, and the memory."""
        if self.learns(memory):
            return self.counting.next(number, memory)
        epoch, position = divmod(number - memory.get(OTHERS, 0), len(self.problems))
        if epoch not in self._order:
            self._order.clear()
            self._order[epoch] = permutation(self.seed, epoch, len(self.problems))
        return self.problems[int(self._order[epoch][position])], memory

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory unchanged, unless an earlier phase had a curriculum: then its counts are updated."""
        return self.counting.observe(memory, groups) if self.learns(memory) else memory

    def learns(self, memory: Memory) -> bool:
        """Whether an earlier phase had a curriculum."""
        return self.counting is not None and COUNTED in memory


def problem_index(seed: int, cursor: int, size: int) -> int:
    """Return the index, in ``[0, size)``, of the problem at position ``cursor`` of the stream. Positions ``e * size``
    to ``(e + 1) * size - 1`` are epoch ``e``: a permutation of all problems, fresh for each (seed, epoch). A checkpoint
    needs one integer, the number of prompts consumed. InputError: size is 0, or seed or cursor is negative.
    """
    if size < 1 or seed < 0 or cursor < 0:
        raise InputError(f"no problem at seed {seed}, cursor {cursor}, size {size}; size starts at 1, the others at 0")
    epoch, position = divmod(cursor, size)
    return int(permutation(seed, epoch, size)[position])


@functools.lru_cache(maxsize=8)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the numbers below ``size`` in an order of their own for each (seed, epoch); shared, so never change it."""
    # Raw bits and a stable sort: NumPy promises their values across versions, and not those of its own shuffle.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")


def draw_index(weights: np.ndarray, seed: int, number: int) -> int:
    """Draw an index with probability in proportion to its weight; a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number))).random_raw()
    total = np.cumsum(weights)
    # Rounding may reach the total itself, and what has no weight is never drawn.
    index = int(np.searchsorted(total, (bits >> 11) * 2.0**-53 * total[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Streams of several tasks: after n prompts a task with share w of the weights has had w n prompts, within one. The
    next task is a function of the counts alone (``due_task``), so that no chance moves the balance. Each stream numbers
    its own prompts: its order does not depend on the other streams. ``streams``: by the label of their task;
    ``weights``: positive, by the same labels.
    """

    streams: Mapping[str, PromptStream]
    weights: Mapping[str, float]

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the next problem, from the task that is due, and the new memory."""
        counts = {label: memory.get(ASKED, {}).get(label, 0) for label in self.streams}
        before = memory.get(BEFORE, {})
        label = due_task({label: count - before.get(label, 0) for label, count in counts.items()}, self.weights)
        inner = memory.get(STREAMS, {})
        problem, new = self.streams[label].next(counts[label], inner.get(label, {}))
        return problem, memory | {ASKED: counts | {label: counts[label] + 1}, STREAMS: inner | {label: new}}

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory after each group is passed to the stream of its task."""
        inner = memory.get(STREAMS, {})
        remembered = {}
        for label in dict.fromkeys(group.problem.task for group in groups):
            task_groups = [group for group in groups if group.problem.task == label]
            remembered[label] = self.streams[label].observe(inner.get(label, {}), task_groups)
        return memory | {STREAMS: inner | remembered}

    def learns(self, memory: Memory) -> bool:
        """Whether any stream does."""
        inner = memory.get(STREAMS, {})
        return any(stream.learns(inner.get(label, {})) for label, stream in self.streams.items())

    def metrics(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Return each stream's metrics as ``task/<label>/...``; events keep their names."""
        metrics = {}
        for label, stream in self.streams.items():
            task_metrics = stream.metrics(*(memory.get(STREAMS, {}).get(label, {}) for memory in (before, after)))
            for name, value in task_metrics.items():
                metrics[name if name.startswith("event/") else f"task/{label}/{name}"] = value
        return metrics


Places = Mapping[str, tuple[int, Memory]]
"""Number of prompts that have asked each task, by its label, and the memory of its stream."""


def places_in(memory: Memory, labels: Sequence[str], prompts: int) -> Places:
    """Return the count and memory of each task in a stream's memory, after ``prompts`` of the run."""
    if len(labels) > 1:
        counts, streams = memory.get(ASKED, {}), memory.get(STREAMS, {})
        return {label: (counts.get(label, 0), streams.get(label, {})) for label in labels}
    task_memory = {name: value for name, value in memory.items() if name != OTHERS}
    return {label: (prompts - memory.get(OTHERS, 0), task_memory) for label in labels}


def resume_memory(places: Places, labels: Sequence[str], prompts: int) -> Memory:
    """Return a stream's memory in which each task resumes from its place (``places_in``); shares count from here."""
    if len(labels) > 1:
        counts = {label: count for label, (count, _) in places.items()}
        return {ASKED: counts, BEFORE: counts, STREAMS: {label: memory for label, (_, memory) in places.items()}}
    count, task_memory = places.get(labels[0], (0, {}))
    return task_memory | ({OTHERS: prompts - count} if prompts > count else {})


def due_task(counts: Mapping[str, int], weights: Mapping[str, float]) -> str:
    """Return the task that is due (R. Tijdeman, The chairman assignment problem, 1980): no count is ever a whole prompt
    away from its share. Among the tasks that one more prompt would not put too far ahead, it is the one that would fall
    behind first. ``counts``: prompts of each task so far; ``weights``: positive.
    """
    if len(weights) == 1:
        return next(iter(weights))
    total = sum(weights.values())
    number = sum(counts.values())
    slack = 1 / (2 * len(weights) - 2)
    due = {}  # after how many prompts the task's share exceeds its count by too much
    for label, weight in weights.items():
        share = weight / total
        if share * (number + 1) - counts[label] >= slack - 1e-9:  # shares are no exact fractions
            due[label] = (1 - slack - share * number + counts[label]) / share
    return min(due, key=due.__getitem__)


def of_tasks(streams: Sequence[tuple[str, float, PromptStream]]) -> PromptStream:
    """Join streams given as (label, weight, stream) into one; a single one is returned as it is."""
    if len(streams) == 1:
        return streams[0][2]
    return Interleaved({label: stream for label, _, stream in streams}, {label: weight for label, weight, _ in streams})


BY_SUCCESS = "success"
"""Value of ``EasyToHard.by`` that replaces a column: the more of its answers were right, the easier a problem is."""
PLACES = (COUNTED, "begun", "asked", "since")
"""Keys of a stream's memory that hold the places of prompts, as opposed to counts of results."""


@dataclasses.dataclass(frozen=True)
class Prioritised(Setting):
    """Drawing of problems with ``p ~ (1 - success) ** power``: Kimi k1.5 (arXiv 2501.12599, section 2.3.4), power 1.

    Each prompt draws anew, so one problem may come twice before another comes once.

    >>> weights = Prioritised()(np.array([0.9, 0.5, 0.1]))
    >>> (weights / weights.sum()).round(6).tolist()
    [0.066667, 0.333333, 0.6]

    Attributes:
      power: above 0.
    """

    power: Annotated[float, Range("(0, inf)", words="above 0")] = 1.0

    def __call__(self, success: np.ndarray) -> np.ndarray:
        """Return the unnormalised probability of drawing each problem, [N], from its estimated success."""
        return (1 - success) ** self.power


@dataclasses.dataclass(frozen=True)
class EasyToHard(Setting):
    """Schedule that opens only the easiest problems at first; their share grows evenly until all are open.

    ``start + (1 - start) * n / over`` of the remaining problems (not dropped) are open to prompt n of the task. Equally
    easy problems come in an order that the seed sets.

    Attributes:
      by: a column of the rows with a number for each problem (a dot reaches into a nested record); "success": how often
        it was solved so far, where a problem that was never asked counts as ``Curriculum.prior``.
      over: prompts of the task after which all problems are open; in a later phase from its first one on.
      start: the share that is open to the first prompt; above 0, at most 1.
      rising: the larger a column's number, the harder the problem; False the other way round.
    """

    by: str
    over: Annotated[int, Range("[1, inf]", words="at least 1 prompt")]
    start: Annotated[float, Range("(0, 1]")] = 0.2
    rising: bool = True

    def check(self, run: Any, where: str) -> None:
        """Refuse an order by nothing, and a direction where the order is by success."""
        require(bool(self.by), f"{where}by must be a column of the rows, or success, got {self.by!r}")
        reversed_success = self.by == BY_SUCCESS and not self.rising
        require(not reversed_success, f"{where}rising must be left out where by is success, got {self.rising}")

    def __call__(self, difficulty: np.ndarray, candidates: np.ndarray, number: int, ties: np.ndarray) -> np.ndarray:
        """Return which problems are open, bool[N], to prompt ``number``. ``difficulty``: [N]; ``candidates``: bool[N],
        those that are not dropped; ``ties``: int[N], a permutation: of equally easy problems smaller numbers come
        first.
        """
        total = int(candidates.sum())
        share = min(1.0, self.start + (1 - self.start) * number / self.over)
        count = math.ceil(share * total - 1e-9)  # a share's rounding opens no further problem
        if count >= total:
            return candidates
        hardest = np.partition(difficulty[candidates], count - 1)[count - 1]
        is_open = candidates & (difficulty < hardest)
        equal = np.flatnonzero(candidates & (difficulty == hardest))
        ties_open = count - int(is_open.sum())
        is_open[equal[np.argpartition(ties[equal], ties_open - 1)[:ties_open]]] = True
        return is_open


@dataclasses.dataclass(frozen=True)
class Dropping(Setting):
    """Removal of problems that were always, or never, solved: their groups teach nothing.

    Attributes:
      solved: a problem is dropped once all its answers were right in so many visits in a row; 0 for never.
      unsolved: a problem is dropped once no answer was right, even in part, in so many visits in a row; 0 for never.
      again: epochs, of as many prompts as there are problems, after which it is visited once more: one that is solved
        in part then is back, another waits as long again. 0 for never.
    """

    solved: Annotated[int, Range("[0, inf]")] = 3
    unsolved: Annotated[int, Range("[0, inf]")] = 3
    again: Annotated[int, Range("[0, inf]")] = 0

    def check(self, run: Any, where: str) -> None:
        """Refuse a removal that removes nothing."""
        require(bool(self.solved or self.unsolved), f"{where}solved and unsolved must be above 0 in one of them, got 0")

    def __call__(self, streak: np.ndarray, last: np.ndarray, number: int) -> np.ndarray:
        """Return which problems are dropped, bool[N]. ``streak``: int[N], visits in a row in which all answers were
        right; negative if none was, even in part. ``last``: int[N], the prompt that last asked it; -1 for none.
        ``number``: of the prompt that is asked now.
        """
        dropped = np.zeros(len(streak), bool)
        if self.solved:
            dropped |= streak >= self.solved
        if self.unsolved:
            dropped |= streak <= -self.unsolved
        if self.again:
            dropped &= number - last < self.again * len(streak)
        return dropped


@dataclasses.dataclass(frozen=True)
class Curriculum(Setting):
    """Selection of the problems to ask. Without parts it asks all in epochs, and still counts how often each is solved.

    A problem's success is ``(solved + prior * strength) / (tries + strength)``: the mean accuracy of its answers, which
    is 0.75 for one that follows three of four instructions.

    Attributes:
      prioritised: how problems are drawn; None: all that are open once, in an order of the seed's, then all again.
      easy_to_hard: share of the problems that is open; None for all.
      drop: which problems are removed; None for none.
      prior: the success that is expected of a problem before it was asked.
      strength: number of answers that this expectation counts as.
      fade: weight of earlier answers once a problem is answered again, above 0; 1 counts all alike.
      statistics: RUN or RUN@STEP, another run of a curriculum over the same problems, to take counts from; None starts
        without any.
    """

    prioritised: Prioritised | None = None
    easy_to_hard: EasyToHard | None = None
    drop: Dropping | None = None
    prior: Annotated[float, Range("[0, 1]")] = 0.5
    strength: Annotated[float, Range("[0, inf)", words="at least 0")] = 1.0
    fade: Annotated[float, Range("(0, 1]")] = 1.0
    statistics: Annotated[str | None, PATH] = None

    def check(self, run: Any, where: str) -> None:
        """Refuse statistics that would order nothing."""
        require(
            self.statistics is None or self.reads_success,
            f"{where}statistics {self.statistics} has nothing to order: set prioritised, drop, or easy_to_hard by "
            "success, or leave it out",
        )

    @property
    def reads_success(self) -> bool:
        """Whether the order of problems depends on which answers were right."""
        measured = self.easy_to_hard is not None and self.easy_to_hard.by == BY_SUCCESS
        return measured or self.prioritised is not None or self.drop is not None


def difficulties(easy: EasyToHard, problems: Sequence[Problem]) -> np.ndarray:
    """Return the number in the column of each problem, turned so that larger is harder, float64[N]."""
    values = np.empty(len(problems))
    for index, problem in enumerate(problems):
        value = nested_field(problem.metadata, easy.by)
        if not _is_number(value) or math.isnan(value):
            fields = {name: nested_field(problem.metadata, name) for name in codec.flat(problem.metadata)}
            columns = [name for name, field in fields.items() if _is_number(field)]
            raise InputError(
                f"easy_to_hard.by {easy.by!r} is {value!r:.40} in problem {problem.metadata.get('row', problem.id)}, "
                "and it takes a number for each: give a column that has them "
                f"(there: {', '.join(columns) or 'none'}), or success"
            )
        values[index] = value
    return values if easy.rising else -values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Scheduled(PromptStream):
    """Prompt stream of a curriculum over N problems. ``seed``: of every draw, with the prompt's number.
    ``prior_memory``: memory of another run's stream; empty for none.

    It remembers arrays with an entry for each problem: ``tries`` and ``solved``, float32, faded counts of verified
    answers and of how much of them was right; ``streak`` and ``last`` as ``Dropping`` reads them; and also ``asked``,
    prompts so far, ``since``, the number of the first one of ``easy_to_hard``, ``begun``, the prompt that began the
    present round, and ``problems``, a digest of their ids. A memory that holds only the places of prompts (``PLACES``)
    starts the counts anew; prompts asked without a curriculum count as asked in epochs.
    """

    curriculum: Curriculum
    problems: Sequence[Problem]
    seed: int
    prior_memory: Memory = dataclasses.field(default_factory=dict)

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the problem drawn for this prompt, and the new memory."""
        number -= memory.get(OTHERS, 0)
        if number and not memory.keys() - {OTHERS}:
            round_start = number - number % len(self.problems)  # so many prompts were asked as ``Shuffled`` asks
            last = np.full(len(self.problems), NONE, np.int64)
            for place in range(round_start, number):
                last[problem_index(self.seed, place, len(self.problems))] = place
            memory = memory | {COUNTED: last, "begun": round_start, "asked": number}
        memory = self.valid(memory)
        if memory.get("since", 0) == NONE:
            memory = memory | {"since": number}
        active = self.active(number, memory)
        round_start = memory["begun"]
        if self.curriculum.prioritised is not None:
            weights = np.where(active, self.curriculum.prioritised(self.success(memory)), 0.0)
            weights = weights if weights.any() else active.astype(float)
        else:
            unasked = active & (memory["last"] < round_start)
            if not unasked.any():
                round_start = number
                unasked = active
            weights = unasked.astype(float)
        index = draw_index(weights, self.seed, number)
        last = memory["last"].copy()
        last[index] = number
        return self.problems[index], memory | {"last": last, "begun": round_start, "asked": number + 1}

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Count the answers of known accuracy, each for the part of it that is right; return the new memory."""
        memory = self.valid(memory)
        tries, solved, streak = (memory[name].copy() for name in ("tries", "solved", "streak"))
        for group in groups:
            index = self._index.get(group.problem.id)
            credits = group.credit[~np.isnan(group.credit)]
            if index is None or not len(credits):
                continue
            tries[index] = tries[index] * np.float32(self.curriculum.fade) + np.float32(len(credits))
            solved[index] = solved[index] * np.float32(self.curriculum.fade) + np.float32(credits.sum())
            if (credits == 1).all():
                streak[index] = max(streak[index], 0) + 1
            else:
                streak[index] = 0 if credits.any() else min(streak[index], 0) - 1
        return memory | {"tries": tries, "solved": solved, "streak": streak}

    def metrics(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Return counts of open and dropped problems, the mean success of those tried, and an event once all drop."""
        before, after = self.valid(before), self.valid(after)
        dropped = self.dropped(after["asked"], after)
        tried = after["tries"] > 0
        rates = after["solved"][tried] / after["tries"][tried]
        metrics: dict[str, Any] = {
            "curriculum/active": int(self.active(after["asked"], after).sum()),
            "curriculum/dropped_solved": int((dropped & (after["streak"] > 0)).sum()),
            "curriculum/dropped_unsolved": int((dropped & (after["streak"] < 0)).sum()),
            "curriculum/success": float(rates.mean(dtype=np.float64)) if tried.any() else math.nan,
        }
        if dropped.all() and not self.dropped(before["asked"], before).all():
            metrics["event/curriculum_exhausted"] = f"all {len(dropped)} problems are dropped, so all are asked again"
        return metrics

    def valid(self, memory: Memory) -> Memory:
        """Return the memory if it is of these problems; else the one before the first prompt, with known places."""
        if memory.get("problems") == self.first["problems"]:
            return memory
        stays = {OTHERS}
        if "problems" not in memory and len(memory.get(COUNTED, ())) == len(self.problems):
            stays |= set(PLACES)
        return self.first | {name: value for name, value in memory.items() if name in stays}

    def success(self, memory: Memory) -> np.ndarray:
        """Estimate each problem's success, float64[N]; with ``strength`` 0 a problem never tried has ``prior``."""
        prior, strength = self.curriculum.prior, self.curriculum.strength
        counted = memory["tries"].astype(np.float64) + strength
        estimate = (memory["solved"] + prior * strength) / np.where(counted > 0, counted, 1.0)
        return np.where(counted > 0, estimate, prior)

    def dropped(self, number: int, memory: Memory) -> np.ndarray:
        """Return which problems are dropped, bool[N]."""
        drop = self.curriculum.drop or Dropping(0, 0)
        return drop(memory["streak"], memory["last"], number)

    def active(self, number: int, memory: Memory) -> np.ndarray:
        """Return which problems prompt ``number`` may ask, bool[N]; at least one."""
        candidates = ~self.dropped(number, memory)
        candidates = candidates if candidates.any() else ~candidates
        easy = self.curriculum.easy_to_hard
        if easy is None:
            return candidates
        hard = 1 - self.success(memory) if easy.by == BY_SUCCESS else self._difficulty
        since = memory.get("since", 0)
        ties = permutation(self.seed, 0, len(self.problems))
        return easy(hard, candidates, 0 if since == NONE else number - since, ties)

    @functools.cached_property
    def first(self) -> Memory:
        """The memory before the first prompt."""
        size = len(self.problems)
        kinds = {"tries": np.float32, "solved": np.float32, "streak": np.int32}
        counts = {name: np.zeros(size, kind) for name, kind in kinds.items()}
        prior_counts = {name: array for name, array in self.prior_memory.items() if name in counts}
        places = {"last": np.full(size, NONE, np.int64), "begun": 0, "asked": 0, "since": NONE}
        digest = codec.digest("\n".join(problem.id for problem in self.problems))
        return counts | prior_counts | places | {"problems": digest}

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {problem.id: index for index, problem in enumerate(self.problems)}

    @functools.cached_property
    def _difficulty(self) -> np.ndarray:
        easy: Any = self.curriculum.easy_to_hard
        return difficulties(easy, self.problems)
