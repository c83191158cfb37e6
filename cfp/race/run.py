"""Steps of a race: compile, admit, time, compare, remember."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import PlanContext
from cfp.errors import CfpError
from cfp.profiling.builder import Built
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.record import CompiledBytes
from cfp.race.candidates import (
    at_levels,
    leanest_of,
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
    programs_of,
    time_ms,
    was_refused,
)
from cfp.race.remembered import answer_to, known_to_fit, question
from cfp.race.shortage import no_winner
from cfp.race.truncated import Truncated
from cfp.race.turns import Ranking, race_programs
from cfp.settings import (
    LEADERS,
    MOST_REFUSED,
    STAY_AFTER_LOOK,
    STAY_AFTER_TURN,
    ConstraintLevel,
)
from cfp.solution import Candidate, Solution, prediction_of

# Kept apart from the first race: what leads must not change with this one.
SECOND: Parts = (("race", "with other compiler options"),)


def second_race(
    raced: Sequence[RaceResult],
    options: Mapping[str, Mapping[str, str]],
    levels: Sequence[ConstraintLevel] = (),
) -> tuple[list[Candidate], list[Candidate]]:
    """Selects what races again: leaders, near ties, the best preset.

    Args:
        raced: the first race.
        options: of the compiler, by name. The best preset gets them as leaders do, or
            a ratio to it would mislead; unless it is as far behind as what is left out
            after a look at all.
        levels: constraint levels at which presets race only if they lead.

    Returns:
        Those, and variants of leaders with options, and at levels; nothing if there
        are no variants.
    """
    ranked = sorted(raced, key=time_ms)
    known = [one for one in ranked if one.candidate.is_preset][:1]
    ran = [one for one in ranked if one.ran]
    # The plan may be a preset: one program, under two names.
    distinct = {one.candidate.key: one for one in reversed(ran)}
    able = [*distinct.values()][::-1][:LEADERS]
    near_ms = STAY_AFTER_LOOK * min(map(time_ms, able), default=0.0)
    near = (one for one in (*able, *known) if one.ran and one.time_ms <= near_ms)
    leaders = {one.candidate.key: one.candidate for one in near}
    keys = {one.candidate.key for one in raced}
    names = {one.name for one in raced}
    # What is remembered may be a variant of something.
    new = {
        one.key: one
        for one in (
            *with_options([*leaders.values()], options),
            *at_levels([*leaders.values()], levels),
        )
        if one.key not in keys and one.name not in names
    }
    if not new:
        return [], []
    limit_ms = STAY_AFTER_TURN * min(map(time_ms, able), default=0.0)
    close = [one for one in ran if one.time_ms <= limit_ms]
    first = {one.name: one.candidate for one in (*able, *close, *known) if one.ran}
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
    # Of candidates that were compiled before, by key.
    sizes: dict[object, CompiledBytes] = field(default_factory=dict)

    @property
    def builder(self) -> Builder:
        """Builder that compiles and times candidates."""
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

    def compile_all(self, candidates: Sequence[Candidate]) -> list[RaceResult]:
        """Compiles candidates; results say what they need and which cannot race."""
        environment = self.context.environment
        programs = programs_of(self.analysis, candidates, environment)
        return self._noted(compile_programs(self.builder, programs))

    def time(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        stage: Parts = (),
        truncated: Truncated | None = None,
    ) -> list[RaceResult]:
        """Times candidates in turn."""
        where = (*self.context.environment, *stage)
        programs = programs_of(self.analysis, candidates, where, truncated)
        return self._noted(race_programs(self.builder, programs, rounds))

    def _noted(self, results: list[RaceResult]) -> list[RaceResult]:
        self.fresh.extend(one.name for one in results if not one.cached)
        return results

    def rank(
        self, candidates: Sequence[Candidate], truncated: Truncated | None = None
    ) -> Ranking:
        """Times candidates, and the leaders again with other compiler options."""
        context, rules = self.context, self.context.rules
        # One turn is enough if leaders run again, or if times say little.
        few = rules.compiler_options or rules.later_levels or rules.estimates
        rounds = 1 if few else rules.rounds
        raced = self.time(candidates, rounds, truncated=truncated)
        first, new = second_race(raced, rules.compiler_options, rules.later_levels)
        if not new or context.agreement.is_over(context.end):
            return Ranking((), raced)
        names = {one.name for one in first}
        kept = {one.program.identity for one in raced if one.name in names}
        for identity in self.built.keys() - kept:
            del self.built[identity]
        again = self.time([*first, *new], rules.rounds, SECOND, truncated)
        # What was not among the leaders has lost already, at another time.
        return Ranking(again, [one for one in raced if one.name not in names])

    def attempts(
        self,
        candidates: Sequence[Candidate],
        known: Sequence[Candidate] = (),
        one_is_enough: bool = False,
    ) -> Iterator[Admitted]:
        """Candidates, compiled: what is near, and more, as long as that is asked for.

        What is far behind is better than nothing; and where nothing else fits, so is
        what needs least. What that needs is what an error names.

        Args:
            candidates: the best by prediction first.
            known: what is known to fit; it is tried in any case.
            one_is_enough: whether one that fits is, without a race.
        """
        keys = {one.key for one in known}
        new = [one for one in candidates if one.key not in keys]
        found = self._admit([*new, *known], keys, one_is_enough)
        yield found
        refused = found.refused
        if self.context.memory is None and found.left and not one_is_enough:
            found = self._admit([one for one, _ in found.left])
            yield found
            refused = [*refused, *found.refused]
        for find in (self.smaller, self._limited):
            for one in find(refused):
                [made] = self.compile_all([one])
                fitting, large = ([made], []) if made.may_race else ([], [made])
                yield Admitted(fitting, large, found.left)
                refused = [*refused, *large]

    def _admit(
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
            size_of=lambda one: (
                self.sizes.get(one.key)
                or prediction_of(analysis, problem, one.choice).size
            ),
            reach=None if one_is_enough else self.context.rules.reach,
            known=known,
            is_over=lambda: self.context.agreement.is_over(self.context.end),
        )

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
            best = smaller_than(analysis, problem, needs, most)
            sizes = [
                (prediction_of(analysis, problem, o.choice).size, o) for o in others
            ]
            known = [(size.peak_bytes, one) for size, one in sizes if size is not None]
            fitting = [pair for pair in known if pair[0] <= most]
            fitting.sort(key=lambda pair: pair[0])
            ways = [*([best] if best else []), *ways, *(one for _, one in fitting)]
        tried = {(one.candidate.choice, one.candidate.level) for one in refused}
        found = dict[Choice, Candidate]()
        for one in ways:
            if (one.choice, one.level) not in tried:
                found.setdefault(one.choice, one)
        return [*found.values()][:MOST_REFUSED]

    def _limited(self, refused: Sequence[RaceResult]) -> list[Candidate]:
        """The smallest of what was compiled, with the memory limit."""
        memory = self.context.memory
        plain = [o for o in refused if MEMORY_SHARE not in o.candidate.options]
        large = [one for one in plain if not one.fits]
        if memory is None or not large:
            return []
        smallest = min(large, key=lambda one: one.peak_bytes)
        options = limit_options(memory, smallest.record)
        tried = {one.candidate.key for one in refused}
        variants = with_options([smallest.candidate], options)
        return [one for one in variants if one.key not in tried]

    def remember(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], ProfileKey | None]:
        """Finds earlier choices known to fit, and the key of the race's answer.

        What candidates need that were compiled before is noted.
        """
        context, problem = self.context, self.solution.problem
        if context.memory is None or problem is None or not context.agreement.alone:
            return [], None
        programs = programs_of(self.analysis, candidates, context.environment)
        asked = question(context, programs)
        compiled = context.store.get_many(one.job.key.digest for one in programs)
        for one in programs:
            record = compiled.get(one.job.key.digest)
            if record is not None and (record.ok or was_refused(record)):
                self.sizes[one.candidate.key] = record
        answer = answer_to(asked, context.store)
        near = self.near_among(candidates)
        known = known_to_fit(context, self.analysis, problem, near, answer)
        presets = {one.choice for one in candidates if one.is_preset}
        known = [replace(one, is_preset=one.choice in presets) for one in known]
        return known, asked

    def near_among(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that race if all fit."""
        anyway = raced_anyway(candidates)
        return near_among(candidates, anyway, self.context.rules.reach)

    def nothing_fits(self, results: Sequence[RaceResult]) -> CfpError:
        """The error where none of what was compiled fits, or runs."""
        memory = self.context.memory
        reserve = memory.reserve_bytes if memory else 0
        return no_winner(self.analysis, results, self.context.budget_bytes, reserve)

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
                **self.solution.counts,
                "race_seconds": time.perf_counter() - self.started,
                "race_cached": float(not self.fresh),
                **(counts or {}),
            },
            raced=tuple((one.candidate, one.time_ms) for one in results if one.ran),
        )
