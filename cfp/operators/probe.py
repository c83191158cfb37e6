"""Availability of libraries and devices on this machine, with reasons."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from cfp.attention.pallas import KERNELS, load
from cfp.errors import summary_of
from cfp.operators.operator import Reason


@cache
def import_reason(name: str) -> Reason:
    """Returns the reason why a module cannot be imported."""
    top = name.partition(".")[0]
    if find_spec(top) is None:
        return f"{top} is not installed"
    try:
        load(name)
    except Exception as error:  # A library may raise anything while it is loaded.
        return f"import {name}: {summary_of(error)}"
    return None


@cache
def gpu_reason(least_capability: float = 0.0) -> Reason:
    """Returns the reason why there is no NVIDIA GPU of some compute capability."""
    device = jax.devices()[0]
    if device.platform != "gpu" or not device.device_kind.startswith(
        ("NVIDIA", "Tesla", "Quadro", "GeForce")
    ):
        return f"needs an NVIDIA GPU, and JAX runs on {device.device_kind}"
    capability = float(device.compute_capability)
    if capability < least_capability:
        return f"needs compute capability {least_capability}, this is {capability}"
    return None


def pallas(module: str) -> Callable[[], Reason]:
    """The probe of a kernel of Pallas."""
    return lambda: gpu_reason(8.0) or import_reason(f"{KERNELS}.{module}")


def tokamax(backend: str, needs: str = "") -> Callable[[], Reason]:
    """The probe of one of tokamax's implementations.

    Args:
        backend: its name for it.
        needs: a module that this implementation needs besides.
    """
    modules = ("tokamax", needs) if needs else ("tokamax",)
    capability = {"triton": 8.0, "mosaic": 9.0, "mosaic_gpu": 9.0}.get(backend)

    def reason() -> Reason:
        missing = next(filter(None, map(import_reason, modules)), None)
        return missing or (gpu_reason(capability) if capability else None)

    return reason


def load_pallas(module: str) -> ModuleType:
    """A module of `jax.experimental.pallas.ops.gpu`."""
    return load(f"{KERNELS}.{module}")


def load_tokamax() -> ModuleType:
    """The module tokamax."""
    return import_module("tokamax")


# ----------------------------------------------------------------- device and versions

_PACKAGES = (
    "cfp",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "tokamax",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


def environment() -> dict[str, Any]:
    """The device, Python, and versions of packages; None for what is missing."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_bytes": memory_limit(),
        "platform_version": str(getattr(device.client, "platform_version", "")).strip(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def memory_limit() -> int | None:
    """Bytes that programs may take on the first device; None if it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the clone that this is part of."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # No git here: the version of the package has to do.
    return done.stdout.strip() or None
