"""All checks, in the order in which they run, with their dependencies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cfp.attention.kernels import KERNELS
from cfp.cluster.doctor import driver, install, programs
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Result, Status, absent, failed, passed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check and its dependencies.

    Attributes:
        name: as in its result.
        run: the check itself.
        needs: checks that must have passed; where one failed or was absent, this one is
            absent, so that one fault is one FAIL.
    """

    name: str
    run: Callable[[Machine], Result]
    needs: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the check's docstring."""
        run = self.run.func if isinstance(self.run, partial) else self.run
        return (run.__doc__ or "").splitlines()[0]


CHECKS = (
    Check(name="python", run=install.python),
    Check(name="packages", run=install.packages),
    Check(name="jaxlib", run=install.jaxlib),
    Check(name="jax", run=install.jax, needs=("jaxlib",)),
    Check(name="plugin", run=install.plugin),
    Check(name="driver", run=driver.driver),
    Check(name="links", run=driver.links, needs=("driver",)),
    Check(name="cache", run=cache),
    Check(name="scratch", run=scratch),
    Check(name="devices", run=programs.devices, needs=("jax",)),
    Check(name="all-reduce", run=programs.all_reduce, needs=("devices",)),
    Check(name="shardy", run=programs.shardy, needs=("jax",)),
    Check(name="graft", run=programs.graft, needs=("devices", "shardy")),
    *(
        Check(
            name=kernel.name,
            run=partial(programs.attention_kernel, name=kernel.name),
            needs=("devices", "driver"),
        )
        for kernel in KERNELS.values()
        if kernel.remedy
    ),
)


def with_needs(names: Collection[str]) -> list[Check]:
    """Selects the checks of these names, and those that they need, in order."""
    wanted = set(names)
    for check in reversed(CHECKS):
        if check.name in wanted:
            wanted.update(check.needs)
    return [check for check in CHECKS if check.name in wanted]


def examine(machine: Machine, checks: Sequence[Check] = CHECKS) -> Iterator[Result]:
    """Runs checks one after another, and yields their results."""
    found: dict[str, Result] = {}
    for check in checks:
        result = _missing_need(check, found) or _run(check, machine)
        found[check.name] = result
        yield result


def _missing_need(check: Check, found: dict[str, Result]) -> Result | None:
    for need in check.needs:
        before = found.get(need)
        if before is None or before.status is Status.PASS:
            continue
        if before.status is Status.FAIL:
            return absent(check.name, f"not tried, as {need} failed")
        return absent(check.name, before.reason)
    return None


def _run(check: Check, machine: Machine) -> Result:
    try:
        return check.run(machine)
    except Exception as error:
        # A machine can be broken in ways that no check looks for. That is a result,
        # and the other checks go on.
        return failed(
            check.name,
            f"the check itself broke: {type(error).__name__}: {error}",
            "please report it, with what cfp doctor --json prints",
        )
