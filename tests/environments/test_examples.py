import math
import re

import pytest
from environments.worlds import begun, contents, says

from jaxrl_llm.config import load_config
from jaxrl_llm.environments.calls import parse_reply
from jaxrl_llm.environments.examples import KEYS, Keys, Lookup, Products, multiply
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.task import load

GAME = load_config("guessing_smoke")[1]
LETTERS = "abcdefghijklmno"


def test_products_are_different_and_their_answers_are_right():
    problems = load(Task(Products(600), holdout=0.1)).train
    assert len({problem.prompt[-1]["content"] for problem in problems}) == len(problems) == 540
    for problem in problems:
        a, b = map(int, re.findall(r"\d+", problem.prompt[-1]["content"]))
        assert min(a, b) >= 10 and max(a, b) <= 99 and int(problem.answer) == a * b
    assert len(list(Products(8100).problems())) == 8100
    with pytest.raises(InputError, match="8100 products"):
        list(Products(8101).problems())


def test_the_worked_examples_of_the_prompt_are_calls_that_the_tool_answers_as_written():
    (problem,) = Products(1).problems()
    texts = [message["content"] for message in problem.prompt]
    assert len(texts) == 9
    for asked, called, answered, said in (texts[:4], texts[4:8]):
        parsed = parse_reply(called, "plain")
        assert parsed.error == "" and len(parsed.message["tool_calls"]) == 1
        arguments = parsed.message["tool_calls"][0]["function"]["arguments"]
        assert asked == f"What is {arguments['a']} * {arguments['b']}?"
        (result,) = contents(begun(tools=[multiply]).reply(parsed))
        assert answered == f"<tool_response>{result}</tool_response>" and said == f"The answer is {result}."


def test_an_episode_of_products():
    (problem,) = Products(1).problems()
    world = begun(tools=[multiply])
    a, b = problem.metadata["a"], problem.metadata["b"]
    asked = parse_reply(f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>', "plain")
    assert contents(world.reply(asked)) == [problem.answer]
    assert world.reply(says(f"The answer is {problem.answer}.")).end == "completed"


def test_the_table_rewards_only_who_looked_up():
    (problem,) = Keys(1).problems()
    name = problem.metadata["name"]
    world = begun(Lookup, row=problem.metadata, seed=4)
    first = world.reply(says(f"<get>{name}</get>"))
    number = re.findall(r"\d+", contents(first)[0])[0]
    branch = world.copy()
    assert (first.metrics, first.reward) == ({"found": 1.0}, 0.0)
    assert contents(branch.reply(says("<get>nothing of the kind</get>"))) == ["The table holds nothing."]
    assert world.reply(says(f"The answer is {number}.")).reward == 1.0
    assert branch.reply(says("The answer is 1.")).reward == 0.0
    tables = [begun(Lookup, row=problem.metadata, seed=seed) for seed in range(30)]
    assert len({contents(world.reply(says(f"<get>{name}</get>")))[0] for world in tables}) > 10


class Middle:
    """Plays by halves: always the middle one of the letters that the answers leave."""

    def __init__(self):
        self.low, self.high = 0, len(LETTERS) - 1

    def guess(self):
        return LETTERS[(self.low + self.high) // 2]

    def hear(self, answer):
        middle = (self.low + self.high) // 2
        self.low, self.high = (self.low, middle - 1) if answer == "<" else (middle + 1, self.high)


def played(world, player):
    """The rewards of a game's turns."""
    rewards = []
    for _ in range(GAME.rollout.episode.max_turns):
        answer = world.reply(says(player.guess()))
        rewards.append(answer.reward)
        if answer.end:
            break
        player.hear(contents(answer)[0])
    assert answer.end == "completed"
    return rewards


@pytest.mark.parametrize("task", [GAME.task, GAME.evaluation.task], ids=lambda task: task.label)
def test_every_secret_is_found_by_halves_in_the_turns_of_a_game(task):
    shaped, turns = float(task is GAME.task), {}
    for seed in range(80):
        world = begun(task.environment, seed=seed)
        rewards = played(world, Middle())
        # All that there is to learn is learned, and each guess was possible.
        assert sum(rewards) == pytest.approx(1 + shaped * (1 + 0.1 * len(rewards)))
        turns[world.environment.secret] = len(rewards)
    assert sorted(turns.values()) == [1, 2, 2, 3, 3, 3, 3, *[4] * 8]


@pytest.mark.parametrize(("first", "left", "said"), [("i", "9 to 14", ">"), ("g", "0 to 5", "<")])
def test_a_guess_that_cannot_be_right_is_worth_nothing_and_tells_nothing(first, left, said):
    worlds = (begun(GAME.task.environment, seed=seed) for seed in range(80))
    low, high = map(int, left.split(" to "))
    world = next(world for world in worlds if low <= world.environment.secret <= high)
    answers = [world.reply(says(guess)) for guess in (first, first, "", first)]
    assert [answer.reward for answer in answers] == [pytest.approx(0.1 + math.log(15 / 6, 15)), 0.0, 0.0, 0.0]
    assert [answer.state for answer in answers] == [f"{left} after {turn}" for turn in (1, 2, 3, 4)]
    assert [contents(answer)[0] for answer in answers] == [said, said, ">", said]
    assert [answer.end for answer in answers] == ["", "", "", "completed"]


def test_questions_for_the_table_are_different():
    most = len(KEYS) ** 2
    assert len({problem.id for problem in Keys(most).problems()}) == most
    with pytest.raises(InputError, match=f"there are {most} names"):
        list(Keys(most + 1).problems())
