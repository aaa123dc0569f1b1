"""What is written of completions: their scores, their advantages, and each token as sampler and learner knew it."""

import collections
import dataclasses
import json

import numpy as np

from jaxrl_llm.learner import Sample
from jaxrl_llm.rollout import evaluate
from jaxrl_llm.stages.rl import LOGGED_TOKENS, training_lines
from jaxrl_llm.telemetry.records import RunWriter, record_step
from jaxrl_llm.types import Completion, Group, Problem

PROBLEM = Problem("1", ({"role": "user", "content": "1 + 1 ="},), "2", "sums")


def completion(text, **more):
    tokens = np.array([byte for byte in text.encode()], np.int32)
    logp = -np.arange(len(tokens), dtype=np.float32) / 3
    fields = {"finish_reason": "stop", "mask": np.ones(len(tokens), bool), "version": np.zeros(len(tokens), np.int32)}
    fields |= {"extras": {"entropy": logp * -2, "kept": np.zeros((len(tokens), 2), np.uint32)}, "text": text}
    return Completion(tokens, logp, **(fields | more))


def group(*completions):
    rewards = np.arange(len(completions), dtype=np.float64)
    return Group(PROBLEM, np.zeros(2, np.int32), completions, rewards, rewards, {"accuracy": rewards})


def learned_from(*groups, **arrays):
    """Samples in another order than their groups."""
    samples = [
        Sample(g.prompt, c.tokens, c.mask, {"advantages": c.tokens[0] / 8}, arrays, place=(n, i))
        for n, g in reversed(list(enumerate(groups)))
        for i, c in enumerate(g.completions)
    ]
    return groups, samples, spelled


def spelled(tokens):
    return [chr(token) for token in tokens]


def test_each_token_is_written_with_what_is_known_of_it():
    first, second = group(completion("ab"), completion("c")), group(completion("d"))
    lines = training_lines(*learned_from(first, second))
    assert [(line["group"], line["completion"], line["reward"]) for line in lines] == [
        (0, "ab", 0.0), (0, "c", 1.0), (1, "d", 0.0)
    ]  # fmt: skip
    assert [line["advantage"] for line in lines] == [97 / 8, 99 / 8, 100 / 8]
    assert lines[0]["by_token"] == {"text": ["a", "b"], "sampler_logp": [0.0, -0.3333], "entropy": [0.0, 0.6667]}


def test_advantages_of_tokens_are_written_with_their_mean_over_those_that_count():
    one = completion("abc", mask=np.array([True, False, True]))
    sample = Sample(
        np.zeros(1, np.int32),
        one.tokens,
        np.array([True, False, False]),
        arrays={"advantages": np.array([0.5, 0.0, -2.0], np.float32), "fresh": np.ones(3, bool)},
        place=(0, 0),
    )
    (line,) = training_lines([group(one)], [sample], spelled)
    assert line["advantage"] == 0.5
    told = line["by_token"]
    assert told["advantages"] == [0.5, 0.0, -2.0] and told["mask"] == [1, 0, 1] and told["counted"] == [1, 0, 0]
    assert set(told) == {"text", "sampler_logp", "entropy", "advantages", "mask", "counted"}


def test_a_steps_first_completions_alone_are_written_token_by_token():
    long = "a" * (LOGGED_TOKENS // 2)
    lines = training_lines(*learned_from(group(*(completion(long) for _ in range(3)))))
    assert ["by_token" in line for line in lines] == [True, True, False] and "advantage" in lines[2]


def test_what_cannot_be_spelled_or_was_not_learned_from_is_left_out():
    (line,) = training_lines([group(completion("a"))], [], lambda tokens: [])
    assert "by_token" not in line and "advantage" not in line
    assert line["tokens"] == 1 and line["parts"] == {"accuracy": 0.0}


def test_lines_on_the_disk_are_rows_of_the_step(tmp_path):
    odd = completion("a", extras={"step_rewards": np.array([np.nan], np.float32)})
    with RunWriter(tmp_path, None) as writer:
        record_step(writer, 3, {"loss": 0.5}, training_lines(*learned_from(group(odd))))
    line = (tmp_path / "samples.jsonl").read_text()
    assert line.startswith('{"step": 3, "kind": "training", "group": 0, "task": "sums", "prompt": "1 + 1 ="')
    assert json.loads(line)["by_token"]["step_rewards"] == [None]


def test_the_learners_numbers_stand_beside_the_samplers():
    one = group(completion("ab"))
    (line,) = training_lines(*learned_from(one, old_values=np.array([0.25, 0.5], np.float32)))
    assert line["by_token"]["old_values"] == [0.25, 0.5]
    others = [dataclasses.replace(sample, place=(1, 0)) for sample in learned_from(one)[1]]
    (line,) = training_lines([one], others, spelled)
    assert "advantage" not in line, "a sample belongs to its completion, not to one that looks like it"


def test_the_same_answers_are_written_of_every_evaluation(tmp_path):
    count = evaluate.LOGGED_ANSWERS + 9
    answers = ((completion("2"),),) * count
    found = evaluate.TaskEvaluation("sums", (PROBLEM,) * count, answers, np.ones((count, 1), bool), None)
    other, alone = dataclasses.replace(found, task="words"), evaluate.EvaluationReport({}, (found,))
    with RunWriter(tmp_path, None) as writer:
        record_step(writer, 0, {}, evaluation_rows=alone.lines())
        learned = training_lines(*learned_from(group(*[completion("a")] * 3 * evaluate.LOGGED_ANSWERS)))
        record_step(writer, 1, {}, learned, alone.lines())
        record_step(writer, 2, {}, evaluation_rows=evaluate.EvaluationReport({}, (found, other)).lines())
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    counts = collections.Counter((line["step"], line["kind"], line["task"]) for line in lines)
    assert counts == {
        (0, "evaluation", "sums"): evaluate.LOGGED_ANSWERS,
        (1, "training", "sums"): 3 * evaluate.LOGGED_ANSWERS,
        (1, "evaluation", "sums"): evaluate.LOGGED_ANSWERS,
        (2, "evaluation", "sums"): evaluate.LOGGED_ANSWERS // 2,
        (2, "evaluation", "words"): evaluate.LOGGED_ANSWERS // 2,
    }
