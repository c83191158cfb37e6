"""The page of steps of two GPUs, beside what one GPU that plays two says of them.

Reads ``docs/results/played_h200x2_202611.json``; see `cfp_test.bench.played`. The
constants of steps are found by `cfp_test.bench.played_fit`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfp.cost.schedule import Schedule
from cfp.cost.step_time import Constants, StepTime, partitioned_compute_ms, step_time
from cfp.devices.described import described
from cfp.profiling.rates import Rates
from cfp_test.bench.one_as_n import rank_correlation
from cfp_test.bench.one_as_n_data import computed_from_json, schedule_from_json
from cfp_test.results.pages import table

FILE = Path(__file__).parents[2] / "docs" / "results" / "played_h200x2_202611.json"
_NAMES = {"gpt": "GPT", "llama4k": "LLaMA", "moe": "MoE", "bert": "BERT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A program's step on two GPUs, and what one that plays two says of it.

    Attributes:
        row: of the JSON.
        schedule: of the compiled program.
        measured_ms: the step on two.
        local_ms: one device's computation, copies in place of gathers included.
        computation_ms: the same with the kernels of the program for two.
    """

    row: dict[str, Any]
    schedule: Schedule
    measured_ms: float
    local_ms: float
    computation_ms: float

    @property
    def name(self) -> str:
        kernel = ", cuDNN" if self.row["kernel"] else ""
        return f"{_NAMES[self.row['model']]}{kernel}, {self.row['how']}"

    def predicted(self, rates: Rates, constants: Constants) -> StepTime:
        """The step, from the computation as it ran."""
        return step_time(
            self.schedule,
            rates,
            computation_ms=self.computation_ms,
            constants=constants,
        )


def mean_ms(runs: Sequence[dict[str, Any]]) -> float:
    """The mean of runs of one program: all of the time that its steps took."""
    return statistics.fmean(ms for run in runs for ms in run["samples_ms"])


def median_ms(runs: Sequence[dict[str, Any]]) -> float:
    """The median of runs of one program, as plans take it."""
    return statistics.median(ms for run in runs for ms in run["samples_ms"])


def pairs(
    data: dict[str, Any],
    rates: Rates,
    centre: Callable[[Sequence[dict[str, Any]]], float] = mean_ms,
) -> list[Pair]:
    """All programs; what a program's runs come to is their centre."""
    found = []
    for row in data["programs"]:
        schedule = schedule_from_json(row)
        local = centre(row["runs"]["local"])
        found.append(
            Pair(
                row=row,
                schedule=schedule,
                measured_ms=centre(row["runs"]["two"]),
                local_ms=local,
                computation_ms=partitioned_compute_ms(
                    schedule, computed_from_json(row["local_computed"]), rates, local
                ),
            )
        )
    return found


def errors(
    found: Sequence[Pair], rates: Rates, constants: Constants | None = None
) -> list[float]:
    """Predicted over measured, less one."""
    used = constants or Constants()
    return [one.predicted(rates, used).total_ms / one.measured_ms - 1 for one in found]


def rates_of() -> Rates:
    """Those of the description, as a user without the second GPU has them."""
    return described("2xh200").rates


def sustained_of(found: Sequence[Pair], rates: Rates) -> float:
    """The sustained rate of products, of a probe's.

    The median of the rates at which products and memory together take as long as each
    computation did.
    """
    needed = []
    for one in found:
        slow = Constants(sustained=1.0)
        alone = step_time(Schedule(one.schedule.computed, ()), rates, constants=slow)
        rate = rates.matmul_flops_per_ms["bfloat16"]
        products = one.schedule.flops / rate
        needed.append(products / (one.computation_ms - alone.total_ms + products))
    return round(statistics.median(needed), 3)


def summary(found: Sequence[Pair], off: Sequence[float]) -> list[str]:
    """Median and worst error, their mean, and the rank correlation."""
    predicted = [one.measured_ms * (1 + e) for one, e in zip(found, off, strict=True)]
    rank = rank_correlation(predicted, [one.measured_ms for one in found])
    return [
        f"{statistics.median(map(abs, off)):.1%}",
        f"{max(map(abs, off)):.1%}",
        f"{statistics.fmean(off):+.1%}",
        f"{rank:.3f}",
    ]


def by_rates(found: Sequence[Pair], rates: Rates) -> list[float]:
    """Errors of computations that did not run, from rates alone."""
    return [
        step_time(Schedule(one.schedule.computed, ()), rates).total_ms
        / one.computation_ms
        - 1
        for one in found
    ]


def _load(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return ""
    clock = statistics.median(run["clock_mhz"] for run in runs)
    power = statistics.median(run["power_watts"] for run in runs)
    return f"{mean_ms(runs):.1f} ms at {clock:.0f} MHz, {power:.0f} W"


def figures(data: dict[str, Any]) -> dict[str, str]:
    """Tables and figures of the page."""
    rates = rates_of()
    found = pairs(data, rates)
    off, used = errors(found, rates), Constants()
    medians = pairs(data, rates, median_ms)
    off_medians = errors(medians, rates)
    kinds: list[tuple[str, Callable[[Pair], Any]]] = [
        ("two", lambda one: one.row["runs"]["two"]),
        ("local", lambda one: one.row["runs"]["local"]),
        ("garbage", lambda one: one.row["runs"].get("garbage", [])),
        ("filled", lambda one: one.row["runs"].get("filled", [])),
    ]
    ran = [one for one in found if "garbage" in one.row["runs"]]
    loads = [[one.name, *(_load(runs(one)) for _, runs in kinds)] for one in ran]
    refused = [
        [one.name, how, run["reason"].partition(":")[0]]
        for one in ran
        for what, how in (("garbage", "as it was"), ("filled", "filled"))
        for run in one.row["runs"][what][:1]
    ]
    tiles = {one["model"]: one for one in data["local_tile"]}
    beside = [
        [
            one.name,
            f"{one.local_ms:.1f}",
            f"{mean_ms([tiles[one.row['model']]]):.1f}",
            f"{one.local_ms / mean_ms([tiles[one.row['model']]]) - 1:+.1%}",
            f"{tiles[one.row['model']]['clock_mhz']:.0f} MHz, "
            f"{tiles[one.row['model']]['power_watts']:.0f} W",
        ]
        for one in found
        if one.row["how"] == "by hand"
    ]
    rows = [
        [
            one.name,
            f"{one.local_ms:.1f}",
            f"{one.local_ms - one.computation_ms:.1f}",
            f"{step.hidden_ms:.1f}",
            f"{step.slowed_ms:.1f}",
            f"{step.exposed_ms:.1f}",
            f"{step.total_ms:.1f}",
            f"{one.measured_ms:.1f}",
            f"{error:+.1%}",
        ]
        for one, error in zip(found, off, strict=True)
        for step in [one.predicted(rates, used)]
    ]
    same = sum(
        row["peak_bytes"]["two"] == row["peak_bytes"]["play"]
        for row in data["programs"]
    )
    seconds = [row["build_seconds"] for row in data["programs"]]
    return {
        "hardware": data["hardware"],
        "jax": data["jax"],
        "loads": table(
            "program | on two | local ops | collectives that do nothing | the same, "
            "memory filled",
            loads,
        ),
        "refused": table(
            "program, with collectives that do nothing | memory | outcome", refused
        ),
        "beside": table(
            "program | local ops ms | by hand ms | difference | by hand at", beside
        ),
        "programs": table(
            "program | local ops ms | less | hidden | slowed by | exposed "
            "| predicted | measured | error",
            rows,
        ),
        "summary": table(
            "samples | median error | worst | mean | rank correlation",
            [
                ["mean", *summary(found, off)],
                ["median", *summary(medians, off_medians)],
            ],
        ),
        "cost": f"{used.slowed_by:.2f}",
        "cost_of_sums": f"{used.slowed_by_all_reduce:.2f}",
        "sustained": f"{used.sustained:.3f}",
        "by_rates": f"{statistics.median(map(abs, by_rates(found, rates))):.1%} in the "
        f"median and {max(map(abs, by_rates(found, rates))):.1%} at worst",
        "same_memory": f"{same} of {len(found)}",
        "build": f"{statistics.median(s['local'] for s in seconds):.1f} s beside "
        f"{statistics.median(s['play'] - s['local'] for s in seconds):.1f} s",
    }
