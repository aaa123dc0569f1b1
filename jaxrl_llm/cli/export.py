"""``jaxrl-llm export``: a run's policy as a directory for transformers or as a GGUF file, or its adapter alone."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import first, status, take
from jaxrl_llm.cli.model_card import model_card
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import check_file, prepare_libraries, writable
from jaxrl_llm.trained import Trained, find_run, load_adapter, load_trained

USAGE = """usage: jaxrl-llm export RUN[@STEP] --out DIR [--adapter]
       jaxrl-llm export RUN[@STEP] --out FILE.gguf [--gguf_type f32|f16|bf16|q8_0]

Writes a run's policy, the newest one unless STEP names another checkpoint: config.json, safetensors, tokenizer, and a
README.md that says what was trained and what tests found. --adapter writes a run's adapter alone, as PEFT loads it. DIR
must not exist, or be empty. FILE.gguf is what llama.cpp runs: matrices as --gguf_type says (f32 unless it does), with
tokenizer and chat template."""
GENERATE = '  jaxrl-llm generate {} --prompt "What is 3 + 5?"'


def export(arguments: list[str]) -> int:
    """``export RUN[@STEP] --out DIR [--adapter]``, or ``--out FILE.gguf [--gguf_type T]``; returns the exit code."""
    name = first(arguments, USAGE, "export needs a run: jaxrl-llm export runs/quickstart --out model")
    if name is None:
        return 0
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    out = take(arguments, "--out", True)
    adapter = bool(take(arguments, "--adapter", False))
    gguf_type = take(arguments, "--gguf-type", True)
    if arguments:
        raise InputError(f"export does not know {arguments[0]}: jaxrl-llm export RUN[@STEP] --out DIR")
    if out is None:
        raise InputError(f"export needs a folder to write: jaxrl-llm export {shlex.quote(name)} --out DIR")
    prepare_libraries()
    trained = find_run(name) if configs.split_step(name)[0].is_dir() else None
    if trained is None:
        raise InputError(f"{name} is no run: give the folder that holds its config.json and checkpoints")
    target = Path(out)
    if target.suffix == ".gguf":
        export_gguf(name, trained, target, gguf_type or "f32", adapter)
        return 0
    if gguf_type is not None:
        raise InputError(f"--gguf_type {gguf_type} is of a file: give --out FILE.gguf, or leave it out")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{out} exists and is not empty; give a new directory, or remove it first")
    card = model_card(name, trained, out, adapter)
    (export_adapter if adapter else export_model)(name, trained, target, card)
    return 0


def export_gguf(name: str, trained: Trained, target: Path, kind: str, adapter: bool) -> None:
    """Write the whole model as one file.

    Raises:
      InputError: the file is there already, or cannot hold what is asked for.
    """
    from jaxrl_llm.models.gguf_writing import KINDS, save_gguf

    if kind not in KINDS:
        raise InputError(f"--gguf_type {kind} is not written here: take one of {', '.join(KINDS)}")
    if adapter:
        raise InputError(f"--adapter writes a folder for PEFT, and --out {target} is a file: give a folder")
    if isinstance(trained.run, configs.RewardModel):
        raise InputError(f"{name} is a reward model, which a GGUF file cannot hold: give a folder with --out")
    if target.exists():
        raise InputError(f"{target} exists: give a new file, or remove it first")
    check_file(target, "--out")
    write(name, trained, target, load_trained, lambda *found: save_gguf(*found, target, kind))
    print(f"{name}, step {trained.step}, is written to {target} ({kind}), for llama.cpp and its like. Try next:")
    print(GENERATE.format(shlex.quote(str(target))))


def export_model(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the whole model as a directory; an adapter is merged.

    That of a reward model says what it was taught, and its tokenizer writes chats with the template of that.
    """
    from jaxrl_llm.models import save_pretrained
    from jaxrl_llm.stages.taught import taught_by
    from jaxrl_llm.tasks.template import with_template

    run = trained.run
    scores = isinstance(run, configs.RewardModel)

    def save(model: Any, tokenizer: Any) -> None:
        told = None
        if scores:
            told = taught_by(run, tokenizer).to_json()
            tokenizer = with_template(tokenizer, configs.wording(run).template)
        save_pretrained(model, tokenizer, target, card, told)

    write(name, trained, target, load_trained, save)
    use = " as AutoModelForSequenceClassification." if scores else ". Try next:"
    print(f"{name}, step {trained.step}, is written to {target}; transformers loads it{use}")
    if not scores:
        print(GENERATE.format(shlex.quote(str(target))))


def export_adapter(name: str, trained: Trained, target: Path, card: str) -> None:
    """Write the adapter alone.

    Raises:
      InputError: the run trains none, or one of a reward model.
    """
    run = trained.run
    if not run.learner.lora.rank:
        raise InputError(f"{name} trained the whole model (learner.lora.rank is 0): export it without --adapter")
    if isinstance(run, configs.RewardModel):
        raise InputError(f"{name} is a reward model, whose head is no adapter: export it whole, without --adapter")
    from jaxrl_llm.models.peft import save_adapter

    def save(base: Any, adapter: Any) -> None:
        save_adapter(adapter, base.config, run.learner.lora, run.model, target, card)

    write(name, trained, target, load_adapter, save)
    print(f"the adapter of {name}, step {trained.step}, is written to {target}; PEFT loads it beside {run.model}.")


def write(name: str, trained: Trained, target: Path, load: Callable[..., Any], save: Callable[..., None]) -> None:
    """``save`` what ``load`` makes of the run on its mesh, and say meanwhile which of them is at work."""
    from jaxrl_llm.sharding import make_mesh

    status(f"loading {name}")
    found = load(trained, make_mesh(trained.run.mesh))
    status(f"writing {target}")
    with writable(target, "--out"):
        save(*found)
    status("")
