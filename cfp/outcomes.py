"""Variants of a step, what came of them, and what a plan gains by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jax.sharding import Mesh

from cfp.devices.described import DescribedMesh
from cfp.plan.figures import VariantFigures, WorthFigures
from cfp.plan.plan import Plan


class Basis(StrEnum):
    """Source of the times that variants are compared by."""

    RACED = "raced"
    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a step.

    Attributes:
        args: its arguments, arrays or ``jax.ShapeDtypeStruct`` s.
        microbatches: in how many parts the batch goes through the step, if that is
            what variants differ in.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)
    mesh: Mesh | DescribedMesh
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    microbatches: int | None = None

    @property
    def axes(self) -> int:
        """The number of mesh axes that shard anything."""
        return sum(size > 1 for size in self.mesh.shape.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of planning a variant.

    Attributes:
        step_ms: the time that it is compared by, or None.
        seconds: how long planning it took.
        note: why it has no plan or no time, or "".
        estimated_ms: what its best plan takes by estimates, if that was asked.
        is_too_large: whether none of its plans fits in memory.
    """

    name: str
    plan: Plan | None = None
    step_ms: float | None = None
    seconds: float = 0.0
    note: str = ""
    estimated_ms: float | None = None
    is_too_large: bool = False

    def __repr__(self) -> str:
        time = f"{self.step_ms:.3f} ms per step" if self.step_ms is not None else ""
        parts = [text for text in (time, self.note.partition("\n")[0]) if text]
        return f"{self.name}: {'; '.join(parts) or 'not timed'}"


def with_variants(
    plan: Plan,
    best: str,
    variants: Sequence[Variant],
    outcomes: Sequence[Outcome],
    basis: Basis,
) -> Plan:
    """The plan with what it was chosen among, if there was more than one.

    And with what it gains by meshes of several axes, and by microbatches.
    """
    if len(outcomes) < 2 or plan.figures is None:
        return plan
    tried = tuple(
        VariantFigures(
            name=one.name,
            step_ms=one.step_ms,
            estimated_ms=one.estimated_ms,
            note=one.note.partition("\n")[0],
            taken=one.name == best,
        )
        for one in outcomes
    )
    worth = [*plan.figures.worth]
    for name in ("mesh", "microbatches"):
        plain = [
            outcome
            for outcome, one in zip(outcomes, variants, strict=True)
            if (one.axes < 2 if name == "mesh" else one.microbatches in (None, 1))
        ]
        if plain and len(plain) < len(variants):
            worth += _worth_of(name, outcomes, plain, basis)
    is_raced = basis is Basis.RACED
    figures = replace(
        plan.figures, variants=tried, variants_raced=is_raced, worth=tuple(worth)
    )
    return replace(plan, figures=figures)


def _worth_of(
    name: str, every: Sequence[Outcome], plain: Sequence[Outcome], basis: Basis
) -> list[WorthFigures]:
    """Compares the best variant with the best of some, by times of one kind.

    By estimates, where none of these was planned but some fit in memory.
    """
    for kind in ("step_ms", "estimated_ms"):
        with_ms, without_ms = (
            min(
                (ms for one in some if (ms := getattr(one, kind)) is not None),
                default=None,
            )
            for some in (every, plain)
        )
        if with_ms is None:
            continue
        if without_ms is not None or all(one.is_too_large for one in plain):
            measured = kind == "step_ms" and basis is not Basis.PREDICTED
            return [
                WorthFigures(
                    name=name,
                    with_ms=with_ms,
                    without_ms=without_ms,
                    is_measured=measured,
                )
            ]
    return []
