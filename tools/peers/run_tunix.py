"""Tunix's own sampler, which runs in the trainer's process ("vanilla"): a batch runs until its longest row is done."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tunix.generate.sampler import CacheConfig, Sampler
from worker import Contestant, batches, serve


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
        return -2

    def pad_id(self) -> int:
        """No token."""
        return -1


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


def make(work: dict[str, Any]) -> Contestant:
    """A cache of exactly the longest request; every batch stops with its longest row; no log-probabilities."""
    model = load(work["model"])
    of = model.config
    cache = CacheConfig(work["prompt"] + work["completion"], of.num_layers, of.num_kv_heads, of.head_dim)
    sampler = Sampler(model, Ids(), cache)

    def greedy() -> Sequence[int]:
        return sampler(work["prompts"][:1], work["completion"], work["prompt"]).tokens[0]

    def generate(seed: int) -> tuple[list[Sequence[int]], int]:
        tokens, computed = [], 0
        for index, (prompts, limits) in enumerate(batches(work)):
            steps, draw = max(limits), 1000 * seed + index
            tokens += sampler(prompts, steps, work["prompt"], temperature=1.0, top_p=1.0, seed=draw).tokens
            computed += steps * len(prompts)
        return tokens, computed

    settings = "cache of the longest request, no log-probabilities"
    return Contestant(greedy, generate, ("google-tunix", "jax", "flax"), settings)


if __name__ == "__main__":
    serve(make)
