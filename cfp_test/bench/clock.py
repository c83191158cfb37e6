"""Options of timing, and the trace, of a compiled step."""

from __future__ import annotations

from dataclasses import replace

import jax
from jax.sharding import Mesh

from cfp.profiling.inputs import make_inputs
from cfp.profiling.runner import ON_CPUS, TimingOptions, timing_on
from cfp_test.bench.case import Ready
from cfp_test.bench.kernels import Split, trace_split

QUICK_TURN = replace(
    ON_CPUS, warmup_seconds=0.0, min_samples=2, max_samples=2, budget_seconds=0.2
)


def turn_on(mesh: Mesh) -> TimingOptions:
    """One competitor's turn on a mesh's devices."""
    return timing_on(
        mesh,
        warmup_seconds=0.5,
        min_samples=4,
        max_samples=10,
        budget_seconds=2.0,
    )


def traced(one: Ready, mesh: Mesh, steps: int = 5) -> Split | None:
    """Splits a competitor's time by kernels; None if the trace does not show it."""
    inputs = make_inputs(one.kinds, mesh, [put for put, _ in one.feedback])

    def run(times: int) -> None:
        for _ in range(times):
            results = one.built.compiled(*inputs)
            for put, got in one.feedback:
                inputs[put] = results[got]
            jax.block_until_ready(results)

    run(2)
    return trace_split(run, steps)
