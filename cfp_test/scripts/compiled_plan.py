"""Compiles a plan for GPUs that are not here, and prints collectives and memory.

    cfp plan TARGET --for 4xh200 -o plan.json
    python cfp_test/scripts/compiled_plan.py TARGET [TARGET'S OPTIONS]
        --plan plan.json [--device FILE] [--hlo FILE]

XLA compiles for devices that a file describes, with the wheels that
`compiled_memory.py` names; cuDNN's attention takes those of cuDNN and cuBLAS, too,
whose libraries LD_LIBRARY_PATH finds. Kernels are not tuned: times say nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# The plugin's own checks ask for libraries that compiling does not take.
os.environ["JAX_PLATFORMS"] = "cpu"

import cfp
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.compiler_options import UNTUNED
from cfp.profiling.hlo import collectives_in
from cfp.runtime.execute import compile_step
from cfp.targets import resolve
from cfp_test.scripts.compiled_memory import H200, described_mesh


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--device", type=Path, default=H200)
    parser.add_argument("--hlo", type=Path, help="a file for the compiled program")
    options, rest = parser.parse_known_args()

    plan = cfp.Plan.load(options.plan)
    mesh = described_mesh(options.device, plan.mesh_axes)
    compiled = compile_step(
        resolve(options.target, rest).flatten(),
        mesh,
        plan.fingerprint,
        plan.arg_specs,
        plan.output_specs,
        plan.constraints,
        {**plan.options, **UNTUNED},
        planned=(plan.outline, plan.environment),
        environment=BuildEnvironment(),
    )
    text = compiled.as_text()
    if options.hlo:
        options.hlo.write_text(text)
    for one in collectives_in(text):
        print(one)
    print(compiled.compiled.memory_analysis())


if __name__ == "__main__":
    main()
