"""Predicts a step's time on N devices when at most one of them is here.

1. The program is compiled for all N devices: its memory and its schedule are theirs.
   If one device is here, it also runs the computation of one of the N, as a program of
   its own with local ops in place of collectives (:mod:`cfp.program.local`), on real
   numbers: a GPU at its power limit computes others faster. Results that are not
   finite, and a GPU that runs at an idle one's clock, are refused
   (:mod:`cfp.profiling.meter`). The time is stored under a digest of the compiled text
   without what differs between devices (:func:`computation_of`), so that programs
   which compute the same on one of them share it. Without a device the computation is
   estimated from rates.
2. Kernels that this program has and the partitioned one has not, such as copies in
   place of gathers, are taken off, and those that it lacks are added, such as copies
   that bring a dim to the front, where a collective needs it: by what the two texts
   move, at the rate of the memory (:func:`partitioned_compute_ms`).
3. Collectives are added by their curves: hidden behind the computation that the
   program's schedule puts between their start and their end, each slowing down the
   other, and exposed where there is none (:func:`step_time`). A GPU that waits takes
   less power, and its clock rises until the step takes all that it may again.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from jax.sharding import Mesh

from cfp.cost.schedule import Computed, Schedule, Sent, schedule_of
from cfp.profiling.builder import Built, Job
from cfp.profiling.compiler_options import without_collectives
from cfp.profiling.hlo_text import modules_in, split_at_commas
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.meter import limits_of
from cfp.profiling.rates import Rates
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import run_local, timing_on
from cfp.profiling.store import ProfileStore
from cfp.program.graph import Program
from cfp.settings import RUNS_PLAYED

# Names, in keys, records of what ran by itself.
COMPUTATION_ALONE = "computation alone, one sample of each run, what it moves"
_KERNEL_MS = 0.002  # From one kernel to the next, about.
_HALVINGS = 20  # Of a range of clocks.
# Of the power that a GPU may take: computations on H200s took 0.93 to 0.99 of it.
_AT_ITS_LIMIT = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Ratios of times, of 14 programs on 2 H200, in two runs with NVLink, one without.

    ``docs/results/played_h200x2_202611.md`` and ``played_links_h200x2_202611.md`` have
    the steps; ``python -m cfp_test.bench.played_page`` finds the numbers. Steps of four
    H200 (``played_four_h200x4_202611.md``) had no part in them.

    Attributes:
        sustained: the rate of products inside a long step, of that of a short probe.
        slowed_by: what a step loses to a collective that is wholly hidden, of the
            collective's time, in which its kernels take multiprocessors and power.
        slowed_by_all_reduce: the same where it is an all-reduce.
        waiting: the power of a GPU that waits for a collective, of what it may take:
            steps that wait for 65 % of their time took 418 to 440 W of 700
            (``docs/results/played_links_h200x2_202611.md``).
    """

    sustained: float = 0.981
    slowed_by: float = 0.7
    slowed_by_all_reduce: float = 0.5
    waiting: float = 0.3

    def cost_of(self, kind: str) -> float:
        """Returns what a step loses to a hidden collective, of its time."""
        is_sum = kind == "all-reduce"
        return self.slowed_by_all_reduce if is_sum else self.slowed_by


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step, in milliseconds.

    Attributes:
        computation_ms: what computing alone takes.
        exposed_ms: while something is sent and nothing computed.
        hidden_ms: of sending, beside computation.
        slowed_ms: what the computation loses to what is sent beside it.
    """

    total_ms: float
    computation_ms: float
    exposed_ms: float
    hidden_ms: float
    slowed_ms: float


def step_time(
    schedule: Schedule,
    rates: Rates,
    *,
    computation_ms: float | None = None,
    highest_clock: float = 1.0,
    constants: Constants | None = None,
) -> StepTime:
    """Predicts what a step takes on all devices of a mesh.

    Args:
        computation_ms: what computing takes on one of the devices, or None to take
            it from the rates.
        highest_clock: of the device, by the clock at which it computed; 1 where
            neither is known.
    """
    constants = constants or Constants()
    parts_ms = _estimated(schedule, rates, constants)
    if computation_ms is not None:
        parts_ms = parts_ms if any(parts_ms) else [1.0]
        total = sum(parts_ms)
        parts_ms = [ms / total * computation_ms for ms in parts_ms]
    found = _together(schedule, rates, parts_ms, constants)
    clock = _raised_clock(
        found.computation_ms, found.exposed_ms, highest_clock, constants.waiting
    )
    if clock == 1.0:
        return found
    return _together(schedule, rates, [ms / clock for ms in parts_ms], constants)


def _headroom(record: ProfileRecord, most_mhz: float, most_watts: float) -> float:
    """The highest clock, by the one that a computation ran at for want of power.

    One that took less than the device may take ran at a lower clock for another reason,
    such as a locked clock or heat, and has none.
    """
    is_limited = record.power_watts >= _AT_ITS_LIMIT * most_watts > 0
    if not is_limited or not record.clock_mhz:
        return 1.0
    return max(1.0, most_mhz / record.clock_mhz)


def _raised_clock(
    computing_ms: float, waiting_ms: float, highest: float, waiting_power: float
) -> float:
    """The clock of a step, by the one at which computing takes all the power there is.

    What an operation takes grows with the square of the voltage, and that with the
    clock. The driver holds the power of whole steps to its limit.
    """

    def is_allowed(clock: float) -> bool:
        taken = computing_ms * clock**2 + waiting_ms * waiting_power
        return taken <= computing_ms / clock + waiting_ms

    low, high = 1.0, max(1.0, highest)
    if is_allowed(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return low


def _together(
    schedule: Schedule, rates: Rates, parts_ms: Sequence[float], constants: Constants
) -> StepTime:
    """Adds what collectives take to the parts of a computation, milliseconds each."""
    left = [one.times * _price(one, rates) for one in schedule.sent]
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, one in enumerate(schedule.sent):
        starts.setdefault(one.start, []).append(number)
        ends.setdefault(one.done, []).append(number)
    running: list[int] = []  # One after another, in the order of their starts.
    exposed = hidden = slowed = 0.0
    for place in range(len(parts_ms) + 1):
        running += starts.get(place, [])
        for number in ends.get(place, []):
            while number in running:
                exposed += left[running.pop(0)]
        work = parts_ms[place] if place < len(parts_ms) else 0.0
        while running and work > 0:
            # Both at the same part of their speed, so each does as much as the other.
            first = running[0]
            both = min(work, left[first])
            work -= both
            hidden += both
            slowed += both * constants.cost_of(schedule.sent[first].kind)
            left[first] -= both
            if left[first] <= 0:
                running.pop(0)
    exposed += sum(left[number] for number in running)
    computation = sum(parts_ms)
    return StepTime(
        total_ms=computation + slowed + exposed,
        computation_ms=computation,
        exposed_ms=exposed,
        hidden_ms=hidden,
        slowed_ms=slowed,
    )


def _estimated(schedule: Schedule, rates: Rates, constants: Constants) -> list[float]:
    """Milliseconds of each part of the computation, by rates alone."""
    rate = rates.matmul_flops_per_ms["bfloat16"] * constants.sustained
    products = [one.flops / rate for one in schedule.computed]
    others = [
        rates.memory_ms(one.moved_bytes) + _KERNEL_MS * one.kernels
        for one in schedule.computed
    ]
    return [a + b for a, b in zip(products, others, strict=True)]


def partitioned_compute_ms(
    schedule: Schedule, ran: Computed, rates: Rates, local_ms: float
) -> float:
    """Compute time of the partitioned program, from that of its one-device version.

    Both multiply the same matrices. The one-device version has copies in place of
    gathers and slices in place of scatters, and lacks what a collective makes
    necessary: copies that bring a dim to the front of the memory, and what is not fused
    across it.

    Args:
        ran: all kernels of its one-device version (`cfp.program.local`).
        local_ms: what that took, as it was measured.
    """
    own = schedule.computation
    more = rates.memory_ms(ran.moved_bytes - own.moved_bytes)
    more += _KERNEL_MS * (ran.kernels - own.kernels)
    return max(0.0, local_ms - more)


def _price(one: Sent, rates: Rates) -> float:
    axes = _axes(one, rates)
    # Curves know whole tensors of a group; of an all-to-all a device has one piece.
    pieces = one.group_size if one.kind not in _WHOLE else 1
    size = one.bytes * pieces
    curve = rates.collective_ms(one.kind, axes, size)
    if one.kind == "all-reduce":
        # As any program could say it, should the library's own way be slower.
        halves = ("reduce-scatter", "all-gather")
        curve = min(curve, sum(rates.collective_ms(k, axes, size) for k in halves))
    return curve


_WHOLE = frozenset(
    ("all-reduce", "all-gather", "reduce-scatter", "collective-broadcast")
)


def _axes(one: Sent, rates: Rates) -> tuple[str, ...]:
    """Axes whose sizes multiply to the group's, the last ones that do."""
    found: list[tuple[tuple[str, ...], int]] = [((), 1)]
    for name, size in reversed(rates.mesh):
        found += [((name, *names), size * count) for names, count in found]
    for names, count in found:
        if count == one.group_size:
            return names
    return tuple(name for name, _ in rates.mesh)


# One run, whose median counts: as long as in the runs that `Constants` are fitted on,
# less what repeats.
_LIMITS = {
    "warmup_seconds": 0.4,
    "min_samples": 3,
    "max_samples": 6,
    "budget_seconds": 1.2,
}
# What says how many devices there are, or where one stands among them, or where a line
# of the source is. No time of a computation depends on it.
_APART = frozenset(
    "backend_config channel_id control-predecessors frontend_attributes metadata"
    " replica_groups sharding source_target_pairs use_global_device_ids".split()
)
_NAME = re.compile(r"%([\w.-]+)")
# Of a measurement's place: how many devices are played, and which they are.
_PLAYED = frozenset({"devices", "order", "processes", "mocked"})


def computation_of(hlo_text: str) -> str:
    """A digest of what one device computes, however many others there are."""
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    found = hashlib.sha256()
    for module in modules_in(hlo_text):
        for name, lines in module.computations.items():
            found.update(f"{number(name)} {name == module.entry}\n".encode())
            for one in lines:
                attributes = [
                    _NAME.sub(lambda m: str(number(m[1])), text)
                    for text in parts_of(one.attributes)
                    if text.partition("=")[0] not in _APART
                ]
                # Tables with a place for each device, and other numbers.
                shape = "" if one.opcode == "constant" else one.shape
                config = one.config if one.opcode == "custom-call" else ""
                ids = [number(name) for name in (one.name, *one.operands)]
                line = (shape, one.opcode, ids, attributes, one.root, one.trips, config)
                found.update(repr(line).encode())
    return found.hexdigest()


def parts_of(attributes: str) -> list[str]:
    """The attributes of an instruction, ``name=value``, one by one."""
    return split_at_commas(attributes.removeprefix(")"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A program's whole step, as it was predicted.

    Attributes:
        record: its samples are predictions.
        local_ms: measured times of its one-device version, as they were taken, from
            which `partitioned_compute_ms` follows; empty if that did not run.
        schedule: what it computes and sends, in order.
    """

    label: str
    record: ProfileRecord
    local_ms: tuple[float, ...] = ()
    schedule: Schedule | None = field(default=None, repr=False)


@dataclass(slots=True, kw_only=True)
class _Computation:
    """One device's computation, which programs with other collectives share.

    Attributes:
        key: where its times are kept, one for each run.
    """

    key: ProfileKey
    built: Built
    job: Job
    program: Program
    mesh: Mesh
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPredictor:
    """Times programs for devices that are not all here; a `MeasureOptions.run`.

    In each turn of a race a computation runs once more, so that a drift of the clock
    meets all alike, and gives one sample: within a run samples differ by 3 %, as the
    clock sinks, and medians of three runs in turn are 0.2 % off on average
    (`cfp.settings.RUNS_PLAYED`).

    Attributes:
        here: what these depend on; None where nothing runs, and the computation's
            time follows from the rates, too.
        compiler_options: that programs for such devices need.
        timed: computations that were timed just now.
        turns: how often each was asked for, by key.
        computations: by the program, whatever joins or moves its collectives.
    """

    rates: Rates
    store: ProfileStore
    here: Parts | None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    constants: Constants = field(default_factory=Constants)
    known: dict[str, Predicted] = field(default_factory=dict, repr=False)
    timed: list[str] = field(default_factory=list, repr=False)
    turns: Counter[str] = field(default_factory=Counter, repr=False)
    computations: dict[Parts, _Computation] = field(default_factory=dict, repr=False)

    def __call__(
        self, built: Built, job: Job, program: Program, mesh: Mesh, **options: object
    ) -> ProfileRecord:
        """The record of a whole step, with the prediction of one turn."""
        key = built.key.digest
        turn = self.turns[key]
        self.turns[key] += 1
        found = self.known.get(key)
        if found is None or self.here is not None:
            found = self._predicted(built, job, program, mesh, turn)
            self.known[key] = found
        samples_ms = found.record.samples_ms
        if not samples_ms:
            return found.record
        return replace(found.record, samples_ms=(samples_ms[turn % len(samples_ms)],))

    def _predicted(
        self, built: Built, job: Job, program: Program, mesh: Mesh, turn: int
    ) -> Predicted:
        text = built.compiled.as_text() or ""
        known = self.known.get(built.key.digest)
        schedule = (known and known.schedule) or schedule_of(text).merged()
        if self.here is None:
            step = step_time(schedule, self.rates, constants=self.constants)
            record = built.record("ok", samples_ms=[step.total_ms])
            return Predicted(label=job.label, record=record, schedule=schedule)
        one = self.computations.get(_without_collectives(job)) or _Computation(
            key=self._key(job, text),
            built=built,
            job=job,
            program=program,
            mesh=mesh,
            schedule=schedule,
        )
        found = self._alone(one, turn)
        if not found.ok:
            # By itself the computation may need more memory, and not the program.
            is_large = found.status == "out_of_memory"
            status = "refused" if is_large else found.status
            failed = built.record(status, reason=found.reason)
            return Predicted(label=job.label, record=failed)
        self.computations[_without_collectives(job)] = one
        # Joined collectives may copy what they send, and fuse less.
        own, its = (
            sum(_estimated(each, self.rates, self.constants))
            for each in (schedule, one.schedule)
        )
        ran = Computed(flops=0, moved_bytes=found.moved_bytes, kernels=found.kernels)
        samples_ms = [
            step_time(
                schedule,
                self.rates,
                computation_ms=partitioned_compute_ms(one.schedule, ran, self.rates, ms)
                * (own / its if its else 1.0),
                highest_clock=_headroom(found, *limits_of(mesh.local_devices[0])),
                constants=self.constants,
            ).total_ms
            for ms in found.samples_ms
        ]
        record = built.record(
            "ok", samples_ms=samples_ms, run_seconds=found.run_seconds
        )
        return Predicted(
            label=job.label,
            record=record,
            local_ms=found.samples_ms,
            schedule=schedule,
        )

    def _alone(self, one: _Computation, turn: int) -> ProfileRecord:
        """The times of a computation by itself, which runs once a turn if it can."""
        kept = self.store.get(one.key.digest)
        is_here = isinstance(one.built.local, Built)
        if kept is not None and kept.ok:
            if not is_here or len(kept.samples_ms) > min(turn, RUNS_PLAYED - 1):
                return kept
        else:
            kept = None
        if is_here:
            self.timed.append(one.key.digest)
        built = replace(one.built, key=one.key)
        timing = timing_on(one.mesh, **_LIMITS)
        found = run_local(built, one.job, one.program, one.mesh, timing=timing)
        if found.ok:
            before = kept.samples_ms if kept else ()
            samples_ms = (*before, median(found.samples_ms))
            found = replace(found, samples_ms=samples_ms, **_moved(kept, built))
        elif kept is not None:
            return kept
        if is_here:
            self.store.put(found, replace=True)
        return found

    def keep_only(self, jobs: Sequence[Job]) -> None:
        """Lets go of what was compiled of all other jobs."""
        kept = {_without_collectives(job) for job in jobs}
        for other in self.computations.keys() - kept:
            del self.computations[other]

    def wants_local(self, job: Job, text: str) -> bool:
        """Returns True if the computation of a program may have to run."""
        if _without_collectives(job) in self.computations:
            return False
        kept = self.store.get(self._key(job, text).digest)
        return kept is None or not kept.ok or len(kept.samples_ms) < RUNS_PLAYED

    def _key(self, job: Job, text: str) -> ProfileKey:
        assert self.here is not None
        return ProfileKey(
            (
                ("what", COMPUTATION_ALONE),
                ("computation", computation_of(text)),
                ("donated", repr(job.donated)),
                *(part for part in self.here if part[0] not in _PLAYED),
            )
        )


def _moved(kept: ProfileRecord | None, built: Built) -> dict[str, int]:
    """Reads what the kernels of a computation by itself move, and counts them."""
    if kept is not None:
        return {"moved_bytes": kept.moved_bytes, "kernels": kept.kernels}
    assert isinstance(built.local, Built), "it has just run"
    ran = schedule_of(built.local.compiled.as_text() or "").computation
    return {"moved_bytes": round(ran.moved_bytes), "kernels": ran.kernels}


def _without_collectives(job: Job) -> Parts:
    """Parts of a job's key that its computation depends on, and not its collectives."""
    kept = without_collectives(job.options)
    parts = (part for part in job.key.parts if part[0] not in ("race", "options"))
    return (*parts, ("options", repr(kept)))
