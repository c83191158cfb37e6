"""What the planner is told, and what its passes hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from cfp.analysis.layout import Choice
from cfp.profiling.collectives import Rates
from cfp.profiling.marks import Limits
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import Progress
from cfp.search.measure import Told
from cfp.search.problem import Problem
from cfp.search.wanted import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How much to measure, and who is told.

    Attributes:
        per_kind: how many strategies to measure for each kind of segment.
        in_context: whether segments are measured with a neighbour, which predicts
            better and builds twice as many programs.
        plans: how many of the best plans, by each of two ways to predict, take part
            in the race; by default 3, and 1 on virtual CPU devices.
        extents: how much the compiler is told of the classics; each way takes part.
            By default all ways, and one on virtual CPU devices, where a build takes
            longer than the difference is worth.
        race: whether the best plan and the classics are timed on the whole program;
            otherwise the prediction is trusted.
        measure: whether devices may be used; otherwise only records that are in the
            store already.
        retry_failures: whether what failed before is tried again; or what failed
            before a moment, which a process that is started again keeps to.
        limits: what counts as hung.
        progress: told of every event, a :class:`Progress` or a line of text.
    """

    per_kind: int = 16
    in_context: bool = True
    plans: int | None = None
    extents: tuple[Told, ...] | None = None
    race: bool = True
    measure: bool = True
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None


@dataclass(frozen=True)
class Profiles:
    """What the profile pass measured.

    Attributes:
        classics: those classics that are worth measuring.
        wanted: the candidates of every kind of segment, with their jobs.
        records: what was measured, by key.
        rates: the devices' rates.
        measured, cached, failed: counts of strategies.
        seconds: how long the pass took.
    """

    classics: Mapping[str, Choice]
    wanted: list[Wanted]
    records: Mapping[str, ProfileRecord]
    rates: Rates
    measured: int
    cached: int
    failed: int
    seconds: float


@dataclass(frozen=True)
class Decision:
    """A choice for the whole program, and where it came from.

    Attributes:
        name: what the race calls it.
        choice: strategies and storage.
        predicted_ms: its step time by the profiles, or None.
        extent: how much of it the compiler is told.
        rivals: other choices that the search found promising.
        classics: the classics to race against.
        problem: what was searched, or None for a classic taken by name.
        search: counts and seconds of the search.
    """

    name: str
    choice: Choice
    predicted_ms: float | None = None
    extent: Told = Told.EVERYTHING
    rivals: tuple[Decision, ...] = ()
    classics: Mapping[str, Choice] = field(default_factory=dict)
    problem: Problem | None = None
    search: Mapping[str, float] = field(default_factory=dict)
