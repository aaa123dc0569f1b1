"""A run of a few thousand weights, to be planned for devices that are there and for some that are not."""

import dataclasses

from jaxrl_llm import config as configs
from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig, Norm
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.tasks import ReasoningGym, Task

CONFIG = ModelConfig("qwen2", 512, 64, 2, 128, Attention(4, 2, 16), Norm(1e-6), embeddings=Embeddings(tied=True))


def tiny_run(mesh, model="tiny-random", recipe=GRPO, slots=32, chunk=8, attention="auto", cache="auto", **rollout):
    """Resolved, with a mesh of these sizes; two rows of a microbatch for each part of the batch."""
    data, fsdp, tensor = mesh
    sizes = {"prompts": 8, "group": 4, "max_prompt_tokens": 24, "max_new_tokens": 40} | rollout
    run = configs.Run(
        model=model, task=Task(ReasoningGym("chain_sum")), recipe=recipe,
        rollout=Rollout(**sizes, engine=EngineOptions(slots, chunk, attention=attention, kv_cache_dtype=cache)),
        learner=Learner(compute=Compute(microbatch_rows=2 * data * fsdp, row_tokens=128)),
        mesh=MeshShape(data, fsdp, tensor),
    )  # fmt: skip
    return configs.resolved(run)


def with_learner(run, **changes):
    """The run with other settings of its learner."""
    return dataclasses.replace(run, learner=dataclasses.replace(run.learner, **changes))


def computing(run, **changes):
    """The run with another way to compute."""
    return dataclasses.replace(run, learner=run.learner.computing(**changes))
