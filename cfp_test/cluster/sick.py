"""Machines with faults, for the doctor to find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cfp.cluster import doctor

_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) {driver} ;;
nvlink) /bin/cat {folder}/links ;;
*) exit 2 ;;
esac
"""
NVLINK = "GPU 0: NVIDIA H200\n" + "\n".join(
    f"\t Link {index}: 26.562 GB/s" for index in range(18)
)


class Machine:
    """A machine in a folder, sound until it is given a fault."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        for name in ("home", "bin", "packages"):
            (folder / name).mkdir()
        self.folder, self.patch = folder, patch
        # An empty folder: nothing of the machine that runs the tests is found.
        patch.setenv("PATH", str(folder / "bin"))
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("CFP_CACHE_DIR", str(folder / "home" / "cache"))
        for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "NCCL_P2P_DISABLE"):
            patch.delenv(name, raising=False)
        patch.setattr(doctor, "_DRIVER", folder / "nvidia")

    def check(self, name: str) -> doctor.Result:
        """The result of one check alone."""
        (result,) = doctor.examine([name])
        return result

    def install(self, versions: dict[str, str]) -> None:
        """Has these packages alone; JAX and its plugin need those of their names."""
        needs = {
            "jax": [
                f"jaxlib=={versions.get('jax')}",
                f"jax-cuda13-plugin=={versions.get('jax')}; extra == 'cuda13'",
            ],
            "jax-cuda13-plugin": [f"jax-cuda13-pjrt=={versions.get('jax')}"],
        }
        packages = self.folder / "packages"
        for name, version in versions.items():
            info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            lines = [f"Requires-Dist: {line}" for line in needs.get(name, ())]
            text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", *lines])
            (info / "METADATA").write_text(f"{text}\nVersion: {version}\n")
        doctor.allows("jax>0", "1")  # Loads what it needs.
        self.patch.setattr(sys, "path", [str(packages)])

    def plug_in_gpus(self, driver: str = "", count: int = 1) -> None:
        """Has an nvidia-smi that answers with this shell command."""
        rows = "; ".join(['echo "NVIDIA H200, 580.95, 9.0"'] * count)
        (self.folder / "links").write_text(NVLINK)
        tool = self.folder / "bin" / "nvidia-smi"
        tool.write_text(_SMI.format(driver=driver or rows, folder=self.folder))
        tool.chmod(0o755)

    def replace_jax(self, text: str) -> None:
        """Has a module that stands before the installed JAX."""
        (self.folder / "jax.py").write_text(text)
