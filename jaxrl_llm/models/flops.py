"""The FLOPs that a model needs, from its configuration alone: those of matrix products, of attention too."""

import math

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import parameter_shapes
from jaxrl_llm.models.experts import Matrices
from jaxrl_llm.models.layers import layer_windows


def count_parameters(config: ModelConfig) -> tuple[int, int, int]:
    """Count the parameters of the architecture: all of them, those that one token uses, and of these the ones in matrix
    products of the layers.

    A token does not use the experts that it does not take.
    """
    sizes = {path: math.prod(shape) for path, shape in parameter_shapes(config).items()}
    total = sum(sizes.values())
    if config.experts is not None:
        for path in sizes.keys() & {f"blocks.experts.{name}" for name in Matrices._fields}:
            sizes[path] = sizes[path] * config.experts.active // config.experts.count
    # Norms and biases are added or scaled with: no products.
    elementwise = ("norm", "_bias", "sinks")
    matrices = [path for path in sizes if path.startswith("blocks.") and not any(word in path for word in elementwise)]
    return total, sum(sizes.values()), sum(sizes[path] for path in matrices)


def visible_pairs(config: ModelConfig, first: int, last: int) -> float:
    """Count pairs of a query at positions first .. last - 1 and a key it sees, itself included, summed over layers."""
    pairs = 0.0
    for window in layer_windows(config):
        full = min(max(window - 1, first), last) if window else last  # queries before it see all
        pairs += (full * (full + 1) - first * (first + 1)) / 2 + (last - full) * window
    return pairs


def forward_flops(config: ModelConfig, tokens: float, pairs: float, predictions: float) -> float:
    """Return the FLOPs of a forward pass: ``2 n_layers tokens + 2 D V predictions + 4 N H pairs``.

    Pairs are those of ``visible_pairs``: attention is causal, so published counts of 6 N S D for it are halved.
    """
    *_, layers = count_parameters(config)
    a = config.attention
    head = config.width * config.vocab_size
    return 2.0 * layers * tokens + 2.0 * head * predictions + 4.0 * a.heads * a.head_dim * pairs


def training_flops(
    config: ModelConfig, tokens: float, pairs: float, predictions: float, adapter: int | None = None
) -> float:
    """Return the FLOPs of a loss and its gradient, without recomputation: ``6 N D`` and the attention.

    A forward pass's products are made once, and twice as many follow for the gradients of what they multiply: of inputs
    and of weights. Frozen weights get none, so below an adapter each product counts twice, not three times; attention
    multiplies no weights and counts three times in any case; the adapter's own weights count ``6 n`` a token.

    Args:
      config: the model.
      tokens: that its layers read.
      pairs: as in ``forward_flops``.
      predictions: tokens that its head predicts.
      adapter: the number of the adapter's weights, n, with all other weights frozen; None for none.
    """
    products = forward_flops(config, tokens, 0, predictions)
    attention = forward_flops(config, 0, pairs, 0)
    if adapter is None:
        return 3 * (products + attention)
    return 2 * products + 3 * attention + 6.0 * adapter * tokens
