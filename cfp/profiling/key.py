"""Keys of measurements: their dependencies, as a list of named parts.

The digest of the parts is the key in the store. The names are kept beside it, so that
records of another machine can be told: "jax_version: 0.10.2 there, 0.11.2 here".
"""

import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from cfp.profiling.coordination import coordination
from cfp.profiling.topology import gpu_parts
from cfp.program.meaning import compiler_settings

Parts = tuple[tuple[str, str], ...]

# Another one where cfp itself measures or builds otherwise than before.
MEASURE_VERSION = "3"

GPU_PLATFORMS = ("gpu", "cuda", "rocm")

# Flags that change what is written, cached or seen, but not what a program costs
# (the number of devices is a part of its own).
_IRRELEVANT_XLA_FLAGS = re.compile(
    r"--xla_(dump_.*|force_host_platform_device_count|gpu_cuda_data_dir"
    r"|gpu_dump_.*|gpu_per_fusion_autotune_cache_dir|gpu_kernel_cache_file"
    r"|gpu_experimental_autotune_cache_mode|gpu_experimental_autotuner_cache_dir)"
)
_ALLOCATOR_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# CUDA's and its libraries', that choose kernels, or how many queues there are.
_CUDA_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)
_PRNG_IMPL = "jax_default_prng_impl"  # Has a part of its own.
# Of a host, and so not the same for all processes of a program.
_OF_A_HOST = frozenset(
    ("allocator", "driver", "host", "links", "nccl", "power_limit", "processor")
)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """An ordered list of (name, value) parts: the measured program, then the place."""

    parts: Parts

    def __post_init__(self):
        names = [name for name, _ in self.parts]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"expected every part once, got more of {doubled}")

    @property
    def digest(self) -> str:
        """SHA-256 of the parts, in hex."""
        # JSON keeps ("a", "bc") and ("ab", "c") apart.
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()


def environment_parts(devices: Sequence[Any]) -> Parts:
    """The parts of a key that say where something was measured.

    Args:
      devices: `jax.Device`s: all devices of the mesh, of every process.
    """
    platform_name = devices[0].platform
    parts = {
        "measure": MEASURE_VERSION,
        "platform": platform_name,
        "device_kind": ", ".join(sorted({device.device_kind for device in devices})),
        "devices": str(len(devices)),
        # Neighbours on the mesh may be linked in another way.
        "order": ",".join(str(d.id - min(o.id for o in devices)) for d in devices),
        "processes": str(len({device.process_index for device in devices})),
        "jax_version": jax.__version__,
        "jaxlib_version": metadata.version("jaxlib"),
        "driver_version": devices[0].client.platform_version,
        "xla_flags": normalise_xla_flags(os.environ.get("XLA_FLAGS", "")),
        **configuration(),
    }
    settings = [f"{n}={text}" for n, text in compiler_settings() if n != _PRNG_IMPL]
    if settings:
        parts["jax_settings"] = shlex.join(settings)
    if platform_name in GPU_PLATFORMS:
        parts["nccl"] = _variables(
            name
            for name in os.environ
            # What NCCL logs, and where to, changes no time.
            if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
        )
        if cuda := _variables(_CUDA_VARIABLES):
            parts["cuda"] = cuda
        # These decide what runs out of memory, and what an allocation costs.
        parts["allocator"] = _variables(_ALLOCATOR_VARIABLES)
        # Of the devices of this process, whose host knows their links.
        here = devices[0].client.process_index()
        mine = [d.local_hardware_id for d in devices if d.process_index == here]
        parts |= gpu_parts(mine)
        # It launches what the devices run.
        parts["host"] = f"{_processor()}, {os.cpu_count()} cores"
    elif platform_name == "tpu":
        parts["libtpu_flags"] = normalise_xla_flags(
            os.environ.get("LIBTPU_INIT_ARGS", "")
        )
    elif platform_name == "cpu":
        # Every CPU's device kind is "cpu".
        parts["processor"] = f"{_processor()}, {os.cpu_count()} cores"
    talk = coordination()
    processes = {device.process_index for device in devices}
    if talk is not None and talk.hosts and processes != {jax.process_index()}:
        known = list(dict.fromkeys(talk.hosts))
        # What lies between two hosts is slower than what lies inside of one.
        parts["hosts"] = ",".join(
            str(known.index(talk.hosts[device.process_index])) for device in devices
        )
    return tuple(parts.items())


def alike_parts(devices: Sequence[Any]) -> dict[str, str]:
    """The parts that all processes of a program have in common, in words."""
    return {
        name.replace("_", " "): text
        for name, text in environment_parts(devices)
        if name not in _OF_A_HOST
    }


# Of an environment: what makes a machine one of another kind.
_KIND = (
    "platform",
    "device_kind",
    "host",
    "processor",
    "driver_version",
    "jax_version",
    "jaxlib_version",
)


def other_kind(parts: Parts, here: Parts) -> str:
    """Names the differences of a key's machine from another; "" if of one kind."""
    theirs, ours = dict(parts), dict(here)
    return "; ".join(
        f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here"
        for name in _KIND
        if theirs.get(name) != ours.get(name)
    )


def normalise_xla_flags(flags: str) -> str:
    """Returns the flags that may change a measurement, sorted by name.

    Args:
      flags: value of the environment variable: flags, or a file of flags if it does not
        begin with a dash.

    Returns:
      Flags with one space between them. Flags of one name keep their order: some add
        up,
      and otherwise the last one counts.
    """
    if flags.strip() and not flags.lstrip().startswith("-"):
        try:
            flags = Path(flags).read_text()
        except OSError:
            return flags.strip()
    kept = [
        flag
        for flag in _split(flags)
        if not _IRRELEVANT_XLA_FLAGS.fullmatch(flag.partition("=")[0])
    ]
    kept.sort(key=lambda flag: flag.partition("=")[0])
    once = [flag for i, flag in enumerate(kept) if i == 0 or flag != kept[i - 1]]
    return shlex.join(once)


def _split(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError:
        # Quotes that do not pair up: XLA will complain, not the key.
        return flags.split()


def configuration() -> dict[str, str]:
    """JAX's settings that programs follow from, as keys and plans name them."""
    return {
        "matmul_precision": _setting("jax_default_matmul_precision"),
        "enable_x64": _setting("jax_enable_x64"),
        "prng_impl": _setting(_PRNG_IMPL),
        "threefry_partitionable": _setting("jax_threefry_partitionable"),
    }


def _setting(name: str) -> str:
    # Settings come and go with versions of JAX, and so does their influence.
    return str(getattr(jax.config, name, "absent"))


def _variables(names: Iterable[str]) -> str:
    return shlex.join(
        f"{name}={os.environ[name]}" for name in sorted(names) if name in os.environ
    )


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()
