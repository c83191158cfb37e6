"""What a race does with candidates: compile, admit, time, compare, remember."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import PlanContext
from cfp.errors import CfpError
from cfp.profiling.builder import Built
from cfp.profiling.key import Parts, ProfileKey
from cfp.race.candidates import (
    leanest_of,
    predicted_size,
    smaller_than,
    with_options,
)
from cfp.race.compile import Builder, compile_programs
from cfp.race.enough import (
    MEMORY_SHARE,
    Admitted,
    enough_that_fit,
    limit_options,
    near_among,
    raced_anyway,
)
from cfp.race.programs import (
    RaceOutcome,
    RaceResult,
    RaceRow,
    TimedCandidate,
    programs_of,
)
from cfp.race.remembered import answer_to, known_to_fit, question
from cfp.race.shortage import no_winner
from cfp.race.truncated import Truncated
from cfp.race.turns import race_programs
from cfp.settings import (
    LEADERS,
    MOST_REFUSED,
    STAY_AFTER_TURN,
)
from cfp.solution import Candidate, Solution

# Kept apart from the first race: what leads must not change with this one.
SECOND: Parts = (("race", "with other compiler options"),)


def time_ms(timed: TimedCandidate) -> float:
    """What a candidate took."""
    return timed[1].time_ms


def second_race(
    field: Sequence[TimedCandidate],
    options: Mapping[str, Mapping[str, str]],
    presets: Collection[Choice],
) -> tuple[list[Candidate], list[Candidate]]:
    """What races again: leaders, what is close to the first, the best preset.

    Args:
        field: the first race.
        options: of the compiler, by name.
        presets: choices of which the best has what leaders have, or a ratio to it
            would mislead.

    Returns:
        Those, and variants of leaders with options; nothing if there are no variants.
    """
    ranked = sorted(field, key=time_ms)
    # The plan may be a preset: one program, under two names.
    distinct = {one.key: (one, r) for one, r in reversed(ranked) if r.ran}
    able = [*distinct.values()][::-1][:LEADERS]
    known = [(one, r) for one, r in ranked if one.choice in presets]
    leaders = {one.key: one for one, r in [*able, *known[:1]] if r.ran}
    keys = {one.key for one, _ in field}
    names = {one.name for one, _ in field}
    # What is remembered may be a variant of something.
    new = {
        one.key: one
        for one in with_options([*leaders.values()], options)
        if one.key not in keys and one.name not in names
    }
    if not new:
        return [], []
    limit_ms = STAY_AFTER_TURN * min(map(time_ms, able), default=0.0)
    close = [(one, r) for one, r in ranked if r.ran and r.time_ms <= limit_ms]
    first = {one.name: one for one, r in [*able, *close, *known[:1]] if r.ran}
    return [*first.values()], [*{one.name: one for one in new.values()}.values()]


@dataclass(frozen=True)
class Run:
    """A race, and what it has compiled."""

    context: PlanContext
    analysis: Analysis
    solution: Solution
    started: float = field(default_factory=time.perf_counter)
    built: dict[str, Built] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)  # What was not in the store.

    @property
    def builder(self) -> Builder:
        """What compiles and times candidates."""
        context = self.context
        return Builder(
            program=self.analysis.frame.program,
            mesh=context.devices,
            store=context.store,
            budget_bytes=context.budget_bytes,
            end=context.end,
            options=context.measure,
            built=self.built,
        )

    @property
    def presets(self) -> set[Choice]:
        return set(self.solution.presets.values())

    @property
    def rounds(self) -> int:
        """Of a race after which leaders run again, or in which times say little."""
        few = self.context.rules.compiler_options or self.context.rules.estimates
        return 1 if few else self.context.rules.rounds

    def compile_all(self, candidates: Sequence[Candidate]) -> list[RaceResult]:
        """What candidates need, and which cannot race."""
        context, analysis = self.context, self.analysis
        programs = programs_of(analysis, candidates, context.environment)
        found = compile_programs(self.builder, programs)
        pairs = zip(candidates, found, strict=True)
        self.fresh.extend(one.name for one, made in pairs if not made.cached)
        return found

    def time(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        stage: Parts = (),
        truncated: Truncated | None = None,
    ) -> list[TimedCandidate]:
        """How candidates do, timed in turn."""
        context, analysis = self.context, self.analysis
        where = (*context.environment, *stage)
        programs = programs_of(analysis, candidates, where, truncated)
        results = race_programs(self.builder, programs, rounds)
        self.fresh.extend(result.name for result in results if not result.cached)
        return list(zip(candidates, results, strict=True))

    def leaders_again(
        self, raced: list[TimedCandidate], truncated: Truncated | None
    ) -> tuple[list[TimedCandidate], list[TimedCandidate]]:
        """Races leaders with other compiler options; how these did, and the others."""
        context = self.context
        first, new = second_race(raced, context.rules.compiler_options, self.presets)
        if not new or context.agreement.is_over(context.end):
            return [], raced
        names = {one.name for one in first}
        for name in self.built.keys() - names:
            del self.built[name]
        rounds = context.rules.rounds
        again = self.time([*first, *new], rounds, SECOND, truncated)
        ranked = sorted(raced, key=time_ms)
        return again, [(one, r) for one, r in ranked if one.name not in names]

    def admit(
        self,
        candidates: Sequence[Candidate],
        known: Collection[object] = (),
        one_is_enough: bool = False,
    ) -> Admitted:
        """Compiles candidates until enough fit."""
        problem, analysis = self.solution.problem, self.analysis
        return enough_that_fit(
            candidates,
            self.compile_all,
            memory=self.context.memory,
            size_of=lambda one: predicted_size(analysis, problem, one.choice),
            reach=None if one_is_enough else self.context.rules.reach,
            presets=self.presets,
            known=known,
        )

    def last_resort(self, admitted: Admitted) -> Admitted:
        """The leanest by prediction; and the smallest compiled, with the memory limit.

        What these need is what an error names.
        """
        memory, problem = self.context.memory, self.solution.problem
        refused = list(admitted.refused)
        if problem is not None:
            lean = leanest_of(self.analysis, problem)
            [made] = self.compile_all([lean])
            if made.may_race:
                return Admitted([(lean, made)], refused)
            refused.append((lean, made))
        plain = [(c, m) for c, m in refused if MEMORY_SHARE not in c.options]
        large = [(c, m) for c, m in plain if not m.fits]
        if memory is None or not large:
            return Admitted([], refused)
        smallest, made = min(large, key=lambda pair: pair[1].peak_bytes)
        options = limit_options(memory, made.record)
        variants = with_options([smallest], options)
        known = {one.key for one, _ in refused}
        variants = [one for one in variants if one.key not in known]
        for one in variants:
            [made] = self.compile_all([one])
            if made.may_race:
                return Admitted([(one, made)], refused)
            refused.append((one, made))
        return Admitted([], refused)

    def sieve(self, timed: Sequence[TimedCandidate]) -> list[TimedCandidate]:
        """The same; what is too large, scaled to the whole program, does not fit."""
        most = self.context.budget_bytes
        if most is None:
            return [*timed]
        return [
            (one, replace(made, fits=made.fits and made.peak_bytes <= most))
            for one, made in timed
        ]

    def smaller(
        self, large: Sequence[TimedCandidate], others: Sequence[Candidate]
    ) -> list[Candidate]:
        """What may fit where none of what was compiled does, the likeliest first.

        The best if memory is as far off as theirs, the leanest by prediction, and of
        the others what is predicted to fit, the smallest first.
        """
        problem, most = self.solution.problem, self.context.budget_bytes
        if problem is None or most is None:
            return []
        needs = {one.choice: made.peak_bytes for one, made in large if made.peak_bytes}
        best = smaller_than(self.analysis, problem, needs, most)
        sizes = [
            (size.peak_bytes, one)
            for one in others
            if (size := predicted_size(self.analysis, problem, one.choice))
        ]
        sizes.sort(key=lambda pair: pair[0])
        fitting = [one for size, one in sizes if size <= most]
        ways = [best, leanest_of(self.analysis, problem), *fitting]
        found = dict[Choice, Candidate]()
        for one in filter(None, ways):
            found.setdefault(one.choice, one)
        new = [one for choice, one in found.items() if choice not in needs]
        return new[:MOST_REFUSED]

    def remember(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], ProfileKey | None]:
        """What is known to fit and is no candidate yet; and what that answers."""
        context, problem = self.context, self.solution.problem
        if context.memory is None or problem is None or not context.agreement.alone:
            return [], None
        programs = programs_of(self.analysis, candidates, context.environment)
        asked = question(context, programs)
        answer = answer_to(asked, context.store)
        near = self.near_among(candidates)
        return known_to_fit(context, self.analysis, problem, near, answer), asked

    def near_among(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that race if all fit."""
        anyway = raced_anyway(candidates, self.presets)
        return near_among(candidates, anyway, self.context.rules.reach)

    def nothing_fits(self, results: Sequence[RaceResult]) -> CfpError:
        memory = self.context.memory
        reserve = memory.reserve_bytes if memory else 0
        return no_winner(self.analysis, results, self.context.budget_bytes, reserve)

    def outcome(
        self,
        won: TimedCandidate,
        rows: Sequence[RaceRow],
        ties: Sequence[TimedCandidate] = (),
        built: Built | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> RaceOutcome:
        found = {
            **self.solution.counts,
            "race_seconds": time.perf_counter() - self.started,
            "race_cached": float(not self.fresh),
            **(counts or {}),
        }
        if (count := len({result.samples_ms for _, result in ties})) > 1:
            found["ties"] = count - 1
        absent = [
            RaceRow(name=name, predicted_ms=None, note=why)
            for name, why in self.solution.unraced.items()
        ]
        winner, result = won
        return RaceOutcome(
            winner=winner,
            result=result,
            peak_bytes=result.peak_bytes,
            built=built,
            rows=(*rows, *absent),
            counts=found,
        )
