"""What is chosen for a platform and a model, and what is refused."""

import dataclasses

import jax
import pytest
from learner.rollouts import one_device

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Learner
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import Attention, ModelConfig
from jaxrl_llm.sharding import MeshShape, make_mesh, platform_of

MODEL = ModelConfig("llama", 50, 64, 2, 64, Attention(4, 2, 64))
CAPPED = dataclasses.replace(MODEL, attention=Attention(4, 2, 64, softcap=50.0))
WIDE = dataclasses.replace(MODEL, attention=Attention(4, 2, 256))
HALF = Learner(compute_dtype="bfloat16")


@pytest.mark.parametrize(("settings", "model", "platform", "wanted"), [
    (HALF, MODEL, "tpu", "splash"), (HALF, CAPPED, "tpu", "splash"), (Learner(row_tokens=200), MODEL, "tpu", "xla"),
    (HALF, MODEL, "gpu", "cudnn"), (Learner(), MODEL, "gpu", "xla"), (HALF, CAPPED, "gpu", "xla"),
    (HALF, WIDE, "gpu", "xla"),
    (HALF, MODEL, "cpu", "xla"), (Learner(attention="xla"), MODEL, "tpu", "xla"),
])  # fmt: skip
def test_the_attention_that_can_serve_is_taken(settings, model, platform, wanted):
    assert compute_for(settings, model, platform).attention == wanted


@pytest.mark.parametrize(("settings", "model", "platform", "message"), [
    (Learner(attention="splash"), MODEL, "cpu",
     "learner.attention 'splash' is for tpu, and this is cpu: set it to 'auto'"),
    (Learner(attention="cudnn"), MODEL, "tpu", "'cudnn' is for gpu, and this is tpu"),
    (Learner(attention="cudnn"), MODEL, "gpu", "needs learner.compute_dtype 'bfloat16', got 'float32'"),
    (dataclasses.replace(HALF, attention="cudnn"), CAPPED, "gpu", "has no soft cap"),
    (dataclasses.replace(HALF, attention="cudnn"), WIDE, "gpu",
     "heads of at most 128, a multiple of 8, and this model's have 256"),
    (Learner(attention="splash", row_tokens=200), MODEL, "tpu", "learner.row_tokens to be a multiple of 128, got 200"),
])  # fmt: skip
def test_what_cannot_serve_is_refused(settings, model, platform, message):
    with pytest.raises(InputError, match=message):
        compute_for(settings, model, platform)


def test_few_layers_are_unrolled_on_cpus_only():
    deep = dataclasses.replace(MODEL, layers=30)
    assert compute_for(HALF, MODEL, "cpu").unroll and not compute_for(HALF, MODEL, "tpu").unroll
    assert not compute_for(HALF, deep, "cpu").unroll
    found = compute_for(Learner(remat="dots"), MODEL, "cpu")
    assert (found.dtype, found.remat, found.interpret) == ("float32", "dots", False)


def test_layouts_follow_the_mesh_and_the_attention():
    mesh = one_device()
    assert platform_of(mesh) == "cpu"
    layout = layout_for(Learner(microbatch_rows=4), Compute(), 300, 200, mesh)
    assert (layout.rows, layout.row_tokens, layout.completion_tokens, layout.parts) == (4, 320, 200, 1)
    assert layout_for(Learner(), Compute(), 160, 128, mesh).row_tokens == 32 + 2 * 128
    assert layout.share_prompts and not layout_for(Learner(), Compute(attention="splash"), 300, 200, mesh).share_prompts
    assert layout_for(Learner(row_tokens=310), Compute(), 300, 200, mesh).row_tokens == 310


@pytest.mark.parametrize(("tensor", "wanted"), [(1, 320), (2, 320), (3, 384), (5, 320), (6, 384), (7, 448)])
def test_rows_of_open_length_are_divided_over_tensor(tensor, wanted):
    mesh = make_mesh(MeshShape(1, 1, tensor), jax.devices()[:tensor])
    assert layout_for(Learner(), Compute(), 300, 200, mesh).row_tokens == wanted
