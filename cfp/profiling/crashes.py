"""Finds out why processes crashed, and records it.

A program that was running when its process crashed is a failure like any other: it is
recorded with its reason, and not tried again. Three cases are no failure of it:

- The process was ended by hand: by Ctrl-C, `kill` or switching the machine off. A crash
  of its own leaves a crash record or an exit status, and want of memory a count in the
  kernel. A program whose process ended without either is measured again; if no crash
  record could be written, or it is not known whether this process alone was killed, it
  has two tries.
- It was being built beside the guilty one. If several were being built, all are
  suspects, and the next time suspects are built one at a time.
- It had been measured already, and its process died right after.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cfp.profiling.in_flight import (
    CrashCandidate,
    InFlight,
    InFlightFolder,
    ProcessInFlight,
    oom_kills,
)
from cfp.profiling.record import ProfileRecord, Status
from cfp.profiling.store import ProfileStore

_TRIES = 2
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MOST_NAMED = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a process, as its parent saw it.

    Attributes:
      status: as `os.waitpid` gives it.
      overdue: the parent ended it, since something took too long.
    """

    status: int
    overdue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A process that died during operations.

    Attributes:
      suspects: what it may have died of.
      record: what is known now of the only suspect; None if nothing is.
    """

    pid: int
    suspects: tuple[InFlight, ...]
    record: ProfileRecord | None = None


_Cause = tuple[Status, str]  # as of a record: its status, and the reason


def record_crashes(
    store: ProfileStore,
    ended: Mapping[int, ProcessEnd] | None = None,
    about: Collection[str] | None = None,
) -> list[Crash]:
    """Removes the logs of dead processes, and records why they crashed.

    Args:
      ended: by process id how those ended whose parent asks.
      about: keys of what is about to be measured: only of these warnings speak. All
        programs of a user share a store; None for all of them.
    """
    folder = InFlightFolder(store.path)
    found = []
    with folder.locked():
        suspects = folder.suspects()
        before = dict(suspects)
        for process in folder.dead():
            how = (ended or {}).get(process.pid)
            words = folder.crash_record(process.name)
            found.append(_judge(store, process, words, how, suspects, about))
            folder.remove(process.name)
        known = store.get_many(suspects)
        suspects = {
            key: suspicion
            for key, suspicion in suspects.items()
            if key not in known or not _made_since(known[key], suspicion.since)
        }
        if suspects != before:
            folder.write_suspects(suspects)
    if about is None:
        named = [key for key in suspects if suspects[key] != before.get(key)]
    else:
        named = [key for key in suspects if key in about]
    if named:
        names = "; ".join(suspects[key].what for key in named[:_MOST_NAMED])
        _log.warning(
            "a process died while it was %s%s. Trying again",
            names,
            "; ..." if len(named) > _MOST_NAMED else "",
        )
    return found


def _judge(
    store: ProfileStore,
    process: ProcessInFlight,
    words: str,
    ended: ProcessEnd | None,
    noted: dict[str, CrashCandidate],
    about: Collection[str] | None,
) -> Crash:
    """Records the guilty one, or notes the suspects."""
    suspects = [one for one in _suspects(process, ended) if not _done(store, one)]
    cause = _cause(process, suspects, words, ended)
    seen = cause or ended or not process.witnessed
    if not suspects or not seen:
        return Crash(pid=process.pid, suspects=tuple(suspects))
    for one in suspects:
        before = noted.get(one.key.digest)
        noted[one.key.digest] = CrashCandidate(
            crashes=1 + (before.crashes if before else 0),
            since=one.since,
            what=f"{one.words} {_name(one)}",
        )
    one = suspects[0]
    tries = noted[one.key.digest].crashes
    if cause is None and tries >= _TRIES:
        cause = ("crashed", f"the process died {tries} times")
    if cause is None or len(suspects) > 1:
        return Crash(pid=process.pid, suspects=tuple(suspects))
    status, reason = cause
    record = ProfileRecord(
        key=one.key.digest,
        parts=one.parts,
        status=status,
        reason=f"{reason} while {one.words} it",
    )
    store.put(record, replace=True)
    del noted[record.key]
    if about is None or record.key in about:
        _log.warning(
            "%s is left out: %s: %s "
            "(PlannerSettings(retry_failures=True), --retry-failures: try again)",
            _name(one),
            record.status.replace("_", " "),
            record.reason,
        )
    return Crash(pid=process.pid, suspects=tuple(suspects), record=record)


def _suspects(process: ProcessInFlight, ended: ProcessEnd | None) -> list[InFlight]:
    """Lists suspects of a crash: runs, or else builds, the overdue first."""
    at_work = [one for one in process.operations if one.doing != "wait"]
    late = [one for one in at_work if one.overdue]
    if late and (ended is None or ended.overdue):
        return late
    return [one for one in at_work if one.doing == "run"] or at_work


def _done(store: ProfileStore, one: InFlight) -> bool:
    record = store.get(one.key.digest)
    return record is not None and _made_since(record, one.since)


def _made_since(record: ProfileRecord, moment: str) -> bool:
    # Both are of `utc_now`: as text they sort by time.
    return record.created >= moment


def _cause(
    process: ProcessInFlight,
    suspects: list[InFlight],
    words: str,
    ended: ProcessEnd | None,
) -> _Cause | None:
    """Returns the reason of a crash that the process caused itself."""
    if words:
        return "crashed", words
    late = ended.overdue if ended else all(one.overdue for one in suspects)
    if suspects and late:
        limit = suspects[0].limit_seconds or 0.0
        return "timeout", f"no end after {limit:.0f} s"
    if ended is not None:
        code = os.waitstatus_to_exitcode(ended.status)
        if code >= 0:
            return "crashed", f"the process ended with exit code {code}"
        if -code not in _SENT_BY_OTHERS:
            return "crashed", f"the process ended by {signal.Signals(-code).name}"
    if oom_kills() > process.oom_kills:
        reason = "the machine's memory was used up, and the kernel ended the process"
        return "out_of_memory", reason
    return None


def _name(one: InFlight) -> str:
    return f"{one.label} of {one.program}" if one.program else one.label
