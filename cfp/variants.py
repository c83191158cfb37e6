"""The fastest of several variants of one step: other meshes, other microbatches.

By default all are estimated, the best two are planned, and their plans run in one race,
since clocks drift between races. If none fits in memory, the smallest may be planned
with state in host memory, then leaner variants are tried. `complete_plan` makes a
winner's plan with its figures; `wrong_kernels` checks the plan's kernels.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis, enough_state
from cfp.analysis.layout import lay_out
from cfp.context import DetailedSettings, PlanContext, device_memory
from cfp.cost.described import DescribedMesh
from cfp.cost.memory import host_bytes
from cfp.errors import CfpError, MemoryBudgetError, ProcessError
from cfp.passes import Analyzed, PlanOptions, analyze_step, estimate
from cfp.plan.describe import compose_plan
from cfp.plan.parts import UNPLANNED, VARIANTS_SECONDS, VariantFigures
from cfp.plan.plan import Plan
from cfp.printable import format_bytes, parse_bytes
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.coordination import Coordination, check_alike, coordinated, leading
from cfp.profiling.followers import follow
from cfp.profiling.record import alike_parts, environment_parts
from cfp.profiling.store import store_path
from cfp.profiling.tasks import Progress
from cfp.program.graph import Program
from cfp.program.jaxprs import check_settings, unchecked
from cfp.program.memory import has_host_memory
from cfp.race.admission import least_short, no_winner
from cfp.race.compile import Builder
from cfp.race.programs import (
    RaceOutcome,
    RaceProgram,
    RaceResult,
    programs_of,
    race_row,
)
from cfp.race.turns import race_programs
from cfp.search.guided import Candidate, Estimate
from cfp.settings import ESTIMATES_SHARE, HOST_BYTES_PER_MS, Dimension, defaults_of
from cfp.view.console import shown
from cfp.view.evidence import with_figures
from cfp.view.words import DEVICE_BYTES, RESERVE_BYTES, SAME_MS

now = time.monotonic
_PLANNED = 2
_UNKNOWN = Estimate(time_ms=inf, fits=False)
SEARCH_INSTEAD = (
    "A search may find a plan that fits: leave out the preset (--preset, preset=)."
)

# Type of a function that plans an analysed step.
RunPasses = Callable[[Analyzed, PlanOptions], "FoundPlan"]
InHost = Sequence[tuple[int, int]]  # See `FlatStep.in_host`.


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan, with the analysis and the race's winner that it was made from."""

    plan: Plan
    analysis: Analysis = field(repr=False)
    winner: Candidate = field(repr=False)


def complete_plan(
    context: PlanContext, analyzed: Analyzed, outcome: RaceOutcome
) -> FoundPlan:
    """Makes the plan of a race's winner, with its figures.

    Raises:
        MemoryBudgetError: no candidate fits in memory.
        CfpError: no candidate runs.
    """
    analysis, winner = analyzed.analysis, outcome.winner
    reserve = context.memory.reserve_bytes if context.memory else 0
    if winner is None:
        error = no_winner(analysis, outcome.results, context.budget_bytes, reserve)
        if isinstance(error, MemoryBudgetError) and context.is_over:
            error = error.with_line(
                "Planning ran out of time before it compiled all smaller candidates. "
                "Give it more time (--time-budget, cfp.PlannerSettings(seconds=...))."
            )
        raise error
    kept = BuildEnvironment.beside(context.store.path)
    environment = dict(context.environment)
    made = compose_plan(analysis, context.mesh, environment, outcome, kept)
    made = made.bound_to(analyzed.step, analyzed.lowering.out_tree)
    search = {**made.search}
    if reserve:
        search[RESERVE_BYTES] = float(reserve)
    if isinstance(context.mesh, DescribedMesh):
        search[DEVICE_BYTES] = float(context.mesh.cluster.kind.memory_bytes)
    if moved := [argument for argument, _ in made.in_host]:
        kept, both_ways = host_bytes(lay_out(analysis.frame, winner.choice), moved)
        search |= {"host_bytes": kept, "host_ms": both_ways / HOST_BYTES_PER_MS}
    how = context.defaults.replacing, context.settings.dimensions, context.budget_bytes
    made = with_figures(replace(made, search=search), analysis, outcome, *how)
    return FoundPlan(plan=made, analysis=analysis, winner=winner)


def wrong_kernels(
    context: PlanContext, found: FoundPlan
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Compares kernels with the ops they replace; returns (wrong kernels, notes).

    Notes name wrong parts, and parts that were not compared. Described devices, several
    processes and plans without kernels give neither names nor notes.
    """
    program = found.analysis.frame.program
    if not found.plan.constraints.replaced:
        return frozenset(), ()
    from cfp.race.sites import check_sites  # For plans with kernels only.

    with Builder(context, program).in_flight as in_flight:
        checks = check_sites(context, program, found.plan.constraints, in_flight)
    wrong = frozenset(one.kernel for one in checks if one.is_wrong)
    return wrong, tuple(str(one) for one in checks if one.is_wrong or one.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A step with its arguments (arrays or ``jax.ShapeDtypeStruct`` s) on a mesh."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)
    mesh: Mesh | DescribedMesh
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """Name and plan of the fastest variant; its figures list all if several."""

    name: str
    plan: Plan


def find_fastest(
    run_passes: RunPasses,
    variants: Sequence[Variant],
    options: PlanOptions,
    leaner: Callable[[], Iterable[Variant]] = tuple,
    quiet: bool = False,
) -> Fastest:
    """Plans the best variants of a step; see :func:`cfp.plan_fastest`."""
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise CfpError(f"Expected variants, each with a name of its own, got {names}.")
    doing = f"planning how to shard {getattr(variants[0].fn, '__name__', 'a step')!r}"
    if names[1:]:
        doing = f"planning variants of a step: {', '.join(names)}"
    meshes = [one.mesh for one in variants if isinstance(one.mesh, Mesh)]
    with (
        shown(options.settings, doing, "quiet=True hides these lines", quiet) as how,
        coordinated(meshes) as talk,
    ):
        options = replace(options, settings=how)
        planning = _Planning(run_passes, variants, options, leaner)
        if talk is None:
            return planning.fastest()
        talk.meet(facts_of(meshes, options), device_memory(meshes[0]) or 0)
        if not talk.leads:
            return planning.followed(talk)
        fastest = planning.fastest()
        # Other processes get the plan as a file, and compile it themselves.
        plan = replace(fastest.plan, raced=None)
        talk.broadcast((fastest.name, plan.as_in_file().to_json()))
        return replace(fastest, plan=plan)


def facts_of(meshes: Sequence[Mesh], options: PlanOptions) -> dict[str, str]:
    """Returns {name: text} of versions and settings that all processes must share."""
    settings = DetailedSettings.of(options.settings)
    shapes = (f"{dict(one.shape)} of {one.device_ids.tolist()}" for one in meshes)
    return {
        "version of cfp": sys.modules["cfp"].__version__,
        "mesh": "; ".join(shapes),
        **alike_parts([*meshes[0].devices.flat]),
        "memory budget": str(parse_bytes(options.memory_budget)),
        # Process 0 alone decides when time is over.
        "time budget": "some" if isfinite(settings.seconds) else "none",
        "preset": str(options.preset),
        "settings": repr(replace(settings, progress=None, seconds=0.0)),
    }


@dataclass(slots=True)
class _Tried:
    """A variant with its estimate, and its plan, its error, or a note why neither."""

    variant: Variant
    estimate: Estimate = _UNKNOWN
    found: FoundPlan | None = None
    error: CfpError | None = None
    note: str = ""


@dataclass(slots=True)
class _Planning:
    """Plans variants one after another within one time budget."""

    run_passes: RunPasses
    variants: Sequence[Variant]
    options: PlanOptions
    leaner: Callable[[], Iterable[Variant]]
    began: float = field(default_factory=lambda: now())
    known: dict[str, Analyzed] = field(default_factory=dict)

    def left(self, share: float = 1.0) -> float:
        """Returns the seconds left of a share of all variants' time budget."""
        end = self.began + share * self.options.settings.seconds
        return max(0.0, end - now())

    def fastest(self) -> Fastest:
        """Plans the best; returns the fastest by one race, else by each plan's time."""
        tried = self.tried()
        found = {one.variant.name: one.found for one in tried if one.found}
        measured = {n: f for n, f in found.items() if f.plan.measured_ms is not None}
        raced = self.raced(measured) if len(measured) > 1 and self.left() else {}
        # Times of one race come before times of several, and these before predictions.
        times = {name: one.time_ms for name, one in raced.items() if one.ran}
        times = times or {name: one.plan.measured_ms for name, one in measured.items()}
        times = times or {name: one.plan.predicted_ms for name, one in found.items()}
        if len(found) > 1 and not any(times.values()):
            raise CfpError(
                f"Comparing variants under the preset {self.options.preset!r} needs a "
                f"race. Set race=True, or plan one alone: {'; '.join(found)}."
            )
        best = min(found, key=lambda name: times.get(name) or inf)
        plan = found[best].plan
        if len(tried) > 1 and plan.figures is not None:
            rows = []
            for one in tried:
                name, known = one.variant.name, one.estimate.time_ms
                why = one.note or str(one.error or "").partition("\n")[0]
                if plan.in_host and one.error:
                    why += f" State in host memory was tried for {best} only."
                if result := raced.get(name):
                    why = race_row(result).note
                row = VariantFigures(
                    name=name,
                    step_ms=times.get(name),
                    estimated_ms=known if isfinite(known) else None,
                    note=why,
                    taken=name == best,
                )
                rows.append(row)
            how = {"variants": tuple(rows), "variants_raced": bool(raced)}
            figures = replace(plan.figures, **how)
            search = {**plan.search, VARIANTS_SECONDS: now() - self.began}
            plan = replace(plan, figures=figures, search=search)
        return Fastest(name=best, plan=plan)

    def tried(self) -> list[_Tried]:
        """Plans the best one or two by estimate, or all under a preset.

        If one fails, the next is planned. If all lack memory, `lean` adds variants.
        Returns every variant, planned or not; raises CfpError if none can be planned.
        """
        every = [_Tried(one) for one in self.variants]
        order, left = every, len(every)
        if left > 1 and self.options.preset is None:
            for one in every:
                if one is every[0] or self.left(ESTIMATES_SHARE):
                    self.estimate(one)
            order = sorted(
                every, key=lambda one: (not one.estimate.fits, one.estimate.time_ms)
            )
            left = 1 if order[0].estimate.profiles else _PLANNED
        races = left > 1  # The last race takes a share of the time, too.
        for one in order:
            if not left:
                best = next(other for other in order if other.found)
                more_ms = one.estimate.time_ms - best.estimate.time_ms
                how = "as fast as" if abs(more_ms) < SAME_MS else "behind"
                how = how if more_ms > -SAME_MS else "too large, unlike"
                one.note = f"{how} {best.variant.name} by estimate"
            elif one is not order[0] and not self.left():
                one.note = UNPLANNED
            else:
                self.plan(one, left + races)
                left -= one.found is not None
        if all(isinstance(one.error, MemoryBudgetError) for one in every):
            every += self.lean(every)
        if any(one.found for one in every):
            return every
        error = _no_plan(every)
        if isinstance(error, MemoryBudgetError) and self.options.preset:
            error = error.with_line(SEARCH_INSTEAD)
        raise error

    def lean(self, short: Sequence[_Tried]) -> list[_Tried]:
        """Plans the smallest of `short` with state in host memory, without a preset.

        If it lacks memory still, tries leaner variants until one fits. Returns these,
        without variants that failed for other reasons than memory.
        """
        least = min(short, key=lambda one: _lacks(one).smallest_feasible_bytes)
        if self.options.preset is None:
            self.plan_in_host(least)
        more = list[_Tried]()
        for one in () if least.found else map(_Tried, self.leaner()):
            more.append(one)
            if not self.left():
                one.note = UNPLANNED
                break
            self.estimate(one)
            if one.estimate.fits:
                self.plan(one)
            if one.found:
                break
        return [one for one in more if isinstance(one.error, MemoryBudgetError | None)]

    def estimate(self, one: _Tried) -> None:
        """Sets a variant's estimate of its best plan, or its error."""
        name = one.variant.name
        self.tell(name, "reading the step")
        with _kept_error(one):
            analyzed = self.analyzed(one.variant)
            options = self.options_of(name, self.left())
            with unchecked(), options.context(analyzed.mesh) as context:
                one.estimate = estimate(context, analyzed.analysis)
            if (made := one.estimate.profiles) is not None:
                self.known[name] = replace(analyzed, profiles=made)

    def plan(self, one: _Tried, shares: int = 1, in_host: InHost = ()) -> None:
        """Plans a variant in 1 / `shares` of the time left; sets its plan or error."""
        end = now() + self.left() / shares
        with _kept_error(one):
            analyzed = self.analyzed(one.variant, in_host)
            options = self.options_of(one.variant.name, max(0.0, end - now()))
            one.found = self.run_passes(analyzed, options)

    def plan_in_host(self, one: _Tried) -> None:
        """Plans a variant with some state in host memory, if allowed and possible.

        Large state that only its update reads moves: first as much as memory lacks,
        then all such state if the plan does not fit.
        """
        lacks, mesh, name = _lacks(one), one.variant.mesh, one.variant.name
        most = parse_bytes(self.options.memory_budget) or device_memory(mesh)
        may_move = Dimension.HOST_MEMORY in self.options.settings.dimensions
        if most is None or not (may_move and _uses_host_memory(mesh)):
            return
        frame = self.known[name].analysis.frame
        for some in enough_state(frame, lacks.smallest_feasible_bytes - most):
            if not self.left():
                return
            size = format_bytes(sum(some.values()))
            self.tell(name, f"planning again with {size} of state in host memory")
            self.plan(one, in_host=[*some])
            if not isinstance(one.error, MemoryBudgetError):
                return
            one.error = one.error.with_line(
                f"The plan was tried with {size} of state in host memory."
            )

    def analyzed(self, variant: Variant, in_host: InHost = ()) -> Analyzed:
        """Analyses a variant once, but anew with `in_host`, here and in followers."""
        name, mesh = variant.name, variant.mesh
        if name in self.known and not in_host:
            return self.known[name]
        check_settings()
        talk = leading(mesh) if isinstance(mesh, Mesh) else None
        said = talk and talk.say("trace", name, in_host)
        made = self.analyze(variant, in_host)
        if talk and said:
            mine = made.analysis.frame.program.fingerprint
            for process, other in enumerate(talk.answers(said), start=1):
                check_alike({"program": mine[:12]}, {"program": other[:12]}, process)
        return self.known.setdefault(name, made) if not in_host else made

    def analyze(self, variant: Variant, in_host: InHost) -> Analyzed:
        """Analyses a variant anew; may use an equal step's trace without `in_host`."""
        step = self.options.flatten(variant.fn, variant.args, variant.kwargs)
        before = (one.step for one in self.known.values() if one.step == step)
        step = next(before, step).with_state_in_host(in_host)
        with unchecked():
            return analyze_step(step, variant.mesh, self.options.pins)

    def options_of(self, name: str, seconds: float) -> PlanOptions:
        how = {"seconds": seconds, "progress": partial(self.tell, name)}
        return replace(self.options, settings=replace(self.options.settings, **how))

    def tell(self, name: str, event: Progress | str) -> None:
        """Passes an event to `progress`, after the variant's name if of several."""
        if progress := self.options.settings.progress:
            before = f"{name}: " if name and len(self.variants) > 1 else ""
            said = before + (event if isinstance(event, str) else event.label)
            said = said.rstrip(": ")
            progress(said if isinstance(event, str) else replace(event, label=said))

    def raced(self, found: Mapping[str, FoundPlan]) -> Mapping[str, RaceResult]:
        """Races plans, by name; empty if one is not compiled in time, or none runs."""
        # Results are stored apart from races of one variant or of other variants.
        every = sorted(_program(name, one).identity for name, one in found.items())
        field = hashlib.sha256("".join(every).encode()).hexdigest()
        kept = "race", f"between variants {field}"
        programs = {name: _program(name, one, kept) for name, one in found.items()}
        # Equal programs run once, as the last of them, on that one's devices.
        made = {one.identity: found[name].plan.raced for name, one in programs.items()}
        built = {key: one.built for key, one in made.items() if one}
        first = self.known[next(iter(found))]
        with self.options_of("", self.left()).context(first.mesh) as context:
            builder = Builder(context, first.analysis.frame.program, built)
            results = race_programs(builder, [*programs.values()])
        if any(one.skipped for one in results) or not any(r.ran for r in results):
            return {}
        return dict(zip(found, results, strict=True))

    def followed(self, talk: Coordination) -> Fastest:
        """Compiles and runs programs for process 0; returns the plan of process 0."""
        by_name = {one.name: one for one in self.variants}

        def trace(name: str, in_host: InHost) -> Program:
            if name not in by_name:
                by_name.update((one.name, one) for one in self.leaner())
            return self.analyze(by_name[name], in_host).analysis.frame.program

        environment = BuildEnvironment.beside(store_path(self.options.cache_dir))
        name, text = follow(talk, trace, environment)
        data, one = json.loads(text), by_name[name]
        assert isinstance(one.mesh, Mesh), "its devices are there"
        plan = Plan.from_json(data, allowed_options=tuple(data["options"]))
        # The plan itself has other options, such as the precision.
        named = self.options.of_arguments
        plan = plan.bind(one.fn, *one.args, mesh=one.mesh, **named, **one.kwargs)
        return Fastest(name=name, plan=replace(plan, tuned=environment))


@contextmanager
def _kept_error(one: _Tried) -> Iterator[None]:
    """Stores a CfpError, but no ProcessError; then no estimate counts. Else None."""
    one.error = None
    try:
        yield
    except CfpError as error:
        if isinstance(error, ProcessError):
            raise
        one.error, one.estimate = error, _UNKNOWN


def _lacks(one: _Tried) -> MemoryBudgetError:
    assert isinstance(one.error, MemoryBudgetError)
    return one.error


def _uses_host_memory(mesh: Mesh | DescribedMesh) -> bool:
    if isinstance(mesh, DescribedMesh):
        return defaults_of(mesh.environment["platform"]).host_memory
    device = mesh.local_devices[0]
    return defaults_of(device.platform).host_memory and has_host_memory(device)


def _program(name: str, found: FoundPlan, *where: tuple[str, str]) -> RaceProgram:
    """Makes a race's program of a measured plan; `where` adds to its record's key."""
    mesh, named = found.plan.mesh, f"{name}: {found.winner.name}"
    assert mesh is not None, "its time is measured"
    mine = replace(found.winner, name=named, predicted_ms=found.plan.measured_ms)
    environment = (*environment_parts([*mesh.devices.flat]), *where)
    [made] = programs_of(found.analysis, [mine], environment)
    return replace(made, stands_on=(found.analysis.frame.program, mesh))


def _no_plan(tried: Sequence[_Tried]) -> CfpError:
    """Joins the errors; if all lack memory, returns `least_short` of them."""
    errors = {one.variant.name: one.error for one in tried if one.error}
    short = {n: one for n, one in errors.items() if isinstance(one, MemoryBudgetError)}
    if len(short) == len(errors):
        return least_short(short, [t.variant.name for t in tried if t.note])
    by_text: dict[str, list[str]] = {}
    for name, error in errors.items():
        by_text.setdefault(str(error), []).append(name)
    if len(by_text) == 1:
        return next(iter(errors.values()))
    lines = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    return CfpError("\n".join(["None of the variants can be planned.", *lines]))
