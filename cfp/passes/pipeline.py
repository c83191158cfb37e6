"""The passes in a row: the first two and the last two are here, as functions.

trace      step + arguments        -> Program
analyze    Program + mesh          -> Analysis
profile    Analysis                -> Profiles     :mod:`cfp.passes.profile`
search     Analysis + Profiles     -> Solution     :mod:`cfp.passes.search`
race       Analysis + Solution     -> RaceOutcome  :mod:`cfp.race.race`
compose    Analysis + RaceOutcome  -> Plan         :mod:`cfp.plan.compose`

Of arguments types count, and the values of scalars and small masks
(:mod:`cfp.program.step`). :mod:`cfp.find` runs the passes one after another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.analysis.analyze import Analysis, analyze, resolve_pins
from cfp.context import PlanContext
from cfp.devices.described import DescribedMesh, slice_of
from cfp.plan.compose import compose_plan
from cfp.plan.plan import Plan
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.key import environment_parts
from cfp.program.graph import PARTITIONED
from cfp.program.step import FlatStep
from cfp.program.trace import Lowering, planning_mesh, trace
from cfp.race.programs import RaceOutcome
from cfp.race.race import race
from cfp.search.requests import Profiles
from cfp.solution import Solution

Pins = Mapping[str, PartitionSpec | NamedSharding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyzed:
    """A step, traced and analysed.

    Attributes:
        mesh: the devices, which may only be described.
        analysis: its blocks and segments.
        seconds: how long tracing and analysing took, and making the profiles.
        profiles: the profile pass's, if an estimate has made them.
    """

    mesh: Mesh | DescribedMesh
    lowering: Lowering
    analysis: Analysis
    seconds: float
    profiles: Profiles | None = None


def analyze_step(
    step: FlatStep, mesh: Mesh | DescribedMesh, pins: Pins | None = None
) -> Analyzed:
    """Traces and analyses a step; on several meshes of as many devices, traces it once.

    Raises:
        CfpError: it cannot be traced, or the pins do not fit.
    """
    started = time.perf_counter()
    axes = tuple(mesh.shape.items())
    where = mesh.abstract if isinstance(mesh, DescribedMesh) else planning_mesh(mesh)
    devices = type(where), prod(mesh.shape.values())
    if devices in step.programs:
        program, lowering = step.programs[devices]
    else:
        program, lowering = trace(step, where)
        calls = (op.manual or PARTITIONED.search(op.attributes) for op in program.ops)
        if not any(calls):
            step.programs[devices] = program, lowering  # Nothing is for one mesh.
    pinned = resolve_pins(pins or {}, program, axes)
    analysis = analyze(program, axes, pinned, outer_axes(mesh))
    return Analyzed(
        mesh=mesh,
        lowering=lowering,
        analysis=analysis,
        seconds=time.perf_counter() - started,
    )


def outer_axes(mesh: Mesh | DescribedMesh) -> frozenset[str]:
    """Axes along which hosts differ, of a slice of several hosts the first."""
    if isinstance(mesh, DescribedMesh):
        return mesh.outer
    devices = [*mesh.devices.flat]
    known = dict(environment_parts(devices)).get("hosts", "0")  # None of one process.
    hosts = np.resize(known.split(","), mesh.devices.shape)
    names = enumerate(mesh.axis_names)
    found = [n for i, n in names if (hosts != hosts.take([0], i)).any()]
    return frozenset(found[:1] if slice_of(devices) else found)


def decide(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    last_resort: bool = True,
) -> tuple[Plan, RaceOutcome]:
    """The race, and the plan of what has won it.

    Args:
        last_resort: whether the smallest are compiled where no candidate fits.

    Raises:
        NoneFits: none does, and the smallest are not to be compiled.
        MemoryBudgetError: nothing fits in memory.
        CfpError: nothing runs.
    """
    outcome = race(context, analysis, solution, last_resort)
    plan = compose_plan(
        analysis,
        context.mesh,
        dict(context.environment),
        outcome,
        solution.problem,
        BuildEnvironment.beside(context.store.path),
        solution.rates,
    )
    return plan, outcome
