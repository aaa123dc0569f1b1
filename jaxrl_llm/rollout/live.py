"""One episode under way: its environment, its chat, and the copies from which branches begin."""

import dataclasses
import math
from typing import Self

from jaxrl_llm.environments.calls import Parsed
from jaxrl_llm.environments.environment import Message
from jaxrl_llm.environments.episode_format import EpisodeFormat
from jaxrl_llm.environments.world import Answer, World
from jaxrl_llm.rollout.branches import entropy_rise
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.types import Completion, Episode, Turn


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
        room = whole.room(limit, self.prompt)
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
        said = tuple((size + begin, size + end) for begin, end in self.form.said(*asked, tokens))
        turns = (*before.turns, dataclasses.replace(turn, said=said))
        return dataclasses.replace(episode, turns=turns), [int(token) for token in tokens]

    def ended(self, episode: Episode) -> Episode:
        """Close the environment; return the episode with its reward for all of it, NaN if it has failed."""
        failed = episode.end in ("environment_error", "timeout")
        last = math.nan if failed else self.world.reward() or 0.0
        error = episode.error if failed else self.world.error
        self.world.close()
        return dataclasses.replace(episode, reward=episode.reward + last, error=error)
