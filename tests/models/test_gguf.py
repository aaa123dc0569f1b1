"""GGUF files give the same model as the directory they were made from; others are refused in one line."""

import random
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from models.loading import example_of, read

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, logits
from jaxrl_llm.models.decoder import to_parameters
from jaxrl_llm.models.gguf import read_gguf
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.models.tokenizer import byte_alphabet
from jaxrl_llm.models.weights import open_checkpoint, split_tensors

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.gguf"))
EXACT = dict.fromkeys(NAMES, 0.0) | {"gemma2": 1e-6, "gemma3_text": 1e-6, "qwen3_5_text": 1e-6}
"""Norms of Gemma and Qwen3.5 are stored plus 1, which rounds, and exponentials in place of logarithms."""


def refusal(path):
    with pytest.raises(InputError) as refused:
        load_pretrained(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write(path, architecture="llama", tensors=True, **metadata):
    """A one-layer model of width 4 with what a test adds."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {"block_count": 1, "context_length": 16, "embedding_length": 4, "feed_forward_length": 4,
              "attention.head_count": 1, "attention.head_count_kv": 1}  # fmt: skip
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(*value if isinstance(value, tuple) else (value,))
    blocks = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] if tensors else []
    for name in blocks:
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((4, 4), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(4, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((262, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata(pre="smollm", **more):
    """258 bytes and specials, then three tokens with the merges that make them."""
    tokens = [*byte_alphabet(), "<|end|>", "<tool>", "ab", "abc", "12", "Ġa"]
    kinds = [1] * 256 + [3, 4, 1, 1, 1, 1]
    return {"tokenizer_model": "gpt2", "tokenizer_pre": pre, "token_list": (tokens,), "token_types": (kinds,),
            "token_merges": (["a b", "ab c", "1 2", "Ġ a"],), "eos_token_id": 256, "bos_token_id": 256,
            "chat_template": "{{ messages }}", **more}  # fmt: skip


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_equal_those_of_the_directory(name):
    attributes, stored, tokenizer = read_gguf(FIXTURES / f"{name}.gguf")
    assert tokenizer is None and attributes["model_type"] == name
    wanted = split_tensors(read_config(attributes), open_checkpoint(FIXTURES / name))
    assert stored.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert stored[key].shape == tensor.shape
        np.testing.assert_allclose(stored[key].read(), tensor.read(), atol=EXACT[name], rtol=0, err_msg=key)


@pytest.mark.slow(but=("llama", "qwen3", "olmo2", "qwen2_moe", "lfm2"))
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "qwen2_moe", "lfm2", "qwen3_5_text", "glm4_moe"])
def test_model_equals_that_of_the_directory(name):
    example = example_of(FIXTURES / name)
    model, _ = load_pretrained(FIXTURES / f"{name}.gguf")
    config, parameters = read(FIXTURES / name)
    assert model.config.attention == config.attention and model.config.norm == config.norm
    assert model.config.recurrent == config.recurrent and model.config.experts == config.experts
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT[name], rtol=0)
    jax.tree.map(near, to_parameters(model), parameters)
    np.testing.assert_allclose(np.asarray(logits(model, example["tokens"])), example["logits"], atol=1e-4, rtol=0)


def copy_of(name, path, changes, more=()):
    """The fixture with other metadata, None for a key to leave out, and more tensors."""
    reader = gguf.GGUFReader(FIXTURES / f"{name}.gguf")
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in fields.items():
        value = changes.get(key.removeprefix(f"{architecture}."), field.contents())
        if value is not None:
            writer.add_key_value(key, value, field.types[0], field.types[-1] if isinstance(value, list) else None)
    for key, value in changes.items():
        if f"{architecture}.{key}" not in fields:
            writer.add_uint32(f"{architecture}.{key}", value)
    for tensor_name, data in [*((tensor.name, tensor.data) for tensor in reader.tensors), *more]:
        writer.add_tensor(tensor_name, np.array(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    _, wanted, _ = read_gguf(FIXTURES / "qwen3_5_text.gguf")
    kinds = [True, False, True, False, True, False]
    changes = {"block_count": 6, "nextn_predict_layers": 1, "attention.recurrent_layers": kinds}
    more = [(f"blk.5.{name}.weight", np.ones((16, 16), np.float32)) for name in ("nextn.eh_proj", "attn_k")]
    attributes, stored, _ = read_gguf(copy_of("qwen3_5_text", tmp_path / "m.gguf", changes, more))
    assert stored.keys() == wanted.keys() and read_config(attributes).layers == 5
    del changes["nextn_predict_layers"]
    assert "blk.5.nextn.eh_proj.weight is unknown" in refusal(
        copy_of("qwen3_5_text", tmp_path / "o.gguf", changes, more)
    )


def test_layers_with_a_state_are_known_by_their_interval(tmp_path):
    changes = {"attention.recurrent_layers": None, "full_attention_interval": 2}
    attributes, _, _ = read_gguf(copy_of("qwen3_5_text", tmp_path / "m.gguf", changes))
    assert read_config(attributes).recurrent.layers == (True, False, True, False, True)


def test_experts_chosen_by_a_softmax_are_refused(tmp_path):
    assert "softmax" in refusal(copy_of("glm4_moe", tmp_path / "m.gguf", {"expert_gating_func": 1}))


def test_gemma_metadata():
    gemma2, _, _ = read_gguf(FIXTURES / "gemma2.gguf")
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"], gemma2["sliding_window"]) == (3, 5, 6)
    assert gemma2["query_pre_attn_scalar"] == gemma2["head_dim"] == 16
    gemma3, _, _ = read_gguf(FIXTURES / "gemma3_text.gguf")
    assert gemma3["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rescaling_is_recognised_from_its_table(factor, tmp_path):
    table = []
    for i in range(64):
        wavelength = 2 * np.pi * 500000.0 ** (i / 64)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            table.append(1 / ((1 - smooth) / factor + smooth))
    path = write(
        tmp_path / "m.gguf", rope_freq_base=500000.0, tensor=("rope_freqs.weight", np.array(table, np.float32))
    )
    attributes, stored, _ = read_gguf(path)
    assert attributes["rope_scaling"]["factor"] == factor
    assert attributes["rope_scaling"]["rope_type"] == "llama3"
    assert not any("rope" in name for name in stored)
    other = write(tmp_path / "o.gguf", tensor=("rope_freqs.weight", np.linspace(1, 5, 64, dtype=np.float32)))
    assert "rope_freqs.weight" in refusal(other)


def test_quantised_tensors_are_dequantised(tmp_path):
    values = np.random.RandomState(0).standard_normal((32, 64)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    attributes, stored, _ = read_gguf(path)
    assert attributes["vocab_size"] == 32
    read = stored["model.embed_tokens.weight"].read()
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, values, atol=np.abs(values).max() / 200)


def test_tokenizer_comes_from_the_file(tmp_path):
    _, tokenizer = load_pretrained(write(tmp_path / "m.gguf", **tokenizer_metadata()))
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.eos_token_id == 256
    assert ids(tokenizer, "abc ab a") == [259, 32, 258, 261]
    assert ids(tokenizer, "12<|end|><tool>") == [49, 50, 256, 257]
    text = "don't  stop 2024 日本\n\t<tool>"
    assert tokenizer.decode(ids(tokenizer, text)) == text
    assert tokenizer.decode([97, 256, 257], skip_special_tokens=True) == "a<tool>"


def test_pre_tokenizers_differ_where_they_should(tmp_path):
    def of(pre, **more):
        return load_pretrained(write(tmp_path / f"{pre}.gguf", **tokenizer_metadata(pre, **more)))[1]

    assert ids(of("gpt-2"), "12") == [260]
    assert ids(of("smollm"), "12") == [49, 50]
    assert ids(of("qwen2"), "12") == [49, 50]
    assert ids(of("dbrx"), "12") == [260]
    assert ids(of("llama-bpe"), "12") == ids(of("lfm2"), "12") == [256, 260]
    assert ids(of("glm4"), "12") == [260]
    assert ids(of("qwen35"), "12") == [49, 50]
    assert ids(of("qwen2"), "e\u0301") == list("é".encode())
    assert "no-such-pre" in refusal(write(tmp_path / "x.gguf", **tokenizer_metadata("no-such-pre")))


def test_chat_models_end_with_every_end(tmp_path):
    model, _ = load_pretrained(write(tmp_path / "m.gguf", **tokenizer_metadata(eot_token_id=257)))
    assert model.config.tokens.eos == (256, 257)


def test_random_and_truncated_files_are_refused(tmp_path):
    path = tmp_path / "random.gguf"
    whole = (FIXTURES / "llama.gguf").read_bytes()
    for content in (random.Random(0).randbytes(5000), b"", b"GGUF", whole[:300], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert "random.gguf is not a whole GGUF file" in refusal(path)
    assert "no such GGUF file" in refusal(tmp_path / "missing.gguf")


def test_what_is_not_known_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    for architecture in ("mamba", "gpt-oss"):
        assert f"{architecture!r} is not supported" in refusal(write(path, architecture=architecture))
    assert "blk.0.ffn_gate_inp.weight" in refusal(
        write(path, tensor=("blk.0.ffn_gate_inp.weight", np.ones((4, 4), np.float32)))
    )
    assert "blk.0.ffn_gate.weight is unknown to mixtral" in refusal(write(path, expert_count=4))
    assert "yarn" in refusal(write(path, rope_scaling_type=gguf.RopeScalingType.YARN, rope_scaling_factor=4.0))
    spm = {"tokenizer_model": "llama", "token_list": (["a"],)}
    assert "Hugging Face directory" in refusal(write(path, **spm))
    assert "self_attn.q_proj.weight" in refusal(write(path, tensors=False))
