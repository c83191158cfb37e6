"""Plans a model under memory budgets from too small to plenty, and measures the plans.

    python cfp_test/scripts/budgets.py TARGET [TARGET'S OPTIONS] [--mesh x=2]
        [--count 20] [--steps 10] [--seconds S] [--per-kind N] [--workdir DIR]
        [--plain] [--json FILE] [--platform cpu]

What it shows, or does not: the memory that devices really used stays within the
budget, time never rises with more memory, and where nothing fits the error names a
budget in which something does.

Two processes, one after the other. The first plans: without a budget, with one that is
absurdly small, then with ``--count`` budgets in ascending order, from below the
smallest that should do to above what the fastest plan needs, all with one store. Then
all plans that differ are timed in one race, in turns: times of two races differ by
drift alone. The second process runs them, from the smallest budget up: the high-water
mark of a device never falls, so that each must leave it within its own budget.
Virtual CPU devices have none; what the compiler says stands in for it there.

``--plain`` races presets with constraints on every value alone, and no compiler
options. ``--seconds`` ends the planning of further budgets, and names them. Prints a
line as each thing is done, a table, and which parts of the claim hold. ``--json`` gets
a line for each, all samples included, as soon as it is known.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.tree_util import tree_unflatten

from cfp import platform
from cfp.checking.trial import run_trial
from cfp.cli.session import open_target
from cfp.errors import MemoryBudgetError
from cfp.find import FoundPlan, PlanOptions, find_plan
from cfp.plan.plan import Plan
from cfp.planner_settings import DetailedSettings
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.inputs import InputKind, above_zero, make_inputs
from cfp.profiling.key import environment_parts
from cfp.profiling.store import ProfileStore, store_path
from cfp.program.signature import aval
from cfp.program.trace import planning_mesh, trace
from cfp.race.compile import Builder
from cfp.race.programs import programs_of
from cfp.race.turns import race_programs
from cfp.settings import ConstraintLevel
from cfp.targets import Target
from cfp.units import format_bytes

# Nothing fits in this; the error says what would.
_ABSURD_BYTES = 1024
# How far the budgets reach beyond the smallest that should do, and the fastest plan's.
_BELOW, _ABOVE = 0.85, 1.1
# Times of one and the same plan differ by as much from race to race.
_NOISE = 0.02

Row = dict[str, Any]


# ------------------------------------------------------------------------ pure parts


def spread(least: int, most: int, count: int) -> list[int]:
    """Budgets at equal distances, from below the least to above the most."""
    low, high = _BELOW * min(least, most), _ABOVE * max(least, most)
    return [round(low + (high - low) * i / (count - 1)) for i in range(count)]


def largest_rise(times: Sequence[tuple[int, float]]) -> float:
    """By which share time rises at most from some budget to a larger one.

    Args:
        times: budgets in bytes, and milliseconds; in any order.
    """
    best, rise = math.inf, 0.0
    for _, time_ms in sorted(times):
        rise = max(rise, time_ms / best - 1.0)
        best = min(best, time_ms)
    return rise


def verdict(rows: Iterable[Mapping[str, Any]]) -> Row:
    """Judges the parts of the claim by the lines of a run; None where none is known.

    Every number is of the worst case.
    """
    rows = list(rows)
    plans = [r for r in rows if r["what"] in ("budget", "smallest")]
    fit = [r for r in plans if r["feasible"]]
    runs = {r["plan"]: r for r in rows if r["what"] == "measured"}
    raced = {r["plan"]: r["time_ms"] for r in rows if r["what"] == "raced"}
    compiled = [(r["peak_bytes"], r["budget_bytes"]) for r in fit]
    used = [
        (max(run["peaks_bytes"]), run["budget_bytes"])
        for run in runs.values()
        if run["peaks_bytes"] and run["budget_bytes"] is not None
    ]
    own = [(r["budget_bytes"], r["measured_ms"]) for r in fit if r["measured_ms"]]
    one = [(r["budget_bytes"], raced[r["plan"]]) for r in fit if r["plan"] in raced]
    named = {r["least_bytes"] for r in plans if not r["feasible"]}
    tried = {r["budget_bytes"]: r["feasible"] for r in plans}
    wrong = sorted(least for least in named if tried.get(least) is False)
    untried = sorted(least for least in named if least not in tried)
    return {
        "what": "verdict",
        "feasible": len(fit),
        "infeasible": len(plans) - len(fit),
        "distinct_plans": len({r["plan"] for r in fit}),
        "compiled_share": max((a / b for a, b in compiled), default=None),
        "used_share": max((a / b for a, b in used), default=None),
        "rise_own_races": largest_rise(own) if own else None,
        "rise_one_race": largest_rise(one) if one else None,
        "smallest_named": len(named),
        "smallest_infeasible": wrong,
        "smallest_untried": untried,
    }


# -------------------------------------------------------------------------- planning


class _Lines:
    """Writes the lines to the working folder, to ``--json``, and to people."""

    def __init__(self, options: argparse.Namespace, target: Sequence[str]) -> None:
        self._files = [_lines_file(options.workdir)]
        if options.json:
            self._files.append(options.json)
        self._target = list(target)

    def add(self, row: Row) -> None:
        """Appends a line, and prints it without its long parts."""
        for path in self._files:
            with path.open("a") as file:
                file.write(json.dumps({"target": self._target, **row}) + "\n")
        short = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
        print(json.dumps(short), flush=True)


def plan_all(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """The first process."""
    started = time.perf_counter()
    target, mesh = _open(options, rest)
    lines = _Lines(options, [options.target, *rest])
    step = target.flatten()
    settings = DetailedSettings(per_kind=options.per_kind)
    if options.plain:
        settings = replace(
            settings,
            constraint_levels=(ConstraintLevel.EVERYTHING,),
            compiler_options={},
        )
    found: dict[str, FoundPlan] = {}

    def plan(what: str, budget: int | None) -> Row:
        begun = time.perf_counter()
        row: Row = {"what": what, "budget_bytes": budget}
        try:
            how = PlanOptions(
                memory_budget=budget, cache_dir=options.workdir, settings=settings
            )
            made = find_plan(step, mesh, how)
        except MemoryBudgetError as error:
            row |= {"feasible": False, "least_bytes": error.smallest_feasible_bytes}
            row["message"] = str(error)
        else:
            name = _digest(made.plan)
            if name not in found:
                found[name] = made
                made.plan.save(options.workdir / f"{name}.json")
            row |= {"feasible": True, "plan": name, **_row_of(made.plan)}
        row["seconds"] = time.perf_counter() - begun
        lines.add(row)
        return row

    first, absurd = plan("free", None), plan("budget", _ABSURD_BYTES)
    low, high = absurd["least_bytes"], first["peak_bytes"]
    # What an error names takes its place among the others: what was compiled for a
    # smaller budget is known to do for a larger one.
    todo = [(low, "smallest")]
    todo += [(budget, "budget") for budget in spread(low, high, options.count)]
    heapq.heapify(todo)
    named = {low}
    while todo:
        budget, what = heapq.heappop(todo)
        if time.perf_counter() - started > options.seconds:
            lines.add({"what": "left out", "budget_bytes": budget})
            continue
        row = plan(what, budget)
        least = None if row["feasible"] else row["least_bytes"]
        if least is not None and least not in named:
            named.add(least)
            heapq.heappush(todo, (least, "smallest"))
    for row in _race_all(found, options.workdir):
        lines.add(row)


def _race_all(found: Mapping[str, FoundPlan], workdir: Path) -> list[Row]:
    """Times all plans in turns, so that their times compare."""
    some = next(iter(found.values()))
    mesh = some.plan.mesh
    assert mesh is not None, "a new plan has a mesh"
    field = hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()
    where = ("race", f"between budgets {field}")
    entries = [
        replace(one.winner, name=name, predicted_ms=one.plan.measured_ms)
        for name, one in found.items()
    ]
    environment = (*environment_parts(list(mesh.devices.flat)), where)
    with ProfileStore(store_path(workdir)) as store:
        program = some.analysis.frame.program
        builder = Builder(program=program, mesh=mesh, store=store)
        programs = programs_of(some.analysis, entries, environment)
        results = race_programs(builder, programs)
    return [
        {
            "what": "raced",
            "plan": result.name,
            "winner": found[result.name].winner.name,
            "time_ms": result.time_ms,
            "samples_ms": list(result.samples_ms),
        }
        for result in results
        if result.is_timed
    ]


def _row_of(plan: Plan) -> Row:
    return {
        "winner": plan.winner,
        "measured_ms": plan.measured_ms,
        "predicted_ms": plan.predicted_ms,
        "peak_bytes": plan.peak_bytes,
        "search": dict(plan.search),
        "environment": dict(plan.environment),
        "race": [asdict(row) for row in plan.race],
    }


def _digest(plan: Plan) -> str:
    """A name for what a plan does, however it was found."""
    data = json.loads(plan.to_json())
    parts = ("arguments", "output_specs", "constraints", "recompute", "options")
    text = json.dumps([data[part] for part in parts], sort_keys=True)
    return "plan_" + hashlib.sha256(text.encode()).hexdigest()[:8]


# ------------------------------------------------------------------------- measuring


def measure_all(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """The second process: runs every plan, the smallest budget first."""
    target, mesh = _open(options, rest)
    lines = _Lines(options, [options.target, *rest])
    budgets: dict[str, float] = {}
    for row in _read(options.workdir):
        if row.get("feasible"):
            budget = row["budget_bytes"] or math.inf
            budgets[row["plan"]] = min(budget, budgets.get(row["plan"], math.inf))
    for name, budget in sorted(budgets.items(), key=lambda item: item[1]):
        plan = Plan.load(options.workdir / f"{name}.json", mesh=mesh)
        row = _run(plan, target, options)
        limit = int(budget) if budget < math.inf else None
        lines.add({"what": "measured", "plan": name, "budget_bytes": limit, **row})


def _run(plan: Plan, target: Target, options: argparse.Namespace) -> Row:
    """Runs a plan's step for real, and watches the devices' high-water marks."""
    mesh = plan.mesh
    assert mesh is not None, "it was loaded for one"
    devices = list(mesh.devices.flat)
    gc.collect()  # Whatever the plan before left: it would count as this one's.
    marks: dict[str, list[int] | None] = {}

    def look(key: str) -> list[int] | None:
        stats = [device.memory_stats() for device in devices]
        values = [int(s[key]) for s in stats if s is not None]
        return values or None

    held = look("bytes_in_use")

    def watch(doing: str) -> None:
        marks.setdefault(f"before {doing.split()[0]}", look("peak_bytes_in_use"))

    # What was tuned for the race needs no tuning again.
    beside = BuildEnvironment.beside(store_path(options.workdir))
    tuned = beside.options(devices[0].platform)
    trial = run_trial(
        replace(plan, options={**plan.options, **tuned}),
        replace(target, make_args=_maker(plan, target, mesh)),
        steps=options.steps,
        progress=watch,
    )
    return {
        "winner": plan.winner,
        "held_before_bytes": held,
        "peaks_by_phase_bytes": marks,
        "peaks_bytes": look("peak_bytes_in_use"),
        "largest_allocation_bytes": look("largest_alloc_size"),
        "compiled_bytes": plan.peak_bytes,
        "time_ms": trial.median_ms,
        "samples_ms": [step.time_ms for step in trial.steps],
        "metrics": dict(trial.steps[-1].metrics),
    }


def _maker(plan: Plan, target: Target, mesh: Mesh) -> Any:
    """Makes arguments as races do: each where it belongs, whole on no device."""
    step = target.flatten()
    program, _ = trace(step, planning_mesh(mesh))
    positive = above_zero(program, tuple(op.id for op in program.ops if op.parent < 0))
    kinds = [
        InputKind(
            aval(program, v).shape, str(aval(program, v).dtype), spec, v not in positive
        )
        for v, spec in zip(program.args, plan.arg_specs, strict=True)
    ]

    def make(*_: Any) -> tuple[Any, ...]:
        leaves = make_inputs(kinds, mesh, donated=range(len(kinds)))
        dynamic = iter(tree_unflatten(step.in_tree, leaves)[0])
        return tuple(
            arg if i in target.static else next(dynamic)
            for i, arg in enumerate(target.args)
        )

    return make


# ----------------------------------------------------------------------------- report


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and what it says about the claim."""
    runs = {r["plan"]: r for r in rows if r["what"] == "measured"}
    raced = {r["plan"]: r["time_ms"] for r in rows if r["what"] == "raced"}
    plans = [r for r in rows if r["what"] in ("budget", "smallest", "free")]
    plans.sort(key=lambda r: r["budget_bytes"] or math.inf)
    lines = [
        "| budget | plan | compiled | used | own race ms | one race ms | alone ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in plans:
        budget = r["budget_bytes"]
        text = "none" if budget is None else format_bytes(budget)
        text += ", named as smallest" if r["what"] == "smallest" else ""
        if not r["feasible"]:
            least = format_bytes(r["least_bytes"])
            lines.append(f"| {text} | nothing fits; {least} would do | | | | | |")
            continue
        run = runs.get(r["plan"], {})
        peaks = run.get("peaks_bytes")
        cells = [
            text,
            f"{r['winner']} ({r['plan'].removeprefix('plan_')})",
            format_bytes(r["peak_bytes"]),
            format_bytes(max(peaks)) if peaks else "",
            *map(_ms, (r["measured_ms"], raced.get(r["plan"]), run.get("time_ms"))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_claims(verdict(rows))])


def _claims(found: Mapping[str, Any]) -> list[str]:
    def line(text: str, value: float | None, limit: float) -> str:
        if value is None:
            return f"unknown  {text}"
        return f"{'holds' if value <= limit else 'FAILS':8} {text}: {value:.2%}"

    wrong, untried = found["smallest_infeasible"], found["smallest_untried"]
    is_open = untried or not found["smallest_named"]
    state = "FAILS" if wrong else "unknown" if is_open else "holds"
    return [
        f"{found['feasible']} feasible, {found['infeasible']} infeasible, "
        f"{found['distinct_plans']} plans that differ",
        line("most of a budget that a compiled plan needs", found["compiled_share"], 1),
        line("most of a budget that a device has used", found["used_share"], 1),
        line(
            "largest rise of time, each in its own race",
            found["rise_own_races"],
            _NOISE,
        ),
        line("largest rise of time, all in one race", found["rise_one_race"], _NOISE),
        f"{state:8} what errors name as smallest budget does"
        + "".join(f"; {format_bytes(least)} did not" for least in wrong)
        + "".join(f"; {format_bytes(least)} was not tried" for least in untried),
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ----------------------------------------------------------------------------- inside


def _open(options: argparse.Namespace, rest: Sequence[str]) -> tuple[Target, Mesh]:
    axes = platform.parse_mesh(options.devices, options.mesh)
    return open_target(options.target, rest, axes=axes, platform_name=options.platform)


def _lines_file(workdir: Path) -> Path:
    return workdir / "budgets.jsonl"


def _read(workdir: Path) -> list[Row]:
    return [json.loads(line) for line in _lines_file(workdir).read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plans a model under memory budgets, and measures the plans.",
        allow_abbrev=False,
    )
    parser.add_argument("target")
    for name, kind in (("mesh", str), ("devices", int), ("platform", str)):
        parser.add_argument(f"--{name}", type=kind)
    for name in ("workdir", "json"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--per-kind", type=int, default=16)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.stage:
        STAGES[options.stage](options, rest)
        return
    with tempfile.TemporaryDirectory() as temporary:
        workdir = (options.workdir or Path(temporary)).resolve()
        workdir.mkdir(parents=True, exist_ok=True)
        _lines_file(workdir).write_text("")
        failed = 0
        for stage in STAGES:
            # A process that has used a device holds its memory until it ends.
            again = ["--workdir", str(workdir), "--stage", stage]
            command = [sys.executable, __file__, *sys.argv[1:], *again]
            failed = failed or subprocess.run(command, check=False).returncode
        rows = _read(workdir)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(verdict(rows)) + "\n")
        print(report(rows))
    sys.exit(failed)


STAGES = {"plan": plan_all, "measure": measure_all}

if __name__ == "__main__":
    main()
