"""Compiles programs for described devices, each in a child process with a time limit.

XLA's compilers for TPUs and GPUs compile for a topology, without its devices. If a
compiler aborts, only the child process ends.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from cfp.cost.described import DescribedMesh, DeviceKind
from cfp.errors import CfpError
from cfp.profiling.builder import BuildEnvironment, Built, Job, build_here
from cfp.profiling.hlo import collectives_in
from cfp.profiling.record import UNTUNED, ProfileRecord
from cfp.program.graph import Program

# Children use no device of this machine, and may each load libtpu.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}
_LOOK_SECONDS = 0.5
_CONDITION = re.compile(
    r"^(%\S+) \((?:.*\n  )+?ROOT .* compare\(%[^,]*#0, (%\S+)\), direction=LT", re.M
)
_NEEDED = re.compile(r"\(([\d.]+)([KMG])\) exceeds available HBM")


def check_compiler(kind: DeviceKind) -> None:
    """Checks that this machine can compile for a kind of device.

    Raises:
        CfpError: the compiler is not installed, or the kind has no `target_config`.
    """
    extra, modules = "tpu", ("libtpu",)
    if kind.platform == "gpu":
        extra, modules = "cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin")
        if not kind.target_config:
            raise CfpError(
                f"XLA cannot compile for {kind.name} without its target_config. Give "
                "one in a description, as in cfp/cost/kinds/h200.toml."
            )
    if not any(map(find_spec, modules)):
        raise CfpError(
            f"Compiling for {kind.name} needs {modules[0]}, which is not installed. "
            f'Run pip install "cfp[{extra}]" on Linux; or plan by estimates, without '
            "--compile (compile=True)."
        )


def topology_mesh(mesh: DescribedMesh) -> Mesh:
    """Makes a mesh of device descriptions to compile for; it cannot run programs."""
    cluster, kind = mesh.cluster, mesh.cluster.kind
    if cluster.torus:
        name = f"{kind.name}:{'x'.join(map(str, cluster.torus))}"
        found = topologies.get_topology_desc(name, platform="tpu")
    else:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=kind.target_config,
            topology=f"1x{cluster.hosts}x{cluster.per_host}",
        )
    names, sizes = zip(*mesh.axes, strict=True)
    types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, types, devices=found.devices)


def build_elsewhere(
    program: Program, mesh: DescribedMesh, job: Job, limit_seconds: float
) -> Built | ProfileRecord:
    """Compiles a job in a child process; returns sizes, or a record of the failure."""
    started, status, reason = time.perf_counter(), "crashed", ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The copy lacks the program's cached findings, which may not be picklable.
        Path(folder, "asked").write_bytes(pickle.dumps((replace(program), mesh, job)))
        environment = {**os.environ, **_ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if mesh.cluster.torus:
            flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        command = [sys.executable, "-m", __name__, name]
        with Path(folder, "said").open("wb") as said:
            child = subprocess.Popen(command, env=environment, stderr=said)
        while child.poll() is None and not (dumped := _dumped(folder)):
            if time.perf_counter() - started > limit_seconds:
                status, reason = "timeout", f"not done within {limit_seconds:.0f} s"
                break
            time.sleep(_LOOK_SECONDS)
        child.kill()
        if child.wait() == 0:
            return pickle.loads(Path(folder, "answer").read_bytes())
        seconds = time.perf_counter() - started
        made = Built(key=job.key, compiled=None, build_seconds=seconds)
        if status != "timeout" and (dumped := _dumped(folder)):
            return replace(made, **dumped)
        lines = Path(folder, "said").read_text(errors="replace").splitlines()[-3:]
    reason = reason or f"the compiler ended with {child.returncode}: {' '.join(lines)}"
    return made.record(status, reason=reason[:2000])


def _dumped(folder: Path) -> Mapping[str, Any]:
    """Finds temporary bytes and collectives in XLA:TPU's dumps; {} if not yet there.

    The dumps come before code generation, which takes most of the time.
    """
    texts = [*folder.glob("*.after_optimizations_after_buffer_assignment.txt")]
    sizes = [*folder.glob("*.after_optimizations-memory-usage-report.txt")]
    if not (texts and sizes) or time.time() - texts[0].stat().st_mtime < _LOOK_SECONDS:
        return {}
    needed = re.search(r"default.*\nTotal bytes: (\d+)", sizes[0].read_text())
    if needed is None:
        return {}
    text = _with_trip_counts(texts[0].read_text())
    return {"temp_bytes": int(needed[1]), "collectives": collectives_in(text)}


def _with_trip_counts(text: str) -> str:
    """Writes trip counts of loops from 0, which XLA:TPU omits, into HLO text."""
    for name, bound in _CONDITION.findall(text):
        bounds = rf"^  {re.escape(bound)} = \S+ constant\((\d+)\)"
        if count := re.search(bounds, text, re.M):
            known = f"condition={name}, known_trip_count={{n={count[1]}}},"
            text = text.replace(f"condition={name},", known)
    return text


def _answer(folder: Path) -> None:
    """Child process: compiles the job in a folder's file, and writes the result."""
    program, mesh, job = pickle.loads(Path(folder, "asked").read_bytes())
    if mesh.cluster.kind.platform == "gpu":  # Tuning kernels takes a device.
        job = replace(job, options=(*UNTUNED.items(), *job.options))
    found = build_here(program, topology_mesh(mesh), job, BuildEnvironment())
    if isinstance(found, Built):
        found = replace(found, compiled=None)
    elif size := _NEEDED.search(found.reason):
        # If a program does not fit, XLA:TPU's error has its total memory.
        needed = float(size[1]) * 2 ** (10 * "KMG".index(size[2]) + 10)
        found = replace(found, temp_bytes=round(needed))
    Path(folder, "answer").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
