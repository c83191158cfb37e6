"""What plans of `attention_planned` are estimated to need now, without a GPU.

    python -m cfp_test.bench.attention_estimated FILE.json

FILE.json is that of `docs/results`; its rows of plans get another figure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from cfp.context import open_context
from cfp.devices.described import described
from cfp.passes.pipeline import analyze_step, decide
from cfp.passes.profile import profile
from cfp.passes.search import search
from cfp.planner_settings import PlannerSettings
from cfp.program.step import flatten_step
from cfp.targets import resolve
from cfp_test.bench.attention_planned import PARTS_OF_VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    estimate_again(parser.parse_args().file)


def estimate_again(path: Path) -> None:
    """Adds to rows of plans what their memory is estimated at now, without a GPU.

    Of those for which the same is chosen now.
    """
    page = json.loads(path.read_text())
    settings = PlannerSettings(
        attention=("cudnn", "chunked"), cross_entropy=PARTS_OF_VOCABULARY, race=False
    )
    analyzed: dict[str, Any] = {}
    for row in page["rows"]:
        if "budget" not in row:
            continue
        if row["target"] not in analyzed:
            words = row["target"].split()
            found = resolve(words[0], words[1:])
            step = flatten_step(found.step, found.args, donate_argnums=found.donate)
            analyzed[row["target"]] = analyze_step(step, described("8xh200", x=8))
        one = analyzed[row["target"]]
        # So much that what was chosen then is chosen now.
        budget = row["budget"] and max(row["budget"], row["peak_bytes"])
        least = budget or max(page["memory_bytes"], row["peak_bytes"])
        with (
            tempfile.TemporaryDirectory() as folder,
            open_context(one.mesh, folder, int(1.1 * least), settings) as context,
        ):
            solution = search(context, one.analysis, profile(context, one.analysis))
            plan, _ = decide(context, one.analysis, solution)
        is_same = _choice_lines(repr(plan)) == _choice_lines(row["told"])
        row["estimated_again_bytes"] = plan.predicted_bytes if is_same else None
        print(row["name"], row["budget"], row["estimated_again_bytes"], flush=True)
    path.write_text(json.dumps(page, indent=1) + "\n")


def _choice_lines(told: str) -> list[str]:
    """What is said of segments, without figures."""
    return told[told.index("segment 0") : told.index("  arguments:")].split()


if __name__ == "__main__":
    main()
