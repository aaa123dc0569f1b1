"""What TextArena 0.7.4 and SkyRL-gym 0.4.0 return, recorded: the packages would be 60 MB and take 8 s to import."""

import enum
import random
import re
import types


class Kind(enum.Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_MESSAGE = 4


class GuessTheNumber:
    """As ``textarena.make("GuessTheNumber-v0-raw")``."""

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.state = types.SimpleNamespace(done=False)
        self.number = random.randint(1, 20)
        self.rewards = None
        self.seen = [(-1, "Guess the number between 1 and 20.", Kind.PROMPT)]

    def get_observation(self):
        seen, self.seen = self.seen, []
        return 0, seen

    def step(self, action):
        self.seen.append((0, action, Kind.PLAYER_ACTION))
        guess = int(re.search(r"\[(\d+)\]", action)[1])
        self.state.done = guess == self.number
        if self.state.done:
            self.rewards = {0: 1}
        else:
            hint = "lower" if guess > self.number else "higher"
            self.seen.append((-1, f"The target number is {hint}.", Kind.GAME_MESSAGE))
        return self.state.done, {}

    def close(self):
        return self.rewards, {0: {"role": "Player 0", "invalid_move": False, "turn_count": 1}}


class CountTo5:
    """Two players in turn add 1 or 2; who says 5 wins. Observations are those of the player whose turn it is."""

    def reset(self, num_players, seed=None):
        assert num_players == 2
        self.state = types.SimpleNamespace(done=False)
        self.player = self.total = 0
        self.rewards = None
        self.seen = {player: [(-1, f"You are Player {player}.", Kind.PROMPT)] for player in (0, 1)}

    def get_observation(self):
        seen, self.seen[self.player] = self.seen[self.player], []
        return self.player, seen

    def step(self, action):
        for seen in self.seen.values():
            seen.append((self.player, action, Kind.PLAYER_ACTION))
        self.total += int(action)
        self.state.done = self.total >= 5
        if self.state.done:
            self.rewards = {self.player: 1, 1 - self.player: -1}
        self.player = 1 - self.player
        return self.state.done, {}

    def close(self):
        return self.rewards, {}


class MultiTurn:
    """As ``skyrl_gym.make("gsm8k_multi_turn", extras=...)``."""

    def __init__(self, truth):
        self.truth, self.turns, self.closed = truth, 0, False

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        reward = float(action.endswith(f"#### {self.truth}"))
        done = reward == 1.0 or self.turns == 3
        again = [] if done else [{"role": "user", "content": "Please provide your reasoning."}]
        metadata = {"turns": self.turns, "text": "no number"}
        return {"observations": again, "reward": reward, "done": done, "metadata": metadata}

    def close(self):
        self.closed = True
