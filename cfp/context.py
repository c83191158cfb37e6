"""Settings of planning, and the context that all passes of a plan share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from math import prod
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp.cost.described import DescribedMesh
from cfp.errors import CfpError, OptionError, known_names
from cfp.kernels.kinds import KERNELS, usual_kernels
from cfp.printable import format_bytes
from cfp.profiling.coordination import coordination, is_shared
from cfp.profiling.record import Parts, environment_parts
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import Limits, MeasureOptions, Progress
from cfp.program.trace import find_precision
from cfp.settings import (
    ALL_DIMENSIONS,
    LIMITED_MEMORY,
    ConstraintLevel,
    Dimension,
    PlatformDefaults,
    Replacing,
    defaults_of,
)

# Names of options on the command line, for suggestions.
_OPTIONS = {"time_budget": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings of measuring, search and race. A segment is a repeated run of blocks.

    An attribute's first sentence is also the help of its option, except of --no-race.

    Attributes:
        per_kind: most strategies to measure per kind of segment, and as many again with
            rematerialization. Presets may exceed it; kernel variants do not count.
        others: strategies of each kind of segment to measure beside those of the
            presets. The best by estimate are measured. If memory excludes the fastest,
            more are measured while another may make the plan faster by 2 %.
        seconds: stop planning after about this long, race included, also if nothing
            fits in memory yet. Measuring ends after 0.6 of this time, or all of it
            without a race. If no program fits then, the smallest is compiled.
        compiler_options: sets of compiler options by the name that the race is to give
            them; the fastest program races with each. By default a short list for the
            platform.
        kernels: kernels to try in place of written ops, such as cudnn and chunked, the
            preferred first; by default cudnn on GPUs, and chunked if memory decides.
            (), on the command line none, keeps ops as written.
        choose: kinds of choices to make among mesh, sharding, storage, remat, kernels,
            compiler-options, microbatches and host-memory; by default all. Without
            them: one mesh axis, data parallel, parameters as used, the step as written,
            no options, state on the devices.
        race: time the best candidates by prediction as whole programs. Without a race
            the best prediction wins; with a memory budget, the best that compiles to
            fit. On virtual CPU devices candidates race only with ``measure=True``.
        precision: compute large 16-bit products of parameters in fewer bits, which
            changes results: NAME, or NAME,-*/router to leave some out by path.
            ``cfp plan --help`` lists names.
        measure: measure strategies and race on virtual CPU devices, too; by default
            choices there are by estimates. False: stored measurements, and no race.
        retry_failures: measure again what failed before. A `datetime` retries failures
            from before that time.
        progress: called with every event, a :class:`Progress` or a line of text.
        limits: times after which a build or a run counts as hung, :class:`Limits`.
        ray: address of a Ray cluster: auto, host:port, or local, which starts one here.

    Raises:
        CfpError: a value is out of range, a name unknown, or two settings contradict.
    """

    per_kind: int = 16
    others: int = 1
    seconds: float = float("inf")
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    kernels: tuple[str, ...] | None = None
    choose: tuple[str, ...] | None = None
    race: bool = True
    precision: str = ""
    measure: bool | None = None
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None
    ray: str | None = None

    def __new__(cls, **given: Any) -> PlannerSettings:
        """Raises OptionError for an unknown name, and lists the known names."""
        known = [one.name for one in fields(cls)]
        for name in given.keys() - {*known}:
            raise OptionError(
                f"PlannerSettings has no setting {name!r}. "
                f"{known_names(name, known, _OPTIONS)} "
                "Pass options of cfp.plan, such as memory_budget, to cfp.plan itself."
            )
        return object.__new__(cls)

    def __post_init__(self):
        for name, least, what in (
            ("per_kind", 1, "strategies to measure for each kind of segment"),
            ("others", 0, "strategies to measure beside those of the presets"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise CfpError(
                    f"Expected {least} or more {what}, got {name}={value!r}."
                )
        if not isinstance(self.seconds, Real) or not self.seconds >= 0:
            raise CfpError(
                f"Expected 0 or more seconds, got seconds={self.seconds!r}. Leave out "
                "seconds for planning without a limit of time."
            )
        find_precision(self.precision)
        dimensions = self.dimensions
        for dimension, name in _OF_DIMENSIONS.items():
            if getattr(self, name) and dimension not in dimensions:
                raise CfpError(
                    f"{name}={getattr(self, name)!r} needs the choice of {dimension}, "
                    f"which choose leaves out. Add {dimension} to choose, or leave out "
                    f"the setting {name}."
                )
        if unknown := [name for name in self.kernels or () if name not in KERNELS]:
            raise CfpError(
                f"Expected kernels among {', '.join(KERNELS)}, got "
                f"{', '.join(unknown)}."
            )

    @property
    def dimensions(self) -> frozenset[Dimension]:
        """Kinds of choices to make: those of ``choose``; by default all.

        Raises:
            CfpError: ``choose`` has an unknown name, or is empty.
        """
        return ALL_DIMENSIONS if self.choose is None else dimensions_of(self.choose)


# The setting that lists the options of a kind of choice.
_OF_DIMENSIONS = {
    Dimension.KERNELS: "kernels",
    Dimension.COMPILER_OPTIONS: "compiler_options",
}


def dimensions_of(names: str | Iterable[str]) -> frozenset[Dimension]:
    """Reads names of kinds of choices (a string is one), with hyphens or underscores.

    Raises:
        CfpError: a name is unknown, or no name is given.
    """
    names = [names] if isinstance(names, str) else [*names]
    known = [one.replace("_", "-") for one in Dimension]
    plain = {name: str(name).strip().lower().replace("_", "-") for name in names}
    for name, found in plain.items():
        if found not in known:
            raise CfpError(
                f"choose has no choice {name!r}. {known_names(found, known, _ALIASES)}"
            )
    if not plain:
        raise CfpError(
            f"choose is empty. Name some of {', '.join(known)}, or leave out choose "
            "for all."
        )
    return frozenset(Dimension(one.replace("-", "_")) for one in plain.values())


_ALIASES = {
    "attention": "kernels",
    "rematerialization": "remat",
    "options": "compiler-options",
    "strategies": "sharding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedSettings(PlannerSettings):
    """Settings that only commands, tests and benchmarks set.

    Attributes:
        in_context: True measures segments beside a neighbour, too: better predictions
            from up to twice as many programs.
        constraint_levels: levels of the presets in the race: all at the first, a
            leading one at each. By default all; one on one device or virtual devices.
        reach: limit of predicted time for candidates, as a multiple of the fastest that
            fits. By default 1.1; 1.25 with activations constrained, 1.2 with arguments
            constrained; 2 on virtual CPU devices.
    """

    in_context: bool = True
    constraint_levels: tuple[ConstraintLevel, ...] | None = None
    reach: float | None = None

    @classmethod
    def of(cls, settings: PlannerSettings | None) -> DetailedSettings:
        """Adds detailed defaults to settings that lack them; None gives all defaults.

        Raises:
            CfpError: the settings are no PlannerSettings.
        """
        if isinstance(settings, DetailedSettings):
            return settings
        if not isinstance(settings, PlannerSettings | None):
            raise CfpError(
                f"settings is a {type(settings).__name__}. Pass "
                "cfp.PlannerSettings(per_kind=8), for instance."
            )
        given = fields(PlannerSettings) if settings else ()
        return cls(**{one.name: getattr(settings, one.name) for one in given})


# ------------------------------------------------------------------------------ context


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory that a program must fit in.

    Attributes:
        budget_bytes: memory that a program may need on each device: the user's budget
            without the reserve.
        device_bytes: memory of a device, from which the compiler's limit is computed;
            None if that memory is unknown or the compiler takes no limit.
        reserve_bytes: part of the user's budget that the allocator may need.
    """

    budget_bytes: int
    device_bytes: int | None
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Context shared by all passes of a plan.

    Attributes:
        mesh: the devices, real or described.
        defaults: the platform's defaults, replaced by the user's settings where given.
        memory: the user's memory budget; None without one.
        device_bytes: memory of a device for programs; None on CPUs, or if unknown.
        end: the end of planning, in seconds of `time.monotonic`; inf without a limit.
    """

    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: DetailedSettings
    defaults: PlatformDefaults
    environment: Parts
    measure: MeasureOptions
    memory: MemoryBudget | None
    device_bytes: int | None
    end: float

    @property
    def devices(self) -> Mesh:
        """The mesh of real devices; an AssertionError for a described mesh."""
        assert isinstance(self.mesh, Mesh), "nothing is compiled for described devices"
        return self.mesh

    @property
    def budget_bytes(self) -> int | None:
        """Bytes for a plan on each device: by `memory`, else `device_bytes`."""
        return self.memory.budget_bytes if self.memory else self.device_bytes

    @property
    def is_over(self) -> bool:
        """True if the time for planning is over."""
        return time.monotonic() > self.end

    @property
    def races(self) -> bool:
        """True if a race of the best candidates decides the plan."""
        return self._may_run and not self.defaults.estimates

    @property
    def compiles(self) -> bool:
        """True if candidates are compiled, to check that they fit in memory."""
        is_here = isinstance(self.mesh, Mesh)
        return is_here and (self._may_run or self.memory is not None)

    @property
    def _may_run(self) -> bool:
        return self.settings.race and self.settings.measure is not False

    @property
    def usual_temp_share(self) -> float:
        """Usual temporary memory under XLA's memory limit, as a share of that without.

        It is 1 if nothing is compiled, `device_bytes` is None, or XLA takes no limit.
        """
        limited = self.compiles and self.defaults.limits_memory and self.device_bytes
        return LIMITED_MEMORY if limited else 1.0


@contextlib.contextmanager
def open_context(
    mesh: Mesh | DescribedMesh,
    cache_dir: str | Path | None = None,
    budget_bytes: int | None = None,
    settings: PlannerSettings | None = None,
) -> Iterator[PlanContext]:
    """Opens the context of a plan; the store is closed at the end.

    Raises:
        CfpError: the budget is not above the allocator's reserve, or `settings` is no
            `PlannerSettings`.
    """
    settings = DetailedSettings.of(settings)
    if isinstance(mesh, DescribedMesh):
        environment = tuple(mesh.environment.items())
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
                f"{format_bytes(defaults.reserve_bytes)}. Give a larger budget."
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
            defaults=_defaults(defaults, settings, mesh),
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


def _defaults(
    usual: PlatformDefaults, settings: DetailedSettings, mesh: Mesh | DescribedMesh
) -> PlatformDefaults:
    """Combines a platform's defaults with the user's settings.

    By default, one device has one constraint level and no compiler options, which are
    for collectives. `slow_to_tune` lacks kernels that the precision turns off, and is
    empty if the user gives compiler options or chooses without them.
    """
    reach, unasked = settings.reach, settings.measure is None
    options = settings.compiler_options
    asked = settings.kernels if Dimension.KERNELS in settings.dimensions else ()

    def replacing(for_memory: bool) -> Replacing:
        platform = usual.replacing.platform
        kernels = usual_kernels(platform, for_memory) if asked is None else asked
        return Replacing(kernels=kernels, platform=platform)

    if Dimension.COMPILER_OPTIONS not in settings.dimensions:
        options = {}
    levels = usual.levels
    usual_options = usual.compiler_options
    if prod(mesh.shape.values()) == 1:
        levels, usual_options = levels[:1], {}
    off = found.options if (found := find_precision(settings.precision)) else {}
    slow = usual.slow_to_tune.items() if options is None else ()
    return replace(
        usual,
        estimates=isinstance(mesh, DescribedMesh) or (usual.estimates and unasked),
        levels=settings.constraint_levels or levels,
        reach=dict.fromkeys(ConstraintLevel, reach) if reach else usual.reach,
        compiler_options=usual_options if options is None else options,
        first_options=usual.first_options if options is None and usual_options else {},
        slow_to_tune={n: one for n, one in slow if not one.items() <= off.items()},
        replacing=replacing(for_memory=False),
        replacing_for_memory=replacing(for_memory=True),
    )


def device_memory(mesh: Mesh | DescribedMesh) -> int | None:
    """Bytes that programs may use on each device; None on CPUs, or if not reported."""
    if isinstance(mesh, DescribedMesh):
        return mesh.memory_bytes
    if mesh.devices.flat[0].platform == "cpu":
        return None
    own = int((mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0))
    talk = coordination() if is_shared(mesh) else None
    # A process can only query its own devices.
    return min(own, talk.least_bytes) if talk and talk.hosts else own or None
