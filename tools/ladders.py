"""What ablate adds to a run, piece by piece: a ladder is a table of rungs, a rung a name and settings that it changes.

To add a ladder, add a value to ``LADDERS``. The number of updates of a batch, learning rate, batch and task are the
configuration's, and the same for all rungs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GroupMean
from jaxrl_llm.algorithms.kl import K3
from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, TokenMean
from jaxrl_llm.algorithms.surrogates import PPOClip
from jaxrl_llm.recipes import RECIPES, Recipe
from jaxrl_llm.rewards.shaping import LengthCycle, StopProperly
from jaxrl_llm.rollout import Branching
from jaxrl_llm.rules import Resets

KL = 0.04
"""Coefficient of the KL where a ladder has one: GRPO's. ProRL's 1e-4 does nothing that so short a run could show."""
REDUCE = "recipe.algorithm.reduce"
ROUTES = "learner.routing_replay"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A run of a ladder.

    Attributes:
      name: for people, and of its folder: rungs whose folders have the same name, in any ladder, are the same run.
      changes: settings by their dotted names, on top of those of the rung that it is added to.
      onto: the name of that rung, which it is compared with too; None for the one before.
      published: what the paper's own ladder reports for it.
    """

    name: str
    changes: Mapping[str, Any]
    onto: str | None = None
    published: float | None = None


GRPO = Recipe("grpo", dataclasses.replace(PRESETS["grpo"], kl=None, kl_coef=0.0))
HIGH_CLIP = Recipe("prorl", dataclasses.replace(PRESETS["prorl"], kl=None, kl_coef=0.0))

OF_MORE = ("ppo", "gigpo", "mt_grpo")
"""Objectives that need a critic, or turns: a small run with verified answers says nothing about them."""


def alone(name: str) -> Recipe:
    """A preset as a recipe, without a KL, which not all have: its filters, shaping and sampling are the ladder's."""
    return Recipe(name, dataclasses.replace(PRESETS[name], kl=None, kl_coef=0.0, kl_in="loss"))


LADDERS: dict[str, tuple[Rung, ...]] = {
    # Every policy objective of the presets against GRPO's; no paper has such a table.
    "objectives": (
        Rung("grpo", {"recipe": alone("grpo")}),
        *(Rung(name, {"recipe": alone(name)}, "grpo") for name in PRESETS if name not in ("grpo", *OF_MORE)),
    ),
    # arXiv 2503.14476, table 1: AIME 2024 with Qwen2.5-32B, one run of each rung. No rung has a KL, as in the paper.
    "dapo": (
        Rung("GRPO", {"recipe": GRPO}, published=30),
        Rung("+ overlong filtering", {"recipe.overlong.drop": True}, published=36),
        Rung("+ clip-higher", {"recipe.algorithm.surrogate": PPOClip(0.2, 0.28)}, published=38),
        # It takes the filter's place, as in the released recipe: filtering would leave out of the loss what it is for.
        Rung("+ soft punishment", {"recipe.overlong.drop": False, "recipe.overlong.share": 0.2}, published=41),
        Rung("+ token mean", {REDUCE: TokenMean()}, published=42),
        Rung("+ dynamic sampling", {"recipe.filter_groups": "accuracy"}, published=50),
    ),
    # arXiv 2505.24864 and the second version's recipes; neither publishes a ladder.
    "prorl": (
        Rung("GRPO, clip 0.4, token mean", {"recipe": HIGH_CLIP}),
        Rung("+ dynamic sampling, clip 0.4", {"recipe.filter_groups": "accuracy"}),
        Rung("+ KL, no resets", {"recipe.algorithm.kl": K3(), "recipe.algorithm.kl_coef": KL}),
        Rung("+ resets", {"recipe.resets": Resets(reference_every=25, with_optimiser=True, snapshots=False)}),
        Rung("+ length cosine", {"recipe.shaping": (StopProperly(), LengthCycle(on=100, off=100))}),
    ),
    # arXiv 2503.20783: means by sequence make wrong answers grow.
    "length": (
        Rung("GRPO", {"recipe": GRPO}),
        Rung("GRPO, token mean", {REDUCE: TokenMean()}),
        Rung("constant", {REDUCE: ConstantLength(None)}, onto="GRPO"),
        Rung("constant, no deviation", {"recipe.algorithm.advantage": GroupMean()}, onto="constant"),
    ),
    # arXiv 2503.14476, figure 2: entropy collapses at 0.2 and stays up at 0.28. 0.4 is ProRL's.
    "clip": (
        Rung("GRPO", {"recipe": GRPO}),
        Rung("clip 0.28", {"recipe.algorithm.surrogate": PPOClip(0.2, 0.28)}),
        Rung("clip 0.4", {"recipe.algorithm.surrogate": PPOClip(0.2, 0.4)}, onto="GRPO"),
    ),
    # arXiv 2507.19849, for a configuration of episodes: half of a group's members branch from the others.
    "arpo": (
        Rung("GRPO", {"recipe": GRPO}),
        Rung("+ branches", {"recipe.branch": Branching()}),
        Rung("+ hard credit", {"recipe.branch.credit": "hard"}),
    ),
    # What routing replay does for ratios by token and by sequence, and what needs none (arXiv 2507.18071, 2512.01374):
    # python tools/ablate.py moe_smoke --ladder routing --rollout.engine.router_bits 4 --learner.minibatches 4
    # --learner.optimiser.learning_rate 1e-3 --evaluation.every 8 --steps 16
    "routing": (
        Rung("GRPO, off", {"recipe": GRPO, ROUTES: "off"}),
        Rung("GRPO, R2", {ROUTES: "R2"}, onto="GRPO, off"),
        Rung("GRPO, R3", {ROUTES: "R3"}, onto="GRPO, off"),
        Rung("GSPO, off", {"recipe": RECIPES["gspo"], ROUTES: "off"}, onto="GRPO, off"),
        Rung("GSPO, R2", {ROUTES: "R2"}, onto="GSPO, off"),
        Rung("GSPO, R3", {ROUTES: "R3"}, onto="GSPO, off"),
        Rung("DPPO, off", {"recipe": Recipe("dppo", PRESETS["dppo_tv"]), ROUTES: "off"}, onto="GRPO, off"),
        Rung("MiniRL, off", {"recipe": RECIPES["minirl"], ROUTES: "off"}, onto="GRPO, off"),
        Rung("TIS, off", {"recipe.algorithm.correction": TruncatedIS()}, onto="GRPO, off"),
    ),
    # What keeps a long run learning, taken out one at a time; the recipe is the configuration's own.
    "prolonged": (
        Rung("resets, clip-higher", {}),
        Rung("no resets", {"recipe.resets": Resets()}),
        Rung("no clip-higher", {"recipe.algorithm.surrogate": PPOClip(0.2, 0.2)}, onto="resets, clip-higher"),
    ),
}
"""By name."""
