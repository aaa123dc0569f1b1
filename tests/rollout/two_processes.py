"""What each process of ``test_processes`` runs: the same requests on one mesh over the devices of all of them."""

import functools
import json
import sys

import jax
import numpy as np
from tiny import tiny

from jaxrl_llm.models.decoder import cast
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, make_mesh, sampling_shardings, shardings

RULES = Sampling(temperature=0.8, max_new_tokens=7, stop_ids=(3, 11))
PROMPTS, SEEDS, LENGTH = ([3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8], [3, 1, 4], [2, 7]), tuple(range(6)), 24


def sampled(engine, weights):
    """Every completion, after an interruption in the middle."""
    engine.start(RULES)
    handles = engine.submit(PROMPTS, SEEDS)
    engine.step(weights)
    engine.step(weights)
    engine.abort(handles[:2])
    done = dict(engine.collect())
    begun = [done[handle] for handle in handles[:2]]
    left = [i for i in range(2) if begun[i].finish_reason == "aborted"]
    again = engine.submit([PROMPTS[i] for i in left], [SEEDS[i] for i in left], partials=[begun[i] for i in left])
    while engine.busy:
        engine.step(weights)
    done |= dict(engine.collect())
    done |= {handles[i]: done[handle] for i, handle in zip(left, again, strict=True)}
    return [done[handle] for handle in handles]


def placed(x, layout):
    """One array over the devices of all processes."""
    return jax.make_array_from_callback(x.shape, layout, lambda index: np.asarray(x)[index])


def main(address, count, number):
    """Print this process's completions as JSON."""
    jax.distributed.initialize(address, int(count), int(number))
    mesh = make_mesh(MeshShape(data=1, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        model = tiny("windows")
        learner = jax.tree.map(placed, model, shardings(model, mesh))
        move = jax.jit(functools.partial(cast, dtype="float32"), out_shardings=sampling_shardings(model, mesh))
        found = sampled(Engine(model, 4, LENGTH, 2, mesh), move(learner))
    print(json.dumps([[c.tokens.tolist(), c.sampler_logp.tolist(), c.finish_reason] for c in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
