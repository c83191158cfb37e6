"""The fastest of several variants of one step: other meshes, other microbatches.

They are planned in turn (`cfp.variant_turns`). What won is then timed once more, all of
them in turn in one race, because times of different races do not compare: clocks drift,
and neighbours come and go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.context import agreement_of, device_memory, settings_or_defaults
from cfp.errors import CfpError
from cfp.find import FoundPlan, PlanOptions
from cfp.outcomes import Basis, Outcome, Variant, with_variants
from cfp.passes.pipeline import Pins, analyze_step
from cfp.plan.figures import (
    GIVEN_SECONDS,
    VARIANTS_SECONDS,
)
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.profiling.builder import BuildEnvironment, Job
from cfp.profiling.coordination import END, Coordination, coordinated_planning
from cfp.profiling.followers import follow
from cfp.profiling.key import alike_parts, environment_parts
from cfp.profiling.options import MeasureOptions
from cfp.profiling.processes import meet, talk_of_all
from cfp.profiling.store import ProfileStore, store_path
from cfp.program.graph import Program
from cfp.program.meaning import unchecked
from cfp.program.step import flatten_step
from cfp.race.compile import Builder
from cfp.race.programs import RaceProgram, RaceResult, Skipped, race_row
from cfp.race.turns import race_programs
from cfp.search.jobs import whole_job
from cfp.units import parse_bytes
from cfp.variant_turns import Tried, now, plan_best
from cfp.view.progress import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest variant, and what came of the others.

    Attributes:
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
    leaner: Callable[[], Iterable[Variant]] = tuple,
) -> Fastest:
    """Plans the best variants of a step, and keeps the fastest that fits in memory.

    All are estimated, and the best two planned; where choices are made by estimates
    anyway, the best; with a preset, all. A variant that cannot be planned is out, and
    the next takes its turn. When time is over, it makes do with those that are
    finished.

    Args:
        variants: what to choose from; each has a name of its own. They may differ in
            the mesh, the step and the arguments.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as for
            :func:`cfp.plan`, for every variant.
        memory_budget, pins, preset, cache_dir, settings: the same.
            ``settings.seconds`` holds for all variants together.
        quiet: whether no progress is shown, as for :func:`cfp.plan`.
        leaner: makes further variants, of which the first that can be planned is taken
            where none of the others fits in memory, unless one with a part of its
            state in host memory is faster.

    Raises:
        CfpError: no variant can be planned.
        ProcessError: the processes of this program do not plan together.
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

    calls = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "precision": settings_or_defaults(settings).precision,
    }
    name = getattr(variants[0].fn, "__name__", "a step")
    variants_text = f"variants of a step: {', '.join(names)}"
    doing = f"planning {variants_text if several else f'how to shard {name!r}'}"
    silence = "quiet=True says nothing"
    shared = _shared(variants)
    with (
        shown(settings, doing, silence, quiet) as how,
        coordinated_planning(alone=shared is None),
    ):
        settings_or_defaults(how)
        options = PlanOptions(
            memory_budget=memory_budget,
            pins=pins,
            preset=preset,
            cache_dir=cache_dir,
            settings=how,
        )
        if shared is None:
            return _fastest(variants, calls, options, leaner)
        talk = talk_of_all()
        meet(talk, _facts(variants, shared, options), device_memory(shared) or 0)
        if not talk.leads:
            return _followed(talk, variants, calls, options, leaner)
        fastest = _fastest(variants, calls, options, leaner)
        # All compile it alike: the others have it as a file does.
        plan = replace(fastest.plan, raced=None)
        talk.say(END, (fastest.name, str(fastest.basis), plan.as_in_file().to_json()))
        return replace(fastest, plan=plan)


def _fastest(
    variants: Sequence[Variant],
    calls: Mapping[str, Any],
    options: PlanOptions,
    leaner: Callable[[], Iterable[Variant]],
) -> Fastest:
    """Plans variants in turn, and compares what won."""
    began, seconds = now(), options.settings.seconds
    tried = {
        one.variant.name: one for one in plan_best(variants, calls, options, leaner)
    }
    found = {name: one.found for name, one in tried.items() if one.found is not None}
    notes = {name: one.note or str(one.error or "") for name, one in tried.items()}
    basis, times = _own_times(found)
    if basis is Basis.MEASURED and len(times) > 1 and now() - began < seconds:
        entrants = [(name, found[name]) for name in times]
        results = _race_winners(entrants, options, began + seconds)
        ran = {n: r for n, r in results.items() if isfinite(r.time_ms)}
        raced = {name: result.time_ms for name, result in ran.items()}
        # Without what there was no time for it does not say what is fastest.
        outcomes = [one.outcome for one in results.values()]
        is_whole = not any(isinstance(one, Skipped) for one in outcomes)
        if raced and is_whole:
            basis, times = Basis.RACED, raced
            notes |= {name: race_row(r).note for name, r in results.items()}
    best = min(times, key=times.__getitem__, default=next(iter(found)))
    outcomes = tuple(
        Outcome(
            name=name,
            plan=one.found and one.found.plan,
            step_ms=times.get(name),
            seconds=_seconds(one),
            note=notes[name],
            estimated_ms=one.estimate and one.estimate.time_ms,
            is_too_large=one.is_short,
        )
        for name, one in tried.items()
    )
    plan = found[best].plan
    took = {VARIANTS_SECONDS: now() - began} if len(tried) > 1 else {}
    given = {GIVEN_SECONDS: seconds} if isfinite(seconds) else {}
    plan = replace(plan, search={**plan.search, **took, **given})
    every = [one.variant for one in tried.values()]
    plan = with_variants(plan, best, every, outcomes, basis)
    outcomes = tuple(
        replace(one, plan=plan) if one.name == best else one for one in outcomes
    )
    return Fastest(name=best, plan=plan, outcomes=outcomes, basis=basis)


def _shared(variants: Sequence[Variant]) -> Mesh | None:
    """The first mesh of variants that several processes have devices of."""
    meshes = [one.mesh for one in variants if isinstance(one.mesh, Mesh)]
    return next((one for one in meshes if not agreement_of(one).alone), None)


def _facts(
    variants: Sequence[Variant], mesh: Mesh, options: PlanOptions
) -> dict[str, str]:
    """Facts of planning that are to be the same in all processes."""
    settings = settings_or_defaults(options.settings)
    meshes = [
        f"{dict(one.mesh.shape)} of {[d.id for d in one.mesh.devices.flat]}"
        for one in variants
        if isinstance(one.mesh, Mesh)
    ]
    return {
        "mesh": "; ".join(meshes),
        **alike_parts([*mesh.devices.flat]),
        "memory budget": str(parse_bytes(options.memory_budget)),
        # Process 0 says when time is over, if it ever is.
        "time budget": "some" if isfinite(settings.seconds) else "none",
        "preset": str(options.preset),
        "settings": repr(replace(settings, progress=None, seconds=0.0)),
    }


def _followed(
    talk: Coordination,
    variants: Sequence[Variant],
    calls: Mapping[str, Any],
    options: PlanOptions,
    leaner: Callable[[], Iterable[Variant]],
) -> Fastest:
    """The leader's plan, of whose planning this process does its part."""
    by_name = {one.name: one for one in variants}

    def trace(name: str, in_host: Sequence[tuple[int, int]]) -> Program:
        if name not in by_name:
            by_name.update((one.name, one) for one in leaner())
        one = by_name[name]
        step = flatten_step(one.fn, one.args, one.kwargs, **calls)
        step = step.with_state_in_host(in_host)
        with unchecked():
            return analyze_step(step, one.mesh, options.pins).analysis.frame.program

    environment = BuildEnvironment.beside(store_path(options.cache_dir))
    platform = jax.local_devices()[0].platform
    name, basis, text = follow(talk, trace, environment, platform)
    data, one = json.loads(text), by_name[name]
    assert isinstance(one.mesh, Mesh), "its devices are there"
    plan = Plan.from_json(data, allowed_options=tuple(data["options"]))
    # What else decides, such as the precision, is in the plan.
    bound = {name: how for name, how in calls.items() if "_arg" in name}
    plan = plan.bind(one.fn, *one.args, mesh=one.mesh, **bound, **one.kwargs)
    plan = replace(plan, tuned=environment)
    return Fastest(name=name, plan=plan, outcomes=(), basis=Basis(basis))


def _seconds(one: Tried) -> float:
    """Returns what planning a variant took: in all, as its plan has it, if it has."""
    taken = {} if one.found is None else one.found.plan.search
    return taken.get("planning_seconds", one.seconds)


def _own_times(found: Mapping[str, FoundPlan]) -> tuple[Basis, dict[str, float]]:
    """Step times as the plans have them; a measured one beats all predictions."""
    measured = {name: one.plan.measured_ms for name, one in found.items()}
    predicted = {name: one.plan.predicted_ms for name, one in found.items()}
    for basis, times in ((Basis.MEASURED, measured), (Basis.PREDICTED, predicted)):
        known = {name: ms for name, ms in times.items() if ms is not None}
        if known:
            return basis, known
    return Basis.PREDICTED, {}


def _race_winners(
    found: Sequence[tuple[str, FoundPlan]],
    options: PlanOptions,
    end: float,
) -> dict[str, RaceResult]:
    """Times what won each variant's own race, in turn, until time is over."""
    settings = options.settings
    plain = sorted(_job(name, one).key.digest for name, one in found)
    # Kept apart from their own races, and from those against other variants: only
    # times of one run compare.
    field = hashlib.sha256("".join(plain).encode()).hexdigest()
    programs = [
        RaceProgram(
            candidate=replace(one.winner, name=name, predicted_ms=one.plan.measured_ms),
            job=_job(name, one, ("race", f"between variants {field}")),
            stands_on=(one.analysis.frame.program, _mesh(one)),
        )
        for name, one in found
    ]
    places = zip(programs, found, strict=True)
    meshes = {program.identity: _mesh(one) for program, (_, one) in places}
    mesh = _mesh(found[0][1])
    with ProfileStore(store_path(options.cache_dir)) as store:
        builder = Builder(
            program=found[0][1].analysis.frame.program,
            mesh=mesh,
            store=store,
            budget_bytes=parse_bytes(options.memory_budget) or device_memory(mesh),
            options=MeasureOptions(
                retry_failures=settings.retry_failures,
                progress=settings.progress,
                limits=settings.limits,
            ),
            end=end,
            built={
                program.identity: one.plan.raced.built
                for program, (_, one) in zip(programs, found, strict=True)
                # Of programs that are alike the last runs, on its own devices.
                if one.plan.raced is not None and meshes[program.identity] == _mesh(one)
            },
        )
        results = race_programs(builder, programs)
    return {result.name: result for result in results}


def _job(name: str, found: FoundPlan, *where: tuple[str, str]) -> Job:
    winner = found.winner
    return whole_job(
        found.analysis,
        winner.choice,
        (*environment_parts(list(_mesh(found).devices.flat)), *where),
        f"{name}: {winner.name}",
        winner.level,
        winner.options,
    )


def _mesh(found: FoundPlan) -> Mesh:
    mesh = found.plan.mesh
    assert mesh is not None, "a new plan has a mesh"
    return mesh
