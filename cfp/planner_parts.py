"""What the planner is told, and what its passes hand on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.describe import plan_rows, uneven_arguments, whole_ops
from cfp.devices.described import DescribedMesh
from cfp.plan import Plan
from cfp.plan_parts import RaceRow, type_text
from cfp.profiling.builder import BuildEnvironment, Built
from cfp.profiling.collectives import Rates
from cfp.profiling.key import GPU_PLATFORMS, Parts
from cfp.profiling.moves import Move
from cfp.profiling.processes import Agreement
from cfp.profiling.runner import Progress
from cfp.profiling.store import ProfileStore
from cfp.program.graft import aval
from cfp.raced import Raced
from cfp.search.effort import Effort, Explored
from cfp.search.explain import picks_of
from cfp.search.finalist import Finalist, RaceResult, Whole
from cfp.search.measure import Told, told_of, whole_job
from cfp.search.problem import Problem
from cfp.search.shortened import Shortened
from cfp.search.squeeze import Room
from cfp.settings import PlannerSettings

TOO_FAR = "predicted too far behind to be raced"
UNMEASURED = "estimated too far behind to be measured"
TOO_LARGE = "predicted not to fit in memory"
_NOT_RUN = "estimated; nothing was compiled or run"
# XLA's allocator does not split a free block of which less than this would stay free,
# and counts the whole block as used: what is measured is up to this much more than what
# a program's largest allocation, that of all its temporaries, needs.
_UNSPLIT_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Ground:
    """What all passes of one program on some devices have in common.

    Attributes:
        analysis: of the program.
        mesh: the devices, which may only be described.
        store: where measurements are kept.
        settings: how much to measure.
        room: what there is in a budget that was asked for; None if none was.
        device_bytes: memory of a device, or None where it does not say.
        environment: what measurements depend on.
        end: when planning is to end, as `time.monotonic` counts.
    """

    analysis: Analysis
    mesh: Mesh | DescribedMesh
    store: ProfileStore
    settings: PlannerSettings
    room: Room | None
    device_bytes: int | None
    environment: Parts
    end: float = math.inf

    @property
    def described(self) -> DescribedMesh | None:
        """The mesh, if its devices are not there."""
        return self.mesh if isinstance(self.mesh, DescribedMesh) else None

    @property
    def devices(self) -> Mesh:
        """The mesh, whose devices are there."""
        assert not isinstance(self.mesh, DescribedMesh), (
            "it is described, and not there"
        )
        return self.mesh

    @property
    def platform(self) -> str:
        """Of the devices."""
        if self.described is not None:
            return self.described.environment["platform"]
        return self.devices.devices.flat[0].platform

    @property
    def estimates(self) -> bool:
        """Whether choices are made by estimates, and none is measured but in a race."""
        if self.described is not None:
            return True
        return self.settings.measure is None and self.platform == "cpu"

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
                shortened and shortened.programs[entry.choice],
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


def not_run(*entries: Sequence[Decision]) -> list[RaceRow]:
    """Choices for devices that are not there, as a plan keeps them."""
    every = [e for some in entries for e in some if e.extent is Told.EVERYTHING]
    return [left_out(e.name, e.predicted_ms, _NOT_RUN) for e in every]


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
    mesh: Mesh | DescribedMesh,
    environment: Mapping[str, str],
    winner: Decision,
    decision: Decision,
    race: Sequence[RaceRow],
    won: RaceResult | None = None,
    built: Built | None = None,
    tuned: BuildEnvironment | None = None,
) -> Plan:
    """The plan of what won.

    Args:
        analysis: of the program.
        mesh: the devices, which may only be described.
        environment: what the measurements depend on.
        winner: what is to be run.
        decision: what the search found.
        race: who took part, and how they did.
        won: how the winner did, if it was raced.
        built: its whole program, if the race has compiled it.
        tuned: where what was tuned is kept.
    """
    frame = analysis.frame
    program = frame.program
    layout = lay_out(frame, winner.choice)
    timed = won is not None and won.record.ok
    search = dict(winner.search)
    if program.erased_constraints:
        search["constraints_left_out"] = program.erased_constraints
    estimated = "strategies_estimated" in search
    raced = None
    if built is not None and isinstance(mesh, Mesh):
        [finalist] = finalists(analysis, [winner], ())
        raced = Raced.of(program, mesh, finalist.job, built)
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
        uneven=uneven_arguments(layout),
        whole=whole_ops(layout),
        race=tuple(race),
        environment=environment,
        search=search,
        rung="measured" if timed or not estimated else "estimated",
        predicted_bytes=_predicted_bytes(analysis, decision.problem, winner.choice),
        mesh=mesh if isinstance(mesh, Mesh) else None,
        raced=raced,
        tuned=tuned,
    )


def _predicted_bytes(
    analysis: Analysis, problem: Problem | None, choice: Choice
) -> int | None:
    picks = None if problem is None else picks_of(analysis, problem, choice)
    return None if problem is None or picks is None else problem.memory_bytes(picks)


def device_memory(mesh: Mesh | DescribedMesh) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    if isinstance(mesh, DescribedMesh):
        return mesh.memory_bytes
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
