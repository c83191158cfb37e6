"""Kinds of kernels: what may replace parts of a step, and the list.

To add a kind, write its module and name it in `KINDS`. Candidates, estimates, plans and
their files, and the check of replaced parts, follow from that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jax.sharding import Mesh

from cfp.analysis.layout import Layout, SegmentKernels
from cfp.analysis.strategies import FactorAxes
from cfp.errors import PlanMismatch
from cfp.kernels import matches as attention
from cfp.kernels.matches import Span
from cfp.kernels.problem import AxisSizes
from cfp.program.constrain import Constraints
from cfp.program.graph import Program
from cfp.program.replace import Replacement, Sites


class Proposal(Protocol):
    """A kernel in the place of a site, under a layout.

    Attributes:
        site: a part of the program that `Kind.find` found. It has a ``source``; ids of
            all its ``ops``; and ids of the values ``between``, which no kernel returns.
        keeps_between: True if values like ``between`` stay for the backward pass.
    """

    @property
    def site(self) -> Any: ...
    @property
    def keeps_between(self) -> bool: ...
    # Share of a device's values ``between`` that is in memory at once.
    def share_at_once(self, sizes: AxisSizes, /) -> float: ...
    # Memory that the kernel needs while it runs.
    def spans(self, program: Program, sizes: AxisSizes, /) -> Sequence[Span]: ...
    # Its ms, by the ms of products, and of other ops, as written.
    def kernel_ms(self, matmul_ms: float, memory_ms: float, /) -> float: ...
    # The reason why devices cannot compute it, or None.
    def refusal(self, sizes: AxisSizes, platform: str, /) -> str | None: ...
    # Functions in the place of the ops; files record `how`, the kernel's name first.
    def replacements(self, program: Program, /) -> tuple[Replacement, ...]: ...


class Kind(Protocol):
    """A module that finds, and proves, the parts of a program its kernels may replace.

    Attributes:
        NAME: name in plans, such as "attention".
        KERNELS: names of the kernels, as users give them; no other kind has them.
    """

    @property
    def NAME(self) -> str: ...
    @property
    def KERNELS(self) -> Collection[str]: ...
    # The kernels that plans use unasked, the preferred first.
    def usual(self, platform: str, for_memory: bool, /) -> tuple[str, ...]: ...
    # Kernels of a segment; the first of each row that can is a candidate.
    def variants(self, allowed: Sequence[str], /) -> Sequence[Sequence[str]]: ...
    # Sites that kernels are proved to compute.
    def find(self, program: Program, /) -> Sites[Any]: ...
    # A kernel in the place of a site, or the reason why it cannot be there.
    def propose(
        self,
        program: Program,
        site: Any,
        kernel: str,
        axes: Mapping[int, FactorAxes],
        /,
    ) -> Proposal | str: ...
    # The proposal that a file records; PlanMismatch for an unknown kernel or role.
    def read(self, site: Any, how: Sequence[str], /) -> Proposal: ...


KINDS: tuple[Kind, ...] = (attention,)
_BY_NAME = {kind.NAME: kind for kind in KINDS}
KERNELS = tuple(name for kind in KINDS for name in kind.KERNELS)


def usual_kernels(platform: str, for_memory: bool) -> tuple[str, ...]:
    """Names of default kernels; `for_memory` adds kernels that only save memory."""
    return tuple(name for kind in KINDS for name in kind.usual(platform, for_memory))


def known_kernels(allowed: Sequence[str] = KERNELS) -> set[tuple[str, str]]:
    """Pairs (kind, kernel) of allowed names, with variants such as "xla ring"."""
    return {
        (kind.NAME, name)
        for kind in KINDS
        for row in kind.variants(allowed)
        for name in row
    }


def proposals(
    layout: Layout, ops: Collection[int], kernels: SegmentKernels
) -> list[Proposal]:
    """Proposes each (kind, kernel) at its sites in `ops`, if the layout allows it."""
    program = layout.frame.program
    every = (
        _BY_NAME[kind].propose(program, site, name, layout.axes)
        for kind, name in kernels
        for site in _BY_NAME[kind].find(program).among(program, ops)
    )
    return [one for one in every if not isinstance(one, str)]


def resolved(program: Program, mesh: Mesh, constraints: Constraints) -> Constraints:
    """Returns constraints whose replacements are made from the program.

    A plan's file records the kernel of each site. The computation follows from the
    program, whose constants may differ from those at planning.

    Raises:
        PlanMismatch: a kernel or its site is missing, or this mesh cannot compute it.
    """
    wanted = {(one.name, one.op): one.functions.how for one in constraints.replaced}
    platform, found = mesh.devices.flat[0].platform, list[Replacement]()
    for (name, op), how in wanted.items():
        if name not in _BY_NAME:
            raise PlanMismatch(
                f"The plan has kernels for {name!r}; this cfp has none. Plan again."
            )
        kind = _BY_NAME[name]
        sites = kind.find(program)
        one = kind.read(sites.found[op], how) if op in sites.found else None
        reason = one.refusal(dict(mesh.shape), platform) if one else sites.reason(op)
        if one is None or reason:
            raise PlanMismatch(
                f"The plan computes the {name} of op {op} by {how[0]}, which the "
                f"step's program, or these devices, do not allow: {reason}. Plan "
                "again without kernels: cfp plan --kernels none, or "
                "PlannerSettings(kernels=())."
            )
        found += one.replacements(program)
    return replace(constraints, replaced=tuple(found))
