"""The machine that is examined, and results of checks: as data, a table, and JSON.

Checks read the machine through this record alone, so that a test can hand them one with
a fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

from cfp.profiling.files import cache_dir

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


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


# ------------------------------------------------------------------ installed packages

_OPERATORS = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[[^]]*\])?\s*([^;]*?)\s*(;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<|~=)\s*([0-9][0-9.]*)")
# Names of JAX's plugins for GPUs.
GPU_PLUGIN = r"jax-(cuda1[23]|rocm\w*)-(plugin|pjrt)"
_EXTRA = re.compile(r"extra\s*==")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A package that is needed.

    Attributes:
        versions: a range, as in ``>=0.10.2,<0.13``; empty for any.
    """

    name: str
    versions: str

    def allows(self, version: str) -> bool:
        """Returns True if a version will do."""
        found = release(version)
        for sign, text in _CLAUSE.findall(self.versions):
            wanted = release(text)
            if sign == "~=":
                up_to = (*wanted[:-2], wanted[-2] + 1)
                if not (_padded(wanted) <= _padded(found) < _padded(up_to)):
                    return False
            elif not _OPERATORS[sign](_padded(found), _padded(wanted)):
                return False
        return True


def installed(machine: Machine, name: str) -> str | None:
    """Returns the version in a package's metadata; None if it is missing."""
    places = list(machine.search_path)
    for found in metadata.distributions(name=name, path=places):
        return found.version
    return None


def names_like(machine: Machine, pattern: str) -> dict[str, str]:
    """Finds all packages with a name that matches; versions by name."""
    found: dict[str, str] = {}
    for each in metadata.distributions(path=list(machine.search_path)):
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
        if re.fullmatch(pattern, name):
            found.setdefault(name, each.version)
    return dict(sorted(found.items()))


def requirements(machine: Machine) -> list[Requirement]:
    """Reads cfp's requirements, from its pyproject.toml or its installed metadata."""
    project = PACKAGE_ROOT / "pyproject.toml"
    lines: Iterable[str]
    if project.is_file():
        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        found = list(metadata.distributions(name="cfp", path=list(machine.search_path)))
        lines = (found[0].requires or []) if found else []
    return [parse(line) for line in lines if not _EXTRA.search(line)]


def jax_range(machine: Machine) -> str:
    """Returns the versions of JAX that cfp works with; empty if nothing says so."""
    return next((r.versions for r in requirements(machine) if r.name == "jax"), "")


def parse(line: str) -> Requirement:
    """Reads a line such as ``jax[cuda13]>=0.10.2,<0.13``."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        raise ValueError(f"not a requirement: {line!r}")
    return Requirement(name=match[1], versions=match[2].strip("() "))


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: ``0.11.2.dev1`` gives (0, 11, 2)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def same_release(one: str, other: str) -> bool:
    """Returns True if the first three numbers of two versions agree."""
    return _padded(release(one))[:3] == _padded(release(other))[:3]


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, 0, 0, 0, 0)[:4]


# --------------------------------------------------------------------- other processes

# Each has a time limit, and one that cannot even be killed (a driver that hangs holds
# its callers in the kernel) is left behind and not waited for.

MARK = "cfp-doctor: "  # Before the line that a probe answers with.
_PROBES = "cfp.cluster.probes"
_TO_DIE_S = 3.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """The answer of a process.

    Attributes:
        data: the findings of a probe.
        trouble: the reason why there is no answer; empty if there is one.
        signal: the name of the signal that ended the process, or empty.
    """

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    signal: str = ""
    timed_out: bool = False


def tool(machine: Machine, *command: str) -> ProcessAnswer:
    """Runs a command of the system."""
    path = machine.which(command[0])
    if path is None:
        return ProcessAnswer(trouble=f"{command[0]} is not on the PATH")
    return _run(
        [path, *command[1:]], machine.environ, machine.tool_timeout_s, command[0]
    )


def probe(
    machine: Machine,
    name: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
) -> ProcessAnswer:
    """Runs a probe of `cfp.cluster.probes`, in a process of its own.

    Args:
        variables: environment variables that it needs beside the machine's.
    """
    environ = {**machine.environ, **(variables or {})}
    if str(PACKAGE_ROOT) in sys.path and PACKAGE_ROOT.name != "site-packages":
        inherited = environ.get("PYTHONPATH", "")
        parts = [part for part in inherited.split(os.pathsep) if part]
        # Behind the user's own folders, so that it does not hide their modules.
        environ["PYTHONPATH"] = os.pathsep.join([*parts, str(PACKAGE_ROOT)])
    command = [machine.python, *_flags(), "-m", _PROBES, name, *arguments]
    answer = _run(command, environ, machine.timeout_s, f"the probe {name!r}")
    for line in reversed(answer.text.splitlines()):
        if line.startswith(MARK):
            try:
                data = json.loads(line.removeprefix(MARK))
            except json.JSONDecodeError:
                break
            # The findings count, however the process ended afterwards.
            return ProcessAnswer(data=data, trouble=data.get("trouble", ""))
    trouble = answer.trouble or f"the probe {name!r} printed no answer"
    return ProcessAnswer(
        trouble=trouble, signal=answer.signal, timed_out=answer.timed_out
    )


def _flags() -> list[str]:
    """Returns the options of this interpreter that choose its package folders."""
    flags = []
    if sys.flags.no_site:
        flags.append("-S")
    if sys.flags.no_user_site:
        flags.append("-s")
    return flags


def _run(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float, name: str
) -> ProcessAnswer:
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
            return ProcessAnswer(trouble=f"{name} cannot be started: {error.strerror}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return ProcessAnswer(
                trouble=f"{name} did not answer within {timeout_s:g} s", timed_out=True
            )
        except BaseException:  # Also Ctrl-C: nothing is left behind.
            _end(process)
            raise
        out.seek(0)
        err.seek(0)
        text = out.read().decode(errors="replace")
        errors = err.read().decode(errors="replace")
    if code < 0:
        ended_by = signal.Signals(-code).name
        trouble = f"{name} was ended by {ended_by}"
        return ProcessAnswer(text=text, trouble=trouble, signal=ended_by)
    if code > 0:
        last = last_line(errors) or last_line(text) or f"exit code {code}"
        return ProcessAnswer(text=text, trouble=f"{name} failed: {last}")
    return ProcessAnswer(text=text)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TO_DIE_S)


def last_line(text: str) -> str:
    """Returns the last line that is not blank, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SHOWN_CHARACTERS] if lines else ""


Number = float | int | str

_NAME_WIDTH = 14
_STATUS_WIDTH = 7
_REMEDY = "-> "
LEAST_WIDTH = 60


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: of the check, which whoever runs it fills in.
        status: PASS; FAIL, with a remedy; or ABSENT, where there is nothing to check.
        reason: the finding, in one sentence.
        remedy: a command or a hint; empty unless something is to be done.
        numbers: measurements by name, with units in the names.
    """

    name: str = ""
    status: Status
    reason: str
    remedy: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self):
        if self.status is Status.FAIL and not self.remedy:
            raise ValueError(f"a failure without a remedy: {self.reason}")


def passed(reason: str, **numbers: Number) -> Result:
    """Makes the result of a check that works."""
    return Result(status=Status.PASS, reason=reason, numbers=numbers)


def failed(reason: str, remedy: str, **numbers: Number) -> Result:
    """Makes the result of a check that does not work, with its remedy."""
    return Result(status=Status.FAIL, reason=reason, remedy=remedy, numbers=numbers)


def absent(reason: str, remedy: str = "") -> Result:
    """Makes the result of a check for which there is nothing to check."""
    return Result(status=Status.ABSENT, reason=reason, remedy=remedy)


def row(result: Result, width: int) -> str:
    """Formats one result, with the reason and the remedy beside it."""
    indent = " " * (_NAME_WIDTH + _STATUS_WIDTH)
    room = max(width, LEAST_WIDTH) - len(indent)
    # A path or a command stays in one piece.
    wrap = {"width": room, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(result.reason, **wrap)
    if result.remedy:
        lines += textwrap.wrap(
            _REMEDY + result.remedy, subsequent_indent=" " * len(_REMEDY), **wrap
        )
    head = f"{result.name:<{_NAME_WIDTH}}{result.status.value:<{_STATUS_WIDTH}}"
    return head + f"\n{indent}".join(lines)


def summary(results: Sequence[Result]) -> str:
    """Counts results by status, and names the failures."""
    counts = {s: sum(r.status is s for r in results) for s in Status}
    failures = [r.name for r in results if r.status is Status.FAIL]
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    return said + (f": {', '.join(failures)}" if failures else "")


def document(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    """Makes a JSON document of all results."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "architecture": platform.machine(),
        "python": ".".join(map(str, machine.version)),
        "ok": all(r.status is not Status.FAIL for r in results),
        "checks": [asdict(r) for r in results],
    }
