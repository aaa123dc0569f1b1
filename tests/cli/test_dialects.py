"""TRL's and verl's names: what each becomes, what is refused and why, and the table that tells of it."""

import dataclasses
import re

import numpy as np
import pytest
from commands import ROOT

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS, PolicyBatch, kl, policy_loss, ratios, reduce, surrogates
from jaxrl_llm.algorithms.advantages import BatchScaled, GroupMean, GroupZScore, KLInReward, LeaveOneOut, Whitened
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.algorithms.whole_step import ClipCov, KLCov, TopEntropy
from jaxrl_llm.cli.dialects import SPELLINGS, explain, translate
from jaxrl_llm.cli.train import take_spellings
from jaxrl_llm.codec import flat
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES, Overlong

ACTOR, CORRECTION, VLLM = "actor_rollout_ref.actor.", "algorithm.rollout_correction.", "vllm_importance_sampling_"
CLIP, CISPO, SAPO = surrogates.PPOClip, surrogates.CISPO, surrogates.SAPO
CLIPS = f"{ACTOR}clip_ratio_low={{}} {ACTOR}clip_ratio_high={{}}"
NO_KL = {"kl": None, "kl_coef": 0.0, "kl_in": "loss"}


def in_loss(estimate, coef):
    return {"kl": estimate, "kl_coef": coef, "kl_in": "loss"}


def in_reward(estimator, coef):
    kl_of = {"kl": kl.K1(), "kl_coef": coef, "kl_in": "reward"}
    return {"advantage": KLInReward(estimator, kl.K1(), coef), **kl_of}


# (recipe, what is given, the fields that this changes)
TRANSLATED = [
    ("dapo", "loss_type=grpo", {"reduce": reduce.SequenceMean()}),
    ("grpo", "loss_type=dapo", {"reduce": reduce.TokenMean()}),
    ("grpo", "loss_type=dr_grpo", {"reduce": reduce.ConstantLength(None)}),
    ("dapo", "loss_type=sapo", {"surrogate": SAPO(1.0, 1.05), "reduce": reduce.SequenceMean()}),
    ("grpo", "epsilon_high=5 loss_type=cispo", {"surrogate": CISPO(5.0), "reduce": reduce.TokenMean()}),
    ("cispo", "loss_type=cispo", {}),
    ("gspo", "loss_type=luspo", {"surrogate": surrogates.LUSPO()}),
    ("gspo", "loss_type=luspo epsilon=1e-3 epsilon_high=2e-3", {"surrogate": surrogates.LUSPO(1e-3, 2e-3)}),
    ("dapo", "top_entropy_quantile=0.2", {"token_filter": TopEntropy(0.2)}),
    ("top_entropy", "top_entropy_quantile=1.0", {"token_filter": None}),
    ("cispo", "epsilon_high=1.28", {"surrogate": CISPO(1.28)}),
    ("cispo", "loss_type=dapo", {"surrogate": CLIP(0.2, 0.2)}),
    ("dapo", "epsilon_high=0.3", {"surrogate": CLIP(0.2, 0.3)}),
    ("dapo", "epsilon=0.1", {"surrogate": CLIP(0.1, 0.1)}),
    ("dapo", "epsilon=0.1 epsilon_high=0.3", {"surrogate": CLIP(0.1, 0.3)}),
    ("grpo", "delta=4", {"surrogate": CLIP(0.2, 0.2, 4.0)}),
    ("grpo", "delta=None", {}),
    ("grpo", "importance_sampling_level=token", {}),
    ("gspo", "importance_sampling_level=sequence_token", {"ratio": ratios.SequenceToken()}),
    ("dapo", "importance_sampling_level=sequence loss_type=grpo epsilon=3e-4 epsilon_high=4e-4",
     {"ratio": ratios.Sequence(), "reduce": reduce.SequenceMean(), "surrogate": CLIP(3e-4, 4e-4)}),
    ("grpo", "sapo_temperature_pos=0.9 loss_type=sapo sapo_temperature_neg=1.2", {"surrogate": SAPO(0.9, 1.2)}),
    ("grpo", "beta=0", NO_KL),
    ("prorl_v1", "beta=0.04", in_loss(kl.K3(), 0.04)),
    ("dapo", "beta=0.04 use_bias_correction_kl=True", in_loss(kl.UnbiasedK3(), 0.04)),
    ("deepseek_v3_2", "beta=0.01", {"kl_coef": 0.01}),
    ("grpo", "use_bias_correction_kl=true", {"kl": kl.UnbiasedK3()}),
    ("grpo", "use_bias_correction_kl=False", {}),
    ("grpo", "scale_rewards=True", {"advantage": GroupZScore(eps=1e-4)}),
    ("dr_grpo", "scale_rewards=group", {"advantage": GroupZScore(eps=1e-4)}),
    ("grpo", "scale_rewards=batch", {"advantage": BatchScaled(eps=1e-4)}),
    ("grpo", "scale_rewards=none", {"advantage": GroupMean()}),
    ("dapo", "mask_truncated_completions=True", {"overlong": Overlong(drop=True, share=0.2)}),
    ("filtered", "mask_truncated_completions=False", {"overlong": Overlong(share=0.2)}),
    ("grpo", "off_policy_mask_threshold=0.4", {"sequence_filter": ratios.OffPolicySequenceMask(0.4)}),
    ("grpo", "off_policy_mask_threshold=None", {}),
    ("grpo", f"{VLLM}correction=False", {}),
    ("grpo", f"{VLLM}correction=True {VLLM}mode=sequence_mask", {"correction": ratios.MaskedIS(0.0, 3.0, "sequence")}),
    ("grpo", f"{VLLM}mode=token_truncate {VLLM}clip_max=2", {"correction": ratios.TruncatedIS(2.0, "token")}),
    ("grpo", f"{VLLM}mode=sequence_truncate {VLLM}cap=4", {"correction": ratios.TruncatedIS(4.0, "sequence")}),
    ("grpo", f"{VLLM}mode=token_mask {VLLM}clip_max=5 {VLLM}clip_min=0.5",
     {"correction": ratios.MaskedIS(0.5, 5.0, "token")}),
    ("dapo", "entropy_coef=0.01", {"entropy_coef": 0.01}),
    ("dapo", "use_adaptive_entropy=True", {"controller": AdaptiveEntropy(0.2, 0.005, 1.0)}),
    ("dapo", "entropy_coef_max=0.5 entropy_coef_min=0 entropy_coef_delta=0.01 entropy_target=0.3 "
     "use_adaptive_entropy=True", {"controller": AdaptiveEntropy(0.3, 0.01, 0.5)}),
    ("both", "use_adaptive_entropy=False", {"controller": AdaptiveKL(0.1)}),
    ("both", "use_adaptive_entropy=True entropy_target=0.4",
     {"controller": (AdaptiveKL(0.1), AdaptiveEntropy(0.4, 0.005, 1.0))}),
    ("dr_grpo", "algorithm.adv_estimator=grpo", {"advantage": GroupZScore()}),
    ("dapo", "algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo", {"advantage": GroupMean()}),
    ("grpo", "algorithm.adv_estimator=rloo", {"advantage": LeaveOneOut()}),
    ("grpo", "algorithm.adv_estimator=reinforce_plus_plus", {"advantage": Whitened()}),
    ("grpo", "algorithm.adv_estimator=reinforce_plus_plus_baseline", {"advantage": Whitened("group")}),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=vanilla", {"surrogate": CLIP(0.2, 0.28, 3.0)}),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}tau_pos=0.9 {ACTOR}tau_neg=1.1",
     {"surrogate": SAPO(0.9, 1.1), "reduce": reduce.SequenceMean()}),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=gspo {CLIPS.format(3e-4, 4e-4)}",
     {"ratio": ratios.SequenceToken(), "surrogate": CLIP(3e-4, 4e-4), "reduce": reduce.SequenceMean()}),
    ("grpo", f"{CLIPS.format(1, 0.25)} {ACTOR}policy_loss.loss_mode=cispo", {"surrogate": CISPO(1.25, 0.0)}),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=clip_cov {ACTOR}policy_loss.clip_cov_lb=0.5 {CLIPS.format(0.1, 0.3)} "
     f"{ACTOR}policy_loss.clip_cov_ratio=0.01 {ACTOR}policy_loss.clip_cov_ub=9",
     {"surrogate": ClipCov(0.01, 0.5, 9.0, 0.1, 0.3)}),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=kl_cov {ACTOR}policy_loss.ppo_kl_coef=1 "
     f"{ACTOR}policy_loss.kl_cov_ratio=0.002", {"surrogate": KLCov(0.002, 1.0)}),
    ("cispo", CLIPS.format(0.25, 4), {"surrogate": CISPO(5.0, 0.75)}),
    ("cispo", f"{ACTOR}clip_ratio_high=0.25", {"surrogate": CISPO(1.25)}),
    ("dapo", f"{ACTOR}clip_ratio_high=0.3", {"surrogate": CLIP(0.2, 0.3)}),
    ("dapo", f"{ACTOR}clip_ratio_c=4 {ACTOR}policy_loss.loss_mode=vanilla", {"surrogate": CLIP(0.2, 0.28, 4.0)}),
    ("grpo", f"{ACTOR}loss_agg_mode=token-mean", {"reduce": reduce.TokenMean()}),
    ("dapo", f"{ACTOR}loss_agg_mode=seq-mean-token-mean", {"reduce": reduce.SequenceMean()}),
    ("dapo", f"{ACTOR}loss_agg_mode=seq-mean-token-sum", {"reduce": reduce.SequenceSum()}),
    ("dapo", f"{ACTOR}use_kl_loss=True", in_loss(kl.K3(clip=10.0), 0.001)),
    ("grpo", f"{ACTOR}use_kl_loss=False", NO_KL),
    ("rloo", f"{ACTOR}use_kl_loss=False", {}),
    ("rloo", f"{ACTOR}use_kl_loss=True", in_loss(kl.K3(clip=10.0), 0.001)),
    ("grpo", f"{ACTOR}kl_loss_coef=0.1", {"kl_coef": 0.1}),
    ("grpo", f"{ACTOR}kl_loss_type=k1", {"kl": kl.K1()}),
    ("grpo", f"{ACTOR}kl_loss_type=mse", {"kl": kl.K2()}),
    ("grpo", f"{ACTOR}kl_loss_type=k3+", {"kl": kl.K3Plus()}),
    ("rloo", "algorithm.use_kl_in_reward=True", in_reward(LeaveOneOut(), 0.001)),
    ("rloo", "algorithm.kl_ctrl.kl_coef=0.03", in_reward(LeaveOneOut(), 0.03)),
    ("grpo", f"algorithm.use_kl_in_reward=True {ACTOR}use_kl_loss=False", in_reward(GroupZScore(), 0.001)),
    ("dapo", "algorithm.use_kl_in_reward=False", {}),
    ("k2 in reward", f"{ACTOR}use_kl_loss=False", {}),
    ("k2 in reward", "algorithm.use_kl_in_reward=False", {"advantage": LeaveOneOut(), **NO_KL}),
    ("dapo", "algorithm.filter_groups.enable=False", {"filter_groups": False}),
    ("grpo", "algorithm.filter_groups.enable=True", {"filter_groups": "accuracy"}),
    ("dapo", "algorithm.filter_groups.metric=seq_reward", {"filter_groups": "reward"}),
    ("grpo", "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", {"filter_groups": "accuracy"}),
    ("dapo", f"{CORRECTION}rollout_is=token", {"correction": ratios.TruncatedIS(2.0, "token")}),
    ("dapo", f"{CORRECTION}rollout_is_threshold=3 {CORRECTION}rollout_is=sequence",
     {"correction": ratios.TruncatedIS(3.0, "sequence")}),
    ("dapo", f"{CORRECTION}rollout_is=null", {}),
    ("corrected", f"{CORRECTION}rollout_is=null", {"correction": None}),
    ("corrected", f"{CORRECTION}rollout_is_threshold=3", {"correction": ratios.TruncatedIS(3.0, "sequence")}),
    ("corrected", f"{CORRECTION}rollout_is=token", {"correction": ratios.TruncatedIS(5.0, "token")}),
    ("grpo", f"{ACTOR}entropy_coeff=0.001", {"entropy_coef": 0.001}),
]  # fmt: skip

# (recipe, what is given, words of the refusal)
REFUSED = [
    ("dapo", "beta=0.1 algorithm.adv_estimator=grpo", "--beta 0.1 is TRL's", "algorithm.adv_estimator=grpo verl's"),
    ("dapo", "beta=much", "--beta much: expected a number"),
    ("dapo", "beta=nan", "--beta nan: expected a number"),
    ("dapo", "beta=0.1 epsilon=-1", r"^--epsilon -1: PPOClip.low must be at least 0"),
    ("dapo", "mask_truncated_completions=maybe", "expected True or False"),
    ("dapo", "loss_type=vespo", "expected grpo, dr_grpo, dapo, cispo, sapo"),
    ("dapo", "loss_type=bnpo", "one microbatch", "write --loss_type dapo"),
    ("dapo", "loss_type=luspo", "add --importance_sampling_level sequence"),
    ("dapo", "top_entropy_quantile=1.5", "a share above 0 and at most 1"),
    ("dapo", f"{ACTOR}policy_loss.loss_mode=dppo_tv", "PRESETS['dppo_tv']", "ratio Token() for verl's anchor"),
    ("dapo", f"{ACTOR}policy_loss.ppo_kl_coef=1", "only loss_mode=kl_cov reads it"),
    ("dapo", "algorithm.adv_estimator=grpo_passk", "PRESETS['pass_at_k']"),
    ("dapo", "loss_type=cispo", "default of 0.2", "--epsilon_high 5.0"),
    ("dapo", "loss_type=cispo epsilon=0.2", "default of 0.2", "--epsilon_high 5.0"),
    ("dapo", "loss_type=cispo epsilon_high=0.28", "the ratio itself", "default of 0.2", "--epsilon_high 1.28"),
    ("cispo", "epsilon=0.2 epsilon_high=5", "no lower bound in TRL"),
    ("sapo", "epsilon=0.2", "SAPO has no clip range"),
    ("dapo", "delta=1.27", "below the clip at 1.28"),
    ("dapo", "delta=4 loss_type=sapo", "only a clipped loss reads it", "SAPO"),
    ("dapo", "sapo_temperature_pos=1", "only SAPO has temperatures"),
    ("grpo", "importance_sampling_level=sequence epsilon_high=4e-4", "by token does not fit", "--epsilon 3e-4"),
    ("dapo", "importance_sampling_level=sequence epsilon=3e-4 beta=0",
     r"^--importance_sampling_level sequence --epsilon 3e-4: a sequence ratio needs SequenceMean", "--loss_type grpo"),
    ("gspo", "loss_type=dapo", "needs SequenceMean"),
    ("dapo", "use_bias_correction_kl=True", "there is no KL in the loss"),
    ("gspo", "use_bias_correction_kl=True beta=0.1", "the sequence's ratio"),
    ("penalty", "beta=0.1", "the KL of PenaltyKL is not to a reference"),
    ("penalty", f"{ACTOR}kl_loss_coef=0.1", "the KL of PenaltyKL is not to a reference"),
    ("k2 in reward", f"{ACTOR}use_kl_loss=True", "there is one KL", "use_kl_in_reward=False"),
    ("rloo", "scale_rewards=none", "this recipe has LeaveOneOut"),
    ("k2 in reward", "scale_rewards=none", "this recipe has LeaveOneOut"),
    ("grpo", "entropy_coef=0.1", "by SequenceMean", "--recipe.algorithm.entropy_coef 0.1"),
    ("grpo", "use_adaptive_entropy=True", "by SequenceMean", "recipe.controller to AdaptiveEntropy()"),
    ("dapo", "entropy_target=0.3", "nothing reads it without --use_adaptive_entropy True"),
    ("dapo", "use_adaptive_entropy=False entropy_coef_delta=0.1", "nothing reads it"),
    ("dapo", "use_adaptive_entropy=True entropy_coef_min=0.01", "may fall to 0"),
    ("dapo", "use_adaptive_entropy=True entropy_coef_delta=0", "AdaptiveEntropy.rate must be above 0"),
    ("grpo", f"{VLLM}correction=True", f"choose one with --{VLLM}mode: token_truncate"),
    ("grpo", f"{VLLM}clip_max=2", "choose one with"),
    ("grpo", f"{VLLM}correction=False {VLLM}clip_max=2", "nothing reads it"),
    ("grpo", f"{VLLM}mode=token_mask {VLLM}cap=2 {VLLM}clip_max=2", "the older name"),
    ("grpo", f"{VLLM}mode=token_truncate {VLLM}clip_min=0.5", "no lower bound here", "token_mask"),
    ("grpo", f"{VLLM}mode=token_truncate {VLLM}clip_max=-1", "TruncatedIS.cap must be above 0"),
    ("deepseek_v3_2", f"{VLLM}mode=token_mask", "the ratio is against the sampler already"),
    ("grpo", "algorithm.adv_estimator=gae", "a critic"),
    ("grpo", "algorithm.filter_groups.metric=acc", "nothing reads it without algorithm.filter_groups.enable=True"),
    ("dapo", "algorithm.filter_groups.metric=seq_final_reward", "write seq_reward"),
    ("rloo", "algorithm.norm_adv_by_std_in_grpo=True", "only algorithm.adv_estimator=grpo reads it"),
    ("grpo", f"{ACTOR}policy_loss.loss_mode=geo_mean", "expected vanilla, gspo, sapo, cispo"),
    ("grpo", f"{ACTOR}policy_loss.loss_mode=gspo {ACTOR}clip_ratio_high=4e-4", "does not fit", "clip_ratio_low=3e-4"),
    ("gspo", f"{ACTOR}policy_loss.loss_mode=vanilla", "by sequence does not fit", "clip_ratio_high=0.2"),
    ("grpo", f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_high=4", "set its bounds"),
    ("cispo", f"{ACTOR}clip_ratio_low=1.5", "clip_ratio_low=1.5: CISPO.ratio_min is an absolute ratio from 0 to 1"),
    ("grpo", f"{ACTOR}clip_ratio=0.3", "does not read it", "clip_ratio_high"),
    ("grpo", f"{ACTOR}clip_ratio_c=1", "PPOClip.dual must be above 1"),
    ("gspo", f"{ACTOR}clip_ratio_c=3", "only loss_mode=vanilla reads it"),
    ("gspo", f"{ACTOR}loss_agg_mode=token-mean", "needs SequenceMean", "loss_agg_mode=seq-mean-token-mean"),
    ("dapo", f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", "the length only", "--recipe dr_grpo"),
    ("dapo", f"{ACTOR}loss_agg_mode=token-mean {ACTOR}policy_loss.loss_mode=sapo", "always reduced as"),
    ("dapo", f"{ACTOR}kl_loss_coef=0.1", "use_kl_loss=True"),
    ("grpo", f"{ACTOR}kl_loss_type=abs", "expected kl, k1"),
    ("grpo", f"{ACTOR}kl_loss_type=k1+", "write k2"),
    ("grpo", "algorithm.kl_ctrl.kl_coef=0.1", "use_kl_in_reward=True"),
    ("grpo", "algorithm.use_kl_in_reward=True", "there is one KL", "use_kl_loss=False"),
    ("dapo", "algorithm.adv_estimator=reinforce_plus_plus_baseline algorithm.use_kl_in_reward=True",
     "verl sums the KL", "kl_loss_type=k2"),
    ("dapo", f"{CORRECTION}rollout_is_threshold=3", "rollout_is=token"),
    ("dapo", f"{CORRECTION}rollout_is=null {CORRECTION}rollout_is_threshold=3", "rollout_is=token"),
]  # fmt: skip

ALGORITHMS = PRESETS | {
    "k2 in reward": dataclasses.replace(PRESETS["rloo"], kl=kl.K2(), kl_coef=0.1),
    "corrected": dataclasses.replace(PRESETS["dapo"], correction=ratios.TruncatedIS(5.0, "sequence")),
    "penalty": dataclasses.replace(PRESETS["dapo"], surrogate=surrogates.PenaltyKL(), kl_coef=1.0),
}
START = {key: dataclasses.replace(RECIPES["grpo"], name=key, algorithm=a) for key, a in ALGORITHMS.items()} | RECIPES
BOTH = (AdaptiveKL(0.1), AdaptiveEntropy(0.9))
START["both"] = dataclasses.replace(RECIPES["dapo"], controller=BOTH)
START["filtered"] = dataclasses.replace(RECIPES["dapo"], overlong=Overlong(drop=True, share=0.2))


def given(line):
    return dict(word.split("=") for word in line.split())


def values(recipe):
    parts = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.name != "algorithm"}
    return parts | {f.name: getattr(recipe.algorithm, f.name) for f in dataclasses.fields(recipe.algorithm)}


@pytest.mark.parametrize(("start", "line", "becomes"), TRANSLATED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_changes_what_it_says_and_nothing_else(start, line, becomes):
    recipe = translate(START[start], given(line))
    assert values(recipe) == values(START[start]) | becomes
    backwards = translate(START[start], dict(reversed(given(line).items())))
    assert backwards == recipe
    changed = {name for name, value in values(recipe).items() if value != values(START[start])[name]}
    said = {field for name in given(line) for field in SPELLINGS[name].fields}
    # A KL in the reward is put around the estimator.
    assert changed <= (said | {"advantage"} if "kl_coef" in said else said)
    assert [text.split(": ")[0] for text in explain(recipe, given(line))] == [
        SPELLINGS[name].typed(value) for name, value in given(line).items()
    ]


@pytest.mark.parametrize(("start", "line", "words"), [(s, line, words) for s, line, *words in REFUSED],
                         ids=[line for _, line, *_ in REFUSED])  # fmt: skip
def test_what_cannot_be_said_exactly_is_refused_with_the_reason(start, line, words):
    with pytest.raises(InputError) as refusal:
        translate(START[start], given(line))
    for word in words:
        assert re.search(word if word.startswith("^") else re.escape(word), str(refusal.value)), str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_name_is_tried():
    understood = {name for _, line, _ in TRANSLATED for name in given(line)}
    assert understood == {name for name, spelling in SPELLINGS.items() if spelling.fields}
    assert set(SPELLINGS) - understood <= {name for _, line, *_ in REFUSED for name in given(line)}


def test_nothing_given_changes_nothing():
    assert translate(RECIPES["dapo"], {}) is RECIPES["dapo"]


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match="no spelling epsilon_low"):
        translate(RECIPES["dapo"], {"epsilon_low": "0.2"})


def test_what_a_name_became_is_shown_without_what_is_off():
    settings = given("epsilon_high=0.3 beta=0.04 loss_type=grpo")
    assert explain(translate(RECIPES["dapo"], settings), settings) == [
        "--epsilon_high 0.3: surrogate PPOClip(low=0.2, high=0.3)",
        "--beta 0.04: kl K3(), kl_coef 0.04, kl_in loss",
        "--loss_type grpo: surrogate PPOClip(low=0.2, high=0.3), reduce SequenceMean()",
    ]
    assert explain(translate(RECIPES["grpo"], {"beta": "0"}), {"beta": "0"}) == ["--beta 0: kl None, kl_coef 0.0"]


@pytest.mark.parametrize("delta", [1.28, 1.5, 4.0])
def test_delta_is_the_clamp_of_the_unclipped_ratio(delta):
    rng = np.random.default_rng(0)
    old, logp = -rng.uniform(0.1, 3, (4, 8)), -rng.uniform(0.1, 3, (4, 8))
    advantages, r = rng.normal(size=(4, 8)), np.exp(logp - old)
    clamped = -np.minimum(np.minimum(r, delta) * advantages, np.clip(r, 0.8, 1.28) * advantages)
    algorithm = translate(RECIPES["dapo"], {"delta": str(delta)}).algorithm
    arrays = [x.astype(np.float32) for x in (advantages, old, logp)]
    loss, _ = policy_loss(algorithm, arrays[2], PolicyBatch(arrays[0], np.ones((4, 8), bool), arrays[1]))
    assert np.any((r > delta) & (advantages < 0)) and np.any((r > delta) & (advantages > 0))
    np.testing.assert_allclose(loss, np.mean(clamped), rtol=2e-6)


def test_the_two_dialects_of_cispo_mean_the_same_bound():
    trl = translate(RECIPES["dapo"], given("loss_type=cispo epsilon_high=1.25"))
    verl = translate(RECIPES["dapo"], given(f"{ACTOR}policy_loss.loss_mode=cispo {CLIPS.format(1, 0.25)}"))
    assert trl == verl


@pytest.mark.parametrize(("start", "line"), [row[:2] for row in TRANSLATED])
def test_a_saved_run_holds_our_own_names_only(start, line):
    run = dataclasses.replace(configs.load_config("smoke")[1], recipe=translate(START[start], given(line)))
    saved = configs.to_json(run)
    assert configs.from_json(saved) == run
    names = {part for key in flat(saved["recipe"]) for part in key.split(".")}
    assert not names & (SPELLINGS.keys() - {"entropy_coef", "delta"})


def test_spellings_are_taken_out_of_the_arguments():
    ours, foreign = "--steps 3 beta=1", f"--epsilon-high=0.3 {ACTOR}tau_pos=1 --beta -0.1"
    arguments = f"{ours} {foreign} +{ACTOR}tau_neg=2 --{ACTOR}clip_ratio 3 --fresh".split()
    assert take_spellings(arguments) == {
        "epsilon_high": "0.3",
        f"{ACTOR}tau_pos": "1",
        "beta": "-0.1",
        f"{ACTOR}tau_neg": "2",
        f"{ACTOR}clip_ratio": "3",
    }
    assert arguments == ["--steps", "3", "beta=1", "--fresh"]


def test_every_name_has_a_row_in_the_documented_table():
    documented = [line for line in (ROOT / "docs" / "dialects.md").read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in documented] == list(SPELLINGS)
