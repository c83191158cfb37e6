"""The page of what memory is estimated at, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from cfp_test.results.pages import Figures, fixed, table


def estimated(data: Mapping[str, Any]) -> Figures:
    """The page of what `cfp_test.bench.memory_estimated` wrote."""
    rows = data["rows"]
    shares = [row["estimated_bytes"] / row["peak_bytes"] for row in rows]
    near = sum(0.9 <= share <= 1.03 for share in shares)
    lines = [
        "# What memory is estimated at, of programs that were compiled for GPUs",
        "",
        f"{len(rows)} presets and strategies by hand, of which other pages have what "
        "they need as compiled, estimated without a GPU by "
        f"`python -m cfp_test.bench.memory_estimated --out FILE`, {data['date']}. "
        f"{min(shares):.0%} to {max(shares):.0%}, the middle one {median(shares):.0%}; "
        f"{near} are at 90 to 103 %.",
        "",
        table(
            "step | devices | strategy | kernels | estimated GB | compiled GB | | of",
            [
                [
                    f"`{row['target']}`",
                    row["devices"],
                    row["strategy"],
                    ", ".join([*row["kernels"], *_parts(row)]) or "as written",
                    fixed(row["estimated_bytes"] / 1e9, 1),
                    fixed(row["peak_bytes"] / 1e9, 1),
                    f"{share:.0%}",
                    f"[page]({row['page']}.md)",
                ]
                for row, share in zip(rows, shares, strict=True)
            ],
        ),
        "",
        'What estimates leave out is in docs/decisions.md, "What a sum reads in two '
        'orders of dims is in memory".',
    ]
    return {"page": "\n".join(lines) + "\n"}


def _parts(row: Mapping[str, Any]) -> list[str]:
    return [f"vocabulary/{row['parts']}"] if row["parts"] else []


def in_host(data: Mapping[str, Any]) -> Figures:
    """Plans with state in the memory of the host and without, as they ran."""
    rows = []
    for row in data["rows"].values():
        moved, budget = row["arguments_in_host"], row["budget_bytes"]
        name = f"{moved} arguments of the state in the host"
        rows.append(
            [
                name if moved else "plenty of memory",
                _gib(budget) if budget else "none",
                _gib(row["peak_bytes"]),
                _gib(row["host_bytes"]) if moved else "0",
                fixed(row["predicted_ms"], 1),
                fixed(row["step_ms"], 1),
                len(row["samples_ms"]),
            ]
        )
    head = (
        "plan | budget | memory of the device, compiled | in the memory of the host "
        "| predicted ms | ms | samples"
    )
    return {"table": table(head, rows)}


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
