"""What NVIDIA's driver says, through nvidia-smi."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

from cfp.cluster.doctor.ask import tool
from cfp.cluster.doctor.machine import Machine

GPU_PLUGIN = r"jax-(cuda1[23]|rocm\w*)-(plugin|pjrt)"
# The oldest drivers that CUDA's libraries of each major version load with (NVIDIA's
# "CUDA Compatibility", minor version compatibility).
OLDEST_DRIVER = {"cuda12": 525, "cuda13": 580}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Rows of an answer of nvidia-smi.

    Attributes:
        rows: one for each GPU, or process; texts by field.
        trouble: why there are none; empty if the tool answered.
        timed_out: whether it did not answer in time.
    """

    rows: tuple[dict[str, str], ...] = ()
    trouble: str = ""
    timed_out: bool = False


def gpus(machine: Machine, *fields: str) -> Query:
    """Asks for fields of all GPUs (``nvidia-smi --help-query-gpu`` lists them)."""
    return _query(machine, "--query-gpu", fields)


def processes(machine: Machine) -> Query:
    """Asks which processes compute on GPUs."""
    fields = ("gpu_uuid", "pid", "process_name", "used_memory")
    return _query(machine, "--query-compute-apps", fields)


def _query(machine: Machine, option: str, fields: Sequence[str]) -> Query:
    answer = tool(
        machine,
        "nvidia-smi",
        f"{option}={','.join(fields)}",
        "--format=csv,noheader,nounits",
    )
    if answer.trouble:
        return Query(trouble=answer.trouble, timed_out=answer.timed_out)
    rows = list(csv.reader(answer.text.splitlines(), skipinitialspace=True))
    odd = [row for row in rows if row and len(row) != len(fields)]
    if odd:
        return Query(trouble=f"nvidia-smi said {', '.join(odd[0])}")
    return Query(rows=tuple(dict(zip(fields, row, strict=True)) for row in rows if row))


def number(text: str) -> float | None:
    """A figure of nvidia-smi; None for ``[N/A]`` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
