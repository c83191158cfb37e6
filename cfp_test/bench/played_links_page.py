"""The page of steps with and without peer-to-peer access, predicted on one of two GPUs.

    python -m cfp_test.bench.played_links_page FOLDER/played.json

writes what `cfp_test.bench.played` measured with ``--p2p-off`` into
``docs/results/played_links_h200x2_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cfp.cost.step_time import Constants, StepTime, partitioned_compute_ms, step_time
from cfp.devices.described import described
from cfp.profiling.rates import Rates
from cfp_test.bench.carried import rates_from_page
from cfp_test.bench.one_as_n import rank_correlation
from cfp_test.bench.one_as_n_data import computed_from_json, schedule_from_json
from cfp_test.results.pages import table

_RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILE = _RESULTS / "played_links_h200x2_202611.json"
_NAMES = {"gpt": "GPT", "llama4k": "LLaMA", "moe": "MoE", "bert": "BERT"}
_LINKS = {"two": "NVLink", "off": "P2P off"}
_HIGHEST_MHZ = 1980.0  # Of an H200, as its driver says.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A program's step over some links, measured and predicted.

    Attributes:
        name: of the program.
        measured_ms, predicted: the step.
        local_ms: one device's computation by itself, copies included.
        clocks_mhz: of the step on two, and of the computation.
    """

    name: str
    measured_ms: float
    predicted: StepTime
    local_ms: float
    clocks_mhz: tuple[float, float]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.total_ms / self.measured_ms - 1


def rates_of(data: dict[str, Any], links: str) -> Rates:
    """NVLink's rates as they are described; the curves measured in this run without."""
    known = described("2xh200").rates
    if links == "two":
        return known
    return replace(known, curves=rates_from_page(data["curves"]["off"]).curves)


def steps(
    data: dict[str, Any], links: str, constants: Constants | None = None
) -> list[Step]:
    """All programs over "two" GPUs, or with peer-to-peer access "off"."""
    rates = rates_of(data, links)
    found = []
    for row in data["programs"]:
        schedule = schedule_from_json(row)
        local, step = row["runs"]["local"], row["runs"][links]
        local_ms = statistics.median(local["samples_ms"])
        predicted = step_time(
            schedule,
            rates,
            computation_ms=partitioned_compute_ms(
                schedule, computed_from_json(row["local_computed"]), rates, local_ms
            ),
            highest_clock=_HIGHEST_MHZ / local["clock_mhz"],
            constants=constants,
        )
        found.append(
            Step(
                name=f"{_NAMES[row['model']]}{', cuDNN' if row['kernel'] else ''}, "
                f"{row['how']}",
                measured_ms=statistics.median(step["samples_ms"]),
                predicted=predicted,
                local_ms=local_ms,
                clocks_mhz=(step["clock_mhz"], local["clock_mhz"]),
            )
        )
    return found


def summary(found: Sequence[Step]) -> tuple[float, float, float, float]:
    """Median and worst error, their mean, and the rank correlation."""
    off = [one.error for one in found]
    rank = rank_correlation(
        [one.predicted.total_ms for one in found], [one.measured_ms for one in found]
    )
    sizes = [abs(error) for error in off]
    return statistics.median(sizes), max(sizes), statistics.fmean(off), rank


def figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables and figures of the page."""
    rows, sums = {}, []
    for links, title in _LINKS.items():
        found = steps(data, links)
        rows[links] = table(
            "program | local ops ms | at MHz | hidden | slowed by | exposed "
            "| predicted | measured | at MHz | error",
            [
                [
                    one.name,
                    f"{one.local_ms:.1f}",
                    f"{one.clocks_mhz[1]:.0f}",
                    f"{one.predicted.hidden_ms:.1f}",
                    f"{one.predicted.slowed_ms:.1f}",
                    f"{one.predicted.exposed_ms:.1f}",
                    f"{one.predicted.total_ms:.1f}",
                    f"{one.measured_ms:.1f}",
                    f"{one.clocks_mhz[0]:.0f}",
                    f"{one.error:+.1%}",
                ]
                for one in found
            ],
        )
        middle, worst, mean, rank = summary(found)
        sums.append(
            [title, f"{middle:.1%}", f"{worst:.1%}", f"{mean:+.1%}", f"{rank:.3f}"]
        )
    samples = {
        len(run["samples_ms"])
        for row in data["programs"]
        for run in row["runs"].values()
    }
    return {
        "hardware": data["hardware"],
        "jax": data["jax"],
        "date": data["date"],
        "count": str(len(data["programs"])),
        "samples": " or ".join(map(str, sorted(samples))),
        "waiting": f"{Constants().waiting:.1f}",
        "cost": f"{Constants().slowed_by:.1f}",
        "cost_of_sums": f"{Constants().slowed_by_all_reduce:.1f}",
        "summary": table(
            "links | median error | worst | mean | rank correlation", sums
        ),
        **rows,
    }


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    programs = []
    for row in found["programs"].values():
        runs = {
            what: {
                "samples_ms": [
                    round(ms, 4) for one in several for ms in one["samples_ms"]
                ],
                "clock_mhz": statistics.median(one["clock_mhz"] for one in several),
                "power_watts": statistics.median(one["power_watts"] for one in several),
            }
            for what, several in row["runs"].items()
        }
        peaks = {side: row[side]["peak_bytes"] for side in ("two", "play", "off")}
        programs.append(
            {
                **{key: row[key] for key in ("model", "kernel", "how")},
                "peak_bytes": peaks,
                "runs": runs,
                **row["two"]["schedule"],
                "local_computed": row["play"]["local_computed"],
            }
        )
    page = {
        "hardware": "2 NVIDIA H200, one host, power limit 700 W",
        "jax": found["jax"],
        "date": "2026-11-26",
        "curves": found["curves"],
    }
    lines = [json.dumps(row, separators=(",", ":")) for row in programs]
    text = json.dumps(page, separators=(",", ":")).removesuffix("}")
    FILE.write_text(text + ',\n "programs": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
