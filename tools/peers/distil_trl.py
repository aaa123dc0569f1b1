"""TRL's DistillationTrainer as its users run it on a CPU: on-policy, over the whole vocabulary; see ``learning``.

Of the work it also reads ``teacher`` (a Hugging Face directory) and ``beta`` of the divergence.
"""

import os
import tempfile
from typing import Any

import datasets
import torch
import transformers
from learn_trl import tell_of
from learning import batches_of, work
from trl import DistillationConfig, DistillationTrainer


def settings(asked: dict[str, Any]) -> DistillationConfig:
    """Those of the run; nothing is recomputed for less memory."""
    rows = asked["prompts"] * asked["group"]
    return DistillationConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=asked["microbatch"], gradient_accumulation_steps=rows // asked["microbatch"],
        gradient_checkpointing=False, beta=asked["beta"], learning_rate=asked["learning_rate"],
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=asked["clip_norm"],
        max_completion_length=asked["completion"], temperature=asked["temperature"], top_p=1.0, top_k=0,
        max_steps=asked["steps"], seed=asked["seed"], shuffle_dataset=False,
    )  # fmt: skip


def main() -> None:
    """Train until somebody has seen enough."""
    asked = work()
    torch.set_num_threads(os.cpu_count() or 1)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, teacher = (load(asked[name], dtype=torch.float32) for name in ("model", "teacher"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"], padding_side="left")

    drawn = batches_of(asked["train"], asked["prompts"], asked["seed"])
    steps = [next(drawn) for _ in range(asked["steps"])]
    rows = [{"prompt": one["prompt"]} for batch in steps for one in batch for _ in range(asked["group"])]
    data = datasets.Dataset.from_list(rows)
    trainer = DistillationTrainer(model, teacher, settings(asked), data, processing_class=tokenizer)
    tell_of(trainer, tokenizer, asked)
    trainer.train()


if __name__ == "__main__":
    main()
