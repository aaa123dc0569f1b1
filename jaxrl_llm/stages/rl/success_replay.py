"""The carryover of stored successes between phases. ``rollout.replay`` stores and replays them."""

import dataclasses
from typing import Self

from jaxrl_llm import config as configs
from jaxrl_llm.rollout.groups import Carryover
from jaxrl_llm.rollout.replay import Store, no_longer_than
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.stages.rl.phase_carryover import going_together, same_task


@dataclasses.dataclass(frozen=True)
class SuccessReplay(Ingredient):
    """The stored successes of a run; a run without replay keeps those of an earlier phase for a later one."""

    run: configs.Run
    name = "replay"

    @classmethod
    def of(cls, run: configs.Run) -> Self:
        """See ``Ingredient``."""
        return cls(run)

    def leaves(self, left: Carryover, following: configs.Run) -> Carryover:
        """Keep the successes that are also right in the next phase and fit into its limits."""
        return dataclasses.replace(left, successes=successes_left(left.successes, self.run, following))


def successes_left(store: Store, one: configs.Run, other: configs.Run) -> Store:
    """Return the stored successes that are also right in the next phase and fit into its limits."""
    masks = one.learner.keep_sampling_mask == other.learner.keep_sampling_mask
    if not masks or not same_rewards(one, other):
        return {}
    limits = configs.limits_of(configs.parts_of_task(other.task), other.rollout.max_new_tokens)
    names = {old.label: new.label for old, new in going_together(one, other) if same_task(old, new)}
    return no_longer_than(store, {old: limits[new] for old, new in names.items()}, names)


def same_rewards(one: configs.Run, other: configs.Run) -> bool:
    """Whether both runs score all completions in the same way, including the penalty of long ones."""
    return one.scoring == other.scoring and configs.rewards(one) == configs.rewards(other)
