"""TRL's own GRPO losses on given groups and on given log-probabilities; see ``tools/compare_losses.py``.

The work comes as JSON on standard input; losses and versions go out as JSON, gradients of the weights to files.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class Given(GRPOTrainer):
    """The trainer, whose log-probabilities are given where ``logp`` is set."""

    logp: torch.Tensor | None = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
        if self.logp is None:
            return super()._get_per_token_logps_and_entropies(*args, **named)
        return self.logp, torch.zeros_like(self.logp), None


def trainer_of(folder: Path, settings: dict[str, Any], rows: int, tokens: int) -> Given:
    """A trainer with these settings of the loss, which has all rows in one batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], beta=0.0, num_generations=rows,
        per_device_train_batch_size=rows, gradient_checkpointing=False, max_completion_length=tokens,
        temperature=1.0, disable_dropout=True, **settings,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": "a"}] * rows)
    found = Given(model, lambda completions, **_: [0.0] * len(completions), config, data, processing_class=tokenizer)
    found.current_gradient_accumulation_steps = 1
    found.model.train()
    return found


def inputs_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Prompts padded at the left, completions at the right."""
    before, after = (max(map(len, batch[name])) for name in ("prompts", "completions"))
    right = lambda values, fill: torch.tensor([[*row, *[fill] * (after - len(row))] for row in values])
    prompts = batch["prompts"]
    mask = right([[1] * len(row) for row in batch["completions"]], 0)
    return {
        "prompt_ids": torch.tensor([[0] * (before - len(row)) + row for row in prompts]),
        "prompt_mask": torch.tensor([[0] * (before - len(row)) + [1] * len(row) for row in prompts]),
        "completion_ids": right(batch["completions"], 0),
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]),
        "old_per_token_logps": right(batch["old_logp"], 0.0),
        "num_items_in_batch": mask.sum(),
    }


def on_random(trainer: Given, batch: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient by the given log-probabilities."""
    trainer.logp = torch.tensor(batch["logp"], requires_grad=True)
    mask = torch.tensor(batch["mask"]).int()
    blank = torch.zeros_like(mask)
    loss = trainer._compute_loss(trainer.model, {
        "prompt_ids": blank, "prompt_mask": blank, "completion_ids": blank, "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]), "old_per_token_logps": torch.tensor(batch["old_logp"]),
        "num_items_in_batch": mask.sum(),
    })  # fmt: skip
    loss.backward()
    found = {"loss": loss.item(), "gradient": trainer.logp.grad.tolist()}
    trainer.logp = None
    return found


def main() -> None:
    """Every loss on both batches."""
    work = json.load(sys.stdin)
    folder = Path(work["folder"])
    batch = json.loads((folder / "batch.json").read_text())
    losses, alone = {}, {}
    for name, settings in work["losses"].items():
        tokens = max(map(len, batch["completions"]))
        trainer = trainer_of(folder, settings, len(batch["prompts"]), tokens)
        loss = trainer._compute_loss(trainer.model, inputs_of(batch))
        loss.backward()
        weights = {weight: one.grad.contiguous() for weight, one in trainer.model.named_parameters()}
        save_file(weights, folder / f"{name}_trl.safetensors")
        losses[name] = loss.item()
        trainer.max_completion_length = len(work["random"]["logp"][0])
        alone[name] = on_random(trainer, work["random"])
    versions = {library: version(library) for library in ("trl", "torch", "transformers")}
    print(json.dumps({"losses": losses, "random": alone, "versions": versions}), file=OUT, flush=True)


if __name__ == "__main__":
    main()
