"""Memory of presets on GPUs, by the compiler alone: no GPU is asked.

    python cfp_test/scripts/compiled_memory.py TARGET [TARGET'S OPTIONS] --mesh x=4
        [--device FILE] [--presets NAME,...] [--option NAME=VALUE ...] [--json FILE]

XLA compiles for devices that a file describes (`cfp/devices/kinds/h200.txtpb`), which
takes the wheels of JAX's CUDA plugin and of nvcc, and nothing else:
``pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12``, of JAX's own
version. Kernels are not tuned, so times say nothing, but memory is what the devices
need: of a GPT of 4 layers on 4 H200, fully sharded, 14.48 GB here and 14.47 GB there.

Prints a line for each preset, as it is and with every segment rematerialized; and what
XLA would have read after it was overwritten, or why that is not known, so that the
program was compiled once more (:mod:`cfp.profiling.compiled`). ``--option`` goes to the
compiler, such as ``xla_gpu_memory_limit_slop_factor=1``, which limits its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path

# The plugin's own checks ask for libraries that compiling does not take.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import cfp
from cfp import platform
from cfp.analysis.analyze import analyze
from cfp.cost.memory import can_rematerialize
from cfp.presets.presets import PRESETS, presets
from cfp.profiling import compiled
from cfp.profiling.builder import Built, build
from cfp.profiling.compiler_options import UNTUNED
from cfp.program.trace import planning_mesh, trace
from cfp.search.jobs import whole_job
from cfp.targets import resolve

H200 = Path(cfp.__file__).parent / "devices" / "kinds" / "h200.txtpb"
# Tuning kernels takes a device.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--device", type=Path, default=H200)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()

    target = resolve(options.target, rest)
    axes = platform.parse_mesh(None, options.mesh) or ()
    mesh = planning_mesh(described_mesh(options.device, axes))
    flat = target.flatten()
    program, _ = trace(flat, mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    frame, segments = analysis.frame, analysis.segments
    again = tuple(s.index for s in segments if can_rematerialize(frame, s))
    known = presets(frame)
    given = dict(one.split("=", 1) for one in options.option)
    found = watch_overwritten()
    for name in options.presets.split(","):
        for remat in ((), again) if name in known else ():
            choice = replace(known[name], remat=remat)
            job = whole_job(analysis, choice, (), name, options={**UNTUNED, **given})
            found.clear()
            built = build(program, mesh, job)
            if not isinstance(built, Built):
                print(f"{name}: {built.status}: {built.reason}", flush=True)
                continue
            line = {
                "target": [options.target, *rest],
                "mesh": options.mesh,
                "jax": jax.__version__,
                "preset": name,
                "computed_again": len(remat),
                "argument_bytes": built.argument_bytes,
                "temp_bytes": built.temp_bytes,
                "peak_bytes": built.peak_bytes,
                "options": {**UNTUNED, **given},
                "overwritten": found[0],
            }
            print(
                f"{name:24} {len(remat):2} segments again: "
                f"{built.temp_bytes / 1e9:6.2f} GB of temporaries, "
                f"{built.peak_bytes / 1e9:6.2f} GB in all"
                + (f"; {found[0]}" if found[0] else ""),
                flush=True,
            )
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def watch_overwritten() -> list[str | None]:
    """Collects texts of programs from now on, first tries first."""
    found: list[str | None] = []
    look = compiled.miscompile_reason

    def looked(text: str) -> str | None:
        found.append(look(text))
        return found[-1]

    compiled.miscompile_reason = looked
    return found


def described_mesh(path: Path, axes: platform.Axes) -> Mesh:
    """A mesh of devices that are not there."""
    names, sizes = zip(*axes, strict=True)
    found = topologies.get_topology_desc(
        "",
        "cuda",
        target_config=path.read_text(),
        topology=f"1x1x{math.prod(sizes)}",
    )
    return Mesh(np.array(found.devices).reshape(sizes), names)


if __name__ == "__main__":
    main()
