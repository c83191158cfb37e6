"""Runs other processes: tools of the system, and probes in Python.

Each has a time limit, and one that cannot even be killed (a driver that hangs holds its
callers in the kernel) is left behind and not waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cfp.cluster.doctor.machine import PACKAGE_ROOT, Machine

MARK = "cfp-doctor: "  # Before the line that a probe answers with.
_PROBES = "cfp.cluster.doctor.probes"
_TO_DIE_S = 3.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """The answer of a process.

    Attributes:
        text: the output of a tool.
        data: the findings of a probe.
        trouble: the reason why there is no answer; empty if there is one.
        signal: the name of the signal that ended the process, or empty.
        timed_out: the process took too long.
    """

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    signal: str = ""
    timed_out: bool = False


def tool(machine: Machine, *command: str) -> ProcessAnswer:
    """Runs a command of the system.

    Args:
        machine: to run it on.
        command: its name and arguments.
    """
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
    """Runs a module of `cfp.cluster.doctor.probes`, in a process of its own.

    Args:
        machine: to run it on.
        name: of the module.
        arguments: of the probe.
        variables: environment variables that it needs beside the machine's.
    """
    environ = {**machine.environ, **(variables or {})}
    if str(PACKAGE_ROOT) in sys.path and PACKAGE_ROOT.name != "site-packages":
        inherited = environ.get("PYTHONPATH", "")
        parts = [part for part in inherited.split(os.pathsep) if part]
        # Behind the user's own folders, so that it does not hide their modules.
        environ["PYTHONPATH"] = os.pathsep.join([*parts, str(PACKAGE_ROOT)])
    command = [machine.python, *_flags(), "-m", f"{_PROBES}.{name}", *arguments]
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
