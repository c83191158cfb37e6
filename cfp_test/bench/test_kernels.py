"""Splits of a trace: made-up events with known overlaps, and a real trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp_test.bench.kernels import split, trace_split
from cfp_test.support.checking import make_mesh

MS = 1e6  # nanoseconds


def test_split_of_events():
    """Ten milliseconds: compute 0 to 6, sending 4 to 10, and one of each overlaps."""
    one = [
        ("gpu0", "gemm_fusion_dot_3", (0, 6 * MS)),
        ("gpu0", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", (4 * MS, 8 * MS)),
        ("gpu0", "loop_fusion all-gather-start.2", (7 * MS, 10 * MS)),
    ]
    # The other device computes alone.
    other = [("gpu1", "input_reduce_fusion_1", (0, 4 * MS))]
    found = split([*one, *other], steps=1)
    assert found is not None
    assert found.communication_ms == pytest.approx((6 + 0) / 2)
    assert found.compute_ms == pytest.approx((6 + 4) / 2)
    assert found.overlapped_ms == pytest.approx(2 / 2)
    assert found.exposed_ms == pytest.approx(4 / 2)
    assert found.busy_ms == pytest.approx((10 + 4) / 2)
    halved = split([*one, *other], steps=2)
    assert halved is not None and halved.busy_ms == pytest.approx(found.busy_ms / 2)
    assert split([], steps=1) is None


def test_a_real_trace_shows_what_is_sent():
    mesh = make_mesh((("x", 4),))
    whole, cut = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ("x",)))

    def traced(function, out):
        run = jax.jit(function, out_shardings=out)
        x = jax.device_put(jnp.ones((256, 256)), cut)
        run(x).block_until_ready()

        def steps(times):
            for _ in range(times):
                run(x).block_until_ready()

        found = trace_split(steps, 2)
        assert found is not None
        return found

    summed = traced(lambda x: jnp.sin(x).sum(axis=0), whole)
    assert summed.communication_ms > 0
    assert summed.compute_ms > 0
    local = traced(lambda x: jnp.sin(x) + 1, cut)
    assert local.communication_ms == local.exposed_ms == 0
    assert local.compute_ms > 0
