"""usage: jaxrl-llm plan CONFIG --topology NAME [--slices N] [--mean_tokens N] [--search] [--quick] [--largest]
                      [--loops] [--phase N] [--price_per_device_hour X] [--json FILE] [--plot FILE] [--dump DIR]
                      [--recipe NAME] [--field value ...]

NAME is a TPU slice (v5e:4x4, v5p:8x8x4, v6e:16x16) or a number of GPUs (h100:64; hosts x devices of each: h100:2x4).
--slices N         so many such slices
--mean_tokens N    completions (or rows of data) have N tokens on average (times only; memory is that of the longest)
--search           try meshes and microbatches; compile the most promising and print the best
--quick            by formula, nothing is compiled
--largest          also how many microbatch_rows fit, which compiles the update once more
--loops            also what the compiled programs move in memory: each loop's bytes, copies and transfers
--phase N          as the run is in its phase N, counted from 1, where it has several
--price_per_device_hour X
                   also the cost of the run, in the currency of X
--json FILE        all numbers, in bytes and seconds
--plot FILE        a picture of the memory (.svg, .png or .pdf; needs matplotlib)
--dump DIR         the text of each compiled program (update.txt, decode.txt, ...)
jaxrl-llm train CONFIG --help all lists the fields.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, parse_flags, status, take
from jaxrl_llm.errors import require
from jaxrl_llm.sharding.mesh import all_devices
from jaxrl_llm.system.paths import check_file, writable

PRICE = "--price_per_device_hour"


def plan_command(arguments: list[str]) -> int:
    """Run ``plan CONFIG --topology NAME ...``; return the exit code."""
    example = "jaxrl-llm plan quickstart --topology v5e:2x2 (jaxrl-llm list configs names the others)"
    config_name = first(arguments, __doc__, f"plan needs a configuration: {example}", True)
    from jaxrl_llm.plan.machines import (
        NO_COMPILER,
        compiles_for_gpus,
        describe_devices,
        parse_topology,
        prepare_compilers,
    )

    prepare_compilers()
    choices = plan_options(arguments)
    run = plan_settings(config_name, arguments, choices["--slices"])
    from jaxrl_llm.plan.programs import find_model_config

    machine = parse_topology(choices["--topology"], choices["--slices"])
    quick = choices["--quick"]
    compilable = machine.chip.platform != "gpu" or (not quick and compiles_for_gpus())
    devices = describe_devices(machine) if compilable else None
    configs.validate(run)
    run = select_phase(run, choices["--phase"])
    configs.validate_on_processes(run, machine.hosts)
    all_devices()  # refuses settings of JAX with which the programs would be others
    config, source = find_model_config(run.model)
    from jaxrl_llm.plan import planning, tables

    mean = choices["--mean_tokens"]
    if choices["--search"]:
        plans = planning.best_plans(run, config, machine, devices, mean, quick, status)
        lines, source = tables.plans_table(plans), ""
        if not plans:
            longest = "rollout.max_new_tokens" if isinstance(run, configs.Run) else "batch.max_tokens"
            lines.append(f"nothing fits {machine.name}: take a larger machine, or lower {longest}")
    else:
        configs.validate_on_devices(run, machine.devices)
        compiling = compilable and not quick
        largest = compiling and choices["--largest"]
        plans = [planning.plan_run(run, config, machine, devices, mean, compiling, largest, status)]
        lines = tables.report_lines(plans[0], source, choices[PRICE])
        if not plans[0].fits:
            lines += ["", smallest_change(plans[0], config, devices)]
        if choices["--loops"] and plans[0].compiled:
            lines += ["", *tables.loop_lines(plans[0])]
        if not compilable and not quick:
            lines.append(NO_COMPILER["gpu"])
    status("")
    print("\n".join(lines))
    if choices["--json"]:
        with writable(choices["--json"], "--json"):
            tables.write_plans(choices["--json"], [(planned, source) for planned in plans], choices[PRICE])
    if choices["--plot"] and not choices["--search"]:
        with writable(choices["--plot"], "--plot"):
            tables.draw_plans([tables.plan_to_json(plans[0], source)], choices["--plot"])
    if choices["--dump"]:
        with writable(choices["--dump"], "--dump"):
            choices["--dump"].mkdir(parents=True, exist_ok=True)
            for name, program in plans[0].compiled.items():
                (choices["--dump"] / f"{name}.txt").write_text(program.text)
    return 0


FEWEST_SLOTS = 8
"""Completions at one time of each part of the batch below which sampling is too slow to be proposed."""


def smallest_change(planned: Any, config: Any, devices: list[Any] | None) -> str:
    """Return a line with the smallest change with which the run fits, by formula, scaled by what was compiled: of
    settings that leave what is learned as it is, or else, proposed and no more, of the model and of its completions.
    """
    from jaxrl_llm.plan.planning import plan_run
    from jaxrl_llm.sharding import batch_parts

    run, machine, parts = planned.run, planned.machine, batch_parts(planned.mesh)

    def with_flags(flags: list[str]) -> Any:
        changed = parse_flags(type(run), flags.copy(), "", "", run)
        return plan_run(changed, config, machine, devices, None, False)

    before = with_flags([]).halves

    def overfull(candidate: Any) -> set[str]:
        """Return the halves that do not fit, by the formula times its error before."""
        halves = planned.halves
        # The compiler does not always say by how much it refuses: a formula is wrong by so much at most.
        errors = {name: min(halves[name].total / half.total, 1.3) for name, half in before.items()}
        return {name for name, half in candidate.halves.items() if half.total * errors[name] > machine.chip.memory}

    compute = run.learner.compute
    free = [["--learner.compute.remat", "full"]] if compute.remat != "full" else []
    free += [["--learner.compute.microbatch_rows", str(parts)]] if compute.microbatch_rows > parts else []
    together = [word for step in free for word in step]
    tried = [[], *free, together]
    proposals = [] if run.learner.lora.rank else [["--learner.lora.rank", "16"]]
    proposals += [] if run.learner.lora.base == "nf4" else [["--learner.lora.base", "nf4"]]
    if planned.sampling is not None:
        proposals.append(["--rollout.max_new_tokens", str(run.rollout.max_new_tokens // 2)])
    proposed: list[str] = []
    for step in proposals:
        proposed = proposed + step
        tried += [proposed, proposed + together]
    for number, flags in enumerate(tried):
        full, slots, fewest = overfull(with_flags(flags)), run.rollout.engine.slots if planned.sampling else 0, flags
        while full == {"sampling"} and slots >= 2 * FEWEST_SLOTS * parts:
            slots = slots // 2 // parts * parts
            fewest = [*flags, "--rollout.engine.slots", str(slots)]
            full = overfull(with_flags(fewest))
        if not full and fewest:
            learned = ", which changes the model that learns or what it may write" if number > len(free) + 1 else ""
            return f"it fits with {' '.join(fewest)}{learned} (by formula)"
    return "no smaller setting makes it fit: take more devices, larger ones, or a smaller model"


def select_phase(run: Any, number: int | None) -> Any:
    """Return the settings of one phase of the run, counted from 1; without a number the first, which is printed."""
    phases = configs.phases_of(run)
    if len(phases) == 1 and number is None:
        return run
    phase = number or 1
    require(phase <= len(phases), f"--phase {phase}: this run has {len(phases)}, give one from 1 on")
    hint = "" if number else "; --phase N plans another"
    print(f"phase {phase} of {len(phases)}: {phases[phase - 1].name or 'all of the run'}{hint}")
    return configs.in_phase(run, phase - 1)


def plan_options(arguments: list[str]) -> dict[str, Any]:
    """Return the command's own options, removed from the arguments."""
    switches = ("--search", "--quick", "--largest", "--loops")
    choices: dict[str, Any] = {flag: take(arguments, flag, False) for flag in switches}
    choices |= {flag: take(arguments, flag, True) for flag in ("--topology", "--json", "--plot", "--dump")}
    machines = "--topology v5e:4x4 (v4, v5e, v5p, v6e, tpu7x), or h100:8 (t4, l4, rtx4090, a100-40, a100, h200, b200)"
    require(choices["--topology"], f"plan needs a machine: {machines}")
    for flag, default in (("--slices", 1), ("--mean_tokens", None), ("--phase", None)):
        text = take(arguments, flag, True)
        positive = text is None or (text.isdigit() and int(text) > 0)
        require(positive, f"{flag} must be a positive number, got {text}")
        choices[flag] = default if text is None else int(text)
    price = take(arguments, PRICE, True)
    try:
        choices[PRICE] = None if price is None else float(price)
    except ValueError:
        choices[PRICE] = 0.0
    priced = choices[PRICE] is None or 0 < choices[PRICE] < math.inf
    require(priced, f"--price_per_device_hour must be a number above 0, such as 1.2, got {price}")
    paths = {flag: Path(choices[flag]) for flag in ("--json", "--plot") if choices[flag]}
    for flag, path in paths.items():
        check_file(path, flag)
        valid_suffix = flag == "--json" or path.suffix in (".svg", ".png", ".pdf")
        require(valid_suffix, f"--plot {path}: end it in .svg or .png or .pdf")
    reader = next((flag for flag in ("--loops", "--dump") if choices[flag]), "")
    compiled = not (reader and (choices["--quick"] or choices["--search"]))
    require(compiled, f"{reader} reads the compiled programs of one plan: leave --quick and --search out")
    if choices["--dump"]:
        paths["--dump"] = Path(choices["--dump"])
        require(not paths["--dump"].is_file(), f"--dump {choices['--dump']} is a file: give a folder")
    return choices | paths


def plan_settings(name: str, arguments: list[str], slices: int) -> Any:
    """Return the run as it would be trained, with model paths resolved from the current folder."""
    loaded = configs.find_config(name)
    run: Any = loaded.run
    recipe = take(arguments, "--recipe", True)
    run = configs.with_recipe(run, recipe) if recipe else run
    if slices > 1:
        run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, slices=slices))
    parsed = dataclasses.replace(loaded, run=parse_flags(type(run), arguments, f"jaxrl-llm plan {name}", "", run))
    return configs.resolved(parsed.located)
