"""The table of checks; each runs in a process of its own, with a limit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from cfp_test.gpu.place import ON_GPUS, Place, child_environment, for_results, tail
from cfp_test.gpu.planted import FAULTS
from cfp_test.support.waiting import end_group

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A check, and how it went.

    Attributes:
        name: of the check, or of the fault that was planted.
        what: that is checked, or the fault.
        outcome: PASSED, FAILED or NOT_RUN.
        said: figures, or what is wrong.
        seconds: that it took.
    """

    name: str
    what: str
    outcome: str
    said: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim, and the function that checks it.

    Attributes:
        what: one sentence.
        home: module and function, which gets the place, returns figures, and raises
            `Failed` where the check does not hold.
        given: what the function gets after the place.
        devices: that it takes at least: there is nothing to shard over one.
        timed: whether times decide: such a check has the devices for itself, and the
            compiler tunes kernels for what it runs. The others look at results alone;
            several run at once.
    """

    what: str
    home: str
    given: tuple[str, ...] = ()
    devices: int = 2
    timed: bool = False


# To add a check: a function of `Place`, and its line here.
CHECKS = {
    **{
        f"{name} under presets": Check(
            what=f"the zoo's {name} under presets and its plan computes what one "
            "device does: loss, gradients and new state",
            home="equal.presets_and_plan",
            given=(name,),
        )
        for name in ON_GPUS.models
    },
    "attention kernels": Check(
        what="each kernel that loads computes what a float32 oracle does, forward and "
        "backward, on one device and over all",
        home="equal.kernels",
        devices=1,
    ),
    "kernel in the step": Check(
        what="a step that calls a kernel itself is sharded, kernel included, and right",
        home="equal.kernel_in_step",
    ),
    "used again": Check(
        what="nothing is measured twice, and a plan's file runs as it is",
        home="plans.used_again",
    ),
    "another device's store": Check(
        what="records of another kind of device are not taken for this one's",
        home="plans.other_device",
    ),
    "faults while measuring": Check(
        what="after a kill, an out-of-memory and a hang planning goes on where it was",
        home="recovery.recovered",
        timed=True,  # A hang is what takes more than a second.
    ),
    "best preset": Check(
        what="the plan is no slower than the best preset, beyond noise",
        home="plans.no_slower",
        timed=True,
    ),
    "memory budget": Check(
        what="a plan within a budget uses no more, as the device counts it",
        home="plans.budget",
        timed=True,
    ),
}
# What checks have done in processes of their own.
PARTS = {
    "devices": "page.describe",
    "plan with a fault": "recovery.plan_with_a_fault",
    "plan within a budget": "plans.plan_within_budget",
    "run within a budget": "plans.run_within_budget",
}


def function_of(name: str) -> Callable[[Place], str | None]:
    """Imports what a check or a part is made of."""
    from importlib import import_module

    home, given = PARTS.get(name, ""), ()
    if not home:
        home, given = CHECKS[name].home, CHECKS[name].given
    module, function = home.split(".")
    found = getattr(import_module(f"cfp_test.gpu.{module}"), function)
    return lambda place: found(place, *given)


def run_check(name: str, place: Place, devices: int, seconds: float) -> Outcome:
    """Runs a check in a process of its own, which is ended when its time is over.

    Args:
        name: of the check.
        place: where.
        devices: that there are.
        seconds: that it may take.
    """
    wanted, what = CHECKS[name].devices, CHECKS[name].what
    if devices < wanted:
        return _not_run(name, what, devices, wanted)
    if seconds <= 0:
        said = "no time was left; --seconds gives more"
        return Outcome(name=name, what=what, outcome=FAILED, said=said, seconds=0.0)
    began = time.monotonic()
    variables = {} if CHECKS[name].timed else for_results()
    code, out, err = _end_of(place.command(name), seconds, variables)
    took = time.monotonic() - began
    try:
        found = json.loads(out.splitlines()[-1])
        outcome, said = found["outcome"], found["said"]
    except (IndexError, ValueError, KeyError, TypeError):
        outcome = FAILED
        said = f"no end after {seconds:.0f} s" if code is None else f"it died ({code})"
        said = f"{said}: {tail(err)}"
    return Outcome(name=name, what=what, outcome=outcome, said=said, seconds=took)


def _not_run(name: str, what: str, devices: int, wanted: int) -> Outcome:
    said = f"it takes {wanted} devices, and there is {devices}"
    return Outcome(name=name, what=what, outcome=NOT_RUN, said=said, seconds=0.0)


def run_planted(name: str, place: Place, devices: int, seconds: float) -> Outcome:
    """Plants a fault in the check that has to fail of it, and sees that it does."""
    fault = FAULTS[name]
    words = (*place.words, "--plant", name)
    planted = Place(place.folder / name, words)
    found = run_check(fault.check, planted, devices, seconds)
    if found.outcome == NOT_RUN:
        return replace(found, name=name, what=fault.what)
    is_caught = found.outcome == FAILED and fault.says in found.said
    how = "caught" if is_caught else "NOT CAUGHT"
    return replace(
        found,
        name=name,
        what=fault.what,
        outcome=PASSED if is_caught else FAILED,
        said=f"{how} by {fault.check}: {found.said}",
    )


def _end_of(
    command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs a command, with all that it starts; its code is None if it was ended."""
    with subprocess.Popen(
        command,
        env={**child_environment(), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_group(process)
            out, err = process.communicate()
            return None, out, err
        finally:
            end_group(process)
            _running.discard(process)
    return process.returncode, out, err


_running: set[subprocess.Popen[str]] = set()


def end_all() -> None:
    """Ends all checks that run, with what they have started."""
    for process in [*_running]:
        end_group(process)


def run_all(
    names: Sequence[str], run: Callable[[str], Outcome], checks: Sequence[str]
) -> Iterator[Outcome]:
    """Runs checks, or what is planted: several at once where no times decide.

    Args:
        names: of what is run.
        run: runs one.
        checks: the check behind each name.
    """
    pairs = zip(names, checks, strict=True)
    timed = [name for name, check in pairs if CHECKS[check].timed]
    pool = ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 4)))
    try:
        at_once = [pool.submit(run, name) for name in names if name not in timed]
        for one in as_completed(at_once):
            yield one.result()
        yield from map(run, timed)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()
        raise
    finally:
        pool.shutdown()


# Each compiles most of the time.
_AT_ONCE = 5


def described(place: Place, seconds: float) -> dict[str, str]:
    """Asks a process of its own for the devices, the driver and versions.

    Raises:
        RuntimeError: JAX finds none.
    """
    code, out, err = _end_of(place.command("devices"), seconds)
    if code:
        raise RuntimeError(tail(err))
    return json.loads(json.loads(out.splitlines()[-1])["said"])


def run_here(name: str, folder: Path, words: Sequence[str]) -> int:
    """Runs a check, or a part of one, in this process; prints how it went."""
    from cfp_test.gpu.place import Failed, NotRun

    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, tuple(words))
    try:
        said, outcome = function_of(name)(place) or "", PASSED
    except Failed as error:
        said, outcome = str(error), FAILED
    except NotRun as error:
        said, outcome = str(error), NOT_RUN
    print(json.dumps({"outcome": outcome, "said": said}), flush=True)
    return 1 if outcome == FAILED else 0
