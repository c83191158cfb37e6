"""Fully sharded over all devices, or within hosts and replicated across: estimates.

    python -m cfp_test.bench.hosts_described --out FILE [--compile]

Each row is a preset on a described mesh: its step and memory by estimate, and what its
collectives send along outer axes (from host to host, on a slice along the first) and
along the others alone. Bytes are those of the tensors of all groups of devices. With
``--compile``, which takes libtpu, programs for slices are compiled, too. Layers are not
in a loop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import jax

import cfp
from cfp.context import PlannerSettings
from cfp.targets import resolve
from cfp_test.bench.tpu_described import words_of

PRESETS = ("data_parallel", "fully_sharded", "hsdp")
# A target by name, a cluster, the mesh on it, and the share of the usual batch: of a
# GPT 16 sequences on each device, of which half fit on a v5e.
CASES = (
    ("gpt", "8x8xh100", {"x": 8, "y": 8}, 1.0),
    ("llama-7b", "8x8xh100", {"x": 8, "y": 8}, 1.0),
    ("gpt", "v5e:16x16", {"x": 16, "y": 16}, 0.5),
    ("gpt", "v6e:4x4", {"x": 4, "y": 4}, 1.0),
)


def rows_of(
    name: str, text: str, axes: dict[str, int], share: float, compiled: bool
) -> list[Any]:
    """The rows of one target on one mesh."""
    mesh = cfp.described(text, **axes)
    words = words_of(name, round(share * mesh.cluster.count))
    words = [word for word in words if word not in ("--scan", "--remat")]
    target = resolve(words[0], words[1:])
    compiled = compiled and bool(mesh.cluster.torus)

    def planned(**how: Any) -> cfp.Plan:
        return cfp.plan(
            target.step,
            *target.args,
            mesh=mesh,
            donate_argnums=target.donate,
            static_argnums=target.static,
            quiet=True,
            **how,
        )

    with tempfile.TemporaryDirectory() as folder:
        estimates = planned(cache_dir=folder)
        found = []
        for row in estimates.race:
            if row.name not in ("planned", *PRESETS):
                continue
            made, note = estimates, ""
            if row.name in PRESETS:
                settings = PlannerSettings(compile=compiled)
                how = {"preset": row.name, "settings": settings, "cache_dir": folder}
                made = planned(**how)
                note = next(one.note for one in made.race if one.name == row.name)
            found.append(
                {
                    "target": " ".join(words),
                    "cluster": text,
                    "mesh": axes,
                    "preset": row.name,
                    "estimate_ms": row.predicted_ms,
                    "estimate_bytes": row.peak_bytes,
                    **sent_by(made, mesh.outer),
                    "compiled_bytes": made.peak_bytes if compiled else None,
                    "note": note if compiled else "",
                }
            )
    return found


def sent_by(plan: cfp.Plan, outer: frozenset[str]) -> dict[str, float]:
    """Bytes and ms of collectives along outer axes, and of the others."""
    sizes, total = dict(plan.mesh_axes), dict.fromkeys(_SENT, 0.0)
    for move in (move for row in plan.rows for move in row.moves):
        side = "inner" if outer.isdisjoint(move.axes) else "outer"
        groups = prod(sizes.values()) // prod(sizes[axis] for axis in move.axes)
        total[f"{side}_bytes"] += groups * move.total_bytes
        total[f"{side}_ms"] += move.time_ms or 0.0
    return total


_SENT = ("outer_bytes", "outer_ms", "inner_bytes", "inner_ms")


def main() -> None:
    """Writes each row as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", default=[*range(len(CASES))])
    given = parser.parse_args()
    found: dict[str, Any] = {"jax": jax.__version__, "rows": []}
    for number in given.only:
        for row in rows_of(*CASES[number], given.compile):
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
