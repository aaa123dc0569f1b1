"""Environments to begin with: three of our own, and those of TextArena, SkyRL-gym and reasoning-gym."""

import contextlib
import copy
import dataclasses
import importlib
import json
import random
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from jaxrl_llm.environments.environment import Environment, Message, Step
from jaxrl_llm.errors import as_input_error, require
from jaxrl_llm.rewards.sandbox import run_python
from jaxrl_llm.tasks.extract import answer_of
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def in_turns(*contents: str) -> tuple[dict[str, str], ...]:
    """Return messages of user and assistant in turn."""
    return tuple({"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents))


CALCULATOR = in_turns(
    *("What is 31 * 24?", '<tool_call>{"name": "multiply", "arguments": {"a": 31, "b": 24}}</tool_call>'),
    *("<tool_response>744</tool_response>", "The answer is 744."),
    *("What is 58 * 17?", '<tool_call>{"name": "multiply", "arguments": {"a": 58, "b": 17}}</tool_call>'),
    *("<tool_response>986</tool_response>", "The answer is 986."),
)
"""Two worked examples: after one, SmolLM2-135M calls the tool with the numbers of the example."""


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of numbers of two digits, to be found with the tool ``multiply``: ``size`` different ones, drawn by
    ``seed``. ``before``: messages before the question; their calls are text, in the form of most chat templates.
    """

    size: int = 512
    seed: int = 0
    before: tuple[dict[str, str], ...] = CALCULATOR
    label: str = "products"

    def problems(self) -> Iterator[Problem]:
        require(self.size <= 90 * 90, f"Products has size {self.size}: numbers of two digits have {90 * 90} products")
        for index in random.Random(self.seed).sample(range(90 * 90), self.size):
            a, b = 10 + index // 90, 10 + index % 90
            prompt = (*self.before, {"role": "user", "content": f"What is {a} * {b}?"})
            yield problem_of(prompt, str(a * b), self.label, {"a": a, "b": b})


KEYS = ("river", "stone", "cloud", "maple", "tiger", "amber", "piano", "comet", "olive", "cabin", "raven", "cedar")


LOOKUP = in_turns(
    *("Which number does the table hold for fox?", "<get>fox</get>", "The table holds 58.", "The answer is 58."),
    *("Which number does the table hold for lamp?", "<get>lamp</get>", "The table holds 31.", "The answer is 31."),
    *("Which number does the table hold for sugar?", "<get>sugar</get>", "The table holds 74.", "The answer is 74."),
)


@dataclasses.dataclass(frozen=True)
class Keys:
    """Questions for the table of ``Lookup``: ``size`` names in an order by ``seed``, or pairs of names beyond these."""

    size: int = 128
    seed: int = 0
    label: str = "lookup"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems; only the table has their answers."""
        names = [*KEYS, *(f"{first}-{second}" for first in KEYS for second in KEYS if first != second)]
        require(self.size <= len(names), f"Keys has size {self.size}: there are {len(names)} names")
        for name in random.Random(self.seed).sample(names, self.size):
            question = {"role": "user", "content": f"Which number does the table hold for {name}?"}
            yield problem_of((*LOOKUP, question), "", self.label, {"name": name})


class Lookup(Environment):
    """A table of names and numbers, new in each episode: ``<get>name</get>`` is answered with its number. The reward is
    1 if the last number of the first reply without a ``<get>`` is that of the row's ``name``.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[()]:
        """Draw the number of the row's name."""
        self._name = row["name"]
        self._number = str(random.Random(seed).randint(10, 99))
        return ()

    def step(self, reply: Message) -> Step:
        """Answer a request, or end the episode with the reward."""
        request = re.search(r"<get>(.*?)</get>", reply["content"])
        if request is None:
            numbers = re.findall(r"\d+", reply["content"])
            return Step(reward=float(numbers[-1:] == [self._number]), done=True)
        answer = self._number if request[1].strip() == self._name else "nothing"
        return Step([{"role": "user", "content": f"The table holds {answer}."}], metrics={"found": answer.isdigit()})

    def copy(self) -> "Lookup":
        other = Lookup()
        other._name, other._number = self._name, self._number
        return other


DRAWING = threading.Lock()
"""Held while an episode draws from Python's global random numbers, as its own."""


class TextArena(Environment):
    """A game of TextArena; its reward at the end is the episode's. InputError: no such package or game.

    It draws from Python's global random numbers: each episode has a state of its own, and games take turns in calls.

    Args:
      game: id of the game, such as ``GuessTheNumber-v0``, or a callable that makes one without observation wrappers.
      player: the number of the model's player.
      opponent: for several players, returns the move of the others for the text of what they see.
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
            observation = self._until_our_turn(done)
            if not self._game.state.done:
                return Step([{"role": "user", "content": observation}])
            rewards, _ = self._game.close()
            return Step(reward=float((rewards or {}).get(self._player, 0.0)), done=True)

    def copy(self) -> "TextArena":
        """Return the game in the same state; both draw the same numbers."""
        return copy.deepcopy(self)

    def _until_our_turn(self, done: bool) -> str:
        """Return what the model's player sees next; the opponent moves for the others."""
        while not done:
            player, messages = self._game.get_observation()
            # Some games of one player speak its moves as the game.
            senders = (player,) if self._players > 1 else (player, -1)
            news = [text for sender, text, kind in messages if not (sender in senders and kind.name == "PLAYER_ACTION")]
            if player == self._player:
                return "\n\n".join(news)
            done, _ = self._game.step(self._opponent("\n\n".join(news)))
        return ""

    @contextlib.contextmanager
    def _drawing(self) -> Generator[None]:
        with DRAWING:
            global_state = random.getstate()
            random.setstate(self._draws)
            try:
                yield
            finally:
                self._draws = random.getstate()
                random.setstate(global_state)


class SkyRL(Environment):
    """An environment of SkyRL-gym: ``init(prompt)``, ``step(text)``, ``close()``. What it would cut off a reply
    (``postprocessed_action``) stays: the model's tokens are never changed. ``make`` returns a row's environment, such
    as ``lambda row: skyrl_gym.make("gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": row["answer"]}})``.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]):
        self._make = make
        self._environment: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin the episode; the environment may add messages to the row's prompt, and change none."""
        prompt = row.get("prompt", [])
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        self._environment = self._make(row)
        messages, _ = self._environment.init(copy.deepcopy(prompt))
        if messages[: len(prompt)] != prompt:
            raise ValueError("init changes the messages of the row's prompt; write them as they should be in the row")
        return messages[len(prompt) :]

    def step(self, reply: Message) -> Step:
        outcome = self._environment.step(reply["content"])
        metadata = (outcome.get("metadata") or {}).items()
        numbers = {name: float(value) for name, value in metadata if isinstance(value, (int, float))}
        return Step(outcome["observations"] or (), float(outcome["reward"]), bool(outcome["done"]), numbers)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


class GymTries(Environment):
    """Several tries at a problem of a ``ReasoningGym`` source: a wrong answer is answered, the last one's score counts.
    Some data sets evaluate the expression that the model wrote, here in this process.

    Args:
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
            import jaxrl_llm.rewards.gym_answer  # noqa: F401  it takes seconds, which no episode's first step has
        self._score = score or gym_score

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[()]:
        require("entry" in row, "GymTries needs rows of a ReasoningGym source: give the task one")
        self._row, self._remaining = row, self._tries
        return ()

    def step(self, reply: Message) -> Step:
        self._remaining -= 1
        answer = answer_of(reply["content"], self._extractor)
        score = float(self._score(answer, self._row))
        if score >= 1 or not self._remaining:
            return Step(reward=score, done=True, metrics={"tries": self._tries - self._remaining})
        return Step([{"role": "user", "content": self._again}])

    def copy(self) -> "GymTries":
        """Return the problem with as many tries left."""
        return copy.copy(self)


def gym_score(answer: str | None, row: Mapping[str, Any]) -> float:
    """Score an answer by the data set of a row's problem."""
    from jaxrl_llm.rewards.gym_answer import dataset_of

    return dataset_of(row["generator"], json.dumps(row["options"], sort_keys=True)).score_answer(answer, row["entry"])


PROGRAM = """
import ast, contextlib, io, json
names = {"__name__": "__main__"}
earlier, code = json.loads(CODES)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for text in earlier:
        exec(compile(text, "<earlier>", "exec"), names)
tree = ast.parse(code, "<python>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "<python>", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
    if value is not None:
        print(repr(value))
"""
"""Runs the texts of ``CODES``: earlier ones without output, and the last one as an interactive session would."""


class PythonTool:
    """The environment ``Task(environment=PythonTool)``: its tool ``python`` runs a program in the sandbox.

    An episode's state is the text of its programs: those that ended well are run again, without their output, before
    the next one. So no process waits for the model and branches copy texts, but ``timeout_s`` holds for a program with
    the earlier ones, and their draws are made anew, unless they set a seed. A subclass may set other limits.
    """

    timeout_s: float = 2.0
    memory_mb: int = 256

    def __init__(self) -> None:
        self._earlier: tuple[str, ...] = ()

    def reset(self) -> None:
        """Begin an episode with no names defined."""
        self._earlier = ()

    def python(self, code: str) -> str:
        """Run a Python program. Names that earlier programs defined are still known.

        Args:
            code: The program. What it prints is returned, and the value of its last line.

        Returns:
            The output, or the error.
        """
        outcome = run_python(
            f"CODES = {json.dumps([self._earlier, code])!r}\n{PROGRAM}",
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
        )
        if outcome.status == "ok":
            self._earlier = (*self._earlier, code)
            return outcome.stdout or "(no output)"
        if outcome.status == "refused":
            raise RuntimeError(outcome.stderr)
        # The beginning of the last line of a traceback that is about the model's program: it reads what follows.
        _, place, error = outcome.stderr.strip().rpartition('  File "<python>"')
        reasons = {
            "timeout": f"it took longer than {self.timeout_s:g} seconds",
            "memory": f"it used more than {self.memory_mb} MiB of memory",
            "output": "it wrote too much",
        }
        return f"{outcome.stdout}Error: {reasons.get(outcome.status) or f'{place}{error}'.strip()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PythonTool":
        other = type(self)()
        other._earlier = self._earlier
        return other
