"""TRL's GRPOTrainer as its users run it on a CPU, with the loss of DAPO; see ``learning``."""

import os
import tempfile
from typing import Any

import datasets
import torch
import transformers
from calculator import Calculator
from learning import Told, reward_of, work
from trl import GRPOConfig, GRPOTrainer


class AfterEachStep(transformers.TrainerCallback):
    """Tells of it."""

    def __init__(self, told: Told):
        self._told = told

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimiser."""
        self._told.step(state.global_step)


def tell_of(trainer: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    """After each of the trainer's steps, tell of it and of greedy answers to the problems that are tested."""

    def answer(prompts: list[str]) -> list[str]:
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        rule = transformers.GenerationConfig(
            max_new_tokens=asked["completion"], do_sample=False,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        trained = trainer.model
        trained.eval()
        with torch.no_grad():
            tokens = trained.generate(**batch, generation_config=rule)[:, batch["input_ids"].shape[1] :]
        trained.train()
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    trainer.add_callback(AfterEachStep(Told(asked, answer)))


def settings(asked: dict[str, Any]) -> GRPOConfig:
    """Those of the run; nothing is recomputed for less memory."""
    rows = asked["prompts"] * asked["group"]
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        num_generations=asked["group"], per_device_train_batch_size=asked["microbatch"],
        gradient_accumulation_steps=rows // asked["microbatch"], gradient_checkpointing=False, loss_type="dapo",
        beta=0.0, epsilon=asked["clip"][0], epsilon_high=asked["clip"][1], scale_rewards="group",
        learning_rate=asked["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=asked["clip_norm"], max_completion_length=asked["completion"],
        temperature=asked["temperature"], top_p=1.0, top_k=0, max_steps=asked["steps"], seed=asked["seed"],
        max_tool_calling_iterations=asked["turns"] - 1 if asked["turns"] else None,
    )  # fmt: skip


def main() -> None:
    """Train until somebody has seen enough."""
    asked = work()
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"], padding_side="left")

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return reward_of(completions, answer)

    rows = datasets.Dataset.from_list(asked["train"])
    own = {"environment_factory": Calculator} if asked["turns"] else {"reward_funcs": reward}
    trainer = GRPOTrainer(model, args=settings(asked), train_dataset=rows, processing_class=tokenizer, **own)
    tell_of(trainer, tokenizer, asked)
    trainer.train()


if __name__ == "__main__":
    main()
