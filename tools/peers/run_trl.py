"""TRL without a server: GRPOTrainer's own call of transformers' ``generate``, or continuous batching; and its loss.

``mode`` generate: the trainer is asked for completions by the method that it uses in training; a batch runs until its
longest row is done. ``mode`` batching: the manager behind ``generate_batch``, which TRL calls with one length for all,
is given each request with its own. Both learn by the trainer's own loss and optimiser. Liger's kernels need a GPU; the
log-probabilities without whole logits are in that loss always.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from transformers.generation import ContinuousBatchingConfig
from trl import GRPOConfig, GRPOTrainer
from worker import Contestant, batches, padded, serve

PACKAGES = ("trl", "transformers", "torch")
MICROBATCH = 16
"""Rows of one forward and backward pass."""


def words(count: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose end and padding are ids that the model of ``count`` words cannot sample."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": count, "<eos>": count + 1}, "<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def trainer_of(model: Any, work: dict[str, Any]) -> GRPOTrainer:
    """A GRPO trainer on the CPU: temperature 1, the whole vocabulary, no reference, nothing recomputed for less
    memory.
    """
    rows = datasets.Dataset.from_dict({"prompt": ["<eos>"] * work["slots"]})
    size = math.gcd(work["slots"], MICROBATCH)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], num_generations=work["group"],
        per_device_train_batch_size=size, gradient_accumulation_steps=work["slots"] // size,
        gradient_checkpointing=False,
        loss_type="grpo", beta=0.0, epsilon=0.2, learning_rate=work["learning_rate"], weight_decay=0.0,
        max_completion_length=work["completion"], temperature=1.0, top_p=1.0, top_k=0,
    )  # fmt: skip
    reward = lambda completions, **_: [0.0] * len(completions)
    return GRPOTrainer(model, reward, arguments, rows, processing_class=words(model.config.vocab_size))


def learner(trainer: GRPOTrainer, work: dict[str, Any]) -> Callable[[list[list[int]]], tuple[float, float, int]]:
    """The trainer's loss on rows as wide as the longest completion, as it batches them, and the optimiser that it
    makes.
    """
    model, accelerator, parts = trainer.model, trainer.accelerator, trainer.args.gradient_accumulation_steps
    optimiser = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = parts
    prompts, advantages = torch.tensor(work["prompts"]), torch.tensor(work["advantages"])

    def update(completions: list[list[int]]) -> tuple[float, float, int]:
        model.train()
        width, total = max(map(len, completions)), 0.0
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in completions])
        batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "advantages": advantages}
        batch |= {"completion_ids": torch.tensor(padded(completions, width, 0)), "completion_mask": mask}
        for rows in torch.arange(len(mask)).chunk(parts):
            loss = trainer.compute_loss(model, {name: values[rows] for name, values in batch.items()})
            accelerator.backward(loss)
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimiser.step()
        optimiser.zero_grad()
        return total, norm, len(mask) * (work["prompt"] + width)

    return update


def fixed_batches(trainer: GRPOTrainer, model: Any, work: dict[str, Any]) -> tuple[Callable, Callable]:
    """``generate`` as the trainer calls it, with its defaults: dynamic cache, SDPA, no compilation."""

    def greedy() -> Sequence[int]:
        prompt, pad = torch.tensor(work["prompts"][:1]), model.config.vocab_size
        rule = transformers.GenerationConfig(max_new_tokens=work["completion"], do_sample=False, pad_token_id=pad)
        model.eval()
        with torch.no_grad():
            return model.generate(prompt, generation_config=rule)[0, prompt.shape[1] :].tolist()

    def generate(seed: int) -> tuple[list[Sequence[int]], int]:
        transformers.set_seed(seed)
        tokens, computed = [], 0
        for prompts, limits in batches(work):
            trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = max(limits)
            tokens += trainer._generate_single_turn(prompts, None, {}, 1)[0]
            computed += max(limits) * len(prompts)
        return tokens, computed

    return greedy, generate


def continuous_batches(trainer: GRPOTrainer, model: Any, work: dict[str, Any]) -> tuple[Callable, Callable]:
    """A manager for each call, as ``generate_batch`` makes it; as many requests at a time as there are slots.

    Twice the pages that these need: the scheduler starts no request where few are free.
    """
    pages = -(-(work["prompt"] + work["completion"]) // ContinuousBatchingConfig.page_size)
    room = ContinuousBatchingConfig(max_requests_per_batch=work["slots"], num_blocks=2 * pages * work["slots"])

    def complete(prompts: list[list[int]], limits: list[int], sample: bool) -> tuple[list[Sequence[int]], int]:
        rule = transformers.GenerationConfig(
            do_sample=sample, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=work["completion"],
            eos_token_id=-1, pad_token_id=model.config.vocab_size,
        )  # fmt: skip
        done = {}
        with model.continuous_batching_context_manager(rule, continuous_batching_config=room) as manager:
            requests = zip(prompts, limits, strict=True)
            names = [manager.add_request(prompt, max_new_tokens=limit) for prompt, limit in requests]
            while len(done) < len(names) and manager.is_running():
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
        return [done[name] for name in names], sum(limits)

    greedy = lambda: complete(work["prompts"][:1], [work["completion"]], sample=False)[0][0]
    return greedy, lambda seed: (transformers.set_seed(seed), complete(work["prompts"], work["limits"], sample=True))[1]


def make(work: dict[str, Any]) -> Contestant:
    """The contestant that the mode names, with all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    trainer = trainer_of(model, work)
    ways = {"generate": fixed_batches, "batching": continuous_batches}
    settings = {"generate": "generate as GRPOTrainer calls it", "batching": "a length for each request, SDPA"}
    learning = f"; {trainer.args.per_device_train_batch_size} rows at a time, nothing recomputed"
    update = None if work["what"] == "rollout" else learner(trainer, work)
    return Contestant(*ways[work["mode"]](trainer, model, work), update, PACKAGES, settings[work["mode"]] + learning)


if __name__ == "__main__":
    serve(make)
