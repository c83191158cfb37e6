"""Plans, runs and checks the zoo's models in two, three and four processes.

    python cfp_test/scripts/several_processes.py FILE.json [MODEL ...]
    python cfp_test/scripts/several_processes.py FILE.json --gpus [gpt moe]

The processes are of this machine, each with virtual devices, and talk over its loopback
(gloo). With `--gpus` each has one GPU, and one process with all of them runs the same,
so that its plan can be compared; the GPUs are CUDA_VISIBLE_DEVICES, or 0 and 1. Each
row is one model on one layout: what every process says of the plan, and whether all say
the same. What the file has rows of is not run again; ``python -m cfp_test.results``
makes the page of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp_test.distributed.several import described, run_all
from cfp_test.models.tiny import TINY
from cfp_test.scripts.rows import Rows

# Virtual devices of each process.
LAYOUTS = ((2, 2), (1, 1, 1), (1, 1, 1, 1), (2, 1))
WORKER = Path(__file__).parent / "several_worker.py"


def run(
    model: str, layout: tuple[int, ...], gpus: list[str] | None, cpu_sizes: bool
) -> dict:
    """One row.

    Raises:
        RuntimeError: a process failed.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(WORKER), model, folder, "" if cpu_sizes else "gpus"]
        found = run_all(command, Path(folder), layout, gpus=gpus)
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
        "choice": first["choice"],
        "shardings": [row["shardings"] for row in rows],
        "predicted_ms": first["predicted_ms"],
        "step_ms": [row["step_ms"] for row in rows],
        "plan_seconds": first["plan_seconds"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Runs what the file has no row of."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--gpus", action="store_true", help="one for each process")
    parser.add_argument("--seconds", type=float, default=1e9, help="then none begins")
    given = parser.parse_args()
    began, gpus, layouts = time.monotonic(), None, LAYOUTS
    devices = "virtual devices of one machine, gloo"
    models = given.models or list(TINY)
    if given.gpus:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        layouts = ((len(gpus),), (1,) * len(gpus))
        devices = _name_of_gpus()
        models = given.models or ["gpt", "moe"]
    rows, failed = Rows(given.file, {"devices": devices}), False
    todo = [(model, layout) for layout in layouts for model in models]
    if given.gpus:
        todo = [(model, layout) for model in models for layout in layouts]
    for model, layout in todo:
        if rows.find(model=model, layout=",".join(map(str, layout))) is not None:
            continue
        if time.monotonic() - began > given.seconds:
            print(f"{model} {layout}: no time was left", flush=True)
            failed = True
            continue
        try:
            rows.add(run(model, layout, gpus, cpu_sizes=not given.gpus))
        except RuntimeError as error:
            if not given.gpus:
                raise
            print(f"{model} {layout}: {error}", flush=True)
            failed = True
            continue
        print(json.dumps(rows.rows[-1]), flush=True)
    sys.exit(int(failed))


def _name_of_gpus() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return f"{done.stdout.splitlines()[0]}, NCCL"


if __name__ == "__main__":
    main()
