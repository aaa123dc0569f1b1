"""jaxrl_llm's engine."""

from collections.abc import Sequence
from typing import Any

from worker import Contestant, serve

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rollout import Engine, Sampling


def make(work: dict[str, Any]) -> Contestant:
    """One engine for all the work, by the calls that the trainer makes."""
    model, _ = load_pretrained(work["model"])
    length = work["prompt"] + work["completion"]
    engine = Engine(model, work["slots"], length, work["chunk"], group=work["group"])

    def greedy() -> Sequence[int]:
        rule = Sampling(temperature=0.0, max_new_tokens=work["completion"])
        return engine.generate(model, work["prompts"][:1], [0], rule)[0].tokens

    def generate(seed: int) -> tuple[list[Sequence[int]], int]:
        engine.start(Sampling(max_new_tokens=work["completion"]))
        count = len(work["prompts"])
        handles = engine.submit(work["prompts"], range(seed * count, (seed + 1) * count), work["limits"])
        while engine.busy:
            engine.step(model)
        done = dict(engine.collect())
        return [done[handle].tokens for handle in handles], engine.slot_steps

    return Contestant(greedy, generate, ("jax", "flax"), f"slots refilled every {work['chunk']} steps")


if __name__ == "__main__":
    serve(make)
