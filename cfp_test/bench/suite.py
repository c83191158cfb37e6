"""Runs a suite: plan, then compete; one configuration after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.profiling.key import environment_parts
from cfp_test.bench import gate
from cfp_test.bench.case import session_of
from cfp_test.bench.compete import SuiteOptions, compete, what_is_done_with
from cfp_test.bench.competitors import (
    Competitor,
    Field,
    handwritten,
    mesh_text,
    planned,
)
from cfp_test.bench.configs import Config
from cfp_test.bench.rows import FORMAT, Row, configuration, pytorch_rows
from cfp_test.bench.watch import status_and_reason


def run_suite(
    name: str,
    configs: Sequence[Config],
    meshes: Sequence[Mesh],
    options: SuiteOptions,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Compares competitors on every configuration that the journal does not have.

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
        "configurations": options.journal.finished,
    }
    for config in configs[len(options.journal.finished) :]:
        options.tell(config.name)
        options.journal.finish(compare(config, meshes, options))
        keep(results)
        gc.collect()
        jax.clear_caches()
    return results


def compare(
    config: Config, meshes: Sequence[Mesh], options: SuiteOptions
) -> dict[str, Any]:
    """One configuration: all, in one process."""
    devices = meshes[0].size
    taking_part, failed = _field(config, meshes, options)
    rows = [*failed, *compete(config, taking_part.competitors, options)]
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
    """Lists competitors; and rows for what could not be planned."""
    competitors: list[Competitor] = []
    planning: dict[str, dict[str, float]] = {}
    comparison: list[dict[str, Any]] = []
    failed: list[Row] = []
    tflop = 0.0
    for mesh in meshes:
        on = mesh_text(mesh)
        label = f" on {on}" if len(meshes) > 1 else ""
        name = "planned" + label
        options.tell(f"planning for {on}")
        began = options.journal.planning_began(on)
        what = what_is_done_with(config, mesh, name, "")
        try:
            with options.watch.doing(
                what, "traced", f"{config.model}: {name}, analysed", "build"
            ):
                session = session_of(config.model, config.options, mesh)
            found = planned(
                config,
                session,
                options.workdir,
                options.settings,
                began=began,
                budget_bytes=options.budget_bytes,
                label=label,
                groups=options.groups,
            )
        except (CfpError, jax.errors.JaxRuntimeError) as error:
            _, reason = status_and_reason(error)
            failed.append(
                Row(
                    name=name,
                    group="planned",
                    mesh=on,
                    status="crashed",
                    reason=reason,
                )
            )
            continue
        competitors += found.competitors
        # Planned once more, after another process died, all of it is known.
        planning[on] = options.journal.planned(on, found.planning[on])
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
