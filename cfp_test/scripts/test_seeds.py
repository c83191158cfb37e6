"""The driver of the seeds' scripts."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cfp_test.passes import three_passes
from cfp_test.results.seeds import page
from cfp_test.scripts.seeds import Command, chosen, commands, main, run
from cfp_test.scripts.seeds_collect import collected


def options_of(tmp_path, **more):
    given = {
        "devices": 2,
        "platform": "cpu",
        "output": tmp_path,
        "tiny": True,
        "limit": 3,
    }
    return argparse.Namespace(**given, seconds=1200.0, **more)


@pytest.mark.parametrize("tiny", [False, True])
def test_each_command_is_a_script_that_is_there(tmp_path, tiny):
    options = options_of(tmp_path)
    options.tiny = tiny
    found = list(commands(options))
    assert len({command.name for command in found}) == len(found)
    for command in found:
        shell, script, *more = command.words
        if command.group == "own":
            assert script == "-m" and find_spec(more[0])
        else:
            assert shell == "sh" and Path(script).is_file()


def test_only_says_what_runs_and_in_which_order():
    made = [Command(name, name[:1], []) for name in ("a1", "a2", "b1", "b2")]
    picked = chosen(made, ["b2", "a", "a1"])
    assert [command.name for command in picked] == ["b2", "a1", "a2"]
    assert chosen(made, None) == made


def test_what_ended_well_is_not_run_again_nor_begun_without_time(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "ran"
    code = f"from pathlib import Path; Path({str(file)!r}).open('a').write('x')"
    made = [Command("one", "g", [sys.executable, "-c", code])]
    monkeypatch.setattr("cfp_test.scripts.seeds.commands", lambda options: made)
    given = ["seeds", "--output", str(tmp_path)]
    for words, wanted in (
        (["--total", "0"], 1),
        ([], 0),
        ([], 0),
        (["--again"], 0),
    ):
        monkeypatch.setattr(sys, "argv", [*given, *words])
        assert main() == wanted
    assert file.read_text() == "xx"
    assert "one: no time was left" in capsys.readouterr().out


def test_the_passes_know_both_names_of_their_devices():
    parser = argparse.ArgumentParser()
    three_passes.add_options(parser, Path())
    for name in ("--devices", "--device_num"):
        assert parser.parse_args(["--mode", "all", name, "2"]).device_num == 2


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("print('done')", 0), ("exit(3)", 3), ("import time; time.sleep(9e5)", None)],
)
def test_a_command_leaves_its_output_and_its_code(tmp_path, code, wanted):
    options = options_of(tmp_path)
    seconds = 0.1 if wanted is None else options.seconds
    row = run(Command("one", "some", [sys.executable, "-c", code]), options, seconds)
    assert row.code == wanted
    assert (tmp_path / "one.txt").read_text().strip() == row.tail


def test_rows_of_earlier_runs_are_kept(tmp_path, monkeypatch, capsys):
    made = [
        Command(name, name[:1], [sys.executable, "-c", f"print({name!r})"])
        for name in ("a1", "a2", "b1")
    ]
    monkeypatch.setattr("cfp_test.scripts.seeds.commands", lambda options: made)
    for only in ("a", "b1"):
        words = ["seeds", "--output", str(tmp_path), "--only", only]
        monkeypatch.setattr(sys, "argv", words)
        assert main() == 0
    rows = json.loads((tmp_path / "seeds.json").read_text())
    assert [(row["name"], row["tail"]) for row in rows] == [
        (name, name) for name in ("a1", "a2", "b1")
    ]
    assert capsys.readouterr().out.count("exit code 0") == 3


def test_a_page_is_made_of_what_commands_left(tmp_path):
    """It names what was not reached, and no folder of the machine."""
    out = tmp_path / "out"
    out.mkdir()
    words = f"python3 {out}/a --json {out}/several.json"
    rows = [
        {"name": "processes", "command": f"/usr/bin/{words}", "code": 0},
        {"name": "gpt_A100_8GPU_24x2", "command": f"sh {out}/x.sh", "code": None},
    ]
    common = {"seconds": 9.0, "tail": "", "date": "2026-11-26T10:00:00"}
    text = json.dumps([{**row, **common} for row in rows])
    (out / "seeds.json").write_text(text)
    row = {"trial": 0, "fault": "kill", "at": 2, "met": True, "stored": 5, "again": 1}
    row |= {"more": 2, "off": 1e-7, "seconds": 3.0}
    (out / "faults.json").write_text(json.dumps({"rows": [row]}))
    found = collected([out], "Two devices,", "abc")
    assert [row["command"] for row in found["commands"]] == [
        "python a --json several.json",
        "sh x.sh",
    ]
    made = page(found, "some", "two devices")
    assert "| kill | 1 | 1 | 5 to 5 | 1 | 1 | 2 to 2 | 1.0e-07 | 3 to 3 |" in made
    assert "| gpt_A100_8GPU_24x2 | its time was over | 9 |" in made
    assert str(tmp_path) not in made
