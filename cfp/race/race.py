"""The race: compiles and times the plan and its rivals; the fastest is the plan.

Candidates come from the passes before: presets from the profile pass
(:mod:`cfp.passes.profile`), the best choices by each prediction from the search
(:mod:`cfp.passes.search`). The race then goes in this order:

candidates  named, at constraint levels             :mod:`cfp.race.candidates`
remembered  compiled before and known to fit        :mod:`cfp.race.remembered`
admission   compiled until enough fit               :mod:`cfp.race.admission`
turns       timed in turn                           :mod:`cfp.race.turns`
again       the leader with other compiler options, and what is near
ties        the simplest of the fastest wins
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import DecidedBy, PlanContext
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError, MemoryBudgetError
from cfp.profiling.builder import Built
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.race.admission import (
    Admitted,
    compile_until_enough_fit,
    exempt_from_reach,
    expected_ms,
    within_reach,
)
from cfp.race.candidates import (
    LESS_MEMORY,
    leanest_of,
    smaller_than,
    with_options,
)
from cfp.race.compile import Builder, compile_programs
from cfp.race.programs import (
    TOO_LATE,
    NoneFits,
    RaceOutcome,
    RaceResult,
    RaceRow,
    Skipped,
    compiled_row,
    left_out,
    not_run,
    programs_of,
    race_row,
)
from cfp.race.remembered import (
    answer_to,
    compiled_before,
    keep_answer,
    known_to_fit,
    question,
)
from cfp.race.shortage import no_winner
from cfp.race.turns import Ranking, race_programs, second_race
from cfp.settings import MOST_RACED, MOST_REFUSED, ConstraintLevel
from cfp.solution import RACE_SECONDS, Candidate, Solution, prediction_of

# A key of its own, so that this race cannot change the leaders of the first.
SECOND: Parts = (("race", "with other compiler options"),)


@dataclass(frozen=True)
class Run:
    """A race, and what it has compiled."""

    context: PlanContext
    analysis: Analysis
    solution: Solution
    started: float = field(default_factory=time.perf_counter)
    built: dict[str, Built] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)  # What was not in the store.
    # Of candidates that were compiled before, by key.
    sizes: dict[object, CompiledBytes] = field(default_factory=dict)

    @property
    def builder(self) -> Builder:
        """Builder that compiles and times candidates."""
        context = self.context
        return Builder(
            program=self.analysis.frame.program,
            mesh=context.mesh,
            store=context.store,
            budget_bytes=context.budget_bytes,
            end=context.end,
            options=context.measure,
            built=self.built,
        )

    @property
    def seconds(self) -> float:
        """Time that the race took until now, with races before it."""
        before_seconds = self.solution.counts.get(RACE_SECONDS, 0.0)
        return before_seconds + time.perf_counter() - self.started

    def compile_all(self, candidates: Sequence[Candidate]) -> list[RaceResult]:
        """Compiles candidates; results say what they need and which cannot race."""
        environment = self.context.environment
        programs = programs_of(self.analysis, candidates, environment)
        return self._noted(compile_programs(self.builder, programs))

    def time(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        race: Parts = (),
        looks: Mapping[str, ProfileRecord] | None = None,
    ) -> list[RaceResult]:
        """Times candidates in turn; see `race_programs`."""
        where = (*self.context.environment, *race)
        programs = programs_of(self.analysis, candidates, where)
        how = {"looks": looks} if looks else {}
        return self._noted(race_programs(self.builder, programs, rounds, **how))

    def _noted(self, results: list[RaceResult]) -> list[RaceResult]:
        self.fresh.extend(one.name for one in results if not one.cached)
        return results

    def rank(self, candidates: Sequence[Candidate]) -> Ranking:
        """Times candidates, and the leaders again with other compiler options."""
        rules = self.context.rules
        # One turn is enough if leaders run again, or if times say little.
        say_little = rules.estimates
        rounds = 1 if rules.compiler_options or say_little else rules.rounds
        raced = self.time(candidates, rounds)
        first, new = second_race(raced, rules)
        if not new or self.is_over():
            return Ranking((), raced)
        names = {one.name for one in first}
        kept = {one.program.identity for one in raced if one.name in names}
        for identity in self.built.keys() - kept:
            del self.built[identity]
        looks: dict[str, ProfileRecord] = {}
        if not (say_little or any(one.cached for one in raced)):
            mine = [one for one in raced if one.name in names]
            looks = {one.program.identity: one.record for one in mine if one.record}
        again = [*first, *new]
        ran = self.time(again, rules.rounds, SECOND, looks)
        # What was not among the leaders has lost already, at another time.
        others = [one for one in raced if one.name not in names]
        return Ranking(ran, others)

    def attempts(
        self,
        candidates: Sequence[Candidate],
        known: Sequence[Candidate] = (),
        one_is_enough: bool = False,
        last_resort: bool = True,
    ) -> Iterator[Admitted]:
        """Compiles candidates in batches: near ones first, more as long as asked for.

        If none of the near ones fits, slower ones follow, and then the smallest. An
        error names the memory that the smallest needs. Where time is over, the first of
        these is compiled, and no other.

        Args:
            candidates: the best by prediction first.
            known: what is known to fit; it is tried in any case.
            one_is_enough: whether one that fits is, without a race.
            last_resort: whether the smallest are compiled where none of these fits; so
                they are where time is over.

        Raises:
            NoneFits: none does, and the smallest are not to be compiled.
        """
        keys = {one.key for one in known}
        new = [one for one in candidates if one.key not in keys]
        found = self._admit([*new, *known], keys, one_is_enough)
        yield found
        refused = found.refused
        is_plain = self.context.memory is None and not one_is_enough
        if is_plain and found.left and not self.is_over():
            found = self._admit([one for one, _ in found.left])
            yield found
            refused = [*refused, *found.refused]
        skipped = [o.outcome.reason for o in refused if isinstance(o.outcome, Skipped)]
        is_late = TOO_LATE in {*skipped, *(why for _, why in found.left)}
        is_late = is_late or self.is_over()
        if not (last_resort or is_late):
            raise NoneFits(self.seconds)
        for number, one in enumerate(self.smaller(refused)):
            if number and self.is_over():
                return
            [made] = self.compile_all([one])
            fitting, large = ([made], []) if made.may_race else ([], [made])
            yield Admitted(fitting, large, found.left)

    def _admit(
        self,
        candidates: Sequence[Candidate],
        known: Collection[object] = (),
        one_is_enough: bool = False,
    ) -> Admitted:
        """Compiles candidates until enough fit."""
        problem, analysis = self.solution.problem, self.analysis
        return compile_until_enough_fit(
            candidates,
            self.compile_all,
            memory=self.context.memory,
            size_of=lambda one: (
                self.sizes.get(one.key)
                or prediction_of(analysis, problem, one.choice).size
            ),
            reach=None if one_is_enough else self.context.rules.reach,
            known=known,
            compiled=self.sizes,
            at_once=self.builder.at_once,
            is_over=self.is_over,
        )

    def is_over(self) -> bool:
        """Returns True if the time for planning is over."""
        return self.context.is_over

    def smaller(
        self, refused: Sequence[RaceResult], others: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """Returns candidates that may fit where none compiled so far does.

        The best if memory is as far off as theirs, the leanest by prediction, and of
        the others what is predicted to fit, the smallest first.
        """
        analysis, problem = self.analysis, self.solution.problem
        if problem is None:
            return []
        ways = [leanest_of(analysis, problem)]
        needs = defaultdict[Choice, int](int)
        for one in refused:  # Without the memory limit, and with it.
            choice = one.candidate.choice
            needs[choice] = max(needs[choice], one.peak_bytes)
        if (most := self.context.budget_bytes) is not None:
            names = [one.name for one in self.solution.candidates]
            again = sum(name.startswith(LESS_MEMORY) for name in names)
            best = smaller_than(analysis, problem, needs, most, again + 1)
            sizes = [
                (prediction_of(analysis, problem, o.choice).size, o) for o in others
            ]
            known = [(size.peak_bytes, one) for size, one in sizes if size is not None]
            fitting = [pair for pair in known if pair[0] <= most]
            fitting.sort(key=lambda pair: pair[0])
            ways = [*([best] if best else []), *ways, *(one for _, one in fitting)]
        # What there was no time for yet is not refused.
        done = [one for one in refused if not isinstance(one.outcome, Skipped)]
        tried = {(one.candidate.choice, one.candidate.level) for one in done}
        found = dict[Choice, Candidate]()
        for one in ways:
            if (one.choice, one.level) not in tried:
                found.setdefault(one.choice, one)
        return [*found.values()][:MOST_REFUSED]

    def remember(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], ProfileKey | None]:
        """Finds earlier choices known to fit, and the key of the race's answer.

        What candidates need that were compiled before is noted.
        """
        context, problem = self.context, self.solution.problem
        if context.memory is None or problem is None:
            return [], None
        programs = programs_of(self.analysis, candidates, context.environment)
        asked = question(context, programs)
        self.sizes.update(compiled_before(context, programs))
        answer = answer_to(asked, context.store)
        near = self.within_reach(candidates)
        known = known_to_fit(context, self.analysis, problem, near, answer)
        presets = {one.choice for one in candidates if one.is_preset}
        known = [replace(one, is_preset=one.choice in presets) for one in known]
        return known, asked

    def within_reach(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that race if all fit."""
        anyway = exempt_from_reach(candidates)
        return within_reach(candidates, anyway, self.context.rules.reach)

    def nothing_fits(self, results: Sequence[RaceResult]) -> CfpError:
        """The error where none of what was compiled fits, or runs."""
        memory = self.context.memory
        reserve = memory.reserve_bytes if memory else 0
        budget = self.context.budget_bytes
        error = no_winner(self.analysis, results, budget, reserve)
        if isinstance(error, MemoryBudgetError) and self.is_over():
            return error.with_line(
                "Time for planning was over before all that may need less was compiled:"
                " with more of it (--time-budget, cfp.PlannerSettings(seconds=...)) a "
                "plan may fit."
            )
        return error

    def outcome(
        self,
        won: RaceResult,
        rows: Sequence[RaceRow],
        built: Built | None = None,
        counts: Mapping[str, float] | None = None,
        *,
        results: Sequence[RaceResult],
    ) -> RaceOutcome:
        """Returns the outcome of a race that has a winner."""
        absent = self.solution.unraced.items()
        counts = {**self.solution.counts, **(counts or {})}
        if built is not None:
            counts["compile_seconds"] = built.build_seconds
        elif won.record is not None:
            counts["compile_seconds"] = won.record.build_seconds
        return RaceOutcome(
            winner=won.candidate,
            result=won,
            peak_bytes=won.peak_bytes,
            built=built,
            rows=(
                *rows,
                *(RaceRow(name=n, predicted_ms=None, note=why) for n, why in absent),
            ),
            counts={
                **counts,
                RACE_SECONDS: self.seconds,
                "race_cached": float(not self.fresh),
            },
            raced=tuple((one.candidate, one.time_ms) for one in results if one.ran),
        )


def race(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    last_resort: bool = True,
) -> RaceOutcome:
    """The fastest of the best by prediction, its rivals and the presets.

    Without a race that is the best by prediction; or, where a memory budget was asked
    for, the best by prediction that fits when compiled.

    Args:
        last_resort: whether the smallest are compiled where no candidate fits.

    Raises:
        NoneFits: none does, and the smallest are not to be compiled.
        MemoryBudgetError: none of them fits in memory.
        CfpError: none of them runs.
    """
    run = Run(context, analysis, solution)
    candidates = solution.candidates
    decided_by = context.decided_by
    if decided_by is DecidedBy.RACE:
        return _race(run, candidates, last_resort)
    rows: Collection[RaceRow] = ()
    if isinstance(context.mesh, DescribedMesh):
        said = (prediction_of(analysis, solution.problem, c.choice) for c in candidates)
        needs = [one.peak_bytes for one in said]
        rows = not_run(candidates, needs, context.budget_bytes)
    counts = solution.counts
    if decided_by is not DecidedBy.COMPILER:
        return RaceOutcome(winner=candidates[0], rows=tuple(rows), counts=counts)
    fits, refused = _first_that_fits(run, candidates, last_resort)
    if rows:
        seen = {one.candidate.key for one in (fits, *refused)}
        whole = ConstraintLevel.EVERYTHING
        others = [o for o in candidates if o.level is whole and o.key not in seen]
        others.sort(key=expected_ms)
        made = [fits, *run.compile_all(others[: MOST_RACED - 1]), *refused]
        named = {row.name: row for row in rows}
        rows = (named | {one.name: compiled_row(one) for one in made}).values()
        counts = {**counts, RACE_SECONDS: run.seconds}
    return RaceOutcome(
        winner=fits.candidate,
        peak_bytes=fits.peak_bytes,
        rows=tuple(rows),
        counts=counts,
    )


# ---------------------------------------------------------------------- whole programs


def _race(run: Run, candidates: Sequence[Candidate], last_resort: bool) -> RaceOutcome:
    """Whole programs, compiled until enough fit, and timed."""
    run.built.clear()
    if run.context.memory is None:  # These options may take memory.
        first = run.context.rules.first_options
        candidates = [(with_options(one, first) or [one])[0] for one in candidates]
    known, asked = run.remember(candidates)
    fitting, refused, left = [], [], []
    ranking = Ranking((), ())
    for made in run.attempts(candidates, known, last_resort=last_resort):
        refused += made.refused
        left = made.left
        if made.fitting:
            fitting += [one.candidate for one in made.fitting]
            ranking = run.rank(fitting)
        if ranking.best is not None:
            break
    best, results = ranking.best, [*ranking.results, *refused]
    if asked is not None:
        jobs = [one.job for one in programs_of(run.analysis, known, ())]
        samples_ms = best.samples_ms if best else ()
        raced = [one.program.job.choice for one in ranking.results if one.ran]
        choices = [job.choice for job in jobs]
        keep_answer(asked, run.context.store, choices, samples_ms, raced)
    if best is None:
        raise run.nothing_fits(results)
    rows = [*map(race_row, results), *(left_out(one, why) for one, why in left)]
    tied = {one.samples_ms: one.time_ms for one in ranking.ties}
    counts = {}
    if len(tied) > 1:
        spread = max(tied.values()) / min(tied.values()) - 1.0
        counts = {"ties": len(tied) - 1, "tie_spread": spread}
    made = run.built.get(best.program.identity)
    return run.outcome(best, rows, made, counts, results=results)


def _first_that_fits(
    run: Run, candidates: Sequence[Candidate], last_resort: bool
) -> tuple[RaceResult, list[RaceResult]]:
    """The best by prediction whose whole program, compiled, fits; and what did not."""
    known, _ = run.remember(candidates)
    refused: list[RaceResult] = []
    attempts = run.attempts(candidates, known, True, last_resort)
    for made in attempts:
        refused += made.refused
        if made.fitting:
            return made.fitting[0], refused
    raise run.nothing_fits(refused)
