"""The device that operators run on, and versions of their libraries."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

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
