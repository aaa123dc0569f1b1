"""TRL's rollouts without a server: GRPOTrainer's own call of transformers' ``generate``, or continuous batching.

``mode`` generate: a trainer made for the purpose is asked for completions by the method that it uses in training; a batch
runs until its longest row is done. ``mode`` batching: the manager behind ``generate_batch``, which TRL calls with one
length for all, is given each request with its own.
"""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from transformers.generation import ContinuousBatchingConfig
from trl import GRPOConfig, GRPOTrainer
from worker import Contestant, batches, serve


def words(count: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose end and padding are ids that the model of ``count`` words cannot sample."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": count, "<eos>": count + 1}, "<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def trainer_of(model: Any, work: dict[str, Any]) -> GRPOTrainer:
    """A GRPO trainer on the CPU that never trains: temperature 1, the whole vocabulary."""
    rows = datasets.Dataset.from_dict({"prompt": ["<eos>"] * 2})
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], num_generations=2,
        per_device_train_batch_size=2, max_completion_length=work["completion"], temperature=1.0, top_p=1.0, top_k=0,
    )  # fmt: skip
    reward = lambda completions, **_: [0.0] * len(completions)
    return GRPOTrainer(model, reward, arguments, rows, processing_class=words(model.config.vocab_size))


def fixed_batches(model: Any, work: dict[str, Any]) -> Contestant:
    """``generate`` as the trainer calls it, with its defaults: dynamic cache, SDPA, no compilation."""
    trainer = trainer_of(model, work)

    def greedy() -> Sequence[int]:
        prompt, length = torch.tensor(work["prompts"][:1]), work["completion"]
        rule = transformers.GenerationConfig(max_new_tokens=length, do_sample=False, pad_token_id=model.config.vocab_size)
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

    return Contestant(greedy, generate, ("trl", "transformers", "torch"), "GRPOTrainer's defaults")


def main(work: dict[str, Any]) -> Contestant:
    """The contestant that the mode names, with all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    return {"generate": fixed_batches, "batching": continuous_batches}[work["mode"]](model, work)


def continuous_batches(model: Any, work: dict[str, Any]) -> Contestant:
    """A manager that lives on between calls, with pages for as many requests as there are slots."""
    model.requires_grad_(False)
    settings = ContinuousBatchingConfig(
        max_requests_per_batch=int(os.environ.get("CB_MAX", work["slots"])), num_blocks=int(os.environ.get("CB_BLOCKS", work["slots"])), page_size=int(os.environ.get("CB_PAGE",256)), seed=0,
        max_batch_tokens=int(os.environ["CB_TOK"]) if "CB_TOK" in os.environ else None,
        default_compile_level=int(os.environ.get("CB_COMPILE","0")),
    )

    def complete(prompts: list[list[int]], limits: list[int], sample: bool) -> tuple[list[Sequence[int]], int]:
        rule = transformers.GenerationConfig(
            max_new_tokens=work["completion"], do_sample=sample, temperature=1.0, top_p=1.0, top_k=0,
            eos_token_id=-1, pad_token_id=model.config.vocab_size,
        )
        model.destroy_cached_continuous_batching_manager()
        with model.continuous_batching_context_manager(rule, continuous_batching_config=settings, warmup=False) as manager:
            names = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
            done = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
        return [done[name] for name in names], sum(limits)

    return Contestant(
        lambda: complete(work["prompts"][:1], [work["completion"]], False)[0][0],
        lambda seed: complete(work["prompts"], work["limits"], True),
        ("transformers", "torch"),
        "x",
    )


if __name__ == "__main__":
    serve(main)
