"""What a step must compute and read, from the run's sizes alone; nothing here has been compiled or measured."""

import dataclasses
import math

from jaxrl_llm.config import Run
from jaxrl_llm.learner.batch import Layout
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.models.attention import BLOCKS, part_columns
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import parameter_shapes
from jaxrl_llm.models.layers import layer_windows
from jaxrl_llm.stages.programs import minibatch, objectives_of


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Weights by what a token does with them.

    Attributes:
      total: all, each once.
      layers: in matrix products of the layers; every token passes them.
      head: in the product that makes logits; the embedding, where it is tied.
    """

    total: int
    layers: int
    head: int


def counts(config: ModelConfig) -> ParameterCounts:
    """Parameters of the architecture."""
    sizes = list(_sizes(parameter_shapes(config)))
    # Norms and biases are added or scaled with: no products.
    layers = sum(
        n for path, n in sizes if path.startswith("blocks/") and "norm" not in path and not path.endswith("_bias")
    )
    return ParameterCounts(sum(n for _, n in sizes), layers, config.width * config.vocab_size)


def _sizes(tree: dict, path: str = "") -> list[tuple[str, int]]:
    found = []
    for name, value in tree.items():
        found += _sizes(value, f"{path}{name}/") if isinstance(value, dict) else [(path + name, math.prod(value))]
    return found


def visible_pairs(config: ModelConfig, first: int, last: int) -> float:
    """Pairs of a query at positions first .. last - 1 and a key that it sees, itself included, summed over layers."""

    def one(window: int) -> float:
        if not window:
            return (last * (last + 1) - first * (first + 1)) / 2
        full = min(max(window - 1, first), last)  # queries before it see all
        return (full * (full + 1) - first * (first + 1)) / 2 + (last - full) * window

    return sum(one(window) for window in layer_windows(config))


def forward_flops(config: ModelConfig, tokens: float, pairs: float, predictions: float) -> float:
    """Multiplications and additions of a forward pass: ``2 n_layers tokens + 2 D V predictions + 4 N H pairs``.

    Pairs are those of ``visible_pairs``: attention is causal, as published counts that say 6 N S D for it are halved.
    """
    n = counts(config)
    a = config.attention
    return 2.0 * n.layers * tokens + 2.0 * n.head * predictions + 4.0 * a.heads * a.head_dim * pairs


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step computes, over all devices; a completion has ``mean`` tokens and a prompt as many as are allowed.

    Attributes:
      completions: B.
      mean: tokens of each.
      sampled: tokens, B * mean.
      prompts_flops: keys and values of all prompts, once for each group.
      decode_flops: all sampled tokens.
      score_passes: forward passes over the batch that are not differentiated: old policy, reference.
      forward: FLOPs of one useful forward pass over the batch.
      rows: of packed tokens that an update computes, padding included.
      row_tokens: S.
      microbatches: of an update, that hold anything.
      updates: of the optimiser.
      passes: forward passes that learning from a batch is worth: 3, or 2 where weights are frozen under an adapter.
    """

    completions: int
    mean: int
    sampled: int
    prompts_flops: float
    decode_flops: float
    score_passes: int
    forward: float
    rows: int
    row_tokens: int
    microbatches: int
    updates: int
    passes: int

    @property
    def train_flops(self) -> float:
        """Of all updates that count as work: nothing computed twice, and no gradient of a frozen weight."""
        return self.passes * self.forward * self.updates


def work(run: Run, config: ModelConfig, layout: Layout, mean: int | None = None) -> Work:
    """The step's work in microbatches of this layout; ``mean`` tokens of a completion, the longest if not given."""
    rollout = run.rollout
    mean = run.rollout.max_new_tokens if mean is None else mean
    prompt = rollout.max_prompt_tokens
    groups = rollout.prompts
    completions = groups * rollout.group
    own = visible_pairs(config, 0, prompt)
    after = visible_pairs(config, prompt, prompt + mean)
    prompts_flops = groups * forward_flops(config, prompt, own, 0)
    decode = completions * forward_flops(config, mean, after, mean)
    _, microbatches = packed_shapes(minibatch(run, config.vocab_size, mean), layout)
    share = 1 / run.learner.minibatches
    algorithm = run.recipe.algorithm
    needed = {name for objective in objectives_of(run) for name in objective.needs}
    in_reward = algorithm.needs_reference and not algorithm.kl_in_loss
    passes = len(needed) + in_reward
    return Work(
        completions, mean, completions * mean, prompts_flops, decode, passes, (prompts_flops + decode) * share,
        microbatches * layout.rows, layout.row_tokens, microbatches, run.learner.updates,
        2 if run.learner.lora.rank else 3,
    )  # fmt: skip


REMAT_PASSES = {"none": 0.0, "dots": 0.0, "full": 1.0}
"""Forward passes that the backward pass computes again; "dots" repeats no matrix product."""


def attention_share(attention: str, columns: int) -> float:
    """The share of all pairs of a row's columns that a back end computes: it knows that what is later is not seen."""
    if attention == "xla":
        parts = -(-columns // part_columns(columns))
        return (parts + 1) / (2 * parts)
    return 0.5 + BLOCKS[0] / (2 * columns) if attention == "splash" else 1.0


def update_flops(config: ModelConfig, one: Work, remat: str, attention: str) -> float:
    """FLOPs that one update really runs on all devices: padding, what attention hides too late, what remat repeats."""
    tokens = one.rows * one.row_tokens
    pairs = config.layers * one.rows * one.row_tokens**2 * min(attention_share(attention, one.row_tokens), 1.0)
    body = forward_flops(config, tokens, pairs, 0)
    predictions = one.sampled / max(one.updates, 1)
    # Nobody asks for what the last product of a layer returned, so that one is not repeated.
    repeated = body - 2.0 * config.layers * config.width * config.mlp_width * tokens
    # The head's logits are always computed again in the backward pass.
    return (
        one.passes * body + REMAT_PASSES[remat] * repeated + (one.passes + 1) * forward_flops(config, 0, 0, predictions)
    )
