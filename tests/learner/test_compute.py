"""What is chosen for a platform and a model, and what is refused."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from learner.rollouts import one_device

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.learner.platform import compute_for, layout_for, tokens_in_memory
from jaxrl_llm.models.config import Attention, ComputeOptions, Lora, ModelConfig
from jaxrl_llm.sharding import MeshShape, make_mesh, platform_of

MODEL = ModelConfig("llama", 50, 64, 2, 64, Attention(4, 2, 64))
CAPPED = dataclasses.replace(MODEL, attention=Attention(4, 2, 64, softcap=50.0))
WIDE = dataclasses.replace(MODEL, attention=Attention(4, 2, 256))
HALF = Learner(compute=Compute(dtype="bfloat16"))
ROWS = Learner(compute=Compute(row_tokens=200))
CUDNN = Learner(compute=Compute(attention="cudnn"))
ODD = dataclasses.replace(MODEL, attention=Attention(4, 2, 80))


@pytest.mark.parametrize(("settings", "model", "platform", "wanted"), [
    (HALF, MODEL, "tpu", "splash"), (HALF, CAPPED, "tpu", "splash"), (ROWS, MODEL, "tpu", "xla"),
    (HALF, MODEL, "gpu", "triton"), (Learner(), MODEL, "gpu", "xla"), (HALF, CAPPED, "gpu", "triton"),
    (HALF, ODD, "gpu", "cudnn"), (HALF.computing(row_tokens=200), MODEL, "gpu", "cudnn"),
    (HALF, WIDE, "gpu", "xla"),
    (HALF, MODEL, "cpu", "xla"), (Learner(compute=Compute(attention="xla")), MODEL, "tpu", "xla"),
])  # fmt: skip
def test_the_attention_that_can_serve_is_taken(settings, model, platform, wanted):
    assert compute_for(settings, model, platform).attention == wanted


@pytest.mark.parametrize(("settings", "model", "platform", "message"), [
    (Learner().computing(attention="splash"), MODEL, "cpu",
     "learner.compute.attention 'splash' is for tpu, and this is cpu: set it to 'auto'"),
    (CUDNN, MODEL, "tpu", "'cudnn' is for gpu, and this is tpu"),
    (CUDNN, MODEL, "gpu", "needs learner.compute.dtype 'bfloat16', got 'float32'"),
    (HALF.computing(attention="cudnn"), CAPPED, "gpu", "has no soft cap"),
    (HALF.computing(attention="cudnn"), WIDE, "gpu",
     "heads of at most 128, a multiple of 8, and this model's have 256"),
    (HALF.computing(attention="triton"), ODD, "gpu", "needs heads of 16, 32, 64, 128, and this model's have 80"),
    (ROWS.computing(attention="splash"), MODEL, "tpu",
     "learner.compute.row_tokens to be a multiple of 128, got 200"),
])  # fmt: skip
def test_what_cannot_serve_is_refused(settings, model, platform, message):
    with pytest.raises(InputError, match=message):
        compute_for(settings, model, platform)


def test_few_layers_are_unrolled_on_cpus_only():
    deep = dataclasses.replace(MODEL, layers=30)
    assert compute_for(HALF, MODEL, "cpu").unroll and not compute_for(HALF, MODEL, "tpu").unroll
    assert not compute_for(HALF, deep, "cpu").unroll
    found = compute_for(Learner(compute=Compute(remat="dots")), MODEL, "cpu")
    assert (found.dtype, found.remat, found.interpret) == ("float32", "dots", False)


def test_layouts_follow_the_mesh_and_the_attention():
    mesh = one_device()
    assert platform_of(mesh) == "cpu"
    layout = layout_for(Learner(compute=Compute(microbatch_rows=4)), ComputeOptions(), 300, 200, mesh)
    assert (layout.rows, layout.row_tokens, layout.completion_tokens, layout.parts) == (4, 320, 200, 1)
    assert layout_for(Learner(), ComputeOptions(), 160, 128, mesh).row_tokens == 32 + 2 * 128
    assert (
        layout.share_prompts
        and not layout_for(Learner(), ComputeOptions(attention="splash"), 300, 200, mesh).share_prompts
    )
    assert layout_for(Learner(compute=Compute(row_tokens=310)), ComputeOptions(), 300, 200, mesh).row_tokens == 310


def test_rows_of_a_microbatch_are_chosen_for_the_mesh_the_platform_and_the_memory():
    def rows(mesh, update_tokens=math.inf, **settings):
        return layout_for(Learner().computing(**settings), ComputeOptions(), 300, 200, mesh, MODEL, update_tokens).rows

    def described(platform, fsdp):
        kind = AbstractDevice("a device", 1, platform)
        return AbstractMesh((1, fsdp, 1), ("data", "fsdp", "tensor"), abstract_device=kind)

    assert (rows(one_device()), rows(make_mesh(MeshShape()))) == (1, 8)
    assert rows(one_device(), row_tokens=600) == 1
    assert rows(make_mesh(MeshShape(2, 2, 2))) == 4
    assert (rows(described("tpu", 1), row_tokens=512), rows(described("tpu", 4), row_tokens=512)) == (16, 64)
    assert rows(described("tpu", 4), 8 * 512 + 1, row_tokens=512) == 8
    assert rows(described("tpu", 4), 100, row_tokens=512) == 4
    assert rows(described("tpu", 4), row_tokens=16384) == 4
    with pytest.raises(InputError, match=r"microbatch_rows 2 does not divide .* 4 parts of a batch: make it a mult"):
        rows(described("tpu", 4), microbatch_rows=2)


def test_the_more_a_device_holds_the_fewer_tokens_of_a_microbatch_fit():
    def tokens(sizes=(1, 1), memory=2e9, lora=Lora(), **settings):
        learner = Learner(lora=lora).computing(**settings)
        compute = compute_for(learner, MODEL, "tpu")
        return tokens_in_memory(learner, compute, MODEL, 512, sizes, memory)

    assert tokens(memory=math.inf) == math.inf and tokens(memory=1e4) < 0 < tokens()
    assert tokens(memory=1e6) < tokens((8, 1), 1e6) and tokens((1, 1)) < tokens((1, 2))
    assert tokens(remat="none") < tokens(remat="dots") < tokens(remat="full")
    assert tokens(memory=1e6) < tokens(memory=1e6, lora=Lora(4))


@pytest.mark.parametrize(("tensor", "wanted"), [(1, 320), (2, 320), (3, 384), (5, 320), (6, 384), (7, 448)])
def test_rows_of_open_length_are_divided_over_tensor(tensor, wanted):
    mesh = make_mesh(MeshShape(1, 1, tensor), jax.devices()[:tensor])
    assert layout_for(Learner(), ComputeOptions(), 300, 200, mesh).row_tokens == wanted
