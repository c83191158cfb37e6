"""What collectives take without peer-to-peer access, fitted on a record apart.

    python -m cfp_test.bench.one_as_n_links

The record is the first races of a GPT of two layers on 4 H200, over NVLink and without
peer-to-peer access; no row of `cfp_test.bench.one_as_n`'s groups is among it. Its
presets were compiled without a GPU. The computation is what makes the prediction over
NVLink right, so that only links are left to explain the other. Prints the factor with
the least error there, and what the groups of 4 H200 come to with it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from cfp.cost.stand_in import Constants, step_time
from cfp.profiling.rates import Rates
from cfp_test.bench.one_as_n import groups, link_rates, pairs, summary
from cfp_test.bench.one_as_n_data import FILE, RESULTS, schedule_from_json

# Of what other collectives take in a program by their curves: see the page.
ALL_TO_ALL = 0.47
_RINGS = (0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
_BESIDE = (0.5, Constants().beside, 0.85, 1.0)


def scaled(rates: Rates, factors: Mapping[str, float]) -> Rates:
    """Rates of which each kind of collective takes so many times as long."""
    return replace(
        rates,
        curves={
            (kind, axes): tuple((size, ms * factors[kind]) for size, ms in curve)
            for (kind, axes), curve in rates.curves.items()
        },
    )


def factors_of(reduced: float, others: float, exchanged: float) -> dict[str, float]:
    """By kind."""
    return {
        "all-reduce": reduced,
        "all-gather": others,
        "reduce-scatter": others,
        "all-to-all": exchanged,
    }


def recorded(links: str) -> dict[str, float]:
    """What the record's programs took, in milliseconds, by name."""
    file = RESULTS / f"gpt_h200x4_202611_{links}.json"
    rows = json.loads(file.read_text())["race"]
    return {row["name"]: row["time_ms"] for row in rows}


def computation_ms(schedule: Any, rates: Rates, total_ms: float) -> float:
    """The computation with which a step takes so long."""
    low, high = 1.0, total_ms
    for _ in range(40):
        middle = (low + high) / 2
        found = step_time(schedule, rates, computation_ms=middle)
        low, high = (middle, high) if found.total_ms < total_ms else (low, middle)
    return high


def errors(
    data: Mapping[str, Any],
    rates: Mapping[tuple[int, str], Rates],
    constants: Constants,
    factors: Mapping[str, float],
) -> dict[str, float]:
    """Predicted over recorded, less one, of the record's programs."""
    near, far = recorded("nvlink"), recorded("p2p_off")
    off = scaled(rates[4, "P2P off"], factors)
    found = {}
    for row in data["two_layers"]:
        schedule, name = schedule_from_json(row), row["name"]
        alone = computation_ms(schedule, rates[4, "NVLink"], near[name])
        step = step_time(schedule, off, computation_ms=alone, constants=constants)
        found[name] = step.total_ms / far[name] - 1
    return found


def main() -> None:
    data = json.loads(FILE.read_text())
    rates = link_rates(data)
    plain = errors(data, rates, Constants(), factors_of(1.0, 1.0, 1.0))
    print({name: f"{error:+.1%}" for name, error in plain.items()})
    tried = []
    for reduced, others, beside in product(_RINGS, _RINGS, _BESIDE):
        factors = factors_of(reduced, others, ALL_TO_ALL * others)
        constants = replace(Constants(), beside=beside)
        sizes = [abs(e) for e in errors(data, rates, constants, factors).values()]
        loss = statistics.fmean(sizes) + 0.3 * max(sizes)
        tried.append((loss, reduced, others, beside))
    loss, reduced, others, beside = min(tried)
    print(f"loss {loss:.4f}: all-reduce {reduced}, others {others}, beside {beside}")
    factors = factors_of(reduced, others, ALL_TO_ALL * others)
    rates[4, "P2P off"] = scaled(rates[4, "P2P off"], factors)
    constants = replace(Constants(), beside=beside)
    for name, found in groups(pairs(data, rates, 4, constants)).items():
        if name.endswith("P2P off"):
            print(*summary(name, found))


if __name__ == "__main__":
    main()
