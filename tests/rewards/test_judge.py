"""Several judges as one."""

import numpy as np
import pytest
from rewards.test_scorer import item

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Accuracy, Failures, Format, Panel, Scorer, Scores


class Constant:
    """A judge that gives every completion its place, one of them nothing."""

    def __init__(self, name):
        self.name, self.seen, self.closed = name, [], False

    def score(self, items):
        self.seen.append(len(items))
        reward = np.arange(len(items), dtype=float)
        reward[-1] = np.nan
        return Scores(reward, np.full(len(items), np.nan), {self.name: reward}, Failures(1, 0, {self.name: (3, 1)}))

    def close(self):
        self.closed = True


def test_a_panel_adds_up_what_its_judges_say():
    model = Constant("model")
    panel = Panel((Scorer((Accuracy(2.0), Format(r"\d"))), model))
    scores = panel.score([item("3"), item("x"), item("3")])
    np.testing.assert_array_equal(scores.reward, [3.0, 1.0, np.nan])
    np.testing.assert_array_equal(scores.accuracy, [1.0, 0.0, 1.0])
    assert list(scores.parts) == ["accuracy", "format", "model"]
    assert scores.failures.errors == 1 and scores.failures.of["model"] == (3, 1) and model.seen == [3]
    panel.close()
    assert model.closed


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(InputError, match="two judges call a reward 'same': give one of them another name"):
        Panel((Constant("same"), Constant("same"))).score([item("3")])
