"""What a compiled program moves in memory, read from its text: by hand for every rule, and of a TPU's real program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import bytes_moved, cycles, find_loops, in_memory
from jaxrl_llm.plan.machines import describe_devices, parse_topology
from jaxrl_llm.sharding.mesh import without_compilation_cache

MIB = 2**20
TEXT = """HloModule jit_f, is_scheduled=true

%sliced (p: f32[4,512,512], i: s32[], x: f32[512]) -> f32[512] {
  %p = f32[4,512,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[512]{0} parameter(2)
  %slice = f32[1,512,512]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,512,512}
  %flat = f32[512,512]{1,0} bitcast(%slice)
  ROOT %dot = f32[512]{0} dot(%flat, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (p.1: f32[4,512], i.1: s32[], x.1: f32[512]) -> f32[4,512] {
  %p.1 = f32[4,512]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x.1 = f32[512]{0} parameter(2)
  %row = f32[1,512]{1,0} bitcast(%x.1)
  ROOT %update = f32[4,512]{1,0} dynamic-update-slice(%p.1, %row, %i.1)
}

%turned (p.2: f32[512,1024]) -> f32[1024,512] {
  %p.2 = f32[512,1024]{1,0} parameter(0)
  ROOT %turn = f32[1024,512]{1,0} transpose(%p.2), dimensions={1,0}, metadata={op_name="jit(f)/while/body/s/transpose"}
}

%body (t: (s32[], f32[512], f32[4,512,512], f32[4,512])) -> (s32[], f32[512], f32[4,512,512], f32[4,512]) {
  %t = (s32[], f32[512]{0}, f32[4,512,512]{2,1,0}, f32[4,512]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %h = f32[512]{0} get-tuple-element(%t), index=1
  %w = f32[4,512,512]{2,1,0} get-tuple-element(%t), index=2
  %out = f32[4,512]{1,0} get-tuple-element(%t), index=3
  %new = f32[512]{0} fusion(%w, %n, %h), kind=kOutput, calls=%sliced
  %outs = f32[4,512]{1,0} fusion(%out, %n, %new), kind=kLoop, calls=%put
  %one = s32[] constant(1)
  %sum = f32[512]{0} all-reduce(%new), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %next = s32[] add(%n, %one)
  ROOT %tuple = (s32[], f32[512]{0}, f32[4,512,512]{2,1,0}, f32[4,512]{1,0}) tuple(%next, %sum, %w, %outs)
}

%condition (t.1: (s32[], f32[512], f32[4,512,512], f32[4,512])) -> pred[] {
  %t.1 = (s32[], f32[512]{0}, f32[4,512,512]{2,1,0}, f32[4,512]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%t.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%n.1, %four), direction=LT
}

ENTRY %main (a: f32[512], b: f32[4,512,512], c: f32[4,512], d: f32[512,1024]) -> f32[4,512] {
  %a = f32[512]{0} parameter(0)
  %b = f32[4,512,512]{2,1,0} parameter(1)
  %c = f32[4,512]{1,0} parameter(2)
  %d = f32[512,1024]{1,0} parameter(3)
  %fetch = (f32[512,1024]{1,0:S(1)}, f32[512,1024]{1,0}, u32[]{:S(2)}) copy-start(%d)
  %fetched = f32[512,1024]{1,0:S(1)} copy-done(%fetch)
  %other = f32[1024,512]{1,0} fusion(%d), kind=kLoop, calls=%turned, metadata={op_name="jit(f)/while/body/s/transpose"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[512]{0}, f32[4,512,512]{2,1,0}, f32[4,512]{1,0}) tuple(%zero, %a, %b, %c)
  %loop = (s32[], f32[512]{0}, f32[4,512,512]{2,1,0}, f32[4,512]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[4,512]{1,0} get-tuple-element(%loop), index=3
}
"""
ROW, LAYER, WIDE = 512 * 4, 512 * 512 * 4, 512 * 1024 * 4


def test_a_loop_reads_what_it_slices_and_writes_what_it_puts():
    program = hlo.parse_hlo(TEXT, 2)
    whole, loop = find_loops(program)
    scalars = 3 * 4 + 2 * 4  # the counter: read by both kernels and the sum, written once; and the constant's word
    body = (LAYER + ROW + ROW) + (ROW + ROW) + (ROW + ROW)
    assert (loop.depth, loop.times) == (1, 4) and body <= loop.moved <= body + scalars
    # A fetch into the chip's memory reads, and writes nothing here; a transpose does both.
    assert whole.moved == pytest.approx(4 * loop.moved + WIDE + 2 * WIDE, abs=32)
    assert [c.size for c in loop.collectives] == [ROW] and not whole.collectives


@pytest.mark.parametrize(
    ("inner", "read"),
    [
        ("%b = f32[8,512]{1,0} pad(%p, %z), padding=2_2x0_0\n  ROOT %r = f32[1,512]{1,0} slice(%b)", 512 * 2),
        ("%b = f32[4,512]{1,0} convert(%p)\n  ROOT %r = f32[1,512]{1,0} dynamic-slice(%b, %z)", 512 * 2),
        ("ROOT %r = f32[4,512]{1,0} convert(%p)", 4 * 512 * 2),
        ("%b = f32[4,512]{1,0} convert(%p)\n  ROOT %r = f32[4,512]{1,0} add(%b, %b)", 4 * 512 * 2),
    ],
    ids=["padded", "converted", "result", "used"],
)
def test_a_kernel_that_slices_what_it_pads_or_converts_reads_the_slice(inner, read):
    shape = "f32[4,512]" if "[4,512]{1,0} add" in inner or "ROOT %r = f32[4" in inner else "f32[1,512]"
    text = f"""HloModule m

%k (p: bf16[4,512], z: f32[]) -> {shape} {{
  %p = bf16[4,512]{{1,0}} parameter(0)
  %z = f32[] parameter(1)
  {inner}
}}

ENTRY %main (a: bf16[4,512], c: f32[]) -> {shape} {{
  %a = bf16[4,512]{{1,0}} parameter(0)
  %c = f32[] parameter(1)
  ROOT %f = {shape}{{1,0}} fusion(%a, %c), kind=kLoop, calls=%k
}}
"""
    written = hlo.bytes_of(shape)
    assert bytes_moved(hlo.parse_hlo(text, 1), "main") - written == pytest.approx(read, abs=8)


def test_cycles_of_kernels_are_added_up_with_their_loops():
    def noted(count):
        return f', backend_config={{"flag_configs":[],"estimated_cycles":"{count}"}}'

    text = TEXT.replace("calls=%sliced", f"calls=%sliced{noted(100)}").replace("calls=%put", f"calls=%put{noted(20)}")
    text = text.replace("calls=%turned", f"calls=%turned{noted(7)}")
    assert cycles(hlo.parse_hlo(text, 2)) == 4 * 120 + 7
    assert cycles(hlo.parse_hlo(TEXT, 2)) == 0


def test_what_only_moves_is_told():
    whole, loop = find_loops(hlo.parse_hlo(TEXT, 2))
    assert [(c.kind, c.size, c.source) for c in whole.copies] == [("transpose", WIDE, "jit(f)/s/transpose")]
    assert not loop.copies  # 2 KiB are put into place there, which is not worth telling


def test_loops_whose_bound_is_data_run_as_often_as_is_said():
    text = TEXT.replace("%less = pred[] compare(%n.1, %four), direction=LT", "%less = pred[] custom-call(%n.1)")
    program = hlo.parse_hlo(text, 2)
    assert [loop.times for loop in find_loops(program, (7.0,))] == [1, 7] and [
        x.times for x in find_loops(program)
    ] == [1, 1]


def test_of_branches_the_dearest_counts_and_fast_memory_is_free():
    text = """HloModule m

%small (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  ROOT %negated = f32[8]{0} negate(%s)
}

%large (l: f32[8]) -> f32[8] {
  %l = f32[8]{0} parameter(0)
  %twice = f32[8]{0:S(1)} add(%l, %l)
  ROOT %again = f32[8]{0} negate(%twice)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %chosen = f32[8]{0} conditional(%i, %x, %x), branch_computations={%small, %large}
}
"""
    assert bytes_moved(hlo.parse_hlo(text, 1), "main") == 3 * 32  # x twice, the result once
    assert in_memory("(f32[8]{0:T(8,128)S(1)}, bf16[2,8]{1,0}, u32[]{:S(2)})") == 32


def test_attention_by_length_reads_one_layer_of_a_cache_at_most():
    text = """HloModule m

ENTRY %main (q: f32[8], k: f32[4,2,1,8,16]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %k = f32[4,2,1,8,16]{4,3,2,1,0} parameter(1)
  ROOT %read = f32[8]{0} custom-call(%q, %k), custom_call_target="x", metadata={op_name="jit(f)/NAME/pallas_call"}
}
"""
    found = [
        bytes_moved(hlo.parse_hlo(text.replace("NAME", name), 1), "main") for name in ("attention_by_length", "other")
    ]
    assert found == [2 * 32 + 2 * 8 * 16 * 4, 2 * 32 + 4 * 2 * 8 * 16 * 4]


@pytest.mark.slow
@pytest.mark.compilers
def test_a_tpu_reads_weights_and_a_cache_once_in_each_round():
    """A real program: what is added to the least is small, and a cache that grows is counted in full."""
    device = describe_devices(parse_topology("v5e:1x1"))[0]
    place = jax.sharding.SingleDeviceSharding(device)
    layers, width, rows = 6, 1024, 16

    def step(weights, cache, x):
        def layer(x, own):
            w, kept = own
            x = jnp.tanh(x @ w)
            return x + jnp.einsum("bs,bsd->bd", jnp.einsum("bd,bsd->bs", x, kept), kept), None

        return jax.lax.scan(layer, x, (weights, cache))[0]

    found = []
    for columns in (256, 512):
        shapes = (layers, width, width), (layers, rows, columns, width), (rows, width)
        given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
        with without_compilation_cache():
            text = jax.jit(step).lower(*given).compile().as_text()
        whole, loop = find_loops(hlo.parse_hlo(text, 1))
        least = sum(2 * float(np.prod(shape)) for shape in shapes[:1]) + 2 * 2 * float(np.prod(shapes[1]))
        assert loop.times == layers and least <= layers * loop.moved <= whole.moved < 1.2 * least, text
        found.append(layers * loop.moved)
    assert found[1] - found[0] == pytest.approx(2 * 2 * layers * rows * 256 * width, rel=0.05)
