"""Amounts of memory, as people read and write them."""

from hypothesis import given
from hypothesis import strategies as st

from cfp.units import format_bytes, parse_bytes, seconds_left

AMOUNTS = st.integers(1, 2**45)


@given(AMOUNTS)
def test_what_is_rounded_up_does(count):
    written = parse_bytes(format_bytes(count, up=True))
    assert written is not None
    assert count <= written <= 1.01 * count + 1


@given(AMOUNTS)
def test_what_is_written_is_near(count):
    written = parse_bytes(format_bytes(count))
    assert written is not None
    assert abs(written - count) <= 0.005 * count + 1


def test_the_rest_of_equal_parts_takes_as_long_for_each():
    assert [seconds_left(done, 4, 30.0) for done in range(5)] == [
        None,
        90.0,
        30.0,
        10.0,
        None,
    ]
