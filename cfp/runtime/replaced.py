"""Finds the ops that a plan replaces again in the step's program.

A plan's file says by what an attention is computed, and not what it is: that follows
from the program, whose constants may be others than those that were planned with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh

from cfp.attention.matching.called import GRADIENT
from cfp.attention.matching.graft import NAME, Way
from cfp.attention.matching.matches import attentions, cannot, replacements
from cfp.errors import PlanMismatch
from cfp.patterns.build import NAME as CROSS_ENTROPY
from cfp.patterns.build import build, read_how
from cfp.patterns.sites import cross_entropies
from cfp.program.constrain import Constraints
from cfp.program.graph import Program
from cfp.program.replace import Replacement


def resolved(program: Program, mesh: Mesh, constraints: Constraints) -> Constraints:
    """Constraints whose replacements are those of a program, by what they say.

    Args:
        program: the step's, as it was traced now.
        mesh: the devices.
        constraints: of a plan.

    Raises:
        PlanMismatch: the program has nothing that could be replaced so.
    """
    if not constraints.replaced:
        return constraints
    wanted = {(one.name, one.op): one.functions.how for one in constraints.replaced}
    found: list[Replacement] = []
    for (name, op), how in wanted.items():
        if name not in _BY_NAME:
            raise PlanMismatch(f"The plan replaces {name!r}, which cfp does not know.")
        found += _BY_NAME[name](program, mesh, op, how)
    return replace(constraints, replaced=tuple(found))


def _attention(
    program: Program, mesh: Mesh, op: int, how: Sequence[str]
) -> tuple[Replacement, ...]:
    match = attentions(program).matches.get(op)
    if match is None:
        known = {one.op: one.reason for one in attentions(program).left_alone}
        reason = known.get(op, "there is none")
        raise PlanMismatch(
            f"The plan computes the attention of op {op} by {how[0]}; in the step's "
            f"program that is no attention that may be replaced: {reason}. Plan again."
        )
    way = Way.read(how)
    platform = mesh.devices.flat[0].platform
    reason = cannot(match, way, dict(mesh.shape), platform)
    if reason is not None:
        raise PlanMismatch(
            f"The plan computes the attention at {match.found.source} by {way}, which "
            f"these devices do not: {reason}. Plan again."
        )
    return replacements(program, match, way)


def _cross_entropy(
    program: Program, mesh: Mesh, op: int, how: Sequence[str]
) -> tuple[Replacement, ...]:
    known = cross_entropies(program)
    found = known.found.get(op)
    if found is None:
        reasons = {one.contraction: one.reason for one in known.left_alone}
        raise PlanMismatch(
            f"The plan computes the cross-entropy of op {op} by {how[0]}; in the "
            "step's program that is none that may be replaced: "
            f"{reasons.get(op, 'there is none')}. Plan again."
        )
    rank = len(program.values[program.ops[op].results[0]].shape) - 1
    try:
        chunks, spread = read_how(how, rank)
    except ValueError as error:
        raise PlanMismatch(f"{error}. Plan again.") from error
    made = build(program, found, chunks, spread, dict(mesh.shape))
    if made is None:
        raise PlanMismatch(
            f"The plan computes the cross-entropy of op {op} by {', '.join(how)}, "
            "which does not divide it evenly. Plan again."
        )
    return (made,)


_BY_NAME: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {NAME: _attention, GRADIENT: _attention, CROSS_ENTROPY: _cross_entropy}
)
