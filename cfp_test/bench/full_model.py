"""Plans a whole model, and trains it under the plan and under presets.

    python -m cfp_test.bench full_model MODEL [MODEL'S OPTIONS] --json FILE
        [--mesh x=2] [--steps 20] [--presets fully_sharded tensor_parallel]
        [--nominal 989.5] [--workdir FOLDER] [--platform cpu]

Planning is as by default. Each training is a process of its own, since a device's
high-water mark of memory never falls within one. ``--steps`` steps are timed one by
one, and as many in a row, each from the state that the step before returned, on one
batch of random tokens. ``--nominal`` is the TFLOP/s of a device by its data sheet, of
which the share is told that the model's own products reach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import cfp
from cfp import platform
from cfp.targets import Target, resolve
from cfp_test.bench.commit import commit

_PLANNED = "the plan"


def _plan(
    given: argparse.Namespace, target: Target, preset: str | None
) -> dict[str, Any]:
    """Plans, or takes a preset, and saves it in the working folder."""
    started = time.perf_counter()
    plan = cfp.plan(
        target.step,
        *target.args,
        mesh=_mesh(given),
        donate_argnums=target.donate,
        preset=preset,
        cache_dir=given.workdir,
    )
    seconds = time.perf_counter() - started
    plan.save(_file(given, preset or _PLANNED))
    return {
        "winner": plan.winner,
        "planned_s": round(seconds, 1),
        "predicted_ms": plan.predicted_ms,
        "raced_ms": plan.measured_ms,
        "race": [(row.name, row.time_ms) for row in plan.race],
        "planned_bytes": plan.peak_bytes,
        "model_flops": plan.search.get("model_flops"),
    }


def _train(given: argparse.Namespace, target: Target, name: str) -> dict[str, Any]:
    """Trains under a saved plan; times, memory and losses."""
    plan = cfp.Plan.load(_file(given, name), mesh=_mesh(given))
    bound = plan.bind(target.step, *target.args, donate_argnums=target.donate)
    compiled = bound.compile(target.step, *target.args)
    state, batch = target.make_args(bound.in_shardings, 0)
    losses: list[Any] = []

    def run(count: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(count):
            state, metrics = compiled(state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        return (time.perf_counter() - started) * 1e3 / count

    run(1)  # Loads code, and opens communicators.
    alone_ms = [run(1) for _ in range(given.steps)]
    in_a_row_ms = run(given.steps)
    found = [float(loss) for loss in losses]
    assert all(map(math.isfinite, found)), "losses are not finite"
    stats = [device.memory_stats() or {} for device in jax.devices()]
    return {
        "alone_ms": statistics.median(alone_ms),
        "in_a_row_ms": in_a_row_ms,
        "tokens_per_s": batch["tokens"].size / in_a_row_ms * 1e3,
        "device_bytes": max((s.get("peak_bytes_in_use", 0) for s in stats), default=0),
        "losses": [found[0], found[-1]],
    }


def _mesh(given: argparse.Namespace) -> jax.sharding.Mesh:
    return platform.make_mesh(platform.parse_mesh(None, given.mesh))


def _file(given: argparse.Namespace, name: str) -> Path:
    return given.workdir / f"{name.replace(' ', '_')}.json"


def _in_child(given: argparse.Namespace, words: list[str], role: str) -> dict[str, Any]:
    """Plans or trains in a process of its own; returns its last line."""
    command = [sys.executable, "-m", "cfp_test.bench.full_model", *words]
    command += ["--role", role, "--workdir", str(given.workdir)]
    # JAX's own 0.75 would leave a quarter of the memory unused.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if ran.returncode:
        return {"failed": f"its process ended with {ran.returncode}"}
    return json.loads(ran.stdout.splitlines()[-1])


def run_all(given: argparse.Namespace, rest: list[str], words: list[str]) -> None:
    """Plans, then trains under the plan and each preset; writes what each came to."""
    rows = []
    for name in (_PLANNED, *given.presets):
        row = {"trained under": name, **_in_child(given, words, f"plan {name}")}
        if "failed" not in row:
            row |= _in_child(given, words, f"train {name}")
        if given.nominal and row.get("in_a_row_ms") and row.get("model_flops"):
            rate = row["model_flops"] / row["in_a_row_ms"] / 1e9
            axes = platform.parse_mesh(None, given.mesh) or ()
            row["of_nominal"] = rate / math.prod(dict(axes).values()) / given.nominal
        rows.append(row)
        print(row, flush=True)
        head = {"model": [given.model, *rest], "commit": commit()}
        head |= {"date": datetime.now(UTC).date().isoformat(), "jax": jax.__version__}
        given.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--mesh", default="x=2")
    parser.add_argument("--platform")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--presets", nargs="*", default=["fully_sharded", "tensor_parallel"]
    )
    parser.add_argument("--nominal", type=float, help="TFLOP/s of a device")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args()
    if given.role is None:
        with tempfile.TemporaryDirectory() as temporary:
            given.workdir = (given.workdir or Path(temporary)).absolute()
            given.workdir.mkdir(parents=True, exist_ok=True)
            run_all(given, rest, sys.argv[1:])
        return
    platform.select(given.platform, platform.parse_mesh(None, given.mesh))
    what, _, name = given.role.partition(" ")
    target = resolve(given.model, rest)
    if what == "train":
        found = _train(given, target, name)
    else:
        found = _plan(given, target, None if name == _PLANNED else name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
