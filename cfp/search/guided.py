"""Search-guided profiling: measures only candidates that may be in the fastest plan.

A candidate is a choice for a segment (a run of blocks; equal segments have one kind).
The first ones are parts of presets and the best by estimate, with kernels if possible.
One of each kind is measured without kernels, too; all are if its kernels are slower
(docs/decisions.md, "Kernels are measured in place of written attention"). If the
fastest choice fits in memory, measuring ends: more rounds made no plan faster
(docs/decisions.md, "Where memory decides, likely strategies are measured next").

Otherwise rounds follow. Unmeasured candidates enter the search with expected costs
(`expect`), and the picked ones are measured. Rounds end when no candidate is expected
to make the best plan faster by enough, at the deadline, or if the memory budget
excludes no choice that is faster by enough. Estimates are inexact: `expect` corrects
their times and memory by medians of the kind's measured candidates. On described
and by default on virtual devices, estimates alone decide (`estimate_options`).

With a deadline, the parts of one preset after another are measured, the fastest preset
by estimate first. The deadline does not hold for kinds without a measured candidate.
A `Solution` holds whole programs (`Candidate`) that may become the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.cost.costs import Costs, SegmentChoice, SegmentEstimate
from cfp.profiling.builder import Job
from cfp.profiling.collectives import Rates
from cfp.profiling.jobs import Measurer
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.search.choices import (
    first_candidates,
    kernel_variants,
    picks_of,
    preset_parts,
    preset_times,
    ranked_candidates,
)
from cfp.search.requests import (
    MeasurementRequest,
    Profiles,
    RequestBuilder,
    measured_options,
    rematerialize,
)
from cfp.search.solver import Option, Problem, fastest, leanest, solve
from cfp.settings import (
    REMATERIALIZED_TIME_EXPECTED,
    ROUND_SIZE,
    SAFE_ESTIMATED_MEMORY_SHARE,
    SAFE_MEMORY_SHARE,
    WORTH_HAVING,
    ConstraintLevel,
    Replacing,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated step time of the fastest choice that fits, else of the leanest one.

    Attributes:
        fits: True if a choice fits in the memory budget, by estimate.
        profiles: result of the profile pass if estimates alone decide; otherwise None.
    """

    time_ms: float
    fits: bool
    profiles: Profiles | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Candidate:
    """A whole program that may become the plan.

    Attributes:
        predicted_ms: step time by the profiles, measured or estimated; None if unknown.
        level: how much of the choice the compiler must follow.
        options: XLA compiler options.
    """

    name: str
    choice: Choice = field(repr=False)
    predicted_ms: float | None = None
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    options: Mapping[str, str] = field(default_factory=dict)
    is_preset: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Choice, level and options: equal keys compile to the same program."""
        return self.choice, self.level, tuple(sorted(self.options.items()))

    def without(self, options: Iterable[str], name: str) -> Candidate:
        """Returns the candidate without options of these names, renamed to `name`."""
        kept = {key: self.options[key] for key in self.options.keys() - {*options}}
        return replace(self, name=name, options=kept)


# Key of a plan's or solution's counts: seconds of all races so far.
RACE_SECONDS = "race_seconds"


class Stage(StrEnum):
    """Stages of a search; a later one may begin if no candidate fits when compiled."""

    PREDICTED = "predicted"  # Choices that fit by predicted memory.
    CORRECTED = "corrected"  # The same, corrected by the memory of compiled programs.
    SMALLEST = "smallest"  # Choices of least memory, compiled one by one.


@dataclass(frozen=True)
class Solution:
    """Result of the search.

    Attributes:
        candidates: usually the best by prediction, then presets and other choices.
        unraced: ``{unmixed preset that the search left out: reason}``.
        problem: the searched one; None for a preset by name, unless estimates decide.
        counts: counts and seconds of the passes so far.
        rates: rates of the devices (compute, memory, collectives); None if unknown.
        named: a search's presets by name, with kernels, without rematerialization.
        profiles: the searched profiles; None for a preset by name.
    """

    candidates: Sequence[Candidate]
    unraced: Mapping[str, str] = field(default_factory=dict)
    problem: Problem | None = field(default=None, repr=False)
    counts: Mapping[str, float] = field(default_factory=dict)
    rates: Rates | None = field(default=None, repr=False)
    named: Mapping[str, Choice] = field(default_factory=dict, repr=False)
    profiles: Profiles | None = field(default=None, repr=False)
    stage: Stage = Stage.PREDICTED


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step time and memory of a choice; both None if a part has no option.

    Attributes:
        size: memory of each device. Values that live during the whole step count as
            arguments, also results that reuse no donated argument.
    """

    time_ms: float | None = None
    size: CompiledBytes | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the choice needs on each device; None if unknown."""
        return self.size and self.size.peak_bytes


def prediction_of(
    analysis: Analysis, problem: Problem | None, choice: Choice
) -> Prediction:
    """Predicts a choice's cost; all None unless `problem` has options for all parts."""
    picks = None if problem is None else picks_of(analysis, problem, choice)
    if problem is None or picks is None:
        return Prediction()
    held = problem.fixed_bytes + problem.state_bytes(picks)
    rest = problem.memory_bytes(picks) - held
    size = CompiledBytes(argument_bytes=held, temp_bytes=rest)
    return Prediction(problem.cost_ms(picks), size)


def expect(
    costs: Costs,
    kind: int,
    estimate: SegmentEstimate,
    measured: Sequence[Option],
    candidates: Iterable[SegmentChoice],
) -> list[Option]:
    """Returns an option for each candidate of a kind, in order, with expected costs.

    A candidate in `measured`, the kind's measured options, keeps its costs if it is not
    rematerialized. `estimate` has estimated times of the kind's strategies.
    """
    plain = {o.candidate: o for o in measured if not o.candidate.remat}
    again = [o for o in measured if o.candidate.remat]
    both = [(o, plain[o.candidate.plain]) for o in again if o.candidate.plain in plain]
    as_is = [o for o in plain.values() if not o.candidate.kernels]

    def least(candidate: SegmentChoice) -> int:
        return costs.least_bytes(kind, candidate).residual_bytes

    def residual(candidate: SegmentChoice, among: Iterable[Option]) -> int:
        more = _median((o.residual_bytes - least(o.candidate) for o in among), 0)
        return max(0, round(least(candidate) + more))

    def estimated_ms(candidate: SegmentChoice) -> float:
        saved_ms = costs.saved_by_kernel_ms(kind, candidate)
        return max(0.0, estimate.total_ms(candidate) - saved_ms)

    slower = _ratio(((o.time_ms, estimated_ms(o.candidate)) for o in as_is), 1.0)
    times_ms = ((o.time_ms, base.time_ms) for o, base in both)
    again_slower = _ratio(times_ms, REMATERIALIZED_TIME_EXPECTED)
    # The backward pass needs about the same memory, but only while the segment runs.
    needed_again = _ratio(((_needed(o), _needed(base)) for o, base in both), 1.0)
    temps = [o.temp_bytes for o in plain.values()]

    def unmeasured(candidate: SegmentChoice) -> Option:
        temp = round(median(temps)) if temps else costs.temp_bytes(kind, candidate)
        return Option(
            candidate=candidate,
            time_ms=slower * estimated_ms(candidate),
            state_bytes=costs.least_bytes(kind, candidate).state_bytes,
            residual_bytes=residual(candidate, plain.values()),
            temp_bytes=temp,
        )

    def rematerialized(option: Option) -> Option:
        candidate = replace(option.candidate, remat=True)
        needed = round(needed_again * _needed(option))
        kept = min(needed, residual(candidate, again))
        return replace(
            option,
            candidate=candidate,
            time_ms=again_slower * option.time_ms,
            residual_bytes=kept,
            temp_bytes=needed - kept,
        )

    known = ((c, plain.get(c.plain) or unmeasured(c.plain)) for c in candidates)
    return [rematerialized(o) if c.remat else o for c, o in known]


def _needed(option: Option) -> int:
    return option.residual_bytes + option.temp_bytes


def _ratio(pairs: Iterable[tuple[float, float]], otherwise: float) -> float:
    return _median((value / of for value, of in pairs if of > 0.0), otherwise)


def _median(values: Iterable[float], otherwise: float) -> float:
    found = [*values]
    return median(found) if found else otherwise


def estimate_options(
    estimates: Sequence[SegmentEstimate],
    presets: Mapping[str, Choice],
    costs: Costs,
    *,
    per_kind: int,
    budget_bytes: int | None,
    replacing: Replacing,
    for_memory: Replacing | None = None,
) -> Profiles:
    """Returns profiles of parts of presets and the best others, by estimates alone.

    Rematerialized candidates are added only if the fastest choice may not fit.

    Args:
        presets: ``{name: choice for the whole program}``.
        per_kind: largest number of other candidates of each kind.
        budget_bytes: memory per device; None for no limit.
        for_memory: kernels in place of `replacing` if the fastest choice may not fit.
    """
    parts = preset_parts(costs.analysis, presets.values())

    def expected(kind: int, remat: bool) -> list[Option]:
        mine = [replace(c, remat=remat) for c in candidates[kind]]
        own = replace(estimates[kind], edge_ms=estimates[kind].own_edge_ms)
        return expect(costs, kind, own, (), mine)

    most = inf if budget_bytes is None else SAFE_ESTIMATED_MEMORY_SHARE * budget_bytes
    for one in dict.fromkeys((replacing, for_memory or replacing)):
        candidates = first_candidates(
            costs.analysis, estimates, parts, one, others=per_kind
        )
        options = [expected(kind, False) for kind in range(len(estimates))]
        problem = build_problem(costs, options, budget_bytes)
        tight = fastest(problem).memory_bytes > most
        if not tight:
            break
    if tight:
        for kind, found in enumerate(options):
            if costs.can_rematerialize(kind):
                found += expected(kind, True)
        problem = build_problem(costs, options, budget_bytes)
    return Profiles(
        presets=presets, costs=costs, memory_bound=tight, problem=problem, replacing=one
    )


# ------------------------------------------------------- the problem over some options


def build_problem(
    costs: Costs, options: Sequence[Sequence[Option]], budget_bytes: int | None
) -> Problem:
    """Makes the search problem over ``[kind]`` options of segments."""
    analysis = costs.analysis
    segments, kinds = analysis.segments, [s.kind for s in analysis.segments]
    candidates = [[option.candidate for option in row] for row in options]
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for left, right in pairwise(segments):
        pairs.setdefault((left.kind, right.kind), (left.index, right.index))
    far = {
        (a, b): costs.reshardings_ms(a, b, candidates[kinds[a]], candidates[kinds[b]])
        for a, b in sorted({(min(pair), max(pair)) for pair in analysis.passing})
        if b > a + 1
    }
    return Problem(
        kinds=tuple(kinds),
        options=tuple(map(tuple, options)),
        edge_ms={
            (a, b): costs.reshardings_ms(*pair, candidates[a], candidates[b])
            for (a, b), pair in pairs.items()
        },
        far_ms={pair: rows for pair, rows in far.items() if any(map(any, rows))},
        fixed_ms=costs.fixed_ms,
        fixed_bytes=costs.fixed_bytes,
        budget_bytes=budget_bytes,
    )


def measure_candidates(
    maker: RequestBuilder,
    *,
    per_kind: int,
    others: int = 1,
    budget_bytes: int | None,
    measurer: Measurer,
) -> Profiles:
    """Measures candidates: one round, or more if memory excludes faster choices.

    Args:
        per_kind: largest number of candidates of each kind of segment, and of
            rematerialized ones. Presets' parts may exceed it; kernels do not count.
        others: largest number of candidates of the first round besides presets' parts.
        measurer: measures jobs, or looks them up. It exceeds its deadline until each
            kind has a measured candidate.

    Raises:
        CfpError: all candidates of some kind failed.
    """
    first = maker.first(per_kind, others)
    pairs = _written_twice(maker, first)
    waiting = {id(one.written) for one in pairs if not one.is_reference}
    asked = [item for item in first if id(item) not in waiting]
    if measurer.has_end:
        records = _in_time(_by_preset(maker, asked), measurer)
    else:
        records = dict(measurer(_jobs(asked)))
    if all(item.outcome(records) for item in asked):
        more = _needed_as_written(pairs, records)
        records.update(measurer(_jobs(more)) if more and not measurer.is_over else {})
        # Requests that the deadline left without records are dropped.
        asked += [item for item in more if item.outcome(records)]
    rounds, tight = [asked], False
    # A further round needs the records of all requests before.
    while all(item.outcome(records) for item in asked):
        wanted = [item for items in rounds for item in items]
        options = measured_options(maker.costs, wanted, records)
        problem = build_problem(maker.costs, options, budget_bytes)
        quickest, best = fastest(problem), solve(problem)
        if budget_bytes is not None:
            tight |= quickest.memory_bytes > SAFE_MEMORY_SHARE * budget_bytes
        if best and best.cost_ms <= (1.0 + WORTH_HAVING) * quickest.cost_ms:
            break  # The memory budget excludes no choice that is faster by enough.
        asked = _Round(maker, per_kind, wanted, records, problem).ask()
        if not asked or measurer.is_over:
            break
        rounds.append(asked)
        records.update(measurer(_jobs(asked)))
    return Profiles(
        presets=maker.presets,
        costs=maker.costs,
        memory_bound=tight,
        rounds=rounds,
        records=records,
        replacing=maker.replacing,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Requests without and with kernels; `written` can wait unless `is_reference`."""

    written: MeasurementRequest
    replaced: Sequence[MeasurementRequest]
    is_reference: bool


def _written_twice(
    maker: RequestBuilder, first: Sequence[MeasurementRequest]
) -> list[_Written]:
    """Pairs requests that have kernel variants with them; marks a kind's best pair."""
    found = []
    for kind, estimate in enumerate(maker.estimates):
        mine = [item for item in first if item.kind == kind]
        both = []
        for item in (one for one in mine if not one.candidate.kernels):
            own = (one for one in mine if one.candidate.as_written == item.candidate)
            if ways := [one for one in own if one is not item]:
                both.append((item, ways))
        best_ms = [estimate.total_ms(item.candidate) for item, _ in both]
        reference = best_ms.index(min(best_ms)) if both else 0
        found += [
            _Written(written=item, replaced=ways, is_reference=place == reference)
            for place, (item, ways) in enumerate(both)
        ]
    return found


def _needed_as_written(
    pairs: Sequence[_Written], records: Mapping[str, ProfileRecord]
) -> list[MeasurementRequest]:
    """Selects requests without kernels that are to be measured, too.

    If every kernel slows a kind's reference down or fails, all others of the kind are
    selected. Otherwise a request is selected only if all of its kernel variants failed.
    A tie selects none: collectives may hide the gain.
    """

    def is_no_slower(way: MeasurementRequest, written: MeasurementRequest) -> bool:
        """False if `way` is clearly slower: times alone, plus those of pairs if any."""
        if not written.is_measured(records):
            return True
        mine_ms, written_ms = way.pair_ms(records), written.pair_ms(records)
        if mine_ms is None or written_ms is None:
            mine_ms = written_ms = 0.0  # Compares times alone.
        mine_ms += way.alone_ms(records)
        written_ms += written.alone_ms(records)
        return mine_ms <= (1.0 + WORTH_HAVING) * written_ms

    ran = [[way for way in one.replaced if way.is_measured(records)] for one in pairs]
    gains = {
        one.written.kind: any(is_no_slower(way, one.written) for way in ways)
        for one, ways in zip(pairs, ran, strict=True)
        if one.is_reference
    }
    return [
        one.written
        for one, ways in zip(pairs, ran, strict=True)
        if not one.is_reference and not (gains[one.written.kind] and ways)
    ]


def _by_preset(
    maker: RequestBuilder, wanted: Sequence[MeasurementRequest]
) -> list[list[MeasurementRequest]]:
    """Groups requests by fastest preset, in order; requests of none come second."""
    analysis, presets = maker.costs.analysis, maker.presets
    times_ms = preset_times(analysis, maker.estimates, presets)
    names = sorted(presets, key=times_ms.__getitem__)
    parts = [preset_parts(analysis, [presets[name]]) for name in names]

    def place(item: MeasurementRequest) -> float:
        part = item.candidate.as_written
        return next((n for n, one in enumerate(parts) if part in one[item.kind]), 0.5)

    found: dict[float, list[MeasurementRequest]] = {}
    for item in wanted:
        found.setdefault(place(item), []).append(item)
    return [found[key] for key in sorted(found)]


def _in_time(
    groups: Sequence[Sequence[MeasurementRequest]], measurer: Measurer
) -> dict[str, ProfileRecord]:
    """Measures groups until the deadline; then only kinds without a measurement.

    A group that begins in time is finished if it has such a kind.
    """
    wanted = [item for group in groups for item in group]
    missing = {item.kind for item in wanted}
    records: dict[str, ProfileRecord] = {}
    for group in groups:
        for some in [[item] for item in group] if measurer.is_over else [group]:
            needed = any(item.kind in missing for item in some)
            if needed or not measurer.is_over:
                records.update(measurer(_jobs(some), ignore_end=needed))
                missing -= {item.kind for item in some if item.is_measured(records)}
    return {**measurer.look_up(_jobs(wanted)), **records}


def _jobs(wanted: Iterable[MeasurementRequest]) -> list[Job]:
    return [job for item in wanted for job in item.jobs]


@dataclass(slots=True)
class _Round:
    """Selects the candidates to measure in one round.

    Attributes:
        per_kind: limit of `measure_candidates`, over all rounds.
        wanted: requests of earlier rounds.
        found: requests of this round.
        asked: ``[kind]{candidate: request}`` of all rounds.
    """

    maker: RequestBuilder
    per_kind: int
    wanted: Sequence[MeasurementRequest]
    records: Mapping[str, ProfileRecord]
    problem: Problem
    found: list[MeasurementRequest] = field(default_factory=list)
    asked: list[dict[SegmentChoice, MeasurementRequest]] = field(init=False)

    def __post_init__(self) -> None:
        self.asked = [{} for _ in self.problem.options]
        for item in self.wanted:
            # If a base's job failed, the rematerialized request may be made again.
            base = item.neighbour and item.base
            if not (base and base.has_failed(self.records)):
                self.asked[item.kind][item.candidate] = item

    def ask(self) -> list[MeasurementRequest]:
        """Returns requests, if any, for candidates expected to make the plan faster.

        If nothing is expected to fit, requests the leanest choice, rematerialized.
        """
        likely = [*map(self._likely, range(len(self.asked)))]
        best = solve(self.problem)
        best_ms = best.cost_ms if best else float("inf")
        self._propose(likely, (1.0 - WORTH_HAVING) * best_ms)
        if self.found or best:
            return self.found
        # So that the error can name the least memory that suffices.
        costs, lean = self.maker.costs, leanest(self.problem)
        options = self.problem.picked(lean.picks)
        for kind, option in zip(self.problem.kinds, options, strict=True):
            if costs.can_rematerialize(kind):
                self._add(kind, replace(option.candidate, remat=True))
        return self.found

    def _likely(self, kind: int) -> list[Option]:
        """Expected options of unrequested candidates: best, then rematerialized."""
        measured, asked = self.problem.options[kind], self.asked[kind]
        costs, estimate = self.maker.costs, self.maker.estimates[kind]
        ranked = ranked_candidates(estimate, ROUND_SIZE + len(asked))
        found = [c for c in ranked if c not in asked][:ROUND_SIZE]
        if costs.can_rematerialize(kind):
            ran_out = (
                item.candidate
                for item in self.wanted
                if item.kind == kind
                and self.records[item.own_job.key.digest].status == "out_of_memory"
            )
            every = (*(o.candidate for o in measured), *found, *ran_out)
            again = (replace(c, remat=True) for c in every if not c.remat)
            found += [candidate for candidate in again if candidate not in asked]
        return expect(costs, kind, estimate, measured, found)

    def _propose(self, likely: Sequence[Sequence[Option]], goal_ms: float) -> None:
        """Requests new picks of plans below `goal_ms`, about `ROUND_SIZE` at most."""
        measured, budget_bytes = self.problem.options, self.problem.budget_bytes
        while len(self.found) < ROUND_SIZE:
            options = [
                [*known, *(o for o in likely[kind] if self._may_add(kind, o.candidate))]
                for kind, known in enumerate(measured)
            ]
            problem = build_problem(self.maker.costs, options, budget_bytes)
            lowest = solve(problem)
            if lowest is None or lowest.cost_ms >= goal_ms:
                break
            picks = set(zip(problem.kinds, lowest.picks, strict=True))
            new = sorted((k, i) for k, i in picks if i >= len(measured[k]))
            if not new:
                break
            for kind, i in reversed(new):
                self._add(kind, options[kind][i].candidate)

    def _may_add(self, kind: int, candidate: SegmentChoice) -> bool:
        """True if a candidate is new, and `per_kind` is not reached.

        Rematerialized ones count apart; an unrequested base must be allowed, too.
        """
        asked = self.asked[kind]
        if candidate in asked:
            return False
        # Variants with kernels do not count.
        plain = sum(not (one.remat or one.kernels) for one in asked)
        again = sum(one.remat for one in asked)
        if candidate.remat and again >= self.per_kind:
            return False
        return candidate.plain in asked or plain < self.per_kind

    def _add(self, kind: int, candidate: SegmentChoice) -> None:
        """Requests a candidate if allowed: new base, variants, then rematerialized."""
        if not self._may_add(kind, candidate):
            return
        maker, plain = self.maker, candidate.plain
        analysis, asked = maker.costs.analysis, self.asked[kind]
        number = sum(w.kind == kind for w in (*self.wanted, *self.found)) + 1
        if plain not in asked:
            estimate_ms = maker.estimates[kind].total_ms(plain)
            variants = kernel_variants(analysis, kind, plain, maker.replacing)
            for one in (replace(plain, estimate_ms=estimate_ms), *variants):
                if one not in asked:
                    asked[one] = maker.make(kind, one, number)
                    self.found.append(asked[one])
                    number += 1
        if candidate.remat:
            label = f"segment {kind}: {number}, rematerialized"
            asked[candidate] = rematerialize(
                analysis, maker.environment, asked[plain], label, self.records
            )
            self.found.append(asked[candidate])
