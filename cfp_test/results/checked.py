"""Checks, analysis and guided search, all on virtual CPU devices."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, table

_MESHES = ("x=4", "x=8", "x=2,y=2")


def _key(run: str) -> tuple[str, str, str, str]:
    """Model, form, rematerialization and mesh of a run."""
    model, *words = shlex.split(run)
    form = "scanned" if "--scan" in words else "unrolled"
    remat = "yes" if "--remat" in words else "no"
    return model, form, remat, words[words.index("--mesh") + 1]


def checks(data: Mapping[str, Any], by_hand: Mapping[str, Any]) -> Figures:
    """The figures of the page of plans against one device."""
    found = {_key(r["run"]): r["largest_difference"] for r in data["matrix"]}
    other = {_key(r["run"]): r["largest_difference"] for r in data["matrix_seed_1"]}

    def cell(key: tuple[str, str, str, str]) -> str:
        text = f"{found[key]['relative_l2']:.1e}"
        again = other.get(key)
        return f"{text} ({again['relative_l2']:.1e})" if again else text

    kinds = dict.fromkeys(key[:3] for key in found)
    matrix = [[*kind, *(cell((*kind, mesh)) for mesh in _MESHES)] for kind in kinds]
    programs: dict[str, list[Mapping[str, Any]]] = {}
    for run in data["programs"]:
        programs.setdefault(run["name"], []).append(run)
    ran = [
        [
            name,
            " and ".join(run["mesh"] for run in runs),
            f"{max(run['relative_l2'] for run in runs):.1e}",
            "yes" if all(run["passed"] for run in runs) else "no",
            f"{sum(run['seconds'] for run in runs):.0f}",
        ]
        for name, runs in programs.items()
    ]
    absent = by_hand["programs_not_run"]["value"]
    passed = sum(run["passed"] for run in (*data["matrix"], *data["programs"]))
    assert passed == len(data["matrix"]) + len(data["programs"]), "the page says all"
    return {
        "matrix": table("model | form | remat | " + " | ".join(_MESHES), matrix),
        "matrix_runs": str(len(data["matrix"])),
        "programs": table(
            "program | meshes | largest difference | passed | seconds", ran
        ),
        "runs": str(len(data["programs"])),
        "ran": str(len(programs)),
        "all": str(len(programs) + len(absent)),
        "absent": ", ".join(absent),
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
