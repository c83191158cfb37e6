"""The machine that is examined: everything that checks ask of it.

Checks read the machine through this record alone, so that a test can hand them one with
a fault.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
UNLIMITED = resource.RLIM_INFINITY


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _soft_limit(name: str) -> int:
    return resource.getrlimit(getattr(resource, name))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where checks look.

    Attributes:
        python: the interpreter that runs the probes.
        version: of that interpreter: major, minor, micro.
        environ: the environment variables.
        search_path: where installed packages are looked for, as in `sys.path`.
        home: the user's home directory; None where there is none.
        proc, sys, shm: the folders /proc, /sys and /dev/shm.
        cache: where cfp keeps its measurements.
        timeout_s: how long one probe may take.
        tool_timeout_s: how long a tool such as nvidia-smi may take.
        free_bytes: the free space of the file system that holds a folder.
        soft_limit: a resource limit by the name that the `resource` module gives it;
            `UNLIMITED` for none.
        now: seconds since the epoch.
    """

    python: str
    version: tuple[int, int, int]
    environ: Mapping[str, str]
    search_path: tuple[str, ...]
    home: Path | None
    proc: Path
    sys: Path
    shm: Path
    cache: Path | None
    timeout_s: float
    tool_timeout_s: float
    free_bytes: Callable[[Path], int]
    soft_limit: Callable[[str], int]
    now: Callable[[], float]

    @classmethod
    def here(cls, *, cache: Path | None = None, timeout_s: float = 120) -> Machine:
        """This machine.

        Args:
            cache: another folder than the one that cfp would choose.
            timeout_s: how long one probe may take.
        """
        home = _home(os.environ)
        return cls(
            python=sys.executable,
            version=sys.version_info[:3],
            environ=dict(os.environ),
            search_path=tuple(sys.path),
            home=home,
            proc=Path("/proc"),
            sys=Path("/sys"),
            shm=Path("/dev/shm"),
            cache=cache or cache_dir(os.environ, home),
            timeout_s=timeout_s,
            tool_timeout_s=min(30.0, timeout_s),
            free_bytes=_free_bytes,
            soft_limit=_soft_limit,
            now=time.time,
        )

    def which(self, tool: str) -> str | None:
        """The path of a command."""
        return shutil.which(tool, path=self.environ.get("PATH", os.defpath))

    @property
    def shows_nvidia(self) -> bool:
        """Whether there is a sign of NVIDIA's driver."""
        driver = self.proc / "driver" / "nvidia"
        return driver.exists() or self.which("nvidia-smi") is not None


def _home(environ: Mapping[str, str]) -> Path | None:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:  # The user has no entry in the password database.
        return None


def cache_dir(environ: Mapping[str, str], home: Path | None) -> Path | None:
    """Where cfp keeps its measurements; None if nothing says where.

    As `cfp.profiling.store.default_cache_dir` has it, which cannot be asked where JAX
    is missing.
    """
    if chosen := environ.get("CFP_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "cfp"
    return home / ".cache" / "cfp" if home else None
