"""Results as plain data, and the numbers that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cfp.profiling.timing import interquartile_range

FORMAT = 1

# What the plan is measured against, and what the ratio is called.
RIVALS = {
    "handwritten": "planned / best handwritten",
    "cost_model": "planned / best cost model",
    "preset": "planned / best preset",
    "pytorch": "planned / best PyTorch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Outcome of one competitor.

    Attributes:
      name, group, mesh: which it is.
      status: "ok", or why there are no samples: "out_of_memory", "compile_error",
        "crashed", "timeout", or "wrong" where it does not train as one device does.
      reason: the same in words; "" for "ok".
      samples_ms: of one step, in the order taken, all turns together.
      loss_gap: the largest relative difference of its losses from one device's.
      peak_bytes: memory of one device, by the compiler.
      build_seconds: to compile it.
      predicted_ms: what profiles predicted of it.
      collectives: kind -> bytes that one device holds of them in one step.
      trace: where the time goes, of those that were traced.
      note: how it was measured, where that differs from the others.
    """

    name: str
    group: str
    mesh: str
    status: str
    reason: str = ""
    samples_ms: tuple[float, ...] = ()
    loss_gap: float | None = None
    peak_bytes: int = 0
    build_seconds: float = 0.0
    predicted_ms: float | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    trace: Mapping[str, float] | None = None
    note: str = ""

    @property
    def median_ms(self) -> float:
        """Infinite without samples."""
        ok = self.status == "ok" and self.samples_ms
        return statistics.median(self.samples_ms) if ok else float("inf")

    @property
    def iqr_ms(self) -> float | None:
        """Interquartile range; None below two samples."""
        few = len(self.samples_ms) < 2
        return None if few else interquartile_range(self.samples_ms)

    def data(self) -> dict[str, Any]:
        """As JSON keeps it."""
        found = asdict(self)
        found["samples_ms"] = list(self.samples_ms)
        found["median_ms"] = self.median_ms if self.status == "ok" else None
        found["iqr_ms"] = self.iqr_ms
        return found

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """Reads what `data` gave."""
        kept = {k: v for k, v in data.items() if k not in ("median_ms", "iqr_ms")}
        return cls(**{**kept, "samples_ms": tuple(kept["samples_ms"])})


def best(rows: Iterable[Row], group: str) -> Row | None:
    """The fastest of a group that ran."""
    found = [row for row in rows if row.group == group and row.status == "ok"]
    return min(found, key=lambda row: row.median_ms, default=None)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """The plan's step time over that of the best of each other group that ran."""
    ours = best(rows, "planned")
    if ours is None:
        return {}
    found = {}
    for group, name in RIVALS.items():
        rival = best(rows, group)
        if rival is not None:
            found[name] = ours.median_ms / rival.median_ms
    return found


def pays_after(rows: Sequence[Row], planning_seconds: float) -> dict[str, int | None]:
    """After how many steps planning has saved what it took, against each group.

    None where the plan is not faster.
    """
    ours = best(rows, "planned")
    found: dict[str, int | None] = {}
    for group in RIVALS:
        rival = best(rows, group)
        if ours is None or rival is None:
            continue
        saved_ms = rival.median_ms - ours.median_ms
        pays = saved_ms > 0
        found[group] = math.ceil(1000 * planning_seconds / saved_ms) if pays else None
    return found


def configuration(
    *,
    name: str,
    model: str,
    options: Mapping[str, Any],
    devices: int,
    rows: Sequence[Row],
    planning: Mapping[str, Mapping[str, float]],
    comparison: Sequence[Mapping[str, Any]],
    tflop: float,
) -> dict[str, Any]:
    """One configuration's results as JSON keeps them."""
    seconds = sum(one.get("planning_seconds", 0.0) for one in planning.values())
    return {
        "name": name,
        "model": model,
        "options": dict(options),
        "devices": devices,
        "tflop": tflop,
        "planning": {mesh: dict(one) for mesh, one in planning.items()},
        "planning_seconds": seconds,
        "competitors": [row.data() for row in rows],
        "ratios": ratios(rows),
        "pays_after_steps": pays_after(rows, seconds),
        "cost_model": [dict(one) for one in comparison],
    }


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a configuration that `configuration` made."""
    return [Row.of(row) for row in data["competitors"]]


def pytorch_rows(data: Iterable[Mapping[str, Any]], wanted: Mapping[str, Any]) -> list:
    """Rows that PyTorch's own runs wrote, as far as they are of one configuration.

    Args:
      data: what `alpa_test/pytorch` wrote.
      wanted: model, devices, and all options that must agree.
    """
    found = []
    for one in data:
        same = (one["model"], one["devices"]) == (wanted["model"], wanted["devices"])
        options = one["options"]
        shared = options.keys() & wanted["options"].keys()
        if same and all(options[k] == wanted["options"][k] for k in shared):
            found.append(
                Row(
                    name=one["name"],
                    group="pytorch",
                    mesh=one.get("mesh", ""),
                    status=one["status"],
                    reason=one.get("reason", ""),
                    samples_ms=tuple(one.get("samples_ms", ())),
                    peak_bytes=int(one.get("peak_bytes", 0)),
                    note="in a process of its own",
                )
            )
    return found


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, str, float, float]]:
    """(configuration, competitor, ms before, ms now) of what ran in both results."""
    found = []
    older = {one["name"]: rows_of(one) for one in before["configurations"]}
    for one in now["configurations"]:
        known = {row.name: row for row in older.get(one["name"], [])}
        for row in rows_of(one):
            other = known.get(row.name)
            if other is not None and row.status == other.status == "ok":
                found.append((one["name"], row.name, other.median_ms, row.median_ms))
    return found
