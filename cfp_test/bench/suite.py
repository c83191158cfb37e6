"""Runs a suite: gate, time in turn, trace; one configuration after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.planner_parts import PlannerSettings
from cfp.profiling.builder import BuildEnvironment, is_out_of_memory, reason_of
from cfp.profiling.key import environment_parts
from cfp.profiling.runner import TimingOptions
from cfp_test.bench import clock, gate
from cfp_test.bench.case import Ready
from cfp_test.bench.competitors import (
    GROUPS,
    Competitor,
    Field,
    handwritten,
    mesh_text,
    planned,
)
from cfp_test.bench.configs import Config, small
from cfp_test.bench.rows import FORMAT, Row, best, configuration, pytorch_rows

# At a small size a compile takes far longer than a run.
_FAST_ON_CPU = {"xla_backend_optimization_level": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How to compare.

    Attributes:
      workdir: where measurements are kept; planning is as quick as it knows.
      settings: of the planner.
      rounds: how many turns each competitor gets.
      timing: one turn.
      groups: who takes part.
      only: of the hand-written strategies, those named; all if empty.
      budget_bytes: memory of one device.
      pytorch: rows that PyTorch's own runs wrote.
      trace: whether the plan and its best rival are traced.
      tell: told what is being done.
    """

    workdir: Path
    settings: PlannerSettings
    rounds: int = 5
    timing: TimingOptions = field(default_factory=lambda: clock.TURN)
    groups: Sequence[str] = GROUPS
    only: Sequence[str] = ()
    budget_bytes: int | None = None
    pytorch: Sequence[Mapping[str, Any]] = ()
    trace: bool = True
    tell: Callable[[str], None] = lambda _: None


def run_suite(
    name: str,
    configs: Sequence[Config],
    meshes: Sequence[Mesh],
    options: SuiteOptions,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compares competitors on every configuration.

    Args:
      name: of the suite.
      configs: what to compare on.
      meshes: those to plan for; the hand-written tables bring their own.
      options: how.
      keep: given the results so far after each configuration, to be saved.

    Returns:
      All results as JSON keeps them.
    """
    devices = list(meshes[0].devices.flat)
    results: dict[str, Any] = {
        "format": FORMAT,
        "suite": name,
        "date": time.strftime("%Y-%m-%d"),
        "environment": dict(environment_parts(devices)),
        "rounds": options.rounds,
        "gate": {"steps": gate.STEPS, "tolerance": gate.TOLERANCE},
        "configurations": [],
    }
    for config in configs:
        options.tell(config.name)
        results["configurations"].append(compare(config, meshes, options))
        keep(results)
        gc.collect()
        jax.clear_caches()
    return results


def compare(
    config: Config, meshes: Sequence[Mesh], options: SuiteOptions
) -> dict[str, Any]:
    """One configuration: everybody, in one process."""
    devices = meshes[0].size
    taking_part, failed = _field(config, meshes, options)
    rows = [*failed, *_compete(config, taking_part.competitors, options)]
    wanted = {"model": config.model, "options": config.options, "devices": devices}
    rows += pytorch_rows(options.pytorch, wanted)
    return configuration(
        name=config.name,
        model=config.model,
        options=config.options,
        devices=devices,
        rows=rows,
        planning=taking_part.planning,
        comparison=taking_part.comparison,
        tflop=taking_part.tflop,
    )


def _field(
    config: Config, meshes: Sequence[Mesh], options: SuiteOptions
) -> tuple[Field, list[Row]]:
    """Who takes part; and rows for what could not be planned."""
    competitors: list[Competitor] = []
    planning: dict[str, dict[str, float]] = {}
    comparison: list[dict[str, Any]] = []
    failed: list[Row] = []
    tflop = 0.0
    for mesh in meshes:
        label = f" on {mesh_text(mesh)}" if len(meshes) > 1 else ""
        options.tell(f"planning for {mesh_text(mesh)}")
        try:
            found = planned(
                config,
                mesh,
                options.workdir,
                options.settings,
                budget_bytes=options.budget_bytes,
                label=label,
                groups=options.groups,
            )
        except (CfpError, jax.errors.JaxRuntimeError) as error:
            row = Row(
                name="planned" + label,
                group="planned",
                mesh=mesh_text(mesh),
                status="crashed",
                reason=reason_of(error),
            )
            failed.append(row)
            continue
        competitors += found.competitors
        planning.update(found.planning)
        comparison += found.comparison
        tflop = found.tflop
    if "handwritten" in options.groups:
        competitors += [
            one
            for one in handwritten(config, meshes[0].size)
            if not options.only or one.name in options.only
        ]
    return (
        Field(
            competitors=competitors,
            planning=planning,
            comparison=comparison,
            tflop=tflop,
        ),
        failed,
    )


def _compete(
    config: Config, competitors: Sequence[Competitor], options: SuiteOptions
) -> list[Row]:
    rows = {c.name: _empty_row(c) for c in competitors}
    ready: dict[str, tuple[Ready, Mesh]] = {}
    if not competitors:
        return []
    environment = BuildEnvironment(autotune_dir=options.workdir / "autotune")
    check = _Gate(config, competitors[0].mesh, environment)
    for one in competitors:
        options.tell(f"checking {one.name}")
        rows[one.name] = check.row(one, rows[one.name])
    for one in competitors:
        if rows[one.name].status == "ok":
            options.tell(f"compiling {one.name}")
            rows[one.name], made = _build(one, rows[one.name], options)
            if made is not None:
                ready[one.name] = (made, one.mesh)
    records = clock.in_turn(ready, options.rounds, options.timing, options.tell)
    for name, record in records.items():
        rows[name] = replace(
            rows[name],
            status=record.status,
            reason=record.reason,
            samples_ms=record.samples_ms,
        )
    if options.trace:
        for name in _worth_tracing(list(rows.values())):
            options.tell(f"tracing {name}")
            found = clock.traced(*ready[name])
            rows[name] = replace(rows[name], trace=asdict(found) if found else None)
    return list(rows.values())


def _empty_row(one: Competitor) -> Row:
    return Row(
        name=one.name,
        group=one.group,
        mesh=mesh_text(one.mesh),
        status="ok",
        predicted_ms=one.predicted_ms,
    )


def _worth_tracing(rows: Sequence[Row]) -> list[str]:
    """The plan, and the best of each group that ran here."""
    found = [best(rows, group) for group in GROUPS]
    return [row.name for row in found if row is not None]


class _Gate:
    """Checks competitors at a small size against one device."""

    def __init__(
        self, config: Config, mesh: Mesh, environment: BuildEnvironment
    ) -> None:
        where = mesh.devices.flat[0].platform
        environment.prepare(where)
        self._options = _FAST_ON_CPU if where == "cpu" else environment.options(where)
        with jax.default_matmul_precision("highest"):
            self._reference = gate.on_one_device(
                config.model,
                small(config.model, config.options, mesh.size),
                self._options,
            )

    def row(self, one: Competitor, row: Row) -> Row:
        """The row, with how far its losses are off."""
        made: Ready | None = None
        try:
            with jax.default_matmul_precision("highest"):
                made = one.make(True, self._options)
                losses = gate.losses_of(made, one.mesh, self._reference)
        except Exception as error:  # Compilers' errors have no type in common.
            reason = f"at the small size: {reason_of(error)}"
            return replace(row, status=_status(error), reason=reason)
        gap = gate.largest_gap(losses, self._reference)
        row = replace(row, loss_gap=gap)
        if gap <= gate.TOLERANCE:
            return row
        reason = (
            f"its losses are off by {gap:.2g} from one device's, more than "
            f"{gate.TOLERANCE:g}: not timed"
        )
        return replace(row, status="wrong", reason=reason)


def _build(
    one: Competitor, row: Row, options: SuiteOptions
) -> tuple[Row, Ready | None]:
    """Compiles a competitor at full size; why it cannot be is a row like any other."""
    environment = BuildEnvironment(autotune_dir=options.workdir / "autotune")
    where = one.mesh.devices.flat[0].platform
    environment.prepare(where)
    try:
        made = one.make(False, environment.options(where))
    except Exception as error:  # As above.
        return replace(row, status=_status(error), reason=reason_of(error)), None
    sent: dict[str, int] = {}
    for found in made.built.collectives:
        sent[found.kind] = sent.get(found.kind, 0) + found.bytes * found.count
    row = replace(
        row,
        peak_bytes=made.built.peak_bytes,
        build_seconds=made.built.build_seconds,
        collectives=sent,
    )
    return row, made


def _status(error: Exception) -> str:
    return "out_of_memory" if is_out_of_memory(error) else "compile_error"
