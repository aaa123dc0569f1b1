"""verl's overrides: what each name does to a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses

from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, LeaveOneOut, Whitened
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus
from jaxrl_llm.algorithms.ratios import SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, PPOClip
from jaxrl_llm.cli.dialects.given import NOTHING, Given
from jaxrl_llm.cli.dialects.pieces import Fields, check_range, fields_of, kept, kind, with_bounds, with_temperatures
from jaxrl_llm.cli.dialects.spellings import ACTOR, CORRECTION
from jaxrl_llm.recipes import Recipe

ESTIMATOR, DEVIATION = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
MODE, AGGREGATION = ACTOR + "policy_loss.loss_mode", ACTOR + "loss_agg_mode"
CLIP, LOW, HIGH, DUAL = (ACTOR + "clip_ratio" + end for end in ("", "_low", "_high", "_c"))
IN_LOSS, LOSS_COEF, LOSS_TYPE = ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"
IN_REWARD, REWARD_COEF = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
FILTER, METRIC = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric"
LEVEL, CAP = CORRECTION + "rollout_is", CORRECTION + "rollout_is_threshold"

ESTIMATORS = {
    "grpo": GroupZScore(),
    "rloo": LeaveOneOut(),
    "reinforce_plus_plus": Whitened(),
    "reinforce_plus_plus_baseline": Whitened("group"),
}
NO_ESTIMATORS = {"gae": "it needs a critic: leave it out and begin with --recipe ppo, which has one"}
MODES = {
    "vanilla": (Token(), PPOClip),
    "gspo": (SequenceToken(), PPOClip),
    "sapo": (Token(), SAPO),
    "cispo": (Token(), CISPO),
}
AGGREGATIONS = {
    "token-mean": TokenMean(),
    "seq-mean-token-mean": SequenceMean(),
    "seq-mean-token-sum": SequenceSum(),
}
NO_AGGREGATIONS = {
    "seq-mean-token-sum-norm": "verl divides by the length only, so that the loss grows with the batch: leave it out "
    "and take --recipe dr_grpo, which divides by the number of sequences too"
}
METRICS = {"acc": "accuracy", "score": "reward", "seq_reward": "reward"}
NO_METRICS = {"seq_final_reward": "no filter here reads a reward with the KL in it: write seq_reward"}
BY_SEQUENCE = ("gspo", "sapo")
"""Losses that verl always reduces as seq-mean-token-mean."""
ESTIMATES = {
    "kl": K1(),
    "k1": K1(),
    "mse": K2(),
    "k2": K2(),
    "low_var_kl": K3(clip=10.0),
    "k3": K3(clip=10.0),
    "k3+": K3Plus(),
}
NO_ESTIMATES = {"k1+": "its gradient is that of k2, under another value: write k2"}
NO_KL = {"kl": None, "kl_coef": 0.0, "kl_in": "loss"}
COEF = 0.001
"""verl's default of both coefficients."""


def change(recipe: Recipe, given: Given) -> Recipe:
    """The recipe with what the names change.

    Raises:
      InputError: what cannot be said here, in one line.
      ValueError: the pieces contradict each other.
    """
    fields = fields_of(recipe.algorithm)
    for part in (_estimator, _mode, _reduce, _bounds, _dual, _temperatures, _kl, _correction, _entropy):
        fields |= part(fields, given)
    check_range(recipe.algorithm, fields, given, MODE, (LOW, HIGH), LOW in given and HIGH in given)
    return dataclasses.replace(
        recipe,
        algorithm=dataclasses.replace(recipe.algorithm, **fields),
        filter_groups=_filter(recipe.filter_groups, given),
    )


def _filter(reads: str | bool, given: Given) -> str | bool:
    """What the filter of groups reads: verl's metric, else what it read before."""
    on = given.switch(FILTER)
    metric = given.choice(METRIC, METRICS, NO_METRICS)
    on = bool(reads) if on is None else on
    if metric is not None and not on:
        given.refuse(METRIC, f"nothing reads it without {FILTER}=True: add that, or leave it out")
    return (metric or reads or "accuracy") if on else False


def _estimator(fields: Fields, given: Given) -> Fields:
    estimator = given.choice(ESTIMATOR, ESTIMATORS, NO_ESTIMATORS) or fields["advantage"]
    deviation = given.switch(DEVIATION)
    if deviation is None:
        return {"advantage": estimator}
    if not isinstance(estimator, (GroupZScore, GroupMean)):
        given.refuse(DEVIATION, f"only {ESTIMATOR}=grpo reads it, and the estimator is {kind(estimator)}: leave it out")
    return {"advantage": GroupZScore() if deviation else GroupMean()}


def _mode(fields: Fields, given: Given) -> Fields:
    found = given.choice(MODE, MODES, {})
    if found is None:
        return {}
    ratio, wanted = found
    if wanted is CISPO and not isinstance(fields["surrogate"], CISPO) and not (LOW in given and HIGH in given):
        given.refuse(MODE, f"say its bounds with {LOW} (1 for none) and {HIGH}, distances from 1")
    surrogate = kept(fields["surrogate"], wanted)
    if wanted is PPOClip:
        surrogate = dataclasses.replace(surrogate, dual=None if ratio.level == "sequence" else surrogate.dual or 3.0)
    return {"ratio": ratio, "surrogate": surrogate}


def _reduce(fields: Fields, given: Given) -> Fields:
    reduce = given.choice(AGGREGATION, AGGREGATIONS, NO_AGGREGATIONS)
    mode = given.texts.get(MODE)
    if mode not in BY_SEQUENCE:
        return {} if reduce is None else {"reduce": reduce}
    if reduce not in (None, SequenceMean()):
        given.refuse(
            AGGREGATION, f"verl's {mode} is always reduced as seq-mean-token-mean: write that, or leave it out"
        )
    return {"reduce": SequenceMean()}


def _bounds(fields: Fields, given: Given) -> Fields:
    if CLIP in given:
        given.refuse(CLIP, f"verl itself does not read it, since its other two have defaults: write {LOW} and {HIGH}")
    low = given.number(LOW)
    high = given.number(HIGH)
    surrogate = fields["surrogate"]
    if not isinstance(surrogate, CISPO):
        return with_bounds(surrogate, given, (LOW, HIGH), low, high)
    bounds = {"ratio_min": None if low is None else 1 - low, "ratio_max": None if high is None else 1 + high}
    return {"surrogate": dataclasses.replace(surrogate, **{k: v for k, v in bounds.items() if v is not None})}


def _dual(fields: Fields, given: Given) -> Fields:
    if DUAL not in given:
        return {}
    if not isinstance(fields["surrogate"], PPOClip) or fields["ratio"].level == "sequence":
        given.refuse(DUAL, "only loss_mode=vanilla reads it: leave it out")
    return {"surrogate": dataclasses.replace(fields["surrogate"], dual=given.number(DUAL))}


def _temperatures(fields: Fields, given: Given) -> Fields:
    return with_temperatures(fields["surrogate"], given, ACTOR + "tau_pos", ACTOR + "tau_neg")


def _kl(fields: Fields, given: Given) -> Fields:
    """Where the KL is, then what it is. Without a word on a place, it stays as the recipe has it."""
    if given.first(IN_LOSS, LOSS_COEF, LOSS_TYPE, IN_REWARD, REWARD_COEF) is None:
        return {}
    name = given.first(IN_LOSS, IN_REWARD, LOSS_COEF, LOSS_TYPE, REWARD_COEF)
    if fields["surrogate"].reads_kl_coef:
        given.refuse(name, f"the KL of {kind(fields['surrogate'])} is none to a reference: leave it out")
    place = fields["kl_in"] if fields["kl"] is not None else None
    in_loss = given.switch(IN_LOSS)
    in_reward = given.switch(IN_REWARD)
    in_loss = place == "loss" if in_loss is None else in_loss
    # A KL in the reward with the coefficient 0 gives way to one in the loss.
    in_reward = place == "reward" and not (in_loss and not fields["kl_coef"]) if in_reward is None else in_reward
    if in_loss and in_reward:
        given.refuse(name, f"there is one KL, in the loss or in the reward: add {IN_LOSS}=False or {IN_REWARD}=False")
    for on, switch, details in ((in_loss, IN_LOSS, (LOSS_COEF, LOSS_TYPE)), (in_reward, IN_REWARD, (REWARD_COEF,))):
        unread = given.first(*details)
        if unread is not None and not on:
            given.refuse(unread, f"nothing reads it without {switch}=True: add that, or leave it out")
    if in_loss:
        return _kl_in_loss(fields if place == "loss" else NO_KL, given)
    return _kl_in_reward(fields, given) if in_reward else NO_KL


def _kl_in_loss(fields: Fields, given: Given) -> Fields:
    estimate = given.choice(LOSS_TYPE, ESTIMATES, NO_ESTIMATES) or fields["kl"] or ESTIMATES["low_var_kl"]
    usual = fields["kl_coef"] or (COEF if IN_LOSS in given else 0.0)
    return {"kl": estimate, "kl_coef": given.number(LOSS_COEF, usual), "kl_in": "loss"}


def _kl_in_reward(fields: Fields, given: Given) -> Fields:
    name = given.first(IN_REWARD, REWARD_COEF)
    estimator = fields["advantage"]
    if name is None:
        return {}
    if isinstance(estimator, Whitened) and estimator.baseline == "group":
        given.refuse(
            name,
            "verl sums the KL over the sequence before this baseline, here it stays at its tokens: write "
            f"{IN_LOSS}=True {LOSS_TYPE}=k2",
        )
    usual = fields["kl_coef"] if fields["kl_in"] == "reward" else 0.0
    usual = usual or (COEF if IN_REWARD in given else 0.0)
    return {"kl": K1(), "kl_coef": given.number(REWARD_COEF, usual), "kl_in": "reward"}


def _correction(fields: Fields, given: Given) -> Fields:
    levels = {"token": "token", "sequence": "sequence"} | dict.fromkeys((*NOTHING, "None"), "none")
    level = given.choice(LEVEL, levels, {})
    cap = given.number(CAP)
    now = fields["correction"]
    if level is None and cap is None:
        return {}
    if level == "none" or (level is None and not isinstance(now, TruncatedIS)):
        return (
            {"correction": None}
            if cap is None
            else given.refuse(CAP, f"there is no truncated weight: add {LEVEL}=token")
        )
    kept_cap = now.cap if isinstance(now, TruncatedIS) else 2.0
    return {"correction": TruncatedIS(kept_cap if cap is None else cap, now.level if level is None else level)}


def _entropy(fields: Fields, given: Given) -> Fields:
    coef = given.number(ACTOR + "entropy_coeff")
    return {} if coef is None else {"entropy_coef": coef}
