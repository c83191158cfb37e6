"""All races on GPUs: plans against the best preset, and predictions against times.

The README quotes from here: best, worst and all between stand in one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfp_test.results.pages import Figures, fixed, plain, table
from cfp_test.results.planning import error_of, errors

# Plans' JSON does not name the commit: it is the one that brought the file.
_SINCE = {"gpt_h200x4": "11e5294", "gpt4_h200x4": "5f1c354", "moe_h200x4": "11e5294"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One race that a plan had with presets.

    Attributes:
      group: "first", "P2P off", "NVLink", "budget" or "whole model".
      what: the model and the file that it is of.
      links: between the devices.
      commit: of cfp.
      ratio: the best plan's time over the best preset's; None where no preset fits.
      worst: the largest relative error of a prediction in the race.
      samples: of the plan, and of the best preset.
    """

    group: str
    what: str
    links: str
    commit: str
    ratio: float | None
    worst: float | None
    samples: tuple[int, int] | None = None


def _first(name: str, links: str, race: Sequence[Mapping[str, Any]]) -> Cell:
    """A race of a saved plan: the best plan against the best preset, any options."""
    ran = [row for row in race if row["time_ms"] is not None]
    ran.sort(key=lambda row: row["time_ms"])
    plan = next(row for row in ran if row["name"].startswith("planned"))
    best = next(row for row in ran if not row["name"].startswith("planned"))
    return Cell(
        group="first",
        what=name,
        links=links,
        commit=_SINCE[name],
        ratio=plan["time_ms"] / best["time_ms"],
        worst=max(errors(race), key=abs),
        samples=(len(plan["samples_ms"]), len(best["samples_ms"])),
    )


def _moe(data: Mapping[str, Any]) -> Cell:
    rows = data["race"]
    plan = min(r["measured_ms"] for r in rows if r["name"].startswith("planned"))
    best = min(r["measured_ms"] for r in rows if not r["name"].startswith("planned"))
    missed = [
        error_of(row["predicted_ms"], row["measured_ms"])
        for row in rows
        if row["predicted_ms"] and "told" not in row["name"]
    ]
    return Cell(
        group="first",
        what="moe_h200x4",
        links="NVLink",
        commit=_SINCE["moe_h200x4"],
        ratio=plan / best,
        worst=max(missed, key=abs),
    )


def _planned(rows: Iterable[Mapping[str, Any]], name: str) -> list[Cell]:
    """Races of `never_loses.py`."""
    found = []
    for row in rows:
        if row["what"].endswith("warm") or "measured_ms" not in row:
            continue
        links = "P2P off" if row.get("NCCL_P2P_DISABLE") else "NVLink"
        budget = row["budget_bytes"] is not None
        missed = errors(row["race"])
        known = [row.get("ratio"), row.get("compared_ratio")]
        found.append(
            Cell(
                group="budget" if budget else links,
                what=f"{row['target'][0]}, {name}",
                links=links,
                commit=row.get("commit", "82e75f8"),
                ratio=max((one for one in known if one), default=None),
                worst=max(missed, key=abs) if missed else None,
            )
        )
    return found


def _wholes(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Cell]:
    plans = (row for rows in data.values() for row in rows if row["what"] == "planned")
    return [
        Cell(
            group="whole model",
            what=f"{row['target'][0]}, full_models_h200x2",
            links="NVLink",
            commit="05b7fc8",
            ratio=row["plan"]["ratio"],
            worst=max(errors(row["plan"]["race"]), key=abs),
        )
        for row in plans
    ]


def cells(
    gpt: Sequence[Mapping[str, Any]],
    gpt4: Sequence[Mapping[str, Any]],
    moe: Mapping[str, Any],
    two: Sequence[Mapping[str, Any]],
    budgets: Sequence[Mapping[str, Any]],
    four: Mapping[str, Any],
    whole: Mapping[str, Any],
) -> list[Cell]:
    """All races, the first ones first.

    Args:
      gpt, gpt4: saved plans with NVLink, and with P2P off.
      moe: the printed race of the mixture of experts.
      two, budgets, four: what `never_loses.py` wrote on two and on four devices.
      whole: what `full_model.py` wrote.
    """
    found = []
    for name, pair in (("gpt_h200x4", gpt), ("gpt4_h200x4", gpt4)):
        for links, plan in zip(("NVLink", "P2P off"), pair, strict=True):
            found.append(_first(name, links, plan["race"]))
    return [
        *found,
        _moe(moe),
        *_planned(two, "planning_h200x2"),
        *_planned(budgets, "planning_budget_h200x2"),
        *_planned(four["cells"], "planning_h200x4"),
        *_wholes(whole),
    ]


def span(found: Iterable[Cell], group: str, links: str | None = None) -> str:
    """The smallest and the largest ratio of a group, as a page says them."""
    chosen = [
        cell.ratio
        for cell in found
        if cell.group == group and cell.ratio and links in (None, cell.links)
    ]
    low, high = f"{min(chosen):.2f}", f"{max(chosen):.2f}"
    return low if low == high else f"{low} to {high}"


def ranges(
    nvlink: Mapping[str, Any],
    off: Mapping[str, Any],
    nvlink4: Mapping[str, Any],
    off4: Mapping[str, Any],
    *others: Any,
) -> Figures:
    """The figures of the page of all races."""
    found = cells((nvlink, off), (nvlink4, off4), *others)
    worst = [cell.worst for cell in found if cell.worst is not None]
    rows = [
        [
            cell.group,
            cell.what,
            cell.links,
            cell.commit,
            fixed(cell.ratio, 3) or "no preset fits",
            f"{100 * cell.worst:+.1f}%" if cell.worst is not None else None,
            " and ".join(map(str, cell.samples)) if cell.samples else None,
        ]
        for cell in found
    ]
    told = [row for row in off["race"] if row["name"] == "planned, arguments told"]
    plan = next(row for row in off["race"] if row["name"] == off["winner"])
    return {
        "races": table(
            "group | what | links | commit | plan / best preset | worst prediction | "
            "samples of plan and preset",
            rows,
        ),
        "p2p_off": span(found, "P2P off"),
        "nvlink": span(found, "NVLink"),
        "first_p2p_off": span(found, "first", "P2P off"),
        "first_nvlink": span(found, "first", "NVLink"),
        "budget": span(found, "budget"),
        "whole": span(found, "whole model"),
        "worst": f"{100 * max(worst, key=abs):+.0f}%",
        "worst_planned": f"{100 * error_of(plan['predicted_ms'], plan['time_ms']):.0f}",
        "told_predicted": fixed(told[0]["predicted_ms"], 1),
        "told_measured": fixed(told[0]["time_ms"], 1),
        "plan_name": plain(plan["name"]),
    }
