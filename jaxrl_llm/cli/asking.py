"""What ``eval`` and ``collect`` share: a model that answers a task's problems, and what verifies its answers."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import take
from jaxrl_llm.cli.policy import Policy, load_policy
from jaxrl_llm.errors import InputError
from jaxrl_llm.signals import farewell
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.trained import Trained, find_run
from jaxrl_llm.types import Problem


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where problems are asked.

    Attributes:
      policy: the model as it was loaded.
      prompts: of the task, as token ids.
      engine: samples.
      model: weights to sample from.
      scorer: verifies, or scores.
    """

    policy: Policy
    prompts: Any
    engine: Any
    model: Any
    scorer: Any


def find_settings(name: str, arguments: list[str]) -> tuple[Trained | None, configs.Run]:
    """The run that is named, None for a model; and the settings whose task is asked: those of ``--config``, which is
    removed from the arguments, else the run's own, else quickstart's.

    Raises:
      InputError: neither is there, or the run has no task.
    """
    chosen = take(arguments, "--config", True)
    trained = find_run(name, tests=chosen is None)
    settings = trained.run if trained and chosen is None else configs.find_config(chosen or "quickstart").located
    if not isinstance(settings, configs.Run):
        raise InputError(
            f"{chosen or name} is a {type(settings).__name__} run, which asks no problems: name a configuration that "
            "does with --config"
        )
    return trained, settings


@contextlib.contextmanager
def asking(
    name: str,
    trained: Trained | None,
    settings: configs.Run,
    task: Task | configs.Mixture,
    problems: Sequence[Problem],
    options: Any,
    status: Callable[[str], None],
    refusals: bool = False,
) -> Generator[Desk]:
    """The model, loaded, with what it takes to ask it these problems.

    Args:
      name: of the run or model.
      trained: the run.
      settings: give the rewards, the dtype and the engine's chunk.
      task: the problems', or several; their templates write the prompts.
      problems: at least one.
      options: ``max_new_tokens`` and ``slots``.
      status: hears what is going on.
      refusals: also tell which answers refuse, where the settings say by what.

    Raises:
      InputError: a model that cannot be loaded, that has no tokenizer or no words, or that is too short.
    """
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.engine.weight_transfer import for_sampling
    from jaxrl_llm.models.decoder import cast
    from jaxrl_llm.rewards import Scorer
    from jaxrl_llm.rollout import Engine
    from jaxrl_llm.sharding import platform_of
    from jaxrl_llm.stages.judges import judges_of
    from jaxrl_llm.tasks import Prompts

    status(f"loading {name}")
    policy = load_policy(name, trained, writes=True)
    check_tokenizer(policy.tokenizer, name)
    rewards = judges(settings, problems)
    watched = configs.refusals(settings) if refusals else {}
    with (
        jax.set_mesh(policy.mesh),
        Scorer(rewards, settings.scoring.workers, settings.scoring.timeout_s, watched=watched) as scorer,
        farewell(lambda *reason: scorer.close()),
    ):
        prompts = Prompts(configs.tasks_in(task), policy.tokenizer)
        length = max_length(prompts.longest(problems), options.max_new_tokens, policy)
        scoring = configs.Scoring(rewards, refusals=settings.scoring.refusals if refusals else None)
        asked = as_asked(name, settings, scoring, length - options.max_new_tokens, options.max_new_tokens)
        labels = [one.label for one in prompts.tasks]
        scorer.models = judges_of(asked, policy.mesh, policy.tokenizer, dict.fromkeys(labels, prompts), status)
        dtype = jnp.dtype(settings.learner.compute_dtype)
        platform = platform_of(policy.mesh)
        model = jax.jit(lambda m: for_sampling(cast(m, dtype), platform))(policy.model)
        engine = Engine(model, options.slots, length, settings.rollout.chunk, policy.mesh)
        yield Desk(policy, prompts, engine, model, scorer)


def judges(settings: configs.Run, problems: Sequence[Problem]) -> tuple[Any, ...]:
    """The verifier alone; where some answers are not verified, all rewards of the configuration."""
    from jaxrl_llm.rewards import Accuracy

    return (Accuracy(),) if all(problem.verifier != "none" for problem in problems) else configs.rewards(settings)


def as_asked(
    name: str, settings: configs.Run, scoring: configs.Scoring, prompt_tokens: int, new_tokens: int
) -> configs.Run:
    """The settings with what this model is asked, for judges on the devices."""
    rollout = dataclasses.replace(settings.rollout, max_prompt_tokens=prompt_tokens, max_new_tokens=new_tokens)
    evaluation = dataclasses.replace(settings.evaluation, judge=None)
    return dataclasses.replace(settings, model=name, rollout=rollout, scoring=scoring, evaluation=evaluation)


def max_length(longest: int, max_new_tokens: int, policy: Policy) -> int:
    """The longest prompt and a completion, in tokens.

    Raises:
      InputError: it is longer than what the model was made for.
    """
    length = longest + max_new_tokens
    positions = policy.model.config.attention.max_positions
    configs.require(
        length <= positions,
        f"--max_new_tokens {max_new_tokens} after a prompt of {longest} tokens need {length} positions, and "
        f"the model was made for {positions}: lower it by {length - positions}",
    )
    return length
