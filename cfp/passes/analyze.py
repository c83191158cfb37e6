"""The first pass: traces a step, and analyses it on a mesh.

Of the arguments it reads types, and values of scalars and small masks
(:mod:`cfp.program.step`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.analysis.analyze import Analysis, analyze, resolve_pins
from cfp.context import PlanContext, PlannerSettings, open_context
from cfp.devices.described import DescribedMesh, slice_of
from cfp.printable import parse_bytes
from cfp.profiling.record import environment_parts
from cfp.program.graph import PARTITIONED
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import Lowering, planning_mesh, trace
from cfp.search.requests import Profiles

Pins = Mapping[str, PartitionSpec | NamedSharding | str]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of :func:`cfp.plan` that all variants of a step share."""

    static_argnums: int | Sequence[int] = ()
    static_argnames: str | Sequence[str] = ()
    donate_argnums: int | Sequence[int] = ()
    donate_argnames: str | Sequence[str] = ()
    memory_budget: int | str | None = None
    pins: Pins | None = None
    preset: str | None = None
    cache_dir: str | Path | None = None
    settings: PlannerSettings = field(default_factory=PlannerSettings)

    @property
    def of_arguments(self) -> dict[str, Any]:
        """The options that name static and donated arguments."""
        return {name: value for name, value in vars(self).items() if "_arg" in name}

    def flatten(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FlatStep:
        """Returns the step over its argument leaves."""
        precision = self.settings.precision
        return flatten_step(fn, args, kwargs, **self.of_arguments, precision=precision)

    def context(
        self, mesh: Mesh | DescribedMesh
    ) -> AbstractContextManager[PlanContext]:
        """Opens the context of all passes on a mesh."""
        budget = parse_bytes(self.memory_budget)
        return open_context(mesh, self.cache_dir, budget, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyzed:
    """A step, traced and analysed.

    Attributes:
        step: the step over flat arguments.
        mesh: the devices, real or described.
        analysis: the step's blocks and segments (repeated runs of blocks).
        seconds: time of tracing and analysing, and of making the profiles.
        profiles: estimated profiles that replace the profile pass; None without.
    """

    step: FlatStep
    mesh: Mesh | DescribedMesh
    lowering: Lowering
    analysis: Analysis
    seconds: float
    profiles: Profiles | None = None


def analyze_step(
    step: FlatStep, mesh: Mesh | DescribedMesh, pins: Pins | None = None
) -> Analyzed:
    """Traces and analyses a step; meshes of equally many devices share a trace.

    Raises:
        CfpError: the step cannot be traced, or the pins do not fit.
    """
    started = time.perf_counter()
    axes = tuple(mesh.shape.items())
    where = mesh.abstract if isinstance(mesh, DescribedMesh) else planning_mesh(mesh)
    devices = type(where), prod(mesh.shape.values())
    if devices in step.programs:
        program, lowering = step.programs[devices]
    else:
        program, lowering = trace(step, where)
        calls = (op.manual or PARTITIONED.search(op.attributes) for op in program.ops)
        if not any(calls):
            step.programs[devices] = program, lowering  # No op depends on the mesh.
    pinned = resolve_pins(pins or {}, program, axes)
    analysis = analyze(program, axes, pinned, outer_axes(mesh))
    return Analyzed(
        step=step,
        mesh=mesh,
        lowering=lowering,
        analysis=analysis,
        seconds=time.perf_counter() - started,
    )


def outer_axes(mesh: Mesh | DescribedMesh) -> frozenset[str]:
    """Returns the mesh axes that cross hosts; only the first of a TPU slice."""
    if isinstance(mesh, DescribedMesh):
        return mesh.outer
    devices = [*mesh.devices.flat]
    known = dict(environment_parts(devices)).get("hosts", "0")  # Of several processes.
    hosts = np.resize(known.split(","), mesh.devices.shape)
    names = enumerate(mesh.axis_names)
    found = [n for i, n in names if (hosts != hosts.take([0], i)).any()]
    return frozenset(found[:1] if slice_of(devices) else found)
