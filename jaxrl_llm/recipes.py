"""One value per published method: the algorithm and what its paper fixes around the loss."""

import dataclasses

from jaxrl_llm.algorithms import PRESETS, Algorithm


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A method of training.

    Attributes:
      name: key of ``RECIPES``, or yours.
      algorithm: the loss.
      filter_groups: learn only from prompts that some, not all, completions solve; sample on until there are enough.
      drop_truncated: completions cut off at the length limit are left out of the loss (their reward still counts).
      overlong_share: the last share of the generation budget in which a completion is punished, from 0 to -1; 0 is off.
      reference_reset: steps after which the reference becomes the policy; 0 never.
      reset_on_stall: evaluations without a better accuracy after which it does; 0 never.
      reset_optimiser: start the optimiser anew at each reset of the reference.
    """

    name: str
    algorithm: Algorithm
    filter_groups: bool = False
    drop_truncated: bool = False
    overlong_share: float = 0.0
    reference_reset: int = 0
    reset_on_stall: int = 0
    reset_optimiser: bool = False


GRPO = Recipe("grpo", PRESETS["grpo"])
"""DeepSeekMath (arXiv 2402.03300): GSM8K 82.9 -> 88.2 and MATH 46.8 -> 51.7 with a 7B model."""

DR_GRPO = Recipe("dr_grpo", PRESETS["dr_grpo"])
"""Understanding R1-Zero-like training (arXiv 2503.20783): no deviation, no length normalisation."""

DAPO = Recipe("dapo", PRESETS["dapo"], filter_groups=True, drop_truncated=True, overlong_share=0.2)
"""DAPO (arXiv 2503.14476): AIME24 30 -> 50 with Qwen2.5-32B. Its numbers, L_max 20480 and L_cache 4096, are the share 0.2."""

GSPO = Recipe("gspo", PRESETS["gspo"])
"""Group sequence policy optimisation (arXiv 2507.18071): no KL, a band of 3e-4 / 4e-4 on the sequence ratio."""

CISPO = Recipe("cispo", PRESETS["cispo"], filter_groups=True, overlong_share=0.2)
"""MiniMax-M1 (arXiv 2506.13585): DAPO's dynamic sampling and length penalty are kept."""

PRORL = Recipe("prorl", PRESETS["prorl"], filter_groups=True, reset_on_stall=3, reset_optimiser=True)
"""ProRL (arXiv 2505.24864): reference and optimiser begin anew when validation stagnates; average pass@1 on mathematics
44.45 -> 60.14 with a 1.5B model. How many evaluations make a stall is ours: the paper gives no number."""

RLOO = Recipe("rloo", PRESETS["rloo"])
"""Back to basics (arXiv 2402.14740): REINFORCE with a leave-one-out baseline."""

RECIPES: dict[str, Recipe] = {r.name: r for r in (GRPO, DR_GRPO, DAPO, GSPO, CISPO, PRORL, RLOO)}
"""Every recipe by its name; ``--recipe NAME`` chooses one."""
