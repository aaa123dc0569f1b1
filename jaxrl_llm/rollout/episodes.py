"""Episodes: completions of several turns, between which an environment answers.

The sampler never waits for a slow environment: answers are made on threads, and an episode that waits has no slot. What
the model sampled is never tokenised again; what the environment says follows as tokens with mask False.

An episode is a function of weights, problem, seed and what its environment answers. Answers are saved with the
completion: after a restart the environment is begun anew and given the same replies. If it then answers otherwise, the
episode begins anew too, and is counted.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.engine.requests import EMPTY, with_tokens
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.threads import hanging
from jaxrl_llm.errors import require
from jaxrl_llm.rollout.branches import branch, starts
from jaxrl_llm.rollout.live import Beginning, Scene, Worlds
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
        found = [(told, hanging())]
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
