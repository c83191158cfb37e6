"""Plans within budgets of time, by a made-up clock: what is left for the race.

    python cfp_test/bench/planning_in_time.py --seconds 50,30,20 --slow 1,1.5 moe gpt

Nothing is compiled and nothing runs, as in `planning_parts.py`, whose times of programs
these are. On the clock each thing takes what it took in the plans of
docs/results/planning_parts_gpux2_202611.md, about, also where threads do many at once;
kernels that were not tuned take no longer, so that it flatters what is compiled late.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from cfp_test.bench import planning_parts as parts  # isort: skip (it sets up devices)

from cfp import context as contexts
from cfp import settings
from cfp.context import open_context
from cfp.devices.described import cluster_of
from cfp.devices.described import mesh_of as described_mesh
from cfp.passes import profile as profile_pass
from cfp.passes.pipeline import analyze_step
from cfp.passes.search import search
from cfp.planner_settings import PlannerSettings
from cfp.profiling import measurer, outlook, processes, runner
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.outlook import Stage
from cfp.program.step import flatten_step
from cfp.race import compile as race_compile
from cfp.race import race as races
from cfp.race import turns
from cfp.race.programs import TOO_LATE
from cfp.targets import resolve
from cfp_test.support.checking import make_mesh

SECONDS = {
    "rates": 5.7,
    "tuned": 1.3,
    "built": 0.38,
    "run": 0.13,
    "whole": 0.75,
    "warm-up": 3.5,
    "timed": 0.3,
}
_THREADS = 12
_CLOCKED = (
    contexts,
    measurer,
    outlook,
    processes,
    race_compile,
    turns,
    races,
    profile_pass,
)


class Clock:
    """A clock that goes on by what is done.

    Args:
        slow: how many times as long everything takes.
    """

    def __init__(self, slow: float) -> None:
        self.now, self._slow, self._lock = 0.0, slow, threading.Lock()
        self.time, self.sleep = time.time, time.sleep

    def monotonic(self) -> float:
        """Returns its seconds."""
        return self.now

    perf_counter = monotonic

    def spend(self, what: str) -> None:
        """Goes on by what something takes."""
        with self._lock:
            self.now += self._slow * SECONDS[what]

    def spending(self, what: str, do: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what does the same, and takes time."""

        def done(*where: Any, **how: Any) -> Any:
            self.spend(what)
            return do(*where, **how)

        return done


def patches(clock: Clock, rates: Any) -> list[tuple[Any, str, Any]]:
    """Lists what takes time, around what `planning_parts.counted` puts in place."""
    tune, build, time_one = measurer.tune_kernels, runner._build, turns.run

    def tuned(
        program: Any, mesh: Any, jobs: Any, store: Any, how: Any, is_late: Any
    ) -> Any:
        done, started = [], clock.now
        how.outlook.expect({Stage.TUNING: len(jobs)})
        for job in jobs:
            seconds = clock.now - started
            how.outlook.left_text(Stage.TUNING, len(done), len(jobs), seconds)
            if is_late():
                break
            clock.spend("tuned")
            done.append(job)
        return tune(program, mesh, done, store)

    def built(
        program: Any, mesh: Any, job: Any, environment: Any, known: Any = None
    ) -> Any:
        if not (known and job.key.digest in known):
            clock.spend("built")
        return build(program, mesh, job, environment, known)

    def timed(*where: Any, timing: Any = None) -> Any:
        is_warm_up = timing is turns._WARM_UP_ELSEWHERE
        clock.spend("warm-up" if is_warm_up else "timed")
        return time_one(*where, timing=timing)

    threads = [
        (room, "default_threads", lambda _: _THREADS)
        for room in (runner, race_compile, turns, measurer)
    ]
    return [
        *((room, "time", clock) for room in _CLOCKED),
        *threads,
        (profile_pass, "measured_rates", clock.spending("rates", lambda _: rates)),
        (measurer, "tune_kernels", tuned),
        (runner, "_build", built),
        (runner, "run", clock.spending("run", runner.run)),
        (runner, "overlaps", lambda _: False),
        (race_compile, "build", clock.spending("whole", race_compile.build)),
        (turns, "run", timed),
        (BuildEnvironment, "options", lambda *_: {"kernels": "tuned"}),
    ]


def row(name: str, seconds: float, slow: float) -> dict[str, Any]:
    """Plans one model from an empty store within so many seconds."""
    model, *rest = parts.MODELS[name].split()
    target = resolve(model, rest, donate=(), static=())
    mesh = make_mesh((("x", 2),))
    step = flatten_step(target.step, target.args, {}, donate_argnums=target.donate)
    analysis = analyze_step(step, mesh).analysis
    rates = described_mesh(cluster_of("2xh100"), None).rates
    how = PlannerSettings(measure=True, seconds=seconds, progress=lambda _: None)
    clock = Clock(slow)
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        on_gpus = {"cpu": parts._ON_GPUS}
        stack.enter_context(mock.patch.dict(settings._PLATFORMS, on_gpus))
        stack.enter_context(parts.counted(rates))
        for patch in patches(clock, rates):
            stack.enter_context(mock.patch.object(*patch))
        context = stack.enter_context(open_context(mesh, cache, None, how))
        changed = {**dict(context.environment), "platform": "gpu"}
        context = replace(context, environment=tuple(changed.items()))
        profiles = profile_pass.profile(context, analysis)
        measured_seconds = clock.now
        outcome = races.race(context, analysis, search(context, analysis, profiles))
    return {
        "name": name,
        "seconds": seconds,
        "slow": slow,
        "measured_until": round(measured_seconds, 1),
        "unmeasured": len(profiles.unmeasured),
        "strategies": len(profiles.requests),
        "in_all": round(clock.now, 1),
        "timed": sum(one.time_ms is not None for one in outcome.rows),
        "late": sum(one.note == TOO_LATE for one in outcome.rows),
        "winner": outcome.winner.name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(parts.MODELS)}")
    parser.add_argument("--seconds", default="50,30,20", help="budgets of time")
    parser.add_argument("--slow", default="1", help="how many times as long all takes")
    options = parser.parse_args()
    for name in options.names or parts.MODELS:
        for seconds in map(float, options.seconds.split(",")):
            for slow in map(float, options.slow.split(",")):
                print(row(name, seconds, slow), flush=True)


if __name__ == "__main__":
    main()
