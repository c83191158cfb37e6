"""The command ``cfp doctor``: checks of a machine, in the order in which they run.

A check is a function that returns its finding as text, or None if it needs a GPU and
there is no GPU. It raises an exception for a fault. Checks that import JAX share a
child process; others need only Python's standard library and `packaging`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import timeit
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from cfp.profiling.files import cache_dir

PASS, FAIL, ABSENT = "PASS", "FAIL", "ABSENT"
# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
SUM_ERROR = 1e-5  # Relative.
ATTENTION_ERROR = 5e-3  # Relative L2 distance in bfloat16, as of the tests.
LEAST_SHARE = 0.3  # An all-reduce that works reaches more of NVLink's rate.
ENOUGH_BYTES = 512 << 20  # Compiled programs take most of it.
TOOL_SECONDS = 30.0
_MARK = "cfp-doctor: "  # Before a result as JSON.
_DRIVER = Path("/proc/driver/nvidia")
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Number of virtual devices to sum over on CPUs.
_CPU_DEVICES = "--xla_force_host_platform_device_count=4"


class Failure(Exception):
    """Error: a check found a fault of the machine."""


def shows_nvidia() -> bool:
    """True if the machine has NVIDIA's driver or nvidia-smi."""
    return _DRIVER.exists() or shutil.which("nvidia-smi") is not None


def installed() -> dict[str, metadata.Distribution]:
    """Installed packages by normalised name; the first on the path counts."""
    found = reversed([*metadata.distributions()])
    return {package_name(one.metadata["Name"] or ""): one for one in found}


def package_name(requirement: str) -> str:
    """A requirement's package name, normalised: lower case, with hyphens."""
    return re.sub("[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def requirements() -> list[str]:
    """cfp's requirements without extras, such as ``jax>=0.10.2,<0.13``."""
    if _PROJECT.is_file():
        return tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
    return [one for one in metadata.requires("cfp") or [] if "extra ==" not in one]


def allows(requirement: str, version: str) -> bool:
    """True if a version satisfies a requirement such as ``jax>=0.10.2``."""
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _run(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[str, str]:
    """Runs a process; returns (all its output, the reason why it failed or "").

    A hanging driver can make a process unkillable; it is then left behind. Output goes
    to a file, since children could keep a pipe open.
    """
    with tempfile.TemporaryFile() as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        start = partial(subprocess.Popen, env=environ, start_new_session=True)
        try:
            process = start(command, **streams)
        except FileNotFoundError:
            return "", "is not on the PATH"
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:  # Also after Ctrl-C.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        out.seek(0)
        text = out.read().decode(errors="replace")
    if code is None:
        return text, f"did not answer within {timeout_s:g} s"
    if code < 0:
        return text, f"was ended by {signal.Signals(-code).name}"
    last = (text.strip() or f"exit code {code}").splitlines()[-1]
    return text, f"failed: {last[:300]}" if code else ""


def _nvidia_smi(*words: str) -> str:
    text, trouble = _run(["nvidia-smi", *words], os.environ, TOOL_SECONDS)
    if trouble:
        raise Failure(f"nvidia-smi {trouble}")
    return text


def _gpus() -> list[list[str]]:
    """Name, driver's version and compute capability of each GPU."""
    what = "--query-gpu=name,driver_version,compute_cap"
    text = _nvidia_smi(what, "--format=csv,noheader,nounits")
    return [line.split(", ") for line in text.splitlines() if line]


def packages() -> str:
    """Checks that required packages and JAX plugins have versions that fit together."""
    found, lines, wrong = installed(), requirements(), {}
    ours = sorted(n for n in found if re.match(r"jax(lib|-.*-(plugin|pjrt))?$", n))
    for line in (line for name in ours for line in found[name].requires or ()):
        # JAX's extras name plugins; only those of installed plugins count.
        needed, _, extra = line.partition(";")
        plugin = re.match(r"jax-\w+-plugin", needed)
        if not extra or (plugin and plugin[0] in found):
            lines.append(needed)
    for line in lines:
        if (name := package_name(line)) not in found:
            wrong[f"{line} is missing"] = None
        elif re.search("[<>=]", line) and not allows(line, found[name].version):
            wrong[f"{name} is {found[name].version}, not {line}"] = None
    if wrong:
        raise Failure(", ".join(wrong))
    return ", ".join(f"{name} {found[name].version}" for name in ours)


def folders() -> str:
    """Checks that cache and temporary folder are writable, with 512 MiB free."""
    found = []
    for folder in (cache_dir(), Path(tempfile.gettempdir())):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
        free = shutil.disk_usage(folder).free
        found.append(f"{folder}, {free >> 30} GiB free")
        if free < ENOUGH_BYTES:
            raise Failure(
                f"{folder}: {free >> 20} MiB free, {ENOUGH_BYTES >> 20} MiB needed"
            )
    return "; ".join(found)


def driver() -> str | None:
    """Describes NVIDIA's driver, None without one; fails if too old, or without GPU."""
    if not shows_nvidia():
        return None
    if not (rows := _gpus()):
        raise Failure("nvidia-smi lists no GPU")
    name, version, capability = rows[0]
    for plugin, oldest in OLDEST_DRIVER.items():
        if plugin in installed() and int(version.split(".")[0]) < oldest:
            raise Failure(f"driver {version}; {plugin} needs {oldest} or newer")
    return f"driver {version}; {len(rows)} × {name}, compute capability {capability}"


def jax() -> str:
    """Checks that JAX can be imported, and has Shardy's passes."""
    import jax

    from cfp.program import shardy

    if missing := sorted(shardy.missing_pipelines().values()):
        raise Failure(f"jaxlib lacks MLIR passes that cfp needs: {', '.join(missing)}")
    text = f"JAX {jax.__version__} from {jax.__file__}; cfp works around "
    return text + "the faults of XLA's partitioner in docs/results/rules.md"


def devices() -> str:
    """Checks that JAX uses all GPUs that the driver shows."""
    import jax

    first, *more = jax.local_devices()
    text = f"{1 + len(more)} × {first.device_kind} ({first.platform})"
    shown = len(_gpus()) if shows_nvidia() else 0
    if shown > (1 + len(more) if first.platform in ("gpu", "cuda") else 0):
        names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
        given = [f"; {n}={os.environ[n]}" for n in names if n in os.environ]
        reason = f"JAX uses {text}; the driver shows {shown} GPUs"
        raise Failure(reason + "".join(given))
    return text


def graft() -> str:
    """Checks that a cfp program compiles, its all-reduce is right, and NVLink fast."""
    import jax
    import jax.numpy as jnp

    from cfp.program.constrain import Constraints
    from cfp.program.part import cut_part, lower_part
    from cfp.program.step import flatten_step
    from cfp.program.trace import trace

    mesh = jax.sharding.Mesh(jax.local_devices(), ("x",))
    length = (1 << 20) * (1 if jax.default_backend() == "cpu" else 64)
    shape = jax.ShapeDtypeStruct((mesh.size, length), jnp.float32)
    program, _ = trace(flatten_step(lambda x: x.sum(0), (shape,)), mesh)
    part = cut_part(program, [op.id for op in program.ops])
    rows, whole = (("x",), ()), ((),)
    lowered = lower_part(program, part, mesh, Constraints({}, {}), [rows], [whole])
    run = lowered.compile()
    (sharding,) = run.input_shardings[0]
    numbers = jnp.arange(1.0, mesh.size + 1)[:, None]  # One for each device.
    fill = partial(jnp.broadcast_to, shape=shape.shape)
    x = jax.jit(fill, out_shardings=sharding)(numbers)
    error = float(jnp.abs(run(x)[0] / numbers.sum() - 1).max())
    times = timeit.repeat(lambda: jax.block_until_ready(run(x)), number=1, repeat=10)
    return judged_sum(mesh.size, 4 * length, error, 1e3 * sorted(times)[5])


def judged_sum(count: int, size_bytes: int, error: float, time_ms: float) -> str:
    """Describes an all-reduce; Failure for a large relative error, or slow NVLink."""
    text = f"{count} devices: an all-reduce of {size_bytes >> 20} MiB"
    if not error <= SUM_ERROR:  # Also for NaN.
        raise Failure(f"{text} is off by {error:.1e} of the sum; limit {SUM_ERROR:g}")
    if not shows_nvidia() or count < 2:
        return f"{text} is right"
    # GB/s that each device sends in a ring.
    rate = 2 * (count - 1) / count * size_bytes / time_ms / 1e6
    links = re.findall(r"([\d.]+)\s*GB/s", _nvidia_smi("nvlink", "-s", "-i", "0"))
    link = sum(map(float, links))
    text += f" takes {time_ms:.2f} ms, {rate:.0f} GB/s"
    if link:
        text += f", {rate / link:.0%} of the NVLinks' {link:.0f} in each direction"
    if rate < LEAST_SHARE * link and os.environ.get("NCCL_P2P_DISABLE") != "1":
        raise Failure(f"{text}; {LEAST_SHARE:.0%} or more expected")
    return text


def cudnn() -> str | None:
    """Checks cuDNN's attention, forward and backward, against float32."""
    import jax

    return judged_kernel("cudnn") if jax.default_backend() == "gpu" else None


def judged_kernel(kernel: str) -> str:
    """Runs an attention kernel; describes its errors, or raises Failure if large."""
    import jax
    import jax.numpy as jnp

    from cfp.kernels.call import attention

    def results(kernel, q, k, v, dout):
        call = partial(attention, causal=True, implementation=kernel)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    # Small, but whole blocks; two query heads share a key head.
    shapes = [(1, 256, heads, 64) for heads in (4, 2, 2, 4)]
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    arrays = [*map(draw, jax.random.split(jax.random.key(0), 4), shapes)]
    found = jax.jit(partial(results, kernel))(*arrays)
    with jax.default_matmul_precision("highest"):
        exact = (x.astype(jnp.float32) for x in arrays)
        right = jax.jit(partial(results, "xla"))(*exact)
    norm = jnp.linalg.norm
    off = [float(norm(a - b) / norm(b)) for a, b in zip(found, right, strict=True)]
    text = "forward {:.1e}, dq {:.1e}, dk {:.1e}, dv {:.1e}".format(*off)
    if not all(one <= ATTENTION_ERROR for one in off):  # Also for NaN.
        raise Failure(f"differs from float32: {text}")
    return f"forward and backward; relative {text}"


@dataclass(frozen=True, slots=True)
class Result:
    """A check's result; status is PASS, FAIL or ABSENT (no GPU, or not run)."""

    name: str
    status: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the remedy for its faults."""

    run: Callable[[], str | None]
    remedy: str

    @property
    def name(self) -> str:
        """The name of the check's function."""
        return self.run.__name__

    def result(self) -> Result:
        """Runs the check; every exception becomes a FAIL."""
        try:
            reason = self.run()
        except Exception as error:
            # A machine can be broken in unforeseen ways: report it, and go on.
            kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
            text = " ".join(str(error).split("\n\n")[0].split())
            return Result(self.name, FAIL, kind + text[:2000], self.remedy)
        return Result(self.name, PASS if reason else ABSENT, reason or "no GPU")


WITHOUT_JAX = (packages, folders, driver)
CHECKS = (
    Check(
        packages,
        "pip install -e . in the clone, or pip install cfp, from a wheelhouse with "
        "--no-index --find-links WHEELHOUSE. jaxlib without a wheel is built from "
        "source (docs/install/from-source.md)",
    ),
    Check(
        folders,
        "free space there (the cache may be deleted), or set CFP_CACHE_DIR and TMPDIR "
        "to writable directories on a local disk",
    ),
    Check(
        driver,
        "ask the job for a GPU: --gres=gpu:1 (Slurm), -g 1 (jsrun), --gpus all with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility (Docker), --nv (Apptainer). Driver "
        "hangs or was updated: look for Xid in dmesg, and restart. Driver is too old: "
        "update it, or install 'jax[cuda12]' for 525 and newer",
    ),
    Check(
        jax,
        "pip install --force-reinstall --no-deps jax and jaxlib of one version. "
        "SIGILL: the processor lacks instructions of the wheel, build it from source "
        "(docs/install/from-source.md). No answer: install on a local disk",
    ),
    Check(
        devices,
        "pip install 'jax[cuda13]' (cuda12 for drivers older than 580); unset "
        "CUDA_VISIBLE_DEVICES and JAX_PLATFORMS, or name all devices there; end "
        "other programs that hold the devices; look for Xid in dmesg. "
        'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" says why the plugin '
        "does not start",
    ),
    Check(
        graft,
        "NCCL_DEBUG=INFO shows the links that NCCL uses, and where it waits. If "
        "NCCL_P2P_DISABLE=1 helps, a link is at fault (in a virtual machine, access "
        "control, ACS). SIGKILL: compiling needs 3 GiB or more. No answer: "
        "try --timeout 600. Wrong result: try JAX_PLATFORMS=cpu, and see ECC errors "
        "(nvidia-smi -q -d ECC); see docs/install/limits.md",
    ),
    Check(
        cudnn,
        "pip install --upgrade nvidia-cudnn-cu13 (or -cu12), in the versions that the "
        "plugin asks for; cfp plans without it, and attention is XLA's then",
    ),
)


def examine(only: Collection[str] = (), jax_timeout_s: float = 300) -> Iterator[Result]:
    """Yields results of named checks or all; ABSENT once a check with JAX failed."""
    checks = [check for check in CHECKS if not only or check.name in only]
    yield from (check.result() for check in checks if check.run in WITHOUT_JAX)
    if not (checks := [check for check in checks if check.run not in WITHOUT_JAX]):
        return
    # The programs are small: do not preallocate a device's memory.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    variables.setdefault("XLA_FLAGS", _CPU_DEVICES)
    command = [sys.executable, "-m", __name__, *(check.name for check in checks)]
    text, trouble = _run(command, variables, jax_timeout_s)
    lines = [line for line in text.splitlines() if line.startswith(_MARK)]
    found = [Result(**json.loads(line.removeprefix(_MARK))) for line in lines]
    if len(found) < len(checks) and not (found and found[-1].status == FAIL):
        ended = checks[len(found)]
        reason = f"its process {trouble or 'gave no answer'}"
        found.append(Result(ended.name, FAIL, reason, ended.remedy))
    yield from found
    for check in checks[len(found) :]:
        yield Result(check.name, ABSENT, f"not tried, as {found[-1].name} failed")


def row(result: Result, width: int) -> str:
    """Formats a result with reason and remedy, folded at `width` (at least 60)."""
    fill = partial(textwrap.wrap, width=max(width, 60) - 19, break_long_words=False)
    lines = fill(result.reason, break_on_hyphens=False)
    if result.remedy:
        lines += fill(f"-> {result.remedy}", break_on_hyphens=False)
    return f"{result.name:<12}{result.status:<7}" + ("\n" + " " * 19).join(lines)


def main(words: Sequence[str]) -> int:
    """Runs ``cfp doctor``; returns 0, 1 if a check failed, or 130 after Ctrl-C."""
    about = """Checks this machine for planning, with a remedy for each failure. Works
        where JAX is missing or broken. The exit code is 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="cfp doctor", description=about)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    names, only = [check.name for check in CHECKS], "this check; may be repeated"
    add("--only", action="append", choices=names, metavar="NAME", help=only)
    add("--list", action="store_true", help="list the checks")
    limit = "time limit of all checks that use JAX, in seconds (default: %(default)g)"
    add("--timeout", type=float, default=300, metavar="S", help=limit)
    options = parser.parse_args(words)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<12}{check.run.__doc__}")
        return 0
    results: list[Result] = []
    try:
        for result in examine(options.only or (), options.timeout):
            results.append(result)
            if not options.json:
                columns = shutil.get_terminal_size().columns
                print(row(result, min(columns, 120)), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    counts = Counter(result.status for result in results)
    if options.json:
        document = {
            "host": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "ok": not counts[FAIL],
            "checks": [asdict(result) for result in results],
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n" + ", ".join(f"{counts[one]} {one}" for one in (PASS, FAIL, ABSENT)))
    return int(counts[FAIL] > 0)


if __name__ == "__main__":
    for _check in (check for check in CHECKS if check.name in sys.argv[1:]):
        _found = _check.result()
        print(f"\n{_MARK}{json.dumps(asdict(_found))}", flush=True)
        if _found.status == FAIL:
            break
