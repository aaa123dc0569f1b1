"""What a step must compute and read, from the run's sizes alone; nothing here has been compiled or measured."""

import dataclasses
import math
from collections.abc import Sequence

from jaxrl_llm.config import Configuration
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.models.attention import BLOCKS, part_columns
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import parameter_shapes
from jaxrl_llm.models.layers import layer_windows
from jaxrl_llm.plan.arrays import Learned
from jaxrl_llm.stages.outline import Outline


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
      prompts_flops: keys and values of all prompts, once for each group; 0 where nothing is sampled.
      decode_flops: all sampled tokens.
      score_passes: forward passes over the batch that are not differentiated: old policy, reference.
      update_flops: that count as work in one update of every role: of the policy and of those beside it, where one
        makes more passes with its share of those.
      predictions: tokens of one update.
      rows: of packed tokens that an update computes, padding included.
      row_tokens: S.
      microbatches: of an update, that hold anything.
      updates: of the optimiser.
    """

    completions: int
    mean: int
    prompts_flops: float
    decode_flops: float
    score_passes: int
    update_flops: float
    predictions: int
    rows: int
    row_tokens: int
    microbatches: int
    updates: int

    @property
    def sampled(self) -> int:
        """Tokens, B * mean."""
        return self.completions * self.mean

    @property
    def train_flops(self) -> float:
        """Of all updates that count as work: nothing computed twice, and no gradient of a frozen weight."""
        return self.update_flops * self.updates


def work(run: Configuration, outline: Outline, learned: Sequence[Learned], mean: int | None = None) -> Work:
    """The step's work; ``mean`` tokens of a completion, the longest if not given."""
    groups = outline.groups
    layout = outline.forward.layout
    mean = groups.longest if mean is None else mean
    samples = outline.samples(mean)
    prompt = len(samples[0].prompt)
    tokens = len(samples[0].tokens)
    completions = groups.count * groups.each

    def flops(config: ModelConfig, predicts: bool) -> tuple[float, float]:
        own = forward_flops(config, prompt, visible_pairs(config, 0, prompt), 0)
        after = visible_pairs(config, prompt, prompt + tokens)
        return groups.count * own, completions * forward_flops(config, tokens, after, tokens if predicts else 0)

    _, microbatches = packed_shapes(samples, layout)
    policy = outline.training[0]
    scored = policy.needs | ({"old_logp", "ref_logp"} if run.output.monitor_kl else set())
    in_reward = outline.state.reference is not None and "ref_logp" not in scored
    settings = run.learner
    counted = sum(
        one.passes * sum(flops(one.config, one.predicts)) * one.training.passes(settings) / settings.epochs
        for one in learned
    )
    sampling = (0.0, 0.0) if outline.sampler is None else flops(learned[0].config, True)
    return Work(
        completions, mean, *sampling, len(scored) + in_reward, counted / settings.minibatches,
        sum(len(sample.tokens) for sample in samples), microbatches * layout.rows, layout.row_tokens, microbatches,
        settings.updates,
    )  # fmt: skip


REMAT_PASSES = {"none": 0.0, "dots": 0.0, "full": 1.0}
"""Forward passes that the backward pass computes again; "dots" repeats no matrix product."""


def attention_share(attention: str, columns: int) -> float:
    """The share of all pairs of a row's columns that a back end computes: it knows that what is later is not seen."""
    if attention == "xla":
        parts = -(-columns // part_columns(columns))
        return (parts + 1) / (2 * parts)
    return 0.5 + BLOCKS[0] / (2 * columns) if attention == "splash" else 1.0


def update_flops(one: Work, learned: Learned) -> float:
    """FLOPs that one update of a role really runs on all devices: padding, what attention hides too late, what remat
    repeats."""
    config = learned.config
    compute = learned.forward.compute
    tokens = one.rows * one.row_tokens
    body = packed_flops(config, compute.attention, one.rows, one.row_tokens)
    # Nobody asks for what the last product of a layer returned, so that one is not repeated.
    repeated = body - 2.0 * config.layers * config.width * config.mlp_width * tokens
    # The head's logits are always computed again in the backward pass.
    head = forward_flops(config, 0, 0, one.predictions) if learned.predicts else 0.0
    return learned.passes * body + REMAT_PASSES[compute.remat] * repeated + (learned.passes + 1) * head


def packed_flops(config: ModelConfig, attention: str, rows: int, row_tokens: int) -> float:
    """FLOPs of the layers in a forward pass over packed rows, padding included."""
    pairs = config.layers * rows * row_tokens**2 * min(attention_share(attention, row_tokens), 1.0)
    return forward_flops(config, rows * row_tokens, pairs, 0)
