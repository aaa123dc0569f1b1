"""Both precisions for the tests of published numbers."""

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)
