"""The page that people attach to an issue."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata

from cfp_test.gpu.place import ROOT, Place
from cfp_test.gpu.suite import FAILED, PASSED, Outcome

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "pydantic")
_VARIABLES = ("NCCL_", "XLA_", "JAX_", "CUDA_VISIBLE_DEVICES")


def describe(place: Place) -> str:
    """Returns devices, driver and versions, as JSON of texts by name."""
    devices = place.devices
    kinds = sorted({device.device_kind for device in devices})
    found = {
        "devices": f"{len(devices)} × {', '.join(kinds)} ({devices[0].platform})",
        "runtime": " ".join(devices[0].client.platform_version.split()),
    }
    if place.is_gpu:
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv"
        )
        links = _output("nvidia-smi", "topo", "-m").partition("\n\nLegend")[0]
        found["links"] = re.sub(r"\x1b\[\d*m", "", links)
    return json.dumps(found)


def versions() -> dict[str, str]:
    """Returns the versions of what runs, as texts by name."""
    packages = []
    for name in _PACKAGES:
        try:
            packages.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    ]
    return {
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "python": f"{platform.python_version()}, {', '.join(packages)}",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "environment": " ".join(variables) or "no variables of JAX, XLA or NCCL",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"no {command[0]} here"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


def page(command: str, machine: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """Returns the page, as Markdown."""
    passed = sum(one.outcome == PASSED for one in outcomes)
    failed = sum(one.outcome == FAILED for one in outcomes)
    left = len(outcomes) - passed - failed
    seconds = sum(one.seconds for one in outcomes)
    verdict = f"{passed} passed, {failed} FAILED" if failed else f"{passed} passed"
    not_run = f", {left} not run" if left else ""
    lines = [
        f"# cfp on GPUs: {verdict}{not_run}, {seconds:.0f} s",
        "",
        f"`{command}`",
        "",
        *(_line(name, text) for name, text in machine.items()),
        "",
        "| check | | s | figures |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| **{one.name}**: {one.what} | {one.outcome} | {one.seconds:.0f} | "
        f"{_cell(one.said)} |"
        for one in outcomes
    ]
    return "\n".join([*lines, ""])


def _line(name: str, text: str) -> str:
    if "\n" in text:
        return f"- {name}:\n\n```\n{text}\n```\n"
    return f"- {name}: {text}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
