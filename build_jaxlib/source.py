"""Builds jaxlib from a checkout of JAX, where no wheel exists."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cfp.cluster.doctor import allows, package_name, requirements
from cfp.errors import CfpError

_DISK_BYTES = 40 << 30
_MEMORY_BYTES = 15 << 30
_VERSION = re.compile(r'^_version = "([\d.]+)"', re.MULTILINE)
# Bazel itself, and the toolchains that JAX's build fetches, exist for these.
BUILDS_ON = ("x86_64", "aarch64")


def command(
    checkout: Path,
    output: Path,
    accelerator: str,
    bazel_options: Sequence[str],
    *,
    build_options: Sequence[str] = (),
    force: bool = False,
) -> list[str]:
    """The command that builds, once nothing speaks against it.

    Args:
        checkout: JAX's sources, at a release that cfp works with.
        output: where the wheels go.
        accelerator: as in `platforms.ACCELERATORS`.
        bazel_options: passed on to Bazel.
        build_options: passed on to JAX's build.
        force: even where experience says that it will fail.

    Raises:
        CfpError: it cannot be built here, with the reason.
    """
    version = jax_version(checkout)
    needed = {package_name(line): line for line in requirements()}["jax"]
    if not allows(needed, version):
        raise _refusal(
            "cfp does not work with this release of JAX.",
            f"a checkout at {needed}",
            version,
            "git checkout jax-v0.12.0 there",
        )
    if not force:
        _refuse_machine(accelerator)
    kinds = ["jaxlib"]
    if accelerator.startswith("cuda"):
        kinds += ["jax-cuda-plugin", "jax-cuda-pjrt"]
    elif accelerator == "rocm":
        kinds += ["jax-rocm-plugin", "jax-rocm-pjrt"]
    words = [sys.executable, "build/build.py", "build", f"--wheels={','.join(kinds)}"]
    words.append(f"--output_path={output.resolve()}")
    words.append(f"--python_version={sys.version_info.major}.{sys.version_info.minor}")
    if accelerator.startswith("cuda"):
        words.append(f"--cuda_major_version={_cuda(accelerator)}")
    words += build_options
    return [*words, *(f"--bazel_options={option}" for option in bazel_options)]


def _cuda(accelerator: str) -> str:
    """The major version of CUDA in a name such as cuda13-local."""
    return accelerator.removeprefix("cuda").partition("-")[0]


def build(words: Sequence[str], checkout: Path) -> int:
    """Runs the build, which takes an hour or more; returns its exit code."""
    return subprocess.run(words, cwd=checkout, check=False).returncode


def jax_version(checkout: Path) -> str:
    """The release of a checkout.

    Raises:
        CfpError: it is none.
    """
    script, version = checkout / "build" / "build.py", checkout / "jax" / "version.py"
    found = _VERSION.search(version.read_text()) if version.exists() else None
    if not script.exists() or found is None:
        raise _refusal(
            "This is no checkout of JAX.",
            "a folder with build/build.py and jax/version.py",
            str(checkout),
            "git clone --branch jax-v0.12.0 https://github.com/jax-ml/jax, on a "
            "machine with a network, and carry it over",
        )
    return found[1]


def _refuse_machine(accelerator: str) -> None:
    machine = platform.machine()
    if machine not in BUILDS_ON:
        raise _refusal(
            f"JAX's build does not support {machine}: it fetches Bazel, Clang and "
            "Python for x86_64 and aarch64 only.",
            " or ".join(BUILDS_ON),
            machine,
            "follow docs/install/ppc64le.md step by step, then give --force",
        )
    if accelerator == "tpu":
        raise _refusal(
            "libtpu's sources are not public.",
            "a wheel of libtpu",
            "tpu",
            "--accelerator cpu",
        )
    # On x86_64 the build brings its own.
    if machine != "x86_64" and shutil.which("clang") is None:
        raise _refusal(
            "There is no compiler that JAX is built with.",
            "clang 18 or newer on the PATH",
            "none",
            "install clang (apt-get install clang; module load llvm)",
        )
    free = shutil.disk_usage(Path.home()).free
    if free < _DISK_BYTES:
        raise _refusal(
            "There is too little space for Bazel's cache.",
            f"{_DISK_BYTES >> 30} GiB in the home directory",
            f"{free >> 30} GiB",
            "--build_option=--bazel_startup_options=--output_user_root=DIR, with "
            "--force",
        )
    total = _memory_bytes()
    if total < _MEMORY_BYTES:
        raise _refusal(
            "There is too little memory to link in.",
            f"{_MEMORY_BYTES >> 30} GiB",
            f"{total >> 30} GiB",
            "a larger machine; or --bazel_options=--jobs=2, with --force",
        )


def _memory_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemTotal:")[1].split()[0]) << 10


def _refusal(summary: str, expected: str, got: str, attempt: str) -> CfpError:
    return CfpError(f"{summary} Expected {expected}, got {got}. Try: {attempt}.")
