import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cfp.plan.parts import Role
from cfp.plan.plan import Plan
from cfp.printable import merged_alike, merged_name
from cfp.race.programs import RaceRow
from cfp.view.model import view_of
from cfp.view.page import page_html
from cfp.view.text import explain_text, plan_text, print_plan
from cfp.view.words import summary_line
from cfp_test.report.plans import (
    RACE,
    as_data,
    axis_role,
    layers,
    make_plan,
    move,
    row,
)


@pytest.mark.smoke
def test_the_table_of_a_known_plan():
    text = plan_text(make_plan(layers([0, 0, 0, 0]), RACE), width=160)
    lines = text.splitlines()
    assert lines[0] == (
        "Plan 'planned' for a mesh x=4 of abacus; 10.250 ms per step, measured; "
        "9.500 ms predicted; 3.00 MiB on each device"
    )
    assert text.isascii()
    (repeated,) = [line for line in lines if "layer_" in line]
    cells = [cell.strip() for cell in repeated.strip("|").split("|")]
    assert cells == [
        "1-4 (4 x)",
        "layer_0-3/mlp",
        "x: columns (dim 1, size 64)",
        "sharded",
        "all-reduce over x, 19.25 KiB",
        "4 x 1.5",
    ]
    raced = [line.strip("|").split("|") for line in lines if " MiB |" in line]
    ranked = [cells[1].strip() for cells in raced]
    assert ranked == ["planned", "data_parallel"]
    assert [cells[0].strip() for cells in raced] == ["*", ""]
    assert "the same program as zero1" in text
    assert "out_of_memory: needs 9 bytes" in text
    assert lines[-1] == (
        "12 strategies measured, 3 from the cache, 1 failed; "
        "profile 20.0 s, search 0.5 s, race 7.0 s"
    )


def test_an_optimizers_blocks_without_products_share_a_row():
    """They are many, and mostly without names; explanations still have each."""
    dim = axis_role(Role.DIM, 1, 64)
    made = [((), (dim,)), ((), (dim,)), ((move("all-gather", 8),), ())]
    blocks = layers([])
    blocks += [
        row(1, 9, "select_n", updates=True, block=2 + i, strategy=how, moves=moves)
        for i, (moves, how) in enumerate(made)
    ]
    plan = make_plan(blocks, RACE)
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in plan_text(plan, width=160).splitlines()
        if "optimizer" in line or "select_n" in line
    ]
    name = "optimizer update (3 blocks without products)"
    assert shown == [["", name, "x: 2 of 3", "", "all-gather over x, 8.00 KiB", ""]]
    said = " ".join(repr(plan).split())
    assert f"; {name} x: 2 of 3; parameters sharded" in said
    assert "select_n" not in said
    assert explain_text(plan).count("select_n") == 3
    alone = make_plan([row(0, 9, "select_n", updates=True)], RACE)
    one = "optimizer update (1 block without products) replicated; parameters sharded"
    assert f"segment 0: {one}" in repr(alone)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([0, 0, 0], [(0, 1, 1), (1, 1, 3), (4, 1, 1)]),
        ([0, 1, 0, 1], [(0, 1, 1), (1, 2, 2), (5, 1, 1)]),
        ([0, 0, 1, 0, 0, 1], [(0, 1, 1), (1, 3, 2), (7, 1, 1)]),
        ([0, 1, 2], [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1)]),
    ],
)
def test_repeats_are_found(kinds, found):
    repeats = view_of(make_plan(layers(kinds), [])).runs
    assert [(r.first, r.period, r.count) for r in repeats] == found


def test_segments_that_are_sharded_otherwise_stand_apart():
    rows = layers([0, 0, 0])
    rows[2] = row(2, 0, "Net/layer_1/mlp", strategy=())
    assert [r.count for r in view_of(make_plan(rows, [])).runs] == [1, 1, 1, 1, 1]


def test_what_only_some_of_the_segments_send_is_said():
    rows = layers([0, 0, 0])
    rows[1] = row(1, 0, "Net/layer_0/mlp", moves=(move("all-to-all", 8),))
    text = plan_text(make_plan(rows, []), width=170)
    said = "all-reduce over x, 19.25 KiB; but in segment 1: all-to-all over x, 8.00 KiB"
    assert f"| {said} |" in text


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["layer_0/mlp", "layer_1/mlp"], "layer_0-1/mlp"),
        (["layer_1/mlp", "layer_3/mlp"], "layer_1,3/mlp"),
        ([f"layer_{i}/mlp" for i in range(0, 12, 2)], "layer_0,2..10/mlp"),
        (["a/b"], "a/b"),
        (["a/b", "a/b"], "a/b"),
        (["a/b", "c/d"], "a/b ... c/d"),
        (["a_0/b_0", "a_0/b_1", "a_1/b_0", "a_1/b_1"], "a_0-1/b_0-1"),
        (["a_0/b_0", "a_1/b_1"], "a_0/b_0 ... a_1/b_1"),
        (["layer_07"], "layer_07"),
    ],
)
def test_names_merge(names, merged):
    assert merged_name(names) == merged


@pytest.mark.parametrize("chosen", range(1, 2**6))
def test_merged_names_stand_for_exactly_these(chosen):
    every = [f"a_{i}/b_{j}" for i in (0, 1) for j in (0, 1, 2)]
    names = [name for place, name in enumerate(every) if chosen >> place & 1]

    def numbers(span: str) -> list[str]:
        first, _, last = span.partition("-")
        if not last:
            return span.split(",")
        return [str(i) for i in range(int(first), int(last) + 1)]

    found = []
    for merged in merged_alike(names):
        outer, inner = re.fullmatch(r"a_([-,\d]+)/b_([-,\d]+)", merged).groups()
        found += [f"a_{i}/b_{j}" for i in numbers(outer) for j in numbers(inner)]
    assert sorted(found) == names


def test_a_plan_without_measurements_prints_too():
    bare = make_plan([], [])
    text = plan_text(Plan.from_json({**as_data(bare), "search": {}}), width=160)
    assert text.count("\n") == 1


def test_terminals_get_lines_and_pipes_plain_text():
    plan = make_plan(layers([0, 0]), RACE)
    pipe, terminal = io.StringIO(), io.StringIO()
    print_plan(plan, Console(file=pipe))
    print_plan(plan, Console(file=terminal, force_terminal=True, width=160))
    assert pipe.getvalue() == plan_text(plan)
    assert "│" in terminal.getvalue()


def test_times_of_a_race_have_their_noise_beside_them():
    [first, *rest] = RACE
    noisy = replace(first, samples_ms=(11.0, 12.0, 12.5, 13.0, 20.0), time_ms=12.5)
    table = plan_text(make_plan([row(0, 0, "Net/up")], [noisy, *rest]), width=160)
    cells = [line.split("|") for line in table.splitlines() if "12.500" in line]
    assert [[c.strip() for c in line[4:6]] for line in cells] == [["12.500", "0.5"]]
    [few] = [line.split("|") for line in table.splitlines() if "10.250 |" in line]
    assert few[5].strip() == "-"  # Two samples say nothing of it.


def test_a_list_of_modules_is_named_with_its_numbers():
    rows = [row(i, 0, f"blocks/{i}/{name}") for i in range(2) for name in ("q", "k")]
    rows.append(row(2, 1, "head"))
    assert "segment 0-1 (blocks/0-1): " in repr(make_plan(rows, RACE))


def test_what_planning_took_ends_with_all_of_it():
    plan = make_plan([], RACE)
    search = {"search_seconds": 1.0, "race_seconds": 2.0, "planning_seconds": 9.5}
    assert summary_line(replace(plan, search=search)) == (
        "search 1.0 s, race 2.0 s; 9.5 s in all, with tracing and compiling"
    )
    # The compiling is a part of a race, of this one or of an earlier one.
    found = summary_line(replace(plan, search={**search, "compile_seconds": 8.0}))
    assert found == (
        "search 1.0 s, race 2.0 s; 9.5 s in all, with tracing and compiling; "
        "the plan's program compiled in 8.0 s, now or earlier"
    )
    # Where nothing was compiled it is not said that something was.
    only = [replace(r, samples_ms=(), time_ms=None, peak_bytes=2**20) for r in RACE]
    plan = replace(plan, race=tuple(only), peak_bytes=None, measured_ms=None)
    said = summary_line(replace(plan, search=search))
    assert said.endswith("9.5 s in all, with tracing")
    said = summary_line(replace(plan, search={**search, "strategies_measured": 1.0}))
    assert "1 strategies" not in said
    assert said.endswith("9.5 s in all, with tracing and compiling")


ESTIMATES = [
    RaceRow(
        name=name,
        predicted_ms=ms,
        note="estimated; nothing was compiled or run",
        rung="estimated",
    )
    for name, ms in (("planned", 9.5), ("tensor_sequence_parallel", 1234.5))
]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_estimates_stay_a_table_in_narrow_terminals(width):
    plan = replace(make_plan([], ESTIMATES), rung="estimated", measured_ms=None)
    lines = plan_text(plan, width=width).splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert [[cell.strip() for cell in row] for row in cells if len(row) == 4] == [
        ["", "plan", "predicted ms", "from"],
        ["*", "planned", "9.500", "estimated"],
        ["", "tensor_sequence_parallel", "1234.500", "estimated"],
    ]
    assert "Each: estimated; nothing was compiled or run" in lines


def test_notes_that_differ_stand_beside_their_plans():
    [first, second] = ESTIMATES
    some = [replace(first, peak_bytes=2**20), replace(second, note="too large")]
    plan = replace(make_plan([], some), rung="estimated", measured_ms=None)
    text = plan_text(plan, width=80)
    assert "Each:" not in text and "too large" in text
    [heads] = [line for line in text.splitlines() if "memory" in line]
    assert "note" in heads and "measured" not in heads and "+-" not in heads
    alone = replace(plan, race=(first,))
    assert "note" in plan_text(alone, width=160) and "Each:" not in plan_text(alone)


def test_blocks_that_are_alike_in_a_segment_share_a_row():
    """A gradient's norm by `jnp.vdot` is a product for each parameter."""
    others = [row(2, 9, "step.py:7 dot_general", block=3 + i) for i in range(9)]
    plan = make_plan([*layers([0]), *others], RACE)
    [line] = [x for x in plan_text(plan, width=160).splitlines() if "step.py" in x]
    assert "| step.py:7 dot_general (9 blocks) |" in " ".join(line.split())
    [line] = [x for x in repr(plan).splitlines() if "step.py" in x]
    assert "head, step.py:7 dot_general (9 blocks) replicated;" in line


def test_all_renderings_name_and_count_a_race_alike():
    """A program that ran and cannot win, such as one that does not fit, is no rival."""
    [data, *others] = RACE
    lost = replace(data, note="does not fit")
    plan = make_plan(layers([0]), [lost, *others])
    assert "chosen: the fastest of 2 that fit, raced on the whole step" in repr(plan)
    said = " ".join(explain_text(plan).split())
    assert "the fastest of 2 programs that were timed and fit. Next: zero1" in said
    assert "<h2>Race</h2>" in page_html(plan)
    untimed = [replace(one, samples_ms=(), time_ms=None) for one in RACE]
    unraced = replace(plan, race=tuple(untimed), measured_ms=None)
    assert "\nPredictions\n" in plan_text(unraced)
    assert "<h2>Predictions</h2>" in page_html(unraced)
