"""Plans of the zoo before and after a change: what is chosen, its memory, its time.

    python cfp_test/scripts/same_plans.py run --json FILE [--models gpt] [--ways W]
    python cfp_test/scripts/same_plans.py join BEFORE AFTER --json FILE

Every model on x=4 and x=2,y=2, without a budget and with 90, 75, 60 and 35 % of what
data parallelism needs, in two ways: as virtual devices plan by default, by estimates,
and by measuring and racing as GPUs do. Times follow from compiled programs
(`cfp_test/support/injected.py`), so that the same choices have the same times and no
plan is decided by how busy the machine is. Rows are added to the JSON as they come, and
those that it has are not made again. Run it in a clone of each commit. `join` puts two
files beside each other, several of a side at once with commas, and
`python -m cfp_test.results` makes the page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

_SMALL = {"vocab": 256, "seq": 32, "hidden": 64, "layers": 2, "heads": 4, "batch": 16}
# Larger ones, of which sharded and rematerialized plans fit in less than others.
_LARGER = {**_SMALL, "seq": 64, "hidden": 128, "layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": _SMALL,
    "moe": {**_SMALL, "experts": 4, "expert_group_size": 128},
    "bert": _SMALL,
    "llama": _SMALL,
    "gpt larger": _LARGER,
    "moe larger": {**_LARGER, "experts": 4, "expert_group_size": 128},
    "bert larger": _LARGER,
    "llama larger": _LARGER,
}
MESHES = ((("x", 4),), (("x", 2), ("y", 2)))
SHARES = (None, 0.9, 0.75, 0.6, 0.35)
WAYS: dict[str, dict[str, Any]] = {
    "estimates": {"race": False},
    # As on GPUs, but for the options of their compiler.
    "measured": {"measure": True, "plans": 2, "per_kind": 4},
}


def run(file: Path, models: list[str], ways: list[str]) -> None:
    """Makes all plans that the file does not have."""
    import jax
    import pytest

    from cfp_test.support.injected import inject_times

    inject_times(pytest.MonkeyPatch())
    data = json.loads(file.read_text()) if file.exists() else {"rows": []}
    data |= {"commit": _git("rev-parse", "HEAD"), "jax": jax.__version__}
    done = {(row["way"], row["model"], row["mesh"]) for row in data["rows"]}
    for way in ways:
        for axes in MESHES:
            mesh = ",".join(f"{name}={size}" for name, size in axes)
            for model in models:
                if (way, model, mesh) in done:
                    continue
                rows = [
                    {"way": way, "model": model, "mesh": mesh, **row}
                    for row in _rows(way, model, axes)
                ]
                data["rows"] += rows
                file.write_text(json.dumps(data, indent=1) + "\n")
                for row in rows:
                    print({k: row.get(k) for k in row if k != "race"}, flush=True)


def _rows(way: str, model: str, axes: tuple[tuple[str, int], ...]) -> list[dict]:
    """The plans of a model on a mesh, in one way, with one store."""
    import jax

    import cfp
    from cfp import planner_settings

    # Earlier versions had one class of settings.
    settings_type = getattr(planner_settings, "DetailedSettings", cfp.PlannerSettings)
    from cfp.errors import CfpError
    from cfp.models import build
    from cfp.settings import ConstraintLevel

    built = [0]

    def count(event: str, seconds: float, **_: Any) -> None:
        built[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    step, args = build(model.split()[0], **MODELS[model])
    names, sizes = zip(*axes, strict=True)
    mesh = jax.make_mesh(sizes, names)
    settings = dict(WAYS[way])
    if way == "measured":
        # `extents` in earlier versions.
        known = {one.name for one in fields(settings_type)}
        [levels] = known & {"constraint_levels", "extents"}
        settings[levels] = tuple(ConstraintLevel)
    rows = []
    with tempfile.TemporaryDirectory() as folder:

        def plan(budget: int | None, preset: str | None = None) -> Any:
            return cfp.plan(
                step,
                *args,
                mesh=mesh,
                donate_argnums=0,
                cache_dir=folder,
                memory_budget=budget,
                preset=preset,
                settings=settings_type(**settings),
            )

        # A budget has it compiled, and says what it needs.
        base = plan(2**40, "data_parallel").peak_bytes
        for share in SHARES:
            built[0] = 0
            wall, cpu = time.perf_counter(), time.process_time()
            row: dict[str, Any] = {"share": share, "data_parallel_bytes": base}
            try:
                row |= _told(plan(None if share is None else round(share * base)))
            except CfpError as error:
                row["failure"] = f"{type(error).__name__}: {error}"
            row["wall_seconds"] = round(time.perf_counter() - wall, 2)
            row["processor_seconds"] = round(time.process_time() - cpu, 2)
            row["programs_compiled"] = built[0]
            rows.append(row)
    jax.monitoring.clear_event_listeners()
    jax.clear_caches()
    return rows


def _told(plan: Any) -> dict[str, Any]:
    """Returns the parts of a plan that are compared."""
    decided = json.loads(plan.to_json())
    parts = ("arguments", "output_specs", "constraints", "recompute", "options")
    chosen = {part: decided[part] for part in parts}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
    return {
        "winner": plan.winner,
        "digest": digest[:12],
        "predicted_ms": plan.predicted_ms,
        "measured_ms": plan.measured_ms,
        "peak_bytes": plan.peak_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "race": [
            [one.name, one.predicted_ms, one.time_ms, one.peak_bytes, one.note]
            for one in plan.race
        ],
        "search": {k: v for k, v in plan.search.items() if "seconds" not in k},
    }


# ------------------------------------------------------------------------- the page


def page(data: dict[str, Any]) -> str:
    """Both sides' rows beside each other, as Markdown."""
    before, after = ({_key(row): row for row in data[side]["rows"]} for side in _SIDES)
    both = [key for key in before if key in after]
    same = sum(_decided(before[key]) == _decided(after[key]) for key in both)
    commits = [data[side]["commit"][:7] for side in _SIDES]
    lines = [
        "# The same plans, before and after",
        "",
        f"{commits[0]} and {commits[1]}, 4 virtual CPU devices of two shared processor "
        f"cores, jax {data['after']['jax']}, November 2026. Small models of the zoo "
        "(two layers of width 64; the larger ones four of width 128), without a budget "
        "and with shares of what data parallelism needs; by estimates, and by "
        "measuring and racing, with times that follow from the compiled programs, so "
        f"that load on the machine decides nothing. Of {len(both)} plans made with "
        f"both, {same} decide the same, or name the same size where nothing fits; "
        "those that only one side made are left out. Made by "
        "`python cfp_test/scripts/same_plans.py`. [JSON](same_plans_cpu_202611.json)",
        "",
        "| way | model | mesh | budget | decides the same | predicted ms | step ms | "
        "memory MiB | programs compiled | processor s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in both:
        one, other = before[key], after[key]
        share = "none" if one["share"] is None else f"{one['share']:.0%}"
        cells = [one["way"], one["model"], one["mesh"], share]
        cells.append("yes" if _decided(one) == _decided(other) else "no")
        if "failure" in one and "failure" in other:
            cells += ["nothing fits", "", f"{_needs(one)} / {_needs(other)}"]
        else:
            cells += [
                _pair(one, other, "predicted_ms", 1.0),
                _pair(one, other, "measured_ms", 1.0),
                _pair(one, other, "peak_bytes", 2.0**20),
            ]
        cells.append(f"{one['programs_compiled']} / {other['programs_compiled']}")
        seconds = one["processor_seconds"], other["processor_seconds"]
        cells.append(f"{seconds[0]:.1f} / {seconds[1]:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


_SIDES = ("before", "after")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["way"], row["model"], row["mesh"], row["share"]


def _decided(row: dict[str, Any]) -> Any:
    """Returns a plan's decisions, or what the smallest needs where nothing fits."""
    return row.get("digest") or _needs(row)


def _needs(row: dict[str, Any]) -> str:
    return row["failure"].split(", needs ")[-1].split(" on")[0]


def _pair(one: dict[str, Any], other: dict[str, Any], name: str, unit: float) -> str:
    values = (row.get(name) for row in (one, other))
    return " / ".join("-" if x is None else f"{x / unit:.2f}" for x in values)


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "join"))
    parser.add_argument("files", nargs="*", help="FILE,FILE... before, and after")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    if options.command == "join":
        both = {}
        for side, files in zip(_SIDES, options.files, strict=True):
            parts = [json.loads(Path(f).read_text()) for f in files.split(",")]
            rows = [row for part in parts for row in part["rows"]]
            both[side] = {**parts[0], "rows": rows}
        options.json.write_text(json.dumps(both, indent=1) + "\n")
        return
    from cfp_test.support.quick_flags import QUICK_FLAGS

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=4"
    run(options.json, options.models.split(","), options.ways.split(","))


if __name__ == "__main__":
    main()
