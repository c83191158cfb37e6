import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cfp.plan.parts import Role
from cfp.printable import merged_alike, merged_name, span_text
from cfp.race.programs import RaceRow
from cfp.view.rows import race_rows, segments_of
from cfp.view.text import explain_text, page_html, print_plan
from cfp_test.support.golden import plan_text
from cfp_test.view.plans import (
    RACE,
    axis_role,
    layers,
    make_plan,
    move,
    row,
)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([0, 0, 0], ["0.", "1-3.", "4."]),
        ([0, 1, 0, 1], ["0.", "1,3", "2,4.", "5."]),
        ([0, 0, 1, 0, 0, 1], ["0.", "1,4", "2,5", "3,6.", "7."]),
        ([0, 1, 2], ["0.", "1.", "2.", "3.", "4."]),
    ],
)
def test_repeats_are_found(kinds, found):
    """Each with a point behind the last of those that repeat together."""
    segments = segments_of(make_plan(layers(kinds), []))
    assert [span_text([*s.indices]) + "." * s.ends for s in segments] == found


def test_segments_that_are_sharded_otherwise_stand_apart():
    rows = layers([0, 0, 0])
    rows[2] = row(2, 0, "Net/layer_1/mlp", strategy=())
    found = segments_of(make_plan(rows, []))
    assert [len(s.indices) for s in found] == [1, 1, 1, 1, 1]


def test_layers_stand_together_if_a_last_one_has_more_parameters_beside_its_pins():
    rows = layers([0, 0, 0])
    for at, others in ((1, 1), (2, 1), (3, 2)):
        segment, block = rows[at]
        norms = [replace(segment.parameters[0], argument=9)] * others
        rows[at] = replace(segment, parameters=(*segment.parameters, *norms)), block
    found = segments_of(replace(make_plan(rows, []), pinned=(1, 2, 3)))
    assert [len(s.indices) for s in found] == [1, 3, 1]
    assert found[1].parameters.endswith(", 1 pinned")


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
        (["a_0/b_0", "a_1/b_1"], "a_0-1/b_0-1"),
        (["a_0/b_1", "a_1/b_2"], "a_0/b_1 ... a_1/b_2"),
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


def test_terminals_get_lines_and_pipes_plain_text():
    plan = make_plan(layers([0, 0]), RACE)
    pipe, terminal = io.StringIO(), io.StringIO()
    print_plan(plan, Console(file=pipe))
    print_plan(plan, Console(file=terminal, force_terminal=True, width=160))
    assert pipe.getvalue() == plan_text(plan)
    assert "│" in terminal.getvalue()


ESTIMATES = [
    RaceRow(
        name=name,
        predicted_ms=ms,
        note="estimated; not compiled or run",
        rung="estimated",
    )
    for name, ms in (("planned", 9.5), ("tensor_sequence_parallel", 1234.5))
]


def updates():
    """An optimizer's blocks without products: many, and mostly without names."""
    dim = axis_role(Role.DIM, 1, 64)
    made = [((), (dim,)), ((), (dim,)), ((move("all-gather", 8),), ())]
    how = {"updates": True}
    return [
        row(1, 9, f"select_n#{1 + i}", block=2 + i, strategy=to, moves=moves, **how)
        for i, (moves, to) in enumerate(made)
    ]


DATA, OWN, *OTHERS = RACE
NOISY = replace(DATA, samples_ms=(11.0, 12.0, 12.5, 13.0, 20.0), time_ms=12.5)
ODD_LAYERS = layers([0, 0, 0])
ODD_LAYERS[1] = row(1, 0, "Net/layer_0/mlp", moves=(move("all-to-all", 8),))
NORMS = [row(2, 9, f"step.py:7 dot_general#{1 + i}", block=3 + i) for i in range(9)]
UNTIMED = [replace(one, samples_ms=(), time_ms=None) for one in RACE]


def estimated(*rows):
    plan = make_plan([], rows or ESTIMATES)
    return replace(plan, rung="estimated", measured_ms=None)


TABLES = {
    "layers": (make_plan(layers([0, 0, 0, 0]), RACE), 160),
    "layers of which one sends otherwise": (make_plan(ODD_LAYERS, []), 170),
    "an optimizer's blocks": (make_plan([*layers([]), *updates()], RACE), 160),
    "alike blocks": (make_plan([*layers([0]), *NORMS], RACE), 160),
    "noise": (make_plan([row(0, 0, "Net/up")], [NOISY, OWN, *OTHERS]), 160),
    "no measurements": (replace(make_plan([], []), search={}), 160),
    "one that does not fit": (
        make_plan(layers([0]), [replace(DATA, note="does not fit"), OWN, *OTHERS]),
        100,
    ),
    "predictions": (replace(make_plan([], UNTIMED), measured_ms=None), 100),
    "estimates": (estimated(), 160),
    "estimates, narrow": (estimated(), 60),
    "estimates with notes": (
        estimated(
            replace(ESTIMATES[0], peak_bytes=2**20),
            replace(ESTIMATES[1], note="too large"),
        ),
        80,
    ),
    "one estimate": (estimated(ESTIMATES[0]), 160),
}


@pytest.mark.smoke
def test_tables(golden):
    texts = {name: plan_text(plan, width) for name, (plan, width) in TABLES.items()}
    golden("tables", texts)
    assert all(text.isascii() for text in texts.values())


@pytest.mark.parametrize("name", ["layers", "predictions"])
def test_a_page_has_the_tables_race(name):
    heading = "Race" if name == "layers" else "Predictions"
    plan, width = TABLES[name]
    assert f"<h2>{heading}</h2>" in page_html(plan)
    assert f"\n{heading}\n" in plan_text(plan, width)


def test_explanations_merge_an_optimizers_blocks_that_are_alike():
    text = explain_text(TABLES["an optimizer's blocks"][0])
    assert re.findall(r"select_n\S+", text) == ["select_n#1-2", "select_n#3"]


def test_estimated_memory_has_another_column_than_compiled_memory():
    planned, other = (replace(one, peak_bytes=2**20) for one in ESTIMATES)
    planned = replace(planned, note="compiled, not run")
    other = replace(other, peak_bytes=2**21)
    made = race_rows(estimated(planned, other))
    cells = zip(*(row.cells for row in made.rows), strict=True)
    columns = dict(zip(made.headings, cells, strict=True))
    assert columns["estimated memory"] == ("-", "2.00 MiB")
    assert columns["compiled memory"] == ("1.00 MiB", "-")


def show_once(show, plan):
    return " ".join(re.sub(r"<[^>]+>", " ", show(plan)).replace("&#39;", "'").split())
