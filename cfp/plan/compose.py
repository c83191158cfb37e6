"""Composes the plan of a race's winner; several processes take that of process 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType, Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import lay_out
from cfp.analysis.work import model_work
from cfp.devices.described import DescribedMesh
from cfp.plan.describe import (
    constraint_sites,
    describe_uncounted,
    plan_rows,
    plan_segments,
    undonated_arguments,
    uneven_arguments,
    whole_ops,
)
from cfp.plan.parts import type_text
from cfp.plan.plan import Plan
from cfp.presets.arguments import data_arguments
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.key import configuration
from cfp.program.outline import outline_of
from cfp.program.part import aval
from cfp.program.trace import host_calls
from cfp.race.programs import RaceOutcome, programs_of
from cfp.runtime.executables import ReusableExecutable
from cfp.search.jobs import constraints_of
from cfp.solution import prediction_of


def compose_plan(
    analysis: Analysis,
    mesh: Mesh | DescribedMesh,
    environment: Mapping[str, str],
    outcome: RaceOutcome,
    tuned: BuildEnvironment | None = None,
) -> Plan:
    """Composes the plan of a race's winner.

    Args:
        mesh: the devices, real or described.
        tuned: folder of the tuned kernels.
    """
    frame, winner = analysis.frame, outcome.winner
    assert winner is not None, "something fits"
    problem, rates = outcome.solution.problem, outcome.solution.rates
    program = frame.program
    layout = lay_out(frame, winner.choice)
    search: dict[str, Any] = dict(outcome.counts)
    if count := program.rewritten.erased_constraints:
        search["constraints_left_out"] = count
    if count := program.rewritten.wide_sums:
        search["wide_sums"] = count
    search |= model_work(frame, data_arguments(frame))
    if undonated := undonated_arguments(layout):
        search["undonated_bytes"] = sum(undonated.values())
    estimated = isinstance(mesh, DescribedMesh) or "strategies_estimated" in search
    size = prediction_of(analysis, problem, winner.choice).peak_bytes
    raced = None
    if outcome.built is not None and isinstance(mesh, Mesh):
        [one] = programs_of(analysis, [winner], ())
        raced = ReusableExecutable.of(program, mesh, one.job, outcome.built)
    rows = plan_rows(analysis, winner.choice, rates)
    constraints = constraints_of(analysis, winner.choice, winner.level)
    return Plan(
        fingerprint=program.fingerprint,
        mesh_axes=frame.mesh,
        arg_names=program.arg_names,
        arg_types=tuple(type_text(aval(program, v)) for v in program.args),
        arg_specs=tuple(layout.arg_spec(i) for i in range(len(program.args))),
        output_specs=layout.output_specs(),
        constraints=constraints,
        sites=constraint_sites(program, constraints),
        donated=tuple(a is not None for a in program.alias),
        winner=winner.name,
        predicted_ms=winner.predicted_ms,
        measured_ms=outcome.time_ms,
        peak_bytes=outcome.peak_bytes,
        options=dict(winner.options),
        level=winner.level,
        segments=plan_segments(analysis, winner.choice, problem),
        rows=rows,
        uneven=uneven_arguments(layout),
        undonated=tuple(undonated),
        uncounted=describe_uncounted(program),
        replicated_ops=whole_ops(layout, rates),
        host_callbacks_skipped=host_calls(program),
        race=tuple(outcome.rows),
        environment={**configuration(), **environment, **_explicit_axes(mesh)},
        outline=outline_of(program),
        search=search,
        products=program.rewritten.products,
        rung="estimated" if estimated and outcome.time_ms is None else "measured",
        predicted_bytes=size,
        mesh=mesh if isinstance(mesh, Mesh) else None,
        raced=raced,
        tuned=tuned,
    )


def _explicit_axes(mesh: Mesh | DescribedMesh) -> dict[str, str]:
    """Axes of the caller's mesh that results of a plan from a file are to have, too."""
    if isinstance(mesh, DescribedMesh):
        return {}
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    found = [name for name, kind in pairs if kind is AxisType.Explicit]
    return {"explicit_axes": ",".join(found)} if found else {}
