"""Reward models: a decoder with a scalar head learns to score answers, or the steps of solutions."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config.texts import RewardModel
from jaxrl_llm.data import Ranked, Stepped, Steps
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.objectives import Objective, Ranking, StepEntropy
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.runs import as_trained
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.dataset import DatasetStage, build_programs, groups, outline_dataset, read_rows_of, resources
from jaxrl_llm.stages.stage import PLACEHOLDER, Outline, sample_to_score, score_samples
from jaxrl_llm.telemetry.progress import Progress

__all__ = ["groups", "outline", "prepare", "resources"]


def reward_samples(row: Ranked | Stepped, number: int) -> list[Sample]:
    """Return a prompt's completions as samples for ``Ranking``, or a solution as one for ``StepEntropy``."""
    if isinstance(row, Ranked):
        return [
            sample_to_score(row.prompt, tokens, {"rank": float(rank), "margin": row.margin}, number, rank == 0)
            for rank, tokens in enumerate(row.completions)
        ]
    size = len(row.tokens) + 1
    mask = np.zeros(size, bool)
    labels = np.zeros(size, np.float32)
    mask[row.ends + 1] = True
    labels[row.ends + 1] = row.labels
    return [Sample(row.prompt, np.append(row.tokens, PLACEHOLDER), mask, arrays={"labels": labels})]


def ranking_metrics(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return accuracy and margin of pairs and the mean reward, averaged over prompts; scores are best answer first."""
    accuracy = []
    margin = []
    for row in scores:
        pairs = [better - worse for place, better in enumerate(row) for worse in row[place + 1 :]]
        accuracy.append(np.mean((np.sign(pairs) + 1) / 2))
        margin.append(np.mean(pairs))
    return {
        "eval/pairs/accuracy": float(np.mean(accuracy)),
        "eval/pairs/margin": float(np.mean(margin)),
        "eval/pairs/reward_mean": float(np.mean([np.mean(row) for row in scores])),
    }


def step_metrics(rows: Sequence[Stepped], values: Sequence[np.ndarray]) -> dict[str, float]:
    """Return ``eval/steps/loss``, nats, and ``eval/steps/accuracy`` at a threshold of one half."""
    at_ends = [row_values[row.ends + 1] for row, row_values in zip(rows, values, strict=True)]
    scores = np.concatenate(at_ends).astype(np.float64)
    labels = np.concatenate([row.labels for row in rows]).astype(np.float64)
    loss = labels * np.logaddexp(0, -scores) + (1 - labels) * np.logaddexp(0, scores)
    right = (scores > 0) == (labels > 0.5)
    return {"eval/steps/loss": float(np.mean(loss)), "eval/steps/accuracy": float(np.mean(right))}


def reward_objective(run: RewardModel) -> Objective:
    """Return the training objective of the model."""
    return StepEntropy() if isinstance(run.data, Steps) else Ranking(run.centre)


def outline(run: RewardModel, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """Outline the run's computation on its devices."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        if isinstance(run.data, Steps):
            end = np.full(1, len(tokens) - 1, np.int32)
            return reward_samples(Stepped("", prompt, tokens, end, np.zeros(1, np.float32), ""), number)
        return reward_samples(Ranked("", prompt, (tokens, tokens), 0.0, ""), number)

    trained = jax.eval_shape(lambda decoder: as_trained(run, decoder), model)
    return outline_dataset(run, trained, mesh, reward_objective(run), samples)


def prepare(
    run: RewardModel,
    model: Decoder | ScalarModel,
    tokenizer: Any,
    mesh: Any,
    scorer: Scorer,
    progress: Progress,
    peers: Peers,
) -> DatasetStage:
    """Read or collect the rows; build training and evaluation. InputError: data that the run cannot use."""
    what = "solutions" if isinstance(run.data, Steps) else "rankings"
    loaded, fields = read_rows_of(run, model, tokenizer, mesh, scorer, progress, peers, what)
    fields["exam"] = None  # what learns gives scores, and no answers
    if run.bootstrap:
        count = len(loaded.train)
        drawn = np.random.default_rng([run.seed, count]).integers(count, size=count)
        note = f"{count:,} rows to learn from are drawn by seed {run.seed}, {len(set(drawn.tolist())):,} different ones"
        fields["rows"] = tuple(loaded.train[place] for place in drawn)
        fields["notes"].insert(-1, f"bootstrap: {note}")
    rows = ((row.where, reward_samples(row, 0)) for row in (*fields["rows"], *loaded.held_out))
    forward, training = build_programs(run, model, mesh, reward_objective(run), rows)

    def numbers(policy: ScalarModel, rows: Sequence[Any]) -> dict[str, float]:
        samples = [sample for number, row in enumerate(rows) for sample in reward_samples(row, number)]
        outputs = score_samples(forward, policy, samples, "values", lambda text: progress.status(f"evaluating: {text}"))
        if isinstance(run.data, Steps):
            return step_metrics(rows, outputs)
        scores = iter([float(values[-1]) for values in outputs])
        return ranking_metrics([[next(scores) for _ in row.completions] for row in rows])

    return DatasetStage(
        forward=forward,
        training=training,
        samples_of=lambda row, place, number: reward_samples(row, number),
        numbers=numbers,
        learned=lambda sample: len(sample.tokens) - 1,  # all tokens: the score is read after the last one
        **fields,
    )
