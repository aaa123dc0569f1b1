"""What a run is: frozen dataclasses, checked in one place, saved as JSON that loads again."""

from jaxrl_llm.config.files import config_folder, config_names, load_config, with_recipe
from jaxrl_llm.config.notes import notes
from jaxrl_llm.config.run import Evaluation, Output, Run, Scoring, resolved
from jaxrl_llm.config.saved import FREE_TO_CHANGE, changes, flat, from_json, load_json, to_json
from jaxrl_llm.config.validation import MAX_SEED, require, rewards, validate, validate_on_devices

__all__ = [
    "FREE_TO_CHANGE",
    "MAX_SEED",
    "Evaluation",
    "Output",
    "Run",
    "Scoring",
    "changes",
    "config_folder",
    "config_names",
    "flat",
    "from_json",
    "load_config",
    "load_json",
    "notes",
    "require",
    "resolved",
    "rewards",
    "to_json",
    "validate",
    "validate_on_devices",
    "with_recipe",
]
