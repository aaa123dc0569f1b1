"""What a run says about learning: values without arrays, quick to import."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """AdamW (arXiv 1711.05101).

    Attributes:
      learning_rate: after the warm-up.
      warmup: optimiser updates over which it rises linearly from 1/warmup of itself.
      schedule: "constant" or "cosine" (to 0 at ``decay_updates``).
      decay_updates: where the cosine ends, in optimiser updates.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: on matrices, not on norms and biases.
      clip_norm: gradients are scaled down to this global norm; 0 leaves them alone.
    """

    learning_rate: float = 1e-6
    warmup: int = 0
    schedule: str = "constant"
    decay_updates: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Learner:
    """How a rollout is learned from.

    Attributes:
      optimiser: see ``Optimiser``.
      epochs: passes over each rollout.
      minibatches: optimiser updates in each pass; groups stay whole.
      target_kl: end the passes early once the policy is this far (k3, nats per token) from where they began; None never.
      microbatch_rows: rows R of packed tokens whose activations exist at one time; divided by the mesh's data and fsdp.
      row_tokens: tokens S of a row, at least the longest prompt with its completion; 0 chooses.
      remat: what the backward pass keeps of a layer: "none", "dots" or "full" (keeps only its input).
      attention: "xla" everywhere, "splash" on TPUs, "cudnn" on GPUs; "auto" takes the kernel that can serve the model.
      dtype: of the weights that are trained and saved.
      compute_dtype: of matrix products and activations; sums, softmax and logits are float32.
      keep_sampling_mask: take every log-probability (live, old, reference) among the tokens that the sampler's top-k and
        top-p kept at that position; needs V / 8 bytes for each sampled token, on the host and on every device.
    """

    optimiser: Optimiser = Optimiser()
    epochs: int = 1
    minibatches: int = 1
    target_kl: float | None = None
    microbatch_rows: int = 2
    row_tokens: int = 0
    remat: str = "full"
    attention: str = "auto"
    dtype: str = "float32"
    compute_dtype: str = "float32"
    keep_sampling_mask: bool = False
