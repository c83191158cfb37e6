"""Processes that plan one step with one store at once, and one that is killed."""

import json
import subprocess
import sys
from collections import defaultdict
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from cfp.profiling.store import ProfileStore
from cfp_test.cli.cli_runner import environment
from cfp_test.support.at_work import at_work, of_living
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import end_of, running, until

Process = subprocess.Popen[str]

# Data parallel needs 50 KiB.
LARGE, SMALL = 2**20, 30_000
PLAN = """
import json, sys
import jax
import cfp
from cfp.context import DetailedSettings
from cfp.profiling.tasks import Limits
from cfp_test.cli.toy_targets import toy

# Leaders race again with other options, as they do on GPUs.
options = {"again": {"xla_llvm_disable_expensive_passes": "True"}}
settings = DetailedSettings(
    per_kind=1, in_context=False, measure=True, compiler_options=options,
    limits=Limits(run_seconds=100_000.0),
)
step, args = toy()
mesh = jax.make_mesh((2,), ("x",))
for budget in map(int, sys.argv[1:]):
    how = {"mesh": mesh, "memory_budget": budget, "cache_dir": ".", "quiet": True}
    plan = cfp.plan(step, *args, settings=settings, **how)
    found = {"winner": plan.winner, "ms": plan.measured_ms, "bytes": plan.peak_bytes}
    print(json.dumps([found, plan.search]))
"""

# Its race never ends, so that it is killed there, however busy the machine is.
HANGS_IN_ITS_RACE = (
    """
import time
from cfp.race import turns

turns.run = lambda *args, **options: time.sleep(100_000)
"""
    + PLAN
)


def begin(
    folder: Path, *budgets: int, code: str = PLAN, python: str = sys.executable
) -> AbstractContextManager[Process]:
    """Plans for budgets, one after another, for as long as the body.

    Times follow from what is compiled, so that each finds the others' records as it
    would have made them.
    """
    flags = "--xla_force_host_platform_device_count=2"
    steady = ("-m", "cfp_test.support.injected")
    command = [python, *steady, "-c", code, *map(str, budgets)]
    return running(command, folder, environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))


def finish(process: Process) -> list[list[dict[str, Any]]]:
    out, err = end_of(process)
    assert process.returncode == 0 and err == "", err
    return [json.loads(line) for line in out.splitlines()]


def is_at(folder: Path, process: Process, doing: str = "", what: str = "") -> bool:
    """Returns True if a process has marked something of this kind as what it is at."""
    every = of_living(folder).items()
    mine = [m for o, marks in every if o.startswith(f"{process.pid}:") for m in marks]
    return any(
        doing in ("", mark.doing) and (not what or ("what", what) in mark.parts)
        for mark in mine
    )


def test_plans_made_at_once_are_those_that_the_store_answers_with(tmp_path):
    # That which is killed, and the one that is asked for by its number, start anew.
    begin_quick = partial(begin, tmp_path, python=quick_python())
    with begin(tmp_path, LARGE, code=HANGS_IN_ITS_RACE) as killed:
        races = partial(
            is_at, tmp_path, killed, "run", "whole program, raced when warm"
        )
        until(races, killed)
        with begin(tmp_path, LARGE) as first:
            until(partial(is_at, tmp_path, first), first)
            killed.kill()
            killed.wait()
            with begin_quick(LARGE) as again, begin_quick(SMALL) as other:
                [[one, _]], [[two, _]], [[small, _]] = map(
                    finish, (first, again, other)
                )
    assert small["bytes"] <= SMALL

    with begin_quick(LARGE, SMALL) as last:
        [[large_now, searched], [small_now, also]] = finish(last)
    for search in (searched, also):
        assert search["race_cached"] == 1.0
        assert search["strategies_measured"] == 0.0
    assert large_now in (one, two)
    assert small_now == small

    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        records = store.records()
    refused = [record for record in records if not record.ok]
    reasons = {r.reason for r in refused}
    sizes = {r.peak_bytes for r in refused}
    assert reasons == {f"needs {size} bytes, more than {SMALL}" for size in sizes}
    races = defaultdict(set)
    for record in records:
        parts = dict(record.parts)
        if "among" in parts:
            races[parts["among"], parts["budget"]].add(record.created)
    assert {budget for _, budget in races} == {str(LARGE), str(SMALL)}
    # What ended at one moment is of one race, which ended.
    assert {len(moments) for moments in races.values()} == {1}
    assert at_work(tmp_path) == {}
