"""What a run is: frozen dataclasses, checked in one place, saved as JSON that loads again."""

from jaxrl_llm.config.answers import check_answers, refuse_readers, verifies
from jaxrl_llm.config.check_texts import check_start
from jaxrl_llm.config.code import own_modules
from jaxrl_llm.config.field_types import check_types
from jaxrl_llm.config.files import (
    Found,
    config_folder,
    config_names,
    find_config,
    find_start,
    load_config,
    with_recipe,
)
from jaxrl_llm.config.kinds import KINDS, validate
from jaxrl_llm.config.mixture import Mixture, Part, holds_out, limits_of, parts_of_task, tasks_in
from jaxrl_llm.config.notes import notes
from jaxrl_llm.config.numbers import MAX_SEED, check_seed
from jaxrl_llm.config.origin import Origin, Pin, Start, located, pinned, split_step
from jaxrl_llm.config.parts import dated, day_of
from jaxrl_llm.config.phases import in_phase, phases_of, rules_of_run, shared_by_phases, unreached
from jaxrl_llm.config.run import Configuration, Evaluation, Output, Run, Scoring, keeps_reference, resolved
from jaxrl_llm.config.saved import (
    FREE_TO_CHANGE,
    Unsaveable,
    as_read,
    changes,
    evaluation_key,
    flat,
    from_json,
    is_run,
    is_whole,
    load_json,
    read,
    rebuilt,
    reloads,
    to_json,
    whole,
)
from jaxrl_llm.config.scored import JUDGED, asked, bases, of_steps, refusals, watched
from jaxrl_llm.config.texts import Answering, BatchSize, Preference, RewardModel, Supervised, wording
from jaxrl_llm.config.validation import (
    longest_row,
    require,
    rewards,
    validate_on_devices,
    validate_on_model,
)

__all__ = [
    "FREE_TO_CHANGE",
    "JUDGED",
    "KINDS",
    "MAX_SEED",
    "Answering",
    "BatchSize",
    "Mixture",
    "Part",
    "Pin",
    "Preference",
    "RewardModel",
    "Supervised",
    "Configuration",
    "Evaluation",
    "Found",
    "Origin",
    "Output",
    "Run",
    "Scoring",
    "Start",
    "Unsaveable",
    "as_read",
    "asked",
    "bases",
    "changes",
    "check_answers",
    "check_seed",
    "check_start",
    "check_types",
    "config_folder",
    "config_names",
    "dated",
    "day_of",
    "evaluation_key",
    "find_config",
    "find_start",
    "flat",
    "from_json",
    "holds_out",
    "in_phase",
    "is_run",
    "is_whole",
    "keeps_reference",
    "limits_of",
    "load_config",
    "load_json",
    "located",
    "longest_row",
    "notes",
    "of_steps",
    "own_modules",
    "parts_of_task",
    "phases_of",
    "pinned",
    "read",
    "rebuilt",
    "refusals",
    "refuse_readers",
    "require",
    "reloads",
    "resolved",
    "rewards",
    "rules_of_run",
    "shared_by_phases",
    "split_step",
    "tasks_in",
    "to_json",
    "unreached",
    "validate",
    "validate_on_devices",
    "validate_on_model",
    "verifies",
    "watched",
    "whole",
    "with_recipe",
    "wording",
]
