"""Tunix: its own sampler, which runs in the trainer's process ("vanilla"), and the step of its GRPO learner.

A batch is sampled until its longest row is done. Its packing of rows needs the attention kernel for TPUs.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl import function_registry
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig
from worker import Contestant, batches, padded, serve

PAD, END = -1, -2
"""No tokens."""
MICROBATCH = 16
"""Rows of one forward and backward pass."""


class Ids:
    """A tokenizer that takes and gives token ids; no token pads or ends."""

    def encode(self, ids: list[int]) -> list[int]:
        """The ids themselves."""
        return ids

    def decode(self, ids: list[int]) -> str:
        """No text: it would cost time."""
        return ""

    def bos_id(self) -> int:
        """0: nothing is put before a prompt."""
        return 0

    def eos_id(self) -> int:
        """No token."""
        return END

    def pad_id(self) -> int:
        """No token."""
        return PAD


def load(directory: str) -> Any:
    """Its Qwen3 or Llama with the directory's weights in float32, on one device."""
    config = json.loads((Path(directory) / "config.json").read_text())
    heads = config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    shape = {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": theta,
    }
    tied = config["tie_word_embeddings"]
    if config["model_type"] == "qwen3":
        from tunix.models.qwen3 import model, params

        of = model.ModelConfig(**shape, use_tied_embedding=tied)
    else:
        from tunix.models.llama3 import model, params

        of = model.ModelConfig(**shape, weight_tying=tied)
    # Both families rotate by a base of 1e6 whatever the config says; this makes them compute the model that is named.
    model.apply_rope = functools.partial(model.apply_rope, rope_theta=theta)
    return params.create_model_from_safe_tensors(directory, of, dtype=jnp.float32)


def trainer_of(model: Any, work: dict[str, Any], parts: int) -> Trainer:
    """The trainer as its GRPO learner sets it up, for an optimiser step of so many passes; the gradient's norm is
    noted.
    """
    algorithm = GRPOConfig(num_generations=work["group"], beta=0.0, epsilon=0.2)
    algorithm.temperature = 1.0
    adam = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.adamw(work["learning_rate"], weight_decay=0.0))
    trainer = Trainer(model, adam, TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=parts), lambda: {})
    loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
    given = functools.partial(loss, algo_config=algorithm, pad_id=PAD, eos_id=END)
    trainer.with_loss_fn(lambda model, train_example: given(model, train_example), has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    return trainer


def learner(model: Any, work: dict[str, Any]) -> Callable[[list[list[int]]], tuple[float, float, int]]:
    """The step that its GRPO learner trains by, on rows as wide as the longest completion may be, as that learner has
    them.
    """
    count = len(work["prompts"])
    size = math.gcd(count, MICROBATCH)
    trainer = trainer_of(model, work, count // size)
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
    prompts, advantages = jnp.asarray(work["prompts"], jnp.int32), jnp.asarray(work["advantages"], jnp.float32)

    def update(completions: list[list[int]]) -> tuple[float, float, int]:
        tokens = jnp.asarray(padded(completions, work["completion"], PAD), jnp.int32)
        batch = TrainExample(prompts, prompts != PAD, tokens, tokens != PAD, advantages, None, None)
        losses = []
        for start in range(0, count, size):
            losses.append(step(jax.tree.map(lambda x, at=start: x[at : at + size], batch))[0])
        jax.block_until_ready(nnx.state(model))
        norm = optax.tree.get(nnx.as_pure(nnx.state(trainer.optimizer)), "norm")
        return float(sum(losses)) / len(losses), float(norm), tokens.shape[0] * (work["prompt"] + work["completion"])

    return update


def make(work: dict[str, Any]) -> Contestant:
    """A cache of exactly the longest request; every batch stops with its longest row; no log-probabilities."""
    model = load(work["model"])
    of = model.config
    cache = CacheConfig(work["prompt"] + work["completion"], of.num_layers, of.num_kv_heads, of.head_dim)
    sampler = Sampler(model, Ids(), cache)

    def greedy() -> Sequence[int]:
        return sampler(work["prompts"][:1], work["completion"], work["prompt"]).tokens[0]

    def generate(seed: int) -> tuple[list[Sequence[int]], int]:
        sampler.transformer_state = nnx.variables(model)
        tokens, computed = [], 0
        for index, (prompts, limits) in enumerate(batches(work)):
            steps, draw = max(limits), 1000 * seed + index
            tokens += sampler(prompts, steps, work["prompt"], temperature=1.0, top_p=1.0, seed=draw).tokens
            computed += steps * len(prompts)
        return tokens, computed

    settings = f"cache of the longest request, no log-probabilities; {MICROBATCH} rows at a time, nothing recomputed"
    update = None if work["what"] == "rollout" else learner(model, work)
    return Contestant(greedy, generate, update, ("google-tunix", "jax", "flax"), settings)


if __name__ == "__main__":
    serve(make)
