"""config.json <-> ModelConfig, in both dialects, and what is refused."""

import json
import math
from pathlib import Path

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import Embeddings, Llama3Rope, Rope, Yarn
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.hf import read_config, write_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


def attributes(name="llama", **changes):
    return json.loads((FIXTURES / name / "config.json").read_text()) | changes


def refusal(name="llama", **changes):
    with pytest.raises(InputError) as refused:
        read_config(attributes(name, **changes))
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_every_family_has_a_fixture():
    assert {attributes(name)["model_type"] for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_both_dialects_mean_the_same(name):
    old = json.loads((FIXTURES / name / "config.transformers4.json").read_text())
    assert "rope_parameters" not in old or name.startswith(("gemma4", "olmo_hybrid"))  # which transformers 4 lacks
    assert read_config(old) == read_config(attributes(name))


@pytest.mark.parametrize("name", NAMES)
def test_written_config_is_read_back_equal(name):
    config = read_config(attributes(name))
    written = json.loads(json.dumps(write_config(config, "bfloat16")))
    assert read_config(written) == config
    assert written["torch_dtype"] == "bfloat16"


def test_window_rules_follow_each_family():
    assert read_config(attributes("llama")).attention.windows == ()
    assert read_config(attributes("mistral")).attention.windows == (6, 6)
    assert read_config(attributes("mistral", sliding_window=None)).attention.windows == ()
    assert read_config(attributes("qwen2")).attention.windows == (0, 6)
    assert read_config(attributes("qwen2", use_sliding_window=False)).attention.windows == ()
    assert read_config(attributes("gemma2", layer_types=None)).attention.windows == (6, 0, 6)
    gemma3 = attributes("gemma3_text", layer_types=None, num_hidden_layers=7)
    assert read_config(gemma3).attention.windows == (6, 6, 0, 6, 6, 0, 6)
    bare = {name: value for name, value in gemma3.items() if "pattern" not in name}
    assert read_config(bare).attention.windows == (6, 6, 6, 6, 6, 0, 6)
    assert read_config(bare | {"_sliding_window_pattern": 2}).attention.windows == (6, 0, 6, 0, 6, 0, 6)


def test_gemma_constants():
    config = read_config(attributes("gemma2"))
    assert config.attention.scale == pytest.approx(24**-0.5)
    assert (config.attention.softcap, config.embeddings.logit_softcap) == (3.0, 5.0)
    assert config.embeddings.scale == pytest.approx(32**0.5)
    assert config.norm.plus_one
    assert config.activation == "gelu_tanh"
    local = read_config(attributes("gemma3_text")).attention
    assert (local.rope.theta, local.rope.local_theta, local.rope.scaling) == (1000.0, 50.0, 8.0)


def test_llama3_rope_falls_back_to_the_models_length():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read_config(attributes(rope_parameters=None, rope_scaling=rope, rope_theta=5e5))
    assert config.attention.rope.scaling == Llama3Rope(8.0, 1.0, 4.0, 64)
    assert config.attention.rope.theta == 5e5


def test_left_out_attributes_take_the_familys_default():
    bare = {name: value for name, value in attributes().items() if name in ("model_type", "vocab_size", "hidden_size",
            "intermediate_size", "num_hidden_layers", "num_attention_heads")}  # fmt: skip
    config = read_config(bare)
    assert (config.attention.kv_heads, config.attention.head_dim) == (4, 8)
    assert (config.norm.eps, config.attention.rope.theta, config.embeddings.tied) == (1e-6, 10000.0, False)
    assert read_config(bare | {"model_type": "olmo2"}).norm.eps == 1e-5


def test_special_ids_of_every_spelling():
    ids = read_config(attributes(eos_token_id=[2, 5, 2], pad_token_id=-1, bos_token_id=None)).tokens
    assert (ids.bos, ids.eos, ids.pad) == (None, (2, 5), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["mamba", "llama", "olmo2"]),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, ["'llama4_text'", "qwen3_5_text"]),
        ({"model_type": "llava", "text_config": {}}, ["'llava'", "None"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"logits_scaling": 8.0}, ["logits_scaling=8.0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_act": "relu"}, ["relu", "silu", "gelu_pytorch_tanh"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, ["dynamic", "llama3", "yarn"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["yarn", "factor"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "beta_fast": 3.0}}, ["beta_fast=3.0"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"hidden_size": "32"}, ["hidden_size", "positive integer"]),
        ({"hidden_size": "32", "head_dim": None}, ["hidden_size", "positive integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers=None"]),
        ({"num_hidden_layers": 10_001}, ["num_hidden_layers=10001; at most 10000 are read"]),
        ({"hidden_size": 30, "head_dim": None}, ["hidden_size=30", "num_attention_heads=4"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"rope_parameters": ["default"]}, ["wrong type"]),
        ({"rope_parameters": None, "rope_theta": [1]}, ["wrong type"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>", "integer"]),
    ],
)
def test_refused_by_name(changes, words):
    message = refusal(**changes)
    assert all(word in message for word in words), message


def test_other_refusals():
    assert "chunked_attention" in refusal("gemma2", layer_types=["chunked_attention"] * 3)
    assert "sliding_window='6'" in refusal("mistral", sliding_window="6")
    assert "2 entries for 3 layers" in refusal("gemma2", layer_types=["full_attention"] * 2)
    local = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {"rope_type": "default"}}
    assert "sliding layers" in refusal("gemma3_text", rope_parameters=local)
    partial = attributes()
    del partial["vocab_size"]
    with pytest.raises(InputError, match="vocab_size"):
        read_config(partial)


def test_experts_that_cannot_be_obeyed_are_refused():
    assert "decoder_sparse_step=2" in refusal("qwen3_moe", decoder_sparse_step=2)
    assert "mlp_only_layers=[0]" in refusal("qwen2_moe", mlp_only_layers=[0])
    assert "qkv_bias=False" in refusal("qwen2_moe", qkv_bias=False)
    assert "router_jitter_noise=0.1" in refusal("mixtral", router_jitter_noise=0.1)
    assert "clip_qkv=8.0" in refusal("olmoe", clip_qkv=8.0)
    assert "num_experts_per_tok=7 of 6 experts" in refusal("olmoe", num_experts_per_tok=7)
    assert "num_experts=0; it must be a positive integer" in refusal("olmoe", num_experts=0)


def test_the_later_families_refuse_what_they_do_not_do():
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert "longrope" in refusal("phi3", rope_parameters=longrope)
    assert "longrope" in refusal("phi3", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert "rotates 3 of 8 numbers" in refusal("glm4", rope_parameters=None, partial_rotary_factor=0.4)
    assert "no_rope_layers has 1 entries for 3 layers" in refusal("smollm3", no_rope_layers=[1])
    assert "attention_bias=False" in refusal("gpt_oss", attention_bias=False)
    assert "quantization_config" in refusal("gpt_oss", quantization_config={"quant_method": "awq"})
    assert read_config(attributes("gpt_oss", quantization_config={"quant_method": "mxfp4"})).family == "gpt_oss"


def test_layers_without_attention_are_read_in_each_spelling():
    bare = {name: value for name, value in attributes("qwen3_next").items() if name != "layer_types"}
    assert read_config(bare).recurrent.layers == (True, True, True, False)
    assert read_config(bare | {"full_attention_interval": 2}).recurrent.layers == (True, False, True, False)
    bare = {name: value for name, value in attributes("lfm2").items() if name != "layer_types"}
    assert read_config(bare | {"full_attn_idxs": [0, 3]}).recurrent.layers == (False, True, True, False)
    assert read_config(bare | {"block_auto_adjust_ff_dim": False}).mlp_width == 30
    assert read_config(bare).mlp_width == 24  # two thirds, in multiples of 8
    assert "linear_num_value_heads=3" in refusal("qwen3_next", linear_num_value_heads=3)
    assert "takes one of full_attention, linear_attention" in refusal("qwen3_next", layer_types=["conv"] * 4)
    assert "conv_bias=True" in refusal("lfm2", conv_bias=True)
    assert "attn_output_gate=False" in refusal("qwen3_5_text", attn_output_gate=False)
    old = {"block_ff_dim": 30, "theta": 50.0, "tie_embedding": True, "block_dim": 16, "block_use_swiglu": True}
    named = {"intermediate_size", "rope_parameters", "tie_word_embeddings"}
    bare = {name: value for name, value in attributes("lfm2").items() if name not in named}
    assert read_config(bare | old) == read_config(attributes("lfm2"))
    assert "intermediate_size under two names, 31 and 30" in refusal("lfm2", intermediate_size=31, block_ff_dim=30)
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_type": "default"}
    assert read_config(attributes("qwen3_5_text", rope_parameters=rope)).attention.rope.dims == 4


def test_two_sizes_of_attention_are_read_or_refused():
    config = read_config(attributes("gemma4_text"))
    assert config.layers_with("shared_kv_attn") == (4, 5, 6) and config.layers_with("shared_kv_global_attn") == (7,)
    assert config.layers_with("attn") == (0, 1, 2) and config.layers_with("wide_mlp") == (4, 5, 6, 7)
    assert (config.attention.head_dim, config.global_attention.head_dim) == (8, 16)
    assert write_config(config, "float32")["vocab_size_per_layer_input"] == 128
    assert config.global_attention.rope == Rope(1000.0, max_positions=64, rotated_pairs=2)
    # In the form of published models other heads of keys count where values are keys alone.
    flat = {"per_layer_config": None, "global_head_dim": 16, "num_global_key_value_heads": 1}
    for keys, heads in ((True, 1), (False, 2)):
        changes = flat | {"attention_k_eq_v": keys}
        assert read_config(attributes("gemma4_experts", **changes)).global_attention.kv_heads == heads
    assert read_config(attributes("gemma4_experts", attention_k_eq_v=False)).global_attention.kv_heads == 1
    published = {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    assert read_config(attributes("gemma4_unified_text", **published)).per_layer_width == 0
    ends = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "per_layer_config": None}
    assert read_config(attributes("gemma4_unified_text", **ends)).attention.windows == (6, 0, 0)
    plain = {"full_attention": {"rope_type": "default", "rope_theta": 10.0}}
    assert read_config(attributes("gemma4_text", rope_parameters=plain)).global_attention.rope.rotated_pairs == 0
    assert "num_kv_shared_layers=5, and an earlier layer" in refusal("gemma4_text", num_kv_shared_layers=5)
    assert "per_layer_config" in refusal("gemma4_text", per_layer_config={"3": {"head_dim": 16}})
    assert "use_bidirectional_attention='all'" in refusal("gemma4_text", use_bidirectional_attention="all")
    assert "vocab_size_per_layer_input=64" in refusal("gemma4_text", vocab_size_per_layer_input=64)
    assert "top_k_experts=7 of 6 experts" in refusal("gemma4_experts", top_k_experts=7)
    one = {"layer_types": ["full_attention"] * 8, "per_layer_config": None}
    assert "layer_types to one kind of layer" in refusal("gemma4_text", **one)
    assert "layer_types has 9 entries for 8 layers" in refusal(
        "gemma4_text", per_layer_config=None, layer_types=["sliding_attention"] * 8 + ["full_attention"]
    )
    nothing = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.0}}
    assert "rotates nothing" in refusal("gemma4_text", rope_parameters=nothing)
    assert "global_head_dim=15" in refusal("gemma4_text", per_layer_config=None, global_head_dim=15)
    yarn = {"full_attention": {"rope_type": "yarn", "factor": 4.0}}
    assert "of full_attention, which is not known" in refusal("gemma4_text", rope_parameters=yarn)


def test_ids_of_a_whole_model_count_before_those_of_its_text_model():
    text = attributes("gemma4_text", eos_token_id=1)
    assert read_config({"model_type": "gemma4", "eos_token_id": [1, 106], "text_config": text}).tokens.eos == (1, 106)
    assert read_config({"model_type": "gemma4", "eos_token_id": None, "text_config": text}).tokens.eos == (1,)


def test_olmo_hybrid_is_read_with_and_without_rotary_positions():
    config = read_config(attributes("olmo_hybrid"))
    assert config.attention.rope.layers == (False, False, False) and config.recurrent.strength == 2
    assert config.layers_with("state_norms") == (0, 2) and config.layers_with("attn_norms") == (1,)
    for rope in (None, {"rope_theta": 10000.0, "rope_type": "default"}):  # null is transformers' default
        assert read_config(attributes("olmo_hybrid", rope_parameters=rope)).attention.rope.layers == ()
    flat = attributes("olmo_hybrid", rope_theta=None)
    assert not any(
        read_config({name: x for name, x in flat.items() if name != "rope_parameters"}).attention.rope.layers
    )
    assert read_config(attributes("olmo_hybrid", linear_allow_neg_eigval=False)).recurrent.strength == 1
    bare = {
        name: x
        for name, x in attributes("olmo_hybrid").items()
        if not name.startswith("linear_") and name != "layer_types"
    }
    sizes = read_config(bare | {"num_hidden_layers": 4}).recurrent
    assert (sizes.layers, sizes.key_heads, sizes.value_heads) == ((True, True, True, False), 2, 2)
    assert (sizes.key_dim, sizes.value_dim) == (6, 12)


def test_experts_after_dense_layers_are_read_in_each_spelling():
    config = read_config(attributes("deepseek_v3"))
    assert config.layers_with("experts") == (2, 3) and config.layers_with("mlp") == (0, 1)
    assert config.experts.shared_width == 24 and config.attention.cached == (1, 14, 0)
    growth = 0.1 * 0.7 * math.log(4.0) + 1
    assert config.attention.factor == pytest.approx(10**-0.5 * growth**2)
    assert read_config(attributes("deepseek_v3", model_type="kimi_k2")) == config
    kimi = {"model_type": "kimi_k25", "text_config": attributes("deepseek_v3", model_type="kimi_k2")}
    assert read_config(kimi) == config
    bare = {name: value for name, value in attributes("glm4_moe_lite").items() if name != "mlp_layer_types"}
    assert read_config(bare) == read_config(attributes("glm4_moe_lite"))
    assert read_config(bare | {"first_k_dense_replace": 2}).layers_with("experts") == (2,)
    assert "mlp_layer_types=['sparse', 'dense', 'sparse']" in refusal(
        "glm4_moe_lite", mlp_layer_types=["sparse", "dense", "sparse"]
    )
    flash = attributes("glm4_moe_lite", num_attention_heads=20, num_key_value_heads=20)
    assert read_config(flash).attention.head_dim == 10, "32 numbers need not be a multiple of 20 heads"
    assert "n_routed_experts=8, which is no multiple of n_group=3" in refusal("deepseek_v3", n_group=3)
    assert "scoring_func='softmax'" in refusal("deepseek_v3", scoring_func="softmax")
    assert "topk_method='greedy'" in refusal("deepseek_v3", topk_method="greedy")


def test_yarn_is_read_in_each_spelling():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    read = lambda **more: read_config(attributes(rope_parameters=None, rope_scaling=rope | more)).attention.rope.scaling
    assert read() == Yarn(4.0, 32, 32.0, 1.0, pytest.approx(0.1 * math.log(4) + 1), True)
    assert read(attention_factor=0.7, truncate=False, beta_fast=9).magnitude == 0.7
    both = (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert read(mscale=2.0, mscale_all_dim=0.5).magnitude == pytest.approx(both)
    assert read(factor=None) == Yarn(2.0, 32, 32.0, 1.0, pytest.approx(0.1 * math.log(2) + 1), True)
    bare = {name: value for name, value in attributes("gpt_oss").items() if name != "rope_parameters"}
    assert read_config(bare).attention.rope.scaling == Yarn(
        32.0, 4096, 32, 1, pytest.approx(0.1 * math.log(32) + 1), False
    )


LINEAR = {"rope_type": "linear", "factor": 4.0}
NEW = "rope_parameters"
KINDS = ("full_attention", "sliding_attention")


@pytest.mark.parametrize(
    ("name", "changes", "theta", "scaling"),
    [
        ("llama", {NEW: LINEAR | {"rope_theta": 7.0}}, 7.0, 4.0),
        ("llama", {NEW: LINEAR, "rope_theta": 7.0}, 7.0, 4.0),
        ("llama", {NEW: LINEAR | {"rope_theta": 7.0}, "rope_theta": 7}, 7.0, 4.0),
        (
            "llama",
            {NEW: {"type": "linear", "rope_type": None, "factor": 4.0, "rope_theta": None}},
            1e4,
            4.0,
        ),
        ("llama", {NEW: None, "rope_scaling": LINEAR, "rope_theta": None}, 1e4, 4.0),
        ("llama", {NEW: LINEAR | {"beta_fast": None, "attention_factor": None}}, 1e4, 4.0),
        ("llama", {NEW: LINEAR, "rope_scaling": LINEAR}, 1e4, 4.0),
        ("qwen2", {NEW: dict.fromkeys(KINDS, LINEAR | {"rope_theta": 7.0})}, 7.0, 4.0),
        (
            "llama",
            {NEW: {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 7.0}},
            7.0,
            None,
        ),
        ("gemma3_text", {NEW: {"full_attention": LINEAR | {"rope_theta": 7.0}}}, 7.0, 4.0),
        ("gemma3_text", {NEW: None, "rope_scaling": LINEAR, "rope_theta": 7.0}, 7.0, 4.0),
        (
            "gemma3_text",
            {NEW: {"full_attention": LINEAR, "sliding_attention": None}, "rope_theta": 7.0},
            7.0,
            4.0,
        ),
    ],
)
def test_rotary_parameters_are_read_wherever_they_stand(name, changes, theta, scaling):
    rope = read_config(attributes(name, **changes)).attention.rope
    assert (rope.theta, rope.scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {NEW: {"factor": 4.0}}, "factor=4.0"),
        ("llama", {NEW: {"rope_type": "default", "low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        (
            "llama",
            {NEW: LINEAR | {"original_max_position_embeddings": 8}},
            "original_max_position_embeddings=8",
        ),
        ("llama", {NEW: LINEAR | {"type": "yarn"}}, "'linear' and 'yarn'"),
        (
            "llama",
            {NEW: LINEAR, "rope_scaling": LINEAR | {"factor": 2.0}},
            "rope_scaling, and they differ",
        ),
        (
            "llama",
            {NEW: LINEAR | {"rope_theta": 7.0}, "rope_theta": 8.0},
            "rope_theta in two places, 7.0 and 8.0",
        ),
        ("llama", {NEW: {"full_attention": LINEAR}}, "otherwise than full ones; llama cannot"),
        ("llama", {"rope_local_base_freq": 5.0}, "rope_local_base_freq=5.0"),
        ("llama", {NEW: LINEAR | {"mrope_section": [1, 1, 2]}}, "mrope_section=[1, 1, 2]"),
        ("llama", {NEW: {"rope_type": "proportional"}}, "'proportional'; known are default, linear"),
        ("glm4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor in two places, 0.5 and 0.75"),
        ("gemma3_text", {NEW: LINEAR}, "rope_parameters.rope_type='linear' outside of full_attention"),
        (
            "gemma3_text",
            {NEW: {"full_attention": LINEAR, "rope_theta": 7.0}},
            "rope_parameters.rope_theta=7.0 outside",
        ),
        ("gemma3_text", {"rope_local_base_freq": 60.0}, "rope_theta in two places, 50.0 and 60.0"),
        ("qwen2_yarn", {NEW: LINEAR | {"rope_type": "yarn", "truncate": "false"}}, "truncate='false'"),
        ("gemma2", {"sliding_window": None}, "layer_types has sliding layers, and sliding_window is not set"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "wrong type"),
        (
            "gemma2",
            {"hidden_act": "silu", "hidden_activation": None},
            "hidden_act='silu'; gemma2 has gelu_pytorch_tanh",
        ),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
    ],
)
def test_an_attribute_in_another_form_never_becomes_the_default(name, changes, words):
    assert words in refusal(name, **changes)


def test_layers_without_rotation_follow_the_interval():
    config = read_config(attributes("smollm3", no_rope_layers=None, layer_types=None, num_hidden_layers=5))
    assert config.attention.rope.layers == (True, True, True, False, True)


def test_numbers_of_experts_have_two_spellings():
    new = attributes("qwen3_moe")
    count = new.pop("num_local_experts")
    assert read_config(new | {"num_experts": count}) == read_config(attributes("qwen3_moe"))
    experts = read_config(attributes("qwen2_moe")).experts
    assert (experts.count, experts.active, experts.width, experts.shared_width) == (6, 2, 12, 20)
    assert read_config(attributes("mixtral")).expert_width == 48


def test_switched_off_attributes_are_harmless():
    off = {"attention_bias": False, "rope_interleaved": False, "mlp_bias": None, "partial_rotary_factor": 1.0}
    assert read_config(attributes(**off, is_llama_config=True, use_cache=False)) == read_config(attributes())


def test_a_config_that_the_family_cannot_say_is_not_written():
    import dataclasses

    config = read_config(attributes())
    capped = dataclasses.replace(config, embeddings=Embeddings(logit_softcap=30.0))
    with pytest.raises(InputError, match=r"embeddings\.logit_softcap=30\.0"):
        write_config(capped, "float32")
