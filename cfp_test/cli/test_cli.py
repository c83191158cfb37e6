"""The command line from the outside: what it prints, and how it fails."""

import gc
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cfp import __main__, __version__, cli
from cfp.profiling.store import ProfileStore
from cfp_test.cli.cli_runner import (
    Outcome,
    environment,
    refusals,
    run_batch,
    run_one,
)
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import end_of, running, until

TOYS = str(Path(__file__).with_name("toy_targets.py"))
TOY = f"{TOYS}:toy"
HALF = f"{TOYS}:half"
ON_CPU = ("--platform", "cpu", "--devices", "4")
ANY_PRESET = ("--preset", "data_parallel", "--workdir", "work")
TIGHT_PRESET = ("--preset", "zero1", "--memory-budget", "99B", "--workdir", "tight")
FEW = ("--workdir", "work", "--per-kind", "2", "--quick")
STRICT = ("--steps", "2", "--tolerance", "1e-9")

# (command line, part of the message). All end with code 2 and nothing on stdout. Those
# that reach a device ask for the same four, since they share a process.
MISTAKES: list[list[str]] = [
    ["plan", "gtp"],
    ["plan", "absent.py:step"],
    ["plan", "gpt", "--layrs", "2"],
    ["plan", TOY, "--deivces", "4"],
    ["plan", "--jsno", *ON_CPU],
    ["plan", TOY, "--mesh", "x:4"],
    ["plan", TOY, "--mesh", "x=2,y=0"],
    ["plan", TOY, "--mesh", "x=2,x=2"],
    ["plan", TOY, "--mesh", "x=2", "--devices", "4"],
    ["plan", TOY, "--platform", "npu"],
    ["plan", TOY, "--platform", "gpu"],
    ["plan", TOY, *ON_CPU, "--memory-budget", "lots"],
    ["plan", TOY, *ON_CPU, "--pin", "weights"],
    ["plan", TOY, *ON_CPU, "--pin", "bias=x"],
    ["plan", TOY, *ON_CPU, "--pin", "weights/up=y"],
    ["plan", TOY, *ON_CPU, "--pin", "weights/up=None,None,x"],
    ["plan", TOY, *ON_CPU, "-o", "/dev/null/plan.json"],
    ["plan", TOY, *ON_CPU, "--workdir", "/proc/cfp"],
    ["plan", "no_such_file.py:step", "--preset", "fsdp"],
    ["plan", TOY, *ON_CPU, "--workdir", "work", "--preset", "x=data,y=tensor"],
    ["plan", TOY, *ON_CPU, "--donate", "3"],
    ["plan", TOY, *ON_CPU, "--donate", "0,3"],
    ["plan", TOY, *ON_CPU, "--static", "1", "--static", "0,4"],
    ["plan", TOY, *ON_CPU, "--donate", "0,x"],
    ["plan", f"{TOYS}:with_static", *ON_CPU],
    ["plan", TOY, "--devices", "64"],
    ["analyze", TOY, "--devices", "64"],
    ["analyze", TOY, *ON_CPU, "--workdir", "/proc/cfp"],
    ["search", TOY, *ON_CPU, "--workdir", "empty"],
    ["show", "absent.json"],
    ["show", "."],
    ["show", "damaged.json"],
    ["show", "other.json"],
    ["run", TOY, "--plan", "damaged.json", "--preset", "zero1"],
    ["run", TOY, "--plan", "damaged.json"],
    ["run", TOY, "--plan", "p.json", "--memory-budget", "1GiB"],
    ["run", TOY, *ON_CPU, "--memory-budget", "lots"],
    ["run", TOY, *ON_CPU, *TIGHT_PRESET],
    ["run", f"{TOYS}:never_again", "--donate", "0", *ON_CPU, *ANY_PRESET],
    ["profile", "--export", "out.jsonl", "--workdir", "empty/er"],
    ["profile", "--import", "absent.jsonl"],
    ["profile", "--import", "damaged.json"],
    ["profile", "--curves", "toy.py:step"],
    ["profile", "--link", "450", TOY],
    ["profile"],
    ["show", "p.json", "--explain", "--diff", "q.json"],
    ["show", "p.json", "--block", "up"],
    ["plan"],
    ["plan", TOY, "--devices", "four"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def outcomes(folder) -> list[Outcome]:
    (folder / "damaged.json").write_text('{"format": 1, "mesh_axes"')
    (folder / "other.json").write_text('{"format": 1000}')
    return run_batch([line for line in MISTAKES], folder)


def test_mistakes_end_in_one_message(outcomes, golden):
    golden("mistakes", refusals(MISTAKES, outcomes))


@pytest.mark.smoke
def test_version_and_help(folder):
    lines = [["--version"], ["--help"]]
    commands = ["plan", "analyze", "profile", "search", "run", "show"]
    lines += [[command, "--help"] for command in commands]
    version, overview, *details = run_batch(lines, folder)
    assert version.out == f"cfp {__version__}\n"
    for command, text in zip(commands, details, strict=True):
        assert command in overview.out
        assert text.code == 0
        assert f"Example: cfp {command}" in text.out


def test_there_are_ten_commands_and_ten_options_come_first(folder):
    overview, details = run_batch([["--help"], ["plan", "--help"]], folder)
    commands = overview.out.split("Commands:\n")[1]
    assert re.findall(r"^  ([a-z]+) ", commands, re.M) == [
        *("plan", "run", "show", "verify", "export"),
        *("analyze", "profile", "search", "doctor", "operators"),
    ]
    options = re.findall(r"^  (?:-\w, )?--([a-z-]+) ", details.out, re.M)
    assert options[:10] == [
        *("devices", "mesh", "for", "platform", "memory-budget", "time-budget"),
        *("preset", "choose", "pin", "donate"),
    ]


@pytest.mark.explained("There are too few devices")
def test_too_few_devices_names_the_remedy(folder):
    outcome = run_one(
        *("plan", TOY, "--devices", "4"),
        folder=folder,
        python=sys.executable,
        JAX_PLATFORMS="cpu",
    )
    assert outcome.code == 2
    assert "the mesh x=4 needs 4, and here are" in outcome.err
    assert "--platform cpu" in outcome.err


def test_looking_at_a_program_takes_no_measurements(folder):
    lines = [
        ["analyze", TOY, *ON_CPU, "--workdir", "look"],
        ["analyze", f"{TOYS}:talkative", *ON_CPU, "--json"],
    ]
    analysed, analysed_json = run_batch(lines, folder)
    flops = 5 * 2 * 16 * 32 * 64
    assert "2 blocks, 1 segment" in analysed.out
    assert f"{flops / 1e6:.3g} MFLOP per step" in analysed.out
    assert not [line for line in analysed.out.split("\n") if line != line.rstrip()]
    assert (folder / "look" / "debug_analysis_global" / "strategy_map.txt").exists()
    assert not list(folder.glob("look/*.sqlite"))
    found = json.loads(analysed_json.out)
    assert [len(s["strategies"]) for s in found["segments"]] == [2]
    assert {"x"} < {name.split("/")[0] for name in found["arguments"]}
    # Forward, and both gradients but that of the data.
    assert found["flops"] == flops
    assert "This is no JSON." in analysed_json.err


@pytest.fixture(scope="module")
def planned(folder) -> tuple[Outcome, Path]:
    """A plan in JSON, saved too.

    Its process has another seed of hashes than those that read what it stored.
    """
    path = folder / "plan.json"
    outcome = run_one(
        *(
            "plan",
            f"{TOYS}:talkative",
            *ON_CPU,
            "--workdir",
            "work",
            "--per-kind",
            "2",
            "--quick",
            "--measure",
        ),
        *("--pin", "weights/up=None,x", "-o", str(path), "--json", "--quiet"),
        folder=folder,
        python=sys.executable,
    )
    return outcome, path


def test_plan_prints_one_json_document(planned):
    outcome, path = planned
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    rates = found.pop("throughput")
    assert rates["step_ms"] == found["measured_ms"]
    assert found == json.loads(path.read_text())
    assert found["race"] and found["rows"]
    specs = dict(zip(found["arg_names"], found["arg_specs"], strict=True))
    assert specs["weights/up"] == [[], ["x"]]
    # Asked to be quiet, nothing tells of progress.
    assert outcome.err == "This is no JSON.\n"


@pytest.mark.explained("Measurements are missing")
def test_show_and_search_know_what_was_found(planned, folder):
    _, path = planned
    common = [*ON_CPU, *FEW]
    shown, again, searched, missing = run_batch(
        [
            ["show", str(path)],
            ["plan", TOY, *common, "--measure", "--pin", "weights/up=None,x"],
            ["search", TOY, *common, "--pin", "weights/up=None,x", "--no-race"],
            ["search", TOY, *common, "--no-race"],
        ],
        folder,
    )
    assert "all-reduce" in shown.out or "all-gather" in shown.out
    assert "0 strategies measured" in again.out
    assert "0 strategies measured" in searched.out
    assert "Race" not in searched.out
    assert missing.code == 2
    assert "measurements are missing" in missing.err


def test_measurements_travel(planned, folder):
    theirs = ["--workdir", "elsewhere"]
    out, into = run_batch(
        [
            ["profile", "--export", "records.jsonl", "--workdir", "work"],
            ["profile", *(2 * ["--import", "records.jsonl"]), *theirs],
        ],
        folder,
    )
    wanted = ["search", TOY, *ON_CPU, "--pin", "weights/up=None,x", *FEW[2:], *theirs]
    found = run_one(*wanted, "--no-race", folder=folder)
    count = int(out.out.split()[0])
    assert count == len((folder / "records.jsonl").read_text().splitlines()) > 10
    assert f"{count} measurements added from records.jsonl\n0 measure" in into.out
    assert found.code == 0, found.err


def test_run_checks_a_plan_and_a_preset(planned, folder):
    _, path = planned
    checked, preset, low, other = run_batch(
        [
            ["run", TOY, "--plan", str(path), "--steps", "3", "--check"],
            ["run", TOY, *ON_CPU, *ANY_PRESET, "--steps", "3", "--json"],
            ["run", HALF, *ON_CPU, *ANY_PRESET, "--check", "--json", *STRICT],
            ["run", HALF, "--plan", str(path)],
        ],
        folder,
    )
    assert checked.code == 0, checked
    assert "Check passed" in checked.out
    assert "Median step time" in checked.out
    assert "ran on random numbers (an integer scalar is 1)" in checked.out
    found = json.loads(preset.out)
    assert found["random_arguments"] is True
    losses = [step["metrics"]["loss"] for step in found["steps"]]
    # The weights come back, so they are fed back, donated or not.
    assert losses[0] > losses[1] > losses[2]
    assert found["checked"] is False
    strict = json.loads(low.out)
    assert strict["tolerance"] == 1e-9
    assert low.code == (0 if strict["passed"] else 1)
    assert strict["passed"] == (strict["failures"] == [])
    assert all(one["relative_l2"] > one["allowed"] for one in strict["failures"])
    assert other.code == 2
    assert "planned for float32[32,64], got bfloat16[32,64]" in other.err


def test_other_donation_than_the_plans_is_refused(folder):
    plan = ["plan", TOY, *ON_CPU, *ANY_PRESET, "--no-race", "--donate", "0"]
    given = ["--plan", "donating.json", "--donate"]
    made, same, *others = run_batch(
        [
            [*plan, "-o", "donating.json"],
            ["run", TOY, *given, "0", "--steps", "1"],
            ["run", TOY, *given, "1", "--steps", "1"],
        ],
        folder,
    )
    assert (made.code, same.code) == (0, 0), made.err + same.err
    for other in others:
        assert other.code == 2, other
        assert "The plan donates weights, and donate_argnums" in other.err
        assert "Leave out donate_argnums" in other.err


def test_run_plans_within_a_budget(folder):
    wanted = ["run", TOY, *ON_CPU, "--per-kind", "2", "--quick", "--no-race"]
    wanted += ["--steps", "1", "--json", "--workdir", "roomy"]
    within, none = run_batch(
        [[*wanted, "--memory-budget", size] for size in ("1GiB", "99B")], folder
    )
    assert json.loads(within.out)["plan"]
    assert none.code == 2
    assert "Raise the budget" in none.err


@pytest.mark.explained("No plan fits in the memory budget")
def test_a_budget_that_nothing_fits(planned, folder):
    budget = run_one(
        *("plan", TOY, *ON_CPU, *FEW),
        *("--pin", "weights/up=None,x", "--memory-budget", "100B"),
        folder=folder,
    )
    assert budget.code == 2
    assert "Raise the budget" in budget.err


@pytest.mark.explained("Interrupted")
def test_interrupting_keeps_what_was_measured(folder):
    """The first record is there, and the last one is not: that one would never end."""
    work = folder / "interrupted"
    store = work / "profiles.sqlite"
    words = [
        "-m",
        "cfp_test.cli.faulty",
        "profile",
        TOY,
        *ON_CPU,
        "--workdir",
        str(work),
    ]
    faults = {"FAULTS": '{"segment 0: 2": "sleep"}', "FAULT_LOG": str(folder / "log")}

    def has_measured() -> bool:
        if not store.exists():
            return False
        with ProfileStore(store) as found:
            return found.records() != []

    with running([quick_python(), *words], folder, environment(**faults)) as process:
        until(has_measured, process)
        process.send_signal(signal.SIGINT)
        out, err = end_of(process)
    assert process.returncode == 130, err
    assert out == ""
    assert f"kept in {store}" in err
    assert "Traceback" not in err
    assert has_measured()


def test_an_error_in_a_step_points_home_and_a_traceback_is_had_for_the_asking(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "def step(x):\n"
        "    return jnp.zeros(3) @ x\n"
        "def tiny():\n"
        "    return step, (jnp.zeros(4),)\n"
    )
    plan = ["plan", "mine.py:tiny", *ON_CPU, "--quiet"]
    plain, *asked = run_batch(
        [plan, [*plan, "--traceback"], ["--traceback", *plan]], tmp_path
    )
    assert "\n  at mine.py:3, in step: return jnp.zeros(3) @ x\n" in plain.err.replace(
        f"{tmp_path}/", ""
    )
    assert "Traceback" not in plain.err
    for one in asked:
        assert one.code == 2
        assert one.err.startswith(plain.err)
        assert "Traceback (most recent call last)" in one.err
        assert "TypeError: dot_general" in one.err


def test_garbage_is_collected_while_a_command_runs(monkeypatch):
    """Only while modules are loaded it is not."""
    found, frozen = [], gc.get_freeze_count()
    # This process goes on with other tests, whose garbage is not to stay.
    monkeypatch.setattr(gc, "freeze", lambda: found.append(gc.isenabled()))
    monkeypatch.setattr(cli, "main", lambda: found.append(gc.isenabled()))
    monkeypatch.setattr(sys, "argv", ["cfp", "plan"])
    __main__.main()
    assert found == [False, True] and gc.get_freeze_count() <= frozen


def sockets():
    return [one.detach() for one in socket.socketpair()]


@pytest.mark.parametrize(
    ("ends", "unbuffered"), [(os.pipe, ""), (os.pipe, "1"), (sockets, "")]
)
def test_a_command_goes_on_after_its_reader_has_left(ends, unbuffered):
    reader, writer = ends()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "cfp", "doctor", "--list"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=unbuffered),
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_writes_to_what_is_no_file(monkeypatch):
    found = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "argv", ["cfp", "doctor", "--list"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    found.flush()
    assert not end.value.code and b"packages" in found.buffer.getvalue()


LOADING = """
import sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cfp.cli":
            raise KeyboardInterrupt


sys.meta_path.insert(0, Finder())
from cfp.__main__ import main

main()
"""


def test_an_interrupt_while_modules_are_loaded_is_one_line():
    done = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "error: Interrupted.\n")
