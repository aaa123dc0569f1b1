"""How a forward pass is computed, as one value that a compiled program is made for."""

import dataclasses

import jax

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What the backward pass keeps of a layer: everything, nothing but its input, or the results of its matrix products."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """Choices that change speed and memory, and results by rounding only.

    Nothing of it is read from the machine that traces a program: one for a TPU can be compiled without a TPU.

    Attributes:
      dtype: of matrix products and activations.
      remat: key of ``REMAT``.
      attention: "xla", "splash" or "cudnn".
      unroll: every layer has its own part of the program; else they share one, in a loop.
      interpret: the attention of another platform's kernels is computed by XLA on this one, slowly: for tests.
    """

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"
    unroll: bool = False
    interpret: bool = False
