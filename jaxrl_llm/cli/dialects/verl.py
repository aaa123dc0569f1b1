"""verl's overrides: the effect of each name on a recipe. Surrogate and ratio come first, whatever the order given."""

import dataclasses

from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, LeaveOneOut, Whitened
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus
from jaxrl_llm.algorithms.ratios import SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, PPOClip
from jaxrl_llm.algorithms.whole_step import ClipCov, KLCov
from jaxrl_llm.cli.dialects.spelling import KL, Given, check_range, refuse_own_kl, set_bounds, set_temperatures

ACTOR = "actor_rollout_ref.actor."
ESTIMATOR, DEVIATION = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
MODE, AGGREGATION = ACTOR + "policy_loss.loss_mode", ACTOR + "loss_agg_mode"
CLIP, LOW, HIGH, DUAL = (ACTOR + "clip_ratio" + end for end in ("", "_low", "_high", "_c"))
TAUS = (ACTOR + "tau_pos", ACTOR + "tau_neg")
IN_LOSS, LOSS_COEF, LOSS_TYPE = ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"
IN_REWARD, REWARD_COEF = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
FILTER, METRIC = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric"
LEVEL, CAP = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"

COVARIANCES = {
    ClipCov: {
        f"{ACTOR}policy_loss.clip_cov_{name}": field
        for name, field in (("ratio", "share"), ("lb", "least"), ("ub", "most"))
    },
    KLCov: {f"{ACTOR}policy_loss.kl_cov_ratio": "share", f"{ACTOR}policy_loss.ppo_kl_coef": "coef"},
}
"""Fields of surrogates that choose tokens by covariance, by verl's names."""
ESTIMATORS = {
    "grpo": GroupZScore(),
    "rloo": LeaveOneOut(),
    "reinforce_plus_plus": Whitened(),
    "reinforce_plus_plus_baseline": Whitened("group"),
}
NO_ESTIMATORS = {
    "gae": "it needs a critic: leave it out and begin with --recipe ppo, which has one",
    "grpo_passk": "it divides pass@k's advantages by a deviation, which biases them: set recipe.algorithm to "
    "PRESETS['pass_at_k'] in a configuration",
}
MODES = {
    "vanilla": (Token(), PPOClip, None),
    "gspo": (SequenceToken(), PPOClip, SequenceMean()),
    "sapo": (Token(), SAPO, SequenceMean()),
    "cispo": (Token(), CISPO, None),
    "clip_cov": (Token(), ClipCov, None),
    "kl_cov": (Token(), KLCov, None),
}
"""Ratio, surrogate, and the reduction that verl always takes for such a loss."""
NO_MODES = {
    name: "verl compares with the old policy, and caps the ratio at 3 unless clip_ratio_c is set: set recipe.algorithm "
    f"to PRESETS['{name}'] in a configuration, with ratio Token() for verl's anchor"
    for name in ("dppo_tv", "dppo_kl")
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
LEVELS = {"token": "token", "sequence": "sequence"} | dict.fromkeys(("none", "null", "None"), "none")
NO_KL = {"kl": None, "kl_coef": 0.0, "kl_in": "loss"}
COEF = 0.001
"""verl's default of both coefficients."""


def _deviation(given: Given) -> None:
    estimator = given.fields["advantage"]
    unread = f"only {ESTIMATOR}=grpo reads it, and the estimator is {type(estimator).__name__}: leave it out"
    given.refuse(DEVIATION, unread, not isinstance(estimator, (GroupZScore, GroupMean)))
    given.fields["advantage"] = GroupZScore() if given.get(DEVIATION) else GroupMean()


def _mode(given: Given) -> None:
    fields = given.fields
    fields["ratio"], wanted, always = given.get(MODE)
    surrogate = fields["surrogate"]
    if not isinstance(surrogate, wanted):
        unbound = wanted is CISPO and not (LOW in given.texts and HIGH in given.texts)
        given.refuse(MODE, f"set its bounds with {LOW} (1 for none) and {HIGH}, distances from 1", unbound)
        surrogate = wanted()
    if wanted is PPOClip:
        by_sequence = fields["ratio"].level == "sequence"
        surrogate = dataclasses.replace(surrogate, dual=None if by_sequence else surrogate.dual or 3.0)
    fields["surrogate"] = surrogate
    check_range(given, MODE, f"{LOW}={{}} {HIGH}={{}}", LOW in given.texts and HIGH in given.texts)
    if always is not None:
        other = f"verl's {given.texts[MODE]} is always reduced as seq-mean-token-mean: write that, or leave it out"
        given.refuse(AGGREGATION, other, given.get(AGGREGATION, always) != always)
        fields["reduce"] = always


def _bounds(given: Given) -> None:
    low, high, surrogate = given.get(LOW), given.get(HIGH), given.fields["surrogate"]
    if isinstance(surrogate, CISPO):
        least = surrogate.ratio_min if low is None else 1 - low
        most = surrogate.ratio_max if high is None else 1 + high
        given.fields["surrogate"] = dataclasses.replace(surrogate, ratio_min=least, ratio_max=most)
    else:
        set_bounds(given, (LOW, HIGH), low, high)


def _covariance(given: Given) -> None:
    """Set the numbers of Clip-Cov and of KL-Cov."""
    for kind, names in COVARIANCES.items():
        surrogate = given.fields["surrogate"]
        unread = f"only loss_mode={'clip_cov' if kind is ClipCov else 'kl_cov'} reads it: leave it out"
        given.refuse(given.first(*names), unread, not isinstance(surrogate, kind))
        told = {field: given.get(name) for name, field in names.items() if name in given.texts}
        given.fields["surrogate"] = dataclasses.replace(surrogate, **told)


def _dual(given: Given) -> None:
    surrogate = given.fields["surrogate"]
    other = not isinstance(surrogate, PPOClip) or given.fields["ratio"].level == "sequence"
    given.refuse(DUAL, "only loss_mode=vanilla reads it: leave it out", other)
    given.fields["surrogate"] = dataclasses.replace(surrogate, dual=given.get(DUAL))


def _kl(given: Given) -> None:
    """Set the place of the KL, then its estimator and coefficient. An unspecified place stays as in the recipe."""
    fields, name = given.fields, given.first(IN_LOSS, IN_REWARD, LOSS_COEF, LOSS_TYPE, REWARD_COEF)
    refuse_own_kl(given, name)
    place = fields["kl_in"] if fields["kl"] is not None else None
    in_loss = given.get(IN_LOSS, place == "loss")
    # A KL in the reward with the coefficient 0 gives way to one in the loss.
    in_reward = given.get(IN_REWARD, place == "reward" and not (in_loss and not fields["kl_coef"]))
    two = f"there is one KL, in the loss or in the reward: add {IN_LOSS}=False or {IN_REWARD}=False"
    given.refuse(name, two, in_loss and in_reward)
    for on, switch, details in ((in_loss, IN_LOSS, (LOSS_COEF, LOSS_TYPE)), (in_reward, IN_REWARD, (REWARD_COEF,))):
        unread = f"nothing reads it without {switch}=True: add that, or leave it out"
        given.refuse(given.first(*details), unread, not on)
    if in_loss:
        before = fields if place == "loss" else NO_KL
        usual = before["kl_coef"] or (COEF if IN_LOSS in given.texts else 0.0)
        estimate = given.get(LOSS_TYPE) or before["kl"] or ESTIMATES["low_var_kl"]
        fields |= {"kl": estimate, "kl_coef": given.get(LOSS_COEF, usual), "kl_in": "loss"}
    elif not in_reward:
        fields |= NO_KL
    elif (name := given.first(IN_REWARD, REWARD_COEF)) is not None:
        estimator = fields["advantage"]
        summed = "verl sums the KL over the sequence before this baseline, here it stays at its tokens: write "
        grouped = isinstance(estimator, Whitened) and estimator.baseline == "group"
        given.refuse(name, f"{summed}{IN_LOSS}=True {LOSS_TYPE}=k2", grouped)
        usual = fields["kl_coef"] if fields["kl_in"] == "reward" else 0.0
        usual = usual or (COEF if IN_REWARD in given.texts else 0.0)
        fields |= {"kl": K1(), "kl_coef": given.get(REWARD_COEF, usual), "kl_in": "reward"}


def _filter(given: Given) -> None:
    """Set the filter of groups, which reads verl's metric, else what it read before."""
    before, metric = given.recipe.filter_groups, given.get(METRIC)
    on = given.get(FILTER, bool(before))
    unread = f"nothing reads it without {FILTER}=True: add that, or leave it out"
    given.refuse(METRIC, unread, not on)
    given.fields["filter_groups"] = (metric or before or "accuracy") if on else False


def _correction(given: Given) -> None:
    now, level, cap = given.fields["correction"], given.get(LEVEL), given.get(CAP)
    truncated = isinstance(now, TruncatedIS)
    if level == "none" or (level is None and not truncated):
        given.refuse(CAP, f"there is no truncated weight: add {LEVEL}=token", cap is not None)
        given.fields["correction"] = None
    else:
        cap = (now.cap if truncated else 2.0) if cap is None else cap
        given.fields["correction"] = TruncatedIS(cap, level or now.level)


TABLE = (
    (ESTIMATOR, "advantage", ESTIMATORS, None, NO_ESTIMATORS),
    (DEVIATION, "advantage", "switch", _deviation),
    (MODE, "ratio surrogate reduce", MODES, _mode, NO_MODES),
    (AGGREGATION, "reduce", AGGREGATIONS, None, NO_AGGREGATIONS),
    (f"{LOW} {HIGH}", "surrogate", "number", _bounds),
    (CLIP, "", {}, None, f"verl itself does not read it, since its other two have defaults: write {LOW} and {HIGH}"),
    (" ".join(name for names in COVARIANCES.values() for name in names), "surrogate", "number", _covariance),
    (DUAL, "surrogate", "number", _dual),
    (" ".join(TAUS), "surrogate", "number", lambda given: set_temperatures(given, *TAUS)),
    (IN_LOSS, KL, "switch", _kl),
    (LOSS_COEF, "kl kl_coef", "number", _kl),
    (LOSS_TYPE, "kl kl_coef", ESTIMATES, _kl, NO_ESTIMATES),
    (IN_REWARD, KL, "switch", _kl),
    (REWARD_COEF, "kl kl_coef", "number", _kl),
    (FILTER, "filter_groups", "switch", _filter),
    (METRIC, "filter_groups", METRICS, _filter, NO_METRICS),
    (LEVEL, "correction", LEVELS, _correction),
    (CAP, "correction", "number", _correction),
    (ACTOR + "entropy_coeff", "entropy_coef", "number", None),
)
"""verl's names in the order of docs/dialects.md, which is the order of their effects. A row has names and fields, each
apart by spaces, and what else ``Spelling`` has: values, effect, reasons against known words.
"""
