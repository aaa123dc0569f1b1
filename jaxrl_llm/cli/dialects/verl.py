"""verl's overrides: the effect of each name on a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses

from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, LeaveOneOut, Whitened
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus
from jaxrl_llm.algorithms.ratios import SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, PPOClip
from jaxrl_llm.cli.dialects import ACTOR, CORRECTION, Given
from jaxrl_llm.cli.dialects.trl import Fields, check_range, fields_of, kind, refuse_own_kl, set_bounds, set_temperatures
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
    """Return the recipe with the given changes.

    Raises:
      InputError: a setting that cannot be expressed here, in one line.
      ValueError: the pieces contradict each other.
    """
    fields = fields_of(recipe.algorithm)
    for part in (_estimator, _mode, _reduce, _bounds, _kl, _correction):
        part(fields, given)
    fields["entropy_coef"] = given.number(ACTOR + "entropy_coeff", fields["entropy_coef"])
    check_range(recipe.algorithm, fields, given, MODE, (LOW, HIGH), LOW in given and HIGH in given)
    algorithm = dataclasses.replace(recipe.algorithm, **fields)
    # The filter of groups reads verl's metric, else what it read before.
    on = given.switch(FILTER, bool(recipe.filter_groups))
    metric = given.choice(METRIC, METRICS, NO_METRICS)
    unread = f"nothing reads it without {FILTER}=True: add that, or leave it out"
    given.refuse(METRIC, unread, metric is not None and not on)
    reads = (metric or recipe.filter_groups or "accuracy") if on else False
    return dataclasses.replace(recipe, algorithm=algorithm, filter_groups=reads)


def _estimator(fields: Fields, given: Given) -> None:
    estimator = given.choice(ESTIMATOR, ESTIMATORS, NO_ESTIMATORS) or fields["advantage"]
    deviation = given.switch(DEVIATION)
    if deviation is not None:
        unread = f"only {ESTIMATOR}=grpo reads it, and the estimator is {kind(estimator)}: leave it out"
        given.refuse(DEVIATION, unread, not isinstance(estimator, (GroupZScore, GroupMean)))
        estimator = GroupZScore() if deviation else GroupMean()
    fields["advantage"] = estimator


def _mode(fields: Fields, given: Given) -> None:
    found = given.choice(MODE, MODES)
    if found is None:
        return
    fields["ratio"], wanted = found
    surrogate = fields["surrogate"]
    if not isinstance(surrogate, wanted):
        if wanted is CISPO and not (LOW in given and HIGH in given):
            given.refuse(MODE, f"say its bounds with {LOW} (1 for none) and {HIGH}, distances from 1")
        surrogate = wanted()
    if wanted is PPOClip:
        by_sequence = fields["ratio"].level == "sequence"
        surrogate = dataclasses.replace(surrogate, dual=None if by_sequence else surrogate.dual or 3.0)
    fields["surrogate"] = surrogate


def _reduce(fields: Fields, given: Given) -> None:
    reduce = given.choice(AGGREGATION, AGGREGATIONS, NO_AGGREGATIONS)
    mode = given.texts.get(MODE)
    if mode in BY_SEQUENCE:
        always = f"verl's {mode} is always reduced as seq-mean-token-mean: write that, or leave it out"
        given.refuse(AGGREGATION, always, reduce not in (None, SequenceMean()))
        reduce = SequenceMean()
    fields["reduce"] = reduce or fields["reduce"]


def _bounds(fields: Fields, given: Given) -> None:
    """Set the clip range, the dual clip, and SAPO's temperatures."""
    instead = f"verl itself does not read it, since its other two have defaults: write {LOW} and {HIGH}"
    given.refuse(CLIP, instead, CLIP in given)
    low, high = given.number(LOW), given.number(HIGH)
    surrogate = fields["surrogate"]
    if isinstance(surrogate, CISPO):
        least = surrogate.ratio_min if low is None else 1 - low
        most = surrogate.ratio_max if high is None else 1 + high
        fields["surrogate"] = dataclasses.replace(surrogate, ratio_min=least, ratio_max=most)
    else:
        set_bounds(fields, given, (LOW, HIGH), low, high)
    if DUAL in given:
        other = not isinstance(surrogate, PPOClip) or fields["ratio"].level == "sequence"
        given.refuse(DUAL, "only loss_mode=vanilla reads it: leave it out", other)
        fields["surrogate"] = dataclasses.replace(fields["surrogate"], dual=given.number(DUAL))
    set_temperatures(fields, given, ACTOR + "tau_pos", ACTOR + "tau_neg")


def _kl(fields: Fields, given: Given) -> None:
    """Set the place of the KL, then its estimator and coefficient. An unspecified place stays as in the recipe."""
    name = given.first(IN_LOSS, IN_REWARD, LOSS_COEF, LOSS_TYPE, REWARD_COEF)
    if name is None:
        return
    refuse_own_kl(fields, given, name)
    place = fields["kl_in"] if fields["kl"] is not None else None
    in_loss = given.switch(IN_LOSS, place == "loss")
    # A KL in the reward with the coefficient 0 gives way to one in the loss.
    in_reward = given.switch(IN_REWARD, place == "reward" and not (in_loss and not fields["kl_coef"]))
    two = f"there is one KL, in the loss or in the reward: add {IN_LOSS}=False or {IN_REWARD}=False"
    given.refuse(name, two, in_loss and in_reward)
    for on, switch, details in ((in_loss, IN_LOSS, (LOSS_COEF, LOSS_TYPE)), (in_reward, IN_REWARD, (REWARD_COEF,))):
        unread = f"nothing reads it without {switch}=True: add that, or leave it out"
        given.refuse(given.first(*details), unread, not on)
    if in_loss:
        before = fields if place == "loss" else NO_KL
        usual = before["kl_coef"] or (COEF if IN_LOSS in given else 0.0)
        estimate = given.choice(LOSS_TYPE, ESTIMATES, NO_ESTIMATES) or before["kl"] or ESTIMATES["low_var_kl"]
        fields |= {"kl": estimate, "kl_coef": given.number(LOSS_COEF, usual), "kl_in": "loss"}
    elif not in_reward:
        fields |= NO_KL
    elif (name := given.first(IN_REWARD, REWARD_COEF)) is not None:
        estimator = fields["advantage"]
        summed = "verl sums the KL over the sequence before this baseline, here it stays at its tokens: write "
        grouped = isinstance(estimator, Whitened) and estimator.baseline == "group"
        given.refuse(name, f"{summed}{IN_LOSS}=True {LOSS_TYPE}=k2", grouped)
        usual = fields["kl_coef"] if fields["kl_in"] == "reward" else 0.0
        usual = usual or (COEF if IN_REWARD in given else 0.0)
        fields |= {"kl": K1(), "kl_coef": given.number(REWARD_COEF, usual), "kl_in": "reward"}


def _correction(fields: Fields, given: Given) -> None:
    levels = {"token": "token", "sequence": "sequence"} | dict.fromkeys(("none", "null", "None"), "none")
    level = given.choice(LEVEL, levels)
    cap = given.number(CAP)
    if level is None and cap is None:
        return
    now = fields["correction"]
    truncated = isinstance(now, TruncatedIS)
    if level == "none" or (level is None and not truncated):
        given.refuse(CAP, f"there is no truncated weight: add {LEVEL}=token", cap is not None)
        fields["correction"] = None
    else:
        cap = (now.cap if truncated else 2.0) if cap is None else cap
        fields["correction"] = TruncatedIS(cap, level or now.level)
