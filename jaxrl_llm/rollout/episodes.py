"""Episodes: completions of several turns, between which an environment answers.

The sampler never waits for a slow environment: answers are made on threads, and an episode that waits has no slot. What
the model sampled is never tokenised again; what the environment says follows as tokens with mask False.

An episode is a function of weights, problem, seed and what its environment answers. Answers are saved with the
completion: after a restart the environment is begun anew and given the same replies. If it then answers otherwise, the
episode begins anew too, and is counted.
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
from jaxrl_llm.engine.requests import EMPTY, first_tokens, row_room, with_tokens
from jaxrl_llm.environments.calls import ParsedReply
from jaxrl_llm.environments.environment import Limits
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.world import Answer, DaemonThreads, World, count_hanging, format_error
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.tasks.chats import Prompts
from jaxrl_llm.tasks.template import worded
from jaxrl_llm.types import Completion, Episode, Message, Problem, Turn

if TYPE_CHECKING:
    from jaxrl_llm.sharding.distributed import Peers

AT_ONCE = 256
"""Maximum number of environments that answer at one time."""
SETTLE_S = 0.05
"""Seconds in which episodes that begin are waited for together, so that the sampler gets them together."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """One episode to play.

    Attributes:
      key: of its request: whole numbers.
      problem: its row.
      seed: of the environment; equal for all members of a group.
    """

    key: Hashable
    problem: Problem
    seed: int

    @property
    def row(self) -> dict[str, Any]:
        """The row as environments see it: its columns, ``prompt`` (chat messages) and ``answer``."""
        return {**self.problem.metadata, "prompt": list(self.problem.prompt), "answer": self.problem.answer}


@dataclasses.dataclass(frozen=True)
class Beginning:
    """How an episode has begun, or was brought back to where it was.

    Attributes:
      prompt: token ids; empty where it failed.
      same: whether the environment has answered as before.
      failed: its end, if the environment or the chat template failed.
    """

    prompt: list[int]
    same: bool = True
    failed: Episode | None = None


@dataclasses.dataclass
class Live:
    """An episode under way, on the process that has its environment.

    Attributes:
      world: the environment.
      form: writes and reads its chat.
      messages: the prompt, and all turns so far.
      asked: the prompt as row and environment gave it, without the task's system message and suffix.
      prompt: its token ids.
      theirs: number of the last messages of ``asked`` that are the environment's.
      room: most characters of an answer; what is longer fits nowhere.
      trouble: gets a line for each environment that fails to close.
      turns: those answered.
      restarts: times that it began anew.
      branching: where it may branch; None for nowhere.
      observed: whether a loss reads what the environment says.
      copies: of the episode where it may branch, by the number of turns.
      settled: whether no more copies are needed.
    """

    world: World
    form: EpisodeFormat
    messages: list[Message]
    asked: list[Message]
    prompt: list[int]
    theirs: int
    room: int
    trouble: list[str]
    turns: tuple[Turn, ...] = ()
    restarts: int = 0
    branching: Branching | None = None
    observed: bool = False
    copies: dict[int, Self] = dataclasses.field(default_factory=dict)
    settled: bool = False

    def parsed(self, whole: Completion) -> ParsedReply:
        """Return the message of a completion's last turn."""
        start = whole.last_turn
        before = whole.forks.get(start, whole.tokens[:start])
        return self.form.parse(whole.tokens[start:].tolist(), before.tolist() or None)

    def play(self, whole: Completion) -> tuple[Turn, Answer]:
        """Give the last turn of a completion to the environment; return its record and the answer."""
        parsed = self.parsed(whole)
        rise = self.risen(whole)
        answer = self.world.reply(parsed)
        answer = dataclasses.replace(answer, messages=cut(answer.messages, self.room))
        turn = Turn(
            len(whole.tokens), parsed.message, answer.messages, answer.reward, answer.tool_calls,
            answer.tool_errors, dict(answer.metrics), rise, answer.state,
        )  # fmt: skip
        self.turns += (turn,)
        self.messages += [parsed.message, *answer.messages]
        return turn, answer

    def risen(self, whole: Completion) -> float:
        """Return the rise of the entropy of a completion's last turn, and copy the episode if it branches before it."""
        rule = self.branching
        if rule is None or not self.turns:
            return 0.0
        rise = entropy_rise(whole, rule.tokens, len(self.form.tokenizer))
        if rule.at(rise) and not self.settled:
            try:
                copied = {"world": self.world.copy(), "messages": list(self.messages), "restarts": 0, "copies": {}}
                self.copies[len(self.turns)] = dataclasses.replace(self, **copied)
            except RuntimeError:  # what branches here gets a new environment that is given the same replies
                self.world.error = ""
        return rise

    @property
    def opening(self) -> dict[str, Any]:
        """How it began: ``prompt``, messages without the task's system message and suffix; ``tools``, JSON schemas."""
        return {"prompt": self.asked, "tools": list(self.world.tools)}

    def copy_error(self) -> str | None:
        """Copy the environment and drop the copy; return why it cannot be copied, None if it can."""
        try:
            self.world.copy().close()
        except RuntimeError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Close the environment and its copies."""
        self.settle()
        if error := self.world.close():
            self.trouble.append(error)

    def settle(self) -> None:
        """Close the copies, and make no more: no branch will begin here."""
        self.settled = True
        for turns in list(self.copies):
            copy = self.copies.pop(turns, None)  # which another thread may have closed
            if copy is not None:
                copy.close()

    def answer(self, whole: Completion, limit: int) -> tuple[Episode, list[int]]:
        """Answer a completion's last turn; return the episode with it, and the tokens up to the model's next turn.

        Whatever fails, such as a chat template that refuses the answer, ends the episode.

        ``limit``: tokens of the whole completion at most.
        """
        before = whole.episode or Episode(tools=len(self.world.tools))
        try:
            return self._answer(whole, before, limit)
        except BaseException as error:  # noqa: BLE001  libraries written in Rust panic with one of their own
            known = {"turns": self.turns, "tools": before.tools, "parent": before.parent, "shared": before.shared}
            return self.ended(dataclasses.replace(failure(error), **known, restarts=self.restarts)), []

    def _answer(self, whole: Completion, before: Episode, limit: int) -> tuple[Episode, list[int]]:
        size = len(whole.tokens)
        room = row_room(whole, limit, len(self.prompt))
        cut = whole.finish_reason == "length" and size < room
        if whole.finish_reason != "stop" and not cut:
            last = Turn(size, self.parsed(whole).message, entropy_rise=self.risen(whole))
            turns = (*before.turns, last)
            return self.ended(dataclasses.replace(before, turns=turns, end="max_tokens", restarts=self.restarts)), []
        history = list(self.messages)
        turn, answer = self.play(whole)
        end = "max_tokens" if cut and answer.end == "completed" and not self.world.steps else answer.end
        episode = dataclasses.replace(
            before, turns=(*before.turns, turn), end=end, reward=before.reward + answer.reward,
            error=answer.error, restarts=self.restarts,
        )  # fmt: skip
        if end:
            return self.ended(episode), []
        asked = [*history, turn.reply], answer.messages, whole.tokens[whole.last_turn :].tolist()
        fork = self.form.fork(self.asked, *asked[:2], self.theirs)
        tokens = [] if fork else self.form.suffix(*asked)
        if size >= limit or (len(fork) - len(self.prompt) >= limit if fork else size + len(tokens) >= room):
            return self.ended(dataclasses.replace(episode, end="context_overflow")), []
        if fork:
            turns = (*before.turns, dataclasses.replace(turn, fork=tuple(map(int, fork))))
            return dataclasses.replace(episode, turns=turns), []
        if self.observed:
            said = tuple((size + begin, size + end) for begin, end in self.form.content_ranges(*asked, tokens))
            episode = dataclasses.replace(episode, turns=(*before.turns, dataclasses.replace(turn, said=said)))
        return episode, [int(token) for token in tokens]

    def ended(self, episode: Episode) -> Episode:
        """Close the environment; return the episode with its reward for all of it, NaN if it has failed."""
        failed = episode.end in ("environment_error", "timeout")
        last = math.nan if failed else self.world.reward() or 0.0
        error = episode.error if failed else self.world.error
        if trouble := self.world.close():
            self.trouble.append(trouble)
        return dataclasses.replace(episode, reward=episode.reward + last, error=error)


def cut(messages: Sequence[Message], room: int) -> tuple[Message, ...]:
    """Return messages with at most ``room`` characters of their contents, the first ones."""
    found = []
    for message in messages:
        text = message.get("content")
        found.append({**message, "content": text[:room]} if isinstance(text, str) else message)
        room -= len(text[:room]) if isinstance(text, str) else 0
    return tuple(found)


def failure(error: BaseException) -> Episode:
    """Return the end of an episode that an exception breaks off."""
    return Episode(
        end="environment_error", reward=math.nan, error=format_error(error, kind=not isinstance(error, InputError))
    )


class Worlds:
    """Owner of the episodes under way whose environments are on this process, and of the threads on which they answer.

    Args:
      prompts, limits, stops, branching, observed: as ``episodes.Episodes`` gets them.
      longest: maximum number of tokens of a prompt, or of a completion.

    Attributes:
      threads: on which environments are called.
      trouble: lines on environments that failed to close.
    """

    def __init__(
        self, prompts: Prompts, limits: Limits, stops: Sequence[int], branching: Branching | None, observed: bool,
        longest: int,
    ):  # fmt: skip
        self.trouble: list[str] = []
        self._room = longest * max(map(len, prompts.tokenizer.get_vocab()))
        self.threads = DaemonThreads(AT_ONCE)
        self._prompts, self._limits, self._stops = prompts, limits, stops
        self._branching, self._observed = branching, observed
        playing = [task for task in prompts.tasks if task.plays]
        self._factories = {task.label: Factory(task.environment, task.tools) for task in playing}
        self._forms: dict[str, EpisodeFormat] = {}
        self._live: dict[Hashable, Live] = {}
        self._answers: dict[Hashable, concurrent.futures.Future[tuple[Episode, list[int]]]] = {}
        self._begun: dict[Hashable, concurrent.futures.Future[Beginning]] = {}

    def __getitem__(self, key: Hashable) -> Live:
        """Return an episode under way."""
        return self._live[key]

    def copy_error(self, key: Hashable) -> str | None:
        """Copy the environment of an episode and drop the copy; return why it cannot be copied, None if it can."""
        return self._live[key].copy_error() if key in self._live else None

    @property
    def notes(self) -> list[str]:
        """Lines for people on the forms of the chats begun so far."""
        return [*dict.fromkeys(form.note for form in self._forms.values() if form.note)]

    def prepare(self, scene: Scene, begun: Completion | None) -> None:
        """Begin an episode on a thread, or bring its environment to where it was, unless that is done already."""
        if scene.key not in self._begun:
            self._begun[scene.key] = self.threads.submit(self._prepared, scene, begun)

    def _prepared(self, scene: Scene, begun: Completion | None) -> Beginning:
        try:
            return self._resumed(scene, begun or EMPTY)
        except BaseException as error:  # noqa: BLE001  as in ``Live.answer``
            return Beginning([], failed=failure(error))

    def _begin(self, scene: Scene, restarts: int) -> Beginning:
        task = self._prompts.task(scene.problem.task)
        if scene.key in self._live:
            self._live.pop(scene.key).close()
        self._answers.pop(scene.key, None)
        world = self._factories[task.label].world(scene.row, scene.seed, self._limits)
        messages, answer = world.reset(scene.problem.prompt)
        if answer.end:
            world.close()
            return Beginning([], failed=Episode(end=answer.end, reward=math.nan, error=answer.error, restarts=restarts))
        messages, theirs = list(cut(messages, self._room)), len(messages) - len(scene.problem.prompt)
        options = scene.problem.options
        key = json.dumps([task.label, world.tools, options])
        if key not in self._forms:
            tokenizer, history = self._prompts.tokenizer, self._limits.history
            self._forms[key] = EpisodeFormat(tokenizer, task, world.tools, self._stops, history, options)
        form = self._forms[key]
        prompt = [int(token) for token in form.prompt(messages, theirs)]
        self._live[scene.key] = Live(
            world, form, worded(messages, task), messages, prompt, theirs, self._room, self.trouble, (), restarts,
            self._branching, self._observed,
        )  # fmt: skip
        return Beginning(prompt)

    def _resumed(self, scene: Scene, begun: Completion) -> Beginning:
        episode = begun.episode or Episode()
        live = self._live.get(scene.key)
        if live is not None and (live.turns == episode.turns or scene.key in self._answers):
            return Beginning(live.prompt)
        new = self._begin(scene, episode.restarts)
        for number, turn in enumerate(() if new.failed else episode.turns):
            so_far = dataclasses.replace(first_tokens(begun, turn.end), episode=Episode(episode.turns[:number]))
            if self._live[scene.key].play(so_far)[0] != turn:
                return dataclasses.replace(self._begin(scene, episode.restarts + 1), same=False)
        return new

    def branch(self, key: Hashable, parent: Hashable, turns: int) -> None:
        """Begin an episode where another one was after so many turns, by the copy of its environment.

        Without a copy, as after a restart, ``resume`` gives a new environment the same replies.
        """
        copy = self._live[parent].copies.pop(turns, None) if parent in self._live else None
        if copy is not None:
            self._live[key] = copy

    def settle(self, keys: Sequence[Hashable]) -> None:
        """Close the copies of these episodes: no branch begins there any more."""
        for key in keys:
            if key in self._live:
                self.threads.submit(self._live[key].settle)

    def ask(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Let the environment answer a turn, unless it does already, having been asked before an interruption."""
        if key not in self._answers:
            self._answers[key] = self.threads.submit(self._live[key].answer, turn, limit)

    def come(
        self, asked: Iterable[Hashable], preparing: Iterable[Hashable], wait_s: float
    ) -> tuple[list[tuple[Hashable, tuple[Episode, list[int]]]], list[tuple[Hashable, Beginning]]]:
        """Return the answers that have come to these episodes, and those that have begun; with none, wait so many
        seconds for the first."""
        answers = {key: self._answers[key] for key in asked if key in self._answers}
        begun = {key: self._begun[key] for key in preparing if key in self._begun}
        if wait_s and begun:
            concurrent.futures.wait(begun.values(), SETTLE_S)
        if wait_s and (answers or begun):
            concurrent.futures.wait([*answers.values(), *begun.values()], wait_s, concurrent.futures.FIRST_COMPLETED)
        return _taken(answers, self._answers), _taken(begun, self._begun)

    def retain(self, kept: Set[Hashable]) -> list[Hashable]:
        """Close the environments of all other episodes; return their keys."""
        for key in self._begun.keys() - kept:
            self._begun.pop(key).add_done_callback(lambda _, key=key: self._close(key))
        closed = [*(self._live.keys() - kept)]
        for key in closed:
            self._answers.pop(key, None)
            self._close(key)
        return closed

    def _close(self, key: Hashable) -> None:
        if (live := self._live.pop(key, None)) is not None:
            self.threads.submit(live.close)


def _taken(some: dict[Hashable, Any], every: dict[Hashable, Any]) -> list[tuple[Hashable, Any]]:
    """Return the results that have come of some futures, which are taken out of ``every``."""
    return [(key, every.pop(key).result()) for key, future in some.items() if future.done()]


CUT_OFF = ("max_tokens", "context_overflow", "max_turns", "max_tool_calls")
"""Ends of episodes that were cut off: their completions have the finish reason "length"."""
OVERFLOWN = dataclasses.replace(EMPTY, finish_reason="length", episode=Episode(end="context_overflow"))
"""The completion of an episode whose prompt is too long: it has no token."""


def environment_seed(seed: int) -> int:
    """Return the 31-bit seed of an environment, made from the 64-bit seed of a request."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") >> 1


RECORDS = (Episode, Turn, Beginning)
"""Types that processes send to each other."""
LONGEST_WAIT_S = 1.0
"""Seconds after which a wait for an episode that begins is looked at again."""


class Opened(NamedTuple):
    """An episode that has begun, or was brought back to where it was.

    Attributes:
      key: of its request.
      prompt: token ids, int32[p].
      begun: completion that it goes on from, or the whole one if it is over; None for a new one.
    """

    key: Hashable
    prompt: np.ndarray
    begun: Completion | None


class Preparation(NamedTuple):
    """Episodes that begin together.

    Attributes:
      scenes: the episodes.
      begun: completions to go on from; None for new ones.
      prompt: known already; None if they give it.
    """

    scenes: Sequence[Scene]
    begun: Sequence[Completion | None]
    prompt: np.ndarray | None


class Episodes:
    """Owner of the episodes under way and of their environments; a ``respond.Responder``.

    With several processes each environment lives on one, and all get its answers.

    Args:
      prompts: of the tasks, some of which have environments or tools; gives the tokenizer.
      limits: of every episode.
      longest_prompt: maximum number of tokens of a prompt.
      stops: tokens at which the model ends its turns.
      peers: the run's processes; None for one.
      branching: where episodes branch; None for nowhere.
      observed: whether a loss reads what the environments say (``Turn.said``).
      longest: maximum number of tokens of a completion.

    Attributes:
      max_turn_tokens: tokens of one turn at most; 0 for no limit but that of the episode.
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
        self._worlds = Worlds(prompts, limits, stops, branching, observed, max(longest, longest_prompt))
        self._homes: dict[Hashable, Hashable] = {}  # of a branch: the whole episode that it goes back to
        self._asked: dict[Hashable, Completion] = {}
        self._playing: set[Hashable] = set()
        self._preparations: list[Preparation] = []
        self._known: dict[Hashable, Beginning] = {}

    def plays(self, problem: Problem) -> bool:
        """Whether an environment or tools belong to the problem's task."""
        return self._prompts.task(problem.task).plays

    def rehearse(self, problems: Sequence[Problem]) -> list[str]:
        """Begin two episodes of the first problem of each task that has episodes, and drop them; return notes for
        people.

        Later prompts that are too long end their episodes, and so does an environment that fails; the first one says
        that the settings are wrong, if it fails twice.

        Raises:
          InputError: the environment fails, the template cannot render its tools, or the prompt is too long.
        """
        firsts: dict[str, Problem] = {}
        for problem in problems:
            if self.plays(problem):
                firsts.setdefault(self._prompts.task(problem.task).label, problem)
        scenes = [Scene((-1, place, twin), one, 0) for place, one in enumerate(firsts.values()) for twin in range(2)]
        failed = any(one.begun is not None and one.begun.episode.error for one in self.begin(scenes))
        for scene, one in zip(scenes, self.begin(scenes), strict=True):
            label = self._prompts.task(scene.problem.task).label
            error = "" if one.begun is None else one.begun.episode.error
            require(not (failed and error), f"the environment of task {label} cannot begin an episode: {error}")
            require(
                one.begun is None or bool(error),
                f"a prompt of task {label} has {len(one.prompt)} tokens with what its environment says first: set "
                f"--rollout.max_prompt_tokens {len(one.prompt)} (now {self._longest_prompt})",
            )
        if self.branching is not None:
            for error in self._everywhere(lambda scene: self._worlds.copy_error(scene.key), scenes):
                require(error is None, f"the environment cannot be copied, as branches need it: {error}")
        self.retain(())
        return self._worlds.notes

    @property
    def preparing(self) -> list[Hashable]:
        """Keys of the episodes that begin, or are brought back."""
        return [scene.key for one in self._preparations for scene in one.scenes]

    def has(self, key: Hashable) -> bool:
        """Whether the request of this key is an episode."""
        return key in self._playing

    def prepare(
        self,
        scenes: Sequence[Scene],
        begun: Sequence[Completion | None] | None = None,
        prompt: np.ndarray | None = None,
    ) -> None:
        """Begin episodes on threads, or bring their environments back to where they were; ``ready`` returns them.

        An environment that is in memory goes on as it is. For others a new one is given the same replies.

        Args:
          scenes: the episodes; those of one row and seed have one prompt.
          begun: completions to go on from; None for new ones.
          prompt: of all of them, if it is known.
        """
        begun = [None] * len(scenes) if begun is None else begun
        self._playing |= {scene.key for scene in scenes}
        self._preparations.append(Preparation(scenes, begun, prompt))
        for scene, one in zip(scenes, begun, strict=True):
            if self._is_own(scene.key):
                self._worlds.prepare(scene, one)

    def ready(self) -> list[list[Opened]]:
        """Return the episodes of each ``prepare`` that have all begun; ``answered`` waits for them.

        One whose environment failed, or began with other words than the first of its row and seed, is over. One whose
        environment answers otherwise than before begins anew.
        """
        done = [one for one in self._preparations if all(scene.key in self._known for scene in one.scenes)]
        self._preparations = [one for one in self._preparations if one not in done]
        return [self._opened(one, [self._known.pop(scene.key) for scene in one.scenes]) for one in done]

    def begin(self, scenes: Sequence[Scene]) -> list[Opened]:
        """Begin episodes, and wait for them."""
        self.prepare(scenes)
        while not (done := self.ready()):
            self._hear(LONGEST_WAIT_S)
        return done[0]

    def _opened(self, asked: Preparation, found: Sequence[Beginning]) -> list[Opened]:
        prompts: dict[Hashable, Any] = {}
        of = [(self._prompts.task(one.problem.task).label, one.problem.id, one.seed) for one in asked.scenes]
        for which, new in zip(of, found, strict=True):
            if asked.prompt is not None:
                prompts[which] = asked.prompt.tolist()
            elif new.failed is None:
                prompts.setdefault(which, new.prompt)
        opened = []
        for scene, which, begun, new in zip(asked.scenes, of, asked.begun, found, strict=True):
            prompt = np.asarray(prompts.get(which, ()), np.int32)
            goes_on = begun is not None and new.same
            if new.failed is not None:
                begun = _broken_off(begun, new.failed)
            elif not goes_on and new.prompt != prompts[which]:
                what = (
                    f"the environment of task {which[0]} begins two episodes of one row and seed with different words: "
                    "draw what it says in reset() from the row and the seed alone"
                )
                begun = _broken_off(None, Episode(end="environment_error", reward=math.nan, error=what))
            elif not goes_on:
                begun = None if len(prompt) <= self._longest_prompt else OVERFLOWN
            opened.append(Opened(scene.key, prompt, begun))
        return opened

    def openings(self, scenes: Sequence[Scene]) -> list[dict[str, Any]]:
        """Return how these episodes, which are not closed yet, began: ``prompt``, messages without the task's system
        message and suffix, and ``tools``, JSON schemas.
        """
        return self._everywhere(lambda scene: self._worlds[scene.key].opening, scenes)

    def beginnings(
        self, number: int, known: Sequence[Completion | None], left: Sequence[int]
    ) -> dict[int, Completion | None]:
        """Return the members of a group that may begin now, of those ``left``: a branch with its first tokens.

        ``number``: of the group; ``known``: its completions, as far as they are.
        """
        if self.branching is None:
            return dict.fromkeys(left)
        found = starts([None if one is None else one.episode for one in known], self.branching)
        begun: dict[int, Completion | None] = {}
        for place in [place for place in left if place < len(found)]:
            start = found[place]
            parent = None if start.parent is None else known[start.parent]
            begun[place] = None if parent is None else branch(parent, start)
            if parent is not None:
                key, origin = (number, place), (number, start.parent)
                self._homes[key] = self._homes.get(origin, origin)
                self._worlds.branch(key, origin, start.turns)
        if len(found) == len(known):
            self._worlds.settle([(number, place) for place in range(len(known))])
        return begun

    def ask(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Let the environment answer a turn that the model has ended; ``limit``: tokens of the episode at most."""
        self._asked[key] = turn
        if self._is_own(key):
            self._worlds.ask(key, turn, limit)

    def abort(self, keys: Sequence[Hashable]) -> dict[Hashable, Completion]:
        """Leave the answers to these episodes for later: ``answered`` does not return them unless asked again.

        Returns those that were in preparation, as they are: all of one ``prepare``, if any key is among them.
        """
        for key in keys:
            self._asked.pop(key, None)
        ending = [one for one in self._preparations if {scene.key for scene in one.scenes} & {*keys}]
        self._preparations = [one for one in self._preparations if one not in ending]
        left = {}
        for one in ending:
            left |= {scene.key: begun or EMPTY for scene, begun in zip(one.scenes, one.begun, strict=True)}
        self._known = {key: found for key, found in self._known.items() if key not in left}
        return left

    def answered(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call, those with an end being over.

        ``wait_s``: seconds to wait if there are none, and none has begun.
        """
        return {key: _continued(self._asked.pop(key), *answer) for key, answer in self._hear(wait_s)}

    def _hear(self, wait_s: float) -> list[tuple[Hashable, tuple[Episode, list[int]]]]:
        """Return the answers since the last call on all processes, and note the episodes that have begun."""
        preparing = [key for key in self.preparing if key not in self._known]
        answers, begun = self._worlds.come(self._asked, preparing, wait_s)
        if self._peers is not None and self._peers.count > 1:
            parts = self._peers.gather(codec.to_json([answers, begun], RECORDS))
            both = [codec.from_json(part, RECORDS) for part in parts]
            answers, begun = ([one for part in both for one in part[which]] for which in range(2))
        self._known |= dict(begun)
        return answers

    def trouble(self) -> dict[str, Any]:
        """Return metrics of environments that failed to close since the last call, and of threads that hang; {} without
        any."""
        told, self._worlds.trouble[:] = [*self._worlds.trouble], []
        found = [(told, count_hanging())]
        if self._peers is not None and self._peers.count > 1:
            found = self._peers.gather(found[0])
        errors = [line for lines, _ in found for line in lines]
        left = sum(count for _, count in found)
        closing = {"episode/close_errors": len(errors), "event/environment": errors[0]} if errors else {}
        return closing | ({"episode/hanging_threads": left} if left else {})

    def retain(self, keys: Sequence[Hashable] | set[Hashable]) -> None:
        """Close the environments of all other episodes."""
        kept = set(keys)
        self._playing &= kept
        self.abort(self._worlds.retain(kept))
        self._homes = {key: home for key, home in self._homes.items() if key in kept}

    def _is_own(self, key: Hashable) -> bool:
        """Whether the environment of an episode is on this process; the same answer everywhere."""
        home = self._homes.get(key, key)
        return self._peers is None or hash(home) % self._peers.count == self._peers.index

    def _everywhere(self, call: Callable[[Scene], Any], scenes: Sequence[Scene]) -> list[Any]:
        """Call a function for each scene, on the process that has its environment; return the results on all."""
        own = [place for place, scene in enumerate(scenes) if self._is_own(scene.key)]
        calls = {place: self._worlds.threads.submit(call, scenes[place]) for place in own}
        found = {place: coming.result() for place, coming in calls.items()}
        if self._peers is not None and self._peers.count > 1:
            for part in self._peers.gather({str(place): found[place] for place in own}):
                found |= {int(place): result for place, result in part.items()}
        return [found[place] for place in range(len(scenes))]


def episodes_of(prompts: Prompts, rollout: Any, stops: Sequence[int], *others: Any) -> Episodes | None:
    """Return the owner of the episodes of some tasks, within the limits of ``rollout``; None if no task has any.

    ``others``: the last arguments of ``Episodes``.
    """
    if not any(task.plays for task in prompts.tasks):
        return None
    return Episodes(prompts, rollout.episode, rollout.max_prompt_tokens, stops, *others, longest=rollout.max_new_tokens)


def _broken_off(begun: Completion | None, failed: Episode) -> Completion:
    """Return the completion of an episode that cannot begin, or not be brought back."""
    known = begun or EMPTY
    episode = dataclasses.replace(
        known.episode or Episode(), end=failed.end, reward=math.nan, error=failed.error, pending=""
    )
    return dataclasses.replace(known, finish_reason="stop", episode=episode)


def _continued(turn: Completion, episode: Episode, tokens: Sequence[int]) -> Completion:
    """Return the completion with an environment's answer to its last turn."""
    if episode.end:
        reason = turn.finish_reason
        if reason in ("stop", "length"):
            reason = "length" if episode.end in CUT_OFF else "stop"
        return dataclasses.replace(turn, episode=episode, finish_reason=reason)
    return dataclasses.replace(with_tokens(turn, tokens, int(turn.version[-1])), episode=episode)


class Start(NamedTuple):
    """The beginning of a member of a group.

    Attributes:
      parent: member that it branches from; None for a whole episode.
      turns: of the parent's that it has.
    """

    parent: int | None = None
    turns: int = 0


def entropy_rise(completion: Completion, tokens: int, vocabulary: int) -> float:
    """Return dH of the last turn, which has ended: 0 for the first.

    Turns with less than ``tokens`` tokens are compared over those that both have.

    Args:
      completion: with the entropy of each token.
      tokens: k.
      vocabulary: V.
    """
    entropies = completion.extras["entropy"].astype(np.float64)
    last = entropies[completion.last_turn :][:tokens]
    ends = [*np.flatnonzero(~completion.mask)[:1], *completion.forks]
    first = entropies[: min(ends, default=None)][:tokens]
    both = min(len(first), len(last))
    return float(np.sum(last[:both] - first[:both])) / math.log(vocabulary)


def starts(episodes: Sequence[Episode | None], rule: Branching) -> list[Start]:
    """Return the beginnings of a group's M members, as many as are decided: ARPO, arXiv 2507.19849.

    A group of M members begins with N whole episodes. After each answer of the environment, the entropy of the first k
    tokens of the model's next turn is compared with that of its first turn,

        dH = sum_{j <= k} (H_j - H_j of the first turn) / log V,    P = alpha + beta dH,

    and if P > tau, another member begins there: a branch. Entropies are the policy's, in nats, at the sampling
    temperature. A branch has its parent's tokens and turns up to the answer, a copy of the environment in that state,
    and a seed of its own. It samples the whole next turn anew, which is another draw from the distribution at the
    point of branching; the tokens that were measured stay the parent's.

    Members begin in an order that no clock decides. Points of branching are looked at turn by turn, and those of one
    turn by the number of the member, one branch at each, until M members are there; a branch may branch in its turn,
    at later turns than that of its own beginning. A point is decided once the turn after the answer has ended, and all
    points before it are decided. So the start of a member follows from the turns of the others alone, and a run that
    is stopped finds them again. If all episodes end before there are M members, the others are whole episodes.

    Departures: the paper divides by V, its code by log V, as here. The code draws a random number where the paper
    compares P with tau, and measures the turn before the answer; here it is the paper's. Points that are reached at
    one time have no order in the paper.

    ``episodes``: of the members, as far as they are; None for one that has no answer yet.
    """
    found = [Start()] * rule.whole_of(len(episodes))
    turn, going = 1, True
    while going and len(found) < len(episodes):
        going = False
        for member in range(len(found)):  # those that begin at this turn are looked at from the next one on
            episode = episodes[member] or Episode()
            over = len(episode.turns) <= turn
            if over and not episode.end:
                return found
            if not over:
                going = True
                if rule.at(episode.turns[turn].entropy_rise) and len(found) < len(episodes):
                    found.append(Start(member, turn))
        turn += 1
    return found + [Start()] * (len(episodes) - len(found))


def branch(parent: Completion, start: Start) -> Completion:
    """Return a completion that goes on after some turns of its parent and the answer to the last of them."""
    turns = parent.episode.turns[: start.turns]
    after = int(np.argmax(parent.mask[turns[-1].end :]))
    shared = turns[-1].end + after
    reward = sum(turn.reward for turn in turns)
    episode = Episode(turns, reward=reward, parent=start.parent, shared=shared, tools=parent.episode.tools)
    return dataclasses.replace(first_tokens(parent, shared), episode=episode)


def common_lengths(completions: Sequence[Completion]) -> np.ndarray:
    """Return the number of first tokens that each two members of a group have from one beginning, int64[G, G].

    That is what their records say, as far as their tokens are equal: a parent may have begun anew.
    """
    found = np.diag([len(one.tokens) for one in completions])
    for member, one in enumerate(completions):
        parent = None if one.episode is None else one.episode.parent
        if parent is None or parent >= member:
            continue
        shared = min(one.episode.shared, len(completions[parent].tokens))
        differ = np.flatnonzero(one.tokens[:shared] != completions[parent].tokens[:shared])
        shared = int(differ[0]) if len(differ) else shared
        found[member, :member] = found[:member, member] = np.minimum(shared, found[parent, :member])
    return found


def shared_credit(advantages: Sequence[np.ndarray], common: np.ndarray) -> list[np.ndarray]:
    """Return each token's advantage, float[T] by member: the mean over the members that share the token, ARPO's "hard".

    Args:
      advantages: of the tokens of each member, float[T].
      common: lengths that members share, int[G, G], as of ``common_lengths``.
    """
    found = []
    for member, own in enumerate(advantages):
        total, count = np.zeros(len(own)), np.zeros(len(own))
        for other, shared in enumerate(common[member]):
            total[:shared] += advantages[other][:shared]
            count[:shared] += 1
        found.append((total / np.maximum(count, 1)).astype(own.dtype))
    return found
