"""Gradients that JAX scatters, as they are written and as cfp writes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from cfp_test.results.pages import Figures, fixed, table


def scatters(data: Mapping[str, Any]) -> Figures:
    """Tables of gradients alone and of whole steps."""
    gradients, steps = [], []
    for row in data["rows"]:
        ms = {way: statistics.median(all_) for way, all_ in row["samples_ms"].items()}
        spread = [
            f"{fixed(ms[way])} ({fixed(min(all_))} to {fixed(max(all_))})"
            for way, all_ in row["samples_ms"].items()
        ]
        line = [row["name"], *spread]
        if row["what"] == "step":
            over = fixed(ms["as cfp"] / ms["as written"], 3)
            gib = [fixed(row["temporary"][way] / 2**30) for way in ms]
            steps.append([*line, over, ", ".join(gib)])
        else:
            off = [f"{one / row['largest']:.1%}" for one in row["off"].values()]
            gradients.append([*line, *off])
    return {
        **{name: data[name] for name in ("device", "jax", "python", "date")},
        "gradients": table(
            "table and tokens | as written, ms | in float32, ms | as written off by | "
            "in float32 off by",
            gradients,
        ),
        "steps": table(
            "step | as written, ms | in float32, ms | words selected, too, ms | of as "
            "written | temporary GiB of each",
            steps,
        ),
    }
