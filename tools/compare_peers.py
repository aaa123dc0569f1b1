"""How fast others' libraries are at the same work: rollouts, updates, or whole GRPO steps, on this machine's CPU.

    python tools/compare_peers.py [--what step] [--only tunix,trl] [--model 7m] [--lengths long] [--slots 64] [--repeats
    3]

``what`` rollout samples four waves of requests; update takes one optimiser step of GRPO (no reference, one update for
each rollout, AdamW) by one wave of random completions; step samples one wave and learns from it. Rewards cost nothing
here: the advantages are given.

Contestants: ``ours``; ``tunix``, Tunix's sampler in the trainer's process and the step of its GRPO learner; ``trl``,
TRL with ``generate`` of transformers and its GRPO trainer's loss; ``batching``, the same with the continuous batching
of transformers that TRL offers. Each peer lives in a virtual environment of its own, made once from the pins below. All
get the same float32 weights, prompts and lengths (``bench_rollout.work_of``), sample at temperature 1 from the whole
vocabulary, and are checked: their greedy tokens against ours, the mean log-probability of what they sampled, how many
tokens came; the losses and gradient norms of two updates by the same tokens against ours. Ours alone also returns
log-probabilities and entropies of what it samples.

One process for each stays alive; its loading, compiling and first run are left out (``warmup_s``); then they take turns
while the others wait.

``what`` learn is another comparison: whole runs of ``config``, ours by its own command, the peers' by their trainers
with the same weights, prompts, rewards, groups and learning rate, one process after the other, with nothing compiled
before; ``repeats`` is the number of seeds. After each step held-out problems are answered greedily; told are the
seconds since the process was started, evaluations left out, and the completions sampled, until 0.95 and 0.98; a step's
median seconds, and the largest memory. ``what`` distillation is the same with a teacher in the place of rewards,
beside TRL's ``DistillationTrainer``: same teacher, prompts, learning rate and divergence.

``what`` episode times whole GRPO steps of episodes: SmolLM2-135M-Instruct asks a calculator, an environment written
after TRL's interface (tools/peers/calculator.py) that both trainers run unchanged; the same prompts, chat template,
turns and tokens at most. Told are the median seconds of a step, the first of each run left out, and its calls.

Prints a table, then one JSON line with everything. Ratios are of median seconds, the peer's over
ours. ``cpu_s`` is the median of the cores' time, which neighbours disturb less. ``useful`` is the share of the rows and
positions computed that were asked for. ``peak_mb`` is the process's largest memory in a timed run. ``others`` is the
largest share of the machine that other programs used during a run: above some hundredths, measure again.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import peer_learning
import tyro
from bench_rollout import SHAPES, WAVES, Options, model_of, work_of
from peer_checks import agreement, checked, mean_logp, same_updates
from peer_processes import PEERS, ROOT, Worker, started

from jaxrl_llm.models import save_pretrained
from jaxrl_llm.models.config import TokenIds
from jaxrl_llm.models.decoder import Decoder, initialise, to_parameters

WHOLE = {"learn": "quickstart", "distillation": "distillation_quickstart"}
"""Kinds of whole runs, and the configuration of each."""
LIVELY = 0.1
"""Standard deviation of random weights: large enough that the next token depends on more than the last."""
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
      work: as in bench_rollout.
      what: the part of a training step; or whole runs, learn, distillation or episode, which take of ``work`` only
        ``repeats``.
      config: of ours, that whole runs compare; None for quickstart and distillation_quickstart.
      steps: of a whole run at most.
      only: contestants, separated by commas; ours always takes part.
      folder: where the peers' environments and logs are kept.
    """

    work: Annotated[Options, tyro.conf.arg(name="")] = Options()
    what: Literal["rollout", "update", "step", "learn", "distillation", "episode"] = "rollout"
    config: str | None = None
    steps: int = peer_learning.STEPS
    only: str = ",".join(PEERS)
    folder: Path = ROOT / ".peers"


def chosen(only: str, what: str = "rollout") -> list[str]:
    """The contestants' names, ours first; those that only sample in another way take no part in updates."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise SystemExit(f"compare_peers: no contestant {unknown[0]!r}: there are {', '.join(PEERS)}")
    others = [name for name in PEERS if name in names and name != "ours"]
    others = [name for name in others if name != "tunix" or what not in ("distillation", "episode")]
    samples = what in ("rollout", "step")
    return ["ours", *(name for name in others if samples or PEERS[name].mode != "batching")]


def lively(options: Options) -> Decoder:
    """The benchmark's model without end tokens; random weights are larger, so that a wrong cache would show."""
    model = model_of(options.model)
    if options.model in SHAPES:
        return initialise(SHAPES[options.model], jax.random.key(0), scale=LIVELY)
    return Decoder(dataclasses.replace(model.config, tokens=TokenIds()), to_parameters(model))


def row(first: dict[str, Any], runs: list[dict[str, Any]], tokens: int, phases: int = 1) -> dict[str, Any]:
    """One contestant's numbers from its first run and the timed ones; each phase of the work handles all tokens."""
    seconds = [run["seconds"] for run in runs]
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 3),
        "spread": round((max(seconds) - min(seconds)) / median, 3),
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 3),
        "tokens_per_s": round(tokens / median, 1),
        "useful": round(phases * tokens / runs[-1]["computed"], 3),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "warmup_s": round(first["warmup_s"], 1),
        "others": None if runs[0]["others"] is None else round(max(run["others"] for run in runs), 3),
        "settings": first["settings"],
        "versions": first["versions"],
    }


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Each peer's median seconds over ours."""
    return {name: round(r["seconds"] / rows["ours"]["seconds"], 2) for name, r in rows.items() if name != "ours"}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows for people."""
    measured = ("seconds", "spread", "cpu_s", "tokens_per_s", "useful", "peak_mb", "warmup_s", "others")
    columns = (
        *measured,
        *(name for name in ("greedy", "mean_logp", "loss", "grad_norm") if name in rows["ours"]),
        "ratio",
    )
    against = ratios(rows) | {"ours": 1.0}
    cells = [("", *columns)]
    cells += [(name, *(str((r | {"ratio": against[name]})[column]) for column in columns)) for name, r in rows.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def take_turns(
    workers: list[Worker], question: dict[str, Any], repeats: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """({name: first answer}, {name: timed answers}): each warms up alone, then they take turns."""
    limits = question["limits"]
    first = {w.name: checked(w.name, w.ask(question | {"mode": PEERS[w.name].mode}), limits) for w in workers}
    for name in first if question["what"] != "rollout" else ():
        same_updates(name, first["ours"]["updates"], first[name]["updates"])
    runs: dict[str, list[Any]] = {w.name: [] for w in workers}
    for seed in range(1, repeats + 1):
        for worker in workers:
            runs[worker.name].append(checked(worker.name, worker.ask({"seed": seed}), limits))
            print(f"{worker.name} {seed}: {runs[worker.name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return first, runs


def question_of(options: Options, what: str, words: int) -> dict[str, Any]:
    """The work as the contestants are told it: prompts, lengths, and tokens to learn from."""
    prompts, limits = work_of(options, words, WAVES if what == "rollout" else 1)
    random = np.random.default_rng(1)
    question = {name: getattr(options, name) for name in ("slots", "chunk", "group", "prompt", "completion")}
    return question | {
        "what": what,
        "prompts": [prompt.tolist() for prompt in prompts],
        "limits": limits.tolist(),
        "completions": [random.integers(0, words, limit).tolist() for limit in limits],
        "advantages": random.standard_normal(len(limits)).tolist(),
        "learning_rate": LEARNING_RATE,
    }


def seen(model: Decoder, question: dict[str, Any], ours: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What a contestant's first answer shows of the work it did."""
    found: dict[str, Any] = {}
    if "greedy" in answer:
        found["greedy"] = f"{agreement(ours['greedy'], answer['greedy'])}/{question['completion']}"
        found["mean_logp"] = round(mean_logp(model, question["prompts"], answer["completions"]), 3)
    if "updates" in answer:
        found |= {"loss": round(answer["updates"][0][0], 6), "grad_norm": round(answer["updates"][0][1], 5)}
    return found


def compare(comparison: Comparison) -> dict[str, Any]:
    """Everything that is printed."""
    options, what, names = comparison.work, comparison.what, chosen(comparison.only, comparison.what)
    model = lively(options)
    question = question_of(options, what, model.config.vocab_size)
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, None, Path(folder) / "model")
        try:
            workers.extend(started(name, comparison.folder) for name in names)
            first, runs = take_turns(workers, question | {"model": str(Path(folder) / "model")}, options.repeats)
        finally:
            for worker in workers:
                worker.close()
    tokens, phases = sum(question["limits"]), 2 if what == "step" else 1
    rows = {
        name: row(first[name], runs[name], tokens, phases) | seen(model, question, first["ours"], first[name])
        for name in names
    }
    counted = {"what": what, "cores": os.cpu_count(), "requests": len(question["prompts"]), "tokens": tokens}
    return dataclasses.asdict(options) | counted | {"rows": rows, "ratios": ratios(rows)}


if __name__ == "__main__":
    asked = tyro.cli(Comparison, description=__doc__)
    if asked.what in WHOLE:
        config = asked.config or WHOLE[asked.what]
        names = chosen(asked.only, asked.what)
        found = peer_learning.learn(config, names, asked.work.repeats, asked.folder, asked.steps)
        print(peer_learning.table(found))
    elif asked.what == "episode":
        found = peer_learning.play(chosen(asked.only, "episode"), asked.work.repeats, asked.folder)
        print("\n".join(f"{name}  {row}  ratio {found['ratios'][name]}" for name, row in found["rows"].items()))
    else:
        found = compare(asked)
        print(table(found["rows"]))
    print(json.dumps(found))
