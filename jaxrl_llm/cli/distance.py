"""``jaxrl-llm eval --kl_to``: the KL of a policy to another model, on the policy's answers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy
from jaxrl_llm.errors import require
from jaxrl_llm.runs.load import find_run, load_model


@dataclasses.dataclass(frozen=True)
class Distance:
    """Estimates of KL(tested || other) of the next token, nats, on tokens that the tested model sampled.

    ``k1``, log p - log q, and ``k3``, q/p - 1 - log(q/p), are both unbiased, since the tokens are sampled from p at the
    temperature at which p and q are taken; k3 is never negative, and varies less where the two are near.

    Attributes:
      to: the other's name, as it was given.
      step: of the other's run; None for a model.
      task: the label of the task with these answers.
      sums: float64[n, 3] for each completion: its tokens, and the sums over them of k1 and of k3.
    """

    to: str
    step: int | None
    task: str
    sums: np.ndarray

    def metrics(self) -> dict[str, float]:
        """Return ``eval/<task>/kl_k1`` and ``kl_k3``: means over all tokens."""
        tokens, k1, k3 = self.sums.sum(axis=0)
        return {f"eval/{self.task}/kl_k1": float(k1 / tokens), f"eval/{self.task}/kl_k3": float(k3 / tokens)}

    def rows(self) -> list[dict[str, float]]:
        """Return the means of k1 and k3 over the tokens of each completion, for a file."""
        return [{"kl_k1": float(k1 / tokens), "kl_k3": float(k3 / tokens)} for tokens, k1, k3 in self.sums]

    def lines(self) -> list[str]:
        """Return two lines of a table for people."""
        k1, k3 = self.metrics().values()
        step = "" if self.step is None else f", step {self.step}"
        of = f"nats a token to {self.to}{step}"
        return [f"  {'KL (k1)':<16}{k1:8.5f}  {of}", f"  {'KL (k3)':<16}{k3:8.5f}"]


def check_distance(to: str | None, options: Any) -> None:
    """Refuse sampling settings that would bias the estimates, and a model that does not exist.

    Raises:
      InputError: names the flag and the remedy.
    """
    if to is None:
        return
    drawn = "--kl_to needs answers drawn from the model as it is, and"
    require(options.temperature > 0, f"{drawn} --temperature is 0: set --temperature 1")
    require(options.top_p >= 1, f"{drawn} --top_p is {options.top_p:g}: set --top_p 1")
    find_run(to)


def measure(
    to: str,
    policy: Policy,
    prompts: Any,
    settings: configs.Run,
    options: Any,
    found: Sequence[Any],
    status: Callable[[str], None],
) -> tuple[Distance, ...]:
    """Measure the KL of a policy to the model ``to``, on its fresh answers to each task.

    Both are read by the learner's own forward pass at the sampling temperature: a model is at distance 0 from itself,
    bit for bit.

    Raises:
      InputError: the other is not a language model, has other tokens, or was made for shorter texts.
    """
    from jaxrl_llm.learner import Sample
    from jaxrl_llm.models.heads import ScalarModel
    from jaxrl_llm.stages.stage import run_by, scored

    status(f"loading {to}")
    other, tokenizer = load_model(to, settings.learner.dtype, policy.mesh)
    trained = find_run(to)
    require(not isinstance(other, ScalarModel), f"--kl_to {to} is a reward model: give a language model")
    alike = tokenizer is None or tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    vocab = policy.model.config.vocab_size
    require(
        alike and other.config.vocab_size == vocab,
        f"--kl_to {to} has other tokens than {policy.name}: no KL between the two is defined",
    )
    samples = [
        Sample(np.asarray(prompts[problem], np.int32), completion.tokens, completion.mask)
        for one in found
        for problem, row in zip(one.problems, one.completions, strict=True)
        for completion in row
    ]
    length = max(len(sample.prompt) for sample in samples) + options.max_new_tokens
    positions = other.config.attention.rope.max_positions
    require(length <= positions, f"--kl_to {to} was made for {positions} positions, and {length} are needed")
    shape = policy.mesh, length, options.max_new_tokens, options.temperature
    logps = []
    for model in (policy.model, other):
        forward = run_by(settings.learner, model.config, *shape)
        logps.append(scored(forward, model, samples, "logp", status))
    sums = []
    for sample, own, its in zip(samples, *logps, strict=True):
        away = (its.astype(np.float64) - own)[sample.mask]
        sums.append((float(len(away)), float(-away.sum()), float((np.expm1(away) - away).sum())))
    ends = np.cumsum([len(one.problems) * options.samples for one in found])[:-1]
    of_tasks = zip(found, np.split(np.asarray(sums), ends), strict=True)
    return tuple(Distance(to, trained.step if trained else None, one.task, own) for one, own in of_tasks)
