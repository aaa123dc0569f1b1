"""A model as a GGUF file: what another converter wrote of the same weights, and what our loader makes of it."""

import dataclasses
import hashlib
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, load_scalar, logits, save_gguf
from jaxrl_llm.models.config import Llama3Rope, Rope
from jaxrl_llm.models.decoder import Decoder, to_parameters
from jaxrl_llm.models.gguf import FILE_TYPES, PATHS
from jaxrl_llm.models.pretrained import CHATML, TINY
from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer, byte_alphabet, byte_pairs_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
FITTING = {
    "llama": {},
    "llama_linear": {},
    "llama3_rope": {"rope": Rope(500000.0, Llama3Rope(32.0, 1.0, 4.0, 8192))},
    "mistral": {"windows": ()},
    "qwen2": {"windows": ()},
    "qwen3": {},
    "gemma2": {"scale": 16**-0.5},
    "gemma3_text": {"scale": 16**-0.5, "windows": (6, 6, 6)},
    "olmo2": {},
    "mixtral": {"windows": ()},
    "qwen3_moe": {},
    "qwen2_moe": {},
    "olmoe": {},
    "lfm2": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "deepseek_v3": {"rope": Rope(50.0, max_positions=64, dims=4, interleaved=True)},
    "deepseek_v3_plain": {"rope": Rope(50.0, max_positions=64, dims=4, interleaved=True)},
}
"""What of a fixture's attention has to be another so that a GGUF file can say it."""
ROUNDED = ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Their norms are stored plus 1, which rounds, as do exponentials in place of logarithms."""
READ_AS = {"mistral": "llama", "glm4_moe_lite": "deepseek_v3"}
DIGESTS = {
    "qwen3_5_moe_text": "0d075febb1c8fd18",
    "qwen3_next": "aefbadd0fcab81e4",
    "glm4_moe_lite": "15e2f597b147d5e1",
}
"""Of what llama.cpp's converter makes of fixtures (tools/make_model_fixtures.py)."""
OWN_KEYS = ("general.type", "general.name", "general.size_label", "full_attention_interval", "dimension_sections")
"""Ends of keys that it writes otherwise: of pictures, or of an interval that the fixture does not have."""
TEXTS = ("don't  stop 2024 日本\n\t<tool>", "abc ab 12 a<|end|>", "", " À 3.14\r\n\r\n", "e\u0301 <|end|>x")


def fitting(name):
    """The fixture's weights in an architecture that a GGUF file can say."""
    model, _ = load_pretrained(FIXTURES / name)
    attention = dataclasses.replace(model.config.attention, **FITTING[name])
    return Decoder(dataclasses.replace(model.config, attention=attention), to_parameters(model))


def read(path):
    """(metadata by key, tensors by name) as the package ``gguf`` reads them."""
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def refusal(model, tokenizer, path, kind="f32"):
    with pytest.raises(InputError) as refused:
        save_gguf(model, tokenizer, path, kind)
    assert "\n" not in str(refused.value) and not list(path.parent.iterdir())
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.gguf")))
def test_tensors_and_numbers_are_those_that_another_converter_wrote(name, tmp_path):
    save_gguf(fitting(name), None, tmp_path / "m.gguf")
    metadata, tensors = read(tmp_path / "m.gguf")
    wanted_metadata, wanted = read(FIXTURES / f"{name}.gguf")
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensors[key].tensor_type == gguf.GGMLQuantizationType.F32
        assert tensors[key].shape.tolist() == tensor.shape.tolist()
        most = 2.0**-22 if key.endswith("ssm_a") else 0.0  # libraries round exponentials differently
        np.testing.assert_allclose(tensors[key].data, tensor.data, atol=most, rtol=0.0, err_msg=key)
    keys = [key for key in wanted_metadata if not key.startswith("GGUF.") and not key.endswith(OWN_KEYS)]
    ours = {key: metadata.get(key) for key in keys}
    assert ours == {key: wanted_metadata[key] for key in ours}


@pytest.mark.parametrize("name", DIGESTS)
def test_tensors_are_those_of_the_converter_by_their_digest(name, tmp_path):
    save_gguf(fitting(name), None, tmp_path / "m.gguf")
    found = hashlib.sha256()
    for key, tensor in sorted(read(tmp_path / "m.gguf")[1].items()):
        found.update(f"{key} {tensor.data.shape}".encode())
        found.update(b"" if key.endswith("ssm_a") else tensor.data.tobytes())
    assert found.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", FITTING)
def test_our_loader_reads_the_same_model(name, tmp_path):
    model = fitting(name)
    save_gguf(model, None, tmp_path / "m.gguf")
    again, tokenizer = load_pretrained(tmp_path / "m.gguf")
    family = READ_AS.get(name, model.config.family)
    assert tokenizer is None and again.config == dataclasses.replace(model.config, family=family)
    most = 2.0**-22 if name in ROUNDED else 0.0  # the distance of numbers between 2 and 4
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=0.0, atol=most)
    jax.tree.map(near, to_parameters(again), to_parameters(model))
    if name == "llama":
        tokens = np.arange(3, 23)[None]
        np.testing.assert_array_equal(logits(again, tokens), logits(model, tokens))


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_matrices_are_rounded_as_their_type_says_and_norms_are_not(kind, tmp_path):
    model = fitting("llama")
    save_gguf(model, None, tmp_path / "exact.gguf")
    save_gguf(model, None, tmp_path / "m.gguf", kind)
    metadata, tensors = read(tmp_path / "m.gguf")
    assert metadata["general.file_type"] == {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind]
    for name, exact in read(tmp_path / "exact.gguf")[1].items():
        tensor = tensors[name]
        found = gguf.dequantize(tensor.data, tensor.tensor_type)
        if exact.data.ndim == 1 or kind == "f32":
            assert tensor.tensor_type.name == "F32"
            np.testing.assert_array_equal(found, exact.data)
        elif kind == "f16" or (kind == "q8_0" and exact.data.shape[1] % 32):
            assert tensor.tensor_type.name == "F16"
            np.testing.assert_array_equal(found, exact.data.astype(np.float16).astype(np.float32))
        elif kind == "bf16":
            assert tensor.tensor_type.name == "BF16"
            np.testing.assert_array_equal(found, exact.data.astype(ml_dtypes.bfloat16).astype(np.float32))
        else:
            assert tensor.tensor_type.name == "Q8_0"
            blocks = exact.data.reshape(-1, 32)
            # Half of a step of 1/127 of the block's largest value, which float16 rounds.
            bound = np.abs(blocks).max(axis=1, keepdims=True) / 127 * (0.5 + 127 * 2.0**-11)
            assert (np.abs(found.reshape(-1, 32) - blocks) <= bound).all()
            assert np.abs(found - exact.data).max() > 0


def test_our_loader_dequantises_what_is_written(tmp_path):
    save_gguf(fitting("qwen3"), None, tmp_path / "m.gguf", "q8_0")
    model, _ = load_pretrained(tmp_path / "m.gguf")
    stored = read(tmp_path / "m.gguf")[1]["token_embd.weight"]
    np.testing.assert_array_equal(to_parameters(model)["embed"], gguf.dequantize(stored.data, stored.tensor_type))


def test_bfloat16_weights_are_written_as_they_are(tmp_path):
    model, _ = load_pretrained(FIXTURES / "qwen3", "bfloat16")
    save_gguf(model, None, tmp_path / "m.gguf", "bf16")
    again, _ = load_pretrained(tmp_path / "m.gguf", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, to_parameters(again), to_parameters(model))


def pairs(pre, **more):
    """Bytes, two whole tokens, and four that merges make."""
    tokens = (*byte_alphabet(), "<|end|>", "<tool>", "ab", "abc", "12", "Ġa")
    merges = (("a", "b"), ("ab", "c"), ("1", "2"), ("Ġ", "a"))
    named = (("bos_token", "<|end|>"), ("eos_token", "<|end|>"))
    return BytePairs(tokens, merges, ("<|end|>",), ("<tool>",), pre, chat_template=CHATML, names=named, **more)


@pytest.mark.parametrize("pre", ["none", "gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "qwen35"])
def test_tokenizer_and_template_come_back(pre, tmp_path):
    tokenizer = build_tokenizer(pairs(pre, begin=pre == "llama-bpe"))
    tokens = dataclasses.replace(TINY.tokens, bos=256, eos=(256,), pad=None)
    config = dataclasses.replace(TINY, vocab_size=264, tokens=tokens)
    model = Decoder(config, _resized(to_parameters(load_pretrained("tiny-random")[0]), 264))
    save_gguf(model, tokenizer, tmp_path / "m.gguf")
    metadata, _ = read(tmp_path / "m.gguf")
    assert metadata["tokenizer.ggml.pre"] == pre and metadata["tokenizer.ggml.merges"] == ["a b", "ab c", "1 2", "Ġ a"]
    assert metadata["tokenizer.ggml.tokens"][255:] == [
        byte_alphabet()[255], "<|end|>", "<tool>", "ab", "abc", "12", "Ġa", "[PAD262]", "[PAD263]",
    ]  # fmt: skip
    assert metadata["tokenizer.ggml.token_type"] == [1] * 256 + [3, 4, 1, 1, 1, 1, 5, 5]
    assert metadata["tokenizer.ggml.eos_token_id"] == 256 and metadata["tokenizer.chat_template"] == CHATML
    again, read_back = load_pretrained(tmp_path / "m.gguf")
    assert again.config == config
    for text in TEXTS:
        assert read_back(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (read_back.eos_token, read_back.chat_template) == ("<|end|>", CHATML)


def _resized(parameters, size):
    """The same with another number of tokens."""
    return parameters | {"embed": jnp.resize(parameters["embed"], (size, parameters["embed"].shape[1]))}


def test_the_tiny_model_comes_back_whole(tmp_path):
    model, tokenizer = load_pretrained("tiny-random")
    save_gguf(model, tokenizer, tmp_path / "m.gguf")
    again, read_back = load_pretrained(tmp_path / "m.gguf")
    assert again.config == model.config
    assert dataclasses.replace(byte_pairs_of(read_back), names=()) == dataclasses.replace(
        byte_pairs_of(tokenizer), names=()
    )


def test_what_a_file_cannot_say_is_refused_and_nothing_is_left(tmp_path):
    def of(name):
        return load_pretrained(FIXTURES / name)[0]

    tiny, tokenizer = load_pretrained("tiny-random")
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "m.gguf"
    assert "attention.windows=(0, 6)" in refusal(of("qwen2"), None, path)
    assert "attention.scale" in refusal(of("gemma2"), None, path)
    assert "cannot express this model's attention" in refusal(of("mistral"), None, path)
    assert "was not published" in refusal(of("llama3_rope"), None, path)
    assert "cannot express attention.rope.scaling" in refusal(of("deepseek_v3"), None, path)
    assert "cannot express attention.rope.interleaved=False" in refusal(of("deepseek_v3_plain"), None, path)
    assert "the family gemma4_text has no known name in GGUF files" in refusal(of("gemma4_text"), None, path)
    assert "'q4_0' is not a GGUF type that can be written" in refusal(tiny, None, path, "q4_0")
    reward, _ = load_scalar(Path(__file__).parents[1] / "fixtures/reward_models/llama")
    assert "a GGUF file cannot hold a reward model" in refusal(reward, None, path)
    assert "the tokenizer has 259 tokens and the model 128" in refusal(of("llama"), tokenizer, path)
    wide = jax.tree.map(lambda leaf: leaf * 1e7, of("llama"))
    assert "holds values that float16 cannot: take bf16 or f32" in refusal(wide, None, path, "f16")
    ends = dataclasses.replace(tiny.config, tokens=dataclasses.replace(tiny.config.tokens, eos=(1, 2, 3, 4)))
    assert "cannot express tokens.eos=(1, 2, 3, 4)" in refusal(Decoder(ends, to_parameters(tiny)), None, path)


def test_a_tokenizer_that_cuts_otherwise_is_refused(tmp_path):
    from tokenizers import pre_tokenizers

    model, tokenizer = load_pretrained("tiny-random")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "out"
    folder.mkdir()
    assert "not a byte-level BPE known to GGUF files" in refusal(model, tokenizer, folder / "m.gguf")


def test_three_ends_are_kept(tmp_path):
    model, tokenizer = load_pretrained("tiny-random")
    config = dataclasses.replace(model.config, tokens=dataclasses.replace(model.config.tokens, eos=(9, 257, 10)))
    save_gguf(Decoder(config, to_parameters(model)), tokenizer, tmp_path / "m.gguf")
    metadata, _ = read(tmp_path / "m.gguf")
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [257, 9, 10]
    again, read_back = load_pretrained(tmp_path / "m.gguf")
    assert set(again.config.tokens.eos) == {9, 257, 10} and read_back.eos_token_id == 257


@pytest.mark.slow
def test_each_path_has_one_name():
    assert len(set(PATHS.values())) == len(PATHS)
