"""The machine that the doctor examines, and processes that answer for it.

Checks read the machine through this record alone, so that a test can hand them one with
a fault. Python's own library is enough, but for comparing versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cfp.profiling.files import cache_dir

MARK = "cfp-doctor: "  # Before a line of JSON: a probe's name, and what it found.
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_CPU_DEVICES = "--xla_force_host_platform_device_count"


class Failure(Exception):
    """A fault of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The environment and folders that checks read.

    Attributes:
        search_path: folders of installed packages, as in `sys.path`.
        cache: the folder of cfp's measurements.
        timeout_s: the time limit of a process.
        enough_bytes: the free space that folders need; compiled programs take most.
    """

    environ: Mapping[str, str]
    search_path: tuple[str, ...]
    proc: Path
    cache: Path | None
    timeout_s: float
    enough_bytes: int = 512 << 20

    @classmethod
    def here(cls, *, cache: Path | None = None, timeout_s: float = 120) -> Machine:
        """Describes this machine, with another cache than cfp's if one is given."""
        return cls(
            environ=dict(os.environ),
            search_path=tuple(sys.path),
            proc=Path("/proc"),
            cache=cache or cache_dir(),
            timeout_s=timeout_s,
        )

    def which(self, tool: str) -> str | None:
        """Finds a command on the PATH."""
        return shutil.which(tool, path=self.environ.get("PATH", os.defpath))

    @property
    def shows_nvidia(self) -> bool:
        """True if there is a sign of NVIDIA's driver."""
        driver = self.proc / "driver" / "nvidia"
        return driver.exists() or self.which("nvidia-smi") is not None

    def installed(self) -> dict[str, metadata.Distribution]:
        """Finds all packages, by their normal names."""
        found: dict[str, metadata.Distribution] = {}
        for each in metadata.distributions(path=list(self.search_path)):
            name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
            found.setdefault(name, each)
        return found

    def requirements(self) -> dict[str, str]:
        """cfp's requirements by name, such as ``jax>=0.10.2,<0.13``.

        From its pyproject.toml, or from its installed metadata.
        """
        if _PROJECT.is_file():
            lines = tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
        else:
            lines = self.installed()["cfp"].requires or []
        named = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
        return {name: line for name, line in named.items() if "extra ==" not in line}


def allows(requirement: str, version: str) -> bool:
    """Returns True if a version is one that a requirement takes."""
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def tool(machine: Machine, *command: str) -> str:
    """Runs a command of the system, and returns its output.

    Raises:
        Failure: it cannot be run, fails or does not answer.
    """
    path = machine.which(command[0])
    if path is None:
        raise Failure(f"{command[0]} is not on the PATH")
    limit_s = min(30.0, machine.timeout_s)
    text, trouble = _run([path, *command[1:]], machine.environ, limit_s)
    if trouble:
        raise Failure(f"{command[0]} {trouble}")
    return text


def probe(machine: Machine, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Runs probes of `cfp.cluster.probes`, one after another, in one process.

    Returns:
        What each found, by name, and why the process ended before the last, if it did.
    """
    # Programs of the doctor are small: they need not take a device for themselves.
    variables = {**machine.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if (flags := variables.get("XLA_FLAGS", "")).find(_CPU_DEVICES) < 0:
        # Devices to sum over where there are only CPUs.
        variables["XLA_FLAGS"] = f"{flags} {_CPU_DEVICES}=4".strip()
    command = [sys.executable, "-m", "cfp.cluster.probes", *names]
    text, trouble = _run(command, variables, machine.timeout_s)
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    answers = [json.loads(line.removeprefix(MARK)) for line in lines]
    return dict(answers), f"the probe {trouble or 'gave no answer'}"


def _run(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[str, str]:
    """Runs a process with a time limit: its output, and what went wrong, if it did.

    One that cannot be killed, as a driver that hangs holds its callers in the kernel,
    is left behind. Output goes to files: what outlives the process keeps pipes open.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # Also after Ctrl-C nothing is left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        for file in (out, err):
            file.seek(0)
        text, errors = (file.read().decode(errors="replace") for file in (out, err))
    if code is None:
        return text, f"did not answer within {timeout_s:g} s"
    if code < 0:
        return text, f"was ended by {signal.Signals(-code).name}"
    last = (errors.strip() or text.strip() or f"exit code {code}").splitlines()[-1]
    return text, f"failed: {last[:300]}" if code else ""
