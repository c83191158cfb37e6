"""Profile store: one SQLite file, shared by all processes.

What is read is never trusted blindly. The file is checked when it is opened and
each row when it is read. A damaged file is set aside and a fresh one begun, a
damaged row is dropped, both with a message through `logging`: a cache may forget,
it must not lie, and it must not stop the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cfp.errors import CacheError
from cfp.profiling.files import cache_dir, close_to_others
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store_file import OpenFile, is_damage, open_sound, read_export

STORE_NAME = "profiles.sqlite"

_COLUMNS = "SELECT rowid, key, json, checksum FROM records"
# SQLite builds differ in how many variables a statement may have; all take these.
_KEYS_PER_QUERY = 500

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def default_cache_dir() -> Path:
    """The folder that `cfp.profiling.files.cache_dir` names.

    Raises:
      CacheError: nothing names one.
    """
    if (found := cache_dir()) is not None:
        return found
    raise CacheError(
        "There is no place for the profile cache.",
        expected="CFP_CACHE_DIR, XDG_CACHE_HOME or a home directory",
        got="none of them",
        attempt="set CFP_CACHE_DIR to a directory that can be written",
    )


def store_path(folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the path of the store in a folder, or in the default one.

    Raises:
      CacheError: if there is no default one.
    """
    return Path(folder if folder is not None else default_cache_dir()) / STORE_NAME


def _own_store() -> Path | None:
    """The store in the folder that cfp named itself; None if the user named one."""
    if os.environ.get("CFP_CACHE_DIR"):
        return None
    with contextlib.suppress(CacheError):
        return store_path()
    return None


class ProfileStore:
    """Records by key, in one file.

    Several processes and threads may use one file at once; each process opens a
    store of its own. On a network file system only processes of one host may
    share a file: give each host its own, and `merge` them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        copy: Callable[[Sequence[ProfileRecord], bool], None] | None = None,
    ):
        """Opens the file, and makes it and its directory if they are missing.

        Args:
          copy: called with what was put, and whether it was to replace, once it is
            in the file.

        Raises:
          CacheError: if the directory or the file cannot be made or written.
        """
        self.path = Path(path)
        self._copy = copy
        self._lock = threading.RLock()
        self._file: OpenFile | None = None
        with self._explained():
            if self.path == _own_store():
                close_to_others(self.path.parent)
            self._file = open_sound(self.path)

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the use of the file; any later call but this one is an error."""
        with self._lock:
            if self._file is not None:
                self._file.connection.close()
            self._file = None

    def __len__(self) -> int:
        return self._do(
            lambda connection: connection.execute(
                "SELECT count(*) FROM records"
            ).fetchone()[0]
        )

    def get(self, key: str) -> ProfileRecord | None:
        """The record of a key (a `ProfileKey.digest`), or None."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, ProfileRecord]:
        """The records of those keys that have one."""
        wanted = list(dict.fromkeys(keys))

        def read(connection: sqlite3.Connection) -> dict[str, ProfileRecord]:
            found: dict[str, ProfileRecord] = {}
            for start in range(0, len(wanted), _KEYS_PER_QUERY):
                some = wanted[start : start + _KEYS_PER_QUERY]
                marks = ", ".join("?" * len(some))
                for record in _read(
                    connection, f"{_COLUMNS} WHERE key IN ({marks})", some
                ):
                    found[record.key] = record
            return found

        found = self._do(read)
        return {key: found[key] for key in wanted if key in found}

    @property
    def build_path(self) -> Path:
        """Beside which compilers keep what they have learnt."""
        return self.path

    def records(self) -> list[ProfileRecord]:
        """All records, ordered by key."""
        return self._do(
            lambda connection: list(_read(connection, f"{_COLUMNS} ORDER BY key"))
        )

    def put(self, record: ProfileRecord, *, replace: bool = False) -> bool:
        """Keeps a record, unless one that is as good is kept already.

        The first "ok" record of a key stays, and the first failure does until an
        "ok" record comes.

        Args:
          replace: put it in the place of whatever is there.

        Returns:
          Whether the record was written.
        """
        return self.put_all([record], replace=replace) == 1

    def put_all(
        self, records: Sequence[ProfileRecord], *, replace: bool = False
    ) -> int:
        """Keeps records like `put`: all of them or, on an error, none.

        Returns:
          How many were written.
        """

        def write(connection: sqlite3.Connection) -> int:
            written = 0
            # IMMEDIATE: what was looked up must still hold when it is written.
            connection.execute("BEGIN IMMEDIATE")
            try:
                for record in records:
                    query = f"{_COLUMNS} WHERE key = ?"
                    kept = next(_read(connection, query, [record.key]), None)
                    if kept and not replace and (kept.ok or not record.ok):
                        continue
                    text = record.to_json().encode()
                    connection.execute(
                        "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
                        (record.key, text, _checksum(record.key, text)),
                    )
                    written += 1
                connection.execute("COMMIT")
            except BaseException:
                # Some errors have ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return written

        written = self._do(write)
        if self._copy is not None:
            self._copy(records, replace)
        return written

    def keys(self) -> list[ProfileKey]:
        """All keys that have a record."""
        return [ProfileKey(record.parts) for record in self.records()]

    def explain(self, key: ProfileKey) -> str:
        """Explains a missing record: the differences from the nearest stored one."""
        return key.explain(self.keys())

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes all records to a file of JSON lines, whole or not at all.

        Returns:
          How many there were.

        Raises:
          CacheError: if the file cannot be written.
        """
        records = self.records()
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(record.to_json() + "\n" for record in records)
            unfinished.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise CacheError(
                "The profiles cannot be exported.",
                expected=f"a file that can be written at {target}",
                got=str(error),
                attempt="name another file, or free some room",
            ) from error
        return len(records)

    def merge(self, path: str | os.PathLike[str]) -> int:
        """Adds the records of an exported file, all or, on an error, none.

        Returns:
          How many were new, or better than what was here.

        Raises:
          CacheError: if a line is not a record, or asks for what no record may; see
            `cfp.profiling.store_file`.
        """
        return self.put_all(read_export(path))

    def _do(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with self._lock, self._explained():
            if self._file is None:
                raise ValueError("the store is closed")
            if not self._file.is_current:
                _log.warning("%s was moved or deleted; opening it again", self.path)
                self._reopen(self._file, thorough=False)
            try:
                return work(self._file.connection)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                _log.warning("%s: %s; opening it again", self.path, error)
            # Opening checks the file, and sets it aside if it is damaged.
            self._reopen(self._file, thorough=True)
            return work(self._file.connection)

    def _reopen(self, file: OpenFile, *, thorough: bool) -> None:
        # In this order, so that a failure leaves the old file to try again from.
        self._file = open_sound(self.path, thorough=thorough)
        file.connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise CacheError(
                f"The profile cache {self.path} cannot be used.",
                expected="a file that can be made, read and written, on a disk "
                "with room, and a directory too",
                got=str(error),
                attempt="set CFP_CACHE_DIR to another directory, or "
                f"make {self.path.parent} writable and free some room",
            ) from error


def _checksum(key: str, text: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + text).digest()


def _read(
    connection: sqlite3.Connection, query: str, values: Iterable[str] = ()
) -> Iterator[ProfileRecord]:
    """Yields the sound records of a query, and drops the other rows."""
    rows = connection.execute(query, tuple(values)).fetchall()
    for rowid, key, text, checksum in rows:
        try:
            # Damage may have changed types too.
            if not (isinstance(key, str) and isinstance(text, bytes)):
                raise ValueError("wrong types")
            if _checksum(key, text) != checksum:
                raise ValueError("wrong checksum")
            record = ProfileRecord.from_json(text)
            if record.key != key:
                raise ValueError("wrong key")
        except ValueError as error:
            _log.warning("dropped the damaged profile %s: %s", key, error)
            connection.execute("DELETE FROM records WHERE rowid = ?", (rowid,))
            continue
        yield record


# --------------------------------------------------------- one store for all processes
