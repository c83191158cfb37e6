"""Checks of files: home, the cache directory, its locks and its clock."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cfp.cluster.doctor.ask import probe
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Result, failed, passed

_ENOUGH_BYTES = 512 << 20  # Compiled programs take most of it.
_SKEW_S = 2.0
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs")
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
    trouble = _write_trouble(folder)
    if trouble:
        return failed("cache", f"{folder} cannot be written: {trouble}", _ELSEWHERE)
    free = machine.free_bytes(folder)
    if free < _ENOUGH_BYTES:
        return failed(
            "cache",
            f"{folder} has {free >> 20} MiB left; cfp wants {_ENOUGH_BYTES >> 20}",
            "make space there (what stands in it may be deleted), or set CFP_CACHE_DIR "
            "to a directory with more",
            free_bytes=free,
        )
    return passed(
        "cache",
        f"{folder} ({file_system(machine, folder)}), {free / 2**30:.0f} GiB free",
        free_bytes=free,
    )


def home(machine: Machine) -> Result:
    """The home directory can be written, or nothing of cfp's stands there."""
    folder = machine.home
    if folder is None or not folder.is_dir():
        trouble = "there is none" if folder is None else f"{folder} is no directory"
    else:
        trouble = _write_trouble(folder)
    if not trouble:
        assert folder is not None, "it could be written"
        return passed("home", f"{folder} ({file_system(machine, folder)})")
    elsewhere = machine.cache is not None and not (
        folder and machine.cache.is_relative_to(folder)
    )
    if elsewhere:
        return passed("home", f"{trouble}; the cache is elsewhere ({machine.cache})")
    return failed(
        "home",
        f"the home directory cannot be written ({trouble}), and the cache would "
        "stand there",
        "export XDG_CACHE_HOME and CUDA_CACHE_PATH, both naming directories that can "
        "be written",
    )


def scratch(machine: Machine) -> Result:
    """There is a directory for temporary files, with space."""
    place = Path(machine.environ.get("TMPDIR") or tempfile.gettempdir())
    trouble = _write_trouble(place) if place.is_dir() else f"{place} is no directory"
    if not trouble:
        free = machine.free_bytes(place)
        if free >= _ENOUGH_BYTES:
            return passed("scratch", f"{place}, {free / 2**30:.0f} GiB free")
        trouble = f"{free >> 20} MiB left"
    return failed(
        "scratch",
        f"{place} does not do for temporary files: {trouble}",
        "export TMPDIR, naming a directory with a few GiB of space",
    )


def locks(machine: Machine) -> Result:
    """A lock on a file of the cache keeps other processes out."""
    folder = machine.cache
    assert folder is not None, "needs the check of the cache"
    where = f"{folder} ({file_system(machine, folder)})"
    # No JAX in this one: it starts in no time.
    answer = probe(machine, "locks", str(folder))
    if answer.timed_out:
        return failed(
            "locks",
            f"locking a file in {where} did not end",
            "the lock service (lockd) of the file system does not answer; "
            f"{_ELSEWHERE}",
        )
    if answer.trouble:
        return failed(
            "locks", f"files in {where} cannot be locked: {answer.trouble}", _ELSEWHERE
        )
    if not answer.data["excludes"]:
        return failed(
            "locks",
            f"a lock on a file in {where} does not keep other processes out",
            f"mount it with locks (no nolock, no local_lock), or {_ELSEWHERE}",
        )
    return passed("locks", f"locks hold in {where}")


def clock(machine: Machine) -> Result:
    """The clock of the file system agrees with that of the machine."""
    folder = machine.cache
    assert folder is not None, "needs the check of the cache"
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        skew_s = os.stat(file.name).st_mtime - machine.now()
    if abs(skew_s) > _SKEW_S:
        return failed(
            "clock",
            f"files in {folder} are stamped {abs(skew_s):.0f} s "
            f"{'ahead of' if skew_s > 0 else 'behind'} this machine's clock",
            "synchronize the clocks of this machine and its file server (chronyc "
            "makestep; timedatectl set-ntp true)",
            skew_s=skew_s,
        )
    return passed("clock", f"{skew_s:+.2f} s between file system and machine")


def file_system(machine: Machine, folder: Path) -> str:
    """The type of the file system that holds a folder, as /proc/mounts names it."""
    try:
        mounts = (machine.proc / "mounts").read_text().splitlines()
    except OSError:
        return "unknown file system"
    place = folder.resolve()
    best, kind = -1, "unknown file system"
    for line in mounts:
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) > best:
            best, kind = len(point), found
    network = kind in _NETWORK or kind.startswith("fuse.")
    return f"{kind}, a network file system" if network else kind


def _write_trouble(folder: Path) -> str:
    """Why nothing can be written there; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""
