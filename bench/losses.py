"""Whether our update agrees with TRL's loss, and our losses with verl's: the same tokens, value and whole gradient."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxrl_llm.algorithms import PRESETS, Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.ratios import Sequence, Token
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, DPPO, LUSPO, ClipCov, KLCov, PPOClip
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner import Layout, PolicyGradient, Sample, pack
from jaxrl_llm.learner.forward import score
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.types import Role

GROUP, TOKENS, LARGEST = 4, 12, 1e-5
EMBEDDING, PAD = "model.embed_tokens.weight", 258
"""Transformers drops the gradient of the padding token as an input, which a random model samples: it is left out."""
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
LOSSES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (PRESETS["grpo"], {"loss_type": "grpo", "epsilon": 0.2}),
    "dapo": (PRESETS["dapo"], {"loss_type": "dapo", **CLIP}),
    "dr_grpo": (dataclasses.replace(PRESETS["dr_grpo"], reduce=ConstantLength(TOKENS)), {"loss_type": "dr_grpo"}),
    "cispo": (
        dataclasses.replace(PRESETS["cispo"], surrogate=CISPO(1.28)),
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "sapo": (PRESETS["sapo"], {"loss_type": "sapo"}),
    "gspo": (
        Algorithm(PRESETS["gspo"].advantage, Sequence(), PPOClip(0.02, 0.03), SequenceMean()),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "luspo": (
        dataclasses.replace(PRESETS["luspo"], surrogate=LUSPO(0.02, 0.03)),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    "vespo": (dataclasses.replace(PRESETS["vespo"], ratio=Token(), reduce=TokenMean()), {"loss_type": "vespo"}),
}
"""Ours without a KL, and the settings of TRL's ``GRPOConfig``. Its VESPO divides by tokens, the paper sums them."""


def in_verl(
    ours: str | Algorithm, name: str, reduce: str = "token-mean", choice: dict[str, float] | None = None,
    **settings: float,
) -> tuple[Algorithm, dict[str, Any]]:  # fmt: skip
    """A loss of ours, and what verl calls it: its name, its way to a mean, and the other fields of its two classes."""
    algorithm = PRESETS[ours] if isinstance(ours, str) else ours
    return algorithm, {"name": name, "settings": {"loss_agg_mode": reduce, **settings}, "choice": choice or {}}


def with_old_policy(name: str, surrogate: Any) -> Algorithm:
    """A preset with this surrogate, its ratio against the old policy as in verl, not against the sampler."""
    return dataclasses.replace(PRESETS[name], ratio=Token(), surrogate=surrogate)


BY_SEQUENCE = "seq-mean-token-mean"
VERL_LOSSES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "dual_clip": in_verl(
        with_old_policy("dapo", PPOClip(0.2, 0.28, dual=1.5)), "vanilla", clip_ratio_high=0.28, clip_ratio_c=1.5
    ),
    "grpo": in_verl("grpo", "vanilla", BY_SEQUENCE, clip_ratio_c=1e4),
    "gspo": in_verl("gspo", "gspo", BY_SEQUENCE, clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    "sapo": in_verl("sapo", "sapo", BY_SEQUENCE),
    "cispo": in_verl(with_old_policy("cispo", CISPO(1.28, 0.8)), "cispo", clip_ratio_high=0.28),
    "gmpo": in_verl("gmpo", "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
    "dppo_tv": in_verl(
        with_old_policy("dppo_tv", DPPO(0.1, 0.15, "tv", cap=1.5)), "dppo_tv",
        clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=1.5,
    ),
    "dppo_kl": in_verl(
        with_old_policy("dppo_kl", DPPO(0.02, 0.05, "kl", cap=1.5)), "dppo_kl",
        clip_ratio_low=0.02, clip_ratio_high=0.05, clip_ratio_c=1.5,
    ),
    "clip_cov": in_verl(
        with_old_policy("clip_cov", ClipCov(1.0, 0.1, 0.8)), "clip_cov",
        choice={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8},
    ),
    "kl_cov": in_verl(
        with_old_policy("kl_cov", KLCov(0.2, 0.5)), "kl_cov", choice={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}
    ),
}  # fmt: skip
"""Ours, and verl's by its registry. Clip-Cov takes all tokens of the band, since verl draws some of them at random."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared, and with what.

    Attributes:
      trl: the interpreter of an environment with TRL and torch; None to leave TRL out.
      verl: the interpreter of an environment with verl; None to leave verl out.
      fixtures: a folder for the numbers on random log-probabilities, a file for each library; None for none.
    """

    trl: Path | None = None
    verl: Path | None = None
    fixtures: Path | None = None


def plain(algorithm: Algorithm) -> Algorithm:
    """The algorithm without a KL."""
    return dataclasses.replace(algorithm, kl=None, kl_coef=0.0)


def sampled() -> tuple[Any, Any, Any, list[Sample], dict[str, Any]]:
    """(policy, old policy, tokenizer, samples of its groups, the same as rows for TRL)."""
    model, tokenizer = load_pretrained("tiny-random")
    keys = iter(jax.random.split(jax.random.key(1), 99))
    old = jax.tree.map(lambda x: x + 2 * np.abs(x).mean() * jax.random.normal(next(keys), x.shape), model)
    keys = iter(jax.random.split(jax.random.key(2), 99))
    policy = jax.tree.map(lambda x: x + 0.05 * np.abs(x).mean() * jax.random.normal(next(keys), x.shape), old)
    prompts = [list(text.encode()) for text in ("1+1=", "12+30=", "hello", "a longer question?") for _ in range(GROUP)]
    engine = Engine(old, len(prompts), 64, TOKENS)
    limits = np.random.default_rng(0).integers(3, TOKENS + 1, len(prompts))
    limits[0] = TOKENS
    rule = Sampling(max_new_tokens=TOKENS)
    engine.start(rule)
    handles = engine.submit(prompts, range(len(prompts)), limits.tolist())
    while engine.busy:
        engine.step(old)
    done = dict(engine.collect())
    found = [done[handle] for handle in handles]
    rewards = np.float32([sum(map(int, one.tokens)) % 3 for one in found])
    advantages = np.asarray(PRESETS["grpo"].advantage(jnp.asarray(rewards.reshape(-1, GROUP)))).reshape(-1)
    samples = [
        Sample(np.int32(prompt), one.tokens, np.ones(len(one.tokens), bool), {"advantages": float(advantage)},
               {"sampler_logp": one.sampler_logp, "fresh": np.ones(len(one.tokens), bool)})
        for prompt, one, advantage in zip(prompts, found, advantages, strict=True)
    ]  # fmt: skip
    rows = {
        "prompts": prompts,
        "completions": [one.tokens.tolist() for one in found],
        "rewards": rewards.tolist(),
        "advantages": advantages.tolist(),
    }
    return policy, old, tokenizer, samples, rows


def ours(folder: Path) -> dict[str, float]:
    """The losses by our update; the folder gets the model, the batch, and the gradients under the model's names."""
    policy, old, tokenizer, samples, rows = sampled()
    save_pretrained(policy, tokenizer, folder / "model")
    compute = ComputeOptions(remat="full")
    packed = pack(samples, Layout(2, 80, TOKENS))
    logp = score(old, packed, jnp.float32(1), compute)
    packed = packed.with_tokens(old_logp=logp)
    flat = np.asarray(jax.nn.log_softmax(logits_of(old, rows)))
    rows["old_logp"] = [
        [float(flat[i, len(prompt) + t - 1, token]) for t, token in enumerate(tokens)]
        for i, (prompt, tokens) in enumerate(zip(rows["prompts"], rows["completions"], strict=True))
    ]
    (folder / "batch.json").write_text(json.dumps(rows))
    losses = {}
    for name, (algorithm, _) in LOSSES.items():
        objective = PolicyGradient(plain(algorithm), True)
        role = Role(policy, None, jnp.int32(0), None)
        found = jax.jit(
            lambda role, packed, o=objective: accumulate(role, packed, (o,), {"temperature": jnp.float32(1)}, compute)
        )
        gradient, metrics = found(role, packed)
        losses[name] = float(metrics["loss"])
        save_pretrained(gradient, tokenizer, folder / name)
    return losses


def logits_of(model: Any, rows: dict[str, Any]) -> jax.Array:
    """Logits [B, T, V] of each prompt with its completion in a row of its own."""
    whole = [[*prompt, *tokens] for prompt, tokens in zip(rows["prompts"], rows["completions"], strict=True)]
    width = max(map(len, whole))
    return logits(model, np.int32([row + [0] * (width - len(row)) for row in whole]))


def random_batch() -> dict[str, Any]:
    """Log-probabilities, older ones, a mask and advantages, drawn at random."""
    random = np.random.default_rng(7)
    old = np.float32(-random.gamma(2.0, 0.6, (5, 6)))
    logp = np.minimum(old + np.float32(random.normal(0, 0.35, old.shape)), np.float32(-1e-3))
    mask = np.arange(6) < np.array([[6], [4], [5], [2], [6]])
    advantages = np.float32(random.normal(size=5))
    return {name: array.tolist() for name, array in zip(("logp", "old_logp", "mask", "advantages"),
                                                        (logp, old, mask, advantages), strict=True)}  # fmt: skip


def on_random(algorithm: Algorithm, batch: dict[str, Any]) -> tuple[float, np.ndarray]:
    """(loss, gradient [B, T]) of ours on ``random_batch``."""
    given = {name: jnp.asarray(values, jnp.float32) for name, values in batch.items() if name != "mask"}
    width = len(batch["logp"][0])
    constant = isinstance(algorithm.reduce, ConstantLength)
    algorithm = dataclasses.replace(algorithm, reduce=ConstantLength(width)) if constant else algorithm
    rest = PolicyBatch(given["advantages"], jnp.asarray(batch["mask"]), old_logp=given["old_logp"])
    loss, gradient = jax.value_and_grad(lambda logp: policy_loss(plain(algorithm), logp, rest)[0])(given["logp"])
    return float(loss), np.asarray(gradient)


def far(mine: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, over the largest element."""
    return float(np.abs(mine - other).max() / max(np.abs(other).max(), 1e-30))


def gaps_on_random(
    losses: dict[str, tuple[Algorithm, dict[str, Any]]], batch: dict[str, Any], theirs: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Differences of value and gradient on the random batch, by loss."""
    gaps = {}
    for name, (algorithm, _) in losses.items():
        loss, gradient = on_random(algorithm, batch)
        other = theirs["random"][name]
        gaps[name] = {
            "random_loss": abs(loss - other["loss"]),
            "random_gradient": far(gradient, np.float32(other["gradient"])),
        }
    return gaps


def gaps_of_update(folder: Path, losses: dict[str, float], theirs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Differences of loss and gradient of every weight, after the same sampled groups, by loss."""
    gaps = {}
    for name, loss in losses.items():
        other = load_file(folder / f"{name}_trl.safetensors")
        mine = load_file(folder / name / "model.safetensors")
        for embedding in (mine[EMBEDDING], other[EMBEDDING]):
            embedding[PAD] = 0
        largest = max(np.abs(x).max() for x in other.values())
        weights = max(float(np.abs(mine[weight] - other[weight]).max() / largest) for weight in other)
        gaps[name] = {"loss": abs(loss - theirs["losses"][name]), "gradient": weights}
    return gaps


def compare(options: Options) -> Iterator[dict[str, Any]]:
    """Compare values and whole gradients of losses with those of other libraries.

    A tiny float32 model samples four groups; a policy nearby learns from them, so that ratios are not 1 and bounds cut.
    Its weights, the tokens, their old log-probabilities and the advantages go to TRL's ``GRPOTrainer._compute_loss`` in
    the environment of ``--trl`` (``pip install trl torch``), which returns losses and the gradient of every weight;
    ours are those of the learner's packed, microbatched update. The same losses, and those of verl (``pip install
    verl``), are compared on random log-probabilities alone; ``--fixtures`` writes those numbers to files, which tests
    read. A row for each loss has the largest difference of the loss (absolute) and of the gradient (over its largest
    element); one above 1e-5 is an error.
    """
    require(options.trl or options.verl, "give --trl or --verl, an interpreter")
    batch, largest = random_batch(), 0.0
    for peer, interpreter, compared in (("trl", options.trl, LOSSES), ("verl", options.verl, VERL_LOSSES)):
        if interpreter is None:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            losses = ours(folder) if peer == "trl" else {}
            given = {name: settings for name, (_, settings) in compared.items()}
            work = json.dumps({"folder": str(folder), "random": batch, "losses": given}) + "\n"
            program = [str(interpreter), str(Path(__file__).parent / "contestants.py"), f"loss_{peer}"]
            done = subprocess.run(
                program, input=work, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=False
            )
            require(done.returncode == 0, f"{peer}'s process ended with {done.returncode}")
            theirs = json.loads(done.stdout)
            gaps, of_update = gaps_on_random(compared, batch, theirs), gaps_of_update(folder, losses, theirs)
        for name, gap in gaps.items():
            row = of_update.get(name, {}) | gap
            largest = max(largest, *row.values())
            yield {"peer": peer, "loss_of": name} | row
        if options.fixtures is not None:
            told = {"versions": theirs["versions"], "batch": batch, "losses": theirs["random"]}
            (options.fixtures / f"{peer}_losses.json").write_text(json.dumps(told, indent=1) + "\n")
    if largest > LARGEST:
        raise InputError(f"a difference of {largest:.1e}, above {LARGEST:.0e}")
