"""Links of GPUs, their power limits and their driver.

Two GPUs over NVLink and two over PCIe are of one kind, and no time of a collective is
the same. NVIDIA's driver says what links each pair, through ``nvidia-smi``.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from functools import lru_cache

UNKNOWN = "unknown"

_SECONDS = 30
_BUS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.([0-9a-fA-F]+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_QUERY = "index,power.limit,driver_version,pci.bus_id"
_BUS_LETTERS = 32  # More than such an address has.


@lru_cache(maxsize=16)
def ask_driver(*words: str) -> str:
    """Runs ``nvidia-smi``; "" if the program is missing or fails."""
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
    """Returns the PCI address of a GPU by CUDA's number; "" if unknown.

    CUDA counts the fastest first, and only those in ``CUDA_VISIBLE_DEVICES``; the
    driver counts by address. So hosts with several kinds have two numberings.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0:
        return ""  # Nothing has started CUDA in this process, or there is none such.
    text = ctypes.create_string_buffer(_BUS_LETTERS)
    failed = library.cuDeviceGetPCIBusId(text, ctypes.c_int(_BUS_LETTERS), device)
    return "" if failed else text.value.decode(errors="replace")


def gpu_parts(ordinals: Sequence[int | None]) -> dict[str, str]:
    """Returns the parts of a key that describe links between GPUs of this host.

    Args:
        ordinals: CUDA's numbers of the mesh's devices in this process, in the mesh's
            order.

    Returns:
        ``links`` of each pair, in the order of the mesh; ``power_limit`` and ``driver``
        of
        the devices. Values that the driver does not give are "unknown".
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
    """An address such as ``00000000:18:00.0``, whatever zeros it is written with."""
    match = _BUS.fullmatch(bus.strip())
    return None if match is None else tuple(int(part, 16) for part in match.groups())


def _gpus() -> dict[tuple[int, ...] | None, tuple[int, str, str]]:
    """Number, power limit and driver of all GPUs of the host, by address."""
    found = {}
    answer = ask_driver(f"--query-gpu={_QUERY}", "--format=csv,noheader")
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and (address := _address(cells[3])):
            found[address] = (int(cells[0]), cells[1], cells[2])
    return found


def _links(numbers: Sequence[int]) -> str:
    """Lists the links of pairs: ``NV18``, ``PIX``, ``SYS``; once if all are alike."""
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
