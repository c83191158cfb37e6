"""The last pass: the found plan and its rivals, timed; the fastest is the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cfp.entries import (
    Entrant,
    by_size,
    complexity,
    extent_name,
    in_reach,
    known_to_fit,
    leanest_of,
    let_down,
    one_by_one,
    predicted_bytes,
    predicted_ms,
    tied_with,
    told_of_budget,
    with_options,
)
from cfp.errors import CfpError
from cfp.plan import Plan
from cfp.planner_parts import (
    TOO_FAR,
    TOO_LARGE,
    UNMEASURED,
    Decision,
    Ground,
    compose_plan,
    finalists,
    left_out,
    not_run,
)
from cfp.profiling.builder import BuildEnvironment, Built
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord
from cfp.search.answers import answer_to, keep_answer, question
from cfp.search.compiler import variants
from cfp.search.finalist import Finalist, RaceResult
from cfp.search.measure import Told
from cfp.search.race import first_that_fits, race
from cfp.search.shortened import Shortened, shorten
from cfp.search.spread import ENOUGH_SAMPLES
from cfp.search.squeeze import Room
from cfp.shortage import no_winner
from cfp.whole import Refused, first_whole

# How many of the fastest are raced with other compiler options, too.
_LEADERS = 2
_ROUNDS_ON_CPUS = 2
# Where leaders run again, or times say little, a look tells which lead.
_ROUNDS_BEFORE_OPTIONS = 1
_CLOSE = 1.03
# A classic that is predicted to take this many times as long as the plan is not raced.
# On 2 H200 predictions were off by 8% at most, and what is told of arguments alone, for
# which the same prediction stands, was up to 8% faster; virtual devices vary more.
_REACH = {Told.EVERYTHING: 1.1, Told.ARGUMENTS: 1.2}
_REACH_ON_CPUS = 2.0
# Of a device's memory: who needs more by prediction, or abridged, does not fit.
_SURELY_TOO_LARGE = 1.1


class Contest:
    """Who takes part, and who wins."""

    def __init__(self, ground: Ground, decision: Decision) -> None:
        self.ground = ground
        self.decision = decision
        self.winner = decision
        self._reserve = ground.room.reserve_bytes if ground.room else 0
        is_cpu, settings = ground.platform == "cpu", ground.settings
        everywhere = settings.reach or (_REACH_ON_CPUS if is_cpu else None)
        self._reach = dict.fromkeys(Told, everywhere) if everywhere else _REACH
        self._rounds = _ROUNDS_ON_CPUS if is_cpu else ENOUGH_SAMPLES
        asked = settings.compiler_options
        self._options = variants(ground.platform) if asked is None else asked
        every = (Told.EVERYTHING,) if is_cpu else tuple(Told)
        self._extents = settings.extents or every
        self._most_bytes = _SURELY_TOO_LARGE * (ground.device_bytes or float("inf"))
        self._asked: ProfileKey | None = None
        self._known: list[Decision] = []
        self._cached = True
        self._wholes: dict[str, Built] = {}

    def trusted(self) -> Plan:
        """The decision, by prediction alone."""
        return self._plan(not_run(*self._entries()) if self.ground.described else [])

    def race(self) -> Plan:
        """The fastest of the decision and the classics, by their measured times.

        Where a program repeats itself often, abridged ones run, and the winner's whole
        program after them.

        Raises:
            MemoryBudgetError: none of them fits in memory.
            DeviceError: none of them runs.
        """
        started = time.perf_counter()
        entries, far = self._entries()
        shortened, large = self._shortened(entries)
        made = None
        if shortened is not None:
            near = [entry for entry in entries if entry not in large]
            made = self._raced(near, far, started, shortened, large)
        if made is None:
            near, told, large = self._sorted_out(entries)
            near += self._remember(entries, [*near, *told])
            made = self._raced(near, far, started, None, large, told)
        assert made is not None, "whole programs lead to a plan, or to an error"
        return made

    def compiled_within(self, room: Room) -> Plan:
        """The best by prediction whose whole program, compiled, fits in a budget.

        Raises:
            MemoryBudgetError: none of them fits in memory.
        """
        decision, analysis = self.decision, self.ground.analysis
        entrants, far = self._entries()
        near = [*entrants[1:], *self._remember(entrants, entrants)]
        rest = sorted([*near, *far], key=lambda e: e.predicted_ms or float("inf"))
        lean = decision.problem and leanest_of(analysis, decision.problem)
        entries: list[Decision] = []

        def record_of(entry: Decision) -> ProfileRecord | None:
            [finalist] = finalists(analysis, [entry], self.ground.environment)
            return self.ground.store.get(finalist.job.key.digest)

        def hopefuls() -> Iterator[Finalist]:
            for entry in one_by_one([decision, *rest], lean, record_of, room):
                entries.append(entry)
                yield from finalists(analysis, [entry], self.ground.environment)

        refused, peak_bytes = first_that_fits(
            analysis.frame.program,
            self.ground.devices,
            hopefuls(),
            self.ground.store,
            budget_bytes=room.budget_bytes,
            **self.ground.manner,
        )
        if peak_bytes is None:
            raise self._nobody(refused)
        self.winner = replace(entries[len(refused)], search=decision.search)
        return replace(self._plan([]), peak_bytes=peak_bytes)

    # -- inside --------------------------------------------------------------

    def _entries(self) -> tuple[list[Decision], list[Decision]]:
        """Who takes part, and who does only if none of them can."""
        ground, decision = self.ground, self.decision
        if decision.problem is None:
            return [decision], []
        varied = [
            Decision(
                extent_name(name, extent),
                choice,
                predicted_ms(ground.analysis, decision.problem, choice),
                extent=extent,
            )
            for extent in self._extents
            for name, choice in decision.classics.items()
        ]
        classics, far = in_reach(decision, varied, self._reach)
        rivals, behind = in_reach(decision, decision.rivals, self._reach)
        entries, far = [decision, *classics, *rivals], [*far, *behind]
        return entries, far

    def _remember(
        self, entries: Sequence[Decision], taking_part: Sequence[Decision]
    ) -> list[Decision]:
        """Who is known to fit and does not take part yet.

        Args:
            entries: who wanted to take part: the question that this answers.
            taking_part: those of them that do, and variants.
        """
        ground = self.ground
        is_alone = Agreement.of(ground.devices).alone
        if ground.room is None or self.decision.problem is None or not is_alone:
            return []
        environment, options = ground.environment, self._options.values()
        jobs = [f.job for f in finalists(ground.analysis, entries, environment)]
        asked = question(jobs, options, ground.room.budget_bytes, environment)
        where = (ground.analysis, ground.store, environment)
        how = (ground.plans, options, ground.room, answer_to(asked, ground.store))
        self._asked = asked
        self._known = known_to_fit(*where, taking_part or entries, *how)
        return self._known

    def _sorted_out(
        self, entries: Sequence[Decision]
    ) -> tuple[list[Decision], list[Decision], list[Decision]]:
        """Who may fit, whom the compiler is told of the budget for, and who cannot."""
        ground, problem = self.ground, self.decision.problem
        if ground.room is None or problem is None:
            return list(entries), [], []
        rest = [entry for entry in entries if entry is not self.decision]
        near, told, large = by_size(ground.analysis, problem, rest, ground.room)
        near = [e for e in entries if e is self.decision or e in near]
        return near, told, large

    def _shortened(
        self, entries: Sequence[Decision]
    ) -> tuple[Shortened | None, list[Decision]]:
        """What stands for the whole program, and who would not fit with all of it.

        None under a budget: only whole programs tell what they need. Of who may fit
        into a device or not, that is found out where one of them wins.
        """
        ground, problem = self.ground, self.decision.problem
        kept = ground.settings.repeats
        if ground.room is not None or problem is None or kept is None:
            return None, []
        large = []
        for entry in entries if ground.device_bytes else ():
            need = predicted_bytes(ground.analysis, problem, entry.choice)
            if need is None:
                return None, []
            if need > self._most_bytes:
                large.append(entry)
        choices = [entry.choice for entry in entries if entry not in large]
        return shorten(ground.analysis, problem, choices, kept), large

    def _raced(
        self,
        entries: list[Decision],
        far: list[Decision],
        started: float,
        shortened: Shortened | None = None,
        large: Sequence[Decision] = (),
        ahead: Sequence[Decision] = (),
    ) -> Plan | None:
        """The plan of the fastest; None if shortened programs do not lead to one.

        Ahead are variants that are told of the budget from the first.
        """
        ground, decision = self.ground, self.decision
        programs: dict[str, Built] = {}
        few = self._options or ground.estimates
        rounds = _ROUNDS_BEFORE_OPTIONS if few else self._rounds
        where, how = ground.environment, {"rounds": rounds, "programs": programs}
        entries = [*entries, *ahead]
        field = self._race(entries, where, shortened, **how)
        if decision.problem and not any(result.ran for _, result in field):
            if shortened:
                return None
            lean = leanest_of(ground.analysis, decision.problem)
            entries, far = [*entries, *far], []
            entries += [lean] if lean.key not in {e.key for e in entries} else []
            field = self._race(entries, where, None, **how)
        room, results = ground.room, [result for _, result in field]
        told = told_of_budget(entries, results, room) if room else []
        again, others = self._leaders_again(field, told, shortened, programs)
        field = [*again, *others]
        sober = let_down(decision, ahead, told, [e for e, r in field if r.ran])
        self._keep_answer(field, is_last=sober is None)
        if sober is not None:
            self.decision = sober  # Who was left out for them may win.
            return self.race()
        # Who was not among the leaders has lost already, at another time.
        contest = [entrant for entrant in again if entrant[1].ran] or field
        best, won = min(contest, key=_time_ms)
        ties = tied_with(won, contest)
        best, won = min(ties, key=complexity, default=(best, won))
        refused = Refused()
        if shortened and not won.ran:
            return None
        if not won.ran:
            raise self._nobody([result for _, result in field])
        counts = dict(decision.search)
        counts["race_seconds"] = (raced := time.perf_counter()) - started
        if shortened:
            ranked = [(best, won), *sorted(field, key=_time_ms)]
            found, refused = first_whole(ranked, self._most_bytes, self._alone)
            ran = [e for e, r in field if r.ran and e not in refused]
            sober = let_down(decision, (), (), ran) if refused.found else None
            if sober is not None:
                self.decision = sober
                return self.race()
            if found is None:
                return None
            best, won = found
            counts["segments"] = len(ground.analysis.segments)
            counts["segments_raced"] = len(shortened.programs[best.choice].segments)
            counts["winner_seconds"] = time.perf_counter() - raced
        counts["race_cached"] = float(self._cached)
        if not shortened and (count := len({r.samples_ms for _, r in ties})) > 1:
            counts["ties"] = count - 1
        self.winner = replace(best, search=counts)
        rows = [refused.row(entry, result) for entry, result in field]
        for why, absent in ((TOO_FAR, far), (TOO_LARGE, large)):
            rows += [left_out(e.name, e.predicted_ms, why) for e in absent]
        why = TOO_LARGE if ground.room else UNMEASURED
        rows += [left_out(name, None, why) for name in decision.unmeasured]
        built = (self._wholes if shortened else programs).get(best.name)
        return self._plan(rows, won, built)

    def _alone(self, entry: Decision) -> RaceResult:
        """How the whole program of who won abridged does, by itself."""
        where = (*self.ground.environment, ("race", "the winner of shortened ones"))
        self._wholes = {}
        how = {"rounds": self._rounds, "programs": self._wholes}
        [(_, won)] = self._race([entry], where, None, **how)
        return won

    def _leaders_again(
        self,
        field: list[Entrant],
        told: Sequence[Decision],
        shortened: Shortened | None,
        programs: dict[str, Built],
    ) -> tuple[list[Entrant], list[Entrant]]:
        """Races leaders, what is close to the first, and the best preset with variants.

        Variants are what was told of the budget, and leaders with other options.

        Returns:
            How these did, and the others of the field: all if there are no variants.
        """
        ranked = sorted(field, key=_time_ms)
        # The plan may be a classic: one program, under two names.
        distinct = {e.key: (e, r) for e, r in reversed(ranked) if r.ran}
        able = [*distinct.values()][::-1][:_LEADERS]
        classics = set(self.decision.classics.values())
        known = [(entry, r) for entry, r in ranked if entry.choice in classics]
        # The best preset has what the leaders have, or a ratio to it would mislead.
        leaders = {e.key: e for e, r in [*able, *known[:1]] if r.ran}
        new = [*with_options([*leaders.values()], self._options), *told]
        # Who is remembered, or was told of the budget, may be a variant of somebody.
        keys = {entry.key for entry, _ in field}
        names = {entry.name for entry, _ in field}
        unlike = {e.key: e for e in new if e.key not in keys and e.name not in names}
        new = [*{entry.name: entry for entry in unlike.values()}.values()]
        if not new or time.monotonic() > self.ground.end:
            return [], field
        limit_ms = _CLOSE * min(map(_time_ms, able), default=0.0)
        close = [(entry, r) for entry, r in ranked if r.ran and r.time_ms <= limit_ms]
        first = {entry.name: entry for entry, r in [*able, *close, *known[:1]] if r.ran}
        for name in programs.keys() - first.keys():
            del programs[name]
        # Kept apart from the first race: who leads must not change with this one.
        where = (*self.ground.environment, ("race", "with other compiler options"))
        how = {"rounds": self._rounds, "programs": programs}
        again = self._race([*first.values(), *new], where, shortened, **how)
        return again, [(entry, r) for entry, r in ranked if entry.name not in first]

    def _race(
        self,
        entries: list[Decision],
        environment: Parts,
        shortened: Shortened | None,
        **how: Any,
    ) -> list[Entrant]:
        ground = self.ground
        results = race(
            ground.analysis.frame.program,
            ground.devices,
            finalists(ground.analysis, entries, environment, shortened),
            ground.store,
            budget_bytes=ground.budget_bytes,
            end=ground.end,
            **how,
            **ground.manner,
        )
        self._cached &= all(result.cached for result in results)
        return list(zip(entries, results, strict=True))

    def _keep_answer(self, field: Sequence[Entrant], is_last: bool) -> None:
        """Keeps how it ended, for when the same is asked for again.

        Nothing is news to a race that only leads to the next one.
        """
        if self._asked is None:
            return
        choices = {entry.name: result.record.choice for entry, result in field}
        known = [choices[e.name] for e in self._known if e.name in choices]
        _, best = min(field, key=_time_ms)
        ended = best.samples_ms if best.ran else ()
        keep_answer(self._asked, self.ground.store, known, ended if is_last else (0.0,))

    def _nobody(self, results: Sequence[RaceResult]) -> CfpError:
        how = self.ground.budget_bytes, self._reserve
        return no_winner(self.ground.analysis, results, *how)

    def _plan(self, *how: Any) -> Plan:
        on, tuned = self.ground, BuildEnvironment.beside(self.ground.store.path)
        where = (on.analysis, on.mesh, dict(on.environment), self.winner, self.decision)
        return compose_plan(*where, *how, tuned=tuned)


def _time_ms(entrant: Entrant) -> float:
    return entrant[1].time_ms
