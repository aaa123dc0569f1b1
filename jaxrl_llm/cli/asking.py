"""Loading of a model by name, and sampling of verified answers to a task's problems."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.runs import Trained, find_run, load_trained, mesh_here, on_this_machine
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.system.signals import on_exit
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.rollout.generation import Answerer


@dataclasses.dataclass(frozen=True)
class Policy:
    """A loaded model, laid out on ``mesh`` over all devices, with its tokenizer or None. ``name``: as it was given.
    ``run`` and ``step``: of its checkpoint; None for a model.
    """

    name: str
    run: configs.Configuration | None
    step: int | None
    model: Any
    tokenizer: Any
    mesh: Any


def load_policy(name: str, trained: Trained | None, shape: MeshShape = MeshShape()) -> Policy:
    """Load a run's policy as it samples, or the model of this name, with float32 weights."""
    from jaxrl_llm.models.heads import ScalarModel
    from jaxrl_llm.models.pretrained import load_either

    mesh = mesh_here(shape)
    if trained is None:
        model, tokenizer = load_either(name, "float32", mesh)
    else:
        model, tokenizer = load_trained(trained, mesh, merged=False)
    scores = isinstance(model, ScalarModel)
    require(not scores, f"{name} is a reward model, which scores text and writes none: give a language model")
    run, step = (None, None) if trained is None else (trained.run, trained.step)
    return Policy(name, run, step, model, tokenizer, mesh)


def check_tools(name: str, trained: Trained) -> None:
    """Refuse to call tools that a run brings, unless this user made it here."""
    tools = configs.tools_of_others(configs.wording(trained.run), trained.directory.parents[1] / "config.json")
    calls = f"{name} calls tools of its own ({', '.join(tools)}), and was not made by you on this machine"
    require(not tools, f"{calls}: read them, and name those that may be called with --tools {' '.join(tools)}")


def find_settings(name: str, config: str | None) -> tuple[Trained | None, configs.Run]:
    """Return the run of this name (None: a model), and settings with a task: ``config``'s, its own or quickstart's."""
    trained = find_run(name, tests=config is None)
    if trained and config is None:
        settings = configs.with_lost(trained.run, configs.split_step(name)[0] / "config.json")
    else:
        settings = on_this_machine(configs.find_config(config or "quickstart").located)
    if not isinstance(settings, configs.Run):
        kind = f"{config or name} is a {type(settings).__name__} run, which has no problems to ask"
        raise InputError(f"{kind}: name a configuration that has some with --config")
    return trained, settings


@contextlib.contextmanager
def open_answerer(
    name: str,
    trained: Trained | None,
    settings: configs.Run,
    task: Task | configs.Mixture,
    problems: Sequence[Problem],
    options: Any,
    status: Callable[[str], None],
    refusals: bool = False,
) -> Generator[tuple[Policy, Any, "Answerer"]]:
    """Yield the loaded model, the task's prompts as token ids, and an answerer of these problems, at least one.
    ``name``, ``trained``: of the run or model. ``settings``: give the rewards, the dtype and the engine's chunk.
    ``task``: its templates write the prompts. ``options``: ``max_new_tokens``, ``slots`` and ``mesh``. ``status``:
    called with the current activity. ``refusals``: also detect answers that refuse, if the settings define how.
    """
    import jax

    from jaxrl_llm.engine.engine import backend_for
    from jaxrl_llm.rewards import Accuracy, Scorer
    from jaxrl_llm.rollout.episodes import episodes_of
    from jaxrl_llm.rollout.generation import Answerer
    from jaxrl_llm.stages.judges import load_judges
    from jaxrl_llm.stages.stage import check_positions
    from jaxrl_llm.tasks import Prompts

    status(f"loading {name}")
    policy = load_policy(name, trained, options.mesh)
    check_tokenizer(policy.tokenizer, name)
    unverified = any(problem.verifier == "none" for problem in problems)
    rewards: tuple = configs.rewards(settings) if unverified else (Accuracy(),)
    watched = configs.refusals(settings) if refusals else {}
    with (
        jax.set_mesh(policy.mesh),
        Scorer(rewards, settings.scoring.workers, settings.scoring.timeout_s, watched=watched) as scorer,
        on_exit(lambda *reason: scorer.close()),
    ):
        scorer.check(problems)
        prompts = Prompts(configs.tasks_in(task), policy.tokenizer)
        longest = prompts.longest(problems)
        rollout = dataclasses.replace(settings.rollout, max_new_tokens=options.max_new_tokens)
        episodes = episodes_of(prompts, rollout, policy.model.config.tokens.eos)  # say more than the rows
        longest = longest if episodes is None else max(longest, settings.rollout.max_prompt_tokens)
        length = longest + options.max_new_tokens
        field = f"--max_new_tokens {options.max_new_tokens} after a prompt of {longest} tokens"
        check_positions(length, policy.model.config, field)
        scoring = configs.Scoring(rewards, refusals=settings.scoring.refusals if refusals else None)
        with_model = settings_for(name, settings, scoring, longest, options.max_new_tokens)
        by_task = {part.label: prompts for part in prompts.tasks}
        scorer.models = load_judges(with_model, policy.mesh, policy.tokenizer, by_task, status)
        dtype = jax.numpy.dtype(settings.learner.compute.dtype)
        sizes: dict[str, Any] = {"slots": options.slots, "max_length": length, "chunk": settings.rollout.engine.chunk}
        engine, prepared = backend_for(policy.model, dtype, policy.mesh, policy.mesh, **sizes)
        yield policy, prompts, Answerer(engine, prepared(policy.model), policy.tokenizer, scorer, episodes)


def settings_for(
    name: str, settings: configs.Run, scoring: configs.Scoring, prompt_tokens: int, new_tokens: int
) -> configs.Run:
    """Return the settings with this model and its lengths, for judges on the devices."""
    rollout = dataclasses.replace(settings.rollout, max_prompt_tokens=prompt_tokens, max_new_tokens=new_tokens)
    evaluation = dataclasses.replace(settings.evaluation, judge=None)
    return dataclasses.replace(settings, model=name, rollout=rollout, scoring=scoring, evaluation=evaluation)
