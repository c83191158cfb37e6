"""Plans made on one H200, beside what was recorded on four.

    python -m cfp_test.bench.planned_on_one_data FILE.jsonl ...

Reads what `cfp_test.bench.planned_on_one` wrote, and writes
``docs/results/planned_on_one_h200_202611.json``. For each plan the recorded program is
looked for that is nearest to it: of which the fewest blocks are sharded, or have their
parameters stored, in another way.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from cfp import described
from cfp.passes.pipeline import analyze_step
from cfp.plan.describe import plan_rows, plan_segments
from cfp.plan.parts import PlanRow, PlanSegment, roles_text
from cfp.plan.plan import Plan
from cfp.presets.presets import presets
from cfp.targets import resolve
from cfp.view.words import storage_text
from cfp_test.bench.one_as_n_data import FILE as RECORDED
from cfp_test.bench.one_as_n_data import RESULTS

FILE = RESULTS / "planned_on_one_h200_202611.json"
Blocks = list[tuple[str, str, str]]


def recorded_blocks(rows: Iterable[dict[str, Any]]) -> Blocks:
    """Shardings of blocks and storage of parameters in a recorded plan."""
    return [(one["op"], one["sharded"], one["storage"]) for one in rows]


def blocks_of(rows: Sequence[PlanRow], segments: Sequence[PlanSegment]) -> Blocks:
    """Shardings of each block, and the storage of its parameters."""
    return [
        (
            row.op,
            roles_text(row.strategy),
            storage_text(segments[row.segment], short=True),
        )
        for row in rows
    ]


def preset_blocks(target: str) -> dict[str, Blocks]:
    """The blocks of a program under each preset."""
    words = target.split()
    found = resolve(words[0], words[1:])
    step = found.flatten()
    analysis = analyze_step(step, described("4xh200")).analysis
    return {
        name: blocks_of(
            plan_rows(analysis, choice), plan_segments(analysis, choice, None)
        )
        for name, choice in presets(analysis.frame).items()
    }


def nearest(row: dict[str, Any], known: dict[str, Blocks]) -> dict[str, Any]:
    """The recorded program that is nearest to a plan, and what it takes."""
    links = "P2P off" if row["cluster"] == "P2P off" else "NVLink"
    plan = Plan.from_json(row["plan"], allowed_options=[*row["plan"]["options"]])
    own = blocks_of(plan.rows, plan.segments)
    found = []
    for one in json.loads(RECORDED.read_text())["programs"]:
        times = one["recorded_ms"].get(links)
        preset, _, rest = one["name"].partition(", ")
        if one["devices"] != 4 or one["target"] != row["target"] or not times:
            continue
        if preset not in known:
            kept = json.loads((RESULTS / preset).read_text())
            known[preset] = recorded_blocks(kept["rows"])
        theirs = known[preset]
        assert len(theirs) == len(own)
        unlike = sum(a != b for a, b in zip(own, theirs, strict=True))
        # Of one choice that with the plan's compiler options comes first.
        large = "large" in row["winner"]
        other = ("large" in rest) != large
        found.append((unlike, other, statistics.median(times), one["name"]))
    best = min(found, key=lambda item: item[2])
    unlike, _, ms, name = min(found)
    return {
        "nearest": name,
        "unlike_blocks": unlike,
        "blocks": len(own),
        "nearest_ms": ms,
        "best": best[3],
        "best_ms": best[2],
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    rows: list[dict[str, Any]] = []
    known: dict[str, dict[str, Blocks]] = {}
    for file in sys.argv[1:]:
        for line in Path(file).open():
            row = json.loads(line)
            if "failure" not in row and row["part"] == "chosen":
                target = row["target"]
                known.setdefault(target, preset_blocks(target))
                row |= nearest(row, known[target])
            row.pop("plan", None)
            rows.append(row)
    FILE.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
