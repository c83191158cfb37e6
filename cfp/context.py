"""What is asked for, and what all passes of a plan have in common."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from cfp.cost.stand_in import UNTUNED, StandIn
from cfp.devices import mock
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError, MeshError, compose
from cfp.planner_settings import PlannerSettings
from cfp.profiling.common_store import open_store
from cfp.profiling.conversation import together
from cfp.profiling.key import Parts, environment_parts
from cfp.profiling.options import MeasureOptions
from cfp.profiling.processes import Agreement
from cfp.profiling.store import ProfileStore, store_path
from cfp.settings import (
    PLANS_BY_ESTIMATE,
    REACH_BY_ESTIMATE,
    ConstraintLevel,
    PlatformDefaults,
    defaults_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What a program has to fit into, where that was asked for.

    Attributes:
        budget_bytes: what it may need of a device's memory.
        device_bytes: memory that the compiler reckons with, or None if unknown.
        limits_memory: whether the compiler takes a memory limit.
        reserve_bytes: what is there besides, since the allocator may add it.
    """

    budget_bytes: int
    device_bytes: int | None
    limits_memory: bool
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What all passes of a plan have in common.

    Attributes:
        mesh: the devices, which may only be described.
        store: where measurements are kept.
        settings: what was asked for.
        defaults: what holds on the platform of the devices.
        environment: what measurements depend on.
        memory: the budget that was asked for; None if none was.
        device_bytes: memory of a device, or None where it does not say.
        end: when planning is to end, as `time.monotonic` counts.
        stand_in: what predicts whole steps of programs that are compiled for devices
            which are only described; None where none is, or the devices are there.
    """

    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: PlannerSettings
    defaults: PlatformDefaults
    environment: Parts
    memory: MemoryBudget | None = None
    device_bytes: int | None = None
    end: float = math.inf
    stand_in: StandIn | None = None

    @property
    def described(self) -> DescribedMesh | None:
        """The mesh, if its devices are not there."""
        return self.mesh if isinstance(self.mesh, DescribedMesh) else None

    @property
    def devices(self) -> Mesh:
        """The mesh that programs are compiled for, and run on if that is possible."""
        mesh = self.mesh.stand_in if isinstance(self.mesh, DescribedMesh) else self.mesh
        assert mesh is not None, "it is described, and nothing is compiled for it"
        return mesh

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for the devices, which may not be there."""
        return self.described is None or self.stand_in is not None

    @property
    def is_alone(self) -> bool:
        """Whether no other process has some of the devices."""
        return self.agreement.alone

    @property
    def agreement(self) -> Agreement:
        """Of the processes that have the devices."""
        return agreement_of(self.mesh)

    @property
    def measure(self) -> MeasureOptions:
        """How anything is built and timed."""
        return MeasureOptions(
            retry_failures=self.settings.retry_failures,
            limits=self.settings.limits,
            progress=self.settings.progress,
            place=self.settings.place,
            compiler_options=self.stand_in.compiler_options if self.stand_in else {},
            run=self.stand_in,
        )

    @property
    def by_estimates(self) -> bool:
        """Whether choices are made by estimates, and none is measured but in a race."""
        if self.described is not None:
            return True
        return self.settings.measure is None and self.defaults.estimates

    @property
    def races(self) -> bool:
        """Whether whole programs are timed, unless the user interrupts before that."""
        settings = self.settings
        return self.compiles and settings.race and settings.measure is not False

    @property
    def compiles_alone(self) -> bool:
        """Whether plans for described devices are compiled though none races."""
        settings = self.settings
        return self.stand_in is not None and settings.measure is not False

    @property
    def plans(self) -> int:
        """How many of the best plans by each way to predict take part in the race."""
        usual = PLANS_BY_ESTIMATE if self.stand_in else self.defaults.plans
        return self.settings.plans or usual

    @property
    def levels(self) -> tuple[ConstraintLevel, ...]:
        """How much the compiler is constrained in presets; each way races."""
        return self.settings.extents or self.defaults.levels

    @property
    def reach(self) -> Mapping[ConstraintLevel, float]:
        """How many times as long as the best a candidate may take, to be raced."""
        asked = self.settings.reach or (REACH_BY_ESTIMATE if self.stand_in else None)
        return dict.fromkeys(ConstraintLevel, asked) if asked else self.defaults.reach

    @property
    def compiler_options(self) -> Mapping[str, Mapping[str, str]]:
        """What the leaders are raced with, too, by name."""
        asked = self.settings.compiler_options
        return self.defaults.compiler_options if asked is None else asked

    @property
    def attention(self) -> tuple[str, ...]:
        """Kernels that may take the place of the step's attentions."""
        asked = self.settings.attention
        return self.defaults.attention if asked is None else asked

    @property
    def platform(self) -> str:
        """Of the devices, by JAX's name for it."""
        return dict(self.environment)["platform"]

    @property
    def budget_bytes(self) -> int | None:
        """Memory that a plan may use on each device."""
        return self.memory.budget_bytes if self.memory else self.device_bytes


@contextlib.contextmanager
def open_context(
    mesh: Mesh | DescribedMesh,
    cache_dir: str | Path | None = None,
    budget_bytes: int | None = None,
    settings: PlannerSettings | None = None,
) -> Iterator[PlanContext]:
    """What the passes of a plan need; the store is closed at the end.

    Args:
        mesh: the devices, which may only be described.
        cache_dir: where measurements are kept; the user's cache by default.
        budget_bytes: memory of a device that was asked for, or None.
        settings: how much to measure.
    """
    if not isinstance(settings, PlannerSettings | None):
        raise CfpError(
            f"settings is a {type(settings).__name__}. Pass "
            "cfp.PlannerSettings(per_kind=8), for instance."
        )
    settings = settings or PlannerSettings()
    agreement = agreement_of(mesh)
    with together(agreement.alone):
        if isinstance(mesh, DescribedMesh):
            environment = tuple(mesh.environment.items())
        else:
            devices = [*mesh.devices.flat]
            environment = environment_parts(devices)
            agreement.same(
                {
                    "mesh": f"{dict(mesh.shape)} of {[d.id for d in devices]}",
                    "memory budget": str(budget_bytes),
                    "settings": repr(replace(settings, progress=None, place=None)),
                }
            )
        defaults = defaults_of(dict(environment)["platform"])
        device_bytes = device_memory(mesh)
        memory = None
        if budget_bytes is not None:
            memory = MemoryBudget(
                budget_bytes=budget_bytes - defaults.reserve_bytes,
                device_bytes=device_bytes,
                limits_memory=defaults.limits_memory,
                reserve_bytes=defaults.reserve_bytes,
            )
        place, path = settings.place, store_path(cache_dir)
        with (
            open_store(path, agreement)
            if place is None
            else ProfileStore(path, copy=place.keep)
        ) as store:
            stand_in, environment = _stand_in(mesh, store, environment)
            yield PlanContext(
                mesh=mesh,
                store=store,
                settings=settings,
                defaults=defaults,
                environment=environment,
                memory=memory,
                device_bytes=device_bytes,
                end=time.monotonic() + settings.seconds,
                stand_in=stand_in,
            )


def agreement_of(mesh: Mesh | DescribedMesh | None) -> Agreement:
    """Of the processes that have a mesh's devices.

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
                compose(
                    "The mesh leaves out processes of this program.",
                    expected="a mesh with devices of all processes, or of one only",
                    got=f"{dict(mesh.shape)} of devices of processes "
                    f"{sorted(theirs)}, without {without}",
                    attempt=f"a mesh of all {jax.device_count()} devices, or fewer "
                    "processes",
                )
            )
    return agreement


def _stand_in(
    mesh: Mesh | DescribedMesh, store: ProfileStore, environment: Parts
) -> tuple[StandIn | None, Parts]:
    """What predicts whole steps of described devices, and what that depends on."""
    if not isinstance(mesh, DescribedMesh) or mesh.stand_in is None:
        return None, environment
    here = environment_parts(list(mesh.stand_in.devices.flat))
    rates = mesh.rates
    found = StandIn(
        rates=rates,
        store=store,
        place=here if mesh.runs else None,
        compiler_options=mock.OPTIONS if mesh.runs else UNTUNED,
    )
    told = hashlib.sha256(repr((rates, found.constants)).encode()).hexdigest()
    names = {name for name, _ in environment}
    more = [part for part in here if part[0] not in names]
    return found, (*environment, *more, ("rung", mesh.rung), ("described_rates", told))


def device_memory(mesh: Mesh | DescribedMesh) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    if isinstance(mesh, DescribedMesh):
        return mesh.memory_bytes
    if mesh.devices.flat[0].platform == "cpu":
        return None
    # A process may only ask its own; what follows must be the same in all.
    stats = mesh.local_devices[0].memory_stats() or {}
    return Agreement.of(mesh).least(int(stats.get("bytes_limit", 0))) or None
