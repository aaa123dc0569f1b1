"""Reward models: scores agree with transformers, directories are what it writes, and no kind is taken for another."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from models.loading import example_of
from safetensors.numpy import load_file, save_file
from tiny import tiny
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, load_scalar, save_pretrained, scores
from jaxrl_llm.models.config import TokenIds
from jaxrl_llm.models.decoder import Decoder, causal_rows, forward, to_parameters
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.heads import ScalarModel, random_scalar_head, scalars, with_scalar_head
from jaxrl_llm.models.hf import is_reward_model, padding_id
from jaxrl_llm.models.pretrained import load_either
from jaxrl_llm.models.weights import open_checkpoint
from jaxrl_llm.sharding import MeshShape, make_mesh, replicated, shardings

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
REWARDS = Path(__file__).parents[1] / "fixtures" / "reward_models"
NAMES = sorted(path.name for path in REWARDS.iterdir())


@pytest.fixture
def llama(tmp_path):
    return Path(shutil.copytree(REWARDS / "llama", tmp_path / "llama"))


def attributes(directory):
    return json.loads((directory / "config.json").read_text())


def change(directory, **changes):
    (directory / "config.json").write_text(json.dumps(attributes(directory) | changes))


def refusal(load, *given, **settings):
    with pytest.raises(InputError) as refused:
        load(*given, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", NAMES)
def test_scores_agree_with_transformers(name):
    example = example_of(REWARDS / name)
    model, tokenizer = load_scalar(REWARDS / name)
    assert tokenizer is None and isinstance(model, ScalarModel)
    found = scores(model, example["tokens"], example["lengths"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, example["scores"], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_score_is_of_the_last_token_and_padding_moves_none():
    example = example_of(REWARDS / "llama")
    model, _ = load_scalar(REWARDS / "llama")
    tokens, lengths = example["tokens"], example["lengths"]
    garbage = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 99_999)
    np.testing.assert_array_equal(scores(model, garbage, lengths), scores(model, tokens, lengths))
    everywhere = np.asarray(scalars(model, forward(model.decoder, causal_rows(tokens))))
    np.testing.assert_allclose(scores(model, tokens, lengths - 1), everywhere[np.arange(4), lengths - 2], atol=1e-6)
    assert np.abs(everywhere[np.arange(4), lengths - 2] - example["scores"]).min() > 1e-3
    for wrong in (lengths * 0, lengths + 1):
        assert "must be from 1 to 12" in refusal(scores, model, tokens, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_directory_is_the_one_that_transformers_wrote(name, tmp_path):
    model, _ = load_scalar(REWARDS / name)
    save_pretrained(model, None, tmp_path / "export")
    before, after = open_checkpoint(REWARDS / name), open_checkpoint(tmp_path / "export")
    assert before.keys() == after.keys() and before["score.weight"].shape == (1, model.config.width)
    for key, tensor in before.items():
        assert tensor.shape == after[key].shape and tensor.read().tobytes() == after[key].read().tobytes(), key
    theirs, ours = attributes(REWARDS / name), attributes(tmp_path / "export")
    shared = ("architectures", "model_type", "id2label", "label2id", "pad_token_id", "eos_token_id", "vocab_size")
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert {path.name for path in (tmp_path / "export").iterdir()} == {"config.json", "model.safetensors"}
    again, _ = load_scalar(tmp_path / "export")
    assert_same_bits(again, model)


def test_half_precision_keeps_its_bits(tmp_path):
    model, _ = load_scalar(REWARDS / "qwen2", "bfloat16")
    save_pretrained(model, None, tmp_path / "export")
    assert attributes(tmp_path / "export")["torch_dtype"] == "bfloat16"
    assert open_checkpoint(tmp_path / "export")["score.weight"].read().dtype.name == "bfloat16"
    assert_same_bits(load_scalar(tmp_path / "export", "bfloat16")[0], model)


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_a_reward_model_is_born_on_its_mesh(shape):
    mesh = make_mesh(MeshShape(*shape))
    whole, _ = load_scalar(REWARDS / "qwen3")
    model, _ = load_scalar(REWARDS / "qwen3", "float32", mesh)
    assert_same_bits(model, whole)
    layouts = shardings(whole, mesh)
    assert jax.tree.leaves(layouts) == [*jax.tree.leaves(shardings(whole.decoder, mesh)), replicated(mesh)]
    for (path, leaf), layout in zip(jax.tree.leaves_with_path(model), jax.tree.leaves(layouts), strict=True):
        assert leaf.sharding.is_equivalent_to(layout, leaf.ndim), jax.tree_util.keystr(path)
    assert not model.decoder.weights.blocks.attn.q[...].sharding.is_fully_replicated


def test_a_language_model_gets_a_head_only_where_asked():
    mesh = make_mesh(MeshShape(1, 8, 1))
    for name in (MODELS / "llama", MODELS / "llama.gguf", "tiny-random"):
        message = refusal(load_scalar, name)
        assert f"{name} is a language model" in message and "fresh=True" in message
    model, tokenizer = load_scalar("tiny-random", "bfloat16", mesh, fresh=True)
    assert tokenizer is not None and {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {"bfloat16"}
    assert not np.any(model.weights.scalar[...])
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(model))
    kept, _ = load_scalar(REWARDS / "llama", fresh=True)
    assert_same_bits(kept, load_scalar(REWARDS / "llama")[0])


def test_a_drawn_head_is_small_and_the_seeds_own():
    decoder, _ = load_pretrained("tiny-random", "bfloat16")
    first, again, other = (np.asarray(random_scalar_head(decoder, seed), np.float32) for seed in (0, 0, 1))
    assert random_scalar_head(decoder, 0).dtype == "bfloat16" and first.shape == (decoder.config.width,)
    assert np.array_equal(first, again) and not np.any(first == other)
    assert 0.01 < first.std() < 0.03 and abs(np.corrcoef(first, other)[0, 1]) < 0.5


def test_the_head_of_a_language_model_is_let_go():
    language, _ = load_pretrained(MODELS / "llama")
    model = with_scalar_head(language)
    assert "head" in to_parameters(language) and "head" not in to_parameters(model.decoder)
    assert model.decoder.weights.embed[...] is language.weights.embed[...], "arrays are not copied"


def test_each_entrance_refuses_the_other_kind_and_one_takes_both():
    message = refusal(load_pretrained, REWARDS / "llama")
    assert "llama is a reward model" in message and "load_scalar" in message
    assert isinstance(load_either(REWARDS / "llama")[0], ScalarModel)
    assert isinstance(load_either(MODELS / "llama")[0], Decoder)
    assert isinstance(load_either("tiny-random")[0], Decoder)


def test_several_labels_are_refused(llama):
    change(llama, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    for load in (load_scalar, load_pretrained, load_either):
        assert "classifier of 2 labels; a reward model has one" in refusal(load, llama)
    classifier = {"architectures": ["LlamaForSequenceClassification"]}
    assert is_reward_model(classifier | {"num_labels": 1}) and not is_reward_model(
        {"architectures": ["LlamaForCausalLM"]}
    )
    assert not is_reward_model({})
    for labels, count in (({}, 2), ({"num_labels": 5}, 5), ({"id2label": {}}, 0)):  # transformers' default is 2
        assert f"of {count} labels" in refusal(is_reward_model, classifier | labels)


def test_a_head_that_does_not_fit_is_named(llama):
    tensors = load_file(llama / "model.safetensors")
    head = tensors.pop("score.weight")
    for changed, told in (
        ({}, "lack score.weight"),
        (
            {"score.weight": np.ones((2, 16), np.float32)},
            "score.weight has shape [2, 16] where config.json says [1, 16]",
        ),
        ({"score.weight": head, "score.bias": np.ones(1, np.float32)}, "hold score.bias"),
    ):
        save_file(tensors | changed, llama / "model.safetensors", metadata={"format": "pt"})
        assert told in refusal(load_scalar, llama)


def test_every_family_names_the_classifier_that_transformers_has():
    for name, family in FAMILIES.items():
        assert family.classifier == MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name, "")


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (TokenIds(256, (257,), 258), 258),
        (TokenIds(256, (257,), 257), 256),  # transformers would read the score before the end
        (TokenIds(257, (257,), 257), 256),
        (TokenIds(None, (256, 257, 258)), 0),
        (TokenIds(None, (257,), None), 256),
    ],
)
def test_padding_ends_no_text(tokens, wanted, tmp_path):
    model, tokenizer = load_scalar("tiny-random", fresh=True)
    before = copy.deepcopy(tokenizer)
    config = dataclasses.replace(model.config, tokens=tokens)
    assert padding_id(config, tokenizer) == wanted
    changed = with_scalar_head(Decoder(config, to_parameters(model.decoder)))
    save_pretrained(changed, tokenizer, tmp_path / "export")
    assert attributes(tmp_path / "export")["pad_token_id"] == wanted
    again, loaded = load_scalar(tmp_path / "export")
    assert again.config.tokens.pad == wanted and set(again.config.tokens.eos) == set(tokens.eos)
    assert loaded.pad_token_id == (wanted if wanted else None), "text is never made a special token"
    assert loaded("a b").input_ids == tokenizer("a b").input_ids
    assert tokenizer.pad_token == before.pad_token, "the caller's tokenizer stays as it is"


def test_without_a_tokenizer_the_padding_is_the_smallest_id_that_is_no_end():
    config = dataclasses.replace(tiny().config, tokens=TokenIds(None, (0, 1)))
    assert padding_id(config, None) == 2
