"""The command line with faults: ``python -m cfp_test.cli.faulty profile TARGET ...``.

`$FAULTS` is a JSON object from the label of something to measure to what its run does
instead. What is "overdue" hangs, and its time is over at once, however long it should
have.
`$FAULT_LOG` names a file for one line per event: ``run KEY`` before something runs,
``put KEY`` after its record was written.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from cfp.cli import main
from cfp.profiling import collectives, runner
from cfp.profiling.builder import Built, Job
from cfp.profiling.inputs import InputKind
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import InFlight, Operation
from cfp.race import turns
from cfp_test.support.injected import hold_times

FAULTS: dict[str, str] = json.loads(os.environ.get("FAULTS", "{}"))
# More than any machine has.
HUGE = InputKind((1 << 46,), "float32", ((),))


def log(event: str, key: str) -> None:
    with open(os.environ["FAULT_LOG"], "a") as file:
        file.write(f"{event} {key}\n")


def _hang() -> None:
    """Sleeps in C without giving Python to other threads, as a driver may.

    A signal that this thread takes would end the sleep.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    ctypes.PyDLL(None).sleep(100_000)


ENDS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": _hang,
    "overdue": _hang,
    "sleep": lambda: time.sleep(100_000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def install() -> None:
    """Puts faults and log where things run and records are kept, and holds times."""
    hold_times(pytest.MonkeyPatch())
    run, execute, put_all = runner.run, runner.execute, ProfileStore.put_all
    make_inputs = runner.make_inputs

    def make_too_much(_kinds, mesh, _donated):
        return jax.block_until_ready(make_inputs([HUGE], mesh))

    def faulty_run(built: Built, job: Job, program, mesh, **options) -> ProfileRecord:
        fault = FAULTS.get(job.label, "")
        if fault == "memory":
            runner.make_inputs = make_too_much
        elif fault:
            ENDS[fault]()
        else:
            runner.make_inputs = make_inputs
        log("run", job.key.digest)
        return run(built, job, program, mesh, **options)

    def logged_execute(built: Built, *args, **options) -> ProfileRecord:
        log("run", built.key.digest)
        return execute(built, *args, **options)

    def logged_put_all(store, records, **options) -> int:
        written = put_all(store, records, **options)
        if written:
            for record in records:
                log("put", record.key)
        return written

    note = InFlight._set

    def faulty_note(log: InFlight, digest: str, one: Operation | None) -> None:
        if one and one.doing == "run" and FAULTS.get(one.label) == "overdue":
            one = replace(one, deadline=time.monotonic())
        note(log, digest, one)

    InFlight._set = faulty_note  # pyright: ignore
    runner.run = turns.run = faulty_run
    collectives.execute = logged_execute
    ProfileStore.put_all = logged_put_all  # pyright: ignore


if __name__ == "__main__":
    install()
    sys.exit(main())
