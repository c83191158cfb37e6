"""Times competitors in turn: A B C, B C A, ... all in one process.

A turn makes the inputs, warms up, takes some samples and frees everything, so that only
one competitor's state is on the devices at any time, and a drift of the clocks meets
all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from cfp.profiling.inputs import make_inputs
from cfp.profiling.runner import timing_on
from cfp.profiling.timing import ON_CPUS, TimingOptions
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


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yields turns: (turn, name) in order.

    Args:
      names: in the order of the first round.
      rounds: how many turns each gets.
    """
    for turn in range(rounds):
        start = turn % max(1, len(names))
        yield from ((turn, name) for name in (*names[start:], *names[:start]))


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
