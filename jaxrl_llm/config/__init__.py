"""Configurations of runs: frozen dataclasses that validate themselves and round-trip through JSON."""

from jaxrl_llm.config.checks import (
    check_types,
    notes,
    resolved,
    validate_on_devices,
    validate_on_model,
    validate_on_processes,
)
from jaxrl_llm.config.code import own_code, write_code
from jaxrl_llm.config.distillation import Context, Distillation, TaskTeacher, samples_groups, without_rewards
from jaxrl_llm.config.files import (
    FREE_TO_CHANGE,
    RECORDED_CHANGES,
    LoadedConfig,
    as_read,
    changed_since,
    changes,
    chosen,
    evaluation_key,
    find_config,
    from_json,
    is_run,
    is_whole,
    load_config,
    read,
    reloads,
    shown,
    to_json,
    whole,
    with_recipe,
    write,
)
from jaxrl_llm.config.mixture import (
    JUDGED,
    Mixture,
    Part,
    asked,
    bases,
    check_answers,
    check_environments,
    limits_of,
    parts_of_task,
    refusals,
    refuse_readers,
    rewards,
    tasks_in,
    verifies,
    watched,
)
from jaxrl_llm.config.origin import (
    Origin,
    Pin,
    Start,
    changed_code,
    located,
    own_modules,
    split_step,
    tools_of_others,
    trusting,
    with_lost,
    without_step,
)
from jaxrl_llm.config.phases import SHIFT, in_phase, phases_of, unreached, validate
from jaxrl_llm.config.run import SEED, Evaluation, Output, Run, Scoring, keeps_reference
from jaxrl_llm.config.texts import (
    Answering,
    BatchSize,
    Configuration,
    Preference,
    RewardModel,
    Supervised,
    check_start,
    dated,
    wording,
)
from jaxrl_llm.errors import require
from jaxrl_llm.system.paths import config_folder, config_names
