"""The command ``cfp doctor``: all checks, in the order in which they run.

It needs nothing but Python's own library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from cfp.attention.kernels import KERNELS
from cfp.cluster import programs
from cfp.cluster.machine import (
    GPU_PLUGIN,
    Machine,
    ProcessAnswer,
    Result,
    Status,
    absent,
    document,
    failed,
    installed,
    jax_range,
    names_like,
    parse,
    passed,
    probe,
    requirements,
    row,
    same_release,
    summary,
)
from cfp.errors import CfpError, nearest

SUPPORTED_PYTHON = ((3, 11), (3, 14))  # From the first on, before the second.
# Architectures that jaxlib has wheels for, on Linux.
WITH_WHEELS = ("x86_64", "aarch64")


def python(machine: Machine) -> Result:
    """The interpreter is one that cfp and jaxlib's wheels are for."""
    version = ".".join(map(str, machine.version))
    kind = f"Python {version}, {platform.machine()}"
    lowest, above = SUPPORTED_PYTHON
    if not lowest <= machine.version[:2] < above:
        return failed(
            f"{kind}; cfp runs on 3.11, 3.12 and 3.13",
            "make an environment with one of them: python3.12 -m venv",
        )
    if sys.maxsize < 2**32:
        return failed(f"{kind}, with 32 bits", "install a Python with 64 bits")
    if platform.machine() not in WITH_WHEELS:
        kind += "; jaxlib has no wheel for it (docs/install/ppc64le.md)"
    return passed(kind)


def packages(machine: Machine) -> Result:
    """The packages that cfp needs are installed, in versions that it works with."""
    wanted = [r for r in requirements(machine) if r.name not in ("jax", "jaxlib")]
    if not wanted:
        return failed(
            "cfp's own metadata are missing, and so is the list of packages it needs",
            "install cfp with pip, or run it from a clone",
        )
    missing, wrong = [], []
    for requirement in wanted:
        version = installed(machine, requirement.name)
        if version is None:
            missing.append(f"{requirement.name}{requirement.versions}")
        elif not requirement.allows(version):
            wrong.append(f"{requirement.name} {version} (needs {requirement.versions})")
    if missing or wrong:
        said = [f"missing: {', '.join(missing)}"] if missing else []
        said += [f"of a wrong version: {', '.join(wrong)}"] if wrong else []
        return failed(
            "; ".join(said),
            "pip install -e . in the clone, or from a wheelhouse: pip install "
            "--no-index --find-links WHEELHOUSE cfp",
        )
    return passed(f"all {len(wanted)} are there")


def jax(machine: Machine) -> Result:
    """JAX is there, of a version that cfp works with, and can be imported."""
    version = installed(machine, "jax")
    if version is None:
        return failed(
            "JAX is not installed for this Python",
            f"{machine.python} -m pip install 'jax{jax_range(machine)}'",
        )
    requirement = parse(f"jax{jax_range(machine)}")
    if not requirement.allows(version):
        return failed(
            f"JAX {version}; cfp works with {requirement.versions}",
            f"pip install 'jax{requirement.versions}'",
        )
    answer = probe(machine, "imports")
    if answer.trouble:
        return failed(
            f"JAX {version} cannot be imported: {answer.trouble}",
            _import_remedy(machine, answer, version),
        )
    return passed(f"JAX {answer.data['version']} from {answer.data['file']}")


def _import_remedy(machine: Machine, answer: ProcessAnswer, version: str) -> str:
    if installed(machine, "jaxlib") is None:
        return f"pip install jaxlib=={version}"
    if answer.signal == "SIGILL":
        return (
            "this processor lacks instructions that jaxlib's wheel uses (AVX on "
            "x86_64): build jaxlib from source (docs/install/from-source.md)"
        )
    if answer.timed_out:
        return (
            "see whether the file system that holds Python answers; install the "
            "environment on a local disk"
        )
    return f"pip install --force-reinstall --no-deps jax=={version} jaxlib=={version}"


def jaxlib(machine: Machine) -> Result:
    """jaxlib is the one that belongs to JAX."""
    ours, theirs = installed(machine, "jaxlib"), installed(machine, "jax")
    if ours is None:
        return failed(
            "jaxlib is not installed for this Python",
            f"pip install jaxlib=={theirs}"
            if theirs
            else f"{machine.python} -m pip install 'jax{jax_range(machine)}'",
        )
    if theirs is not None and not same_release(ours, theirs):
        return failed(
            f"jaxlib {ours} beside JAX {theirs}", f"pip install jaxlib=={theirs}"
        )
    return passed(f"jaxlib {ours}")


def plugin(machine: Machine) -> Result:
    """The plugin for GPUs is there if there are any, and belongs to jaxlib."""
    found = names_like(machine, GPU_PLUGIN)
    lib = installed(machine, "jaxlib")
    if lib is not None:
        foreign = {n: v for n, v in found.items() if not same_release(v, lib)}
        if foreign:
            listed = ", ".join(f"{name} {v}" for name, v in foreign.items())
            return failed(
                f"{listed} beside jaxlib {lib}: JAX leaves out plugins of another "
                "version",
                "pip install " + " ".join(f"{name}=={lib}" for name in foreign),
            )
    kinds = {name.removesuffix("-plugin").removesuffix("-pjrt") for name in found}
    lacking = [
        f"{kind}-{part}"
        for kind in sorted(kinds)
        for part in ("plugin", "pjrt")
        if f"{kind}-{part}" not in found
    ]
    if lacking:
        return failed(
            f"{', '.join(found)} without {', '.join(lacking)}: they work together only",
            "pip install " + " ".join(f"{n}=={lib}" if lib else n for n in lacking),
        )
    if len(kinds) > 1:
        return failed(
            f"plugins of several kinds: {', '.join(sorted(kinds))}",
            "uninstall all but the one that the driver is for "
            "(pip uninstall NAME-plugin NAME-pjrt)",
        )
    if found:
        return passed(", ".join(f"{n} {v}" for n, v in found.items()))
    if machine.shows_nvidia:
        return failed(
            "there is an NVIDIA driver, and no CUDA plugin for JAX",
            f"pip install 'jax[cuda13]{'==' + lib if lib else ''}' (cuda12 for drivers "
            "older than 580)",
        )
    return absent("no GPU, so none is needed")


# ------------------------------------------------------------------- what is installed

_ENOUGH_BYTES = 512 << 20  # Compiled programs take most of it.
_ELSEWHERE = "set CFP_CACHE_DIR to a directory that can be written, on a local disk"


def cache(machine: Machine) -> Result:
    """The cache directory can be made and written, and has space."""
    folder = machine.cache
    if folder is None:
        return failed(
            "no place for the cache: neither CFP_CACHE_DIR, XDG_CACHE_HOME nor a home "
            "directory",
            _ELSEWHERE,
        )
    if trouble := _write_error(folder):
        return failed(f"{folder} cannot be written: {trouble}", _ELSEWHERE)
    free = machine.free_bytes(folder)
    if free < _ENOUGH_BYTES:
        return failed(
            f"{folder} has {free >> 20} MiB left; cfp needs {_ENOUGH_BYTES >> 20}",
            "make space there (its contents may be deleted), or set CFP_CACHE_DIR to a "
            "directory with more",
            free_bytes=free,
        )
    return passed(f"{folder}, {free / 2**30:.0f} GiB free", free_bytes=free)


def scratch(machine: Machine) -> Result:
    """There is a directory for temporary files, with space."""
    folder = Path(machine.environ.get("TMPDIR") or tempfile.gettempdir())
    trouble = _write_error(folder) if folder.is_dir() else "it is no directory"
    if not trouble:
        free = machine.free_bytes(folder)
        if free >= _ENOUGH_BYTES:
            return passed(f"{folder}, {free / 2**30:.0f} GiB free")
        trouble = f"{free >> 20} MiB left"
    return failed(
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
    Check(name="python", run=python),
    Check(name="packages", run=packages),
    Check(name="jaxlib", run=jaxlib),
    Check(name="jax", run=jax, needs=("jaxlib",)),
    Check(name="plugin", run=plugin),
    Check(name="driver", run=programs.driver),
    Check(name="links", run=programs.links, needs=("driver",)),
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
        found[check.name] = replace(result, name=check.name)
        yield found[check.name]


def _missing_need(check: Check, found: dict[str, Result]) -> Result | None:
    for need in check.needs:
        before = found.get(need)
        if before is None or before.status is Status.PASS:
            continue
        if before.status is Status.FAIL:
            return absent(f"not tried, as {need} failed")
        return absent(before.reason)
    return None


def _run(check: Check, machine: Machine) -> Result:
    try:
        return check.run(machine)
    except Exception as error:
        # A machine can be broken in ways that no check looks for. That is a result,
        # and the other checks go on.
        return failed(
            f"the check itself broke: {type(error).__name__}: {error}",
            "please report it, with what cfp doctor --json prints",
        )


_WIDEST = 120
INTERRUPTED = 130


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
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        metavar="NAME",
        help="this check and those that it needs; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="examine this cache directory in place of the one that cfp would use",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="time limit of one check, in seconds (default: %(default)g)",
    )
    return parser
