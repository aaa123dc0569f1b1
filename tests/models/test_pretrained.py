"""Names and paths that lead to a model, and those that do not."""

import contextlib
import subprocess
import sys

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.pretrained import looks_like_hub_id, model_config_of


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./missing", "no such model directory: ./missing"),
        ("/no/such/folder", "no such model directory: /no/such/folder"),
        ("runs/a/export", "no such model directory: runs/a/export"),
        ("tiny-randon", "did you mean tiny-random?"),
        ("gpt", "built in are smollm2-135m, smollm2-135m-moe, tiny-random"),
        ("missing.gguf", "no such GGUF file: missing.gguf"),
    ],
)
def test_a_wrong_name_is_refused_with_the_remedy(name, words):
    with pytest.raises(InputError) as refused:
        load_pretrained(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"neither a model directory nor a \.gguf file"):
        load_pretrained(tmp_path / "weights.bin")


def test_hub_ids_are_told_from_paths(tmp_path):
    assert looks_like_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert not looks_like_hub_id("./a/b") and not looks_like_hub_id("a/b/c") and not looks_like_hub_id("name")
    (tmp_path / "runs").mkdir()
    with contextlib.chdir(tmp_path):
        assert not looks_like_hub_id("runs/missing"), "the first part is a folder here"


@pytest.mark.slow
def test_an_unreachable_hub_gives_one_line_and_a_family_that_is_not_known_is_refused_before_its_weights(tmp_path):
    kept = tmp_path / "hub/models--owner--odd"
    (kept / "snapshots/1").mkdir(parents=True)
    (kept / "snapshots/1/config.json").write_text('{"model_type": "mamba"}')
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("1")
    code = (
        "from jaxrl_llm.errors import InputError\n"
        "from jaxrl_llm.models import load_pretrained\n"
        "for name in ('no-such-model', 'odd', 'OLMoE-1B-7B'):\n"
        "    try: load_pretrained(f'owner/{name}')\n"
        "    except InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    absent, odd, mixture = done.stdout.splitlines()
    assert "cannot fetch owner/no-such-model" in absent and "--model PATH" in absent
    assert odd.startswith("model_type 'mamba' is not supported")
    assert mixture.startswith("cannot fetch owner/OLMoE-1B-7B")  # no name is refused: config.json decides


def test_importing_the_room_is_cheap():
    code = (
        "import sys, jaxrl_llm.models; print([m for m in ('jax', 'transformers', 'gguf', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_torch_is_never_imported():
    code = (
        "import sys; from jaxrl_llm.models import load_pretrained as l; l('tiny-random'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_plan_reads_the_architecture_of_a_built_in_model():
    config, source = model_config_of("smollm2-135m")
    assert (config.width, config.layers, config.vocab_size, source) == (576, 30, 49152, "built in")
