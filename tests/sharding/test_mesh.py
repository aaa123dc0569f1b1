"""Meshes over several slices: weights stay inside of one, whatever the order of the devices."""

import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding import MeshShape, batch_parts, make_mesh, rollout_mesh

TWO = MeshShape(data=1, fsdp=-1, tensor=2, slices=2)


def chips(name, slices=1):
    """The devices of a TPU topology that need not be there."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices


def slices_of(row):
    return {device.slice_index for device in row.flat}


@pytest.mark.parametrize(("shape", "wanted"), [
    (TWO, (2, 2, 2)), (MeshShape(slices=2), (2, 4, 1)), (MeshShape(2, -1, 1, slices=2), (4, 2, 1)),
    (MeshShape(-1, 1, 2, slices=4), (4, 1, 2)), (MeshShape(1, -1, 1, rollout=4, slices=2), (2, 2, 1)),
])  # fmt: skip
def test_every_slice_has_copies_of_its_own(shape, wanted):
    assert tuple(shape.sizes(8).values()) == wanted
    mesh = make_mesh(shape)
    assert mesh.devices.shape == wanted and batch_parts(mesh) == wanted[0] * wanted[1]


def test_sizes_are_found_by_the_names_of_their_axes():
    shape = MeshShape(2, -1, 2, rollout=4)
    assert shape.sizes(12) == {"data": 2, "fsdp": 2, "tensor": 2} == dict(make_mesh(MeshShape(2, 2, 2)).shape)
    assert shape.sampling_sizes(12) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert batch_parts(shape.sizes(12)) == batch_parts(make_mesh(MeshShape(2, 2, 2))) == 4


@pytest.mark.parametrize(("shape", "message"), [
    (MeshShape(slices=3), "mesh.slices must divide the 8 devices that learn, got 3"), (MeshShape(slices=0), "got 0"),
    (MeshShape(1, 8, 1, slices=2), "does not fit 4 devices of a slice"),
])  # fmt: skip
def test_slices_that_cannot_be(shape, message):
    with pytest.raises(InputError, match=message):
        shape.sizes(8)


def test_without_slice_numbers_devices_are_taken_in_their_order():
    rows = [[d.id for d in row.flat] for row in make_mesh(TWO).devices]
    assert rows == [[d.id for d in jax.devices()[:4]], [d.id for d in jax.devices()[4:]]]


@pytest.mark.compilers
@pytest.mark.parametrize("shape", [TWO, MeshShape(2, -1, 1, slices=2)])
def test_each_row_of_data_lies_within_one_slice(shape):
    shuffled = np.random.default_rng(0).permutation(chips("v5e:2x2", 2))
    mesh = make_mesh(shape, shuffled)
    assert all(len(slices_of(row)) == 1 for row in mesh.devices)
    halves = np.split(mesh.devices, 2)
    assert slices_of(halves[0]) == {0} and slices_of(halves[1]) == {1}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in shuffled}


@pytest.mark.compilers
def test_weights_across_slices_are_refused():
    with pytest.raises(InputError, match=r"slices of 4, 4: set mesh\.slices to 2") as refused:
        make_mesh(MeshShape(), chips("v5e:2x2", 2))
    assert "\n" not in str(refused.value)


@pytest.mark.compilers
def test_one_slice_may_learn_and_the_other_sample():
    devices, shape = chips("v5e:2x2", 2), MeshShape(1, -1, 2, rollout=4)
    learner, sampler = make_mesh(shape, devices), rollout_mesh(shape, devices)
    assert slices_of(learner.devices) == {0} and slices_of(sampler.devices) == {1}
    assert sampler.devices.shape == (2, 1, 2)


@pytest.mark.compilers
@pytest.mark.parametrize(("name", "shape"), [
    ("v5p:4x4x4", MeshShape(tensor=4)), ("v5p:4x4x4", MeshShape(2, -1, 2)), ("v5e:4x4", MeshShape(tensor=2)),
])  # fmt: skip
def test_tensor_neighbours_are_linked(name, shape):
    mesh = make_mesh(shape, chips(name))
    pairs = [(row[0].coords, row[1].coords) for row in mesh.devices.reshape(-1, mesh.shape["tensor"])]
    assert all(sum(abs(a - b) for a, b in zip(*pair, strict=True)) == 1 for pair in pairs)
