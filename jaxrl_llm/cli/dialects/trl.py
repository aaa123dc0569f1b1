"""TRL's GRPOConfig: what each name does to a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses

from jaxrl_llm.algorithms.advantages import BatchScaled, GroupMean, GroupZScore
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.ratios import MaskedIS, OffPolicySequenceMask, Sequence, SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, PPOClip
from jaxrl_llm.cli.dialects.given import Given
from jaxrl_llm.cli.dialects.pieces import Fields, check_range, fields_of, kept, kind, with_bounds, with_temperatures
from jaxrl_llm.recipes import Controller, Recipe

LOSSES = {
    "grpo": (PPOClip, SequenceMean()),
    "dr_grpo": (PPOClip, ConstantLength(None)),
    "dapo": (PPOClip, TokenMean()),
    "cispo": (CISPO, TokenMean()),
    "sapo": (SAPO, SequenceMean()),
}
NO_LOSSES = {
    "bnpo": "it divides by the tokens of one microbatch, so that the loss depends on its size: write --loss_type dapo, "
    "which divides by those of the whole update"
}
LEVELS = {"token": Token(), "sequence": Sequence(), "sequence_token": SequenceToken()}
BY_GROUP = GroupZScore(eps=1e-4)
SCALES = {
    "group": BY_GROUP,
    "batch": BatchScaled(eps=1e-4),
    "none": GroupMean(),
    "True": BY_GROUP,
    "true": BY_GROUP,
    "False": GroupMean(),
    "false": GroupMean(),
}
SAMPLING = "vllm_importance_sampling_"
MODES = {f"{level}_{rule}": (level, rule == "mask") for level in ("token", "sequence") for rule in ("truncate", "mask")}


def change(recipe: Recipe, given: Given) -> Recipe:
    """The recipe with what the names change.

    Raises:
      InputError: what cannot be said here, in one line.
      ValueError: the pieces contradict each other.
    """
    fields = fields_of(recipe.algorithm)
    for part in (_loss, _level, _bounds, _delta, _temperatures, _scale, _kl, _correction, _filter, _entropy):
        fields |= part(fields, given)
    bounds = ("epsilon", "epsilon_high")
    check_range(recipe.algorithm, fields, given, "importance_sampling_level", bounds, "epsilon" in given)
    truncated = given.switch("mask_truncated_completions")
    return dataclasses.replace(
        recipe,
        algorithm=dataclasses.replace(recipe.algorithm, **fields),
        drop_truncated=recipe.drop_truncated if truncated is None else truncated,
        controller=_controller(recipe, fields, given),
    )


def _loss(fields: Fields, given: Given) -> Fields:
    found = given.choice("loss_type", LOSSES, NO_LOSSES)
    if found is None:
        return {}
    surrogate, reduce = found
    if surrogate is CISPO and not isinstance(fields["surrogate"], CISPO) and "epsilon_high" not in given:
        given.refuse(
            "loss_type",
            "TRL's default of 0.2 would be the ratio itself and scale every gradient by 0.2: say the bound with "
            "--epsilon_high 5.0, which is usual",
        )
    return {"surrogate": kept(fields["surrogate"], surrogate), "reduce": reduce}


def _level(fields: Fields, given: Given) -> Fields:
    ratio = given.choice("importance_sampling_level", LEVELS, {})
    return {} if ratio is None else {"ratio": ratio}


def _bounds(fields: Fields, given: Given) -> Fields:
    low = given.number("epsilon")
    high = given.number("epsilon_high")
    if not isinstance(fields["surrogate"], CISPO):
        return with_bounds(fields["surrogate"], given, ("epsilon", "epsilon_high"), low, low if high is None else high)
    if low is not None:
        given.refuse(
            "epsilon", "CISPO has no lower bound in TRL; its upper one is --epsilon_high 5.0, an absolute ratio"
        )
    if high is None:
        return {}
    if high < 1:
        given.refuse(
            "epsilon_high",
            f"for CISPO it is the ratio itself in TRL, and {high:g} would scale gradients by {high:g} or less (the "
            f"default of 0.2 does that): for a bound {high:g} above 1 write --epsilon_high {1 + high:g}; 5.0 is usual",
        )
    return {"surrogate": dataclasses.replace(fields["surrogate"], ratio_max=high)}


def _delta(fields: Fields, given: Given) -> Fields:
    """TRL clamps r at delta before the minimum with the clipped term: the dual clip exactly, once delta >= 1 + high."""
    surrogate = fields["surrogate"]
    if "delta" not in given:
        return {}
    if not isinstance(surrogate, PPOClip):
        given.refuse("delta", f"only a clipped loss reads it, and the loss is {kind(surrogate)}: leave it out")
    delta = given.number("delta", optional=True)
    if delta is not None and delta < 1 + surrogate.high:
        given.refuse(
            "delta",
            f"below the clip at {1 + surrogate.high:g} it would cut what is clipped already: give at least that",
        )
    return {"surrogate": dataclasses.replace(surrogate, dual=delta)}


def _temperatures(fields: Fields, given: Given) -> Fields:
    return with_temperatures(fields["surrogate"], given, "sapo_temperature_pos", "sapo_temperature_neg")


def _scale(fields: Fields, given: Given) -> Fields:
    estimator = given.choice("scale_rewards", SCALES, {})
    if estimator is None:
        return {}
    if not isinstance(fields["advantage"], (GroupZScore, BatchScaled, GroupMean)):
        given.refuse(
            "scale_rewards",
            f"it scales GRPO's advantage, and this recipe has {kind(fields['advantage'])}: leave it out",
        )
    return {"advantage": estimator}


def _kl(fields: Fields, given: Given) -> Fields:
    name = given.first("use_bias_correction_kl", "beta")
    if name is None:
        return {}
    if fields["surrogate"].reads_kl_coef:
        given.refuse(name, f"the KL of {kind(fields['surrogate'])} is none to a reference: leave it out")
    in_loss = fields["kl"] is not None and fields["kl_in"] == "loss"
    coef = given.number("beta", fields["kl_coef"] if in_loss else 0.0)
    unbiased = given.switch("use_bias_correction_kl")
    if unbiased is not None and not coef:
        given.refuse("use_bias_correction_kl", "there is no KL in the loss: add --beta 0.001, or leave it out")
    if not coef:
        return {"kl": None, "kl_coef": 0.0, "kl_in": "loss"}
    if unbiased and fields["ratio"].level == "sequence":
        given.refuse(
            "use_bias_correction_kl",
            "TRL multiplies by the sequence's ratio here, which is no unbiased KL: leave it out",
        )
    unbiased = isinstance(fields["kl"], UnbiasedK3) if unbiased is None else unbiased
    return {"kl": UnbiasedK3() if unbiased else K3(), "kl_coef": coef, "kl_in": "loss"}


def _correction(fields: Fields, given: Given) -> Fields:
    switch, mode, highest, older, lowest = (
        SAMPLING + name for name in ("correction", "mode", "clip_max", "cap", "clip_min")
    )
    details = given.first(mode, highest, older, lowest)
    on = given.switch(switch)
    if on is False:
        return (
            {"correction": None}
            if details is None
            else given.refuse(details, f"nothing reads it with --{switch} False")
        )
    if details is None and on is None:
        return {}
    if mode not in given:
        given.refuse(details or switch, f"say how with --{mode}: {', '.join(MODES)}")
    if highest in given and older in given:
        given.refuse(older, f"it is the older name of --{highest}: leave one out")
    level, masked = given.choice(mode, MODES, {})
    low = given.number(lowest, optional=True)
    high = given.number(highest, given.number(older, 3.0))
    if masked:
        return {"correction": MaskedIS(low or 0.0, high, level)}
    if low:
        given.refuse(
            lowest, f"a truncated weight has no lower bound here: leave it out, or write --{mode} {level}_mask"
        )
    return {"correction": TruncatedIS(high, level)}


def _filter(fields: Fields, given: Given) -> Fields:
    name = "off_policy_mask_threshold"
    if name not in given:
        return {}
    threshold = given.number(name, optional=True)
    return {"sequence_filter": None if threshold is None else OffPolicySequenceMask(threshold)}


def _entropy(fields: Fields, given: Given) -> Fields:
    coef = given.number("entropy_coef")
    if coef:
        _check_bonus(fields, given, "entropy_coef", f"write --recipe.algorithm.entropy_coef {coef:g}")
    return {} if coef is None else {"entropy_coef": coef}


def _check_bonus(fields: Fields, given: Given, name: str, ours: str) -> None:
    """Refuse a bonus that would not be what TRL's is; ``ours``: how to have it all the same."""
    if not isinstance(fields["reduce"], TokenMean):
        given.refuse(
            name,
            f"TRL's bonus is a mean over tokens, here it is reduced like the loss, by {kind(fields['reduce'])}: "
            f"{ours} for that, or add --loss_type dapo",
        )


def _controller(recipe: Recipe, fields: Fields, given: Given) -> Controller | tuple[Controller, ...] | None:
    """What moves the coefficients; TRL's rule for the entropy's is Skywork's, as ours is."""
    switch, lowest = "use_adaptive_entropy", "entropy_coef_min"
    on = given.switch(switch)
    detail = given.first("entropy_target", "entropy_coef_delta", "entropy_coef_max", lowest)
    if detail is not None and not on:
        given.refuse(detail, f"nothing reads it without --{switch} True: add that, or leave it out")
    if on is None:
        return recipe.controller
    if not on:
        return recipe.of_kl
    _check_bonus(fields, given, switch, "set recipe.controller to AdaptiveEntropy() in a configuration")
    if given.number(lowest):
        given.refuse(lowest, "the coefficient may fall to 0 here: leave it out")
    target = given.number("entropy_target", 0.2)
    rate = given.number("entropy_coef_delta", 0.005)
    own = AdaptiveEntropy(target, rate, largest=given.number("entropy_coef_max", 1.0))
    return own if recipe.of_kl is None else (recipe.of_kl, own)
