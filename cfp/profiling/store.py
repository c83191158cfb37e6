"""Profile store: one SQLite file, shared by all processes.

A file that is damaged, or of another version, is set aside with a warning, and a fresh
one is begun: what it held is measured again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cfp.errors import CfpError
from cfp.printable import printable
from cfp.profiling.files import (
    cache_dir,
    locked,
    make_private,
    make_private_folder,
)
from cfp.profiling.record import ProfileKey, ProfileRecord, refused_option

STORE_NAME = "profiles.sqlite"

SCHEMA_VERSION = 2
_TABLES = (
    "CREATE TABLE records (key TEXT PRIMARY KEY NOT NULL, json TEXT NOT NULL)",
    "CREATE TABLE in_flight (key TEXT NOT NULL, owner TEXT NOT NULL, "
    "json TEXT NOT NULL, PRIMARY KEY (key, owner))",
)
_BUSY_SECONDS = 30.0  # For another process that is writing.

_log = logging.getLogger(__name__)


def store_path(folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the path of the store in a folder, or in the default one."""
    return Path(folder if folder is not None else cache_dir()) / STORE_NAME


class ProfileStore:
    """Records by key, in one file; CfpError is raised if it cannot be used.

    Several processes and threads may use one file at once; each process opens a
    store of its own. On a network file system only processes of one host may
    share a file: give each host its own, and `merge` them.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens the file, and makes it and its directory if they are missing."""
        self.path = Path(path)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        with self._explained():
            self._connection = _open(self.path)

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the use of the file; any later call but this one is an error."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def alone(self, keys: Iterable[str]) -> AbstractContextManager[bool]:
        """Has no other process measure some jobs meanwhile; False if one does."""
        # Of one lock for each job few would be used: others seldom share a letter.
        name = f"{self.path.name}.measuring-{min(keys)[0]}"
        return locked(self.path.with_name(name), waits=False)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction, or the one that it is in: on an error nothing is written."""
        with self._lock, self._explained():
            if self._connection is None:
                raise ValueError("the store is closed")
            if self._connection.in_transaction:
                yield self._connection
                return
            # IMMEDIATE: what is looked up must still hold when it is written.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # Some errors have ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def __len__(self) -> int:
        [[count]] = self._rows("SELECT count(*) FROM records")
        return count

    def get(self, key: str) -> ProfileRecord | None:
        """The record of a key (a `ProfileKey.digest`), or None."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, ProfileRecord]:
        """Returns the stored records of some keys."""
        wanted = list(dict.fromkeys(keys))
        some = "SELECT value FROM json_each(?)"
        query = f"SELECT key, json FROM records WHERE key IN ({some})"
        found = _records(self._rows(query, [json.dumps(wanted)]))
        return {key: found[key] for key in wanted if key in found}

    def records(self) -> list[ProfileRecord]:
        """All records, ordered by key."""
        rows = self._rows("SELECT key, json FROM records ORDER BY key")
        return [*_records(rows).values()]

    def put(self, record: ProfileRecord, *, replace: bool = False) -> bool:
        """Keeps a record, unless one that is as good is there; returns True if it did.

        The first "ok" record of a key stays, and the first failure does until an
        "ok" record comes; with `replace` nothing does.
        """
        return self.put_all([record], replace=replace) == 1

    def put_all(
        self, records: Sequence[ProfileRecord], *, replace: bool = False
    ) -> int:
        """Keeps records like `put`, all or none; returns how many were written."""
        written = 0
        with self.transaction() as connection:
            for record in records:
                kept = None if replace else self.get(record.key)
                if kept and (kept.ok or not record.ok):
                    continue
                row = record.key, record.to_json()
                connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", row)
                written += 1
        return written

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes all records to a file of JSON lines, or none; returns how many."""
        records, target = self.records(), Path(path)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
        try:
            lines = (record.to_json() + "\n" for record in records)
            unfinished.write_text("".join(lines), encoding="utf-8")
            unfinished.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise CfpError(
                f"The profiles cannot be exported to {target}: {error}. Name another "
                "file, or free some room."
            ) from error
        return len(records)

    def merge(self, path: str | os.PathLike[str]) -> int:
        """Adds the records of an exported file, all or none; returns how many were new.

        Raises:
          CfpError: see `read_export`.
        """
        return self.put_all(read_export(path))

    def _rows(self, query: str, values: Sequence[str] = ()) -> list[tuple]:
        with self._lock, self._explained():
            if self._connection is None:
                raise ValueError("the store is closed")
            return self._connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise CfpError(
                f"The profile cache {self.path} cannot be used: {error}. Make "
                f"{self.path.parent} writable and free some room, or set CFP_CACHE_DIR "
                "to another directory."
            ) from error


def _records(rows: Iterable[tuple[str, str]]) -> dict[str, ProfileRecord]:
    """Reads records of rows, by key; damaged rows are left out."""
    found: dict[str, ProfileRecord] = {}
    for key, text in rows:
        try:
            found[key] = ProfileRecord.from_json(text)
        except ValueError as error:
            _log.warning("the profile %s cannot be read: %s", key, error)
    return found


def _open(path: Path) -> sqlite3.Connection:
    """Opens a store; a file that is no sound store is replaced."""
    make_private_folder(path.parent)
    # Two that find it damaged would otherwise both set it aside, the second one the
    # fresh file of the first.
    how = {"timeout": _BUSY_SECONDS, "isolation_level": None}
    with locked(path.with_name(f"{path.name}.lock")):
        is_fresh = False
        while True:
            # SQLite gives its logs the mode of the file.
            make_private(path)
            connection = sqlite3.connect(path, check_same_thread=False, **how)
            try:
                if not (damage := _damage(connection)):
                    return connection
                if is_fresh:
                    raise CfpError(f"The cache {path} cannot be made: {damage}")
                # Before closing: to close a file, SQLite writes its log into it.
                _set_aside(path, damage)
                is_fresh = True
            except BaseException:
                connection.close()
                raise
            connection.close()


def _damage(connection: sqlite3.Connection) -> str:
    """Makes a file ready, and fills it if it is new; says why it is none of these."""
    try:
        [[answer]] = connection.execute("PRAGMA quick_check(1)")
        [[version]] = connection.execute("PRAGMA user_version")
        [[tables]] = connection.execute("SELECT count(*) FROM sqlite_master")
        if answer != "ok":
            return " ".join(str(answer).split())
        if version != SCHEMA_VERSION and (version or tables):
            return f"schema version {version}, not {SCHEMA_VERSION}"
        # With WAL a killed process loses nothing, a power cut the last records, and
        # neither damages the file.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not version:
            for statement in (*_TABLES, f"PRAGMA user_version = {SCHEMA_VERSION}"):
                connection.execute(statement)
    except sqlite3.DatabaseError as error:
        # Errors from Python's side of sqlite3 have no code. The low byte is the error,
        # the others say more about it. Our statements are right, so that a plain error
        # means what the file says of itself.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
            sqlite3.SQLITE_ERROR,
        ):
            return str(error)
        raise
    return ""


def _set_aside(path: Path, why: str) -> None:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    # The log first: a fresh database must never meet an old log.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    _log.warning(
        "the profile cache %s was damaged and is set aside (%s): it is now %s, and "
        "what it held will be measured again",
        path,
        why,
        aside.name,
    )


# ----------------------------------------------------------------------- exported files

# Times and sizes can mislead a search, and do no more. Two things are followed further:
# what a record says was chosen for a whole program holds compiler options, which may
# only be such as do no harm; and what is printed must not be commands to a terminal.


# A record of a program with thousands of collectives has a few megabytes.
_MOST_LINE_BYTES = 2**26
_KEPT = "\n\t"


def read_export(path: str | os.PathLike[str]) -> list[ProfileRecord]:
    """Reads the records of an exported file.

    Raises:
      CfpError: a line is no record, its key does not fit its parts, or it contains
        compiler options that are not known to be harmless.
    """
    records: list[ProfileRecord] = []
    try:
        with open(path, "rb") as file:
            while line := file.readline(_MOST_LINE_BYTES + 1):
                if len(line) > _MOST_LINE_BYTES:
                    raise ValueError(f"a line of more than {_MOST_LINE_BYTES} bytes")
                records.append(_read_line(line))
    except (OSError, ValueError) as error:
        raise CfpError(
            f"Nothing was merged from {path}: {printable(str(error))}, after "
            f"{len(records)} good lines. Export it again with the same version of "
            "cfp."
        ) from error
    return records


def _read_line(line: bytes) -> ProfileRecord:
    record = ProfileRecord.from_json(line)
    if ProfileKey(record.parts).digest != record.key:
        raise ValueError("the key is not that of the parts")
    if (found := _refused_choice(record.choice)) is not None:
        raise ValueError(found)
    if any(printable(text, _KEPT) != text for part in record.parts for text in part):
        raise ValueError("parts of the key with characters that cannot be printed")
    return replace(record, reason=printable(record.reason, _KEPT))


def _refused_choice(text: str) -> str | None:
    """Returns the reason to refuse a stored choice with compiler options, or None."""
    if not text:
        return None
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "a choice that cannot be read"
    if not isinstance(data, dict):
        return "a choice that is none"
    return refused_option(data.get("options", {}))
