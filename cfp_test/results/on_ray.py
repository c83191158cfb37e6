"""Pages about planning on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

_KINDS = {
    "": "nothing",
    "builder": "a builder",
    "runner": "the runner",
    "node": "a node",
    "driver": "the driver",
}


def kills(data: Mapping[str, Any]) -> str:
    """Processes that were killed while a plan was made, and what came of it."""
    trials = [one for run in data["runs"] for one in run["trials"]]
    disturbed = [one for one in trials if one["kind"]]
    good = [o for o in disturbed if o["same_plan"] and o["same_keys"]]
    again = sum(len(one["again"]) for one in trials)
    commits = ", ".join(dict.fromkeys(run["commit"] for run in data["runs"]))
    undisturbed = max(one["builds"] for one in trials if not one["kind"])
    fewest = min(
        sum(one["kind"] == kind for one in disturbed) for kind in _KINDS if kind
    )
    short = f" (at least {fewest} were run)" if fewest < data["wanted"] else ""
    lines = [
        "# Planning on a Ray cluster while its processes are killed",
        "",
        f"Three Ray nodes on one machine of {data['cores']} shared processor cores, "
        f"two virtual devices, Python {data['python']}, jax {data['jax']}, Ray "
        f"{data['ray']}, {data['date']}, commits {commits}. In each trial a planning "
        "begins with an empty store, and SIGKILL ends one thing at a random moment; a "
        "node or a driver is then replaced. Everything runs; times follow from the "
        "compiled program, so that plans compare. Made by `python -m "
        "cfp_test.scripts.ray_kills`. [JSON](ray_kills_cpu_202611.json)",
        "",
        f"{len(good)} of {len(disturbed)} disturbed plannings gave the undisturbed "
        f"plan and a store with the same keys; {again} programs were run again that "
        f"were stored. {data['wanted']} of each kind were wanted{short}.",
        "",
        "| killed | trials | of | after events | same plan | same keys | stored, run "
        "again | builds at most | median s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, name in _KINDS.items():
        some = [one for one in trials if one["kind"] == kind]
        after = [one["after"] for one in some]
        of = some[0]["of"]
        cells = [
            name,
            len(some),
            data["wanted"] if kind else "-",
            f"{min(after)} to {max(after)} of {of}" if kind else "-",
            sum(one["same_plan"] for one in some),
            sum(one["same_keys"] for one in some),
            sum(len(one["again"]) for one in some),
            max(one["builds"] for one in some),
            round(median(one["seconds"] for one in some)),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    late = sum(one["after"] >= one["of"] for one in disturbed)
    lines += [
        "",
        "An event is a build that is asked for, a run that begins, or a record that is "
        f"stored. {late} of the kills came when all had happened, and the plan was not "
        "there yet.",
        "",
        f"Without a disturbance {undisturbed} programs are built elsewhere. What was "
        "built and not run yet goes with the runner, and is built again. Seconds are "
        "those of a machine that did much else.",
    ]
    return "\n".join(lines) + "\n"


WORKERS = (1, 2, 4)


def builds(data: Mapping[str, Any]) -> str:
    """Builds on several workers."""
    rows = data["rows"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"# {data['count']} builds on Ray workers",
        "",
        f"One machine of {data['cores']} shared processor cores, Python "
        f"{data['python']}, jax {data['jax']}, Ray {data['ray']}, {rows[0]['date']}, "
        f"commits {commits}. Every build is another program for two virtual devices. "
        "Processor seconds are those of the workers, starting Python and JAX included; "
        "the largest of any worker is what nodes of their own would take at least. "
        "Wall time says little here. Made by `python -m cfp_test.scripts.ray_builds`. "
        "[JSON](ray_builds_cpu_202611.json)",
        "",
        "| workers | builds | processor s, all workers | processor s, the busiest "
        "worker | builds by worker | built twice | wall s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            row["workers"],
            row["builds"],
            row["processor_seconds"],
            row["largest_processor_seconds"],
            " + ".join(map(str, row["builds_by_process"])),
            row["built_twice"],
            row["wall_seconds"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    absent = [str(n) for n in WORKERS if n not in {row["workers"] for row in rows}]
    if absent:
        lines += [
            "",
            f"Not measured: {', '.join(absent)} workers. The run was ended before "
            "that, since the machine was needed.",
        ]
    return "\n".join(lines) + "\n"
