"""Checks of folders that must be writable: the profile cache and temporary files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Result, failed, passed

_ENOUGH_BYTES = 512 << 20  # Compiled programs take most of it.
_ELSEWHERE = "set CFP_CACHE_DIR to a directory that can be written, on a local disk"


def cache(machine: Machine) -> Result:
    """The cache directory can be made and written, and has space."""
    folder = machine.cache
    if folder is None:
        return failed(
            "cache",
            "no place for the cache: neither CFP_CACHE_DIR, XDG_CACHE_HOME nor a home "
            "directory",
            _ELSEWHERE,
        )
    if trouble := _write_error(folder):
        return failed("cache", f"{folder} cannot be written: {trouble}", _ELSEWHERE)
    free = machine.free_bytes(folder)
    if free < _ENOUGH_BYTES:
        return failed(
            "cache",
            f"{folder} has {free >> 20} MiB left; cfp needs {_ENOUGH_BYTES >> 20}",
            "make space there (its contents may be deleted), or set CFP_CACHE_DIR to a "
            "directory with more",
            free_bytes=free,
        )
    return passed("cache", f"{folder}, {free / 2**30:.0f} GiB free", free_bytes=free)


def scratch(machine: Machine) -> Result:
    """There is a directory for temporary files, with space."""
    folder = Path(machine.environ.get("TMPDIR") or tempfile.gettempdir())
    trouble = _write_error(folder) if folder.is_dir() else "it is no directory"
    if not trouble:
        free = machine.free_bytes(folder)
        if free >= _ENOUGH_BYTES:
            return passed("scratch", f"{folder}, {free / 2**30:.0f} GiB free")
        trouble = f"{free >> 20} MiB left"
    return failed(
        "scratch",
        f"{folder} cannot hold temporary files: {trouble}",
        "export TMPDIR, naming a directory with a few GiB of space",
    )


def _write_error(folder: Path) -> str:
    """Returns the reason why nothing can be written to a folder; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""
