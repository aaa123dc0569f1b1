"""usage: jaxrl-llm train CONFIG [--recipe NAME] [--fresh] [--from RUN[@STEP] [--carry]] [--guard KIND] [--monitor_kl]
                       [--quiet] [--json] [--trust] [--field value ...]

CONFIG is a name (jaxrl-llm list configs), a Python file that sets config = Run(...), or the directory of a run to
resume; the command that started a run resumes it, too.

  --recipe NAME       another method: grpo, dapo, gspo, ... (jaxrl-llm list recipes)
  --sizes CONFIG      the method at the size of another configuration: model, task, rollout, devices, ... from there
  --fresh             start over in a new folder
  --from RUN[@STEP]   start a new run from another's weights, and its optimiser if that has the same settings
  --carry             with --from: also from its place in the data, its curriculum and stored successes
  --guard KIND        stop once that trouble is found (or roll back: --rules.on_guard rollback)
  --monitor_kl        measure the distance of the policy from its beginning where the recipe has no KL
  --quiet             no progress: warnings, findings and errors on stderr, the result in a few lines
  --json              each step's metrics on stdout, one JSON object a line, all else on stderr; with --quiet the last
                      line is the result
  --trust             execute the code that a run brings which others, or other machines, made
  --distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I
                      on several hosts: docs/hosts.md
  --help [all|PART]   the usual settings; all of them; those of a part, such as rollout

A name of TRL's or verl's is refused in one line with ours: docs/from_trl.md, docs/from_verl.md.
"""

import contextlib
import dataclasses
import json
import sys
import traceback
from collections.abc import Generator
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, parse_flags, take
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.runs import parse_start
from jaxrl_llm.sharding.distributed import Disagreement, Distributed, Peers, join
from jaxrl_llm.system.signals import let_go, on_exit
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.trainer.launch import launch


def train_command(arguments: list[str]) -> int:
    """Run ``train CONFIG [--fresh] [--from RUN[@STEP]] [--quiet] [--json] [--field V ...]``; return the exit code."""
    if {"-h", "--help"} & set(arguments[:1]):
        arguments.insert(0, "quickstart")  # the settings are shown with its values
    example = "jaxrl-llm train quickstart (jaxrl-llm list configs names the others)"
    name = first(arguments, None, f"train needs a configuration: {example}")
    loaded = configs.find_config(name)
    settings = loaded.run
    fresh = take(arguments, "--fresh", False)
    recipe = take(arguments, "--recipe", True)
    start = take(arguments, "--from", True)
    carry = take(arguments, "--carry", False)
    require(start is not None or not carry, "--carry continues another run: name it with --from RUN")
    quiet = take(arguments, "--quiet", False)
    as_json = take(arguments, "--json", False)
    distributed = take_distributed(arguments)
    if take(arguments, "--monitor_kl", False):
        arguments.append("--output.monitor_kl")
    if sizes := take(arguments, "--sizes", True):
        settings = with_sizes_of(settings, sizes)
    while guard := take(arguments, "--guard", True):
        unwatched = f"--guard watches reinforcement learning, and this is a {type(settings).__name__} run: leave it out"
        require(isinstance(settings, configs.Run), unwatched)
        guards = tuple(dict.fromkeys((*settings.rules.guards, guard)))
        settings = dataclasses.replace(settings, rules=dataclasses.replace(settings.rules, guards=guards))
    if recipe:
        settings = configs.with_recipe(settings, recipe)
    settings = parse_flags(type(settings), arguments, f"jaxrl-llm train {name}", str(__doc__), settings)
    settings = configs.resolved(settings)
    configs.validate(settings)
    loaded = dataclasses.replace(loaded, run=settings)
    first_weights = None if start is None else parse_start(start, carry)
    with linked_processes(distributed) as peers, row_output(quiet, as_json) as voice:
        return launch(loaded, fresh, first_weights, peers, voice=voice)


def with_sizes_of(settings: configs.Configuration, name: str) -> configs.Configuration:
    """Return the settings at the size of the configuration of this name: all but method, seed and rules is from there,
    so that a large configuration can be tried anywhere; recipe, minibatches and other settings of the learner stay.
    """
    _, source = configs.load_config(name)
    for kind in (type(settings), type(source)):
        require(
            kind is configs.Run,
            f"--sizes takes one reinforcement learning run to another's size, not a {kind.__name__}",
        )
    parts = ("model", "task", "scoring", "rollout", "mesh", "evaluation", "output", "steps")
    learner = {part: getattr(source.learner, part) for part in ("compute", "optimiser", "lora")}
    resized = dataclasses.replace(settings.learner, **learner)
    return dataclasses.replace(settings, learner=resized, **{part: getattr(source, part) for part in parts})


@contextlib.contextmanager
def row_output(quiet: bool, as_json: bool) -> Generator[Verbosity]:
    """Yield the verbosity of a run; if its rows go to stdout, all other output of the block goes to stderr. A row is
    one line of JSON. A closed reader of the rows is reported, and the run continues.
    """
    out = sys.stdout

    def show(row: dict[str, Any]) -> None:
        try:
            print(json.dumps(row), file=out, flush=True)
        except BrokenPipeError:
            let_go(out.fileno())
            print("jaxrl-llm: nobody reads stdout any more; the rows are in metrics.jsonl", file=sys.stderr)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield Verbosity(quiet, show if as_json else None)


def take_distributed(arguments: list[str]) -> Distributed:
    """Remove ``--distributed.*``; they depend on the place of a run, not its settings, so no config.json holds them."""
    names = ("coordinator", "processes", "process", "heartbeat_s")
    options: dict[str, Any] = {}
    for name in names:
        value = take(arguments, f"--distributed.{name}", True)
        if value is None:
            continue
        number = name != "coordinator"
        require(not number or value.isdecimal(), f"--distributed.{name} must be a number, got {value!r}")
        options[name] = int(value) if number else value
    flags = [f"--distributed.{name}" for name in names]
    for argument in arguments:
        if argument.startswith("--distributed"):
            hint = did_you_mean(argument, flags, f"there are {', '.join(flags)}")
            raise InputError(f"no option {argument}: {hint}")
    enough = options.get("processes", 1) > 0 and options.get("heartbeat_s", 10) >= 10
    require(enough, "--distributed.processes must be at least 1, and --distributed.heartbeat_s at least 10")
    return Distributed(**options)


@contextlib.contextmanager
def linked_processes(distributed: Distributed) -> Generator[Peers]:
    """Yield the link to the other processes; an early end of the block on one process ends all, with one line each."""
    peers = join(distributed)
    if peers.shutdown is None:
        yield peers
        return
    try:
        with on_exit(peers.shutdown.quit):
            yield peers
    except BaseException as error:  # noqa: BLE001  the other processes hear of whatever ends this one
        from jaxrl_llm import cli

        shutdown = peers.shutdown
        reason = str(error) if isinstance(error, InputError) else cli.explain(error, "train")
        if reason is not None:
            shutdown.stop(getattr(error, "code", cli.WRONG_INPUT), reason)
        if isinstance(error, Disagreement):
            shutdown.stop(1, str(error))
        # Texts in errors of collectives and of the coordination service after the loss of a process.
        marks = ("Gloo", "CoordinationService", "coordination service", "Connection reset", "heartbeat")
        if any(mark in str(error) for mark in marks):
            shutdown.lost(str(error))
        traceback.print_exception(error, file=sys.stderr)
        shutdown.stop(1, f"{type(error).__name__}: {error}"[:500])
    peers.close()
