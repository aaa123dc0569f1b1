"""verl's own policy losses on given log-probabilities; see ``tools/compare_losses.py``.

The work comes as JSON on standard input; losses, gradients and versions go out as JSON.
"""

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def on_random(batch: dict[str, Any], name: str, settings: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient by the given log-probabilities."""
    logp = torch.tensor(batch["logp"], requires_grad=True)
    mask = torch.tensor(batch["mask"]).float()
    advantages = torch.tensor(batch["advantages"])[:, None].expand_as(mask)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(name, **choice),
        **settings,
    )  # fmt: skip
    old = torch.tensor(batch["old_logp"])
    loss, _ = get_policy_loss_fn(name)(old, logp, advantages, mask, config.loss_agg_mode, config)
    loss.backward()
    return {"loss": loss.item(), "gradient": logp.grad.tolist()}


def main() -> None:
    """Every loss on the batch."""
    work = json.load(sys.stdin)
    found = {name: on_random(work["random"], **given) for name, given in work["losses"].items()}
    print(json.dumps({"random": found, "versions": {one: version(one) for one in ("verl", "torch")}}), file=OUT)


if __name__ == "__main__":
    main()
