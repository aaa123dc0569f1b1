"""New locations of classes that older config.json files name elsewhere: an alias table, old to new."""

MOVED: dict[str, str] = {
    "jaxrl_llm.rewards.by_task:OfTasks": "jaxrl_llm.rewards.bounds:TaskReward",
    "jaxrl_llm.rewards.models": "jaxrl_llm.rewards.functions",
    "jaxrl_llm.rewards.refusals": "jaxrl_llm.rewards.shaping",
    "jaxrl_llm.rewards.steps": "jaxrl_llm.rewards.functions",
    "jaxrl_llm.tasks.collected": "jaxrl_llm.data.datasets",
    "jaxrl_llm.tasks.texts": "jaxrl_llm.data.datasets",
}
"""New names by old ones: modules (``package.module``) that keep their class names, and classes
(``package.module:Class``)."""
