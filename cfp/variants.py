"""The fastest of several variants of one step: other meshes, other microbatches.

Each variant is planned as if it were the only one, with one store for all. What won
is then timed once more, all of them in turn in one race, because times of different
races do not compare: clocks drift, and neighbours come and go.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp.api import Found, Pins, find_plan
from cfp.context import agreement_of, device_memory
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.profiling.builder import Job
from cfp.profiling.common_store import open_store
from cfp.profiling.conversation import together
from cfp.profiling.key import environment_parts
from cfp.profiling.options import MeasureOptions
from cfp.profiling.runner import Progress
from cfp.profiling.store import store_path
from cfp.program.step import flatten_step
from cfp.race.compile import Builder
from cfp.race.programs import RaceProgram, RaceResult, race_row
from cfp.race.turns import race_programs
from cfp.report.progress import shown
from cfp.search.jobs import whole_job
from cfp.units import parse_bytes


class Basis(StrEnum):
    """Where the times that variants are compared by come from."""

    RACED = "raced"
    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a step.

    Attributes:
        name: what it is called in the outcome.
        fn: the step, as for :func:`cfp.plan`.
        args: its arguments, arrays or ``jax.ShapeDtypeStruct`` s.
        mesh: the devices.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)
    mesh: Mesh | DescribedMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a variant.

    Attributes:
        name: the variant's.
        plan: its plan, or None.
        step_ms: the time that it is compared by, or None.
        seconds: how long planning it took.
        note: why it has no plan or no time, or "".
    """

    name: str
    plan: Plan | None = None
    step_ms: float | None = None
    seconds: float = 0.0
    note: str = ""

    def __repr__(self) -> str:
        time = f"{self.step_ms:.3f} ms per step" if self.step_ms is not None else ""
        parts = [text for text in (time, self.note.partition("\n")[0]) if text]
        return f"{self.name}: {'; '.join(parts) or 'not timed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest variant, and what came of the others.

    Attributes:
        name: the fastest variant's.
        plan: its plan.
        outcomes: of all variants, in their order.
        basis: raced together; measured, but each in a race of its own, so that small
            differences say nothing; or predicted.
    """

    name: str
    plan: Plan
    outcomes: tuple[Outcome, ...]
    basis: Basis

    def __repr__(self) -> str:
        lines = [f"  {outcome}" for outcome in self.outcomes]
        title = f"Fastest of {len(lines)} variants, {self.basis}: {self.name}"
        return "\n".join([title, *lines, repr(self.plan)])


def plan_fastest(
    variants: Sequence[Variant],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    memory_budget: int | str | None = None,
    pins: Pins | None = None,
    preset: str | None = None,
    cache_dir: str | Path | None = None,
    settings: PlannerSettings | None = None,
    quiet: bool = False,
) -> Fastest:
    """Plans variants of a step, and keeps the fastest plan that fits in memory.

    A variant that cannot be planned is out, and its outcome says why. Interrupted
    (``KeyboardInterrupt``), it makes do with the variants that are finished.

    Args:
        variants: what to choose from; each has a name of its own. They may differ in
            the mesh, the step and the arguments.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as for
            :func:`cfp.plan`, for every variant.
        memory_budget, pins, preset, cache_dir, settings: the same.
            ``settings.seconds`` holds for each.
        quiet: whether no progress is shown, as for :func:`cfp.plan`.

    Raises:
        CfpError: no variant can be planned.
        KeyboardInterrupt: before anything can be chosen from.
    """
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise CfpError(f"Expected variants with a name each, got {names}.")
    several = len(names) > 1
    if several and preset is not None and settings is not None and not settings.race:
        raise CfpError(
            f"Without a race nothing says which of {', '.join(names)} is the fastest "
            f"under the preset {preset!r}. Have a race, or take one of them."
        )

    def plan_one(variant: Variant) -> Found:
        step = flatten_step(
            variant.fn,
            variant.args,
            {},
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
        )
        return find_plan(
            step,
            mesh=variant.mesh,
            memory_budget=memory_budget,
            pins=pins,
            preset=preset,
            cache_dir=cache_dir,
            settings=_telling(how, variant.name) if several else how,
        )

    doing = f"planning variants of a step: {', '.join(names)}"
    silence = "cfp.plan_fastest(..., quiet=True) says nothing"
    with shown(settings, doing, silence, quiet) as how:
        tries = _plan_all(variants, plan_one)
        found = {one.name: one.found for one in tries if one.found is not None}
        if not found:
            raise _no_plan([(one.name, one.error) for one in tries if one.error])
        notes = {one.name: one.note for one in tries}
        basis, times = _own_times(found)
        if basis is Basis.MEASURED and len(times) > 1 and not tries[-1].interrupted:
            budget = parse_bytes(memory_budget)
            with contextlib.suppress(KeyboardInterrupt):
                entrants = [(name, found[name]) for name in times]
                results = _race_winners(entrants, budget, cache_dir, how)
                ran = {n: r for n, r in results.items() if isfinite(r.time_ms)}
                raced = {name: result.time_ms for name, result in ran.items()}
                if raced:
                    basis, times = Basis.RACED, raced
                    notes |= {name: race_row(r).note for name, r in results.items()}
    best = min(times, key=times.__getitem__, default=next(iter(found)))
    seconds = {one.name: one.seconds for one in tries}
    outcomes = tuple(
        Outcome(
            name=name,
            plan=found[name].plan if name in found else None,
            step_ms=times.get(name),
            seconds=seconds.get(name, 0.0),
            note=notes.get(name, _INTERRUPTED),
        )
        for name in names
    )
    return Fastest(name=best, plan=found[best].plan, outcomes=outcomes, basis=basis)


# --------------------------------------------------------------------------- inside

_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """How planning a variant went."""

    name: str
    seconds: float
    found: Found | None = None
    error: CfpError | None = None

    @property
    def interrupted(self) -> bool:
        ended = self.found or self.error
        return ended is None or ended.interrupted

    @property
    def note(self) -> str:
        return str(self.error or (_INTERRUPTED if self.interrupted else ""))


def _plan_all(
    variants: Sequence[Variant], plan_one: Callable[[Variant], Found]
) -> list[_Try]:
    """Plans one after another, until the user ends it."""
    tries: list[_Try] = []
    for variant in variants:
        found = error = None
        started = time.perf_counter()
        try:
            found = plan_one(variant)
        except CfpError as reason:
            error = reason
        except KeyboardInterrupt:
            if not any(one.found for one in tries):
                raise
        seconds = time.perf_counter() - started
        tries.append(_Try(name=variant.name, seconds=seconds, found=found, error=error))
        if tries[-1].interrupted:
            break
    return tries


def _own_times(found: Mapping[str, Found]) -> tuple[Basis, dict[str, float]]:
    """Step times as the plans have them; a measured one beats all predictions."""
    measured = {name: one.plan.measured_ms for name, one in found.items()}
    predicted = {name: one.plan.predicted_ms for name, one in found.items()}
    for basis, times in ((Basis.MEASURED, measured), (Basis.PREDICTED, predicted)):
        known = {name: ms for name, ms in times.items() if ms is not None}
        if known:
            return basis, known
    return Basis.PREDICTED, {}


def _race_winners(
    found: Sequence[tuple[str, Found]],
    budget_bytes: int | None,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
) -> dict[str, RaceResult]:
    """Times what won each variant's own race, in turn."""
    plain = sorted(_job(name, one).key.digest for name, one in found)
    # Kept apart from their own races, and from those against other variants: only
    # times of one run compare.
    field = hashlib.sha256("".join(plain).encode()).hexdigest()
    programs = [
        RaceProgram(
            candidate=replace(one.winner, name=name, predicted_ms=one.plan.measured_ms),
            job=_job(name, one, ("race", f"between variants {field}")),
            place=(one.analysis.frame.program, _mesh(one)),
        )
        for name, one in found
    ]
    mesh = _mesh(found[0][1])
    agreement = agreement_of(mesh)
    with (
        together(agreement.alone),
        open_store(store_path(cache_dir), agreement) as store,
    ):
        builder = Builder(
            program=found[0][1].analysis.frame.program,
            mesh=mesh,
            store=store,
            budget_bytes=budget_bytes or device_memory(mesh),
            options=MeasureOptions(
                retry_failures=settings.retry_failures,
                progress=settings.progress,
                limits=settings.limits,
            ),
        )
        results = race_programs(builder, programs)
    return {result.name: result for result in results}


def _job(name: str, found: Found, *where: tuple[str, str]) -> Job:
    winner = found.winner
    return whole_job(
        found.analysis,
        winner.choice,
        (*environment_parts(list(_mesh(found).devices.flat)), *where),
        f"{name}: {winner.name}",
        winner.level,
        winner.options,
    )


def _mesh(found: Found) -> Mesh:
    mesh = found.plan.mesh
    assert mesh is not None, "a new plan has a mesh"
    return mesh


def _telling(settings: PlannerSettings, name: str) -> PlannerSettings:
    """Settings whose events say which variant they are about."""
    progress = settings.progress
    if progress is None:
        return settings

    def tell(event: Progress | str) -> None:
        if isinstance(event, str):
            progress(f"{name}: {event}")
        else:
            label = f"{name}: {event.label}" if event.label else name
            progress(replace(event, label=label))

    return replace(settings, progress=tell)


def _no_plan(errors: Sequence[tuple[str, CfpError]]) -> CfpError:
    """The error where every variant failed: the only one's, or all of them."""
    if len(errors) == 1:
        return errors[0][1]
    names: dict[str, list[str]] = {}
    for name, error in errors:
        names.setdefault(str(error), []).append(name)
    lines = [f"{', '.join(found)}: {text}" for text, found in names.items()]
    return CfpError("\n".join(["None of the variants can be planned.", *lines]))
