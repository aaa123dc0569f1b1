"""TRL's GRPOConfig: the effect of each name on a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses
from typing import Any

from jaxrl_llm.algorithms.advantages import BatchScaled, GroupMean, GroupZScore
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.ratios import MaskedIS, OffPolicySequenceMask, Sequence, SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, LUSPO, SAPO, PPOClip
from jaxrl_llm.algorithms.whole_step import TopEntropy
from jaxrl_llm.cli.dialects.spelling import KL, Given, check_range, refuse_own_kl, set_bounds, set_temperatures

LOSSES = {
    "grpo": (PPOClip, SequenceMean()),
    "dr_grpo": (PPOClip, ConstantLength(None)),
    "dapo": (PPOClip, TokenMean()),
    "cispo": (CISPO, TokenMean()),
    "sapo": (SAPO, SequenceMean()),
    "luspo": (LUSPO, SequenceMean()),
}
NO_LOSSES = {
    "bnpo": "it divides by the tokens of one microbatch, so that the loss depends on its size: write --loss_type dapo, "
    "which divides by those of the whole update",
}
LEVELS = {"token": Token(), "sequence": Sequence(), "sequence_token": SequenceToken()}
BY_GROUP = GroupZScore(eps=1e-4)
SCALES: dict[str, Any] = {"group": BY_GROUP, "batch": BatchScaled(eps=1e-4), "none": GroupMean()}
SCALES |= dict.fromkeys(("True", "true"), BY_GROUP) | dict.fromkeys(("False", "false"), GroupMean())
SWITCHED, MODE, HIGHEST, OLDER, LOWEST = (
    f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "cap", "clip_min")
)
MODES = {f"{level}_{rule}": (level, rule == "mask") for level in ("token", "sequence") for rule in ("truncate", "mask")}
TARGET, RATE, LEAST, MOST = "entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"
TAUS = ("sapo_temperature_pos", "sapo_temperature_neg")


def _loss(given: Given) -> None:
    surrogate, given.fields["reduce"] = given.get("loss_type")
    if not isinstance(given.fields["surrogate"], surrogate):
        usual = "TRL's default of 0.2 would be the ratio itself and scale every gradient by 0.2: set the bound with "
        unbound = surrogate is CISPO and "epsilon_high" not in given.texts
        given.refuse("loss_type", f"{usual}--epsilon_high 5.0, which is usual", unbound)
        given.fields["surrogate"] = surrogate()
    by_token = given.get("importance_sampling_level", given.fields["ratio"]).level == "token"
    wants = "its ratio is a sequence's: add --importance_sampling_level sequence"
    given.refuse("loss_type", wants, surrogate is LUSPO and by_token)


def _level(given: Given) -> None:
    given.fields["ratio"] = given.get("importance_sampling_level")
    check_range(given, "importance_sampling_level", "--epsilon {} --epsilon_high {}", "epsilon" in given.texts)


def _bounds(given: Given) -> None:
    low, high = given.get("epsilon"), given.get("epsilon_high")
    if not isinstance(given.fields["surrogate"], CISPO):
        set_bounds(given, ("epsilon", "epsilon_high"), low, low if high is None else high)
        return
    unread = "CISPO has no lower bound in TRL; its upper one is --epsilon_high 5.0, an absolute ratio"
    given.refuse("epsilon", unread, low is not None)
    given.refuse(
        "epsilon_high",
        f"for CISPO it is the ratio itself in TRL, and {high:g} would scale gradients by {high:g} or less (the "
        f"default of 0.2 does that): for a bound {high:g} above 1 write --epsilon_high {1 + high:g}; 5.0 is usual",
        high < 1,
    )
    given.fields["surrogate"] = dataclasses.replace(given.fields["surrogate"], ratio_max=high)


def _dual(given: Given) -> None:
    """Set the dual clip: TRL's clamp of r at delta, before the minimum, is that once delta >= 1 + high."""
    surrogate, delta = given.fields["surrogate"], given.get("delta")
    unread = f"only a clipped loss reads it, and the loss is {type(surrogate).__name__}: leave it out"
    given.refuse("delta", unread, not isinstance(surrogate, PPOClip))
    clip = 1 + surrogate.high
    low = f"below the clip at {clip:g} it would cut what is clipped already: give at least that"
    given.refuse("delta", low, delta is not None and delta < clip)
    given.fields["surrogate"] = dataclasses.replace(surrogate, dual=delta)


def _kl(given: Given) -> None:
    fields, switch = given.fields, "use_bias_correction_kl"
    refuse_own_kl(given, given.first(switch, "beta"))
    in_loss = fields["kl"] is not None and fields["kl_in"] == "loss"
    coef = given.get("beta", fields["kl_coef"] if in_loss else 0.0)
    unbiased = given.get(switch, isinstance(fields["kl"], UnbiasedK3))
    lacking = "there is no KL in the loss: add --beta 0.001, or leave it out"
    given.refuse(switch, lacking, switch in given.texts and not coef)
    biased = "TRL multiplies by the sequence's ratio here, which is not an unbiased KL: leave it out"
    given.refuse(switch, biased, given.get(switch, False) and fields["ratio"].level == "sequence")
    estimate = UnbiasedK3() if unbiased else K3()
    fields |= {"kl": estimate if coef else None, "kl_coef": coef or 0.0, "kl_in": "loss"}


def _scale(given: Given) -> None:
    estimator = given.fields["advantage"]
    unread = f"it scales GRPO's advantage, and this recipe has {type(estimator).__name__}: leave it out"
    given.refuse("scale_rewards", unread, not isinstance(estimator, (GroupZScore, BatchScaled, GroupMean)))
    given.fields["advantage"] = given.get("scale_rewards")


def _top(given: Given) -> None:
    share = given.get("top_entropy_quantile")
    given.refuse("top_entropy_quantile", "it is a share above 0 and at most 1", not 0 < share <= 1)
    given.fields["token_filter"] = TopEntropy(share) if share < 1 else None


def _filter(given: Given) -> None:
    threshold = given.get("off_policy_mask_threshold")
    given.fields["sequence_filter"] = None if threshold is None else OffPolicySequenceMask(threshold)


def _correction(given: Given) -> None:
    details = given.first(MODE, HIGHEST, OLDER, LOWEST)
    if given.get(SWITCHED) is False:
        given.refuse(details, f"nothing reads it with --{SWITCHED} False")
        given.fields["correction"] = None
        return
    given.refuse(details or SWITCHED, f"choose one with --{MODE}: {', '.join(MODES)}", MODE not in given.texts)
    given.refuse(
        OLDER, f"it is the older name of --{HIGHEST}: leave one out", HIGHEST in given.texts and OLDER in given.texts
    )
    level, masked = given.get(MODE)
    low, high = given.get(LOWEST), given.get(HIGHEST, given.get(OLDER, 3.0))
    unread = f"a truncated weight has no lower bound here: leave it out, or write --{MODE} {level}_mask"
    given.refuse(LOWEST, unread, bool(low) and not masked)
    given.fields["correction"] = MaskedIS(low or 0.0, high, level) if masked else TruncatedIS(high, level)


def _check_bonus(given: Given, name: str, ours: str) -> None:
    """Refuse an entropy bonus that would differ from TRL's; ``ours``: how to have it all the same."""
    reduce = given.fields["reduce"]
    here = f"here it is reduced like the loss, by {type(reduce).__name__}: {ours} for that, or add --loss_type dapo"
    given.refuse(name, f"TRL's bonus is a mean over tokens, {here}", not isinstance(reduce, TokenMean))


def _bonus(given: Given) -> None:
    coef = given.fields["entropy_coef"] = given.get("entropy_coef")
    if coef:
        _check_bonus(given, "entropy_coef", f"write --recipe.algorithm.entropy_coef {coef:g}")


def _controller(given: Given) -> None:
    """Set the controllers of the coefficients; TRL's rule for the entropy's is Skywork's, as ours is."""
    switch, of_kl = "use_adaptive_entropy", given.recipe.of_kl
    if not given.get(switch):
        unread = f"nothing reads it without --{switch} True: add that, or leave it out"
        given.refuse(given.first(TARGET, RATE, MOST, LEAST), unread)
        given.fields["controller"] = of_kl
        return
    _check_bonus(given, switch, "set recipe.controller to AdaptiveEntropy() in a configuration")
    given.refuse(LEAST, "the coefficient may fall to 0 here: leave it out", bool(given.get(LEAST)))
    own = AdaptiveEntropy(given.get(TARGET, 0.2), given.get(RATE, 0.005), largest=given.get(MOST, 1.0))
    given.fields["controller"] = own if of_kl is None else (of_kl, own)


def _mask(given: Given) -> None:
    """Set whether completions that are cut off are left out of the loss."""
    drop = given.get("mask_truncated_completions")
    given.fields["overlong"] = dataclasses.replace(given.fields["overlong"], drop=drop)


TABLE = (
    ("loss_type", "surrogate reduce", LOSSES, _loss, NO_LOSSES),
    ("importance_sampling_level", "ratio", LEVELS, _level),
    ("epsilon epsilon_high", "surrogate", "number", _bounds),
    ("delta", "surrogate", "number or None", _dual),
    (" ".join(TAUS), "surrogate", "number", lambda given: set_temperatures(given, *TAUS)),
    ("beta", KL, "number", _kl),
    ("use_bias_correction_kl", "kl", "switch", _kl),
    ("scale_rewards", "advantage", SCALES, _scale),
    ("mask_truncated_completions", "overlong", "switch", _mask),
    ("off_policy_mask_threshold", "sequence_filter", "number or None", _filter),
    ("top_entropy_quantile", "token_filter", "number", _top),
    (SWITCHED, "correction", "switch", _correction),
    (MODE, "correction", MODES, _correction),
    (f"{HIGHEST} {OLDER}", "correction", "number", _correction),
    (LOWEST, "correction", "number or None", _correction),
    ("entropy_coef", "entropy_coef", "number", _bonus),
    ("use_adaptive_entropy", "controller", "switch", _controller),
    (f"{TARGET} {RATE} {LEAST} {MOST}", "controller", "number", _controller),
)
"""TRL's names in the order of docs/dialects.md, which is the order of their effects. A row has names and fields, each
apart by spaces, and what else ``Spelling`` has: values, effect, reasons against known words.
"""
