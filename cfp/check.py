"""Checks a plan's steps against the same steps on one device.

Both compute in float32 where the step computes in less, with the highest precision of
matrix products: what is left to differ is the order of sums in float32. It is measured,
not guessed: one device runs the steps a second time, from arguments that differ in
their last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfp.execute import CompiledStep, Difference, compare, compile_step
from cfp.plan import Plan
from cfp.program.graft import Constraints
from cfp.program.widen import wide_dtype

FULL_TOLERANCE = 1e-5
LOW_TOLERANCE = 1e-2

# An optimizer that divides gradients by their own size makes large what was rounding:
# where a gradient is all but zero, no two orders of summation agree. So a leaf may be
# off by this many times what the last bit of the arguments does to it.
ROUNDING_MARGIN = 10.0


class Check:
    """A plan's steps, one device's, and one device's from nudged arguments.

    Attributes:
        tolerance: relative L2 distance that always passes: more than float32's where
            the step calls kernels that compute in less.
    """

    def __init__(
        self,
        planned: CompiledStep,
        alone: CompiledStep,
        feedback: Mapping[int, int | None],
    ) -> None:
        """Takes both sides as :func:`both_sides` compiles them.

        Args:
            planned: the step under a plan.
            alone: the step on one device.
            feedback: for each argument that is state the result that replaces it; None
                for all of it.
        """
        self._planned = planned
        self._alone = alone
        self._feedback = feedback
        self._args: list[list[Any]] = []
        self.tolerance = LOW_TOLERANCE if planned.narrow else FULL_TOLERANCE

    def start(self, args: Sequence[Any]) -> None:
        """Copies the arguments, which the plan's step is about to overwrite."""

        def each(change: Callable[[jax.Array], jax.Array]) -> list[Any]:
            return [
                a if i in static else jax.tree.map(change, a)
                for i, a in enumerate(args)
            ]

        static = {key for key, _ in self._alone.step.static}
        self._args = [
            each(widened_copy),
            each(widened_copy),
            each(lambda x: nudge(widened_copy(x))),
        ]

    def step(self) -> tuple[tuple[Difference, ...], dict[str, float]]:
        """Runs a step: how far off the plan's results are, and what rounding does."""
        results = []
        runs = (self._planned, self._alone, self._alone)
        for run, args in zip(runs, self._args, strict=True):
            results.append(run(*args))
            feed_back(args, results[-1], self._feedback)
        found, expected, nudged = results
        rounding = {d.path: d.relative_l2 for d in compare(nudged, expected)}
        return tuple(compare(found, expected)), rounding


def both_sides(plan: Plan) -> tuple[CompiledStep, CompiledStep]:
    """Compiles a plan's step and one device's, in float32.

    Args:
        plan: bound to its step, on its mesh.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    planned = compile_step(
        step,
        mesh,
        plan.fingerprint,
        plan.arg_specs,
        plan.output_specs,
        plan.constraints,
        plan.options,
        wide=True,
    )
    alone = compile_step(
        step,
        Mesh(mesh.devices.flat[:1], ("alone",)),
        None,
        [((),) * len(spec) for spec in plan.arg_specs],
        [((),) * len(spec) for spec in plan.output_specs],
        Constraints({}, {}),
        wide=True,
    )
    return planned, alone


def widened_copy(x: jax.Array) -> jax.Array:
    """An array in memory of its own, in float32 if it is in less."""
    return jnp.array(x, wide_dtype(x.dtype), copy=True)


@jax.jit
def nudge(x: jax.Array) -> jax.Array:
    """Every other number one bit up or down."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    signs = 1 - 2 * (jnp.arange(x.size) % 2).reshape(x.shape)
    return (x * (1 + signs * jnp.finfo(x.dtype).eps)).astype(x.dtype)


def feed_back(args: list[Any], result: Any, feedback: Mapping[int, int | None]) -> None:
    """Puts what a step returned in place of the arguments that are state."""
    for position, place in feedback.items():
        args[position] = result if place is None else result[place]
