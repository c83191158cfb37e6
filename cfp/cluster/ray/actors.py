"""The actors of a planning: one has the devices, and one has the records."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cfp.cluster.ray.place import RayPlace
from cfp.errors import CfpError
from cfp.profiling.marks_folder import MarksFolder
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, default_cache_dir, store_path

_LOOK_SECONDS = 1.0
# What is overdue is noted by the marks' own thread first.
_GRACE_SECONDS = 2.0

Work = Callable[[RayPlace, Path], Any]


class Keeper:
    """Has the one store that all records of a planning go to.

    Lives on the node of the driver, and is started again there if it dies.

    Args:
        path: the store's file.
    """

    def __init__(self, path: Path) -> None:
        self._store = ProfileStore(path)

    def lines(self) -> list[str]:
        """All records, as JSON."""
        return [record.to_json() for record in self._store.records()]

    def put_all(self, lines: Sequence[str], replace: bool) -> int:
        """Keeps records, as a store does; to do it twice changes nothing."""
        records = [ProfileRecord.from_json(line.encode()) for line in lines]
        return self._store.put_all(records, replace=replace)


class Runner:
    """Has the devices of one mesh, and plans on them.

    If it dies, Ray starts it again, and the planning with it, which finds what was
    measured in the store.

    Args:
        planning: what is planned, in a word that no other planning has: the runner's
            own store, on its host, is named by it.
    """

    def __init__(self, planning: str) -> None:
        # Ray's has no file that a process that comes after this one could read.
        faulthandler.disable()
        digest = hashlib.sha256(planning.encode()).hexdigest()[:16]
        self._folder = default_cache_dir() / "ray" / digest

    def plan(self, keeper: Any, work: Work) -> tuple[Any, str | None]:
        """Does the work.

        Args:
            keeper: the actor with the records.
            work: the planning.

        Returns:
            What came of it, or what is wrong.
        """
        import ray

        path = store_path(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        with ProfileStore(path) as store:
            lines = ray.get(keeper.lines.remote())
            store.put_all([ProfileRecord.from_json(line.encode()) for line in lines])
        ends = threading.Event()
        watch = threading.Thread(target=_end_if_late, args=(path, ends), daemon=True)
        watch.start()
        try:
            return work(RayPlace(keeper), self._folder), None
        except CfpError as error:
            return None, str(error)
        finally:
            ends.set()


def _end_if_late(path: Path, ends: threading.Event) -> None:
    """Ends this process if something hangs: then it is known what, and what is next."""
    folder = MarksFolder(path)
    while not ends.wait(_LOOK_SECONDS):
        now = time.monotonic()
        for file in folder.path.glob(f"{os.getpid()}-*.alive"):
            marks = folder.read(file.stem).marks
            if any((mark.deadline or now) < now - _GRACE_SECONDS for mark in marks):
                os.kill(os.getpid(), signal.SIGKILL)
