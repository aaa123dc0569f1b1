"""How fast other libraries are at the same work: parts of a step by contestants that take turns, or whole runs."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from bench.speed import SHAPES, WAVES, Rollout, model_of, requests
from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import JensenShannon
from jaxrl_llm.config import Run
from jaxrl_llm.environments.examples import Products
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.models.config import TokenIds
from jaxrl_llm.models.decoder import Decoder, initialise, to_parameters
from jaxrl_llm.runs import load_model
from jaxrl_llm.sharding import make_mesh

ROOT = Path(__file__).parents[1]
TUNIX = ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "transformers==5.12.1")
TRL = ("trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0", "datasets==5.2.0")
WHOLE = {"learn": "quickstart", "distillation": "distillation_quickstart", "episode": ""}
"""Kinds of whole runs, and the configuration of each."""
LIVELY = 0.1
"""Standard deviation of random weights: large enough that the next token depends on more than the last."""
LEARNING_RATE = 1e-4
LOSS_GAP, NORM_GAP = 1e-5, 1e-3
"""Largest differences of losses (absolute) and of gradient norms (relative): those of rounding."""
SCORED_ROWS = 16
LEVELS = (0.95, 0.98)
"""Shares of right answers whose first reaching is timed; with the last one a contestant is done."""
MICROBATCH = 16
"""Rows of one pass of the peers."""
EPISODE_STEPS = 4
"""Of a run of episodes; the first is not timed."""


class Peer(NamedTuple):
    """A contestant: its library, how it samples, and what its environment is made of; nothing for our own."""

    library: str
    mode: str = ""
    pins: tuple[str, ...] = ()


PEERS = {
    "ours": Peer("ours"),
    "tunix": Peer("tunix", pins=TUNIX),
    "trl": Peer("trl", "generate", TRL),
    "batching": Peer("trl", "batching", TRL),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
      work: what is sampled, and learned from.
      what: the part of a training step; or whole runs: learn, distillation or episode, which take of the work only
        ``repeats``, the number of seeds.
      config: of ours, that whole runs compare; None for quickstart and distillation_quickstart.
      steps: of a whole run at most.
      only: contestants; ours always takes part.
      folder: where the peers' environments and logs are kept.
    """

    work: Annotated[Rollout, tyro.conf.arg(name="")] = Rollout(repeats=3)
    what: Literal["rollout", "update", "step", "learn", "distillation", "episode"] = "rollout"
    config: str | None = None
    steps: int = 12
    only: tuple[str, ...] = tuple(PEERS)
    folder: Path = ROOT / ".peers"


def compare(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Compare rollouts, updates, or whole GRPO steps with other libraries', on this machine's CPU.

    ``what`` rollout samples four waves of requests; update takes one optimiser step of GRPO (no reference, one update
    for each rollout, AdamW) by one wave of random completions; step samples one wave and learns from it. Rewards cost
    nothing here: the advantages are given.

    Contestants: ``ours``; ``tunix``, Tunix's sampler in the trainer's process and the step of its GRPO learner;
    ``trl``, TRL with ``generate`` of transformers and its GRPO trainer's loss; ``batching``, the same with the
    continuous batching of transformers that TRL offers. Each peer lives in a virtual environment of its own, made once
    from pins. All get the same float32 weights, prompts and lengths, sample at temperature 1 from the whole vocabulary,
    and are checked: their greedy tokens against ours, the mean log-probability of what they sampled, how many tokens
    came; the losses and gradient norms of two updates by the same tokens against ours. One process for each stays
    alive; its loading, compiling and first run are left out; then they take turns while the others wait. Rows have
    median seconds, their ratio to ours, and the process's largest memory in a timed run.

    ``what`` learn compares whole runs of ``config``, ours by its own command, the peers' by their trainers with the
    same weights, prompts, rewards, groups and learning rate, one process after the other, with nothing compiled before.
    After each step held-out problems are answered greedily; rows have the seconds since the process was started,
    evaluations left out, until 0.95 and 0.98, of each seed; a step's median seconds, and the largest memory.
    ``distillation`` is the same with a teacher in the place of rewards, beside TRL's ``DistillationTrainer``.
    ``episode`` times GRPO steps of episodes: SmolLM2-135M-Instruct asks a calculator, an environment after TRL's
    interface that both trainers run unchanged; the first step of each run is left out.
    """
    names, what, folder = chosen(comparison.only, comparison.what), comparison.what, comparison.folder.absolute()
    if what not in WHOLE:
        return parts(comparison, names, folder)
    with tempfile.TemporaryDirectory() as model:
        if what == "episode":
            work = episodes_of(Path(model), folder) | {"steps": EPISODE_STEPS}
        else:
            work = work_of(comparison.config or WHOLE[what], Path(model)) | {"steps": comparison.steps}
        runs: dict[str, list[Any]] = {name: [] for name in names}
        for seed, name in itertools.product(range(comparison.work.repeats), names):
            runs[name].append(run_of(name, work | {"seed": seed}, folder))
    return whole_rows(runs, work)


def chosen(only: Sequence[str], what: str = "rollout") -> list[str]:
    """The contestants' names, ours first; those that only sample in another way take no part in updates."""
    unknown = [name for name in only if name not in PEERS]
    require(not unknown, f"no contestant {unknown[:1]}: there are {', '.join(PEERS)}")
    lacks = {"tunix": ("distillation", "episode"), "batching": ("update", *WHOLE)}
    return [name for name in PEERS if name == "ours" or (name in only and what not in lacks.get(name, ()))]


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


class Worker:
    """Owner of a contestant's process, which takes and gives lines of JSON.

    Args:
      name: of the contestant.
      kind: work or learn.
      folder: where environments and logs are kept.
      compiled: a folder for compiled programs.
    """

    def __init__(self, name: str, kind: str, folder: Path, compiled: str):
        self.name = name
        peer = PEERS[name]
        folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would take the cores from others
        environment["JAX_COMPILATION_CACHE_DIR"] = compiled
        # A peer sees none of the packages of this environment.
        environment["PYTHONPATH"] = "" if peer.pins else str(ROOT)
        self._log: IO[str] = open(folder / f"{name}.log", "w")  # noqa: SIM115  closed with the process
        command = [str(python_of(peer.pins, folder)), str(ROOT / "bench" / "contestants.py"), f"{kind}_{peer.library}"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment)

    def ask(self, question: dict[str, Any] | None) -> dict[str, Any]:
        """Its next answer.

        Raises:
          InputError: none comes; with the end of its log.
        """
        try:
            if question is not None:
                self.process.stdin.write(json.dumps(question) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(Path(self._log.name).read_text().splitlines()[-15:])
            raise InputError(f"{self.name} ended without an answer; the end of {self._log.name}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self._log.close()


def parts(comparison: Comparison, names: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each contestant of rollouts, updates or steps."""
    work, what = comparison.work, comparison.what
    model = lively(work)
    question = question_of(work, what, model.config.vocab_size)
    first, runs, workers = {}, {name: [] for name in names}, []
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    with tempfile.TemporaryDirectory() as place:
        save_pretrained(model, None, Path(place) / "model")
        try:
            for name in names:
                workers.append(Worker(name, "work", folder, compiled))
                asked = question | {"model": str(Path(place) / "model"), "mode": PEERS[name].mode}
                first[name] = same_work(first.get("ours"), name, workers[-1].ask(asked), question)
            for seed, worker in itertools.product(range(1, work.repeats + 1), workers):
                runs[worker.name].append(same_work(None, worker.name, worker.ask({"seed": seed}), question))
                print(f"{worker.name} {seed}: {runs[worker.name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
        finally:
            for worker in workers:
                worker.close()
    tokens, medians = sum(question["limits"]), {}
    for name in names:
        seconds = [run["seconds"] for run in runs[name]]
        medians[name] = statistics.median(seconds)
        checks: dict[str, Any] = {}
        if what != "update":
            pairs = enumerate(zip(first["ours"]["greedy"], first[name]["greedy"], strict=False))
            agreed = next((at for at, (a, b) in pairs if a != b), work.completion)
            mean = mean_logp(model, question["prompts"], first[name]["completions"])
            checks = {"greedy": f"{agreed}/{work.completion}", "mean_logp": round(mean, 3)}
        if what != "rollout":
            checks |= dict(zip(("loss", "grad_norm"), first[name]["updates"][0], strict=True))
        yield {
            "contestant": name,
            "what": what,
            "lengths": work.lengths,
            "tokens": tokens,
            "seconds": round(medians[name], 3),
            "ratio": round(medians[name] / medians["ours"], 2),
            "spread": round((max(seconds) - min(seconds)) / medians[name], 3),
            "tokens_per_s": round(tokens / medians[name], 1),
            "peak_mb": max(run["peak_mb"] for run in runs[name]),
        } | checks


def lively(work: Rollout) -> Decoder:
    """The benchmark's model without end tokens; random weights are larger, so that a wrong cache would show."""
    if work.model in SHAPES:
        return initialise(SHAPES[work.model], jax.random.key(0), scale=LIVELY)
    model = model_of(work.model)
    return Decoder(dataclasses.replace(model.config, tokens=TokenIds()), to_parameters(model))


def question_of(work: Rollout, what: str, words: int) -> dict[str, Any]:
    """The work as the contestants are told it: prompts, lengths, and tokens to learn from."""
    prompts, limits = requests(words, (WAVES if what == "rollout" else 1) * work.slots, work)
    random = np.random.default_rng(1)
    question = {name: getattr(work, name) for name in ("slots", "chunk", "group", "prompt", "completion")}
    return question | {
        "what": what,
        "prompts": [prompt.tolist() for prompt in prompts],
        "limits": limits.tolist(),
        "completions": [random.integers(0, words, limit).tolist() for limit in limits],
        "advantages": random.standard_normal(len(limits)).tolist(),
        "learning_rate": LEARNING_RATE,
    }


def same_work(
    ours: dict[str, Any] | None, name: str, answer: dict[str, Any], question: dict[str, Any]
) -> dict[str, Any]:
    """The answer.

    Raises:
      InputError: a completion has another length than was asked for, or an update another loss or gradient than ours.
    """
    lengths = [len(tokens) for tokens in answer.get("completions", [])]
    wrong = lengths != question["limits"] and "completions" in answer
    require(
        not wrong, f"{name} returned {sum(lengths)} tokens in wrong lengths; {sum(question['limits'])} were asked for"
    )
    for mine, other in zip(ours.get("updates", []) if ours else [], answer.get("updates", []), strict=bool(ours)):
        close = abs(mine[0] - other[0]) <= LOSS_GAP and math.isclose(mine[1], other[1], rel_tol=NORM_GAP)
        require(close, f"an update of {name} has loss and gradient norm {other}, ours {mine}")
    return answer


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


def work_of(config: str, folder: Path) -> dict[str, Any]:
    """What all contestants are told of a configuration's run; its model is written to ``folder``.

    Raises:
      InputError: it has something that the peers' trainers are not set up for.
    """
    run = configs.resolved(configs.find_config(config).run)
    surrogate, own = run.recipe.algorithm.surrogate, run.scoring.distillation
    rewards = run.scoring.rewards == (Run.scoring.rewards if own is None else ())
    alike = {
        "rewards": rewards and run.task.extractor == "last_number",
        "loss": run.recipe.algorithm == PRESETS["dapo"],
        "teacher": own is None or own == configs.Distillation(own.teacher, JensenShannon(own.divergence.beta)),
        "long answers": run.recipe.overlong.share == 0 and not run.recipe.overlong.drop,
        "updates": run.learner.updates == 1,
    }
    other = [name for name, same in alike.items() if not same]
    require(not other, f"{config} has other {', '.join(other)} than is set up in TRL and Tunix")
    model, tokenizer = load_pretrained(run.model)
    save_pretrained(model, tokenizer, folder)
    loaded, prompts = tasks.load(run.task), tasks.Prompts(run.task, tokenizer)

    def told(problems: Sequence[Any]) -> list[dict[str, str]]:
        return [{"prompt": tokenizer.decode(prompts[one]), "answer": one.answer} for one in problems]

    teacher: dict[str, Any] = {}
    if own is not None:
        save_pretrained(load_model(own.teacher, "float32", make_mesh(run.mesh))[0], tokenizer, folder / "teacher")
        teacher = {"teacher": str(folder / "teacher"), "beta": own.divergence.beta}
    return teacher | {
        "model": str(folder),
        "config": config,
        "train": told(loaded.train),
        "test": told(loaded.held_out),
        "prompts": run.rollout.prompts,
        "group": run.rollout.group,
        "prompt": run.rollout.max_prompt_tokens,
        "completion": run.rollout.max_new_tokens,
        "temperature": run.rollout.temperature,
        "learning_rate": run.learner.optimiser.learning_rate,
        "clip_norm": run.learner.optimiser.clip_norm,
        "clip": [surrogate.low, surrogate.high],
        "microbatch": MICROBATCH,
        "turns": 0,
    }


def episodes_of(folder: Path, peers: Path) -> dict[str, Any]:
    """What all contestants are told of episodes with a calculator: SmolLM2's weights with a template that writes tools
    and that TRL knows, from its wheel; GRPO without a KL.
    """
    found = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    wheel = subprocess.check_output([python_of(TRL, peers), "-c", found], text=True).strip()
    model, tokenizer = load_pretrained("smollm2-135m")
    tokenizer.chat_template = (Path(wheel) / "chat_templates" / "qwen2_5.jinja").read_text()
    save_pretrained(model, tokenizer, folder)
    rows = [
        {"prompt": [dict(message) for message in one.prompt], **{key: one.metadata[key] for key in ("a", "b")}}
        for one in Products(64).problems()
    ]
    work = {"model": str(folder), "config": "", "train": rows, "test": [], "prompts": 2, "group": 8, "prompt": 512}
    budget = {"completion": 128, "turns": 3, "temperature": 0.8, "learning_rate": 1e-6}
    return work | budget | {"clip_norm": 1.0, "clip": [0.2, 0.2], "microbatch": MICROBATCH}


def peak_mb(pid: int) -> float | None:
    """The largest memory of a process so far, MB; None where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def run_of(name: str, work: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All lines of one contestant's process until it has the last level, or has made its steps."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        question: dict[str, Any] | None = work | {"began": time.time()}
        worker = Worker(name, "learn", folder, cache)
        try:
            while not lines or (lines[-1]["accuracy"] < LEVELS[-1] and lines[-1]["step"] < work["steps"]):
                lines.append(worker.ask(question) | {"peak_mb": peak_mb(worker.process.pid)})
                question = None
                told = "{step}: {accuracy:.3f} after {seconds:.1f} s".format(**lines[-1])
                print(f"{name} seed {work['seed']} step {told}", file=sys.stderr, flush=True)
        finally:
            worker.close()
    return lines


def whole_rows(runs: dict[str, list[Any]], work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each contestant of whole runs; a seed that did not reach a level has None in its place."""
    steps = {}
    for name, seeds in runs.items():
        pairs = [pair for lines in seeds for pair in itertools.pairwise(line for line in lines if line["step"])]
        times = [after["seconds"] - before["seconds"] for before, after in pairs]
        steps[name] = statistics.median(times) if times else None
        row = {"contestant": name, "config": work["config"] or "episodes", "steps": [len(lines) for lines in seeds]}
        row |= {"step_s": steps[name], "ratio": steps[name] / steps["ours"] if times and steps["ours"] else None}
        row["peak_mb"] = max((line["peak_mb"] for lines in seeds for line in lines if line["peak_mb"]), default=None)
        if work["turns"]:
            row["calls"] = [lines[-1]["calls"] for lines in seeds]
        for level in LEVELS if not work["turns"] else ():
            first = [next((line for line in lines if line["accuracy"] >= level), None) for lines in seeds]
            row[f"seconds_to_{level}"] = [line and round(line["seconds"], 1) for line in first]
            row[f"steps_to_{level}"] = [line and line["step"] for line in first]
        yield row
