"""Checks, analysis and guided search, all on virtual CPU devices."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, plain, table

_MESHES = ("x=4", "x=8", "x=2,y=2")


def _key(run: str) -> tuple[str, str, str, str]:
    """Model, form, rematerialization and mesh of a run."""
    model, *words = shlex.split(run)
    form = "scanned" if "--scan" in words else "unrolled"
    remat = "yes" if "--remat" in words else "no"
    return model, form, remat, words[words.index("--mesh") + 1]


def checks(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of the zoo's plans against one device."""
    found = {_key(r["run"]): r["largest_difference"] for r in data["matrix"]}
    other = {_key(r["run"]): r["largest_difference"] for r in data["matrix_seed_1"]}

    def cell(key: tuple[str, str, str, str]) -> str:
        text = f"{found[key]['relative_l2']:.1e}"
        again = other.get(key)
        return f"{text} ({again['relative_l2']:.1e})" if again else text

    kinds = dict.fromkeys(key[:3] for key in found)
    matrix = [[*kind, *(cell((*kind, mesh)) for mesh in _MESHES)] for kind in kinds]
    assert all(run["passed"] for run in data["matrix"]), "the page says all"
    return {
        "matrix": table("model | form | remat | " + " | ".join(_MESHES), matrix),
        "matrix_runs": str(len(data["matrix"])),
    }


def programs(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of other people's programs."""
    rows = data["rows"]
    planned = [row for row in rows if not row["sharding"]]
    ran = {(row["name"], row["mesh"]) for row in planned}
    sharded = _sharding(rows)
    names = {name for name, _ in ran}
    absent = [name for name in data["programs"] if name not in names]
    return {
        "rows": table(
            "program | mesh | plan | arguments sharded | blocks sharded | how | "
            "largest difference | in | passed",
            [_program_row(row) for row in rows],
        ),
        "programs": f"{len(names)} of {len(data['programs'])}",
        "absent": ", ".join(absent) or "none",
        "runs": str(len(rows)),
        "passed": str(sum(row["passed"] for row in rows)),
        "pairs": str(len(ran)),
        "plans_sharding": str(len(_sharding(planned))),
        "pairs_sharding": str(len(sharded)),
        "nowhere": ", ".join(f"{name} ({mesh})" for name, mesh in sorted(ran - sharded))
        or "none",
        "level": str(data["optimization_level"]),
        "jax": data["jax"],
        "python": data["python"],
        "commits": ", ".join(dict.fromkeys(row["commit"] for row in rows)),
        "dates": ", ".join(dict.fromkeys(row["date"] for row in rows)),
    }


def _sharding(rows: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Programs and meshes with a row that shards something."""
    return {
        (row["name"], row["mesh"])
        for row in rows
        if "sharded" in row
        and (row["sharded"]["arguments"] or row["sharded"]["blocks"])
    }


def _program_row(row: Mapping[str, Any]) -> list[Any]:
    if "error" in row:
        return [row["name"], row["mesh"], *[None] * 4, row["error"], None, "no"]
    sharded = row["sharded"]
    return [
        row["name"],
        row["mesh"],
        f"{plain(row['winner'])}, in its place" if row["sharding"] else row["winner"],
        f"{sharded['arguments']} of {sharded['all_arguments']}",
        f"{sharded['blocks']} of {sharded['all_blocks']}",
        "; ".join(sharded["words"]).replace("|", "/"),
        f"{row['relative_l2']:.1e}",
        row["worst"].replace("|", "/"),
        "yes" if row["passed"] else "no",
    ]


def within_budgets(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of the zoo, checked within memory budgets."""
    rows = []
    for row in data["rows"]:
        model, form, _, mesh = _key(row["run"])
        largest = row.get("largest_difference") or {}
        again = row.get("rematerialized", ())
        rows.append(
            [
                model,
                form,
                mesh,
                f"{row['budget_bytes']:,}",
                plain(row.get("plan", "")),
                f"{row['peak_bytes']:,}" if row.get("peak_bytes") else None,
                row.get("segments_recomputed"),
                " and ".join(map(str, again)),
                f"{largest['relative_l2']:.1e}" if largest else row.get("error"),
                largest.get("path"),
                "yes" if row["passed"] else "no",
            ]
        )
    return {
        "rows": table(
            "model | form | mesh | budget, bytes | plan | compiled, bytes | segments "
            "computed again | by the compiler | largest difference | in | passed",
            rows,
        ),
        "runs": str(len(rows)),
        "passed": str(sum(row["passed"] for row in data["rows"])),
        "again": str(sum(bool(r.get("segments_recomputed")) for r in data["rows"])),
        "compiler": str(
            sum(any(filter(None, r.get("rematerialized", ()))) for r in data["rows"])
        ),
        "platform": data["platform"],
        "jax": data["jax"],
        "python": data["python"],
        "commits": ", ".join(dict.fromkeys(row["commit"] for row in data["rows"])),
        "dates": ", ".join(dict.fromkeys(row["date"] for row in data["rows"])),
    }


def margin(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of what rounding does to checks."""
    return {
        "rows": table(
            "leaf | start | off by | last bit, one device | ratio",
            [
                [
                    row["path"],
                    row["seed"],
                    f"{row['relative_l2']:.1e}",
                    f"{row['rounding']:.1e}",
                    fixed(row["relative_l2"] / row["rounding"]),
                ]
                for row in data["beyond_tolerance"]
            ],
        ),
        "target": data["target"],
        "preset": data["preset"].replace("_", " "),
        "jax": data["jax"],
        "starts": str(data["seeds"]),
        "leaves": f"{data['leaves']:,}",
        "middle": fixed(data["quantiles"]["0.5"]),
        "hundredth": fixed(data["quantiles"]["0.99"]),
        "largest": fixed(data["quantiles"]["1.0"], 1),
        "above": str(data["above_margin"]),
        "beyond": str(len(data["beyond_tolerance"])),
    }


def kernels(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of attention in bfloat16 in checks."""
    rows = []
    for row in data["rows"]:
        model, size = row["model"].split()[0], row["model"].split()[-1]
        ratio, off, path = row["largest"] or (None, None, "")
        rows.append(
            [
                f"{model}, {size} tokens",
                fixed(row["scale"]),
                row["attention"],
                row["step"],
                row["further_off"],
                "" if ratio is None else f"{ratio:,.2f}",
                "" if off is None else f"{off:.1e} in {path}",
                row["failures"],
            ]
        )
    head = (
        "model | weights times | attention | step | leaves further off than 1e-2 | "
        "largest ratio | off by | failures"
    )
    right = [row for row in data["rows"] if row["attention"] == "right"]
    return {
        "rows": table(head, rows),
        "jax": data["jax"],
        "largest": fixed(max(row["largest"][0] for row in right if row["largest"])),
        "steps": str(len(right)),
    }


def analysis(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of analysis time."""
    rows = [
        [
            mesh,
            row["layers"],
            f"{row['ops']:,}",
            row["blocks"],
            f"{row['segments']} ({row['kinds']})",
            fixed(min(row["trace_seconds"])),
            fixed(min(row["analysis_seconds"])),
        ]
        for mesh, found in data["meshes"].items()
        for row in found
    ]
    first, *_, last = data["meshes"]["x=4"]
    return {
        "rows": table(
            "mesh | layers | ops | blocks | segments (kinds) | trace s | analysis s",
            rows,
        ),
        "ops": fixed(last["ops"] / first["ops"], 1),
        "times": fixed(
            min(last["analysis_seconds"]) / min(first["analysis_seconds"]), 1
        ),
        "date": data["date"],
    }


def guided(data: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of the page of guided search."""
    rows = []
    for run in data:
        few, every = run["guided"], run["everything"]
        rows.append(
            [
                run["target"][0],
                f"{few['strategies']} ({run['share']:.0%})",
                every["strategies"],
                fixed(few["predicted_ms"]),
                fixed(every["predicted_ms"]),
                fixed(few["median_ms"]),
                "the same plan" if run["same_plan"] else fixed(every["median_ms"]),
                f"{run['gap']:.0%}",
                f"{run['bounds']['violated']} of {run['bounds']['count']}",
                fixed(run["bounds"]["largest"]),
                fixed(run["bounds"]["median"]),
            ]
        )
    return {
        "rows": table(
            "model | measured, guided | everything | predicted, guided ms | "
            "everything ms | measured, guided ms | everything ms | gap | "
            "bounds broken | largest bound over time | median",
            rows,
        )
    }


def moe(data: Mapping[str, Any]) -> Figures:
    """The figures of the page of the mixture of experts on four devices."""
    rows = [
        [
            f"**{row['name']}**" if row["name"] == data["winner"] else row["name"],
            row["measured_ms"],
            row["predicted_ms"] or "-",
            row["memory_gib"],
        ]
        for row in data["race"]
    ]
    return {
        "rows": table("plan | measured ms | predicted ms | memory GiB", rows),
        "samples": ", ".join(fixed(1000 * s) for s in data["samples_seconds"]),
        "tflops": f"{data['tflops'][0]:.0f}",
    }
