"""Preferences: the model learns which of two answers is better, against itself as it was at the start."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.texts import Preference
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Tested
from jaxrl_llm.folders import new_file
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.learner.comparisons import PairLoss
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.fingerprint import weights_digest
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.answering import Resources
from jaxrl_llm.stages.dataset import DatasetStage, Drawn, groups_of, made, outline_of, programs_of, read, with_room
from jaxrl_llm.stages.outline import Groups, Outline, Pass
from jaxrl_llm.stages.reading import SCORED_AT_ONCE, scored
from jaxrl_llm.tasks import Ranked
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import TrainState

REFERENCE = "reference.npz"
"""In the run's directory: what the model gave every answer at the start."""
SIGNS = (1.0, -1.0)
"""Of a pair's better and worse answer."""


Sums = dict[str, np.ndarray]
"""Log-probabilities of both answers of each pair, summed over their tokens: nats, float64[n, 2] by the data's part."""


def at_start(path: Path, key: str, peers: Peers, compute: Callable[[], Sums]) -> Sums:
    """What the model gives the pairs before its first step: computed once, kept in the run's directory.

    That model itself need not be kept: its log-probabilities are all that the loss reads of it.

    Args:
      path: of the file.
      key: of all that they are computed from; a file under another is made anew.
      peers: all of them compute, or none; the first one writes.
      compute: does so.
    """
    if peers.first(lambda: _key_of(path)) == key:
        with np.load(path) as file:
            return {name: file[name] for name in file.files if name != "key"}
    known = compute()
    if peers.leads:
        with new_file(path) as part, part.open("wb") as file:
            np.savez(file, key=np.asarray(key), **known)
    return known


def _key_of(path: Path) -> str | None:
    """What the file was computed from; None where there is none, or a machine that went down has left it torn."""
    try:
        with path.open("rb") as file, np.load(file) as found:
            return str(found["key"])
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceStage(DatasetStage):
    """A run that learns from pairs once its files are read.

    Attributes:
      loss: of each pair.
      known: what the reference gives the pairs ``train`` and ``held_out``.
    """

    loss: Any
    known: Sums

    def samples(
        self, state: TrainState, batch: Drawn, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Both answers of each pair, which stay together."""
        known = self.known["train"][batch.places]
        groups = [pair_samples(pair, known[number], number) for number, pair in enumerate(batch.rows)]
        learned = float(sum(len(sample.tokens) for group in groups for sample in group))
        return groups, {"tokens": learned}

    def test(self, policy: Decoder) -> Tested | None:
        """Accuracy and margin on the pairs that are held out, and answers to a task's problems."""
        numbers = {}
        if self.held_out:
            gap = sums(self.forward, policy, self.held_out, self.status)
            gap -= self.known["held_out"][: len(self.held_out)]
            if self.loss.average:
                gap /= np.asarray([[len(tokens) for tokens in pair.completions] for pair in self.held_out])
            margin = gap[:, 0] - gap[:, 1]
            numbers = {
                "eval/pairs/accuracy": float(np.mean((np.sign(margin) + 1) / 2)),
                "eval/pairs/margin": float(self.loss.beta * np.mean(margin)),
            }
        answers = () if self.exam is None else self.exam(policy)
        return Tested(numbers, answers) if numbers or answers else None


def sums(forward: Forward, model: Decoder, pairs: Sequence[Ranked], status: Callable[[str], None]) -> np.ndarray:
    """Log-probabilities of the answers, summed over their tokens, nats: float64[n, 2]."""
    samples = [sample for number, pair in enumerate(pairs) for sample in pair_samples(pair, (0.0, 0.0), number)]
    found = scored(forward, model, samples, "logp", lambda text: status(f"comparing: {text}"))
    return np.asarray([np.sum(logp, dtype=np.float64) for logp in found]).reshape(-1, len(SIGNS))


def pair_samples(pair: Ranked, reference: Sequence[float], number: int) -> list[Sample]:
    """The better and the worse answer as the learner sees them; ``number``: what the two have in common."""
    return [
        Sample(
            pair.prompt,
            tokens,
            np.ones(len(tokens), bool),
            {"sign": sign, "ref_logp": float(logp)},
            together=number,
        )
        for tokens, sign, logp in zip(pair.completions, SIGNS, reference, strict=True)
    ]


def groups(run: Preference) -> Groups:
    """What a step learns from."""
    return groups_of(run, len(SIGNS), "pairs of completions of")


def outline(run: Preference, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """What the run computes on its devices: before its first step what the model gives all pairs."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        return pair_samples(Ranked("", prompt, (tokens, tokens), 0.0, ""), (0.0, 0.0), number)

    found = outline_of(run, model, mesh, PairLoss(run.loss), groups(run), samples)
    follows = np.zeros(run.batch.max_tokens - 1, np.int32)
    pairs = range(SCORED_AT_ONCE // len(SIGNS))
    read = [sample for pair in pairs for sample in samples(np.full(1, pair, np.int32), follows, pair)]
    return dataclasses.replace(found, passes=(Pass("reference", found.forward, read, "logp", 0, model=model),))


def resources(run: Preference, peers: Peers, directory: Path) -> Resources:
    """The verifiers' processes."""
    return Resources(run, peers, directory)


def check_pairs(rows: Sequence[Ranked]) -> None:
    """Refuse rankings of more than two."""
    for row in rows:
        if len(row.completions) != len(SIGNS):
            raise InputError(
                f"{row.where} ranks {len(row.completions)} completions, and this loss compares two: take the best and "
                "the worst, or train a RewardModel, which learns from rankings"
            )


def prepare(
    run: Preference, model: Decoder, tokenizer: Any, mesh: Any, resources: Resources, progress: Progress, peers: Peers
) -> PreferenceStage:
    """Read the pairs, or collect them; build what learns and tests.

    Raises:
      InputError: data that the run cannot work with.
    """
    data = read(run, model, tokenizer, mesh, resources, progress, peers)
    check_pairs(data.rows)
    forward, training = programs_of(run, model, mesh, PairLoss(run.loss))
    pairs = ((pair.where, pair_samples(pair, (0.0, 0.0), 0)) for pair in data.rows)
    forward = with_room(forward, pairs, run.learner.microbatch_rows)

    def compute() -> Sums:
        parts = {"train": data.loaded.train, "held_out": data.loaded.held_out}
        return {name: sums(forward, model, pairs, progress.status) for name, pairs in parts.items()}

    made_from = {"weights": weights_digest(model), "compute": forward.compute.dtype, "pairs": data.prints}
    key = json.dumps(made_from, sort_keys=True)  # the pairs are tokens: template and tokenizer are in them
    known = at_start(resources.directory / REFERENCE, key, peers, compute)
    return made(PreferenceStage, run, data, forward, training, "pairs", loss=run.loss, known=known)
