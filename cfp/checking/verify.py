"""The command ``cfp verify``: times a saved plan and presets on JAX's devices.

The plan and presets run in turn: propagated ones at their constraint levels in a race,
others at the plan's. The result is the prediction's error, and the fastest program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.layout import Frame
from cfp.analysis.presets import named_choices
from cfp.context import PlannerSettings, open_context
from cfp.errors import CfpError
from cfp.passes import Analyzed
from cfp.plan.describe import compose_plan
from cfp.plan.execute import resolved
from cfp.plan.parts import Figures, check_arguments
from cfp.plan.plan import Plan
from cfp.printable import counted
from cfp.profiling.builder import Job
from cfp.profiling.record import ProfileKey, environment_parts
from cfp.profiling.tasks import Limits, Progress
from cfp.program.read import other_program
from cfp.race.programs import (
    TOO_LATE,
    RaceOutcome,
    named_candidates,
    programs_of,
    race_row,
)
from cfp.race.race import Race
from cfp.race.turns import race_programs
from cfp.search.guided import Candidate, Solution
from cfp.settings import ConstraintLevel
from cfp.view.words import (
    OTHER_DEVICES,
    VERIFIED,
    WAS_DESCRIBED,
    predicted_how,
    sentence,
)


def verify(
    plan: Plan,
    analyzed: Analyzed,
    *,
    seconds: float = 60.0,
    cache_dir: str | Path | None = None,
    progress: Callable[[Progress | str], None] | None = None,
) -> Plan:
    """Times a plan, and presets that differ from it.

    Args:
        seconds: time limit. Programs not begun by then do not run, others once at
            least. Each run has a limit, too, unless the plan is for other devices.

    Returns:
        Plan of the fastest program; `race` has all results, the given plan's first.

    Raises:
        PlanMismatch: the plan is for another step.
        CfpError: neither the plan nor a preset runs.
    """
    analysis, mesh = analyzed.analysis, analyzed.mesh
    assert isinstance(mesh, Mesh), "programs run on its devices"
    program = analysis.frame.program
    environment = dict(environment_parts([*mesh.devices.flat]))
    if plan.fingerprint != program.fingerprint:
        check_arguments(plan.arg_names, plan.arg_types, analyzed.step)
        raise other_program(program, plan.outline, plan.environment, environment)
    where = (*environment.items(), ("race", "verified"))
    kind = plan.environment.get("device_kind", environment["device_kind"])
    is_other = OTHER_DEVICES in plan.search or kind != environment["device_kind"]
    was_described = "described" in plan.environment or WAS_DESCRIBED in plan.search
    # The predicted time is of other devices: it cannot show that a run hangs.
    limits = Limits(run_seconds=inf) if is_other else Limits()
    settings = PlannerSettings(seconds=seconds, progress=progress, limits=limits)
    with open_context(mesh, cache_dir, settings=settings) as context:
        race = Race(context, analysis, Solution(()))
        shared = context.defaults.shared_options
        # Presets have them if the plan has; a user or the race may have left them out.
        options = shared if shared.items() <= plan.options.items() else {}
        every = named_candidates(named_choices(analysis.frame), [*ConstraintLevel])
        others = [
            replace(o, options=options, level=plan.level if o.is_preset else o.level)
            for o in every
        ]
        of_plan = plan.winner, others[0].choice, plan.predicted_ms, plan.level
        like = Candidate(*of_plan, plan.options)
        mine, *rest = programs_of(analysis, [like, *others], where)
        mine = replace(mine, job=_job_under(plan, mine.job, analysis.frame, mesh))
        content = attrgetter("in_specs", "out_specs", "options", "constraints")
        rest = [one for one in rest if content(one.job) != content(mine.job)]
        results = race_programs(race.builder, [mine, *rest], rounds=2)
    best = min(results, key=lambda result: result.time_ms)
    if not best.ran:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in results)
        raise CfpError(
            "Neither the plan nor a preset runs on these devices: "
            f"{reasons[:2000]}. Plan for these devices with cfp plan."
        )
    made = replace(plan, environment=environment)
    if best is not results[0]:
        outcome = RaceOutcome(
            solution=race.solution,
            winner=best.candidate,
            built=race.built.get(best.program.identity),
        )
        made = compose_plan(analysis, mesh, environment, outcome)
    marks = {WAS_DESCRIBED: was_described, OTHER_DEVICES: is_other}
    marks = {name: 1.0 for name, holds in marks.items() if holds}
    search = {**made.search, **marks, VERIFIED: race.seconds}
    search.pop("race_cached", None)  # Said of the race of planning.
    made = replace(
        made,
        measured_ms=best.time_ms,
        peak_bytes=best.peak_bytes,
        figures=replace(made.figures or Figures(), budget_bytes=context.budget_bytes),
        rung="measured",
        race=tuple(map(race_row, results)),
        search=search,
        mesh=mesh,
    )
    return made.bound_to(analyzed.step, analyzed.lowering.out_tree)


def _job_under(plan: Plan, job: Job, frame: Frame, mesh: Mesh) -> Job:
    """Returns a job with a plan's shardings and constraints, and a key of its own."""
    argument = dict(zip(frame.program.args, plan.arg_specs, strict=True))
    output = dict(zip(frame.program.outputs, plan.output_specs, strict=True))
    digest = hashlib.sha256(plan.as_in_file().to_json().encode()).hexdigest()
    return replace(
        job,
        key=ProfileKey((*job.key.parts, ("plan", digest))),
        constraints=resolved(frame.program, mesh, plan.constraints),
        in_specs=tuple(argument[v] for v in job.part.inputs),
        out_specs=tuple(output[v] for v in job.part.outputs),
        choice="",  # Unknown, so that no other program shares this one's records.
    )


def _off(plan: Plan, best: Plan) -> float | None:
    """Predicted / measured time - 1; None if a time is unknown or of other devices."""
    predicted_ms, found_ms = plan.predicted_ms, best.race[0].time_ms
    if OTHER_DEVICES in best.search or predicted_ms is None or found_ms is None:
        return None
    return predicted_ms / found_ms - 1


def verified_data(plan: Plan, best: Plan) -> Mapping[str, Any]:
    """Result of a verification as JSON data; `best` is returned by `verify`.

    "off" is predicted over measured time, less 1; None if they do not compare.
    """
    return {
        "plan": plan.winner,
        "rung": plan.rung,
        "predicted_ms": plan.predicted_ms,
        "measured_ms": best.race[0].time_ms,
        "off": _off(plan, best),
        "fastest": best.winner,
        "fastest_ms": best.measured_ms,
        "predicted_bytes": plan.predicted_bytes,
        "peak_bytes": best.race[0].peak_bytes,
        "seconds": best.search[VERIFIED],
        "rows": [*map(asdict, best.race)],
    }


def verified_text(plan: Plan, best: Plan) -> Sequence[str]:
    """Formats a verification in a few lines; see `verified_data`."""
    off, time_ms, others = _off(plan, best), best.race[0].time_ms, best.race[1:]
    does = "does not run here" if time_ms is None else f"takes {time_ms:.3f} ms"
    lines = [f"The plan {plan.winner!r} {does}."]
    if plan.predicted_ms is not None and time_ms is not None:
        how_far = "not compared, since the prediction is for other devices"
        how_far = how_far if off is None else f"off by {off:+.1%}"
        how = sentence(predicted_how(plan))
        lines.append(f"{how}: {plan.predicted_ms:.3f} ms, {how_far}.")
    if late := sum(row.note == TOO_LATE for row in others):
        count = counted(late, "other program was", "other programs were")
        lines.append(f"{count} not compiled: --seconds gives more time.")
    slower = sum(row.time_ms is not None for row in others)
    if best.measured_ms != time_ms:
        fastest = f"{best.winner!r}: {best.measured_ms:.3f} ms"
        lines.append(f"The fastest is {fastest}. -o writes this plan.")
    elif slower:
        count = counted(slower, "other program", "other programs")
        lines.append(f"{count} ran, none faster.")
    else:
        lines.append("No other program ran, so a faster one is not known.")
    return lines
