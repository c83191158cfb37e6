"""The tutorial's training on these devices: its curves, and what each part takes.

    python -m cfp_test.scripts.tutorial_times FILE.json

Model, step, batches and loop are the tutorial's own cells. All steps run on one device
and under a plan for all; then a new process loads the plan, restores the checkpoint and
goes on, as the tutorial does; at last the plan is adapted to half of the devices.
Losses are compared, not asserted: the file has every one of them. Beside it each part
notes its figures as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cfp_test.gpu.place import child_environment, tail
from cfp_test.scripts.rows import commit
from cfp_test.scripts.tutorial import SOURCE, STORY, read_cells

STEPS, SAVED = 80, 40
# Steps that are timed after the curve is there.
TIMED = 60


def definitions() -> dict[str, Any]:
    """Runs the tutorial's cells above its first training step; returns their names."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    for cell in read_cells(SOURCE.read_text()):
        if "one_step =" in cell.text and not cell.prose:
            break
        if not cell.prose:
            code = "\n" * (cell.line - 1) + cell.text
            exec(compile(code, SOURCE.name, "exec"), namespace)
    return namespace


def restore_of(tutorial: dict[str, Any]) -> Callable[[Any, int], Any]:
    """The tutorial's function that restores a checkpoint under a plan."""
    (text,) = (
        cell.text
        for cell in read_cells(SOURCE.read_text())
        if not cell.prose and "def restore(" in cell.text
    )
    names = dict(tutorial)
    exec(text.partition("plan = cfp.Plan.load")[0], names)
    return names["restore"]


def timed(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[float]]:
    """Times steps one by one, each waited for."""
    import jax

    samples = []
    for _ in range(TIMED):
        began = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        samples.append(1e3 * (time.perf_counter() - began))
    return state, samples


class Notes(dict[str, Any]):
    """Figures of a part, in a file as they come."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._file.write_text(json.dumps(self))


def train_and_save(row: Notes) -> None:
    """Trains on one device and on all, and saves half-way."""
    t = definitions()
    import jax
    import orbax.checkpoint as ocp

    import cfp

    devices = t["devices"]
    one_step = jax.jit(t["train_step"], donate_argnums=0)
    began = time.perf_counter()
    state, one = t["train"](one_step, t["make_state"](), 0, STEPS)
    row["one_losses"] = one
    row["one_seconds"] = time.perf_counter() - began
    batch = t["batch_of"](0)
    _, row["one_ms"] = timed(one_step, state, batch)
    del state
    shape = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    is_cpu = devices[0].platform == "cpu"
    began = time.perf_counter()
    plan = cfp.plan(
        t["train_step"],
        t["state_shape"],
        shape,
        mesh=mesh,
        donate_argnums=0,
        memory_budget="12MiB" if is_cpu else None,
        quiet=True,
    )
    row["plan_seconds"] = time.perf_counter() - began
    plan.save("plan.json")
    row["devices"], row["kind"] = len(devices), devices[0].device_kind
    row["jax"], row["python"] = jax.__version__, sys.version.split()[0]
    row["plan"], row["winner"] = str(plan), plan.winner
    row["race"] = {one.name: one.time_ms for one in plan.race}
    step = plan.apply(t["train_step"])
    began = time.perf_counter()
    state, first = t["train"](step, plan.init(t["make_state"]), 0, SAVED)
    row["first_seconds"] = time.perf_counter() - began
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(Path("checkpoints").absolute() / str(SAVED), state, force=True)
    state, rest = t["train"](step, state, SAVED, STEPS)
    row["losses"] = [*first, *rest]
    state, row["ms"] = timed(step, state, batch)
    # What JAX itself takes to call a program on all devices.
    by_jit = jax.jit(
        t["train_step"],
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        donate_argnums=0,
    )
    state, _ = by_jit(state, batch)
    _, row["jit_ms"] = timed(by_jit, state, batch)


def restart(row: Notes) -> None:
    """Goes on in a new process, then on half of the devices."""
    began = time.perf_counter()
    t = definitions()
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import cfp

    batch = t["batch_of"](0)
    shape = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    restore, state_shape = restore_of({**t, "batch_shape": shape}), t["state_shape"]
    row["definitions_seconds"] = time.perf_counter() - began
    began = time.perf_counter()
    plan = cfp.Plan.load("plan.json")
    row["read_seconds"] = time.perf_counter() - began
    plan = plan.bind(t["train_step"], state_shape, shape)
    step = plan.apply(t["train_step"])
    row["load_seconds"] = time.perf_counter() - began
    # The devices' first array, which waits for their memory.
    mesh = jax.tree.leaves(plan.in_shardings)[0].mesh
    jax.block_until_ready(jax.device_put(0, NamedSharding(mesh, PartitionSpec())))
    row["devices_seconds"] = time.perf_counter() - began
    state = jax.block_until_ready(restore(plan, SAVED))
    row["restored_seconds"] = time.perf_counter() - began
    state, first = t["train"](step, state, SAVED, SAVED + 1)
    row["restart_seconds"] = time.perf_counter() - began
    _, rest = t["train"](step, state, SAVED + 1, STEPS)
    row["resumed"] = [*first, *rest]
    devices = t["devices"]
    count = max(len(devices) // 2, 1)
    half = jax.make_mesh((count,), ("x",), devices=devices[:count])
    began = time.perf_counter()
    fewer = cfp.adapt(
        plan, t["train_step"], state_shape, shape, mesh=half, donate_argnums=0
    )
    row["adapt_seconds"] = time.perf_counter() - began
    state = restore(fewer, SAVED)
    _, row["on_half"] = t["train"](fewer.apply(t["train_step"]), state, SAVED, STEPS)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=("train", "restart"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part = train_and_save if args.part == "train" else restart
        part(Notes(args.file))
        return 0
    file = args.file.resolve()
    rows: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copy(STORY, folder)
        for part in ("train", "restart"):
            noted = file.with_suffix(f".{part}.json")
            command = [sys.executable, "-m", "cfp_test.scripts.tutorial_times", noted]
            began = time.perf_counter()
            done = subprocess.run(
                [*map(str, command), "--part", part],
                env=child_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{part} ended with {done.returncode}: {tail(done.stderr, 2000)}")
                return 1
            rows[part] = json.loads(noted.read_text())
            rows[part]["process_seconds"] = time.perf_counter() - began
    file.write_text(json.dumps(rows, indent=1) + "\n")
    for part in ("train", "restart"):  # Of a part that fails the other stays.
        file.with_suffix(f".{part}.json").unlink()
    train, again = rows["train"], rows["restart"]
    print(
        f"plan {train['plan_seconds']:.1f} s, step {median(train['one_ms']):.2f} ms on "
        f"one, {median(train['ms']):.2f} ms on {train['devices']}, restart "
        f"{again['restart_seconds']:.1f} s, process {again['process_seconds']:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
