"""Steps by hand under sets of compiler options, and when their collectives begin."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from cfp_test.results.pages import Figures, fixed, table

_BEGINS = ("between", "with_long", "inside", "at_end")


def schedules(data: Mapping[str, Any]) -> Figures:
    """Tables of times in turn and of traces; a run is one process."""
    plain = {
        (row["run"], row["step"]): statistics.median(row["samples_ms"])
        for row in data["rows"]
        if not row["options"]
    }
    times, traces = [], []
    for row in data["rows"]:
        way = [row["run"], row["step"].replace("=", ", "), row["options"] or "none"]
        samples = row["samples_ms"]
        median_ms = statistics.median(samples)
        low, high = fixed(min(samples)), fixed(max(samples))
        over = median_ms / plain[row["run"], row["step"]]
        times.append([*way, fixed(median_ms), f"{low} to {high}", fixed(over, 3)])
        if sent := row["sending"]:
            counts = [fixed(sent[name], 1) for name in _BEGINS]
            waits = [fixed(sent[name], 1) for name in ("waiting_ms", "sending_ms")]
            traces.append([*way, *waits, *counts])
    return {
        **{name: data[name] for name in ("device", "jax", "python", "date", "commit")},
        "times": table("run | step | options | ms | samples | of none", times),
        "traces": table(
            "run | step | options | nothing computes, ms | collectives, ms | begin "
            "between long kernels | in the first twentieth of one | later | in its "
            "last 0.06 ms",
            traces,
        ),
    }
