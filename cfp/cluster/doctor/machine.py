"""The machine that is examined: everything that checks ask of it.

Checks read the machine through this record alone, so that a test can hand them one with
a fault.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[3]


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The interpreter, environment and folders that checks read.

    Attributes:
        python: the interpreter that runs the probes.
        version: of that interpreter: major, minor, micro.
        environ: the environment variables.
        search_path: folders of installed packages, as in `sys.path`.
        home: the user's home directory; None where there is none.
        proc: the folder /proc.
        cache: the folder of cfp's measurements.
        timeout_s: the time limit of one probe.
        tool_timeout_s: the time limit of a tool such as nvidia-smi.
        free_bytes: the free space of the file system that holds a folder.
    """

    python: str
    version: tuple[int, int, int]
    environ: Mapping[str, str]
    search_path: tuple[str, ...]
    home: Path | None
    proc: Path
    cache: Path | None
    timeout_s: float
    tool_timeout_s: float
    free_bytes: Callable[[Path], int]

    @classmethod
    def here(cls, *, cache: Path | None = None, timeout_s: float = 120) -> Machine:
        """Describes this machine.

        Args:
            cache: another folder than the one that cfp would choose.
            timeout_s: the time limit of one probe.
        """
        home = _home(os.environ)
        return cls(
            python=sys.executable,
            version=sys.version_info[:3],
            environ=dict(os.environ),
            search_path=tuple(sys.path),
            home=home,
            proc=Path("/proc"),
            cache=cache or cache_dir(os.environ, home),
            timeout_s=timeout_s,
            tool_timeout_s=min(30.0, timeout_s),
            free_bytes=_free_bytes,
        )

    def which(self, tool: str) -> str | None:
        """Finds a command on the PATH."""
        return shutil.which(tool, path=self.environ.get("PATH", os.defpath))

    @property
    def shows_nvidia(self) -> bool:
        """True if there is a sign of NVIDIA's driver."""
        driver = self.proc / "driver" / "nvidia"
        return driver.exists() or self.which("nvidia-smi") is not None


def _home(environ: Mapping[str, str]) -> Path | None:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:  # The user has no entry in the password database.
        return None


def cache_dir(environ: Mapping[str, str], home: Path | None) -> Path | None:
    """Returns the folder of cfp's measurements; None if nothing says where.

    The same as `cfp.profiling.store.default_cache_dir`, which needs JAX.
    """
    if chosen := environ.get("CFP_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "cfp"
    return home / ".cache" / "cfp" if home else None
