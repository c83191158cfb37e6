"""What is asked for, and what all passes of a plan have in common."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import jax
from jax.sharding import Mesh

from cfp.attention.kernels import KERNELS
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError, MeshError, compose
from cfp.profiling.common_store import open_store
from cfp.profiling.conversation import together
from cfp.profiling.key import Parts, environment_parts
from cfp.profiling.marks import Limits
from cfp.profiling.options import MeasureOptions
from cfp.profiling.processes import Agreement
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import Progress
from cfp.settings import ConstraintLevel, PlatformDefaults, defaults_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How much to measure, and where progress is reported.

    Attributes:
        per_kind: how many strategies to measure for each kind of segment, at most.
        others: how many of them beside the presets' parts, the best by estimate. Where
            memory keeps out what is faster, more are measured in rounds, until one made
            the plan faster by less than 2 %.
        seconds: planning ends about when this much time is over: once every kind of
            segment has something nothing else is measured then, and no program joins
            the race or is timed again.
        in_context: whether segments are measured with a neighbour, which predicts
            better and builds twice as many programs.
        plans: how many of the best plans, by each of two ways to predict, take part
            in the race; by default 2, and 1 on virtual CPU devices. Where memory
            decides, one of them is for programs that turn out smaller than predicted.
        extents: how much the compiler is constrained in presets; each way races.
            By default all ways, and one on virtual CPU devices, where a build takes
            longer than the difference is worth.
        reach: candidates that are predicted to take this many times as long as the
            fastest that fits are not raced; by default 1.1, or 1.2 where only arguments
            are constrained, and 2 on virtual CPU devices.
        compiler_options: options of the compiler by the name that the race is to give
            them; the leaders are raced with each, too. By default a short list for
            the platform.
        attention: kernels that may take the place of the step's attentions, the
            preferred first, such as ("cudnn", "chunked"). By default none: attentions
            are left as they are written.
        race: whether the best plan and the presets are timed on the whole program;
            otherwise the prediction is trusted, and under a budget that was asked for
            the best that fits is found by compiling, which runs nothing.
        repeats: of segments that repeat back to back so many repeats are raced (two at
            least, the first and the last), unless a budget was asked for, and the rest
            follows from the prediction; only what wins is then compiled and timed
            whole. None races whole programs.
        measure: whether what each strategy costs is measured; False takes what is in
            the store already. By default it is, but on virtual CPU devices, whose times
            say nothing about those of GPUs: there choices are made by estimates, and
            the plan and two presets race.
        retry_failures: whether what failed before is tried again; or what failed
            before a moment, which a process that is started again keeps to.
        limits: what counts as hung.
        progress: told of every event, a :class:`Progress` or a line of text.

    Raises:
        CfpError: fewer than two repeats, or no strategy to measure.
    """

    per_kind: int = 16
    others: int = 1
    seconds: float = float("inf")
    in_context: bool = True
    plans: int | None = None
    extents: tuple[ConstraintLevel, ...] | None = None
    reach: float | None = None
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    attention: tuple[str, ...] | None = None
    race: bool = True
    repeats: int | None = 4
    measure: bool | None = None
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None

    def __post_init__(self):
        if self.repeats is not None and self.repeats < 2:
            raise CfpError(
                f"Expected two repeats or more to race, got repeats={self.repeats}. "
                "None races whole programs."
            )
        if self.per_kind < 1:
            raise CfpError(
                f"Expected one strategy or more to measure for each kind of segment, "
                f"got per_kind={self.per_kind}."
            )
        if unknown := [name for name in self.attention or () if name not in KERNELS]:
            raise CfpError(
                f"Expected kernels of attention among {', '.join(KERNELS)}, got "
                f"{', '.join(unknown)}."
            )
        if self.others < 0:
            raise CfpError(
                "Expected no fewer than 0 strategies to measure beside the presets' "
                f"parts, got others={self.others}."
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
    """

    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: PlannerSettings
    defaults: PlatformDefaults
    environment: Parts
    memory: MemoryBudget | None = None
    device_bytes: int | None = None
    end: float = math.inf

    @property
    def described(self) -> DescribedMesh | None:
        """The mesh, if its devices are not there."""
        return self.mesh if isinstance(self.mesh, DescribedMesh) else None

    @property
    def devices(self) -> Mesh:
        """The mesh, whose devices are there."""
        assert isinstance(self.mesh, Mesh), "it is described, and not there"
        return self.mesh

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
        return (
            self.described is None and settings.race and settings.measure is not False
        )

    @property
    def plans(self) -> int:
        """How many of the best plans by each way to predict take part in the race."""
        return self.settings.plans or self.defaults.plans

    @property
    def levels(self) -> tuple[ConstraintLevel, ...]:
        """How much the compiler is constrained in presets; each way races."""
        return self.settings.extents or self.defaults.levels

    @property
    def reach(self) -> Mapping[ConstraintLevel, float]:
        """How many times as long as the best a candidate may take, to be raced."""
        asked = self.settings.reach
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
        yield from _opened(mesh, cache_dir, budget_bytes, settings, agreement)


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


def _opened(
    mesh: Mesh | DescribedMesh,
    cache_dir: str | Path | None,
    budget_bytes: int | None,
    settings: PlannerSettings,
    agreement: Agreement,
) -> Iterator[PlanContext]:
    if isinstance(mesh, DescribedMesh):
        environment = tuple(mesh.environment.items())
    else:
        environment = environment_parts(list(mesh.devices.flat))
        agreement.same(
            {
                "mesh": f"{dict(mesh.shape)} of {[d.id for d in mesh.devices.flat]}",
                "memory budget": str(budget_bytes),
                "settings": repr(replace(settings, progress=None)),
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
    with open_store(store_path(cache_dir), agreement) as store:
        yield PlanContext(
            mesh=mesh,
            store=store,
            settings=settings,
            defaults=defaults,
            environment=environment,
            memory=memory,
            device_bytes=device_bytes,
            end=time.monotonic() + settings.seconds,
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
