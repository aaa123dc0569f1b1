"""What a run says about learning: values without arrays, quick to import."""

import dataclasses

from jaxrl_llm.models.config import Lora

MUON_RMS = 0.2
"""Root mean square of Muon's steps: AdamW's, so that one learning rate serves both (arXiv 2502.16982, section 2.2)."""


class Usual(float):
    """A learning rate that nobody has named: a run takes what is usual for its kind."""


RL_RATE = Usual(1e-6)
"""Of reinforcement learning, and where no run says what is learned."""


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """How gradients become steps.

    Attributes:
      name: "adamw" (arXiv 1711.05101), "adafactor" (its second moments take next to no memory, arXiv 1804.04235) or
        "muon" (arXiv 2502.16982: matrices of layers by orthogonalised momentum, all else by AdamW; takes AdamW's
        learning rates).
      learning_rate: after the warm-up. Where it is left out it is what is usual for the kind of run: 1e-6 for
        reinforcement learning and preferences, 2e-5 for texts, 1e-4 for reward models.
      warmup: optimiser updates over which it rises linearly from 1/warmup of itself.
      schedule: "constant", or how it falls to 0 over ``decay``: "cosine" or "linear".
      decay: optimiser updates between which it falls; with a late first one it is warm-up, stable, decay (arXiv
        2404.06395).
      b1: decay of the first moment; Muon's papers take 0.95; adafactor keeps no first moment at 0.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: on matrices, not on norms and biases.
      clip_norm: gradients are scaled down to this global norm; 0 leaves them alone.
      momentum_dtype: of the first moment. The second one stays float32: bfloat16 would round away what (1 - b2) adds to
        it.
      offload: what the optimiser remembers lies in the host's memory between updates, and is fetched whole for each.
    """

    name: str = "adamw"
    learning_rate: float = RL_RATE
    warmup: int = 0
    schedule: str = "constant"
    decay: tuple[int, int] = (0, 0)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    momentum_dtype: str = "float32"
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Critic:
    """The model that says what each state is worth, and how it learns; its loss is ``algorithms.values.value_loss``.

    It is updated after the policy on each minibatch, with a gradient, a norm and a learning rate of its own, so that no
    coefficient weighs its loss against the policy's. Its weights have ``learner.dtype``.

    Attributes:
      model: what it begins as: a run (RUN, RUN@STEP) or a Hugging Face directory, of a reward model or of a language
        model of the policy's vocabulary. None: the policy's own layers. Where there is no scalar head it gets one of
        zeros, so that every value is 0 at first.
      optimiser: see ``Optimiser``; the learning rate is InstructGPT's (arXiv 2203.02155, appendix C.4).
      clip: how far a value may move from the one before the batch's first update until its loss keeps it; None for no
        bound.
      warmup: steps at the start of the run in which only the critic learns: the policy, and its version, stay.
      epochs: passes over each rollout; those after ``learner.epochs`` are the critic's alone. 0: as many as the
        policy's.
      adapter: train low-rank adapters (``learner.lora``) beside the policy's frozen model, not a second model.
    """

    model: str | None = None
    optimiser: Optimiser = Optimiser(learning_rate=9e-6)
    clip: float | None = 0.2
    warmup: int = 0
    epochs: int = 0
    adapter: bool = False


@dataclasses.dataclass(frozen=True)
class Learner:
    """How a rollout is learned from.

    Attributes:
      optimiser: see ``Optimiser``.
      epochs: passes over each rollout.
      minibatches: optimiser updates in each pass; groups stay whole.
      target_kl: end the passes with the first update before which the policy is this far (k3, nats per token) from
        where they began; that update is not applied. None never.
      microbatch_rows: rows R of packed tokens whose activations exist at one time; divided by the mesh's data and fsdp.
        0 chooses, at each start, for the mesh and the memory of its devices.
      row_tokens: tokens S of a row, at least the longest prompt with its completion; divided by the mesh's tensor. 0
        chooses.
      remat: what the backward pass keeps of a layer: "none", "dots" or "full" (keeps only its input).
      attention: "xla" everywhere, "splash" on TPUs, "cudnn" on GPUs; "auto" takes the kernel that can serve the model.
      dtype: of the weights that are trained and saved; under ``lora`` of the frozen model (adapters are float32).
        bfloat16 is refused for weights that are trained at a rate whose steps it would round away.
      compute_dtype: of matrix products and activations; sums, softmax and logits are float32.
      lora: train low-rank adapters beside the frozen model.
      keep_sampling_mask: take every log-probability (live, old, reference) among the tokens that the sampler's top-k
        and top-p kept at that position; needs V / 8 bytes for each sampled token, on the host and on every device.
    """

    optimiser: Optimiser = Optimiser()
    epochs: int = 1
    minibatches: int = 1
    target_kl: float | None = None
    microbatch_rows: int = 0
    row_tokens: int = 0
    remat: str = "full"
    attention: str = "auto"
    dtype: str = "float32"
    compute_dtype: str = "float32"
    keep_sampling_mask: bool = False
    lora: Lora = Lora()

    @property
    def updates(self) -> int:
        """Optimiser updates of each batch."""
        return self.epochs * self.minibatches


def at_usual_rate(learner: Learner, rate: float) -> Learner:
    """The learner with this learning rate where none is named."""
    optimiser = getattr(learner, "optimiser", None)  # a run that is read may lack what its file could not hold
    named = getattr(optimiser, "learning_rate", None)
    if not isinstance(optimiser, Optimiser) or not isinstance(named, Usual) or named is rate:
        return learner
    return dataclasses.replace(learner, optimiser=dataclasses.replace(optimiser, learning_rate=rate))
