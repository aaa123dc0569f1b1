"""What a run is: frozen dataclasses, checked in one place, saved as JSON that loads again."""

from jaxrl_llm.config.answers import check_answers, refuse_readers, verifies
from jaxrl_llm.config.files import config_folder, config_names, load_config, with_recipe
from jaxrl_llm.config.notes import notes
from jaxrl_llm.config.run import Evaluation, Output, Run, Scoring, dated, resolved
from jaxrl_llm.config.saved import FREE_TO_CHANGE, changes, flat, from_json, load_json, reloads, to_json
from jaxrl_llm.config.validation import MAX_SEED, require, rewards, validate, validate_on_devices, validate_on_model

__all__ = [
    "FREE_TO_CHANGE",
    "MAX_SEED",
    "Evaluation",
    "Output",
    "Run",
    "Scoring",
    "changes",
    "check_answers",
    "config_folder",
    "config_names",
    "dated",
    "flat",
    "from_json",
    "load_config",
    "load_json",
    "notes",
    "refuse_readers",
    "require",
    "reloads",
    "resolved",
    "rewards",
    "to_json",
    "validate",
    "validate_on_devices",
    "validate_on_model",
    "verifies",
    "with_recipe",
]
