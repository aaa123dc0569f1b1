"""Settings of learning: values without arrays, quick to import."""

import dataclasses
import operator
from typing import Annotated, Any

from jaxrl_llm.errors import require
from jaxrl_llm.models.config import Lora
from jaxrl_llm.system.setting import FIXED, FREE, MODEL, RECORDED, Choice, Count, Range, Setting

MUON_RMS = 0.2
"""Root mean square of Muon's steps: AdamW's, so that one learning rate serves both (arXiv 2502.16982, section 2.2)."""

MIN_BFLOAT16_STEP = 2.0**-13
"""Half the distance between bfloat16's numbers from 1/32 to 1/16: smaller steps leave weights of that size unchanged.
Most weights of large models are smaller (their deviation is about 0.02), most of small ones larger (SmolLM2-135M:
0.19).
"""


class UsualRate(float):
    """A default learning rate, which a run replaces by the usual one for its kind."""

    def __hash__(self) -> int:
        """Return another hash than the number's: tyro keeps types by default value, and would mix them up."""
        return hash((UsualRate, float(self)))


RL_RATE = UsualRate(1e-6)
"""The usual rate for reinforcement learning, and the default outside a run."""


@dataclasses.dataclass(frozen=True)
class Moments(Setting):
    """Settings of the moments: moving averages of the gradients, which the optimiser keeps for each weight.

    Attributes:
      b1: decay of the first moment; Muon's papers take 0.95; adafactor keeps no first moment at 0.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      dtype: of the first moment. The second stays float32: bfloat16 would round away what (1 - b2) adds to it.
      offload: keep them in host memory between updates, and fetch them whole for each.
    """

    b1: Annotated[float, Range("[0, 1)")] = 0.9
    b2: Annotated[float, Range("[0, 1)")] = 0.999
    eps: Annotated[float, Range("(0, inf)")] = 1e-8
    dtype: Annotated[str, Choice("float32", "bfloat16")] = "float32"
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Optimiser(Setting):
    """The optimiser: how gradients become steps.

    Attributes:
      name: "adamw" (arXiv 1711.05101), "adafactor" (second moments of next to no memory, arXiv 1804.04235) or "muon"
        (arXiv 2502.16982: matrices of layers by orthogonalised momentum, all else by AdamW, at AdamW's learning rates).
      learning_rate: after the warm-up; by default the usual one: 1e-6 for reinforcement learning and preferences, 2e-5
        for texts, 1e-4 for reward models.
      warmup: optimiser updates over which it rises linearly from 1/warmup of itself.
      schedule: "constant", or how it falls to 0 over ``decay``: "cosine" or "linear".
      decay: optimiser updates between which it falls; a late first one is warm-up, stable, decay (arXiv 2404.06395).
      weight_decay: on matrices, not on norms and biases.
      clip_norm: gradients are scaled down to this global norm; 0 leaves them alone.
      moments: see ``Moments``.
    """

    name: Annotated[str, Choice("adamw", "adafactor", "muon")] = "adamw"
    learning_rate: Annotated[float, Range("(0, inf)"), RECORDED] = RL_RATE
    warmup: Annotated[int, Range("[0, inf]")] = 0
    schedule: Annotated[str, Choice("constant", "cosine", "linear")] = "constant"
    decay: tuple[int, int] = (0, 0)
    weight_decay: Annotated[float, Range("[0, inf)")] = 0.0
    clip_norm: Annotated[float, Range("[0, inf)", "0 does not clip")] = 1.0
    moments: Moments = Moments()

    def check(self, run: Any, where: str) -> None:
        """Refuse a schedule without its decay, and a decay without its schedule."""
        fine = self.decay[1] > max(self.decay[0], self.warmup)
        require(
            self.decay == (0, 0) if self.schedule == "constant" else fine,
            f"{where}decay must be two counts of updates, the second above the first and above warmup ({self.warmup}), "
            f"between which schedule cosine or linear lowers the rate to 0; or 0 0 with schedule constant, got "
            f"{self.decay}",
        )

    def check_rounding(self, where: str, dtype: str, adapter: str) -> None:
        """Refuse bfloat16 weights (``dtype``) if their rounding would swallow steps at this rate. ``where``: this
        optimiser's name; ``adapter``: a setting that would spare them.
        """
        # AdamW and Adafactor move a weight by about the rate at most, Muon by a fifth of it.
        step = self.learning_rate * (MUON_RMS if self.name == "muon" else 1.0)
        require(
            dtype != "bfloat16" or step >= MIN_BFLOAT16_STEP,
            f"learner.dtype 'bfloat16' rounds away steps of {step:g} ({where}.learning_rate "
            f"{self.learning_rate:g}): set learner.dtype float32 and learner.compute.dtype bfloat16, or {adapter}",
        )


@dataclasses.dataclass(frozen=True)
class Critic(Setting):
    """The critic, which estimates the value of each state; its loss is ``algorithms.advantages.value_loss``. It is
    updated after the policy on each minibatch, with a gradient, a norm and a learning rate of its own, so that no
    coefficient weighs its loss against the policy's. Its weights have ``learner.dtype``.

    Attributes:
      model: its initial model: a run (RUN, RUN@STEP) or a Hugging Face directory, of a reward model or of a language
        model with the policy's vocabulary. None: the policy's own layers. A missing scalar head begins as zeros, and so
        do all values.
      optimiser: see ``Optimiser``; the learning rate is InstructGPT's (arXiv 2203.02155, appendix C.4).
      clip: how far a value may move from the one before the batch's first update before its loss is clipped; None: no
        bound.
      warmup: steps at the start of the run in which only the critic learns: the policy, and its version, stay.
      epochs: passes over each rollout; those after ``learner.epochs`` are the critic's alone. 0: as many as the
        policy's.
      adapter: train low-rank adapters (``learner.lora``) on the policy's frozen model, not a second model.
    """

    model: Annotated[str | None, MODEL] = None
    optimiser: Optimiser = Optimiser(learning_rate=9e-6)
    clip: Annotated[float | None, Range("(0, inf]", words="above 0, or None")] = 0.2
    warmup: Annotated[int, Range("[0, inf]")] = 0
    epochs: Annotated[int, Range("[0, inf]")] = 0
    adapter: bool = False

    def check(self, run: Any, where: str) -> None:
        """Refuse an adapter without a frozen base model, or on another model."""
        require(
            not self.adapter or run.learner.lora.rank > 0,
            f"{where}adapter True adapts the policy's frozen model, and the policy is trained whole: set "
            f"learner.lora.rank above 0, or {where}adapter False",
        )
        require(
            not self.adapter or self.model is None,
            f"{where}adapter True begins as the policy's frozen model, not as {where}model {self.model}: "
            f"set {where}model None, or {where}adapter False",
        )
        self.optimiser.check_rounding(
            f"{where}optimiser",
            "float32" if self.adapter else run.learner.dtype,
            f"{where}adapter True with learner.lora.rank above 0",
        )

    def notes(self, run: Any) -> list[str]:
        """Return a note on the steps in which the policy waits for its critic."""
        steps = "step" if self.warmup == 1 else f"{self.warmup} steps"
        waits = 0 < self.warmup < run.steps
        return [f"the critic learns alone in the first {steps} (recipe.critic.warmup)"] if waits else []


@dataclasses.dataclass(frozen=True)
class Compute(Setting):
    """How forward and backward passes are computed: speed and memory, and results by rounding only.
    ``learner.platform`` makes ``ComputeOptions`` and ``Layout`` of it, for a model and its devices.

    Attributes:
      microbatch_rows: rows R of packed tokens with activations in memory at one time; divided by the mesh's data and
        fsdp. 0 chooses, at each start, for the mesh and the memory of its devices.
      row_tokens: tokens S of a row, at least the longest prompt with its completion; divided by the mesh's tensor. 0
        chooses.
      remat: what of a layer the backward pass recomputes: "none", "dots" (all but matrix products) or "full" (all);
        "offload" is "full" with what a layer begins with in the host's memory, for long rows.
      attention: "xla" everywhere, "splash" on TPUs, "triton" or "cudnn" on GPUs; "auto": the first that fits the model.
      dtype: of matrix products and activations; sums, softmax and logits are float32.
    """

    microbatch_rows: Annotated[int, Count(0), FREE] = 0
    row_tokens: Annotated[int, Count(0), FREE] = 0
    remat: Annotated[str, FREE, Choice("none", "dots", "full", "offload", unknown=True)] = "full"
    attention: Annotated[str, FREE, Choice("auto", "xla", "splash", "triton", "cudnn", unknown=True)] = "auto"
    dtype: Annotated[str, Choice("float32", "bfloat16", unknown=True)] = "float32"

    def check(self, run: Any, where: str) -> None:
        """Refuse rows shorter than a prompt with its completion."""
        longest = run.longest_row
        require(
            self.row_tokens == 0 or self.row_tokens >= longest,
            f"{where}row_tokens {self.row_tokens} cannot hold a prompt with its completion: set it to at "
            f"least {longest}, or 0 to choose",
        )


@dataclasses.dataclass(frozen=True)
class Learner(Setting):
    """How the learner trains on a rollout.

    Attributes:
      optimiser: see ``Optimiser``.
      epochs: passes over each rollout.
      minibatches: optimiser updates in each pass; groups stay whole.
      target_kl: early stopping: end the passes with the first update before which the policy is this far (k3, nats per
        token) from where they began; that update is not applied. None never.
      compute: see ``Compute``.
      dtype: of the weights that are trained and saved (adapters are float32; of their base see ``Lora``). bfloat16 is
        refused for weights that are trained at a rate with steps that it would round away.
      lora: train low-rank adapters on the frozen model.
      routing_replay: of a model with experts: "R3" takes the sampler's experts in all passes of the policy (old, live,
        recomputed), "R2" those that the policy would take before the first update (one more forward pass); "off" lets
        the router choose anew in each pass. The reference is never replayed.
      keep_sampling_mask: take every log-probability (live, old, reference) among the tokens that the sampler's top-k
        and top-p kept there; needs V / 8 bytes for each sampled token, on the host and on every device.
    """

    optimiser: Optimiser = Optimiser()
    epochs: Annotated[int, Count(1)] = 1
    minibatches: Annotated[int, Count(1)] = 1
    target_kl: Annotated[float | None, Range("(0, inf]", words="above 0, or None to learn on")] = None
    compute: Compute = Compute()
    dtype: Annotated[str, FIXED, Choice("float32", "bfloat16", unknown=True)] = "float32"
    keep_sampling_mask: bool = False
    routing_replay: Annotated[str, Choice("off", "R2", "R3")] = "off"
    lora: Annotated[Lora, FIXED] = Lora()

    def check(self, run: Any, where: str) -> None:
        """Refuse minibatches without groups, and steps that rounding swallows."""
        groups = operator.attrgetter(run.group_field)(run)
        require(
            self.minibatches <= groups,
            f"{where}minibatches {self.minibatches} exceeds {run.group_field} {groups}: groups stay whole",
        )
        critic = getattr(getattr(run, "recipe", None), "critic", None)
        trains_whole = not self.lora.rank or (critic is not None and not critic.adapter)
        require(
            trains_whole or self.dtype == "float32",
            f"{where}dtype {self.dtype!r} is of weights that are trained, and this run trains adapters: set "
            f"{where}lora.base, of the model below them, and leave {where}dtype out",
        )
        self.optimiser.check_rounding(
            f"{where}optimiser", "float32" if self.lora.rank else self.dtype, f"{where}lora.rank above 0"
        )

    @property
    def initial_dtype(self) -> str:
        """Return the dtype in which the run's model is read: of the weights that are trained, or of the frozen base."""
        return self.lora.read_dtype if self.lora.rank else self.dtype

    @property
    def updates(self) -> int:
        """Return the number of optimiser updates of each batch."""
        return self.epochs * self.minibatches

    def computing(self, **changes: Any) -> "Learner":
        """Return the learner with changes of ``compute``."""
        return dataclasses.replace(self, compute=dataclasses.replace(self.compute, **changes))


def with_usual_rate(learner: Learner, rate: float) -> Learner:
    """Return the learner with this learning rate, unless a rate was set explicitly."""
    optimiser = getattr(learner, "optimiser", None)  # a run that is read may lack what its file could not hold
    current = getattr(optimiser, "learning_rate", None)
    if not isinstance(optimiser, Optimiser) or not isinstance(current, UsualRate) or current is rate:
        return learner
    return dataclasses.replace(learner, optimiser=dataclasses.replace(optimiser, learning_rate=rate))
