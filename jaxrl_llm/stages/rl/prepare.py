"""Reinforcement learning as a kind of training: reading its data, building its parts, checking the run."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.environments import Factory
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.episodes import Episodes, episodes_of
from jaxrl_llm.rollout.evaluate import Evaluated, Questions, evaluate
from jaxrl_llm.rollout.groups import GroupSource
from jaxrl_llm.rollout.respond import Answerer
from jaxrl_llm.sharding import repeated_heads, rollout_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.rl.ingredient import Around
from jaxrl_llm.stages.rl.ingredients import ingredients_of, moved_by_rules, rules_for
from jaxrl_llm.stages.rl.judge_model import asked_models
from jaxrl_llm.stages.rl.problems import (
    Problems,
    about,
    problems_of,
    prompts_of,
    read_problems,
    same_groups,
    streams_of,
)
from jaxrl_llm.stages.rl.programs import answering, groups, learning_of, outline, sampler_of, sampling_of
from jaxrl_llm.stages.rl.reinforcement import Reinforcement
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.progress import Progress

__all__ = ["check_ahead", "groups", "outline", "prepare", "resources"]


@contextlib.contextmanager
def resources(run: configs.Run, peers: Peers, directory: Path) -> Generator[Scorer]:
    """Open the run's rewards with their workers, and begin to generate problems while the weights load."""
    scoring = run.scoring
    scorer = Scorer(
        configs.rewards(run), scoring.workers, scoring.timeout_s, scoring.on_error, peers, directory,
        configs.watched(run), configs.asked(run),
    )  # fmt: skip
    sources = [task.source for task in configs.tasks_in(run.task, run.evaluation.task)]
    with scorer, tasks.begun(sources):
        yield scorer


def prepare(
    run: configs.Run, model: Any, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Reinforcement:
    """Read the task and build sampling, scoring, learning and evaluation; nothing large is computed yet.

    Raises:
      InputError: data, rewards or prompts that the run cannot use.
    """
    check_tokenizer(tokenizer, run.model)
    configs.validate_on_model(run, model.config.attention.rope.max_positions)
    read = read_problems(run, tokenizer, progress.status)
    prints = problems_of(run, read)
    peers.check_same(f"problems of {run.task.label}", " ".join(found["order"] for found in prints.values()))
    prompts = prompts_of(run, run.task, read.all_train, tokenizer)
    test_prompts = prompts_of(run, read.tested, read.asked, tokenizer)
    scorer.tokenizer = tokenizer
    progress.status("calling each reward once")
    sandboxed = rewarded(scorer, read, prompts, configs.verifies(run), progress.note)
    stops, where = model.config.tokens.eos, rollout_mesh(run.mesh)
    training, forwards = learning_of(run, model, mesh, tokenizer)
    forward, names = forwards["policy"], [objective.name for one in training for objective in one.objectives]
    answers = answering(run, stops)
    around = Around(
        tokenizer, prompts, test_prompts, stops, forwards, names, scorer, where, answers, peers, progress,
    )  # fmt: skip
    ingredients = [one.prepared(around) for one in ingredients_of(run)]
    if asked_models(run):
        scorer.dry_run(read.all_train[0], tokenizer, judges=True)
    engine, transfer = sampling_of(run, model, forward.compute.dtype, mesh, where)
    played = (prompts, run.recipe.branch, bool(run.recipe.observation_coef)), (test_prompts, None, False)
    episodes = [episodes_of(one, run.rollout, stops, peers, *others) for one, *others in played]
    of_run = run.rollout.group, run.seed, run.recipe.shaping
    source = GroupSource(tokenizer, prompts, streams_of(run, read.train), scorer, *of_run, episodes[0], stops)
    limits = configs.limits_of(configs.parts_of_task(read.tested), run.rollout.max_new_tokens)

    def test(weights: Any) -> tuple[Evaluated, ...]:
        if not read.asked:
            return ()
        asked = Questions(test_prompts, read.asked, run.evaluation.samples, run.seed, limits)
        return evaluate(Answerer(engine, weights, tokenizer, scorer, episodes[1]), asked, answers, progress.status)

    repeated = repeated_heads(model.config.attention.kv_heads, where.shape["tensor"])
    told = [line for one in ingredients for line in one.notes] + rehearsed(episodes, read)
    return Reinforcement(
        training=training,
        forward=forward,
        label=run.task.label,
        problems=prints | {name: print_ for one in ingredients for name, print_ in one.fingerprints.items()},
        reference=configs.keeps_reference(run),
        coefficients=moved_by_rules(run),
        rules=rules_for(run),
        notes=[*read.notes, *told, *sandboxed, *about(run, read, prompts, stops), *repeated],
        ahead=run.rollout.collect.staleness > 0,
        apart=run.mesh.rollout > 0 or mesh.size == 1,
        measures_kl=run.recipe.of_kl is not None,
        run=run,
        sampler=sampler_of(run, engine, source, stops, progress.status),
        transfer=transfer,
        evaluation=test,
        ingredients=ingredients,
    )


def rewarded(
    scorer: Scorer, read: Problems, prompts: Prompts, verifies: bool, note: Callable[[str], None] | None = None
) -> list[str]:
    """Check that the rewards can judge all problems, and call each once for every task; return notes. ``note`` gets
    what is found later, see ``Scorer.check``.
    """
    notes = scorer.check([*read.all_train, *read.held_out], verifies, note)
    for problems in read.train:
        task = prompts.task(problems[0].task)
        tools = [*Factory(None, task.tools).functions] if task.plays else None
        scorer.dry_run(problems[0], prompts.tokenizer, tools)
    return notes


def rehearsed(episodes: Sequence[Episodes | None], read: Problems) -> list[str]:
    """Begin a first episode of training and of evaluation, so that one that cannot begin is refused; return notes."""
    notes: list[str] = []
    for one, problems in zip(episodes, (read.all_train, read.asked), strict=True):
        notes += [] if one is None else one.rehearse(problems)
    return list(dict.fromkeys(notes))


def check_ahead(
    before: configs.Run, run: configs.Run, model: Any, tokenizer: Any, status: Callable[[str], None]
) -> None:
    """Refuse a phase that ``prepare`` would refuse later, before the phases ahead of it are trained.

    Its problems are read, and its rewards called once.

    Raises:
      InputError: as ``prepare``.
    """
    configs.validate_on_model(run, model.attention.rope.max_positions)
    if same_groups(before, run) and before.evaluation.task == run.evaluation.task:
        return
    read = read_problems(run, tokenizer, status)
    # Refuses those that are too long.
    prompts = prompts_of(run, run.task, read.all_train, tokenizer)
    prompts_of(run, read.tested, read.asked, tokenizer)
    scoring = run.scoring
    with Scorer(configs.rewards(run), scoring.workers, scoring.timeout_s, watched=configs.watched(run)) as scorer:
        rewarded(scorer, read, prompts, configs.verifies(run))
