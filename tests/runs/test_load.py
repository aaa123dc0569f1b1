"""A run's settings where its model is used, which need not be the machine that it was trained on."""

import dataclasses

import pytest
from runs.test_pins import JUDGED, a_run

from jaxrl_llm import config as configs
from jaxrl_llm.config import RewardModel
from jaxrl_llm.data import Pairs
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Learner
from jaxrl_llm.runs.load import find_run, mesh_here
from jaxrl_llm.sharding import MeshShape
from jaxrl_llm.tasks import Table

SCORES = RewardModel("tiny-random", Pairs(Table("rm.jsonl")))
MACHINES = {
    "fixed sizes": {"mesh": MeshShape(2, 2, 2)},
    "devices that sample": {"mesh": MeshShape(rollout=4)},
    "slices": {"mesh": MeshShape(2, slices=4)},
    "experts divided": {"mesh": MeshShape(fsdp=1, expert=8)},
    "rows": {"learner": Learner().computing(microbatch_rows=48)},
    "row's length": {"learner": Learner().computing(row_tokens=4096)},
    "a TPU's kernel": {"learner": Learner().computing(attention="splash")},
}


@pytest.mark.parametrize("run", [JUDGED, SCORES], ids=["policy", "reward model"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_model_is_used_on_the_devices_that_are_there(tmp_path, machine, run):
    plain = dataclasses.replace(run, learner=Learner(), mesh=MeshShape())
    found = [
        find_run(str(a_run(tmp_path / name, dataclasses.replace(plain, **changes), 2))).run
        for name, changes in (("here", {}), ("there", MACHINES[machine]))
    ]
    runs = [configs.to_json(dataclasses.replace(one, output=plain.output)) for one in found]
    assert runs[0] == runs[1] and mesh_here(found[1].mesh).size == 8


def test_no_device_is_set_aside_where_nothing_learns():
    with pytest.raises(InputError, match=r"^--mesh.rollout 2 sets devices aside, and nothing learns: leave it out$"):
        mesh_here(MeshShape(rollout=2))
    with pytest.raises(InputError, match="does not fit 8 devices"):
        mesh_here(MeshShape(3))
