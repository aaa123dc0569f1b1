"""Machines by name, models by name: what is understood, and what is refused with a remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import count_parameters
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.plan.machines import EXAMPLES, describe_devices, parse_topology
from jaxrl_llm.plan.programs import find_model_config, published_configs
from jaxrl_llm.sharding.mesh import CHIPS, check_dtype, chip_of, without_compilation_cache


@pytest.mark.parametrize("text, devices, shape", [
    ("v5e:4x4", 16, (4, 4)), ("v5p:8x8x4", 256, (8, 8, 4)), ("V6E:16x16", 256, (16, 16)), ("h100:64", 64, (8, 8)),
    ("tpu7x:2x2x1", 8, (2, 2, 1)), ("b200:3", 3, (1, 3)), ("h200:2x4", 8, (2, 4)),
    ("a100-40:8", 8, (1, 8))])  # fmt: skip
def test_a_topology_is_a_chip_and_a_shape(text, devices, shape):
    machine = parse_topology(text)
    assert (machine.devices, machine.shape, machine.name) == (devices, shape, text.lower())


def test_slices_multiply_devices():
    machine = parse_topology("v5e:4x4", 2)
    assert (machine.devices, machine.devices // machine.slices, machine.name) == (32, 16, "v5e:4x4 x 2 slices")


@pytest.mark.parametrize("text, remedy", [
    ("v5litepod-16", "write v5e:4x4"), ("v6e-8", "write v6e:2x4"), ("v5p-128", "write v5p:4x4x4"),
    ("h100-8", "write h100:8"), ("a100-16", "write a100:16"),
    ("v5e:16", "2 sizes, as in v5e:4x4"), ("v5p:4x4", "3 sizes"),
    ("h200:2x4x1", "a number of devices, or hosts x devices of each"),
    ("a100:12", "write hosts x devices of each, as in a100:2x8"),
    ("v9:2x2", "there are v4")])  # fmt: skip
def test_another_name_is_refused_with_the_right_one(text, remedy):
    with pytest.raises(InputError, match=remedy):
        parse_topology(text)


@pytest.mark.compilers
@pytest.mark.parametrize("name", ["t4", "l4", "rtx4090", "a100-40"])
def test_small_cards_can_be_described_to_their_compiler(name):
    (device,) = describe_devices(parse_topology(f"{name}:1"))
    program = jax.jit(lambda x: x @ x)
    placed = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    with without_compilation_cache():
        assert chip_of(device.device_kind) is CHIPS[name] and program.lower(placed).compile().as_text()


@pytest.mark.parametrize("text, slices", [("v5e:4x4", 0), ("h100:8", 2)])
def test_slices_that_make_no_sense_are_refused(text, slices):
    with pytest.raises(InputError, match="--slices"):
        parse_topology(text, slices)


@pytest.mark.compilers
@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.platform == "tpu"])
def test_jax_names_of_tpus_are_known(name):
    kind = describe_devices(parse_topology(EXAMPLES[name]))[0].device_kind
    assert chip_of(kind) is CHIPS[name]


@dataclasses.dataclass
class Device:
    """What jax says of a device."""

    device_kind: str
    compute_capability: str


def test_learning_in_bfloat16_is_refused_where_the_chip_lacks_it():
    with pytest.raises(InputError, match=r"^t4 has no bfloat16: set learner.compute.dtype float32"):
        check_dtype("bfloat16", CHIPS["t4"])
    with pytest.raises(InputError, match=r"^Tesla V100 has no bfloat16"):
        check_dtype("bfloat16", Device("Tesla V100", "7.0"))
    for dtype, kind, capability in (
        ("float32", "Tesla T4", "7.5"),
        ("bfloat16", "NVIDIA L4", "8.9"),
        ("bfloat16", "RTX 6000 Ada", "8.9"),
        ("bfloat16", "AMD Instinct MI300X", "gfx942"),
        ("bfloat16", "NVIDIA B300", "10.3"),
        ("bfloat16", "cpu", ""),
    ):
        check_dtype(dtype, Device(kind, capability))


def test_every_chip_has_an_example_and_sound_peaks():
    assert set(EXAMPLES) == set(CHIPS) and all(
        parse_topology(text).chip.name == name for name, text in EXAMPLES.items()
    )
    for chip in CHIPS.values():
        assert all(
            value > 0
            for name, value in dataclasses.asdict(chip).items()
            if name in ("flops", "bandwidth", "memory", "link", "network")
        )
        # What a chip computes while it reads one number: the machine balance of every accelerator of these years.
        least = 80 if chip.bfloat16 else 20  # without matrix units
        assert least < chip.flops / chip.bandwidth < 700 and chip.network < chip.link


@pytest.mark.parametrize("name, parameters", [
    ("Qwen/Qwen2.5-0.5B", 494_032_768), ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
    ("Qwen/Qwen2.5-7B", 7_615_616_512),
    ("Qwen/Qwen2.5-32B", 32_763_876_352), ("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-8B", 8_190_735_360),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248), ("meta-llama/Llama-3.2-1B", 1_235_814_400),
    ("google/gemma-3-1b-it", 999_885_952), ("openai/gpt-oss-20b", 20_914_757_184)])  # fmt: skip
def test_published_shapes_have_the_published_number_of_parameters(name, parameters):
    config, source = find_model_config(name)
    assert count_parameters(config)[0] == parameters and "copied into this package" in source


def test_a_token_uses_the_parameters_of_its_own_experts():
    """The model's card says 30.5 billion, 3.3 of them active."""
    config = find_model_config("Qwen/Qwen3-30B-A3B")[0]
    total, active, _ = count_parameters(config)
    assert total == 30_532_122_624 and active == total - 48 * (128 - 8) * 3 * 2048 * 768
    assert 3.3e9 < active < 3.4e9
    dense = find_model_config("Qwen/Qwen3-8B")[0]
    assert count_parameters(dense)[1] == count_parameters(dense)[0]


def test_every_published_shape_can_be_read():
    assert len(published_configs()) > 30 and {config["model_type"] for config in published_configs().values()} <= set(
        FAMILIES
    )
    for name in published_configs():
        assert find_model_config(name)[0].layers > 0


def test_a_directory_is_read_before_the_table(tmp_path):
    from jaxrl_llm.models.hf import write_config
    from jaxrl_llm.models.pretrained import TINY
    from jaxrl_llm.models.weights import write_object

    write_object(tmp_path / "config.json", write_config(TINY, "float32"))
    config, source = find_model_config(str(tmp_path))
    assert config.width == TINY.width and source == str(tmp_path / "config.json")
    assert find_model_config("tiny-random") == (TINY, "built in")


def test_a_model_of_no_such_name_is_refused():
    with pytest.raises(InputError, match="no such model"):
        find_model_config("qwen2.5-32b")
