"""jaxrl_llm's engine and learner."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bench_update import ADAM, LEARNER, computed, samples_of, set_up, updated
from worker import Contestant, serve

from jaxrl_llm.learner import pack
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout import Engine, Sampling

PACKAGES = ("jax", "flax", "optax")


class Policy:
    """The weights that are sampled from, and what improves them."""

    def __init__(self, model: Decoder, work: dict[str, Any]):
        settings = dataclasses.replace(
            LEARNER, optimiser=dataclasses.replace(ADAM, learning_rate=work["learning_rate"])
        )
        self._state, self._setup = set_up(model, settings, work["prompt"], work["completion"])
        self._work, self.mesh = work, self._setup.forward.mesh
        # Lengths never change, and so neither does this.
        groups = samples_of(work["prompts"], work["completions"], work["advantages"], work["group"])
        self._positions = computed(pack([sample for group in groups for sample in group], self._setup.layout))

    @property
    def weights(self) -> Decoder:
        """As the last update left them."""
        return self._state.policy.params

    def update(self, completions: list[list[int]]) -> tuple[float, float, int]:
        """By the call that the trainer makes."""
        work = self._work
        groups = samples_of(work["prompts"], completions, work["advantages"], work["group"])
        self._state, metrics = updated(self._state, groups, self._setup)
        return metrics["loss"], metrics["grad_norm"], self._positions


def sampler(work: dict[str, Any], engine: Engine, weights: Callable[[], Decoder]) -> tuple[Callable, Callable]:
    """(greedy, generate): one engine for all the work, by the calls that the trainer makes."""

    def greedy() -> Sequence[int]:
        rule = Sampling(temperature=0.0, max_new_tokens=work["completion"])
        return engine.generate(weights(), work["prompts"][:1], [0], rule)[0].tokens

    def generate(seed: int) -> tuple[list[Sequence[int]], int]:
        engine.start(Sampling(max_new_tokens=work["completion"]))
        count = len(work["prompts"])
        handles = engine.submit(work["prompts"], range(seed * count, (seed + 1) * count), work["limits"])
        while engine.busy:
            engine.step(weights())
        done = dict(engine.collect())
        return [done[handle].tokens for handle in handles], engine.slot_steps

    return greedy, generate


def make(work: dict[str, Any]) -> Contestant:
    """An engine, and a state where there is anything to learn."""
    model, _ = load_pretrained(work["model"])
    length, settings = work["prompt"] + work["completion"], f"slots refilled every {work['chunk']} steps"
    if work["what"] == "rollout":
        engine = Engine(model, work["slots"], length, work["chunk"], group=work["group"])
        return Contestant(*sampler(work, engine, lambda: model), None, PACKAGES, settings)
    policy = Policy(model, work)
    engine = Engine(model, work["slots"], length, work["chunk"], mesh=policy.mesh, group=work["group"])
    return Contestant(
        *sampler(work, engine, lambda: policy.weights), policy.update, PACKAGES, settings + "; a run's own settings"
    )


if __name__ == "__main__":
    serve(make)
