"""Profile store: records in one SQLite file, shared by all processes.

A damaged file, or one of another version, is renamed with a warning, and an empty one
replaces it: its records are measured again.
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
from cfp.profiling.files import cache_dir, locked, make_private, make_private_folder
from cfp.profiling.record import ProfileKey, ProfileRecord, refused_option

STORE_NAME = "profiles.sqlite"

SCHEMA_VERSION = 2
_TABLES = (
    "CREATE TABLE records (key TEXT PRIMARY KEY NOT NULL, json TEXT NOT NULL)",
    "CREATE TABLE in_flight (key TEXT NOT NULL, owner TEXT NOT NULL, "
    "json TEXT NOT NULL, PRIMARY KEY (key, owner))",
)
_BUSY_SECONDS = 30.0  # Longest wait for another process that writes.

_log = logging.getLogger(__name__)


def store_path(folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the path of the store in a folder; None is `cache_dir()`."""
    return Path(folder if folder is not None else cache_dir()) / STORE_NAME


class ProfileStore:
    """Records by key, in one file; methods raise CfpError if it cannot be used.

    Several processes and threads may use one file at once; each process opens its own
    store. On a network file system, only processes of one host may share a file: each
    host needs its own, to `merge` later.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens the file; makes it and its folder if they are missing."""
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
        """Closes the file; reads and writes then raise ValueError."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def alone(self, keys: Iterable[str]) -> AbstractContextManager[bool]:
        """Context of a lock for jobs with these keys: True, or False if it is taken."""
        # The first letters of a least key are mostly 0. The last ones clash rarely.
        name = f"{self.path.name}.measuring-{min(keys)[-2:]}"
        return locked(self.path.with_name(name), waits=False)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Context of a transaction, or part of one: errors undo the outermost."""
        with self._lock, self._explained():
            if self._connection is None:
                raise ValueError("the store is closed")
            if self._connection.in_transaction:
                yield self._connection
                return
            # IMMEDIATE: reads must still be true when the transaction writes.
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
        """Returns a key's (`ProfileKey.digest`) record; None if missing or damaged."""
        return self.get_many((key,)).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, ProfileRecord]:
        """Returns {key: record} in the keys' order, without missing or damaged ones."""
        wanted = list(dict.fromkeys(keys))
        some = "SELECT value FROM json_each(?)"
        query = f"SELECT key, json FROM records WHERE key IN ({some})"
        found = _records(self._rows(query, [json.dumps(wanted)]))
        return {key: found[key] for key in wanted if key in found}

    def records(self) -> list[ProfileRecord]:
        """Returns all records, ordered by key; warns of and skips damaged ones."""
        rows = self._rows("SELECT key, json FROM records ORDER BY key")
        return [*_records(rows).values()]

    def put(self, record: ProfileRecord, *, replace: bool = False) -> bool:
        """Stores a record; returns False if an earlier one stays instead.

        The first "ok" record of a key stays. The first failure stays until an "ok"
        record comes. With `replace`, the new record always replaces the old one.
        """
        return self.put_all([record], replace=replace) == 1

    def put_all(
        self, records: Sequence[ProfileRecord], *, replace: bool = False
    ) -> int:
        """Stores records like `put`, in one transaction; returns the number written."""
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
        """Writes all readable records to a file of JSON lines; returns their number."""
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
                "file, or free disk space."
            ) from error
        return len(records)

    def merge(self, path: str | os.PathLike[str]) -> int:
        """Stores records of an exported file like `put`; returns the number written.

        Raises:
          CfpError: the file is invalid (`read_export`); nothing was added.
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
                f"{self.path.parent} writable and free disk space, or name another "
                "folder (CFP_CACHE_DIR, --workdir, cache_dir)."
            ) from error


def _records(rows: Iterable[tuple[str, str]]) -> dict[str, ProfileRecord]:
    """Reads (key, JSON) rows into {key: record}; warns of and skips damaged rows."""
    found: dict[str, ProfileRecord] = {}
    for key, text in rows:
        try:
            found[key] = ProfileRecord.from_json(text)
        except ValueError as error:
            _log.warning("the profile %s cannot be read and is skipped: %s", key, error)
    return found


def _open(path: Path) -> sqlite3.Connection:
    """Opens or makes a store's file; renames and replaces one with `_damage`."""
    make_private_folder(path.parent)
    # Without the lock, a second process could rename the first one's new file.
    how = {"timeout": _BUSY_SECONDS, "isolation_level": None}
    with locked(path.with_name(f"{path.name}.lock")):
        is_fresh = False
        while True:
            # SQLite's log files get the mode of this file.
            make_private(path)
            connection = sqlite3.connect(path, check_same_thread=False, **how)
            try:
                if not (damage := _damage(connection)):
                    return connection
                if is_fresh:
                    raise CfpError(
                        f"The profile cache {path} cannot be made: {damage}. "
                        "Name another folder (CFP_CACHE_DIR, --workdir, cache_dir)."
                    )
                # Renamed before closing, since SQLite writes its log on closing.
                _set_aside(path, damage)
                is_fresh = True
            except BaseException:
                connection.close()
                raise
            connection.close()


def _damage(connection: sqlite3.Connection) -> str:
    """Makes a new file's tables; describes damage or another version, or returns ""."""
    try:
        [[answer]] = connection.execute("PRAGMA quick_check(1)")
        [[version]] = connection.execute("PRAGMA user_version")
        [[tables]] = connection.execute("SELECT count(*) FROM sqlite_master")
        if answer != "ok":
            return " ".join(str(answer).split())
        if version != SCHEMA_VERSION and (version or tables):
            return f"schema version {version}, not {SCHEMA_VERSION}"
        # With WAL a killed process loses no records, a power cut the last ones.
        # Neither damages the file.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not version:
            for statement in (*_TABLES, f"PRAGMA user_version = {SCHEMA_VERSION}"):
                connection.execute(statement)
    except sqlite3.DatabaseError as error:
        # Errors of Python's sqlite3 have no code. The low byte is the error, the others
        # are details. The statements are correct, so that SQLITE_ERROR is of the file.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        damaged = sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR
        if code in damaged:
            return str(error)
        raise
    return ""


def _set_aside(path: Path, why: str) -> None:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    # Logs first: a new database must never have an old log.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    _log.warning(
        "the profile cache %s cannot be used (%s): it is renamed to %s, and its "
        "records will be measured again",
        path,
        why,
        aside.name,
    )


# ----------------------------------------------------------------------- exported files

# False times and sizes can only mislead a search. Two things could do harm, and are
# checked: compiler options in a program's choice, and control characters in text.

# A record of a program with thousands of collectives has a few megabytes.
_MOST_LINE_BYTES = 2**26
_KEPT = "\n\t"


def read_export(path: str | os.PathLike[str]) -> list[ProfileRecord]:
    """Reads the records of an exported file.

    Raises:
      CfpError: the file cannot be read, or a line is no record, has a key that is not
        its parts' digest, unprintable parts, or options that `refused_option` refuses.
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
        raise ValueError("the key is not the digest of its parts")
    if (found := _refused_choice(record.choice)) is not None:
        raise ValueError(found)
    if any(printable(text, _KEPT) != text for part in record.parts for text in part):
        raise ValueError("a record's key has characters that cannot be printed")
    return replace(record, reason=printable(record.reason, _KEPT))


def _refused_choice(text: str) -> str | None:
    """Describes a choice that is unreadable or has refused options; None for others."""
    if not text:
        return None
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "a choice that cannot be read"
    if not isinstance(data, dict):
        return "a choice that is no JSON object"
    return refused_option(data.get("options", {}))
