"""TRL's GRPOConfig: the effect of each name on a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses
from typing import Any

from jaxrl_llm.algorithms.advantages import BatchScaled, GroupMean, GroupZScore, KLInReward
from jaxrl_llm.algorithms.kl import K3, AdaptiveEntropy, UnbiasedK3
from jaxrl_llm.algorithms.loss import Algorithm
from jaxrl_llm.algorithms.ratios import MaskedIS, OffPolicySequenceMask, Sequence, SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, MiniRL, PPOClip
from jaxrl_llm.cli.dialects import SPELLINGS, Given
from jaxrl_llm.recipes import Controller, Recipe

Fields = dict[str, Any]
"""The fields of an algorithm, by name."""
CLIPPED = (PPOClip, MiniRL)
"""Surrogates with bounds ``low`` and ``high``, distances from 1."""
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
SCALES: dict[str, Any] = {"group": BY_GROUP, "batch": BatchScaled(eps=1e-4), "none": GroupMean()}
SCALED = (GroupZScore, BatchScaled, GroupMean)
SCALES |= dict.fromkeys(("True", "true"), BY_GROUP) | dict.fromkeys(("False", "false"), GroupMean())
SAMPLING = "vllm_importance_sampling_"
MODES = {f"{level}_{rule}": (level, rule == "mask") for level in ("token", "sequence") for rule in ("truncate", "mask")}


def change(recipe: Recipe, given: Given) -> Recipe:
    """Return the recipe with the given changes.

    Raises:
      InputError: a setting that cannot be expressed here, in one line.
      ValueError: the pieces contradict each other.
    """
    fields = fields_of(recipe.algorithm)
    _loss(fields, given)
    fields["ratio"] = given.choice("importance_sampling_level", LEVELS) or fields["ratio"]
    estimator = fields["advantage"]
    unread = f"it scales GRPO's advantage, and this recipe has {kind(estimator)}: leave it out"
    scaled = given.choice("scale_rewards", SCALES)
    given.refuse("scale_rewards", unread, bool(scaled) and not isinstance(estimator, SCALED))
    fields["advantage"] = scaled or estimator
    for part in (_bounds, _kl, _correction):
        part(fields, given)
    if "off_policy_mask_threshold" in given:
        threshold = given.number("off_policy_mask_threshold", optional=True)
        fields["sequence_filter"] = None if threshold is None else OffPolicySequenceMask(threshold)
    if coef := given.number("entropy_coef"):
        _check_bonus(fields, given, "entropy_coef", f"write --recipe.algorithm.entropy_coef {coef:g}")
    fields["entropy_coef"] = given.number("entropy_coef", fields["entropy_coef"])
    bounds = ("epsilon", "epsilon_high")
    check_range(recipe.algorithm, fields, given, "importance_sampling_level", bounds, "epsilon" in given)
    truncated = given.switch("mask_truncated_completions", recipe.drop_truncated)
    algorithm = dataclasses.replace(recipe.algorithm, **fields)
    controller = _controller(recipe, fields, given)
    return dataclasses.replace(recipe, algorithm=algorithm, drop_truncated=truncated, controller=controller)


def fields_of(algorithm: Algorithm) -> Fields:
    """Return the fields of an algorithm by name, the estimator without a KL wrapper."""
    fields = dict(vars(algorithm))
    if isinstance(algorithm.advantage, KLInReward):
        fields["advantage"] = algorithm.advantage.estimator
    return fields


def kind(value: Any) -> str:
    """Return the name of a value's class."""
    return type(value).__name__


def set_bounds(fields: Fields, given: Given, names: tuple[str, ...], low: float | None, high: float | None) -> None:
    """Set ``low`` and ``high`` of a clipped surrogate; None keeps the value. ``names``: the spellings of the bounds."""
    name = given.first(*names)
    if name is None:
        return
    surrogate = fields["surrogate"]
    given.refuse(name, f"{kind(surrogate)} has no clip range: leave it out", not isinstance(surrogate, CLIPPED))
    low = surrogate.low if low is None else low
    high = surrogate.high if high is None else high
    fields["surrogate"] = dataclasses.replace(surrogate, low=low, high=high)


def set_temperatures(fields: Fields, given: Given, positive: str, negative: str) -> None:
    """Set the temperatures of SAPO from two spellings."""
    surrogate = fields["surrogate"]
    name = given.first(positive, negative)
    unlike = f"only SAPO has temperatures, and the loss is {kind(surrogate)}"
    given.refuse(name, unlike, not isinstance(surrogate, SAPO))
    if name is not None:
        found = SAPO(given.number(positive, surrogate.tau_pos), given.number(negative, surrogate.tau_neg))
        fields["surrogate"] = found


def refuse_own_kl(fields: Fields, given: Given, name: str) -> None:
    """Refuse the spelling of a KL to the reference if the surrogate has its own KL."""
    surrogate = fields["surrogate"]
    unread = f"the KL of {kind(surrogate)} is none to a reference: leave it out"
    given.refuse(name, unread, surrogate.reads_kl_coef)


def check_range(
    before: Algorithm, fields: Fields, given: Given, level: str, bounds: tuple[str, str], told: bool
) -> None:
    """Refuse a clip range made for ratios of another level: that of a sequence is some 500 times narrower.

    Raises:
      InputError: the spelling ``level`` changed the ratio's level, the loss is clipped, and the spellings ``bounds`` do
        not give its range (``told`` is False).
    """
    now = fields["ratio"].level
    was = before.ratio.level
    if level in given and now != was and isinstance(fields["surrogate"], CLIPPED) and not told:
        usual = ("3e-4", "4e-4") if now == "sequence" else ("0.2", "0.2")
        remedy = " ".join(SPELLINGS[name].typed(value) for name, value in zip(bounds, usual, strict=True))
        given.refuse(level, f"a clip range for ratios by {was} does not fit ratios by {now}: add one, such as {remedy}")


def _loss(fields: Fields, given: Given) -> None:
    found = given.choice("loss_type", LOSSES, NO_LOSSES)
    if found is None:
        return
    surrogate, fields["reduce"] = found
    if not isinstance(fields["surrogate"], surrogate):
        if surrogate is CISPO and "epsilon_high" not in given:
            given.refuse(
                "loss_type",
                "TRL's default of 0.2 would be the ratio itself and scale every gradient by 0.2: say the bound with "
                "--epsilon_high 5.0, which is usual",
            )
        fields["surrogate"] = surrogate()


def _bounds(fields: Fields, given: Given) -> None:
    """Set the clip range, the dual clip, and SAPO's temperatures."""
    low, high = given.number("epsilon"), given.number("epsilon_high")
    if isinstance(fields["surrogate"], CISPO):
        unread = "CISPO has no lower bound in TRL; its upper one is --epsilon_high 5.0, an absolute ratio"
        given.refuse("epsilon", unread, low is not None)
        if high is not None and high < 1:
            given.refuse(
                "epsilon_high",
                f"for CISPO it is the ratio itself in TRL, and {high:g} would scale gradients by {high:g} or less (the "
                f"default of 0.2 does that): for a bound {high:g} above 1 write --epsilon_high {1 + high:g}; 5.0 is "
                "usual",
            )
        if high is not None:
            fields["surrogate"] = dataclasses.replace(fields["surrogate"], ratio_max=high)
    else:
        set_bounds(fields, given, ("epsilon", "epsilon_high"), low, low if high is None else high)
    if "delta" in given:  # TRL's clamp of r at delta, before the minimum, is the dual clip once delta >= 1 + high
        surrogate = fields["surrogate"]
        unread = f"only a clipped loss reads it, and the loss is {kind(surrogate)}: leave it out"
        given.refuse("delta", unread, not isinstance(surrogate, PPOClip))
        delta = given.number("delta", optional=True)
        clip = 1 + surrogate.high
        low = f"below the clip at {clip:g} it would cut what is clipped already: give at least that"
        given.refuse("delta", low, delta is not None and delta < clip)
        fields["surrogate"] = dataclasses.replace(surrogate, dual=delta)
    set_temperatures(fields, given, "sapo_temperature_pos", "sapo_temperature_neg")


def _kl(fields: Fields, given: Given) -> None:
    name = given.first("use_bias_correction_kl", "beta")
    if name is None:
        return
    refuse_own_kl(fields, given, name)
    in_loss = fields["kl"] is not None and fields["kl_in"] == "loss"
    coef = given.number("beta", fields["kl_coef"] if in_loss else 0.0)
    switch = "use_bias_correction_kl"
    unbiased = given.switch(switch)
    lacking = "there is no KL in the loss: add --beta 0.001, or leave it out"
    given.refuse(switch, lacking, unbiased is not None and not coef)
    biased = "TRL multiplies by the sequence's ratio here, which is no unbiased KL: leave it out"
    given.refuse(switch, biased, bool(unbiased) and fields["ratio"].level == "sequence")
    unbiased = isinstance(fields["kl"], UnbiasedK3) if unbiased is None else unbiased
    estimate = UnbiasedK3() if unbiased else K3()
    fields |= {"kl": estimate if coef else None, "kl_coef": coef or 0.0, "kl_in": "loss"}


def _correction(fields: Fields, given: Given) -> None:
    switch, mode, highest, older, lowest = (
        SAMPLING + name for name in ("correction", "mode", "clip_max", "cap", "clip_min")
    )
    details = given.first(mode, highest, older, lowest)
    on = given.switch(switch)
    given.refuse(details, f"nothing reads it with --{switch} False", on is False)
    if on is False:
        fields["correction"] = None
    if on is False or (details is None and on is None):
        return
    given.refuse(details or switch, f"say how with --{mode}: {', '.join(MODES)}", mode not in given)
    given.refuse(older, f"it is the older name of --{highest}: leave one out", highest in given and older in given)
    level, masked = given.choice(mode, MODES)
    low = given.number(lowest, optional=True)
    high = given.number(highest, given.number(older, 3.0))
    unread = f"a truncated weight has no lower bound here: leave it out, or write --{mode} {level}_mask"
    given.refuse(lowest, unread, bool(low) and not masked)
    fields["correction"] = MaskedIS(low or 0.0, high, level) if masked else TruncatedIS(high, level)


def _check_bonus(fields: Fields, given: Given, name: str, ours: str) -> None:
    """Refuse an entropy bonus that would differ from TRL's; ``ours``: how to have it all the same."""
    here = f"here it is reduced like the loss, by {kind(fields['reduce'])}: {ours} for that, or add --loss_type dapo"
    given.refuse(name, f"TRL's bonus is a mean over tokens, {here}", not isinstance(fields["reduce"], TokenMean))


def _controller(recipe: Recipe, fields: Fields, given: Given) -> Controller | tuple[Controller, ...] | None:
    """Return the controllers of the coefficients; TRL's rule for the entropy's is Skywork's, as ours is."""
    switch, lowest = "use_adaptive_entropy", "entropy_coef_min"
    on = given.switch(switch)
    detail = given.first("entropy_target", "entropy_coef_delta", "entropy_coef_max", lowest)
    given.refuse(detail, f"nothing reads it without --{switch} True: add that, or leave it out", not on)
    if not on:
        return recipe.controller if on is None else recipe.of_kl
    _check_bonus(fields, given, switch, "set recipe.controller to AdaptiveEntropy() in a configuration")
    given.refuse(lowest, "the coefficient may fall to 0 here: leave it out", bool(given.number(lowest)))
    target = given.number("entropy_target", 0.2)
    rate = given.number("entropy_coef_delta", 0.005)
    own = AdaptiveEntropy(target, rate, largest=given.number("entropy_coef_max", 1.0))
    return own if recipe.of_kl is None else (recipe.of_kl, own)
