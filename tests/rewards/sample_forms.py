"""Reward functions in the forms that people bring; each returns what shows what it was given."""

import asyncio
import os

TOGETHER = []


def single(problem, completion):
    return float(completion.text) + len(problem.answer)


def by_any_name(p, c, level, missing=10):
    return level + missing + float(c.text)


def with_columns(problem, completion, **columns):
    return len(columns) + columns["level"]


def completion_only(completion, answer):
    return float(completion.text == answer)


def batch(problems, completions, level):
    return [float(c.text) + len(problems) + at for c, at in zip(completions, level, strict=True)]


def trl(completions, **kwargs):
    """In the words of TRL's documentation: keyword arguments, columns as lists."""
    assert list(kwargs) == ["prompts", "completion_ids", "answer", "level"], list(kwargs)
    assert all(isinstance(ids, list) for ids in kwargs["completion_ids"])
    return [len(p) + len(c) + at for p, c, at in zip(kwargs["prompts"], completions, kwargs["level"], strict=True)]


def trl_chat(prompts, completions):
    return [
        len(p) + len(c[0]["content"]) + 10 * (c[0]["role"] == "assistant")
        for p, c in zip(prompts, completions, strict=True)
    ]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": data_source, "level": extra_info["level"]}


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]


async def judge(problem, completion):
    """Answers once three are asked at one time; what says ``hang`` waits for ever."""
    if completion.text == "raise":
        raise ConnectionError("no judge")
    TOGETHER.append(completion.text)
    while len(TOGETHER) < 3 or completion.text == "hang":
        await asyncio.sleep(0.001)
    return float(completion.text) / 2


async def judge_batch(prompts, completions):
    await asyncio.sleep(0)
    return [float(text) for text in completions]


def some_none(problems, completions):
    return [None if c.text == "none" else "a" if c.text == "text" else float(c.text) for c in completions]


def too_few(problems, completions):
    return [1.0]


def whole_batch_fails(problems, completions):
    return [1 / 0 for _ in completions]


def process(problems, completions):
    return [os.getpid()] * len(completions)
