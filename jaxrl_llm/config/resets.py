"""What is refused of resets: of the reference, of the optimiser, and of how far the reference goes."""

import math

from jaxrl_llm.config.run import Run
from jaxrl_llm.errors import require


def check_resets(run: Run) -> None:
    """Refuse numbers out of their range, and resets that have nothing to act on or to act with.

    Raises:
      InputError: names field, value and remedy.
    """
    resets = run.recipe.resets
    ranges = {
        "reference_every": (resets.reference_every >= 0, "at least 0"),
        "on_stall": (resets.on_stall >= 0, "at least 0"),
        "optimiser_every": (resets.optimiser_every >= 0, "at least 0"),
        "on_kl": (0 <= resets.on_kl < math.inf, "at least 0 (0 is off), and finite"),
        "on_kl_share": (0 <= resets.on_kl_share < 1, "from 0 (off) to below 1"),
        "on_kl_jump": (resets.on_kl_jump == 0 or 1 < resets.on_kl_jump < math.inf, "above 1, or 0 for off"),
        "kl_window": (resets.kl_window >= 1, "at least 1"),
        "mix": (0 < resets.mix <= 1, "above 0 and at most 1"),
        "ema": (0 <= resets.ema < 1, "from 0 (off) to below 1"),
    }
    for name, (fine, rule) in ranges.items():
        require(fine, f"recipe.resets.{name} must be {rule}, got {getattr(resets, name)}")
    _check_reference(run)
    require(
        not resets.on_stall or run.evaluation.every > 0,
        f"recipe.resets.on_stall {resets.on_stall} waits for evaluations: set evaluation.every above 0, or "
        "recipe.resets.on_stall 0",
    )


def _check_reference(run: Run) -> None:
    """Refuse resets of a reference that is not kept, and a mixture of what cannot be mixed."""
    resets = run.recipe.resets
    algorithm = run.recipe.algorithm
    kept = algorithm.needs_reference or run.output.monitor_kl
    for name in (*resets.of_reference, *["ema"] * bool(resets.ema)):
        value = getattr(resets, name)
        require(
            kept,
            f"recipe.resets.{name} {value} has no reference to reset: set recipe.algorithm.kl_coef above 0, "
            f"output.monitor_kl True, or recipe.resets.{name} 0",
        )
    require(
        not resets.on_kl_share or (algorithm.needs_reference and algorithm.kl_in == "loss"),
        f"recipe.resets.on_kl_share {resets.on_kl_share} has no share in the loss to compare: set "
        "recipe.algorithm.kl_coef above 0 and kl_in 'loss', or take recipe.resets.on_kl",
    )
    require(
        resets.mix == 1 or bool(resets.of_reference),
        f"recipe.resets.mix {resets.mix} has no reset to act in: set recipe.resets.reference_every, or "
        "recipe.resets.mix 1",
    )
    for name, off in (("mix", 1.0), ("ema", 0.0)):
        value = getattr(resets, name)
        require(
            value == off or not run.learner.lora.rank,
            f"recipe.resets.{name} {value} would mix the factors of two adapters, which is not the mixture of their "
            f"products: set recipe.resets.{name} {off:g}, or learner.lora.rank 0",
        )
    require(
        not resets.ema or run.learner.dtype == "float32",
        f"recipe.resets.ema {resets.ema} moves a bfloat16 reference by less than its rounding: set learner.dtype "
        "float32, or recipe.resets.reference_every in place of recipe.resets.ema",
    )
