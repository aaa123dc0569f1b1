"""The process's surroundings: settings of JAX, absent devices, and terminals that lack characters."""

import contextlib

import jax
import pytest
from commands import ROOT, command, started

from jaxrl_llm.cli import explain
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.mesh import JAX_SETTINGS, all_devices

OTHERS = {
    "jax_enable_x64": True,
    "jax_threefry_partitionable": False,
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 7,
    "jax_high_dynamic_range_gumbel": True,
    "jax_transfer_guard": "disallow",
}


@contextlib.contextmanager
def configured(name, value):
    """A setting of JAX's with another value."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("name", JAX_SETTINGS)
def test_what_would_give_other_numbers_is_refused(name):
    with configured(name, OTHERS[name]), pytest.raises(InputError, match=f"^{name.upper()}=.* unset it, or set "):
        all_devices()
    assert all_devices() == jax.devices()


@pytest.mark.parametrize(
    "said",
    [
        "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'",
        'Invalid value "nonsense" for JAX flag jax_default_matmul_precision',
        'Invalid value "x" for JAX flag jax_num_cpu_devices',
    ],
)
def test_a_value_that_jax_cannot_read_is_one_line(said):
    assert explain(ValueError(said), "train") == f"{said}: correct it, or unset it"
    assert explain(ValueError("invalid truth value 'maybe'"), "train") is None


def test_a_library_that_lacks_a_name_is_blamed_for_it(tmp_path):
    package = tmp_path / "some_package"
    package.mkdir()
    imports = "from jaxrl_llm.system import attach\n__getattr__ = attach(__name__, {'Thing': 'things'})\n"
    (package / "__init__.py").write_text(imports)
    (package / "things.py").write_text("import json\nThing = json.NoSuchName\n")
    answer = started("from some_package import Thing", "", tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    blames = "ImportError: some_package.things cannot be imported: module 'json' has no attribute 'NoSuchName'"
    assert answer.err.splitlines()[-1] == blames


SMOKE = ("train", "smoke", "--steps", "1", "--run_dir", "run", "--evaluation.limit", "4")
REFUSED = {
    "x64": ({"JAX_ENABLE_X64": "1"}, "JAX_ENABLE_X64=True", "unset it"),
    "old random bits": ({"JAX_THREEFRY_PARTITIONABLE": "0"}, "JAX_THREEFRY_PARTITIONABLE=False", "unset it"),
    "no TPU": ({"JAX_PLATFORMS": "tpu"}, "JAX_PLATFORMS=tpu finds no device", "set it to cpu"),
    "no GPU": ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS=cuda finds no device", "set it to cpu"),
    "no such platform": ({"JAX_PLATFORMS": "abacus"}, "JAX_PLATFORMS=abacus finds no device", "set it to cpu"),
    "no truth": ({"JAX_ENABLE_X64": "maybe"}, "invalid truth value 'maybe'", "correct it"),
}
COMMANDS = {"train": SMOKE, "generate": ("generate", "tiny-random", "--prompt", "1", "--max_new_tokens", "2")}
WORKS = {
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DEBUG_NANS": "1",
}
USUAL = {"JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow"}
"""Where the tests' own settings are others."""
TERMINALS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
SAYS = (
    ("--help",),
    ("train", "--help", "all"),
    ("list", "configs"),
    SMOKE,
    ("report", "run", "--out", "run.html"),
    ("eval", "run", "--limit", "2", "--max_new_tokens", "4"),
    ("collect", "run", "--limit", "2", "--max_new_tokens", "4", "--out", "run.jsonl"),
    ("generate", "run", "--prompt", "1", "--max_new_tokens", "9", "--temperature", "2"),
    ("export", "run", "--out", "model"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"), [*(("train", name) for name in REFUSED), ("generate", "x64"), ("generate", "no TPU")]
)
def test_a_command_says_in_one_line_what_is_wrong_around_it(tmp_path, what, name):
    changes, *words = REFUSED[name]
    answer = command(*COMMANDS[what], folder=tmp_path, anew=True, **changes)
    # Before it libtpu says much of its own.
    last = answer.err.splitlines()[-1]
    assert (answer.code, answer.out) == (2, "") and last.startswith("jaxrl-llm: ") and "Traceback" not in answer.err
    assert all(word in last for word in words) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_is_equal_whatever_else_jax_is_told(tmp_path):
    for run, changes in (("plain", USUAL), ("strict", WORKS)):
        answer = command(*SMOKE[:5], run, *SMOKE[6:], folder=tmp_path, anew=True, **changes)
        assert answer.code == 0, answer.err
    plain, strict = ((tmp_path / run / "samples.jsonl").read_bytes() for run in ("plain", "strict"))
    assert plain == strict


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMINALS)
def test_what_a_terminal_lacks_is_replaced(tmp_path, name):
    for arguments in SAYS if name == "C" else SAYS[:5]:
        answer = command(*arguments, folder=tmp_path, anew=True, **TERMINALS[name])
        assert answer.code == 0 and "Traceback" not in answer.err, (arguments, answer.err)


def test_a_character_that_a_pipe_cannot_carry_is_a_question_mark():
    program = "import sys\nfrom jaxrl_llm import cli\ncli.run = lambda _: print('6 × 7', '数') or 0\ncli.main()"
    answer = started(program, "", ROOT, PYTHONIOENCODING="ascii")
    assert (answer.code, answer.out) == (0, "6 ? 7 ?\n"), answer.err
