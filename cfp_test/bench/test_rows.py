"""Ratios, pay-back and comparisons, from rows with known times."""

import pytest

from cfp_test.bench.made_rows import ROWS, made, row
from cfp_test.bench.rows import (
    best,
    changes,
    pays_after,
    pytorch_rows,
    ratios,
    rows_of,
)


def test_best_of_a_group_is_the_fastest_that_ran():
    assert best(ROWS, "handwritten") == ROWS[2]
    assert best(ROWS, "planned") == ROWS[0]
    assert best(ROWS, "pytorch") is None


def test_ratios_are_to_the_best_of_each_group():
    assert ratios(ROWS) == {
        "planned / best handwritten": pytest.approx(0.9),
        "planned / best cost model": pytest.approx(0.5),
        "planned / best preset": pytest.approx(9 / 8),
    }
    assert ratios(ROWS[2:]) == {}


def test_planning_is_paid_for_by_what_steps_save():
    # One millisecond a step against a person, nine against the model.
    found = pays_after(ROWS, planning_seconds=9.0)
    assert found == {"handwritten": 9000, "cost_model": 1000, "preset": None}


def test_rows_survive_json():
    data = made(ROWS)
    assert rows_of(data) == ROWS
    assert data["planning_seconds"] == 10.0
    assert data["competitors"][0]["median_ms"] == 9.0
    assert data["competitors"][4]["median_ms"] is None


def test_rows_of_pytorch_are_those_of_the_same_configuration():
    one = {
        "model": "gpt",
        "devices": 4,
        "options": {"layers": 4, "batch": 24},
        "name": "FSDP2",
        "status": "ok",
        "samples_ms": [3.0, 5.0],
    }
    others = [
        {**one, "devices": 8},
        {**one, "options": {"layers": 2, "batch": 24}},
        {**one, "model": "bert"},
    ]
    wanted = {"model": "gpt", "devices": 4, "options": {"layers": 4, "batch": 24}}
    (found,) = pytorch_rows([one, *others], wanted)
    assert (found.name, found.group, found.median_ms) == ("FSDP2", "pytorch", 4.0)
    assert "planned / best PyTorch" in ratios([*ROWS, found])


def test_comparison_with_earlier_results():
    before = {"configurations": [made([row("planned", "planned", 10.0)])]}
    now = {
        "configurations": [
            made(ROWS),
            made([row("planned", "planned", 1.0)], name="another"),
        ]
    }
    assert changes(before, now) == [("gpt, 4 layers", "planned", 10.0, 9.0)]
