"""Lowered steps as `jax.export` has functions."""

from __future__ import annotations

import jax
from jax._src.export import _export
from jax.export import DisabledSafetyCheck

from cfp.program import shardy
from cfp.program.step import FlatStep
from cfp.program.trace import Lowering


def exported(step: FlatStep, lowering: Lowering) -> jax.export.Exported:
    """Exports a lowered step with all that was changed in its module.

    JAX exports what it lowers itself; by no public name it takes a lowering.
    """
    targets = {shardy.call_target(op) for op in shardy.every_op(lowering.module)}
    checks = [DisabledSafetyCheck.custom_call(name) for name in sorted(targets - {""})]
    name = step.flat_fn.__name__
    closed = step.traced.jaxpr
    return _export._export_lowered(lowering.lowered, closed, name, checks)
