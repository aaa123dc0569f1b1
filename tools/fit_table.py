"""What fits on one card: the table of docs/models.md, by formula.

    python tools/fit_table.py

The run is ``grpo_qwen2_5_1_5b_gsm8k`` with one row of 4,096 tokens a microbatch. A cell has the slots (64 at most, a
power of two) that fit beside the weights, for three ways to train: all weights / LoRA 16 bits / LoRA 4 bits (nf4; mxfp4
for GPT-OSS).
"""

import dataclasses

from jaxrl_llm import config as configs
from jaxrl_llm.models.config import Lora
from jaxrl_llm.plan.machines import parse_topology, prepare_compilers
from jaxrl_llm.plan.planning import plan_run, with_engine
from jaxrl_llm.plan.programs import find_model_config

CARDS = ("t4:1", "v5e:1x1", "l4:1", "a100-40:1", "h100:1")
MODELS = (
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "google/gemma-3-1b-it", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip
WAYS = (Lora(), Lora(16))


def slots_that_fit(model: str, card: str, lora: Lora) -> str:
    """Return how many slots fit, as text; "-" where fewer than 8 do."""
    machine = parse_topology(card)
    run = configs.resolved(configs.find_config("grpo_qwen2_5_1_5b_gsm8k").run)
    dtype = "bfloat16" if machine.chip.bfloat16 else "float32"
    learner = dataclasses.replace(run.learner, lora=lora).computing(microbatch_rows=1, dtype=dtype)
    run = with_engine(dataclasses.replace(run, model=model, learner=learner), slots=0)
    plan = plan_run(run, find_model_config(model)[0], machine, None, None, False)
    slots = plan.run.rollout.engine.slots
    return str(slots) if plan.fits and slots >= 8 else "-"


if __name__ == "__main__":
    prepare_compilers()
    names = {"v5e:1x1": "v5e chip, 16 GB", "l4:1": "L4, RTX 4090, 24 GB", "t4:1": "T4, 16 GB",
             "a100-40:1": "A100, 40 GB", "h100:1": "H100, A100, 80 GB"}  # fmt: skip
    print("| model | " + " | ".join(names[card] for card in CARDS) + " |\n" + "|---" * (len(CARDS) + 1) + "|")
    for model in MODELS:
        few_bits = Lora(16, base="mxfp4" if "gpt-oss" in model else "nf4")
        cells = (" / ".join(slots_that_fit(model, card, way) for way in (*WAYS, few_bits)) for card in CARDS)
        print(f"| `{model}` | {' | '.join(cells)} |", flush=True)
