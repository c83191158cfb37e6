"""Measurement tasks, their options and progress, and builds or runs under way.

A build or run under way has a row in the store (`InFlight`), which outlives a dead
process. `settle` reads the rows of dead processes. The job that was running, or else
building, is tried again. After a second death, past its time limit, or with a known
cause, a failure is recorded. Several builds under way are then built one at a time.

A process cannot end its own hanging run. It marks the run as overdue, and its parent,
the command line, ends the process (`cfp.cli.supervise`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from sqlite3 import Connection
from typing import Literal

from cfp.profiling.record import Parts, ProfileKey, ProfileRecord, Status, utc_now
from cfp.profiling.store import ProfileStore

Phase = Literal["look up", "build", "run", "wait", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement, of a part of a program or a probe of the devices.

    Attributes:
      key: key of its record; tasks with equal keys are the same.
      label: text for progress, such as "segment 1: 3 of 24".
      expected_ms: expected time of one execution; 0 if unknown.
      kernels: keys of kernels that the compiler tunes. If tasks are built side by side,
        the first with a key tunes it, and others with this key wait.
    """

    key: ProfileKey
    label: str
    expected_ms: float = 0.0
    kernels: frozenset[Hashable] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of measuring.

    Attributes:
      done: number of tasks with a record: `cached`, plus measured, plus `failed`.
      cached: number of tasks with a record in the store, good or failed.
      failed: number of tasks that failed in this run.
      total: number of all tasks, each key once.
      best_ms: the smallest time of good records; infinity without, or for rates.
      label: label of the event's task; "" before the first.
      phase: "look up" after the store's answer; "build" while a task's build is
        awaited; "run" when it starts to run; "wait" while another process measures
        for the same store; "done" when it has its record.
      elapsed_seconds: time since the beginning.
      awaited: number of unfinished builds; 0 if unknown.
      awaited_seconds: time of waiting for the task's build.
    """

    done: int
    cached: int
    failed: int
    total: int
    best_ms: float
    label: str
    phase: Phase
    elapsed_seconds: float
    awaited: int = 0
    awaited_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits after which a build or run counts as hung; a parent may stop it.

    Attributes:
      run_seconds: stop a run, with making its inputs, after SECONDS plus 20 times one
        execution's expected time.
      run_expected: factor of one execution's expected time; a run executes many.
      build_seconds: stop a compilation after SECONDS. Large programs take many minutes.
    """

    run_seconds: float = 60.0
    run_expected: float = 20.0
    build_seconds: float = 1800.0

    def seconds(self, doing: Doing, expected_ms: float) -> float:
        """Returns the time limit of a run or build, in seconds."""
        if doing == "run":
            return self.run_seconds + self.run_expected * expected_ms / 1e3
        return self.build_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of builds and timings.

    Attributes:
        retry_failures: True tries failures from before `began` again; a time, those
            from before that time. A restarted process gets the first process's time.
        progress: called with every event, a `Progress` or a line of text.
        began: time at which the object was made.
    """

    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def retries(self, record: ProfileRecord) -> bool:
        """True if a record is a failure to try again."""
        again = self.retry_failures
        moment = again if isinstance(again, datetime) else self.began
        is_before = datetime.fromisoformat(record.created) < moment
        return not record.ok and bool(again) and is_before

    def known(
        self, store: ProfileStore, keys: Iterable[str]
    ) -> dict[str, ProfileRecord]:
        """Returns the store's records by key, without failures to try again."""
        found = store.get_many(keys)
        return {key: one for key, one in found.items() if not self.retries(one)}

    def tell(self, event: Progress | str) -> None:
        """Calls `progress`, if it is given, with an event."""
        if self.progress is not None:
            self.progress(event)

    @property
    def of_rates(self) -> MeasureOptions:
        """These options for rates of devices: labels get a prefix, `best_ms` is inf."""

        def tell(event: Progress | str) -> None:
            assert isinstance(event, Progress)
            label = f"rates of the devices: {event.label}" if event.label else ""
            self.tell(replace(event, label=label, best_ms=math.inf))

        return replace(self, progress=tell)


Doing = Literal["build", "run"]

_WATCH_SECONDS = 1.0
# After a longer sleep between two looks, the process was stopped, and its runs, too.
_STOPPED_SECONDS = 3.0
_MOST_DEATHS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A build or run under way, or one that a process may have died of.

    Attributes:
      parts: parts of the record's key.
      program: name of the user's function; "" without one.
      since: start time, ISO 8601 in UTC.
      deadline: time after which it counts as hung, by `time.monotonic`, which all
        processes of a machine share.
      overdue: True once its process has seen that the deadline is over.
      deaths: number of processes that died, possibly of it.
    """

    parts: Parts
    label: str
    program: str = ""
    doing: Doing
    since: str
    limit_seconds: float
    deadline: float
    overdue: bool = False
    deaths: int = 0

    @property
    def key(self) -> str:
        return ProfileKey(self.parts).digest


_WORDS = {"run": "running", "build": "compiling"}  # In messages.
_DEAD = ""  # Owner of operations that may have killed processes.
Cause = tuple[Status, str]  # (status, reason) of a failure's record.


def operations(connection: Connection) -> dict[str, list[Operation]]:
    """Returns {owner: operations} of a store; "" owns suspects of a process's death."""
    found: dict[str, list[Operation]] = {}
    for owner, text in connection.execute("SELECT owner, json FROM in_flight"):
        data = json.loads(text)
        data["parts"] = tuple((name, value) for name, value in data["parts"])
        found.setdefault(owner, []).append(Operation(**data))
    return found


def is_alive(owner: str) -> bool:
    """True if the process of an owner (``"pid:start time"``) lives and is no zombie."""
    pid, _, started = owner.partition(":")
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        pass
    except (ProcessLookupError, ValueError):
        return False
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Returns a process's start time in ticks; "" if it has ended, or is unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if status[0] == "Z" else status[19]


def settle(
    store: ProfileStore, pid: int | None = None, cause: Cause | None = None
) -> list[Operation]:
    """Removes operations of dead processes, and records failures of suspects.

    Suspects of a process are its overdue operations, else runs, else builds. The only
    suspect is recorded as a failure, if it was overdue, the cause is known, or two
    processes died of it. Other suspects are noted.

    Args:
      pid: id of a process that has ended, if its parent calls this.
      cause: (status, reason) of that end; None if unknown.

    Returns:
      The suspects of process `pid`; [] without `pid`.
    """
    suspects: list[Operation] = []
    with store.transaction() as connection:
        every = operations(connection)
        deaths = {one.key: one.deaths for one in every.get(_DEAD, ())}
        for one in every.pop(_DEAD, ()):
            if _is_done(store, one):
                _write(connection, _DEAD, one.key, None)
        for owner, mine in every.items():
            is_asked = owner.startswith(f"{pid}:")
            if is_alive(owner) and not is_asked:
                continue
            connection.execute("DELETE FROM in_flight WHERE owner = ?", (owner,))
            if is_asked:
                mine = [replace(one, overdue=_is_overdue(one)) for one in mine]
            # Overdue operations, else runs, else all.
            late = [one for one in mine if one.overdue]
            late = late or [one for one in mine if one.doing == "run"] or mine
            guilty = [one for one in late if not _is_done(store, one)]
            suspects += guilty if is_asked else ()
            why = cause if is_asked else None
            if why is None and guilty and all(one.overdue for one in guilty):
                why = "timeout", f"no end after {guilty[0].limit_seconds:.0f} s"
            for one in guilty:
                dead = replace(one, deaths=deaths.get(one.key, 0) + 1, overdue=False)
                if why is None and dead.deaths >= _MOST_DEATHS:
                    why = "crashed", f"the process died {dead.deaths} times"
                if why is not None and len(guilty) == 1:
                    _record(store, one, why)
                    dead = None
                _write(connection, _DEAD, one.key, dead)
    return suspects


def forget(store: ProfileStore, pid: int) -> None:
    """Removes the operations of a process that was ended from outside."""
    with store.transaction() as connection:
        connection.execute("DELETE FROM in_flight WHERE owner LIKE ?", (f"{pid}:%",))


def is_late(store: ProfileStore, pid: int) -> bool:
    """True if an operation of a process is past its deadline."""
    with store.transaction() as connection:
        every = operations(connection)
    mine = [every[owner] for owner in every if owner.startswith(f"{pid}:")]
    return any(map(_is_overdue, chain(*mine)))


def _is_overdue(one: Operation) -> bool:
    return one.overdue or one.deadline < time.monotonic()


def _is_done(store: ProfileStore, one: Operation) -> bool:
    record = store.get(one.key)
    # Texts of `utc_now` sort by time.
    return record is not None and record.created >= one.since


def _record(store: ProfileStore, one: Operation, why: Cause) -> None:
    status, reason = why[0], f"{why[1]} while {_WORDS[one.doing]} it"
    record = ProfileRecord(key=one.key, parts=one.parts, status=status, reason=reason)
    store.put(record, replace=True)
    _log.warning(
        "%s is left out: %s: %s "
        "(PlannerSettings(retry_failures=True), --retry-failures: try again)",
        f"{one.label} of {one.program}" if one.program else one.label,
        status.replace("_", " "),
        reason,
    )


def _write(connection: Connection, owner: str, key: str, one: Operation | None) -> None:
    where = "DELETE FROM in_flight WHERE owner = ? AND key = ?"
    connection.execute(where, (owner, key))
    if one is not None:
        row = key, owner, json.dumps(asdict(one))
        connection.execute("INSERT INTO in_flight VALUES (?, ?, ?)", row)


class InFlight:
    """Context that notes this process's operations in a store; `settle` begins it."""

    def __init__(
        self, store: ProfileStore, limits: Limits | None = None, program: str = ""
    ):
        self._store = store
        self._program = program
        self.limits = limits or Limits()
        self._owner = f"{os.getpid()}:{_started(os.getpid())}"
        self._mine: dict[str, Operation] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()

    def __enter__(self) -> InFlight:
        settle(self._store)
        threading.Thread(target=self._watch, name="cfp-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()
            with self._store.transaction() as connection:
                for digest in self._mine:
                    _write(connection, self._owner, digest, None)

    @property
    def is_closed(self) -> bool:
        """True after the context has ended, as by an interrupt."""
        return self._closed.is_set()

    def at_once(self, digests: Iterable[str], most: int) -> int:
        """Returns `most`, or 1 if a process may have died of one of these jobs."""
        with self._store.transaction() as connection:
            dead = {one.key for one in operations(connection).get(_DEAD, ())}
        return most if dead.isdisjoint(digests) else 1

    @contextlib.contextmanager
    def doing(
        self, key: ProfileKey, label: str, doing: Doing, expected_ms: float = 0.0
    ) -> Iterator[None]:
        """Context that notes a build or run until its body ends, or raises."""
        limit = self.limits.seconds(doing, expected_ms)
        one = Operation(
            parts=key.parts,
            label=label,
            program=self._program,
            doing=doing,
            since=utc_now(),
            limit_seconds=limit,
            deadline=time.monotonic() + limit,
        )
        self._set(key.digest, one)
        try:
            yield
        finally:
            self._set(key.digest, None)

    def _set(self, digest: str, one: Operation | None) -> None:
        with self._lock:
            if self._closed.is_set():
                return  # A build that continues after an interrupt.
            self._mine.pop(digest, None)
            self._mine |= {digest: one} if one else {}
            with self._store.transaction() as connection:
                _write(connection, self._owner, digest, one)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(_WATCH_SECONDS):
            now = time.monotonic()
            lost = now - looked if now - looked > _STOPPED_SECONDS else 0.0
            looked = now
            with self._lock:
                for one in [*self._mine.values()]:
                    if one.overdue or self._closed.is_set():
                        continue
                    late = now > one.deadline + lost
                    if late or lost:
                        moved = replace(one, deadline=one.deadline + lost, overdue=late)
                        self._set(one.key, moved)
                    if late:
                        _log.warning(
                            "%s: %s for more than %.0f s; it may hang. If you kill "
                            "this process now, it is left out, unless several hang",
                            one.label,
                            _WORDS[one.doing],
                            one.limit_seconds,
                        )
