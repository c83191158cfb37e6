"""The driver of the seeds' scripts."""

import argparse
from pathlib import Path

import pytest

from cfp_test.bench.seeds import Command, chosen, commands


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
