"""Write-ahead log of device operations, for crash attribution.

A process that dies while it builds or runs something leaves its log behind, from which
those that come after find out why (`cfp.profiling.crashes`). While it lives, its log
keeps others from measuring the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
from pydantic import TypeAdapter

from cfp.errors import CacheError
from cfp.profiling.files import lock_file, make_private_folder, open_private
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.record import utc_now

Doing = Literal["build", "wait", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """An operation of a process that has not ended.

    Attributes:
      parts: of the key that its record will have.
      doing: "build", "run", or "wait": built, and not running yet.
      since: when this began: ISO 8601, UTC.
      limit_seconds: how long it may take; None for ever.
      deadline: when it counts as hung, as of `time.monotonic`, which the processes
        of a machine share.
      overdue: that moment has passed.
      program: whose it is, by the name of the user's function; "" if of none.
    """

    parts: Parts
    label: str
    doing: Doing
    since: str
    limit_seconds: float | None
    deadline: float | None
    overdue: bool = False
    program: str = ""

    @property
    def key(self) -> ProfileKey:
        return ProfileKey(self.parts)

    @property
    def words(self) -> str:
        """The word for it, to users."""
        return "running" if self.doing == "run" else "compiling"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInFlight:
    """The log of one process.

    Attributes:
      name: of its files, without suffix.
      witnessed: its crash record would stand in its `.alive` file.
      oom_kills: how many processes the kernel had ended for want of memory then.
    """

    name: str
    pid: int
    witnessed: bool = False
    oom_kills: int = 0
    operations: tuple[InFlight, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashCandidate:
    """Evidence against an operation during which processes died.

    Attributes:
      since: when the last of them had begun with it: ISO 8601, UTC.
      what: what it is, and what was done to it, in words.
    """

    crashes: int
    since: str
    what: str = ""


_PROCESS = TypeAdapter(ProcessInFlight)
_SUSPECTS = TypeAdapter(dict[str, CrashCandidate])


class InFlightFolder:
    """The logs of all processes beside a store, for reading them."""

    def __init__(self, store_path: Path):
        self.path = store_path.with_name(f"{store_path.name}.in_flight")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time begin, claim or tidy up."""
        make_private_folder(self.path)
        with open_private(self.path / "lock", "ab") as file:
            lock_file(file)
            yield

    def living(self) -> list[ProcessInFlight]:
        """Lists processes that live; call it with the lock held."""
        return [self.read(name) for name in self._names() if self._held(name) is True]

    def dead(self) -> list[ProcessInFlight]:
        """Lists processes that have died; call it with the lock held.

        Without file locks it is not known which processes are alive.
        """
        return [self.read(name) for name in self._names() if self._held(name) is False]

    def read(self, name: str) -> ProcessInFlight:
        """Reads the log of a process, living or not; empty if that cannot be read."""
        try:
            return _PROCESS.validate_json((self.path / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return ProcessInFlight(name=name, pid=0)

    def of_process(self, pid: int) -> list[str]:
        """Names the logs that a process has not tidied up."""
        return [path.stem for path in self.path.glob(f"{pid}-*.alive")]

    def is_late(self, pid: int) -> bool:
        """True if a process does something that is past its deadline.

        It notes that by itself, if it still can, and is given time to.
        """
        late = time.monotonic() - _GRACE_SECONDS
        return any(
            one.overdue or (one.deadline is not None and one.deadline < late)
            for name in self.of_process(pid)
            for one in self.read(name).operations
        )

    def crash_record(self, name: str) -> str:
        """Reads Python's line about a fatal signal; "" if there is none."""
        words = (self.path / f"{name}.alive").read_text(errors="replace").strip()
        return words.partition("\n")[0]

    def remove(self, name: str) -> None:
        """Forgets a process; to be called locked, or by itself."""
        for suffix in ("json", "json.new", "alive"):
            with contextlib.suppress(FileNotFoundError):
                (self.path / f"{name}.{suffix}").unlink()

    def suspects(self) -> dict[str, CrashCandidate]:
        """Lists candidates for crashes without a known cause, by key."""
        try:
            return _SUSPECTS.validate_json((self.path / "suspects.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def write_suspects(self, suspects: dict[str, CrashCandidate]) -> None:
        """To be called locked."""
        path = self.path / "suspects.json"
        if suspects:
            write_whole(path, {key: asdict(found) for key, found in suspects.items()})
        else:
            path.unlink(missing_ok=True)

    def _held(self, name: str) -> bool | None:
        """Returns True if a process lives; None if unknown, or if it just left."""
        path = self.path / f"{name}.alive"
        try:
            with open(path, "rb") as file:
                locked = lock_file(file, wait=False)
        except FileNotFoundError:
            return None
        # A process that ends well removes its files before it lets go of its lock.
        if locked is None or (locked and not path.exists()):
            return None
        return not locked

    def _names(self) -> list[str]:
        return sorted(path.stem for path in self.path.glob("*.alive"))


def write_whole(path: Path, data: Any) -> None:
    """Writes JSON, whole or not at all.

    Raises:
      CacheError: if it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with open_private(unfinished, "w") as file:
            file.write(json.dumps(data))
        unfinished.replace(path)
    except OSError as error:
        raise CacheError(
            "What is being measured cannot be noted.",
            expected=f"a file that can be written at {path}",
            got=str(error),
            attempt="free some room, or set CFP_CACHE_DIR to another directory",
        ) from error


# --------------------------------------------------------- the folder of all processes

_WATCH_SECONDS = 1.0
# A process notes by itself what is overdue, and is given time to.
_GRACE_SECONDS = 2.0
# A process that slept longer than this between two looks was stopped, and all else
# with it.
_STOPPED_SECONDS = 3.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits after which a build or a run counts as hung.

    Attributes:
      run_seconds: for making the inputs of one thing and running it, besides
        `run_expected` times what it is expected to take.
      run_expected: see above. The expectation is an estimate, and a run repeats.
      build_seconds: for compiling one thing. Large programs take many minutes.
    """

    run_seconds: float = 60.0
    run_expected: float = 20.0
    build_seconds: float = 1800.0

    def seconds(self, doing: Doing, expected_ms: float) -> float | None:
        """The limit of something; None for waiting, which has none."""
        match doing:
            case "run":
                return self.run_seconds + self.run_expected * expected_ms / 1e3
            case "build":
                return self.build_seconds
        return None


class InFlightLog:
    """The log of this process, from `with` to its end.

    May be used by several threads.
    """

    def __init__(
        self, store_path: Path, limits: Limits | None = None, program: str = ""
    ):
        """Makes the folder beside a store."""
        self._program = program
        self.folder = InFlightFolder(store_path)
        self.limits = limits or Limits()
        self._mine = ProcessInFlight(
            name=f"{os.getpid()}-{uuid.uuid4().hex[:8]}", pid=os.getpid()
        )
        self._operations: dict[str, InFlight] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._files = contextlib.ExitStack()

    def __enter__(self) -> InFlightLog:
        with self.folder.locked():
            file = open_private(self.folder.path / f"{self._mine.name}.alive", "ab")
            self._files.enter_context(file)
            lock_file(file)
        # Another's is left alone: pytest's, or one that the user asked for. Of
        # several processes one is ended when another dies, whatever it runs.
        if witnessed := not faulthandler.is_enabled() and jax.process_count() == 1:
            faulthandler.enable(file, all_threads=False)
            self._files.callback(faulthandler.disable)
        self._mine = replace(self._mine, witnessed=witnessed, oom_kills=oom_kills())
        threading.Thread(target=self._watch, name="cfp-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()
            self.folder.remove(self._mine.name)
            self._files.close()

    def at_once(self, digests: Iterable[str], most: int) -> int:
        """Limits the builds at once: to one, where a process may have died of some.

        Of several builds it is not known which one a process died of.
        """
        return most if self.folder.suspects().keys().isdisjoint(digests) else 1

    def claim(self, keys: Sequence[ProfileKey], count: int) -> list[ProfileKey]:
        """Takes the first few of some keys that no other living process is at.

        They are logged as waiting. A process that hangs has no claims.
        """
        with self.folder.locked(), self._lock:
            taken = {
                one.key.digest
                for other in self.folder.living()
                if other.name != self._mine.name
                and not any(one.overdue for one in other.operations)
                for one in other.operations
            }
            ours = [key for key in keys if key.digest not in taken][:count]
            for key in ours:
                self._operations[key.digest] = self._begin(key, "", "wait", 0.0)
            self._write()
        return ours

    @contextlib.contextmanager
    def doing(
        self,
        key: ProfileKey,
        label: str,
        doing: Doing,
        expected_ms: float = 0.0,
        *,
        then_wait: bool = False,
    ) -> Iterator[None]:
        """Logs something for as long as the body takes.

        Args:
          then_wait: log it as waiting afterwards.
        """
        self._set(key, self._begin(key, label, doing, expected_ms))
        try:
            yield
        finally:
            self._set(key, self._begin(key, label, "wait", 0.0) if then_wait else None)

    def release(self, key: ProfileKey) -> None:
        """Ends the operation with a key."""
        self._set(key, None)

    def _set(self, key: ProfileKey, one: InFlight | None) -> None:
        with self._lock:
            if self._closed.is_set():
                return  # A build that an interrupt did not wait for.
            if one is None:
                self._operations.pop(key.digest, None)
            else:
                self._operations[key.digest] = one
            self._write()

    def _begin(
        self, key: ProfileKey, label: str, doing: Doing, expected_ms: float
    ) -> InFlight:
        limit = self.limits.seconds(doing, expected_ms)
        return InFlight(
            parts=key.parts,
            label=label,
            doing=doing,
            since=utc_now(),
            limit_seconds=limit,
            deadline=None if limit is None else time.monotonic() + limit,
            program=self._program,
        )

    def _write(self) -> None:
        found = replace(self._mine, operations=tuple(self._operations.values()))
        write_whole(self.folder.path / f"{self._mine.name}.json", asdict(found))

    def _watch(self) -> None:
        """Notes what takes too long; nothing in this process can end it."""
        looked = time.monotonic()
        while not self._closed.wait(_WATCH_SECONDS):
            now = time.monotonic()
            lost = now - looked if now - looked > _STOPPED_SECONDS else 0.0
            looked = now
            with self._lock:
                late = self._judge(lost, now)
            for one in late:
                _log.warning(
                    "%s: %s for more than %.0f s; it may hang. If this process is "
                    "ended now, that is noted, and it is not tried again",
                    one.label,
                    one.words,
                    one.limit_seconds,
                )

    def _judge(self, lost: float, now: float) -> list[InFlight]:
        """Notes which operations are overdue, and returns those that were not before.

        Args:
            lost: seconds that the process was stopped for, which do not count.
        """
        before = self._operations
        judged = {key: _judged(one, lost, now) for key, one in before.items()}
        if judged != before and not self._closed.is_set():
            self._operations = judged
            self._write()
        every = judged.items()
        return [one for key, one in every if one.overdue and not before[key].overdue]


def _judged(one: InFlight, lost: float, now: float) -> InFlight:
    if one.deadline is None:
        return one
    deadline = one.deadline + lost
    return replace(one, deadline=deadline, overdue=one.overdue or now > deadline)


def oom_kills() -> int:
    """Reads the number of processes that Linux has ended for want of memory."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
