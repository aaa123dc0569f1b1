"""The last thing that a run prints: what it changed, where it lies, what to try next."""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxrl_llm.telemetry.columns import seconds, short
from jaxrl_llm.telemetry.diagnosis import Finding
from jaxrl_llm.telemetry.lines import abridge

SHOWN_PAIRS = 3
SHOWN_LINES = 3
LABEL_WIDTH = 18
LONGEST_ASKED = 100
SHOWN_STEPS = 12
WORDS = {
    "accuracy": ("went from wrong to right", "from right to wrong"),
    "reward": ("got a higher reward", "a lower one"),
}
"""What is said of problems that got better, and worse, by what was measured."""


@dataclasses.dataclass(frozen=True)
class SamplePair:
    """Two completions of one prompt, by the model before training and after, and what each scored (1 is correct)."""

    prompt: str
    before: str
    after: str
    before_score: float
    after_score: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number that tests found beside the answers to a task, before training and after; None where it was not."""

    name: str
    before: float | None
    after: float | None
    share: bool


@dataclasses.dataclass(frozen=True)
class Took:
    """The steps that a process has made, ``first`` to ``last``, and the ``seconds`` that it took."""

    first: int
    last: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """What a finished run is summed up by.

    Attributes:
      run_dir: where the run lies.
      task: the task that was evaluated.
      took: the steps of this process, which may have gone on from others', and its time.
      measure: what the evaluation told: ``accuracy``, or ``reward`` where nothing is verified.
      before: the share of correct answers, 0 to 1, or the mean reward, before training; None if it was not evaluated.
      after: the same after the last step.
      pairs: the evaluated problems with their completions, as far as there are any.
      problems: how many were evaluated; of many not all completions are written down.
      reloads: whether its config.json holds all that it trains with.
      others: what else its tests measured.
      writes: whether it trains a model that answers; a reward model does not.
      judged: of each step, where a reward model judges: the step, its mean score, the share of correct answers, and by
        how much several models differ.
    """

    run_dir: str
    task: str
    took: Took
    measure: str = "accuracy"
    before: float | None = None
    after: float | None = None
    pairs: tuple[SamplePair, ...] = ()
    problems: int = 0
    reloads: bool = True
    others: tuple[Measured, ...] = ()
    writes: bool = True
    judged: tuple[tuple[int, float, float, float | None], ...] = ()


Answered = tuple[str, str, str, float]
"""Task, prompt text, completion text, what it scored: 1 if it is correct, 0 if not; its reward where nothing is
verified."""


def pair_samples(before: Iterable[Answered], after: Iterable[Answered]) -> tuple[SamplePair, ...]:
    """Pairs by task and prompt, in the order of ``after``; what stands on one side only is left out."""
    first = {(task, prompt): (text, score) for task, prompt, text, score in before}
    pairs = []
    for task, prompt, text, score in after:
        if (task, prompt) in first:
            earlier, scored = first[task, prompt]
            pairs.append(SamplePair(prompt, earlier, text, scored, score))
    return tuple(pairs)


def worth_showing(pairs: Sequence[SamplePair], count: int = SHOWN_PAIRS) -> list[SamplePair]:
    """``count`` pairs: those that got better first, then the others, in their order."""
    return sorted(pairs, key=lambda pair: not pair.after_score > pair.before_score)[:count]


class Printer(Console):
    """Its owner hears that nobody reads it; Rich's own ends the process, with exit code 1."""

    def on_broken_pipe(self) -> None:
        """See ``Console``."""
        raise BrokenPipeError


def print_summary(
    summary: RunSummary,
    console: Console | None = None,
    findings: Sequence[Finding] = (),
    brief: bool = False,
    phases: Sequence[tuple[int, str]] = (),
) -> None:
    """Print the accuracy (or reward) before and after, samples, the run's directory, the next commands and findings.

    Args:
      summary: of the run.
      console: where to; stdout if None.
      findings: what is wrong with it.
      brief: without the samples and commands.
      phases: the steps after which another phase began, and what the row of each says of it.
    """
    console = console or Printer(highlight=False)
    begun = [_field(f"after step {step}", text) for step, text in phases]
    lines = [*_results(summary), *begun, _field("the run lies in", summary.run_dir)]
    if not brief:
        lines = [Text(""), *_results(summary), *begun, *_judged(summary), *_samples(summary, console)]
        lines += [Text(""), *_next(summary)]
    for line in (*lines, *_findings(findings)):
        console.print(line, soft_wrap=True)


def _field(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH - 1}} ", "bold"), (value, style))


def _results(summary: RunSummary) -> list[Text]:
    measure = summary.measure
    took = summary.took
    later = f"step {took.last}" if took.first == took.last else f"steps {took.first} to {took.last}"
    steps = f"{took.last} steps" if took.first <= 1 else later
    lines = [_field("finished", f"{steps} in {seconds(took.seconds)}")]
    if summary.after is not None:
        lines.append(_field(f"{measure} before", _shown(summary.before, measure)))
        lines.append(_field(f"{measure} after", f"{_shown(summary.after, measure)}  on {summary.task}", "bold"))
    for other in summary.others:
        kind = "accuracy" if other.share else "reward"
        lines.append(_field(f"{other.name} before", _shown(other.before, kind)))
        lines.append(_field(f"{other.name} after", _shown(other.after, kind), "bold"))
    if summary.pairs:
        gained = sum(pair.after_score > pair.before_score for pair in summary.pairs)
        lost = sum(pair.after_score < pair.before_score for pair in summary.pairs)
        better, worse = WORDS[measure]
        known = len(summary.pairs)
        which = f"first {known} of {summary.problems}" if known < summary.problems else "of the problems"
        lines.append(_field(which, f"{gained} {better}, {lost} {worse}, {known - gained - lost} stayed"))
    return lines


def _judged(summary: RunSummary) -> list[Text]:
    """What the reward model believed of some steps, beside what was true: where they part, it is being exploited."""
    shown = summary.judged[:: max(1, -(-len(summary.judged) // SHOWN_STEPS))]
    if not shown:
        return []
    several = any(differ is not None for *_, differ in shown)
    title = "step      modelled reward   true accuracy" + "      disagreement" * several
    lines = [Text(""), Text(title, "bold")]
    most = max(score for _, score, *_ in shown)
    least = min(score for _, score, *_ in shown)
    for step, score, accuracy, differ in shown:
        height = (score - least) / (most - least) if most > least else 0.0
        line = f"{step:>4}  {short(score):>8} {_bar(height)}  {100 * accuracy:5.1f} % {_bar(accuracy)}"
        lines.append(Text(line if differ is None else f"{line}  {short(differ):>8}"))
    return lines


def _bar(share: float) -> str:
    """A share of ten signs."""
    return f"{'#' * round(10 * share):<10}"


def _findings(findings: Sequence[Finding]) -> list[Text]:
    """What is wrong with the run by its last row, each with what it means and what to change."""
    lines = []
    for found in findings:
        lines += [Text(""), _field(found.kind.replace("_", " "), f"since step {found.step}: {found.what}", "bold")]
        lines += [Text(f"{'':<{LABEL_WIDTH}}{text}") for text in (found.why, f"try {found.remedy}")]
    return lines


def _shown(value: float | None, measure: str) -> str:
    if value is None:
        return "not evaluated"
    return f"{100 * value:.1f} %" if measure == "accuracy" else short(value)


def _samples(summary: RunSummary, console: Console) -> list[Text]:
    lines = []
    for pair in worth_showing(summary.pairs):
        lines += [Text(""), *_block("prompt", ("", ""), pair.prompt, console)]
        lines += _block("before", _verdict(pair.before_score, summary.measure), pair.before, console)
        lines += _block("after", _verdict(pair.after_score, summary.measure), pair.after, console)
    return lines


def _verdict(score: float, measure: str) -> tuple[str, str]:
    if measure == "reward":
        return short(score), ""
    return ("right", "green") if score else ("wrong", "red")


def _block(label: str, verdict: tuple[str, str], text: str, console: Console) -> list[Text]:
    room = max(20, console.width - LABEL_WIDTH - 1)
    first, *others = Text(abridge(text, room * SHOWN_LINES) or "(nothing)").wrap(console, room)
    head = Text.assemble((f"{label:<8}", "dim"), (f"{verdict[0]:<{LABEL_WIDTH - 8}}", verdict[1]))
    return [head + first, *(Text(" " * LABEL_WIDTH) + other for other in others)]


def _next(summary: RunSummary) -> list[Text]:
    run = shlex.quote(summary.run_dir)
    ask = "What is 3 + 5?"
    # The run's own configuration: it may have been begun with flags beside the one that was named.
    config = shlex.quote(f"{summary.run_dir}/config.json")
    if summary.pairs and len(summary.pairs[0].prompt) <= LONGEST_ASKED:
        ask = abridge(summary.pairs[0].prompt, LONGEST_ASKED)
    more = f"jaxrl-llm train {config} --run_dir {run} --steps {2 * summary.took.last}"
    if not summary.reloads:
        begun = "from the file or notebook that began it: config.json lacks its own parts"
        more = f"train again for {2 * summary.took.last} steps {begun}"
    commands = [f"jaxrl-llm eval {run}", more]
    if summary.writes:
        commands.insert(1, f"jaxrl-llm generate {run} --prompt {shlex.quote(ask)}")
    report = Path(summary.run_dir, "report.html")
    return [
        _field("the run lies in", summary.run_dir),
        *([_field("look at it", f"{report}, in a browser")] if report.is_file() else []),
        _field("try next", ""),
        *(Text(f"  {command}") for command in commands),
    ]
