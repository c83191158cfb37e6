"""Checks of all-reduces: by NCCL itself and by XLA, side by side."""

from __future__ import annotations

from typing import Any

from cfp.cluster.doctor.ask import Answer, probe, tool
from cfp.cluster.doctor.devices import installed_cupy
from cfp.cluster.doctor.driver import NO_GPU, nvlink_gb_per_s
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.programs import SMALL
from cfp.cluster.doctor.result import Result, absent, failed, passed
from cfp.cluster.doctor.versions import installed

# A ring that works reaches more of what NVLink can carry.
_LEAST_SHARE = 0.3
_CPU_DEVICES = "--xla_force_host_platform_device_count"


def nccl(machine: Machine) -> Result:
    """NCCL's own all-reduce is right, and as fast as the links let it be."""
    name = "nccl"
    if not machine.shows_nvidia:
        return absent(name, NO_GPU)
    if not installed_cupy(machine):
        return absent(
            name,
            "CuPy is not installed, so that NCCL cannot be asked without JAX",
            "optional: pip install cupy-cuda13x (cupy-cuda12x with CUDA 12)",
        )
    answer = probe(machine, "allreduce_nccl")
    if answer.trouble:
        return failed(name, answer.trouble, _nccl_remedy(machine, answer))
    return _judge(machine, name, answer.data, f"NCCL {answer.data['version']}")


def xla(machine: Machine) -> Result:
    """XLA's all-reduce is right; on GPUs, as fast as the links let it be."""
    name = "all-reduce"
    variables = dict(SMALL)
    flags = machine.environ.get("XLA_FLAGS", "")
    if _CPU_DEVICES not in flags:
        # Devices to sum over where there are only CPUs.
        variables["XLA_FLAGS"] = f"{flags} {_CPU_DEVICES}=4".strip()
    answer = probe(machine, "allreduce_xla", variables=variables)
    if answer.trouble:
        return failed(name, answer.trouble, _nccl_remedy(machine, answer))
    if not machine.shows_nvidia:
        data = answer.data
        if not data["right"]:
            return failed(name, "the sum is wrong", _WRONG_SUM)
        return passed(name, f"{data['devices']} virtual devices: the sum is right")
    return _judge(machine, name, answer.data, "through XLA")


_WRONG_SUM = (
    "a faulty link or device: run nccl-tests' all_reduce_perf -c 1 on pairs of "
    "devices; NCCL_P2P_DISABLE=1 tells whether it is the link"
)


def _judge(machine: Machine, name: str, data: Any, by: str) -> Result:
    count, time_ms = data["devices"], data["median_ms"]
    if not data["right"]:
        return failed(name, f"{by}, {count} devices: the sum is wrong", _WRONG_SUM)
    if count < 2:
        return passed(name, f"{by}: starts, on 1 device; no link is used")
    # What each device sends in a ring.
    rate = 2 * (count - 1) / count * data["bytes"] / time_ms / 1e6
    link = nvlink_gb_per_s(tool(machine, "nvidia-smi", "nvlink", "-s", "-i", "0").text)
    said = (
        f"{by}, {count} devices, {data['bytes'] >> 20} MiB: {time_ms:.2f} ms, "
        f"{rate:.0f} GB/s"
    )
    numbers = {"time_ms": time_ms, "gb_per_s": rate, "link_gb_per_s": link}
    if link:
        said += f", {rate / link:.0%} of the NVLink's {link:.0f}"
    off = machine.environ.get("NCCL_P2P_DISABLE") == "1"
    if link and rate < _LEAST_SHARE * link and not off:
        return failed(
            name,
            said,
            "NCCL_DEBUG=INFO says which way it takes; see the rows peers, shm and "
            "busy; unset NCCL_* variables that choose a way",
            **numbers,
        )
    return passed(name, said + (" with NCCL_P2P_DISABLE=1" if off else ""), **numbers)


def _nccl_remedy(machine: Machine, answer: Answer) -> str:
    if answer.timed_out:
        return (
            "devices wait for each other: NCCL_P2P_DISABLE=1 tells whether it is the "
            "links (in a virtual machine, access control (ACS) stops them); "
            "NCCL_DEBUG=INFO says where"
        )
    if not machine.shows_nvidia:
        return "see the rows jax and devices"
    return "NCCL_DEBUG=INFO says why; see the rows shm, ulimit and plugin"


def ray(machine: Machine) -> Result:
    """Ray starts and runs a task."""
    version = installed(machine, "ray")
    if version is None:
        return absent(
            "ray",
            "Ray is not installed",
            "optional, for builds on other machines: pip install ray",
        )
    answer = probe(machine, "ray", variables={"RAY_USAGE_STATS_ENABLED": "0"})
    if answer.trouble:
        return failed(
            "ray",
            answer.trouble,
            "see /tmp/ray/session_latest/logs; Ray wants a writable /tmp with space, "
            "shared memory (row shm) and open files (row ulimit)",
        )
    return passed("ray", f"Ray {version} starts and runs a task")
