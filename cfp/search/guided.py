"""Search-guided profiling: only what may be part of the fastest plan is measured.

The presets' parts come first, and the best by estimate. If the fastest choice of these
fits in memory, that is all: more rounds made no plan faster (docs/decisions.md, "A
round that made no plan faster is the last"). Where memory keeps it out, rounds follow:
what is not measured enters the search with what it will probably cost
(:mod:`cfp.search.expected`), and what the search picks of it is measured. That ends
when nothing will probably make the best plan faster by enough, when a round has not, or
when enough was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cfp.cost.choice import SegmentChoice
from cfp.profiling.builder import Job
from cfp.profiling.looker import Look
from cfp.profiling.record import ProfileRecord
from cfp.search.build import build_problem
from cfp.search.choices import ranked_candidates
from cfp.search.dynamic import leanest, solve_dynamically
from cfp.search.expected import expect
from cfp.search.problem import Option, Problem, scale_memory
from cfp.search.wanted import (
    Explored,
    Measured,
    Wanted,
    WantedMaker,
    measured_options,
    rematerialize,
)
from cfp.settings import (
    ROUND_SIZE,
    SAFE_MEMORY_SHARE,
    WORTH_HAVING,
)


def explore(
    maker: WantedMaker,
    *,
    per_kind: int,
    others: int = 1,
    budget_bytes: int | None,
    look: Look,
    look_anyway: Look | None = None,
    is_over: Callable[[], bool] = lambda: False,
    left: float = 1.0,
) -> Explored:
    """Measures until nothing else is likely to be much better.

    Args:
        maker: makes candidates into things to measure.
        per_kind: how many candidates of each kind of segment to measure.
        others: how many of each kind, of the best by estimate, with the presets'.
        budget_bytes: memory of one device, or None.
        look: measures jobs, or looks them up; what it has no record of stays unknown.
        look_anyway: does the same for what a plan cannot do without, however late it
            is; None where time has no end.
        is_over: whether to stop after a round.
        left: with what share of memory that is no state a compiler makes do if it
            must; 1 if it cannot save any.

    Raises:
        DeviceError: no candidate of some segment could be measured.
    """
    asked = maker.first(per_kind, others)
    rounds, tight, before = [asked], False, None
    records = _least(asked, look_anyway) if look_anyway else {}
    records.update(look(_jobs(asked)))
    # What would be asked for next depends on what all of it takes.
    while all(job.key.digest in records for job in _jobs(asked)):
        wanted = [item for items in rounds for item in items]
        options = measured_options(maker.costs, wanted, records)
        problem = build_problem(maker.costs, options, budget_bytes)
        fastest = solve_dynamically(replace(problem, budget_bytes=None))
        best = solve_dynamically(problem)
        assert fastest is not None, "without a budget everything fits"
        if budget_bytes is not None:
            tight |= fastest.memory_bytes > SAFE_MEMORY_SHARE * budget_bytes
        # Whether memory keeps out what is faster.
        if best and best.cost_ms <= (1.0 + WORTH_HAVING) * fastest.cost_ms:
            break
        # While nothing fits a round is worth it that makes what is leanest leaner.
        now = best.cost_ms if best else float(leanest(problem).memory_bytes)
        if before and before[0] == bool(best):
            if 1.0 - now / before[1] <= WORTH_HAVING:
                break
        before = bool(best), now
        asked = _Round(maker, per_kind, wanted, records, problem).ask(left)
        if not asked or is_over():
            break
        rounds.append(asked)
        records.update(look(_jobs(asked)))
    return Explored(rounds=rounds, records=records, tight=tight)


def _least(wanted: Sequence[Wanted], look: Look) -> dict[str, ProfileRecord]:
    """What a plan cannot do without: of each kind the first that can be measured."""
    records: dict[str, ProfileRecord] = {}
    rest = {item.kind: deque[Wanted]() for item in wanted}
    for item in wanted:
        rest[item.kind].append(item)
    while asked := [items.popleft() for items in rest.values() if items]:
        records.update(look(_jobs(asked)))
        for item in asked:
            if isinstance(item.measured(records), Measured):
                rest[item.kind].clear()
    return records


def _jobs(wanted: Sequence[Wanted]) -> list[Job]:
    return [job for item in wanted for job in item.jobs]


@dataclass
class _Round:
    """What is asked for next.

    Attributes:
        maker: makes candidates into things to measure.
        per_kind: how many of each kind of segment to measure, and how many of these
            rematerialized.
        known: what was asked for before.
        records: what it takes.
        problem: the search over what was measured.
    """

    maker: WantedMaker
    per_kind: int
    known: Sequence[Wanted]
    records: Mapping[str, ProfileRecord]
    problem: Problem

    def __post_init__(self) -> None:
        self.found: list[Wanted] = []

    def ask(self, left: float) -> list[Wanted]:
        """What will probably make the best plan faster.

        If nothing will probably fit, it is what would if the compiler saves memory; and
        if nothing would then, the leanest, rematerialized.
        """
        likely = [*map(self._likely, range(len(self.problem.options)))]
        for share in dict.fromkeys((1.0, left)):
            best = solve_dynamically(scale_memory(self.problem, share))
            best_ms = best.cost_ms if best else float("inf")
            self._propose(likely, (1.0 - WORTH_HAVING) * best_ms, share)
            if self.found or best:
                return self.found
        # An error is to name how little would do.
        costs, picks = self.maker.costs, leanest(self.problem).picks
        for kind, pick in zip(self.problem.kinds, picks, strict=True):
            if costs.can_rematerialize(kind):
                lean = self.problem.options[kind][pick].candidate
                self._add(kind, replace(lean, remat=True))
        return self.found

    def _propose(
        self, likely: Sequence[Sequence[Option]], goal_ms: float, share: float
    ) -> None:
        """Adds what the search picks of what is likely, until none beats a time."""
        while len(self.found) < ROUND_SIZE:
            options = [
                [*known, *(o for o in new if self._may_add(kind, o.candidate))]
                for kind, (known, new) in enumerate(
                    zip(self.problem.options, likely, strict=True)
                )
            ]
            budget_bytes = self.problem.budget_bytes
            problem = build_problem(self.maker.costs, options, budget_bytes)
            lowest = solve_dynamically(scale_memory(problem, share))
            if lowest is None or lowest.cost_ms >= goal_ms:
                break
            picks = set(zip(problem.kinds, lowest.picks, strict=True))
            known = self.problem.options
            new = [(kind, i) for kind, i in picks if i >= len(known[kind])]
            if not new:
                break
            for kind, i in sorted(new, reverse=True):
                self._add(kind, options[kind][i].candidate)

    def _asked(self, kind: int) -> set[SegmentChoice]:
        """What was asked for; what shares programs with failures was not."""
        return {
            item.candidate
            for item in (*self.known, *self.found)
            if item.kind == kind
            and not (item.base and item.context and item.base.has_failed(self.records))
        }

    def _may_add(self, kind: int, candidate: SegmentChoice) -> bool:
        """Whether a candidate is new, and there is room for it."""
        asked = self._asked(kind)
        # What has kernels does not take the place of another strategy.
        plain = {one for one in asked if not (one.remat or one.kernel)}
        room = len(plain) < self.per_kind
        if candidate in asked:
            return False
        if not candidate.remat:
            return room
        again = sum(one.remat for one in asked)
        return again < self.per_kind and (candidate.plain in plain or room)

    def _add(self, kind: int, candidate: SegmentChoice) -> None:
        """Adds what tells the cost of a candidate: itself, and what it is based on."""
        if not self._may_add(kind, candidate):
            return
        maker, plain = self.maker, candidate.plain
        analysis = maker.costs.analysis
        mine = [item for item in (*self.known, *self.found) if item.kind == kind]
        base = next((item for item in mine if item.candidate == plain), None)
        if base is None:
            estimate_ms = maker.estimates[kind].total_ms(plain)
            variants = maker.kernels.variants(analysis, kind, plain)
            candidates = [replace(plain, estimate_ms=estimate_ms), *variants]
            numbered = enumerate(candidates, len(mine) + 1)
            made = [maker.make(kind, one, number) for number, one in numbered]
            self.found += made
            mine, base = [*mine, *made], made[0]
        if candidate.remat:
            label = f"segment {kind}: {len(mine) + 1}, computed again"
            where = analysis, maker.environment
            self.found.append(rematerialize(*where, base, label, self.records))

    def _likely(self, kind: int) -> list[Option]:
        """Unmeasured candidates of a kind, with what they will probably cost."""
        maker, measured = self.maker, self.problem.options[kind]
        estimate, asked = maker.estimates[kind], self._asked(kind)
        ranked = ranked_candidates(estimate, ROUND_SIZE + len(asked))
        found = [c for c in ranked if c not in asked][:ROUND_SIZE]
        if maker.costs.can_rematerialize(kind):
            ran_out = (
                item.candidate
                for item in self.known
                if item.kind == kind
                and self.records[item.job.key.digest].status == "out_of_memory"
            )
            every = (*(o.candidate for o in measured), *found, *ran_out)
            again = (replace(c, remat=True) for c in every if not c.remat)
            found += [candidate for candidate in again if candidate not in asked]
        return expect(maker.costs, kind, estimate, measured, found)
