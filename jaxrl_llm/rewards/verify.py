"""Verification of completions: compare the extracted answer with the reference; and an invented answer for dry runs."""

import math
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.code import CodeTests
from jaxrl_llm.rewards.functions import RewardCall
from jaxrl_llm.tasks.extract import extract, matches, wrap_answer
from jaxrl_llm.tasks.filters import resolve
from jaxrl_llm.tasks.instructions import followed
from jaxrl_llm.types import Completion, Problem

INLINE = ("match", "integer", "instructions")
"""Verifiers that cannot hang."""

POOLED = {"math": "jaxrl_llm.rewards.math_answer:score_math", "reasoning_gym": "jaxrl_llm.rewards.gym_answer:score_gym"}
"""Verifiers that run a model's text through code that may hang, as ``module:function`` of the same form."""


def accuracy(problem: Problem, completion: Completion) -> float:
    """Score the extracted answer by the verifier: 1 or more is accurate, 0 without an answer, NaN without a verifier.
    It runs here without a time limit; ``Scorer`` runs the pooled verifiers in processes that can be killed. InputError:
    the problem names an unknown extractor or verifier.
    """
    score = verdict(problem, completion)
    return resolve(score.path)(*score.items[0]) if isinstance(score, RewardCall) else score


def verdict(problem: Problem, completion: Completion) -> float | RewardCall:
    """Return the accuracy if the verifier cannot hang; else the call that computes it."""
    if problem.verifier == "none":
        return math.nan
    answer = extract(completion.text, problem.extractor)
    if answer is None:
        return 0.0
    if problem.verifier == "code":
        return CodeTests().call(problem, answer)
    if problem.verifier in POOLED:
        return RewardCall(POOLED[problem.verifier], [(answer, problem)])
    if problem.verifier not in INLINE:
        raise InputError(
            f"verifier {problem.verifier!r} of problem {problem.id} is unknown; "
            f"choose one of {', '.join((*INLINE, *POOLED, 'code'))}"
        )
    if problem.verifier == "instructions":  # characters count as written: a full-width comma is none, as in IFEval
        satisfied = followed(answer, problem.metadata)
        return sum(satisfied) / len(satisfied)
    return float(matches(answer, problem.answer, problem.verifier))


def dry_run_completion(problem: Problem, tokenizer: Any) -> Completion:
    """Return a plausible right answer: some words, and the reference in the form in which it is extracted. It ends with
    the stop token, if the tokenizer has one. The version of its tokens is -1: no policy sampled them.
    """
    text = wrap_answer(problem.answer or "42", problem.extractor)
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = np.asarray([*tokenizer(text, add_special_tokens=False)["input_ids"], *stop], np.int32)
    size = len(tokens)
    return Completion(
        tokens, np.full(size, -1.0, np.float32), "stop", np.ones(size, bool), np.full(size, -1, np.int32), text=text
    )
