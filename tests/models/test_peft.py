"""Adapters in PEFT's format: read as PEFT adds them up, or refused by the name of what is not done."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, load_scalar, logits, save_pretrained, scores
from jaxrl_llm.models.config import ADAPTED, Lora
from jaxrl_llm.models.decoder import to_parameters
from jaxrl_llm.models.families import StoredTensor, axis_sizes, layers_of, our_shape, tensors_of
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.lora import create_adapter
from jaxrl_llm.models.peft import read_adapter, save_adapter
from jaxrl_llm.models.pretrained import check_name, model_config_of
from jaxrl_llm.models.tokenizer import save_tokenizer
from jaxrl_llm.models.weights import hf_shape, read_part, split_tensors
from jaxrl_llm.plan.programs import find_model_config
from jaxrl_llm.sharding import MeshShape, make_mesh

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
TOKENS = np.array([[1, 5, 9, 200, 33, 17, 4]])
PLAIN = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny-random", "r": 4}
PLAIN |= {"lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none", "lora_dropout": 0.1}
ALL = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
WITHOUT_PATTERN = {f"layers.{layer}.{name}_proj": (4, 16 / 4) for layer in (0, 1) for name in ALL}
ADAPTERS = {
    "plain": (PLAIN, {f"layers.{i}.self_attn.{name}_proj": (4, 16 / 4) for i in (0, 1) for name in "qv"}),
    "rslora": (
        PLAIN | {"use_rslora": True, "target_modules": "all-linear", "megatron_core": "megatron.core"},
        {name: (4, 16 / math.sqrt(4)) for name in WITHOUT_PATTERN},
    ),
    "patterns": (
        PLAIN
        | {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}, "target_modules": "all-linear"}
        | {"alpha_pattern": {"o_proj": 5, r"^model\.layers\.0\..*up_proj": 3}},
        WITHOUT_PATTERN
        | {f"layers.{i}.self_attn.q_proj": (2, 16 / 2) for i in (0, 1)}
        | {f"layers.{i}.self_attn.o_proj": (4, 5 / 4) for i in (0, 1)}
        | {"layers.1.mlp.down_proj": (6, 16 / 6), "layers.0.mlp.up_proj": (4, 3 / 4)},
    ),
    "expression": (
        PLAIN | {"target_modules": r".*layers\.1\.(self_attn\.o|mlp\.gate)_proj", "auto_mapping": {"parent": "x"}},
        {f"layers.1.{name}_proj": (4, 16 / 4) for name in ("self_attn.o", "mlp.gate")},
    ),
}
"""What adapter_config.json says, and by hand rank and scale of each module that it adapts."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    save_pretrained(*load_pretrained("tiny-random"), folder)
    return folder


def write(folder, said, adapted, base):
    """Write a random adapter; return the weights of base and adapter, added up in float64."""
    random = np.random.default_rng(0)
    weights = load_file(base / "model.safetensors")
    stored = {}
    for name, (rank, scale) in adapted.items():
        outputs, inputs = weights[f"model.{name}.weight"].shape
        a, b = (0.1 * random.normal(size=size) for size in ((rank, inputs), (outputs, rank)))
        module = f"base_model.model.model.{name}"
        stored |= {f"{module}.lora_A.weight": a.astype(np.float32), f"{module}.lora_B.weight": b.astype(np.float32)}
        whole = weights[f"model.{name}.weight"] + scale * b @ a
        weights[f"model.{name}.weight"] = whole.astype(np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file(stored, folder / "adapter_model.safetensors")
    return weights


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_base_and_adapter_added_up(name, base, tmp_path):
    summed = tmp_path / "summed"
    save_pretrained(*load_pretrained(base), summed)
    save_file(write(tmp_path / "adapter", *ADAPTERS[name], base), summed / "model.safetensors")
    (ours, tokenizer), (theirs, _) = (load_pretrained(tmp_path / folder) for folder in ("adapter", "summed"))
    found, wanted = (np.asarray(logits(model, TOKENS)) for model in (ours, theirs))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.abs(found - np.asarray(logits(load_pretrained(base)[0], TOKENS))).max() > 0.1 and tokenizer is not None
    assert model_config_of(str(tmp_path / "adapter"))[0] == theirs.config


@pytest.mark.slow
def test_an_adapter_is_read_in_any_dtype_and_layout_and_of_a_reward_model(base, tmp_path):
    write(tmp_path / "adapter", *ADAPTERS["plain"], base)
    whole, _ = load_pretrained(tmp_path / "adapter")
    parts, _ = load_pretrained(tmp_path / "adapter", mesh=make_mesh(MeshShape(fsdp=4, tensor=2)))
    half, _ = load_pretrained(tmp_path / "adapter", "bfloat16")
    shapes, _ = load_pretrained(tmp_path / "adapter", "bfloat16", make_mesh(MeshShape(fsdp=8)).abstract_mesh)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [(x.shape, x.dtype) for x in jax.tree.leaves(half)]
    assert "tensor" in str(to_parameters(parts)["blocks"]["attn"]["q"].sharding.spec)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6), whole, parts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, np.asarray(b, np.float32), rtol=0.02, atol=1e-2), whole, half
    )

    judge, tokenizer = load_pretrained("tiny-random")
    scalar = np.linspace(-1, 1, judge.config.width, dtype=np.float32)
    save_pretrained(with_scalar_head(judge, scalar), tokenizer, tmp_path / "judge")
    write(
        tmp_path / "adapter", PLAIN | {"base_model_name_or_path": str(tmp_path / "judge")}, ADAPTERS["plain"][1], base
    )
    found = scores(load_scalar(tmp_path / "adapter")[0], TOKENS, np.array([7]))
    np.testing.assert_allclose(found, scores(with_scalar_head(whole, scalar), TOKENS, np.array([7])), atol=1e-5)
    with pytest.raises(InputError, match=r"the base_model_name_or_path of the adapter .* is a reward model"):
        load_pretrained(tmp_path / "adapter")


def test_the_tokenizer_is_the_adapters_own_with_its_end_of_text(base, tmp_path):
    write(tmp_path / "adapter", *ADAPTERS["plain"], base)
    model, tokenizer = load_pretrained("tiny-random")
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages }}", "<|im_start|>"
    save_tokenizer(tokenizer, tmp_path / "adapter")
    adapted, own = load_pretrained(tmp_path / "adapter")
    assert own.chat_template == "{{ messages }}" and adapted.config.tokens.eos == (*model.config.tokens.eos, 256)


def test_a_plan_over_a_known_base_needs_no_network(base, tmp_path):
    write(tmp_path / "adapter", PLAIN | {"base_model_name_or_path": "Qwen/Qwen2.5-1.5B"}, ADAPTERS["plain"][1], base)
    config, source = find_model_config(str(tmp_path / "adapter"))
    assert config.width == 1536 and "of adapter" in source


REFUSED = {
    "sets use_dora True, which jaxrl_llm does not do: merge the adapter with PEFT": {"use_dora": True},
    "has peft_type 'IA3', not LORA": {"peft_type": "IA3"},
    "sets modules_to_save": {"modules_to_save": ["lm_head"]},
    "sets bias 'all'": {"bias": "all"},
    "sets fan_in_fan_out True": {"fan_in_fan_out": True},
    "sets layers_to_transform [0]": {"layers_to_transform": [0]},
    "sets init_lora_weights 'pissa'": {"init_lora_weights": "pissa"},
    "sets task_type 'TOKEN_CLS'": {"task_type": "TOKEN_CLS"},
    "sets new_thing 3": {"new_thing": 3},
    "has r None": {"r": None},
    "has rank_pattern ['q_proj']": {"rank_pattern": ["q_proj"]},
    "has ranks [4, 0] and alphas [16]": {"rank_pattern": {"q_proj": 0}},
    "has ranks [5000] and alphas [16]": {"r": 5000},
    "has ranks [4] and alphas [1000": {"lora_alpha": 10**400},
    "'(q' is not a regular expression": {"target_modules": "(q"},
    "has base_model_name_or_path None": {"base_model_name_or_path": None},
    "no such model directory: ./missing": {"base_model_name_or_path": "./missing"},
}
UNFIT = {
    "lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A": {"target_modules": ["q_proj", "v_proj", "k_proj"]},
    "holds base_model.model.model.layers.0.self_attn.v_proj": {"target_modules": ["q_proj"]},
    "has shape [4, 64], and base and adapter_config.json say [5, 64]": {"r": 5},
    "and the base has none of them": {"target_modules": ["c_attn"]},
}


@pytest.mark.parametrize("words", [*REFUSED, *UNFIT])
def test_what_is_not_done_is_refused_by_name(words, base, tmp_path):
    adapted = {} if "none of them" in words else ADAPTERS["plain"][1]
    write(tmp_path / "adapter", PLAIN | (REFUSED | UNFIT)[words], adapted, base)
    with pytest.raises(InputError) as refused:
        (check_name if words in REFUSED else load_pretrained)(str(tmp_path / "adapter"))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_pickled_weights_and_an_adapter_of_an_adapter_are_refused(base, tmp_path):
    write(tmp_path / "one", *ADAPTERS["plain"], base)
    write(tmp_path / "two", PLAIN | {"base_model_name_or_path": str(tmp_path / "one")}, ADAPTERS["plain"][1], base)
    (tmp_path / "one/adapter_model.safetensors").rename(tmp_path / "one/adapter_model.bin")
    for name, words in {"one": "holds no adapter_model.safetensors", "two": "is an adapter too"}.items():
        with pytest.raises(InputError, match=words):
            check_name(str(tmp_path / name))


@pytest.mark.parametrize(("kind", "word"), [("gpt_oss", "experts/gate"), ("qwen3_moe", "experts/up")])
def test_experts_are_no_modules_and_are_refused(kind, word, tmp_path):
    config, _ = model_config_of(str(FIXTURES / kind))
    lora = Lora(rank=2, targets=(word,))
    adapter = jax.eval_shape(lambda: create_adapter(config, lora, jax.random.key(0)))
    with pytest.raises(InputError, match=f"no modules for {word} of a {kind} model: export the merged model"):
        save_adapter(adapter, config, lora, "base", tmp_path / "adapter")


QUERIES = {"self_attn.q_proj": 1}
FUSED = {
    "phi3": (ADAPTED, {"self_attn.qkv_proj": 3, "mlp.gate_up_proj": 2}),
    "phi3 in part": (("attn/k", "attn/v", "mlp/up"), {"self_attn.qkv_proj": 2, "mlp.gate_up_proj": 1}),
    "glm4": (ADAPTED, {"mlp.gate_up_proj": 2}),
    "qwen3_next": (ADAPTED, QUERIES | {"linear_attn.in_proj_qkvz": 4}),
    "qwen3_next in part": (("attn/gate", "delta/k", "delta/z"), QUERIES | {"linear_attn.in_proj_qkvz": 2}),
    "qwen3_5_text": (ADAPTED, QUERIES | {"linear_attn.in_proj_qkv": 3}),
    "qwen3_5_moe_text": ((*ADAPTED, "attn/gate"), {"self_attn.q_proj": 2, "linear_attn.in_proj_qkv": 3}),
    "lfm2": (ADAPTED, {"conv.in_proj": 3}),
    "deepseek_v3": (ADAPTED, {"self_attn.kv_a_proj_with_mqa": 2}),
    "glm4_moe_lite": (ADAPTED, {"self_attn.kv_a_proj_with_mqa": 2}),
    "gemma4_text in part": (("attn/q", "attn/v", "mlp/up"), {}),  # one name for layers of two sizes
}
"""Targets, and by hand the modules with several of our matrices and how many of these are adapted."""


def changes(config, adapter):
    """What an adapter adds to each of our matrices."""
    found = {}
    for tensor in tensors_of(config):
        part, *name = tensor.path.removeprefix("blocks.").split(".")
        values = to_parameters(adapter)["blocks"].get(part, {})
        if name and name[0] in values:
            layers = zip(values[name[0]]["a"], values[name[0]]["b"], strict=True)
            found[tensor.path] = np.stack([adapter.scale * np.tensordot(a, b, 1) for a, b in layers])
    return found


def split_changes(config, folder, scale):
    """What an adapter's file adds to each of our matrices, which the loader splits as it does a checkpoint."""
    stored = load_file(folder / "adapter_model.safetensors")
    added = {}
    for name in stored:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            change = scale(module) * stored[f"{module}.lora_B.weight"] @ stored[name]
            added[module.removeprefix("base_model.model.") + ".weight"] = StoredTensor(change.shape, change.__getitem__)
    added, found = split_tensors(config, added), {}
    for tensor in tensors_of(config):
        names = [tensor.name.format(layer) for layer in layers_of(tensor, config)] if tensor.outer == "L" else []
        if any(name in added for name in names):
            zeros = np.zeros(hf_shape(tensor, axis_sizes(config)), np.float32)
            whole = {name: added.get(name, StoredTensor(zeros.shape, zeros.__getitem__)) for name in names}
            place = tuple(slice(0, size) for size in our_shape(tensor, config))
            found[tensor.path] = read_part(config, tensor, whole, np.float32, place)
    return found


def assert_equal(found, wanted):
    for name in found | wanted:
        np.testing.assert_allclose(found.get(name, 0), wanted.get(name, 0), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", FUSED)
def test_an_adapter_of_several_matrices_of_one_module_is_written_and_read_exactly(case, tmp_path):
    targets, modules = FUSED[case]
    config, _ = model_config_of(str(FIXTURES / case.split()[0]))
    lora, random = Lora(rank=2, alpha=5.0, targets=targets), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: create_adapter(config, lora, jax.random.key(0)))
    adapter = jax.tree.map(lambda x: (0.3 * random.normal(size=x.shape)).astype(np.float32), shapes)
    save_adapter(adapter, config, lora, "base", tmp_path / "adapter")
    wanted = changes(config, adapter)
    assert_equal(split_changes(config, tmp_path / "adapter", lambda module: 5.0 / 2), wanted)
    assert_equal(changes(config, read_adapter(tmp_path / "adapter", config)), wanted)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    ranks = {
        name.split(".", 5)[5].removesuffix(".lora_A.weight"): len(x) for name, x in stored.items() if "_A." in name
    }
    assert {name: rank // 2 for name, rank in ranks.items() if rank > 2 or name in modules} == modules
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    named = said["target_modules"] + said.get("target_parameters", [])
    assert len(named) == len(set(named)) == len(ranks)


def test_modules_of_a_base_that_reads_pictures_are_named_whole(tmp_path):
    """Its vision model has modules of the same names."""
    config, _ = model_config_of(str(FIXTURES / "gemma4_text"))
    lora, random = Lora(rank=2, targets=("attn/q",)), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: create_adapter(config, lora, jax.random.key(0)))
    adapter = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)
    save_adapter(adapter, config, lora, "base", tmp_path / "adapter", below="language_model.")
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    modules = {f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(8)}
    assert set(said["target_modules"]) == modules
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored} == modules
    assert_equal(changes(config, read_adapter(tmp_path / "adapter", config)), changes(config, adapter))


@pytest.mark.parametrize("case", [name for name in FUSED if " " not in name])
def test_an_adapter_of_a_whole_module_is_read_as_the_loader_splits_the_weight(case, tmp_path):
    """A layer has another rank than the others, and all rows of B are full."""
    config, _ = model_config_of(str(FIXTURES / case))
    described = PLAIN | {"target_modules": [*FUSED[case][1]], "rank_pattern": {r".*layers\.1\..*": 3}}
    weights, random = load_file(FIXTURES / case / "model.safetensors"), np.random.default_rng(0)
    stored, scales = {}, {}
    for name, weight in weights.items():
        module = "base_model.model." + name.removesuffix(".weight")
        if module.endswith(tuple(FUSED[case][1])):
            rank = 3 if ".layers.1." in name else 4
            scales[module] = 16 / rank
            for side, shape in {"A": (rank, weight.shape[1]), "B": (len(weight), rank)}.items():
                stored[f"{module}.lora_{side}.weight"] = (0.1 * random.normal(size=shape)).astype(np.float32)
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    save_file(stored, tmp_path / "adapter_model.safetensors")
    found = changes(config, read_adapter(tmp_path, config))
    assert_equal(found, split_changes(config, tmp_path, scales.get))
    name = next(name for name in stored if "lora_B" in name)
    save_file(stored | {name: stored[name][1:]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=f"{name} has shape"):
        read_adapter(tmp_path, config)


NAMED = [
    ("lfm2", "attn/o", {"target_modules": ["self_attn.out_proj"]}),
    ("glm4_moe", "mlp/gate", {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]}),
]


@pytest.mark.parametrize(("name", "target", "named"), NAMED)
def test_an_adapter_is_of_the_modules_named_and_of_no_others(name, target, named, tmp_path):
    """The last word of their names is that of another matrix too. PEFT takes modules of MLPs next to experts for these:
    they are named by their weights.
    """
    fixture = FIXTURES / name
    model, _ = load_pretrained(fixture)
    adapter = create_adapter(model.config, Lora(2, targets=(target,)), jax.random.key(0))
    save_adapter(adapter, model.config, Lora(2, targets=(target,)), str(fixture), tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert {name: targets for name, targets in said.items() if name.startswith("target_")} == named
    again, _ = load_pretrained(tmp_path / "adapter")
    np.testing.assert_array_equal(logits(again, TOKENS % 128), logits(model, TOKENS % 128))
