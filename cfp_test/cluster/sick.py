"""Machines with faults, for the doctor to find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cfp.cluster.machine import Machine
from cfp_test.support.waiting import GUARD_SECONDS

SOUND = {"jax": "0.11.2", "jaxlib": "0.11.2"}
PLUGIN = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}
_SMI = """#!/bin/sh
case "$1" in
--query-gpu=name,*) {driver} ;;
--query-gpu=index) {indices} ;;
topo) {topo} ;;
nvlink) {nvlink} ;;
*) echo "unknown option $1"; exit 2 ;;
esac
"""


def machine(folder: Path, **fields: Any) -> Machine:
    """A machine in a folder, sound but for the fields that are given."""
    for name in ("home", "bin", "proc", "packages"):
        (folder / name).mkdir(exist_ok=True)
    sound = replace(
        Machine.here(timeout_s=GUARD_SECONDS),
        tool_timeout_s=GUARD_SECONDS,
        version=(3, 12, 3),
        # An empty folder: nothing of the machine that runs the tests is found.
        environ={"PATH": str(folder / "bin")},
        search_path=(str(folder / "packages"),),
        proc=folder / "proc",
        cache=folder / "home" / ".cache" / "cfp",
        free_bytes=lambda _: 64 << 30,
    )
    return replace(sound, **fields)


def with_packages(folder: Path, versions: dict[str, str], **fields: Any) -> Machine:
    """A machine on which only these packages are installed."""
    made = machine(folder, **fields)
    for name, version in versions.items():
        info = folder / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return made


def with_gpus(
    folder: Path,
    *,
    count: int = 1,
    driver: str = 'echo "NVIDIA H200, 580.95, 9.0"',
    topo: str = ":",
    nvlink: str = ":",
    packages: dict[str, str] | None = None,
    **fields: Any,
) -> Machine:
    """A machine whose nvidia-smi answers with these shell commands."""
    versions = {**SOUND, **PLUGIN} if packages is None else packages
    made = with_packages(folder, versions, **fields)
    indices = "; ".join(f"echo {index}" for index in range(count)) or ":"
    tool = folder / "bin" / "nvidia-smi"
    tool.write_text(
        _SMI.format(
            driver=driver,
            topo=topo,
            nvlink=nvlink,
            indices=indices,
        )
    )
    tool.chmod(0o755)
    return made


def fake_module(folder: Path, name: str, text: str) -> None:
    """A module that stands before the installed one of its name."""
    (folder / f"{name}.py").write_text(text)
