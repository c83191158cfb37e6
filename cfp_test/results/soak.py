"""The page of the soak: an hour of planning, running, interrupts and kills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cfp_test.results.pages import Figures, table

# Until then each step was planned, interrupted and killed a few times.
_WARM_SECONDS = 600.0
_ROWS = 12
_COLUMNS = {
    "rss_mib": "resident, MiB",
    "trimmed_rss_mib": "after malloc_trim, MiB",
    "heap_held_mib": "held by malloc, MiB",
    "heap_used_mib": "in use, MiB",
    "open_files": "files",
    "threads": "threads",
    "live_arrays": "arrays",
    "live_executables": "executables",
    "python_blocks": "Python blocks",
    "store_bytes": "store, bytes",
    "store_records": "records",
}


def slope(samples: Sequence[Mapping[str, Any]], name: str) -> float:
    """Fits a line to what was noted after the warm-up: its rise in an hour."""
    warm = [one for one in samples if one["seconds"] >= _WARM_SECONDS]
    hours = [one["seconds"] / 3600 for one in warm]
    return float(np.polyfit(hours, [one[name] for one in warm], 1)[0])


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _run(data: Mapping[str, Any]) -> Figures:
    samples = data["samples"]
    step = max(1, len(samples) // _ROWS)
    shown = [
        *samples[::step],
        *([] if (len(samples) - 1) % step == 0 else samples[-1:]),
    ]
    plain = [one["plain"] | {"seconds": one["seconds"]} for one in samples]
    counts = [[what, f"{n:,}"] for what, n in sorted(data["counts"].items())]
    return {
        "minutes": f"{samples[-1]['seconds'] / 60:.0f}",
        "turns": str(samples[-1]["turns"]),
        "wrong": str(len(data["wrong"])),
        "difference": f"{data['largest_difference']:.1e}",
        "samples": table(
            "minute | " + " | ".join(_COLUMNS.values()),
            [
                [f"{one['seconds'] / 60:.0f}", *(_cell(one[name]) for name in _COLUMNS)]
                for one in shown
            ],
        ),
        "slopes": table(
            "MiB per hour, after 10 minutes | cfp | jax.jit alone",
            [
                [
                    _COLUMNS[name].removesuffix(", MiB"),
                    f"{slope(samples, name):+.1f}",
                    f"{slope(plain, name):+.1f}",
                ]
                for name in _COLUMNS
                if name.endswith("_mib")
            ],
        ),
        "counts": table("what | times", counts),
    }


def figures(hour: Mapping[str, Any], arena: Mapping[str, Any]) -> Figures:
    """The figures of the hour, and of the run with one arena."""
    about = {name: str(hour[name]) for name in ("jax", "python", "date")}
    other = {
        f"arena_{name}": text
        for name, text in _run(arena).items()
        if name not in ("counts", "difference")
    }
    return about | other | dict(_run(hour))
