"""Compares every strategy of attention with a float32 oracle, and makes a page of it.

    python cfp_test/scripts/attention_matrix.py [--out FILE.json] [--limit N]

Cells that FILE.json has already are left out, so a run that was stopped goes on. Exit
code 1 if a cell is further from the oracle than allowed. Uses 8 virtual CPU devices;
takes about half an hour of one core that has nothing else to do.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from cfp_test.attention import matrix

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "results" / "attention_matrix_cpu_202611.json"
SAVED_EVERY = 5  # Cells.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, help="cells to compute now, at most")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["cells"]
    known = {row["name"] for row in rows}
    whole = list(matrix.cells())
    missing = [cell for cell in whole if cell.name not in known]
    for number, cell in enumerate(missing[: options.limit], 1):
        found = matrix.distances(cell)
        allowed = matrix.ALLOWED[cell.dtype]
        right = max(found.values()) <= allowed
        rows.append({"name": cell.name, "allowed": allowed, "relative_l2": found})
        if not right:
            print(f"too far: {cell.name}: {found}", flush=True)
        if number % SAVED_EVERY == 0:
            _save(options.out, rows, len(whole))
            print(f"{len(rows)} cells of {len(known) + len(missing)}", flush=True)
            jax.clear_caches()
    _save(options.out, rows, len(whole))
    return any(max(row["relative_l2"].values()) > row["allowed"] for row in rows)


def _save(path: Path, rows: list[dict[str, Any]], of: int) -> None:
    cells = ",\n".join(json.dumps(row) for row in rows)
    head = f'"jax": "{jax.__version__}", "of": {of}'
    text = f'{{{head}, "cells": [\n{cells}\n]}}\n'
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
