"""What the planner is told, and what its passes hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.describe import plan_rows
from cfp.errors import CfpError
from cfp.plan import Plan
from cfp.plan_parts import RaceRow, type_text
from cfp.profiling.collectives import Rates
from cfp.profiling.key import GPU_PLATFORMS, Parts
from cfp.profiling.marks import Limits
from cfp.profiling.moves import Move
from cfp.profiling.processes import Agreement
from cfp.profiling.runner import Progress
from cfp.profiling.store import ProfileStore
from cfp.program.graft import aval
from cfp.search.effort import Effort, Explored
from cfp.search.finalist import Finalist, RaceResult, Whole
from cfp.search.measure import Told, told_of, whole_job
from cfp.search.problem import Problem
from cfp.search.shortened import Shortened
from cfp.search.squeeze import Room

TOO_FAR = "predicted too far behind to be raced"
UNMEASURED = "estimated too far behind to be measured"
TOO_LARGE = "predicted not to fit in memory"
# XLA's allocator does not split a free block of which less than this would stay free,
# and counts the whole block as used: what is measured is up to this much more than what
# a program's largest allocation, that of all its temporaries, needs.
_UNSPLIT_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How much to measure, and who is told.

    Attributes:
        per_kind: how many strategies to measure for each kind of segment, at most.
        tolerance: measuring ends when no other plan can be faster by more than this
            share of the step; on GPUs, where memory decides, when none probably is by
            more than 2%.
        patience: or after so many rounds in a row that made no plan faster by that
            share, and one more where memory keeps out a faster one. By default 1 on
            virtual CPU devices, and none on others: what is measured at first is the
            classics' parts and the best by estimate.
        seconds: measuring ends after the round in which this much time is over.
        in_context: whether segments are measured with a neighbour, which predicts
            better and builds twice as many programs.
        plans: how many of the best plans, by each of two ways to predict, take part
            in the race; by default 2, and 1 on virtual CPU devices. Where memory
            decides, one of them is for programs that turn out smaller than predicted.
        extents: how much the compiler is told of the classics; each way takes part.
            By default all ways, and one on virtual CPU devices, where a build takes
            longer than the difference is worth.
        reach: classics that are predicted to take this many times as long as the plan
            are not raced; by default 1.1, or 1.2 where the compiler is told of their
            arguments alone, and 2 on virtual CPU devices.
        compiler_options: options of the compiler by the name that the race is to give
            them; the leaders are raced with each, too. By default a short list for
            the platform.
        race: whether the best plan and the classics are timed on the whole program;
            otherwise the prediction is trusted, and under a budget that was asked for
            the best that fits is found by compiling, which runs nothing.
        repeats: of segments that repeat back to back so many repeats are raced (two at
            least, the first and the last), where memory is not in question, and the
            rest follows from the prediction; only what wins is then compiled and timed
            whole. None races whole programs.
        measure: whether devices may be used; otherwise only records that are in the
            store already.
        retry_failures: whether what failed before is tried again; or what failed
            before a moment, which a process that is started again keeps to.
        limits: what counts as hung.
        progress: told of every event, a :class:`Progress` or a line of text.

    Raises:
        CfpError: fewer than two repeats.
    """

    per_kind: int = 16
    tolerance: float = 0.01
    patience: float | None = None
    seconds: float = float("inf")
    in_context: bool = True
    plans: int | None = None
    extents: tuple[Told, ...] | None = None
    reach: float | None = None
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    race: bool = True
    repeats: int | None = 4
    measure: bool = True
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None

    def __post_init__(self):
        if self.repeats is not None and self.repeats < 2:
            raise CfpError(
                f"Expected two repeats or more to race, got repeats={self.repeats}. "
                "None races whole programs."
            )


@dataclass(frozen=True)
class Ground:
    """What all passes of one program on some devices have in common.

    Attributes:
        analysis: of the program.
        mesh: the devices.
        store: where measurements are kept.
        settings: how much to measure.
        room: what there is in a budget that was asked for; None if none was.
        device_bytes: memory of a device, or None where it does not say.
        environment: what measurements depend on.
    """

    analysis: Analysis
    mesh: Mesh
    store: ProfileStore
    settings: PlannerSettings
    room: Room | None
    device_bytes: int | None
    environment: Parts

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def plans(self) -> int:
        """How many of the best plans by each way to predict take part in the race."""
        return self.settings.plans or (1 if self.platform == "cpu" else 2)

    @property
    def effort(self) -> Effort:
        """When measuring ends."""
        settings, patience = self.settings, self.settings.patience
        if patience is None:
            patience = 1 if self.platform == "cpu" else 0
        return Effort(
            per_kind=settings.per_kind, tolerance=settings.tolerance, patience=patience
        )

    @property
    def budget_bytes(self) -> int | None:
        """Memory that a plan may use on each device."""
        return self.room.budget_bytes if self.room else self.device_bytes

    @property
    def manner(self) -> dict[str, Any]:
        """How anything is measured."""
        return {
            "retry_failures": self.settings.retry_failures,
            "progress": self.tell,
            "limits": self.settings.limits,
        }

    def tell(self, event: Progress | str) -> None:
        """Passes an event on to who wants to know."""
        if self.settings.progress is not None:
            self.settings.progress(event)


@dataclass(frozen=True)
class Profiles:
    """What the profile pass measured.

    Attributes:
        classics: those classics that are worth measuring.
        found: the candidates of every kind of segment, and what they take.
        rates: the devices' rates.
        measured, cached, failed: counts of strategies.
        seconds: how long the pass took.
        moved_ms: what resharding between segments takes, where it was measured.
    """

    classics: Mapping[str, Choice] = field(repr=False)
    found: Explored = field(repr=False)
    rates: Rates = field(repr=False)
    measured: int
    cached: int
    failed: int
    seconds: float
    moved_ms: Mapping[Move, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Decision:
    """A choice for the whole program, and where it came from.

    Attributes:
        name: what the race calls it.
        choice: strategies and storage.
        predicted_ms: its step time by the profiles, or None.
        extent: how much of it the compiler is told.
        options: of the compiler.
        rivals: other choices that the search found promising.
        classics: the classics to race against.
        unmeasured: names of those that were estimated to be too far behind or, under a
            budget, to need more memory than there is.
        problem: what was searched, or None for a classic taken by name.
        search: counts and seconds of the search.
    """

    name: str
    choice: Choice = field(repr=False)
    predicted_ms: float | None = None
    extent: Told = Told.EVERYTHING
    options: Mapping[str, str] = field(default_factory=dict)
    rivals: tuple[Decision, ...] = field(default=(), repr=False)
    classics: Mapping[str, Choice] = field(default_factory=dict, repr=False)
    unmeasured: tuple[str, ...] = ()
    problem: Problem | None = field(default=None, repr=False)
    search: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells whole programs apart."""
        return self.choice, self.extent, tuple(sorted(self.options.items()))


def finalists(
    analysis: Analysis,
    decisions: Sequence[Decision],
    environment: Parts,
    shortened: Shortened | None = None,
) -> list[Finalist]:
    """Decisions as programs that take part in a race: whole, or shortened."""
    return [
        Finalist(
            name=entry.name,
            job=whole_job(
                analysis.frame,
                analysis.segments,
                entry.choice,
                environment,
                entry.name,
                entry.extent,
                entry.options,
                shortened and shortened.abridged,
            ),
            predicted_ms=entry.predicted_ms,
            whole=shortened.whole(entry.choice) if shortened else Whole(),
        )
        for entry in decisions
    ]


def race_row(result: RaceResult) -> RaceRow:
    """How a finalist did, as a plan keeps it."""
    record = result.record
    note = "" if record.ok else f"{record.status}: {record.reason}"
    if record.ok and not result.fits:
        note = "over the memory budget"
    return RaceRow(
        name=result.name,
        predicted_ms=result.predicted_ms,
        samples_ms=result.samples_ms,
        time_ms=median(result.samples_ms) if record.ok else None,
        peak_bytes=result.peak_bytes,
        note=note,
    )


def left_out(name: str, predicted_ms: float | None, why: str) -> RaceRow:
    """A classic that was not raced, as a plan keeps it."""
    return RaceRow(
        name=name,
        predicted_ms=predicted_ms,
        samples_ms=(),
        time_ms=None,
        peak_bytes=0,
        note=why,
    )


def compose_plan(
    analysis: Analysis,
    mesh: Mesh,
    environment: Mapping[str, str],
    winner: Decision,
    decision: Decision,
    race: Sequence[RaceRow],
    won: RaceResult | None = None,
) -> Plan:
    """The plan of what won.

    Args:
        analysis: of the program.
        mesh: the devices.
        environment: what the measurements depend on.
        winner: what is to be run.
        decision: what the search found.
        race: who took part, and how they did.
        won: how the winner did, if it was raced.
    """
    frame = analysis.frame
    program = frame.program
    layout = lay_out(frame, winner.choice)
    timed = won is not None and won.record.ok
    return Plan(
        fingerprint=program.fingerprint,
        mesh_axes=frame.mesh,
        arg_names=program.arg_names,
        arg_types=tuple(type_text(aval(program, v)) for v in program.args),
        arg_specs=tuple(layout.arg_spec(i) for i in range(len(program.args))),
        output_specs=layout.output_specs(),
        constraints=told_of(frame, analysis.segments, winner.choice, winner.extent),
        donated=tuple(a is not None for a in program.alias),
        winner=winner.name,
        predicted_ms=winner.predicted_ms,
        measured_ms=won.time_ms if won is not None and timed else None,
        peak_bytes=won.peak_bytes if won is not None else None,
        options=dict(winner.options),
        rows=plan_rows(analysis, winner.choice, decision.problem),
        race=tuple(race),
        environment=environment,
        search=dict(winner.search),
        mesh=mesh,
    )


def device_memory(mesh: Mesh) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    if mesh.devices.flat[0].platform == "cpu":
        return None
    # A process may only ask its own; what follows must be the same in all.
    stats = mesh.local_devices[0].memory_stats() or {}
    return Agreement.of(mesh).least(int(stats.get("bytes_limit", 0))) or None


def room_within(
    asked_bytes: int | None, device_bytes: int | None, platform: str
) -> Room | None:
    """What there is in a budget that was asked for."""
    if asked_bytes is None:
        return None
    reserve = _UNSPLIT_BYTES if platform in GPU_PLATFORMS else 0
    return Room(
        budget_bytes=asked_bytes - reserve,
        device_bytes=device_bytes,
        platform=platform,
        reserve_bytes=reserve,
    )
