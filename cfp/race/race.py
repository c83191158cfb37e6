"""The race: compiles and times candidates, whole programs; the winner is the plan.

Candidates are presets and the best choices by each prediction, both from
:mod:`cfp.passes`. The order of the race:

candidates  named, at constraint levels             :mod:`cfp.race.programs`
remembered  a choice that an earlier run compiled   :mod:`cfp.race.compile`
admission   compiled until enough fit               :mod:`cfp.race.admission`
turns       timed in turn                           :mod:`cfp.race.turns`
again       the leader with other compiler options, and near candidates
ties        the simplest of the fastest wins
flags       the winner's branches, each timed       :mod:`cfp.race.turns`
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext
from cfp.profiling.builder import Built, CompilePool, default_threads
from cfp.profiling.record import (
    CompiledBytes,
    Parts,
    ProfileKey,
    ProfileRecord,
    utc_now,
)
from cfp.race.admission import (
    Admitted,
    compile_until_enough_fit,
    exempt_from_reach,
    within_reach,
)
from cfp.race.compile import (
    Answer,
    Builder,
    answer_to,
    choice_digest,
    compile_programs,
    compiled_before,
    keep_answer,
    keep_built,
    question,
    to_race_again,
)
from cfp.race.programs import (
    NOT_RUN,
    SAME_AS,
    TOO_LARGE,
    RaceOutcome,
    RaceResult,
    RaceRow,
    compiled_row,
    left_out,
    programs_of,
    race_row,
    with_options,
)
from cfp.race.turns import Ranking, race_programs, second_race, time_flags
from cfp.search.guided import RACE_SECONDS, Candidate, Solution, Stage, prediction_of
from cfp.settings import ConstraintLevel

# A key of its own, so that this race cannot change the leaders of the first.
SECOND: Parts = (("race", "with other compiler options"),)


@dataclass(frozen=True)
class Race:
    """A race of a solution's candidates, and the programs compiled for it.

    Attributes:
        built: ``{identity of a program: compiled program}``.
        sizes: ``{candidate's key: memory}``, of earlier runs.
    """

    context: PlanContext
    analysis: Analysis
    solution: Solution
    started: float = field(default_factory=time.perf_counter)
    built: dict[str, Built] = field(default_factory=dict)
    sizes: dict[object, CompiledBytes] = field(default_factory=dict)

    @property
    def builder(self) -> Builder:
        """Makes the builder that compiles and times candidates."""
        return Builder(self.context, self.analysis.frame.program, self.built)

    @property
    def seconds(self) -> float:
        """Seconds of this race until now, and of earlier races for the same plan."""
        before_seconds = self.solution.counts.get(RACE_SECONDS, 0.0)
        return before_seconds + time.perf_counter() - self.started

    def compile_all(self, candidates: Sequence[Candidate]) -> list[RaceResult]:
        """Compiles candidates; returns their results, in order.

        Before a race, devices have little else to do. So kernels of the first candidate
        with kernels are compared meanwhile; `check_sites` keeps passes.
        """
        context, program = self.context, self.analysis.frame.program
        programs = programs_of(self.analysis, candidates, context.environment)
        replacing = [p.job.constraints for p in programs if p.job.constraints.replaced]
        if not context.races or not replacing:
            return compile_programs(self.builder, programs)
        from cfp.race.sites import check_sites  # For plans with kernels only.

        with self.builder.in_flight as in_flight, CompilePool(1) as pool:
            check = partial(check_sites, context, program, replacing[0], in_flight)
            checking = pool.start("a replaced part", check)
            results = compile_programs(self.builder, programs)
            checking.exception()  # A kernel that fails here fails its program, too.
        return results

    def time(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        race: Parts = (),
        looks: Mapping[str, ProfileRecord] = MappingProxyType({}),
        is_warm: bool = False,
    ) -> list[RaceResult]:
        """Times candidates by `race_programs`, with `race` as a part of their keys."""
        where = (*self.context.environment, *race)
        programs = programs_of(self.analysis, candidates, where)
        return race_programs(self.builder, programs, rounds, looks, is_warm)

    def rank(self, candidates: Sequence[Candidate]) -> Ranking:
        """Times candidates; if options may race, times leaders again with variants."""
        defaults = self.context.defaults
        # One turn is enough if leaders run again.
        runs_again = defaults.compiler_options
        raced = self.time(candidates, 1 if runs_again else defaults.rounds)
        first, new = second_race(raced, defaults, self.solution.rates)
        again = [*first, *new]
        if not (runs_again and again) or self.context.is_over:
            return Ranking((), raced)
        names = {one.name for one in first}
        kept = {one.program.identity for one in raced if one.name in names}
        for identity in self.built.keys() - kept:
            del self.built[identity]
        looks: dict[str, ProfileRecord] = {}
        if not any(one.cached for one in raced):
            mine = [one for one in raced if one.name in names]
            looks = {one.program.identity: one.record for one in mine if one.record}
        is_warm = bool(looks) and not new  # Nothing compiled meanwhile.
        ran = self.time(again, defaults.rounds, SECOND, looks, is_warm)
        # Times of the first race do not compare with the second's.
        return Ranking(ran, [one for one in raced if one.name not in names])

    def batches(
        self,
        candidates: Sequence[Candidate],
        known: Sequence[Candidate],
        one_is_enough: bool = False,
    ) -> Iterator[Admitted]:
        """Yields compiled candidates in batches; the caller may stop after any.

        The first is `compile_until_enough_fit`'s. A race without a budget has a second,
        of those left. In `Stage.SMALLEST`, each candidate is one, until the deadline.

        Args:
            candidates: the best by prediction first.
            known: remembered candidates, compiled in any case.
            one_is_enough: True to end with the first that fits, without a race.
        """
        if self.solution.stage is Stage.SMALLEST:
            for number, one in enumerate(candidates):
                if number and self.context.is_over:
                    return
                [made] = self.compile_all([one])
                yield Admitted([made], []) if made.may_race else Admitted([], [made])
            return
        keys = {one.key for one in known}
        new = [one for one in candidates if one.key not in keys]
        found = self._admit([*new, *known], keys, one_is_enough)
        yield found
        is_plain = self.context.memory is None and not one_is_enough
        if is_plain and found.left and not self.context.is_over:
            yield self._admit([one for one, _ in found.left])

    def _admit(
        self,
        candidates: Sequence[Candidate],
        known: Collection[object] = (),
        one_is_enough: bool = False,
    ) -> Admitted:
        problem, analysis = self.solution.problem, self.analysis
        return compile_until_enough_fit(
            candidates,
            self.compile_all,
            memory=self.context.memory,
            size_of=lambda one: (
                self.sizes.get(one.key)
                or prediction_of(analysis, problem, one.choice).size
            ),
            reach=None if one_is_enough else self.context.defaults.reach,
            known=known,
            compiled=self.sizes,
            at_once=default_threads(self.builder.platform),
            is_over=lambda: self.context.is_over,
        )

    def remember(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], ProfileKey | None]:
        """Returns `to_race_again`'s candidates, and the key of the race's answer.

        Empty and None without budget or search, and in `Stage.SMALLEST`. Fills `sizes`.
        """
        context, problem = self.context, self.solution.problem
        is_last = self.solution.stage is Stage.SMALLEST
        if context.memory is None or problem is None or is_last:
            return [], None
        programs = programs_of(self.analysis, candidates, context.environment)
        asked = question(context, programs)
        self.sizes.update(compiled_before(context, programs))
        answer = answer_to(asked, context.store) if context.races else None
        anyway = exempt_from_reach(candidates)
        near = within_reach(candidates, anyway, context.defaults.reach)
        known = to_race_again(context, self.analysis, problem, near, answer)
        presets = {one.choice for one in candidates if one.is_preset}
        known = [replace(one, is_preset=one.choice in presets) for one in known]
        return known, asked

    def outcome(self) -> RaceOutcome:
        """Compiles candidates until enough fit, and times them.

        Without a race, compiles until one fits.
        """
        context, solution = self.context, self.solution
        candidates, races = solution.candidates, context.races
        if races and context.memory is None:  # First options may need more memory.
            defaults, best = context.defaults, candidates[0]
            tuned = [
                best.without(off, name=f"{best.name}, {name}")
                for name, off in defaults.slow_to_tune.items()
            ]
            candidates = [
                (with_options(one, defaults.first_options) or [one])[0]
                for one in (best, *tuned, *candidates[1:])
            ]
        known, asked = self.remember(candidates)
        fitting, refused, left = list[RaceResult](), list[RaceResult](), []
        best, ranking = None, Ranking((), ())
        for made in self.batches(candidates, known, one_is_enough=not races):
            refused += made.refused
            fitting += made.fitting
            left = made.left
            if races and made.fitting:
                ranking = self.rank([one.candidate for one in fitting])
            best = ranking.best if races else next(iter(fitting), None)
            if best is not None:
                break
        results = [*(ranking.results if races else fitting), *refused]
        absent = solution.unraced.items()
        rows = [
            *map(race_row, results),
            *(left_out(one, why) for one, why in left),
            *(RaceRow(name=name, predicted_ms=None, note=why) for name, why in absent),
        ]
        counts: dict[str, float] = {**solution.counts}
        counts["race_cached"] = float(races and all(one.cached for one in results))
        built = best and self.built.get(best.program.identity)
        if not races:
            rows = [*self.estimated_rows(results).values()]
            if best and built:
                keep_built(context.store, best.program, built)
        elif best:
            self._keep(best, ranking, known, asked)
            tied = {one.samples_ms: one.time_ms for one in ranking.ties}.values()
            if len(tied) > 1:  # Equal programs share their samples.
                spread = max(tied) / min(tied) - 1.0
                counts |= {"ties": len(tied) - 1, "tie_spread": spread}
            flags, name = time_flags(self.builder, best), best.name
            rows = [replace(r, flag_ms=flags * (r.name == name)) for r in rows]
        counts[RACE_SECONDS] = self.seconds
        if best:
            counts["compile_seconds"] = best.build_seconds
        return RaceOutcome(
            solution=solution,
            winner=best and best.candidate,
            time_ms=best.time_ms if best and races else None,
            peak_bytes=best and best.peak_bytes,
            built=built,
            rows=tuple(rows),
            results=tuple(results),
            counts=counts,
        )

    def _keep(
        self,
        best: RaceResult,
        ranking: Ranking,
        known: Sequence[Candidate],
        asked: ProfileKey | None,
    ) -> None:
        if asked is None:
            return
        jobs = [one.job for one in programs_of(self.analysis, known, ())]
        raced = {one.program.job.choice for one in ranking.results if one.ran}
        answer = Answer(
            known=jobs[0].choice if jobs else "",
            time_ms=best.time_ms,
            ended=utc_now(),
            raced=tuple(map(choice_digest, sorted(raced))),
        )
        keep_answer(asked, self.context.store, answer)

    def estimated_rows(self, results: Sequence[RaceResult] = ()) -> dict[str, RaceRow]:
        """Rows by name of fully constrained candidates, and results; {} if measured."""
        if not self.context.defaults.estimates:
            return {}
        problem, most = self.solution.problem, self.context.budget_bytes
        compiled = (one.candidate for one in results if one.may_race)
        found, won = {}, next(compiled, self.solution.candidates[0])
        for one in self.solution.candidates:
            if one.level is not ConstraintLevel.EVERYTHING:
                continue
            size = prediction_of(self.analysis, problem, one.choice).peak_bytes or 0
            why = NOT_RUN if most is None or size <= most else TOO_LARGE
            if one.key == won.key and one.name != won.name:
                why = f"{SAME_AS}{won.name}"
            row = replace(left_out(one, why), peak_bytes=size, rung="estimated")
            found[one.name] = row
        return found | {one.name: compiled_row(one) for one in results}


def race(context: PlanContext, analysis: Analysis, solution: Solution) -> RaceOutcome:
    """Races a solution's candidates; the winner is the plan.

    Without a race, the best by prediction wins; if `context.compiles`, the best that
    fits when compiled. If no candidate fits or runs, `winner` is None.
    """
    shared, found = context.defaults.shared_options, solution.candidates
    found = [replace(one, options={**shared, **one.options}) for one in found]
    solution = replace(solution, candidates=found)
    run = Race(context, analysis, solution)
    if context.compiles:
        return run.outcome()
    return RaceOutcome(
        solution=solution,
        winner=solution.candidates[0],
        rows=tuple(run.estimated_rows().values()),
        counts=solution.counts,
    )
