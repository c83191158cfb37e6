"""Context shared by all passes of a plan: mesh, store, settings, budget."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite, prod
from pathlib import Path

import jax
from jax.sharding import Mesh

from cfp.cost.step_time import StepPredictor
from cfp.devices import described
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError, MeshError
from cfp.planner_settings import DetailedSettings, PlannerSettings
from cfp.profiling.compiler_options import UNTUNED
from cfp.profiling.coordination import coordinated_planning
from cfp.profiling.key import Parts, environment_parts
from cfp.profiling.options import MeasureOptions
from cfp.profiling.processes import Agreement
from cfp.profiling.store import ProfileStore, open_store, store_path
from cfp.settings import (
    LIMITED_MEMORY,
    PLANS_BY_ESTIMATE,
    REACH_BY_ESTIMATE,
    RUNS_PLAYED,
    ConstraintLevel,
    Dimension,
    PlatformDefaults,
    defaults_of,
)
from cfp.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory that a program has to fit into.

    Attributes:
        budget_bytes: what it may need of a device's memory.
        device_bytes: memory that the compiler reckons with, where it takes a limit;
            None where it takes none, or a device does not say.
        reserve_bytes: what is there besides, since the allocator may add it.
    """

    budget_bytes: int
    device_bytes: int | None
    reserve_bytes: int = 0


class DecidedBy(StrEnum):
    """The way to choose the plan among candidates.

    The best by prediction, of which nothing is compiled; the compiler, which says what
    is the best of them that fits; or a race, of times or of what compiles.
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
        predictor: what predicts whole steps of programs that are compiled for devices
            which are only described; None where none is, or the devices are there.
    """

    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: DetailedSettings
    rules: PlatformDefaults
    environment: Parts
    agreement: Agreement
    measure: MeasureOptions
    memory: MemoryBudget | None
    device_bytes: int | None
    end: float
    predictor: StepPredictor | None

    @property
    def devices(self) -> Mesh:
        """The mesh that programs are compiled for, and run on if that is possible."""
        mesh = self.mesh.stand_in if isinstance(self.mesh, DescribedMesh) else self.mesh
        assert mesh is not None, "it is described, and nothing is compiled for it"
        return mesh

    @property
    def plays(self) -> bool:
        """True if one device runs computations of several that are described."""
        return self.predictor is not None and self.predictor.here is not None

    @property
    def budget_bytes(self) -> int | None:
        """Memory that a plan may use on each device."""
        return self.memory.budget_bytes if self.memory else self.device_bytes

    @property
    def decided_by(self) -> DecidedBy:
        """The way to choose the plan among candidates."""
        settings, is_described = self.settings, isinstance(self.mesh, DescribedMesh)
        uses_devices = settings.measure is not False
        if is_described and not (self.predictor and uses_devices):
            return DecidedBy.PREDICTION
        if settings.race and uses_devices:
            return DecidedBy.RACE
        if is_described or self.memory is not None:
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

    Args:
        cache_dir: where measurements are kept; the user's cache by default.

    Raises:
        CfpError: the budget is no more than what the allocator may add.
    """
    settings = settings_or_defaults(settings)
    agreement = agreement_of(mesh)
    with coordinated_planning(agreement.alone):
        if isinstance(mesh, DescribedMesh):
            environment = tuple(mesh.environment.items())
        else:
            devices = [*mesh.devices.flat]
            environment = environment_parts(devices)
            agreement.same(
                {
                    "mesh": f"{dict(mesh.shape)} of {[d.id for d in devices]}",
                    "memory budget": str(budget_bytes),
                    # Process 0 says when time is over, if it ever is.
                    "time budget": "some" if isfinite(settings.seconds) else "none",
                    "settings": repr(
                        replace(settings, progress=None, remote=None, seconds=0.0)
                    ),
                }
            )
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
        remote, path = settings.remote, store_path(cache_dir)
        end = time.monotonic() + settings.seconds
        runs = settings.race and settings.measure is not False
        with (
            open_store(path, agreement)
            if remote is None
            else ProfileStore(path, copy=remote.keep)
        ) as store:
            predictor, environment = _step_predictor(mesh, store, environment)
            yield PlanContext(
                mesh=mesh,
                store=store,
                settings=settings,
                rules=_rules(defaults, settings, mesh, predictor, memory is None),
                environment=environment,
                agreement=agreement,
                measure=MeasureOptions(
                    retry_failures=settings.retry_failures,
                    limits=settings.limits,
                    progress=settings.progress,
                    remote=remote,
                    compiler_options=predictor.compiler_options if predictor else {},
                    run=predictor,
                    wants_local=predictor.wants_local
                    if predictor and predictor.here and runs
                    else None,
                ),
                memory=memory,
                device_bytes=device_bytes,
                end=end,
                predictor=predictor,
            )


def _rules(
    usual: PlatformDefaults,
    settings: DetailedSettings,
    mesh: Mesh | DescribedMesh,
    predictor: StepPredictor | None,
    no_budget: bool,
) -> PlatformDefaults:
    """A platform's defaults, and in their place what was asked for.

    Where programs are compiled for described devices, presets race with less than all
    values constrained: with all of them they are points of the search, which predicts
    as the race does. Under a budget what is less constrained may need more memory, so
    that all levels race. On one device there is one level, and no compiler options,
    which are for collectives.
    """
    reach = settings.reach or (REACH_BY_ESTIMATE if predictor else None)
    options, unasked = settings.compiler_options, settings.measure is None
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
    elif predictor is not None and no_budget:
        few = tuple(one for one in levels if one is not ConstraintLevel.EVERYTHING)
        levels = few or levels
    return replace(
        usual,
        estimates=isinstance(mesh, DescribedMesh) or (usual.estimates and unasked),
        rounds=RUNS_PLAYED if predictor else usual.rounds,
        plans=settings.plans or (PLANS_BY_ESTIMATE if predictor else usual.plans),
        levels=settings.constraint_levels or levels,
        reach=dict.fromkeys(ConstraintLevel, reach) if reach else usual.reach,
        compiler_options=usual_options if options is None else options,
        replacing=replace(usual.replacing, **asked),
        replacing_for_memory=replace(usual.replacing_for_memory, **asked),
        dimensions=settings.dimensions,
    )


def agreement_of(mesh: Mesh | DescribedMesh | None) -> Agreement:
    """Returns the agreement of the processes that have a mesh's devices.

    Raises:
        MeshError: some processes have none of them.
    """
    if not isinstance(mesh, Mesh):
        return Agreement(alone=True)
    agreement = Agreement.of(mesh)
    if not agreement.alone:
        theirs = {device.process_index for device in mesh.devices.flat}
        if without := sorted(set(range(jax.process_count())) - theirs):
            raise MeshError(
                "The mesh leaves out processes of this program.",
                expected="a mesh with devices of all processes, or of one only",
                got=f"{dict(mesh.shape)} of devices of processes "
                f"{sorted(theirs)}, without {without}",
                attempt=f"a mesh of all {jax.device_count()} devices, or fewer "
                "processes",
            )
    return agreement


def _step_predictor(
    mesh: Mesh | DescribedMesh, store: ProfileStore, environment: Parts
) -> tuple[StepPredictor | None, Parts]:
    """Returns the predictor of steps on described devices, and its environment."""
    if not isinstance(mesh, DescribedMesh) or mesh.stand_in is None:
        return None, environment
    here = environment_parts(list(mesh.stand_in.devices.flat))
    rates = mesh.rates
    found = StepPredictor(
        rates=rates,
        store=store,
        here=here if mesh.runs else None,
        compiler_options=described.OPTIONS if mesh.runs else UNTUNED,
    )
    rated = hashlib.sha256(repr((rates, found.constants)).encode()).hexdigest()
    names = {name for name, _ in environment}
    more = [part for part in here if part[0] not in names]
    return found, (
        *environment,
        *more,
        ("rung", mesh.rung),
        ("described_rates", rated),
    )


def device_memory(mesh: Mesh | DescribedMesh) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    if isinstance(mesh, DescribedMesh):
        return mesh.memory_bytes
    if mesh.devices.flat[0].platform == "cpu":
        return None
    # A process may only ask its own; what follows must be the same in all.
    stats = mesh.local_devices[0].memory_stats() or {}
    return Agreement.of(mesh).least(int(stats.get("bytes_limit", 0))) or None
