"""Episodes under way on this process: each with its environment, its chat, and copies from which branches begin."""

import concurrent.futures
import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any, Self

from jaxrl_llm.engine.requests import first_tokens, row_room
from jaxrl_llm.environments.calls import Parsed
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.world import Answer, World
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.branches import entropy_rise
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.tasks.chats import Prompts
from jaxrl_llm.tasks.template import worded
from jaxrl_llm.types import Completion, Episode, Message, Problem, Turn

AT_ONCE = 256
"""Maximum number of environments that answer at one time."""


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


@dataclasses.dataclass
class Live:
    """An episode under way, on the process that has its environment.

    Attributes:
      world: the environment.
      form: writes and reads its chat.
      messages: the prompt, and all turns so far.
      asked: the prompt as row and environment gave it, without the task's system message and suffix.
      prompt: number of the prompt's tokens.
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
    prompt: int
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
        turn = Turn(
            len(whole.tokens), parsed.message, tuple(answer.messages), answer.reward, answer.tool_calls,
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
        self.world.close()

    def settle(self) -> None:
        """Close the copies, and make no more: no branch will begin here."""
        self.settled = True
        for turns in list(self.copies):
            copy = self.copies.pop(turns, None)  # which another thread may have closed
            if copy is not None:
                copy.close()

    def answer(self, whole: Completion, limit: int) -> tuple[Episode, list[int]]:
        """Answer a completion's last turn; return the episode with it, and the tokens up to the model's next turn.

        ``limit``: tokens of the whole completion at most.
        """
        before, size = whole.episode or Episode(tools=len(self.world.tools)), len(whole.tokens)
        room = row_room(whole, limit, self.prompt)
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
        fork = self.form.fork(self.asked, *asked[:2])
        tokens = [] if fork else self.form.suffix(*asked)
        if size >= limit or (len(fork) - self.prompt >= limit if fork else size + len(tokens) >= room):
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
        self.world.close()
        return dataclasses.replace(episode, reward=episode.reward + last, error=error)


class Worlds:
    """Owner of the episodes under way whose environments are on this process, and of the threads on which they answer.

    Args:
      prompts, limits, stops, branching, observed: as ``episodes.Episodes`` gets them.

    Attributes:
      threads: on which environments are called.
    """

    def __init__(
        self, prompts: Prompts, limits: Limits, stops: Sequence[int], branching: Branching | None, observed: bool
    ):
        self.threads = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "environment")
        self._prompts, self._limits, self._stops = prompts, limits, stops
        self._branching, self._observed = branching, observed
        playing = [task for task in prompts.tasks if task.plays]
        self._factories = {task.label: Factory(task.environment, task.tools) for task in playing}
        self._forms: dict[str, EpisodeFormat] = {}
        self._live: dict[Hashable, Live] = {}
        self._answers: dict[Hashable, concurrent.futures.Future[tuple[Episode, list[int]]]] = {}

    def __getitem__(self, key: Hashable) -> Live:
        """Return an episode under way."""
        return self._live[key]

    @property
    def notes(self) -> list[str]:
        """Lines for people on the forms of the chats begun so far."""
        return [*dict.fromkeys(form.note for form in self._forms.values() if form.note)]

    def begin(self, scene: Scene, restarts: int = 0) -> list[int] | str:
        """Begin an episode; return the tokens of its prompt, or why it cannot begin."""
        task = self._prompts.task(scene.problem.task)
        if scene.key in self._live:
            self._live.pop(scene.key).close()
        self._answers.pop(scene.key, None)
        try:
            world = self._factories[task.label].world(scene.row, scene.seed, self._limits)
            messages, answer = world.reset(scene.problem.prompt)
            if answer.end:
                return answer.error
            options = scene.problem.options
            key = json.dumps([task.label, world.tools, options])
            if key not in self._forms:
                tokenizer, history = self._prompts.tokenizer, self._limits.history
                self._forms[key] = EpisodeFormat(tokenizer, task, world.tools, self._stops, history, options)
            form = self._forms[key]
            prompt = [int(token) for token in form.prompt(messages)]
        except InputError as error:
            return str(error)
        told = worded(messages, task)
        self._live[scene.key] = Live(
            world, form, told, messages, len(prompt), (), restarts, self._branching, self._observed
        )
        return prompt

    def resume(self, scene: Scene, begun: Completion) -> bool | str:
        """Bring an episode's environment to where it was; whether it answered as before, or why it cannot begin."""
        episode = begun.episode or Episode()
        live = self._live.get(scene.key)
        if live is not None and (live.turns == episode.turns or scene.key in self._answers):
            return True
        prompt = self.begin(scene, episode.restarts)
        if isinstance(prompt, str):
            return prompt
        for number, turn in enumerate(episode.turns):
            so_far = dataclasses.replace(first_tokens(begun, turn.end), episode=Episode(episode.turns[:number]))
            if self._live[scene.key].play(so_far)[0] != turn:
                again = self.begin(scene, episode.restarts + 1)
                return again if isinstance(again, str) else False
        return True

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

    def answered(self, keys: Iterable[Hashable], wait_s: float) -> list[tuple[Hashable, tuple[Episode, list[int]]]]:
        """Return the answers that have come to these episodes; with none, wait so many seconds for the first."""
        own = {key: self._answers[key] for key in keys if key in self._answers}
        if wait_s and own:
            concurrent.futures.wait(own.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
        return [(key, self._answers.pop(key).result()) for key, answer in own.items() if answer.done()]

    def retain(self, kept: Set[Hashable]) -> list[Hashable]:
        """Close the environments of all other episodes; return their keys."""
        closed = [*(self._live.keys() - kept)]
        for key in closed:
            self._answers.pop(key, None)
            self.threads.submit(self._live.pop(key).close)
        return closed
