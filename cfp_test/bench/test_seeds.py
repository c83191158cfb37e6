"""The driver of the seeds' scripts."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from cfp_test.bench.seeds import Command, chosen, commands, main, run
from cfp_test.passes import three_passes


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
        shell, script, *_ = command.words
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
    monkeypatch.setattr("cfp_test.bench.seeds.commands", lambda options: made)
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
    monkeypatch.setattr("cfp_test.bench.seeds.commands", lambda options: made)
    for only in ("a", "b1"):
        words = ["seeds", "--output", str(tmp_path), "--only", only]
        monkeypatch.setattr(sys, "argv", words)
        assert main() == 0
    rows = json.loads((tmp_path / "seeds.json").read_text())
    assert [(row["name"], row["tail"]) for row in rows] == [
        (name, name) for name in ("a1", "a2", "b1")
    ]
    assert capsys.readouterr().out.count("exit code 0") == 3
