"""Steps that XLA compiles wrong for one GPU: found by their text, and run both ways.

    python cfp_test/scripts/miscompiled.py OUT.json --seconds 150
        [--part alone | played] [--described FILE] [--small]

Alone: training steps for one device, with memory limits that make XLA rematerialize.
Each is compiled without a limit, with it, and with it by `compile_right`, which is how
cfp compiles everything. Where the text of the second tells that something is read after
it was overwritten, all three run from the same arguments, and what the other two return
is compared with the first, leaf by leaf; so is what is rematerialized and proved right.

Played: whole programs of presets for four devices, which one GPU plays
(:mod:`cfp.devices.described`). They are compiled, and their texts looked at; what they
return means nothing, since their collectives do nothing.

``--described`` compiles for a device that a file describes, such as h200.txtpb beside
this file, and runs nothing (compiled_memory.py says what that takes); ``--small`` is
for trying it without a GPU. Rows are saved as they come, and what OUT.json holds
already is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from cfp.checking.check import compare
from cfp.profiling.compiled import compile_right, miscompile_reason
from cfp.profiling.compiler_options import UNTUNED
from cfp.profiling.overwritten import count_rematerialized, read_after_overwritten
from cfp.targets import Target, resolve

# Kernels are not tuned, so that all compile within the time and compute alike.
LIMIT = "xla_gpu_memory_limit_slop_factor"
LIMITS = (
    {LIMIT: "1"},
    {LIMIT: "2"},
    {LIMIT: "1", "xla_gpu_enable_latency_hiding_scheduler": "False"},
)
# A rate at which a weight's successor is clearly another number.
_SHAPE = "--layers 2 --hidden 1024 --heads 16 --batch 16 --seq 1024 --vocab 8192"
ALONE = (
    f"gpt {_SHAPE} --learning-rate 0.01",
    f"gpt {_SHAPE} --learning-rate 0.01 --dtype float32",
    f"llama {_SHAPE} --learning-rate 0.01",
    f"gpt {_SHAPE} --learning-rate 0.01 --remat",
    "moe --layers 2 --batch 8 --learning-rate 0.01",
)
SMALL = ("gpt --layers 1 --hidden 32 --heads 2 --batch 2 --seq 16 --vocab 64",)
PLAYED_TARGET = "moe --layers 2 --batch 32"
PLAYED = (
    ("tensor_parallel", LIMITS[0]),
    ("data_parallel", LIMITS[2]),
    ("tensor_parallel", {**LIMITS[0], "xla_gpu_enable_triton_gemm": "True"}),
    ("fully_sharded", LIMITS[0]),
)
DEVICES = 4
# Otherwise compiling waits for the kernels that the other processes should have tuned.
SHARD_TUNING = "xla_gpu_shard_autotuning"

Row = dict[str, Any]


class Rows:
    """Findings, saved row by row. Two processes write one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.all: list[Row] = []
        if path.exists():
            self.all = json.loads(path.read_text())["rows"]

    def has(self, part: str, target: str, options: Mapping[str, str]) -> bool:
        wanted = (part, target, dict(options))
        return wanted in [(r["part"], r["target"], r["options"]) for r in self.all]

    def add(self, row: Row) -> None:
        with self._lock:
            self.all.append(row)
            here = {
                "date": date.today().isoformat(),
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "rows": self.all,
            }
            self._path.write_text(json.dumps(here, indent=1) + "\n")
        print(json.dumps(row), flush=True)


def looked_at(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> Row:
    """Compiles a program as XLA does, and as cfp does; both under "programs"."""
    as_is = lowered.compile(compiler_options=dict(options))
    right, right_text = compile_right(lowered, options)
    return {
        **seen_in(as_is),
        "right": {**seen_in(right), "doubt": miscompile_reason(right_text)},
        "programs": (as_is, right),
    }


def seen_in(compiled: jax.stages.Compiled) -> Row:
    """Reads the text of a program."""
    text = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    return {
        "rematerialized": count_rematerialized(text),
        "read_too_late": read_after_overwritten(text),
        "doubt": miscompile_reason(text),
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


def alone(rows: Rows, until: float, described: Path | None, small: bool) -> None:
    """Steps of one device, compiled as they are and as cfp does, and run."""
    device = described_device(described) if described else jax.devices()[0]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {}
        for words in SMALL if small else ALONE:
            name, *rest = words.split()
            target = resolve(name, rest)
            lowered = lower_alone(target, device)
            plain = pool.submit(lowered.compile, compiler_options=dict(UNTUNED))
            for limit in LIMITS:
                options = {**UNTUNED, **limit}
                if not rows.has("alone", words, options):
                    job = pool.submit(looked_at, lowered, options)
                    waiting[job] = words, options, target, plain
        # Run one after another, as they come: the device's memory holds one step.
        for job in as_completed(waiting):
            words, options, target, plain = waiting[job]
            if time.monotonic() > until:
                for one in waiting:
                    one.cancel()
                break
            row = {"part": "alone", "target": words, "options": options}
            row |= job.result()
            as_is, right = row.pop("programs")
            if row["rematerialized"] and not described:
                expected = outcome(plain.result(), target, device)
                row["off"] = farthest(expected, outcome(as_is, target, device))
                row["right"]["off"] = farthest(expected, outcome(right, target, device))
            rows.add(row)


def lower_alone(target: Target, device: Any) -> jax.stages.Lowered:
    """A model's step for one device; its state is donated."""
    place = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), target.args
    )
    return jax.jit(target.step, donate_argnums=target.donate).lower(*args)


def outcome(compiled: jax.stages.Compiled, target: Target, device: Any) -> Any:
    """Returns a step's results, always from the same arguments."""
    place = SingleDeviceSharding(device)
    args = target.make_args([place] * len(target.args), 0)
    return jax.block_until_ready(compiled(*args))


def farthest(expected: Any, got: Any) -> list[Row]:
    """The three leaves that differ most."""
    most = compare(got, expected)[:3]
    return [{"leaf": d.path, "relative_l2": d.relative_l2} for d in most]


def played(rows: Rows, until: float, described: Path | None) -> None:
    """Programs of four devices, which one GPU plays or a file describes."""
    from cfp.analysis.analyze import analyze
    from cfp.cost.memory import can_rematerialize
    from cfp.presets.presets import presets
    from cfp.program.graft import lower_part
    from cfp.program.step import flatten_step
    from cfp.program.trace import planning_mesh, trace
    from cfp.search.jobs import whole_job

    mesh = planning_mesh(played_mesh(described))
    name, *rest = PLAYED_TARGET.split()
    target = resolve(name, rest)
    flat = flatten_step(target.step, target.args, donate_argnums=target.donate)
    program, _ = trace(flat, mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    again = tuple(
        s.index for s in analysis.segments if can_rematerialize(analysis.frame, s)
    )
    known = presets(analysis.frame)

    def look(preset: str, options: Mapping[str, str]) -> Row:
        choice = replace(known[preset], remat=again)
        job = whole_job(analysis, choice, (), preset, options=options)
        lowered = lower_part(
            program,
            job.part,
            mesh,
            job.constraints,
            job.in_specs,
            job.out_specs,
            job.donated,
        )
        return looked_at(lowered, job_options(job))

    def job_options(job: Any) -> dict[str, str]:
        return dict(job.options) | ({} if described else {SHARD_TUNING: "False"})

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {}
        for preset, limit in PLAYED:
            words = f"{PLAYED_TARGET}, {preset}, rematerialized"
            options = {**UNTUNED, **limit}
            if not rows.has("played", words, options):
                waiting[pool.submit(look, preset, options)] = words, options
        for job in as_completed(waiting):
            if time.monotonic() > until:
                for one in waiting:
                    one.cancel()
                break
            words, options = waiting[job]
            row = {"part": "played", "target": words, "options": options}
            row |= job.result()
            row.pop("programs")
            rows.add(row)


def described_device(path: Path) -> Any:
    """One device that is not there."""
    return described_devices(path, 1)[0]


def described_devices(path: Path, count: int) -> Any:
    from jax.experimental import topologies

    topology = f"1x1x{count}"
    text = path.read_text()
    return topologies.get_topology_desc(
        "", "cuda", target_config=text, topology=topology
    ).devices


def played_mesh(described: Path | None) -> jax.sharding.Mesh:
    if described:
        devices = np.array(described_devices(described, DEVICES))
        return jax.sharding.Mesh(devices, ("x",))
    from cfp.devices.described import mocked_mesh

    return mocked_mesh((("x", DEVICES),))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--part", choices=("alone", "played"))
    parser.add_argument("--described", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    if options.part is None:
        # A process of its own each: what plays four devices cannot be one.
        codes = []
        for part, share in (("alone", 0.6), ("played", 1.0)):
            left = (until - time.monotonic()) * share
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
            ended = subprocess.run([*command, "--seconds", str(left)], check=False)
            codes.append(ended.returncode)
        sys.exit(max(map(abs, codes)))
    rows = Rows(options.out)
    if options.part == "alone":
        alone(rows, until, options.described, options.small)
    elif not options.small:
        if not options.described:
            from cfp.devices.described import play_one_of

            play_one_of(DEVICES)
        played(rows, until, options.described)


if __name__ == "__main__":
    main()
