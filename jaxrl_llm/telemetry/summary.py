"""The summary at the end of a run: results, sample completions, the run's directory and next commands."""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from jaxrl_llm.diagnosis import Finding, diagnose
from jaxrl_llm.system import storage
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import PROFILE
from jaxrl_llm.system.text import abridge, seconds, short
from jaxrl_llm.telemetry.report import step_events
from jaxrl_llm.types import DISAGREEMENT

OTHER_MEASURES = {
    "eval/pairs/accuracy": ("pairs", True),
    "eval/steps/accuracy": ("steps", True),
    "eval/text/loss": ("text loss", False),
}
"""Metrics of evaluations other than task accuracy: their label, and whether they are shares."""
LABEL_WIDTH = 18


class SamplePair(NamedTuple):
    """Two completions of one prompt, by the model before and after training, and the score of each (1 is correct)."""

    prompt: str
    before: str
    after: str
    before_score: float
    after_score: float


class StepSpan(NamedTuple):
    """The steps of a process, ``first`` to ``last``, and its duration in ``seconds``."""

    first: int
    last: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The contents of a finished run's summary.

    Attributes:
      took: the steps of this process, which may have resumed the run, and its duration.
      measure: of the evaluation: ``accuracy``, or ``reward`` where nothing is verified.
      before, after: the share of correct answers, 0 to 1, or the mean reward; None if it was not evaluated.
      problems: number of evaluated problems; of many not all completions are written down.
      other_measures: label, before training (None if not evaluated) and after, and whether it is a share.
      judged: for each step with a reward model: step, mean score, share of correct answers, disagreement of several.
      phases: the steps after which another phase began, and the text of each one's row about it.
      best: step and result, as measured, of the best evaluation, where the run keeps that model; else None.
      ended: after how many planned steps a rule ended the run, why, and flags that continue it; None if none did.
    """

    run_dir: str
    task: str
    took: StepSpan
    measure: str = "accuracy"
    before: float | None = None
    after: float | None = None
    pairs: tuple[SamplePair, ...] = ()
    problems: int = 0
    other_measures: tuple[tuple[str, float | None, float, bool], ...] = ()
    judged: tuple[tuple[int, float, float, float | None], ...] = ()
    phases: tuple[tuple[int, str], ...] = ()
    findings: Sequence[Finding] = ()
    best: tuple[int, float] | None = None
    ended: tuple[int, str, str] | None = None


ScoredAnswer = tuple[str, str, str, float]
"""Task, prompt text, completion text, and score: 1 if correct, 0 if not; the reward where nothing is verified."""


def pair_answers(before: Iterable[ScoredAnswer], after: Iterable[ScoredAnswer]) -> tuple[SamplePair, ...]:
    """Pair answers by task and prompt, in the order of ``after``; unpaired ones are left out."""
    first = {(task, prompt): (text, score) for task, prompt, text, score in before}
    pairs = []
    for task, prompt, text, score in after:
        if (task, prompt) in first:
            earlier, scored = first[task, prompt]
            pairs.append(SamplePair(prompt, earlier, text, scored, score))
    return tuple(pairs)


class Printer(Console):
    """A console that raises BrokenPipeError when its reader is gone; Rich's own ends the process, with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; see ``Console``."""
        raise BrokenPipeError


def print_summary(
    summary: RunSummary, console: Console | None = None, brief: bool = False, reloads: bool = True, writes: bool = True
) -> None:
    """Print the accuracy (or reward) before and after, samples, the run's directory, the next commands and findings.
    ``brief`` leaves out samples and commands. ``reloads``: the run's config.json holds all that it trains with.
    ``writes``: it trains a model that answers; a reward model does not.
    """
    console = console or Printer(highlight=False)
    phases = [_field(f"after step {step}", text) for step, text in summary.phases]
    lines = [*_result_lines(summary), *phases]
    if brief:
        lines.append(_field("the run is in", summary.run_dir))
    else:
        lines = [Text(""), *lines, *_reward_model_lines(summary), *_sample_lines(summary, console)]
        lines += [Text(""), *_next_lines(summary, reloads, writes)]
    for finding in summary.findings:
        lines += [
            Text(""),
            _field(finding.kind.replace("_", " "), f"since step {finding.step}: {finding.what}", "bold"),
        ]
        lines += [Text(f"{'':<{LABEL_WIDTH}}{text}") for text in (finding.why, f"try {finding.remedy}")]
    console.print(*lines, sep="\n", soft_wrap=True)  # at once: in a notebook each call is an output


def _field(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH - 1}} ", "bold"), (value, style))


def _result_lines(summary: RunSummary) -> list[Text]:
    measure = summary.measure
    took = summary.took
    later = f"step {took.last}" if took.first == took.last else f"steps {took.first} to {took.last}"
    steps = f"{took.last} steps" if took.first <= 1 else later
    early = "; ended at step {} of {}: {}".format(took.last, *summary.ended) if summary.ended is not None else ""
    lines = [_field("finished", f"{steps} in {seconds(took.seconds)}{early}")]
    measured = [(*other, "") for other in summary.other_measures]
    if summary.after is not None:
        measured.insert(0, (measure, summary.before, summary.after, measure == "accuracy", f"  on {summary.task}"))
    for name, before, after, share, where in measured:
        lines.append(_field(f"{name} before", "not evaluated" if before is None else _format_measure(before, share)))
        lines.append(_field(f"{name} after", f"{_format_measure(after, share)}{where}", "bold"))
    if summary.pairs:
        gained = sum(pair.after_score > pair.before_score for pair in summary.pairs)
        lost = sum(pair.after_score < pair.before_score for pair in summary.pairs)
        right_or_wrong = ("went from wrong to right", "from right to wrong")
        better, worse = right_or_wrong if measure == "accuracy" else ("got a higher reward", "a lower one")
        count = len(summary.pairs)
        label = f"first {count} of {summary.problems}" if count < summary.problems else "of the problems"
        lines.append(_field(label, f"{gained} {better}, {lost} {worse}, {count - gained - lost} stayed"))
    return lines


def _reward_model_lines(summary: RunSummary) -> list[Text]:
    """Return a table of modelled reward next to true accuracy: where they diverge, it is being exploited."""
    rows = summary.judged[:: max(1, -(-len(summary.judged) // 12))]
    if not rows:
        return []
    several = any(differ is not None for *_, differ in rows)
    title = "step      modelled reward   true accuracy" + "      disagreement" * several
    lines = [Text(""), Text(title, "bold")]
    most = max(score for _, score, *_ in rows)
    least = min(score for _, score, *_ in rows)
    for step, score, accuracy, differ in rows:
        height = (score - least) / (most - least) if most > least else 0.0
        reward_bar, accuracy_bar = ("#" * round(10 * share) for share in (height, accuracy))
        line = f"{step:>4}  {short(score):>8} {reward_bar:<10}  {100 * accuracy:5.1f} % {accuracy_bar:<10}"
        lines.append(Text(line if differ is None else f"{line}  {short(differ):>8}"))
    return lines


def _format_measure(value: float, share: bool) -> str:
    return f"{100 * value:.1f} %" if share else short(value)


def _sample_lines(summary: RunSummary, console: Console) -> list[Text]:
    lines = []
    # Those that improved come first, the others in their order.
    for pair in sorted(summary.pairs, key=lambda pair: not pair.after_score > pair.before_score)[:3]:
        lines += [Text(""), *_labelled_lines("prompt", ("", ""), pair.prompt, console)]
        for label, text, score in (("before", pair.before, pair.before_score), ("after", pair.after, pair.after_score)):
            verdict = ("right", "green") if score else ("wrong", "red")
            result = (short(score), "") if summary.measure == "reward" else verdict
            lines += _labelled_lines(label, result, text, console)
    return lines


def _labelled_lines(label: str, verdict: tuple[str, str], text: str, console: Console) -> list[Text]:
    room = max(20, console.width - LABEL_WIDTH - 1)
    first, *rest = Text(abridge(text, room * 3) or "(nothing)").wrap(console, room)
    head = Text.assemble((f"{label:<8}", "dim"), (f"{verdict[0]:<{LABEL_WIDTH - 8}}", verdict[1]))
    return [head + first, *(Text(" " * LABEL_WIDTH) + other for other in rest)]


def _next_lines(summary: RunSummary, reloads: bool, writes: bool) -> list[Text]:
    run = shlex.quote(summary.run_dir)
    prompt, longest = "What is 3 + 5?", 100
    # The run's own configuration: it may have started with flags on top of the named one.
    config = shlex.quote(f"{summary.run_dir}/config.json")
    if summary.pairs and len(summary.pairs[0].prompt) <= longest:
        prompt = abridge(summary.pairs[0].prompt, longest)
    flags = f"--steps {2 * summary.took.last}" if summary.ended is None else summary.ended[2]
    more = f"jaxrl-llm train {config} " + (f"--run_dir {run} {flags}" if flags else f"--from {run}")
    if not reloads:
        source = "from the file or notebook that began it: config.json lacks its own parts"
        extent = f"for {2 * summary.took.last} steps" if summary.ended is None else f"with {flags or f'--from {run}'}"
        more = f"train again {extent} {source}"
    commands = [f"jaxrl-llm eval {run}", more]
    if writes:
        commands.insert(1, f"jaxrl-llm generate {run} --prompt {shlex.quote(prompt)}")
    folder = storage.mirror(summary.run_dir)
    report, profile = folder / "report.html", folder / PROFILE
    best = []
    if summary.best is not None:
        step, result = summary.best
        value = _format_measure(result, summary.measure == "accuracy" and summary.after is not None)
        best = [_field("its best model", f"{summary.run_dir}@best: step {step}, {value}")]
    return [
        _field("the run is in", summary.run_dir),
        *best,
        *([_field("look at it", f"{report}, in a browser")] if report.is_file() else []),
        *([_field("its profile", f"{profile} (pip install xprof, then xprof {profile})")] if profile.is_dir() else []),
        _field("try next", ""),
        *(Text(f"  {command}") for command in commands),
    ]


def summarise(run_dir: Path, seconds: float) -> RunSummary:
    """Summarise metrics.jsonl and samples.jsonl: first and last evaluation, reward models, phases and findings."""
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    steps = rows[-1]["step"] if rows else 0
    took = StepSpan(max((row["step"] for row in rows if row.get("event/resumed")), default=1), steps, seconds)
    other_measures = []
    for name, (label, share) in OTHER_MEASURES.items():
        values = [row[name] for row in rows if name in row]
        if values:
            other_measures.append((label, values[0] if len(values) > 1 else None, values[-1], share))
    judged = []
    for row in rows:
        score, right = row.get("reward_model/mean"), row.get("reward/accuracy")
        if score is not None and right is not None:
            names = (name for name in row if name.startswith("reward/") and name.endswith(f"/{DISAGREEMENT}"))
            judged.append((row["step"], score, right, row.get(next(names, ""))))
    summary = RunSummary(
        storage.named(run_dir), "", took, other_measures=tuple(other_measures), judged=tuple(judged),
        findings=diagnose(rows),
        phases=tuple((row["step"], text) for row in rows for name, text in step_events(row) if name == "phase"),
    )  # fmt: skip
    # The main metric comes first in a row: the accuracy, or the reward where nothing is verified, of several tasks the
    # average.
    measures = [[name for name in row if re.fullmatch(r"eval/.*/(pass@1|reward)", name)] for row in rows]
    tested = [(row, names[0]) for row, names in zip(rows, measures, strict=True) if names]
    if not tested:
        return summary
    last, name = tested[-1]
    first = next(row for row in rows if name in row)  # a phase may test on other tasks
    task, _, kind = name.removeprefix("eval/").rpartition("/")
    measure = "accuracy" if kind == "pass@1" else "reward"
    summary = dataclasses.replace(summary, task=task, measure=measure, after=last[name])
    if first is last:
        return summary
    answers: dict[int, list[ScoredAnswer]] = {first["step"]: [], last["step"]: []}
    for row in read_rows(run_dir / "samples.jsonl"):
        if row["kind"] == "evaluation" and row["step"] in answers:
            reward = math.nan if row.get("reward") is None else row["reward"]
            score = float(row["correct"]) if "correct" in row else reward
            answers[row["step"]].append((row.get("task", ""), row["prompt"], row["completion"], score))
    counts = [last[count] for count in last if count.startswith("eval/") and count.endswith("/problems")]
    return dataclasses.replace(
        summary, before=first[name], pairs=pair_answers(*answers.values()), problems=int(sum(counts))
    )
