"""The command ``cfp doctor``: a table of checks, in the order in which they run.

It needs nothing but Python's own library. A check is a function of the machine that
returns its finding, or raises `Failure` or `Absent`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
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
from typing import Any, NoReturn

from cfp.attention.kernels import KERNELS
from cfp.cluster.machine import (
    Failure,
    Machine,
    Number,
    allows,
    probe,
    same_release,
    tool,
)
from cfp.errors import CfpError, nearest

# A sentence, and measurements by name, with units in the names.
Finding = tuple[str, Mapping[str, Number]]

SUPPORTED_PYTHON = ((3, 11), (3, 14))  # From the first on, before the second.
# Architectures that jaxlib has wheels for, on Linux.
WITH_WHEELS = ("x86_64", "aarch64")
GPU_PLUGIN = r"jax-(cuda1[23]|rocm\w*)-(plugin|pjrt)"
# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"cuda12": 525, "cuda13": 580}
NO_GPU = "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia is there"
_ENOUGH_BYTES = 512 << 20  # Compiled programs take most of the cache.
# Programs of the doctor are small: they need not take a device for themselves.
_SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_CPU_DEVICES = "--xla_force_host_platform_device_count"
_GRAFT_ERROR = 2e-2  # Devices multiply matrices in TF32.
_ATTENTION_ERROR = 5e-3  # Relative L2 distance in bfloat16, as of the tests.
_LEAST_SHARE = 0.3  # A ring that works reaches more of NVLink's rate.


class Absent(Exception):
    """There is nothing to check."""


# ------------------------------------------------------------------- what is installed


def python(machine: Machine) -> Finding:
    """The interpreter is one that cfp and jaxlib's wheels are for."""
    kind = f"Python {'.'.join(map(str, machine.version))}, {platform.machine()}"
    lowest, above = SUPPORTED_PYTHON
    if not lowest <= machine.version[:2] < above:
        raise Failure(f"{kind}; cfp runs on 3.11, 3.12 and 3.13")
    if sys.maxsize < 2**32:
        raise Failure(f"{kind}, with 32 bits", "install a Python with 64 bits")
    if platform.machine() not in WITH_WHEELS:
        kind += "; jaxlib has no wheel for it (docs/install/ppc64le.md)"
    return kind, {}


def packages(machine: Machine) -> Finding:
    """The packages that cfp needs are installed, in versions that it works with."""
    wanted = {n: r for n, r in machine.requirements().items() if n != "jax"}
    if not wanted:
        raise Failure("cfp's own metadata are missing, so is the list of its packages")
    missing = [r for name, r in wanted.items() if machine.installed(name) is None]
    if missing:
        raise Failure(f"missing: {', '.join(missing)}")
    found = {
        requirement: machine.installed(n) or "" for n, requirement in wanted.items()
    }
    wrong = [f"{v} ({r} is needed)" for r, v in found.items() if not allows(r, v)]
    if wrong:
        raise Failure(f"of a wrong version: {', '.join(wrong)}")
    return f"all {len(wanted)} are there", {}


def jaxlib(machine: Machine) -> Finding:
    """jaxlib is the one that belongs to JAX."""
    ours, theirs = machine.installed("jaxlib"), machine.installed("jax")
    if ours is None:
        raise Failure("jaxlib is not installed for this Python", _install_jax(machine))
    if theirs is not None and not same_release(ours, theirs):
        raise Failure(
            f"jaxlib {ours} beside JAX {theirs}", f"pip install jaxlib=={theirs}"
        )
    return f"jaxlib {ours}", {}


def jax(machine: Machine) -> Finding:
    """JAX is there, of a version that cfp works with, and can be imported."""
    version = machine.installed("jax")
    if version is None:
        raise Failure("JAX is not installed for this Python", _install_jax(machine))
    wanted = machine.requirements().get("jax", "jax")
    if not allows(wanted, version):
        raise Failure(f"JAX {version}; cfp works with {wanted}", _install_jax(machine))
    try:
        data = probe(machine, "imports")
    except Failure as failure:
        reason = f"JAX {version} cannot be imported: {failure.reason}"
        raise Failure(reason) from failure
    return f"JAX {data['version']} from {data['file']}", {}


def _install_jax(machine: Machine) -> str:
    requirement = machine.requirements().get("jax", "jax")
    return f"{machine.python} -m pip install '{requirement}'"


def plugin(machine: Machine) -> Finding:
    """The plugin for GPUs is there if there are any, and belongs to jaxlib."""
    found, lib = machine.names_like(GPU_PLUGIN), machine.installed("jaxlib")
    if lib is not None:
        foreign = [name for name, v in found.items() if not same_release(v, lib)]
        if foreign:
            listed = ", ".join(f"{name} {found[name]}" for name in foreign)
            raise Failure(
                f"{listed} beside jaxlib {lib}: JAX leaves out plugins of another "
                "version",
                "pip install " + " ".join(f"{name}=={lib}" for name in foreign),
            )
    kinds = sorted({name.rpartition("-")[0] for name in found})
    both = [f"{kind}-{part}" for kind in kinds for part in ("plugin", "pjrt")]
    lacking = [name for name in both if name not in found]
    if lacking:
        raise Failure(
            f"{', '.join(found)} without {', '.join(lacking)}: they work together only",
            "pip install " + " ".join(f"{n}=={lib}" if lib else n for n in lacking),
        )
    if len(kinds) > 1:
        raise Failure(f"plugins of several kinds: {', '.join(kinds)}")
    if not found and machine.shows_nvidia:
        raise Failure(
            "there is an NVIDIA driver, and no CUDA plugin for JAX",
            f"pip install 'jax[cuda13]{'==' + lib if lib else ''}' (cuda12 for drivers "
            "older than 580)",
        )
    if not found:
        raise Absent("no GPU, so none is needed")
    return ", ".join(f"{n} {v}" for n, v in found.items()), {}


def cache(machine: Machine) -> Finding:
    """The cache directory can be made and written, and has space."""
    if machine.cache is None:
        raise Failure(
            "no place for the cache: neither CFP_CACHE_DIR, XDG_CACHE_HOME nor a home "
            "directory"
        )
    return _with_space(machine, machine.cache)


def scratch(machine: Machine) -> Finding:
    """There is a directory for temporary files, with space."""
    folder = machine.environ.get("TMPDIR") or tempfile.gettempdir()
    return _with_space(machine, Path(folder))


def _with_space(machine: Machine, folder: Path) -> Finding:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    free = machine.free_bytes(folder)
    if free < _ENOUGH_BYTES:
        raise Failure(
            f"{folder} has {free >> 20} MiB left; cfp needs {_ENOUGH_BYTES >> 20}",
            free_bytes=free,
        )
    return f"{folder}, {free / 2**30:.0f} GiB free", {"free_bytes": free}


# --------------------------------------------------------------------- NVIDIA's driver


def _gpus(machine: Machine, *fields: str) -> list[dict[str, str]]:
    """Fields of all GPUs (``nvidia-smi --help-query-gpu`` lists them)."""
    what = f"--query-gpu={','.join(fields)}"
    text = tool(machine, "nvidia-smi", what, "--format=csv,noheader,nounits")
    rows = [*filter(None, csv.reader(text.splitlines(), skipinitialspace=True))]
    if odd := [row for row in rows if len(row) != len(fields)]:
        raise Failure(f"nvidia-smi said {', '.join(odd[0])}")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def driver(machine: Machine) -> Finding:
    """The driver answers, and is new enough for the plugin's CUDA."""
    if not machine.shows_nvidia:
        raise Absent(NO_GPU)
    rows = _gpus(machine, "name", "driver_version", "compute_cap")
    if not rows:
        raise Failure("nvidia-smi lists no GPU")
    version, capability = rows[0]["driver_version"], rows[0]["compute_cap"]
    for name in machine.names_like(GPU_PLUGIN):
        oldest = OLDEST_DRIVER.get(name.split("-")[1], 0)
        if int(version.split(".")[0]) < oldest:
            raise Failure(
                f"driver {version} is older than {oldest}, which {name} needs"
            )
    kinds = ", ".join(sorted({row["name"] for row in rows}))
    text = f"driver {version}; {len(rows)} × {kinds}, compute capability {capability}"
    return text, {"gpus": len(rows)}


def links(machine: Machine) -> Finding:
    """The driver names the links between the GPUs, and NVLink's rate."""
    if len(_gpus(machine, "index")) < 2:
        raise Absent("one GPU: no links")
    ways = link_kinds(tool(machine, "nvidia-smi", "topo", "-m"))
    if not ways:
        raise Failure("nvidia-smi topo -m names no links")
    speed = _nvlink_gb_per_s(machine)
    listed = ", ".join(f"{kind} ({count} pairs)" for kind, count in ways.items())
    fast = f"; NVLink {speed:.0f} GB/s each way of a GPU" if speed else ""
    return listed + fast, {"nvlink_gb_per_s": speed}


def link_kinds(matrix: str) -> dict[str, int]:
    """Counts pairs of GPUs by link in the output of ``nvidia-smi topo -m``."""
    # Heads and row names may be underlined by escape codes.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    way = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)\b"
    rows = re.findall(rf"^GPU\d+((?:\s+{way})+)", plain, re.MULTILINE)
    cells = [cell for i, row in enumerate(rows) for cell in row.split()[:i]]
    return dict(sorted(Counter(cells).items()))


def _nvlink_gb_per_s(machine: Machine) -> float:
    """Sums the rates of the first GPU's NVLinks, in each direction; 0 without any."""
    status = tool(machine, "nvidia-smi", "nvlink", "-s", "-i", "0")
    return sum(map(float, re.findall(r"([\d.]+)\s*GB/s", status)))


# -------------------------------------------------------------- programs on the devices


def devices(machine: Machine) -> Finding:
    """JAX uses the devices that the driver shows."""
    data = probe(machine, "devices")
    text = f"{data['count']} × {data['kind']} ({data['platform']})"
    shown = len(_gpus(machine, "index")) if machine.shows_nvidia else 0
    if shown > (data["count"] if data["platform"] in ("gpu", "cuda") else 0):
        reason = f"JAX uses {text}; the driver shows {shown} GPUs"
        visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
        platforms = machine.environ.get("JAX_PLATFORMS", "")
        if visible is not None:
            reason += f", and CUDA_VISIBLE_DEVICES={visible!r} hides some"
        elif platforms and not re.search("cuda|gpu", platforms):
            reason += f", and JAX_PLATFORMS={platforms} leaves them out"
        raise Failure(reason, count=data["count"])
    return text, {"count": data["count"], "platform": data["platform"]}


def all_reduce(machine: Machine) -> Finding:
    """An all-reduce is right; on GPUs, as fast as the links let it be."""
    variables, flags = dict(_SMALL), machine.environ.get("XLA_FLAGS", "")
    if _CPU_DEVICES not in flags:
        # Devices to sum over where there are only CPUs.
        variables["XLA_FLAGS"] = f"{flags} {_CPU_DEVICES}=4".strip()
    data = probe(machine, "allreduce", **variables)
    count, time_ms = data["devices"], data["median_ms"]
    if not data["right"]:
        raise Failure(f"{count} devices: the sum is wrong")
    if not machine.shows_nvidia:
        return f"{count} virtual devices: the sum is right", {}
    if count < 2:
        return "starts, on 1 device; no link is used", {}
    # In a ring each device sends this much.
    rate = 2 * (count - 1) / count * data["bytes"] / time_ms / 1e6
    link = _nvlink_gb_per_s(machine)
    numbers = {"time_ms": time_ms, "gb_per_s": rate, "link_gb_per_s": link}
    text = f"{count} devices, {data['bytes'] >> 20} MiB: {time_ms:.2f} ms, "
    text += f"{rate:.0f} GB/s"
    if link:
        text += f", {rate / link:.0%} of the NVLink's {link:.0f}"
    if machine.environ.get("NCCL_P2P_DISABLE") == "1":
        text += " with NCCL_P2P_DISABLE=1"
    elif rate < _LEAST_SHARE * link:
        raise Failure(text, **numbers)
    return text, numbers


def shardy(machine: Machine) -> Finding:
    """jaxlib has Shardy's passes; faults of XLA that cfp works around are named."""
    data = probe(machine, "shardy", JAX_PLATFORMS="cpu")
    if data["missing"]:
        raise Failure(
            f"jaxlib lacks {len(data['missing'])} of the {data['needed']} pipelines "
            f"that cfp needs: {data['reasons'][0]}"
        )
    if data["rules"] == 0:
        raise Failure("Shardy's passes write no sharding rules")
    text = f"all {data['needed']} pipelines are there and write rules"
    if faults := len(data["faults"]):
        text += (
            f"; cfp works around {faults} faults of XLA's partitioner: "
            "docs/results/rules.md lists them"
        )
    return text, {"faults": faults}


def graft(machine: Machine) -> Finding:
    """A part of a program becomes a program, compiles, runs, and is right."""
    data = probe(machine, "graft", **_SMALL)
    off = data["difference"]
    if off > _GRAFT_ERROR:
        raise Failure(f"the result is off by {off:.1e}", difference=off)
    text = f"compiled in {data['compile_s']:.1f} s, runs on {data['devices']} devices"
    return f"{text}, off by {off:.0e}", data


def attention_kernel(machine: Machine, name: str) -> Finding:
    """A kernel of attention, forward and backward, agrees with float32."""
    if not machine.shows_nvidia:
        raise Absent(NO_GPU)
    data = probe(machine, "kernel", name, **_SMALL)
    if "refusal" in data:
        raise Failure(data["refusal"])
    text = ", ".join(f"{what} {value:.1e}" for what, value in data.items())
    if not max(data.values()) <= _ATTENTION_ERROR:  # Also if it is no number.
        raise Failure(f"differs from float32: {text}", **data)
    return f"forward and backward; relative {text}", data


# --------------------------------------------------------------------------- the table


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: of the check.
        status: PASS; FAIL, with a remedy; or ABSENT, where there is nothing to check.
        reason: the finding, in one sentence.
        remedy: a command or a hint; empty unless something is to be done.
        numbers: measurements by name, with units in the names.
    """

    name: str
    status: Status
    reason: str
    remedy: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """A check, what mends its faults, and its dependencies.

    Attributes:
        remedy: of faults that bring none themselves.
        needs: checks that must have passed; where one failed or was absent, this one is
            absent, so that one fault is one FAIL.
    """

    name: str
    run: Callable[[Machine], Finding]
    remedy: str
    needs: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the check's docstring."""
        run = self.run.func if isinstance(self.run, partial) else self.run
        return (run.__doc__ or "").splitlines()[0]


CHECKS = (
    Check("python", python, "make an environment with one: python3.12 -m venv"),
    Check(
        "packages",
        packages,
        "pip install -e . in the clone, or pip install cfp, from a wheelhouse with "
        "--no-index --find-links WHEELHOUSE",
    ),
    Check("jaxlib", jaxlib, "install jax and jaxlib of one version"),
    Check(
        "jax",
        jax,
        "pip install --force-reinstall --no-deps jax and jaxlib of one version. "
        "SIGILL: the processor lacks instructions of the wheel, build it from source "
        "(docs/install/from-source.md). No answer: install on a local disk",
        ("jaxlib",),
    ),
    Check(
        "plugin",
        plugin,
        "uninstall all but the one that the driver is for "
        "(pip uninstall NAME-plugin NAME-pjrt)",
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
        "links",
        links,
        "see what nvidia-smi topo -m says; update the driver",
        ("driver",),
    ),
    Check(
        "cache",
        cache,
        "make space there (its contents may be deleted), or set CFP_CACHE_DIR to a "
        "directory that can be written, on a local disk",
    ),
    Check("scratch", scratch, "export TMPDIR, a directory with a few GiB of space"),
    Check(
        "devices",
        devices,
        "unset CUDA_VISIBLE_DEVICES and JAX_PLATFORMS, or name all devices there; end "
        "other programs that hold the devices; look for Xid in dmesg. "
        'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" says why the plugin '
        "does not start",
        ("jax",),
    ),
    Check(
        "all-reduce",
        all_reduce,
        "NCCL_DEBUG=INFO says which way it takes, and where it waits; "
        "NCCL_P2P_DISABLE=1 tells whether it is a link (in a virtual machine, access "
        "control (ACS) stops them). Unset other NCCL_* variables; see "
        "docs/install/limits.md",
        ("devices",),
    ),
    Check(
        "shardy",
        shardy,
        "pip install jax, of a version that cfp works with, with its own jaxlib",
        ("jax",),
    ),
    Check(
        "graft",
        graft,
        "install jax and jaxlib of one version again. SIGKILL: compiling needs 3 GiB "
        "or more (docs/install/limits.md). No answer: try --timeout 600. Wrong result: "
        "try JAX_PLATFORMS=cpu, and see ECC errors (nvidia-smi -q -d ECC)",
        ("devices", "shardy"),
    ),
    *(
        Check(
            kernel.name,
            partial(attention_kernel, name=kernel.name),
            kernel.remedy,
            ("devices", "driver"),
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
        found[check.name] = _outcome(check, machine, found)
        yield found[check.name]


def _outcome(check: Check, machine: Machine, found: Mapping[str, Result]) -> Result:
    result = partial(Result, name=check.name)
    for need in filter(None, map(found.get, check.needs)):
        if need.status is not Status.PASS:
            reason = need.reason
            if need.status is Status.FAIL:
                reason = f"not tried, as {need.name} failed"
            return result(status=Status.ABSENT, reason=reason)
    failed = partial(result, status=Status.FAIL)
    try:
        reason, numbers = check.run(machine)
    except Absent as error:
        return result(status=Status.ABSENT, reason=str(error))
    except Failure as error:
        remedy = error.remedy or check.remedy
        return failed(reason=error.reason, remedy=remedy, numbers=error.numbers)
    except OSError as error:
        reason = f"{error.filename} cannot be written: {error.strerror}"
        return failed(reason=reason, remedy=check.remedy)
    except Exception as error:
        # A machine can be broken in ways that no check looks for. That is a result,
        # and the other checks go on.
        return failed(
            reason=f"the check itself broke: {type(error).__name__}: {error}",
            remedy="please report it, with what cfp doctor --json prints",
        )
    return result(status=Status.PASS, reason=reason, numbers=numbers)


# ------------------------------------------------------------------------- the command

INTERRUPTED = 130
LEAST_WIDTH, _WIDEST = 60, 120
_INDENT = " " * 21  # Of the check's name, and of its status.


def row(result: Result, width: int) -> str:
    """Formats one result, with the reason and the remedy beside it."""
    room = max(width, LEAST_WIDTH) - len(_INDENT)
    # A path or a command stays in one piece.
    wrap = {"width": room, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(result.reason, **wrap)
    if result.remedy:
        lines += textwrap.wrap(f"-> {result.remedy}", subsequent_indent="   ", **wrap)
    return f"{result.name:<14}{result.status.value:<7}" + f"\n{_INDENT}".join(lines)


def summary(results: Sequence[Result]) -> str:
    """Counts results by status, and names the failures."""
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    failures = [r.name for r in results if r.status is Status.FAIL]
    return f"{text}: {', '.join(failures)}" if failures else text


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


def main(words: Sequence[str]) -> int:
    """Examines this machine.

    Args:
        words: the command's own words, without ``cfp doctor``.

    Returns:
        0 if no check failed, 1 if one did; 2 for words that are not understood.
    """
    options = _parser().parse_args(words)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<16}{check.summary}")
        return 0
    machine = Machine.here(cache=options.cache, timeout_s=options.timeout)
    checks = with_needs(options.only) if options.only else CHECKS
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    results = []
    try:
        for result in examine(machine, checks):
            results.append(result)
            if not options.json:
                print(row(result, width), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        print(json.dumps(document(machine, results), indent=2))
    else:
        print(f"\n{summary(results)}")
    return int(any(result.status is Status.FAIL for result in results))


class _Parser(argparse.ArgumentParser):
    """Errors of use are as those of the other commands."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and what to try, without a page of usage."""
        attempt = "cfp doctor --help lists the options, cfp doctor --list the checks"
        if option := re.search(r"arguments: (-\S+)", message):
            known = re.findall(r"--\w+", self.format_usage())
            attempt = nearest(option[1], known) + attempt
        elif choice := re.search("invalid choice: '(.*?)'", message):
            attempt = nearest(choice[1], [one.name for one in CHECKS]) + attempt
        error = CfpError(f"{message[0].upper()}{message[1:]}.", attempt=attempt)
        self.exit(2, f"error: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cfp doctor",
        description="Checks this machine for planning, with a remedy for each failure. "
        "Works where JAX is missing or broken. The exit code is 0 if nothing failed, "
        "else 1.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        metavar="NAME",
        help="this check and those that it needs; may be given several times",
    )
    add("--list", action="store_true", help="list the checks")
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="examine this cache directory in place of the one that cfp would use",
    )
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="time limit of one check, in seconds (default: %(default)g)",
    )
    return parser
