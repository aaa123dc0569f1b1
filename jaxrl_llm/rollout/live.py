"""Episodes under way on this process: each with its environment, its chat, and copies from which branches begin."""

import concurrent.futures
import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any, Self

from jaxrl_llm.engine.requests import EMPTY, first_tokens, row_room
from jaxrl_llm.environments.calls import Parsed
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.threads import Threads, told
from jaxrl_llm.environments.world import Answer, World
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.branches import entropy_rise
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.tasks.chats import Prompts
from jaxrl_llm.tasks.template import worded
from jaxrl_llm.types import Completion, Episode, Message, Problem, Turn

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

    def parsed(self, whole: Completion) -> Parsed:
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
            said = tuple((size + begin, size + end) for begin, end in self.form.said(*asked, tokens))
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
    return Episode(end="environment_error", reward=math.nan, error=told(error, kind=not isinstance(error, InputError)))


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
        self.threads = Threads(AT_ONCE)
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
