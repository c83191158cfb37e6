"""Arrival: times a plan from elsewhere on the devices that it is for.

The plan and the presets take turns. The result is the error of the prediction, and the
fastest program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.context import PlannerSettings, open_context
from cfp.errors import CfpError
from cfp.plan.describe import compose_plan
from cfp.plan.parts import Figures, check_arguments
from cfp.plan.plan import Plan
from cfp.presets.presets import presets
from cfp.printable import counted
from cfp.profiling.record import Parts, ProfileKey, environment_parts
from cfp.profiling.tasks import Limits, Progress
from cfp.program.read import other_program
from cfp.program.step import FlatStep
from cfp.race.programs import (
    RaceOutcome,
    RaceProgram,
    RaceResult,
    programs_of,
    race_row,
)
from cfp.race.race import Race
from cfp.race.turns import race_programs
from cfp.runtime.execute import resolved
from cfp.settings import ConstraintLevel
from cfp.solution import RACE_SECONDS, Candidate, Solution
from cfp.view.words import OTHER_DEVICES, VERIFIED, WAS_DESCRIBED, basis_text


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The times of a plan and the presets on its devices.

    Attributes:
        best: the fastest of all that were timed, measured: this plan, or a preset.
        measured_ms: median step time of the plan, or None if it did not run.
        rows: all that were timed, the fastest first.
    """

    plan: Plan
    best: Plan
    measured_ms: float | None
    rows: tuple[RaceResult, ...] = field(repr=False)
    seconds: float

    @property
    def off(self) -> float | None:
        """Predicted over measured, less one; None if unknown, or of other devices."""
        predicted_ms, found_ms = self.plan.predicted_ms, self.measured_ms
        is_other = OTHER_DEVICES in self.best.search
        if is_other or predicted_ms is None or found_ms is None:
            return None
        return predicted_ms / found_ms - 1

    @property
    def holds(self) -> bool:
        """True if nothing that was timed is faster than the plan."""
        return self.best.winner == self.plan.winner


def verify(
    plan: Plan,
    analysis: Analysis,
    step: FlatStep,
    out_tree: Any,
    *,
    mesh: Mesh,
    seconds: float = 60.0,
    cache_dir: str | Path | None = None,
    progress: Callable[[Progress | str], None] | None = None,
) -> Verified:
    """Times a plan and the presets.

    Args:
        seconds: time limit; programs that are not compiled by then are left out. A run
            on other devices than the plan's has no limit of its own.

    Raises:
        PlanMismatch: the plan is for another step.
        CfpError: no program runs.
    """
    program = analysis.frame.program
    environment = dict(environment_parts([*mesh.devices.flat]))
    if plan.fingerprint != program.fingerprint:
        check_arguments(plan.arg_names, plan.arg_types, step)
        raise other_program(program, plan.outline, plan.environment, environment)
    where = (*environment.items(), ("race", "verified"))
    marks = _marks(plan, environment)
    # Times that other devices need say nothing of a run that hangs.
    limits = Limits(run_seconds=inf) if OTHER_DEVICES in marks else Limits()
    settings = PlannerSettings(seconds=seconds, progress=progress, limits=limits)
    with open_context(mesh, cache_dir, settings=settings) as context:
        race = Race(context, analysis, Solution(()))
        mine = _program(plan, analysis, mesh, where)
        programs = [mine, *_others(mine, plan.level, analysis, where)]
        results = race_programs(race.builder, programs, rounds=2)
    best, own = min(results, key=lambda result: result.time_ms), results[0]
    if not best.ran:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in results)
        raise CfpError(
            "Neither the plan nor a preset runs on these devices: "
            f"{reasons[:2000]}. Plan these devices with cfp plan."
        )
    made = replace(plan, environment=environment)
    if best is not own:
        outcome = RaceOutcome(
            solution=race.solution,
            winner=best.candidate,
            built=race.built.get(best.program.identity),
            counts={RACE_SECONDS: race.seconds},
        )
        made = compose_plan(analysis, mesh, environment, outcome)
    made = replace(
        made,
        measured_ms=best.time_ms,
        peak_bytes=best.peak_bytes,
        figures=replace(made.figures or Figures(), budget_bytes=context.budget_bytes),
        rung="measured",
        race=tuple(map(race_row, results)),
        search={**made.search, **marks},
        mesh=mesh,
    )
    return Verified(
        plan=plan,
        best=made.bound_to(step, out_tree),
        measured_ms=median(own.samples_ms) if own.ran else None,
        rows=tuple(sorted(results, key=lambda result: result.time_ms)),
        seconds=race.seconds,
    )


def _marks(plan: Plan, here: Mapping[str, str]) -> dict[str, float]:
    """Marks of a plan that these devices have verified: where it came from."""
    kind = plan.environment.get("device_kind", here["device_kind"])
    marks = {
        VERIFIED: True,
        WAS_DESCRIBED: "described" in plan.environment or WAS_DESCRIBED in plan.search,
        OTHER_DEVICES: OTHER_DEVICES in plan.search or kind != here["device_kind"],
    }
    return {name: 1.0 for name, holds in marks.items() if holds}


def _others(
    mine: RaceProgram, level: ConstraintLevel, analysis: Analysis, environment: Parts
) -> list[RaceProgram]:
    """The presets' programs, without the plan's own under another name."""

    def content(program: RaceProgram) -> tuple:
        job = program.job
        return job.in_specs, job.out_specs, job.options, job.constraints

    every = [Candidate(*named) for named in presets(analysis.frame).items()]
    alike = programs_of(analysis, [replace(c, level=level) for c in every], environment)
    others = programs_of(analysis, every, environment)
    pairs = zip(others, alike, strict=True)
    return [one for one, same in pairs if content(same) != content(mine)]


def _program(
    plan: Plan, analysis: Analysis, mesh: Mesh, environment: Parts
) -> RaceProgram:
    """Makes the whole program under a plan from elsewhere, without its choice.

    Raises:
        PlanMismatch: a kernel of the plan cannot compute its part.
    """
    frame = analysis.frame
    any_choice = next(iter(presets(frame).values()))
    blank = Candidate(plan.winner, any_choice, plan.predicted_ms, options=plan.options)
    [program] = programs_of(analysis, [blank], environment)
    job, constraints = program.job, resolved(frame.program, mesh, plan.constraints)
    argument = {value: i for i, value in enumerate(frame.program.args)}
    output = {value: i for i, value in enumerate(frame.program.outputs)}
    digest = hashlib.sha256(plan.as_in_file().to_json().encode()).hexdigest()
    job = replace(
        job,
        key=ProfileKey((*job.key.parts, ("plan", digest))),
        constraints=constraints,
        in_specs=tuple(plan.arg_specs[argument[v]] for v in job.part.inputs),
        out_specs=tuple(plan.output_specs[output[v]] for v in job.part.outputs),
        choice="",
    )
    return replace(program, job=job)


def verified_data(found: Verified) -> Mapping[str, Any]:
    """Makes plain data of a verification."""
    return {
        "plan": found.plan.winner,
        "rung": found.plan.rung,
        "predicted_ms": found.plan.predicted_ms,
        "measured_ms": found.measured_ms,
        "off": found.off,
        "fastest": found.best.winner,
        "fastest_ms": found.best.measured_ms,
        "predicted_bytes": found.plan.predicted_bytes,
        "peak_bytes": found.best.peak_bytes if found.holds else None,
        "seconds": found.seconds,
        "rows": [asdict(race_row(row)) for row in found.rows],
    }


def verified_text(found: Verified) -> Sequence[str]:
    """Formats a verification in a few lines."""
    plan, off, time_ms = found.plan, found.off, found.measured_ms
    does = "does not run here" if time_ms is None else f"takes {time_ms:.3f} ms"
    lines = [f"The plan {plan.winner!r} {does}."]
    if plan.predicted_ms is not None and time_ms is not None:
        how_far = "of other devices, with which times of these are not compared"
        how_far = how_far if off is None else f"off by {off:+.1%}"
        lines.append(
            f"Predicted were {plan.predicted_ms:.3f} ms, {basis_text(plan)}: {how_far}."
        )
    if late := [row for row in found.rows if row.is_skipped]:
        count = counted(len(late), "other was", "others were")
        lines.append(f"{count} not compiled: --seconds gives more time.")
    others = sum(row.ran for row in found.rows) - (time_ms is not None)
    if not found.holds:
        fastest = f"{found.best.winner!r}: {found.best.measured_ms:.3f} ms"
        lines.append(f"Faster is {fastest}. It is what -o writes.")
    elif others:
        count = counted(others, "other that ran is", "others that ran are")
        lines.append(f"{count} slower, or as fast.")
    else:
        lines.append("Nothing else ran, so that nothing is known to be faster.")
    return lines
