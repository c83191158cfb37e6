"""The machine that is examined, and processes that answer for it.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cfp.profiling.files import cache_dir

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
MARK = "cfp-doctor: "  # Before the line that a probe answers with.
_TO_DIE_S = 3.0
_SHOWN_CHARACTERS = 300

Number = float | int | str


class Failure(Exception):
    """A fault of the machine.

    Args:
        reason: the finding, in one sentence.
        remedy: unless the check's own remedies have one.
        numbers: measurements by name, with units in the names.
    """

    def __init__(self, reason: str, remedy: str = "", **numbers: Number):
        super().__init__(reason)
        self.reason, self.remedy, self.numbers = reason, remedy, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The interpreter, environment and folders that checks read.

    Attributes:
        python: the interpreter that runs the probes.
        version: of that interpreter: major, minor, micro.
        search_path: folders of installed packages, as in `sys.path`.
        cache: the folder of cfp's measurements.
        tool_timeout_s: the time limit of a tool such as nvidia-smi.
        free_bytes: the free space of the file system that holds a folder.
    """

    python: str
    version: tuple[int, int, int]
    environ: Mapping[str, str]
    search_path: tuple[str, ...]
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
        """
        return cls(
            python=sys.executable,
            version=sys.version_info[:3],
            environ=dict(os.environ),
            search_path=tuple(sys.path),
            proc=Path("/proc"),
            cache=cache or cache_dir(),
            timeout_s=timeout_s,
            tool_timeout_s=min(30.0, timeout_s),
            free_bytes=lambda folder: shutil.disk_usage(folder).free,
        )

    def which(self, tool: str) -> str | None:
        """Finds a command on the PATH."""
        return shutil.which(tool, path=self.environ.get("PATH", os.defpath))

    @property
    def shows_nvidia(self) -> bool:
        """True if there is a sign of NVIDIA's driver."""
        driver = self.proc / "driver" / "nvidia"
        return driver.exists() or self.which("nvidia-smi") is not None

    def installed(self, name: str) -> str | None:
        """Returns the version in a package's metadata; None if it is missing."""
        places = list(self.search_path)
        found = metadata.distributions(name=name, path=places)
        return next((one.version for one in found), None)

    def names_like(self, pattern: str) -> dict[str, str]:
        """Finds all packages with a name that matches; versions by name."""
        found: dict[str, str] = {}
        for each in metadata.distributions(path=list(self.search_path)):
            name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
            if re.fullmatch(pattern, name):
                found.setdefault(name, each.version)
        return dict(sorted(found.items()))

    def requirements(self) -> dict[str, str]:
        """cfp's requirements by name, such as ``jax>=0.10.2,<0.13``.

        From its pyproject.toml, or from its installed metadata.
        """
        project = PACKAGE_ROOT / "pyproject.toml"
        if project.is_file():
            lines = tomllib.loads(project.read_text())["project"]["dependencies"]
        else:
            places = list(self.search_path)
            found = [*metadata.distributions(name="cfp", path=places)]
            lines = (found[0].requires or []) if found else []
        named = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
        return {name: line for name, line in named.items() if "extra ==" not in line}


def allows(requirement: str, version: str) -> bool:
    """Returns True if a version is one that a requirement takes."""
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def same_release(one: str, other: str) -> bool:
    """Returns True if the first three numbers of two versions agree."""
    return one.split(".")[:3] == other.split(".")[:3]


def tool(machine: Machine, *command: str) -> str:
    """Runs a command of the system, and returns its output.

    Raises:
        Failure: it cannot be run, fails or does not answer.
    """
    path = machine.which(command[0])
    if path is None:
        raise Failure(f"{command[0]} is not on the PATH")
    words = [path, *command[1:]]
    text, trouble = _run(words, machine.environ, machine.tool_timeout_s, command[0])
    if trouble:
        raise Failure(trouble)
    return text


def probe(
    machine: Machine, name: str, *arguments: str, **variables: str
) -> Mapping[str, Any]:
    """Runs a probe of `cfp.cluster.probes` in a process of its own.

    Args:
        variables: environment variables that it needs beside the machine's.

    Raises:
        Failure: it finds trouble, or ends without an answer.
    """
    environ = {**machine.environ, **variables}
    if str(PACKAGE_ROOT) in sys.path and PACKAGE_ROOT.name != "site-packages":
        # Behind the user's own folders, so that it does not hide their modules.
        parts = [environ.get("PYTHONPATH", ""), str(PACKAGE_ROOT)]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    # The options of this interpreter that choose its package folders.
    flags = ["-S"] * sys.flags.no_site + ["-s"] * sys.flags.no_user_site
    command = [machine.python, *flags, "-m", "cfp.cluster.probes", name, *arguments]
    text, trouble = _run(command, environ, machine.timeout_s, f"the probe {name!r}")
    answers = [line for line in text.splitlines() if line.startswith(MARK)]
    if answers:  # The findings count, however the process ended afterwards.
        data = json.loads(answers[-1].removeprefix(MARK))
        trouble = data.get("trouble", "")
    elif not trouble:
        trouble = f"the probe {name!r} printed no answer"
    if trouble:
        raise Failure(trouble)
    return data


def _run(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float, name: str
) -> tuple[str, str]:
    """Runs a process with a time limit: its output, and what went wrong, if it did.

    A process that cannot even be killed, as a driver that hangs holds its callers in
    the kernel, is left behind and not waited for.
    """
    # Files, not pipes: a child that outlives the process would keep pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return "", f"{name} cannot be started: {error.strerror}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "", f"{name} did not answer within {timeout_s:g} s"
        finally:  # Also after Ctrl-C nothing is left behind.
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TO_DIE_S)
        out.seek(0)
        err.seek(0)
        text, errors = (file.read().decode(errors="replace") for file in (out, err))
    if code < 0:
        return text, f"{name} was ended by {signal.Signals(-code).name}"
    if code > 0:
        last = last_line(errors) or last_line(text) or f"exit code {code}"
        return text, f"{name} failed: {last}"
    return text, ""


def last_line(text: str) -> str:
    """Returns the last line that is not blank, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SHOWN_CHARACTERS] if lines else ""
