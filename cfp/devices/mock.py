"""Runs programs for N devices on one GPU, which stands in for one of the N.

JAX can be given a topology that is not there. The one GPU is then process 0 of N, with
a device each: programs are partitioned, tuned and scheduled for all N, and run, while
their collectives do nothing. So a program's peak memory is that of N devices, to the
byte, and its time is that of its computation alone. Its results are wrong.

Nothing may wait for the other processes, which do not exist: no value is gathered from
them, no barrier is met, and kernels are tuned by this process alone.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from cfp.errors import DeviceError, MeshError, compose
from cfp.profiling.processes import TOPOLOGY_SETTING, mocked_topology
from cfp.profiling.topology import ask_driver

# Otherwise compiling waits for the kernels that the other processes should have tuned.
OPTIONS: Mapping[str, str] = MappingProxyType({"xla_gpu_shard_autotuning": "False"})
_FLAG = "--xla_gpu_shard_autotuning=false"


def can_play(device_kind: str) -> bool:
    """Returns True if a GPU of a kind and JAX's plugin are here; starts nothing.

    Args:
        device_kind: as JAX calls it, and the driver.
    """
    names = ask_driver("--query-gpu=name", "--format=csv,noheader").splitlines()
    return device_kind in map(str.strip, names) and cuda_plugin() is not None


def cuda_plugin() -> str | None:
    """The module of JAX's CUDA plugin, if one is installed; loads nothing."""
    folders = [str(Path(folder) / "jax_plugins") for folder in sys.path]
    found = {one.name for one in pkgutil.iter_modules(folders)}
    return min((name for name in found if "cuda" in name), default=None)


def play_one_of(count: int) -> None:
    """Has this process's one GPU play one of so many. Call it before JAX has devices.

    Args:
        count: devices of the cluster that is played, two or more.

    Raises:
        MeshError: there are fewer than two.
    """
    if count < 2:
        raise MeshError(
            compose(
                "One GPU can only play one of several.",
                expected="two devices or more",
                got=str(count),
                attempt="the GPU itself: --devices 1, or a mesh of one device",
            )
        )
    # One of several would do; JAX takes all that it may see.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    # As slices x hosts x devices of a host. The environment variable is not read.
    jax.config.update(TOPOLOGY_SETTING, f"1x{count}x1")
    # What comes from a cache is not partitioned again, and nothing shows its parts.
    jax.config.update("jax_enable_compilation_cache", False)
    flags = os.environ.get("XLA_FLAGS", "").split()
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = " ".join([*flags, _FLAG])


def mocked_mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """The mesh of the devices that the GPU plays.

    Args:
        axes: names and sizes, whose product is what `play_one_of` was given.

    Raises:
        DeviceError: JAX had its devices before `play_one_of`, or there is no GPU.
    """
    devices = jax.devices()
    names, sizes = zip(*axes, strict=True)
    types = (AxisType.Auto,) * len(names)
    wanted = int(np.prod(sizes))
    here = len(jax.local_devices())
    if len(devices) != wanted or here != 1 or not mocked_topology():
        raise DeviceError(
            compose(
                "This process does not play the devices that were asked for.",
                expected=f"{wanted} devices, of which one is here",
                got=f"{len(devices)} of platform {devices[0].platform}, of which "
                f"{here} are here",
                attempt="a machine with one GPU (or CUDA_VISIBLE_DEVICES=0), and "
                "play_one_of before anything asks JAX for its devices",
            )
        )
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=types)


def compiling_mesh(axes: tuple[tuple[str, int], ...], target: str) -> Mesh:
    """A mesh of devices that programs are compiled for, of which none is here.

    Args:
        axes: names and sizes.
        target: what the compiler has to know of a device, as XLA reads it.

    Raises:
        DeviceError: JAX's CUDA plugin, which has the compiler, is not installed.
    """
    if cuda_plugin() is None:
        raise DeviceError(
            compose(
                "Nothing here compiles for GPUs.",
                expected="JAX's CUDA plugin and nvcc, of JAX's own version; no GPU",
                got="neither of jax-cuda12-plugin and jax-cuda13-plugin",
                attempt='install "cfp[cuda]", or plan without --compile',
            )
        )
    names, sizes = zip(*axes, strict=True)
    # One process has them all: no other is waited for.
    found = topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=f"1x1x{prod(sizes)}"
    )
    types = (AxisType.Auto,) * len(names)
    return Mesh(np.array(found.devices).reshape(sizes), names, axis_types=types)
