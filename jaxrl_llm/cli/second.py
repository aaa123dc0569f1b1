"""``jaxrl-llm eval`` with a second model: a reward model that chooses answers (``--rerank``), or one to which the KL is
measured (``--kl_to``).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, as_asked
from jaxrl_llm.errors import require
from jaxrl_llm.runs.load import find_run, load_model
from jaxrl_llm.stages.taught import DEFAULT_SEPARATOR, Reader, taught
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.rollout.evaluate import Evaluated


def check_rerank(options: Any) -> None:
    """Refuse options without a choice to make, or a reward model that learned to score something else.

    Raises:
      InputError: names the flag, its value and the remedy.
    """
    by_steps = options.rerank_by != "score"
    if options.rerank is None:
        for flag, given in (("rerank_by", by_steps), ("give_up_after", options.give_up_after)):
            needs = f"--{flag} {getattr(options, flag)} needs a process reward model: add --rerank RUN_OR_MODEL"
            require(not given, needs)
        return
    require(
        options.samples >= 2,
        f"--rerank chooses one of several answers, and --samples is {options.samples}: set it to at least 2",
    )
    require(
        by_steps or not options.give_up_after,
        f"--give_up_after {options.give_up_after} reads the scores of steps: set --rerank_by product, minimum or last",
    )
    reader_of(options).check(options.rerank)


def reader_of(options: Any) -> Reader:
    """Return the role of the reward model under ``--rerank_by``."""
    if options.rerank_by == "score":
        return Reader("--rerank", "ranking", "set --rerank_by product, minimum or last")
    return Reader("--rerank", "steps", "set --rerank_by score")


@dataclasses.dataclass(frozen=True)
class Reranker:
    """A reward model that chooses among answers, and that may end hopeless ones early.

    Attributes:
      model: scores answers on the devices.
      by: "score", "product", "minimum" or "last".
      give_up_after: consecutive steps with falling scores that end an answer; 0 never.
      separator: ends a step.
      tokenizer: the policy's.
    """

    model: Any
    by: str
    give_up_after: int
    separator: str
    tokenizer: Any

    def watch(self, problems: Sequence[Problem], samples: int) -> Any:
        """Return a watcher that ends answers early, ``samples`` per problem; None without ``give_up_after``."""
        from jaxrl_llm.stages.rl.step_rewards import FallingSteps

        if not self.give_up_after:
            return None
        asked = [problem for problem in problems for _ in range(samples)]
        return FallingSteps(self.model, asked, self.separator, self.give_up_after, self.tokenizer)

    def choose(self, found: "Evaluated") -> "Evaluated":
        """Return the evaluation with its answers reranked."""
        from jaxrl_llm.rollout.evaluate import reranked
        from jaxrl_llm.stages.rl.step_rewards import solution_scores

        items = [(problem, c) for problem, row in zip(found.problems, found.completions, strict=True) for c in row]
        scores = solution_scores(self.model, items, self.by, self.separator, self.tokenizer)
        scores = scores.reshape(found.correct.shape)
        weights = 1 / (1 + np.exp(-scores)) if self.by == "score" else scores
        return reranked(found, scores, weights)


def reranker(
    options: Any, policy: Policy, prompts: Any, longest: int, settings: configs.Run, status: Callable[[str], None]
) -> Reranker | None:
    """Return the reranker; None without ``--rerank``. ``longest``: most tokens of a prompt.

    Raises:
      InputError: the reward model does not exist, is a language model, or cannot read the model's texts.
    """
    if options.rerank is None:
        return None
    from jaxrl_llm.stages.rl.device_model import load_judge

    asked = as_asked(policy.name, settings, configs.Scoring(()), longest, options.max_new_tokens)
    known_prompts = {options.task.label: prompts}
    model = load_judge(asked, options.rerank, "--rerank", policy.mesh, policy.tokenizer, known_prompts, status)
    known = taught(options.rerank)
    separator = (known and known.separator) or DEFAULT_SEPARATOR
    return Reranker(model, options.rerank_by, options.give_up_after, separator, policy.tokenizer)


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
    positions = other.config.attention.max_positions
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
    return tuple(Distance(to, trained and trained.step, one.task, own) for one, own in of_tasks)
