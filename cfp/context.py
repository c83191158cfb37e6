"""Context shared by all passes of a plan: mesh, store, settings, budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path

from jax.sharding import Mesh

from cfp.devices.described import DescribedMesh
from cfp.devices.elsewhere import check_compiler
from cfp.errors import CfpError
from cfp.planner_settings import DetailedSettings, PlannerSettings
from cfp.profiling.coordination import coordination, is_shared
from cfp.profiling.key import Parts, environment_parts
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import MeasureOptions
from cfp.settings import (
    LIMITED_MEMORY,
    ConstraintLevel,
    Dimension,
    PlatformDefaults,
    defaults_of,
)
from cfp.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory that a program must fit in.

    Attributes:
        budget_bytes: memory of a device that a program may need.
        device_bytes: memory that the compiler assumes if it takes a limit, or None.
        reserve_bytes: memory beside the budget that the allocator may add.
    """

    budget_bytes: int
    device_bytes: int | None
    reserve_bytes: int = 0


class DecidedBy(StrEnum):
    """The way to choose the plan among candidates.

    By prediction, without compiling; by the compiler, as the best by prediction that
    fits; or by a race.
    """

    PREDICTION = "prediction"
    COMPILER = "compiler"
    RACE = "race"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Context shared by all passes of a plan.

    Attributes:
        mesh: the devices, which may only be described.
        rules: the platform's defaults, with the user's settings in their place.
        memory: the budget that was asked for, not the device's memory; None if none
            was.
        device_bytes: memory of a device, or None where it does not say.
        end: when planning is to end, as `time.monotonic` counts.
    """

    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: DetailedSettings
    rules: PlatformDefaults
    environment: Parts
    measure: MeasureOptions
    memory: MemoryBudget | None
    device_bytes: int | None
    end: float

    @property
    def devices(self) -> Mesh:
        """The mesh that programs are compiled for, and run on."""
        assert isinstance(self.mesh, Mesh), "nothing is compiled for described devices"
        return self.mesh

    @property
    def budget_bytes(self) -> int | None:
        """Memory that a plan may use on each device."""
        return self.memory.budget_bytes if self.memory else self.device_bytes

    @property
    def is_over(self) -> bool:
        """True if the time for planning is over."""
        return time.monotonic() > self.end

    @property
    def decided_by(self) -> DecidedBy:
        """The way to choose the plan among candidates."""
        settings = self.settings
        if isinstance(self.mesh, DescribedMesh):
            return DecidedBy.COMPILER if settings.compile else DecidedBy.PREDICTION
        if settings.race and settings.measure is not False:
            return DecidedBy.RACE
        if self.memory is not None:
            return DecidedBy.COMPILER
        return DecidedBy.PREDICTION

    @property
    def usual_temp_share(self) -> float:
        """The share of temporaries that the compiler usually leaves under a limit.

        1 where it takes no limit, or nothing is compiled.
        """
        compiled = self.decided_by is not DecidedBy.PREDICTION
        limited = compiled and self.rules.limits_memory and self.device_bytes
        return LIMITED_MEMORY if limited else 1.0


def settings_or_defaults(settings: PlannerSettings | None) -> DetailedSettings:
    """The settings, or the defaults.

    Raises:
        CfpError: they are of another type.
    """
    if not isinstance(settings, PlannerSettings | None):
        raise CfpError(
            f"settings is a {type(settings).__name__}. Pass "
            "cfp.PlannerSettings(per_kind=8), for instance."
        )
    return DetailedSettings.of(settings or PlannerSettings())


@contextlib.contextmanager
def open_context(
    mesh: Mesh | DescribedMesh,
    cache_dir: str | Path | None = None,
    budget_bytes: int | None = None,
    settings: PlannerSettings | None = None,
) -> Iterator[PlanContext]:
    """Opens the context of a plan; the store is closed at the end.

    Raises:
        CfpError: the budget is no more than what the allocator may add, or programs
            are to be compiled for described devices, and these are there.
    """
    settings = settings_or_defaults(settings)
    if isinstance(mesh, DescribedMesh):
        environment = tuple(mesh.environment.items())
        if settings.compile:
            check_compiler(mesh.cluster.kind)
            budget_bytes = budget_bytes or mesh.memory_bytes
    elif settings.compile:
        raise CfpError("compile=True is for described devices. Leave it out.")
    else:
        environment = environment_parts([*mesh.devices.flat])
    defaults = defaults_of(dict(environment)["platform"])
    device_bytes = device_memory(mesh)
    memory = None
    if budget_bytes is not None:
        if budget_bytes <= defaults.reserve_bytes:
            raise CfpError(
                f"A memory budget of {format_bytes(budget_bytes)} leaves nothing "
                "for a program: the devices' allocator may add "
                f"{format_bytes(defaults.reserve_bytes)}. Give more than that."
            )
        memory = MemoryBudget(
            budget_bytes=budget_bytes - defaults.reserve_bytes,
            device_bytes=device_bytes if defaults.limits_memory else None,
            reserve_bytes=defaults.reserve_bytes,
        )
    with ProfileStore(store_path(cache_dir)) as store:
        yield PlanContext(
            mesh=mesh,
            store=store,
            settings=settings,
            rules=_rules(defaults, settings, mesh),
            environment=environment,
            measure=MeasureOptions(
                retry_failures=settings.retry_failures,
                limits=settings.limits,
                progress=settings.progress,
            ),
            memory=memory,
            device_bytes=device_bytes,
            end=time.monotonic() + settings.seconds,
        )


def _rules(
    usual: PlatformDefaults,
    settings: DetailedSettings,
    mesh: Mesh | DescribedMesh,
) -> PlatformDefaults:
    """Combines a platform's defaults with the user's settings.

    One device has one level, and no compiler options, which are for collectives.
    """
    reach, unasked = settings.reach, settings.measure is None
    options = settings.compiler_options
    kernels = settings.attention
    if Dimension.KERNELS not in settings.dimensions:
        kernels = ()
    asked = {} if kernels is None else {"attention": kernels}
    if Dimension.COMPILER_OPTIONS not in settings.dimensions:
        options = {}
    levels = usual.levels
    usual_options = usual.compiler_options
    if prod(mesh.shape.values()) == 1:
        levels, usual_options = levels[:1], {}
    return replace(
        usual,
        estimates=isinstance(mesh, DescribedMesh) or (usual.estimates and unasked),
        plans=settings.plans or usual.plans,
        levels=settings.constraint_levels or levels,
        reach=dict.fromkeys(ConstraintLevel, reach) if reach else usual.reach,
        compiler_options=usual_options if options is None else options,
        first_options=usual.first_options if options is None and usual_options else {},
        replacing=replace(usual.replacing, **asked),
        replacing_for_memory=replace(usual.replacing_for_memory, **asked),
        dimensions=settings.dimensions,
    )


def device_memory(mesh: Mesh | DescribedMesh) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    if isinstance(mesh, DescribedMesh):
        return mesh.memory_bytes
    if mesh.devices.flat[0].platform == "cpu":
        return None
    own = int((mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0))
    talk = coordination() if is_shared(mesh) else None
    # A process may only ask its own devices.
    return min(own, talk.least_bytes) if talk and talk.hosts else own or None
