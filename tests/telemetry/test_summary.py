"""The summary is honest about what got better and worse, and model output cannot drive the terminal."""

import io
import json
import shlex

import pytest
from rich.console import Console

from jaxrl_llm.rules.guards import evaluation_result, measured_result
from jaxrl_llm.system.text import abridge
from jaxrl_llm.telemetry import Finding
from jaxrl_llm.telemetry.summary import RunSummary, SamplePair, StepSpan, pair_answers, print_summary, summarise

BEFORE = [
    ("sums", "1 + 1", "2", True),
    ("sums", "4 + 3", "8", False),
    ("sums", "5 + 5", "10", True),
    ("sums", "2 + 9", "", False),
    ("sums", "only before", "", True),
]
AFTER = [
    ("sums", "5 + 5", "[b]11[/b]", False),
    ("sums", "1 + 1", "2", True),
    ("sums", "4 + 3", "\x1b[31m7", True),
    ("sums", "2 + 9", "12 " * 400, False),
]

BLANK = SamplePair("", "", "", 0, 0)


def printed(width=80, reloads=True, **changes):
    console = Console(file=io.StringIO(), width=width)
    values = {
        "run_dir": "my runs/quickstart",
        "task": "chain_sum",
        "took": StepSpan(1, 12, 431.0),
        "before": 0.5,
        "after": 0.25,
        "pairs": pair_answers(BEFORE, AFTER),
    }
    print_summary(RunSummary(**{**values, **changes}), console, reloads=reloads)
    return console.file.getvalue()


def prompts_of(text):
    """The prompts of the samples that are shown, in their order."""
    return [line.removeprefix("prompt").strip() for line in text.splitlines() if line.startswith("prompt")]


def test_pairs_are_made_by_prompt():
    pairs = pair_answers(BEFORE, AFTER)
    assert [pair.prompt for pair in pairs] == [prompt for _, prompt, _, _ in AFTER]
    assert pairs[0] == SamplePair("5 + 5", "10", "[b]11[/b]", True, False)


def test_what_reward_models_believe_is_shown_beside_what_is_true_and_how_much_they_differ():
    judged = ((1, 0.5, 0.25, None), (2, 1.5, 0.5, None))
    lines = printed(judged=judged).splitlines()
    at = lines.index("step      modelled reward   true accuracy")
    assert lines[at + 1].split() == ["1", "0.500", "25.0", "%", "##"]
    several = ((1, 0.5, 0.25, 0.125), (2, 1.5, 0.5, None))
    lines = printed(judged=several).splitlines()
    at = lines.index("step      modelled reward   true accuracy      disagreement")
    assert lines[at + 1].split()[-2:] == ["##", "0.125"] and lines[at + 2].split()[-1] == "#####"


def test_two_tasks_may_ask_the_same():
    before = [("sums", "2", "4", True), ("words", "2", "two", False)]
    after = [("words", "2", "2", True), ("sums", "2", "5", False), ("new", "2", "", False)]
    assert pair_answers(before, after) == (
        SamplePair("2", "two", "2", False, True),
        SamplePair("2", "4", "5", True, False),
    )


def test_wrong_to_right_comes_first_and_the_rest_keeps_its_order():
    assert prompts_of(printed()) == ["4 + 3", "5 + 5", "1 + 1"]


def test_losses_are_counted_beside_gains():
    text = printed()
    assert "1 went from wrong to right, 1 from right to wrong, 2 stayed" in text
    assert "accuracy before   50.0 %" in text and "accuracy after    25.0 %  on chain_sum" in text


def test_where_not_all_answers_are_known_the_summary_says_so():
    assert "of the problems   1 went" in printed(problems=4)
    assert "first 4 of 6      1 went" in printed(problems=6)
    worst = (SamplePair("", "", "", 0, 1),) * 192 + (SamplePair("", "", "", 1, 0),) * 5 + (BLANK,) * 3
    line = next(line for line in printed(pairs=worst, problems=600).splitlines() if "went" in line)
    assert len(line) <= 80 and line.startswith("first 200 of 600  192 went from wrong to right, 5 from")


def test_seconds_stand_beside_the_steps_that_they_took(tmp_path):
    assert "finished          12 steps in 7m11" in printed()
    rows = [{"step": 1}, {"step": 2, "event/resumed": True}, {"step": 3, "event/resumed": True}, {"step": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    took = summarise(tmp_path, 5.0).took
    assert took == StepSpan(3, 4, 5.0) and "finished          steps 3 to 4 in 5.0 s" in printed(took=took)
    assert "finished          step 4 in 5.0 s" in printed(took=StepSpan(4, 4, 5.0))


def test_without_a_verifier_the_reward_is_summed_up():
    pairs = pair_answers([("t", "a", "x", 0.25), ("t", "b", "y", 2.0)], [("t", "a", "z", -1.5), ("t", "b", "w", 3.0)])
    text = printed(measure="reward", before=0.25, after=-1.5, pairs=pairs)
    assert prompts_of(text) == ["b", "a"]
    assert "reward before     0.250" in text and "reward after      -1.500  on chain_sum" in text
    assert "1 got a higher reward, 1 a lower one, 0 stayed" in text
    assert "after   3.000" in text and not {"right", "wrong", "accuracy"} & set(text.split())


@pytest.mark.parametrize(("row", "result", "told"), [
    ({"eval/a/reward": -0.6}, -0.6, "-0.600"),
    ({"eval/loss": 3.4}, -3.4, "3.400"),
    ({"eval/a/pass@1": 0.25}, 0.25, "25.0 %"),
])  # fmt: skip
def test_the_best_result_is_shown_as_it_was_measured(row, result, told):
    assert evaluation_result(row) == result
    shares = {"before": None, "after": 0.25} if "eval/a/pass@1" in row else {"before": None, "after": None}
    text = printed(best=(6, measured_result(row)[0]), **shares)
    assert f"my runs/quickstart@best: step 6, {told}\n" in text


def test_a_run_that_its_configuration_does_not_hold_is_not_said_to_go_on_from_it():
    assert "config.json' --run_dir 'my runs/quickstart' --steps 24" in printed()
    assert "train again for 24 steps from the file or notebook that began it" in printed(reloads=False)
    assert "jaxrl-llm train" not in printed(reloads=False)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_samples_fit_the_terminal_and_carry_no_escape_codes(width):
    text = printed(width, pairs=pair_answers(BEFORE, AFTER)[3:])
    assert max(len(line) for line in text.split("the run is in")[0].splitlines() if "went" not in line) <= width
    assert "(nothing)" in text and "…" in text
    assert "\x1b" not in printed(width) and "[b]11[/b]" in printed(width)


def test_the_report_is_named_where_there_is_one(tmp_path):
    assert "look at it" not in printed(run_dir=str(tmp_path))
    (tmp_path / "report.html").touch()
    assert f"look at it        {tmp_path}/report.html, in a browser" in printed(run_dir=str(tmp_path))


def test_the_commands_can_be_pasted():
    commands = [shlex.split(line) for line in printed().splitlines() if line.startswith("  jaxrl-llm")]
    assert commands == [
        ["jaxrl-llm", "eval", "my runs/quickstart"],
        ["jaxrl-llm", "generate", "my runs/quickstart", "--prompt", "5 + 5"],
        ["jaxrl-llm", "train", "my runs/quickstart/config.json", "--run_dir", "my runs/quickstart", "--steps", "24"],
    ]


def test_a_run_without_evaluation_still_ends_with_its_commands():
    text = printed(before=None, after=None, pairs=())
    assert "accuracy" not in text and "jaxrl-llm eval" in text
    assert "accuracy before   not evaluated" in printed(before=None)


def test_abridging_keeps_the_end_where_the_answer_stands():
    text = abridge("word " * 100 + "so it is 8.", 60)
    assert len(text) <= 60 and text.endswith("word so it is 8.") and " word … word " in text
    assert len(abridge("x" * 100, 60)) <= 60
    assert abridge("a\n\tb\x00 c", 60) == "a b c"


def test_findings_stand_at_the_end_with_what_to_change():
    finding = Finding("kl_runaway", 40, "the KL rose", "The policy runs away.", "a larger --recipe.algorithm.kl_coef")
    lines = printed(findings=[finding, finding]).splitlines()
    assert printed().splitlines() == lines[:-8]
    assert (
        lines[-8:-4]
        == lines[-4:]
        == [
            "",
            "kl runaway        since step 40: the KL rose",
            "                  The policy runs away.",
            "                  try a larger --recipe.algorithm.kl_coef",
        ]
    )


def test_before_and_after_are_of_one_task_where_a_phase_tests_on_others(tmp_path):
    rows = [
        {"step": 0, "eval/average/pass@1": 0.5, "eval/sums/pass@1": 0.25, "eval/words/pass@1": 0.75},
        {"step": 2, "eval/sums/pass@1": 0.375, "eval/sums/problems": 60.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "samples.jsonl").write_text("")
    found = summarise(tmp_path, 1.0)
    assert (found.task, found.before, found.after, found.problems) == ("sums", 0.25, 0.375, 60)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[::-1]))
    assert summarise(tmp_path, 1.0).before is None, "the average was measured once"
