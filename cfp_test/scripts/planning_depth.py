"""Times planning by a model's depth: cold, warm, and by pass.

    python cfp_test/scripts/planning_depth.py TARGET [TARGET'S OPTIONS]
        [--depths 4,16,48] [--mesh x=4] [--per-kind 16] [--quick] [--whole-race]
        [--platform cpu] [--devices N] [--json FILE]

The target has an option `--layers`. Every depth is planned in a process of its own,
twice with one store that is empty at first. All passes count, tracing and analysis
among them, but not what the final plan takes to compile: the winner's whole program,
which is compiled and run once. Prints a line for each plan, and appends JSON lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from cfp import api, platform
from cfp.cli.session import open_target
from cfp.planner_settings import DetailedSettings
from cfp.settings import ConstraintLevel


def measure(options: argparse.Namespace, rest: list[str]) -> None:
    """Plans one depth, and prints what it took as a line of JSON."""
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    settings = DetailedSettings(per_kind=options.per_kind)
    if options.quick:
        settings = replace(
            settings,
            in_context=False,
            plans=1,
            constraint_levels=(ConstraintLevel.EVERYTHING,),
        )
    if options.whole_race:
        settings = replace(settings, repeats=None)
    begun = time.perf_counter()
    plan = api.plan(
        target.step,
        *target.args,
        mesh=mesh,
        static_argnums=target.static,
        donate_argnums=target.donate,
        cache_dir=options.workdir,
        settings=settings,
    )
    seconds = time.perf_counter() - begun
    final = plan.search.get("winner_seconds", 0.0)
    row = {
        "target": [options.target, *rest],
        "what": options.what,
        "seconds": seconds,
        "seconds_before_the_final_compile": seconds - final,
        "winner": plan.winner,
        "measured_ms": plan.measured_ms,
        "search": dict(plan.search),
        "environment": dict(plan.environment),
        "race": [
            {"name": r.name, "time_ms": r.time_ms, "note": r.note} for r in plan.race
        ],
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--depths", default="4,16,48")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--per-kind", type=int, default=DetailedSettings().per_kind)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--whole-race", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workdir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.what:
        measure(options, rest)
        return
    for depth in options.depths.split(","):
        with tempfile.TemporaryDirectory() as workdir:
            for what in ("cold", "warm"):
                again = ["--workdir", workdir, "--what", what, "--layers", depth]
                done = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], *again],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                row = json.loads(done.stdout.splitlines()[-1])
                passes = ", ".join(
                    f"{name.removesuffix('_seconds')} {value:.1f}"
                    for name, value in row["search"].items()
                    if name.endswith("_seconds")
                )
                print(
                    f"{depth} layers, {what}: "
                    f"{row['seconds_before_the_final_compile']:.1f} s before the final "
                    f"compile, {row['seconds']:.1f} s in all ({passes}); "
                    f"{row['winner']} {row['measured_ms']:.2f} ms",
                    flush=True,
                )
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
