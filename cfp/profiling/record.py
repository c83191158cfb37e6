"""Records of measurements, and the keys that they are stored under.

`ProfileRecord` is the outcome of one measurement. Failures have records, too, so that
no search repeats a compile that is known to run out of memory.

`ProfileKey` names everything on which a measurement depends, as parts. Their digest is
the key in the store. The parts are stored with the record, to name differences of
another machine: "jax_version: 0.10.2 there, 0.11.2 here". GPUs' links, power limits and
driver are parts, from ``nvidia-smi``. JAX has one device kind for GPUs with NVLink and
with PCIe, but times of their collectives differ.

Plans, and records from other machines, may contain any XLA option. Some options write
files (``xla_dump_to``), load them, or change results (``xla_gpu_enable_fast_min_max``).
So only a list of options is allowed, for a program's schedule, memory and kernels
(`refused_option`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import jax
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from cfp.printable import Count, Time, first_error
from cfp.profiling.coordination import coordination
from cfp.program.jaxprs import compiler_settings

Status = Literal["ok", "out_of_memory", "compile_error", "timeout", "crashed"]
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind, size and group that a compiled program contains.

    Attributes:
      kind: HLO's name: "all-reduce", "all-gather", "reduce-scatter", ...
      bytes: size on one device of the operand or the result, whichever is larger.
      group_size: number of devices in a group.
      count: executions in one run; a loop of unknown length counts once.
    """

    kind: str
    bytes: Count
    group_size: Count
    count: Count


def utc_now() -> str:
    """Returns this moment as an ISO 8601 string in UTC; such strings sort by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _in_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError("ISO 8601 in UTC")
    return text


Moment = Annotated[str, AfterValidator(_in_utc)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBytes:
    """Memory of a program on one device, by XLA or predicted; 0 if unknown.

    Attributes:
      alias_bytes: bytes of results in a donated argument's memory.
      temp_bytes: peak of temporaries.
      code_bytes: size of the generated code.
    """

    argument_bytes: Count = 0
    output_bytes: Count = 0
    alias_bytes: Count = 0
    temp_bytes: Count = 0
    code_bytes: Count = 0

    @property
    def size(self) -> CompiledBytes:
        """The memory fields alone, without those of a subclass."""
        names = (one.name for one in dataclasses.fields(CompiledBytes))
        return CompiledBytes(**{name: getattr(self, name) for name in names})

    @property
    def peak_bytes(self) -> int:
        """Sum of arguments, results, temporaries and code; aliases count once."""
        return (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temp_bytes
            + self.code_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord(CompiledBytes):
    """Outcome of one measurement: times and memory of a program, or its failure.

    Attributes:
      key: digest of `parts` (`ProfileKey.digest`).
      parts: (name, value) parts of the key, in order.
      status: "ok", or the kind of failure.
      reason: description of the failure; "" for "ok".
      samples_ms: milliseconds per execution, in the order taken; never changed later.
        docs/planning-rules.md lists the corrections that readers make.
      drift: factor on the samples, if the devices' speed changed in the race after
        them; see `cfp.race.turns`.
      build_seconds: time of tracing, lowering and compiling.
      run_seconds: time of all runs, warm-up included.
      collectives: collectives of one run.
      choice: JSON of a program's choice or race's answer (`cfp.race.compile`), or "".
      created: time of the record, ISO 8601 in UTC.

    Raises:
      ValueError: the status is "ok", and `samples_ms` is empty.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    key: str
    parts: tuple[tuple[str, str], ...]
    status: Status
    reason: str = ""
    samples_ms: tuple[Time, ...] = ()
    drift: Time = 1.0
    build_seconds: Time = 0.0
    run_seconds: Time = 0.0
    collectives: tuple[Collective, ...] = ()
    choice: str = ""
    created: Moment = field(default_factory=utc_now)

    def __post_init__(self):
        if self.ok and not self.samples_ms:
            raise ValueError("samples_ms: expected at least one where status is 'ok'")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def time_ms(self) -> float:
        """Median of the samples times `drift`, ms; infinity for a failure."""
        return self.drift * statistics.median(self.samples_ms) if self.ok else math.inf

    def to_json(self) -> str:
        """Returns the record as one line of JSON, with sorted names."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ProfileRecord:
        """Reads a record's JSON; raises ValueError if a field is invalid or unknown."""
        try:
            return _reader().validate_json(text)
        except ValidationError as error:
            where, expected, got = first_error(error)
            raise ValueError(
                f"{where or 'record'}: expected {expected}, got {got}"
            ) from error


@cache
def _reader() -> TypeAdapter[ProfileRecord]:
    return TypeAdapter(ProfileRecord)


Parts = tuple[tuple[str, str], ...]

# Changes if cfp measures or builds differently than before.
MEASURE_VERSION = "3"

GPU_PLATFORMS = ("gpu", "cuda", "rocm")

# Flags for dumps, caches, waits and the number of devices, which has its own part: they
# do not change a program's cost.
_IRRELEVANT_XLA_FLAGS = re.compile(
    r"--xla_(dump_.*|force_host_platform_device_count|cpu_collective_call_.*"
    r"|gpu_(cuda_data_dir|dump_.*|per_fusion_autotune_cache_dir|kernel_cache_file"
    r"|experimental_autotune_cache_mode|experimental_autotuner_cache_dir))"
)
_ALLOCATOR_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# Variables of CUDA and its libraries that select kernels, or the number of queues.
_CUDA_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)
_PRNG_IMPL = "jax_default_prng_impl"  # Has its own part of the key.
# Parts of a host, which may differ between processes of a program.
_OF_A_HOST = frozenset(
    ("allocator", "driver", "host", "links", "nccl", "power_limit", "processor")
)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Key of a record: (name, value) parts, such as the program's and environment's.

    Raises ValueError if a name is repeated.
    """

    parts: Parts

    def __post_init__(self):
        names = [name for name, _ in self.parts]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"expected every part once, got several of {doubled}")

    @property
    def digest(self) -> str:
        """SHA-256 of the parts in their order, in hex."""
        # JSON keeps ("a", "bc") and ("ab", "c") apart.
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()


def environment_parts(devices: Sequence[Any]) -> Parts:
    """Returns the parts of a key for the environment: devices, versions, settings.

    Args:
      devices: `jax.Device`s of the mesh, in its order, of all processes.
    """
    platform_name = devices[0].platform
    parts = {
        "measure": MEASURE_VERSION,
        "platform": platform_name,
        "device_kind": ", ".join(sorted({device.device_kind for device in devices})),
        "devices": str(len(devices)),
        # Links between neighbours on the mesh depend on the order.
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
            # Variables of NCCL's logs change no times.
            if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
        )
        if cuda := _variables(_CUDA_VARIABLES):
            parts["cuda"] = cuda
        # The allocator decides if memory suffices, and the time of allocations.
        parts["allocator"] = _variables(_ALLOCATOR_VARIABLES)
        # Only of this process's devices: the host knows no others' links.
        here = devices[0].client.process_index()
        mine = [d.local_hardware_id for d in devices if d.process_index == here]
        parts |= gpu_parts(mine)
        # The host launches the devices' programs.
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
        # Links between hosts are slower than links inside of one.
        parts["hosts"] = ",".join(
            str(known.index(talk.hosts[device.process_index])) for device in devices
        )
    return tuple(parts.items())


def alike_parts(devices: Sequence[Any]) -> dict[str, str]:
    """Returns {name in words: text} of parts that must be equal in all processes."""
    return {
        name.replace("_", " "): text
        for name, text in environment_parts(devices)
        if name not in _OF_A_HOST
    }


# Parts of an environment that make a machine one of another kind.
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
    """Describes differences of device kind, host and versions; "" if none differ."""
    theirs, ours = dict(parts), dict(here)
    return "; ".join(
        f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here"
        for name in _KIND
        if theirs.get(name) != ours.get(name)
    )


def normalise_xla_flags(flags: str) -> str:
    """Returns the flags that may change a measurement, sorted by name.

    Args:
      flags: value of the environment variable: flags, or the path of a file of flags
        if it does not begin with a dash. An unreadable path is returned.

    Returns:
      Flags with one space between them. Flags of one name keep their order, as XLA adds
      some up, and takes the last of others. Equal neighbours are one.
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
        # Unpaired quotes: XLA will report them.
        return flags.split()


def configuration() -> dict[str, str]:
    """Returns {name: text} of JAX's settings of matrix precision, x64 and the PRNG."""
    return {
        "matmul_precision": _setting("jax_default_matmul_precision"),
        "enable_x64": _setting("jax_enable_x64"),
        "prng_impl": _setting(_PRNG_IMPL),
        "threefry_partitionable": _setting("jax_threefry_partitionable"),
    }


def _setting(name: str) -> str:
    # A version of JAX may not have the setting.
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


UNKNOWN = "unknown"

_SECONDS = 30
_BUS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.([0-9a-fA-F]+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_QUERY = "index,power.limit,driver_version,pci.bus_id"
_BUS_LETTERS = 32  # A PCI address is shorter.


@lru_cache(maxsize=16)
def ask_driver(*words: str) -> str:
    """Returns the output of ``nvidia-smi``; "" if it is missing or fails; cached."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return _ESCAPES.sub("", done.stdout) if done.returncode == 0 else ""


def bus_of(ordinal: int) -> str:
    """Returns the PCI address of a GPU by CUDA's number; "" if CUDA does not tell.

    CUDA's numbers may differ from the driver's: they count only the GPUs in
    ``CUDA_VISIBLE_DEVICES``, by default the fastest first.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0:
        return ""  # CUDA is not started in this process, or has no such GPU.
    text = ctypes.create_string_buffer(_BUS_LETTERS)
    failed = library.cuDeviceGetPCIBusId(text, ctypes.c_int(_BUS_LETTERS), device)
    return "" if failed else text.value.decode(errors="replace")


def gpu_parts(ordinals: Sequence[int | None]) -> dict[str, str]:
    """Returns the parts of a key that describe GPUs of this host.

    Args:
        ordinals: CUDA's numbers of the mesh's devices in this process, in the mesh's
            order.

    Returns:
        ``links`` of pairs in the mesh's order (one if all are equal, "" for one GPU);
        distinct ``power_limit`` and ``driver``. Values not reported are "unknown".
    """
    known = _gpus()
    unknown = (-1, UNKNOWN, UNKNOWN)
    buses = ["" if ordinal is None else bus_of(ordinal) for ordinal in ordinals]
    gpus = [known.get(_address(bus), unknown) for bus in buses]
    return {
        "links": _links([number for number, *_ in gpus]),
        "power_limit": ", ".join(dict.fromkeys(power for _, power, _ in gpus)),
        "driver": ", ".join(dict.fromkeys(driver for *_, driver in gpus)),
    }


def _address(bus: str) -> tuple[int, ...] | None:
    """Parses an address such as ``00000000:18:00.0``; None for other text."""
    match = _BUS.fullmatch(bus.strip())
    return None if match is None else tuple(int(part, 16) for part in match.groups())


def _gpus() -> dict[tuple[int, ...] | None, tuple[int, str, str]]:
    """Returns {address: (driver's number, power limit, driver's version)} of GPUs."""
    found = {}
    answer = ask_driver(f"--query-gpu={_QUERY}", "--format=csv,noheader")
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and (address := _address(cells[3])):
            found[address] = (int(cells[0]), cells[1], cells[2])
    return found


def _links(numbers: Sequence[int]) -> str:
    """Returns links of all pairs, as ``NV18,SYS``; one if equal, "" for one GPU."""
    if len(numbers) < 2:
        return ""
    lines = [line.split("\t") for line in ask_driver("topo", "-m").splitlines()]
    heads = next((line for line in lines if "GPU0" in map(str.strip, line)), [])
    columns = {name.strip(): i for i, name in enumerate(heads)}
    rows = {line[0].strip(): line for line in lines if len(line) > 1 and line != heads}

    def link(a: int, b: int) -> str:
        row, column = rows.get(f"GPU{a}", []), columns.get(f"GPU{b}", -1)
        return row[column].strip() if 0 < column < len(row) else UNKNOWN

    pairs = [link(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    return pairs[0] if len(set(pairs)) == 1 else ",".join(pairs)


_SWITCH = re.compile("[Tt]rue|[Ff]alse")
_BYTES = re.compile("[0-9]{1,13}")
_PERCENT = re.compile("[1-9][0-9]?|100")
_LEVEL = re.compile("[0-3]")

# XLA's memory limit: percentage of device memory without arguments that others may use.
MEMORY_SHARE = "xla_gpu_memory_limit_slop_factor"


def untuned_options(platform: str) -> dict[str, Any]:
    """Returns XLA options that disable tuning and Triton's products; {} but on GPUs."""
    # Without tuning, Triton's kernels for products are slow.
    off = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}
    return off if platform in GPU_PLATFORMS else {}


# Harmless options, with the values that they may have.
_KNOWN = {
    "xla_gpu_enable_latency_hiding_scheduler": _SWITCH,
    "xla_gpu_all_gather_combine_threshold_bytes": _BYTES,
    "xla_gpu_all_reduce_combine_threshold_bytes": _BYTES,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _BYTES,
    "xla_gpu_collective_permute_combine_threshold_bytes": _BYTES,
    "xla_gpu_enable_pipelined_all_gather": _SWITCH,
    "xla_gpu_enable_pipelined_all_reduce": _SWITCH,
    "xla_gpu_enable_pipelined_reduce_scatter": _SWITCH,
    "xla_gpu_enable_triton_gemm": _SWITCH,
    "xla_gpu_enable_while_loop_double_buffering": _SWITCH,
    MEMORY_SHARE: _PERCENT,
    "xla_backend_optimization_level": _LEVEL,
    # Programs without rematerialization need more memory, and compute the same.
    "xla_disable_hlo_passes": re.compile("rematerialization"),
}


def refused_option(options: Any, allowed: Collection[str] = ()) -> str | None:
    """Describes the first refused one of a file's compiler options, or returns None.

    Args:
        options: value read from JSON; all but ``{name: text}`` is refused.
        allowed: names of further options, allowed with any text.
    """
    if not isinstance(options, Mapping):
        return f"compiler options that are a {type(options).__name__}, not an object"
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"the compiler option {name!r:.80} = {value!r:.80}, which is no text"
        if name in allowed:
            continue
        known = _KNOWN.get(name)
        if known is None:
            return (
                f"the compiler option {name!r:.80}, which is not known to be harmless"
            )
        if not known.fullmatch(value):
            return f"{value!r:.80} for the compiler option {name}"
    return None
