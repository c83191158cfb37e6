"""One of several processes that plan a model together, run it and check it.

    CFP_COORDINATOR=... CFP_PROCESSES=2 CFP_PROCESS_ID=0 \\
        python cfp_test/scripts/several_worker.py MODEL FOLDER [gpus]

Models are tiny, or with ``gpus`` so large that a step computes for milliseconds: what
is over sooner is bound by its launches, which several processes share.

Prints one line of JSON: the plan, how far its steps are from one device's, and whether
what it saved came back on another mesh.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import cfp
from cfp.checking.trial import run_trial
from cfp.devices.joining import is_asked, join
from cfp.plan.plan import Plan
from cfp.targets import Target, model_target
from cfp_test.gpu.place import ON_GPUS
from cfp_test.models.tiny import TINY

STEPS = 2
_LARGE = {"hidden": 2048, "heads": 16, "batch": 16, "seq": 1024}
# Of planning, beyond which it ends with the best so far.
MOST_SECONDS = 120.0


def plan_of(target: Target, mesh: jax.sharding.Mesh, folder: Path, **options) -> Plan:
    """The model's plan on a mesh."""
    return cfp.plan(
        target.step,
        *target.args,
        mesh=mesh,
        donate_argnums=target.donate,
        cache_dir=folder / "cache",
        settings=cfp.PlannerSettings(
            race=options.get("preset") is None, seconds=MOST_SECONDS
        ),
        **options,
    )


def digest(plan: Plan) -> str:
    """Digest of the program that the step is compiled from, and of the figures.

    Each process has its own clock, and so its own seconds of planning.
    """
    found = json.loads(plan.to_json(), parse_int=float)
    search = found["search"].items()
    found["search"] = {name: one for name, one in search if "seconds" not in name}
    return _digest(found)


def choice_digest(plan: Plan) -> str:
    """Digest of the program that the step is compiled from alone."""
    found = json.loads(plan.to_json())
    names = "arguments", "output_specs", "constraints", "replaced", "options"
    return _digest([found.get(name) for name in names])


def _digest(found: Any) -> str:
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shardings_digest(plan: Plan) -> str:
    """Digest of the shardings of arguments and results.

    Two measured races may end with other compiler options, or constraints of other
    values, where these are as fast within noise.
    """
    parts = (plan.arg_specs, plan.output_specs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def saved_and_restored(
    target: Target, plan: Plan, folder: Path
) -> tuple[bool | None, str]:
    """Saves the state under a plan, and restores it under another, on another mesh.

    Returns:
        Whether every number came back, and the mesh that it came back on; None where
        processes have unequally many devices, which Orbax cannot do.
    """
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        return None, ""
    state = target.make_args(plan.in_shardings, 0)[0]
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save((folder / "saved").absolute(), state)
    count = jax.device_count()
    shape = (2, count // 2) if count % 2 == 0 else (1, count)
    other = plan_of(
        target, jax.make_mesh(shape, ("x", "y")), folder, preset="fully_sharded"
    )
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        state,
        other.in_shardings[0],
    )
    with ocp.StandardCheckpointer() as checkpoints:
        back = checkpoints.restore((folder / "saved").absolute(), shapes)
    again = jax.tree.map(
        lambda a, s: jax.device_put(a, s), state, other.in_shardings[0]
    )
    differ = [
        float(jax.jit(lambda a, b: jnp.abs(a - b).max())(a, b)) if a.size else 0.0
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(again), strict=True)
    ]
    return max(differ) == 0.0, ",".join(f"{n}={s}" for n, s in other.mesh_axes)


def main(model: str, folder: Path, sizes: str = "") -> None:
    """Joins the others, plans, runs, checks, saves and restores."""
    if is_asked():
        join(join_seconds=600)
    options = {**ON_GPUS.models[model], **_LARGE} if sizes else TINY[model]
    target = model_target(model, dict(options))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    started = time.perf_counter()
    plan = plan_of(target, mesh, folder)
    planned = time.perf_counter()
    trial = run_trial(plan, target, steps=STEPS, check=True)
    # Programs of this size are often fastest if nothing is sharded.
    preset = plan_of(target, mesh, folder, preset="fully_sharded")
    sharded = run_trial(preset, target, steps=1, check=True)
    same, on = saved_and_restored(target, preset, folder)
    largest, largest_sharded = trial.largest, sharded.largest
    assert largest is not None and largest_sharded is not None
    row = {
        "model": model,
        "process": jax.process_index(),
        "plan": digest(plan),
        "choice": choice_digest(plan),
        "shardings": shardings_digest(plan),
        "predicted_ms": plan.predicted_ms,
        "winner": plan.winner,
        "raced": [row.name for row in plan.race],
        "sharded_arguments": sum(any(spec) for spec in plan.arg_specs),
        "plan_seconds": round(planned - started, 1),
        "passed": not trial.failures and not sharded.failures,
        "largest": largest.relative_l2,
        "preset_sharded_arguments": sum(any(spec) for spec in preset.arg_specs),
        "preset_largest": largest_sharded.relative_l2,
        "tolerance": trial.tolerance,
        "losses": [step.metrics["loss"] for step in trial.steps],
        "restored": same,
        "restored_on": on,
        "step_ms": float(np.round(trial.median_ms, 2)),
        "devices": [d.process_index for d in mesh.devices.flat],
    }
    print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
