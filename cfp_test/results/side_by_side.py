"""The page of plans beside the best other ways to shard, timed in turn on two GPUs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from cfp.presets.presets import PRESETS
from cfp.race.programs import TOO_LARGE
from cfp_test.results.pages import Figures, fixed, gib, table

LINKS = {"": "NVLink", "off": "NCCL_P2P_DISABLE=1"}
BUDGETS = {"budgets": LINKS[""], "off_budgets": LINKS["off"]}
# In the order of tables.
GROUPS = {
    "planned": "plan",
    "preset": "preset",
    "hand": "by hand",
    "cost_model": "cost model",
    "pytorch": "PyTorch",
}
# How many times as long the cost model's steps took as CFP's own plans (its paper's
# machines have PCIe).
OVER_COST_MODEL = {"gpt": 1.51, "llama": 1.31, "moe": 3.43}
OF_PYTORCH = 0.85
# As the race's rows say it.
OVER_BUDGET = "over the memory budget"
CLEARLY_FASTER, ITS_SHARE = 0.95, 1 / 3
IS_PLAN = "is_the_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One way that ran.

    Attributes:
        name, group: which it is.
        samples_ms: of a step.
        about: the rest of its row.
    """

    name: str
    group: str
    samples_ms: Sequence[float]
    about: Mapping[str, Any]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        if len(self.samples_ms) < 2:
            return self.samples_ms[0], self.samples_ms[0]
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return low, high

    @property
    def is_whole(self) -> bool:
        """Returns False for what was left out after a few rounds."""
        return not self.about.get("note")


def timed_of(piece: Mapping[str, Any], prefix: str = "") -> list[Timed]:
    """The ways of a piece that ran, PyTorch's among them."""
    found = [
        Timed(
            name=name.removeprefix(prefix),
            group=row["group"],
            samples_ms=row["samples_ms"],
            about=row,
        )
        for name, row in piece["ways"].items()
        if name.startswith(prefix) and row["status"] == "ok" and row["samples_ms"]
    ]
    return found + [
        Timed(
            name=row["name"], group="pytorch", samples_ms=row["samples_ms"], about=row
        )
        for row in piece.get("pytorch", ())
        if row["status"] == "ok" and row["samples_ms"]
    ]


def best(
    ways: Sequence[Timed], group: str, kernels: bool | None = None
) -> Timed | None:
    """The fastest of a group; of the cost model's with, or without, the kernels."""
    found = [
        one
        for one in ways
        if one.group == group
        and one.is_whole
        and (kernels is None or ("kernels" in one.name) == kernels)
    ]
    return min(found, key=lambda one: one.median_ms, default=None)


def is_tie(one: Timed, other: Timed) -> bool:
    """True if the middle halves of their samples overlap."""
    (low, high), (other_low, other_high) = one.quartiles_ms, other.quartiles_ms
    return low <= other_high and other_low <= high


def is_same_program(ours: Timed, other: Timed) -> bool:
    """True if the plan is that preset."""
    return ours.group == "planned" and bool(other.about.get(IS_PLAN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A plan beside a rival.

    Attributes:
        where: of the comparison: model, links, budget.
        ratio: the plan's time over the rival's; None without a rival.
        tie: whether noise hides a difference.
        rival: its name.
    """

    where: str
    ratio: float | None
    tie: bool
    rival: str

    @property
    def text(self) -> str:
        if self.ratio is None:
            return self.rival
        return f"{self.ratio:.3f}{' (tie)' if self.tie and self.ratio > 1 else ''}"

    @property
    def is_at_most_one(self) -> bool:
        return self.ratio is None or self.ratio <= 1.0 or self.tie


def cell(where: str, ways: Sequence[Timed], group: str) -> Cell | None:
    """The plan beside the best of a group; None if one of them is missing."""
    ours, rival = best(ways, "planned"), best(ways, group)
    if ours is None or rival is None:
        return None
    if is_same_program(ours, rival):
        return Cell(where=where, ratio=1.0, tie=True, rival=f"{rival.name}, the plan")
    return Cell(
        where=where,
        ratio=ours.median_ms / rival.median_ms,
        tie=is_tie(ours, rival),
        rival=rival.name,
    )


def _pieces(data: Mapping[str, Any], *kinds: str) -> Iterator[Mapping[str, Any]]:
    yield from (piece for piece in data["pieces"] if piece["kind"] in kinds)


def _rows(piece: Mapping[str, Any]) -> list[list[Any]]:
    ways = timed_of(piece)
    ours = best(ways, "planned")
    order = list(GROUPS)
    ways.sort(key=lambda one: (order.index(one.group), one.median_ms))
    rows = []
    trained = ours is not None and "trained_from" in piece
    for one in ways:
        low, high = one.quartiles_ms
        rows.append(
            [
                piece["model"],
                GROUPS[one.group],
                one.about.get("candidate", one.name),
                fixed(one.median_ms, 2),
                f"{low:.2f} to {high:.2f}",
                len(one.samples_ms),
                fixed(ours.median_ms / one.median_ms, 3) if ours else None,
                fixed(one.about.get("predicted_ms"), 1),
                gib(one.about.get("peak_bytes") or None, 1),
                _gap(one, ours) if trained and ours else None,
                "the plan" if one.about.get(IS_PLAN) else one.about.get("note"),
            ]
        )
    every = [
        *piece["ways"].items(),
        *((r["name"], r) for r in piece.get("pytorch", ())),
    ]
    for name, row in every:
        if row["status"] != "ok" or not row["samples_ms"]:
            reason = row.get("reason") or "not timed: time was over"
            reason = reason.replace("|", "/").replace("\n", " ")
            kind = GROUPS[row.get("group", "pytorch")]
            rows.append([piece["model"], kind, name, *[None] * 7, reason[:120]])
    return rows


def _gap(one: Timed, ours: Timed) -> str | None:
    """The largest relative difference from the plan's losses of the same steps."""
    if "losses" not in one.about:
        return None
    pairs = zip(one.about["losses"], ours.about["losses"], strict=True)
    return f"{max(abs(mine - its) / abs(its) for mine, its in pairs):.1e}"


HEAD = (
    "model | kind | way | ms | quartiles | samples | plan's ms over it | predicted ms "
    "| GiB | losses off by | note"
)


def _presets_within(
    piece: Mapping[str, Any], share: str, size_bytes: int
) -> list[Timed]:
    """The presets that were timed under any of a piece's budgets and fit in one.

    What was timed beside the plan under that budget counts as it was there.

    Args:
        share: that of the budget.
    """
    own = [one for one in timed_of(piece, f"{share}: ") if one.group == "preset"]
    names = {one.name for one in own if one.is_whole}
    others = [
        replace(
            one, name=one.name.partition(": ")[2], about={**one.about, IS_PLAN: False}
        )
        for one in timed_of(piece)
        if one.group == "preset"
        and one.name.partition(": ")[2] not in names
        and (one.about.get("peak_bytes") or size_bytes + 1) <= size_bytes
    ]
    return own + others


def _smallest_presets(data: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the smallest preset that ran, by model; over any links as many."""
    found: dict[str, int] = {}
    for piece in data["pieces"]:
        for one in timed_of(piece):
            size = one.about.get("peak_bytes")
            if one.group == "preset" and size:
                found[piece["model"]] = min(size, found.get(piece["model"], size))
    return found


def _no_preset_fits(
    race: Sequence[Mapping[str, Any]], ways: Mapping[str, Mapping[str, Any]]
) -> bool:
    """True if no preset fits: by the race, or as compiled afterwards.

    Args:
        ways: those of the same budget, by name.
    """
    notes = [
        ways.get(f"preset {row['name']}", {}).get("reason") or row["note"]
        for row in race
        if re.split("[ ,]", row["name"])[0] in PRESETS
    ]
    return bool(notes) and set(notes) <= {TOO_LARGE, OVER_BUDGET}


def _budget_cells(
    data: Mapping[str, Any], kind: str, smallest: Mapping[str, int] | None = None
) -> tuple[list[list[Any]], list[Cell]]:
    """Rows under budgets, and the cells that count, over one kind of links.

    Args:
        smallest: see `_smallest_presets`; of the same data where it is left out.
    """
    rows, cells = [], []
    smallest = _smallest_presets(data) if smallest is None else smallest
    for piece in _pieces(data, kind):
        for share, about in piece.get("budgets", {}).items():
            where = f"{piece['model']}, {share}"
            where += f", {BUDGETS[kind]}" if kind != "budgets" else ""
            size = gib(about["bytes"], 1)
            if "winner" not in about:
                least = f"nothing fits; {gib(about['least_bytes'], 1)} GiB would do"
                rows.append([piece["model"], share, size, least, *[None] * 5])
                continue
            ways = timed_of(piece, f"{share}: ")
            ways = [one for one in ways if one.group != "preset"]
            ways += _presets_within(piece, share, about["bytes"])
            ours, rival = best(ways, "planned"), best(ways, "preset")
            found = cell(where, ways, "preset")
            these = {
                name.removeprefix(f"{share}: "): row
                for name, row in piece["ways"].items()
                if name.startswith(f"{share}: ")
            }
            is_small = smallest.get(piece["model"], math.inf) <= about["bytes"]
            unfit = ours is not None and _no_preset_fits(about["race"], these)
            unfit = unfit and not is_small
            if found is None and unfit:
                found = Cell(where=where, ratio=None, tie=False, rival="no preset fits")
            if found is not None:
                cells.append(found)
            rows.append(
                [
                    piece["model"],
                    share,
                    size,
                    about["winner"],
                    fixed(ours.median_ms, 2) if ours else None,
                    rival.name.removeprefix("preset ") if rival else None,
                    fixed(rival.median_ms, 2) if rival else None,
                    found.text if found else "no preset timed",
                    fixed(about["planning_s"], 0),
                ]
            )
    return rows, cells


def _free_cells(data: Mapping[str, Any]) -> list[Cell]:
    """The cells without a budget."""
    found = [
        cell(f"{piece['model']}, {LINKS[piece['kind']]}", timed_of(piece), "preset")
        for piece in _pieces(data, *LINKS)
    ]
    return [one for one in found if one is not None]


def _verdict(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _cell_aims(cells: Sequence[Cell]) -> list[list[Any]]:
    """The aims of all cells together; none without a cell."""
    if not cells:
        return []
    worse = [one for one in cells if not one.is_at_most_one]
    faster = [one for one in cells if one.ratio is None or one.ratio < CLEARLY_FASTER]
    enough = len(faster) >= ITS_SHARE * len(cells)
    return [
        [
            "at most 1.00 of the best preset in all cells, noise aside",
            f"{len(cells)} cells",
            "; ".join(f"{one.where}: {one.text}" for one in worse) or "none is above",
            _verdict(not worse),
        ],
        [
            f"below {CLEARLY_FASTER} of it in a third of the cells",
            f"{len(faster)} of {len(cells)}",
            "; ".join(f"{one.where}: {one.text}" for one in faster) or "none",
            _verdict(enough),
        ],
    ]


def _aims(data: Mapping[str, Any], budget_cells: Sequence[Cell]) -> list[list[Any]]:
    rows = []
    for piece in _pieces(data, "off"):
        ways, model = timed_of(piece), piece["model"]
        ours = best(ways, "planned")
        for kernels, title in ((False, "as written"), (True, "with kernels")):
            rival = best(ways, "cost_model", kernels)
            if ours is None or rival is None or model not in OVER_COST_MODEL:
                continue
            times, wanted = rival.median_ms / ours.median_ms, OVER_COST_MODEL[model]
            aim = f"over the cost model, {title}, P2P off: at least {wanted}"
            rows.append([aim, model, fixed(times, 2), _verdict(times >= wanted)])
    cells = [*budget_cells, *_free_cells(data)]
    rows += _cell_aims(cells)
    for piece in _pieces(data, *LINKS):
        ways, links = timed_of(piece), LINKS[piece["kind"]]
        by_hand, torch = cell("", ways, "hand"), cell("", ways, "pytorch")
        if by_hand is not None:
            aim = f"at most 1.00 of the best by hand with kernels, {links}"
            figure = f"{by_hand.text} ({by_hand.rival})"
            rows.append([aim, piece["model"], figure, _verdict(by_hand.is_at_most_one)])
        if torch is not None and torch.ratio is not None:
            aim = f"at most {OF_PYTORCH} of PyTorch, {links}"
            holds = torch.ratio <= OF_PYTORCH
            rows.append([aim, piece["model"], torch.text, _verdict(holds)])
    return rows


def _alone(data: Mapping[str, Any]) -> list[list[Any]]:
    rows = []
    for piece in _pieces(data, "sharding"):
        ways = {one.group: one for one in timed_of(piece)}
        if {"planned", "sharding"} <= ways.keys():
            ours, alone = ways["planned"].median_ms, ways["sharding"].median_ms
            about = piece["planning_sharding"]
            rows.append(
                [
                    piece["model"],
                    fixed(ours, 2),
                    fixed(alone, 2),
                    fixed(alone / ours, 3),
                    about["winner"],
                ]
            )
    return rows


def _planning(data: Mapping[str, Any]) -> list[list[Any]]:
    rows = []
    for piece in _pieces(data, *LINKS):
        about = piece.get("planning")
        if about is None:
            continue
        counts = about["counts"]
        rows.append(
            [
                piece["model"],
                LINKS[piece["kind"]],
                fixed(about["planning_s"], 1),
                fixed(counts.get("profile_seconds"), 1),
                fixed(counts.get("race_seconds"), 1),
                fixed(counts.get("strategies_cached"), 0),
                about["winner"],
                fixed(about["predicted_ms"], 1),
            ]
        )
    return rows


def page(data: Mapping[str, Any]) -> Figures:
    """All tables, and what they say of the aims."""
    first = data["pieces"][0]
    where = first["environment"]
    under = {kind: _budget_cells(data, kind) for kind in BUDGETS}
    budget_cells = [cell for _, cells in under.values() for cell in cells]
    lines = [
        "# Plans beside presets, the cost model, shardings by hand and PyTorch",
        "",
        f"Two {where['device_kind']} of one host, jax {where['jax_version']}, "
        f"{first['date']}; `python -m cfp_test.bench.side_by_side --out FOLDER`. The "
        "zoo's models, four layers at full width, AdamW in float32, compute in "
        "bfloat16. A sample is the mean of five steps in a row after three; ways of a "
        "model take turns in one process. After two rounds the best of each kind go "
        "on; the others have two samples. Plans of which nothing was known before "
        "start from an empty store. By hand: rule tables, and `largest`, each "
        "parameter on its largest dim with the batch on activations between layers; "
        "attention by cuDNN, but the MoE's, whose heads it does not take. The cost "
        "model is Alpa's, for the step as written or with the plan's kernels; presets "
        "have the plan's kernels. "
        "PyTorch's FSDP2, kept gathered, compiled, with flash attention, is a process "
        "of its own. A tie: the middle halves of both samples overlap. Raw, with every "
        "sample and race: [JSON](" + data["name"] + ".json).",
        "",
        *(line for note in data.get("notes", ()) for line in (note, "")),
        "## Aims",
        "",
        table("aim | of | figure | holds", _aims(data, budget_cells)),
        "",
    ]
    for kind, title in LINKS.items():
        found = [row for piece in _pieces(data, kind) for row in _rows(piece)]
        if found:
            lines += [f"## {title}", "", table(HEAD, found), ""]
    head = (
        "model | of what data parallelism needs | GiB | plan | plan ms | preset "
        "| preset ms | plan over preset | planning s"
    )
    for kind, (rows, _) in under.items():
        if rows:
            lines += [f"## Under budgets, {BUDGETS[kind]}", "", table(head, rows), ""]
    if alone := _alone(data):
        head = "model | plan ms | sharding alone ms | times | its plan"
        lines += ['## With `choose="sharding"`', "", table(head, alone), ""]
    head = (
        "model | links | planning s | profile s | race s | known before | plan "
        "| predicted ms"
    )
    lines += ["## Planning", "", table(head, _planning(data)), ""]
    return {"page": "\n".join(lines).rstrip("\n") + "\n"}


def cells_page(
    *suites: Mapping[str, Any], notes: Mapping[str, str], left_out: Collection[str]
) -> Figures:
    """Every cell of several suites, of each the newest.

    Args:
        suites: oldest first, where they were run on the same day.
        notes: about cells.
        left_out: cells that do not count.
    """
    newest: dict[str, tuple[str, str, Cell]] = {}
    every = {"pieces": [piece for data in suites for piece in data["pieces"]]}
    smallest = _smallest_presets(every)
    for piece in every["pieces"]:
        gpus, date = piece["environment"]["device_kind"].split()[1], piece["date"]
        alone = {"pieces": [piece]}
        under = [_budget_cells(alone, kind, smallest)[1] for kind in BUDGETS]
        for one in (*chain.from_iterable(under), *_free_cells(alone)):
            if one.where not in newest or newest[one.where][0] <= date:
                newest[one.where] = date, gpus, one
    counted = [one for where, (*_, one) in newest.items() if where not in left_out]
    rows = [
        [
            where,
            one.text,
            "" if one.ratio is None else one.rival.removeprefix("preset "),
            gpus,
            date,
            notes.get(where),
        ]
        for where, (date, gpus, one) in sorted(newest.items())
    ]
    return {
        "aims": table("aim | of | figure | holds", _cell_aims(counted)),
        "cells": table("cell | plan over preset | preset | GPUs | date | note", rows),
    }
