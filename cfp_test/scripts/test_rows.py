"""A run that was ended goes on where it was."""

import json

import pytest

from cfp_test.scripts import check_programs
from cfp_test.scripts.rows import Rows


def test_rows_are_found_again_by_the_next_run(tmp_path):
    file = tmp_path / "rows.json"
    rows = Rows(file, {"meshes": ("x=4",)})
    assert rows.find(name="a") is None
    rows.add({"name": "a", "mesh": "x=4", "passed": True})
    again = Rows(file, {"meshes": ("x=4",)})
    row = again.find(name="a", mesh="x=4")
    assert row is not None and row["passed"] and row["commit"] and row["date"]
    assert again.find(name="a", mesh="x=8") is None
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_rows_of_another_run_are_not_mixed(tmp_path):
    file = tmp_path / "rows.json"
    Rows(file, {"level": 0}).add({"name": "a"})
    with pytest.raises(ValueError, match="with another level"):
        Rows(file, {"level": 2})
    more = Rows(file, {"level": 0}, about={"programs": ["a", "b"]})
    more.add({"name": "b"})
    assert json.loads(file.read_text())["programs"] == ["a", "b"]
    with pytest.raises(ValueError, match="with another programs"):
        Rows(file, {"level": 0})


def test_where_a_plan_shards_nothing_a_preset_is_checked_and_nothing_runs_twice(
    tmp_path, monkeypatch
):
    ran = []

    def run(name, make, mesh, cache, race, sharding):
        ran.append((name, mesh, sharding))
        blocks = int(sharding or name == "sharded")
        return {
            "name": name,
            "mesh": mesh,
            "sharding": sharding,
            "sharded": {"arguments": 0, "blocks": blocks},
            "passed": name != "wrong",
        }

    monkeypatch.setattr(check_programs, "run", run)
    programs = {"sharded": object(), "whole": object(), "wrong": object()}
    file = tmp_path / "rows.json"
    for _ in range(2):
        rows = Rows(file, {})
        assert check_programs.run_all(programs, ["x=4"], rows, False) == 2
        assert ran == [
            ("sharded", "x=4", False),
            ("whole", "x=4", False),
            ("whole", "x=4", True),
            ("wrong", "x=4", False),
            ("wrong", "x=4", True),
        ]
    assert len(json.loads(file.read_text())["rows"]) == 5
