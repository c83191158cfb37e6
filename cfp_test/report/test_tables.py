import io

import pytest
from rich.console import Console

from cfp.plan.plan import Plan, PlanRow, RaceRow
from cfp.plan.text import collapse, merged_name
from cfp.program.graft import Constraints
from cfp.report import picture
from cfp.report.tables import plan_text, print_plan

SHARDED = {"attention": "x: rows (dim 0 of 8)", "mlp": "x: columns (dim 1 of 64)"}


def row(segment: int, kind: int, name: str, **changes) -> PlanRow:
    values = {
        "block": segment,
        "segment": segment,
        "kind": kind,
        "name": name,
        "op": "dot_general",
        "sharded": SHARDED.get(name.rpartition("/")[2], "replicated"),
        "storage": "sharded",
        "collectives": f"all-reduce x {16 + segment}.25 KiB",
        "segment_ms": 1.5 * (kind + 1),
    }
    return PlanRow(**{**values, **changes})


def layers(kinds: list[int]) -> list[PlanRow]:
    """One block per segment; the first and the last stand alone."""
    inner = [row(i + 1, k, f"Net/layer_{i}/mlp") for i, k in enumerate(kinds)]
    last = len(kinds) + 1
    return [row(0, 8, "Net/embedding"), *inner, row(last, 9, "Net/head")]


def make_plan(rows: list[PlanRow], race: list[RaceRow]) -> Plan:
    return Plan(
        fingerprint="0" * 64,
        mesh_axes=(("x", 4),),
        arg_names=(),
        arg_types=(),
        arg_specs=(),
        output_specs=(),
        constraints=Constraints({}, {}),
        donated=(),
        winner="planned",
        predicted_ms=9.5,
        measured_ms=10.25,
        peak_bytes=3 * 2**20,
        rows=tuple(rows),
        race=tuple(race),
        environment={"device_kind": "abacus"},
        search={
            "strategies_measured": 12,
            "strategies_cached": 3,
            "strategies_failed": 1,
            "profile_seconds": 20.04,
            "search_seconds": 0.5,
            "race_seconds": 7.0,
            "race_cached": 0.0,
        },
    )


RACE = [
    RaceRow(
        name="data_parallel",
        predicted_ms=11.0,
        samples_ms=(12.0, 12.5),
        time_ms=12.25,
        peak_bytes=5 * 2**20,
    ),
    RaceRow(
        name="planned",
        predicted_ms=9.5,
        samples_ms=(10.0, 10.5),
        time_ms=10.25,
        peak_bytes=3 * 2**20,
    ),
    RaceRow(
        name="zero1",
        predicted_ms=None,
        samples_ms=(12.0, 12.5),
        time_ms=12.25,
        peak_bytes=5 * 2**20,
    ),
    RaceRow(
        name="fully_sharded",
        predicted_ms=None,
        samples_ms=(),
        time_ms=None,
        peak_bytes=0,
        note="out_of_memory: needs 9 bytes",
    ),
]


@pytest.mark.smoke
def test_the_table_of_a_known_plan():
    text = plan_text(make_plan(layers([0, 0, 0, 0]), RACE))
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
        "x: columns (dim 1 of 64)",
        "sharded",
        "all-reduce x 17.25 KiB",
        "4 x 1.5",
    ]
    raced = [line.strip("|").split("|") for line in lines if " MiB |" in line]
    ranked = [cells[1].strip() for cells in raced]
    assert ranked == ["planned", "data_parallel", "zero1"]
    assert [cells[0].strip() for cells in raced] == ["*", "", ""]
    assert "the same program as zero1" in text
    assert "out_of_memory: needs 9 bytes" in text
    assert lines[-1] == (
        "12 strategies measured, 3 from the cache, 1 failed; "
        "profile 20.0 s, search 0.5 s, race 7.0 s"
    )


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
    repeats = collapse(layers(kinds))
    assert [(r.first, r.period, r.count) for r in repeats] == found


def test_segments_that_are_sharded_otherwise_stand_apart():
    rows = layers([0, 0, 0])
    rows[2] = row(2, 0, "Net/layer_1/mlp", sharded="replicated")
    assert [r.count for r in collapse(rows)] == [1, 1, 1, 1, 1]


def test_what_only_some_of_the_segments_send_is_said():
    rows = layers([0, 0, 0])
    rows[1] = row(1, 0, "Net/layer_0/mlp", collectives="all-to-all x 8.00 KiB")
    text = plan_text(make_plan(rows, []))
    assert "| all-reduce x 18.25 KiB; segment 1: all-to-all x 8.00 KiB |" in text


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["layer_0/mlp", "layer_1/mlp"], "layer_0-1/mlp"),
        (["layer_1/mlp", "layer_3/mlp"], "layer_1,3/mlp"),
        ([f"layer_{i}/mlp" for i in range(0, 12, 2)], "layer_0,2..10/mlp"),
        (["a/b"], "a/b"),
        (["a/b", "a/b"], "a/b"),
        (["a/b", "c/d"], "a/b ... c/d"),
    ],
)
def test_names_merge(names, merged):
    assert merged_name(names) == merged


def test_a_plan_without_measurements_prints_too():
    bare = make_plan([], [])
    text = plan_text(Plan.from_json({**as_data(bare), "search": {}}))
    assert text.count("\n") == 1


def as_data(plan: Plan) -> dict:
    import json

    return json.loads(plan.to_json())


def test_terminals_get_lines_and_pipes_plain_text():
    plan = make_plan(layers([0, 0]), RACE)
    pipe, terminal = io.StringIO(), io.StringIO()
    print_plan(plan, Console(file=pipe))
    print_plan(plan, Console(file=terminal, force_terminal=True, width=160))
    assert pipe.getvalue() == plan_text(plan)
    assert "│" in terminal.getvalue()


def test_a_picture_is_drawn_from_a_saved_plan(tmp_path, capsys):
    saved = tmp_path / "plan.json"
    drawn = tmp_path / "plan.svg"
    make_plan(layers([0, 0]), RACE).save(saved)
    assert picture.main([str(saved), str(drawn)]) == 0
    assert "layer_0-1/mlp" in drawn.read_text()
    assert picture.main([str(drawn), str(drawn)]) == 2
    assert "Cannot read a plan" in capsys.readouterr().err
    assert picture.main([]) == 2
