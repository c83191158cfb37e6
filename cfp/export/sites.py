"""A plan's constraints as sites in the step: gathered, and folded where alike."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

from jax.sharding import Mesh

from cfp.analysis.strategies import Spec
from cfp.export.runtime import digest, equation_key, equations
from cfp.plan.sites import Site, Sites
from cfp.program.equations import place
from cfp.program.graft import Constraints
from cfp.program.step import FlatStep

_PATH_PARTS = 2


def sites_of(
    step: FlatStep, mesh: Mesh, fingerprint: str, constraints: Constraints
) -> Sites | None:
    """The sites of a plan's constraints; None if the step does not show them.

    Args:
        step: the step that was planned.
        mesh: the devices.
        fingerprint: of its program.
        constraints: by the program's values and ops.
    """
    placed = place(step, mesh, fingerprint, constraints)
    if placed is None:
        return None
    keys = [equation_key(eqn) for eqn in equations(step.traced.jaxpr.jaxpr)]
    seen: Counter[tuple[str, str]] = Counter()
    numbers = []
    for key in keys:
        numbers.append(seen[key])
        seen[key] += 1
    groups: dict[tuple[str, str, str, Spec, str], list[int]] = {}
    for where, spec in placed.places.items():
        primitive, kind = keys[where.equation]
        value = f"{where.value} {where.index}"
        source = _short(placed.sources[where.equation])
        members = groups.setdefault((primitive, kind, value, spec, source), [])
        members.append(numbers[where.equation])
    return Sites(
        sites=tuple(
            Site(
                primitive=primitive,
                type=kind,
                value=value,
                which=ranges(members),
                spec=spec,
                source=source,
            )
            for (primitive, kind, value, spec, source), members in groups.items()
        ),
        equations=len(keys),
        digest=digest(keys),
        inner=len(placed.lost),
    )


def ranges(numbers: list[int]) -> str:
    """Rising numbers in short: ``0-3,8``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _short(source: str) -> str:
    return "/".join(PurePath(source).parts[-_PATH_PARTS:]) if source else ""
