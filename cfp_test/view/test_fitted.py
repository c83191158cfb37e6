"""Tables and texts fit what $COLUMNS says, and lose nothing by it."""

import io
import random
import string

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from cfp.printable import columns
from cfp.profiling.rates import Rates
from cfp.view.console import Fitted, broken
from cfp.view.plots import curve_points, curves_table
from cfp.view.text import diff_text, explain_text, plan_text, short_text
from cfp_test.view.plans import RACE, layers, make_plan
from cfp_test.view.reported import DEEP, HOSTILE

WIDTHS = (60, 80, 100, 160)
LETTERS = string.ascii_lowercase + "  //,_->"


def drawn(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Fitted(table))
    return captured.get().splitlines()


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
    raced = packed(plan_text(make_plan([], RACE)).replace("|", ""))
    assert packed("data_parallel") in raced and packed("out_of_memory") in raced


@pytest.mark.parametrize("width", WIDTHS)
def test_curves_of_a_mesh_with_long_names_fit(width):
    axes = ("data_between_hosts", "model_within_a_host")
    rates = Rates.default([(name, 8) for name in axes])
    lines = drawn(curves_table(rates, 450.0, box.ASCII), width)
    assert max(map(len, lines)) <= width
    # Nothing is cut off: a row's cells are all there, in one line or in several.
    assert not any("\u2026" in line for line in lines)
    assert all(
        f"{point.time_ms:.4f}" in "".join(lines) for point in curve_points(rates)
    )


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


def test_broken_text_is_the_same_text_in_lines_that_fit():
    rng = random.Random(3)
    for _ in range(300):
        text, width = text_of(rng, 60), rng.randint(1, 30)
        lines = broken(text, width)
        assert max(map(len, lines)) <= width
        assert packed("".join(lines)) == packed(text)


def test_lines_end_at_spaces_and_slashes_before_they_end_in_words():
    assert broken("layer_0-1/attention/scores", 12) == [
        "layer_0-1/",
        "attention/",
        "scores",
    ]
    assert broken("tensor_sequence_parallel", 16) == ["tensor_sequence_", "parallel"]
    assert broken("a" * 7, 3) == ["aaa", "aaa", "a"]


def test_no_cell_of_a_table_loses_a_letter_at_any_width():
    rng = random.Random(5)
    for width in (*range(20, 140, 7), *WIDTHS):
        table = Table(box=box.ASCII, pad_edge=False)
        headings = ["", *(f"h{i}" for i in range(rng.randint(1, 6)))]
        cells = ["*", *(text_of(rng, 50) or "x" for _ in headings[1:])]
        for i, heading in enumerate(headings):
            table.add_column(heading, no_wrap=i % 3 == 2 and width > 90)
        table.add_row(*cells)
        lines = drawn(table, width)
        assert max(map(len, lines)) <= width
        inside = [line[1:-1].split("|") for line in lines[3:-1]]
        if lines[0].startswith("+"):
            found = ["".join(column) for column in zip(*inside, strict=True)]
            assert list(map(packed, found)) == list(map(packed, cells))
        else:
            for cell in cells:
                assert packed(cell) in packed("".join(lines))


def test_columns_that_cannot_stand_side_by_side_become_lines():
    table = Table(box=box.ASCII, pad_edge=False)
    for heading in ("", "name", "first", "second"):
        table.add_column(heading, no_wrap=True)
    table.add_row("*", "one", "1" * 30, "2" * 30)
    table.add_row("", "two", "", "3")
    assert drawn(table, 80)[0].startswith("+")
    lines = [line.rstrip() for line in drawn(table, 50)]
    assert lines == [
        "* name: one; first:",
        f"    {'1' * 30}; second:",
        f"    {'2' * 30}",
        "  name: two; second: 3",
    ]
