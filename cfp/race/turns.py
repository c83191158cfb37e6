"""Times programs in turn, A B C B C A: the fastest wins, of ties the simplest.

The winner's branches are timed separately, with each value of the arguments' flags.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import MappingProxyType

import numpy as np

from cfp.analysis.analyze import long_branches
from cfp.profiling.builder import Built, CompilePool, default_threads
from cfp.profiling.collectives import COMBINED_KINDS, Rates
from cfp.profiling.inputs import sources
from cfp.profiling.record import ProfileKey, ProfileRecord, utc_now
from cfp.profiling.runner import (
    ON_CPUS,
    TimingOptions,
    check_devices,
    compile_generators,
    run,
)
from cfp.profiling.tasks import InFlight
from cfp.program.graph import Program, numpy_dtype
from cfp.race.compile import (
    Builder,
    EarlierRace,
    build_each,
    keep,
    known_records,
    results_of,
)
from cfp.race.programs import (
    RaceProgram,
    RaceResult,
    fits,
    variants,
    with_options,
    without_first_options,
)
from cfp.search.guided import Candidate
from cfp.settings import (
    ALIKE,
    LONG_COLLECTIVES,
    STAY_AFTER_LOOK,
    STAY_AFTER_TURN,
    ConstraintLevel,
    PlatformDefaults,
    defaults_of,
)


def flag_values(
    program: Program, carried: Collection[int]
) -> Iterator[tuple[str, Program]]:
    """Yields a text such as ``refresh=False``, and the program with that flag's value.

    A flag is a scalar argument that gives a long branch's predicate or index, perhaps
    cast, or with others. Its values are the numbers of the first 8 branches.

    Args:
        carried: ids of donated arguments, excluded: each step would change their value.
    """
    given = [*program.given, *[b""] * (len(program.args) - len(program.given))]
    ways: dict[int, int] = {}
    for op in (one for one in long_branches(program) if one.results):
        for v in sources(program, op.operands[0]).difference(carried):
            if v in program.args and not program.shape(v):
                ways[v] = max(ways.get(v, 0), len(op.yields) // len(op.results))
    for v, count in sorted(ways.items()):
        place, dtype = program.args.index(v), numpy_dtype(program.values[v].dtype)
        for value in np.arange(min(count, 8)).astype(dtype):
            other = [*given[:place], value.tobytes(), *given[place + 1 :]]
            text = f"{program.arg_names[place]}={value}"
            yield text, replace(program, given=tuple(other))


def time_flags(builder: Builder, best: RaceResult) -> tuple[tuple[str, float], ...]:
    """Times a compiled program with each value of its flags.

    Returns:
        (``"flag=value"``, step time in ms) pairs, from the store or measured before the
        deadline. Values that could not be timed are absent; () without flags.
    """
    context, one, found = builder.context, best.program, list[tuple[str, float]]()
    built = builder.built.get(one.identity)
    carried = {one.job.part.inputs[place] for place in one.job.donated}
    for text, program in flag_values(builder.program, carried):
        key = ProfileKey((*one.job.key.parts, ("flag", text)))
        record = context.store.get(key.digest)
        if record is None and built is not None and not context.is_over:
            context.measure.tell(f"timing {best.name!r} with {text}")
            with builder.in_flight as at, at.doing(key, text, "run", best.time_ms):
                record = run(replace(built, key=key), one.job, program, context.devices)
            context.store.put(record)
        if record is not None and record.ok:
            found.append((text, record.time_ms))
    return tuple(found)


# Timing of one program in a turn. Turns are short, so that clock drift affects all
# programs alike. On devices, a short look before the turns finds slow programs.
_ON_CPUS = replace(
    ON_CPUS, warmup_seconds=0.15, min_samples=2, max_samples=4, budget_seconds=0.6
)
# Devices at their power limit slow down during work: on 2 H200 the same step took
# 141 ms after 0.4 s, 151 ms after 0.9 s and 146 ms in the long run. Only samples taken
# equally long after the start compare. So in a turn each program has one sample, of
# the same number of steps: as many as the fastest runs in `_TURN_MS_ELSEWHERE`.
_LOOK_ELSEWHERE = TimingOptions(
    warmup_seconds=0.0,
    min_samples=1,
    max_samples=1,
    budget_seconds=0.0,
    min_sample_ms=60.0,
    min_repeat=3,
)
_TURN_MS_ELSEWHERE = 500.0
# decisions.md, "A race begins when clocks are steady".
_WARM_UP_ELSEWHERE = replace(
    _LOOK_ELSEWHERE,
    warmup_seconds=3.0,
    budget_seconds=6.0,  # Half of it is the longest warm-up.
    min_sample_ms=150.0,
    min_repeat=1,
)


def race_programs(
    builder: Builder,
    programs: Sequence[RaceProgram],
    rounds: int = 3,
    looks: Mapping[str, ProfileRecord] = MappingProxyType({}),
    is_warm: bool = False,
) -> list[RaceResult]:
    """Compiles whole programs and times them in turn, A B C B C A.

    A program far behind after a turn is left out of later ones. Real devices are warmed
    up before the first turn. If their speed drifts, times of programs that were left
    out are scaled alike (`ProfileRecord.drift`), so that none wins by its absence.

    A race with the same programs, budget and turns comes from the store, since times
    compare only within one race. Programs over the budget do not run; nor do earlier
    failures, unless the builder's options retry them. Equal programs run once.

    Args:
        rounds: largest number of turns; fewer if the fastest is clear (`_is_told`).
        looks: ``{identity: recent record}`` of programs that need no look.
        is_warm: True if the devices have just run such programs.

    Returns:
        One result for each program, in order.
    """
    by_key = {one.job.key.digest: one for one in programs}
    context, budget_bytes = builder.context, builder.context.budget_bytes
    known = known_records(context, by_key)
    # Failures and programs over the budget.
    out = {d: r for d, r in known.items() if not (r.ok and fits(r, budget_bytes))}
    mine = EarlierRace(context, by_key, rounds)
    records = {**mine.records(), **out}
    cached = by_key.keys() if len(records) == len(by_key) else ()
    if not cached:
        again = {d: one for d, one in by_key.items() if d not in out}
        with builder.in_flight as in_flight:
            ready, failed = build_each(builder, [*again.values()], in_flight)
            every = again, ready, failed, [*ready]
            ran = _Turns(builder, in_flight, rounds, *every).run(looks, is_warm)
        keep(ran.values(), context.store)
        if not context.is_over:  # Otherwise turns may be missing.
            mine.keep(ran)
        records = {**out, **ran}
    return results_of(programs, records, budget_bytes, cached)


@dataclass(slots=True)
class _Turns:
    """Programs of a race, with the progress of their turns.

    Attributes:
        programs, ready: ``{key: program}`` of all; ``{key: Built}`` if they fit.
        records: ``{key: record}`` of a failure, a look (a short timing), or turns.
        order: keys of the programs in the next turn.
        in_turns: ``{key: record}`` of turns, without looks.
        fastest_ms: ``{key of a program left out: time of the fastest then}``.
    """

    builder: Builder
    in_flight: InFlight
    rounds: int
    programs: Mapping[str, RaceProgram]
    ready: Mapping[str, Built]
    records: dict[str, ProfileRecord]
    order: list[str]
    in_turns: dict[str, ProfileRecord] = field(default_factory=dict)
    fastest_ms: dict[str, float] = field(default_factory=dict)

    def run(
        self, looks: Mapping[str, ProfileRecord], is_warm: bool
    ) -> dict[str, ProfileRecord]:
        """Runs compiled programs in turn; returns the records of all, by key."""
        has_look = self.is_measured and self.rounds > 1
        with CompilePool(default_threads(self.builder.platform)) as pool:
            # Compiled while devices warm up; later they would cool down meanwhile.
            made = list[Future[None]]()
            for one in map(self.programs.__getitem__, self.ready):
                work = partial(compile_generators, *self.builder.where(one), one.job)
                made.append(pool.start(one.job.label, work))
            if not is_warm:
                self.warm_up()
            for one in made:
                one.result()
        for digest in self.order:
            one = self.programs[digest]
            if (found := looks.get(one.identity)) is not None:
                self.records[digest] = one.own(found)
        for number in range(self.rounds):
            if has_look and number == 0:
                self.look()
                if self.is_over():
                    break
                self.leave_out(STAY_AFTER_LOOK)
            self.turn(number, is_first=number == 0 and not has_look)
            if number + 1 == self.rounds or self.is_over() or self.is_told():
                break
            self.leave_out(STAY_AFTER_TURN if number or has_look else STAY_AFTER_LOOK)
        self.note_drift()
        ended = utc_now()
        return {
            d: replace(self.programs[d].own(record), created=ended)
            for d, record in self.records.items()
        }

    @property
    def is_measured(self) -> bool:
        """True except on CPUs, which are timed without looks and warm-up."""
        return not defaults_of(self.builder.platform).estimates

    def is_over(self) -> bool:
        """True if no program is left to time, or after the deadline."""
        return not self.order or self.builder.context.is_over

    def is_told(self) -> bool:
        """True if `_is_told`; on CPUs instead, if only one program is left."""
        if self.is_measured:
            return _is_told([self.records[d].samples_ms for d in self.order])
        return len(self.order) == 1

    def warm_up(self) -> None:
        """Runs the first program for about 3 s on real devices; drops it on failure."""
        if not self.is_measured or self.is_over():
            return
        digest = self.order[0]
        warm = self._run(digest, _WARM_UP_ELSEWHERE, "warming up the devices")
        if not warm.ok:
            self.records[digest] = warm
            del self.order[0]

    def look(self) -> None:
        """Times each program shortly (a look) unless it has a record."""
        timing = _timing(self.builder.platform, None)
        for place in range(len(self.order)):
            digest = self.order[place - 1]
            if digest in self.records:
                continue
            which = f"{place + 1} of {len(self.order)}, a look"
            self.records[digest] = self._time(digest, timing, which)
        self._drop_failures()

    def turn(self, number: int, *, is_first: bool) -> None:
        """Times each program once, with equally many steps.

        Steps may differ on CPUs, and if `is_first`: no program has a time yet.
        """
        known = [self.records[d].time_ms for d in self.order if not is_first]
        timing = _timing(self.builder.platform, min(known, default=None))
        doing = f"turn {number + 1} of {self.rounds}"
        for place in range(len(self.order)):
            count = len(self.order)
            digest = self.order[(place + number) % count]
            which = f"{place + 1} of {count}, " if count > 1 else ""
            found = self._time(digest, timing, which + doing)
            self.records[digest] = _join(self.in_turns.get(digest), found)
            self.in_turns[digest] = self.records[digest]
        self._drop_failures()

    def leave_out(self, stay: float) -> None:
        """Drops programs slower than `stay` times the fastest from further turns."""
        best_ms = min(map(self._time_ms, self.order))
        far = [d for d in self.order if self._time_ms(d) > stay * best_ms]
        self.fastest_ms |= dict.fromkeys(far, best_ms)
        self.order = [d for d in self.order if d not in self.fastest_ms]

    def note_drift(self) -> None:
        """Sets `drift` of programs left out: the fastest time now / the fastest then.

        So no program wins because it was timed earlier, or only by a short look.
        """
        for digest, before_ms in self.fastest_ms.items() if self.order else ():
            drift = min(map(self._time_ms, self.order)) / before_ms
            self.records[digest] = replace(self.records[digest], drift=drift)

    def _drop_failures(self) -> None:
        self.order = [d for d in self.order if self.records[d].ok]

    def _time_ms(self, digest: str) -> float:
        return self.records[digest].time_ms

    def _time(self, digest: str, timing: TimingOptions, doing: str) -> ProfileRecord:
        """Times a program and reports it; `doing` names the look or turn."""
        label = self.programs[digest].job.label
        return self._run(digest, timing, f"timing {label!r}, {doing}")

    def _run(self, digest: str, timing: TimingOptions, text: str) -> ProfileRecord:
        one, context = self.programs[digest], self.builder.context
        context.measure.tell(text)
        where = self.builder.where(one)
        expected_ms = one.candidate.predicted_ms or 0.0
        with self.in_flight.doing(one.job.key, one.job.label, "run", expected_ms):
            record = run(self.ready[digest], one.job, *where, timing=timing)
        if record.status == "crashed":
            keep([record], context.store)
            check_devices(where[1], record)
        return record


def _timing(platform: str, fastest_ms: float | None) -> TimingOptions:
    """Returns a turn's timing, a look's without `fastest_ms`; on CPUs one for both."""
    if platform == "cpu":
        return _ON_CPUS
    if fastest_ms is None:
        return _LOOK_ELSEWHERE
    steps = math.ceil(_TURN_MS_ELSEWHERE / max(fastest_ms, 1e-3))
    how = replace(_LOOK_ELSEWHERE, min_sample_ms=0.0, min_repeat=steps)
    return replace(how, long_sample_ms=math.inf)


def _join(before: ProfileRecord | None, found: ProfileRecord) -> ProfileRecord:
    if before is None or not (before.ok and found.ok):
        return found
    return replace(
        found,
        samples_ms=before.samples_ms + found.samples_ms,
        run_seconds=before.run_seconds + found.run_seconds,
    )


def second_race(
    raced: Sequence[RaceResult], rules: PlatformDefaults, rates: Rates | None = None
) -> tuple[list[Candidate], list[Candidate]]:
    """Selects candidates of a second race from results of the first.

    If `rates` are given, the platform's options race only if the leader's collectives
    are long. Then other choices race with them, too: options may change their order.

    Returns:
        The leader, others at most 4 % slower, and the fastest preset; and variants that
        did not race. Both empty if no candidate ran and fits.
    """
    ran = sorted((one for one in raced if one.ran), key=lambda one: one.time_ms)
    if not ran:
        return [], []
    leader, others = ran[0], dict[object, Candidate]()
    # A user's own options race in any case, with the leader.
    if rules.first_options and rates:
        if _collectives_ms(leader, rates) < LONG_COLLECTIVES * leader.time_ms:
            rules = replace(rules, compiler_options={}, first_options={})
        for one in ran:
            others.setdefault(one.candidate.choice, one.candidate)
        del others[leader.candidate.choice]
    options, first = rules.compiler_options, rules.first_options
    more = {name: chosen for name, chosen in options.items() if name not in first}
    found = variants(leader.candidate, rules)
    for other in others.values():
        found += with_options(without_first_options(other, rules), more)
    # A remembered candidate may be one of the variants.
    keys = {one.candidate.key for one in raced}
    names = {one.name for one in raced}
    new = [one for one in found if one.key not in keys and one.name not in names]
    near = [one for one in ran if one.time_ms <= STAY_AFTER_LOOK * leader.time_ms]
    best = [one for one in ran if one.candidate.is_preset][:1]
    return [*{one.name: one.candidate for one in (*near, *best)}.values()], new


def _collectives_ms(result: RaceResult, rates: Rates) -> float:
    """Ms of a program's collectives one after another, each as if over all axes."""
    axes, total_ms = tuple(name for name, _ in rates.mesh), 0.0
    for one in result.collectives:
        # Sizes of others are of all devices together.
        ways = 1 if one.kind in COMBINED_KINDS else one.group_size
        total_ms += one.count * rates.collective_ms(one.kind, axes, one.bytes * ways)
    return total_ms


# ------------------------------------------------------------------------------ ties


def _is_told(samples: Sequence[Sequence[float]]) -> bool:
    """True if after 2+ turns each program ties with the fastest or lost each turn."""
    turns = {len(one) for one in samples}
    if len(turns) != 1 or min(turns) < 2:
        return False
    fastest = min(samples, key=median)
    return all(
        median(one) <= (1.0 + ALIKE) * median(fastest)
        or all(other > best for other, best in zip(one, fastest, strict=True))
        for one in samples
    )


@dataclass(frozen=True, slots=True)
class Ranking:
    """Results of one or two races; times of different races do not compare.

    Attributes:
        leaders: results of the second race; empty without one. The winner is one of
            these, if any ran.
        others: results of the first race, without programs that raced again.
    """

    leaders: Sequence[RaceResult]
    others: Sequence[RaceResult]

    @property
    def results(self) -> list[RaceResult]:
        """All results, the leaders first."""
        if not self.leaders:
            return [*self.others]
        return [*self.leaders, *sorted(self.others, key=lambda one: one.time_ms)]

    @property
    def ties(self) -> list[RaceResult]:
        """The fastest result, and results within 1 % if both have 2+ samples.

        Of the leaders only, if any ran. Programs over the budget do not count.
        """
        ran = [o for o in self.leaders if o.ran] or [o for o in self.others if o.ran]
        if not ran:
            return []
        fastest = min(ran, key=lambda one: one.time_ms)

        def ties(one: RaceResult) -> bool:
            few = min(len(one.samples_ms), len(fastest.samples_ms)) < 2
            alike = one.time_ms <= (1.0 + ALIKE) * fastest.time_ms
            return one is fastest or (alike and not few)

        return [*filter(ties, ran)]

    @property
    def best(self) -> RaceResult | None:
        """The simplest of the ties; None if no program ran.

        Presets come first, then fewer constraints, fewer compiler options, less time.
        """

        def complexity(one: RaceResult) -> tuple[bool, int, int, float]:
            candidate = one.candidate
            constrained = [*ConstraintLevel][::-1].index(candidate.level)
            options = len(candidate.options)
            return not candidate.is_preset, constrained, options, one.time_ms

        return min(self.ties, key=complexity, default=None)
