"""The folder with the marks of all processes that use a store.

Beside the store `profiles.sqlite` stands a folder `profiles.sqlite.marks`, with two
files for each process: `<name>.json`, its marks, and `<name>.alive`, which it keeps
locked for as long as it lives, and into which Python writes its crash record. A lock
ends with its owner, however that ended; a process id says less, since ids are used
again, and are others in another container.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cfp.errors import CacheError, compose
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.locks import lock_file
from cfp.profiling.private import make_private_folder, open_private

Doing = Literal["build", "wait", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One thing that a process is at.

    Attributes:
      parts: of the key that its record will have.
      label: what progress calls it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The log of one process.

    Attributes:
      name: of its files, without suffix.
      pid: its process id.
      witnessed: its crash record would stand in its `.alive` file.
      oom_kills: how many processes the kernel had ended for want of memory then.
      marks: what it is at.
    """

    name: str
    pid: int
    witnessed: bool = False
    oom_kills: int = 0
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Evidence against an operation beside which processes died.

    Attributes:
      deaths: how many.
      since: when the last of them had begun with it: ISO 8601, UTC.
      what: what it is, and what was done to it, in words.
    """

    deaths: int
    since: str
    what: str = ""


class MarksFolder:
    """The folder of marks beside a store, for reading them."""

    def __init__(self, store_path: Path):
        self.path = store_path.with_name(f"{store_path.name}.marks")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time begin, claim or tidy up."""
        make_private_folder(self.path)
        with open_private(self.path / "lock", "ab") as file:
            lock_file(file)
            yield

    def living(self) -> list[Marked]:
        """Lists processes that live; call it with the lock held."""
        return [self.read(name) for name in self._names() if self._held(name) is True]

    def dead(self) -> list[Marked]:
        """Lists processes that have died; call it with the lock held.

        Without file locks it is not known which processes are alive.
        """
        return [self.read(name) for name in self._names() if self._held(name) is False]

    def read(self, name: str) -> Marked:
        """Reads the log of a process, living or not; empty if that cannot be read."""
        try:
            data = json.loads((self.path / f"{name}.json").read_text())
            marks = [
                Mark(**{**mark, "parts": tuple((a, b) for a, b in mark["parts"])})
                for mark in data.pop("marks")
            ]
            return Marked(**data, marks=tuple(marks))
        except (OSError, ValueError, TypeError, KeyError):
            return Marked(name=name, pid=0)

    def crash_record(self, name: str) -> str:
        """Reads Python's line about a fatal signal; "" if there is none."""
        words = (self.path / f"{name}.alive").read_text(errors="replace").strip()
        return words.partition("\n")[0]

    def remove(self, name: str) -> None:
        """Forgets a process; to be called locked, or by itself."""
        for suffix in ("json", "json.new", "alive"):
            with contextlib.suppress(FileNotFoundError):
                (self.path / f"{name}.{suffix}").unlink()

    def suspects(self) -> dict[str, Suspicion]:
        """Lists suspects of deaths without a known cause, by key."""
        try:
            found = json.loads((self.path / "suspects.json").read_text())
            return {key: Suspicion(**suspicion) for key, suspicion in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write_suspects(self, suspects: dict[str, Suspicion]) -> None:
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
            compose(
                "What is being measured cannot be noted.",
                expected=f"a file that can be written at {path}",
                got=str(error),
                attempt="free some room, or set CFP_CACHE_DIR to another directory",
            )
        ) from error
