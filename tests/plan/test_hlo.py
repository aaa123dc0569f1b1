"""What a compiled program sends, read from its text: programs with known transfers, and every notation of the text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import find_loops
from jaxrl_llm.plan.machines import parse_topology
from jaxrl_llm.plan.roofline import Places, device_places, traffic_of
from jaxrl_llm.sharding import MeshShape, make_mesh

TPU_LIKE = """HloModule jit_f, is_scheduled=true

%fused_computation.1 (p: bf16[4,8]) -> (bf16[4,8], bf16[64,8]) {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, replica_groups=mesh['a'=16,'b'=1] {'a'}, dimensions={0}
  ROOT %custom-call.1 = (bf16[4,8]{1,0}, bf16[64,8]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%fused_computation.2 (p: bf16[4,8]) -> bf16[64,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[64,8]{1,0} all-gather(%p.2), channel_id=7, replica_groups=mesh['a'=16,'b'=1] {'a'}, dimensions={0}
}

%all-reduce-scatter.3 (p: f32[32,8]) -> f32[16,8] {
  %p.3 = f32[32,8]{1,0} parameter(0)
  %all-reduce.3 = f32[32,8]{1,0} all-reduce(%p.3), channel_id=9, replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%add
  ROOT %slice.3 = f32[16,8]{1,0} slice(%all-reduce.3), slice={[0:16], [0:8]}
}

%body (t: (f32[32,8], u32[])) -> (f32[32,8], u32[]) {
  %t = (f32[32,8]{1,0:T(8,128)S(1)}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%t), index=1
  %two = u32[] constant(2)
  %x = f32[32,8]{1,0} get-tuple-element(%t), index=0
  %start = (f32[32,8]{1,0}, f32[32,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=11, source_target_pairs={{0,1},{1,0}}
  %done = f32[32,8]{1,0} collective-permute-done(%start)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %tuple.9 = (f32[32,8]{1,0}, u32[]{:T(128)}) tuple(%done, %next)
}

%condition (t: (f32[32,8], u32[])) -> pred[] {
  %t.2 = (f32[32,8]{1,0:T(8,128)S(1)}, u32[]{:T(128)}) parameter(0)
  %bound = u32[]{:T(128)} constant(9)
  %i.2 = u32[]{:T(128)} get-tuple-element(%t.2), index=1
  ROOT %less = pred[]{:T(512)} compare(%i.2, %bound), direction=LT
}

%body.2 (t: (f32[32,8], s32[], s32[])) -> (f32[32,8], s32[], s32[]) {
  %t.3 = (f32[32,8]{1,0}, s32[], s32[]) parameter(0)
  %x.3 = f32[32,8]{1,0} get-tuple-element(%t.3), index=0
  %one = u32[] constant(1)
  %inner = (f32[32,8]{1,0}, u32[]) tuple(%x.3, %one)
  %while.1 = (f32[32,8]{1,0}, u32[]) while(%inner), condition=%condition, body=%body
  ROOT %fusion.3 = f32[16,8]{1,0} fusion(%x.3), kind=kCustom, calls=%all-reduce-scatter.3
}

%condition.2 (t: (f32[32,8], s32[], s32[])) -> pred[] {
  %t.4 = (f32[32,8]{1,0}, s32[], s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%t.4), index=1
  %n.4 = s32[] get-tuple-element(%t.4), index=2
  ROOT %less.4 = pred[] compare(%i.4, %n.4), direction=LT
}

ENTRY %main (a: bf16[4,8], b: (f32[32,8], s32[], s32[])) -> bf16[64,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = (f32[32,8]{1,0}, s32[], s32[]) parameter(1)
  %kernel = bf16[4,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"sizes":"{\\"block\\": 128}"
}}, metadata={op_name="kernel"}
  %begun = (bf16[4,8]{1,0}, bf16[64,8]{1,0}) fusion(%a), kind=kLoop, calls=%fused_computation.1
  %while.2 = (f32[32,8]{1,0}, s32[], s32[]) while(%b), condition=%condition.2, body=%body.2
  ROOT %ended = bf16[64,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_computation.2
}
"""  # noqa: E501


def sent(text, devices, unknown=()):
    """Every transfer of one call of a program."""
    return [one for loop in find_loops(hlo.parse_hlo(text, devices), unknown) for one in loop.collectives]


def test_loops_channels_and_fusions_of_a_tpu_program():
    found = {c.kind: c for c in sent(TPU_LIKE, 16, (3.0,))}
    assert set(found) == {"all-gather", "reduce-scatter", "collective-permute"}
    gather, scatter, permute = found["all-gather"], found["reduce-scatter"], found["collective-permute"]
    assert (gather.times, gather.size, gather.groups.shape) == (
        1,
        64 * 8 * 2,
        (1, 16),
    )  # once, though two fusions bear it
    assert (scatter.times, scatter.size, scatter.groups.tolist()[1]) == (3, 32 * 8 * 4, [1, 9])
    assert (permute.times, permute.size) == (3 * 4, 32 * 8 * 4)  # from 1 to 9 by 2 is four times
    assert gather.moved == 64 * 8 * 2 * 15 / 16 and scatter.moved == 32 * 8 * 4 / 2


GPU_LIKE = """
%g (p: bf16[192,12]) -> bf16[192,12] {
  ROOT %p = bf16[192,12]{1,0} parameter(0)
}

ENTRY %main (a: bf16[192,12], b: bf16[192,2]) -> bf16[192,12] {
  %a = bf16[192,12]{1,0} parameter(0)
  %b = bf16[192,2]{1,0} parameter(1)
  %one = (bf16[192,12]{1,0}, bf16[1536,12]{1,0}) all-gather-start(%a), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %both = ((bf16[192,12]{1,0}, bf16[192,2]{1,0}), (bf16[1536,12]{1,0}, bf16[1536,2]{1,0})) all-gather-start(%a, %b), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}
  %back = ((bf16[1536,12]{1,0}, /*index=1*/bf16[1536,2]{1,0}), (bf16[192,12]{1,0}, bf16[192,2]{1,0})) reduce-scatter-start(%x, %y), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
  %sum = (f32[16]{0}, f32[]) all-reduce-start(%c, %d), channel_id=4, replica_groups=[1,8]<=[8], to_apply=%add
  %gemm = bf16[192,12]{1,0} fusion(%a), kind=kCustom, calls=%g, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %blas = bf16[192,12]{1,0} custom-call(%a), custom_call_target="__cublas$lt$matmul"
  ROOT %plain = bf16[192,12]{1,0} fusion(%gemm), kind=kCustom, calls=%g, backend_config={"fusion_backend_config":{"kind":"__triton"}}
}
"""  # noqa: E501


def test_what_a_gpus_program_begins_is_counted_by_what_travels():
    sizes = [(c.kind, c.size) for c in sent(GPU_LIKE, 8)]
    both = (1536 * 12 + 1536 * 2) * 2
    assert sizes == [
        ("all-gather", 1536 * 12 * 2), ("all-gather", both), ("reduce-scatter", both), ("all-reduce", 16 * 4 + 4),
    ]  # fmt: skip
    assert hlo.count_products(GPU_LIKE) == {"cuBLAS": 1, "Triton": 1}


def test_a_real_program_sends_what_it_was_written_to_send():
    mesh = make_mesh(MeshShape(1, 4, 2))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("fsdp", "tensor"), out_specs=P(None, "tensor"), check_vma=False
    )
    def program(x):
        def body(carry, _):
            return jax.lax.psum(carry * 2, "tensor"), None

        x, _ = jax.lax.scan(body, x, None, length=5)
        x = jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.all_gather(x, "fsdp", tiled=True)

    text = program.lower(jnp.zeros((8, 16))).compile().as_text()
    found = {c.kind: c for c in sent(text, 8)}
    assert {kind: c.times for kind, c in found.items()} == {"all-reduce": 5, "collective-permute": 1, "all-gather": 1}
    assert {kind: c.size for kind, c in found.items()} == {
        "all-reduce": 64,
        "collective-permute": 64,
        "all-gather": 256,
    }
    assert sorted(map(sorted, found["all-reduce"].groups.tolist())) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(map(sorted, found["all-gather"].groups.tolist())) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found["all-reduce"].moved == 64 and found["all-gather"].moved == 192


@pytest.mark.parametrize(
    "text, size", [("bf16[2,3]{1,0}", 12), ("(f32[4], pred[3], u32[])", 23), ("f8e4m3fn[16]", 16), ("s4[8]", 4)]
)
def test_bytes_of_shapes(text, size):
    assert hlo.bytes_of(text) == size


def collective(kind, groups, size=1000.0):
    return hlo.Collective(kind, size, np.array(groups))


def test_a_ring_on_a_closed_axis_sends_both_ways():
    machine = parse_topology("v5p:4x4x4")
    coordinates = np.stack(np.unravel_index(np.arange(64), (4, 4, 4)), axis=1)
    where = Places(machine, np.zeros(64, int), coordinates)
    one, two = collective("all-gather", [[0, 1, 2, 3]]), collective("all-gather", [list(range(16))])
    assert traffic_of(one, where).ici_s == pytest.approx(750 / (2 * machine.chip.link))
    assert traffic_of(two, where).ici_s == pytest.approx(937.5 / (4 * machine.chip.link))
    open_ended = Places(
        parse_topology("v5e:4x4"), np.zeros(16, int), np.stack(np.unravel_index(np.arange(16), (4, 4)), axis=1)
    )
    assert traffic_of(one, open_ended).ici_s == pytest.approx(750 / CHIP_LINK)


CHIP_LINK = parse_topology("v5e:4x4").chip.link


def test_between_slices_only_sums_of_shares_are_sent():
    machine = parse_topology("v5e:2x2", 2)
    where = Places(machine, np.repeat([0, 1], 4), np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (2, 1)))
    found = traffic_of(collective("all-reduce", [list(range(8))]), where)
    assert found.ici == 1000 * 2 * 3 / 4 and found.dcn == 250 * 2 * 1 / 2
    assert found.dcn_s == pytest.approx(250 / machine.chip.network)
    inside = traffic_of(collective("all-reduce", [[0, 1, 2, 3]]), where)
    assert inside.dcn == 0 and inside.ici == 1500


def test_gpus_of_one_host_have_a_switch():
    where = device_places(parse_topology("h100:16"))
    found = traffic_of(collective("all-gather", [list(range(8))]), where)
    assert found.dcn == 0 and found.ici_s == pytest.approx(875 / where.machine.chip.link)
    assert traffic_of(collective("all-gather", [[0, 8]]), where).dcn == 500
    assert traffic_of(collective("all-gather", [[3, 4]]), device_places(parse_topology("h100:2x4"))).dcn == 500


def test_computations_of_other_threads_end_too():
    """TPUs with sparse cores gather there; the computations that follow are still found."""
    text = """HloModule m
%gathered (p: s32[9]) -> s32[9] {
  ROOT %p = s32[9]{0} parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (q: s32[9]) -> s32[9] {
  ROOT %q = s32[9]{0} parameter(0)
}
"""
    program = hlo.parse_hlo(text, 1)
    assert set(program.computations) == {"gathered", "main"} and program.entry == "main"
