"""The public functions `plan` and `plan_fastest`, and the passes that they run.

analyze   step + mesh             -> Analyzed     `analyze_step` in :mod:`cfp.passes`
profile   Analyzed                -> Profiles     :mod:`cfp.passes`
search    Profiles                -> Solution     :mod:`cfp.passes`
race      Solution                -> RaceOutcome  :mod:`cfp.race.race`
complete  Analyzed + RaceOutcome  -> FoundPlan    `complete_plan` in :mod:`cfp.variants`
check     FoundPlan               -> `wrong_kernels`; then plan again without them

A profile has the time and memory of each segment's candidates, measured or estimated. A
solution has candidates of the race, whole programs; `preset_solution` makes it for a
preset by name, without search. `run_passes` runs the passes after *analyze*. Its
`race_until_fit` may search and race again if no candidate fits in memory, or if the
winner rematerializes though predictions saw no need. `find_fastest` in
:mod:`cfp.variants` analyzes the step; of several meshes or variants it estimates each,
calls `run_passes` usually for the best two, and races their plans.

CONTRIBUTING.md says where something new goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from itertools import compress
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from cfp.context import DetailedSettings, PlanContext, PlannerSettings, dimensions_of
from cfp.cost.described import DescribedMesh
from cfp.errors import CfpError, OptionError, brief, warn
from cfp.passes import (
    Analyzed,
    Pins,
    PlanOptions,
    preset_solution,
    profile,
    search,
    search_further,
)
from cfp.plan.plan import Plan
from cfp.platform import all_meshes
from cfp.printable import few
from cfp.program.calling import check_keywords
from cfp.program.jaxprs import mesh_around, unchecked
from cfp.race.race import race
from cfp.search.guided import Solution
from cfp.settings import Dimension
from cfp.variants import (
    Fastest,
    FoundPlan,
    Variant,
    complete_plan,
    find_fastest,
    wrong_kernels,
)
from cfp.view import words


def run_passes(analyzed: Analyzed, options: PlanOptions) -> FoundPlan:
    """Plans an analysed step on its mesh; again without kernels that prove wrong.

    Raises:
        MemoryBudgetError: no candidate fits in memory.
        CfpError: no candidate runs, or the program has no such preset.
    """
    started = time.perf_counter()
    if analyzed.step.inner_jit_donates:
        warn(
            "The jax.jit around the step donates arguments, and cfp does not. Give cfp "
            "donate_argnums or donate_argnames (--donate), too."
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
            allowed = context.defaults.replacing_for_memory.kernels  # And the usual.
            kernels = [kernel for kernel in allowed if kernel not in wrong]
            left = max(0.0, context.end - time.monotonic())
            settings = replace(options.settings, kernels=tuple(kernels), seconds=left)
            again = replace(analyzed, profiles=None)  # Made with the wrong kernels.
            found = run_passes(again, replace(options, settings=settings))
    notes = tuple(dict.fromkeys((*notes, *found.plan.site_checks)))
    made = analyzed.profiles.counts if analyzed.profiles else {}
    spent = analyzed.seconds + sum(n for k, n in made.items() if k.endswith("_seconds"))
    counts = {"trace_seconds": analyzed.seconds, **found.plan.search}
    counts["planning_seconds"] = spent + time.perf_counter() - started
    plan = replace(found.plan, site_checks=notes, search=counts)
    return replace(found, plan=plan)


def race_until_fit(
    context: PlanContext, analyzed: Analyzed, solution: Solution
) -> FoundPlan:
    """Races, searches again while that may help, and makes the plan or raises."""
    analysis = analyzed.analysis
    outcome = race(context, analysis, solution)
    while (again := search_further(context, analysis, outcome)) is not None:
        outcome = race(context, analysis, again).after(outcome)
    return complete_plan(context, analyzed, outcome)


@brief
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
        fn: a function of pytrees that ``jax.jit`` accepts, such as a training step.
        args, kwargs: arguments of the step, as arrays or ``jax.ShapeDtypeStruct`` s.
            Planning does not overwrite them.
        mesh: the devices; measuring assumes that all of their memory is free. By
            default that of ``jax.set_mesh``, else all devices, in the fastest mesh of
            one or two axes (of one, with a preset or if ``choose`` leaves out meshes).
            A :func:`cfp.described` mesh gives an estimate; ``plan.on(mesh)`` runs it.
            An `AbstractMesh` plans on a Ray cluster, with ``PlannerSettings(ray=...)``.
        quiet: True shows no progress; warnings stay. By default a terminal shows
            progress, and other outputs get lines on standard error.
        static_argnums, static_argnames: arguments that are not arrays.
        donate_argnums, donate_argnames: arguments that the step may overwrite, usually
            the training state.
        memory_budget: memory of each device that the plan may use, in bytes or as text
            such as "80GiB"; by default all memory. The compiled step fits in a given
            budget (as predicted on described devices). On GPUs 128 MiB of it stay free.
        pins: shardings that the plan must keep, by the argument's path or a glob:
            ``{"params/*/kernel": PartitionSpec(None, "x")}``. A string such as "x" is
            one axis, on the first dim.
        preset: name of a classic sharding to use without a search, such as
            "data_parallel" or "fully_sharded". Kernels may compute its attention.
        choose: kinds of choices to make, such as ``("sharding", "kernels")``; by
            default all, see :class:`PlannerSettings`.
        precision: a lower precision of large products, see :class:`PlannerSettings`.
        cache_dir: folder of the measurements; by default the user's cache directory.
        settings: limits of measuring, search and race; `progress` replaces the output.

    Raises:
        CfpError: the step, arguments, mesh, pins or budget cannot be planned.
        KeyboardInterrupt: the user interrupted. Measurements stay for later calls.
    """
    if isinstance(fn, Mesh) or not callable(fn):
        raise OptionError(
            f"cfp.plan takes the step first, got a {type(fn).__name__}. Write "
            "cfp.plan(step, *arguments, mesh=mesh)."
        )
    how = DetailedSettings.of(settings)
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
                "A plan on a Ray cluster needs a mesh, and not a described one. Pass "
                "mesh=jax.sharding.AbstractMesh((4,), ('x',))."
            )
        from cfp.cluster.on_ray import plan_step

        return plan_step(plan, fn, args, kwargs, mesh, **vars(options))
    check_keywords(fn, kwargs, ["mesh", "quiet", *OPTIONS])
    if isinstance(mesh, AbstractMesh):
        raise CfpError(
            "A mesh without devices is for PlannerSettings(ray=...). Pass a Mesh, or "
            "cfp.described(...) to plan for devices that are not here."
        )
    most_axes = 2 if Dimension.MESH in how.dimensions and preset is None else 1
    mesh = mesh_around() if mesh is None else mesh
    meshes = all_meshes(most_axes) if mesh is None else {"": mesh}
    variants = [
        Variant(name=name, fn=fn, args=args, kwargs=kwargs, mesh=one)
        for name, one in meshes.items()
    ]
    found = find_fastest(run_passes, variants, options, quiet=quiet).plan
    given = {n.partition("/")[0] for n in compress(found.arg_names, found.donated)}
    if whole := [x for x in found.uneven if x.split("/")[0].split()[0] not in given]:
        other = words.other_batches(found) or ["a size that it divides"]
        warn(
            f"The mesh does not divide {few(whole, most=8)}. Each device stores all "
            f"rows, and may compute padded parts. Pad the rows, or choose {other[-1]}."
        )
    return found


OPTIONS = tuple(signature(plan).parameters)[4:-1]  # not fn, args, mesh, quiet, kwargs


def plan_fastest(
    variants: Sequence[Variant],
    *,
    quiet: bool = False,
    leaner: Callable[[], Iterable[Variant]] = tuple,
    settings: PlannerSettings | None = None,
    **options: Any,
) -> Fastest:
    """Plans the best variants of a step, and keeps the fastest that fits in memory.

    All variants are estimated, and the best two are planned and raced. If estimates
    decide (on virtual or described devices), only the best is planned; with a preset,
    all are planned, none estimated. If a variant fails, the next best takes its place.

    Args:
        variants: steps with distinct names; they differ in mesh, step or arguments.
        quiet: True shows no progress, as for :func:`cfp.plan`.
        leaner: makes variants of less memory. If none of `variants` fits, nor the
            smallest with state in host memory, these are tried until one fits.
        settings: as for :func:`cfp.plan`; ``seconds`` limits all variants together.
        options: ``static_argnums``, ``static_argnames``, ``donate_argnums``,
            ``donate_argnames``, ``memory_budget``, ``pins``, ``preset`` and
            ``cache_dir``, as for :func:`cfp.plan`, for every variant.

    Raises:
        CfpError: no variant can be planned.
        ProcessError: this program's processes differ, or one has failed.
    """
    given = PlanOptions(settings=DetailedSettings.of(settings), **options)
    return find_fastest(run_passes, variants, given, leaner, quiet)
