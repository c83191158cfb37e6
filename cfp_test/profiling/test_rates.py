from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfp.profiling.collectives import (
    KINDS,
    Rates,
    axis_groups,
    interpolate,
    rising,
)
from cfp.program.fp8 import FP8

CURVE = ((1_000, 0.5), (10_000, 0.5), (100_000, 5.0))


def rates_of(curves, mesh=(("x", 2), ("y", 4))):
    return Rates(
        mesh=mesh,
        curves=curves,
        matmul_flops_per_ms={"float32": 10.0, "bfloat16": 40.0},
        memory_bytes_per_ms=100.0,
    )


def test_curves_are_interpolated():
    assert interpolate(CURVE, 1) == 0.5  # Latency.
    assert interpolate(CURVE, 1_000) == 0.5
    assert interpolate(CURVE, 10_000) == pytest.approx(0.5)
    # Half way, on both logarithmic scales.
    assert interpolate(CURVE, 10**4.5) == pytest.approx(0.5 * 10**0.5)
    assert interpolate(CURVE, 100_000) == 5.0
    assert interpolate(CURVE, 300_000) == pytest.approx(15.0)


def test_a_curve_of_one_point():
    assert interpolate(((100, 2.0),), 50) == 2.0
    assert interpolate(((100, 2.0),), 200) == 4.0


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.floats(1e-4, 1e3)),
        min_size=1,
        max_size=8,
        unique_by=lambda point: point[0],
    ),
    st.lists(st.floats(1, 1e10), min_size=2, max_size=2),
)
def test_more_bytes_never_take_less_time(points, sizes):
    curve = rising(points)
    assert [size for size, _ in curve] == sorted(size for size, _ in points)
    small, large = sorted(sizes)
    assert 0 < interpolate(curve, small) <= interpolate(curve, large) * (1 + 1e-9)


def test_noise_is_taken_for_what_it_is():
    assert rising([(100, 3.0), (10, 7.0), (1, 1.0)]) == (
        (1, 1.0),
        (10, 3.0),
        (100, 3.0),
    )


def test_axis_groups():
    assert axis_groups((("x", 4),)) == (("x",),)
    assert axis_groups((("x", 4), ("y", 1))) == (("x",),)
    assert axis_groups((("x", 2), ("y", 4))) == (("x",), ("y",), ("x", "y"))
    assert axis_groups((("a", 2), ("b", 2), ("c", 2))) == (
        ("a",),
        ("b",),
        ("c",),
        ("a", "b", "c"),
    )
    assert axis_groups(()) == ()


def test_axes_in_any_order():
    rates = rates_of({("all-reduce", ("x", "y")): CURVE})
    assert rates.collective_ms("all-reduce", ("x", "y"), 1e5) == 5.0
    assert rates.collective_ms("all-reduce", ("y", "x"), 1e5) == 5.0


def test_nothing_to_send_takes_no_time():
    rates = rates_of({("all-reduce", ("x",)): CURVE}, mesh=(("x", 2), ("one", 1)))
    assert rates.collective_ms("all-reduce", (), 1e5) == 0
    assert rates.collective_ms("all-reduce", ("one",), 1e5) == 0
    assert rates.collective_ms("all-reduce", ("x",), 0) == 0
    assert rates.collective_ms("all-reduce", ("x", "one"), 1e5) == 5.0


def test_unknown_axes_and_kinds_are_errors():
    rates = rates_of({("all-reduce", ("x",)): CURVE})
    with pytest.raises(KeyError):
        rates.collective_ms("all-reduce", ("z",), 1e5)
    with pytest.raises(KeyError, match="no curve of times for 'all-gather'"):
        rates.collective_ms("all-gather", ("x",), 1e5)


def test_kinds_without_a_curve_of_their_own():
    rates = rates_of({("all-to-all", ("x",)): CURVE})
    assert rates.collective_ms("collective-permute", ("x",), 1e5) == 5.0


def test_groups_that_were_not_measured_go_axis_by_axis():
    line = ((1, 1.0), (1_000_000, 1_000_000.0))  # A millisecond for each byte.
    mesh = (("x", 2), ("y", 4), ("z", 2))
    rates = rates_of(
        {(kind, (name,)): line for kind in KINDS for name, _ in mesh}, mesh
    )
    # The last axis gathered makes all of it, those before a part.
    assert rates.collective_ms("all-gather", ("x", "y"), 8000) == pytest.approx(10000)
    both = pytest.approx(16000)
    assert rates.collective_ms("all-reduce", ("x", "y"), 8000) == both


def test_default_rates_need_no_device():
    mesh = (("x", 4), ("y", 2), ("one", 1))
    rates = Rates.default(mesh)
    assert rates.mesh == mesh
    for kind in KINDS:
        for axes in (("x",), ("y",), ("x", "y")):
            small = rates.collective_ms(kind, axes, 1e3)
            large = rates.collective_ms(kind, axes, 1e8)
            assert 0 < small < large < 10
    whole = ("x", 1e8)
    gather = rates.collective_ms("all-gather", ("x",), whole[1])
    assert rates.collective_ms("all-reduce", ("x",), whole[1]) > 1.8 * gather
    assert rates.collective_ms("all-to-all", ("x",), whole[1]) < gather
    assert 0 < rates.matmul_ms(1e12, "bf16") < rates.matmul_ms(1e12, "f32") < 100
    assert 0 < rates.memory_ms(1e9) < 10


def test_default_rates_of_a_mesh():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    assert Rates.default(mesh) == Rates.default((("x", 4), ("y", 2)))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 2.0),
        ("f32", 2.0),
        ("f64", 2.0),
        ("i32", 2.0),
        ("bfloat16", 0.5),
        ("bf16", 0.5),
        ("f16", 0.5),
        ("f8E4M3FN", 0.5 / FP8.speedup),
        ("i8", 0.5),
    ],
)
def test_types_of_a_matmul(dtype, expected):
    assert rates_of({}).matmul_ms(20.0, dtype) == expected


def test_memory():
    assert rates_of({}).memory_ms(50) == 0.5


@given(
    st.sampled_from(KINDS),
    st.integers(1, 10**6),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
def test_combined_collectives_share_their_launches(kind, size, count, most):
    axes = ("x",)
    rates = replace(Rates.default((("x", 4),)), combined_bytes=most)
    assert rates.combined_ms(kind, axes, 0, count) == 0.0
    whole_ms = rates.collective_ms(kind, axes, size)
    launch_ms = rates.collective_ms(kind, axes, 1)
    total_ms = count * rates.combined_ms(kind, axes, size, count)
    bytes_ms = count * (whole_ms - launch_ms)
    if kind == "all-to-all" or size >= most:
        assert total_ms == count * whole_ms
        return
    launches = (total_ms - bytes_ms) / launch_ms
    least = max(1.0, count * size / most)
    assert launches == pytest.approx(least, rel=1e-6, abs=1e-6)
