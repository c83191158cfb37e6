"""What segments cost by estimate: memory, and what moves between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, cached_property, partial

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout
from cfp.analysis.segments import Segment
from cfp.cost.choice import SegmentChoice, segment_candidate, segment_layout
from cfp.cost.kept import kernel_sites, shares_made
from cfp.cost.memory import (
    SegmentBytes,
    can_recompute,
    fixed_bytes,
    segment_bytes,
)
from cfp.cost.temporaries import bytes_in_memory, course_of
from cfp.cost.terms import Terms
from cfp.cost.transitions import reshard_ms
from cfp.profiling.collectives import Rates
from cfp.settings import KERNEL_SHARE_OF_MATMUL, LIMITED_MEMORY_AT_LEAST


class Costs:
    """What segments keep in memory and what moves between them, remembered.

    Args:
        analysis: the program's analysis.
        rates: the devices' rates.
    """

    def __init__(self, analysis: Analysis, rates: Rates) -> None:
        self.analysis = analysis
        self._terms = Terms(analysis.frame, rates)
        self._laid_out = cache(partial(segment_layout, analysis))
        self._can_recompute = cache(partial(can_recompute, analysis.frame))
        self._course = cache(partial(course_of, analysis.frame))
        self._least: dict[tuple[int, SegmentChoice], SegmentBytes] = {}
        self._reshardings_ms: dict[tuple[int, int, int, int], float] = {}
        self._numbers: dict[SegmentChoice, int] = {}

    @cached_property
    def fixed_bytes(self) -> int:
        """What arguments that are no state take on each device."""
        return fixed_bytes(self.analysis, self.analysis.frame.program.args)

    def can_rematerialize(self, kind: int) -> bool:
        """Whether segments of a kind can compute their forward pass again."""
        return self._can_recompute(self._segment(kind))

    def least_bytes(self, kind: int, candidate: SegmentChoice) -> SegmentBytes:
        """What a segment of a kind keeps at least under a candidate."""
        key = (kind, candidate)
        if key not in self._least:
            segment, layout = self._segment(kind), self._layout(kind, candidate)
            how = candidate.remat, candidate.kernel
            self._least[key] = segment_bytes(segment, layout, *how)
        return self._least[key]

    def temp_bytes(self, kind: int, candidate: SegmentChoice) -> int:
        """What a segment needs while it runs, besides what it keeps: an estimate."""
        segment, layout = self._segment(kind), self._layout(kind, candidate)
        shares = shares_made(layout, segment, candidate.kernel)

        def size_of(v: int) -> int:
            return round(shares.get(v, 1.0) * bytes_in_memory(layout, v))

        needed = self._course(segment).peak_bytes(size_of)
        return max(0, needed - self.least_bytes(kind, candidate.plain).residual_bytes)

    def saved_by_kernel_ms(self, kind: int, candidate: SegmentChoice) -> float:
        """What a candidate's kernel should save, less what it takes.

        Over parts of the vocabulary a cross-entropy makes its logits twice.
        """
        if not candidate.kernel:
            return 0.0
        program, ops = self.analysis.frame.program, self._segment(kind).ops
        layout, terms = self._layout(kind, candidate), self._terms
        attentions, losses = kernel_sites(layout, ops, candidate.kernel)
        saved = 0.0
        for one in losses:
            saved -= terms.compute_ms(program.ops[one.op], layout.axes[one.op])[0]
        for match, way in attentions:
            times = [
                terms.compute_ms(program.ops[op], layout.axes[op])
                for op in match.ops
                if op in layout.axes
            ]
            products = sum(matmul_ms for matmul_ms, _ in times)
            others = sum(memory_ms for _, memory_ms in times)
            share = KERNEL_SHARE_OF_MATMUL[way.implementation]
            saved += others + products - products / share
        return saved

    def least_peak_bytes(self, choice: Choice) -> int:
        """What a program needs on each device whatever is computed again.

        What a segment keeps for its backward pass is there while that runs; a compiler
        that computes some of it again by itself leaves a share of it at least.
        """
        analysis = self.analysis
        state, kept, peak = self.fixed_bytes, 0, 0
        for segment in analysis.segments:
            plain = segment_candidate(analysis, segment.index, choice)
            own = again = self.least_bytes(segment.kind, plain)
            if self.can_rematerialize(segment.kind):
                again = self.least_bytes(segment.kind, replace(plain, remat=True))
            state += own.state_bytes
            peak = max(peak, kept + own.residual_bytes)
            kept += again.residual_bytes
        return state + round(LIMITED_MEMORY_AT_LEAST * peak)

    def reshardings_ms(
        self,
        left: int,
        right: int,
        before: Iterable[SegmentChoice],
        after: Iterable[SegmentChoice],
    ) -> list[list[float]]:
        """``[choice][choice]`` milliseconds between two segments, there and back."""
        rows = [(self._number(a), a) for a in before]
        columns = [(self._number(b), b) for b in after]
        known = self._reshardings_ms
        for m, a in rows:
            for n, b in columns:
                if (left, right, m, n) not in known:
                    known[left, right, m, n] = self.reshard_ms(left, right, a, b)
        return [[known[left, right, m, n] for n, _ in columns] for m, _ in rows]

    def reshard_ms(
        self, left: int, right: int, a: SegmentChoice, b: SegmentChoice
    ) -> float:
        """What moves between two segments, there and back, takes by estimate."""
        here, there = self._laid_out(left, a.plain), self._laid_out(right, b.plain)
        cost_ms, passing = self._terms.transition_ms, self.analysis.passing
        ahead_ms = reshard_ms(cost_ms, here, there, passing.get((left, right), ()))
        back = passing.get((right, left), ())
        return ahead_ms + reshard_ms(cost_ms, there, here, back)

    def _number(self, candidate: SegmentChoice) -> int:
        """The same for candidates that are laid out alike."""
        return self._numbers.setdefault(candidate.plain, len(self._numbers))

    def _segment(self, kind: int) -> Segment:
        return self.analysis.segments[self.analysis.representatives[kind]]

    def _layout(self, kind: int, candidate: SegmentChoice) -> Layout:
        return self._laid_out(self.analysis.representatives[kind], candidate.plain)

    @cached_property
    def distant(self) -> tuple[tuple[int, int], ...]:
        """Pairs of segments, none a neighbour, between which something passes."""
        pairs = {(min(p), max(p)) for p in self.analysis.passing}
        return tuple(sorted((a, b) for a, b in pairs if b > a + 1))
