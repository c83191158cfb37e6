"""The page of steps of four H200, beside what one of them that plays four says.

    python -m cfp_test.bench.played_four_page NVLINK/played.json OFF/played.json

writes what `cfp_test.bench.played` measured with ``--four``, with NVLink and with
``--p2p-off``, into ``docs/results/played_four_h200x4_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cfp.cost.step_time import Constants, partitioned_compute_ms, step_time
from cfp.devices.described import described
from cfp_test.bench import one_as_n
from cfp_test.bench.carried import rates_from_page
from cfp_test.bench.one_as_n import Pair
from cfp_test.bench.one_as_n_data import computed_from_json, schedule_from_json
from cfp_test.bench.played import Recorded
from cfp_test.bench.recorded import Case
from cfp_test.results.pages import table

FILE = Path(__file__).parents[2] / "docs" / "results" / "played_four_h200x4_202611.json"
LINKS = {"two": "NVLink", "off": "P2P off"}
_HIGHEST_MHZ = 1980.0  # Of an H200, as its driver says.


def pairs(data: dict[str, Any], constants: Constants | None = None) -> list[Pair]:
    """All programs over all links, with what is predicted of them on one."""
    known = described("4xh200").rates
    found = []
    for row in data["programs"]:
        curves = rates_from_page(data["curves"][row["links"]]).curves
        rates = replace(known, curves=curves)
        schedule, local = schedule_from_json(row), row["local"]
        predicted = step_time(
            schedule,
            rates,
            computation_ms=partitioned_compute_ms(
                schedule,
                computed_from_json(local["computed"]),
                rates,
                statistics.median(local["samples_ms"]),
            ),
            highest_clock=max(1.0, _HIGHEST_MHZ / local["clock_mhz"]),
            constants=constants,
        )
        name, _, rest = row["name"].partition(", ")
        found.append(
            Pair(
                row={
                    "target": name,
                    "name": rest,
                    "alone_ms": local["samples_ms"],
                    "clock_mhz": local["clock_mhz"],
                    "races_ms": [row["samples_ms"]],
                },
                links=LINKS[row["links"]],
                recorded_ms=statistics.median(row["samples_ms"]),
                predicted=predicted,
            )
        )
    return found


def summary(found: Sequence[Pair]) -> dict[str, tuple[float, float, float]]:
    """Median and worst error and the rank correlation, by group."""
    return {
        name: (
            statistics.median(abs(one.error) for one in group),
            max(abs(one.error) for one in group),
            one_as_n.rank_correlation(
                [one.predicted.total_ms for one in group],
                [one.recorded_ms for one in group],
            ),
        )
        for name, group in one_as_n.groups(found).items()
    }


def figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables and figures of the page."""
    found = pairs(data)
    reached = {
        name: one_as_n.reach(group) for name, group in one_as_n.groups(found).items()
    }
    equal = Constants(slowed_by=0.755, slowed_by_all_reduce=0.755)
    before = one_as_n.groups(pairs(data, equal))
    samples = sorted({len(row["samples_ms"]) for row in data["programs"]})
    return {
        "hardware": data["hardware"],
        "jax": data["jax"],
        "date": data["date"],
        "count": str(len(found)),
        "samples": f"{samples[0]} to {samples[-1]}",
        "before": table(
            "group | programs | median error | worst | mean | rank correlation",
            [one_as_n.summary(name, group) for name, group in before.items()],
        ),
        **one_as_n.tables_of(found, reached),
    }


def main() -> None:
    page: dict[str, Any] = {
        "hardware": "4 NVIDIA H200, one host, power limit 700 W",
        "date": "2026-11-28",
        "curves": {},
    }
    programs = []
    for links, file in zip(LINKS, sys.argv[1:], strict=True):
        found = json.loads(Path(file).read_text())
        page["jax"] = found["jax"]
        page["curves"][links] = found["curves"][links]
        rows = list(found["programs"].values())
        local = {
            Recorded(case=Case(**row["case"])).computation: {
                "samples_ms": _samples(row["runs"]["local"]),
                "clock_mhz": statistics.median(
                    run["clock_mhz"] for run in row["runs"]["local"]
                ),
                "computed": row["play"]["local_computed"],
            }
            for row in rows
            if "local" in row["runs"]
        }
        programs += [
            {
                "links": links,
                "name": name,
                "samples_ms": _samples(row["runs"][links]),
                **row["play"]["schedule"],
                "local": local[Recorded(case=Case(**row["case"])).computation],
            }
            for name, row in found["programs"].items()
        ]
    lines = [json.dumps(row, separators=(",", ":")) for row in programs]
    text = json.dumps(page, separators=(",", ":")).removesuffix("}")
    FILE.write_text(text + ',\n "programs": [\n' + ",\n".join(lines) + "\n]}\n")


def _samples(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [round(ms, 4) for run in runs for ms in run["samples_ms"]]


if __name__ == "__main__":
    main()
