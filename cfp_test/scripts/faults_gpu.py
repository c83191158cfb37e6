"""Plans that are killed, interrupted or run out of memory on GPUs, and planned again.

    python -m cfp_test.scripts.faults_gpu FILE.json [--kills 20] [--seconds 300]
    python -m cfp_test.scripts.faults_gpu FILE.json --cpu 2

Each trial has a store of its own and plans a small step by measuring. The process
meets its fault at one of the runs: SIGKILL, SIGINT, or a demand for more memory than
there is. Another process plans again with the same store: nothing that was stored may
be measured again, and what the plan computes is compared with one device. Several
trials share the devices, as times decide nothing here. What the file has rows of is
not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from cfp.profiling import runner
from cfp.profiling.store import ProfileStore, store_path
from cfp.race import turns
from cfp_test.gpu.place import Place, child_environment, tail
from cfp_test.gpu.plans import STEP, measured_plan
from cfp_test.gpu.recovery import demand_too_much
from cfp_test.scripts.rows import Rows
from cfp_test.scripts.soak import compare, make_step, stored

KILL, INTERRUPT, MEMORY = "kill", "interrupt", "memory"
# Runs at one of which a fault comes, after the first. A planning of the step has nine
# or more on virtual devices; one with fewer ends without its fault: its row says so.
RUNS = 8
_GUARD_SECONDS = 240.0
_STORE = "store"


@dataclass(frozen=True)
class Trial:
    """A planning that meets a fault.

    Attributes:
        number: of the trial.
        fault: that it meets.
        at: the run at which it does.
    """

    number: int
    fault: str
    at: int


def trials(kills: int, others: int) -> list[Trial]:
    """Draws the runs at which faults come; those of a kind spread over all runs."""
    draw = random.Random(0)
    found = []
    for fault, count in ((KILL, kills), (INTERRUPT, others), (MEMORY, others)):
        for index in range(count):
            low, high = RUNS * index // count, RUNS * (index + 1) // count
            found.append((fault, 2 + draw.randrange(low, max(high, low + 1))))
    return [Trial(number, *one) for number, one in enumerate(found)]


# ----------------------------------------------------------- in processes of their own


def plan_with_fault(place: Place, fault: str, at: int) -> dict[str, Any]:
    """Plans, and meets a fault at a run; returns how many runs there were."""
    count, run, make_inputs = itertools.count(1), runner.run, runner.make_inputs
    runs = 0

    def faulty_run(*args: Any, **options: Any) -> Any:
        nonlocal runs
        runs = next(count)
        meets = runs == at
        if meets and fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if meets and fault == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        wants = meets and fault == MEMORY
        runner.make_inputs = demand_too_much(place) if wants else make_inputs
        return run(*args, **options)

    runner.run = turns.run = faulty_run
    measured_plan(place, _STORE)
    return {"runs": runs}


def plan_again(place: Place) -> dict[str, Any]:
    """Plans with what is stored; returns what was measured, and how far it is off."""
    plan, keys = measured_plan(place, _STORE)
    fn, args = make_step(STEP)
    worst = compare(STEP, plan.compile_bound()(*args), jax.jit(fn)(*args))
    return {"keys": keys, "winner": plan.winner, "off": worst}


def _child(args: argparse.Namespace) -> int:
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu)
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = Place(args.child)
    if args.fault:
        found = plan_with_fault(place, args.fault, args.at)
    else:
        found = plan_again(place)
    print(json.dumps(found), flush=True)
    return 0


# -------------------------------------------------------------------------- the trials


def run_trial(trial: Trial, cpu: int, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a trial: a planning that meets its fault, and one after it."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "trial": trial.number,
        "fault": trial.fault,
        "at": trial.at,
    }
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / _STORE

        def plan(*words: str) -> tuple[int | None, str, str]:
            command = [sys.executable, "-m", "cfp_test.scripts.faults_gpu", "-"]
            command += ["--child", folder, "--cpu", str(cpu), *words]
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_GUARD_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return None, "", f"no end after {_GUARD_SECONDS:.0f} s"
            return done.returncode, done.stdout, done.stderr

        code, out, err = plan("--fault", trial.fault, "--at", str(trial.at))
        row["first_code"] = code
        # A planning with fewer runs ends without the fault.
        row["met"] = trial.fault == MEMORY or code != 0
        if out.startswith("{"):
            row["runs"] = json.loads(out)["runs"]
            row["met"] = row["runs"] >= trial.at
        row["first_says"] = tail(err, 300)
        try:
            before = stored(store)
            row["stored"] = len(before)
            row["failed_on_record"] = _failed(store)
            code, out, err = plan()
            row["second_code"] = code
            if code != 0:
                row["second_says"] = tail(err, 600)
            else:
                found = json.loads(out.splitlines()[-1])
                keys = {*found["keys"]}
                row |= {"again": len(before & keys), "more": len(keys)}
                row |= {"winner": found["winner"], "off": found["off"]}
        except Exception as error:  # A row says so; the other trials go on.
            row["wrong"] = repr(error)
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def _failed(folder: Path) -> list[str]:
    path = store_path(folder)
    if not path.exists():
        return []
    with ProfileStore(path) as store:
        return [record.status for record in store.records() if not record.ok]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--others", type=int, default=5, help="of each other fault")
    parser.add_argument("--at_once", type=int, default=6, help="trials")
    parser.add_argument("--seconds", type=float, default=1e9, help="then none begins")
    parser.add_argument("--cpu", type=int, default=0, help="virtual devices")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _child(args)
    began = time.monotonic()
    rows = Rows(args.file, {"cpu": args.cpu})
    share = f"{0.85 / args.at_once:.3f}"
    environment = {**child_environment(), "XLA_PYTHON_CLIENT_MEM_FRACTION": share}
    wanted = [
        trial
        for trial in trials(args.kills, args.others)
        if rows.find(trial=trial.number) is None
    ]

    def run(trial: Trial) -> dict[str, Any] | None:
        if time.monotonic() - began > args.seconds:
            return None
        return run_trial(trial, args.cpu, environment)

    bad = 0
    # Some of each kind come early, should the time be over.
    wanted.sort(key=lambda trial: (trial.number * 7 % 10, trial.number))
    with ThreadPoolExecutor(args.at_once) as pool:
        for row in pool.map(run, wanted):
            if row is None:
                bad += 1
                continue
            rows.add(row)
            bad += row.get("again") != 0
            print(json.dumps(row), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
