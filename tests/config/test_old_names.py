"""A setting that moved to another part is still given by its old name, in each way to give a setting."""

import dataclasses
import functools
import json
import operator

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.cli.flags import parse
from jaxrl_llm.config.phases import in_phase, validate
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig, Rope
from jaxrl_llm.rules.settings import Phase, Rules
from jaxrl_llm.system.setting import current_name, former_in, settings_in

RUN = configs.load_config("smoke")[1]


def replaced(run, path, value):
    """The run with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(run, **{name: replaced(getattr(run, name), rest, value) if rest else value})


OLD = {
    "run_dir": "elsewhere",
    "learner.optimiser.b1": 0.8,
    "learner.optimiser.b2": 0.9,
    "learner.optimiser.eps": 1e-4,
    "learner.optimiser.momentum_dtype": "bfloat16",
    "learner.optimiser.offload": True,
    "learner.microbatch_rows": 8,
    "learner.row_tokens": 512,
    "learner.remat": "dots",
    "learner.attention": "xla",
    "learner.compute_dtype": "bfloat16",
    "rollout.slots": 8,
    "rollout.chunk": 4,
    "rollout.strict": True,
    "recipe.drop_truncated": True,
    "recipe.overlong_share": 0.3,
    "recipe.overlong_weight": 0.7,
    "recipe.reference_reset": 3,
    "recipe.reset_on_stall": 4,
    "recipe.reset_optimiser": True,
    "recipe.optimiser_reset": 5,
}
"""Another value than the default for each old name."""
NOW = {current_name(RUN, name): value for name, value in OLD.items()}
OTHER = functools.reduce(lambda run, name: replaced(run, name, NOW[name]), NOW, RUN)
"""The run with all these values."""
SHARED = {"run_dir"}
"""Those that all phases share."""
SHORT = {"distillation"}
"""A short name of a part, in Python alone."""


def test_every_old_name_is_tested():
    found = {f"{where}{name}" for part, where in settings_in(RUN) for name in getattr(part, "old_names", {})}
    assert found == OLD.keys() | SHORT
    assert all(operator.attrgetter(name)(RUN) != NOW[name] for name in NOW)


def test_a_teacher_has_a_short_name():
    teacher = configs.Distillation("teacher")
    run = dataclasses.replace(RUN, distillation=teacher)
    assert run == dataclasses.replace(RUN, scoring=dataclasses.replace(RUN.scoring, distillation=teacher))
    assert configs.Run(RUN.model, RUN.task, distillation=teacher).distillation is teacher


@pytest.mark.parametrize("name", OLD)
def test_python_takes_and_reads_it(name):
    assert operator.attrgetter(name)(OTHER) == OLD[name]
    assert replaced(RUN, name, OLD[name]) == replaced(RUN, current_name(RUN, name), OLD[name]) != RUN
    where, _, field = name.rpartition(".")
    part = operator.attrgetter(where)(RUN) if where else RUN
    kept = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
    assert type(part)(**kept, **{field: OLD[name]}) == dataclasses.replace(part, **{field: OLD[name]})


@pytest.mark.filterwarnings("ignore:get_parser")
def test_the_command_line_takes_it():
    switches = [name for name, value in OLD.items() if value is True]
    flags = [text for name in OLD.keys() - switches for text in (f"--{name}", str(OLD[name]))]
    given = [*flags, *(f"--{name.replace('_', '-')}" for name in switches)]
    assert parse(type(RUN), given, "train", "", RUN) == OTHER
    off = [f"--{'.no-'.join(name.rsplit('.', 1))}" for name in switches]
    assert parse(type(RUN), [*given, *off], "train", "", RUN) == functools.reduce(
        lambda run, name: replaced(run, name, False), switches, OTHER
    )


def test_a_phase_changes_it():
    names = OLD.keys() - SHARED
    old, new = (
        dataclasses.replace(RUN, rules=Rules((Phase("a", 1), Phase("b", changes=changes, reset_optimiser=True))))
        for changes in ({name: OLD[name] for name in names}, {current_name(RUN, name): OLD[name] for name in names})
    )
    assert in_phase(old, 1) == in_phase(new, 1) != in_phase(old, 0)
    for name in SHARED:
        run = dataclasses.replace(RUN, rules=Rules((Phase("a", 1), Phase("b", changes={name: OLD[name]}))))
        with pytest.raises(InputError, match=f"changes {current_name(RUN, name)}, which is the same in all phases"):
            validate(run)


def test_an_older_file_has_it():
    data = json.loads(json.dumps(configs.to_json(OTHER)))
    for name in OLD:
        *where, old = name.split(".")
        *_, group, field = current_name(RUN, name).split(".")
        part = functools.reduce(operator.getitem, where, data)
        part[old] = part[group].pop(field)
        if part[group].keys() == {"type"}:
            del part[group]
    assert "moments" not in data["learner"]["optimiser"] and data["learner"]["optimiser"]["b1"] == 0.8
    assert configs.from_json(data) == OTHER
    assert configs.changes(configs.from_json(data), OTHER) == []


def test_an_architecture_has_it():
    rope = {"rope_theta": 500.0, "rope_scaling": 2.0, "local_rope_theta": 50.0, "max_positions": 64}
    ends = {"tied_embeddings": True, "embedding_scale": 4.0, "logit_softcap": 8.0}
    attention = Attention(4, 2, 8, rope=Rope(500.0, 2.0, 50.0, 64))
    config = ModelConfig("llama", 50, 16, 2, 24, attention, embeddings=Embeddings(True, 4.0, 8.0))
    assert ModelConfig("llama", 50, 16, 2, 24, Attention(4, 2, 8, **rope), **ends) == config
    assert dataclasses.replace(ModelConfig("llama", 50, 16, 2, 24, attention), **ends) == config
    for part, old in ((attention, rope), (config, ends)):
        assert part.old_names.keys() == old.keys() and {name: getattr(part, name) for name in old} == old


def test_moved_settings_may_still_change_when_a_run_is_resumed():
    moved = {current_name(RUN, name) for name in OLD}
    assert moved & set(configs.FREE_TO_CHANGE) == {
        "output.run_dir", "rollout.engine.slots",
        *(f"learner.compute.{name}" for name in ("microbatch_rows", "row_tokens", "remat", "attention")),
    }  # fmt: skip


FORMER = {
    "output.tensorboard": {False: (), True: ("tensorboard",)},
    "output.wandb": {None: ("tensorboard",), "": ("tensorboard",), "sums": ("tensorboard", "wandb:sums")},
}
"""Old settings in another form: for each value what ``output.trackers`` is, where all others are as usual."""


def test_old_settings_in_another_form_are_read_in_python_and_from_files():
    assert former_in(RUN).keys() == FORMER.keys()
    for name, values in FORMER.items():
        field = name.rpartition(".")[2]
        for value, trackers in values.items():
            run = replaced(RUN, name, value)
            assert run.output.trackers == trackers and operator.attrgetter(name)(run) in (value, value or None)
            data = json.loads(json.dumps(configs.to_json(RUN)))
            del data["output"]["trackers"]
            data["output"][field] = value
            assert configs.from_json(data) == run
    both = configs.from_json({"type": "jaxrl_llm.config.run:Output", "tensorboard": False, "wandb": "sums"})
    assert both.trackers == ("wandb:sums",) and dataclasses.replace(both, wandb=None).trackers == ()
    assert dataclasses.replace(both, tensorboard=True, wandb="a").trackers == ("tensorboard", "wandb:a")
    with pytest.raises(InputError, match=r"output.tensorboard is 'no': give True or False"):
        replaced(RUN, "output.tensorboard", "no")


@pytest.mark.filterwarnings("ignore:get_parser")
@pytest.mark.parametrize(
    ("flags", "trackers"),
    [
        ("--output.no_tensorboard --output.wandb sums", ("wandb:sums",)),
        ("--output.wandb=sums --output.no-tensorboard --output.tensorboard", ("tensorboard", "wandb:sums")),
        ("--output.wandb None", ("tensorboard",)),
        ("--output.trackers trackio wandb:sums", ("trackio", "wandb:sums")),
        ("--output.trackers", ()),
    ],
)
def test_the_command_line_takes_old_settings_in_another_form(flags, trackers):
    assert parse(type(RUN), flags.split(), "train", "", RUN).output.trackers == trackers


def test_an_old_setting_and_the_present_one_are_not_given_together():
    with pytest.raises(InputError, match=r"--output.wandb is an old name for a part of --output.trackers"):
        parse(type(RUN), "--output.trackers trackio --output.wandb sums".split(), "train", "", RUN)


def test_a_phase_cannot_change_an_old_setting_of_the_output():
    run = dataclasses.replace(RUN, rules=Rules((Phase("a", 1), Phase("b", changes={"output.wandb": "sums"}))))
    with pytest.raises(InputError, match=r"changes output.wandb, which is the same in all phases"):
        validate(run)
