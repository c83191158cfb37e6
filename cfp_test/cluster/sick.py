"""Machines with faults, for the doctor to find."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cfp.cluster.machine import MARK, Machine
from cfp_test.support.waiting import GUARD_SECONDS

_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) {driver} ;;
topo) /bin/cat {folder}/topology ;;
nvlink) /bin/cat {folder}/links ;;
*) exit 2 ;;
esac
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tPHB\t0-15\t0
GPU2\tSYS\tPHB\t X \t16-31\t1

Legend:
  SYS  = Connection traversing PCIe
"""
NVLINK = "GPU 0: NVIDIA H200\n" + "\n".join(
    f"\t Link {index}: 26.562 GB/s" for index in range(18)
)


def machine(folder: Path, **fields: Any) -> Machine:
    """A machine in a folder, sound but for the fields that are given."""
    for name in ("home", "bin", "proc", "packages"):
        (folder / name).mkdir(exist_ok=True)
    sound = replace(
        Machine.here(timeout_s=GUARD_SECONDS),
        # An empty folder: nothing of the machine that runs the tests is found.
        environ={"PATH": str(folder / "bin"), "PYTHONPATH": str(folder)},
        search_path=(str(folder / "packages"),),
        proc=folder / "proc",
        cache=folder / "home" / ".cache" / "cfp",
    )
    return replace(sound, **fields)


def with_packages(folder: Path, versions: dict[str, str], **fields: Any) -> Machine:
    """A machine on which only these packages are installed.

    JAX and its plugin need what those of these names need.
    """
    needs = {
        "jax": [
            f"jaxlib=={versions.get('jax')}",
            f"jax-cuda13-plugin=={versions.get('jax')}; extra == 'cuda13'",
        ],
        "jax-cuda13-plugin": [f"jax-cuda13-pjrt=={versions.get('jax')}"],
    }
    made = machine(folder, **fields)
    for name, version in versions.items():
        info = folder / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {line}" for line in needs.get(name, ())]
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", *lines])
        (info / "METADATA").write_text(f"{text}\nVersion: {version}\n")
    return made


def with_gpus(folder: Path, driver: str = "", count: int = 1, **fields: Any) -> Machine:
    """A machine whose nvidia-smi answers with this shell command."""
    made = machine(folder, **fields)
    rows = "; ".join(['echo "NVIDIA H200, 580.95, 9.0"'] * count)
    (folder / "topology").write_text(TOPOLOGY)
    (folder / "links").write_text(NVLINK)
    tool = folder / "bin" / "nvidia-smi"
    tool.write_text(_SMI.format(driver=driver or rows, folder=folder))
    tool.chmod(0o755)
    return made


def answering(folder: Path, **answers: Any) -> None:
    """Has probes answer with these findings, in place of importing JAX."""
    lines = [f"{MARK}{json.dumps([name, data])}" for name, data in answers.items()]
    with_jax(folder, f"print({chr(10).join(lines)!r}); raise SystemExit")


def with_jax(folder: Path, text: str) -> None:
    """A module that stands before the installed JAX."""
    (folder / "jax.py").write_text(text)
