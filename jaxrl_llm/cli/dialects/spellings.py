"""The names that are known, and what of a recipe each may change; docs/dialects.md says what each becomes."""

import dataclasses
from typing import Literal

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One name of another trainer.

    Attributes:
      name: as that trainer has it, without dashes.
      dialect: whose it is.
      fields: of ``Recipe`` or ``Algorithm``, what it may change; none for a spelling that is always refused.
    """

    name: str
    dialect: Literal["TRL", "verl"]
    fields: tuple[str, ...]

    def typed(self, value: str) -> str:
        """The spelling with its value, in the way of its trainer: ``--beta 0.04``, ``algorithm.adv_estimator=grpo``."""
        return f"--{self.name} {value}" if self.dialect == "TRL" else f"{self.name}={value}"


KL = ("kl", "kl_coef", "kl_in")

TRL: dict[str, tuple[str, ...]] = {
    "loss_type": ("surrogate", "reduce"),
    "importance_sampling_level": ("ratio",),
    "epsilon": ("surrogate",),
    "epsilon_high": ("surrogate",),
    "delta": ("surrogate",),
    "sapo_temperature_pos": ("surrogate",),
    "sapo_temperature_neg": ("surrogate",),
    "beta": KL,
    "use_bias_correction_kl": ("kl",),
    "scale_rewards": ("advantage",),
    "mask_truncated_completions": ("drop_truncated",),
    "off_policy_mask_threshold": ("sequence_filter",),
    "vllm_importance_sampling_correction": ("correction",),
    "vllm_importance_sampling_mode": ("correction",),
    "vllm_importance_sampling_clip_max": ("correction",),
    "vllm_importance_sampling_cap": ("correction",),
    "vllm_importance_sampling_clip_min": ("correction",),
    "entropy_coef": ("entropy_coef",),
    "use_adaptive_entropy": ("controller",),
    "entropy_target": ("controller",),
    "entropy_coef_delta": ("controller",),
    "entropy_coef_min": ("controller",),
    "entropy_coef_max": ("controller",),
}
VERL: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": ("advantage",),
    "algorithm.norm_adv_by_std_in_grpo": ("advantage",),
    ACTOR + "policy_loss.loss_mode": ("ratio", "surrogate", "reduce"),
    ACTOR + "loss_agg_mode": ("reduce",),
    ACTOR + "clip_ratio_low": ("surrogate",),
    ACTOR + "clip_ratio_high": ("surrogate",),
    ACTOR + "clip_ratio": (),
    ACTOR + "clip_ratio_c": ("surrogate",),
    ACTOR + "tau_pos": ("surrogate",),
    ACTOR + "tau_neg": ("surrogate",),
    ACTOR + "use_kl_loss": KL,
    ACTOR + "kl_loss_coef": ("kl", "kl_coef"),
    ACTOR + "kl_loss_type": ("kl", "kl_coef"),
    "algorithm.use_kl_in_reward": KL,
    "algorithm.kl_ctrl.kl_coef": ("kl", "kl_coef"),
    "algorithm.filter_groups.enable": ("filter_groups",),
    "algorithm.filter_groups.metric": ("filter_groups",),
    CORRECTION + "rollout_is": ("correction",),
    CORRECTION + "rollout_is_threshold": ("correction",),
    ACTOR + "entropy_coeff": ("entropy_coef",),
}

SPELLINGS = {name: Spelling(name, "TRL", fields) for name, fields in TRL.items()}
SPELLINGS |= {name: Spelling(name, "verl", fields) for name, fields in VERL.items()}
"""Every spelling that is understood, or refused with a reason, by name."""
