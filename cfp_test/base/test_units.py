"""Amounts of memory, as people read and write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfp.errors import CfpError
from cfp.printable import format_bytes, format_flops, parse_bytes

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


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (49152, "49,152 FLOP"),
        (5.24288e6, "5.24 MFLOP"),
        (3.02e9, "3.02 GFLOP"),
        (0.0999e12, "99.9 GFLOP"),
        (0.1e12, "0.1 TFLOP"),
        (1234.5e12, "1,234 TFLOP"),
    ],
)
def test_flops_have_the_unit_that_suits_them(flops, text):
    assert format_flops(flops) == text


@pytest.mark.parametrize("text", ["12", "80", " 1000 ", "4e3", "1.5"])
def test_a_few_bytes_without_a_unit_are_refused(text):
    number = text.strip()
    with pytest.raises(CfpError) as caught:
        parse_bytes(text)
    assert f"Write {number}GiB or {number}MiB, or {number}B for" in str(caught.value)
    assert parse_bytes(f"{number}B") == int(float(number))


@pytest.mark.parametrize("number", [2, 80, 1000, 1.5])
def test_a_small_number_is_refused(number):
    with pytest.raises(CfpError, match=f"Write {number}GiB or {number}MiB"):
        parse_bytes(number)


def test_many_bytes_need_no_unit():
    assert parse_bytes(1024) == 1024 and parse_bytes(4e3) == 4000
    assert parse_bytes("1048576") == 2**20
    assert parse_bytes("8e9") == 8 * 10**9
