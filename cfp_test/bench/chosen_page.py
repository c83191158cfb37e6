"""The page of plans that one GPU chose for two, beside those that two chose.

    python -m cfp_test.bench.chosen_page FOLDER/chosen_on_one.jsonl

writes what `cfp_test.bench.chosen_on_one` measured into
``docs/results/chosen_on_one_gpux2_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from cfp_test.results.pages import RESULTS, table

FILE = RESULTS / "chosen_on_one_gpux2_202611.json"
_NAMES = {"gpt": "GPT", "moe": "MoE"}


def figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables and figures of the page."""
    steps, races = [], []
    for row in data["rows"]:
        name = _NAMES[row["model"]]
        for how, plan in row["plans"].items():
            samples_ms, expected_ms = plan["samples_ms"], plan["predicted_ms"]
            median_ms = statistics.median(samples_ms)
            steps.append(
                [
                    name,
                    how,
                    plan["winner"],
                    f"{plan['planning_s']:.0f}",
                    f"{expected_ms:.1f}" if how == "one" else None,
                    f"{median_ms:.1f}",
                    f"{min(samples_ms):.1f} to {max(samples_ms):.1f}",
                    f"{row['ratio']:.3f}" if how == "one" else None,
                ]
            )
            races += [
                [name, how, one["name"], f"{one['ms']:.2f}"] for one in plan["race"]
            ]
    first = data["rows"][0]
    counts = {
        len(p["samples_ms"]) for row in data["rows"] for p in row["plans"].values()
    }
    return {
        "hardware": f"2 {first['device_kind']}",
        "jax": first["jax"],
        "date": data["date"],
        "commits": ", ".join(dict.fromkeys(row["commit"] for row in data["rows"])),
        "samples": " or ".join(map(str, sorted(counts))),
        "steps": table(
            "model | chosen on | plan | planning s | predicted ms | step ms | samples "
            "| of what two chose",
            steps,
        ),
        "races": table("model | on | program | predicted or measured ms", races),
    }


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    # Of a model that was begun again the last row has all samples.
    rows = {row["model"]: row for row in map(json.loads, lines)}
    page = {"date": "2026-11-26", "rows": [*rows.values()]}
    FILE.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main()
