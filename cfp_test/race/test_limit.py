"""Memory limits for the compiler, and the programs that get one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfp.context import MemoryBudget
from cfp.profiling.record import CompiledBytes
from cfp.race.admission import limit_options, may_fit
from cfp.search.solver import scale_memory
from cfp_test.search.drawn import problems

GIB = 2**30
SHARE = "xla_gpu_memory_limit_slop_factor"


def compiled(fixed_gib, temp_gib):
    """Program that holds its state in place, and needs temporaries."""
    return CompiledBytes(
        argument_bytes=int(fixed_gib * GIB),
        output_bytes=int(fixed_gib * GIB),
        alias_bytes=int(fixed_gib * GIB),
        temp_bytes=int(temp_gib * GIB),
    )


def room(budget_gib, device_gib=100):
    return MemoryBudget(
        budget_bytes=int(budget_gib * GIB),
        device_bytes=device_gib and device_gib * GIB,
    )


def test_the_share_is_of_what_the_arguments_leave():
    found = limit_options(room(52), compiled(20, 60))
    assert {name: options[SHARE] for name, options in found.items()} == {
        "within the budget": "40",  # 52 - 20 of 100 - 20
        "well within the budget": "36",
        "within the budget, no latency hiding": "36",
    }


def test_a_share_is_rounded_to_the_nearest_and_then_down():
    found = limit_options(room(1.9 + 0.02), compiled(0.02, 60))
    assert [options[SHARE] for options in found.values()] == ["2", "1", "1"]


@given(st.floats(0, 99), st.floats(0, 99))
def test_what_is_allowed_stays_within_the_budget(fixed_gib, budget_gib):
    one, there = compiled(fixed_gib, 10), room(budget_gib)
    found = limit_options(there, one).values()
    for share in [int(options[SHARE]) for options in found if SHARE in options]:
        allowed = fixed_gib + share / 100 * (100 - fixed_gib)
        assert share >= 1
        half_a_percent = (100 - fixed_gib) / 200
        assert allowed <= budget_gib + half_a_percent + 1e-6 or share == 1


def test_small_programs_need_no_more_than_the_smallest_share():
    found = limit_options(room(21), compiled(20, 0.7))
    assert list(found) == ["within the budget, no latency hiding"]
    assert SHARE not in found["within the budget, no latency hiding"]


@pytest.mark.parametrize(
    "elsewhere",
    [
        room(52, device_gib=None),
        room(100),  # The compiler reckons with that anyway.
        room(52, device_gib=10),
    ],
)
def test_where_there_is_nothing_to_tell(elsewhere):
    assert limit_options(elsewhere, compiled(20, 60)) == {}


def test_what_may_fit():
    assert may_fit(room(53.1), compiled(20, 60))
    assert not may_fit(room(52.9), compiled(20, 60))
    assert not may_fit(room(52.9), CompiledBytes()), "it could not be compiled"


@given(problems())
def test_the_state_is_not_scaled(problem):
    less = scale_memory(problem, 0.75)
    for before, after in zip(problem.options, less.options, strict=True):
        for one, other in zip(before, after, strict=True):
            assert other.state_bytes == one.state_bytes
            assert other.residual_bytes <= one.residual_bytes
            assert other.temp_bytes <= one.temp_bytes
            assert other.candidate is one.candidate
            assert other.time_ms == one.time_ms
