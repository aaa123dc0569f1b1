"""Metrics of groups: their rewards, their lengths, and the completions that repeat themselves."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.environments.environment import ENDS
from jaxrl_llm.rewards.shaping import REFUSED, REJECTED
from jaxrl_llm.rollout.groups import informative
from jaxrl_llm.tasks import answer_of
from jaxrl_llm.types import Episode, Group, shown_message

LONGEST_PERIOD = 128
"""Length of the longest run of tokens that is checked for repetition."""
LONGEST_LINE = 300
"""Most characters of a line about a call."""
TIMES = 4
"""Minimum number of repetitions of a loop."""
FEWEST = 16
"""Minimum number of tokens in a loop: three equal signs or full stops do not count."""


def loops(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row of tokens ends in a loop, bool[B].

    The last n tokens, for some n up to ``LONGEST_PERIOD``, repeat ``TIMES`` times in a row exactly if each of the
    last (``TIMES`` - 1) n tokens equals the one n before it; a loop of less than ``FEWEST`` tokens must last that long.
    """
    width = TIMES * LONGEST_PERIOD
    # Where a row has no token, nothing equals anything.
    tails = np.repeat(-1 - np.arange(width)[None], len(rows), axis=0)
    for i, tokens in enumerate(rows):
        last = tokens[-width:]
        if len(last):
            tails[i, -len(last) :] = last
    found = np.zeros(len(rows), bool)
    for period in range(1, LONGEST_PERIOD + 1):
        same = max((TIMES - 1) * period, FEWEST - period)
        found |= (tails[:, -same:] == tails[:, -same - period : -period]).all(axis=1)
    return found


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of rewards and lengths, by the suffix of their metrics' names."""
MEASURED = (
    "reward/mean", "reward/std", "reward/zero_std_fraction", "reward/accuracy",
    "completions/mean_length", "completions/truncated_fraction", "completions/repetition_fraction",
    "completions/distinct_fraction",
    *(f"reward/{name}" for name in QUANTILES), *(f"completions/length_{name}" for name in QUANTILES),
)  # fmt: skip
"""Metrics that ``describe`` returns for any groups; NaN without groups."""


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the groups finished in a step, before any filter."""
    if not groups:
        return dict.fromkeys(MEASURED, math.nan)
    scores = np.stack([g.rewards for g in groups])
    accuracy = np.stack([g.accuracy for g in groups])
    completions = [c for g in groups for c in g.completions]
    ended = [c.finish_reason for c in completions]
    lengths = np.array([c.length for c in completions])
    sampled = [c.sampled for c in completions]
    written = [tokens[:-1] if why == "stop" else tokens for tokens, why in zip(sampled, ended, strict=True)]
    looping = loops(written) | (np.array(ended) == "repetition")
    found = {}
    for name in groups[0].parts:
        if all(name in g.parts for g in groups):  # older ones may lack some
            metric = name if name.startswith("constraint/") else f"reward/{name}"
            metric = f"{name}_fraction" if name in (REJECTED, REFUSED) else metric
            found[metric] = over_known(np.nanmean, np.stack([g.parts[name] for g in groups]))
    # One completion of each prompt is like no other, and no reward is no equal reward.
    known = [g for g in groups if len(groups[0].completions) != 1 and not np.isnan(g.rewards).all()]
    equal = float(np.mean([not informative(g, "reward") for g in known])) if known else math.nan
    distinct = []  # different answers of each group, by its completions; all without an answer count as one
    for group in groups:
        extractor = "whole" if group.problem.verifier == "none" else group.problem.extractor
        answers = [answer_of(completion.text, extractor) for completion in group.completions]
        distinct.append(len(set(answers)) / len(answers) if len(answers) > 1 else math.nan)
    found |= {
        "reward/mean": over_known(np.nanmean, scores),
        "reward/std": over_known(np.nanstd, scores),
        "reward/zero_std_fraction": equal,
        "reward/accuracy": over_known(np.nanmean, np.where(np.isnan(accuracy), np.nan, accuracy >= 1)),
        "completions/mean_length": float(lengths.mean()),
        "completions/truncated_fraction": ended.count("length") / len(ended),
        "completions/repetition_fraction": float(looping.mean()),
        "completions/distinct_fraction": over_known(np.nanmean, np.array(distinct)),
    }
    shares = list(QUANTILES.values())
    for prefix, values in {"reward/": scores[~np.isnan(scores)], "completions/length_": lengths}.items():
        between = np.quantile(values, shares) if values.size else [math.nan] * len(shares)
        found |= {prefix + name: float(value) for name, value in zip(QUANTILES, between, strict=True)}
    return found


OF_A_TASK = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "zero_std_fraction": "reward/zero_std_fraction",
    "mean_length": "completions/mean_length",
    "truncated_fraction": "completions/truncated_fraction",
}
"""Metrics of each task of a mixture, ``task/<label>/<name>``, and the metric of all groups that each one repeats."""


def describe_tasks(labels: Sequence[str], sampled: Sequence[Group], learned: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of each task of a mixture: of its groups finished in the step, before any filter, and the number
    of its groups that the step learns from.
    """
    found = {}
    for label in labels:
        own = describe([group for group in sampled if group.problem.task == label])
        found |= {f"task/{label}/{name}": own[metric] for name, metric in OF_A_TASK.items()}
        found[f"task/{label}/groups"] = sum(group.problem.task == label for group in learned)
    return found


def describe_episodes(groups: Sequence[Group], branching: bool = False) -> dict[str, float]:
    """Compute metrics of the groups' episodes; {} without any. ``branching``: also of their branches."""
    found = [c.episode for group in groups for c in group.completions if c.episode is not None]
    if not found:
        return {}
    calls = [sum(turn.calls for turn in episode.turns) for episode in found]
    errors = [sum(turn.errors for turn in episode.turns) for episode in found]
    ends = [episode.end for episode in found]
    numbers = [episode.metrics for episode in found]
    names = sorted({name for one in numbers for name in one})
    branches = describe_branches(groups) if branching else {}
    return branches | {
        "episode/turns": float(np.mean([len(episode.turns) for episode in found])),
        "episode/tools": float(np.mean([episode.tools for episode in found])),
        "episode/tool_calls": float(np.mean(calls)),
        "episode/tool_errors": float(np.mean(errors)),
        "episode/forks": float(np.mean([sum(bool(turn.fork) for turn in episode.turns) for episode in found])),
        "episode/restarts": float(sum(episode.restarts for episode in found)),
        **{f"episode/ends/{end}": ends.count(end) / len(ends) for end in ENDS},
        **{f"environment/{name}": float(np.mean([one.get(name, 0.0) for one in numbers])) for name in names},
    }


def failed_call(groups: Sequence[Group]) -> str:
    """Return the first call of a tool that failed, with its arguments and what the model was told; empty without."""
    for turn in (turn for group in groups for c in group.completions for turn in (c.episode or Episode()).turns):
        calls = turn.reply.get("tool_calls") or ()
        for call, said in zip(calls, turn.messages, strict=False) if turn.errors else ():
            if said["content"].startswith("{'error'"):
                return f"{shown_message({'tool_calls': [call]})}: {said['content']}"[:LONGEST_LINE]
        if turn.errors and turn.messages:
            return turn.messages[0]["content"][:LONGEST_LINE]
    return ""


def describe_branches(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics of the branches of the groups' episodes: how many, what they did not have to sample, and how much
    less certain the model was after the environment's answers.
    """
    played = [[c for c in group.completions if c.episode is not None] for group in groups]
    members = [(c, c.episode) for group in played for c in group]
    tokens = sum(c.length for c, _ in members)
    rises = [turn.entropy_rise for _, episode in members for turn in episode.turns[1:] if turn.end > episode.shared]
    return {
        "episode/branches": sum(one.parent is not None for _, one in members) / max(sum(map(bool, played)), 1),
        "episode/shared_fraction": sum(int(c.mask[: one.shared].sum()) for c, one in members) / max(tokens, 1),
        "episode/entropy_rise": float(np.mean(rises)) if rises else math.nan,
    }


def over_known(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """Compute a statistic of the values that are not NaN; NaN if all are, where NumPy would warn."""
    return math.nan if np.isnan(values).all() else float(statistic(values))
