"""What is refused of how a run learns: numbers of the learner, of optimisers, of adapters and of a critic."""

import math

from jaxrl_llm.errors import require
from jaxrl_llm.learner.settings import MUON_RMS, Learner, Optimiser
from jaxrl_llm.models.config import ADAPTABLE, Lora
from jaxrl_llm.recipes import Recipe

LEAST_STEP = 2.0**-13
"""Half the distance between bfloat16's numbers from 1/32 to 1/16: smaller steps leave weights of that size where they
are. Most weights of large models are smaller (their deviation is about 0.02), most of small ones larger (SmolLM2-135M:
0.19)."""


def check_learner(learner: Learner, groups: tuple[str, int], longest: int) -> None:
    """Refuse what no learner can do.

    Args:
      learner: the settings.
      groups: that each step learns from, which stay whole: the field that says it, and how many.
      longest: tokens of a prompt with its completion.

    Raises:
      InputError: names field, value and remedy.
    """
    require(
        learner.minibatches <= groups[1],
        f"learner.minibatches {learner.minibatches} exceeds {groups[0]} {groups[1]}: groups stay whole",
    )
    require(
        learner.remat in ("none", "dots", "full"), f"learner.remat {learner.remat!r} is unknown: none, dots or full"
    )
    require(
        learner.attention in ("auto", "xla", "splash", "cudnn"),
        f"learner.attention {learner.attention!r} is unknown: auto, xla, splash or cudnn",
    )
    for name, value in {"learner.dtype": learner.dtype, "learner.compute_dtype": learner.compute_dtype}.items():
        require(value in ("float32", "bfloat16"), f"{name} {value!r} is unknown: float32 or bfloat16")
    require(
        learner.target_kl is None or learner.target_kl > 0,
        f"learner.target_kl must be above 0, or None to learn on, got {learner.target_kl}",
    )
    _check_lora(learner.lora)
    _check_rounding(
        "learner.optimiser",
        learner.optimiser,
        "float32" if learner.lora.rank else learner.dtype,
        "learner.lora.rank above 0",
    )
    require(
        learner.row_tokens == 0 or learner.row_tokens >= longest,
        f"learner.row_tokens {learner.row_tokens} cannot hold a prompt with its completion: set it to at "
        f"least {longest}, or 0 to choose",
    )
    check_optimiser("learner.optimiser", learner.optimiser)


def check_optimiser(field: str, optimiser: Optimiser) -> None:
    """Refuse an optimiser's numbers; ``field`` is where it stands in the configuration."""
    rules = {
        "learning_rate": (0 < optimiser.learning_rate < math.inf, "above 0, and finite"),
        "warmup": (optimiser.warmup >= 0, "at least 0"),
        "name": (optimiser.name in ("adamw", "adafactor", "muon"), "adamw, adafactor or muon"),
        "schedule": (optimiser.schedule in ("constant", "cosine", "linear"), "constant, cosine or linear"),
        "momentum_dtype": (optimiser.momentum_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
        "b1": (0 <= optimiser.b1 < 1, "from 0 to below 1"),
        "b2": (0 <= optimiser.b2 < 1, "from 0 to below 1"),
        "eps": (0 < optimiser.eps < math.inf, "above 0, and finite"),
        "weight_decay": (0 <= optimiser.weight_decay < math.inf, "at least 0, and finite"),
        "clip_norm": (0 <= optimiser.clip_norm < math.inf, "at least 0 (0 does not clip), and finite"),
        "decay": (
            optimiser.decay == (0, 0)
            if optimiser.schedule == "constant"
            else optimiser.decay[1] > max(optimiser.decay[0], optimiser.warmup),
            f"two counts of updates, the second above the first and above warmup ({optimiser.warmup}), between which "
            "schedule cosine or linear lowers the rate to 0; or 0 0 with schedule constant",
        ),
    }
    for name, (fine, rule) in rules.items():
        require(fine, f"{field}.{name} must be {rule}, got {getattr(optimiser, name)}")


def _check_lora(lora: Lora) -> None:
    require(lora.rank >= 0, f"learner.lora.rank must be at least 0 (0 trains the whole model), got {lora.rank}")
    require(lora.alpha > 0, f"learner.lora.alpha must be above 0, got {lora.alpha}")
    known = bool(lora.targets) and set(lora.targets) <= set(ADAPTABLE) and len(set(lora.targets)) == len(lora.targets)
    require(
        known,
        f"learner.lora.targets must be some of {', '.join(ADAPTABLE)}, each once; got "
        f"{', '.join(lora.targets) or 'none'}",
    )


def _check_rounding(field: str, optimiser: Optimiser, dtype: str, adapter: str) -> None:
    """Refuse bfloat16 weights whose steps at this rate are rounded away; ``adapter``: what would spare them."""
    # AdamW and Adafactor move a weight by about the rate at most, Muon by a fifth of it.
    step = optimiser.learning_rate * (MUON_RMS if optimiser.name == "muon" else 1.0)
    require(
        dtype != "bfloat16" or step >= LEAST_STEP,
        f"learner.dtype 'bfloat16' rounds away steps of {step:g} ({field}.learning_rate "
        f"{optimiser.learning_rate:g}): set learner.dtype float32 and learner.compute_dtype bfloat16, or {adapter}",
    )


def check_critic(recipe: Recipe, learner: Learner) -> None:
    """Refuse an estimator without the critic that it reads, a critic that nothing reads, and a critic's numbers.

    Raises:
      InputError: names field, value and remedy.
    """
    critic = recipe.critic
    estimator = recipe.algorithm.advantage
    name = type(getattr(estimator, "estimator", estimator)).__name__
    reads = "values" in estimator.needs
    require(
        critic is not None or not reads,
        f"recipe.algorithm.advantage {name} needs values, and recipe.critic is None: set recipe.critic Critic(), or "
        "take an estimator of outcome rewards, such as GroupZScore",
    )
    if critic is None:
        return
    require(
        reads,
        f"recipe.critic has nothing to do, since recipe.algorithm.advantage {name} reads no values: take GAE(), or set "
        "recipe.critic None",
    )
    require(critic.clip is None or critic.clip > 0, f"recipe.critic.clip must be above 0, or None, got {critic.clip}")
    for name in ("warmup", "epochs"):
        value = getattr(critic, name)
        require(value >= 0, f"recipe.critic.{name} must be at least 0, got {value}")
    require(
        not critic.adapter or learner.lora.rank > 0,
        "recipe.critic.adapter True adapts the policy's frozen model, and the policy is trained whole: set "
        "learner.lora.rank above 0, or recipe.critic.adapter False",
    )
    require(
        not critic.adapter or critic.model is None,
        f"recipe.critic.adapter True begins as the policy's frozen model, not as recipe.critic.model {critic.model}: "
        "set recipe.critic.model None, or recipe.critic.adapter False",
    )
    check_optimiser("recipe.critic.optimiser", critic.optimiser)
    _check_rounding(
        "recipe.critic.optimiser",
        critic.optimiser,
        "float32" if critic.adapter else learner.dtype,
        "recipe.critic.adapter True with learner.lora.rank above 0",
    )
