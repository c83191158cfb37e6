"""Plans, runs and checks the zoo's models in two, three and four processes.

    python cfp_test/scripts/several_processes.py FILE.json [MODEL ...]

The processes are of this machine, each with virtual devices, and talk over its loopback
(gloo). Each row is one model on one layout: what every process says of the plan, and
whether all say the same. What the file has rows of is not run again; ``python -m
cfp_test.results`` makes the page of them.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp_test.models.tiny import TINY
from cfp_test.scripts.rows import Rows
from cfp_test.several import described, run_all

# Virtual devices of each process.
LAYOUTS = ((2, 2), (1, 1, 1), (1, 1, 1, 1), (2, 1))
WORKER = Path(__file__).parent / "several_worker.py"


def run(model: str, layout: tuple[int, ...]) -> dict:
    """One row.

    Raises:
        RuntimeError: a process failed.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(WORKER), model, folder]
        found = run_all(command, Path(folder), layout)
    if any(one.code for one in found):
        raise RuntimeError(described(found))
    rows = [
        json.loads(line.removeprefix("ROW "))
        for one in found
        for line in one.out.splitlines()
        if line.startswith("ROW ")
    ]
    first = rows[0]
    return {
        "model": model,
        "layout": ",".join(map(str, layout)),
        "plans": [row["plan"] for row in rows],
        "losses": [row["losses"] for row in rows],
        "passed": [row["passed"] for row in rows],
        "restored": [row["restored"] for row in rows],
        "restored_on": first["restored_on"],
        "winner": first["winner"],
        "raced": first["raced"],
        "sharded_arguments": first["sharded_arguments"],
        "preset_sharded_arguments": first["preset_sharded_arguments"],
        "largest": max(row["largest"] for row in rows),
        "preset_largest": max(row["preset_largest"] for row in rows),
        "tolerance": first["tolerance"],
        "plan_seconds": first["plan_seconds"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Runs what the file has no row of."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("models", nargs="*", default=list(TINY))
    given = parser.parse_args()
    rows = Rows(given.file, {"devices": "virtual devices of one machine, gloo"})
    for layout in LAYOUTS:
        for model in given.models:
            if rows.find(model=model, layout=",".join(map(str, layout))) is None:
                rows.add(run(model, layout))
                print(json.dumps(rows.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
