"""Checks of what is installed: Python, JAX, its libraries and plugins."""

from __future__ import annotations

import platform
import sys

from cfp.cluster.doctor.machine import (
    GPU_PLUGIN,
    Machine,
    ProcessAnswer,
    installed,
    names_like,
    parse,
    probe,
    requirements,
    same_release,
)
from cfp.cluster.doctor.result import Result, absent, failed, passed

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
            "python",
            f"{kind}; cfp runs on 3.11, 3.12 and 3.13",
            "make an environment with one of them: python3.12 -m venv",
        )
    if sys.maxsize < 2**32:
        return failed(
            "python", f"{kind}, with 32 bits", "install a Python with 64 bits"
        )
    if platform.machine() not in WITH_WHEELS:
        kind += "; jaxlib has no wheel for it (docs/install/ppc64le.md)"
    return passed("python", kind)


def packages(machine: Machine) -> Result:
    """The packages that cfp needs are installed, in versions that it works with."""
    wanted = [r for r in requirements(machine) if r.name not in ("jax", "jaxlib")]
    if not wanted:
        return failed(
            "packages",
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
            "packages",
            "; ".join(said),
            "pip install -e . in the clone, or from a wheelhouse: pip install "
            "--no-index --find-links WHEELHOUSE cfp",
        )
    return passed("packages", f"all {len(wanted)} are there")


def jax(machine: Machine) -> Result:
    """JAX is there, of a version that cfp works with, and can be imported."""
    version = installed(machine, "jax")
    if version is None:
        return failed(
            "jax",
            "JAX is not installed for this Python",
            f"{machine.python} -m pip install 'jax{_jax_range(machine)}'",
        )
    requirement = parse(f"jax{_jax_range(machine)}")
    if not requirement.allows(version):
        return failed(
            "jax",
            f"JAX {version}; cfp works with {requirement.versions}",
            f"pip install 'jax{requirement.versions}'",
        )
    answer = probe(machine, "imports")
    if answer.trouble:
        return failed(
            "jax",
            f"JAX {version} cannot be imported: {answer.trouble}",
            _import_remedy(machine, answer, version),
        )
    return passed("jax", f"JAX {answer.data['version']} from {answer.data['file']}")


def _jax_range(machine: Machine) -> str:
    for requirement in requirements(machine):
        if requirement.name == "jax":
            return requirement.versions
    return ""


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
            "jaxlib",
            "jaxlib is not installed for this Python",
            f"pip install jaxlib=={theirs}"
            if theirs
            else f"{machine.python} -m pip install 'jax{_jax_range(machine)}'",
        )
    if theirs is not None and not same_release(ours, theirs):
        return failed(
            "jaxlib",
            f"jaxlib {ours} beside JAX {theirs}",
            f"pip install jaxlib=={theirs}",
        )
    return passed("jaxlib", f"jaxlib {ours}")


def plugin(machine: Machine) -> Result:
    """The plugin for GPUs is there if there are any, and belongs to jaxlib."""
    found = names_like(machine, GPU_PLUGIN)
    lib = installed(machine, "jaxlib")
    if lib is not None:
        foreign = {n: v for n, v in found.items() if not same_release(v, lib)}
        if foreign:
            listed = ", ".join(f"{name} {v}" for name, v in foreign.items())
            return failed(
                "plugin",
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
            "plugin",
            f"{', '.join(found)} without {', '.join(lacking)}: they work together only",
            "pip install " + " ".join(f"{n}=={lib}" if lib else n for n in lacking),
        )
    if len(kinds) > 1:
        return failed(
            "plugin",
            f"plugins of several kinds: {', '.join(sorted(kinds))}",
            "uninstall all but the one that the driver is for "
            "(pip uninstall NAME-plugin NAME-pjrt)",
        )
    if found:
        return passed("plugin", ", ".join(f"{n} {v}" for n, v in found.items()))
    if machine.shows_nvidia:
        return failed(
            "plugin",
            "there is an NVIDIA driver, and no CUDA plugin for JAX",
            f"pip install 'jax[cuda13]{'==' + lib if lib else ''}' (cuda12 for drivers "
            "older than 580)",
        )
    return absent("plugin", "no GPU, so none is needed")
