"""Make the tiny models under tests/fixtures/models, with the logits that transformers computes for them.

And the reward models under tests/fixtures/reward_models, with their scores.

    pip install torch==2.13.0 transformers safetensors gguf
    python tools/make_model_fixtures.py make     # write the fixtures anew, or those named after it
    python tools/make_model_fixtures.py convert LLAMA_CPP    # GGUF files of newer families by llama.cpp's converter
    python tools/make_model_fixtures.py check    # export each with jaxrl_llm, load it in transformers, compare results

torch is pinned because another version may change the random weights. Run from the root of the repository.
"""

import hashlib
import json
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

FIXTURES = pathlib.Path("tests/fixtures/models")
REWARDS = pathlib.Path("tests/fixtures/reward_models")
SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 0.5}  # fmt: skip
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 12, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
}  # fmt: skip

FAMILIES = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3_rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}, "eos_token_id": [2, 3]},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 6}),
    "qwen2": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "num_hidden_layers": 3,
         "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "num_hidden_layers": 3,
         "sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPE},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "sliding_window": 6}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
         "norm_topk_prob": True},
    ),
    "qwen2_yarn": (transformers.Qwen2Config, SMALL | {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "olmo3": (
        transformers.Olmo3Config,
        SMALL | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
                 "rope_parameters": {"full_attention": YARN | {"rope_theta": 5e5},
                                     "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        SMALL | {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "phi3": (transformers.Phi3Config, SMALL | {"sliding_window": 6}),
    "glm4": (
        transformers.Glm4Config,
        SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    ),
    "glm4_plain": (
        transformers.Glm4Config,
        SMALL | {"attention_bias": False, "rope_parameters": YARN | {"mscale": 1.4, "mscale_all_dim": 0.7,
                                                                     "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        transformers.GraniteConfig,
        SMALL | {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4,
                 "attention_multiplier": 0.2, "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.5,
                 "swiglu_alpha": 1.3, "rope_parameters": YARN | {"truncate": False}},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        SMALL | DELTA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                         "shared_expert_intermediate_size": 20},
    ),
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig,
        SMALL | DELTA | {"layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
                         "num_hidden_layers": 5, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeTextConfig,
        SMALL | DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                         "shared_expert_intermediate_size": 20},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        SMALL | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
                 "intermediate_size": 30, "block_multiple_of": 8, "norm_eps": 1e-3,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        SHAPE | GROUPED | LATENT | {"num_hidden_layers": 4, "first_k_dense_replace": 2, "rms_norm_eps": 1e-4,
                                    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3_plain": (
        transformers.DeepseekV3Config,
        SHAPE | GROUPED | LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0, "rope_interleave": False,
                                    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        SHAPE | GROUPED | LATENT | {"num_hidden_layers": 3, "rms_norm_eps": 1e-3, "n_group": 1, "topk_group": 1,
                                    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        SMALL | GROUPED | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "use_qk_norm": True,
                           "attention_bias": True, "n_group": 1, "topk_group": 1,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 50.0,
                                               "partial_rotary_factor": 0.5}},
    ),
    "gemma4_text": (
        transformers.Gemma4TextConfig,
        {**SMALL, **GEMMA4, "num_hidden_layers": 8, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
         "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
         "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 128},
    ),
    "gemma4_unified_text": (
        transformers.Gemma4UnifiedTextConfig,
        {**SMALL, **GEMMA4, "num_hidden_layers": 3, "num_kv_shared_layers": 1,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "gemma4_experts": (
        transformers.Gemma4TextConfig,
        {**GEMMA4, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12},
    ),
    "olmo_hybrid": (
        transformers.OlmoHybridConfig,
        {name: value for name, value in SMALL.items() if name != "head_dim"}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "num_key_value_heads": 2,
           "num_hidden_layers": 3, "linear_num_value_heads": 4,
                 "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
}  # fmt: skip
REWARD_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
REWARD_SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_labels": 1}
GGUF = {
    "llama": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "olmo2": "OLMO2",
    "mixtral": "LLAMA",
    "qwen3_moe": "QWEN3MOE",
    "qwen2_moe": "QWEN2MOE",
    "olmoe": "OLMOE",
}
CONVERTED = ("lfm2", "qwen3_5_text", "glm4_moe")
"""Families with a GGUF file that llama.cpp's own converter wrote; of those below only a digest is kept."""
DIGESTED = ("qwen3_5_moe_text", "qwen3_next", "glm4_moe_lite")


def make(*names: str) -> None:
    """Write every fixture anew, or those of the families named."""
    for folder in () if names else (FIXTURES, REWARDS):
        shutil.rmtree(folder, ignore_errors=True)
    for seed, (name, (config_class, changes)) in enumerate(FAMILIES.items()):
        if names and name not in names:
            continue
        model = random_model(transformers.AutoModelForCausalLM, config_class(**SHAPE | changes), seed)
        directory = FIXTURES / name
        model.save_pretrained(directory, max_shard_size="60KB" if name == "qwen3" else "5GB")
        if name == "olmo_hybrid":
            save_file(published_names(model), directory / "model.safetensors", metadata={"format": "pt"})
        tokens = np.random.RandomState(seed).randint(3, SHAPE["vocab_size"], (2, 20)).astype(np.int32)
        np.savez(directory / "example.npz", tokens=tokens, logits=logits(model, tokens))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.transformers4.json").write_text(json.dumps(version4(config), indent=2) + "\n")
        if name in GGUF:
            write_gguf(directory, FIXTURES / f"{name}.gguf", GGUF[name])
    for seed, name in enumerate(() if names else REWARD_FAMILIES):
        make_reward_model(name, seed)
    size = sum(file.stat().st_size for folder in (FIXTURES, REWARDS) for file in folder.rglob("*"))
    print(f"{len(FAMILIES)} models and {len(REWARD_FAMILIES)} reward models, {size / 1e6:.2f} MB")


def published_names(model: torch.nn.Module) -> dict:
    """The tensors of OLMo Hybrid as published ones are named; transformers 5.24 saves them under names of its own."""
    tensors, linear = (
        {},
        {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"},
    )
    for name, tensor in model.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.endswith("conv1d.weight"):
            block = model.model.layers[int(layer[1])].linear_attn
            parts = tensor.split([block.key_dim, block.key_dim, block.value_dim])
            tensors |= {name.replace("conv1d", f"{x}_conv1d"): y.clone() for x, y in zip("qkv", parts, strict=True)}
            continue
        if layer and model.config.layer_types[int(layer[1])] == "linear_attention":
            name = next((name.replace(old, new) for old, new in linear.items() if old in name), name)
        tensors[name] = tensor.clone()
    return tensors


def make_reward_model(name: str, seed: int) -> None:
    """A sequence classifier of one label, and its scores of right-padded sequences that end with the end token."""
    config_class, changes = FAMILIES[name]
    config = config_class(**SHAPE | changes | REWARD_SHAPE)
    model = random_model(transformers.AutoModelForSequenceClassification, config, seed)
    model.save_pretrained(REWARDS / name, max_shard_size="20KB" if name == "qwen3" else "5GB")
    lengths = np.array([12, 7, 3, 10], np.int32)
    tokens = np.random.RandomState(seed).randint(3, config.vocab_size, (len(lengths), 12)).astype(np.int32)
    tokens[np.arange(len(lengths)), lengths - 1] = config.eos_token_id
    tokens[np.arange(12) >= lengths[:, None]] = config.pad_token_id
    np.savez(REWARDS / name / "example.npz", tokens=tokens, lengths=lengths, scores=scores(model, tokens, lengths))


def random_model(kind: type, config: transformers.PreTrainedConfig, seed: int) -> torch.nn.Module:
    """A float32 model whose every parameter is far enough from its usual start to matter; ``kind`` is an Auto class."""
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name or name.endswith("scale"):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_((0.5 if name.endswith("bias") else 0.2) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
    return model.eval()


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """float32[B, T, V]"""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def scores(model: torch.nn.Module, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float32[B], of all rows in one batch."""
    mask = torch.from_numpy(np.arange(tokens.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), attention_mask=mask).logits[:, 0].float().numpy()


def version4(config: dict) -> dict:
    """The same configuration as transformers 4 writes it; of a model that it lacks, as published ones are written."""
    if config["model_type"] == "olmo_hybrid":
        return config
    if "per_layer_config" in config:
        sizes = next(iter(config["per_layer_config"].values()))
        others = {name: value for name, value in config.items() if name != "per_layer_config"}
        return others | {
            "global_head_dim": sizes["head_dim"],
            "num_global_key_value_heads": sizes.get("num_key_value_heads"),
        }
    old = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    rope = config["rope_parameters"]
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    scaling = {name: value for name, value in full.items() if name != "rope_theta"}
    old |= {"torch_dtype": config["dtype"], "rope_theta": full["rope_theta"]}
    if "partial_rotary_factor" in scaling:
        old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    old["rope_scaling"] = None if full["rope_type"] == "default" else scaling
    if full["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")
    if local and config["model_type"] != "olmo3":
        old["rope_local_base_freq"] = local["rope_theta"]
    if config["model_type"] in ("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "smollm3", "gpt_oss"):
        del old["layer_types"]
    if config["model_type"] == "gemma3_text":
        old["sliding_window_pattern"] = 3
    return old


def write_gguf(directory: pathlib.Path, path: pathlib.Path, architecture: str) -> None:
    """The same model as llama.cpp's converter lays it out, in float32; names come from the gguf package's own table."""
    import gguf
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    kind = gguf.MODEL_ARCH[architecture]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    write_metadata(writer, config)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = converted(name, opened.get_tensor(name), config)
                if of_one := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
                    experts.setdefault(f"{of_one[1]}.{of_one[3]}", {})[int(of_one[2])] = tensor
                else:
                    writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    for name, each in experts.items():
        stacked = np.stack([each[index] for index in range(len(each))])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stacked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(checkout: str) -> None:
    """Let llama.cpp's converter, in a checkout (that of llama-cpp-python 0.3.36), write files of newer families."""
    sys.path[:0] = [checkout, f"{checkout}/gguf-py"]
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase

    for name in CONVERTED + DIGESTED:
        attributes = ModelBase.load_hparams(FIXTURES / name, False)
        if name == "glm4_moe_lite":  # which published files have, and transformers 5 writes otherwise
            attributes["first_k_dense_replace"] = attributes["mlp_layer_types"].count("dense")
        kind = get_model_class(attributes["architectures"][0], mmproj=False)
        own = {"set_vocab": lambda self: None, "model_arch": kind.model_arch, "no_mtp": True}
        path = FIXTURES / f"{name}.gguf"
        type(name, (kind,), own)(
            FIXTURES / name, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=attributes
        ).write()
        if name in DIGESTED:
            tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
            print(name, digest(tensors))
            path.unlink()


def digest(tensors: dict[str, np.ndarray]) -> str:
    """A digest of names, shapes and numbers, but those of decays, whose exponentials libraries round differently."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.shape}".encode() + (b"" if name.endswith("ssm_a") else array.tobytes()))
    return found.hexdigest()[:16]


def write_metadata(writer, config: dict) -> None:
    """The keys that describe the architecture and its special tokens."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(writer_scaling("linear"))
        writer.add_rope_scaling_factor(rope["factor"])
    if experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for name, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if config.get(name):
            add(config[name])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    for cap, add in (("attn", writer.add_attn_logit_softcapping), ("final", writer.add_final_logit_softcapping)):
        if config.get(f"{cap}_logit_softcapping"):
            add(config[f"{cap}_logit_softcapping"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def writer_scaling(name: str):
    """The gguf package's name of a rope scaling."""
    import gguf

    return gguf.RopeScalingType(name)


def converted(name: str, tensor: np.ndarray, config: dict) -> np.ndarray:
    """llama.cpp's changes: Llama's query and key rows paired for interleaved rotary; Gemma's norms stored plus 1."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if config["model_type"] in ("llama", "mixtral") and heads:
        rows, columns = tensor.shape
        tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + np.float32(1.0)
    return np.ascontiguousarray(tensor)


def check() -> None:
    """Export every fixture with jaxrl_llm and compare what transformers computes from the export."""
    from jaxrl_llm.models import load_pretrained, load_scalar

    for name in FAMILIES:
        loaded, example = exported(transformers.AutoModelForCausalLM, load_pretrained, FIXTURES / name)
        report(loaded, name, np.abs(logits(loaded, example["tokens"]) - example["logits"]).max())
    for name in REWARD_FAMILIES:
        loaded, example = exported(transformers.AutoModelForSequenceClassification, load_scalar, REWARDS / name)
        found = scores(loaded, example["tokens"], example["lengths"])
        report(loaded, name, np.abs(found - example["scores"]).max())


def exported(kind: type, load: Callable, directory: pathlib.Path) -> tuple[torch.nn.Module, dict]:
    """What transformers reads of jaxrl_llm's export of a fixture, and the fixture's example."""
    from jaxrl_llm.models import save_pretrained

    with tempfile.TemporaryDirectory() as folder, np.load(directory / "example.npz") as example:
        save_pretrained(load(directory)[0], None, pathlib.Path(folder) / "export")
        export = pathlib.Path(folder) / "export"
        return kind.from_pretrained(export, dtype=torch.float32, attn_implementation="eager"), dict(example)


def report(loaded: torch.nn.Module, name: str, difference: float) -> None:
    """Say how far an export is from its fixture, and end where it is another model."""
    print(f"{name:14} {type(loaded).__name__:32} largest difference {difference:.1e}")
    if difference > 1e-5:
        raise SystemExit(f"{name}: the export is another model")


if __name__ == "__main__":
    {"make": make, "convert": convert, "check": check}[sys.argv[1]](*sys.argv[2:])
