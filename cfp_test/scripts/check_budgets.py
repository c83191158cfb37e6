"""Checks every model of the zoo within a memory budget against one device.

    python cfp_test/scripts/check_budgets.py [--out FILE.json] [--platform cuda]
        [--mesh x=4] [--model gpt] [--size "--layers 4 --hidden 1024 ..."] [--race]

For each model, unrolled and scanned, on each mesh: asks ``cfp run`` for a plan within
1 KiB, takes of its error what would do, and has ``cfp run --check`` plan within that.
So segments are rematerialized, and the compiler rematerializes, as far as the platform
frees memory by it: each row says how many of both. Prints a line of JSON for each; exit
code 1 if any fails. With ``--out`` the rows are kept, and what it has rows of is not
run again; ``python -m cfp_test.results`` makes the page of them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp.units import parse_bytes
from cfp_test.scripts.rows import Rows

MODELS = ("gpt", "moe", "bert", "llama")
FORMS = ("--no-scan", "--scan")
MESHES = ("x=4", "x=2,y=2")
SMALL = "--layers 2 --hidden 32 --heads 4 --batch 8 --seq 16 --vocab 96 --dtype float32"
# Dense and expert layers take turns, so that two of each are four layers.
SMALL_MOE = SMALL.replace("--layers 2", "--layers 4") + (
    " --experts 8 --expert_group_size 32"
)
# Errors round up to three digits, and the leanest plan is found anew.
MARGIN = 1.01
TRIES = 4
_ROOT = Path(__file__).parents[2]
_NEEDS = re.compile(
    r"needs (?:about )?([\d.]+ (?:[KMGT]i)?B)|would do is about (\S+ \S+?),"
)


def needed_bytes(error: str) -> int | None:
    """Reads from an error what a plan needs; None if it says nothing of the kind."""
    found = _NEEDS.search(error)
    return parse_bytes(found[1] or found[2]) if found else None


def run(words: Sequence[str], budget_bytes: int) -> tuple[dict | None, str]:
    """Runs ``cfp run`` within a budget; returns its output and its error stream."""
    within = ["--memory-budget", f"{budget_bytes}B", "--check", "--json", "--quiet"]
    made = subprocess.run(
        [sys.executable, "-m", "cfp", "run", *words, *within],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])},
    )
    return (json.loads(made.stdout) if made.stdout.strip() else None), made.stderr


def check(words: Sequence[str]) -> dict:
    """One row: a target within the smallest budget that errors name."""
    started = time.perf_counter()
    budget, tried, found, error = 1024, [], None, ""
    for _ in range(TRIES):
        found, error = run(words, budget)
        needed = needed_bytes(error)
        if found is not None or needed is None:
            break
        tried.append(budget)
        budget = int(needed * MARGIN)
    row = {
        "budget_bytes": budget,
        "too_small_bytes": tried,
        "seconds": time.perf_counter() - started,
    }
    if found is None:
        return {**row, "passed": False, "error": error.strip()[-500:]}
    del found["steps"]  # their times say nothing here
    return {**row, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mesh", action="append", help="by default x=4 and x=2,y=2")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--size", help="options of the models, in place of small ones")
    parser.add_argument("--race", action="store_true", help="race the candidates")
    parser.add_argument("--workdir", default=".cfp-check", help="what was measured")
    parser.add_argument("--out", type=Path, help="keep the rows in a file, and go on")
    options = parser.parse_args()
    if options.platform == "cpu":  # Values are checked, not times.
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    how = ["--steps", "2", "--platform", options.platform]
    how += ["--workdir", options.workdir]
    if not options.race:
        how += ["--no-race", "--per-kind", "1", "--quick"]
    sizes = {
        model: options.size or (SMALL_MOE if model == "moe" else SMALL)
        for model in options.model or MODELS
    }
    rows = Rows(options.out, {"platform": options.platform, "race": options.race})
    failed = 0
    for mesh in options.mesh or MESHES:
        for model, size in sizes.items():
            for form in FORMS:
                words = [model, *size.split(), form, "--mesh", mesh]
                row = rows.find(run=" ".join(words))
                if row is None:
                    row = {"run": " ".join(words), **check([*words, *how])}
                    rows.add(row)
                    print(json.dumps(row), flush=True)
                failed += not row["passed"]
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
