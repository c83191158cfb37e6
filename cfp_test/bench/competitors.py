"""Competitors: the plan, the presets, the cost model, and tables by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from alpa_test.cost_model import LINKS, AlphaBeta, Modelled, choose, fit
from alpa_test.handwritten.step import shard_step
from alpa_test.handwritten.tables import TABLES, Table
from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.strategies import block_strategies
from cfp.cli.session import Session
from cfp.context import open_context
from cfp.errors import CfpError
from cfp.passes.profile import profile
from cfp.passes.search import search
from cfp.plan.describe import plan_rows, plan_segments
from cfp.plan.parts import roles_text
from cfp.planner_settings import PlannerSettings
from cfp.program.trace import planning_mesh
from cfp.race.programs import programs_of
from cfp.race.race import race
from cfp.search.requests import Profiles
from cfp.solution import Candidate, Solution, prediction_of
from cfp.view.words import storage_text
from cfp_test.bench.case import Flat, Ready, make_choice, ready, session_of, tflop
from cfp_test.bench.configs import Config, small

GROUPS = ("planned", "handwritten", "cost_model", "preset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Competitor:
    """One side of a comparison.

    Attributes:
      name: in tables.
      group: one of `GROUPS`.
      mesh: its devices.
      make: compiles it: True for the small size, and with which compiler options.
      predicted_ms: what was predicted of it by profiles, if anything.
      identity: of the program, where the name does not say what was chosen.
    """

    name: str
    group: str
    mesh: Mesh
    make: Callable[[bool, Mapping[str, str]], Ready]
    predicted_ms: float | None = None
    identity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All that is compared in one configuration.

    Attributes:
      competitors: the plan first.
      planning: for each mesh that was planned for, counts and seconds.
      comparison: the plan beside the cost model's choice, as plain data.
      tflop: of one step.
    """

    competitors: list[Competitor]
    planning: dict[str, dict[str, float]]
    comparison: list[dict[str, Any]] = field(default_factory=list)
    tflop: float = 0.0


def mesh_text(mesh: Mesh) -> str:
    """A mesh as on the command line: `x=2,y=2`."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


# --------------------------------------------------------------------- by hand


def handwritten(config: Config, devices: int) -> list[Competitor]:
    """The tables for a model, each on a mesh of all devices."""
    found = []
    for table in TABLES[config.model]:
        if len(table.axes) == 2 and (devices < 4 or devices % 2):
            continue
        sizes = (devices,) if len(table.axes) == 1 else (devices // 2, 2)
        axes = tuple(zip(table.axes, sizes, strict=True))
        mesh = planning_mesh(platform.make_mesh(axes))
        found.append(
            Competitor(
                name=table.name,
                group="handwritten",
                mesh=mesh,
                make=partial(_make_by_hand, config, table, mesh),
            )
        )
    return found


def _make_by_hand(
    config: Config,
    table: Table,
    mesh: Mesh,
    is_small: bool,
    options: Mapping[str, str],
) -> Ready:
    sizes = config.options
    if is_small:
        sizes = small(config.model, sizes, mesh.size)
    sharded = shard_step(config.model, dict(sizes), table, mesh)
    tree = jax.tree.structure(sharded.args)

    def compiled(chosen: Mapping[str, str]) -> Flat:
        return Flat(sharded.lowered.compile(dict(chosen) or None), tree)

    shardings = jax.tree.leaves(sharded.shardings)
    return ready(table.name, compiled, sharded.args, shardings, options)


# --------------------------------------------------------------------- by cfp


@dataclass(frozen=True, slots=True)
class _Planned:
    """A configuration on a mesh, planned."""

    config: Config
    session: Session
    solution: Solution
    winner: Candidate
    profiles: Profiles
    seconds: float


def planned(
    config: Config,
    session: Session,
    workdir: Path,
    settings: PlannerSettings,
    *,
    began: float,
    budget_bytes: int | None = None,
    label: str = "",
    groups: Sequence[str] = GROUPS,
) -> Field:
    """Plans a configuration, and lets the cost model choose for the same program.

    Args:
      config: what to plan.
      session: its step, analysed.
      workdir: where measurements are kept.
      settings: of the planner.
      began: when planning did, as of `time.monotonic`.
      budget_bytes: memory of one device.
      label: put behind every name, where several meshes are planned for.
      groups: what is wanted.

    Raises:
      CfpError: there is no plan.
      KeyboardInterrupt: the user has ended it: half of it does not compare.
    """
    analysis = session.analysis
    with open_context(session.mesh, workdir, budget_bytes, settings) as context:
        profiles = profile(context, analysis)
        if profiles.interrupted:
            raise KeyboardInterrupt
        solution = search(context, analysis, profiles)
        outcome = race(context, analysis, solution)
        if outcome.interrupted:
            raise KeyboardInterrupt
        winner = outcome.winner
        done = _Planned(
            config,
            session,
            solution,
            winner,
            profiles,
            time.monotonic() - began,
        )
        found = [_entry(done, winner, "planned", "planned" + label)]
        comparison = []
        if "cost_model" in groups:
            modelled = _modelled(done, budget_bytes)
            for name, one in modelled.items():
                predicted = prediction_of(
                    analysis, solution.problem, one.choice
                ).time_ms
                made = Candidate(f"{name}{label}", one.choice, predicted)
                found.append(_entry(done, made, "cost_model", made.name))
                if (winner.level, winner.options) != (made.level, made.options):
                    as_planned = replace(
                        made,
                        name=f"{name}, told as planned{label}",
                        level=winner.level,
                        options=winner.options,
                    )
                    entry = _entry(done, as_planned, "cost_model", as_planned.name)
                    found.append(entry)
                comparison.append(_side_by_side(done, name + label, one, predicted))
        if "preset" in groups:
            found += [
                _entry(
                    done,
                    Candidate(
                        name,
                        choice,
                        prediction_of(analysis, solution.problem, choice).time_ms,
                    ),
                    "preset",
                    f"preset {name}{label}",
                )
                for name, choice in profiles.presets.items()
            ]
    counts = {**outcome.counts, "analysis_seconds": session.seconds}
    counts["planning_seconds"] = done.seconds
    return Field(
        competitors=found,
        planning={mesh_text(session.mesh): {k: float(v) for k, v in counts.items()}},
        comparison=comparison,
        tflop=tflop(session),
    )


def _entry(done: _Planned, candidate: Candidate, group: str, name: str) -> Competitor:
    [program] = programs_of(done.session.analysis, [candidate], ())
    return Competitor(
        name=name,
        group=group,
        mesh=done.session.mesh,
        identity=program.job.key.digest,
        make=partial(_make_by_cfp, done, candidate, name),
        predicted_ms=candidate.predicted_ms,
    )


def _make_by_cfp(
    done: _Planned,
    candidate: Candidate,
    name: str,
    is_small: bool,
    options: Mapping[str, str],
) -> Ready:
    session, config = done.session, done.config
    if is_small:
        sizes = small(config.model, config.options, session.mesh.size)
        tiny = session_of(config.model, sizes, session.mesh)
        choice = carry_over(candidate.choice, session.analysis, tiny.analysis)
        session, candidate = tiny, replace(candidate, choice=choice)
    return make_choice(session, replace(candidate, name=name), options)


def carry_over(choice: Choice, big: Analysis, little: Analysis) -> Choice:
    """A choice for the same model at another size.

    Raises:
      CfpError: the two programs do not have the same blocks, or not the same
        strategies.
    """
    shapes = [
        (len(a.frame.blocks), len(a.frame.groups), [s.blocks for s in a.segments])
        for a in (big, little)
    ]
    frame = little.frame
    if shapes[0] != shapes[1] or not all(
        strategy in block_strategies(frame.program, block, frame.mesh)
        for block, strategy in zip(frame.blocks, choice.blocks, strict=True)
    ):
        raise CfpError(
            "The choice cannot be checked at a small size: the small program has other "
            f"blocks or strategies ({shapes[0][:2]} and {shapes[1][:2]} blocks and "
            "groups of parameters)."
        )
    return choice


# ------------------------------------------------------------ by the cost model


def _modelled(done: _Planned, budget_bytes: int | None) -> dict[str, Modelled]:
    """Returns the model's choices with links by data sheet, and with fitted ones."""
    axes = done.session.analysis.frame.mesh
    prices: dict[str, AlphaBeta] = {}
    if done.session.mesh.devices.flat[0].platform != "cpu":
        link = "pcie" if _without_peers() else "nvlink"
        prices[f"cost model, {link}"] = AlphaBeta.uniform(axes, LINKS[link])
    prices["cost model, fitted"] = fit(done.profiles.rates)
    found: dict[str, Modelled] = {}
    for name, one in prices.items():
        modelled = choose(done.session.analysis, one, budget_bytes=budget_bytes)
        if all(modelled.choice != other.choice for other in found.values()):
            found[name] = modelled
    return found


def _without_peers() -> bool:
    return os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")


def _block_texts(analysis: Analysis, choice: Choice) -> list[tuple[str, str]]:
    """Each block's name, with how it is sharded, and its parameters stored."""
    segments = plan_segments(analysis, choice, None)
    return [
        (
            row.name,
            f"{roles_text(row.strategy)}; "
            + storage_text(segments[row.segment], short=True),
        )
        for row in plan_rows(analysis, choice)
    ]


def _side_by_side(
    done: _Planned, name: str, modelled: Modelled, predicted_ms: float | None
) -> dict[str, Any]:
    """Lists where the plan and the model differ, and what each believed of both."""
    analysis = done.session.analysis
    ours = _block_texts(analysis, done.winner.choice)
    theirs = _block_texts(analysis, modelled.choice)
    believed = modelled.formulation.believed_ms(done.winner.choice)
    return {
        "name": name,
        "solver_seconds": modelled.seconds,
        "solver_optimal": modelled.optimal,
        "model_believes_of_its_own_ms": modelled.cost_ms,
        "model_believes_of_the_plan_ms": believed,
        "profiles_predict_of_the_model_ms": predicted_ms,
        "profiles_predict_of_the_plan_ms": done.winner.predicted_ms,
        "differences": [
            {"block": name, "planned": mine, "cost_model": other}
            for (name, mine), (_, other) in zip(ours, theirs, strict=True)
            if mine != other
        ],
        "blocks": len(ours),
    }
