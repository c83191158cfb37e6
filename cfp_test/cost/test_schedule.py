"""Schedules of compiled programs, from texts and from compiled programs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.cost import schedule
from cfp.cost.schedule import Computed, Sent, schedule_of

_TEXT = """HloModule m, is_scheduled=true, num_partitions=4

%double (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} add(%p, %p)
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %ar = f32[8,8]{1,0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add
  %y = f32[8,8]{1,0} fusion(%ar), kind=kLoop, calls=%double
  ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %y)
}

ENTRY %main (a: bf16[1024,4096], b: bf16[1024,1024]) -> f32[8,8] {
  %a = bf16[1024,4096]{1,0} parameter(0)
  %b = bf16[1024,1024]{1,0} parameter(1)
  %ag = ((bf16[1024,1024]{1,0}), bf16[4096,1024]{1,0}) all-gather-start(%b), \
replica_groups=mesh['x'=4] {'x'}, dimensions={0}
  %p1 = bf16[1024,1024]{1,0} fusion(%b), kind=kLoop, calls=%double
  %agd = bf16[4096,1024]{1,0} all-gather-done(%ag)
  %mm = (bf16[1024,1024]{1,0}, s8[33554432]{0}) custom-call(%a, %agd), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_batch_dimensions":[]}}}
  %init = (s32[], f32[8,8]{1,0}) tuple(%a, %a)
  %w = (s32[], f32[8,8]{1,0}) while(%init), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""


def test_what_lies_between_a_start_and_its_done():
    found = schedule_of(_TEXT)
    gather, *turns = found.sent
    megabytes = 2 * 4096 * 1024
    assert gather == Sent(
        kind="all-gather", bytes=megabytes, group_size=4, start=0, done=1
    )
    # One kernel beside the all-gather, then the product, then three turns of the loop.
    assert found.computed[0] == Computed(
        flops=0.0, moved_bytes=2 * 2.0 * 1024 * 1024, kernels=1
    )
    assert [(one.start, one.done) for one in turns] == [(2, 2), (3, 3), (4, 4)]
    assert {(one.kind, one.bytes, one.group_size) for one in turns} == {
        ("all-reduce", 256, 2)
    }
    assert len(found.computed) == 5


def test_a_loop_too_long_to_unroll_counts_all_of_its_turns(monkeypatch):
    unrolled = schedule_of(_TEXT)
    monkeypatch.setattr(schedule, "_LONGEST", 5)
    found = schedule_of(_TEXT)
    assert [one.times for one in found.sent] == [1, 3]
    assert found.sent[1] == replace(unrolled.sent[1], times=3)
    assert len(found.computed) == 3
    for name in ("flops", "moved_bytes", "kernels"):
        sums = [
            sum(getattr(c, name) for c in one.computed) for one in (found, unrolled)
        ]
        assert sums[0] == sums[1]


def test_products_count_their_flops_and_no_bytes():
    found = schedule_of(_TEXT)
    product = found.computed[1]
    assert abs(product.flops / (2.0 * 1024 * 4096 * 1024) - 1) < 1e-6
    assert product.moved_bytes == 0


def test_merged_schedules_compute_the_same_between_the_same_collectives():
    found = schedule_of(_TEXT)
    merged = found.merged()
    for what in ("flops", "moved_bytes", "kernels"):
        for before, after in zip(found.sent, merged.sent, strict=True):
            for place in ("start", "done"):
                cut, short = getattr(before, place), getattr(after, place)
                whole = sum(getattr(c, what) for c in found.computed[:cut])
                assert whole == sum(getattr(c, what) for c in merged.computed[:short])


def test_a_compiled_product_has_the_flops_of_its_sizes():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))

    def step(a, b):
        return jax.lax.scan(lambda c, _: (c @ b, None), a, length=5)[0]

    shapes = [jax.ShapeDtypeStruct((2048, 512), jnp.float32)]
    shapes.append(jax.ShapeDtypeStruct((512, 512), jnp.float32))
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, in_shardings=(split, whole), out_shardings=split)
    text = jitted.lower(*shapes).compile().as_text()
    assert schedule_of(text).flops == 0  # Half a gigaflop each: memory decides.
    shapes[0] = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    text = jitted.lower(*shapes).compile().as_text()
    assert abs(schedule_of(text).flops / (5 * 2.0 * 4096 * 512 * 512) - 1) < 1e-6


def test_products_of_attention_kernels_count():
    scores = '"intermediate_tensor_shape":{"dimensions":["6","32","1024","2048"]}'
    more = {
        "forward": '"mask_type":"NO_MASK"',
        "causal": '"mask_type":"CAUSAL"',
        "backward": '"bmm1_grad_gemm1_dot_dimension_numbers":{},"mask_type":"NO_MASK"',
    }
    found = {}
    for name, config in more.items():
        text = f"""HloModule m, is_scheduled=true

ENTRY %main (q: bf16[6,1024,32,128]) -> bf16[6,1024,32,128] {{
  %q = bf16[6,1024,32,128]{{3,2,1,0}} parameter(0)
  ROOT %a = (bf16[6,1024,32,128]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={{"cudnn_fmha_backend_config":{{{scores},{config}}}}}
}}
"""
        found[name] = schedule_of(text).flops
    product = 2.0 * 6 * 32 * 1024 * 2048 * 128
    assert found == {
        "forward": 2 * product,
        "causal": product,
        "backward": 5 * product,
    }
