"""Preference training: the model learns which of two answers is better, or which answers are good."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.preference import KTO
from jaxrl_llm.config.texts import Preference
from jaxrl_llm.data import Judged, Ranked, Unpaired
from jaxrl_llm.errors import require
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.learner.objectives import UNRELATED, PairLoss, UnpairedLoss
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.stages.dataset import DatasetStage, build_programs, groups, outline_dataset, read_rows_of, resources
from jaxrl_llm.stages.stage import SCORING_CHUNK, Outline, Pass, score_samples
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.telemetry.progress import Progress

__all__ = ["groups", "outline", "prepare", "resources"]

REFERENCE = "reference.npz"
"""A file in the run's directory: the initial log-probabilities of every answer."""
SIGNS = (1.0, -1.0)
"""The sign of a pair's better and of its worse answer."""


Sums = dict[str, np.ndarray]
"""Log-probabilities of both answers of each row, summed over their tokens: nats, float64[n, 2] by the data's part."""


def at_start(path: Path, key: str, peers: Peers, compute: Callable[[], Sums]) -> Sums:
    """Return the initial model's log-probabilities of the pairs, computed once and kept in the run's directory.

    Args:
      path: of the file.
      key: of all its inputs; a file with another key is computed anew.
      peers: either all of them compute or none; the first one writes.
    """

    def its_key() -> str | None:
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                return str(arrays["key"])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None  # missing, or torn by a crash

    if peers.first(its_key) == key:
        with np.load(path) as file:
            return {name: file[name] for name in file.files if name != "key"}
    sums = compute()
    if peers.leads:
        with new_file(path) as part, part.open("wb") as file:
            np.savez(file, key=np.asarray(key), **sums)  # ty: ignore[invalid-argument-type]
    return sums


def paired_metrics(loss: Any, pairs: Sequence[Ranked], logp: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return accuracy and margin of pairs from the summed log-probabilities of policy and reference, float64[n, 2]."""
    gap = logp - reference
    if loss.average:
        gap = gap / np.asarray([[len(tokens) for tokens in pair.completions] for pair in pairs])
    value = np.asarray(loss.value(np.asarray(gap, np.float32)), np.float64)
    margin = value[:, 0] - value[:, 1]
    return {
        "eval/pairs/accuracy": float(np.mean((np.sign(margin) + 1) / 2)),
        "eval/pairs/margin": float(loss.beta * np.mean(margin)),
    }


def unpaired_metrics(loss: Any, rows: Sequence[Judged], logp: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return the share of all pairs of a good and a bad answer that the rewards order, and the margin of their means;
    NaN without good or without bad answers. Arguments as in ``paired_metrics``.
    """
    gap = (logp - reference)[:, 0]
    good = np.asarray([row.good for row in rows])
    margins = gap[good][:, None] - gap[~good][None, :]
    return {
        "eval/pairs/accuracy": float(np.mean((np.sign(margins) + 1) / 2)) if margins.size else np.nan,
        "eval/pairs/margin": float(loss.beta * np.mean(margins)) if margins.size else np.nan,
    }


def sum_logprobs(
    forward: Forward,
    model: Decoder,
    rows: Sequence[Ranked | Judged],
    status: Callable[[str], None],
    others: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """Return log-probabilities of the two answers of each row, summed over their tokens, nats: float64[n, 2].
    ``others``: of answers with labels, an answer to another prompt for each.
    """
    groups = [row_samples(row, (0.0, 0.0), place, others[place : place + 1]) for place, row in enumerate(rows)]
    samples = [sample for group in groups for sample in group]
    logprobs = score_samples(forward, model, samples, "logp", lambda text: status(f"comparing: {text}"))
    return np.asarray([np.sum(logp, dtype=np.float64) for logp in logprobs]).reshape(-1, len(SIGNS))


def row_samples(
    row: Ranked | Judged, reference: Sequence[float], number: int, other: Sequence[np.ndarray] = ()
) -> list[Sample]:
    """Return the two samples of a row: of a pair, or of an answer with a label and the ``other`` one's answer."""
    if isinstance(row, Ranked):
        return pair_samples(row, reference, number)
    return unpaired_samples(row, other[0], reference)


def pair_samples(pair: Ranked, reference: Sequence[float], number: int) -> list[Sample]:
    """Return the samples of the better and the worse answer; ``number`` marks them as one pair."""
    return [
        Sample(
            pair.prompt, tokens, np.ones(len(tokens), bool), {"sign": sign, "ref_logp": float(logp)}, together=number
        )
        for tokens, sign, logp in zip(pair.completions, SIGNS, reference, strict=True)
    ]


def unpaired_samples(row: Judged, unrelated: np.ndarray, reference: Sequence[float]) -> list[Sample]:
    """Return the samples of an answer and, after the same prompt, of an answer to another one."""
    answers = ((row.tokens, float(row.good)), (unrelated, UNRELATED))
    return [
        Sample(row.prompt, tokens, np.ones(len(tokens), bool), {"label": label, "ref_logp": float(logp)})
        for (tokens, label), logp in zip(answers, reference, strict=True)
    ]


def unrelated_answers(rows: Sequence[Judged], max_tokens: int) -> list[np.ndarray]:
    """Return an answer to another prompt for each row: that of the next row with one, cut to ``max_tokens`` with the
    row's prompt. InputError: all rows have one prompt.
    """
    require(
        len({row.id for row in rows}) != 1,
        f"{rows[0].where if rows else ''}: all rows answer one prompt, and KTO compares with answers to other prompts: "
        "add rows of another",
    )
    answers: list[np.ndarray] = []
    at = 1
    for place, row in enumerate(rows):
        at = max(at, place + 1)
        while rows[at % len(rows)].id == row.id:
            at += 1
        answers.append(rows[at % len(rows)].tokens[: max_tokens - len(row.prompt)])
    return answers


def balance_note(rows: Sequence[Judged], loss: KTO) -> str:
    """Return what is wrong with the weights of good and bad answers, by the advice of KTO's paper; empty if nothing."""
    good = sum(row.good for row in rows)
    bad = len(rows) - good
    weighed = good * loss.desirable, bad * loss.undesirable
    if not good or not bad or weighed[1] <= weighed[0] <= 4 / 3 * weighed[1]:
        return ""
    least = loss.undesirable * bad / good
    return (
        f"{good:,} good answers and {bad:,} bad ones: KTO's paper advises loss.desirable from {least:.3g} to "
        f"{4 / 3 * least:.3g} for them, now {loss.desirable:.3g}"
    )


def outline(run: Preference, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """Outline the run's computation, including the log-probabilities of all pairs before its first step."""

    unpaired = isinstance(run.data, Unpaired)

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        pair = Ranked("", prompt, (tokens, tokens), 0.0, "")
        return row_samples(Judged("", prompt, tokens, True, "") if unpaired else pair, (0.0, 0.0), number, [tokens])

    planned = outline_dataset(run, model, mesh, preference_objective(run), samples)
    if not needs_reference(run):
        return planned
    follows = np.zeros(run.batch.max_tokens - 1, np.int32)
    pairs = range(SCORING_CHUNK // len(SIGNS))
    samples_read = [sample for pair in pairs for sample in samples(np.full(1, pair, np.int32), follows, pair)]
    return dataclasses.replace(
        planned, passes=(Pass("reference", planned.forward, samples_read, "logp", 0, model=model),)
    )


def preference_objective(run: Preference) -> PairLoss | UnpairedLoss:
    """Return the objective of a run's loss."""
    return UnpairedLoss(run.loss) if isinstance(run.loss, KTO) else PairLoss(run.loss)


def needs_reference(run: Preference) -> bool:
    """Whether the loss reads the initial model's log-probabilities."""
    return isinstance(run.loss, KTO) or run.loss.to_reference


def prepare(
    run: Preference, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> DatasetStage:
    """Read or collect the rows; build training and evaluation. InputError: data that the run cannot use."""
    unpaired = isinstance(run.data, Unpaired)
    what = "answers" if unpaired else "pairs"
    loaded, fields = read_rows_of(run, model, tokenizer, mesh, scorer, progress, peers, what)
    parts = {"train": loaded.train, "held_out": loaded.held_out}
    for row in () if unpaired else (*loaded.train, *loaded.held_out):
        require(
            len(row.completions) == len(SIGNS),
            f"{row.where} ranks {len(row.completions)} completions, and this loss compares two: take the best and "
            "the worst, or train a RewardModel, which learns from rankings",
        )
    # Held-out answers are compared with each other alone: a single token stands for the other prompt's answer.
    others: dict[str, list[np.ndarray]] = {name: [] for name in parts}
    if isinstance(run.loss, KTO) and (note := balance_note(loaded.train, run.loss)):
        fields["notes"].append(note)
    if unpaired:
        others["train"] = unrelated_answers(loaded.train, run.batch.max_tokens)
        others["held_out"] = [row.tokens[:1] for row in loaded.held_out]
    groups = (
        (row.where, row_samples(row, (0.0, 0.0), 0, others[part][place : place + 1]))
        for part, rows in parts.items()
        for place, row in enumerate(rows)
    )
    forward, training = build_programs(run, model, mesh, preference_objective(run), groups)

    def compute() -> Sums:
        return {name: sum_logprobs(forward, model, rows, progress.status, others[name]) for name, rows in parts.items()}

    made_from = {"weights": weights_digest(model), "compute": forward.compute.dtype, what: fields["problems"]}
    key = json.dumps(made_from, sort_keys=True)  # the rows are tokens: template and tokenizer are in them
    if needs_reference(run):
        reference_sums = at_start(scorer.folder / REFERENCE, key, peers, compute)
    else:
        reference_sums = {name: np.zeros((len(rows), len(SIGNS))) for name, rows in parts.items()}
    metrics = unpaired_metrics if unpaired else paired_metrics

    def numbers(policy: Decoder, rows: Sequence[Any]) -> dict[str, float]:
        logp = sum_logprobs(forward, policy, rows, progress.status, others["held_out"])
        return metrics(run.loss, rows, logp, reference_sums["held_out"][: len(rows)])

    return DatasetStage(
        forward=forward,
        training=training,
        samples_of=lambda row, place, number: row_samples(
            row, reference_sums["train"][place], number, others["train"][place : place + 1]
        ),
        numbers=numbers,
        **fields,
    )
