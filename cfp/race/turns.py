"""Programs timed in turn, A B C A B C: the fastest wins, the simplest of ties."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cfp.profiling.builder import Built
from cfp.profiling.in_flight import InFlightLog
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord, utc_now
from cfp.profiling.runner import StopOnDeviceLoss, TimingOptions, run
from cfp.race.candidates import at_levels, with_options
from cfp.race.compile import (
    Builder,
    build_each,
    fits,
    keep,
    known_records,
    results_of,
)
from cfp.race.programs import RaceProgram, RaceResult, time_ms
from cfp.race.remembered import keep_race, of_one_race
from cfp.settings import (
    ALIKE,
    STAY_AFTER_LOOK,
    STAY_AFTER_TURN,
    ConstraintLevel,
    defaults_of,
)
from cfp.solution import Candidate

# What one program gets in a turn. Turns are short, so that a drift of the clocks meets
# all alike. Devices give each program a look before, which tells what is far behind.
_ON_CPUS = TimingOptions(
    warmup_seconds=0.15, min_samples=2, max_samples=4, budget_seconds=0.6
)
# Devices at their power limit slow down as they work: on 2 H200 the same step took
# 141 ms after 0.4 s, 151 ms after 0.9 s and 146 ms in the long run. Only samples that
# are taken as long after the start can be compared: in a turn each program gives one
# sample, of the same number of executions, so long for the fastest.
_LOOK_ELSEWHERE = TimingOptions(
    warmup_seconds=0.0,
    min_samples=1,
    max_samples=1,
    budget_seconds=0.0,
    min_sample_ms=60.0,
    min_repeat=3,
)
_TURN_MS_ELSEWHERE = 500.0
# Devices that rested while programs were compiled run by other clocks for seconds: two
# first turns of five programs had those without latency hiding first, and none of six
# turns after 3 s of work. decisions.md, "A race begins when clocks are steady".
_WARM_UP_ELSEWHERE = TimingOptions(
    warmup_seconds=3.0,
    warmup_window=1,
    min_samples=1,
    max_samples=1,
    budget_seconds=6.0,  # Half of it is the longest warm-up.
    min_sample_ms=150.0,
    min_repeat=1,
)
# Most races are told after so many turns.
_USUAL_TURNS = 2


def race_programs(
    builder: Builder, programs: Sequence[RaceProgram], rounds: int = 3
) -> list[RaceResult]:
    """Compiles programs whole and times them in turn, A B C A B C.

    What is far behind after a turn is left out of the next, so that turns go to those
    between which it is close. Devices whose times decide are warm before the first.
    Where they become slower meanwhile, times of what was left out are made as much
    longer: nothing wins by having been left out.
    Programs with one key run once. If all of them are in the store already, from one
    race, nothing runs; otherwise all run again, because only times of one run compare.
    A race that was run before with as many turns and the same budget is not run again,
    even if its programs ran in others since; what failed since is left out. What failed
    before is not tried again unless asked.

    Args:
        builder: what compiles them, and where they run.
        programs: what races.
        rounds: number of turns; fewer where measured times have told (`_is_told`): of
            predictions the least wins, and nothing is a tie.

    Returns:
        One result for each program, in their order.
    """
    jobs = {one.job.key.digest: one.job for one in programs}
    ratios = {one.job.key.digest: one.ratios.time for one in programs}
    store, budget_bytes = builder.store, builder.budget_bytes
    is_played = builder.options.run is not None
    known = known_records(builder, jobs)
    # What is known to be too large need not be compiled to find that out again.
    out = {d: r for d, r in known.items() if not (r.ok and fits(r, budget_bytes))}
    raced = {**of_one_race(jobs, budget_bytes, store), **out}

    def is_answer(found: Mapping[str, ProfileRecord]) -> bool:
        # Times of two races do not compare. All of one ended at one moment. What was
        # the fastest ran in every turn, which gives one sample, or on CPUs some.
        ran = [record for digest, record in found.items() if digest not in out]
        turns = max((len(record.samples_ms) for record in ran), default=rounds)
        last = [record for record in ran if len(record.samples_ms) == turns]
        last = [[ratios[one.key] * ms for ms in one.samples_ms] for one in last]
        is_one = len({record.created for record in ran}) <= 1
        is_told = rounds > 1 and not is_played and _is_told(last)
        enough = turns >= rounds or is_told
        return len(found) == len(jobs) and is_one and enough

    records = next(filter(is_answer, (raced, known)), None)
    cached = records is not None
    if records is None:
        again = [one for one in programs if one.job.key.digest not in out]
        with builder.in_flight as in_flight:
            with builder.options.outlook.at(builder.stages[0]):
                outcomes = build_each(builder, again, in_flight)
            ran = _run_in_turn(builder, again, outcomes, in_flight, rounds)
        keep(list(ran.values()), store)
        records = {**out, **ran}
    if records is not raced:
        ran = {digest: r for digest, r in records.items() if digest not in out}
        keep_race(jobs, budget_bytes, ran, store)
    return results_of(programs, records, budget_bytes, jobs if cached else ())


def _run_in_turn(
    builder: Builder,
    programs: Sequence[RaceProgram],
    outcomes: Mapping[str, Built | ProfileRecord],
    in_flight: InFlightLog,
    rounds: int,
) -> dict[str, ProfileRecord]:
    """Runs what was built of some programs in turn; records of all, by key."""
    by_key = {one.job.key.digest: one for one in programs}
    records = {d: one for d, one in outcomes.items() if isinstance(one, ProfileRecord)}
    ready = {d: one for d, one in outcomes.items() if isinstance(one, Built)}
    order = list(ready)
    platform = builder.mesh.devices.flat[0].platform
    agreement, defaults = Agreement.of(builder.mesh), defaults_of(platform)
    outlook = builder.options.outlook
    run_next = StopOnDeviceLoss(run, lambda crash: keep([crash], builder.store))

    def time_of(digest: str) -> float:
        return by_key[digest].ratios.time * records[digest].time_ms

    def samples_of(digest: str) -> list[float]:
        return [by_key[digest].ratios.time * ms for ms in records[digest].samples_ms]

    def timed(digest: str, timing: TimingOptions) -> ProfileRecord:
        one, run_one = by_key[digest], builder.options.run or run_next
        place = one.place or (builder.program, builder.mesh)
        expected_ms = one.candidate.predicted_ms or 0.0
        with in_flight.doing(one.job.key, one.job.label, "run", expected_ms):
            return run_one(ready[digest], one.job, *place, timing=timing)

    # What predicts steps warms up the device by itself, for each program; and of
    # predictions the least wins, so that none is a tie before the last turn.
    is_played = builder.options.run is not None
    is_measured = not (defaults.estimates or is_played)
    if order and is_measured and not agreement.is_over(builder.end):
        stage = builder.stages[1]
        about = outlook.left_text(stage, 0, 1, 0.0)
        builder.options.tell(f"warming up the devices{about}")
        with outlook.at(stage):
            warm = timed(order[0], _WARM_UP_ELSEWHERE)
        outlook.expect({stage: 0})
        if not warm.ok:
            records[order[0]] = warm
            order = order[1:]
    # Before turns a look, of which nothing counts for what is in a turn: it is shorter,
    # and comes sooner after another program. Where one turn is all, that is a look.
    first = -1 if is_measured and rounds > 1 else 0
    started, over = time.monotonic(), 0
    in_turns: dict[str, ProfileRecord] = {}
    # By what was left out the time of the fastest when it was.
    fastest_ms: dict[str, float] = {}
    for turn in range(first, rounds):
        known = [records[d].time_ms for d in order if turn > first]
        timing = _timing(platform, min(known, default=None))
        whole = dict(records)
        doing = "a look" if turn < 0 else f"turn {turn + 1} of {rounds}"
        for place in range(len(order)):
            if is_played and turn > 0 and agreement.is_over(builder.end):
                records = whole  # Medians of n and of n + 1 samples do not compare.
                break
            digest = order[(place + turn) % len(order)]
            label = by_key[digest].job.label
            rest = max(1, min(rounds, _USUAL_TURNS) - turn) * len(order) - place
            seconds = time.monotonic() - started
            stage = builder.stages[2]
            about = outlook.left_text(stage, over, over + rest, seconds)
            builder.options.tell(f"timing {label}, {doing}{about}")
            over += 1
            with outlook.at(stage):
                found = timed(digest, timing)
            records[digest] = _join(in_turns.get(digest), found)
            if turn >= 0:
                in_turns[digest] = records[digest]
        order = [d for d in order if records[d].ok]
        if not order or turn + 1 == rounds or agreement.is_over(builder.end):
            break
        if turn > 0 and is_measured and _is_told([*map(samples_of, order)]):
            break  # What is alike is a tie, and the simplest of it wins.
        best_ms = min(map(time_of, order))
        stay = STAY_AFTER_TURN if turn > first else STAY_AFTER_LOOK
        far = [d for d in order if time_of(d) > stay * best_ms]
        fastest_ms |= dict.fromkeys(far, best_ms)
        order = [d for d in order if d not in fastest_ms]
    # A look is shorter than a turn, and devices may have become slower since.
    for digest, before_ms in fastest_ms.items() if order else ():
        drift = min(map(time_of, order)) / before_ms
        samples_ms = tuple(drift * ms for ms in records[digest].samples_ms)
        records[digest] = replace(records[digest], samples_ms=samples_ms)
    ended = utc_now()
    return {
        d: replace(record, choice=by_key[d].job.choice, created=ended)
        for d, record in records.items()
    }


def _timing(platform: str, fastest_ms: float | None) -> TimingOptions:
    """Returns how to time a turn; or a first look, where no time is known yet.

    Args:
        platform: of the devices.
        fastest_ms: the fastest step of those in it, or None for a look.
    """
    if platform == "cpu":
        return _ON_CPUS
    if fastest_ms is None:
        return _LOOK_ELSEWHERE
    steps = max(3, math.ceil(_TURN_MS_ELSEWHERE / max(fastest_ms, 1e-3)))
    return replace(_LOOK_ELSEWHERE, min_sample_ms=0.0, min_repeat=steps)


def _join(before: ProfileRecord | None, found: ProfileRecord) -> ProfileRecord:
    if before is None or not (before.ok and found.ok):
        return found
    return replace(
        found,
        samples_ms=before.samples_ms + found.samples_ms,
        run_seconds=before.run_seconds + found.run_seconds,
    )


def second_race(
    raced: Sequence[RaceResult],
    options: Mapping[str, Mapping[str, str]],
    levels: Sequence[ConstraintLevel] = (),
    reach: float = STAY_AFTER_LOOK,
) -> tuple[list[Candidate], list[Candidate]]:
    """Selects what races again: the leader, near ties, the best preset.

    Args:
        raced: the first race.
        options: of the compiler, by name.
        levels: constraint levels at which presets race only if they lead.
        reach: what takes more times as long as the fastest does not race again, but for
            the best preset, with which a plan is compared.

    Returns:
        Those, and variants of the leader with options, and at levels; nothing if there
        are no variants.
    """
    ran = sorted((one for one in raced if one.ran), key=time_ms)
    if not ran:
        return [], []
    leader = ran[0].candidate
    # What is remembered may be a variant of something.
    keys = {one.candidate.key for one in raced}
    names = {one.name for one in raced}
    new = [
        one
        for one in (*with_options(leader, options), *at_levels(leader, levels))
        if one.key not in keys and one.name not in names
    ]
    if not new:
        return [], []
    near = [one for one in ran if one.time_ms <= reach * ran[0].time_ms]
    best = [one for one in ran if one.candidate.is_preset][:1]
    return [*{one.name: one.candidate for one in (*near, *best)}.values()], new


# ------------------------------------------------------------------------------ ties


def _is_told(samples: Sequence[Sequence[float]]) -> bool:
    """True if turns of several programs suffice to tell the fastest.

    That is after two, if every other program is as fast as the fastest, within 1 %, or
    was slower in each of them.

    Args:
        samples: of each program, one of each turn. Who was left out of a turn has
            fewer, and nothing is told.
    """
    turns = {len(one) for one in samples}
    if len(turns) != 1 or min(turns) < 2:
        return False
    times_ms = [median(one) for one in samples]
    best_ms = min(times_ms)
    fastest = samples[times_ms.index(best_ms)]
    return all(
        time_ms <= (1.0 + ALIKE) * best_ms
        or all(other > best for other, best in zip(one, fastest, strict=True))
        for one, time_ms in zip(samples, times_ms, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranking of programs timed in turn, the leader and near ties a second time.

    Attributes:
        leaders: timed again, and variants of them; empty where there was no second
            race. What won is one of them, if any of them ran.
        others: those that lost before, at another time.
        is_predicted: whether times are predictions of steps, of which the shortest is
            the best: what one is off by is not in the spread of its samples.
    """

    leaders: Sequence[RaceResult]
    others: Sequence[RaceResult]
    is_predicted: bool = False

    @property
    def results(self) -> list[RaceResult]:
        """All, the leaders first."""
        others = sorted(self.others, key=time_ms) if self.leaders else self.others
        return [*self.leaders, *others]

    @property
    def ties(self) -> list[RaceResult]:
        """Returns the fastest result, and those as fast as it.

        That is within 1 %, if each has two samples or more. Predictions tie only if
        they are equal. What was timed for a larger budget, and is too large for this
        one, ties with nothing.
        """
        ran = [one for one in self.leaders if one.ran] or [
            one for one in self.others if one.ran
        ]
        if not ran:
            return []
        fastest = min(ran, key=time_ms)

        def ties(one: RaceResult) -> bool:
            if self.is_predicted:
                return one.time_ms == fastest.time_ms
            few = min(len(one.samples_ms), len(fastest.samples_ms)) < 2
            alike = one.time_ms <= (1.0 + ALIKE) * fastest.time_ms
            return one is fastest or (alike and not few)

        return [*filter(ties, ran)]

    @property
    def best(self) -> RaceResult | None:
        """The simplest of ties.

        Presets come before plans, then what is constrained less, has fewer compiler
        options, or took less time.

        None where nothing ran.
        """

        def complexity(one: RaceResult) -> tuple[bool, int, int, float]:
            candidate = one.candidate
            constrained = [*ConstraintLevel][::-1].index(candidate.level)
            options = len(candidate.options)
            return not candidate.is_preset, constrained, options, one.time_ms

        return min(self.ties, key=complexity, default=None)

    def sieved(self, most_bytes: int | None) -> Ranking:
        """The same; what is too large, scaled to the whole program, does not fit."""

        def sieve(one: RaceResult) -> RaceResult:
            fits = most_bytes is None or one.peak_bytes <= most_bytes
            return replace(one, fits=one.fits and fits)

        return replace(
            self,
            leaders=[*map(sieve, self.leaders)],
            others=[*map(sieve, self.others)],
        )
