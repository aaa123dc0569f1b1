"""``jaxrl-llm export``: a run's policy as a directory that transformers loads."""

import shlex
from pathlib import Path

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, status, take
from jaxrl_llm.cli.policy import load_policy
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import prepare_libraries, writable
from jaxrl_llm.trained import find_run

USAGE = """usage: jaxrl-llm export RUN[@STEP] --out DIR

Writes a run's policy, the newest one unless STEP names another checkpoint: config.json, safetensors, tokenizer. DIR
must not exist, or be empty."""


def export(arguments: list[str]) -> int:
    """``export RUN[@STEP] --out DIR``; returns the exit code."""
    name = first(arguments, USAGE, "export needs a run: jaxrl-llm export runs/quickstart --out model")
    if name is None:
        return 0
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    out = take(arguments, "--out", True)
    if arguments:
        raise InputError(f"export does not know {arguments[0]}: jaxrl-llm export RUN --out DIR")
    if out is None:
        raise InputError(f"export needs a folder to write: jaxrl-llm export {shlex.quote(name)} --out DIR")
    prepare_libraries()
    run = find_run(name)
    if run is None:
        raise InputError(f"{name} is no run: give the folder that holds its config.json and checkpoints")
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{out} exists and is not empty; give a new directory, or remove it first")
    from jaxrl_llm.models import save_pretrained

    status(f"loading {name}")
    policy = load_policy(name, run)
    status(f"writing {out}")
    with writable(target, "--out"):
        save_pretrained(policy.model, policy.tokenizer, target)
    status("")
    if isinstance(run.run, configs.RewardModel):
        loader = "AutoModelForSequenceClassification"
        print(f"{name}, step {policy.step}, is written to {out}; transformers loads it as {loader}.")
        return 0
    shown = shlex.quote(out)
    print(f"{name}, step {policy.step}, is written to {out}; transformers loads it. Try next:")
    print(f'  jaxrl-llm generate {shown} --prompt "What is 3 + 5?"')
    return 0
