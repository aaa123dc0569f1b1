"""A completion that nobody sampled, to call rewards on before anything is."""

from typing import Any

import numpy as np

from jaxrl_llm.tasks.extract import marker
from jaxrl_llm.types import Completion, Problem


def invented(problem: Problem, tokenizer: Any) -> Completion:
    """A plausible right answer: some words, and the reference in the form in which it is cut out.

    It ends with the stop token, where the tokenizer has one. The version of its tokens is -1: no policy sampled them.
    """
    text = _text(problem)
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = np.asarray([*tokenizer(text, add_special_tokens=False)["input_ids"], *stop], np.int32)
    size = len(tokens)
    return Completion(
        tokens, np.full(size, -1.0, np.float32), "stop", np.ones(size, bool), np.full(size, -1, np.int32), text=text
    )


def _text(problem: Problem) -> str:
    answer = problem.answer or "42"
    (kind, _, tag) = problem.extractor.partition(":")
    if kind == "whole":
        return answer
    if kind == "after":
        return f"Let me think about it step by step.{marker(problem.extractor)}{answer}"
    form = {"boxed": rf"\boxed{{{answer}}}", "tag": f"<{tag}>{answer}</{tag}>"}.get(kind, answer)
    return f"Let me think about it step by step. The answer is {form}"
