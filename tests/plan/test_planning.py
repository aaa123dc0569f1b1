"""Plans: one compiled for a TPU that is not there, the rest by formula; what they say, and what is refused."""

import dataclasses
import json
import math
import re

import pytest
from commands import command, commands
from plan.tinyrun import CONFIG, computing, tiny_run

from jaxrl_llm.models.decode_kernels import ByLength
from jaxrl_llm.plan.machines import CUDNN, describe_devices, is_installed, parse_topology
from jaxrl_llm.plan.planning import best_plans, candidate_runs, compilable, plan_run
from jaxrl_llm.plan.programs import abstract_model, compile_program, memory_needed, planned_run, run_meshes
from jaxrl_llm.plan.roofline import CYCLES, FORMULAS, CompiledCost, sampling_costs, step_parts, step_work
from jaxrl_llm.plan.tables import draw_plans, memory_lines, plans_table, report_lines, totals_of, write_plans
from jaxrl_llm.rollout import Collect
from jaxrl_llm.stages.programs import build_engine

pytestmark = pytest.mark.slow

GPUS = parse_topology("h100:8")
SLICE = parse_topology("v5e:2x2")


@pytest.fixture(scope="module")
def compiled():
    """One plan by the TPU's compiler, for all tests."""
    return plan_run(tiny_run((1, 2, 2)), CONFIG, SLICE, describe_devices(SLICE), None, True)


@pytest.mark.compilers
def test_the_real_programs_compile_for_a_tpu_slice(compiled):
    assert set(compiled.compiled) == {"weights", "prompts", "decode", "refill", "update"} and not compiled.refused
    assert compiled.fits and compiled.learning.temporary > 0
    by_name = {p.name: p for p in compiled.phases}
    assert set(by_name) == {"weights", "prompts", "decode", "score", "update"}
    kinds = {t.kind for t in by_name["update"].traffic}
    assert kinds and sum(t.ici for t in by_name["update"].traffic) > 0 == sum(
        t.dcn for p in compiled.phases for t in p.traffic
    )
    # The update's time is that of its own kernels; the passes that score are not compiled.
    update, done = by_name["update"], compiled.compiled["update"]
    assert update.source == CYCLES and by_name["score"].source == FORMULAS
    seconds = update.calls * done.cycles / SLICE.chip.clock
    kernels = update.compute_s - seconds
    assert 0 <= kernels < 0.5 * seconds and update.bytes == update.calls * done.loops[0].moved
    # No device sends its part of the cache away when it grows: only weights are gathered for sampling.
    assert sum(t.ici for t in by_name["weights"].traffic) > 0


@pytest.mark.compilers
def test_the_report_says_what_is_compiled_and_what_is_a_formula(compiled, tmp_path):
    text = "\n".join(report_lines(compiled, "built in"))
    for word in (
        "temporaries, the compiler's",
        "update: ",
        "(compiled)",
        "by formula",
        "compiled cycles and bytes",
        "FITS",
        "bound by",
        "MFU",
    ):
        assert word in text
    assert len({len(line) for line in memory_lines(compiled)}) == 1, "numbers stand below their heads"
    write_plans(tmp_path / "plan.json", [(compiled, "built in")])
    value = json.loads((tmp_path / "plan.json").read_text())
    assert (
        value["memory"]["learning"]["total"] == compiled.learning.total
        and value["fits"]
        and value["mesh"]["tensor"] == 2
    )
    draw_plans([value], tmp_path / "plan.svg")
    assert "tiny-random" in (tmp_path / "plan.svg").read_text()


@pytest.mark.compilers
def test_a_program_that_needs_too_much_is_a_number_and_no_traceback():
    run = tiny_run((1, 4, 1), slots=1 << 16, max_prompt_tokens=1024, max_new_tokens=16384, chunk=16)
    run = computing(run, row_tokens=0)
    one = planned_run(run, CONFIG, describe_devices(SLICE))
    done = compile_program(one, "decode")
    assert done.refused > SLICE.chip.memory and not done.temporary


def test_the_number_is_read_from_the_refusal():
    text = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 36.50G of 15.75G hbm."
    )
    assert memory_needed(text) == 36.5 * 2**30
    text = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (36.42G) exceeds available HBM (31.25G)."
    assert memory_needed(text) == 36.42 * 2**30


def by_formula(run):
    return plan_run(run, CONFIG, GPUS, None, None, False)


def test_without_a_compiler_gpus_are_planned_by_formula():
    found = by_formula(tiny_run((1, 4, 2)))
    assert found.fits and not found.compiled
    assert "a formula's" in "\n".join(report_lines(found, ""))


def test_a_row_whose_length_is_left_open_is_planned_too():
    found = by_formula(computing(tiny_run((1, 4, 2)), row_tokens=0))
    assert found.work.row_tokens % 128 == 0 and found.fits


def test_more_of_everything_costs_more():
    run = tiny_run((1, 4, 2), prompts=32, slots=64)
    base = by_formula(run)
    slots = by_formula(tiny_run((1, 4, 2), prompts=32, slots=128))
    assert slots.sampling.cache == 2 * base.sampling.cache and slots.learning == base.learning
    quarter = by_formula(tiny_run((1, 4, 2), prompts=32, slots=64, cache="int8"))
    assert quarter.sampling.cache < 0.32 * base.sampling.cache and quarter.learning == base.learning
    assert quarter.most("slots") > 2 * base.most("slots")
    rows = by_formula(computing(run, microbatch_rows=16))
    assert rows.learning.temporary > base.learning.temporary and rows.sampling == base.sampling
    prompts = by_formula(dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, prompts=64)))
    assert prompts.learning.batch > base.learning.batch and prompts.seconds > base.seconds
    assert prompts.work.train_flops == 2 * base.work.train_flops


def test_decoding_reads_a_share_of_what_the_largest_program_reads():
    run = tiny_run((1, 4, 2), prompts=32)
    one = planned_run(run, CONFIG, None, machine=GPUS)
    todo = step_work(run, one.outline, one.arrays.learned, 10)
    by_name = {p.name: p for p in step_parts(run, one.arrays, todo, GPUS.chip, {}, {})}
    _, cost = sampling_costs(one.arrays, todo)["decode"]
    largest = 3 * cost.fixed
    read = {"decode": CompiledCost(2.0, largest)}
    decode = {p.name: p for p in step_parts(run, one.arrays, todo, GPUS.chip, {}, read)}["decode"]
    each = cost.fixed + cost.share * (largest - cost.fixed)
    assert 0 < cost.share < 1 and decode.bytes == pytest.approx(decode.calls * each)
    assert decode.compute_s == pytest.approx(decode.calls * 2 * each / largest)
    # Some are longer than the mean, so decoding takes more chunks than if all had it.
    chunk, waves = run.rollout.engine.chunk, todo.completions / run.rollout.engine.slots
    assert decode.calls == by_name["decode"].calls > 1.2 * waves * 10 / chunk
    told = "\n".join(report_lines(plan_run(run, CONFIG, GPUS, None, 10, False), ""))
    assert "completions of 10 tokens (log-normal, sigma 0.9)" in told and "of the cache on average" in told


@pytest.mark.compilers
def test_a_run_decodes_in_the_form_that_its_plan_names():
    model = abstract_model(CONFIG, "float32")
    for name, form in (("auto", ByLength("tpu")), ("xla", None)):
        run = tiny_run((1, 4, 1), attention=name)
        mesh, where = run_meshes(run, describe_devices(SLICE))
        assert build_engine(run, model, "bfloat16", mesh, where)[0].form == form


def test_the_plain_form_of_decoding_reads_more_where_it_is_asked_for():
    lengths = {"prompts": 32, "max_new_tokens": 2048, "chunk": 16}
    kernels, plain = (
        computing(tiny_run((1, 8, 1), **lengths, attention=name), row_tokens=0) for name in ("auto", "xla")
    )
    share = {}
    for run, words in ((kernels, "each slot by its length (gpu kernel)"), (plain, "every slot to the longest one's")):
        one = planned_run(run, CONFIG, None, machine=GPUS)
        todo = step_work(run, one.outline, one.arrays.learned, 400)
        share[words] = sampling_costs(one.arrays, todo)["decode"][1].share
        told = "\n".join(report_lines(plan_run(run, CONFIG, GPUS, None, 400, False), ""))
        assert f"attention of decoding: {words}" in told
    assert share["each slot by its length (gpu kernel)"] < 0.6 * share["every slot to the longest one's"]


def test_what_fits_at_most_fits_and_more_does_not():
    run = tiny_run((1, 4, 2), slots=64)
    small = dataclasses.replace(GPUS, chip=dataclasses.replace(GPUS.chip, memory=by_formula(run).peak * 3))
    most = plan_run(run, CONFIG, small, None, None, False).most("slots")
    assert most > 64

    def fits(slots):
        return plan_run(tiny_run((1, 4, 2), slots=slots), CONFIG, small, None, None, False).fits

    assert fits(most) and not fits(most * 4)


def test_the_whole_run_is_its_steps_its_devices_and_its_checkpoints():
    run = dataclasses.replace(tiny_run((1, 4, 2)), steps=300)
    one = by_formula(run)
    found = totals_of(one, 2.0)
    assert found.run_s == pytest.approx(300 * one.seconds)
    assert found.device_hours == pytest.approx(8 * found.run_s / 3600) and found.cost == pytest.approx(
        2 * found.device_hours
    )
    assert found.checkpoint_every_s == pytest.approx(50 * one.seconds)
    weights = 4 * one.parameters[0]
    assert found.snapshot_bytes == pytest.approx(weights, rel=1e-3)
    assert found.checkpoint_bytes == pytest.approx(4 * weights, rel=1e-3), "weights, two moments, reference"
    assert found.disk_bytes == 4 * found.checkpoint_bytes and totals_of(one).cost is None
    assert found.best_bytes == 4 * found.snapshot_bytes
    off = by_formula(dataclasses.replace(run, output=dataclasses.replace(run.output, keep_best=False)))
    assert totals_of(off).best_bytes == 0


def test_a_step_is_compared_with_the_time_that_a_signal_leaves():
    def told(grace, **collect):
        run = tiny_run((1, 4, 2), collect=Collect(**collect))
        run = dataclasses.replace(run, output=dataclasses.replace(run.output, grace_s=grace))
        return report_lines(by_formula(run), "")[-1]

    assert "a step can end in 12.5 s" in told(25.0)
    assert "stopped within its sampling" in told(1e-6) and "once it learns, it is finished" in told(1e-6)
    assert "set output.grace_s to 1" in told(1e-6, staleness=1), "a step that samples ahead is finished"
    assert "however long" in told(math.inf)


def test_heads_of_a_cache_that_the_mesh_does_not_divide_are_repeated_and_told():
    once, copied = by_formula(tiny_run((1, 4, 2))), by_formula(tiny_run((1, 1, 8)))
    told = "mesh.tensor 8 does not divide the model's 2 key/value heads: the cache holds each of them 4 times"
    assert told in "\n".join(report_lines(copied, ""))
    assert "key/value heads" not in "\n".join(report_lines(once, ""))
    cache = planned_run(tiny_run((1, 1, 8)), CONFIG, None, machine=GPUS).arrays.slots.cache.k
    assert cache.shape[2] == 8 and cache.sharding.shard_shape(cache.shape)[2] == 1


def test_a_machine_has_a_process_for_each_host():
    names = {"h100:8": 1, "h100:2x4": 2, "v5e:2x4": 1, "v5e:4x4": 4, "v6e:2x2": 1, "v5p:2x2x4": 4, "tpu7x:2x2x2": 2}
    assert {name: parse_topology(name).hosts for name in names} == names
    assert parse_topology("v5e:2x4", 2).hosts == 2


def test_a_search_ranks_meshes_that_fit():
    run = tiny_run((1, 8, 1))
    every = candidate_runs(run, CONFIG, GPUS)
    assert len({(one.mesh, one.learner.compute.microbatch_rows) for one in every}) == len(every) > 4
    assert {one.mesh.tensor for one in every} == {1, 2, 4}  # two key/value heads, and two copies of each
    assert {one.mesh.tensor for one in candidate_runs(computing(run, row_tokens=81), CONFIG, GPUS)} == {1}
    experts = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, fsdp=-1, expert=2))
    assert all(math.prod(one.mesh.sizes(8).values()) == 8 for one in candidate_runs(experts, CONFIG, GPUS))
    found = best_plans(run, CONFIG, GPUS, None, None, True, lambda text: None)
    assert found and [p.seconds for p in found] == sorted(p.seconds for p in found) and all(p.fits for p in found)
    assert len(plans_table(found)) == 1 + len(found)


@pytest.mark.compilers
def test_the_command_compiles_for_gpus_of_two_hosts(tmp_path):
    asked = "plan smoke --topology h100:2x2 --mesh.data 2 --mesh.fsdp 2 --learner.compute.microbatch_rows 4"
    done = command(*asked.split(), "--json", "plan.json", "--loops", "--dump", "programs", folder=tmp_path)
    assert done.code == 0 and "tiny-random: 90,624 parameters" in done.out and "FITS" in done.out, done
    assert "activations and temporaries, the compiler's" in done.out and "by formula alone" not in done.out
    assert "attention of decoding: " in done.out
    assert "attention: xla\n" in done.out and re.search(r"products of update, as compiled: \d+ by Triton", done.out)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert set(found["compiled_s"]) == {"weights", "prompts", "decode", "refill", "update"}
    assert "ENTRY" in (tmp_path / "programs/update.txt").read_text()
    assert {path.stem for path in (tmp_path / "programs").iterdir()} == set(found["compiled_s"])
    decode = found["loops"]["decode"]
    assert [loop["depth"] for loop in decode[:2]] == [0, 1] and decode[0]["bytes"] > decode[1]["bytes"] > 0
    assert "times weights and cache" in done.out and any(one["collectives"] for one in found["loops"]["update"])
    assert found["machine"] == "h100:2x2" and found["memory"]["available"] == 72e9
    [update] = [phase for phase in found["phases"] if phase["name"] == "update"]
    sent = {name: sum(one[name] for one in update["traffic"]) for name in ("ici", "dcn")}
    assert update["source"] == "compiled bytes", "a GPU's text has no cycles"
    assert sent["dcn"] > 0 and sent["ici"] > 0, "gradients are summed over both hosts, weights gathered inside"


@pytest.mark.compilers
def test_a_gpu_samples_from_weights_by_layer_and_a_tpu_from_stacked_ones():
    for machine, name in ((parse_topology("h100:4"), "0"), (SLICE, "attn")):
        sampled = planned_run(tiny_run((1, 4, 1)), CONFIG, describe_devices(machine)).arrays.sampled
        assert hasattr(sampled.weights.blocks, name), machine.name


def test_a_run_whose_attention_cannot_be_compiled_here_says_so():
    config = dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, head_dim=16))
    run = computing(tiny_run((1, 4, 2)), dtype="bfloat16", attention="cudnn")
    planned, said = compilable(run, config, GPUS)
    assert (planned.learner.compute.attention, bool(said)) == (
        ("cudnn", False) if is_installed(CUDNN) else ("xla", True)
    )
    assert compilable(computing(run, attention="auto"), config, GPUS)[1] == (), "our own kernels need no cuDNN"
    assert compilable(tiny_run((1, 4, 2)), config, GPUS)[1] == ()


def test_without_the_compiler_one_line_says_how_to_get_it(tmp_path):
    hidden = "import sys; sys.modules['jax_plugins.xla_cuda13'] = sys.modules['jax_plugins.xla_cuda12'] = None"
    done = command("plan", "smoke", "--topology", "h100:2", folder=tmp_path, before=hidden, anew=True)
    assert done.code == 0 and "pip install -e '.[compilers]'" in done.out.splitlines()[-1], done
    # As where it is not installed; JAX has told this process, and so its children, where it is.
    without = "import os, sys; sys.modules['libtpu'] = None; os.environ.pop('TPU_LIBRARY_PATH', None)"
    answer = command("plan", "smoke", "--topology", "v5e:2x2", folder=tmp_path, before=without, anew=True)
    assert answer.code == 2 and "pip install -e '.[compilers]'" in answer.err and answer.err.count("\n") == 1


def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path):
    refused = {
        "plan smoke": "--topology v5e:4x4",
        "plan smoke --topology v5litepod-16": "write v5e:4x4",
        "plan smoke --topology v5e:2x2 --quick --loops": "leave --quick and --search out",
        "plan smoke --topology v5e:2x2 --search --dump x": "--dump reads the compiled programs of one plan",
        "plan smoke --topology h100:3 --learner.compute.microbatch_rows 4": "make it a multiple of 3",
        "plan smoke --topology h100:16 --mesh.rollout 8 --rollout.collect.staleness 1": "run has 2, one on each",
        "plan smoke --topology h100:2 --mean_tokens 0": "--mean_tokens must be a positive number",
        "plan smoke --topology h100:2 --slices x": "--slices must be a positive number",
        "plan smoke --topology h100:2 --price_per_device_hour free": "--price_per_device_hour must be a number above 0",
    }
    for answer, words in zip(commands(list(refused), tmp_path), refused.values(), strict=True):
        assert answer.code == 2 and words in answer.err and answer.err.count("\n") == 1
