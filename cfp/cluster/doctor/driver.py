"""Checks that ask NVIDIA's driver: itself, other programs, clocks, links."""

from __future__ import annotations

import re

from cfp.cluster.doctor.ask import tool
from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.nvidia import (
    GPU_PLUGIN,
    OLDEST_DRIVER,
    Query,
    gpus,
    number,
    processes,
)
from cfp.cluster.doctor.result import Result, absent, failed, passed
from cfp.cluster.doctor.versions import names_like, release

NO_GPU = "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia is there"
_IDLE_MIB = 1024  # A display or a monitor takes less.
# Bits of NVML's nvmlClocksEventReasons that mean that clocks are held down.
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
_POWER_CAP = 0x04
_WAYS = re.compile(r"(X|NV\d+|PIX|PXB|PHB|NODE|SYS)")
_GBYTES = re.compile(r"([\d.]+)\s*GB/s")


def driver(machine: Machine) -> Result:
    """The driver answers, and is new enough for the plugin's CUDA."""
    if not machine.shows_nvidia:
        return absent("driver", NO_GPU)
    found = gpus(machine, "name", "driver_version", "compute_cap")
    if found.trouble:
        return failed("driver", found.trouble, _driver_remedy(found))
    if not found.rows:
        return failed(
            "driver",
            "nvidia-smi lists no GPU",
            "ask for one: --gres=gpu:1 (Slurm), -g 1 (jsrun), --gpus all (Docker), "
            "--nv (Apptainer)",
        )
    first = found.rows[0]
    version = first["driver_version"]
    for name in names_like(machine, GPU_PLUGIN):
        cuda = name.split("-")[1]
        oldest = OLDEST_DRIVER.get(cuda)
        if oldest is not None and release(version)[0] < oldest:
            return failed(
                "driver",
                f"driver {version} is older than {oldest}, which {name} needs",
                "update the driver, or pip uninstall the plugin and install "
                "'jax[cuda12]'"
                if cuda == "cuda13" and release(version)[0] >= OLDEST_DRIVER["cuda12"]
                else f"update the driver to {oldest} or newer",
            )
    kinds = sorted({row["name"] for row in found.rows})
    return passed(
        "driver",
        f"driver {version}; {len(found.rows)} × {', '.join(kinds)}, compute capability "
        f"{first['compute_cap']}",
        gpus=len(found.rows),
    )


def _driver_remedy(found: Query) -> str:
    if found.timed_out:
        return (
            "the driver hangs: look for Xid in dmesg; end what uses the GPUs, or have "
            "the machine restarted"
        )
    if "mismatch" in found.trouble:
        return "the driver was updated: restart the machine, or reload its modules"
    if "not on the PATH" in found.trouble:
        return (
            "in a container, have the driver's tools mounted: --gpus all with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return "see what nvidia-smi says by itself; reload or install the driver"


def busy(machine: Machine) -> Result:
    """No other program computes on the GPUs."""
    found = gpus(machine, "index", "memory.used", "utilization.gpu", "compute_mode")
    if found.trouble:
        return failed("busy", found.trouble, _driver_remedy(found))
    others = processes(machine)
    if others.rows:
        listed = ", ".join(
            f"{row['process_name']} (pid {row['pid']}, {row['used_memory']} MiB)"
            for row in others.rows[:4]
        )
        return failed(
            "busy",
            f"{len(others.rows)} other programs compute on the GPUs: {listed}",
            "end them, or choose free devices with CUDA_VISIBLE_DEVICES; what is "
            "measured beside them is wrong",
        )
    for row in found.rows:
        if row["compute_mode"] == "Prohibited":
            return failed(
                "busy",
                f"GPU {row['index']} is in compute mode Prohibited",
                f"nvidia-smi -i {row['index']} -c DEFAULT, as root",
            )
        used = number(row["memory.used"]) or 0
        if used > _IDLE_MIB:
            return failed(
                "busy",
                f"GPU {row['index']} has {used:.0f} MiB in use by a program that is "
                "not shown (of another container or user)",
                "have it ended (fuser -v /dev/nvidia* as root), or choose another "
                "device with CUDA_VISIBLE_DEVICES",
            )
    return passed("busy", "nothing else uses the GPUs")


def clocks(machine: Machine) -> Result:
    """Clocks are not held down by heat, power or a fault."""
    fields = ("index", "temperature.gpu", "clocks.sm", "clocks.max.sm", "power.draw")
    found = gpus(machine, *fields, "clocks_event_reasons.active")
    if found.trouble and not found.timed_out:  # Drivers before 535 call it otherwise.
        found = gpus(machine, *fields, "clocks_throttle_reasons.active")
    if found.trouble:
        return failed("clocks", found.trouble, _driver_remedy(found))
    capped = []
    for row in found.rows:
        text = list(row.values())[-1]
        bits = int(text, 16) if text.startswith("0x") else 0
        reasons = [name for bit, name in _SLOWED.items() if bits & bit]
        if reasons:
            return failed(
                "clocks",
                f"GPU {row['index']} is slowed down: {', '.join(reasons)}; "
                f"{row['temperature.gpu']} °C, {row['clocks.sm']} of "
                f"{row['clocks.max.sm']} MHz",
                "look after cooling and power supply; measure again when it is gone "
                "(nvidia-smi -q -d PERFORMANCE)",
            )
        if bits & _POWER_CAP:
            capped.append(row["index"])
    hottest = max((number(r["temperature.gpu"]) or 0 for r in found.rows), default=0)
    said = f"not held down; at most {hottest:.0f} °C"
    if capped:
        said += f"; at the power limit now: GPU {', '.join(capped)}"
    return passed("clocks", said, temperature_c=hottest)


def links(machine: Machine) -> Result:
    """How the GPUs are joined, and how fast NVLink is."""
    found = gpus(machine, "index")
    if found.trouble:
        return failed("links", found.trouble, _driver_remedy(found))
    if len(found.rows) < 2:
        return absent("links", "one GPU: there is nothing to be joined with")
    answer = tool(machine, "nvidia-smi", "topo", "-m")
    if answer.trouble:
        return failed(
            "links", answer.trouble, "see what nvidia-smi topo -m says by itself"
        )
    ways = link_kinds(answer.text)
    speed = nvlink_gb_per_s(tool(machine, "nvidia-smi", "nvlink", "-s", "-i", "0").text)
    listed = ", ".join(f"{kind} ({count} pairs)" for kind, count in ways.items())
    if not ways:
        return failed(
            "links",
            "nvidia-smi topo -m names no links",
            "update the driver; without it NCCL guesses",
        )
    fast = f"; NVLink {speed:.0f} GB/s each way of a GPU" if speed else ""
    return passed("links", listed + fast, nvlink_gb_per_s=speed)


def link_kinds(matrix: str) -> dict[str, int]:
    """Kinds of links in what ``nvidia-smi topo -m`` prints, with counts of pairs."""
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


def nvlink_gb_per_s(status: str) -> float:
    """What ``nvidia-smi nvlink -s`` sums up to for one GPU, in each direction."""
    return sum(float(rate) for rate in _GBYTES.findall(status))
