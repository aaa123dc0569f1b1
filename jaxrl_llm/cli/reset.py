"""``jaxrl-llm reset``: have a run reset its reference, by hand."""

from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm import snapshots
from jaxrl_llm.cli.flags import first, take
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import writable
from jaxrl_llm.requests import ask

USAGE = """usage: jaxrl-llm reset RUN [--with_optimiser]

Makes the policy of a run its reference; with --with_optimiser the optimiser begins anew too. A run that is training
does so after the step that it is in, another one after its next step, once it is gone on with. It is an event of that
step, whose models are kept for good as RUN@STEP."""


def reset(arguments: list[str]) -> int:
    """``reset RUN [--with_optimiser]``; returns the exit code."""
    name = first(arguments, USAGE, "reset needs a run: jaxrl-llm reset runs/quickstart")
    if name is None:
        return 0
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    with_optimiser = bool(take(arguments, "--with-optimiser", False))
    if arguments:
        raise InputError(f"reset does not know {arguments[0]}: jaxrl-llm reset RUN [--with_optimiser]")
    directory = Path(name)
    path = directory / "config.json"
    configs.require(configs.is_run(path), f"{name} is no run: give the folder that holds its config.json")
    check_reference(name, settings_of(path), phase_of(directory))
    with writable(directory, "RUN"):
        ask(directory, with_optimiser)
    also = " and its optimiser" if with_optimiser else ""
    print(f"{name} resets its reference{also} after the step that it is in, or after its next one")
    return 0


def settings_of(path: Path) -> Any:
    """Those of a config.json; classes of its own are looked for only where the method, or a phase, is made of some."""
    run = configs.read(path, own=False).run
    phased = bool(configs.rules_of_run(run).phases)
    decides = run if phased else getattr(run, "recipe", None)
    return run if configs.is_whole(decides) else configs.read(path).run


def phase_of(directory: Path) -> int:
    """The phase that a run is in, as far as its checkpoints and snapshots tell: each phase begins with one."""
    places = snapshots.kept(directory)
    return snapshots.phase_of(places[max(places)]) if places else 0


def check_reference(name: str, run: Any, number: int) -> None:
    """Refuse a run that keeps no reference in the phase of this number.

    Raises:
      InputError: names the run and the remedy.
    """
    configs.require(
        isinstance(run, configs.Run),
        f"{name} is a {type(run).__name__} run, which keeps no reference that could be reset",
    )
    phase = configs.phases_of(run)[number].name
    where = f" in phase {phase}" if phase else ""
    run = configs.in_phase(run, number)
    configs.require(
        run.recipe.algorithm.needs_reference or run.output.monitor_kl,
        f"{name} keeps no reference{where}, since its recipe.algorithm.kl_coef is {run.recipe.algorithm.kl_coef:g}: "
        "begin a run with a KL, or with --monitor_kl, from its weights: jaxrl-llm train CONFIG --from " + name,
    )
