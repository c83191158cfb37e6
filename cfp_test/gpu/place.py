"""Devices that checks run on, sizes for their kind, and processes like this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from cfp.models.model import Scalar

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """Raised where a check does not hold; the message is on the page."""


class NotRun(Exception):
    """Raised where a check cannot run; the message is on the page."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what checks compute.

    Attributes:
        models: options of the zoo's models that are compared with one device.
        planned: a model and its options, whose plan is timed, and kept in a budget.
        attention: sequences, tokens, heads, heads of keys, and head dim.
        dtype: of attentions.
        turns, calls: turns of each program that is timed, and its steps in a turn.
        settings: of plans that have to be right, not fast.
        planned_settings: of the plan that has to be fast, too.
    """

    models: Mapping[str, Mapping[str, Scalar]]
    planned: tuple[str, Mapping[str, Scalar]]
    attention: tuple[int, int, int, int, int]
    dtype: str
    turns: int
    calls: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    planned_settings: Mapping[str, Any] = field(default_factory=dict)


def _models(common: Mapping[str, Scalar], **more: Scalar) -> dict[str, Any]:
    common = {**common, "dtype": "float32"}
    return {
        "gpt": common,
        "moe": {**common, "experts": 4, "expert_group_size": more["tokens"]},
        "bert": common,
        "llama": {**common, "kv_heads": 4, "ffn": more["ffn"]},
    }


# What one GPU does in a moment, and yet whole blocks of all kernels.
ON_GPUS = Sizes(
    models=_models(
        {
            "layers": 2,
            "hidden": 512,
            "heads": 8,
            "batch": 8,
            "seq": 256,
            "vocab": 2048,
        },
        tokens=512,
        ffn=1024,
    ),
    planned=(
        "gpt",
        {
            "layers": 2,
            "hidden": 2048,
            "heads": 16,
            "batch": 16,
            "seq": 1024,
            "vocab": 32768,
        },
    ),
    attention=(4, 1024, 8, 4, 64),
    dtype="bfloat16",
    turns=12,
    calls=5,
    settings={"per_kind": 2, "seconds": 10.0, "compiler_options": {}},
    planned_settings={"seconds": 80.0},
)
ON_CPUS = Sizes(
    models=_models(
        {"layers": 2, "hidden": 32, "heads": 4, "batch": 4, "seq": 16, "vocab": 96},
        tokens=32,
        ffn=48,
    ),
    planned=(
        "gpt",
        {
            "layers": 2,
            "hidden": 32,
            "heads": 4,
            "batch": 16,
            "seq": 64,
            "vocab": 256,
        },
    ),
    attention=(4, 64, 8, 4, 8),
    dtype="float32",
    turns=2,
    calls=1,
    settings={"per_kind": 2},
)


@dataclass(frozen=True)
class Place:
    """The devices and folder that a check runs with.

    Attributes:
        folder: for stores, plans and other files; all checks of a run share it.
        words: options that make another process run in the same place.
    """

    folder: Path
    words: tuple[str, ...] = ()

    @cached_property
    def devices(self) -> list[Any]:
        """All devices. Asked for first, this process takes a GPU's memory."""
        return jax.devices()

    @property
    def is_gpu(self) -> bool:
        return self.devices[0].platform != "cpu"

    @property
    def sizes(self) -> Sizes:
        return ON_GPUS if self.is_gpu else ON_CPUS

    @cached_property
    def mesh(self) -> Mesh:
        """One axis over all devices."""
        count, types = len(self.devices), (AxisType.Auto,)
        return jax.make_mesh((count,), ("x",), types, devices=self.devices)

    @property
    def store(self) -> Path:
        """The folder of measurements that checks share."""
        return self.folder / "store"

    def command(self, part: str) -> list[str]:
        """Returns the command that runs a part of a check in another process."""
        words = ("--folder", str(self.folder), "--part", part, *self.words)
        return [sys.executable, "-m", "cfp_test.gpu", *words]

    def run(self, part: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a part in another process, whatever becomes of it."""
        return subprocess.run(
            self.command(part),
            env={**child_environment(), **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def again(self, part: str, **variables: str) -> None:
        """Runs a part in another process.

        Raises:
            Failed: it does not end well.
        """
        done = self.run(part, **variables)
        if done.returncode:
            said = tail(done.stdout + done.stderr)
            raise Failed(f"{part} ended with {done.returncode}: {said}")


def child_environment() -> dict[str, str]:
    """Returns this process's environment, with which another finds the same modules."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def for_results() -> dict[str, str]:
    """Returns variables of a process whose times decide nothing, beside others.

    XLA tunes no kernels, which takes most of a compile; and memory is taken as needed.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    return {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def note(text: str) -> None:
    """Says what a check is at, for one that is ended before it ends."""
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


def tail(text: str, characters: int = 600) -> str:
    """Returns the end of what a process wrote, in one line."""
    return " ".join(text.split())[-characters:]
