"""Rewards are called once before anything is sampled: what always fails is refused then."""

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rewards import LengthPenalty, Scorer, accuracy
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
