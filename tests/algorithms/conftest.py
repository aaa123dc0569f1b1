"""Both precisions for the tests of published numbers, of which float64 has the narrower tolerance."""

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.slow), "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)
