"""Checks of devices as JAX and CUDA see them."""

from __future__ import annotations

from cfp.cluster.doctor.ask import Answer, probe, tool
from cfp.cluster.doctor.driver import NO_GPU, link_kinds
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.nvidia import gpus, number
from cfp.cluster.doctor.result import Result, absent, failed, passed
from cfp.cluster.doctor.versions import installed

# What JAX takes of a device's memory at its start.
_PREALLOCATED = 0.75
_INSTALL_CUPY = "pip install cupy-cuda13x (cupy-cuda12x with CUDA 12)"


def devices(machine: Machine) -> Result:
    """JAX uses the devices that the driver shows."""
    answer = probe(machine, "devices")
    if answer.trouble:
        return failed("devices", answer.trouble, _start_remedy(machine, answer))
    data = answer.data
    said = f"{data['count']} × {data['kind']} ({data['platform']})"
    shown = len(gpus(machine, "index").rows) if machine.shows_nvidia else 0
    used = data["count"] if data["platform"] in ("gpu", "cuda") else 0
    if used < shown:
        cause, remedy = _hidden(machine)
        return failed(
            "devices",
            f"JAX uses {said}; the driver shows {shown} GPUs{cause}",
            remedy,
            count=data["count"],
        )
    return passed("devices", said, count=data["count"], platform=data["platform"])


def _hidden(machine: Machine) -> tuple[str, str]:
    """Why JAX does not see what there is, and what to do."""
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


def _start_remedy(machine: Machine, answer: Answer) -> str:
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


def device_memory(machine: Machine) -> Result:
    """The devices have free what JAX takes at its start: asked of CUDA itself."""
    if not machine.shows_nvidia:
        return absent("device memory", NO_GPU)
    if installed_cupy(machine):
        answer = probe(machine, "cupy_memory")
        if answer.trouble:
            return failed("device memory", answer.trouble, _cupy_remedy(answer))
        free_total = [tuple(pair) for pair in answer.data["free_total"]]
        source = "CuPy"
    else:
        found = gpus(machine, "memory.free", "memory.total")
        pairs = [[number(text) or 0 for text in row.values()] for row in found.rows]
        free_total = [(free * 2**20, total * 2**20) for free, total in pairs]
        source = "nvidia-smi, as CuPy is not installed"
    if not free_total:
        return absent("device memory", "CUDA shows no device here")
    free, total = min(free_total, key=lambda pair: pair[0] / max(pair[1], 1))
    share = float(machine.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _PREALLOCATED))
    said = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({source})"
    if free < share * total:
        return failed(
            "device memory",
            f"{said}; JAX takes {share:.0%} at its start",
            "end what else uses the device, or export "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={max(0.1, 0.9 * free / total):.2f}",
            free_bytes=free,
            total_bytes=total,
        )
    return passed("device memory", said, free_bytes=free, total_bytes=total)


def peers(machine: Machine) -> Result:
    """GPUs joined by NVLink reach each other's memory."""
    if not machine.shows_nvidia:
        return absent("peers", NO_GPU)
    if not installed_cupy(machine):
        return absent("peers", "CuPy is not installed", _INSTALL_CUPY)
    answer = probe(machine, "cupy_peers")
    if answer.trouble:
        return failed("peers", answer.trouble, _cupy_remedy(answer))
    count, able = answer.data["devices"], answer.data["pairs_with_access"]
    if count < 2:
        return absent("peers", f"{count} GPU: there are no peers")
    pairs = count * (count - 1)
    kinds = link_kinds(tool(machine, "nvidia-smi", "topo", "-m").text)
    if able < pairs and any(kind.startswith("NV") for kind in kinds):
        return failed(
            "peers",
            f"{able} of {pairs} pairs reach each other's memory, and there is NVLink",
            "nvidia-smi topo -p2p r says why; with virtual machines: pass NVLink "
            "through; with NVSwitch: start nvidia-fabricmanager",
        )
    off = machine.environ.get("NCCL_P2P_DISABLE") == "1"
    said = f"{able} of {pairs} pairs reach each other's memory"
    said += "; NCCL_P2P_DISABLE=1 has NCCL not use that" if off else ""
    if able == 0:
        said += ": what they send goes through the host's memory"
    return passed("peers", said, pairs_with_access=able)


def installed_cupy(machine: Machine) -> bool:
    """Whether CuPy is there, under whatever name its wheels have."""
    names = ("cupy", "cupy-cuda12x", "cupy-cuda13x")
    return any(installed(machine, name) for name in names)


def _cupy_remedy(answer: Answer) -> str:
    if answer.timed_out:
        return "the driver hangs: look for Xid in dmesg"
    return f"CuPy must be for the driver's CUDA: {_INSTALL_CUPY}"
