"""Optimizer state in the memory of the host: memory saved, and time paid.

A GPT with Adam in float32 is planned with plenty of memory, and in a budget in which
nothing fits with all of its state on the devices; what each plan takes is measured in
turn. One GPU plays one of two: it computes what one device does, on real numbers;
memory and transfers are real, and collectives take no time:

    python -m cfp_test.bench.host_memory --kind h100 --out host_memory.json

On virtual CPU devices, to try the script out:

    python -m cfp_test.bench.host_memory --tiny --out host_memory.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax

from cfp import platform
from cfp.analysis.host_state import movable_state
from cfp.devices.described import DescribedMesh, described
from cfp.errors import MemoryBudgetError
from cfp.find import FoundPlan, PlanOptions, find_plan, find_with_state_in_host
from cfp.models import build as build_model
from cfp.passes.pipeline import analyze_step
from cfp.planner_settings import PlannerSettings
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.key import environment_parts
from cfp.profiling.runner import run_local, timing_on
from cfp.program.step import FlatStep, flatten_step
from cfp.search.jobs import whole_job

DEVICES = 2
_MODEL = {"layers": 4, "hidden": 4096, "heads": 32, "seq": 1024, "batch": 8}
_TINY = {"layers": 2, "hidden": 512, "heads": 4, "seq": 16, "batch": 4, "vocab": 256}
_TURNS = 2
_TOO_LITTLE_BYTES = 2**20


def mesh_of(kind: str, tiny: bool) -> Any:
    """The devices: those that one GPU plays, or virtual ones."""
    if not tiny:
        return described(f"{DEVICES}x{kind}", x=DEVICES).on_one_device()
    platform.select("cpu", (("x", DEVICES),))
    return platform.make_mesh((("x", DEVICES),))


def plans_of(mesh: Any, model: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Plans with plenty of memory, with just enough, and with too little for all.

    Returns:
        Plans by name, with what each may use; "smallest_bytes" that anything fits in
        with all of its state on the devices, and "movable_bytes" of state.
    """
    fn, args = build_model("gpt", **model)
    step = flatten_step(fn, args, donate_argnums=0)
    settings = PlannerSettings(seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        how = PlanOptions(cache_dir=folder, settings=settings)
        found = {"plenty": (None, find_plan(step, mesh, how))}
        state = movable_state(found["plenty"][1].analysis.frame)
        movable = sum(one.size_bytes for one in state) // DEVICES
        smallest = _shortage(step, mesh, how, _TOO_LITTLE_BYTES).smallest_feasible_bytes
        budget = smallest - movable // 2
        shortage, end = _shortage(step, mesh, how, budget), time.monotonic() + seconds
        lacking = replace(how, memory_budget=budget)
        analyzed = analyze_step(step, mesh)
        in_host = find_with_state_in_host(step, shortage, end, analyzed, lacking)
        found["in host"] = budget, in_host
    return {"plans": found, "smallest_bytes": smallest, "movable_bytes": movable}


def _shortage(
    step: FlatStep, mesh: Any, how: PlanOptions, budget: int
) -> MemoryBudgetError:
    """The error of planning with all state on the devices, in too little memory."""
    try:
        find_plan(step, mesh, replace(how, memory_budget=budget))
    except MemoryBudgetError as error:
        return error
    raise AssertionError(f"a model fits in {budget} bytes")


def built_of(found: FoundPlan, mesh: Any) -> tuple[Built, Any, Any, Any]:
    """The whole program of a plan, compiled for the devices that run it."""
    here, options = mesh, {}
    if isinstance(mesh, DescribedMesh):
        from cfp.devices import described

        assert mesh.stand_in is not None, "a GPU plays them"
        here, options = mesh.stand_in, dict(described.OPTIONS)
    winner = found.winner
    options |= winner.options
    job = whole_job(
        found.analysis, winner.choice, (), winner.name, winner.level, options
    )
    environment = BuildEnvironment(wants_local=lambda job, text: True)
    made = build(found.analysis.frame.program, here, job, environment)
    assert isinstance(made, Built), made
    return made, job, found.analysis.frame.program, here


def row_of(budget: int | None, found: FoundPlan, made: Built) -> dict[str, Any]:
    """Returns a plan's memory by prediction and as compiled."""
    memory = made.compiled.memory_analysis()
    names = [n for n in dir(memory) if n.endswith("_size_in_bytes")] if memory else []
    return {
        "winner": found.plan.winner,
        "budget_bytes": budget,
        "predicted_ms": found.plan.predicted_ms,
        "arguments_in_host": len(found.plan.in_host),
        "host_bytes": found.plan.search.get("host_bytes", 0),
        "host_ms_estimated": found.plan.search.get("host_ms", 0.0),
        "rematerialized": len(found.winner.choice.remat),
        "peak_bytes": made.peak_bytes,
        "temp_bytes": made.temp_bytes,
        "argument_bytes": made.argument_bytes,
        "compiled": {name: getattr(memory, name) for name in names},
        "samples_ms": [],
        "peak_in_use_bytes": None,
    }


def main() -> None:
    """Plans, compiles and times; writes JSON after every turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kind", default="h100")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0, help="for each plan")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    model = dict(_TINY if options.tiny else _MODEL)
    model |= {"layers": options.layers} if options.layers else {}
    mesh = mesh_of(options.kind, options.tiny)
    made = plans_of(mesh, model, options.seconds)
    plans = made.pop("plans")
    ready = {name: built_of(found, mesh) for name, (_, found) in plans.items()}
    rows = {
        name: row_of(budget, found, ready[name][0])
        for name, (budget, found) in plans.items()
    }
    here = next(iter(ready.values()))[3]
    page = {
        "environment": dict(environment_parts(list(here.devices.flat))),
        "devices": DEVICES,
        "model": model,
        **made,
        "rows": rows,
    }
    timing = timing_on(
        here,
        warmup_seconds=1.0,
        min_samples=5,
        max_samples=5 if options.tiny else 20,
    )
    for _ in range(_TURNS):
        # What needs less memory first: the peak in use is of the process.
        for name in sorted(ready, key=lambda name: rows[name]["peak_bytes"]):
            record = run_local(*ready[name], timing=timing)
            assert record.ok, f"{name}: {record.status}: {record.reason}"
            row = rows[name]
            row["samples_ms"] += record.samples_ms
            row["step_ms"] = median(row["samples_ms"])
            used = (jax.local_devices()[0].memory_stats() or {}).get(
                "peak_bytes_in_use"
            )
            row["peak_in_use_bytes"] = row["peak_in_use_bytes"] or used
            options.out.write_text(json.dumps(page, indent=1) + "\n")
    for name, row in rows.items():
        print(
            f"{name}: {row['step_ms']:.2f} ms, {row['peak_bytes'] / 2**30:.3f} GiB on "
            f"each device, {row['host_bytes'] / 2**30:.3f} GiB in the host"
        )


if __name__ == "__main__":
    main()
