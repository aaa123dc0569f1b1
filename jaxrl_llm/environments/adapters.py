"""Environments of other packages: TextArena's games, SkyRL-gym's, and reasoning-gym's problems in several tries."""

import contextlib
import copy
import functools
import importlib
import json
import random
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, Step
from jaxrl_llm.errors import as_input_error, require
from jaxrl_llm.tasks.extract import answer_of

DRAWING = threading.Lock()
"""Held while an episode draws from Python's global random numbers, as its own."""


class TextArena(Environment):
    """A game of TextArena; its reward at the end is the episode's.

    Its numbers come from Python's global random numbers: each episode has a state of its own, and calls of all games
    are made one after the other.

    Args:
      game: id of the game, such as ``GuessTheNumber-v0``, or a callable that makes one without observation wrappers.
      player: the number of the model's player.
      players: number of players.
      opponent: for several players, returns the move of the others for the text of what they see.

    Raises:
      InputError: the package is missing, or it has no such game.
    """

    def __init__(
        self,
        game: str | Callable[[], Any],
        player: int = 0,
        players: int = 1,
        opponent: Callable[[str], str] | None = None,
    ):
        require(
            opponent is not None or players == 1,
            f"TextArena with {players} players needs opponent, a function of a text",
        )
        if isinstance(game, str):
            with as_input_error(
                f"game {game!r} cannot be made", "pip install 'jaxrl-llm[environments]', or check its name"
            ):
                self._game: Any = importlib.import_module("textarena").make(f"{game.removesuffix('-raw')}-raw")
        else:
            self._game = game()
        self._player, self._players = player, players
        self._opponent: Any = opponent

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin the game, with moves of the opponent before the model's first."""
        self._draws = random.Random(seed).getstate()
        with self._drawing():
            self._game.reset(num_players=self._players, seed=seed)
            return [{"role": "user", "content": self._until_our_turn(done=False)}]

    def step(self, reply: Message) -> Step:
        """Make the model's move, and those of the opponent after it."""
        with self._drawing():
            done, _ = self._game.step(reply["content"])
            said = self._until_our_turn(done)
            if not self._game.state.done:
                return Step([{"role": "user", "content": said}])
            rewards, _ = self._game.close()
            return Step(reward=float((rewards or {}).get(self._player, 0.0)), done=True)

    def copy(self) -> "TextArena":
        """Return the game in the same state; both draw the same numbers."""
        return copy.deepcopy(self)

    def _until_our_turn(self, done: bool) -> str:
        """Return what the model's player sees next; the opponent moves for the others."""
        while not done:
            player, seen = self._game.get_observation()
            own = (
                (player,) if self._players > 1 else (player, -1)
            )  # some games of one player speak its moves as the game
            news = [said for sender, said, kind in seen if not (sender in own and kind.name == "PLAYER_ACTION")]
            if player == self._player:
                return "\n\n".join(news)
            done, _ = self._game.step(self._opponent("\n\n".join(news)))
        return ""

    @contextlib.contextmanager
    def _drawing(self) -> Generator[None]:
        with DRAWING:
            before = random.getstate()
            random.setstate(self._draws)
            try:
                yield
            finally:
                self._draws = random.getstate()
                random.setstate(before)


class SkyRL(Environment):
    """An environment of SkyRL-gym: ``init(prompt)``, ``step(text)``, ``close()``.

    What it would cut off a reply (``postprocessed_action``) stays: the model's tokens are never changed.

    Args:
      make: makes the environment of a row, such as
        ``lambda row: skyrl_gym.make("gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": row["answer"]}})``.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]):
        self._make = make
        self._environment: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin the episode; the environment may add messages to the row's prompt, and change none."""
        prompt = row.get("prompt", [])
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        self._environment = self._make(row)
        given, _ = self._environment.init(copy.deepcopy(prompt))
        if given[: len(prompt)] != prompt:
            raise ValueError("init changes the messages of the row's prompt; write them as they should be in the row")
        return given[len(prompt) :]

    def step(self, reply: Message) -> Step:
        """Give the reply's text to the environment."""
        told = self._environment.step(reply["content"])
        metadata = (told.get("metadata") or {}).items()
        numbers = {name: float(value) for name, value in metadata if isinstance(value, (int, float))}
        return Step(told["observations"] or (), float(told["reward"]), bool(told["done"]), numbers)

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()


class GymTries(Environment):
    """Several tries at a problem of a ``ReasoningGym`` source: a wrong answer is answered, the last one's score counts.

    Some data sets evaluate the expression that the model wrote, in this process; one try in a task without environment
    is scored in a process of its own.

    Args:
      tries: replies of the model.
      extractor: cuts the answer out of a reply (see ``Task``).
      again: what the model reads after a wrong answer.
      score: scores an answer to a row, 1 if it is right; None: the data set does.
    """

    def __init__(
        self,
        tries: int = 3,
        extractor: str = "whole",
        again: str = "That is not right. Try again.",
        score: Callable[[str | None, Mapping[str, Any]], float] | None = None,
    ):
        self._tries, self._extractor, self._again = tries, extractor, again
        if score is None:
            import reasoning_gym  # noqa: F401  it takes seconds, which no episode's first step has
        self._score = score or gym_score

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[()]:
        """Begin with the row's problem."""
        require("entry" in row, "GymTries needs rows of a ReasoningGym source: give the task one")
        self._row, self._left = row, self._tries
        return ()

    def step(self, reply: Message) -> Step:
        """Score the reply."""
        self._left -= 1
        answer = answer_of(reply["content"], self._extractor)
        score = float(self._score(answer, self._row))
        if score >= 1 or not self._left:
            return Step(reward=score, done=True, metrics={"tries": self._tries - self._left})
        return Step([{"role": "user", "content": self._again}])

    def copy(self) -> "GymTries":
        """Return the problem with as many tries left."""
        return copy.copy(self)


def gym_score(answer: str | None, row: Mapping[str, Any]) -> float:
    """Score an answer by the data set of a row's problem."""
    dataset = _dataset(row["generator"], json.dumps(row["options"], sort_keys=True))
    return dataset.score_answer(answer, row["entry"])


@functools.lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
