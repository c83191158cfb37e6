"""Collectives one a program beside chains of them, over two kinds of links.

    python -m cfp_test.bench.chains --out FOLDER [--devices 4] [--steps] [--tiny]

Curves are of chains today, in which nothing waits between two collectives. Older ones
are of programs with one collective each, of which so many ran in a row as took 2 ms: a
large one ran once a sample, with the whole launch and wait, and a small one ten times,
with a tenth of it. For each kind of links a process measures, on the same devices:

- the curves of chains, as `cfp profile --curves` does;
- one collective a program, so many of them in a row;
- with ``--steps`` whole steps of `cfp_test.bench.recorded`, with what each has to send.

Writes ``FOLDER/chains_NVLink.json`` and ``FOLDER/chains_P2P_off.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cfp import platform
from cfp.cost.schedule import schedule_of
from cfp.profiling.builder import Built
from cfp.profiling.collectives import measure_rates
from cfp.profiling.key import environment_parts
from cfp.profiling.rates import KINDS
from cfp.profiling.runner import run, timing_on
from cfp.profiling.store import ProfileStore
from cfp.program.trace import planning_mesh
from cfp.report.plots import curves_data
from cfp_test.bench.one_as_four import build_all
from cfp_test.bench.one_as_n_data import schedule_to_json
from cfp_test.bench.recorded import cases, tiny_cases

LINKS = ("NVLink", "P2P off")
_SIZES = (1 << 22, 1 << 25, 1 << 28)
_IN_A_ROW = (1, 2, 4, 8, 16)
_SAMPLES = 9
# Beside what the curves are measured with: experts exchange 320 MiB of bfloat16.
_EXPERTS = ("all-to-all", "bfloat16", 320 << 20)
_STEPS = (
    ("moe", "expert_parallel"),
    ("moe", "data_parallel"),
    ("moe", "expert_parallel, no latency hiding"),
    ("gpt", "data_parallel"),
    ("gpt", "fully_sharded"),
)


def single(kind: str, dtype: str, size: int, mesh: Mesh) -> Callable[[int], float]:
    """Returns a function that runs programs of one collective in a row, in ms.

    Args:
        kind: of the collective.
        dtype: of its numbers.
        size: of the whole tensor of the group, in bytes.
        mesh: of one axis.
    """
    (name,), ways = mesh.axis_names, mesh.size
    step = ways * ways * jnp.dtype(dtype).itemsize
    whole = size // step * ways * ways
    piece = whole // ways
    move = {
        "all-reduce": lax.psum,
        "all-gather": partial(lax.all_gather, tiled=True),
        "reduce-scatter": partial(lax.psum_scatter, tiled=True),
        "all-to-all": partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    }[kind]
    sent = piece if kind in ("all-gather", "all-to-all") else whole
    got = piece if kind in ("reduce-scatter", "all-to-all") else whole
    sharding = NamedSharding(mesh, PartitionSpec(name))
    local = jax.shard_map(
        lambda x: move(x, axis_name=name),
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )

    def program(x: jax.Array, room: jax.Array) -> jax.Array:
        return local(x)

    def zeros(count: int) -> jax.Array:
        make = jax.jit(
            lambda: jnp.zeros((count * ways,), dtype), out_shardings=sharding
        )
        return make()

    given, room = zeros(sent), zeros(got)
    compiled = (
        jax.jit(program, donate_argnums=1, keep_unused=True, out_shardings=sharding)
        .lower(given, room)
        .compile()
    )
    held = [room]

    def go(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            held[0] = compiled(given, held[0])
        held[0].block_until_ready()
        return (time.perf_counter() - started) * 1e3

    for _ in range(3):
        go(2)
    return go


def singles(mesh: Mesh, tiny: bool) -> list[dict[str, Any]]:
    """Times of one collective a program, by how many run in a row."""
    wanted = [(kind, "float32", size) for kind in KINDS for size in _SIZES]
    wanted.append(_EXPERTS)
    found = []
    for kind, dtype, size in wanted:
        size = size >> 8 if tiny else size
        go = single(kind, dtype, size, mesh)
        row = {"kind": kind, "dtype": dtype, "size_bytes": size}
        in_a_row = {n: [go(n) for _ in range(_SAMPLES)] for n in _IN_A_ROW}
        found.append({**row, "samples_ms": in_a_row})
        middle = {n: round(median(ms) / n, 4) for n, ms in in_a_row.items()}
        say(
            f"{kind} {dtype} {size / 2**20:.2f} MiB, ms each by runs in a row: {middle}"
        )
    return found


def steps(mesh: Mesh, tiny: bool, tuned: Path) -> list[dict[str, Any]]:
    """Times of whole steps, and what each of them sends."""
    known = tiny_cases(mesh.size) if tiny else cases(mesh.size)
    wanted = [
        case
        for model, name in _STEPS
        for case in known
        if (case.target.split()[0], case.name) == (model, name)
    ]
    timing = timing_on(
        mesh,
        warmup_seconds=0.4,
        min_samples=6,
        max_samples=8,
        budget_seconds=2.5,
    )
    found = []
    for made in build_all(wanted, mesh, {}, 12, tuned):
        row: dict[str, Any] = asdict(made.case) | {"name": made.case.name}
        found.append(row)
        if not isinstance(made.built, Built):
            row["failure"] = f"{made.built.status}: {made.built.reason}"
            continue
        text = made.built.compiled.as_text() or ""
        program = made.session.analysis.frame.program
        record = run(made.built, made.job, program, mesh, timing=timing)
        row |= schedule_to_json(schedule_of(text).merged())
        row["samples_ms"] = list(record.samples_ms)
        row["clock_mhz"] = record.clock_mhz
        row["power_watts"] = record.power_watts
        say(f"{made.case.file}: {[round(ms, 2) for ms in record.samples_ms]} ms")
    return found


def say(text: str) -> None:
    """Prints a line at once, with the seconds since the start."""
    print(f"{time.perf_counter() - _STARTED:6.1f} s: {text}", flush=True)


_STARTED = time.perf_counter()


def measure(given: argparse.Namespace) -> None:
    """Measures with the links of this process, and writes after each part."""
    axes = (("x", given.devices),)
    if given.tiny:
        platform.select("cpu", axes)
        mesh = platform.make_mesh(axes)
    else:
        devices = jax.devices()[: given.devices]
        mesh = jax.make_mesh(
            (given.devices,), ("x",), devices=devices, axis_types=(AxisType.Auto,)
        )
    mesh = planning_mesh(mesh)
    page: dict[str, Any] = {
        "links": given.links,
        "hardware": str(mesh.devices.flat[0].device_kind),
        "environment": dict(environment_parts(list(mesh.devices.flat))),
    }
    file = given.out / f"chains_{given.links.replace(' ', '_')}.json"

    def write() -> None:
        file.write_text(json.dumps(page, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        with ProfileStore(Path(folder) / "curves.sqlite3") as store:
            page["curves"] = curves_data(measure_rates(mesh, store), None)
    write()
    for one in page["curves"]["collectives"]:
        mib = one["size_bytes"] / 2**20
        rate = f"{one['time_ms']:.4f} ms, {one['sent_gb_per_s']:.1f} GB/s"
        say(f"chain of {one['kind']} {mib:.2f} MiB: {rate}")
    page["singles"] = singles(mesh, given.tiny)
    write()
    if given.steps:
        page["steps"] = steps(mesh, given.tiny, given.tuned)
        write()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--links", choices=LINKS, help="only these, in this process")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tuned", type=Path, default=Path("/tmp/one_as_n_tuned"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.links:
        measure(given)
        return
    for links in reversed(LINKS):
        environment = dict(os.environ)
        if links == "P2P off":
            environment["NCCL_P2P_DISABLE"] = "1"
        words = [sys.executable, "-m", "cfp_test.bench.chains", *sys.argv[1:]]
        subprocess.run([*words, "--links", links], env=environment, check=False)


if __name__ == "__main__":
    main()
