"""Amounts of memory, as people read and write them."""

from hypothesis import given
from hypothesis import strategies as st

from cfp.units import format_bytes, left_text, parse_bytes, seconds_left

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
    assert left_text(0, 3, 0.0) == left_text(3, 3, 40.0) == ""
    assert left_text(1, 3, 40.0) == ", about 1:20 left"
    assert left_text(1, 3, 0.1) == "", "no time to speak of"
