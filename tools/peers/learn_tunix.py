"""Tunix's GRPO learner with the loss of DAPO, and its sampler in the trainer's process; see ``learning``."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import transformers
from learning import Told, batches_of, reward_of, work
from run_tunix import load
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

USED = ("<|im_start|>", "<|im_end|>")
"""Special tokens of chats."""


def cluster(asked: dict[str, Any]) -> RLCluster:
    """The policy alone on one device: nothing holds it to a reference."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    optimiser = optax.chain(
        optax.clip_by_global_norm(asked["clip_norm"]), optax.adamw(asked["learning_rate"], weight_decay=0.0)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"])
    # It finds padding by the token, so that this must be none that prompts or answers hold.
    tokenizer.pad_token = next(word for word in tokenizer.all_special_tokens if word not in USED)

    def rollout(temperature: float, top_p: float | None) -> RolloutConfig:
        return RolloutConfig(
            max_tokens_to_generate=asked["completion"], max_prompt_length=asked["prompt"], temperature=temperature,
            top_p=top_p, top_k=None, kv_cache_size=asked["prompt"] + asked["completion"],
            eos_tokens=[tokenizer.eos_token_id], seed=asked["seed"],
        )  # fmt: skip

    training = RLTrainingConfig(
        actor_optimizer=optimiser, eval_every_n_steps=10**9, max_steps=asked["steps"] + 1,
        mini_batch_size=asked["prompts"], train_micro_batch_size=max(asked["microbatch"] // asked["group"], 1),
        rollout_micro_batch_size=asked["prompts"],
    )  # fmt: skip
    return RLCluster(
        actor=load(asked["model"]),
        tokenizer=TokenizerAdapter(tokenizer),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            training_config=training,
            rollout_config={Mode.TRAIN: rollout(asked["temperature"], 1.0), Mode.EVAL: rollout(0.0, None)},
        ),
    )


def main() -> None:
    """Train until somebody has seen enough."""
    asked = work()
    own = cluster(asked)

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return reward_of(completions, [str(one) for one in answer])

    def answer(prompts: list[str]) -> list[str]:
        return own.generate(prompts, mode=Mode.EVAL, micro_batch_size=len(prompts)).text

    told = Told(asked, answer)

    def batches() -> Iterator[dict[str, Any]]:
        """Asked for the next one when a step has learned and the sampler has its weights."""
        for step, batch in enumerate(batches_of(asked["train"], asked["prompts"], asked["seed"])):
            if step:
                told.step(step)
            if step == asked["steps"]:
                return
            yield {
                "prompts": np.array([problem["prompt"] for problem in batch]),
                "answer": np.array([problem["answer"] for problem in batch]),
            }

    low, high = asked["clip"]
    # Its DAPOConfig is this loss too, but pays for a reference's log-probabilities that nothing reads.
    algorithm = GRPOConfig(num_generations=asked["group"], beta=0.0, epsilon=low, loss_agg_mode="token-mean")
    algorithm.epsilon_high = high
    GRPOLearner(rl_cluster=own, algo_config=algorithm, reward_fns=reward).train(batches())


if __name__ == "__main__":
    main()
