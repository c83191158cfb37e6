"""A run that was ended goes on where it was."""

import json

import pytest

from cfp_test.bench.rows import Rows


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
