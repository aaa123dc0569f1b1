"""Preference training: the model learns which of two answers is better, relative to its initial self."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.texts import Preference
from jaxrl_llm.data import Ranked
from jaxrl_llm.errors import require
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.learner.comparisons import PairLoss
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.stages.dataset import DatasetStage, groups, outline_of, programs_of, read, resources
from jaxrl_llm.stages.stage import SCORED_AT_ONCE, Outline, Pass, scored
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.telemetry.progress import Progress

__all__ = ["groups", "outline", "prepare", "resources"]

REFERENCE = "reference.npz"
"""A file in the run's directory: the initial log-probabilities of every answer."""
SIGNS = (1.0, -1.0)
"""The sign of a pair's better and of its worse answer."""


Sums = dict[str, np.ndarray]
"""Log-probabilities of both answers of each pair, summed over their tokens: nats, float64[n, 2] by the data's part."""


def at_start(path: Path, key: str, peers: Peers, compute: Callable[[], Sums]) -> Sums:
    """Return the initial model's log-probabilities of the pairs, computed once and kept in the run's directory.

    That model itself need not be kept: its log-probabilities are all that the loss reads of it.

    Args:
      path: of the file.
      key: of all its inputs; a file with another key is computed anew.
      peers: either all of them compute or none; the first one writes.
      compute: computes the log-probabilities.
    """

    def its_key() -> str | None:
        try:
            with path.open("rb") as file, np.load(file) as found:
                return str(found["key"])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None  # missing, or torn by a crash

    if peers.first(its_key) == key:
        with np.load(path) as file:
            return {name: file[name] for name in file.files if name != "key"}
    known = compute()
    if peers.leads:
        with new_file(path) as part, part.open("wb") as file:
            np.savez(file, key=np.asarray(key), **known)  # ty: ignore[invalid-argument-type]
    return known


def pair_numbers(loss: Any, pairs: Sequence[Ranked], logp: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return accuracy and margin of pairs from the summed log-probabilities of policy and reference, float64[n, 2]."""
    gap = logp - reference
    if loss.average:
        gap /= np.asarray([[len(tokens) for tokens in pair.completions] for pair in pairs])
    margin = gap[:, 0] - gap[:, 1]
    return {
        "eval/pairs/accuracy": float(np.mean((np.sign(margin) + 1) / 2)),
        "eval/pairs/margin": float(loss.beta * np.mean(margin)),
    }


def sums(forward: Forward, model: Decoder, pairs: Sequence[Ranked], status: Callable[[str], None]) -> np.ndarray:
    """Return log-probabilities of the answers, summed over their tokens, nats: float64[n, 2]."""
    samples = [sample for number, pair in enumerate(pairs) for sample in pair_samples(pair, (0.0, 0.0), number)]
    found = scored(forward, model, samples, "logp", lambda text: status(f"comparing: {text}"))
    return np.asarray([np.sum(logp, dtype=np.float64) for logp in found]).reshape(-1, len(SIGNS))


def pair_samples(pair: Ranked, reference: Sequence[float], number: int) -> list[Sample]:
    """Return the samples of the better and the worse answer; ``number`` marks them as one pair."""
    return [
        Sample(
            pair.prompt, tokens, np.ones(len(tokens), bool), {"sign": sign, "ref_logp": float(logp)}, together=number
        )
        for tokens, sign, logp in zip(pair.completions, SIGNS, reference, strict=True)
    ]


def outline(run: Preference, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """Outline the run's computation, including the log-probabilities of all pairs before its first step."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        return pair_samples(Ranked("", prompt, (tokens, tokens), 0.0, ""), (0.0, 0.0), number)

    found = outline_of(run, model, mesh, PairLoss(run.loss), samples)
    follows = np.zeros(run.batch.max_tokens - 1, np.int32)
    pairs = range(SCORED_AT_ONCE // len(SIGNS))
    read = [sample for pair in pairs for sample in samples(np.full(1, pair, np.int32), follows, pair)]
    return dataclasses.replace(found, passes=(Pass("reference", found.forward, read, "logp", 0, model=model),))


def prepare(
    run: Preference, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> DatasetStage:
    """Read or collect the pairs; build training and evaluation.

    Raises:
      InputError: data that the run cannot use.
    """
    loaded, fields = read(run, model, tokenizer, mesh, scorer, progress, peers, "pairs")
    every = (*loaded.train, *loaded.held_out)
    for row in every:
        require(
            len(row.completions) == len(SIGNS),
            f"{row.where} ranks {len(row.completions)} completions, and this loss compares two: take the best and "
            "the worst, or train a RewardModel, which learns from rankings",
        )
    pairs = ((pair.where, pair_samples(pair, (0.0, 0.0), 0)) for pair in every)
    forward, training = programs_of(run, model, mesh, PairLoss(run.loss), pairs)

    def compute() -> Sums:
        parts = {"train": loaded.train, "held_out": loaded.held_out}
        return {name: sums(forward, model, pairs, progress.status) for name, pairs in parts.items()}

    made_from = {"weights": weights_digest(model), "compute": forward.compute.dtype, "pairs": fields["problems"]}
    key = json.dumps(made_from, sort_keys=True)  # the pairs are tokens: template and tokenizer are in them
    known = at_start(scorer.folder / REFERENCE, key, peers, compute)

    def numbers(policy: Decoder, pairs: Sequence[Ranked]) -> dict[str, float]:
        logp = sums(forward, policy, pairs, progress.status)
        return pair_numbers(run.loss, pairs, logp, known["held_out"][: len(pairs)])

    return DatasetStage(
        forward=forward,
        training=training,
        samples_of=lambda pair, place, number: pair_samples(pair, known["train"][place], number),
        numbers=numbers,
        **fields,
    )
