"""Times analysis as a model gets deeper: a table, and JSON beside it.

    python cfp_test/scripts/analysis_time.py [--layers 12 24 48 96] [--json FILE]

Every depth is traced and analysed several times, each time from the start, and the
median is shown, of seconds of the processor: what else runs on the machine then counts
little. Needs no GPU.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

from cfp.analysis.analyze import analyze
from cfp.models import registry
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace

MESHES = {"x=4": ((4,), ("x",)), "x=2,y=2": ((2, 2), ("x", "y"))}


def measure(layers: int, mesh: jax.sharding.Mesh, repeats: int) -> dict:
    """Traces and analyses GPT with so many unrolled layers."""
    rows = []
    for _ in range(repeats):
        jax.clear_caches()
        gc.collect()
        fn, args = registry.build("gpt", layers=layers)
        started = time.process_time()
        program, _ = trace(flatten_step(fn, args, {}), mesh)
        traced = time.process_time()
        analysis = analyze(program, tuple(mesh.shape.items()))
        rows.append((traced - started, time.process_time() - traced))
    return {
        "layers": layers,
        "ops": len(program.ops),
        "blocks": len(analysis.frame.blocks),
        "segments": len(analysis.segments),
        "kinds": len(analysis.representatives),
        "trace_seconds": [t for t, _ in rows],
        "analysis_seconds": [a for _, a in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "meshes": {},
    }
    for name, (shape, axes) in MESHES.items():
        devices = jax.devices()[:4]
        mesh = planning_mesh(jax.make_mesh(shape, axes, devices=devices))
        found["meshes"][name] = []
        print(f"\nmesh {name}\n")
        print("| layers | ops | blocks | segments (kinds) | trace s | analysis s |")
        print("|---|---|---|---|---|---|")
        for layers in options.layers:
            row = measure(layers, mesh, options.repeats)
            found["meshes"][name].append(row)
            trace_s = statistics.median(row["trace_seconds"])
            analysis_s = statistics.median(row["analysis_seconds"])
            print(
                f"| {layers} | {row['ops']:,} | {row['blocks']} | {row['segments']} "
                f"({row['kinds']}) | {trace_s:.2f} | {analysis_s:.2f} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
