"""The device that operators run on, and the versions of packages."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from cfp.operators.operator import Reason

_LEAST_CAPABILITY = 8.0
_PACKAGES = (
    "cfp",
    "jax",
    "jaxlib",
    "flax",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


@cache
def gpu_reason() -> Reason:
    """Returns the reason why there is no NVIDIA GPU that fused kernels run on."""
    device = jax.devices()[0]
    if device.platform != "gpu" or not device.device_kind.startswith(
        ("NVIDIA", "Tesla", "Quadro", "GeForce")
    ):
        return f"needs an NVIDIA GPU, and JAX runs on {device.device_kind}"
    if (capability := float(device.compute_capability)) < _LEAST_CAPABILITY:
        return f"needs compute capability {_LEAST_CAPABILITY}, this is {capability}"
    return None


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
    """The commit of the clone that this is part of; None if git does not say."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
