"""Rejection sampling: a model's own answers, sampled and verified some problems at a time, become rows of a file that
survives the end of the process.
"""

import bisect
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from jaxrl_llm.codec import digest_of_parts
from jaxrl_llm.data import Pairs, Steps, Texts
from jaxrl_llm.data.datasets import (
    CUT_OFF,
    END_CUT_OFF,
    KINDS,
    LABEL,
    Collected,
    RowKind,
    Unpaired,
    split_steps,
    step_lengths,
)
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.environments.environment import Limits
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rollout.episodes import EpisodeSpec
from jaxrl_llm.rollout.evaluate import start_prompts
from jaxrl_llm.rollout.generation import Answerer, OpenRequests, SeedSpace, generate_all, request_seed
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.system.json_lines import append_rows, encode_row, read_rows
from jaxrl_llm.system.paths import COLLECTED, HELD, InUse, new_file, open_nofollow, part_of, writable
from jaxrl_llm.tasks import Prompts, Table
from jaxrl_llm.tasks import fingerprint as fingerprint_of_problems
from jaxrl_llm.tasks.messages import OPTIONS, TOOLS, join_messages
from jaxrl_llm.types import Completion, Problem

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
    """One sampled and verified answer. ``text``: without special tokens and without the token that ended it; of an
    episode its messages as JSON. ``length``: tokens, that one included. ``ended``: it was finished, not cut off.
    ``right``: the verifier's result. ``messages``: of an episode, up to the model's last one; empty for a single
    answer.
    """

    text: str
    length: int
    ended: bool
    right: bool
    messages: Sequence[dict[str, Any]] = ()


def make_rows(problem: Problem, answers: Sequence[SampledAnswer], data: Collected, kind: RowKind) -> list[Row]:
    """Return rows of texts, of pairs or of unpaired answers: none, one, or all that the distinct answers give.

    Texts are right answers. Pairs are right answers, each preferred to a wrong one, and with ``cut_off`` to one that
    was cut off as well. No wrong answer is used twice. With ``match_length`` the two nearest in length are paired
    first, the earlier sampled ones on a tie. Unpaired are right answers and as many wrong ones as there are, or one of
    each kind.
    """
    usable = [answers[index] for index in distinct_answers(answers)]
    right = [answer for answer in usable if answer.right]
    if data.keep == "shortest":
        right.sort(key=lambda answer: answer.length)
    if kind == "texts":
        chosen = right if data.keep == "all" else right[:1]
        return [make_row(problem, completion=answer.messages or answer.text) for answer in chosen]
    wrong = [answer for answer in usable if not answer.right]
    # Those that have no end, and are not right as far as they go; each text once.
    cut = {a.text: a for a in answers if data.cut_off and not a.ended and not a.right and a.text.strip()}
    if kind == "unpaired":
        most = None if data.keep == "all" else 1
        usable = [answer for group in (right, wrong, list(cut.values())) for answer in group[:most]]
        labels = [{LABEL: a.right} | ({} if a.ended else {END_CUT_OFF: True}) for a in usable]
        return [make_row(problem, completion=a.text, **label) for a, label in zip(usable, labels, strict=True)]
    couples = _pair_answers(right, wrong, data) + _pair_answers(right, list(cut.values()), data)
    return [
        make_row(problem, chosen=better.text, rejected=worse.text, **({} if worse.ended else {CUT_OFF: True}))
        for better, worse in couples
    ]


def _pair_answers(right: list[SampledAnswer], wrong: list[SampledAnswer], data: Collected) -> list[tuple[Any, Any]]:
    """Pair right and wrong answers, without an answer in common: one pair, or as many as possible."""
    couples = list(zip(right, wrong, strict=False))
    if data.match_length:  # the nearest in length first
        right = right[:1] if data.keep == "shortest" else right
        near = sorted((abs(a.length - b.length), i, j) for i, a in enumerate(right) for j, b in enumerate(wrong))
        pairs: list[tuple[int, int]] = []
        for _, i, j in near:
            if all(i != first and j != second for first, second in pairs):
                pairs.append((i, j))
        couples = [(right[i], wrong[j]) for i, j in pairs]
    return couples if data.keep == "all" else couples[:1]


def distinct_answers(answers: Sequence[SampledAnswer]) -> list[int]:
    """Return the indices of the answers that can be rows, with text and not cut off; the first of each text."""
    first: dict[str, int] = {}
    for index, answer in enumerate(answers):
        if answer.ended and answer.text.strip():
            first.setdefault(answer.text, index)
    return list(first.values())


def prefix_tokens(
    tokens: Any, steps: Sequence[str], separator: str, decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return, for each step but the last, the number of first tokens up to its end, the separator after it included. A
    token that holds both the end of a step and the beginning of the next belongs to the former.
    """
    ends = step_lengths(steps, separator)[:-1]
    counts = range(len(tokens) + 1)
    return [bisect.bisect_left(counts, end, key=lambda count: len(decode(tokens[:count]))) for end in ends]


def make_row(problem: Problem, **columns: Any) -> Row:
    """Make a row: the prompt (a string if it is one user message), its options, the columns, and the problem's id."""
    chat = [dict(message) for message in problem.prompt]
    alone = len(chat) == 1 and chat[0]["role"] == "user"
    other_options = {name: value for name, value in problem.options.items() if name != TOOLS}
    options = {name: problem.options[name] for name in (TOOLS,) if name in problem.options}
    options |= {OPTIONS: other_options} if other_options else {}
    return {"prompt": chat[0]["content"] if alone else chat} | options | columns | {"id": problem.id}


REMEDY = "give another file with --out"


@dataclasses.dataclass(frozen=True)
class CollectionCounts:
    """Sums over the problems asked; those of several parts add up. ``solved``: problems with at least one right answer.
    ``answers``: sampled, K to each problem; of these ``right``, ``ended`` (not cut off) and ``failed`` (could not be
    verified: they count as wrong). ``rows``: written. ``length``: tokens of the answers. ``tokens``: sampled, those of
    continuations too. ``seconds``: taken.
    """

    problems: int = 0
    solved: int = 0
    answers: int = 0
    right: int = 0
    ended: int = 0
    rows: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0

    def __add__(self, other: "CollectionCounts") -> "CollectionCounts":
        return CollectionCounts(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def numbers(self) -> dict[str, Any]:
        """Return the sums by name, with the usual shares and means."""
        shares = {
            "pass@1": self.right / max(self.answers, 1),
            "solved_fraction": self.solved / max(self.problems, 1),
            "mean_length": self.length / max(self.answers, 1),
        }
        failed = {"failed_fraction": self.failed / self.answers} if self.failed else {}
        return dataclasses.asdict(self) | shares | failed

    def lines(self) -> list[str]:
        """Format the sums as lines for people."""
        numbers = self.numbers()
        return [
            f"  {'pass@1':<12}{100 * numbers['pass@1']:6.1f} %  {self.right:,} of {self.answers:,} answers are right, "
            f"{self.ended:,} came to their end" + (f", {self.failed:,} could not be verified" if self.failed else ""),
            f"  {'solved':<12}{100 * numbers['solved_fraction']:6.1f} %  {self.solved:,} of {self.problems:,} problems "
            "have a right answer",
            f"  {'length':<12}{numbers['mean_length']:6.1f} tokens",
            f"  {'sampled':<12}{self.tokens:,} tokens in {self.seconds:,.1f} s",
            f"  {'rows':<12}{self.rows:,}",
        ]


Entry = tuple[Sequence[Row], CollectionCounts]
"""The rows that a finished problem gave, perhaps none, and its share of the sums."""


def check_free(path: Path) -> None:
    """Refuse an existing file, unless an earlier attempt ended while it was put in its place."""
    if path.exists() and not part_of(path).exists():
        raise InputError(f"{path} is there already: {REMEDY}, or remove it first")


@dataclasses.dataclass
class Ledger:
    """Rows of the file ``path`` in the making, with the counts of the finished problems."""

    path: Path
    file: BinaryIO
    counts: CollectionCounts

    def add(self, entries: Sequence[Entry]) -> None:
        """Append the next problems; they are on the disk when this returns."""
        append_rows(self.file, [{"rows": rows, "counts": dataclasses.asdict(counts)} for rows, counts in entries])
        self.counts = sum((counts for _, counts in entries), self.counts)

    def finish(self) -> None:
        """Write the final file, atomically, after all problems are done."""
        with new_file(self.path) as part, open(part, "wb") as file:
            for line in read_rows(part_of(self.path)):
                file.write(b"".join(encode_row(row) for row in line.get("rows", ())))
            file.flush()
            os.fsync(file.fileno())
        part_of(self.path).unlink()


@contextlib.contextmanager
def open_ledger(path: Path, settings: dict[str, Any]) -> Generator[Ledger]:
    """Open the ledger of a file of rows, new or to resume, locked; ``settings`` are all that decides its rows."""
    check_free(path)
    part = part_of(path)
    with writable(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_nofollow(part)
    with file:
        try:  # the kernel lets go of it when this process ends
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise InUse(f"{part} is being written by another process: wait until it ends, or {REMEDY}") from None
        with open(part, "rb") as partial:  # what comes after the last line that has an end was being written
            size = sum(len(line) for line in partial if line.endswith(b"\n"))
        os.truncate(part, size)
        lines = read_rows(part)
        header = next(lines, None)
        if header is None:
            append_rows(file, [{"settings": settings}])
        elif not isinstance(saved := header.get("settings"), dict):
            raise InputError(f"{part} is not a file of a collection: {REMEDY}, or remove it first")
        else:
            now = json.loads(json.dumps(settings))
            names = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
            changes = "; ".join(f"{name}: {saved.get(name)} -> {now.get(name)}" for name in names[:3])
            require(
                not names,
                f"{part} was begun with other settings ({changes}): take the old ones, {REMEDY}, or remove it first",
            )
        yield Ledger(path, file, sum((CollectionCounts(**line["counts"]) for line in lines), CollectionCounts()))


KIND_SETTINGS = {
    "texts": ("keep",),
    "pairs": ("match_length", "cut_off", "keep"),
    "unpaired": ("cut_off", "keep"),
    "steps": ("continuations",),
}
"""Settings of ``Collected`` that only some kinds of rows read."""
Data = TypeVar("Data", Texts, Pairs, Unpaired, Steps)


@dataclasses.dataclass(frozen=True)
class CollectionPlan:
    """The problems to ask, and the rows to make of the answers. ``prompts``: of the task, as token ids. ``problems``:
    in the order of the rows. ``data``: how many answers, how they are sampled, which are kept. ``kind``: of the rows.
    ``max_new_tokens``: longest answer, the stop token included. ``seed``: decides every random number. ``separator``:
    the text between two steps. ``episode``: limits of episodes; None for a task without.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    data: Collected
    kind: RowKind
    max_new_tokens: int
    seed: int
    separator: str = "\n"
    episode: Limits | None = None

    def __post_init__(self) -> None:
        each = self.max_new_tokens * self.data.continuations if self.kind == "steps" else 1
        most = SeedSpace.CONTINUATION - SeedSpace.COLLECTION
        if len(self.problems) * self.data.samples * each > most:
            raise InputError(
                f"{len(self.problems)} problems with {self.data.samples} samples may need more than {most} random "
                "numbers: ask fewer at a time (limit), each part with another seed"
            )

    def sampling(self, stops: tuple[int, ...]) -> Sampling:
        """Return how answers are sampled; ``stops``: the tokens that end them."""
        return Sampling(self.data.temperature, 0, self.data.top_p, self.max_new_tokens, stops)

    def at_once(self, slots: int) -> int:
        """Return the number of problems sampled together: four answers a slot keep slots filled; for steps, one."""
        return max(1, (slots if self.kind == "steps" else 4 * slots) // self.data.samples)

    def answer_seed(self, number: int, sample: int) -> int:
        """Return the seed of an answer to the problem with this number."""
        return request_seed(self.seed, SeedSpace.COLLECTION + number * self.data.samples + sample)

    def continuation_seed(self, number: int, sample: int, begin: int, index: int) -> int:
        """Return the seed of a continuation of an answer's first ``begin`` tokens."""
        place = (number * self.data.samples + sample) * self.max_new_tokens + begin
        return request_seed(self.seed, SeedSpace.CONTINUATION + place * self.data.continuations + index)

    def settings(self, model: Any) -> dict[str, Any]:
        """Return all that decides a model's rows, as JSON; weights, problems and prompts by their fingerprints."""
        data = self.data
        settings = {
            "weights": weights_digest(model),
            "problems": fingerprint_of_problems(self.problems)["order"],
            "checked": sorted({f"{problem.verifier} of {problem.extractor}" for problem in self.problems}),
            "prompts": digest_of_parts(self.prompts[problem] for problem in self.problems),
            "kind": self.kind,
            **{name: getattr(data, name) for name in ("samples", "temperature", "top_p")},
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            **{name: getattr(data, name) for name in KIND_SETTINGS[self.kind]},
        }
        if self.episode is not None:
            task = data.task
            settings |= {
                "environment": _setting_name(task.environment),
                "tools": [_setting_name(tool) for tool in task.tools],
            }
            settings |= {"episode": dataclasses.asdict(self.episode)}
        return settings | ({"separator": self.separator} if self.kind == "steps" else {})


def collect_rows(
    answerer: Answerer,
    plan: CollectionPlan,
    path: Path,
    peers: Peers = ALONE,
    status: Callable[[str], None] = lambda text: None,
) -> CollectionCounts:
    """Write the rows of all problems, in their order, as JSON lines; return the total counts.

    Until the last problem is done they are in ``PATH.part``, and the same call resumes from there, however the previous
    one ended: the resulting file is identical, byte for byte. For that, problems asked together stay together; at most
    that many are asked again. All processes sample, and the first writes. InputError: the file exists, or was begun
    with other settings; nothing has been sampled then.
    """
    settings = plan.settings(answerer.model)
    total = len(plan.problems)
    with contextlib.ExitStack() as stack:
        book: list[Ledger] = []

        def begin() -> dict[str, Any]:
            book.append(stack.enter_context(open_ledger(path, settings)))
            return dataclasses.asdict(book[0].counts)

        counts = CollectionCounts(**peers.first(begin))
        done = counts.problems
        size = plan.at_once(answerer.engine.slots)
        for first in range(done // size * size, total, size):
            progress = f"collecting {first}/{total} problems, {counts.rows} rows: "
            began = time.perf_counter()
            entries = collect_batch(answerer, plan, first, lambda text, progress=progress: status(progress + text))
            entries = entries[max(done - first, 0) :]
            share = CollectionCounts(seconds=(time.perf_counter() - began) / max(len(entries), 1))
            entries = [(rows, part + share) for rows, part in entries]
            for ledger in book:
                ledger.add(entries)
            counts = sum((part for _, part in entries), counts)
        answerer.engine.start(plan.sampling(()))  # nothing runs any more: what comes next needs the memory of the cache
        peers.first(lambda: [ledger.finish() for ledger in book])
    return counts


def collect_batch(answerer: Answerer, plan: CollectionPlan, first: int, status: Callable[[str], None]) -> list[Entry]:
    """Return answers to the problems from number ``first`` on, as many as are asked together, as entries of rows and
    counts. They depend on the weights, the settings and the engine's slots, but not on earlier problems.
    """
    problems = list(plan.problems[first : first + plan.at_once(answerer.engine.slots)])
    count = plan.data.samples
    places = list(itertools.product(range(len(problems)), range(count)))
    stops = answerer.model.config.tokens.eos
    requests = OpenRequests(answerer.engine, plan.sampling(stops), answerer.episodes)
    repeated = [problems[i] for i, _ in places]
    seeds = [plan.answer_seed(first + i, sample) for i, sample in places]
    prompts, prefixes = start_prompts(answerer, plan.prompts, repeated, seeds, count, places)
    requests.submit(places, prompts, seeds, partials=prefixes, keep=plan.kind == "steps")
    done = generate_all(requests, answerer.model, answerer.tokenizer, status)
    items = [(problem, done[place]) for problem, place in zip(repeated, places, strict=True)]
    as_text = plan.data.task.template in ("plain", "chatml")
    scores = answerer.scorer.score(items, only=())
    lost = scores.failures.message
    require(not scores.failed.all(), f"no answer to {plan.data.task.label} could be verified: {lost}")
    if scores.failed.any():
        status(f"{scores.failed.sum()} of {len(items)} answers could not be verified: {lost}")
    right = zip(items, scores.accuracy, strict=True)
    flat = [
        decode_answer(answerer.tokenizer, c, bool(answer_value(problem, c, accuracy, stops) >= 1), as_text)
        for (problem, c), accuracy in right
    ]
    answers = [flat[i * count : (i + 1) * count] for i in range(len(problems))]
    extra_tokens = [0] * len(problems)
    if plan.kind == "steps":
        rows, extra_tokens = _label_steps(answerer, plan, first, answers, requests, done, status)
    else:
        specs = [EpisodeSpec((i, 0), problem, 0) for i, problem in enumerate(problems)]
        openings = answerer.episodes.openings(specs) if answerer.episodes else ()
        for i, opening in enumerate(openings):
            problems[i] = dataclasses.replace(problems[i], prompt=tuple(opening["prompt"]))
        rows = [make_rows(p, a, plan.data, plan.kind) for p, a in zip(problems, answers, strict=True)]
        for problem_rows, opening in zip(rows, openings, strict=False):
            problem_rows[:] = [row | ({TOOLS: opening["tools"]} if opening["tools"] else {}) for row in problem_rows]
    if answerer.episodes is not None:
        answerer.episodes.retain(())
    entries = []
    failures = scores.failed.reshape(len(problems), count).sum(axis=1).tolist()
    for sampled, new, tokens, failed in zip(answers, rows, extra_tokens, failures, strict=True):
        solved, ended, length = (sum(getattr(a, name) for a in sampled) for name in ("right", "ended", "length"))
        sizes = 1, int(solved > 0), count, solved, ended, len(new), length, length + tokens
        entries.append((new, CollectionCounts(*sizes, failed=failed)))
    return entries


def _label_steps(
    answerer: Answerer,
    plan: CollectionPlan,
    first: int,
    answers: Sequence[Sequence[SampledAnswer]],
    requests: OpenRequests,
    completions: dict[Any, Completion],
    status: Callable[[str], None],
) -> tuple[list[list[Row]], list[int]]:
    """Return the rows of steps for each problem, and the number of tokens sampled for their labels. A step's label is
    the right share of k continuations of the text up to its end (arXiv 2312.08935, the soft estimation of section 3.3);
    the last step's label is the answer's own.
    """
    problems = plan.problems[first:]
    k = plan.data.continuations
    cuts = {}  # of each answer that can be a row: its steps, and its tokens up to the end of each but the last
    decode = functools.partial(text_of, answerer.tokenizer)
    for i, problem_answers in enumerate(answers):
        for sample in distinct_answers(problem_answers):
            steps = split_steps(problem_answers[sample].text, plan.separator)
            cuts[i, sample] = steps, prefix_tokens(completions[i, sample].tokens[:-1], steps, plan.separator, decode)
    # Two steps may end within one token: a continuation's key names the step, not where it begins.
    begins = {(*at, step): begin for at, (_, ends) in cuts.items() for step, begin in enumerate(ends)}
    keys = [(*at, index) for at in begins for index in range(k)]
    requests.submit(
        keys,
        [plan.prompts[problems[i]] for i, *_ in keys],
        [plan.continuation_seed(first + i, sample, begins[i, sample, step], n) for i, sample, step, n in keys],
        partials=[first_tokens(completions[i, sample], begins[i, sample, step]) for i, sample, step, _ in keys],
    )
    model, tokenizer = answerer.model, answerer.tokenizer
    done = generate_all(requests, model, tokenizer, lambda text: status(text.replace("sampling", "labelling", 1)))
    items = [(problems[key[0]], completion) for key, completion in done.items()]
    shares = iter(np.mean((answerer.scorer.verify(items) >= 1).reshape(-1, k), axis=1) if items else ())
    rows: list[list[Row]] = [[] for _ in answers]
    for (i, sample), (steps, ends) in cuts.items():
        labels = [float(next(shares)) for _ in ends] + [float(answers[i][sample].right)]
        rows[i].append(make_row(problems[i], completions=steps, labels=labels))
    tokens = [0] * len(answers)
    for (*at, _), completion in done.items():
        tokens[at[0]] += len(completion.tokens) - begins[tuple(at)]
    return rows, tokens


def answer_value(problem: Problem, completion: Completion, accuracy: float, stops: Sequence[int]) -> float:
    """Return a completion's accuracy; unverified, an episode's reward, 0 if a turn was cut: it taught not to stop."""
    if completion.episode is None:
        return accuracy
    if any(completion.tokens[turn.end - 1] not in stops for turn in completion.episode.turns):
        return 0.0
    return completion.episode.reward if problem.verifier == "none" else accuracy


def decode_answer(tokenizer: Any, completion: Completion, right: bool, as_text: bool = False) -> SampledAnswer:
    """Make an answer of a verified completion; its text excludes the token that ended it, special or not. An episode
    that the environment or a limit broke off, or with an empty reply, has no end. ``as_text``: the template writes no
    reasoning by itself, so that it stays in the text of its message.
    """
    if completion.episode is not None:
        turns = completion.episode.turns
        turn_messages = []
        for turn in turns:
            reply = turn.reply
            if as_text and "reasoning_content" in reply:
                text = f"<think>\n{reply['reasoning_content']}\n</think>\n\n{reply['content']}"
                reply = {name: part for name, part in reply.items() if name != "reasoning_content"} | {"content": text}
            turn_messages.append((reply, *join_messages((), turn.messages, "\n\n")))
        messages = [message for turn in turn_messages for message in turn][: sum(map(len, turn_messages[:-1])) + 1]
        complete = all(reply["content"].strip() or reply.get("tool_calls") for reply, *_ in turn_messages)
        ended = complete and completion.episode.end in ("completed", "tool_stopped")
        return SampledAnswer(json.dumps(messages), completion.length, ended, right, messages)
    ended = completion.finish_reason == "stop"
    text = text_of(tokenizer, completion.tokens[:-1] if ended else completion.tokens)
    return SampledAnswer(text, len(completion.tokens), ended, right)


def _setting_name(setting: Any) -> Any:
    """Return a name of an environment, a tool, or several environments."""
    if isinstance(setting, Mapping):
        return {str(name): _setting_name(part) for name, part in setting.items()}
    plain = setting is None or isinstance(setting, str)
    return setting if plain else getattr(setting, "__qualname__", type(setting).__name__)


def collect_data(
    data: Data,
    problems: Sequence[Problem],
    make_answerer: Callable[[], Answerer],
    max_new_tokens: int,
    seed: int,
    directory: Path,
    peers: Peers,
    status: Callable[[str], None],
    episode: Limits = Limits(),
) -> Data:
    """Collect the data of a run before its first step; return it with a table in place of its ``Collected`` source, and
    with the wording of the prompts that the model read. ``make_answerer``: makes the answerer; not called if an earlier
    start of the run has collected everything. ``max_new_tokens``: longest answer, the stop token included. ``seed``:
    decides every random number. ``directory``: the run's. ``status``: called with lines on the progress. ``episode``:
    limits of episodes.
    """
    path = directory / COLLECTED
    source: Any = data.source
    task = source.task
    if not peers.first(path.exists):
        answerer = make_answerer()
        separator = data.separator if isinstance(data, Steps) else "\n"
        settings = source, KINDS[type(data)], max_new_tokens, seed, separator, episode if task.plays else None
        plan = CollectionPlan(Prompts(task, answerer.tokenizer), problems, *settings)
        counts = collect_rows(answerer, plan, path, peers, status)
        if not counts.rows:
            peers.first(path.unlink)  # another attempt may ask otherwise
            raise InputError(
                f"none of {counts.answers} answers to {source.label} makes a row ({counts.right} are right, "
                f"{counts.ended} came to their end): ask a better model, for more samples or longer answers"
            )
    words = {name: getattr(task, name) for name in ("template", "system", "suffix", "date")}
    return dataclasses.replace(data, source=Table(str(path)), name=data.label, **words)
