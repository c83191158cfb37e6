"""The command ``cfp doctor``: a table of checks, in the order in which they run.

It needs nothing but Python's own library. A check is a function of the machine, and of
what its probe found if it has one, that returns its finding, or raises `Failure` or
`Absent`.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import re
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from cfp.attention.kernels import KERNELS
from cfp.cluster.machine import Failure, Machine, allows, probe, tool

# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_SUM_ERROR = 1e-5  # Relative.
_ATTENTION_ERROR = 5e-3  # Relative L2 distance in bfloat16, as of the tests.
_LEAST_SHARE = 0.3  # A ring that works reaches more of NVLink's rate.


class Absent(Exception):
    """There is nothing to check."""


def packages(machine: Machine) -> str:
    """cfp's packages, jaxlib and plugins are there, in versions that fit."""
    found, lines = machine.installed(), [*machine.requirements().values()]
    ours = [name for name in found if re.match(r"jax(lib|-.*-(plugin|pjrt))?$", name)]
    for name in ours:
        for line in found[name].requires or ():
            # An extra of JAX tells which plugin belongs to it, if there is one.
            needed, _, marker = line.partition(";")
            plugin = re.match(r"jax-\w+-plugin", needed)
            if not marker or (plugin and plugin[0] in found):
                lines.append(needed)
    wrong = []
    for line in lines:
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower()
        if name not in found:
            wrong.append(f"{line} is missing")
        elif re.search("[<>=]", line) and not allows(line, found[name].version):
            wrong.append(f"{name} is {found[name].version}, not {line}")
    if wrong:
        raise Failure(", ".join(dict.fromkeys(wrong)))
    return ", ".join(f"{name} {found[name].version}" for name in sorted(ours))


def folders(machine: Machine) -> str:
    """The folders for the cache and for temporary files are writable, with space."""
    if machine.cache is None:
        raise Failure("neither CFP_CACHE_DIR, XDG_CACHE_HOME nor a home directory")
    found = []
    for folder in (machine.cache, Path(tempfile.gettempdir())):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
        free, needed = shutil.disk_usage(folder).free, machine.enough_bytes
        found.append(f"{folder}, {free >> 30} GiB free")
        if free < needed:
            raise Failure(f"{folder}: {free >> 20} MiB free of {needed >> 20} MiB")
    return "; ".join(found)


def _gpus(machine: Machine) -> list[list[str]]:
    """Name, driver's version and compute capability of each GPU."""
    what = "--query-gpu=name,driver_version,compute_cap"
    text = tool(machine, "nvidia-smi", what, "--format=csv,noheader,nounits")
    return [*filter(None, csv.reader(text.splitlines(), skipinitialspace=True))]


def driver(machine: Machine) -> str:
    """The driver answers, is new enough for the plugin, and names the GPUs' links."""
    if not machine.shows_nvidia:
        raise Absent("no NVIDIA GPU: no nvidia-smi, and no /proc/driver/nvidia")
    rows = _gpus(machine)
    if not rows:
        raise Failure("nvidia-smi lists no GPU")
    name, version, capability = rows[0]
    for plugin, oldest in OLDEST_DRIVER.items():
        if plugin in machine.installed() and int(version.split(".")[0]) < oldest:
            raise Failure(f"driver {version} is older than {oldest}; {plugin} needs it")
    text = f"driver {version}; {len(rows)} × {name}, compute capability {capability}"
    if len(rows) > 1:
        ways = link_kinds(tool(machine, "nvidia-smi", "topo", "-m"))
        listed = (f"{kind} ({count} pairs)" for kind, count in ways.items())
        text += f"; links {', '.join(listed)}"
    return text


def link_kinds(matrix: str) -> dict[str, int]:
    """Counts pairs of GPUs by link in the output of ``nvidia-smi topo -m``."""
    # Heads and row names may be underlined by escape codes.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    way = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)\b"
    rows = re.findall(rf"^GPU\d+((?:\s+{way})+)", plain, re.MULTILINE)
    cells = [cell for i, row in enumerate(rows) for cell in row.split()[:i]]
    return dict(sorted(Counter(cells).items()))


def jax(machine: Machine, data: Mapping[str, Any]) -> str:
    """JAX can be imported, and has Shardy's passes."""
    if missing := data["missing"]:
        raise Failure(f"jaxlib lacks pipelines that cfp needs: {', '.join(missing)}")
    text = f"JAX {data['version']} from {data['file']}"
    if data["faults"]:
        text += f"; cfp works around {data['faults']} faults of XLA's partitioner: "
        text += "docs/results/rules.md lists them"
    return text


def devices(machine: Machine, data: Mapping[str, Any]) -> str:
    """JAX uses the devices that the driver shows."""
    text = f"{data['count']} × {data['kind']} ({data['platform']})"
    shown = len(_gpus(machine)) if machine.shows_nvidia else 0
    if shown > (data["count"] if data["platform"] in ("gpu", "cuda") else 0):
        names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
        given = [f"; {n}={machine.environ[n]}" for n in names if n in machine.environ]
        reason = f"JAX uses {text}; the driver shows {shown} GPUs"
        raise Failure(reason + "".join(given))
    return text


def graft(machine: Machine, data: Mapping[str, Any]) -> str:
    """A program that cfp makes compiles, and sums over devices right and fast."""
    count = data["devices"]
    text = f"{count} devices: an all-reduce of {data['bytes'] >> 20} MiB"
    if not data["error"] <= _SUM_ERROR:  # Also if it is no number.
        raise Failure(f"{text} is off by {data['error']:.1e}")
    if not machine.shows_nvidia or count < 2:
        return f"{text} is right"
    # In a ring each device sends this much.
    rate = 2 * (count - 1) / count * data["bytes"] / data["time_ms"] / 1e6
    status = tool(machine, "nvidia-smi", "nvlink", "-s", "-i", "0")
    link = sum(map(float, re.findall(r"([\d.]+)\s*GB/s", status)))
    text += f" takes {data['time_ms']:.2f} ms, {rate:.0f} GB/s"
    if link:
        text += f", {rate / link:.0%} of the NVLinks' {link:.0f} in each direction"
    if machine.environ.get("NCCL_P2P_DISABLE") == "1":
        return f"{text} with NCCL_P2P_DISABLE=1"
    if rate < _LEAST_SHARE * link:
        raise Failure(text)
    return text


def attention_kernel(machine: Machine, data: Mapping[str, Any]) -> str:
    """A kernel of attention, forward and backward, agrees with float32."""
    if not data:
        raise Absent("no GPU")
    text = ", ".join(f"{what} {value:.1e}" for what, value in data.items())
    if not max(data.values()) <= _ATTENTION_ERROR:  # Also if it is no number.
        raise Failure(f"differs from float32: {text}")
    return f"forward and backward; relative {text}"


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; the remedy is empty unless something is to be done."""

    name: str
    status: Status
    reason: str
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and what mends its faults; true if a probe of its name comes first."""

    name: str
    run: Callable[..., str]
    remedy: str
    is_probed: bool = False


CHECKS = (
    Check(
        "packages",
        packages,
        "pip install -e . in the clone, or pip install cfp, from a wheelhouse with "
        "--no-index --find-links WHEELHOUSE. jaxlib without a wheel is built from "
        "source (docs/install/from-source.md)",
    ),
    Check(
        "folders",
        folders,
        "make space there (the cache may be deleted), or set CFP_CACHE_DIR and TMPDIR "
        "to directories that can be written, on a local disk",
    ),
    Check(
        "driver",
        driver,
        "ask the job for a GPU: --gres=gpu:1 (Slurm), -g 1 (jsrun), --gpus all with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility (Docker), --nv (Apptainer). A "
        "driver that hangs, or was updated: look for Xid in dmesg, and restart; "
        "one that is too old: update it, or install 'jax[cuda12]' for 525 and newer",
    ),
    Check(
        "jax",
        jax,
        "pip install --force-reinstall --no-deps jax and jaxlib of one version. "
        "SIGILL: the processor lacks instructions of the wheel, build it from source "
        "(docs/install/from-source.md). No answer: install on a local disk",
        is_probed=True,
    ),
    Check(
        "devices",
        devices,
        "pip install 'jax[cuda13]' (cuda12 for drivers older than 580); unset "
        "CUDA_VISIBLE_DEVICES and JAX_PLATFORMS, or name all devices there; end "
        "other programs that hold the devices; look for Xid in dmesg. "
        'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" says why the plugin '
        "does not start",
        is_probed=True,
    ),
    Check(
        "graft",
        graft,
        "NCCL_DEBUG=INFO says which way it takes, and where it waits; "
        "NCCL_P2P_DISABLE=1 tells whether it is a link (in a virtual machine, access "
        "control (ACS) stops them). SIGKILL: compiling needs 3 GiB or more. No answer: "
        "try --timeout 600. Wrong result: try JAX_PLATFORMS=cpu, and see ECC errors "
        "(nvidia-smi -q -d ECC); see docs/install/limits.md",
        is_probed=True,
    ),
    *(
        Check(kernel.name, attention_kernel, kernel.remedy, is_probed=True)
        for kernel in KERNELS.values()
        if kernel.remedy
    ),
)


def examine(machine: Machine, only: Collection[str] = ()) -> Iterator[Result]:
    """Runs checks one after another, and yields their results.

    Args:
        only: names of checks; all of them if it is empty.
    """
    checks = [check for check in CHECKS if not only or check.name in only]
    names = [check.name for check in checks if check.is_probed]
    found, trouble, failed = None, "", ""
    for check in checks:
        data: Mapping[str, Any] = {}
        status, reason, remedy = Status.PASS, "", ""
        try:
            if not check.is_probed:
                reason = check.run(machine)
            elif failed:
                raise Absent(f"not tried, as {failed} failed")
            else:
                if found is None:
                    found, trouble = probe(machine, names)
                data = found.get(check.name, {"trouble": trouble})
                if "trouble" in data:
                    raise Failure(data["trouble"])
                reason = check.run(machine, data)
        except Absent as error:
            status, reason = Status.ABSENT, str(error)
        except Exception as error:
            # A machine can be broken in ways that no check looks for. That is a result,
            # and the other checks go on.
            kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
            status, reason, remedy = Status.FAIL, f"{kind}{error}", check.remedy
            failed = check.name if check.is_probed else failed
        yield Result(check.name, status, reason, remedy, data)


def row(result: Result, width: int) -> str:
    """Formats one result, with the reason and the remedy beside it."""
    # A path or a command stays in one piece.
    fill = partial(textwrap.wrap, width=max(width, 60) - 19, break_long_words=False)
    lines = fill(result.reason, break_on_hyphens=False)
    if result.remedy:
        lines += fill(f"-> {result.remedy}", break_on_hyphens=False)
    return f"{result.name:<12}{result.status:<7}" + ("\n" + " " * 19).join(lines)


def main(words: Sequence[str]) -> int:
    """Examines this machine.

    Args:
        words: the command's own words, without ``cfp doctor``.

    Returns:
        0 if no check failed, 1 if one did.
    """
    options = _parser().parse_args(words)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<12}{(check.run.__doc__ or '').splitlines()[0]}")
        return 0
    machine = Machine.here(cache=options.cache, timeout_s=options.timeout)
    results: list[Result] = []
    try:
        for result in examine(machine, options.only or ()):
            results.append(result)
            if not options.json:
                width = min(shutil.get_terminal_size().columns, 120)
                print(row(result, width), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    counts = Counter(result.status for result in results)
    if options.json:
        document = {
            "host": platform.node(),
            "system": platform.platform(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "ok": not counts[Status.FAIL],
            "checks": [asdict(result) for result in results],
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n" + ", ".join(f"{counts[status]} {status}" for status in Status))
    return int(counts[Status.FAIL] > 0)


def _parser() -> argparse.ArgumentParser:
    about = """Checks this machine for planning, with a remedy for each failure. Works
        where JAX is missing or broken. The exit code is 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="cfp doctor", description=about)
    add = parser.add_argument
    names = [check.name for check in CHECKS]
    add("--json", action="store_true", help="print one JSON document")
    only = "this check; may be given several times"
    add("--only", action="append", choices=names, metavar="NAME", help=only)
    add("--list", action="store_true", help="list the checks")
    add("--cache", type=Path, metavar="DIR", help="examine this cache, not cfp's own")
    limit = "time limit of all that runs on devices, in seconds (default: %(default)g)"
    add("--timeout", type=float, default=300, metavar="S", help=limit)
    return parser
