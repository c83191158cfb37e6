"""Checks that compile programs and run them on the devices."""

from __future__ import annotations

import csv
import re

from cfp.attention.kernels import KERNELS
from cfp.cluster.machine import (
    GPU_PLUGIN,
    Machine,
    ProcessAnswer,
    Result,
    absent,
    failed,
    jax_range,
    names_like,
    passed,
    probe,
    release,
    tool,
)

# Programs of the doctor are small: they need not take a device for themselves.
_SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_CPU_DEVICES = "--xla_force_host_platform_device_count"
_GRAFT_ERROR = 2e-2  # Devices multiply matrices in TF32.
_ATTENTION_ERROR = 5e-3  # Relative L2 distance in bfloat16, as of the tests.
# A ring that works reaches more of NVLink's rate.
_LEAST_SHARE = 0.3


def devices(machine: Machine) -> Result:
    """JAX uses the devices that the driver shows."""
    answer = probe(machine, "devices")
    if answer.trouble:
        return failed(answer.trouble, _start_remedy(machine, answer))
    data = answer.data
    said = f"{data['count']} × {data['kind']} ({data['platform']})"
    gpus = query_gpus(machine, "index") if machine.shows_nvidia else ProcessAnswer()
    shown = len(gpus.data.get("rows", ()))
    used = data["count"] if data["platform"] in ("gpu", "cuda") else 0
    if used < shown:
        cause, remedy = _explain_hidden(machine)
        return failed(
            f"JAX uses {said}; the driver shows {shown} GPUs{cause}",
            remedy,
            count=data["count"],
        )
    return passed(said, count=data["count"], platform=data["platform"])


def _explain_hidden(machine: Machine) -> tuple[str, str]:
    """Returns the reason why JAX does not see all devices, and a remedy."""
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f", and CUDA_VISIBLE_DEVICES={visible!r} hides some",
            "unset CUDA_VISIBLE_DEVICES, or name all devices in it that cfp may use",
        )
    platforms = machine.environ.get("JAX_PLATFORMS", "")
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return (
            f", and JAX_PLATFORMS={platforms} leaves them out",
            "unset JAX_PLATFORMS, or set it to cuda",
        )
    return (
        "",
        'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" says why the plugin '
        "does not start",
    )


def _start_remedy(machine: Machine, answer: ProcessAnswer) -> str:
    if answer.timed_out:
        return (
            "the driver or a plugin hangs: look for Xid in dmesg; JAX_PLATFORMS=cpu "
            "works without devices"
        )
    platforms = machine.environ.get("JAX_PLATFORMS")
    if platforms:
        return f"unset JAX_PLATFORMS (it is {platforms}), or install that platform"
    if "RESOURCE_EXHAUSTED" in answer.trouble or "memory" in answer.trouble:
        return (
            "another program holds the device's memory: end it, or choose another "
            "device with CUDA_VISIBLE_DEVICES"
        )
    return 'see what python -c "import jax; jax.devices()" says'


def all_reduce(machine: Machine) -> Result:
    """An all-reduce is right; on GPUs, as fast as the links let it be."""
    variables = dict(_SMALL)
    flags = machine.environ.get("XLA_FLAGS", "")
    if _CPU_DEVICES not in flags:
        # Devices to sum over where there are only CPUs.
        variables["XLA_FLAGS"] = f"{flags} {_CPU_DEVICES}=4".strip()
    answer = probe(machine, "allreduce", variables=variables)
    if answer.trouble:
        return failed(answer.trouble, _nccl_remedy(machine, answer))
    data = answer.data
    count, time_ms = data["devices"], data["median_ms"]
    if not data["right"]:
        return failed(
            f"{count} devices: the sum is wrong",
            "a faulty link or device: run nccl-tests' all_reduce_perf -c 1 on pairs of "
            "devices; NCCL_P2P_DISABLE=1 tells whether it is the link",
        )
    if not machine.shows_nvidia:
        return passed(f"{count} virtual devices: the sum is right")
    if count < 2:
        return passed("starts, on 1 device; no link is used")
    # In a ring each device sends this much.
    rate = 2 * (count - 1) / count * data["bytes"] / time_ms / 1e6
    link = nvlink_gb_per_s(machine)
    said = f"{count} devices, {data['bytes'] >> 20} MiB: {time_ms:.2f} ms, "
    said += f"{rate:.0f} GB/s"
    numbers = {"time_ms": time_ms, "gb_per_s": rate, "link_gb_per_s": link}
    if link:
        said += f", {rate / link:.0%} of the NVLink's {link:.0f}"
    off = machine.environ.get("NCCL_P2P_DISABLE") == "1"
    if link and rate < _LEAST_SHARE * link and not off:
        return failed(
            said,
            "NCCL_DEBUG=INFO says which way it takes; unset NCCL_* variables that "
            "choose a way; see docs/install/limits.md",
            **numbers,
        )
    return passed(said + (" with NCCL_P2P_DISABLE=1" if off else ""), **numbers)


def _nccl_remedy(machine: Machine, answer: ProcessAnswer) -> str:
    if answer.timed_out:
        return (
            "devices wait for each other: NCCL_P2P_DISABLE=1 tells whether it is the "
            "links (in a virtual machine, access control (ACS) stops them); "
            "NCCL_DEBUG=INFO says where"
        )
    if not machine.shows_nvidia:
        return "see the rows jax and devices"
    return "NCCL_DEBUG=INFO says why; see the row plugin and docs/install/limits.md"


def shardy(machine: Machine) -> Result:
    """jaxlib has Shardy's passes; faults of XLA that cfp works around are named."""
    answer = probe(machine, "shardy", variables={"JAX_PLATFORMS": "cpu"})
    versions = jax_range(machine)
    remedy = f"pip install 'jax{versions}' with its own jaxlib, or build that one"
    if answer.trouble:
        return failed(answer.trouble, remedy)
    missing = answer.data["missing"]
    if missing:
        return failed(
            f"jaxlib lacks {len(missing)} of the {answer.data['needed']} pipelines "
            f"that cfp needs: {answer.data['reasons'][0]}",
            remedy,
        )
    if answer.data["rules"] == 0:
        return failed("Shardy's passes write no sharding rules", remedy)
    known = answer.data["faults"]
    said = f"all {answer.data['needed']} pipelines are there and write rules"
    if known:
        said += (
            f"; cfp works around {len(known)} faults of XLA's partitioner: "
            "docs/results/rules_cpu_202611.md lists them"
        )
    return passed(said, faults=len(known))


def graft(machine: Machine) -> Result:
    """A part of a program becomes a program, compiles, runs, and is right."""
    answer = probe(machine, "graft", variables=_SMALL)
    if answer.trouble:
        return failed(answer.trouble, _compile_remedy(answer))
    data = answer.data
    if data["difference"] > _GRAFT_ERROR:
        return failed(
            f"the result is off by {data['difference']:.1e}",
            "the compiler or the device is faulty: run with JAX_PLATFORMS=cpu, then "
            "with another version of jaxlib; see ECC errors (nvidia-smi -q -d ECC)",
            difference=data["difference"],
        )
    return passed(
        f"compiled in {data['compile_s']:.1f} s, runs on {data['devices']} devices, "
        f"off by {data['difference']:.0e}",
        **data,
    )


def _compile_remedy(answer: ProcessAnswer) -> str:
    if answer.timed_out:
        return (
            "compiling hangs: see that the machine has free cores and memory, and "
            "try --timeout 600"
        )
    if answer.signal == "SIGKILL":
        return (
            "the system ended it for want of memory: compiling needs 3 GiB or more; "
            "see docs/install/limits.md"
        )
    if "RESOURCE_EXHAUSTED" in answer.trouble:
        return "free the device's memory: nvidia-smi names the programs that use it"
    return "install jax and jaxlib of one version again; see the rows jax and plugin"


def attention_kernel(machine: Machine, name: str) -> Result:
    """A kernel of attention, forward and backward, agrees with float32."""
    kernel = KERNELS[name]
    if not machine.shows_nvidia:
        return absent(NO_GPU)
    answer = probe(machine, "kernel", name, variables=_SMALL)
    if trouble := answer.trouble or answer.data.get("refusal", ""):
        return failed(trouble, kernel.remedy)
    said = ", ".join(f"{what} {value:.1e}" for what, value in answer.data.items())
    if not max(answer.data.values()) <= _ATTENTION_ERROR:  # Also if it is no number.
        return failed(f"differs from float32: {said}", kernel.remedy, **answer.data)
    return passed(f"forward and backward; relative {said}", **answer.data)


# --------------------------------------------------------------------- NVIDIA's driver

NO_GPU = "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia is there"
# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"cuda12": 525, "cuda13": 580}
_WAYS = re.compile(r"(X|NV\d+|PIX|PXB|PHB|NODE|SYS)")
_GBYTES = re.compile(r"([\d.]+)\s*GB/s")


def query_gpus(machine: Machine, *fields: str) -> ProcessAnswer:
    """Asks for fields of all GPUs (``nvidia-smi --help-query-gpu`` lists them).

    Returns:
        Its data has "rows", one for each GPU; texts by field.
    """
    what = f"--query-gpu={','.join(fields)}"
    answer = tool(machine, "nvidia-smi", what, "--format=csv,noheader,nounits")
    if answer.trouble:
        return answer
    rows = [*filter(None, csv.reader(answer.text.splitlines(), skipinitialspace=True))]
    if odd := [row for row in rows if len(row) != len(fields)]:
        return ProcessAnswer(trouble=f"nvidia-smi said {', '.join(odd[0])}")
    return ProcessAnswer(
        data={"rows": [dict(zip(fields, r, strict=True)) for r in rows]}
    )


def driver(machine: Machine) -> Result:
    """The driver answers, and is new enough for the plugin's CUDA."""
    if not machine.shows_nvidia:
        return absent(NO_GPU)
    found = query_gpus(machine, "name", "driver_version", "compute_cap")
    if found.trouble:
        return failed(found.trouble, _driver_remedy(found))
    rows = found.data["rows"]
    if not rows:
        return failed(
            "nvidia-smi lists no GPU",
            "ask for one: --gres=gpu:1 (Slurm), -g 1 (jsrun), --gpus all (Docker), "
            "--nv (Apptainer)",
        )
    first = rows[0]
    version = first["driver_version"]
    for name in names_like(machine, GPU_PLUGIN):
        cuda = name.split("-")[1]
        oldest = OLDEST_DRIVER.get(cuda)
        if oldest is not None and release(version)[0] < oldest:
            return failed(
                f"driver {version} is older than {oldest}, which {name} needs",
                "update the driver, or pip uninstall the plugin and install "
                "'jax[cuda12]'"
                if cuda == "cuda13" and release(version)[0] >= OLDEST_DRIVER["cuda12"]
                else f"update the driver to {oldest} or newer",
            )
    kinds = sorted({row["name"] for row in rows})
    return passed(
        f"driver {version}; {len(rows)} × {', '.join(kinds)}, compute capability "
        f"{first['compute_cap']}",
        gpus=len(rows),
    )


def _driver_remedy(found: ProcessAnswer) -> str:
    if found.timed_out:
        return (
            "the driver hangs: look for Xid in dmesg; end the programs that use the "
            "GPUs, or have the machine restarted"
        )
    if "mismatch" in found.trouble:
        return "the driver was updated: restart the machine, or reload its modules"
    if "not on the PATH" in found.trouble:
        return (
            "in a container, have the driver's tools mounted: --gpus all with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return "see what nvidia-smi says by itself; reload or install the driver"


def links(machine: Machine) -> Result:
    """The driver names the links between the GPUs, and NVLink's rate."""
    found = query_gpus(machine, "index")
    if found.trouble:
        return failed(found.trouble, _driver_remedy(found))
    if len(found.data["rows"]) < 2:
        return absent("one GPU: no links")
    answer = tool(machine, "nvidia-smi", "topo", "-m")
    if answer.trouble:
        return failed(answer.trouble, "see what nvidia-smi topo -m says by itself")
    ways = link_kinds(answer.text)
    if not ways:
        return failed(
            "nvidia-smi topo -m names no links",
            "update the driver; without it NCCL guesses",
        )
    speed = nvlink_gb_per_s(machine)
    listed = ", ".join(f"{kind} ({count} pairs)" for kind, count in ways.items())
    fast = f"; NVLink {speed:.0f} GB/s each way of a GPU" if speed else ""
    return passed(listed + fast, nvlink_gb_per_s=speed)


def link_kinds(matrix: str) -> dict[str, int]:
    """Counts pairs of GPUs by link in the output of ``nvidia-smi topo -m``."""
    counts: dict[str, int] = {}
    # Heads and row names may be underlined by escape codes.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines()]
    rows = [row for row in rows if re.fullmatch(r"GPU\d+", row[0] if row else "")]
    rows = [row for row in rows if len(row) > 1 and _WAYS.fullmatch(row[1])]
    for index, row in enumerate(rows):
        for cell in row[1 : index + 1]:
            counts[cell] = counts.get(cell, 0) + 1
    return dict(sorted(counts.items()))


def nvlink_gb_per_s(machine: Machine) -> float:
    """Sums the rates of the first GPU's NVLinks, in each direction; 0 without any."""
    status = tool(machine, "nvidia-smi", "nvlink", "-s", "-i", "0").text
    return sum(float(rate) for rate in _GBYTES.findall(status))
