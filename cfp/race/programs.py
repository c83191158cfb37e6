"""Whole programs that may race: candidates, their results, and rows of a plan's table.

Candidates are the best choices by prediction, presets, and variants of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, SegmentKernels
from cfp.analysis.presets import BY_HAND, FROM_ARGUMENTS
from cfp.cost.costs import segment_candidate
from cfp.printable import Count, Rung, Time, Words, format_bytes
from cfp.profiling.builder import Built, Job
from cfp.profiling.record import (
    STATUSES,
    Collective,
    CompiledBytes,
    Parts,
    ProfileKey,
    ProfileRecord,
)
from cfp.program.graph import Program
from cfp.search.choices import picks_of, whole_choice
from cfp.search.guided import Candidate, Solution
from cfp.search.requests import whole_job
from cfp.search.solver import Problem, leanest, solve
from cfp.settings import ConstraintLevel, PlatformDefaults


def level_name(name: str, level: ConstraintLevel) -> str:
    """Returns a choice's name in the table; partial constraint levels add a suffix."""
    whole = level is ConstraintLevel.EVERYTHING
    return name if whole else f"{name}, {level} constrained"


# Constraint levels of presets, and of choices that XLA's propagation made. The latter
# have the constraints from which they were propagated: with all values constrained, the
# search has them already.
_PRESET_LEVELS = (ConstraintLevel.EVERYTHING, ConstraintLevel.ARGUMENTS)
_PROPAGATED_LEVELS = {
    BY_HAND: ConstraintLevel.ACTIVATIONS,
    FROM_ARGUMENTS: ConstraintLevel.ARGUMENTS,
}


def named_candidates(
    named: Mapping[str, Choice],
    levels: Sequence[ConstraintLevel] = (ConstraintLevel.ARGUMENTS,),
) -> list[Candidate]:
    """Makes candidates without predicted times: presets, and XLA's propagated choices.

    Args:
        named: ``{name: choice}``; propagated ones are left out unless `levels` has
            their level in `_PROPAGATED_LEVELS`.
        levels: allowed levels; presets get the first that is in `_PRESET_LEVELS`.
    """
    usual = [level for level in levels if level in _PRESET_LEVELS][:1]
    found = []
    for name, choice in named.items():
        own = _PROPAGATED_LEVELS.get(name.partition(",")[0])
        for level in usual if own is None else {own}.intersection(levels):
            title = level_name(name, level)
            found.append(Candidate(title, choice, None, level, {}, own is None))
    return found


def variants(one: Candidate, rules: PlatformDefaults) -> list[Candidate]:
    """Returns variants of a race's leader, named by what differs.

    The first is the leader, without `rules.first_options` if it has them. Others add a
    set of `rules.compiler_options` to the first, or are a preset at another level.
    """
    others = [
        replace(one, name=level_name(one.name, level), level=level)
        for level in rules.levels
        if one.is_preset and level in _PRESET_LEVELS and level is not one.level
    ]
    plain = without_first_options(one, rules)
    return [plain, *with_options(plain, rules.compiler_options), *others]


def without_first_options(one: Candidate, rules: PlatformDefaults) -> Candidate:
    """Returns a candidate without the first options, if its name has them."""
    for name, chosen in rules.first_options.items():
        if f", {name}" in one.name:
            return one.without(chosen, name=one.name.replace(f", {name}", "", 1))
    return one


def with_options(
    one: Candidate, options: Mapping[str, Mapping[str, str]]
) -> list[Candidate]:
    """Returns a variant for each ``{suffix of the name: compiler options to add}``."""
    return [
        replace(one, name=f"{one.name}, {name}", options={**one.options, **chosen})
        for name, chosen in options.items()
    ]


LESS_MEMORY = "planned, less memory"


def leanest_of(analysis: Analysis, problem: Problem) -> Candidate:
    """Returns the candidate of least predicted memory; of several the fastest.

    Equal memory is common: rematerializing a program of one segment saves nothing.
    """
    least = leanest(problem)
    best = solve(replace(problem, budget_bytes=least.memory_bytes)) or least
    return Candidate("leanest", whole_choice(analysis, problem, best), best.cost_ms)


def rematerialized(
    analysis: Analysis, problems: Sequence[Problem], presets: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Returns {longer name: choice} of presets that fit if segments are rematerialized.

    Left out: presets that fit as they are, never fit, or have a part that is no option.
    If segments of one kind differ in a preset, all take the last segment's option.

    Args:
        problems: equal problems with different predictions of memory. For each preset,
            the first in which it fits counts.
    """
    problem, found = problems[0], dict[str, Choice]()
    for name, choice in presets.items():
        if (kept := like(analysis, problem, choice)) is None:
            continue
        solved = (solve(one.among(kept)) for one in problems)
        if (best := next(filter(None, solved), None)) is not None:
            again = whole_choice(analysis, problem, best)
            if again.remat:
                found[f"{name}, rematerialized"] = again
    return found


def like(
    analysis: Analysis, problem: Problem, choice: Choice
) -> list[list[int]] | None:
    """Returns, by kind of segment, indices of the choice's option and its `remat` twin.

    If segments of a kind differ, the last counts. None if any part is no option.
    """
    if (picks := picks_of(analysis, problem, choice)) is None:
        return None
    picked = zip(problem.kinds, picks, strict=True)
    own = {k: problem.options[k][pick].candidate.plain for k, pick in picked}
    return [
        [i for i, option in enumerate(row) if option.candidate.plain == own[kind]]
        for kind, row in enumerate(problem.options)
    ]


def with_kernels(
    analysis: Analysis, problem: Problem, named: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Returns named choices, each with or without kernels, as is predicted faster.

    So presets and plans are compared with kernels on both sides. Memory does not
    matter. If segments of one kind differ, all take the last segment's strategies.
    Choices that are no options of the problem are unchanged.
    """
    every = (option for options in problem.options for option in options)
    if not any(option.candidate.kernels for option in every):
        return dict(named)
    free, found = replace(problem, budget_bytes=None), dict(named)
    for name, choice in named.items():
        own = {
            segment.kind: segment_candidate(analysis, segment.index, choice)
            for segment in analysis.segments
        }
        kept = [
            [i for i in problem.allowed(k) if row[i].candidate.as_written == own[k]]
            for k, row in enumerate(problem.options)
        ]
        if all(kept) and (best := solve(free.among(kept))) is not None:
            found[name] = whole_choice(analysis, problem, best)
    return found


# Reasons why a candidate was not compiled, or not timed.
TOO_LATE = "not compiled: the time budget was over"
TOO_FAR = "predicted too slow to race"
UNMEASURED = "estimated too slow to be measured"
TOO_LARGE = "predicted not to fit in memory"
BEHIND = "not compiled: enough other candidates raced"
MANY_REFUSED = "not compiled: too many others do not fit, or failed"
OVER_BUDGET = "over the memory budget"
LIMITED_ONCE = "not compiled: another constraint level has the memory limit"
NOT_RUN = "estimated; not compiled or run"
SAME_AS = "the same program as "  # Then a candidate's name.


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceProgram:
    """A program that is compiled, and timed if it fits.

    Attributes:
        job: the job that measures the whole program under its choice.
        stands_on: (program, mesh) if they are not the race's; otherwise None.
    """

    candidate: Candidate
    job: Job
    stands_on: tuple[Program, Mesh] | None = None

    @property
    def identity(self) -> str:
        """Digest of all that the compiled program depends on, equal in all races."""
        parts = self.job.key.parts
        return ProfileKey(tuple(p for p in parts if p[0] != "race")).digest

    def own(self, record: ProfileRecord) -> ProfileRecord:
        """Returns the record under this program's key, and with its choice."""
        key, choice = self.job.key, self.job.choice
        return replace(record, key=key.digest, parts=key.parts, choice=choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """Result of one program in a race.

    Attributes:
        record: record of a run, a failure or a program too large; else None.
        size: memory of the compiled program; zeros if not compiled.
        build_seconds: time of its compile, perhaps in an earlier run.
        skipped: reason why no compile began; otherwise "".
        fits: True if `size` is within the budget; also if not compiled.
        cached: True if the result is from the store.
    """

    program: RaceProgram
    record: ProfileRecord | None = None
    size: CompiledBytes = field(default_factory=CompiledBytes)
    collectives: tuple[Collective, ...] = ()
    build_seconds: float = 0.0
    skipped: str = ""
    fits: bool
    cached: bool = False

    @classmethod
    def of(
        cls,
        program: RaceProgram,
        outcome: Built | ProfileRecord | None,
        budget_bytes: int | None,
        cached: bool = False,
    ) -> RaceResult:
        """Makes a program's result; without an outcome, `skipped` is `TOO_LATE`."""
        made = outcome or CompiledBytes()
        return cls(
            program=program,
            record=outcome if isinstance(outcome, ProfileRecord) else None,
            size=made.size,
            collectives=outcome.collectives if outcome else (),
            build_seconds=outcome.build_seconds if outcome else 0.0,
            skipped="" if outcome else TOO_LATE,
            fits=fits(made, budget_bytes),
            cached=cached,
        )

    @property
    def candidate(self) -> Candidate:
        """The program's candidate: its choice, constraint level and XLA options."""
        return self.program.candidate

    @property
    def name(self) -> str:
        """Name in a plan's table of candidates."""
        return self.candidate.name

    @property
    def peak_bytes(self) -> int:
        """Memory of the compiled program per device; 0 if not compiled."""
        return self.size.peak_bytes

    @property
    def reason(self) -> str:
        """The reason why the program was not timed; "" if it was, or still may be."""
        return self.record.reason if self.record else self.skipped

    @property
    def note(self) -> str:
        """The reason for a plan's table: a failure has its status before it."""
        record = self.record
        if record is None or record.ok:
            return self.reason
        return f"{record.status}: {record.reason}"

    @property
    def is_timed(self) -> bool:
        """True if the program ran, even if it is over the budget."""
        return self.record is not None and self.record.ok

    @property
    def may_race(self) -> bool:
        """True if the program fits, and is compiled or timed without a failure."""
        is_compiled = self.record is None and not self.skipped
        return self.fits and (is_compiled or self.is_timed)

    @property
    def ran(self) -> bool:
        """True if the program ran and fits."""
        return self.fits and self.is_timed

    @property
    def time_ms(self) -> float:
        """Median step time; infinity unless the program ran and fits."""
        return median(self.samples_ms) if self.ran else float("inf")

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """Step times of the program, ms, corrected for drift; empty without a run."""
        if self.record is None:
            return ()
        return tuple(self.record.drift * ms for ms in self.record.samples_ms)


def fits(size: CompiledBytes, budget_bytes: int | None) -> bool:
    """True if a program's memory is within the budget, or there is no budget."""
    return budget_bytes is None or size.peak_bytes <= budget_bytes


def programs_of(
    analysis: Analysis, candidates: Sequence[Candidate], environment: Parts
) -> list[RaceProgram]:
    """Makes the programs of candidates, in order."""

    def program(one: Candidate) -> RaceProgram:
        how = one.name, one.level, one.options
        job = whole_job(analysis, one.choice, environment, *how)
        return RaceProgram(candidate=one, job=job)

    return [*map(program, candidates)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRow:
    """One row of a plan's table of candidates.

    Attributes:
        predicted_ms: predicted step time; None if unknown.
        samples_ms: measured step times.
        time_ms: median of the samples; None without a run.
        peak_bytes: memory of the compiled program per device. If not compiled: 0, or
            predicted if `rung` is "estimated".
        note: reason why it has no time or is too large, perhaps collectives, or "".
        rung: source of `predicted_ms`: "estimated" or "measured".
        flag_ms: of the winner, (``"argument=value"``, step time) for each timed value
            of arguments that select a branch.
    """

    name: Words
    predicted_ms: Time | None
    samples_ms: tuple[Time, ...] = ()
    time_ms: Time | None = None
    peak_bytes: Count = 0
    note: Words = ""
    rung: Rung = "measured"
    flag_ms: tuple[tuple[Words, Time], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RaceOutcome:
    """Outcome of a race.

    Attributes:
        solution: the solution with the candidates.
        winner: the winning candidate; None if no program fits, or none runs.
        time_ms: step time of the winner; None if not timed.
        peak_bytes: memory of the winner per device; None if not compiled.
        built: compiled program of the winner; None if not compiled in this run.
        rows: rows of a plan's table; without a race, only if estimates decide.
        results: results of all programs chosen to compile, whether they fit or not.
        counts: counts and seconds of all passes.
    """

    solution: Solution
    winner: Candidate | None = None
    time_ms: float | None = None
    peak_bytes: int | None = None
    built: Built | None = field(default=None, repr=False)
    rows: tuple[RaceRow, ...] = ()
    results: tuple[RaceResult, ...] = field(default=(), repr=False)
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def raced(self) -> tuple[tuple[Candidate, float], ...]:
        """(candidate, ms) of candidates that ran and fit; empty without a race."""
        if self.time_ms is None:
            return ()
        return tuple((one.candidate, one.time_ms) for one in self.results if one.ran)

    def after(self, before: RaceOutcome) -> RaceOutcome:
        """Joins both if `before` has no winner; else prefers this if this has one."""
        if before.winner is not None:
            return self if self.winner else replace(before, solution=self.solution)
        names = {row.name for row in self.rows}
        earlier = (row for row in before.rows if row.name not in names)
        # Rows of candidates that were not compiled come last.
        rows = sorted((*self.rows, *earlier), key=lambda row: not row.peak_bytes)
        keys = {one.candidate.key for one in self.results}
        others = (one for one in before.results if one.candidate.key not in keys)
        return replace(self, rows=tuple(rows), results=(*self.results, *others))


def is_compiled_too_large(record: ProfileRecord) -> bool:
    """True if a program was compiled, but never ran: it exceeds a budget or device."""
    compiled = record.peak_bytes > 0 and not record.run_seconds
    return record.status == "out_of_memory" and compiled


def race_row(result: RaceResult) -> RaceRow:
    """Returns a result as a row of a plan's table."""
    record, note = result.record, result.note
    if (not record or record.ok or is_compiled_too_large(record)) and not result.fits:
        # The record's own reason may name an earlier budget.
        note = OVER_BUDGET
    return RaceRow(
        name=result.name,
        predicted_ms=result.candidate.predicted_ms,
        samples_ms=result.samples_ms,
        time_ms=median(result.samples_ms) if result.is_timed else None,
        peak_bytes=result.peak_bytes,
        note=note,
    )


def compiled_row(result: RaceResult) -> RaceRow:
    """Returns a row without measured times; its note also lists collectives."""
    row, every = race_row(result), result.collectives
    texts = [row.note or "compiled, not run"]
    for kind in dict.fromkeys(one.kind for one in every):
        own = [one for one in every if one.kind == kind]
        size = format_bytes(sum(one.count * one.bytes for one in own))
        texts.append(f"{sum(one.count for one in own)} {kind}, {size} in all")
    # An earlier run may have raced it.
    unraced = replace(row, samples_ms=(), time_ms=None, rung="estimated")
    return replace(unraced, note="; ".join(texts))


def left_out(candidate: Candidate, why: str) -> RaceRow:
    """Returns the row of a candidate that did not race; `why` is its note."""
    return RaceRow(name=candidate.name, predicted_ms=candidate.predicted_ms, note=why)


def kernels_not_timed(outcome: RaceOutcome) -> dict[SegmentKernels, str]:
    """Returns {kernels: "failed: ..." or "was not timed: ..."}, with the first reason.

    Left out: kernels of a candidate that was timed within the budget.
    """
    choices = {one.name: one.choice for one in outcome.solution.candidates}
    choices |= {one.name: one.candidate.choice for one in outcome.results}
    timed, found = set[SegmentKernels](), dict[SegmentKernels, str]()
    for row in outcome.rows:
        has_failed = row.note.partition(":")[0] in STATUSES
        why = f"{'failed' if has_failed else 'was not timed'}: {row.note}"
        for _, kernels in choices[row.name].kernels if row.name in choices else ():
            if row.note:
                found.setdefault(kernels, why)
            else:
                timed.add(kernels)
    return {kernels: why for kernels, why in found.items() if kernels not in timed}
