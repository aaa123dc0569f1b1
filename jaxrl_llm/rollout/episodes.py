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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.engine.requests import EMPTY, first_tokens, with_tokens
from jaxrl_llm.environments.calls import Parsed
from jaxrl_llm.environments.environment import Message
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.factory import Factory
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.world import Answer, World
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.tasks.template import Prompts, worded
from jaxrl_llm.types import Completion, Episode, Problem, Turn

if TYPE_CHECKING:
    from jaxrl_llm.sharding.distributed import Peers

AT_ONCE = 256
"""Maximum number of environments that answer at one time."""
CUT_OFF = ("max_tokens", "context_overflow", "max_turns", "max_tool_calls")
"""Ends of episodes that were cut off: their completions have the finish reason "length"."""
OVERFLOWN = dataclasses.replace(EMPTY, finish_reason="length", episode=Episode(end="context_overflow"))
"""The completion of an episode whose prompt is too long: it has no token."""


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


def environment_seed(seed: int) -> int:
    """Return the 31-bit seed of an environment, made from the 64-bit seed of a request."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") >> 1


RECORDS = (Episode, Turn)
"""Types that processes send to each other."""


@dataclasses.dataclass
class Live:
    """An episode under way, on the process that has its environment.

    Attributes:
      world: the environment.
      form: writes and reads its chat.
      messages: the prompt, and all turns so far.
      asked: the prompt as row and environment gave it, without the task's system message and suffix.
      turns: those answered.
      restarts: times that it began anew.
    """

    world: World
    form: EpisodeFormat
    messages: list[Message]
    asked: list[Message]
    turns: tuple[Turn, ...] = ()
    restarts: int = 0

    def parsed(self, whole: Completion) -> Parsed:
        """Return the message of a completion's last turn."""
        start = whole.last_turn
        return self.form.parse(whole.tokens[start:].tolist(), whole.tokens[:start].tolist() or None)

    def play(self, whole: Completion) -> tuple[Turn, Answer]:
        """Give the last turn of a completion to the environment; return its record and the answer."""
        parsed = self.parsed(whole)
        answer = self.world.reply(parsed)
        counts = answer.tool_calls, answer.tool_errors
        turn = Turn(len(whole.tokens), parsed.message, tuple(answer.messages), answer.reward, *counts)
        self.turns += (turn,)
        self.messages += [parsed.message, *answer.messages]
        return turn, answer

    def answer(self, whole: Completion, limit: int) -> tuple[Episode, list[int]]:
        """Answer a completion's last turn; return the episode with it, and the tokens up to the model's next turn.

        ``limit``: tokens of the whole completion at most.
        """
        before, size = whole.episode or Episode(tools=len(self.world.tools)), len(whole.tokens)
        cut = whole.finish_reason == "length" and size < limit
        if whole.finish_reason != "stop" and not cut:
            turns = (*before.turns, Turn(size, self.parsed(whole).message))
            return self.ended(dataclasses.replace(before, turns=turns, end="max_tokens", restarts=self.restarts)), []
        history = list(self.messages)
        turn, answer = self.play(whole)
        metrics = {name: before.metrics.get(name, 0.0) + value for name, value in answer.metrics.items()}
        reward = before.reward + answer.reward
        turns = (*before.turns, turn)
        end = "max_tokens" if cut and answer.end == "completed" and not self.world.steps else answer.end
        metrics, told = before.metrics | metrics, (answer.error, self.restarts, before.tools)
        episode = Episode(turns, end, reward, metrics, *told)
        if end:
            return self.ended(episode), []
        tokens = self.form.suffix([*history, turn.reply], answer.messages, whole.tokens[whole.last_turn :].tolist())
        if size + len(tokens) >= limit:
            return self.ended(dataclasses.replace(episode, end="context_overflow")), []
        return episode, [int(token) for token in tokens]

    def ended(self, episode: Episode) -> Episode:
        """Close the environment; return the episode with its reward for all of it, NaN if it has failed."""
        failed = episode.end in ("environment_error", "timeout")
        last = math.nan if failed else self.world.reward() or 0.0
        error = episode.error if failed else self.world.error
        self.world.close()
        return dataclasses.replace(episode, reward=episode.reward + last, error=error)


class Episodes:
    """Owner of the episodes under way and of their environments; a ``respond.Responder``.

    With several processes each environment lives on one, and all get its answers.

    Args:
      prompts: of the tasks, some of which have environments or tools; gives the tokenizer.
      limits: of every episode.
      longest_prompt: maximum number of tokens of a prompt.
      stops: tokens at which the model ends its turns.
      peers: the run's processes; None for one.

    Attributes:
      max_turn_tokens: tokens of one turn at most; 0 for no limit but that of the episode.
    """

    def __init__(
        self, prompts: Prompts, limits: Limits, longest_prompt: int, stops: Sequence[int], peers: "Peers | None" = None
    ):
        self._prompts = prompts
        self.max_turn_tokens = limits.max_turn_tokens
        self._limits = limits
        self._longest_prompt = longest_prompt
        self._stops = stops
        self._peers = peers
        playing = [task for task in prompts.tasks if task.plays]
        self._factories = {task.label: Factory(task.environment, task.tools) for task in playing}
        self._forms: dict[str, EpisodeFormat] = {}
        self._live: dict[Hashable, Live] = {}
        self._asked: dict[Hashable, Completion] = {}
        self._answers: dict[Hashable, concurrent.futures.Future[tuple[Episode, list[int]]]] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "environment")

    def plays(self, problem: Problem) -> bool:
        """Whether an environment or tools belong to the problem's task."""
        return self._prompts.task(problem.task).plays

    def rehearse(self, problems: Sequence[Problem]) -> list[str]:
        """Begin an episode of the first problem of each task that has episodes, and drop it; return notes for people.

        Later prompts that are too long end their episodes; the first one says that the settings are wrong.

        Raises:
          InputError: the environment fails, the template cannot render its tools, or the prompt is too long.
        """
        firsts: dict[str, Problem] = {}
        for problem in problems:
            if self.plays(problem):
                firsts.setdefault(self._prompts.task(problem.task).label, problem)
        scenes = [Scene((-1, place), problem, 0) for place, problem in enumerate(firsts.values())]
        for label, (prompt, over) in zip(firsts, self.begin(scenes), strict=True):
            require(
                over is None,
                f"a prompt of task {label} has {len(prompt)} tokens with what its environment says first: set "
                f"--rollout.max_prompt_tokens {len(prompt)} (now {self._longest_prompt})",
            )
        self.retain(())
        return [form.note for form in self._forms.values() if form.note]

    def begin(self, scenes: Sequence[Scene]) -> list[tuple[np.ndarray, Completion | None]]:
        """Begin episodes; return their prompts, int32[p] each, with the completion of an episode that is over at once,
        since its prompt is too long.

        Raises:
          InputError: an environment fails, or begins two members of a group with different words.
        """
        prompts = self._everywhere(self._begun, scenes)
        alike: dict[Hashable, Any] = {}
        for scene, prompt in zip(scenes, prompts, strict=True):
            label = self._prompts.task(scene.problem.task).label
            require(
                alike.setdefault((label, scene.problem.id, scene.seed), prompt) == prompt,
                f"the environment of task {label} begins two episodes of one row and seed with different words: draw "
                "what it says in reset() from the row and the seed alone",
            )
        return [
            (np.asarray(prompt, np.int32), None if len(prompt) <= self._longest_prompt else OVERFLOWN)
            for prompt in prompts
        ]

    def openings(self, scenes: Sequence[Scene]) -> list[dict[str, Any]]:
        """Return how these episodes, which are not closed yet, began: ``prompt``, messages without the task's system
        message and suffix, and ``tools``, JSON schemas.
        """
        live = self._live
        return self._everywhere(
            lambda scene: {"prompt": live[scene.key].asked, "tools": list(live[scene.key].world.tools)}, scenes
        )

    def resume(self, scenes: Sequence[Scene], begun: Sequence[Completion | None]) -> list[Completion | None]:
        """Return the completions that go on; those whose environment answers otherwise than before begin anew, as None.

        Those in memory go on as they are. For others a new environment is given the same replies.
        """
        known = dict(zip((scene.key for scene in scenes), begun, strict=True))
        same = self._everywhere(lambda scene: self._resumed(scene, known[scene.key] or EMPTY), scenes)
        return [one if fine else None for one, fine in zip(begun, same, strict=True)]

    def ask(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Let the environment answer a turn that the model has ended; ``limit``: tokens of the episode at most."""
        self._asked[key] = turn
        if key not in self._answers and self._is_own(key):  # it may have been asked before an interruption
            self._answers[key] = self._threads.submit(self._live[key].answer, turn, limit)

    def abort(self, keys: Sequence[Hashable]) -> None:
        """Leave the answers to these episodes for later: ``answered`` does not return them unless asked again."""
        for key in keys:
            self._asked.pop(key, None)

    def answered(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call, those with an end being over.

        ``wait_s``: seconds to wait if there are none.
        """
        own = {key: self._answers[key] for key in self._asked if key in self._answers}
        if wait_s and own:
            concurrent.futures.wait(own.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
        done = [(key, self._answers.pop(key).result()) for key, answer in own.items() if answer.done()]
        if self._peers is not None and self._peers.count > 1:
            parts = self._peers.gather(codec.to_json(done, RECORDS))
            done = [one for part in parts for one in codec.from_json(part, RECORDS)]
        return {key: _continued(self._asked.pop(key), *answer) for key, answer in done}

    def retain(self, keys: Sequence[Hashable] | set[Hashable]) -> None:
        """Close the environments of all other episodes."""
        for key in self._live.keys() - set(keys):
            self._asked.pop(key, None)
            self._answers.pop(key, None)
            self._threads.submit(self._live.pop(key).world.close)

    def _is_own(self, key: Hashable) -> bool:
        """Whether the environment of an episode is on this process; the same answer everywhere."""
        return self._peers is None or hash(key) % self._peers.count == self._peers.index

    def _everywhere(self, call: Callable[[Scene], Any], scenes: Sequence[Scene]) -> list[Any]:
        """Call a function for each scene, on the process that has its environment; return the results on all.

        Raises:
          InputError: a result is a text, the reason why an episode cannot begin.
        """
        own = [place for place, scene in enumerate(scenes) if self._is_own(scene.key)]
        found = dict(zip(own, self._threads.map(call, [scenes[place] for place in own]), strict=True))
        if self._peers is not None and self._peers.count > 1:
            for part in self._peers.gather({str(place): found[place] for place in own}):
                found |= {int(place): result for place, result in part.items()}
        for place, scene in enumerate(scenes):
            where = f"the environment of task {self._prompts.task(scene.problem.task).label} cannot begin an episode"
            require(not isinstance(found[place], str), f"{where}: {found[place]}")
        return [found[place] for place in range(len(scenes))]

    def _form(self, task: Task, tools: Sequence[Mapping[str, Any]]) -> EpisodeFormat:
        """Return the form of a task's chats with these tools."""
        key = json.dumps([task.label, tools])
        if key not in self._forms:
            self._forms[key] = EpisodeFormat(self._prompts.tokenizer, task, tools, self._stops)
        return self._forms[key]

    def _begun(self, scene: Scene, restarts: int = 0) -> list[int] | str:
        """Begin an episode; return the tokens of its prompt, or why it cannot begin."""
        task = self._prompts.task(scene.problem.task)
        if scene.key in self._live:
            self._live.pop(scene.key).world.close()
        self._answers.pop(scene.key, None)
        try:
            world = self._factories[task.label].world(scene.row, scene.seed, self._limits)
            messages, answer = world.reset(scene.problem.prompt)
            if answer.end:
                return answer.error
            form = self._form(task, world.tools)
            prompt = [int(token) for token in form.prompt(messages)]
        except InputError as error:
            return str(error)
        self._live[scene.key] = Live(world, form, worded(messages, task), messages, restarts=restarts)
        return prompt

    def _resumed(self, scene: Scene, begun: Completion) -> bool | str:
        """Bring an episode's environment to where it was; whether it answered as before, or why it cannot begin."""
        episode = begun.episode or Episode()
        live = self._live.get(scene.key)
        if live is not None and (live.turns == episode.turns or scene.key in self._answers):
            return True
        prompt = self._begun(scene, episode.restarts)
        if isinstance(prompt, str):
            return prompt
        for turn in episode.turns:
            if self._live[scene.key].play(first_tokens(begun, turn.end))[0] != turn:
                again = self._begun(scene, episode.restarts + 1)
                return again if isinstance(again, str) else False
        return True


def episodes_of(prompts: Prompts, rollout: Any, stops: Sequence[int], peers: "Peers | None" = None) -> Episodes | None:
    """Return the owner of the episodes of some tasks, within the limits of ``rollout``; None if no task has any."""
    if not any(task.plays for task in prompts.tasks):
        return None
    return Episodes(prompts, rollout.episode, rollout.max_prompt_tokens, stops, peers)


def _continued(turn: Completion, episode: Episode, tokens: Sequence[int]) -> Completion:
    """Return the completion with an environment's answer to its last turn."""
    if episode.end:
        reason = turn.finish_reason
        if reason in ("stop", "length"):
            reason = "length" if episode.end in CUT_OFF else "stop"
        return dataclasses.replace(turn, episode=episode, finish_reason=reason)
    return dataclasses.replace(with_tokens(turn, tokens, int(turn.version[-1])), episode=episode)
