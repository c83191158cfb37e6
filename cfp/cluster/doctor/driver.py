"""Checks that ask NVIDIA's driver, through nvidia-smi."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from cfp.cluster.doctor.machine import GPU_PLUGIN, Machine, names_like, release, tool
from cfp.cluster.doctor.result import Result, absent, failed, passed

NO_GPU = "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia is there"
# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"cuda12": 525, "cuda13": 580}
_WAYS = re.compile(r"(X|NV\d+|PIX|PXB|PHB|NODE|SYS)")
_GBYTES = re.compile(r"([\d.]+)\s*GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Rows of an answer of nvidia-smi.

    Attributes:
        rows: one for each GPU; texts by field.
        trouble: the reason why there are none; empty if the tool answered.
        timed_out: the tool did not answer in time.
    """

    rows: tuple[dict[str, str], ...] = ()
    trouble: str = ""
    timed_out: bool = False


def query_gpus(machine: Machine, *fields: str) -> Query:
    """Asks for fields of all GPUs (``nvidia-smi --help-query-gpu`` lists them)."""
    answer = tool(
        machine,
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    )
    if answer.trouble:
        return Query(trouble=answer.trouble, timed_out=answer.timed_out)
    rows = list(csv.reader(answer.text.splitlines(), skipinitialspace=True))
    odd = [row for row in rows if row and len(row) != len(fields)]
    if odd:
        return Query(trouble=f"nvidia-smi said {', '.join(odd[0])}")
    return Query(rows=tuple(dict(zip(fields, row, strict=True)) for row in rows if row))


def driver(machine: Machine) -> Result:
    """The driver answers, and is new enough for the plugin's CUDA."""
    if not machine.shows_nvidia:
        return absent("driver", NO_GPU)
    found = query_gpus(machine, "name", "driver_version", "compute_cap")
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
        return failed("links", found.trouble, _driver_remedy(found))
    if len(found.rows) < 2:
        return absent("links", "one GPU: no links")
    answer = tool(machine, "nvidia-smi", "topo", "-m")
    if answer.trouble:
        return failed(
            "links", answer.trouble, "see what nvidia-smi topo -m says by itself"
        )
    ways = link_kinds(answer.text)
    if not ways:
        return failed(
            "links",
            "nvidia-smi topo -m names no links",
            "update the driver; without it NCCL guesses",
        )
    speed = nvlink_gb_per_s(machine)
    listed = ", ".join(f"{kind} ({count} pairs)" for kind, count in ways.items())
    fast = f"; NVLink {speed:.0f} GB/s each way of a GPU" if speed else ""
    return passed("links", listed + fast, nvlink_gb_per_s=speed)


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
