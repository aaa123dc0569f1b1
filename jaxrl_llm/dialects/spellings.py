"""The table of spellings: what each becomes, and what to know about it. docs/dialects.md shows the same rows."""

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
      becomes: its values and what they become.
      note: conditions, and where the two trainers differ.
    """

    name: str
    dialect: Literal["TRL", "verl"]
    fields: tuple[str, ...]
    becomes: str
    note: str = ""

    def typed(self, value: str) -> str:
        """The spelling with its value, in the way of its trainer: ``--beta 0.04``, ``algorithm.adv_estimator=grpo``."""
        return f"--{self.name} {value}" if self.dialect == "TRL" else f"{self.name}={value}"


KL = ("kl", "kl_coef", "kl_in")
PENALTY = ("kl", "kl_coef")


def _trl(name: str, fields: tuple[str, ...], becomes: str, note: str = "") -> Spelling:
    return Spelling(name, "TRL", fields, becomes, note)


def _verl(name: str, fields: tuple[str, ...], becomes: str, note: str = "") -> Spelling:
    return Spelling(name, "verl", fields, becomes, note)


TRL = (
    _trl(
        "loss_type",
        ("surrogate", "reduce"),
        "`grpo` PPOClip, SequenceMean; `dapo` PPOClip, TokenMean; `dr_grpo` PPOClip, ConstantLength; "
        "`cispo` CISPO, TokenMean; `sapo` SAPO, SequenceMean",
        "a surrogate of that kind keeps its numbers; `cispo` needs `--epsilon_high` unless the recipe is CISPO's. "
        "`bnpo` is refused: it divides by the tokens of one microbatch. ConstantLength's constant is the generation "
        "budget",
    ),
    _trl(
        "importance_sampling_level",
        ("ratio",),
        "`token` Token; `sequence` Sequence; `sequence_token` SequenceToken",
        "where the level changes, a clipped loss needs `--epsilon` too: no range suits both",
    ),
    _trl(
        "epsilon",
        ("surrogate",),
        "PPOClip's and MiniRL's `low`, and `high` too without `--epsilon_high`",
        "refused for CISPO, which has no lower bound in TRL",
    ),
    _trl(
        "epsilon_high",
        ("surrogate",),
        "PPOClip's and MiniRL's `high`; CISPO's `ratio_max`",
        "for CISPO it is the ratio itself, at least 1: TRL's default of 0.2 would scale every gradient by 0.2",
    ),
    _trl(
        "delta",
        ("surrogate",),
        "PPOClip's `dual`; `None` for none",
        "INTELLECT-2's upper clamp of the unclipped ratio: the dual clip exactly, where it is at least 1 + `high`; "
        "refused below",
    ),
    _trl("sapo_temperature_pos", ("surrogate",), "SAPO's `tau_pos`"),
    _trl("sapo_temperature_neg", ("surrogate",), "SAPO's `tau_neg`"),
    _trl(
        "beta",
        KL,
        "K3 in the loss with this `kl_coef`; 0 for no KL",
        "a recipe with UnbiasedK3 keeps that",
    ),
    _trl(
        "use_bias_correction_kl",
        ("kl",),
        "`True` UnbiasedK3; `False` K3",
        "needs a KL in the loss; refused with a sequence ratio, by which TRL would multiply and UnbiasedK3 does not",
    ),
    _trl(
        "scale_rewards",
        ("advantage",),
        "`group` or `True` GroupZScore(eps=1e-4); `batch` BatchScaled(eps=1e-4); `none` or `False` GroupMean",
        "only where the recipe has one of these three",
    ),
    _trl("mask_truncated_completions", ("drop_truncated",), "`drop_truncated`"),
    _trl(
        "off_policy_mask_threshold",
        ("sequence_filter",),
        "OffPolicySequenceMask with this `delta`; `None` for none",
    ),
    _trl(
        "vllm_importance_sampling_correction",
        ("correction",),
        "`False` for no correction",
        "`True` needs `--vllm_importance_sampling_mode`: TRL's default has changed",
    ),
    _trl(
        "vllm_importance_sampling_mode",
        ("correction",),
        "`token_truncate`, `sequence_truncate` TruncatedIS; `token_mask`, `sequence_mask` MaskedIS; of that level",
        "the bound is 3 without `--vllm_importance_sampling_clip_max`",
    ),
    _trl(
        "vllm_importance_sampling_clip_max",
        ("correction",),
        "TruncatedIS's `cap`, MaskedIS's `high`",
        "needs the mode",
    ),
    _trl("vllm_importance_sampling_cap", ("correction",), "the same", "the older name"),
    _trl(
        "vllm_importance_sampling_clip_min",
        ("correction",),
        "MaskedIS's `low`; `None` for 0",
        "needs the mode; refused with a truncating one, which has no lower bound here",
    ),
    _trl(
        "entropy_coef",
        ("entropy_coef",),
        "`entropy_coef`",
        "above 0 only with TokenMean: TRL's bonus is a mean over tokens, ours is reduced like the loss",
    ),
)
"""GRPOConfig's names, as flags."""

VERL = (
    _verl(
        "algorithm.adv_estimator",
        ("advantage",),
        "`grpo` GroupZScore; `rloo` LeaveOneOut; `reinforce_plus_plus` Whitened; `reinforce_plus_plus_baseline` "
        "Whitened(baseline=group)",
        "`gae` is refused: there is no critic",
    ),
    _verl(
        "algorithm.norm_adv_by_std_in_grpo",
        ("advantage",),
        "`True` GroupZScore; `False` GroupMean",
        "only where the recipe has one of these two, or with `adv_estimator=grpo`",
    ),
    _verl(
        ACTOR + "policy_loss.loss_mode",
        ("ratio", "surrogate", "reduce"),
        "`vanilla` Token, PPOClip with `dual` 3; `gspo` SequenceToken, PPOClip without, SequenceMean; `sapo` Token, "
        "SAPO, SequenceMean; `cispo` Token, CISPO",
        "a surrogate of that kind keeps its other numbers; `cispo`, and a clipped loss at another level, need both "
        "`clip_ratio_low` and `clip_ratio_high`",
    ),
    _verl(
        ACTOR + "loss_agg_mode",
        ("reduce",),
        "`token-mean` TokenMean; `seq-mean-token-mean` SequenceMean; `seq-mean-token-sum` SequenceSum",
        "for `gspo` and `sapo` only `seq-mean-token-mean`, here of the KL and the entropy too. "
        "`seq-mean-token-sum-norm` is refused: verl divides by the length only, and not by the sequences",
    ),
    _verl(
        ACTOR + "clip_ratio_low",
        ("surrogate",),
        "PPOClip's and MiniRL's `low`; CISPO's `ratio_min` is 1 less it",
        "for CISPO at most 1, which is no lower bound",
    ),
    _verl(
        ACTOR + "clip_ratio_high",
        ("surrogate",),
        "PPOClip's and MiniRL's `high`; CISPO's `ratio_max` is 1 plus it",
        "for CISPO too it is the distance from 1, unlike TRL's",
    ),
    _verl(ACTOR + "clip_ratio", (), "refused", "verl itself reads `clip_ratio_low` and `clip_ratio_high` in its place"),
    _verl(
        ACTOR + "clip_ratio_c",
        ("surrogate",),
        "PPOClip's `dual`",
        "not with a sequence ratio, where verl has no dual clip",
    ),
    _verl(ACTOR + "tau_pos", ("surrogate",), "SAPO's `tau_pos`"),
    _verl(ACTOR + "tau_neg", ("surrogate",), "SAPO's `tau_neg`"),
    _verl(
        ACTOR + "use_kl_loss",
        KL,
        "`True` a KL in the loss; `False` none there",
        "verl's 0.001 and `low_var_kl` where neither the recipe nor the command says otherwise",
    ),
    _verl(ACTOR + "kl_loss_coef", PENALTY, "`kl_coef`", "needs a KL in the loss"),
    _verl(
        ACTOR + "kl_loss_type",
        PENALTY,
        "`kl`, `k1` K1; `mse`, `k2` K2; `low_var_kl`, `k3` K3(clip=10); `k3+` K3Plus",
        "needs a KL in the loss; `k1+` is refused: `k2` has its gradient. A run refuses `k1`, whose expected "
        "gradient in the loss is 0. verl shows `k3+` clipped at 10",
    ),
    _verl(
        "algorithm.use_kl_in_reward",
        KL,
        "`True` K1 in the reward; `False` none there",
        "verl's 0.001 without `kl_ctrl.kl_coef`. With Whitened(baseline=group) refused: verl sums the KL over the "
        "sequence there, before the group's mean is taken",
    ),
    _verl("algorithm.kl_ctrl.kl_coef", PENALTY, "`kl_coef`", "needs a KL in the reward"),
    _verl(
        "algorithm.filter_groups.enable",
        ("filter_groups",),
        "`False` off; `True` what the recipe or the metric says, else `accuracy`",
    ),
    _verl(
        "algorithm.filter_groups.metric",
        ("filter_groups",),
        "`acc` `accuracy`; `score`, `seq_reward` `reward`",
        "needs a filter; `seq_final_reward` is refused: no filter here reads a reward with the KL in it",
    ),
    _verl(
        CORRECTION + "rollout_is",
        ("correction",),
        "`token`, `sequence` TruncatedIS of that level; `null` for none",
        "verl's cap of 2 without a threshold",
    ),
    _verl(CORRECTION + "rollout_is_threshold", ("correction",), "TruncatedIS's `cap`", "needs TruncatedIS"),
    _verl(ACTOR + "entropy_coeff", ("entropy_coef",), "`entropy_coef`"),
)
"""verl's overrides."""

SPELLINGS: dict[str, Spelling] = {spelling.name: spelling for spelling in (*TRL, *VERL)}
"""Every spelling by its name."""
