"""Compares what two runs of `run_ulysses.sh` saved: every rank, each layer.

An exchange moves numbers and changes none: what ranks have after it is, put together,
what they had before, bit for bit. Between two runs all arrays are compared by relative
L2 distance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

# Relative L2 distance that two runs may have, by dtype.
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2}


def whole(folder: Path) -> dict[str, np.ndarray]:
    """Arrays put together from what the ranks saved, each with its place."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("rank*.npz")):
        with np.load(file) as saved:
            for name in saved["names"]:
                shape, start = saved[f"{name}:shape"], saved[f"{name}:start"]
                part = saved[f"{name}:data"]
                if name not in found:
                    found[name] = np.zeros(shape, part.dtype)
                place = tuple(
                    slice(s, s + n) for s, n in zip(start, part.shape, strict=True)
                )
                found[name][place] = part
    if not found:
        raise SystemExit(f"{folder} holds no rank*.npz of run_ulysses.sh")
    return found


def changed_by_exchange(arrays: dict[str, np.ndarray]) -> list[str]:
    """Names of arrays that an exchange changed."""
    return [
        name
        for name, before in arrays.items()
        if name.endswith(".before")
        and (after := arrays.get(name.replace(".before", ".after"))) is not None
        and before.tobytes() != after.tobytes()
    ]


def distances(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> dict[str, float]:
    """Relative L2 distance of what both runs have."""
    return {
        name: float(
            np.linalg.norm(one[name].astype(np.float64) - other[name])
            / max(np.linalg.norm(other[name].astype(np.float64)), 1e-30)
        )
        for name in sorted(one.keys() & other.keys())
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="DIR")
    parser.add_argument("--allowed", type=float, help="relative L2 distance")
    options = parser.parse_args()
    runs = [whole(run) for run in options.runs]
    changed = {
        str(path): names
        for path, run in zip(options.runs, runs, strict=True)
        if (names := changed_by_exchange(run))
    }
    dtype = json.loads((options.runs[0] / "row.json").read_text())["dtype"]
    allowed = ALLOWED[dtype] if options.allowed is None else options.allowed
    found = distances(*runs)
    far = {name: distance for name, distance in found.items() if distance > allowed}
    exchanged = [sum(name.endswith(".after") for name in run) for run in runs]
    print(
        json.dumps(
            {
                "compared": len(found),
                "worst": max(found.values()),
                "allowed": allowed,
                "too_far": far,
                "exchanged": exchanged,
                "changed_by_exchange": changed,
            }
        )
    )
    return 1 if far or changed or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
