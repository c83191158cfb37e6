"""Planning time, plans beside presets, and errors of predictions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, gib, noted, plain, table

_MODELS = {"gpt": "GPT", "moe": "MoE", "llama": "LLaMA", "bert": "BERT"}
# Ways in which a candidate differs from what its prediction is of.
_NOT_PREDICTED = ("told", "constrained", "collectives", "latency", "budget")
_BUILD = re.compile(
    r"\s*[\d.]+ (?P<what>[a-z ]+?) (?P<count>\d+) threads (?P<threads>\d+) "
    r"\{(?P<options>.*?)\}: (?P<wall>[\d.]+) s, user (?P<user>[\d.]+) sys "
    r"(?P<sys>[\d.]+) child (?P<child>[\d.]+); each .* bad (?P<bad>\d+)"
)


def model_of(row: Mapping[str, Any]) -> str:
    """The model that was planned."""
    return _MODELS[row["target"][0]]


def error_of(predicted: float, measured: float) -> float:
    """The relative error of a prediction."""
    return predicted / measured - 1.0


def errors(race: Sequence[Mapping[str, Any]]) -> list[float]:
    """Errors of what ran as predicted: default options, every value constrained."""
    return [
        error_of(row["predicted_ms"], statistics.median(row["samples_ms"]))
        for row in race
        if row["samples_ms"]
        and row["predicted_ms"]
        and not any(word in row["name"] for word in _NOT_PREDICTED)
    ]


def _best(row: Mapping[str, Any]) -> str | None:
    if not row.get("best_classic_ms"):
        return "none that fits"
    return f"{row['best_classic_ms']:.2f}, {plain(row['best_classic'])}"


def _planned(row: Mapping[str, Any]) -> list[str]:
    """The seconds that planning took."""
    search = row["search"]
    times = (search["profile_seconds"], search["race_seconds"], row["plan_seconds"])
    return [str(search["strategies_measured"]), *(fixed(time, 1) for time in times)]


def _budget(row: Mapping[str, Any]) -> str:
    what = row["what"]
    share = what.split(" of ")[0] if " of " in what else "none"
    return f"{share}, again" if what.endswith("warm") else share


def planning_2(
    data: Sequence[Mapping[str, Any]],
    budgets: Sequence[Mapping[str, Any]],
    by_hand: Mapping[str, Any],
) -> Figures:
    """The figures of the page of plans on two devices."""
    rows = [
        [
            model_of(row),
            row["what"],
            row["commit"],
            fixed(row["measured_ms"]),
            _best(row),
            fixed(row["ratio"], 3),
            *_planned(row),
        ]
        for row in data
    ]
    within = [
        [
            model_of(row),
            _budget(row),
            row.get("commit", "82e75f8"),
            (row.get("xla_flags") or "").removeprefix("--xla_gpu_experimental_"),
            plain(row["winner"]),
            fixed(row["measured_ms"]),
            _best(row),
            fixed(row["ratio"], 3),
            *_planned(row),
        ]
        for row in budgets
    ]
    moe = [row for row in budgets if model_of(row) == "MoE" and "cold" in row["what"]]
    slow = max(moe, key=lambda row: row["measured_ms"])
    return {
        "plans": table(
            "model | store | commit | planned ms | best preset ms | ratio | "
            "strategies | profiled s | raced s | planned in s",
            rows,
        ),
        "budgets": table(
            "model | share | commit | XLA flag | winner | winner ms | best preset ms | "
            "ratio | strategies | profiled s | raced s | planned in s",
            within,
        ),
        "moe_slow": fixed(slow["measured_ms"]),
        "moe_slow_commit": slow["commit"],
        "moe_others": ", ".join(
            f"{row['measured_ms']:.1f} at {row.get('commit', '82e75f8')}"
            for row in moe
            if row is not slow
        ),
        "slow_race": _race(slow),
        "transposes": noted(by_hand, "transposes"),
        "seconds": noted(by_hand, "seconds"),
    }


def _race(row: Mapping[str, Any]) -> str:
    """All candidates of one race."""
    return table(
        "candidate | predicted ms | samples ms | compiled GB | note",
        [
            [
                plain(one["name"]),
                fixed(one["predicted_ms"]),
                ", ".join(fixed(sample) for sample in one["samples_ms"]),
                fixed(one["peak_bytes"] / 1e9) if one["peak_bytes"] else None,
                one["note"].partition(":")[0],
            ]
            for one in row["race"]
        ],
    )


def _links(row: Mapping[str, Any]) -> str:
    return "P2P off" if row["NCCL_P2P_DISABLE"] else "NVLink"


def planning_4(data: Mapping[str, Any], by_hand: Mapping[str, Any]) -> Figures:
    """The figures of the page of plans on four devices."""
    cells = [row for row in data["cells"] if "measured_ms" in row]
    rows = [
        [
            model_of(row),
            _links(row),
            _budget(row),
            row["commit"],
            fixed(row["measured_ms"]),
            _best(row),
            fixed(row.get("ratio"), 3),
            fixed(row.get("compared_ratio"), 3),
            gib(row["peak_bytes"]),
            fixed(row["plan_seconds"], 1),
        ]
        for row in cells
    ]
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in cells:
        if not row["what"].endswith("warm"):
            key = (model_of(row), _links(row), row["commit"])
            groups.setdefault(key, []).extend(errors(row["race"]))
    predicted = [
        [*key, len(found), _percent(statistics.median(map(abs, found))), _worst(found)]
        for key, found in groups.items()
        if found
    ]
    return {
        "plans": table(
            "model | links | budget | commit | planned ms | best preset ms | ratio | "
            "compared | GiB | planned in s",
            rows,
        ),
        "predicted": table(
            "model | links | commit | steps | median error | worst", predicted
        ),
        "seconds": noted(by_hand, "seconds"),
        "builds": table(
            "programs | threads | options | s | processor s | failed",
            [_build(line) for line in data["builds"]],
        ),
        "options": _options(data["options"]),
    }


def _percent(number: float) -> str:
    return f"{100 * number:.1f}%"


def _worst(found: Sequence[float]) -> str:
    return f"{100 * max(found, key=abs):+.1f}%"


def _build(line: str) -> list[str]:
    match = _BUILD.match(line)
    assert match is not None, line
    seconds = sum(float(match[name]) for name in ("user", "sys", "child"))
    options = match["options"].replace("'", "").removeprefix("xla_gpu_")
    return [
        f"{match['count']} {match['what']}",
        match["threads"],
        options or "default",
        fixed(float(match["wall"]), 1),
        f"{seconds:.0f}",
        match["bad"] if match["bad"] != "0" else "",
    ]


def _options(measured: Sequence[Mapping[str, Any]]) -> str:
    """One preset of each model with twenty sets of compiler options: medians."""
    names: dict[str, None] = {}
    columns = []
    for one in measured:
        times = {}
        for row in one["rows"]:
            name = row["name"].partition(", ")[2] or "default"
            names[name] = None
            times[name] = statistics.median(row["samples"])
        columns.append(times)
    heads = [
        f"{_MODELS[one['target'][0]]}, {plain(one['preset'])}, "
        f"{'P2P off' if one['p2p'] else 'NVLink'} ms"
        for one in measured
    ]
    return table(
        " | ".join(["options", *heads]),
        [[name, *(fixed(c.get(name)) for c in columns)] for name in names],
    )


def depth(data: Sequence[Mapping[str, Any]]) -> str:
    """Planning time against the number of layers."""
    first: dict[tuple[str, str], float] = {}
    lines = []
    for row in data:
        layers = row["target"][row["target"].index("--layers") + 1]
        spent, search = row["seconds_before_the_final_compile"], row["search"]
        key = (row.get("commit", ""), row["what"])
        base = first.setdefault(key, spent)
        lines.append(
            [
                layers,
                row["what"],
                row.get("commit"),
                fixed(spent, 1),
                None if base == spent else fixed(spent / base),
                fixed(search["profile_seconds"], 1),
                fixed(search["race_seconds"], 1),
                fixed(search.get("winner_seconds"), 1),
                plain(row["winner"]),
                fixed(row["measured_ms"], 1),
            ]
        )
    return table(
        "layers | store | commit | before the final compile s | against the fewest | "
        "profile s | race s | final compile s | winner | ms",
        lines,
    )


def depth_cpu(data: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of the page of planning time on virtual devices."""
    return {"depth": depth(data)}


def depth_gpu(data: Sequence[Mapping[str, Any]], by_hand: Mapping[str, Any]) -> Figures:
    """The figures of the page of planning time on two devices."""
    races = {
        row["commit"]: {one["name"]: one["time_ms"] for one in row["race"]}
        for row in data
        if row["what"] == "cold" and row["target"][-1] == "48"
    }
    whole, short = races["8d80532"], races["1f04258"]
    lines = [
        [
            plain(name),
            fixed(time, 1),
            fixed(short[name], 1),
            fixed(short[name] / time, 3),
        ]
        for name, time in sorted(whole.items(), key=lambda item: item[1] or 1e9)
        if time and short.get(name) and not name.startswith("planned")
    ]
    return {
        "depth": depth(data),
        "abridged": table("| whole ms | abridged ms | ratio", lines),
        "memory": noted(by_hand, "memory"),
    }
