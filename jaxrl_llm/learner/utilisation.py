"""The model FLOPs utilisation (MFU) of a step's updates: useful FLOPs as a share of what the devices could do."""

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from jaxrl_llm.learner.batch import Sample
from jaxrl_llm.learner.epochs import Training
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Adapter
from jaxrl_llm.models.flops import training_flops, visible_pairs
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.sharding.chips import chip_of
from jaxrl_llm.types import TrainState

MFU = "throughput/mfu"


def utilisation(
    state: TrainState,
    groups: Sequence[Sequence[Sample]],
    training: Sequence[Training],
    minibatches: int,
    row: Mapping[str, Any],
    devices: Sequence[Any],
) -> dict[str, float]:
    """Return the metric ``throughput/mfu``; nothing for devices with unknown peaks, such as a CPU.

        MFU = FLOPs / (seconds * devices * peak)

    The FLOPs are those of ``training_flops``, summed over roles and epochs. A prompt counts once in each group;
    padding, recomputation and passes without a gradient never count. An update that was refused counts nothing; one
    that was applied counts as an equal share of its epoch. The peak is that of bfloat16 products, whatever the run
    computes in.

    Args:
      state: with each role's parameters, at least as shapes.
      groups: samples of each prompt.
      training: of each role.
      minibatches: updates of an epoch, at most one for each group.
      row: the step's ``time/update_s``, and the metrics of ``learn`` that say how many updates each role made.
      devices: those that learned, all of one kind.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return {}
    flops = 0.0
    for one in training:
        updates = row["updates" if one.role == "policy" else f"{one.role}/updates"]
        params = state.roles[one.role].params
        adapter = optax.tree.size(params) if isinstance(params, Adapter) else None
        model = model_of(state, one.role)
        tokens, pairs, predictions = work_of(model.config, groups)
        predictions = 0 if isinstance(model, ScalarModel) else predictions
        epochs = updates / max(min(minibatches, len(groups)), 1)
        flops += epochs * training_flops(model.config, tokens, pairs, predictions, adapter)
    return {MFU: flops / (row["time/update_s"] * len(devices) * chip.flops)}


def work_of(config: ModelConfig, groups: Sequence[Sequence[Sample]]) -> tuple[int, float, int]:
    """Return what a model reads of the groups in one epoch: tokens, pairs of queries and keys that see each other
    (summed over layers), and completion tokens, which a language model predicts."""
    lengths = [(len(sample.prompt), len(sample.tokens)) for group in groups for sample in group]
    shared = [len(prompt) for group in groups for prompt in {s.prompt.tobytes(): s.prompt for s in group}.values()]
    pairs = sum(visible_pairs(config, 0, prompt) for prompt in shared)
    pairs += sum(visible_pairs(config, prompt, prompt + tokens) for prompt, tokens in lengths)
    predictions = sum(tokens for _, tokens in lengths)
    return sum(shared) + predictions, pairs, predictions
