"""The page of plans that one GPU chose for two, beside those that two chose.

    python -m cfp_test.bench.chosen_page FOLDER/chosen_on_one.jsonl

adds what `cfp_test.bench.chosen_on_one` measured to
``docs/results/chosen_on_one_gpux2_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from datetime import UTC, datetime
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
        run = [name, row["device_kind"].split()[1], row["date"]]
        for how, plan in row["plans"].items():
            samples_ms, expected_ms = plan["samples_ms"], plan["predicted_ms"]
            median_ms = statistics.median(samples_ms)
            steps.append(
                [
                    *run,
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
                [*run, how, one["name"], f"{one['ms']:.2f}"] for one in plan["race"]
            ]
    counts = {
        len(p["samples_ms"]) for row in data["rows"] for p in row["plans"].values()
    }
    runs = {row["date"]: row for row in data["rows"]}
    kinds = "model | GPUs | date | chosen on"
    return {
        "hardware": "; ".join(
            f"2 {row['device_kind']}, {date}, at commit {row['commit']}"
            for date, row in runs.items()
        ),
        "jax": ", ".join(dict.fromkeys(row["jax"] for row in data["rows"])),
        "samples": " or ".join(map(str, sorted(counts))),
        "steps": table(
            f"{kinds} | plan | planning s | predicted ms | step ms | samples "
            "| of what two chose",
            steps,
        ),
        "races": table(f"{kinds} | program | predicted or measured ms", races),
    }


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    date = datetime.now(UTC).date().isoformat()
    new = [{**row, "date": date} for row in map(json.loads, lines)]
    # Of a model that was begun again the last row has all samples.
    rows = {
        (row["date"], row["model"]): row
        for row in [*json.loads(FILE.read_text())["rows"], *new]
    }
    FILE.write_text(json.dumps({"rows": [*rows.values()]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
