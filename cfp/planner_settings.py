"""Settings of planning: how much to measure, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from numbers import Integral, Real
from typing import Any

from cfp.attention.kernels import KERNELS
from cfp.errors import CfpError, OptionError, known_names
from cfp.profiling.in_flight import Limits
from cfp.profiling.tasks import Progress
from cfp.program.fp8 import read_precision
from cfp.settings import ALL_DIMENSIONS, ConstraintLevel, Dimension

# Settings that the command line calls otherwise.
_OPTIONS = {"time_budget": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings of measuring, search and race.

    The first sentence on each is the help of the command line's option, too.

    Attributes:
        per_kind: strategies to measure for each kind of segment, at most.
        others: strategies of each kind of segment to measure beside those of the
            presets. The best by estimate are measured. If memory excludes the fastest,
            more are measured while they may make the plan faster by 2 %.
        seconds: stop planning after about this long, race included, also if nothing
            fits in memory yet. Measuring ends after 0.6 of it, or all of it without a
            race. If no program fits at the end, the smallest is compiled.
        compiler_options: sets of compiler options by the name that the race is to give
            them; the fastest program races with each. By default a short list for the
            platform.
        attention: kernels of attention to try, such as cudnn and chunked, the preferred
            first; by default cudnn on GPUs, and chunked if memory decides. () keeps
            attentions as they are written, and so does none on the command line.
        choose: kinds of choices to make among mesh, sharding, storage, remat, kernels,
            compiler-options, microbatches and host-memory; by default all. Without
            them: one mesh axis, data parallel, parameters as used, the step as written,
            no options, state on the devices.
        race: time the best plan and the presets on the whole program. Otherwise the
            prediction decides, and under a budget what compiles to fit.
        compile: compile the best few for described devices (takes cfp[tpu] or
            cfp[cuda]), and drop those that do not fit.
        precision: compute large 16-bit products of parameters in FP8, which changes
            results: fp8, or fp8,-*/router to leave some out by path. See docs/fp8.md.
        measure: measure strategies on virtual CPU devices, too; by default choices
            there are by estimates, and the plan and two presets race. False uses stored
            measurements only.
        retry_failures: measure again what failed before. It may be a moment, too.
        progress: called with every event, a :class:`Progress` or a line of text.
        ray: address of a Ray cluster to plan on: auto, host:port, or local, which
            starts one here. See docs/ray.md.

    Raises:
        CfpError: a value is out of range, or a name is unknown.
    """

    per_kind: int = 16
    others: int = 1
    seconds: float = float("inf")
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    attention: tuple[str, ...] | None = None
    choose: tuple[str, ...] | None = None
    race: bool = True
    compile: bool = False
    precision: str = ""
    measure: bool | None = None
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None
    ray: str | None = None

    def __new__(cls, **given: Any) -> PlannerSettings:
        """Raises for unknown names, with the known ones."""
        known = [one.name for one in fields(cls)]
        for name in given.keys() - {*known}:
            raise OptionError(
                f"PlannerSettings has no {name}. {known_names(name, known, _OPTIONS)}"
            )
        return object.__new__(cls)

    def __post_init__(self):
        for name, least, what in (
            ("per_kind", 1, "strategies to measure for each kind of segment"),
            ("others", 0, "strategies to measure beside the presets' parts"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise CfpError(
                    f"Expected {least} or more {what}, got {name}={value!r}."
                )
        if not isinstance(self.seconds, Real) or not self.seconds >= 0:
            raise CfpError(
                "Expected a number of seconds, 0 or more (left out, planning takes as "
                f"many as it needs), got seconds={self.seconds!r}."
            )
        if self.precision:
            read_precision(self.precision)
        dimensions = self.dimensions
        for dimension, name in _OF_DIMENSIONS.items():
            if getattr(self, name) and dimension not in dimensions:
                raise CfpError(
                    f"{name}={getattr(self, name)!r} asks for what choose leaves out. "
                    f"Add {dimension} to choose, or leave out {name}."
                )
        if unknown := [name for name in self.attention or () if name not in KERNELS]:
            raise CfpError(
                f"Expected kernels of attention among {', '.join(KERNELS)}, got "
                f"{', '.join(unknown)}."
            )

    @property
    def dimensions(self) -> frozenset[Dimension]:
        """The kinds of choices.

        Raises:
            CfpError: a name is unknown, or there is none.
        """
        return ALL_DIMENSIONS if self.choose is None else dimensions_of(self.choose)


# Settings that ask for what a dimension chooses among.
_OF_DIMENSIONS = {
    Dimension.KERNELS: "attention",
    Dimension.COMPILER_OPTIONS: "compiler_options",
}


def dimensions_of(names: str | Iterable[str]) -> frozenset[Dimension]:
    """Reads names of kinds of choices, with hyphens or underscores.

    Raises:
        CfpError: a name is unknown, or there is none.
    """
    names = [names] if isinstance(names, str) else [*names]
    known = [one.replace("_", "-") for one in Dimension]
    plain = {name: str(name).strip().lower().replace("_", "-") for name in names}
    for name, found in plain.items():
        if found not in known:
            raise CfpError(
                f"There is no {name!r} to choose. {known_names(found, known, _ALIASES)}"
            )
    if not plain:
        raise CfpError(
            f"Expected something to choose among, got none. There are: "
            f"{', '.join(known)}; leave choose out for all."
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
            from twice as many programs.
        plans: number of plans that race by each prediction (segments beside a
            neighbour, and alone); by default 1. If memory decides, one more is searched
            with smaller temporaries.
        constraint_levels: levels of the presets in the race: all at the first, the
            fastest at each. By default all levels; one on virtual CPU devices.
        reach: limit of predicted time for candidates, as a multiple of the fastest that
            fits. By default 1.1; 1.25 with activations constrained, 1.2 with arguments
            constrained; 2 on virtual CPU devices.
    """

    in_context: bool = True
    plans: int | None = None
    constraint_levels: tuple[ConstraintLevel, ...] | None = None
    reach: float | None = None

    @classmethod
    def of(cls, settings: PlannerSettings) -> DetailedSettings:
        """Returns a user's settings with defaults for the rest."""
        if isinstance(settings, DetailedSettings):
            return settings
        given = {one.name: getattr(settings, one.name) for one in fields(settings)}
        return cls(**given)
