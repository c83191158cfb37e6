"""The page of mechanisms: what each is worth, from what was recorded without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cfp_test.results.pages import table

WITH_ALL = "with all of them"
_OPTIONS = "the leader races with other compiler options"
_COUNTED = ("tuned", "segments built", "segments run", "wholes built", "race runs")
# Where the line is: of steps, of planning, and of the time that solving takes.
_SLOWER, _LONGER, _MUCH = 1.02, 1.10, 2.0

Row = Mapping[str, Any]


def figures(data: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page."""
    every = dict(data["mechanisms"])
    base = every.pop(WITH_ALL)
    rows = [_cells(name, one, base) for name, one in every.items()]
    rows.sort(key=lambda cells: cells[-1])
    gone = [
        [one["name"], f"{one['lines']} + {one['test_lines']}", one["figure"]]
        for one in data["gone"]
    ]
    replayed = data["replayed"]
    ties, leader = replayed["ties"], replayed["leader"]
    turn, bare = replayed["first turn"], replayed["arguments alone"]
    return {
        "jax": data["jax"],
        "plans": str(len(base["rows"])),
        "problems": str(sum("cost_ms" in row for row in base["walked"])),
        "solving": f"{_seconds(base['walked']):.1f}",
        "stayed": table(
            "mechanism | where | lines + tests | recorded races without it | "
            "made up: slower | fits | programs | solving | other figure | stays for",
            [cells[:-1] for cells in rows],
        ),
        "gone": table("mechanism | lines + tests | figure", gone),
        "ties": f"{ties['changed']} of {ties['races']}",
        "ties_worst": f"{ties['worst'] - 1:.2%}",
        "leaders": f"{leader['races']}",
        "varied": f"{leader['varied']}",
        "free": f"{every[_OPTIONS]['recorded']['races']}",
        "leader_mean": f"{leader['mean'] - 1:.2%}",
        "leader_worst": f"{leader['worst'] - 1:.2%}",
        "turn": f"{turn['slower']} of {turn['races']}",
        "turn_worst": f"{turn['worst'] - 1:.1%}",
        "bare": f"{bare['slower']} of {bare['races']}",
        "bare_worst": f"{bare['worst'] - 1:.1%}",
    }


def _cells(name: str, one: Row, base: Row) -> list[Any]:
    """A mechanism's row, and behind it where it stands among the others."""
    reasons = []
    races = one.get("recorded") or {}
    if races.get("slower"):
        reasons.append("recorded races")
    slower = fits = programs = None
    if "rows" in one:
        pairs = _pairs(base["rows"], one["rows"])
        ratios = [b["true_ms"] / a["true_ms"] for a, b in pairs if _both(a, b)]
        lost = sum("true_ms" in a and "true_ms" not in b for a, b in pairs)
        more = _count(b for _, b in pairs) / _count(a for a, _ in pairs)
        over = sum(ratio > _SLOWER for ratio in ratios)
        slower = f"{over} of {len(ratios)}, {max(ratios) - 1:+.1%}"
        fits = f"{lost} of {len(pairs)} no more" if lost else "as before"
        programs = f"{more - 1:+.0%}"
        reasons += ["what fits"] * bool(lost) + ["times"] * bool(over)
        reasons += ["planning time"] * (more > _LONGER)
    solving = None
    if "walked" in one:
        walked = _seconds(one["walked"]) / _seconds(base["walked"])
        solving = f"{walked:.1f} times"
        reasons += ["solving time"] * (walked > _MUCH)
    if one["cited"]:
        reasons.append("the other figure")
    is_known = {"rows", "walked", "recorded"} & one.keys()
    below = "below the line" if is_known else "was not switched off yet"
    found = ", ".join(reasons) or below
    return [
        name,
        f"`{one['room']}`",
        f"{one['lines']} + {one['test_lines']}",
        _races(races),
        slower,
        fits,
        programs,
        solving,
        one["cited"],
        found,
        not reasons,
    ]


def _races(found: Row) -> str | None:
    if not found.get("races"):
        return None
    worst = (
        "nothing else ran" if found["worst"] is None else f"{found['worst'] - 1:+.1%}"
    )
    return f"{found['slower']} of {found['races']} slower, {worst}"


def _pairs(base: Sequence[Row], rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows with all mechanisms and without one, of the same question."""
    known = {_key(row): row for row in base}
    return [(known[_key(row)], row) for row in rows]


def _key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["seed"], row["share"]


def _both(one: Row, other: Row) -> bool:
    return "true_ms" in one and "true_ms" in other


def _count(rows: Iterable[Row]) -> int:
    """Programs that are tuned, built and run."""
    return sum(row.get(name, 0) for row in rows for name in _COUNTED)


def _seconds(rows: Iterable[Row]) -> float:
    return sum(row.get("seconds", 0.0) for row in rows)
