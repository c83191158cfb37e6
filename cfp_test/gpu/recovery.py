"""Planning that a fault ends or meets: the next planning goes on where it was."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

from cfp.profiling import runner
from cfp.profiling.builder import Built
from cfp.profiling.inputs import InputKind
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import Limits, operations
from cfp.race import turns
from cfp_test.gpu.place import Failed, Place, tail
from cfp_test.gpu.plans import STEP, measured_plan
from cfp_test.support.steps import compare, make_step

PART = "plan with a fault"
# What a store has of each fault in the end. One death may be anything's: what a process
# was at is tried again.
FAULTS = {"kill": [], "memory": ["out_of_memory"], "hang": ["timeout"]}
# The run that a fault meets. One is stored by then.
_AT = 2
_FAULT, _HANGS = "CFP_TEST_FAULT", "hangs"
# Numbers in float32, more than any GPU has memory for; and than any host promises.
_HUGE_ON_GPU, _HUGE = 1 << 37, 1 << 46
_LIMITS = Limits(run_seconds=1.0, run_expected=0.0)
_GUARD_SECONDS = 200.0


def plan_with_a_fault(place: Place) -> None:
    """Plans by measuring; the second thing that runs meets the fault.

    It kills the process, asks for more memory than there is, or never ends.
    """
    fault, count = os.environ[_FAULT], itertools.count(1)
    run, make_inputs = runner.run, runner.make_inputs
    make_too_much = demand_too_much(place)

    def faulty_run(built: Built, *args: Any, **options: Any) -> ProfileRecord:
        meets = next(count) == _AT
        if meets and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if meets and fault == "hang":
            (place.folder / _HANGS).touch()
            time.sleep(100_000)
        runner.make_inputs = make_too_much if meets else make_inputs
        return run(built, *args, **options)

    runner.run = turns.run = faulty_run
    limits = {"limits": _LIMITS} if fault == "hang" else {}
    measured_plan(place, fault, **limits)


def demand_too_much(place: Place) -> Callable[..., Any]:
    """Returns what makes inputs for a run, and asks for more memory than there is."""
    make_inputs = runner.make_inputs
    huge = InputKind((_HUGE_ON_GPU if place.is_gpu else _HUGE,), "float32", ((),))

    def make_too_much(_: Any, mesh: Any, *__: Any) -> Any:
        return jax.block_until_ready(make_inputs([huge], mesh))

    return make_too_much


def recovered(place: Place) -> str:
    """Plans with a fault in another process each, and then again with the same store.

    Nothing that was stored is measured again, what failed is on record and is not tried
    again, and the plan's results are one device's.
    """
    for fault in FAULTS:  # Before this process takes a GPU's memory.
        _meet(fault, place)
    said = []
    for fault, wanted in FAULTS.items():
        before = {record.key for record in _records(place, fault)}
        if not before:
            raise Failed(f"{fault}: nothing was stored before")
        plan, keys = measured_plan(place, fault)
        if again := before & {*keys}:
            raise Failed(f"{fault}: {len(again)} of {len(before)} were measured again")
        failed = [r.status for r in _records(place, fault) if not r.ok]
        if failed != wanted:
            raise Failed(f"{fault}: {wanted} were to be on record, got {failed}")
        fn, args = make_step(STEP)
        worst = compare(fault, plan.compile_bound()(*args), jax.jit(fn)(*args))
        left = f"{len(before)} records left, {len({*keys})} more"
        said.append(f"{fault}: {left}, {failed or 'none'} failed, off by {worst:.0e}")
    return "; ".join(said)


def _meet(fault: str, place: Place) -> None:
    """Plans with a fault in another process.

    Raises:
        Failed: it ends otherwise than it should.
    """
    environment = {**os.environ, _FAULT: fault}
    with subprocess.Popen(
        place.command(PART),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        if fault == "hang":
            _await_overdue(child, place)
            child.kill()
        _, err = child.communicate(timeout=_GUARD_SECONDS)
    wanted = 0 if fault == "memory" else -signal.SIGKILL
    if child.returncode != wanted:
        raise Failed(f"{fault}: expected {wanted}, got {child.returncode}: {tail(err)}")


def _await_overdue(child: subprocess.Popen[str], place: Place) -> None:
    """Waits until a process has noted that what it is at takes too long."""
    until = time.monotonic() + _GUARD_SECONDS
    while child.poll() is None and time.monotonic() < until:
        if (place.folder / _HANGS).exists():
            with (
                ProfileStore(store_path(place.folder / "hang")) as store,
                store.transaction() as connection,
            ):
                every = operations(connection).values()
            if any(one.overdue for mine in every for one in mine):
                return
        time.sleep(0.1)


def _records(place: Place, folder: str) -> list[ProfileRecord]:
    with ProfileStore(store_path(place.folder / folder)) as store:
        return store.records()
