"""The public functions that plan, and the passes in a row.

analyze   step + mesh             -> Analyzed     :mod:`cfp.passes.analyze`
measure   Analyzed                -> Profiles     :mod:`cfp.passes.profile`
search    Profiles                -> Solution     :mod:`cfp.passes.search`
race      Solution                -> RaceOutcome  :mod:`cfp.race.race`
complete  Analyzed + RaceOutcome  -> FoundPlan    :mod:`cfp.complete`

`run_passes` runs them for one step on one mesh. Several meshes, and other variants of
a step, are a loop around it (:mod:`cfp.variants`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from cfp.cluster.on_ray import plan_step
from cfp.complete import FoundPlan, complete_plan, wrong_kernels
from cfp.context import PlanContext, settings_or_defaults
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError
from cfp.passes.analyze import Analyzed, Pins, PlanOptions
from cfp.passes.profile import profile
from cfp.passes.search import preset_solution, search, search_further
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings, dimensions_of
from cfp.platform import all_meshes
from cfp.program.calling import check_keywords
from cfp.program.meaning import unchecked
from cfp.race.race import race
from cfp.settings import Dimension
from cfp.solution import Solution
from cfp.variants import Fastest, Variant, find_fastest


def run_passes(analyzed: Analyzed, options: PlanOptions) -> FoundPlan:
    """Plans an analysed step on its mesh.

    Raises:
        MemoryBudgetError: nothing fits in memory.
        CfpError: nothing runs.
    """
    started = time.perf_counter()
    if analyzed.step.inner_jit_donates:
        warnings.warn(
            "The jax.jit around the step donates arguments, which cfp ignores: give "
            "cfp donate_argnums or donate_argnames, too.",
            stacklevel=3,
        )
    analysis = analyzed.analysis
    with unchecked(), options.context(analyzed.mesh) as context:
        if options.preset is not None:
            solution = preset_solution(context, analysis, options.preset)
        else:
            profiles = analyzed.profiles or profile(context, analysis)
            solution = search(context, analysis, profiles)
        found = race_until_fit(context, analyzed, solution)
        wrong, notes = wrong_kernels(context, found)
        if wrong:
            kernels = [k for k in context.rules.replacing.attention if k not in wrong]
            settings = replace(options.settings, attention=tuple(kernels))
            again = replace(analyzed, profiles=None)  # These have all kernels.
            found = run_passes(again, replace(options, settings=settings))
    notes = tuple(dict.fromkeys((*notes, *found.plan.site_checks)))
    seconds = analyzed.seconds + time.perf_counter() - started
    counts = {**found.plan.search, "planning_seconds": seconds}
    plan = replace(found.plan, site_checks=notes, search=counts)
    return replace(found, plan=plan)


def race_until_fit(
    context: PlanContext, analyzed: Analyzed, solution: Solution
) -> FoundPlan:
    """Races candidates, and completes the plan of what won.

    While nothing fits as compiled, a search that knows what was compiled finds others.
    """
    analysis = analyzed.analysis
    outcome = race(context, analysis, solution)
    while (again := search_further(context, analysis, outcome)) is not None:
        outcome = race(context, analysis, again).after(outcome)
    return complete_plan(context, analyzed, outcome)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | DescribedMesh | AbstractMesh | None = None,
    quiet: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    memory_budget: int | str | None = None,
    pins: Pins | None = None,
    preset: str | None = None,
    choose: Iterable[str] | None = None,
    precision: str | None = None,
    cache_dir: str | Path | None = None,
    settings: PlannerSettings | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans how to shard a step on a mesh.

    Args:
        fn: any function of pytrees that ``jax.jit`` accepts: a training step, an
            evaluation step, anything.
        args, kwargs: its arguments, as arrays or ``jax.ShapeDtypeStruct`` s. They are
            not overwritten, and may be anywhere.
        mesh: the devices; profiling runs on them, as if all of their memory were free.
            By default all that are there, in the mesh of one or two axes that is the
            fastest; one axis with a preset. On those of :func:`cfp.described` nothing
            runs: the plan is by estimates, and is used later with ``plan.on(mesh)``. A
            mesh without devices names those of a Ray cluster's node:
            ``PlannerSettings(ray=...)``.
        quiet: whether to show nothing; by default progress is shown on a terminal, and
            elsewhere by a line on standard error at first, and one now and then. With
            ``settings.progress`` nothing is shown either.
        static_argnums, static_argnames: arguments that are not arrays, by position or
            name.
        donate_argnums, donate_argnames: arguments that the step may overwrite, usually
            the training state.
        memory_budget: memory of one device that the plan may use, in bytes or as
            text such as "80GiB"; by default all of the device's. A plan fits in a
            given budget as compiled, also without a race. On GPUs 128 MiB of it are
            left for the allocator.
        pins: shardings that the plan must keep, by path of the argument, with globs:
            ``{"params/*/kernel": PartitionSpec(None, "x")}``.
        preset: a preset to take instead of searching, such as "data_parallel",
            "fully_sharded" or "tensor_parallel"; its attentions have kernels where a
            search may choose them.
        choose: kinds of choices to make, such as ``("sharding", "kernels")``; by
            default all, see :class:`PlannerSettings`.
        precision: "fp8" for FP8 products, see :class:`PlannerSettings`.
        cache_dir: folder of the measurements; by default the user's cache directory.
        settings: how much to measure, and a callback for progress.

    Raises:
        CfpError: the step, the arguments, the mesh, the pins or the budget cannot be
            planned; each message says what to do.
        KeyboardInterrupt: the user has interrupted. What was measured is kept, and the
            same call goes on from there.
    """
    how = settings_or_defaults(settings)
    if choose is not None:
        how = replace(how, choose=tuple(sorted(dimensions_of(choose))))
    if precision is not None:
        how = replace(how, precision=precision)
    options = PlanOptions(
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        memory_budget=memory_budget,
        pins=pins,
        preset=preset,
        cache_dir=cache_dir,
        settings=how,
    )
    if how.ray is not None:
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise CfpError(
                "A plan on a Ray cluster needs its mesh, which is not described: "
                "mesh=jax.sharding.AbstractMesh((4,), ('x',))."
            )
        return plan_step(plan, fn, args, kwargs, mesh, **vars(options))
    check_keywords(fn, kwargs, ["mesh", "quiet", *OPTIONS])
    variants = [
        Variant(name=name, fn=fn, args=args, kwargs=kwargs, mesh=one)
        for name, one in _meshes(mesh, how, preset).items()
    ]
    return find_fastest(run_passes, variants, options, quiet=quiet).plan


OPTIONS = tuple(signature(plan).parameters)[4:-1]  # not fn, args, mesh, quiet, kwargs


def _meshes(
    mesh: Mesh | DescribedMesh | AbstractMesh | None,
    settings: PlannerSettings,
    preset: str | None,
) -> Mapping[str, Mesh | DescribedMesh]:
    """The meshes to choose among, by name."""
    if isinstance(mesh, AbstractMesh):
        raise CfpError(
            "A mesh without devices is for PlannerSettings(ray=...). Pass a Mesh, or "
            "cfp.described(...) to plan for devices that are not here."
        )
    may = Dimension.MESH in settings.dimensions
    most_axes = 2 if may and preset is None else 1
    return {"": mesh} if mesh is not None else all_meshes(most_axes)


def plan_fastest(
    variants: Sequence[Variant],
    *,
    quiet: bool = False,
    leaner: Callable[[], Iterable[Variant]] = tuple,
    settings: PlannerSettings | None = None,
    **options: Any,
) -> Fastest:
    """Plans the best variants of a step, and keeps the fastest that fits in memory.

    All are estimated, and the best two planned; where choices are made by estimates
    anyway, the best; with a preset, all. A variant that cannot be planned is out, and
    the next takes its turn. When time is over, it makes do with those that are
    finished.

    Args:
        variants: what to choose from; each has a name of its own. They may differ in
            the mesh, the step and the arguments.
        quiet: whether no progress is shown, as for :func:`cfp.plan`.
        leaner: makes further variants, of which the first that can be planned is taken
            where none of the others fits in memory, unless one with a part of its
            state in host memory is faster.
        settings: as for :func:`cfp.plan`; its ``seconds`` hold for all together.
        options: ``static_argnums``, ``static_argnames``, ``donate_argnums``,
            ``donate_argnames``, ``memory_budget``, ``pins``, ``preset`` and
            ``cache_dir``, as for :func:`cfp.plan`, for every variant.

    Raises:
        CfpError: no variant can be planned.
        ProcessError: the processes of this program do not plan together.
    """
    how = settings_or_defaults(settings)
    given = PlanOptions(settings=how, **options)
    return find_fastest(run_passes, variants, given, leaner, quiet)
