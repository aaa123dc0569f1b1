"""Useful FLOPs of a step against a count by hand, and the devices whose peaks are known."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from learner.rollouts import sample
from tiny import KINDS, tiny

from jaxrl_llm.learner.platform import MFU, utilisation
from jaxrl_llm.learner.update import Training
from jaxrl_llm.models.config import Lora
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.lora import create_adapter
from jaxrl_llm.sharding.mesh import CHIPS, chip_of
from jaxrl_llm.types import Role, TrainState

# Two layers of 16 x (32 + 16 + 16 + 32) weights in attention and 3 x 16 x 24 behind it, and a head of 16 x 50.
LAYERS, HEAD = 2 * (16 * 96 + 3 * 16 * 24), 16 * 50
# A prompt of 3 tokens with answers of 2 and 4, and one of 5 with an answer of 1.
TOKENS, ANSWERED = 3 + 2 + 4 + 5 + 1, 2 + 4 + 1
PAIRS = 2 * ((1 + 2 + 3) + (4 + 5) + (4 + 5 + 6 + 7) + (1 + 2 + 3 + 4 + 5) + 6)
ATTENTION = 12 * 4 * 8 * PAIRS
WHOLE = 6 * LAYERS * TOKENS + 6 * HEAD * ANSWERED + ATTENTION
SCALAR = 6 * LAYERS * TOKENS + ATTENTION


def answers(prompt, *lengths):
    made = [np.arange(length, dtype=np.int32) for length in lengths]
    return [sample(list(range(prompt)), one, one >= 0, np.zeros(len(one)), 0.0) for one in made]


GROUPS = [answers(3, 2, 4), answers(5, 1)]


def flops(roles, row, minibatches=2, groups=GROUPS):
    """Of a step of half a second on two chips."""
    state = TrainState({name: Role(params, None, 0, base) for name, (params, base) in roles.items()}, {})
    training = [Training((SimpleNamespace(role=name),), None) for name in roles]
    devices = [SimpleNamespace(device_kind="TPU v5 lite")] * 2
    found = utilisation(state, groups, training, minibatches, row | {"time/update_s": 0.5}, devices)
    return found[MFU] * 0.5 * 2 * 197e12


def test_a_whole_model_counts_six_for_each_weight_and_token():
    policy = {"policy": (tiny("plain"), None)}
    assert flops(policy, {"updates": 2.0}) == pytest.approx(WHOLE, rel=1e-12)
    assert flops(policy, {"updates": 6.0}) == pytest.approx(3 * WHOLE, rel=1e-12)
    assert flops(policy, {"updates": 1.0}, minibatches=8) == pytest.approx(WHOLE / 2, rel=1e-12)
    assert flops(policy, {"updates": 0.0}) == flops(policy, {"updates": 0.0}, groups=[]) == 0


def test_below_an_adapter_frozen_weights_get_no_gradient():
    adapter = create_adapter(KINDS["plain"], Lora(rank=2), jax.random.key(0))
    weights = sum(leaf.size for leaf in jax.tree.leaves(adapter))
    wanted = 4 * LAYERS * TOKENS + 4 * HEAD * ANSWERED + ATTENTION + 6 * weights * TOKENS
    assert flops({"policy": (adapter, tiny("plain"))}, {"updates": 2.0}) == pytest.approx(wanted, rel=1e-12)


def test_each_role_counts_its_own_updates_and_a_scalar_model_no_head():
    critic = with_scalar_head(tiny("plain"), np.zeros(16, np.float32))
    roles = {"policy": (tiny("plain"), None), "critic": (critic, None)}
    wanted = WHOLE + 2 * SCALAR
    assert flops(roles, {"updates": 2.0, "critic/updates": 4.0}) == pytest.approx(wanted, rel=1e-12)


def test_a_device_without_known_peaks_has_no_such_metric():
    state = TrainState({"policy": Role(tiny("plain"), None, 0, None)}, {})
    assert utilisation(state, GROUPS, [], 1, {}, jax.devices()) == {}
    kinds = ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL", "NVIDIA L40S", "TPU v3")
    assert [chip_of(kind) for kind in kinds] == [None] * len(kinds)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"), ("Tesla T4", "t4"), ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)  # fmt: skip
def test_jax_names_of_devices_are_known(kind, name):
    assert chip_of(kind) is CHIPS[name]
