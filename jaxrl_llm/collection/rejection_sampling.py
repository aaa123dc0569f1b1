"""Rejection sampling: a model's own answers, sampled and verified some problems at a time, become rows of a file that
survives the end of the process."""

import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.codec import digest_of_parts
from jaxrl_llm.collection.ledger import Entry, Ledger, Tally, opened
from jaxrl_llm.collection.rows import Answer, Row, distinct, prefix_tokens, row_of, rows_from
from jaxrl_llm.data import Pairs, Steps, Texts
from jaxrl_llm.data.datasets import KINDS, Collected, Kind, Unpaired, split_steps
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rollout.episodes import Scene
from jaxrl_llm.rollout.evaluate import prompts_for
from jaxrl_llm.rollout.respond import Answerer, Requests, SeedSpace, gather, request_seed
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.system.paths import COLLECTED
from jaxrl_llm.tasks import Prompts, Table
from jaxrl_llm.tasks import fingerprint as fingerprint_of_problems
from jaxrl_llm.tasks.messages import TOOLS, joined
from jaxrl_llm.types import Completion, Problem

FILL = 4
"""Answers per call, as a multiple of the slots: at its end few slots stay empty for long."""
READ = {
    "texts": ("keep",),
    "pairs": ("match_length", "cut_off", "keep"),
    "unpaired": ("cut_off", "keep"),
    "steps": ("continuations",),
}
"""Settings of ``Collected`` that only some kinds of rows read."""
Data = TypeVar("Data", Texts, Pairs, Unpaired, Steps)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The problems to ask, and the rows to make of the answers.

    Attributes:
      prompts: of the task, as token ids.
      problems: in the order of the rows.
      data: how many answers, how they are sampled, which are kept.
      kind: of the rows.
      max_new_tokens: longest answer, the stop token included.
      seed: decides every random number.
      separator: of steps: the text between two.
      episode: limits of episodes; None for a task without.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    data: Collected
    kind: Kind
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
        """Return the number of problems sampled together; for rows of steps fewer, since each answer makes many
        requests."""
        return max(1, (slots if self.kind == "steps" else FILL * slots) // self.data.samples)

    def answer_seed(self, number: int, sample: int) -> int:
        """Return the seed of an answer to the problem with this number."""
        return request_seed(self.seed, SeedSpace.COLLECTION + number * self.data.samples + sample)

    def continuation_seed(self, number: int, sample: int, begin: int, index: int) -> int:
        """Return the seed of a continuation of an answer's first ``begin`` tokens."""
        place = (number * self.data.samples + sample) * self.max_new_tokens + begin
        return request_seed(self.seed, SeedSpace.CONTINUATION + place * self.data.continuations + index)

    def settings(self, model: Any) -> dict[str, Any]:
        """Return all that decides a model's rows, as JSON values; weights, problems and prompts by their
        fingerprints."""
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
            **{name: getattr(data, name) for name in READ[self.kind]},
        }
        if self.episode is not None:
            task = data.task
            settings |= {"environment": _named(task.environment), "tools": [_named(tool) for tool in task.tools]}
            settings |= {"episode": dataclasses.asdict(self.episode)}
        return settings | ({"separator": self.separator} if self.kind == "steps" else {})


def collect_rows(
    by: Answerer,
    asked: Asked,
    path: Path,
    peers: Peers = ALONE,
    status: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Write the rows of all problems, in their order, as JSON lines; return the total counts.

    Until the last problem is done they are in ``PATH.part``, and the same call resumes from there, however the previous
    one ended: the resulting file is identical, byte for byte. For that, problems asked together stay together; at most
    that many are asked again. All processes sample, and the first writes.

    Raises:
      InputError: the file exists, or was begun with other settings; nothing has been sampled then.
    """
    settings = asked.settings(by.model)
    total = len(asked.problems)
    with contextlib.ExitStack() as stack:
        book: list[Ledger] = []

        def begin() -> dict[str, Any]:
            book.append(stack.enter_context(opened(path, settings)))
            return dataclasses.asdict(book[0].counts)

        counts = Tally(**peers.first(begin))
        done = counts.problems
        size = asked.at_once(by.engine.slots)
        for first in range(done // size * size, total, size):
            progress = f"collecting {first}/{total} problems, {counts.rows} rows: "
            began = time.perf_counter()
            entries = ask(by, asked, first, lambda text, progress=progress: status(progress + text))
            entries = entries[max(done - first, 0) :]
            share = Tally(seconds=(time.perf_counter() - began) / max(len(entries), 1))
            new = [(rows, own + share) for rows, own in entries]
            for ledger in book:
                ledger.add(new)
            counts = sum((own for _, own in new), counts)
        by.engine.start(asked.sampling(()))  # nothing runs any more: what comes next needs the memory of the cache
        peers.first(lambda: [ledger.finish() for ledger in book])
    return counts


def ask(by: Answerer, asked: Asked, first: int, status: Callable[[str], None]) -> list[Entry]:
    """Return answers to the problems from number ``first`` on, as many as are asked together, as entries of rows and
    counts.

    They depend on the weights, the settings and the engine's slots, but not on earlier problems.
    """
    problems = list(asked.problems[first : first + asked.at_once(by.engine.slots)])
    count = asked.data.samples
    places = list(itertools.product(range(len(problems)), range(count)))
    stops = by.model.config.tokens.eos
    requests = Requests(by.engine, asked.sampling(stops), by.episodes)
    wanted = [problems[i] for i, _ in places]
    seeds = [asked.answer_seed(first + i, sample) for i, sample in places]
    prompts, begun = prompts_for(by, asked.prompts, wanted, seeds, count, places)
    requests.submit(places, prompts, seeds, begun=begun, keep=asked.kind == "steps")
    done = gather(requests, by.model, by.tokenizer, status)
    items = [(problem, done[place]) for problem, place in zip(wanted, places, strict=True)]
    as_text = asked.data.task.template in ("plain", "chatml")
    scores = by.scorer.score(items, only=())
    lost = scores.failures.message
    require(not scores.failed.all(), f"no answer to {asked.data.task.label} could be verified: {lost}")
    if scores.failed.any():
        status(f"{scores.failed.sum()} of {len(items)} answers could not be verified: {lost}")
    right = zip(items, scores.accuracy, strict=True)
    flat = [
        decoded_answer(by.tokenizer, c, bool(worth(problem, c, accuracy, stops) >= 1), as_text)
        for (problem, c), accuracy in right
    ]
    answers = [flat[i * count : (i + 1) * count] for i in range(len(problems))]
    more = [0] * len(problems)
    if asked.kind == "steps":
        rows, more = _labelled(by, asked, first, answers, requests, done, status)
    else:
        openings = by.episodes.openings([Scene((i, 0), p, 0) for i, p in enumerate(problems)]) if by.episodes else ()
        for i, opening in enumerate(openings):
            problems[i] = dataclasses.replace(problems[i], prompt=tuple(opening["prompt"]))
        rows = [rows_from(p, a, asked.data, asked.kind) for p, a in zip(problems, answers, strict=True)]
        for own, opening in zip(rows, openings, strict=False):
            own[:] = [row | ({TOOLS: opening["tools"]} if opening["tools"] else {}) for row in own]
    if by.episodes is not None:
        by.episodes.retain(())
    entries = []
    broken = scores.failed.reshape(len(problems), count).sum(axis=1).tolist()
    for some, own, tokens, failed in zip(answers, rows, more, broken, strict=True):
        solved, ended, length = (sum(getattr(answer, name) for answer in some) for name in ("right", "ended", "length"))
        counts = Tally(1, int(solved > 0), len(some), solved, ended, len(own), length, length + tokens, failed=failed)
        entries.append((own, counts))
    return entries


def _labelled(
    by: Answerer,
    asked: Asked,
    first: int,
    answers: Sequence[Sequence[Answer]],
    requests: Requests,
    completions: dict[Any, Completion],
    status: Callable[[str], None],
) -> tuple[list[list[Row]], list[int]]:
    """Return the rows of steps for each problem, and the number of tokens sampled for their labels.

    A step's label is the right share of k continuations of the text up to its end (arXiv 2312.08935, the soft
    estimation of section 3.3); the last step's label is the answer's own.
    """
    problems = asked.problems[first:]
    k = asked.data.continuations
    cuts = {}  # of each answer that can be a row: its steps, and its tokens up to the end of each but the last
    decode = functools.partial(text_of, by.tokenizer)
    for i, some in enumerate(answers):
        for sample in distinct(some):
            steps = split_steps(some[sample].text, asked.separator)
            cuts[i, sample] = steps, prefix_tokens(completions[i, sample].tokens[:-1], steps, asked.separator, decode)
    # Two steps may end within one token: a continuation's key names the step, not where it begins.
    begins = {(*at, step): begin for at, (_, ends) in cuts.items() for step, begin in enumerate(ends)}
    keys = [(*at, index) for at in begins for index in range(k)]
    requests.submit(
        keys,
        [asked.prompts[problems[i]] for i, *_ in keys],
        [asked.continuation_seed(first + i, sample, begins[i, sample, step], n) for i, sample, step, n in keys],
        begun=[first_tokens(completions[i, sample], begins[i, sample, step]) for i, sample, step, _ in keys],
    )
    done = gather(requests, by.model, by.tokenizer, lambda text: status(text.replace("sampling", "labelling", 1)))
    items = [(problems[key[0]], completion) for key, completion in done.items()]
    shares = iter(np.mean((by.scorer.verify(items) >= 1).reshape(-1, k), axis=1) if items else ())
    rows: list[list[Row]] = [[] for _ in answers]
    for (i, sample), (steps, ends) in cuts.items():
        labels = [float(next(shares)) for _ in ends] + [float(answers[i][sample].right)]
        rows[i].append(row_of(problems[i], completions=steps, labels=labels))
    tokens = [0] * len(answers)
    for (*at, _), completion in done.items():
        tokens[at[0]] += len(completion.tokens) - begins[tuple(at)]
    return rows, tokens


def worth(problem: Problem, completion: Completion, accuracy: float, stops: Sequence[int]) -> float:
    """Return the accuracy of a completion; of an episode without a verifier the reward of its environment, and 0 if one
    of its turns was cut, whose end would teach not to stop.
    """
    if completion.episode is None:
        return accuracy
    if any(completion.tokens[turn.end - 1] not in stops for turn in completion.episode.turns):
        return 0.0
    return completion.episode.reward if problem.verifier == "none" else accuracy


def decoded_answer(tokenizer: Any, completion: Completion, right: bool, as_text: bool = False) -> Answer:
    """Make an answer of a verified completion; its text excludes the token that ended it, special or not.

    An episode that the environment or a limit broke off, or with an empty reply, has no end. ``as_text``: the template
    writes no reasoning by itself, so that it stays in the text of its message.
    """
    if completion.episode is not None:
        turns = completion.episode.turns
        told = [(_reply(turn.reply, as_text), *joined((), turn.messages, "\n\n")) for turn in turns]
        messages = [message for turn in told for message in turn][: sum(map(len, told[:-1])) + 1]
        whole = all(reply["content"].strip() or reply.get("tool_calls") for reply, *_ in told)
        ended = whole and completion.episode.end in ("completed", "tool_stopped")
        return Answer(json.dumps(messages), completion.length, ended, right, messages)
    ended = completion.finish_reason == "stop"
    text = text_of(tokenizer, completion.tokens[:-1] if ended else completion.tokens)
    return Answer(text, len(completion.tokens), ended, right)


def _reply(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return the model's message, with its reasoning in the text if ``as_text``."""
    if not as_text or "reasoning_content" not in message:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    return kept | {"content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"}


def _named(given: Any) -> Any:
    """Return a name of an environment, a tool, or several environments."""
    if isinstance(given, Mapping):
        return {str(name): _named(one) for name, one in given.items()}
    return given if given is None or isinstance(given, str) else getattr(given, "__qualname__", type(given).__name__)


def collected(
    data: Data,
    problems: Sequence[Problem],
    answerer: Callable[[], Answerer],
    max_new_tokens: int,
    seed: int,
    directory: Path,
    peers: Peers,
    status: Callable[[str], None],
    episode: Limits = Limits(),
) -> Data:
    """Collect the data of a run before its first step; return it with a table in place of its ``Collected`` source, and
    with the wording of the prompts that the model read.

    Args:
      data: to collect; its source is a ``Collected``.
      problems: to ask.
      answerer: makes the answerer; not called if an earlier start of the run has collected everything.
      max_new_tokens: longest answer, the stop token included.
      seed: decides every random number.
      directory: the run's.
      peers: its processes.
      status: called with lines on the progress.
      episode: limits of episodes.

    Raises:
      InputError: no answer makes a row.
    """
    path = directory / COLLECTED
    source: Any = data.source
    task = source.task
    if not peers.first(path.exists):
        by = answerer()
        separator = data.separator if isinstance(data, Steps) else "\n"
        told = source, KINDS[type(data)], max_new_tokens, seed, separator, episode if task.plays else None
        asked = Asked(Prompts(task, by.tokenizer), problems, *told)
        counts = collect_rows(by, asked, path, peers, status)
        if not counts.rows:
            peers.first(path.unlink)  # another attempt may ask otherwise
            raise InputError(
                f"none of {counts.answers} answers to {source.label} makes a row ({counts.right} are right, "
                f"{counts.ended} came to their end): ask a better model, for more samples or longer answers"
            )
    words = {name: getattr(task, name) for name in ("template", "system", "suffix", "date")}
    return dataclasses.replace(data, source=Table(str(path)), name=data.label, **words)
