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
from dataclasses import replace
from functools import cached_property

from cfp.cost.choice import SegmentChoice
from cfp.profiling.builder import Job
from cfp.profiling.looker import Look
from cfp.profiling.record import ProfileRecord
from cfp.search.build import build_problem
from cfp.search.choices import ranked_candidates
from cfp.search.dynamic import leanest, solve_dynamically
from cfp.search.expected import Outlook
from cfp.search.kernels import with_kernels
from cfp.search.problem import Option, Problem, scale_memory
from cfp.search.wanted import Explored, Wanted, WantedMaker, measured_options
from cfp.settings import (
    ROUND_SIZE,
    SAFE_MEMORY_SHARE,
    WORTH_HAVING,
)


def explore(
    maker: WantedMaker,
    *,
    per_kind: int,
    at_first: int = 1,
    budget_bytes: int | None,
    look: Look,
    look_in_time: Look | None = None,
    is_over: Callable[[], bool] = lambda: False,
    left: float = 1.0,
) -> Explored:
    """Measures until nothing else is likely to be much better.

    Args:
        maker: makes candidates into things to measure.
        per_kind: how many candidates of each kind of segment to measure.
        at_first: how many of each kind, of the best by estimate, with the presets'.
        budget_bytes: memory of one device, or None.
        look: measures jobs, or looks them up; what it has no record of stays unknown.
        look_in_time: does the same while there is time, for what a plan can do without;
            None where time has no end.
        is_over: whether to stop after a round.
        left: with what share of memory that is no state a compiler makes do if it
            must; 1 if it cannot save any.

    Raises:
        DeviceError: no candidate of some segment could be measured.
    """
    wanted = asked = maker.first(per_kind, at_first)
    required, rounds, tight, before = len(wanted), 0, False, None
    if look_in_time is None:
        records = dict(look(_jobs(wanted)))
    else:
        records = _least(wanted, look)
        records.update(look_in_time(_jobs(wanted)))
    # What would be asked for next depends on what all of it takes.
    while all(job.key.digest in records for job in _jobs(asked)):
        view = _View(maker, per_kind, budget_bytes, wanted, records)
        tight = tight or view.is_tight
        stays = before is not None and view.gained_on(before) <= WORTH_HAVING
        if not view.is_cramped or stays:
            break
        asked = view.ask(left)
        if not asked or is_over():
            break
        rounds, before = rounds + 1, view
        wanted = [*wanted, *asked]
        records.update((look_in_time or look)(_jobs(asked)))
    return Explored(
        wanted=wanted, records=records, required=required, rounds=rounds, tight=tight
    )


def _least(wanted: Sequence[Wanted], look: Look) -> dict[str, ProfileRecord]:
    """What a plan cannot do without: of each kind the first that can be measured."""
    records: dict[str, ProfileRecord] = {}
    rest = {item.kind: deque[Wanted]() for item in wanted}
    for item in wanted:
        rest[item.kind].append(item)
    while asked := [items.popleft() for items in rest.values() if items]:
        records.update(look(_jobs(asked)))
        for item in asked:
            if item.is_known(records) and item.failure(records) is None:
                rest[item.kind].clear()
    return records


def _jobs(wanted: Sequence[Wanted]) -> list[Job]:
    return [job for item in wanted for job in item.jobs]


class _View:
    """The search over what is measured and what is not, after some measurements."""

    def __init__(
        self,
        maker: WantedMaker,
        per_kind: int,
        budget_bytes: int | None,
        wanted: Sequence[Wanted],
        records: Mapping[str, ProfileRecord],
    ) -> None:
        self._maker, self._per_kind = maker, per_kind
        self._budget_bytes = budget_bytes
        self._wanted, self._records = wanted, records
        self._measured = measured_options(maker.costs, wanted, records)
        self._problem = self._with(self._measured)
        fastest = solve_dynamically(replace(self._problem, budget_bytes=None))
        best = solve_dynamically(self._problem)
        assert fastest is not None, "without a budget everything fits"
        self.best_ms = best.cost_ms if best else float("inf")
        # Whether memory decides, and whether it keeps out what is faster.
        self.is_tight = budget_bytes is not None and (
            fastest.memory_bytes > SAFE_MEMORY_SHARE * budget_bytes
        )
        self.is_cramped = self.best_ms > (1.0 + WORTH_HAVING) * fastest.cost_ms

    @cached_property
    def _leanest(self) -> Sequence[int]:
        return leanest(self._problem).picks

    def gained_on(self, before: _View) -> float:
        """The share of its time that the best plan is faster by than it was.

        Where there still is none, the share of memory that the leanest choice needs
        less.
        """
        if self.best_ms < float("inf"):
            return 1.0 - self.best_ms / before.best_ms
        now, then = (v._problem.memory_bytes(v._leanest) for v in (self, before))
        return 1.0 - now / then

    def ask(self, left: float) -> list[Wanted]:
        """What to measure next: what will probably make the best plan faster.

        If nothing will probably fit, it is what would if the compiler saves memory; and
        if nothing would then, the leanest, computed again.
        """
        kinds = range(len(self._measured))
        likely = [self._likely(kind) for kind in kinds]
        for share in dict.fromkeys((1.0, left)):
            best = solve_dynamically(scale_memory(self._problem, share))
            best_ms = best.cost_ms if best else float("inf")
            found = self._proposed(likely, (1.0 - WORTH_HAVING) * best_ms, share)
            if found or best:
                return found
        return self._leaner()

    def _proposed(
        self, likely: Sequence[Sequence[Option]], goal_ms: float, share: float
    ) -> list[Wanted]:
        """What the search picks of what is likely, over and over, to beat a time."""
        found: list[Wanted] = []
        rest = [[*options] for options in likely]
        while len(found) < ROUND_SIZE:
            rest = [
                [o for o in options if self._may_ask(kind, o.candidate, found)]
                for kind, options in enumerate(rest)
            ]
            joined = [[*m, *u] for m, u in zip(self._measured, rest, strict=True)]
            problem = scale_memory(self._with(joined), share)
            lowest = solve_dynamically(problem)
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
                if self._may_ask(kind, candidate, found):
                    found += self._made(kind, candidate, found)
        return found

    def _leaner(self) -> list[Wanted]:
        """What is leanest, computed again: an error is to name how little would do."""
        found: list[Wanted] = []
        for segment, pick in zip(
            self._maker.costs.analysis.segments, self._leanest, strict=True
        ):
            kind = segment.kind
            again = replace(self._measured[kind][pick].candidate, remat=True)
            able = self._maker.costs.can_rematerialize(kind)
            if able and self._may_ask(kind, again, found):
                found += self._made(kind, again, found)
        return found

    def _asked(self, kind: int, found: Sequence[Wanted]) -> set[SegmentChoice]:
        """What was asked for; what shares programs with failures was not."""
        told = (
            w
            for w in (*self._wanted, *found)
            if w.kind == kind
            and not (w.shares_job and w.base and w.base.has_failed(self._records))
        )
        return {w.candidate for w in told}

    def _may_ask(
        self, kind: int, candidate: SegmentChoice, found: Sequence[Wanted]
    ) -> bool:
        """Whether a candidate is new, and there is room for it."""
        asked = self._asked(kind, found)
        # What has kernels does not take the place of another strategy.
        plain = {one for one in asked if not (one.remat or one.kernel)}
        room = len(plain) < self._per_kind
        if candidate in asked:
            return False
        if not candidate.remat:
            return room
        again = sum(one.remat for one in asked)
        return again < self._per_kind and (candidate.plain in plain or room)

    def _made(
        self, kind: int, candidate: SegmentChoice, found: Sequence[Wanted]
    ) -> list[Wanted]:
        """What tells the cost of a candidate: itself, and what it is based on."""
        plain, made = candidate.plain, list[Wanted]()
        known = {(w.kind, w.candidate): w for w in (*self._wanted, *found)}
        base = known.get((kind, plain))
        if base is None:
            estimate_ms = self._maker.estimates[kind].total_ms(plain)
            base = self._maker.make(kind, replace(plain, estimate_ms=estimate_ms))
            made.append(base)
            made += [
                self._maker.make(kind, variant)
                for variant in with_kernels(self._maker.kernels, kind, [plain])[1:]
            ]
        if candidate.remat:
            made.append(self._maker.again(base, base.has_failed(self._records)))
        return made

    def _likely(self, kind: int) -> list[Option]:
        """Unmeasured candidates of a kind, with what they will probably cost."""
        estimate, asked = self._maker.estimates[kind], self._asked(kind, ())
        ranked = ranked_candidates(estimate, ROUND_SIZE + len(asked))
        found = [c for c in ranked if c not in asked][:ROUND_SIZE]
        if self._maker.costs.can_rematerialize(kind):
            ran_out = (
                w.candidate
                for w in self._wanted
                if w.kind == kind
                and (record := self._records.get(w.job.key.digest)) is not None
                and record.status == "out_of_memory"
            )
            measured = (o.candidate for o in self._measured[kind])
            plain = [c for c in (*measured, *found, *ran_out) if not c.remat]
            again = (replace(candidate, remat=True) for candidate in plain)
            found += [candidate for candidate in again if candidate not in asked]
        outlook = Outlook(self._maker.costs, kind, self._measured[kind], estimate)
        return [outlook.expect(candidate) for candidate in found]

    def _with(self, options: Sequence[Sequence[Option]]) -> Problem:
        return build_problem(self._maker.costs, options, self._budget_bytes)
