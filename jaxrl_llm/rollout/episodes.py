"""Episodes: completions of several turns, between which an environment answers on threads, while no slot waits for it.

What the model sampled is never tokenised again; what the environment says follows as tokens with mask False. An episode
is a function of weights, problem, seed and the environment's answers, which are saved with the completion: after a
restart a new environment is given the same replies. If it answers otherwise, the episode begins anew, and is counted.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.engine.requests import EMPTY, first_tokens, row_limit, with_tokens
from jaxrl_llm.environments.calls import ParsedReply
from jaxrl_llm.environments.environment import Limits
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.world import Answer, DaemonThreads, World, count_hanging, format_error
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.tasks.chats import Prompts
from jaxrl_llm.tasks.template import word_prompt
from jaxrl_llm.types import Completion, Episode, Message, Problem, Turn

if TYPE_CHECKING:
    from jaxrl_llm.sharding.distributed import Peers

MAX_ANSWERING = 256
"""Maximum number of environments that answer at one time."""
SETTLE_S = 0.05
"""Seconds in which episodes that begin are waited for together, so that the sampler gets them together."""


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play, of a problem's row; ``key``: of its request, whole numbers; ``seed``: of the environment,
    equal for all members of a group.
    """

    key: Hashable
    problem: Problem
    seed: int

    @property
    def row(self) -> dict[str, Any]:
        """The row as environments see it: its columns, ``prompt`` (chat messages) and ``answer``."""
        return {**self.problem.metadata, "prompt": list(self.problem.prompt), "answer": self.problem.answer}


@dataclasses.dataclass(frozen=True)
class EpisodeStart:
    """The start of an episode, or of its replay after a restart; ``replays_equal``: the environment answers as before;
    ``failed``: the end if it or the chat template failed, with an empty ``prompt``, else token ids.
    """

    prompt: list[int]
    replays_equal: bool = True
    failed: Episode | None = None


@dataclasses.dataclass
class LiveEpisode:
    """A running episode, on the process that has its environment.

    Attributes:
      form: writes and reads its chat.
      messages: the prompt, and all turns so far.
      opening_messages: the prompt of row and environment, without the task's system message and suffix.
      prompt: its token ids.
      num_environment_messages: how many of the last opening messages are the environment's.
      max_chars: of an answer; what is longer fits nowhere.
      close_errors: gets a line for each environment that fails to close.
      turns: those answered.
      restarts: times that it began anew.
      branching: where it may branch; None for nowhere.
      observed: whether a loss reads what the environment says.
      copies: of the episode where it may branch, by the number of turns.
      copies_closed: whether no more copies are needed.
    """

    world: World
    form: EpisodeFormat
    messages: list[Message]
    opening_messages: list[Message]
    prompt: list[int]
    num_environment_messages: int
    max_chars: int
    close_errors: list[str]
    turns: tuple[Turn, ...] = ()
    restarts: int = 0
    branching: Branching | None = None
    observed: bool = False
    copies: dict[int, Self] = dataclasses.field(default_factory=dict)
    copies_closed: bool = False

    def parse(self, completion: Completion) -> ParsedReply:
        """Return the message of a completion's last turn."""
        start = completion.last_turn
        before = completion.forks.get(start, completion.tokens[:start])
        return self.form.parse(completion.tokens[start:].tolist(), before.tolist() or None)

    def play(self, completion: Completion) -> tuple[Turn, Answer]:
        """Give the last turn of a completion to the environment; return its record and the answer."""
        parsed = self.parse(completion)
        rise = self.measure_entropy_rise(completion)
        answer = self.world.reply(parsed)
        answer = dataclasses.replace(answer, messages=cut_contents(answer.messages, self.max_chars))
        turn = Turn(
            len(completion.tokens), parsed.message, answer.messages, answer.reward, answer.tool_calls,
            answer.tool_errors, dict(answer.metrics), rise, answer.state,
        )  # fmt: skip
        self.turns += (turn,)
        self.messages += [parsed.message, *answer.messages]
        return turn, answer

    def measure_entropy_rise(self, completion: Completion) -> float:
        """Return the rise of the entropy of a completion's last turn, and copy the episode if it branches before it."""
        rule = self.branching
        if rule is None or not self.turns:
            return 0.0
        rise = entropy_rise(completion, rule.tokens, len(self.form.tokenizer))
        if rule.branches_at(rise) and not self.copies_closed:
            try:
                changes = {"world": self.world.copy(), "messages": list(self.messages), "restarts": 0, "copies": {}}
                self.copies[len(self.turns)] = dataclasses.replace(self, **changes)
            except RuntimeError:  # what branches here gets a new environment that is given the same replies
                self.world.error = ""
        return rise

    @property
    def opening(self) -> dict[str, Any]:
        """Its start: ``prompt``, messages without the task's system message and suffix; ``tools``, JSON schemas."""
        return {"prompt": self.opening_messages, "tools": list(self.world.tools)}

    def copy_error(self) -> str | None:
        """Copy the environment and drop the copy; return why it cannot be copied, None if it can."""
        try:
            self.world.copy().close()
        except RuntimeError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Close the environment and its copies."""
        self.close_copies()
        if error := self.world.close():
            self.close_errors.append(error)

    def close_copies(self) -> None:
        """Close the copies, and make no more: no branch will begin here."""
        self.copies_closed = True
        for turns in list(self.copies):
            copy = self.copies.pop(turns, None)  # which another thread may have closed
            if copy is not None:
                copy.close()

    def answer(self, completion: Completion, limit: int) -> tuple[Episode, list[int]]:
        """Answer a completion's last turn; return the episode with it, and the tokens up to the model's next turn, up
        to ``limit`` tokens in all. Any failure, such as an answer that the chat template refuses, ends it.
        """
        episode = completion.episode or Episode(tools=len(self.world.tools))
        try:
            return self._answer(completion, episode, limit)
        except BaseException as error:  # noqa: BLE001  libraries written in Rust panic with one of their own
            progress = {"turns": self.turns, "tools": episode.tools, "parent": episode.parent, "shared": episode.shared}
            return self.end(dataclasses.replace(failed_episode(error), **progress, restarts=self.restarts)), []

    def _answer(self, completion: Completion, before: Episode, limit: int) -> tuple[Episode, list[int]]:
        size = len(completion.tokens)
        room = row_limit(completion, limit, len(self.prompt))
        is_cut = completion.finish_reason == "length" and size < room
        if completion.finish_reason != "stop" and not is_cut:
            last = Turn(size, self.parse(completion).message, entropy_rise=self.measure_entropy_rise(completion))
            turns = (*before.turns, last)
            return self.end(dataclasses.replace(before, turns=turns, end="max_tokens", restarts=self.restarts)), []
        history = list(self.messages)
        turn, answer = self.play(completion)
        end = "max_tokens" if is_cut and answer.end == "completed" and not self.world.steps else answer.end
        episode = dataclasses.replace(
            before, turns=(*before.turns, turn), end=end, reward=before.reward + answer.reward,
            error=answer.error, restarts=self.restarts,
        )  # fmt: skip
        if end:
            return self.end(episode), []
        context = [*history, turn.reply], answer.messages, completion.tokens[completion.last_turn :].tolist()
        fork = self.form.fork(self.opening_messages, *context[:2], self.num_environment_messages)
        tokens = [] if fork else self.form.suffix(*context)
        if size >= limit or (len(fork) - len(self.prompt) >= limit if fork else size + len(tokens) >= room):
            return self.end(dataclasses.replace(episode, end="context_overflow")), []
        if fork:
            turns = (*before.turns, dataclasses.replace(turn, fork=tuple(map(int, fork))))
            return dataclasses.replace(episode, turns=turns), []
        if self.observed:
            spans = tuple((size + start, size + end) for start, end in self.form.content_ranges(*context, tokens))
            episode = dataclasses.replace(episode, turns=(*before.turns, dataclasses.replace(turn, said=spans)))
        return episode, [int(token) for token in tokens]

    def end(self, episode: Episode) -> Episode:
        """Close the environment; return the episode with its reward for all of it, NaN if it has failed."""
        failed = episode.end in ("environment_error", "timeout")
        final_reward = math.nan if failed else self.world.reward() or 0.0
        error = episode.error if failed else self.world.error
        if close_error := self.world.close():
            self.close_errors.append(close_error)
        return dataclasses.replace(episode, reward=episode.reward + final_reward, error=error)


def cut_contents(messages: Sequence[Message], max_chars: int) -> tuple[Message, ...]:
    """Return messages with at most ``max_chars`` characters of their contents, the first ones."""
    shortened = []
    for message in messages:
        text = message.get("content")
        shortened.append({**message, "content": text[:max_chars]} if isinstance(text, str) else message)
        max_chars -= len(text[:max_chars]) if isinstance(text, str) else 0
    return tuple(shortened)


def failed_episode(error: BaseException) -> Episode:
    """Return the end of an episode that an exception breaks off."""
    line = format_error(error, kind=not isinstance(error, InputError))
    return Episode(end="environment_error", reward=math.nan, error=line)


class LocalEpisodes:
    """Owner of the running episodes whose environments are on this process, and of the threads on which they answer.

    Args:
      prompts, limits, stops, branching, observed: as ``episodes.Episodes`` gets them.
      longest: maximum number of tokens of a prompt, or of a completion.
    """

    def __init__(
        self,
        prompts: Prompts,
        limits: Limits,
        stops: Sequence[int],
        branching: Branching | None,
        observed: bool,
        longest: int,
    ):
        self.close_errors: list[str] = []
        self._max_chars = longest * max(map(len, prompts.tokenizer.get_vocab()))
        self.threads = DaemonThreads(MAX_ANSWERING)
        self._prompts, self._limits, self._stops = prompts, limits, stops
        self._branching, self._observed = branching, observed
        playing = [task for task in prompts.tasks if task.plays]
        self._factories = {task.label: Factory(task.environment, task.tools) for task in playing}
        self._forms: dict[str, EpisodeFormat] = {}
        self._live: dict[Hashable, LiveEpisode] = {}
        self._answers: dict[Hashable, concurrent.futures.Future[tuple[Episode, list[int]]]] = {}
        self._starts: dict[Hashable, concurrent.futures.Future[EpisodeStart]] = {}

    def __getitem__(self, key: Hashable) -> LiveEpisode:
        """Return a running episode."""
        return self._live[key]

    def copy_error(self, key: Hashable) -> str | None:
        """Copy the environment of an episode and drop the copy; return why it cannot be copied, None if it can."""
        return self._live[key].copy_error() if key in self._live else None

    @property
    def notes(self) -> list[str]:
        """Lines for people on the chat formats in use so far."""
        return [*dict.fromkeys(form.note for form in self._forms.values() if form.note)]

    def prepare(self, spec: EpisodeSpec, partial: Completion | None) -> None:
        """Begin an episode on a thread, or bring its environment to where it was, unless that is done already."""
        if spec.key not in self._starts:
            self._starts[spec.key] = self.threads.submit(self._start_or_fail, spec, partial)

    def _start_or_fail(self, spec: EpisodeSpec, partial: Completion | None) -> EpisodeStart:
        try:
            return self._start_or_replay(spec, partial or EMPTY)
        except BaseException as error:  # noqa: BLE001  as in ``LiveEpisode.answer``
            return EpisodeStart([], failed=failed_episode(error))

    def _begin(self, spec: EpisodeSpec, restarts: int) -> EpisodeStart:
        task = self._prompts.task(spec.problem.task)
        if spec.key in self._live:
            self._live.pop(spec.key).close()
        self._answers.pop(spec.key, None)
        world = self._factories[task.label].world(spec.row, spec.seed, self._limits)
        messages, answer = world.reset(spec.problem.prompt)
        if answer.end:
            world.close()
            failed = Episode(end=answer.end, reward=math.nan, error=answer.error, restarts=restarts)
            return EpisodeStart([], failed=failed)
        num_environment_messages = len(messages) - len(spec.problem.prompt)
        messages = list(cut_contents(messages, self._max_chars))
        options = spec.problem.options
        key = json.dumps([task.label, world.tools, options])
        if key not in self._forms:
            tokenizer, history = self._prompts.tokenizer, self._limits.history
            self._forms[key] = EpisodeFormat(tokenizer, task, world.tools, self._stops, history, options)
        form = self._forms[key]
        prompt = [int(token) for token in form.prompt(messages, num_environment_messages)]
        self._live[spec.key] = LiveEpisode(
            world,
            form,
            word_prompt(messages, task),
            messages,
            prompt,
            num_environment_messages,
            self._max_chars,
            self.close_errors,
            (),
            restarts,
            self._branching,
            self._observed,
        )
        return EpisodeStart(prompt)

    def _start_or_replay(self, spec: EpisodeSpec, partial: Completion) -> EpisodeStart:
        episode = partial.episode or Episode()
        live = self._live.get(spec.key)
        if live is not None and (live.turns == episode.turns or spec.key in self._answers):
            return EpisodeStart(live.prompt)
        start = self._begin(spec, episode.restarts)
        for number, turn in enumerate(() if start.failed else episode.turns):
            so_far = dataclasses.replace(first_tokens(partial, turn.end), episode=Episode(episode.turns[:number]))
            if self._live[spec.key].play(so_far)[0] != turn:
                return dataclasses.replace(self._begin(spec, episode.restarts + 1), replays_equal=False)
        return start

    def branch(self, key: Hashable, parent: Hashable, turns: int) -> None:
        """Begin an episode where another one was after so many turns, by the copy of its environment. Without a copy,
        as after a restart, ``prepare`` gives a new environment the same replies.
        """
        copy = self._live[parent].copies.pop(turns, None) if parent in self._live else None
        if copy is not None:
            self._live[key] = copy

    def close_copies(self, keys: Sequence[Hashable]) -> None:
        """Close the copies of these episodes: no branch begins there any more."""
        for key in keys:
            if key in self._live:
                self.threads.submit(self._live[key].close_copies)

    def submit_turn(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Let the environment answer a turn, unless it does already since before an interruption."""
        if key not in self._answers:
            self._answers[key] = self.threads.submit(self._live[key].answer, turn, limit)

    def poll(
        self, answering: Iterable[Hashable], preparing: Iterable[Hashable], wait_s: float
    ) -> tuple[list[tuple[Hashable, tuple[Episode, list[int]]]], list[tuple[Hashable, EpisodeStart]]]:
        """Return the answers and starts that these episodes have; without any, wait so many seconds for the first."""
        answers = {key: self._answers[key] for key in answering if key in self._answers}
        starts = {key: self._starts[key] for key in preparing if key in self._starts}
        if wait_s and starts:
            concurrent.futures.wait(starts.values(), SETTLE_S)
        if wait_s and (answers or starts):
            concurrent.futures.wait([*answers.values(), *starts.values()], wait_s, concurrent.futures.FIRST_COMPLETED)
        return pop_done(answers, self._answers), pop_done(starts, self._starts)

    def retain(self, keys: Set[Hashable]) -> list[Hashable]:
        """Close the environments of all other episodes; return their keys."""
        for key in self._starts.keys() - keys:
            self._starts.pop(key).add_done_callback(lambda _, key=key: self._close(key))
        closed = [*(self._live.keys() - keys)]
        for key in closed:
            self._answers.pop(key, None)
            self._close(key)
        return closed

    def _close(self, key: Hashable) -> None:
        if (live := self._live.pop(key, None)) is not None:
            self.threads.submit(live.close)


def pop_done(futures: dict[Hashable, Any], pending: dict[Hashable, Any]) -> list[tuple[Hashable, Any]]:
    """Return the results that have come of some futures, which are taken out of ``pending``."""
    return [(key, pending.pop(key).result()) for key, future in futures.items() if future.done()]


CUT_OFF = ("max_tokens", "context_overflow", "max_turns", "max_tool_calls")
"""Ends of episodes that were cut off: their completions have the finish reason "length"."""
OVERFLOWN = dataclasses.replace(EMPTY, finish_reason="length", episode=Episode(end="context_overflow"))
"""The completion of an episode whose prompt is too long: it has no token."""


def environment_seed(seed: int) -> int:
    """Return the 31-bit seed of an environment, made from the 64-bit seed of a request."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") >> 1


EPISODE_RECORDS = (Episode, Turn, EpisodeStart)
"""Types that processes send to each other."""
LONGEST_WAIT_S = 1.0
"""Seconds after which a wait for an episode that begins is looked at again."""


class ReadyEpisode(NamedTuple):
    """An episode that can be sampled: ``prompt``, int32[p], and ``partial``, the completion that it goes on from, the
    whole one if it is over, or None.
    """

    key: Hashable
    prompt: np.ndarray
    partial: Completion | None


class PendingStart(NamedTuple):
    """Episodes that start together: completions to go on from, None for new ones; prompt None if the specs give it."""

    specs: Sequence[EpisodeSpec]
    partials: Sequence[Completion | None]
    prompt: np.ndarray | None


class Episodes:
    """Owner of the running episodes and of their environments; an ``EnvironmentClient``. With several processes each
    environment lives on one, and all get its answers.

    Args:
      prompts: of the tasks, some of which have environments or tools; gives the tokenizer.
      limits: of every episode.
      longest_prompt: maximum number of tokens of a prompt.
      stops: tokens at which the model ends its turns.
      peers: the run's processes; None for one.
      branching: where episodes branch; None for nowhere.
      observed: whether a loss reads what the environments say (``Turn.said``).
      longest: maximum number of tokens of a completion.
    """

    def __init__(
        self,
        prompts: Prompts,
        limits: Limits,
        longest_prompt: int,
        stops: Sequence[int],
        peers: "Peers | None" = None,
        branching: Branching | None = None,
        observed: bool = False,
        longest: int = 1 << 16,
    ):
        self.branching = branching
        self._prompts = prompts
        self.max_turn_tokens = limits.max_turn_tokens
        self._longest_prompt = longest_prompt
        self._peers = peers
        self._local = LocalEpisodes(prompts, limits, stops, branching, observed, max(longest, longest_prompt))
        self._roots: dict[Hashable, Hashable] = {}  # of a branch: the whole episode that it goes back to
        self._answering: dict[Hashable, Completion] = {}
        self._playing: set[Hashable] = set()
        self._pending: list[PendingStart] = []
        self._started: dict[Hashable, EpisodeStart] = {}

    def plays(self, problem: Problem) -> bool:
        """Whether an environment or tools belong to the problem's task."""
        return self._prompts.task(problem.task).plays

    def rehearse(self, problems: Sequence[Problem]) -> list[str]:
        """Begin two episodes of the first problem of each task that has episodes, and drop them; return notes for
        people. Later failures and too long prompts end their episodes; if the first one fails twice, settings are
        wrong.

        Raises:
          InputError: the environment fails, the template cannot render its tools, or the prompt is too long.
        """
        firsts: dict[str, Problem] = {}
        for problem in problems:
            if self.plays(problem):
                firsts.setdefault(self._prompts.task(problem.task).label, problem)
        specs = [
            EpisodeSpec((-1, index, twin), problem, 0)
            for index, problem in enumerate(firsts.values())
            for twin in range(2)
        ]
        failed = any(ready.partial is not None and ready.partial.episode.error for ready in self.begin(specs))
        for spec, ready in zip(specs, self.begin(specs), strict=True):
            label = self._prompts.task(spec.problem.task).label
            error = "" if ready.partial is None else ready.partial.episode.error
            require(not (failed and error), f"the environment of task {label} cannot begin an episode: {error}")
            require(
                ready.partial is None or bool(error),
                f"a prompt of task {label} has {len(ready.prompt)} tokens with what its environment says first: set "
                f"--rollout.max_prompt_tokens {len(ready.prompt)} (now {self._longest_prompt})",
            )
        if self.branching is not None:
            for error in self._call_on_owners(lambda spec: self._local.copy_error(spec.key), specs):
                require(error is None, f"the environment cannot be copied, as branches need it: {error}")
        self.retain(())
        return self._local.notes

    @property
    def preparing(self) -> list[Hashable]:
        """Keys of the episodes that start, or replay what happened before a restart."""
        return [spec.key for pending in self._pending for spec in pending.specs]

    def has(self, key: Hashable) -> bool:
        """Whether the request of this key is an episode."""
        return key in self._playing

    def prepare(
        self,
        specs: Sequence[EpisodeSpec],
        partials: Sequence[Completion | None] | None = None,
        prompt: np.ndarray | None = None,
    ) -> None:
        """Begin episodes on threads, or bring their environments back to where they were; ``pop_ready`` returns them.
        An environment in memory goes on as it is; for others a new one is given the same replies.

        Args:
          specs: the episodes; those of one row and seed have one prompt.
          partials: completions to go on from; None for new ones.
          prompt: of all of them, if it is known.
        """
        partials = [None] * len(specs) if partials is None else partials
        self._playing |= {spec.key for spec in specs}
        self._pending.append(PendingStart(specs, partials, prompt))
        for spec, partial in zip(specs, partials, strict=True):
            if self._is_local(spec.key):
                self._local.prepare(spec, partial)

    def pop_ready(self) -> list[list[ReadyEpisode]]:
        """Return the episodes of each ``prepare`` that have all started; ``pop_answers`` waits for them. One that
        failed, or began otherwise than the first of its row and seed, is over; one with other answers begins anew.
        """
        ready = [pending for pending in self._pending if all(spec.key in self._started for spec in pending.specs)]
        self._pending = [pending for pending in self._pending if pending not in ready]
        return [self._ready(pending, [self._started.pop(spec.key) for spec in pending.specs]) for pending in ready]

    def begin(self, specs: Sequence[EpisodeSpec]) -> list[ReadyEpisode]:
        """Begin episodes, and wait for them."""
        self.prepare(specs)
        while not (ready := self.pop_ready()):
            self._poll(LONGEST_WAIT_S)
        return ready[0]

    def _ready(self, pending: PendingStart, starts: Sequence[EpisodeStart]) -> list[ReadyEpisode]:
        prompts: dict[Hashable, Any] = {}
        rows = [(self._prompts.task(spec.problem.task).label, spec.problem.id, spec.seed) for spec in pending.specs]
        for row, start in zip(rows, starts, strict=True):
            if pending.prompt is not None:
                prompts[row] = pending.prompt.tolist()
            elif start.failed is None:
                prompts.setdefault(row, start.prompt)
        episodes = []
        for spec, row, partial, start in zip(pending.specs, rows, pending.partials, starts, strict=True):
            prompt = np.asarray(prompts.get(row, ()), np.int32)
            continues = partial is not None and start.replays_equal
            if start.failed is not None:
                partial = broken_off(partial, start.failed)
            elif not continues and start.prompt != prompts[row]:
                error = (
                    f"the environment of task {row[0]} begins two episodes of one row and seed with different words: "
                    "draw what it says in reset() from the row and the seed alone"
                )
                partial = broken_off(None, Episode(end="environment_error", reward=math.nan, error=error))
            elif not continues:
                partial = None if len(prompt) <= self._longest_prompt else OVERFLOWN
            episodes.append(ReadyEpisode(spec.key, prompt, partial))
        return episodes

    def openings(self, specs: Sequence[EpisodeSpec]) -> list[dict[str, Any]]:
        """Return how these open episodes began: ``prompt``, row and environment alone; ``tools``, JSON schemas."""
        return self._call_on_owners(lambda spec: self._local[spec.key].opening, specs)

    def members_to_request(
        self, number: int, completions: Sequence[Completion | None], missing: Sequence[int]
    ) -> dict[int, Completion | None]:
        """Return the ``missing`` members of a group that may begin now, by number: a branch with its first tokens."""
        if self.branching is None:
            return dict.fromkeys(missing)
        points = branch_points([None if c is None else c.episode for c in completions], self.branching)
        partials: dict[int, Completion | None] = {}
        for member in [member for member in missing if member < len(points)]:
            point = points[member]
            partials[member] = None
            if point is not None and (parent := completions[point[0]]) is not None:
                partials[member] = begin_branch(parent, *point)
                key, parent_key = (number, member), (number, point[0])
                self._roots[key] = self._roots.get(parent_key, parent_key)
                self._local.branch(key, parent_key, point[1])
        if len(points) == len(completions):
            self._local.close_copies([(number, member) for member in range(len(completions))])
        return partials

    def submit_turn(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Let the environment answer a turn that the model has ended; ``limit``: tokens of the episode at most."""
        self._answering[key] = turn
        if self._is_local(key):
            self._local.submit_turn(key, turn, limit)

    def abort(self, keys: Sequence[Hashable]) -> dict[Hashable, Completion]:
        """Leave the answers to these episodes for later: ``pop_answers`` does not return them until their turns are
        submitted again. Returns those in preparation, as they are: all of one ``prepare``, if any key is among them.
        """
        for key in keys:
            self._answering.pop(key, None)
        aborted = [pending for pending in self._pending if {spec.key for spec in pending.specs} & {*keys}]
        self._pending = [pending for pending in self._pending if pending not in aborted]
        partials = {}
        for pending in aborted:
            pairs = zip(pending.specs, pending.partials, strict=True)
            partials |= {spec.key: partial or EMPTY for spec, partial in pairs}
        self._started = {key: start for key, start in self._started.items() if key not in partials}
        return partials

    def pop_answers(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call, those with an end being over; ``wait_s``: seconds to wait
        if there are none, and none has begun.
        """
        return {key: with_answer(self._answering.pop(key), *answer) for key, answer in self._poll(wait_s)}

    def _poll(self, wait_s: float) -> list[tuple[Hashable, tuple[Episode, list[int]]]]:
        """Return the answers since the last call on all processes, and note the episodes that have started."""
        preparing = [key for key in self.preparing if key not in self._started]
        answers, starts = self._local.poll(self._answering, preparing, wait_s)
        if self._peers is not None and self._peers.count > 1:
            parts = self._peers.gather(codec.to_json([answers, starts], EPISODE_RECORDS))
            pairs = [codec.from_json(part, EPISODE_RECORDS) for part in parts]
            answers, starts = ([entry for pair in pairs for entry in pair[which]] for which in range(2))
        self._started |= dict(starts)
        return answers

    def close_metrics(self) -> dict[str, Any]:
        """Return metrics of environments that failed to close since the last call, and of threads that hang, if any."""
        close_errors, self._local.close_errors[:] = [*self._local.close_errors], []
        by_process = [(close_errors, count_hanging())]
        if self._peers is not None and self._peers.count > 1:
            by_process = self._peers.gather(by_process[0])
        errors = [line for lines, _ in by_process for line in lines]
        threads = sum(count for _, count in by_process)
        closing = {"episode/close_errors": len(errors), "event/environment": errors[0]} if errors else {}
        return closing | ({"episode/hanging_threads": threads} if threads else {})

    def retain(self, keys: Sequence[Hashable] | set[Hashable]) -> None:
        """Close the environments of all other episodes."""
        open_keys = set(keys)
        self._playing &= open_keys
        self.abort(self._local.retain(open_keys))
        self._roots = {key: root for key, root in self._roots.items() if key in open_keys}

    def _is_local(self, key: Hashable) -> bool:
        """Whether the environment of an episode is on this process; the same answer everywhere."""
        root = self._roots.get(key, key)
        return self._peers is None or hash(root) % self._peers.count == self._peers.index

    def _call_on_owners(self, call: Callable[[EpisodeSpec], Any], specs: Sequence[EpisodeSpec]) -> list[Any]:
        """Call a function for each spec, on the process that has its environment; return the results on all."""
        local = [index for index, spec in enumerate(specs) if self._is_local(spec.key)]
        calls = {index: self._local.threads.submit(call, specs[index]) for index in local}
        results = {index: future.result() for index, future in calls.items()}
        if self._peers is not None and self._peers.count > 1:
            for part in self._peers.gather({str(index): results[index] for index in local}):
                results |= {int(index): answer for index, answer in part.items()}
        return [results[index] for index in range(len(specs))]


def episodes_of(prompts: Prompts, rollout: Any, stops: Sequence[int], *others: Any) -> Episodes | None:
    """Return the owner of the episodes of some tasks, within the limits of ``rollout``; None if no task has any.
    ``others``: the last arguments of ``Episodes``.
    """
    if not any(task.plays for task in prompts.tasks):
        return None
    return Episodes(prompts, rollout.episode, rollout.max_prompt_tokens, stops, *others, longest=rollout.max_new_tokens)


def broken_off(partial: Completion | None, end: Episode) -> Completion:
    """Return the completion of an episode that cannot begin, or not be brought back."""
    completion = partial or EMPTY
    episode = dataclasses.replace(
        completion.episode or Episode(), end=end.end, reward=math.nan, error=end.error, unanswered=""
    )
    return dataclasses.replace(completion, finish_reason="stop", episode=episode)


def with_answer(turn: Completion, episode: Episode, tokens: Sequence[int]) -> Completion:
    """Return the completion with an environment's answer to its last turn."""
    if episode.end:
        reason = turn.finish_reason
        if reason in ("stop", "length"):
            reason = "length" if episode.end in CUT_OFF else "stop"
        return dataclasses.replace(turn, episode=episode, finish_reason=reason)
    return dataclasses.replace(with_tokens(turn, tokens, int(turn.version[-1])), episode=episode)


def entropy_rise(completion: Completion, tokens: int, vocabulary: int) -> float:
    """Return dH of the last turn, which has ended, over its first k = ``tokens`` tokens, or those that both turns have;
    0 for the first. The completion has each token's entropy; V = ``vocabulary``.
    """
    entropies = completion.extras["entropy"].astype(np.float64)
    last = entropies[completion.last_turn :][:tokens]
    ends = [*np.flatnonzero(~completion.mask)[:1], *completion.forks]
    first = entropies[: min(ends, default=None)][:tokens]
    both = min(len(first), len(last))
    return float(np.sum(last[:both] - first[:both])) / math.log(vocabulary)


def branch_points(episodes: Sequence[Episode | None], rule: Branching) -> list[tuple[int, int] | None]:
    """Return where a group's M members begin, as many as are decided: ARPO, arXiv 2507.19849. A branch begins at
    (parent, turns), the member that it branches from and how many of its turns it has; a whole episode at None.

    A group begins with N whole episodes. After each answer of the environment, the entropy of the first k tokens of the
    model's next turn is compared with that of its first turn,

        dH = sum_{j <= k} (H_j - H_j of the first turn) / log V,    P = alpha + beta dH,

    and if P > tau, another member begins there: a branch. Entropies are the policy's, in nats, at the sampling
    temperature. A branch has its parent's tokens and turns up to the answer, a copy of the environment in that state,
    and a seed of its own. It samples the whole next turn anew; the tokens that were measured stay the parent's.

    Points of branching are taken turn by turn, those of one turn by the member's number, one branch at each, until M
    members are there; a branch may branch at later turns than that of its own beginning. A point is decided once the
    turn after the answer has ended, and all points before it are decided: so no clock decides, and a run that is
    stopped finds the same starts again. If all episodes end before there are M members, the others are whole episodes.

    Departures: the paper divides by V, its code by log V, as here. The code draws a random number where the paper
    compares P with tau, and measures the turn before the answer; here it is the paper's. Points that are reached at one
    time have no order in the paper.

    ``episodes``: of the members, as far as they are; None for one that has no answer yet.
    """
    points: list[tuple[int, int] | None] = [None] * rule.whole_of(len(episodes))
    turn, running = 1, True
    while running and len(points) < len(episodes):
        running = False
        for member in range(len(points)):  # those that begin at this turn are looked at from the next one on
            episode = episodes[member] or Episode()
            if len(episode.turns) > turn:
                running = True
                if rule.branches_at(episode.turns[turn].entropy_rise) and len(points) < len(episodes):
                    points.append((member, turn))
            elif not episode.end:
                return points
        turn += 1
    return points + [None] * (len(episodes) - len(points))


def begin_branch(parent: Completion, member: int, num_turns: int) -> Completion:
    """Return a completion that goes on after so many answered turns of its parent, the group's ``member``."""
    turns = parent.episode.turns[:num_turns]
    after = int(np.argmax(parent.mask[turns[-1].end :]))
    shared = turns[-1].end + after
    reward = sum(turn.reward for turn in turns)
    episode = Episode(turns, reward=reward, parent=member, shared=shared, tools=parent.episode.tools)
    return dataclasses.replace(first_tokens(parent, shared), episode=episode)


def common_lengths(completions: Sequence[Completion]) -> np.ndarray:
    """Return the number of first tokens that each two members of a group share, int64[G, G], by their records as far as
    the tokens are equal: a parent may have begun anew.
    """
    lengths = np.diag([len(completion.tokens) for completion in completions])
    for member, completion in enumerate(completions):
        parent = None if completion.episode is None else completion.episode.parent
        if parent is None or parent >= member:
            continue
        shared = min(completion.episode.shared, len(completions[parent].tokens))
        differ = np.flatnonzero(completion.tokens[:shared] != completions[parent].tokens[:shared])
        shared = int(differ[0]) if len(differ) else shared
        lengths[member, :member] = lengths[:member, member] = np.minimum(shared, lengths[parent, :member])
    return lengths


def shared_credit(advantages: Sequence[np.ndarray], common: np.ndarray) -> list[np.ndarray]:
    """Return each token's advantage, float[T] by member: the mean over the members that share it, ARPO's "hard", by the
    ``common_lengths``, int[G, G].
    """
    credit = []
    for member, member_advantages in enumerate(advantages):
        total, count = np.zeros(len(member_advantages)), np.zeros(len(member_advantages))
        for other, shared in enumerate(common[member]):
            total[:shared] += advantages[other][:shared]
            count[:shared] += 1
        credit.append((total / np.maximum(count, 1)).astype(member_advantages.dtype))
    return credit
