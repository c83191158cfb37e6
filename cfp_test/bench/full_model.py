"""Plans a whole model, trains it under the plan and under the best presets.

    python -m cfp_test.bench full_model TARGET [TARGET'S OPTIONS] --json FILE
        [--mesh x=2] [--steps 20] [--presets 2] [--seconds 300] [--short] [--quick]
        [--workdir DIR] [--platform cpu]

Planning is as by default. With ``--short`` fewer strategies are measured, and presets
race with all values constrained and no other compiler options; with ``--quick``
segments are measured without a neighbour, too.

Every step gets new random data, and the state that the step before returned; state is
what the target donates. ``steps`` steps are timed one by one, from the call until all
is computed, and then as many in a row that nothing waits in between, as training does:
tokens per second and FLOP utilisation are of the latter. Prints a line for whatever is
done, then a table, and appends JSON lines, one for planning and one for each training.

Planning and each training are processes of their own, one after the other: a device's
high-water mark of memory never falls within a process, memory comes back whole, and
what runs out of it takes nothing along. Such a process costs a start of JAX and a
trace, and on GPUs no compilation: what is trained is the very program that was raced,
which JAX's compilation cache in the working folder has. The state is initialised with
one sharding for all, so that this is compiled once, too, and then moved to where the
plan wants it.

FLOPs are those of the step's matrix products as it was traced, forward and backward,
without what a model or a plan rematerializes. They are divided by the bfloat16 matrix
rate that was measured on these devices before planning, not by a data sheet's.

XLA_PYTHON_CLIENT_MEM_FRACTION is 0.92 unless set: JAX's own 0.75 would leave a quarter
of the memory unused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from cfp import platform
from cfp.analysis.layout import program_flops, rematerialized_flops
from cfp.cli.session import analyse, open_target
from cfp.context import open_context
from cfp.passes.pipeline import decide
from cfp.passes.profile import profile
from cfp.passes.search import search
from cfp.plan.compose import compose_plan
from cfp.plan.plan import Plan
from cfp.planner_settings import DetailedSettings
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.store import store_path
from cfp.profiling.tasks import Progress
from cfp.program.trace import planning_mesh, trace
from cfp.race.programs import RaceOutcome
from cfp.settings import ConstraintLevel
from cfp.targets import Target
from cfp_test.bench.full_figures import (
    best_presets,
    figures,
    loops_counted_once,
    table,
)
from cfp_test.bench.full_training import Training, training_job

_FOLDER = "full_model"
_PLAN = "plan"
_PLANNED = "planned.json"
_TRAINED = "trained.json"
# Of events that come by the dozen one is shown in so many seconds.
_QUIET_SECONDS = 2.0


# ----------------------------------------------------------------------- planning


@dataclass(slots=True)
class Clock:
    """Says what is done, and how long it has been since everything began."""

    began: float
    last: float = 0.0

    def tell(self, event: Progress | str) -> None:
        now = time.time()
        if isinstance(event, Progress):
            if now - self.last < _QUIET_SECONDS:
                return
            event = f"{event.done} of {event.total}, {event.phase} {event.label}"
        self.last = now
        print(f"[{now - self.began:6.1f} s] {event}", flush=True)


def plan_model(options: argparse.Namespace, rest: list[str], folder: Path) -> None:
    """Plans, and writes the plan, those of the best presets, and what is to know."""
    clock = Clock(options.began)
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        seconds[what], begun = now - begun, now
        clock.tell(f"{what}: {seconds[what]:.1f} s")

    target, mesh = _open(options, rest)
    lap("devices and target")
    session = analyse(target, mesh)
    lap("trace and analysis")
    frame = session.analysis.frame
    program = frame.program
    again = rematerialized_flops(program, frame.blocks)
    flops = program_flops(program) - again
    clock.tell(f"{flops / 1e12:.4g} TFLOP a step, {len(program.ops):,} ops")
    settings = DetailedSettings(seconds=options.seconds, progress=clock.tell)
    if options.short or options.quick:
        settings = replace(
            settings,
            per_kind=8,
            in_context=not options.quick,
            plans=1,
            reach=1.1,
            constraint_levels=(ConstraintLevel.EVERYTHING,),
            compiler_options={},
        )
    analysis = session.analysis
    with open_context(session.mesh, options.workdir, None, settings) as context:
        profiles = profile(context, analysis)
        lap("profile")
        solution = search(context, analysis, profiles)
        lap("search")
        with _compilation_cache(options.workdir, mesh):
            plan, _ = decide(context, analysis, solution)
        lap("race")
        presets = {one.name: one for one in solution.candidates if one.is_preset}
        environment = dict(context.environment)
    step, out_tree = session.step, session.lowering.out_tree
    chosen = {plan.winner: plan}
    for name in best_presets(plan.race, plan.winner, options.presets):
        taken = RaceOutcome(winner=presets[name], counts=solution.counts)
        chosen[name] = compose_plan(
            analysis, session.mesh, environment, taken, solution.problem
        )
    raced = {row.name: row for row in plan.race}
    trainings = []
    for number, (name, one) in enumerate(chosen.items()):
        file = f"plan_{number}.json"
        one.bound_to(step, out_tree).save(folder / file)
        trainings.append(
            {
                "plan": name,
                "is_the_plan": number == 0,
                "file": file,
                "predicted_ms": one.predicted_ms,
                "raced_ms": raced[name].time_ms if name in raced else None,
                "raced_peak_bytes": raced[name].peak_bytes if name in raced else None,
            }
        )
    state = [program.args[i] for i, a in enumerate(program.alias) if a is not None]
    outcome = {
        "phases_seconds": seconds,
        "flops": flops,
        "recomputed_flops": again,
        "loops_counted_once": loops_counted_once(program),
        "bfloat16_flops_per_ms": profiles.rates.matmul_flops_per_ms["bfloat16"],
        "state_bytes": sum(program.values[v].size_bytes for v in state),
        "devices": mesh.size,
        "environment": environment,
        "plan": {
            "winner": plan.winner,
            "measured_ms": plan.measured_ms,
            "predicted_ms": plan.predicted_ms,
            "peak_bytes": plan.peak_bytes,
            "plan_seconds": sum(seconds.values()),
            "race": [asdict(row) for row in plan.race],
        },
        "trainings": trainings,
    }
    (folder / _PLANNED).write_text(json.dumps(outcome))


def _open(options: argparse.Namespace, rest: list[str]) -> tuple[Target, Mesh]:
    axes = platform.parse_mesh(options.devices, options.mesh)
    return open_target(options.target, rest, axes=axes, platform_name=options.platform)


@contextlib.contextmanager
def _compilation_cache(workdir: Path, mesh: Mesh) -> Iterator[None]:
    """Has JAX keep what it compiles for GPUs meanwhile."""
    setting, before = (
        "jax_compilation_cache_dir",
        jax.config.jax_compilation_cache_dir,  # pyright: ignore
    )
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    jax.config.update(setting, str(workdir / "compiled") if is_gpu else before)
    compilation_cache.reset_cache()  # Or JAX stays with what it began with.
    try:
        yield
    finally:
        jax.config.update(setting, before)
        compilation_cache.reset_cache()


# ----------------------------------------------------------------------- training


def train(options: argparse.Namespace, rest: list[str], folder: Path) -> dict[str, Any]:
    """Trains a target under a saved plan: what came of it."""
    clock = Clock(options.began)
    target, mesh = _open(options, rest)
    step = target.flatten()
    mesh = planning_mesh(mesh)
    program, lowering = trace(step, mesh)
    plan = Plan.load(folder / options.phase, mesh=mesh)
    plan = plan.bound_to(step, lowering.out_tree)
    job = training_job(program, plan, mesh)
    clock.tell("traced; compiling, or loading what the race compiled")
    environment = BuildEnvironment.beside(store_path(options.workdir))
    with _compilation_cache(options.workdir, mesh):
        built = build(program, mesh, job, environment)
        if not isinstance(built, Built):
            return {"note": f"{built.status}: {built.reason}"}
        clock.tell(f"built in {built.build_seconds:.1f} s; making the first state")
        training = Training(target, step, program, plan, job, built)
        begun = time.perf_counter()
        training.start()
        data = [training.data_of(number) for number in range(2 * options.steps)]
    state_seconds = time.perf_counter() - begun
    before = device_peak(mesh)
    clock.tell(f"state and data made in {state_seconds:.1f} s; training")
    samples = []
    for number in range(options.steps):
        begun = time.perf_counter()
        jax.block_until_ready(training.run(data[number]))
        samples.append((time.perf_counter() - begun) * 1000)
    clock.tell(f"steps one by one: {statistics.median(samples):.2f} ms")
    begun = time.perf_counter()
    for number in range(options.steps, 2 * options.steps):
        results = training.run(data[number])
    jax.block_until_ready(results)
    row_ms = (time.perf_counter() - begun) * 1000 / options.steps
    clock.tell(f"steps in a row: {row_ms:.2f} ms each")
    losses = [float(loss) for loss in training.losses]
    finite = all(map(math.isfinite, losses))
    return {
        "samples_ms": samples,
        "in_a_row_ms": row_ms,
        "tokens": training.tokens(),
        "losses": losses,
        "compiled_bytes": built.peak_bytes,
        "device_peak_bytes": device_peak(mesh),
        "device_peak_before_training_bytes": before,
        "build_seconds": built.build_seconds,
        "state_seconds": state_seconds,
        "note": "" if finite else "losses are not finite",
    }


def device_peak(mesh: Mesh) -> int | None:
    """The most memory that any device ever had in use; None if they do not say."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    found = [int(s["peak_bytes_in_use"]) for s in stats if "peak_bytes_in_use" in s]
    return max(found, default=None)


# ------------------------------------------------------------------------ the whole


def orchestrate(options: argparse.Namespace, rest: list[str], folder: Path) -> int:
    """Has processes plan and train; the exit code."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    words = [*sys.argv[1:], "--workdir", str(options.workdir)]
    words += ["--began", str(options.began)]

    def child(*more: str) -> int:
        return subprocess.run(
            [sys.executable, "-m", "cfp_test.bench.full_model", *words, *more],
            env=environment,
            check=False,
        ).returncode

    def tell(row: dict[str, Any]) -> None:
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"target": [options.target, *rest], **row}))
                file.write("\n")

    if code := child("--phase", _PLAN):
        return code
    outcome = json.loads((folder / _PLANNED).read_text())
    trainings = outcome.pop("trainings")
    tell({"what": "planned", **outcome, "chosen": [t["plan"] for t in trainings]})
    rows = []
    for training in trainings:
        print(f"--- {training['plan']}", flush=True)
        (folder / _TRAINED).unlink(missing_ok=True)
        code = child("--phase", training["file"])
        if code:
            row = {**training, "note": f"its process ended with {code}"}
        else:
            row = {**training, **json.loads((folder / _TRAINED).read_text())}
        if "in_a_row_ms" in row:
            row |= figures(
                row,
                outcome["flops"],
                outcome["bfloat16_flops_per_ms"],
                outcome["devices"],
            )
        keep = ("flops", "bfloat16_flops_per_ms", "devices", "environment")
        tell({"what": "trained", **row, **{k: outcome[k] for k in keep}})
        rows.append(row)
    print(table(rows), flush=True)
    return int(any(row["note"] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--presets", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path)
    # What the script calls itself with: the phase is planning, or the plan to train.
    parser.add_argument(
        "--began", type=float, default=time.time(), help=argparse.SUPPRESS
    )
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        options.workdir = (options.workdir or Path(temporary)).absolute()
        folder = options.workdir / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if options.phase is None:
            raise SystemExit(orchestrate(options, rest, folder))
        if options.phase == _PLAN:
            plan_model(options, rest, folder)
        else:
            (folder / _TRAINED).write_text(json.dumps(train(options, rest, folder)))


if __name__ == "__main__":
    main()
