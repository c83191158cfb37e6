"""Search-guided profiling: only what could be part of the fastest plan is measured.

The classics come first, and the best by estimate. Then, in rounds: what is not measured
enters the search with a lower bound on its time (:mod:`cfp.search.bounds`) and on its
memory, and what the search picks of it is measured. That ends when no unmeasured choice
can beat the best measured plan by more than a tolerance, when a round made no plan
faster (bounds are below what things take, so that most of what they ask for turns out
slower), or when enough was measured. Where memory decides, what is likely to be part of
the best plan comes before what bounds leave possible (:mod:`cfp.search.outlook`).
What is left is the *gap*, as of an integer program: by how much the fastest plan could
still be faster than the best one that is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.profiling.builder import Job
from cfp.profiling.record import ProfileRecord
from cfp.search.bounds import fit_weights
from cfp.search.candidates import best_candidates, storage_modes
from cfp.search.costs import Costs, build_problem, measured_options
from cfp.search.dynamic import solve_dynamically
from cfp.search.effort import Effort, Explored
from cfp.search.estimate import SegmentEstimate
from cfp.search.ilp import leanest
from cfp.search.kernels import with_kernels
from cfp.search.outlook import Outlook
from cfp.search.priced import memory_price
from cfp.search.problem import Candidate, Option, Problem, Solution, scale_memory
from cfp.search.shortlist import Estimates
from cfp.search.wanted import Wanted, WantedMaker
from cfp.settings import (
    BOUND_MARGIN,
    CANDIDATES_IN_SIGHT,
    RECOMPUTE_TIME_AT_LEAST,
    ROUND_IS_WORTH,
    SAFE_MEMORY_SHARE,
)

Look = Callable[[Sequence[Job]], Mapping[str, ProfileRecord]]


def explore(
    estimates: Estimates,
    maker: WantedMaker,
    costs: Costs,
    *,
    effort: Effort,
    budget_bytes: int | None,
    look: Look,
    is_over: Callable[[], bool] = lambda: False,
    left: float = 1.0,
) -> Explored:
    """Measures until nothing else could be much better.

    Args:
        estimates: of every kind of segment.
        maker: makes candidates into things to measure.
        costs: of the program's segments.
        effort: when to stop.
        budget_bytes: memory of one device, or None.
        look: measures jobs, or looks them up; what it has no record of stays unknown.
        is_over: whether to stop after a round.
        left: with what share of memory that is no state a compiler makes do if it
            must; 1 if it cannot save any.

    Raises:
        DeviceError: no candidate of some segment could be measured.
    """
    wanted = maker.first(effort.per_kind, effort.at_first)
    required = len(wanted)
    records = dict(look(_jobs(wanted)))
    rounds = 0
    if not _all_known(wanted, records):
        return Explored(
            wanted=wanted,
            records=records,
            required=required,
            rounds=0,
            gap=1.0,
            tight=False,
        )
    view = _View(costs.analysis, estimates, maker, costs, effort, budget_bytes, left)
    idle = 0
    while True:
        gained = view.see(wanted, records)
        asked = view.ask()
        idle = 0 if gained > effort.tolerance else idle + 1
        # What is too large is asked for next, computed again.
        if not asked or is_over() or idle >= effort.patience + view.cramped:
            break
        rounds += 1
        wanted = [*wanted, *asked]
        records.update(look(_jobs(asked)))
        if not _all_known(asked, records):
            break  # What would be asked for next depends on what is not known.
    return Explored(
        wanted=wanted,
        records=records,
        required=required,
        rounds=rounds,
        gap=view.gap,
        tight=view.tight,
    )


def _jobs(wanted: Sequence[Wanted]) -> list[Job]:
    return [job for item in wanted for job in item.jobs]


def _all_known(wanted: Sequence[Wanted], records: Mapping[str, ProfileRecord]) -> bool:
    return records.keys() >= {job.key.digest for job in _jobs(wanted)}


def _ran_out(item: Wanted, records: Mapping[str, ProfileRecord]) -> bool:
    record = records.get(item.job.key.digest)
    return record is not None and record.status == "out_of_memory"


@dataclass
class _View:
    """The search over what is measured and what is not, after some measurements."""

    analysis: Analysis
    estimates: Estimates
    maker: WantedMaker
    costs: Costs
    effort: Effort
    budget_bytes: int | None
    left: float
    gap: float = 1.0
    tight: bool = False
    _measured: list[list[Option]] = field(default_factory=list)
    _best_ms: float = float("inf")
    _fastest_ms: float = float("inf")
    _least_bytes: float = float("inf")
    _price: float = 0.0
    _too_large: list[list[Candidate]] = field(default_factory=list)
    _bases: dict[tuple, Wanted] = field(default_factory=dict)
    _failed: set[tuple] = field(default_factory=set)
    _asked: list[set[tuple]] = field(default_factory=list)
    _times: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def cramped(self) -> bool:
        """Whether memory keeps out what is faster, by more than the tolerance."""
        return self._best_ms > (1.0 + self.effort.tolerance) * self._fastest_ms

    def see(
        self, wanted: Sequence[Wanted], records: Mapping[str, ProfileRecord]
    ) -> float:
        """Takes in all that was measured so far.

        Returns:
            The share of its time by which that made the best plan faster; 1 if it is
            the first. Where there still is none, the share of memory by which the
            leanest choice needs less.
        """
        kinds = range(len(self.analysis.representatives))
        self._bases = {(w.kind, *w.candidate.key): w for w in wanted}
        self._measured = measured_options(self.costs, wanted, records)
        self._failed = {key for key, w in self._bases.items() if w.has_failed(records)}
        # What shares measurements with what failed is to be measured alone.
        told = [
            w
            for w in wanted
            if not (w.shares_job and w.base and w.base.has_failed(records))
        ]
        self._asked = [{w.candidate.key for w in told if w.kind == k} for k in kinds]
        self._too_large = [
            [w.candidate for w in wanted if w.kind == k and _ran_out(w, records)]
            for k in kinds
        ]
        self._times = [
            self._parts_and_times(kind, options)
            for kind, options in enumerate(self._measured)
        ]
        problem = self._problem(self._measured)
        budget = self.budget_bytes
        fastest = solve_dynamically(replace(problem, budget_bytes=None))
        assert fastest is not None, "without a budget everything fits"
        self._fastest_ms = fastest.cost_ms
        self.tight = self.tight or (
            budget is not None and fastest.memory_bytes > SAFE_MEMORY_SHARE * budget
        )
        self._price = memory_price(problem) if self.tight else 0.0
        best = self._solve(problem)
        if best is None:
            least = problem.memory_bytes(leanest(problem).picks)
            before, self._least_bytes = self._least_bytes, least
            return 1.0 - least / before
        before, self._best_ms = self._best_ms, best.cost_ms
        return 1.0 - self._best_ms / before

    def ask(self) -> list[Wanted]:
        """What to measure next; nothing if nothing can be gained by it.

        Sets the gap.
        """
        kinds = range(len(self._measured))
        unseen = [self._unseen(kind) for kind in kinds]
        lowest = self._solve(self._problem(self._joined(unseen)))
        self.gap = self._gap(lowest)
        if self.tight:
            found, is_enough = self._likely(unseen)
            if found or (is_enough and not self.effort.patience):
                return found
        if lowest is None:
            return self._leaner()
        goal_ms = (1.0 - self.effort.tolerance) * self._best_ms
        return self._proposed(unseen, goal_ms)

    def _likely(self, unseen: Sequence[Sequence[Option]]) -> tuple[list[Wanted], bool]:
        """What will probably make the best plan faster, and whether there is a plan.

        If nothing will probably fit, it is what would if the compiler saves memory.
        """
        worth = max(self.effort.tolerance, ROUND_IS_WORTH)
        likely = []
        for kind, options in enumerate(unseen):
            outlook = Outlook(
                self.costs, kind, self._measured[kind], self._weighed(kind)
            )
            likely.append([outlook.expect(o.candidate) for o in options])
        for left in dict.fromkeys((1.0, self.left)):
            best = self._solve(scale_memory(self._problem(self._measured), left))
            best_ms = best.cost_ms if best else float("inf")
            found = self._proposed(likely, (1.0 - worth) * best_ms, left)
            if found or best:
                return found, True
        return [], False

    def _proposed(
        self,
        unseen: Sequence[Sequence[Option]],
        goal_ms: float,
        left: float = 1.0,
    ) -> list[Wanted]:
        """What the search picks of unmeasured options, over and over.

        Args:
            unseen: for each kind what the unmeasured ones may cost.
            goal_ms: what a choice must take less than.
            left: the share of memory that is no state that will be enough.
        """
        found: list[Wanted] = []
        rest = [[*options] for options in unseen]
        while len(found) < self.effort.batch:
            rest = [
                [u for u in options if self._may_ask(kind, u.candidate)]
                for kind, options in enumerate(rest)
            ]
            problem = scale_memory(self._problem(self._joined(rest)), left)
            lowest = self._solve(problem)
            if lowest is None or lowest.cost_ms >= goal_ms:
                break
            new = {
                (kind, pick - len(self._measured[kind]))
                for kind, pick in zip(problem.kinds, lowest.picks, strict=True)
                if pick >= len(self._measured[kind])
            }
            if not new:
                break
            for kind, place in sorted(new, reverse=True):
                candidate = rest[kind].pop(place).candidate
                if self._may_ask(kind, candidate):
                    found += self._wanted(kind, candidate)
        return found

    def _leaner(self) -> list[Wanted]:
        """What is leanest, computed again: an error is to name how little would do."""
        best = leanest(self._problem(self._measured))
        found: list[Wanted] = []
        for segment, pick in zip(self.analysis.segments, best.picks, strict=True):
            kind = segment.kind
            lean = self._measured[kind][pick].candidate
            again = replace(lean, remat=True)
            is_new = again.key not in self._asked[kind]
            able = is_new and self.costs.can_rematerialize(kind)
            if able and self._may_ask(kind, again):
                found += self._wanted(kind, again)
        return found

    def _joined(self, unseen: Sequence[Sequence[Option]]) -> list[list[Option]]:
        return [[*m, *u] for m, u in zip(self._measured, unseen, strict=True)]

    def _may_ask(self, kind: int, candidate: Candidate) -> bool:
        """Whether there is room for a candidate among what may be measured."""
        # What has kernels does not take the place of another strategy.
        plain = {key for key in self._asked[kind] if not (key[2] or key[1][1])}
        again = len(self._asked[kind]) - len(plain)
        if not candidate.remat:
            return len(plain) < self.effort.per_kind
        has_base = (*candidate.key[:2], False) in plain
        return again < self.effort.per_kind and (
            has_base or len(plain) < self.effort.per_kind
        )

    def _gap(self, lowest: Solution | None) -> float:
        if lowest is None or self._best_ms == float("inf"):
            return 1.0  # No plan is known.
        if lowest.cost_ms >= self._best_ms:
            return 0.0
        return 1.0 - lowest.cost_ms / self._best_ms

    def _parts_and_times(
        self, kind: int, options: Sequence[Option]
    ) -> tuple[np.ndarray, np.ndarray]:
        own = [o for o in options if not (o.candidate.remat or o.candidate.kernel)]
        estimate = self.estimates.kinds[kind]
        return (
            np.array([estimate.parts(o.candidate) for o in own]),
            np.array([o.time_ms for o in own]),
        )

    def _unseen(self, kind: int) -> list[Option]:
        """Unmeasured candidates of a kind that may be asked for, with lower bounds."""
        asked, weighed = self._asked[kind], self._weighed(kind)
        fresh = self._first_unasked(kind, weighed)
        if self.tight:
            # What is slower may need less memory.
            lean = self._first_unasked(kind, weighed.at_price(self._price))
            fresh = list({c.key: c for c in (*fresh, *lean)}.values())
        found = [self._option(kind, c, weighed.total_ms(c)) for c in fresh]
        if not self.tight or not self.costs.can_rematerialize(kind):
            return found
        again = [
            *((o.candidate, o.time_ms) for o in (*self._measured[kind], *found)),
            *((c, weighed.total_ms(c)) for c in self._too_large[kind]),
        ]
        recomputed = [
            self._option(
                kind, replace(candidate, remat=True), RECOMPUTE_TIME_AT_LEAST * bound_ms
            )
            for candidate, bound_ms in again
            if not candidate.remat
        ]
        return [*found, *(o for o in recomputed if o.candidate.key not in asked)]

    def _weighed(self, kind: int) -> SegmentEstimate:
        """A lower bound on the times of a kind's candidates."""
        weights = BOUND_MARGIN * fit_weights(*self._times[kind])
        return self.estimates.kinds[kind].weighed(weights)

    def _first_unasked(self, kind: int, estimate: SegmentEstimate) -> list[Candidate]:
        """The best by an estimate of what was not asked for yet."""
        asked = self._asked[kind]
        ranked = [
            best_candidates(estimate, mode, CANDIDATES_IN_SIGHT + len(asked))
            for mode in storage_modes(estimate)
        ]
        merged = heapq.merge(*ranked, key=lambda c: c.estimate_ms)
        return list(
            islice((c for c in merged if c.key not in asked), CANDIDATES_IN_SIGHT)
        )

    def _option(self, kind: int, candidate: Candidate, bound_ms: float) -> Option:
        least = self.costs.least_bytes(kind, candidate)
        return Option(
            candidate=candidate,
            time_ms=bound_ms,
            state_bytes=least.state_bytes,
            residual_bytes=least.residual_bytes,
            temp_bytes=0,
        )

    def _wanted(self, kind: int, candidate: Candidate) -> list[Wanted]:
        """What tells the cost of a candidate: itself, and what it is based on."""
        self._asked[kind].add(candidate.key)
        plain = replace(candidate, remat=False)
        self._asked[kind].add(plain.key)
        base = self._bases.get((kind, *plain.key))
        found = []
        if base is None:
            estimate_ms = self.estimates.kinds[kind].total_ms(plain)
            base = self.maker.make(kind, replace(plain, estimate_ms=estimate_ms))
            self._bases[kind, *plain.key] = base
            found.append(base)
            for variant in with_kernels(self.maker.kernels, kind, [plain])[1:]:
                if variant.key not in self._asked[kind]:
                    self._asked[kind].add(variant.key)
                    with_kernel = self.maker.make(kind, variant)
                    self._bases[kind, *variant.key] = with_kernel
                    found.append(with_kernel)
        if not candidate.remat:
            return found
        alone = (kind, *plain.key) in self._failed
        return [*found, self.maker.again(base, alone)]

    def _problem(self, options: Sequence[Sequence[Option]]) -> Problem:
        return build_problem(self.costs, options, self.budget_bytes)

    def _solve(self, problem: Problem) -> Solution | None:
        if not self.tight:
            problem = replace(problem, budget_bytes=None)
        return solve_dynamically(problem)
