"""Rewards are called once before anything is sampled: what always fails is refused then."""

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import LengthPenalty, Scorer, accuracy
from jaxrl_llm.rewards.scorer import two_turn_episode
from jaxrl_llm.rewards.verify import dry_run_completion
from jaxrl_llm.system.paths import REWARD_ERROR
from jaxrl_llm.types import Problem


@pytest.fixture(scope="module")
def tokenizer():
    return load_pretrained("tiny-random")[1]


def problem(answer, **fields):
    return Problem("1", ({"role": "user", "content": "why?"},), answer, "test", **fields)


@pytest.mark.parametrize("extractor", ["last_number", "boxed", "tag:result", "after:think", "after:####", "whole"])
def test_the_invented_completion_is_right_and_looks_sampled(tokenizer, extractor):
    asked = problem("12", extractor=extractor)
    made = dry_run_completion(asked, tokenizer)
    assert accuracy(asked, made) == 1.0 and made.finish_reason == "stop"
    assert tokenizer.decode(made.tokens, skip_special_tokens=True) == made.text
    assert made.tokens.dtype == np.int32 and made.sampler_logp.dtype == np.float32 and made.mask.all()
    assert len(made.tokens) == len(made.sampler_logp) == len(made.mask) and made.version.tolist() == [-1] * len(
        made.tokens
    )


def test_a_reward_that_fails_is_refused_and_its_traceback_kept_until_it_does_not(tokenizer, tmp_path):
    broken = True

    def mine(problem, completion):
        assert completion.text, "nothing to score"
        return [1.0] if broken is None else 1 / (not broken)

    with Scorer((mine, LengthPenalty(0.1)), folder=tmp_path) as scorer:
        with pytest.raises(InputError) as refused:
            scorer.dry_run(problem("12"), tokenizer)
        place = f"test_rehearsal.py:{mine.__code__.co_firstlineno + 2}: ZeroDivisionError: division by zero"
        assert str(refused.value).endswith(f"{place} (traceback in {tmp_path / REWARD_ERROR})")
        assert "return [1.0] if broken is None" in (tmp_path / REWARD_ERROR).read_text()
        broken = False
        scorer.dry_run(problem(""), tokenizer)
        assert not list(tmp_path.iterdir())
        broken = None
        with pytest.raises(
            InputError, match=r"test_rehearsal.py:\d+: TypeError: returned \[1.0\], which is not a number$"
        ):
            scorer.dry_run(problem("12"), tokenizer)


def test_where_two_rewards_fail_both_tracebacks_are_kept_and_the_worse_is_told(tmp_path, tokenizer):
    def sometimes(problem, completion):
        return 1 / len(completion.text)

    def always(problem, completion):
        raise RuntimeError("never")

    made = dry_run_completion(problem("12"), tokenizer)
    empty = dry_run_completion(problem("12", extractor="whole"), tokenizer)
    object.__setattr__(empty, "text", "")
    with Scorer((sometimes, always), folder=tmp_path) as scorer:
        failures = scorer.score([(problem("12"), empty), (problem("12"), made)]).failures
    assert failures.of == {"sometimes": (2, 1), "always": (2, 2)} and "RuntimeError: never" in failures.message
    text = (tmp_path / REWARD_ERROR).read_text()
    assert "ZeroDivisionError" in text and "RuntimeError: never" in text
    assert failures.metrics()["event/reward_failed"] == failures.message


def of_calls(problem, completion):
    """How many calls there were, and that the last turn is the answer."""
    *_, last = completion.episode.turns
    return sum(turn.calls for turn in completion.episode.turns) + (last.reply["content"] == completion.text)


def of_the_end(problem, completion):
    return {"completed": 1.0}[completion.episode.end] + completion.episode.metrics.get("won", 0.0)


def of_messages(problem, completion):
    """The environment's words, and the names of the tools that were called."""
    names = [one["function"]["name"] for message in completion.messages for one in message.get("tool_calls", ())]
    heard = [message["content"] for message in completion.messages if message["role"] != "assistant"]
    return len(names) + len(heard[0]) + len(completion.transcript) + len(completion.played["episode"]["turns"])


def of_tokens(problem, completion):
    """The share of the tokens that the policy sampled, those of the last turn among them."""
    assert 0 < completion.last_turn < len(completion.tokens) and completion.episode.turns[-1].end == len(
        completion.mask
    )
    assert completion.mask[completion.last_turn :].all() and completion.extras == {}
    return completion.length / len(completion.tokens)


@pytest.mark.parametrize("tools", [["search", "add"], []], ids=["tools", "an environment"])
def test_rewards_of_episodes_are_rehearsed_on_one(tokenizer, tools):
    with Scorer((of_calls, of_the_end, of_messages, of_tokens, accuracy)) as scorer:
        scorer.dry_run(problem("12"), tokenizer, tools)


@pytest.mark.parametrize("reward", [of_calls, of_the_end])
def test_rewards_of_episodes_are_refused_where_there_are_none(tokenizer, reward):
    with Scorer((reward,)) as scorer, pytest.raises(InputError, match="NoneType"):
        scorer.dry_run(problem("12"), tokenizer)


def test_an_invented_episode_calls_a_tool_that_there_is(tokenizer):
    answer = dry_run_completion(problem("12"), tokenizer)
    made, spoken = two_turn_episode(answer, ["search", "add"]), two_turn_episode(answer, [])
    assert made.text == answer.text and accuracy(problem("12"), made) == 1
    assert [message["role"] for message in made.messages] == ["assistant", "tool", "assistant"]
    assert [message["role"] for message in spoken.messages] == ["assistant", "user", "assistant"]
    assert "search()" in made.transcript and made.episode.tools == 2 and spoken.episode.turns[0].calls == 0
    assert made.length == 2 * len(answer.tokens) and {len(made.version), len(made.sampler_logp)} == {len(made.tokens)}
