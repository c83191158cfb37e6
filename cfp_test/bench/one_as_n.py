"""Whole steps predicted on one GPU beside those recorded on 2 and 4.

    python -m cfp_test.bench.one_as_n          # the page and its picture
    python -m cfp_test.bench.one_as_n DIR      # another page, of new times on one GPU

The first page is of ``docs/results/one_as_four_h200_202611.json``. Its predictions are
those of the day, and stand in the file: the computation was timed where collectives do
nothing, and no later prediction takes such times. The other, of times on real numbers,
is of ``docs/results/one_as_four_again_h200_202611.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cfp.cost.stand_in import StepTime, computed_alone_ms, step_time
from cfp.profiling.rates import Rates
from cfp_test.bench.carried import carried_over, rates_from_page, without_launches
from cfp_test.bench.one_as_n_data import FILE, RESULTS, schedule_from_json
from cfp_test.results.pages import table

AGAIN = RESULTS / "one_as_four_again_h200_202611.json"
PICTURE = RESULTS.parent / "pictures" / "one_as_four_h200_202611.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A program's step, recorded and predicted.

    Attributes:
        row: of the JSON.
        links: between the devices.
        recorded_ms: median of the races' medians.
        predicted: on one GPU.
    """

    row: dict[str, Any]
    links: str
    recorded_ms: float
    predicted: StepTime

    @property
    def error(self) -> float:
        """Predicted over recorded, less one."""
        return self.predicted.total_ms / self.recorded_ms - 1

    @property
    def model(self) -> str:
        """Kind of the model."""
        return {"gpt": "GPT", "moe": "MoE"}[self.row["target"].split()[0]]


def link_rates(data: dict[str, Any]) -> dict[tuple[int, str], Rates]:
    """Rates of collectives on 2 and 4 H200; products and memory as on the one."""
    own = data["rates_per_ms"]["4"]
    dtypes = {name: rate for name, rate in own.items() if name != "memory"}

    def curves(file: str) -> Rates:
        found = rates_from_page(json.loads((RESULTS / file).read_text()))
        return replace(
            found, matmul_flops_per_ms=dtypes, memory_bytes_per_ms=own["memory"]
        )

    two = curves("curves_h200x2_202611_nvlink.json")
    latency = {kind: curve[0][1] for (kind, _), curve in two.curves.items()}

    def launched(rates: Rates) -> Rates:
        return replace(
            rates,
            curves={
                (kind, group): without_launches(curve, latency[kind])
                for (kind, group), curve in rates.curves.items()
            },
        )

    return {
        (2, "NVLink"): two,
        (4, "NVLink"): carried_over(two, (("x", 4),)),
        (4, "P2P off"): launched(curves("curves_h200x4_202611_p2p_off.json")),
    }


def pairs(data: dict[str, Any], devices: int) -> list[Pair]:
    """All programs that were recorded on so many devices, as they were predicted."""
    return [
        Pair(
            row=row,
            links=links,
            recorded_ms=statistics.median(times),
            predicted=StepTime(**row["predicted"][links]),
        )
        for row in data["programs"]
        if row["devices"] == devices
        for links, times in row["recorded_ms"].items()
    ]


def predict(data: dict[str, Any]) -> None:
    """Adds to each program what is predicted of it, by kinds of links.

    Args:
        data: with times of computations on real numbers.
    """
    for row in data["programs"]:
        row["predicted"] = {}
        schedule, ms = schedule_from_json(row), statistics.median(row["alone_ms"])
        for links in row["recorded_ms"]:
            rates = link_rates(data)[row["devices"], links]
            alone = computed_alone_ms(schedule, rates, ms)
            clock = row.get("clock_mhz") or 0.0
            highest = data.get("highest_mhz", 0.0) / clock if clock else 1.0
            found = step_time(
                schedule,
                rates,
                computation_ms=alone,
                highest_clock=max(1.0, highest),
            )
            row["predicted"][links] = asdict(found)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(v < one for v in values) + (sum(v == one for v in values) - 1) / 2
            for one in values
        ]

    return statistics.correlation(ranks(first), ranks(second))


def groups(found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """By model and links."""
    by_name: dict[str, list[Pair]] = {}
    for one in found:
        by_name.setdefault(f"{one.model}, {one.links}", []).append(one)
    return by_name


def summary(name: str, found: Sequence[Pair]) -> list[str]:
    """A row of the table of groups."""
    errors = [abs(one.error) for one in found]
    rank = rank_correlation(
        [one.predicted.total_ms for one in found], [one.recorded_ms for one in found]
    )
    return [
        name,
        str(len(found)),
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.1%}",
        f"{statistics.fmean(one.error for one in found):+.1%}",
        f"{rank:.3f}",
    ]


def again_figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables of the page of times on real numbers."""
    found = [
        Pair(
            row={**one, "target": one["model"].lower()},
            links=one["links"],
            recorded_ms=one["recorded_ms"],
            predicted=StepTime(**one["predicted"]),
        )
        for one in data["rows"]
    ]
    rows = [
        [
            f"{one.model}, {one.links}",
            one.row["name"],
            f"{statistics.median(one.row['alone_ms']):.1f}",
            f"{one.row['clock_mhz']:.0f}",
            f"{one.predicted.hidden_ms:.1f}",
            f"{one.predicted.exposed_ms:.1f}",
            f"{one.predicted.total_ms:.1f}",
            f"{one.recorded_ms:.1f}",
            f"{one.error:+.1%}",
        ]
        for one in found
    ]
    return {
        "groups": table(
            "group | programs | median error | worst | mean | rank correlation",
            [summary(name, group) for name, group in groups(found).items()],
        ),
        "programs": table(
            "group | program | local ops ms | at MHz | hidden | exposed | predicted "
            "| recorded | error",
            rows,
        ),
    }


def main() -> None:
    if folder := sys.argv[1:]:
        data = played_again(Path(folder[0]))
        predict(data)
        found = pairs(data, 4)
        for name, group in groups(found).items():
            print(*summary(name, group), sep=" | ")
        rows = [
            {
                "model": one.model,
                "links": one.links,
                "name": one.row["name"],
                "alone_ms": [round(ms, 4) for ms in one.row["alone_ms"]],
                "clock_mhz": one.row["clock_mhz"],
                "recorded_ms": one.recorded_ms,
                "predicted": asdict(one.predicted),
            }
            for one in found
        ]
        text = ",\n".join(json.dumps(row) for row in rows)
        AGAIN.write_text(
            f'{{"highest_mhz": {data["highest_mhz"]}, "rows": [\n{text}]}}\n'
        )
        return
    from cfp_test.bench import one_as_n_page

    one_as_n_page.write(json.loads(FILE.read_text()))


def played_again(folder: Path) -> dict[str, Any]:
    """The recorded programs of 4 H200 with times of `cfp_test.bench.one_as_four`."""
    data = json.loads(FILE.read_text())
    new = json.loads((folder / "one_as_4.json").read_text())
    times = {
        (row["target"], row["name"]): {
            "alone_ms": row["samples_ms"],
            "clock_mhz": row.get("clock_mhz", 0.0),
        }
        for row in new["rows"]
        if row.get("samples_ms")
    }
    data["highest_mhz"] = new.get("highest_mhz", 0.0)
    data["programs"] = [
        {**row, **times[row["target"], row["name"]]}
        for row in data["programs"]
        if row["devices"] == 4 and (row["target"], row["name"]) in times
    ]
    return data


if __name__ == "__main__":
    main()
