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
jaxrl-llm eval RUN_OR_MODEL --help shows more.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, find_settings, open_answerer, settings_for
from jaxrl_llm.cli.flags import first, parse_flags, take
from jaxrl_llm.codec import jsonable
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rollout.settings import USUAL_SLOTS
from jaxrl_llm.runs import Trained, find_run, load_base, load_model, load_trained, mesh_here, needs_base
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.stages.taught import DEFAULT_SEPARATOR, RewardModelUse, reward_format
from jaxrl_llm.system.paths import check_file, new_file, writable
from jaxrl_llm.system.setting import Count, Range, check_fields
from jaxrl_llm.system.signals import on_exit
from jaxrl_llm.tasks import Prompts, Task
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.rollout.evaluate import TaskEvaluation
    from jaxrl_llm.stages.judges import FallingSteps

HELP = (
    "--config NAME takes another configuration's task and sampling, --out FILE.jsonl keeps every answer, --kl_to "
    "RUN_OR_MODEL measures how far the model is from that one."
)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
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
class EvalDataOptions:
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


def check_rerank(options: Any) -> None:
    """Refuse options without a choice to make, or a reward model that learned to score something else."""
    by_steps = options.rerank_by != "score"
    if options.rerank is None:
        for flag, is_set in (("rerank_by", by_steps), ("give_up_after", options.give_up_after)):
            needs = f"--{flag} {getattr(options, flag)} needs a process reward model: add --rerank RUN_OR_MODEL"
            require(not is_set, needs)
        return
    require(
        options.samples >= 2,
        f"--rerank chooses one of several answers, and --samples is {options.samples}: set it to at least 2",
    )
    require(
        by_steps or not options.give_up_after,
        f"--give_up_after {options.give_up_after} reads the scores of steps: set --rerank_by product, minimum or last",
    )
    reader_of(options).check(options.rerank)


def reader_of(options: Any) -> RewardModelUse:
    """Return the role of the reward model under ``--rerank_by``."""
    if options.rerank_by == "score":
        return RewardModelUse("--rerank", "ranking", "set --rerank_by product, minimum or last")
    return RewardModelUse("--rerank", "steps", "set --rerank_by score")


def load_reranker(
    options: Any,
    policy: Policy,
    prompts: Prompts,
    problems: Sequence[Problem],
    longest: int,
    settings: configs.Run,
    status: Callable[[str], None],
) -> tuple["FallingSteps | None", Callable[["TaskEvaluation"], "TaskEvaluation"]]:
    """Load the reward model; return a watcher that ends hopeless answers (None without ``--give_up_after``), and a
    function that reranks the answers of an evaluation. ``longest``: most tokens of a prompt.
    """
    from jaxrl_llm.rollout.evaluate import reranked
    from jaxrl_llm.stages.judges import FallingSteps, load_judge, solution_scores

    method, patience, tokenizer = options.rerank_by, options.give_up_after, policy.tokenizer
    with_model = settings_for(policy.name, settings, configs.Scoring(()), longest, options.max_new_tokens)
    known_prompts = {options.task.label: prompts}
    model = load_judge(with_model, options.rerank, "--rerank", policy.mesh, tokenizer, known_prompts, status)
    recorded = reward_format(options.rerank)
    separator = DEFAULT_SEPARATOR if recorded is None else recorded.separator or DEFAULT_SEPARATOR

    def choose(evaluation: "TaskEvaluation") -> "TaskEvaluation":
        rows = zip(evaluation.problems, evaluation.completions, strict=True)
        items = [(problem, completion) for problem, row in rows for completion in row]
        scores = solution_scores(model, items, method, separator, tokenizer).reshape(evaluation.correct.shape)
        return reranked(evaluation, scores, 1 / (1 + np.exp(-scores)) if method == "score" else scores)

    answered = [problem for problem in problems for _ in range(options.samples)]
    return FallingSteps(model, answered, separator, patience, tokenizer) if patience else None, choose


@dataclasses.dataclass(frozen=True)
class Distance:
    """Estimates of KL(tested || other) of the next token, nats, on tokens that the tested model sampled.

    ``k1``, log p - log q, and ``k3``, q/p - 1 - log(q/p), are both unbiased, since the tokens are sampled from p at the
    temperature at which p and q are taken; k3 is never negative, and varies less where the two are near. ``to``: the
    other's name, as it was given; ``step``: of its run, None for a model. ``task``: label of the task with these
    answers. ``sums``: float64[n, 3] for each completion: its tokens, and the sums over them of k1 and of k3.
    """

    to: str
    step: int | None
    task: str
    sums: np.ndarray

    def metrics(self) -> dict[str, float]:
        """Return ``eval/<task>/kl_k1`` and ``kl_k3``: means over all tokens."""
        tokens, k1, k3 = self.sums.sum(axis=0)
        return {f"eval/{self.task}/kl_k1": float(k1 / tokens), f"eval/{self.task}/kl_k3": float(k3 / tokens)}

    def rows(self) -> list[dict[str, float]]:
        """Return the means of k1 and k3 over the tokens of each completion, for a file."""
        return [{"kl_k1": float(k1 / tokens), "kl_k3": float(k3 / tokens)} for tokens, k1, k3 in self.sums]

    def lines(self) -> list[str]:
        """Return two lines of a table for people."""
        k1, k3 = self.metrics().values()
        step = "" if self.step is None else f", step {self.step}"
        of = f"nats a token to {self.to}{step}"
        return [f"  {'KL (k1)':<16}{k1:8.5f}  {of}", f"  {'KL (k3)':<16}{k3:8.5f}"]


def measure_distance(
    to: str,
    policy: Policy,
    prompts: Any,
    settings: configs.Run,
    options: Any,
    results: Sequence[Any],
    status: Callable[[str], None],
) -> tuple[Distance, ...]:
    """Measure the KL of a policy to the model ``to``, on its fresh answers to each task. Both are read by the learner's
    own forward pass at the sampling temperature: a model is at distance 0 from itself, bit for bit.
    """
    from jaxrl_llm.learner import Sample
    from jaxrl_llm.models.heads import ScalarModel
    from jaxrl_llm.stages.stage import score_samples, scoring_forward

    status(f"loading {to}")
    other, tokenizer = load_model(to, settings.learner.dtype, policy.mesh)
    trained = find_run(to)
    require(not isinstance(other, ScalarModel), f"--kl_to {to} is a reward model: give a language model")
    same_tokens = tokenizer is None or tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    vocab = policy.model.config.vocab_size
    require(
        same_tokens and other.config.vocab_size == vocab,
        f"--kl_to {to} has other tokens than {policy.name}: no KL between the two is defined",
    )
    samples = [
        Sample(np.asarray(prompts[problem], np.int32), completion.tokens, completion.mask)
        for evaluation in results
        for problem, row in zip(evaluation.problems, evaluation.completions, strict=True)
        for completion in row
    ]
    length = max(len(sample.prompt) for sample in samples) + options.max_new_tokens
    positions = other.config.attention.rope.max_positions
    require(length <= positions, f"--kl_to {to} was made for {positions} positions, and {length} are needed")
    shape = policy.mesh, length, options.max_new_tokens, options.temperature
    logps = []
    for model in (policy.model, other):
        forward = scoring_forward(settings.learner, model.config, *shape)
        logps.append(score_samples(forward, model, samples, "logp", status))
    sums = []
    for sample, logp, other_logp in zip(samples, *logps, strict=True):
        log_ratio = (other_logp.astype(np.float64) - logp)[sample.mask]
        sums.append((float(len(log_ratio)), float(-log_ratio.sum()), float((np.expm1(log_ratio) - log_ratio).sum())))
    ends = np.cumsum([len(evaluation.problems) * options.samples for evaluation in results])[:-1]
    step = trained.step if trained else None
    of_tasks = zip(results, np.split(np.asarray(sums), ends), strict=True)
    return tuple(Distance(to, step, evaluation.task, task_sums) for evaluation, task_sums in of_tasks)


def eval_command(arguments: list[str]) -> int:
    """Run ``eval RUN_OR_MODEL [--config NAME] [--field value ...]``; return the exit code."""
    name = first(arguments, __doc__, "eval needs a run or a model: jaxrl-llm eval runs/quickstart")
    pairs = take(arguments, "--pairs", True)
    if pairs is not None:
        from jaxrl_llm.cli.agreement import agreement_command

        return agreement_command(name, pairs, arguments)
    run = find_run(name)
    config = take(arguments, "--config", True)
    to = take(arguments, "--kl_to", True)
    if run is not None and config is None and not isinstance(run.run, configs.Run):
        require(to is None, f"--kl_to {to} needs a task to answer: name a configuration that has one, --config")
        return evaluate_data(name, arguments)
    trained, settings = find_settings(name, config)
    proposed = default_options(settings)
    if to is not None:  # answers are drawn from the policy as it was trained: at its temperature, with nothing cut off
        temperature = configs.resolved(settings).rollout.temperature
        proposed = dataclasses.replace(proposed, temperature=temperature, top_p=1.0)
    out = take(arguments, "--out", True)
    options = parse_flags(EvalOptions, arguments, f"jaxrl-llm eval {name}", HELP, proposed)
    check_options(options, settings, to)
    if out is not None:  # a file that cannot hold the answers is refused before anything is sampled
        require(out.endswith(".jsonl"), f"--out {out} is written as JSON lines: end it in .jsonl")
        check_file(Path(out), "--out")
    # A task that a run only ever tests on has no part that it learned from.
    all_problems = settings.evaluation.task is not None and options.task == settings.evaluation.task
    # A run's tasks have its date; prompts of what has none are templated twice, and midnight may lie between.
    options = dataclasses.replace(options, task=configs.dated(options.task, datetime.date.today().isoformat()))
    policy, results, notes, distances = evaluate_answers(name, trained, settings, options, all_problems, to)
    if out is not None:
        from jaxrl_llm.system.json_lines import append_rows

        with writable(Path(out), "--out"), new_file(Path(out)) as part, open(part, "wb") as file:
            rows = [row for evaluation in results for row in evaluation.rows()]
            kl_columns = [row for distance in distances for row in distance.rows()] or [{}] * len(rows)
            append_rows(file, [row | more for row, more in zip(rows, kl_columns, strict=True)])
    outputs = policy, options, results, distances
    print(evaluation_json(*outputs) if options.json else evaluation_table(*outputs, notes))
    return 0


def default_options(run: configs.Run) -> EvalOptions:
    """Return the options of the run's own evaluations."""
    e, longest, slots = run.evaluation, run.rollout.max_new_tokens, run.rollout.engine.slots or USUAL_SLOTS
    return EvalOptions(e.task or run.task, e.samples, e.temperature, e.top_p, e.limit, longest, slots, run.seed)


def check_options(options: EvalOptions, settings: configs.Run, to: str | None = None) -> None:
    """Refuse wrong options before anything is loaded; ``to``: of ``--kl_to``, whose estimates must not be biased."""
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
    if to is not None:
        reason = "--kl_to needs answers drawn from the model as it is, and"
        require(options.temperature > 0, f"{reason} --temperature is 0: set --temperature 1")
        require(options.top_p >= 1, f"{reason} --top_p is {options.top_p:g}: set --top_p 1")
        find_run(to)


def evaluate_answers(
    name: str, trained: Trained | None, settings: configs.Run, options: EvalOptions, all_problems: bool, to: str | None
) -> tuple[Policy, tuple[Any, ...], list[str], tuple[Distance, ...]]:
    """Evaluate; return (policy, results of each task, notes on the problems, KL to ``to`` on each task, or empty)."""
    from jaxrl_llm.rollout.evaluate import EvaluationReport, EvaluationSet, evaluate
    from jaxrl_llm.telemetry.progress import Progress, Schedule

    with Progress(Schedule(1)) as progress:
        problems, notes = evaluation_problems(options, settings, all_problems, progress.status)
        require(
            options.rerank is None or problems[0].verifier != "none",
            f"--rerank has nothing to measure on task {options.task.label}, which verifies no answers: give a task "
            "with answers and a verifier",
        )
        model = open_answerer(name, trained, settings, options.task, problems, options, progress.status, True)
        with model as (policy, prompts, answerer):
            stops = policy.model.config.tokens.eos
            sampling = Sampling(options.temperature, 0, options.top_p, options.max_new_tokens, stops)
            limits = configs.limits_of(configs.parts_of_task(options.task), options.max_new_tokens)
            limits = {label: min(most, options.max_new_tokens) for label, most in limits.items()}
            evaluation_set = EvaluationSet(prompts, problems, options.samples, options.seed, limits)
            longest = answerer.engine.max_length - options.max_new_tokens
            watch, choose = None, None
            if options.rerank is not None:
                watch, choose = load_reranker(options, policy, prompts, problems, longest, settings, progress.status)
                for line in reader_of(options).untold(options.rerank):
                    progress.note(line)
            results = evaluate(answerer, evaluation_set, sampling, progress.status, watch)
            EvaluationReport({}, results).check()
            if choose is not None:
                results = tuple(map(choose, results))
            distances: tuple[Distance, ...] = ()
            if to is not None:
                distances = measure_distance(to, policy, prompts, settings, options, results, progress.status)
    return policy, results, notes, distances


def evaluation_problems(
    options: EvalOptions, settings: configs.Run, all_problems: bool, status: Callable[[str], None]
) -> tuple[list[Any], list[str]]:
    """Return the problems to test on, task by task, and a note if the run may have learned from them."""
    from jaxrl_llm.stages.stage import read_parts

    loaded = read_parts(configs.parts_of_task(options.task), functools.partial(configs.verifies, settings), status)
    held_out = any(parts.held_out for parts in loaded)
    chosen = [parts.held_out if held_out and not all_problems else parts.train for parts in loaded]
    warning = "no problems are held out (task.holdout is 0): these may be the ones that a run learned from"
    problems = [problem for parts in chosen for problem in parts[: options.limit or None]]
    return problems, [] if all_problems or held_out else [warning]


def evaluation_json(
    policy: Policy, options: EvalOptions, results: tuple[Any, ...], distances: tuple[Distance, ...]
) -> str:
    """Return one JSON object: model, sampling, and ``eval/<task>/...`` by their names in metrics.jsonl."""
    names = ["samples", "temperature", "top_p"]
    if options.rerank is not None:
        names += ["rerank", "rerank_by", "give_up_after"]
    about = {"model": policy.name, "step": policy.step} | {name: getattr(options, name) for name in names}
    if distances:
        about |= {"kl_to": distances[0].to, "kl_to_step": distances[0].step}
    from jaxrl_llm.rollout.evaluate import EvaluationReport

    kl_metrics = {name: value for distance in distances for name, value in distance.metrics().items()}
    return json.dumps(jsonable(about | EvaluationReport({}, results).metrics() | kl_metrics))


def evaluation_table(
    policy: Policy, options: EvalOptions, results: tuple[Any, ...], distances: tuple[Distance, ...], notes: list[str]
) -> str:
    """Return a small table for each task, for people, and the average over several."""
    from jaxrl_llm.rollout.evaluate import average_tasks

    step = "" if policy.step is None else f", step {policy.step}"
    tables = [task_lines(f"{policy.name}{step}", options, task_result) for task_result in results]
    for table, distance in zip(tables, distances, strict=bool(distances)):
        table += distance.lines()
    lines = [tables[0][0], *notes, *tables[0][1:], *(line for table in tables[1:] for line in table)]
    if len(results) > 1:
        means = average_tasks(results)
        shares = {name.rpartition("/")[2]: mean for name, mean in means.items() if "@" in name}
        averages = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        lines += [f"on average over {len(results)} tasks: {averages}"] if averages else []
    return "\n".join(lines)


def task_lines(name: str, options: EvalOptions, evaluation: Any) -> list[str]:
    """Return the results of one task as lines; the error is the standard error over problems."""
    scores = (
        evaluation.rewards if evaluation.correct is None else np.where(evaluation.failed, np.nan, evaluation.correct)
    )
    is_scored = ~np.isnan(scores)
    # A problem of which no answer could be scored says nothing.
    rate = np.array([row[scored].mean() for row, scored in zip(scores, is_scored, strict=True) if scored.any()])
    error = float(rate.std(ddof=1) / len(rate) ** 0.5) if len(rate) > 1 else 0.0
    sampling = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}, top_p {options.top_p:g}"
    lines = [f"{name} on {evaluation.task}: {len(evaluation.problems)} problems, {options.samples} each, {sampling}"]
    for metric, value in evaluation.metrics().items():
        short = metric.removeprefix(f"eval/{evaluation.task}/")
        if short == "pass@1":
            lines.append(f"  {f'avg@{options.samples}':<16}{100 * value:6.1f} %  +- {100 * error:.1f}")
        elif short == "reward":
            lines.append(f"  {'reward':<16}{value:8.3f}  +- {error:.3f}")
        elif "@" in short or short in ("given_up", "refusals"):
            lines.append(f"  {short.replace('_', ' '):<16}{100 * value:6.1f} %")
        elif short == "mean_length":
            lines.append(f"  {'length':<16}{value:6.1f} tokens")
        if short in ("pass@1", "reward") and not is_scored.all():
            reason = f": {evaluation.failure}" if evaluation.failure else ""
            lines.append(f"  {'not scored':<16}{np.sum(~is_scored):6d} of {is_scored.size} answers{reason}")
    return lines


def evaluate_data(name: str, arguments: list[str]) -> int:
    """Evaluate a run on its held-out data and on its task; return the exit code."""
    trained: Any = find_run(name, tests=True)
    run: Any = trained.run
    e, a = run.evaluation, run.answering
    proposed = EvalDataOptions(e.samples, e.temperature, e.top_p, e.limit, a.max_new_tokens, a.slots)
    options = parse_flags(
        EvalDataOptions, arguments, f"jaxrl-llm eval {name}", "Test a run on its held-out data.", proposed
    )
    e = dataclasses.replace(
        e, samples=options.samples, temperature=options.temperature, top_p=options.top_p, limit=options.limit
    )
    a = dataclasses.replace(a, max_new_tokens=options.max_new_tokens, slots=options.slots)
    run = dataclasses.replace(run, evaluation=e, answering=a, mesh=options.mesh)
    configs.validate(run)
    metrics = evaluate_stage(dataclasses.replace(trained, run=run))
    if options.json:
        print(json.dumps(jsonable({"model": name, "step": trained.step} | metrics)))
        return 0
    print(f"{name}, step {trained.step}:")
    for metric, value in metrics.items():
        text = value if isinstance(value, str) else f"{value:10.4f}"
        print(f"  {metric.removeprefix('eval/').removeprefix('event/'):<24}{text}")
    return 0


def evaluate_stage(trained: Trained) -> dict[str, Any]:
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
        model, tokenizer, _ = load_base(trained, mesh if needs_base(run, directory) else mesh.abstract_mesh)
        stage = kind.prepare(run, model, tokenizer, mesh, resources, progress, ALONE)
        del model
        progress.status(f"loading {directory}")
        evaluation = stage.evaluate(load_trained(trained, mesh)[0])
    if evaluation is not None:
        evaluation.check()
    else:
        raise InputError(f"{directory} holds nothing out to test on, and has no task: give one with --config NAME")
    return evaluation.metrics()
