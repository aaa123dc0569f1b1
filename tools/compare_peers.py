"""How fast rollouts are beside those of other libraries: the same work through each, on this machine's CPU.

    python tools/compare_peers.py [--only tunix,trl] [--model 7m] [--lengths long] [--slots 64] [--repeats 3]

Contestants: ``ours``; ``tunix``, Tunix's sampler in the trainer's process; ``trl``, TRL with ``generate`` of
transformers; ``batching``, the continuous batching of transformers that TRL offers. Each peer lives in a virtual
environment of its own, made once from the pins below. All get the same float32 weights, prompts and lengths
(``bench_rollout.work_of``), sample at temperature 1 from the whole vocabulary, and are checked: their greedy tokens
against ours, the mean log-probability of what they sampled, and how many tokens came. Ours alone also returns
log-probabilities and entropies.

One process for each stays alive; its loading, compiling and first run are left out (``warmup_s``); then they take turns
while the others wait. Prints a table, then one JSON line with everything. Ratios are of median seconds, the peer's over
ours. ``cpu_s`` is the median of the cores' time, which neighbours disturb less. ``useful`` is the share of the decoded
rows that were asked for. ``others`` is the largest share of the machine that other programs used during a run: above
some hundredths, measure again.
"""

import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from bench_rollout import SHAPES, Options, model_of, work_of

from jaxrl_llm.models import logits, save_pretrained
from jaxrl_llm.models.config import TokenIds
from jaxrl_llm.models.decoder import Decoder, from_parameters, initialise, to_parameters

ROOT = Path(__file__).parents[1]
TUNIX = ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "transformers==5.12.1")
TRL = ("trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0", "datasets==5.2.0")
LIVELY = 0.1
"""Standard deviation of random weights: large enough that the next token depends on more than the last."""
SCORED_ROWS = 16


class Peer(NamedTuple):
    """A contestant: its script, the script's mode, and what its environment is made of; none for our own."""

    script: str
    mode: str = ""
    pins: tuple[str, ...] = ()


PEERS = {
    "ours": Peer("run_ours.py"),
    "tunix": Peer("run_tunix.py", pins=TUNIX),
    "trl": Peer("run_trl.py", "generate", TRL),
    "batching": Peer("run_trl.py", "batching", TRL),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
      work: as in bench_rollout.
      only: contestants, separated by commas; ours always takes part.
      folder: where the peers' environments and logs are kept.
    """

    work: Annotated[Options, tyro.conf.arg(name="")] = Options()
    only: str = ",".join(PEERS)
    folder: Path = ROOT / ".peers"


def chosen(only: str) -> list[str]:
    """The contestants' names, ours first."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise SystemExit(f"compare_peers: no contestant {unknown[0]!r}: there are {', '.join(PEERS)}")
    return ["ours", *(name for name in PEERS if name in names and name != "ours")]


def python_of(pins: tuple[str, ...], folder: Path) -> Path:
    """The interpreter of an environment that holds the pins; made on the first call, remade when a pin changes."""
    if not pins:
        return Path(sys.executable)
    home = folder / hashlib.sha256("\n".join(pins).encode()).hexdigest()[:12]
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (home / "complete").is_file():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True, stdout=sys.stderr)
        (home / "complete").write_text("\n".join(pins))
    return python


def lively(options: Options) -> Decoder:
    """The benchmark's model without end tokens; random weights are larger, so that a wrong cache would show."""
    model = model_of(options.model)
    if options.model in SHAPES:
        return initialise(SHAPES[options.model], jax.random.key(0), scale=LIVELY)
    return from_parameters(dataclasses.replace(model.config, tokens=TokenIds()), to_parameters(model))


@dataclasses.dataclass
class Worker:
    """A contestant's process, which waits for lines of JSON."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer; SystemExit with the end of its log where none comes."""
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.flush()
            tail = "\n".join(Path(self.log.name).read_text().splitlines()[-15:])
            raise SystemExit(f"compare_peers: {self.name} ended without an answer; the end of {self.log.name}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def started(name: str, folder: Path) -> Worker:
    """The contestant's process. Threads that wait sleep: spinning ones would take the cores from others."""
    peer = PEERS[name]
    python = python_of(peer.pins, folder.absolute())
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.absolute() / "compiled"))
    # A peer sees none of the packages of this environment.
    environment["PYTHONPATH"] = str(ROOT) if not peer.pins else ""
    log = open(folder / f"{name}.log", "w")
    command = [str(python), str(ROOT / "tools" / "peers" / peer.script)]
    pipe = subprocess.PIPE
    return Worker(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment), log)


def mean_logp(model: Decoder, prompts: list[list[int]], completions: list[list[int]]) -> float:
    """Mean log-probability (nats) that the model gives to the tokens of the longest few completions, in order."""
    longest = sorted(range(len(prompts)), key=lambda i: (-len(completions[i]), i))[:SCORED_ROWS]
    width = max(len(prompts[i]) + len(completions[i]) for i in longest)
    tokens, sampled = np.zeros((len(longest), width), np.int32), np.zeros((len(longest), width), bool)
    for line, i in enumerate(longest):
        end = len(prompts[i]) + len(completions[i])
        tokens[line, :end], sampled[line, len(prompts[i]) : end] = prompts[i] + completions[i], True
    scores = jax.nn.log_softmax(logits(model, tokens))[:, :-1]
    logp = jnp.take_along_axis(scores, jnp.asarray(tokens[:, 1:, None]), axis=-1)[..., 0]
    return float(jnp.mean(logp, where=sampled[:, 1:]))


def agreement(ours: list[int], theirs: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def checked(name: str, answer: dict[str, Any], limits: list[int]) -> dict[str, Any]:
    """The answer, if every completion has the length that was asked for."""
    lengths = [len(tokens) for tokens in answer["completions"]]
    if lengths != limits:
        counts = f"{sum(lengths)} tokens in wrong lengths; {sum(limits)} were asked for"
        raise SystemExit(f"compare_peers: {name} returned {counts}")
    return answer


def row(first: dict[str, Any], runs: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One contestant's numbers from its first run and the timed ones."""
    seconds = [run["seconds"] for run in runs]
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 3),
        "spread": round((max(seconds) - min(seconds)) / median, 3),
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 3),
        "tokens_per_s": round(tokens / median, 1),
        "useful": round(tokens / runs[-1]["computed"], 3),
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
    measured = ("seconds", "spread", "cpu_s", "tokens_per_s", "useful", "warmup_s", "others")
    columns = (*measured, "greedy", "mean_logp", "ratio")
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
    runs: dict[str, list[Any]] = {w.name: [] for w in workers}
    for seed in range(1, repeats + 1):
        for worker in workers:
            runs[worker.name].append(checked(worker.name, worker.ask({"seed": seed}), limits))
            print(f"{worker.name} {seed}: {runs[worker.name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return first, runs


def compare(comparison: Comparison) -> dict[str, Any]:
    """Everything that is printed."""
    options, names = comparison.work, chosen(comparison.only)
    model = lively(options)
    drawn, limits = work_of(options, model.config.vocab_size)
    prompts = [[int(token) for token in np.asarray(prompt)] for prompt in drawn]
    question = {"prompts": prompts, "limits": limits.tolist(), "slots": options.slots, "chunk": options.chunk, "group": options.group}
    question |= {"prompt": options.prompt, "completion": options.completion}
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, None, Path(folder) / "model")
        try:
            workers.extend(started(name, comparison.folder) for name in names)
            first, runs = take_turns(workers, question | {"model": str(Path(folder) / "model")}, options.repeats)
        finally:
            for worker in workers:
                worker.close()
    rows = {name: row(first[name], runs[name], int(limits.sum())) for name in names}
    for name in names:
        rows[name]["greedy"] = f"{agreement(first['ours']['greedy'], first[name]['greedy'])}/{options.completion}"
        rows[name]["mean_logp"] = round(mean_logp(model, prompts, first[name]["completions"]), 3)
    counted = {"cores": os.cpu_count(), "requests": len(prompts), "tokens": int(limits.sum())}
    return dataclasses.asdict(options) | counted | {"rows": rows, "ratios": ratios(rows)}


if __name__ == "__main__":
    found = compare(tyro.cli(Comparison, description=__doc__))
    print(table(found["rows"]))
    print(json.dumps(found))
