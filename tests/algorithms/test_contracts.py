"""What is refused, and by which name: arrays of another rank, shape or kind, and mixes that contradict themselves."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, PolicyBatch, advantages, policy_loss, preference
from jaxrl_llm.algorithms.advantages import (
    GAE,
    GDPO,
    BatchScaled,
    GroupMean,
    GroupZScore,
    KLInReward,
    LeaveOneOut,
    ProcessSupervised,
    Whitened,
)
from jaxrl_llm.algorithms.kl import K1, K2, K3, AdaptiveKL, K3Plus, ProportionalKL, UnbiasedK3
from jaxrl_llm.algorithms.ratios import (
    MaskedIS,
    OffPolicySequenceMask,
    Sequence,
    SequenceMask,
    SequenceToken,
    Token,
    TruncatedIS,
)
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    LUSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    KLCov,
    Likelihood,
    M2POClip,
    MiniRL,
    MirrorDescent,
    PenaltyKL,
    PPOClip,
    TopEntropy,
    Unclipped,
)

ROWS, ONES, WHOLE = np.ones(2, np.float32), np.ones((2, 3), np.float32), np.ones((2, 3), np.int32)
OTHER, THIRD, LONG = np.ones((2, 4), np.float32), np.ones((2, 3, 1), np.float32), np.ones(3, np.float32)
WORDS = np.full((2, 3), "a")
GRPO = PRESETS["grpo"]


def loss(logp=ONES, counts=(), algorithm=GRPO, **changes):
    optional = {name: changes.pop(name) for name in ("entropy", "kl_coef", "entropy_coef") if name in changes}
    given = {"advantages": ROWS, "mask": ONES, "old_logp": ONES, "ref_logp": ONES, "sampler_logp": ONES}
    return policy_loss(algorithm, logp, PolicyBatch(**given | changes), *counts, **optional)


LOSSES = {
    "logp": [None, ROWS, THIRD, WHOLE, WORDS, np.ones((2, 3), bool)],
    "mask": [None, ROWS, OTHER, THIRD, WORDS, np.ones((2, 3), np.complex64)],
    "advantages": [None, LONG, OTHER, THIRD, WORDS, np.ones(2, np.complex64)],
    "old_logp": [ROWS, OTHER, THIRD, WHOLE],
    "ref_logp": [ROWS, OTHER, THIRD, WHOLE],
    "sampler_logp": [ROWS, OTHER, THIRD, WHOLE],
    "entropy": [ROWS, OTHER, WHOLE],
    "kl_coef": [ROWS, ONES, jnp.ones(2)],
    "entropy_coef": [ROWS, ONES, jnp.ones(2)],
}


def refused(call, name, bad):
    """The call names its argument."""
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call(**{name.removeprefix("context.").replace(".", "_"): bad})


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, worst in LOSSES.items() for bad in worst])
def test_policy_loss_names_what_it_refuses(name, bad):
    refused(loss, name, bad)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("bad", [ROWS, [3]])
def test_policy_loss_refuses_counts_that_are_no_scalars(place, bad):
    name = ("token_count", "sequence_count")[place]
    with pytest.raises(ValueError, match=name):
        loss(counts=(bad,) if place == 0 else (6, bad))


@pytest.mark.parametrize(("algorithm", "field"), [
    (GRPO, "ref_logp"),
    (PRESETS["minirl"], "sampler_logp"),
    (PRESETS["deepseek_v3_2"], "sampler_logp"),
    (dataclasses.replace(PRESETS["dapo"], correction=TruncatedIS()), "sampler_logp"),
    (dataclasses.replace(PRESETS["dapo"], correction=MaskedIS()), "sampler_logp"),
    (dataclasses.replace(PRESETS["dapo"], correction=SequenceMask()), "sampler_logp"),
    (dataclasses.replace(PRESETS["dapo"], sequence_filter=OffPolicySequenceMask()), "sampler_logp"),
])  # fmt: skip
def test_policy_loss_names_the_policy_that_is_missing(algorithm, field):
    with pytest.raises(ValueError, match=f"batch.{field} must be given"):
        loss(algorithm=algorithm, **{field: None})


@pytest.mark.parametrize("name", ["dapo", "rloo", "kimi_k1_5"])
def test_policy_loss_refuses_a_kl_coefficient_that_nothing_reads(name):
    with pytest.raises(ValueError, match="nothing in this loss reads kl_coef"):
        loss(algorithm=PRESETS[name], kl_coef=0.1)
    loss(algorithm=PRESETS[name], kl_coef=0.0)


REDUCERS = {"loss": [None, ROWS, THIRD, WHOLE], "mask": [None, ROWS, OTHER, WORDS],
            "token_count": [None, ROWS], "sequence_count": [None, ROWS]}  # fmt: skip


@pytest.mark.parametrize("reducer", [TokenMean(), SequenceMean(), SequenceSum(), ConstantLength(8)])
@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, worst in REDUCERS.items() for bad in worst])
def test_reducers_name_what_they_refuse(reducer, name, bad):
    good = {"loss": ONES, "mask": ONES, "token_count": 6, "sequence_count": 2}
    refused(lambda **given: reducer(**good | given), name, bad)


@pytest.mark.parametrize("estimator", [K1(), K2(), K3(), K3Plus(), UnbiasedK3()])
@pytest.mark.parametrize(("name", "bad"), [
    ("logp", None), ("logp", WHOLE), ("ref_logp", None), ("ref_logp", OTHER), ("ref_logp", WHOLE), ("log_ratio", OTHER),
])  # fmt: skip
def test_kl_estimators_name_what_they_refuse(estimator, name, bad):
    refused(lambda **given: estimator(**{"logp": ONES, "ref_logp": ONES} | given), name, bad)


PAIR = np.array([[1.0, 0.0]], np.float32)
CONTEXT = AdvantageContext(ONES, ONES, ONES, ONES, ONES)
OUTCOME = (GroupMean(), GroupZScore(), LeaveOneOut(), BatchScaled())
BY_TOKEN = (Whitened(), ProcessSupervised(), GAE(), KLInReward(LeaveOneOut(), K1(), 0.1), KLInReward(GAE(), K1(), 0.1))


@pytest.mark.parametrize("estimator", [*OUTCOME, *BY_TOKEN[:3]])
@pytest.mark.parametrize("bad", [None, np.ones((1, 2, 1)), np.array([["a", "b"]]), np.ones((1, 2), np.complex64)])
def test_estimators_refuse_rewards(estimator, bad):
    with pytest.raises(ValueError, match=r"^rewards must be"):
        estimator(bad, CONTEXT)


@pytest.mark.parametrize("estimator", [*OUTCOME, Whitened("group"), ProcessSupervised()])
def test_what_compares_completions_of_a_prompt_refuses_a_flat_list(estimator):
    with pytest.raises(ValueError, match=r"^rewards must be \[P, G\], got shape \(2,\)"):
        estimator(PAIR[0], CONTEXT)


@pytest.mark.parametrize("estimator", [Whitened(), GAE()])
def test_what_compares_none_takes_a_flat_list(estimator):
    np.testing.assert_array_equal(estimator(PAIR[0], CONTEXT), estimator(PAIR, CONTEXT))


@pytest.mark.parametrize("bad", [None, PAIR, np.ones(2), np.ones((1, 2, 3, 1)), np.ones((1, 2, 2), np.complex64)])
def test_gdpo_refuses_rewards_without_an_axis_for_each(bad):
    with pytest.raises(ValueError, match=r"^rewards must be"):
        GDPO()(bad)
    with pytest.raises(ValueError, match=r"GDPO.weights has 3 entries, the last axis of rewards 2"):
        GDPO((1.0, 1.0, 1.0))(np.ones((1, 2, 2)))


@pytest.mark.parametrize("estimator", [*OUTCOME, *BY_TOKEN[:3]])
@pytest.mark.parametrize("ids", [np.zeros(3, int), np.zeros((2, 1), int), np.zeros(2), np.array(["a", "b"])])
def test_estimators_refuse_ids(estimator, ids):
    with pytest.raises(ValueError, match=r"^context.group_ids must"):
        estimator(PAIR, CONTEXT._replace(group_ids=ids))
    with pytest.raises(ValueError, match=r"^rewards must be \[B\] or \[P, G\]"):
        estimator(PAIR[None], CONTEXT._replace(group_ids=np.zeros(2, int)))


FIELDS = [(estimator, field) for estimator in BY_TOKEN for field in estimator.needs]


@pytest.mark.parametrize(("estimator", "field"), FIELDS)
def test_estimators_name_the_field_of_the_context_that_is_missing(estimator, field):
    with pytest.raises(ValueError, match=rf"needs context.{field}: pass AdvantageContext\({field}=...\)"):
        estimator(PAIR, CONTEXT._replace(**{field: None}))
    with pytest.raises(ValueError, match=r"needs context.mask"):
        estimator(PAIR)


@pytest.mark.parametrize(("estimator", "field"), FIELDS)
@pytest.mark.parametrize("bad", [OTHER[:1], THIRD, ROWS, WORDS, np.ones((2, 3), np.complex64)])
def test_estimators_name_the_field_of_the_context_that_they_refuse(estimator, field, bad):
    with pytest.raises(ValueError, match=f"context.{field} must"):
        estimator(PAIR, CONTEXT._replace(**{field: bad}))


@pytest.mark.parametrize("estimator", [Whitened(), GAE(), KLInReward(GAE(), K1(), 0.1)])
@pytest.mark.parametrize("bad", [OTHER, ROWS, WHOLE])
def test_step_rewards_of_another_shape_or_kind_are_named(estimator, bad):
    with pytest.raises(ValueError, match=r"context.step_rewards must"):
        estimator(PAIR, CONTEXT._replace(step_rewards=bad))


CALLS = {
    "returns": (advantages.returns, {"advantages": ONES, "values": ONES},
                {"advantages": [None, ROWS, WHOLE], "values": [None, OTHER, WHOLE]}),
    "value_loss": (functools.partial(advantages.value_loss, clip=0.2),
                   {"values": ONES, "targets": ONES, "mask": ONES, "old_values": ONES, "token_count": 6},
                   {"values": [None, ROWS, WHOLE], "targets": [None, OTHER, WHOLE], "mask": [None, OTHER, WORDS],
                    "old_values": [OTHER, WHOLE], "token_count": [ROWS]}),
    "sequence_logp": (preference.sequence_logp, {"logp": ONES, "mask": ONES},
                      {"logp": [None, ROWS, WHOLE], "mask": [None, OTHER]}),
    "DPO": (preference.DPO(), {"margin": ROWS}, {"margin": [None, ONES, ROWS > 0]}),
    "IPO": (preference.IPO(), {"margin": ROWS}, {"margin": [None, ONES, ROWS > 0]}),
    "SimPO": (preference.SimPO(), {"margin": ROWS}, {"margin": [None, ONES, ROWS > 0]}),
    "KTO": (preference.KTO(), {"gap": ROWS, "good": ROWS > 0, "point": 0.0}, {"gap": [None, ONES, ROWS > 0]}),
    "pretraining_loss": (preference.pretraining_loss, {"logp": ONES, "mask": ONES, "token_count": 6},
                         {"logp": [None, ROWS, WHOLE], "mask": [None, OTHER], "token_count": [ROWS]}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "name"), [(f, name) for f, (_, _, worst) in CALLS.items() for name in worst])
def test_functions_name_what_they_refuse(function, name):
    call, good, worst = CALLS[function]
    for bad in worst[name]:
        refused(lambda **given: call(**good | given), name, bad)


@pytest.mark.parametrize(("old", "clip"), [(None, 0.2), (ONES, 0.0), (ONES, -1.0)])
def test_a_bound_on_values_needs_old_ones_and_a_distance(old, clip):
    with pytest.raises(ValueError, match="old_values"):
        advantages.value_loss(ONES, ONES, ONES, old, clip)


@pytest.mark.parametrize(("kind", "fields"), [
    (PPOClip, {"low": -0.1}), (PPOClip, {"high": -0.1}), (PPOClip, {"dual": 1.0}), (PPOClip, {"high": float("nan")}),
    (CISPO, {"ratio_max": 0.28}), (CISPO, {"ratio_min": 1.5}), (CISPO, {"ratio_min": -0.5}),
    (SAPO, {"tau_pos": 0.0}), (SAPO, {"tau_neg": -1.0}), (MirrorDescent, {"tau": 0.0}),
    (MiniRL, {"low": -1.0}), (MiniRL, {"high": -1.0}), (MiniRL, {"cap": 0.0}),
    (TruncatedIS, {"cap": 0.0}), (TruncatedIS, {"level": "batch"}), (MaskedIS, {"level": "batch"}),
    (MaskedIS, {"low": 3.0}), (MaskedIS, {"high": 0.0}), (SequenceMask, {"low": 1.1}), (SequenceMask, {"low": -1.0}),
    (OffPolicySequenceMask, {"delta": -0.1}), (Token, {"anchor": "reference"}), (ConstantLength, {"length": 0}),
    (K2, {"clip": 0.0}), (K3, {"clip": -1.0}), (AdaptiveKL, {"target": 0.0}),
    (ProportionalKL, {"target": 0.0}), (ProportionalKL, {"horizon": 0}),
    (GroupZScore, {"ddof": -1}), (GroupZScore, {"eps": -1.0}), (BatchScaled, {"of": "tokens"}),
    (BatchScaled, {"eps": -1.0}), (GDPO, {"ddof": -1}), (Whitened, {"baseline": "token"}), (Whitened, {"eps": -1.0}),
    (ProcessSupervised, {"eps": -1.0}),
    (DPPO, {"low": -0.1}), (DPPO, {"divergence": "js"}), (VESPO, {"k_pos": 0.0}), (GMPO, {"high": -1.0}),
    (LUSPO, {"low": -1.0}), (M2PO, {"threshold": 0.0}), (M2POClip, {"low": 1.0}), (ClipCov, {"share": 0.0}),
    (ClipCov, {"least": 6.0}), (KLCov, {"coef": -1.0}), (TopEntropy, {"share": 1.5}),
    (preference.SimPO, {"gamma": -1.0}), (preference.KTO, {"beta": 0.0}),
    (GAE, {"gamma": -0.1}), (GAE, {"lam": -0.1}), (functools.partial(KLInReward, GroupMean(), K1()), {"coef": 0.0}),
    (functools.partial(dataclasses.replace, GRPO), {"kl_coef": -0.1}),
    (functools.partial(dataclasses.replace, GRPO), {"entropy_coef": -0.1}),
    (functools.partial(dataclasses.replace, GRPO), {"kl_in": "rewards"}),
])  # fmt: skip
def test_fields_out_of_range_are_named(kind, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        kind(**fields)


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("dapo", {"kl_coef": 0.1}, "kl_coef=0.1 needs an estimator"),
    ("grpo", {"surrogate": PenaltyKL()}, "PenaltyKL has a KL of its own"),
    ("gspo", {"reduce": TokenMean()}, "a sequence ratio needs SequenceMean"),
    ("gspo_token", {"reduce": SequenceSum()}, "a sequence ratio needs SequenceMean"),
    ("gspo", {"surrogate": Likelihood()}, "Likelihood is made of the tokens' own"),
    ("gspo_token", {"surrogate": MirrorDescent()}, "MirrorDescent is made of the tokens' own"),
    ("gmpo", {"reduce": TokenMean()}, "only SequenceMean counts it once"),
    ("luspo", {"ratio": Token(), "reduce": SequenceSum()}, "only SequenceMean counts it once"),
    ("gspo", {"surrogate": DPPO()}, "DPPO is made of the tokens' own"),
    ("gspo", {"surrogate": M2PO()}, "M2PO is made of the tokens' own"),
    ("m2po", {"correction": MaskedIS()}, "would count that gap twice"),
    ("dapo", {"token_filter": OffPolicySequenceMask()}, "token_filter must be a value such as surrogates.TopEntropy"),
    ("kimi_k1_5", {"reduce": TokenMean()}, "only SequenceSum adds it up once"),
    ("kimi_k1_5", {"reduce": ConstantLength(8)}, "only SequenceSum adds it up once"),
    ("deepseek_v3_2", {"correction": TruncatedIS()}, "would count that gap twice"),
    ("minirl", {"ratio": Token("sampler")}, "would count that gap twice"),
    ("minirl", {"correction": MaskedIS()}, "MiniRL weights by the sampler's"),
    ("reinforce", {"ratio": Token("sampler")}, "Likelihood has no ratio, so that its anchor would go unread"),
    ("dapo", {"kl_in": "reward"}, "kl_in='reward' puts nothing into the reward: set kl"),
    ("grpo", {"surrogate": "ppo"}, "surrogate must be a value such as surrogates.PPOClip"),
    ("grpo", {"surrogate": PPOClip}, "surrogate must be a value such as surrogates.PPOClip"),
    ("grpo", {"surrogate": TokenMean()}, "surrogate must be a value such as surrogates.PPOClip"),
    ("grpo", {"advantage": GroupMean}, "advantage must be a value such as advantages.GroupZScore"),
    ("grpo", {"ratio": None}, "ratio must be a value such as ratios.Token"),
    ("grpo", {"reduce": PPOClip()}, "reduce must be a value such as reduce.TokenMean"),
    ("grpo", {"kl": "k3"}, "kl must be a value such as kl.K3"),
    ("grpo", {"correction": 2.0}, "correction must be a value such as ratios.TruncatedIS"),
    ("rloo", {"advantage": GDPO()}, "GDPO has no one reward to put a KL in"),
    ("rloo", {"advantage": ProcessSupervised()}, "ProcessSupervised has no one reward to put a KL in"),
])  # fmt: skip
def test_mixes_that_contradict_themselves_are_refused_with_the_reason(name, changes, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(PRESETS[name], **changes)


@pytest.mark.parametrize(("name", "changes"), [
    ("dapo", {"surrogate": PenaltyKL(), "kl_coef": 0.1}), ("gspo", {"surrogate": Unclipped()}),
    ("gspo", {"ratio": SequenceToken()}),
    ("dapo", {"correction": MaskedIS(), "sequence_filter": OffPolicySequenceMask()}),
    ("grpo", {"kl_in": "reward"}), ("rloo", {"kl_in": "loss", "kl_coef": 0.1}),
    ("ppo", {"kl": K1(), "kl_in": "reward"}),
    ("grpo", {"ratio": Sequence()}),
])  # fmt: skip
def test_mixes_that_make_sense_are_not(name, changes):
    changed = dataclasses.replace(PRESETS[name], **changes)
    assert changed != PRESETS[name] and hash(changed) == hash(dataclasses.replace(changed))
