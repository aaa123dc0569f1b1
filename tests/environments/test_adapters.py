import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments.others import CountTo5, GuessTheNumber, MultiTurn
from environments.worlds import USER, begun, contents, says

from jaxrl_llm.environments import Factory, Limits
from jaxrl_llm.environments.examples import GymTries, SkyRL, TextArena
from jaxrl_llm.errors import InputError


def searched(seed):
    """Binary search of an episode of this seed: the guesses that it took."""
    world = begun(lambda: TextArena(GuessTheNumber), seed=seed, max_turns=20)
    low, high, guesses = 1, 20, []
    while True:
        guesses.append((low + high) // 2)
        answer = world.reply(says(f"I say [{guesses[-1]}]."))
        if answer.end:
            assert (answer.end, answer.reward) == ("completed", 1.0)
            return guesses
        assert contents(answer)[0] in ("The target number is lower.", "The target number is higher.")
        low, high = (low, guesses[-1] - 1) if "lower" in contents(answer)[0] else (guesses[-1] + 1, high)


def test_a_game_is_played_and_shows_the_model_nothing_of_its_own():
    prompt, _ = Factory(lambda: TextArena(GuessTheNumber)).world({}, 0, Limits()).reset(USER)
    assert prompt[0]["content"] == "Begin.\n\nGuess the number between 1 and 20."
    assert searched(0) == searched(0)


def test_moves_that_a_game_repeats_as_its_own_are_not_shown_either():
    class Repeating(GuessTheNumber):
        def step(self, action):
            ended = super().step(action)
            self.seen[0] = (-1, *self.seen[0][1:])
            return ended

    answer = begun(lambda: TextArena(Repeating), seed=1).reply(says("[20]"))
    assert len(contents(answer)) == 1 and "[20]" not in contents(answer)[0]


def test_games_that_draw_from_global_random_numbers_are_those_of_their_seeds():
    one_by_one = [searched(seed) for seed in range(12)]
    state = random.getstate()
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(searched, range(12))) == one_by_one
    assert random.getstate() == state, "the program's own draws are not touched"
    assert len(set(map(tuple, one_by_one))) > 3


@pytest.mark.parametrize(("player", "moves", "reward"), [(0, ["2", "2"], 1.0), (1, ["1", "1", "1"], -1.0)])
def test_an_opponent_moves_for_the_other_player(player, moves, reward):
    heard = []

    def opponent(text):
        heard.append(text)
        return "1"

    world = begun(lambda: TextArena(CountTo5, player, players=2, opponent=opponent))
    answers = [world.reply(says(move)) for move in moves[: len(moves) if player == 0 else 2]]
    assert heard[0].startswith(f"You are Player {1 - player}.")
    assert (answers[-1].end, answers[-1].reward) == ("completed", reward)


def test_a_game_can_be_copied():
    world = begun(lambda: TextArena(GuessTheNumber), seed=3)
    branch = world.copy()
    assert contents(world.reply(says("[1]"))) == contents(branch.reply(says("[1]")))


def test_games_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="needs opponent"):
        TextArena(CountTo5, players=2)
    with pytest.raises(InputError, match=r"game 'Nothing-v0' cannot be made .*; pip install"):
        TextArena("Nothing-v0")


def test_an_environment_of_skyrl_runs_with_its_rewards_and_numbers():
    made = []

    def make(row):
        made.append(MultiTurn(row["answer"]))
        return made[-1]

    world = begun(lambda: SkyRL(make), row={"prompt": "1 + 1?", "answer": "2"})
    first = world.reply(says("three #### 3"))
    assert (contents(first), first.end, first.metrics) == (["Please provide your reasoning."], "", {"turns": 1.0})
    last = world.reply(says("#### 2"))
    assert (last.reward, last.end) == (1.0, "completed")
    assert world.close() == "" and made[-1].closed


def test_a_prompt_that_an_environment_of_skyrl_changes_is_an_error_and_one_that_it_extends_is_not():
    class Extends(MultiTurn):
        def init(self, prompt):
            return [*prompt, {"role": "user", "content": "Think."}], {}

    class Changes(MultiTurn):
        def init(self, prompt):
            prompt[0]["content"] += " Think."
            return prompt, {}

    row = {"prompt": USER, "answer": "2"}
    prompt, _ = Factory(lambda: SkyRL(lambda row: Extends(2))).world(row, 0, Limits()).reset(USER)
    assert prompt[0]["content"] == "Begin.\n\nThink."
    _, answer = Factory(lambda: SkyRL(lambda row: Changes(2))).world(row, 0, Limits()).reset(USER)
    assert "init changes the messages" in answer.error


def scored(answer, row):
    """As reasoning-gym 0.1.25's data sets score: 0 without an answer, something for any."""
    return 0.0 if answer is None else 1.0 if answer == row["entry"]["answer"] else 0.01


def test_a_problem_of_reasoning_gym_may_be_tried_again():
    row = {"generator": "chain_sum", "options": {}, "entry": {"question": "State 3 + 4.", "answer": "7"}}
    world = begun(lambda: GymTries(2, "last_number", score=scored), row=row)
    assert contents(world.reply(says("no idea"))) == ["That is not right. Try again."]
    branch = world.copy()
    last = world.reply(says("It is 7."))
    assert (last.reward, last.end, last.metrics) == (1.0, "completed", {"tries": 2.0})
    wrong = branch.reply(says("It is 8."))
    assert (wrong.reward, wrong.end) == (0.01, "completed")
    _, answer = Factory(lambda: GymTries(score=scored)).world({"prompt": "x"}, 0, Limits()).reset(USER)
    assert "GymTries needs rows of a ReasoningGym source" in answer.error
