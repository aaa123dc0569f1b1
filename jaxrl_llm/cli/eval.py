"""usage: jaxrl-llm eval RUN_OR_MODEL [--config NAME] [--task.* ...] [--samples K] [--temperature T] [--json]
                      [--out FILE.jsonl] [--kl_to RUN_OR_MODEL] [--trust]
                      [--rerank REWARD_MODEL [--rerank_by score|product|minimum|last] [--give_up_after K]]
       jaxrl-llm eval CONFIG --pairs FILE.jsonl [--limit N] [--json]

A run is tested on its held-out problems, a model on those of a configuration (quickstart unless --config names
another). With --rerank a reward model chooses one of the K answers: by its score of the whole answer, or by the scores
of its steps, their product, the lowest or the last; --give_up_after ends an answer once K steps in a row have lowered
its score. --out writes every answer to a file. --kl_to measures how far the model is from another: the mean KL of a
token on its own answers, sampled at the temperature that it was trained at unless --temperature says otherwise.
RUN@STEP is a checkpoint or a snapshot of the run. --trust executes the code that a run of others brings. --pairs
measures how often the judges of a configuration (Rubric, Pairwise) prefer the better answer of labelled pairs, such as
those that collect --kind pairs verified.
jaxrl-llm eval RUN_OR_MODEL --help shows more."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, asking, find_settings
from jaxrl_llm.cli.distance import Distance, check_distance, measure
from jaxrl_llm.cli.flags import first, parse, take
from jaxrl_llm.cli.reranking import check_rerank, reader_of, reranker
from jaxrl_llm.codec import jsonable
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.runs.load import Trained, find_run, load_base, load_trained, mesh_here
from jaxrl_llm.runs.pins import needs_base
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.paths import check_file, new_file, writable
from jaxrl_llm.system.setting import Count, Range, check_fields
from jaxrl_llm.system.signals import on_exit
from jaxrl_llm.tasks import Task

HELP = (
    "--config NAME takes another configuration's task and sampling, --out FILE.jsonl keeps every answer, --kl_to "
    "RUN_OR_MODEL measures how far the model is from that one."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The problems to evaluate on, and how to sample.

    Attributes:
      task: the problems, of one task or of several; those held out, or all if the task holds out no problems.
      samples: k, completions of each problem.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps all.
      limit: problems at most; 0 for all.
      max_new_tokens: longest completion, in tokens.
      slots: completions sampled at one time.
      seed: of the sampling.
      json: print one JSON object instead of a table.
      rerank: a reward model that chooses one of the samples: RUN[@STEP] or a directory; None for no choice.
      rerank_by: score (of the whole answer); or product, minimum or last of the scores of the answer's steps, from a
        process reward model.
      give_up_after: an answer ends, and is wrong, where this many steps in a row have each had a lower score than the
        one before; needs a process reward model. 0 lets all go on.
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    task: Task | configs.Mixture
    samples: Annotated[int, Count(1)] = 1
    temperature: float = 0.0
    top_p: float = 1.0
    limit: Annotated[int, Range("[0, inf]", "0 is all")] = 0
    max_new_tokens: int = 256
    slots: Annotated[int, Count(1)] = 64
    seed: Annotated[int, configs.SEED] = 0
    json: bool = False
    rerank: str | None = None
    rerank_by: Literal["score", "product", "minimum", "last"] = "score"
    give_up_after: Annotated[int, Count(0)] = 0
    mesh: MeshShape = MeshShape()


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Options of the evaluation of a run that learns from data.

    Attributes:
      samples: k, answers to each problem of the run's task, where it has one.
      temperature: 0 is greedy.
      top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps all.
      limit: rows and problems at most; 0 for all.
      max_new_tokens: longest answer, in tokens.
      slots: answers sampled at one time.
      json: print one JSON object instead of lines.
      mesh: over the devices of this machine; see ``MeshShape``.
    """

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    limit: int = 0
    max_new_tokens: int = 256
    slots: int = 64
    json: bool = False
    mesh: MeshShape = MeshShape()


def evaluate(arguments: list[str]) -> int:
    """Run ``eval RUN_OR_MODEL [--config NAME] [--field value ...]``; return the exit code."""
    name = first(arguments, __doc__, "eval needs a run or a model: jaxrl-llm eval runs/quickstart")
    pairs = take(arguments, "--pairs", True)
    if pairs is not None:
        from jaxrl_llm.cli.agreement import agree

        return agree(name, pairs, arguments)
    own = find_run(name)
    chosen = take(arguments, "--config", True)
    to = take(arguments, "--kl_to", True)
    if own is not None and chosen is None and not isinstance(own.run, configs.Run):
        require(to is None, f"--kl_to {to} needs a task to answer: name a configuration that has one, --config")
        return evaluate_data(name, arguments)
    trained, settings = find_settings(name, chosen)
    proposed = defaults(settings)
    if to is not None:  # answers are drawn from the policy as it was trained: at its temperature, with nothing cut off
        temperature = configs.resolved(settings).rollout.temperature
        proposed = dataclasses.replace(proposed, temperature=temperature, top_p=1.0)
    out = take(arguments, "--out", True)
    options = parse(Options, arguments, f"jaxrl-llm eval {name}", HELP, proposed)
    check(options, settings)
    check_distance(to, options)
    if out is not None:  # a file that cannot hold the answers is refused before anything is sampled
        require(out.endswith(".jsonl"), f"--out {out} is written as JSON lines: end it in .jsonl")
        check_file(Path(out), "--out")
    # A task that a run only ever tests on has no part that it learned from.
    whole = settings.evaluation.task is not None and options.task == settings.evaluation.task
    # A run's tasks have its date; prompts of what has none are templated twice, and midnight may lie between.
    options = dataclasses.replace(options, task=configs.dated(options.task, datetime.date.today().isoformat()))
    policy, found, notes, far = test(name, trained, settings, options, whole, to)
    if out is not None:
        from jaxrl_llm.system.json_lines import append_rows

        with writable(Path(out), "--out"), new_file(Path(out)) as part, open(part, "wb") as file:
            rows = [row for one in found for row in one.rows()]
            away = [row for one in far for row in one.rows()] or [{}] * len(rows)
            append_rows(file, [row | more for row, more in zip(rows, away, strict=True)])
    results = policy, options, found, far
    print(as_json(*results) if options.json else as_table(*results, notes))
    return 0


def defaults(run: configs.Run) -> Options:
    """Return the options of the run's own evaluations."""
    e, longest, slots = run.evaluation, run.rollout.max_new_tokens, run.rollout.engine.slots
    return Options(e.task or run.task, e.samples, e.temperature, e.top_p, e.limit, longest, slots, run.seed)


def check(options: Options, settings: configs.Run) -> None:
    """Refuse wrong options before anything is loaded."""
    from jaxrl_llm.tasks import check as check_task

    for task in configs.tasks_in(options.task):
        check_task(task)
    configs.check_answers(dataclasses.replace(settings, task=options.task))
    configs.check_environments(configs.tasks_in(options.task))
    require(
        options.rerank is None or not any(task.plays for task in configs.tasks_in(options.task)),
        f"--rerank scores single answers, and task {options.task.label} has episodes: leave it out",
    )
    Sampling(options.temperature, 0, options.top_p, options.max_new_tokens)
    check_fields(options, "--")
    require(
        options.samples == 1 or options.temperature > 0,
        f"--samples {options.samples} at temperature 0 would all be the same: set --temperature above 0",
    )
    check_rerank(options)
    require(
        options.rerank is None or not isinstance(options.task, configs.Mixture),
        f"--rerank chooses among the answers to one task, and {options.task.label} has several: name a configuration "
        "of one with --config",
    )


def test(
    name: str, trained: Trained | None, settings: configs.Run, options: Options, whole: bool, to: str | None
) -> tuple[Policy, tuple[Any, ...], list[str], tuple[Distance, ...]]:
    """Evaluate; return (policy, results of each task, notes on the problems, KL to the model ``to`` on each task;
    empty without ``to``).
    """
    from jaxrl_llm.rollout.evaluate import EvaluationReport, EvaluationSet, evaluate
    from jaxrl_llm.telemetry.progress import Progress, Schedule

    with Progress(Schedule(1)) as progress:
        problems, notes = read_problems(options, settings, whole, progress.status)
        require(
            options.rerank is None or problems[0].verifier != "none",
            f"--rerank has nothing to measure on task {options.task.label}, which verifies no answers: give a task "
            "with answers and a verifier",
        )
        model = asking(name, trained, settings, options.task, problems, options, progress.status, True)
        with model as (policy, prompts, by):
            stops = policy.model.config.tokens.eos
            sampling = Sampling(options.temperature, 0, options.top_p, options.max_new_tokens, stops)
            limits = configs.limits_of(configs.parts_of_task(options.task), options.max_new_tokens)
            limits = {label: min(most, options.max_new_tokens) for label, most in limits.items()}
            asked = EvaluationSet(prompts, problems, options.samples, options.seed, limits)
            longest = by.engine.max_length - options.max_new_tokens
            watch, choose = None, None
            if options.rerank is not None:
                watch, choose = reranker(options, policy, prompts, problems, longest, settings, progress.status)
                for line in reader_of(options).untold(options.rerank):
                    progress.note(line)
            found = evaluate(by, asked, sampling, progress.status, watch)
            EvaluationReport({}, found).check()
            if choose is not None:
                found = tuple(map(choose, found))
            far = () if to is None else measure(to, policy, prompts, settings, options, found, progress.status)
    return policy, found, notes, far


def read_problems(
    options: Options, settings: configs.Run, whole: bool, status: Callable[[str], None]
) -> tuple[list[Any], list[str]]:
    """Return the problems to test on, task by task, and a note if the run may have learned from them."""
    from jaxrl_llm.stages.stage import read_parts

    loaded = read_parts(configs.parts_of_task(options.task), functools.partial(configs.verifies, settings), status)
    held_out = any(one.held_out for one in loaded)
    chosen = [one.held_out if held_out and not whole else one.train for one in loaded]
    warning = "no problems are held out (task.holdout is 0): these may be the ones that a run learned from"
    problems = [problem for one in chosen for problem in one[: options.limit or None]]
    return problems, [] if whole or held_out else [warning]


def as_json(policy: Policy, options: Options, found: tuple[Any, ...], far: tuple[Distance, ...]) -> str:
    """Return one JSON object: model, sampling, and ``eval/<task>/...`` by their names in metrics.jsonl."""
    told = ["samples", "temperature", "top_p"]
    if options.rerank is not None:
        told += ["rerank", "rerank_by", "give_up_after"]
    about = {"model": policy.name, "step": policy.step} | {name: getattr(options, name) for name in told}
    if far:
        about |= {"kl_to": far[0].to, "kl_to_step": far[0].step}
    from jaxrl_llm.rollout.evaluate import EvaluationReport

    away = {name: value for one in far for name, value in one.metrics().items()}
    return json.dumps(jsonable(about | EvaluationReport({}, found).metrics() | away))


def as_table(
    policy: Policy, options: Options, found: tuple[Any, ...], far: tuple[Distance, ...], notes: list[str]
) -> str:
    """Return a small table for each task, for people, and the average over several."""
    from jaxrl_llm.rollout.evaluate import average_tasks

    step = "" if policy.step is None else f", step {policy.step}"
    tables = [of_task(f"{policy.name}{step}", options, one) for one in found]
    for table, one in zip(tables, far, strict=bool(far)):
        table += one.lines()
    lines = [tables[0][0], *notes, *tables[0][1:], *(line for table in tables[1:] for line in table)]
    if len(found) > 1:
        means = average_tasks(found)
        shares = {name.rpartition("/")[2]: mean for name, mean in means.items() if "@" in name}
        shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        lines += [f"on average over {len(found)} tasks: {shown}"] if shown else []
    return "\n".join(lines)


def of_task(name: str, options: Options, found: Any) -> list[str]:
    """Return the results of one task as lines; the error is the standard error over problems."""
    import numpy as np

    scores = found.rewards if found.correct is None else np.where(found.failed, np.nan, found.correct)
    known = ~np.isnan(scores)
    # A problem of which no answer could be scored says nothing.
    rate = np.array([row[scored].mean() for row, scored in zip(scores, known, strict=True) if scored.any()])
    error = float(rate.std(ddof=1) / len(rate) ** 0.5) if len(rate) > 1 else 0.0
    how = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}, top_p {options.top_p:g}"
    lines = [f"{name} on {found.task}: {len(found.problems)} problems, {options.samples} each, {how}"]
    for metric, value in found.metrics().items():
        short = metric.removeprefix(f"eval/{found.task}/")
        if short == "pass@1":
            lines.append(f"  {f'avg@{options.samples}':<16}{100 * value:6.1f} %  +- {100 * error:.1f}")
        elif short == "reward":
            lines.append(f"  {'reward':<16}{value:8.3f}  +- {error:.3f}")
        elif "@" in short or short in ("given_up", "refusals"):
            lines.append(f"  {short.replace('_', ' '):<16}{100 * value:6.1f} %")
        elif short == "mean_length":
            lines.append(f"  {'length':<16}{value:6.1f} tokens")
        if short in ("pass@1", "reward") and not known.all():
            why = f": {found.failure}" if found.failure else ""
            lines.append(f"  {'not scored':<16}{np.sum(~known):6d} of {known.size} answers{why}")
    return lines


def evaluate_data(name: str, arguments: list[str]) -> int:
    """Evaluate a run on its held-out data and on its task; return the exit code."""
    trained: Any = find_run(name, tests=True)
    run: Any = trained.run
    e, a = run.evaluation, run.answering
    proposed = DataOptions(e.samples, e.temperature, e.top_p, e.limit, a.max_new_tokens, a.slots)
    given = parse(DataOptions, arguments, f"jaxrl-llm eval {name}", "Test a run on its held-out data.", proposed)
    e = dataclasses.replace(
        e, samples=given.samples, temperature=given.temperature, top_p=given.top_p, limit=given.limit
    )
    a = dataclasses.replace(a, max_new_tokens=given.max_new_tokens, slots=given.slots)
    run = dataclasses.replace(run, evaluation=e, answering=a, mesh=given.mesh)
    configs.validate(run)
    found = tested(dataclasses.replace(trained, run=run))
    if given.json:
        print(json.dumps(jsonable({"model": name, "step": trained.step} | found)))
        return 0
    print(f"{name}, step {trained.step}:")
    for metric, value in found.items():
        told = value if isinstance(value, str) else f"{value:10.4f}"
        print(f"  {metric.removeprefix('eval/').removeprefix('event/'):<24}{told}")
    return 0


def tested(trained: Trained) -> dict[str, Any]:
    """Return ``eval/...`` metrics by their names in metrics.jsonl."""
    import jax

    from jaxrl_llm.sharding.distributed import ALONE
    from jaxrl_llm.stages import stage_of
    from jaxrl_llm.telemetry.progress import Progress, Schedule

    run: Any = trained.run
    directory = trained.directory.parents[1]
    mesh = mesh_here(run.mesh)
    kind = stage_of(run)
    with (
        jax.set_mesh(mesh),
        Progress(Schedule(1)) as progress,
        kind.resources(run, ALONE, directory) as resources,
        on_exit(lambda *reason: resources.close()),
    ):
        progress.status(f"loading {run.model}")
        model, tokenizer = load_base(trained, mesh if needs_base(run, directory) else mesh.abstract_mesh)
        stage = kind.prepare(run, model, tokenizer, mesh, resources, progress, ALONE)
        del model
        progress.status(f"loading {directory}")
        found = stage.evaluate(load_trained(trained, mesh)[0])
    if found is not None:
        found.check()
    else:
        raise InputError(f"{directory} holds nothing out to test on, and has no task: give one with --config NAME")
    return found.metrics()
