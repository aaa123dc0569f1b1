"""Episodes: completions of several turns, between which an environment answers.

The sampler never waits for a slow environment: answers are made on threads, and an episode that waits has no slot. What
the model sampled is never tokenised again; what the environment says follows as tokens with mask False.

An episode is a function of weights, problem, seed and what its environment answers. Answers are saved with the
completion: after a restart the environment is begun anew and given the same replies. If it then answers otherwise, the
episode begins anew too, and is counted.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.engine.requests import EMPTY, with_tokens
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.errors import require
from jaxrl_llm.rollout.branches import branch, starts
from jaxrl_llm.rollout.live import Scene, Worlds
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.tasks.chats import Prompts
from jaxrl_llm.types import Completion, Episode, Problem, Turn

if TYPE_CHECKING:
    from jaxrl_llm.sharding.distributed import Peers

CUT_OFF = ("max_tokens", "context_overflow", "max_turns", "max_tool_calls")
"""Ends of episodes that were cut off: their completions have the finish reason "length"."""
OVERFLOWN = dataclasses.replace(EMPTY, finish_reason="length", episode=Episode(end="context_overflow"))
"""The completion of an episode whose prompt is too long: it has no token."""


def environment_seed(seed: int) -> int:
    """Return the 31-bit seed of an environment, made from the 64-bit seed of a request."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big") >> 1


RECORDS = (Episode, Turn)
"""Types that processes send to each other."""


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
    ):
        self.branching = branching
        self._prompts = prompts
        self.max_turn_tokens = limits.max_turn_tokens
        self._longest_prompt = longest_prompt
        self._peers = peers
        self._worlds = Worlds(prompts, limits, stops, branching, observed)
        self._homes: dict[Hashable, Hashable] = {}  # of a branch: the whole episode that it goes back to
        self._asked: dict[Hashable, Completion] = {}

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
        if self.branching is not None:
            self._everywhere(lambda scene: self._worlds[scene.key].copy_error(), scenes)
        self.retain(())
        return self._worlds.notes

    def begin(self, scenes: Sequence[Scene]) -> list[tuple[np.ndarray, Completion | None]]:
        """Begin episodes; return their prompts, int32[p] each, with the completion of an episode that is over at once,
        since its prompt is too long.

        Raises:
          InputError: an environment fails, or begins two members of a group with different words.
        """
        prompts = self._everywhere(self._worlds.begin, scenes)
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
        return self._everywhere(lambda scene: self._worlds[scene.key].opening, scenes)

    def resume(self, scenes: Sequence[Scene], begun: Sequence[Completion | None]) -> list[Completion | None]:
        """Return the completions that go on; those whose environment answers otherwise than before begin anew, as None.

        Those in memory go on as they are. For others a new environment is given the same replies.
        """
        known = dict(zip((scene.key for scene in scenes), begun, strict=True))
        same = self._everywhere(lambda scene: self._worlds.resume(scene, known[scene.key] or EMPTY), scenes)
        return [one if fine else None for one, fine in zip(begun, same, strict=True)]

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

    def abort(self, keys: Sequence[Hashable]) -> None:
        """Leave the answers to these episodes for later: ``answered`` does not return them unless asked again."""
        for key in keys:
            self._asked.pop(key, None)

    def answered(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call, those with an end being over.

        ``wait_s``: seconds to wait if there are none.
        """
        done = self._worlds.answered(self._asked, wait_s)
        if self._peers is not None and self._peers.count > 1:
            parts = self._peers.gather(codec.to_json(done, RECORDS))
            done = [one for part in parts for one in codec.from_json(part, RECORDS)]
        return {key: _continued(self._asked.pop(key), *answer) for key, answer in done}

    def retain(self, keys: Sequence[Hashable] | set[Hashable]) -> None:
        """Close the environments of all other episodes."""
        kept = set(keys)
        self.abort(self._worlds.retain(kept))
        self._homes = {key: home for key, home in self._homes.items() if key in kept}

    def _is_own(self, key: Hashable) -> bool:
        """Whether the environment of an episode is on this process; the same answer everywhere."""
        home = self._homes.get(key, key)
        return self._peers is None or hash(home) % self._peers.count == self._peers.index

    def _everywhere(self, call: Callable[[Scene], Any], scenes: Sequence[Scene]) -> list[Any]:
        """Call a function for each scene, on the process that has its environment; return the results on all.

        Raises:
          InputError: a result is a text, the reason why an episode cannot begin.
        """
        own = [place for place, scene in enumerate(scenes) if self._is_own(scene.key)]
        found = dict(zip(own, self._worlds.threads.map(call, [scenes[place] for place in own]), strict=True))
        if self._peers is not None and self._peers.count > 1:
            for part in self._peers.gather({str(place): found[place] for place in own}):
                found |= {int(place): result for place, result in part.items()}
        for place, scene in enumerate(scenes):
            where = f"the environment of task {self._prompts.task(scene.problem.task).label} cannot begin an episode"
            require(not isinstance(found[place], str), f"{where}: {found[place]}")
        return [found[place] for place in range(len(scenes))]


def episodes_of(prompts: Prompts, rollout: Any, stops: Sequence[int], *others: Any) -> Episodes | None:
    """Return the owner of the episodes of some tasks, within the limits of ``rollout``; None if no task has any.

    ``others``: the last arguments of ``Episodes``.
    """
    if not any(task.plays for task in prompts.tasks):
        return None
    return Episodes(prompts, rollout.episode, rollout.max_prompt_tokens, stops, *others)


def _continued(turn: Completion, episode: Episode, tokens: Sequence[int]) -> Completion:
    """Return the completion with an environment's answer to its last turn."""
    if episode.end:
        reason = turn.finish_reason
        if reason in ("stop", "length"):
            reason = "length" if episode.end in CUT_OFF else "stop"
        return dataclasses.replace(turn, episode=episode, finish_reason=reason)
    return dataclasses.replace(with_tokens(turn, tokens, int(turn.version[-1])), episode=episode)
