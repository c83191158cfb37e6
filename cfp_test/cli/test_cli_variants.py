"""`cfp plan` with several mesh shapes and microbatches, from the outside."""

import json
from pathlib import Path

import pytest

from cfp import Plan
from cfp_test.cli import cli_runner
from cfp_test.cli.cli_runner import refusals, run_batch

TOYS = str(Path(__file__).with_name("toy_targets.py"))
TOY = f"{TOYS}:toy"
PARTS = f"{TOYS}:in_parts"
CPU = ["--platform", "cpu"]
FEW = ["--devices", "4", *CPU, "--workdir", "work", "--preset", "data_parallel"]
SHAPES = ["--mesh-shapes", "x=4", "--mesh-shapes", "x=2,y=2"]

# (command line, part of the message), all of them found out before anything is planned.
MISTAKES: list[list[str]] = [
    [TOY, *CPU, "--mesh", "x=4", "--mesh-shapes", "all"],
    [TOY, *CPU, *SHAPES, "--mesh-shapes", "x=8"],
    [TOY, *CPU, "--devices", "8", *SHAPES],
    [TOY, *CPU, "--mesh-shapes", "x:4"],
    [TOY, *CPU, "--mesh-shapes", "x=0"],
    [TOY, *FEW, "--microbatches", "1,2"],
    [PARTS, *FEW, "--microbatches", "1,3"],
    [PARTS, *FEW, "--microbatches", "0,2"],
    [PARTS, *FEW, "--microbatches", "1,,2"],
    ["gpt", *FEW, "--microbatches", "3"],
    ["gpt", *FEW, "--microbatches", "2", "--batch", "7"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def mistakes(folder) -> list[cli_runner.Outcome]:
    return run_batch([["plan", *line] for line in MISTAKES], folder)


def test_mistakes_end_in_one_message(mistakes, golden):
    golden("mistakes_variants", refusals(MISTAKES, mistakes))


@pytest.fixture(scope="module")
def saved_data(folder) -> dict:
    """Plans two meshes, each with two microbatches, and returns the command's JSON."""
    wanted = ["plan", PARTS, *FEW, "--mesh-shapes", "all", "--microbatches", "1,2"]
    wanted.append("--measure")  # So they race.
    [outcome] = run_batch([[*wanted, "--json", "-o", "plan.json"]], folder)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def name_of(data: dict) -> str:
    [name] = [one["name"] for one in data["figures"]["variants"] if one["taken"]]
    return name


def test_the_fastest_variant_is_the_plan(saved_data, folder):
    found = saved_data["figures"]
    times = {one["name"]: one["step_ms"] for one in found["variants"]}
    assert list(times) == [
        "x=4, microbatches 1",
        "x=4, microbatches 2",
        "x=2,y=2, microbatches 1",
        "x=2,y=2, microbatches 2",
    ]
    assert found["variants_raced"]
    fastest = name_of(saved_data)
    assert fastest == min(times, key=times.__getitem__)
    assert not any(one["note"] for one in found["variants"])
    saved = json.loads((folder / "plan.json").read_text())
    assert saved == {key: saved_data[key] for key in saved_data if key != "throughput"}
    plan = Plan.load(folder / "plan.json")
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh_axes)
    assert fastest.startswith(f"{mesh}, ")


def test_the_plan_runs_with_its_own_microbatches_only(saved_data, folder):
    count = int(name_of(saved_data)[-1])
    run = ["run", PARTS, "--plan", "plan.json", "--steps", "2", "--check"]
    right, wrong = run_batch(
        [[*run, "--microbatches", str(n)] for n in (count, 3 - count)], folder
    )
    assert right.code == 0, right.err
    assert "Check passed" in right.out
    assert wrong.code == 2
    assert "program is not the one that was planned" in wrong.err
    assert "or plan again." in wrong.err


def test_variants_are_shown_the_fastest_first(saved_data, folder):
    wanted = ["plan", PARTS, *FEW, "--mesh-shapes", "all", "--microbatches", "1,2"]
    wanted.append("--measure")  # So they race.
    several, one, plain = run_batch(
        [wanted, ["plan", PARTS, *FEW, "--microbatches", "2"], ["plan", TOY, *FEW]],
        folder,
    )
    table = several.out.partition(" compared\n")[2].partition("Step times")[0]
    rows = [line.split("|") for line in table.splitlines() if ", micro" in line]
    heads = [cell.strip() for cell in table.splitlines()[1].split("|")]
    place = heads.index("step ms")
    times = [float(row[place]) for row in rows]
    assert len(rows) == 4
    assert times == sorted(times)
    assert [row[1].strip() for row in rows] == ["*", "", "", ""]
    assert rows[0][2].strip() == name_of(saved_data)
    assert "timed in turn in one race" in several.out
    assert "Plan 'data_parallel'" in several.out
    assert "in one race" not in one.out  # There was none.
    assert "Give cfp run --microbatches 2, too." in one.out
    assert "Variants" not in plain.out
    assert "Give cfp run" not in plain.out
