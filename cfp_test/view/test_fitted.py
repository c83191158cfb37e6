"""Tables and texts fit what $COLUMNS says, and lose nothing by it."""

import random
import string

import pytest
from rich import box

from cfp.printable import columns
from cfp.profiling.collectives import Rates
from cfp.view.console import Row, Rows, plain_text
from cfp.view.passes import curve_points, curves_rows
from cfp.view.text import diff_text, explain_text, short_text
from cfp_test.support.golden import plan_text
from cfp_test.view.plans import RACE, layers, make_plan
from cfp_test.view.reported import DEEP, HOSTILE

WIDTHS = (60, 80, 100, 160)
LETTERS = string.ascii_lowercase + "  //,_->"


def text_of(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, most))).strip()


def packed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("plan", [DEEP, HOSTILE, make_plan(layers([0, 1, 0]), RACE)])
def test_what_is_printed_fits_the_columns_that_are_given(plan, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert columns() == width
    other = make_plan(layers([1, 0]), RACE)
    for text in (
        plan_text(plan),
        explain_text(plan),
        diff_text(plan, other),
        short_text(other),
    ):
        assert max(map(len, text.splitlines())) <= width
        assert all(c.isprintable() or c == "\n" for c in text)


def test_rates_of_a_mesh_with_long_names_are_all_there():
    axes = ("data_between_hosts", "model_within_a_host")
    rates = Rates.default([(name, 8) for name in axes])
    text = plain_text(curves_rows(rates, 450.0).table(box.ASCII), 100)
    assert all(f"{point['time_ms']:.4f}" in text for point in curve_points(rates))
    assert "of link" in text and "\u2026" not in text
    assert "of link" not in plain_text(curves_rows(rates, None).table(box.ASCII))


@pytest.mark.parametrize(
    ("given", "found"), [(None, 100), ("", 100), ("wide", 100), ("72", 72), ("7", 60)]
)
def test_columns_follow_the_environment_and_else_are_a_hundred(
    given, found, monkeypatch
):
    if given is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", given)
    assert columns() == found


def test_no_cell_of_a_table_loses_a_letter_at_any_width():
    rng = random.Random(5)
    for width in (*range(40, 140, 7), *WIDTHS):
        names = [f"h{i}" for i in range(rng.randint(1, 6))]
        cells = tuple(text_of(rng, 50) or "x" for _ in names)
        made = Rows(title="", headings=tuple(names), rows=[Row(cells=cells)])
        table = made.table(box.ASCII)
        lines = plain_text(table, width).splitlines()
        assert max(map(len, lines)) <= width
        inside = [line[1:-1].split("|") for line in lines[3:-1]]
        found = ["".join(column) for column in zip(*inside, strict=True)]
        assert [*map(packed, found)] == [*map(packed, cells)]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_words_stay_whole_where_the_longest_ones_fit(width):
    long = "up_0/Residual_0/Conv_0"
    cells = (f"{long}, {long} and 32 more", "900.00 KiB", "does not fit, as compiled")
    made = Rows(title="", headings=("name", "memory", "note"), rows=[Row(cells=cells)])
    text = plain_text(made.table(box.ASCII), width)
    assert text.count(long) == 2 and "900.00 KiB" in text
    assert max(map(len, text.splitlines())) <= width
