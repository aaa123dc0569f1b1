"""Whether an update of ours and TRL's loss agree: the same sampled groups, the same weights, loss and whole gradient.

    python tools/compare_losses.py --trl ENV/bin/python [--folder DIR] [--fixture FILE.json]

A tiny float32 model samples four groups; a policy nearby learns from them, so that ratios are not 1 and bounds cut. Its
weights, the tokens, their old log-probabilities and the advantages go to TRL's ``GRPOTrainer._compute_loss`` in the
environment of ``--trl`` (``pip install trl torch``), which returns losses and the gradient of every weight; ours are
those of the learner's packed, microbatched update. The same losses are compared on random log-probabilities alone;
``--fixture`` writes those numbers to a file, which tests read. Prints a line for each loss, the largest difference of
the loss (absolute) and of the gradient (over its largest element); the exit code is 1 where one is above 1e-5.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from safetensors.numpy import load_file

from jaxrl_llm.algorithms import PRESETS, Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.ratios import Sequence, Token
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import LUSPO, PPOClip
from jaxrl_llm.learner import Layout, PolicyGradient, Sample, pack
from jaxrl_llm.learner.forward import score
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models import load_pretrained, save_pretrained
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
    "cispo": (PRESETS["cispo"], {"loss_type": "cispo", "epsilon_high": 5.0}),
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


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared, and with what.

    Attributes:
      trl: the interpreter of an environment with TRL and torch.
      folder: of the model, the batch and the gradients; None for one that is deleted.
      fixture: a file for the numbers on random log-probabilities; None for none.
    """

    trl: Path
    folder: Path | None = None
    fixture: Path | None = None


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
    from jaxrl_llm.models import logits

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


def main(options: Options) -> int:
    """Returns the exit code."""
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        losses, batch = ours(folder), random_batch()
        work = {"folder": str(folder), "random": batch, "losses": {name: given for name, (_, given) in LOSSES.items()}}
        program = [str(options.trl), str(Path(__file__).parent / "peers" / "loss_trl.py")]
        done = subprocess.run(program, input=json.dumps(work), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"compare_losses: TRL's process ended with {done.returncode}: {done.stderr[-2000:]}")
        theirs = json.loads(done.stdout)
        gaps = {}
        for name, (algorithm, _) in LOSSES.items():
            other = load_file(folder / f"{name}_trl.safetensors")
            mine = load_file(folder / name / "model.safetensors")
            for embedding in (mine[EMBEDDING], other[EMBEDDING]):
                embedding[PAD] = 0
            largest = max(np.abs(x).max() for x in other.values())
            weights = max(float(np.abs(mine[weight] - other[weight]).max() / largest) for weight in other)
            loss, gradient = on_random(algorithm, batch)
            alone = theirs["random"][name]
            gaps[name] = {
                "loss": abs(losses[name] - theirs["losses"][name]),
                "gradient": weights,
                "random_loss": abs(loss - alone["loss"]),
                "random_gradient": far(gradient, np.float32(alone["gradient"])),
            }
            print(name.ljust(10), "  ".join(f"{what} {gap:.1e}" for what, gap in gaps[name].items()))
    if options.fixture is not None:
        found = {"versions": theirs["versions"], "batch": batch, "losses": theirs["random"]}
        options.fixture.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"versions": theirs["versions"], "gaps": gaps}))
    return int(max(gap for one in gaps.values() for gap in one.values()) > LARGEST)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
