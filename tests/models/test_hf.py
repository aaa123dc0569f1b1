"""Hugging Face directories: logits agree with transformers, tensors survive bit for bit, wrong files are refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import traverse_util
from models.loading import example_of, read
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.models.config import TokenIds
from jaxrl_llm.models.decoder import Decoder, parameter_shapes, to_parameters
from jaxrl_llm.models.families import FLOAT32, axis_sizes, tensors_of
from jaxrl_llm.models.pretrained import generation_of
from jaxrl_llm.models.weights import open_checkpoint, to_hf, to_ours, to_stored, write_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


def stored_tensors(directory):
    return {name: tensor.read() for name, tensor in open_checkpoint(directory).items()}


@pytest.fixture
def llama(tmp_path):
    return Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))


def refusal(directory):
    with pytest.raises(InputError) as refused:
        load_pretrained(directory)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree_with_transformers(name):
    example = example_of(FIXTURES / name)
    model, tokenizer = load_pretrained(FIXTURES / name)
    assert tokenizer is None
    ours = np.asarray(logits(model, example["tokens"]))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, example["logits"], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("llama3_rope", "rope", {"scaling": None}),
        ("llama_linear", "rope", {"scaling": None}),
        ("mistral", "attention", {"windows": ()}),
        ("qwen2", "attention", {"windows": (6, 0)}),
        ("gemma2", "attention", {"softcap": None}),
        ("gemma2", "attention", {"scale": None}),
        ("gemma2", "embeddings", {"logit_softcap": None}),
        ("gemma3_text", "rope", {"local_theta": 1000.0}),
        ("gemma3_text", "embeddings", {"scale": 1.0}),
        ("qwen3", "norm", {"eps": 1e-6}),
        ("qwen3_moe", "experts", {"renormalise": False}),
        ("olmoe", "experts", {"renormalise": True}),
        ("mixtral", "experts", {"active": 1}),
        ("olmo3", "attention", {"windows": ()}),
        ("granite", "", {"residual_scale": 1.0}),
        ("granite", "attention", {"scale": None}),
        ("granite", "embeddings", {"logit_divisor": 1.0}),
        ("granite", "embeddings", {"scale": 1.0}),
        ("gpt_oss", "experts", {"limit": 0.7}),
        ("gpt_oss", "experts", {"alpha": 1.702}),
        *(
            ("qwen2_yarn", "yarn", {name: value})
            for name, value in (("magnitude", 1.0), ("fast", 0.6), ("slow", 1.0), ("factor", 2.0))
        ),
        ("gpt_oss", "yarn", {"truncate": True}),
        ("olmo3", "rope", {"local_theta": None}),
        ("glm4", "rope", {"interleaved": False}),
        ("glm4", "rope", {"dims": 0}),
        ("smollm3", "rope", {"layers": ()}),
        ("qwen3_next", "attention", {"gated": False}),
        ("qwen3_next", "norm", {"plus_one": False}),
        ("qwen3_5_text", "rope", {"dims": 0}),
        ("lfm2", "norm", {"eps": 1e-6}),
        ("deepseek_v3", "experts", {"scaling": 1.0}),
        ("deepseek_v3", "experts", {"active_groups": 4}),
        ("deepseek_v3", "rope", {"interleaved": False}),
        ("deepseek_v3", "yarn", {"all_dims": 0.0}),
        ("glm4_moe", "attention", {"scale": 1.0}),
    ],
)
def test_each_rule_of_a_config_moves_the_logits(name, part, change):
    """Else the agreement above would prove nothing about the rule."""
    example = example_of(FIXTURES / name)
    config, parameters = read(FIXTURES / name)
    rope = config.attention.rope
    if part == "yarn":
        part, change = "rope", {"scaling": dataclasses.replace(rope.scaling, **change)}
    if part == "rope":
        part, change = "attention", {"rope": dataclasses.replace(rope, **change)}
    changed = {part: dataclasses.replace(getattr(config, part), **change)} if part else change
    other = Decoder(dataclasses.replace(config, **changed), parameters)
    assert np.abs(np.asarray(logits(other, example["tokens"])) - example["logits"]).max() > 1e-3


def test_a_fused_tensor_of_another_size_is_refused(tmp_path):
    directory = Path(shutil.copytree(FIXTURES / "phi3", tmp_path / "phi3"))
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    assert f"{name} has shape [31, 16] where config.json says 32" in refusal(directory)


def test_the_text_model_of_a_checkpoint_with_other_parts_is_read(tmp_path, caplog):
    directory = Path(shutil.copytree(FIXTURES / "qwen3_5_moe_text", tmp_path / "wrapped"))
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"depth": 1}}
    (directory / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    tensors = load_file(directory / "model.safetensors")
    for layer in range(4):  # as some checkpoints hold the experts of a layer
        block = f"model.layers.{layer}.mlp.experts."
        each = [[tensors.pop(f"{block}{i}.{name}_proj.weight") for i in range(4)] for name in ("gate", "up", "down")]
        tensors[block + "gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(*each[:2], strict=True)])
        tensors[block + "down_proj"] = np.stack(each[2])
    wrapped = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    others = {"model.visual.patch_embed.proj.weight": np.zeros(3), "mtp.fc.weight": np.zeros(2)}
    save_file(wrapped | others, directory / "model.safetensors", metadata={"format": "pt"})
    example = example_of(directory)
    model, _ = load_pretrained(directory)
    np.testing.assert_allclose(logits(model, example["tokens"]), example["logits"], atol=1e-4, rtol=0)
    assert caplog.messages == ["only the text model is read; left out are the tensors of visual, mtp"]
    save_pretrained(model, None, tmp_path / "export")
    assert stored_tensors(tmp_path / "export").keys() == stored_tensors(FIXTURES / "qwen3_5_moe_text").keys()


def test_projections_of_keys_that_no_layer_uses_are_left_out(tmp_path):
    """Published checkpoints of Gemma 4 have them in layers that share the keys of another."""
    directory = Path(shutil.copytree(FIXTURES / "gemma4_text", tmp_path / "more"))
    rewrite(directory, lambda tensors: tensors.update({"model.layers.4.self_attn.k_proj.weight": np.zeros((8, 16))}))
    example = example_of(directory)
    np.testing.assert_allclose(logits(load_pretrained(directory)[0], example["tokens"]), example["logits"], atol=1e-4)
    rewrite(directory, lambda tensors: tensors.update({"model.layers.4.self_attn.z_proj.weight": np.zeros(2)}))
    assert "model.layers.4.self_attn.z_proj.weight, unknown to gemma4_text" in refusal(directory)


def test_layers_that_predict_several_tokens_are_left_out_and_said(tmp_path, caplog):
    directory = Path(shutil.copytree(FIXTURES / "deepseek_v3", tmp_path / "more"))
    rewrite(directory, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": np.zeros(2, np.float32)}))
    load_pretrained(directory)
    assert caplog.messages == ["left out are layers that predict several tokens: model.layers.4.eh_proj.weight"]
    rewrite(directory, lambda tensors: tensors.update({"model.layers.3.extra": np.zeros(2, np.float32)}))
    assert "model.layers.3.extra, unknown to deepseek_v3" in refusal(directory)


def test_the_bias_by_which_experts_are_chosen_is_written_in_float32(tmp_path):
    model, _ = load_pretrained(FIXTURES / "deepseek_v3", "bfloat16")
    save_pretrained(model, None, tmp_path / "export")
    stored = open_checkpoint(tmp_path / "export")
    dtypes = {name.endswith("e_score_correction_bias"): tensor.dtype for name, tensor in stored.items()}
    assert dtypes == {True: "F32", False: "BF16"}
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(stored[name].read(), stored_tensors(FIXTURES / "deepseek_v3")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_decoders_shapes(name):
    config, parameters = read(FIXTURES / name, "bfloat16")
    leaves = traverse_util.flatten_dict(parameters, sep=".")
    assert {path: x.shape for path, x in leaves.items()} == parameter_shapes(config)
    assert {x.dtype.name for path, x in leaves.items() if path not in FLOAT32} == {"bfloat16"}
    assert {x.dtype.name for path, x in leaves.items() if path in FLOAT32} <= {"float32"}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact(name, tmp_path):
    model, _ = load_pretrained(FIXTURES / name)
    save_pretrained(model, None, tmp_path / "export")
    before, after = stored_tensors(FIXTURES / name), stored_tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(value.view(np.uint32), after[key].view(np.uint32), err_msg=key)
    again, _ = load_pretrained(tmp_path / "export")
    assert again.config == model.config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_round_trip_keeps_dtype_and_bits(dtype, tmp_path):
    model, _ = load_pretrained(FIXTURES / "llama", dtype=dtype)
    save_pretrained(model, None, tmp_path / "export")
    assert {tensor.dtype.name for tensor in stored_tensors(tmp_path / "export").values()} == {dtype}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["torch_dtype"] == dtype
    again, _ = load_pretrained(tmp_path / "export", dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, to_parameters(again), to_parameters(model))


@pytest.mark.parametrize("name", NAMES)
def test_layouts_are_inverse(name):
    config, _ = read(FIXTURES / name)
    sizes = axis_sizes(config)
    for tensor in tensors_of(config):
        shape = [sizes[letter] for letter in tensor.inner]
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(to_ours(tensor, to_hf(tensor, array, sizes), sizes), array)


def test_shards_hold_what_one_file_holds(tmp_path):
    config, parameters = read(FIXTURES / "llama")
    write_checkpoint(to_stored(config, parameters), tmp_path, "float32", limit=30_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    whole = load_file(FIXTURES / "llama" / "model.safetensors")
    for name, tensor in open_checkpoint(tmp_path).items():
        np.testing.assert_array_equal(tensor.read(), whole.pop(name))
    assert not whole


def test_save_refuses_a_directory_in_use_and_leaves_it_alone(tmp_path):
    model, _ = load_pretrained(FIXTURES / "llama")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        save_pretrained(model, None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_nothing(tmp_path):
    model, _ = load_pretrained(FIXTURES / "llama")
    # The tokenizer is what is saved last.
    with pytest.raises(AttributeError, match="'str' object has no attribute 'save_pretrained'"):
        save_pretrained(model, "not a tokenizer", tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_save_fills_an_empty_directory(tmp_path):
    model, _ = load_pretrained(FIXTURES / "llama")
    save_pretrained(model, None, tmp_path)
    assert {"config.json", "generation_config.json", "model.safetensors"} == {p.name for p in tmp_path.iterdir()}


def test_special_ids_are_a_union(llama):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 500], "pad_token_id": 9}))
    config, _ = read(llama)
    assert config.tokens == TokenIds(bos=1, eos=(2, 7), pad=0)


def test_saved_ends_are_in_the_generation_config(llama, tmp_path):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    model, _ = load_pretrained(llama)
    save_pretrained(model, None, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


def test_how_to_sample_is_kept_and_the_ends_are_the_models(llama, tmp_path):
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    (llama / "generation_config.json").write_text(json.dumps(sampling | {"eos_token_id": [7], "pad_token_id": 900}))
    model, _ = load_pretrained(llama)
    save_pretrained(model, None, tmp_path / "export", generation=generation_of(str(llama)))
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert written == sampling | {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    (tmp_path / "adapter").mkdir()
    named = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    named = json.dumps(named | {"base_model_name_or_path": str(llama)})
    (tmp_path / "adapter" / "adapter_config.json").write_text(named)
    shutil.copy(llama / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors")
    assert generation_of(str(tmp_path / "adapter")) == generation_of(str(llama))
    assert generation_of("tiny-random") == generation_of(str(tmp_path)) == generation_of("nobody/has-this") == {}


def test_a_repeated_head_of_a_tied_model_is_accepted_and_another_refused(tmp_path):
    directory = Path(shutil.copytree(FIXTURES / "qwen2", tmp_path / "qwen2"))
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    model, _ = load_pretrained(directory)
    assert "head" not in to_parameters(model)
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert "lm_head.weight differs" in refusal(directory)


def test_rotary_buffers_of_old_files_are_ignored(llama):
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(llama, lambda t: t.update({key: np.ones(4, np.float32)}))
    load_pretrained(llama)


def test_missing_unknown_and_misshapen_tensors_are_named(llama):
    key = "model.layers.1.mlp.up_proj.weight"
    original = (llama / "model.safetensors").read_bytes()
    rewrite(llama, lambda t: t.pop(key))
    assert f"lack {key}" in refusal(llama)
    (llama / "model.safetensors").write_bytes(original)
    rewrite(llama, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones((48, 32), np.float32)}))
    assert "model.layers.2.mlp.up_proj.weight" in refusal(llama)
    (llama / "model.safetensors").write_bytes(original)
    rewrite(llama, lambda t: t.update({key: np.ones((32, 48), np.float32)}))
    message = refusal(llama)
    assert key in message and "[32, 48]" in message and "[48, 32]" in message


def test_integer_weights_are_refused(llama):
    rewrite(llama, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    assert "model.norm.weight is stored as I8" in refusal(llama)


def test_broken_weight_files_are_refused(llama):
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-100], whole[:20], b"", b"not a tensor file" * 9):
        weights.write_bytes(content)
        assert "model.safetensors is not a whole safetensors file" in refusal(llama)
    weights.unlink()
    assert "holds no model.safetensors" in refusal(llama)
    (llama / "pytorch_model.bin").write_bytes(b"")
    assert "convert the weights to safetensors" in refusal(llama)


def test_broken_shards_are_refused(tmp_path):
    directory = Path(shutil.copytree(FIXTURES / "qwen3", tmp_path / "qwen3"))
    second = directory / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(directory)
    second.write_bytes((directory / "model-00001-of-00002.safetensors").read_bytes())
    assert "model-00002-of-00002.safetensors lacks" in refusal(directory)
    second.write_bytes(content)
    (directory / "model.safetensors.index.json").write_text("[]")
    assert "does not hold a JSON object" in refusal(directory)


def test_of_two_sets_of_weights_one_file_is_the_model_as_for_transformers(llama):
    tensors = load_file(llama / "model.safetensors")
    names, name = sorted(tensors), "model.norm.weight"
    save_file({name: tensors[name] * 0 for name in names}, llama / "consolidated.safetensors")
    (llama / "pytorch_model.bin").write_bytes(b"")
    places = {name: f"model-0000{1 + (index > 3)}-of-00002.safetensors" for index, name in enumerate(names)}
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))

    def shards(values):
        for file in {*places.values()}:
            save_file({name: values[name] for name in names if places[name] == file}, llama / file)

    same = lambda: np.testing.assert_array_equal(stored_tensors(llama)[name], tensors[name])
    same()  # the index is left over: its files are gone
    shards(tensors)
    same()
    shards(tensors | {name: tensors[name] + 1})
    assert "holds two models that differ, model.safetensors and the files of" in refusal(llama)
    shards(tensors)
    index.write_text(json.dumps({"weight_map": {name: places[name] for name in names[1:]}}))
    assert "holds two models that differ" in refusal(llama)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    same()
    index.write_text(json.dumps({"weight_map": places}))
    (llama / "model.safetensors").unlink()
    same()


def test_broken_json_is_refused(llama):
    (llama / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(llama)
    (llama / "config.json").unlink()
    assert "holds no config.json" in refusal(llama)


def test_a_broken_tokenizer_is_refused(llama):
    (llama / "tokenizer.json").write_text("{}")
    assert "the tokenizer cannot be read" in refusal(llama)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match=r"int8.*bfloat16"):
        load_pretrained(FIXTURES / "llama", dtype="int8")


@pytest.mark.slow
def test_loaded_arrays_do_not_lie_in_the_file(llama):
    """An update may overwrite the file's memory otherwise, and a changed file would change the model."""
    model, _ = load_pretrained(llama)
    before = np.array(to_parameters(model)["embed"])
    with open(llama / "model.safetensors", "r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(size // 2)
        file.write(b"\0" * (size - size // 2))
    np.testing.assert_array_equal(np.asarray(to_parameters(model)["embed"]), before)
