"""The SQLite file under a `ProfileStore`: opened, checked, set aside if damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cfp.errors import CacheError
from cfp.printable import printable
from cfp.profiling.compiler_options import refused_option
from cfp.profiling.files import (
    lock_file,
    make_private,
    make_private_folder,
    open_private,
)
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord

SCHEMA_VERSION = 1
_BUSY_SECONDS = 30.0  # For another process that is writing.

_TABLE = (
    "CREATE TABLE records "
    "(key TEXT PRIMARY KEY NOT NULL, json BLOB NOT NULL, checksum BLOB NOT NULL)"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A file that has passed its checks, and the way to it.

    Attributes:
      connection: in autocommit mode; several threads may use it in turn.
      identity: device and inode.
    """

    path: Path
    connection: sqlite3.Connection
    identity: tuple[int, int]

    @property
    def is_current(self) -> bool:
        """Returns True if the path still leads to this file.

        SQLite goes on writing to a file that was deleted or renamed below it, and
        all of that would be lost.
        """
        try:
            return _identity(self.path) == self.identity
        except FileNotFoundError:
            return False


def open_sound(path: Path, *, thorough: bool = False) -> OpenFile:
    """Opens a file that passes all checks, a fresh one if need be.

    A file that fails is renamed to `<name>.damaged-<time>`, with its log.

    Args:
      path: the file; it and its directory are made if they are missing.
      thorough: check the index against the table too, which takes far longer.
        Wanted after `is_damage`, since the quick check has passed the file once.

    Raises:
      OSError, sqlite3.Error: if the file cannot be made, read or written.
    """
    make_private_folder(path.parent)
    with _only_opener(path):
        try:
            connection = _connect(path, thorough)
        except _DamagedError as damage:
            _log.warning(
                "the profile cache %s was damaged and is set aside (%s); a fresh one "
                "is begun: what it held will be measured again",
                path,
                damage,
            )
            connection = _connect(path, thorough)
        return OpenFile(path=path, connection=connection, identity=_identity(path))


def is_damage(error: sqlite3.Error) -> bool:
    """Returns True if an error means that the file was damaged, or moved."""
    # Errors that come from Python's side of sqlite3 have no code.
    code = getattr(error, "sqlite_errorcode", 0)
    # The low byte is the error, the others say more about it.
    return code == sqlite3.SQLITE_READONLY_DBMOVED or code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


class _DamagedError(OSError):
    """The file was no store of this version, whatever else it may have been."""


def _connect(path: Path, thorough: bool) -> sqlite3.Connection:
    """Opens, checks and, if it is new, fills the file.

    Raises:
      _DamagedError: if it was not a sound store; it has been set aside.
      sqlite3.Error: if it cannot be opened at all.
    """
    # SQLite gives its logs the mode of the file.
    make_private(path)
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        try:
            _prepare(connection, thorough)
        except sqlite3.DatabaseError as error:
            # Our statements are right, so a plain error means what the file says
            # of itself: "unsupported file format" and the like.
            if is_damage(error) or error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                raise _DamagedError(str(error)) from error
            raise
    except _DamagedError as damage:
        # Before closing: to close a file, SQLite writes its log into it.
        aside = _set_aside(path)
        connection.close()
        raise _DamagedError(f"{damage}; it is now {aside.name}") from damage
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, thorough: bool) -> None:
    # Damaged text may be anything; the reader's checksums will tell.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    check = "integrity_check" if thorough else "quick_check"
    answers = connection.execute(f"PRAGMA {check}(1)").fetchall()
    if answers != [("ok",)]:
        raise _DamagedError(" ".join(str(answers[0][0]).split()))
    connection.execute("PRAGMA journal_mode = WAL")
    # With WAL a killed process loses nothing, a power cut the last records, and
    # neither damages the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN IMMEDIATE")
    _check_or_make_schema(connection)
    connection.execute("COMMIT")


def _check_or_make_schema(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema")]
    if not version and not tables:
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif version != SCHEMA_VERSION:
        raise _DamagedError(f"schema version {version}, not {SCHEMA_VERSION}")
    # None is the index that SQLite makes for the primary key.
    elif tables != [_TABLE, None]:
        raise _DamagedError("its tables are not those of a profile cache")


@contextlib.contextmanager
def _only_opener(path: Path) -> Iterator[None]:
    """Lets one process at a time open the file.

    Two that find it damaged would otherwise both set it aside, the second one
    the fresh file of the first. Where there are no file locks that risk is taken.
    """
    with open_private(path.with_name(f"{path.name}.lock"), "ab") as file:
        lock_file(file)
        yield


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _set_aside(path: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    # The log first: without its database it is harmless, but a fresh database
    # must never meet an old log.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


# -------------------------------------------------------------------- exported records

# Times and sizes can mislead a search, and do no more. Two things are followed further:
# what a record says was chosen for a whole program holds compiler options, which may
# only be such as do no harm; and what is printed must not be commands to a terminal.

# A record of a program with thousands of collectives has a few megabytes.
_MOST_LINE_BYTES = 2**26
_KEPT = "\n\t"


def read_export(path: str | os.PathLike[str]) -> list[ProfileRecord]:
    """The records of an exported file.

    Raises:
      CacheError: a line is not a record, its key is not that of its parts, or it asks
        for compiler options that are not known to be harmless.
    """
    records: list[ProfileRecord] = []
    try:
        with open(path, "rb") as file:
            while line := file.readline(_MOST_LINE_BYTES + 1):
                if len(line) > _MOST_LINE_BYTES:
                    raise ValueError(f"a line of more than {_MOST_LINE_BYTES} bytes")
                records.append(_record(line))
    except (OSError, ValueError) as error:
        raise CacheError(
            f"Nothing was merged from {path}.",
            expected="a file that ProfileStore.export of this version wrote",
            got=f"{printable(str(error))}, after {len(records)} good lines",
            attempt="export it again with the same version of cfp",
        ) from error
    return records


def _record(line: bytes) -> ProfileRecord:
    record = ProfileRecord.from_json(line)
    if ProfileKey(record.parts).digest != record.key:
        raise ValueError("the key is not that of the parts")
    if (found := _refused_choice(record.choice)) is not None:
        raise ValueError(found)
    if any(printable(text, _KEPT) != text for part in record.parts for text in part):
        raise ValueError("parts of the key with characters that cannot be printed")
    return replace(record, reason=printable(record.reason, _KEPT))


def _refused_choice(text: str) -> str | None:
    """Returns the reason why a choice is not to be followed; None if it may be.

    It is "", a choice with its compiler options, or a list of such.
    """
    if not text:
        return None
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "a choice that cannot be read"
    if isinstance(data, list) and all(isinstance(one, str) for one in data):
        return next(filter(None, map(_refused_choice, data)), None)
    if not isinstance(data, dict):
        return "a choice that is neither one nor a list of them"
    return refused_option(data.get("options", {}))
