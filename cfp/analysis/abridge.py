"""A program with fewer of its repeats, which runs and costs like the whole of it.

A step of 48 layers takes the compiler twelve times as long as one of 4, and what there
is to learn from timing it (how layers, and what stands before and behind them, go
together under a plan) the short one tells as well. Of a stretch of segments that
repeats, all but the first and the last few are left out: what they would have handed
on, the next repeat reads from the last one before them, as every repeat reads from its
neighbour. That a program can be abridged is not assumed but checked, op by op. Where
something else depends on the repeats in between (a loss on every layer's output, say),
it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.program.graph import Op, Program
from cfp.program.part import Part

# What a chain of these adds up does without any one of what it adds.
_ACCUMULATIONS = frozenset({"add", "and", "or", "maximum", "minimum"})


@dataclass(frozen=True, slots=True)
class Stretch:
    """Segments that repeat back to back.

    Attributes:
        start: index of the first segment.
        period: how many segments one repeat has.
        count: how many repeats there are.
    """

    start: int
    period: int
    count: int

    def repeat(self, number: int) -> range:
        """The segments of one repeat."""
        first = self.start + number * self.period
        return range(first, first + self.period)

    def middle(self, kept: int) -> range:
        """The repeats that are left out if so many stay."""
        head = (kept + 1) // 2
        return range(head, self.count - (kept - head))


@dataclass(frozen=True, slots=True)
class Abridged:
    """A program without the middle of its repeats.

    Attributes:
        part: what is left of it.
        segments: indices of the segments that are left.
        alike: groups of segments, of those left out and of their neighbours: only for
            choices that treat all of a group alike does the short program stand for
            the whole one.
    """

    part: Part
    segments: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]

    def stands_for(self, analysis: Analysis, choice: Choice) -> bool:
        """Whether a choice treats all repeats that were left out like their neighbours.

        Args:
            analysis: of the whole program.
            choice: for the whole program.
        """

        def treated(index: int) -> tuple[object, ...]:
            segment = analysis.segments[index]
            return (
                tuple(choice.blocks[b] for b in segment.blocks),
                tuple(choice.storage[g] for g in segment.groups),
                index in choice.remat,
            )

        return all(len(set(map(treated, group))) == 1 for group in self.alike)


def abridge(analysis: Analysis, kept: int = 4) -> Abridged | None:
    """Leaves the middle of every stretch of repeats out.

    Args:
        analysis: of the program.
        kept: how many repeats of a stretch stay.

    Returns:
        What is left; None if no stretch has more, or none of them can be shortened.
    """
    shortened = _Shortening(analysis)
    left_out: set[int] = set()
    alike: list[tuple[int, ...]] = []
    for stretch in find_stretches([s.kind for s in analysis.segments], kept):
        middle = stretch.middle(kept)
        repeats = [
            [op for index in stretch.repeat(number) for op in _own_ops(analysis, index)]
            for number in range(stretch.count)
        ]
        if not shortened.leave_out(repeats, middle):
            continue
        left_out.update(index for n in middle for index in stretch.repeat(n))
        around = range(middle.start - 1, middle.stop + 1)
        alike += zip(*(stretch.repeat(number) for number in around), strict=True)
    part = shortened.part() if left_out else None
    if part is None:
        return None
    stay = [s.index for s in analysis.segments if s.index not in left_out]
    return Abridged(part, tuple(stay), tuple(alike))


def find_stretches(kinds: Sequence[int], kept: int) -> list[Stretch]:
    """The stretches of a sequence of kinds that have more repeats than are kept.

    They do not overlap; what leaves most out comes first.
    """
    found = []
    for period in range(1, len(kinds) // (kept + 1) + 1):
        start = 0
        while start + period < len(kinds):
            end = start
            while end + period < len(kinds) and kinds[end] == kinds[end + period]:
                end += 1
            count = (end - start) // period + 1
            if count > kept:
                found.append(Stretch(start, period, count))
            start = max(end, start + 1)
    chosen: list[Stretch] = []
    taken: set[int] = set()
    for stretch in sorted(found, key=lambda s: -(s.count - kept) * s.period):
        inside = range(stretch.start, stretch.start + stretch.period * stretch.count)
        if taken.isdisjoint(inside):
            chosen.append(stretch)
            taken.update(inside)
    return chosen


def _own_ops(analysis: Analysis, index: int) -> list[int]:
    """A segment's ops in an order that is the same for all segments of a kind.

    The updates of its parameters stand in the order in which it reads these: in the
    program they may stand in the order of names, of which `layer_10` comes before
    `layer_9`. What computes with scalars alone is nobody's: it ties repeats together,
    costs nothing, and may stand with either of two neighbours.
    """
    frame, segment = analysis.frame, analysis.segments[index]
    program = frame.program
    groups = [frame.groups[group] for group in segment.groups]
    updates = {op for group in groups for op in group.ops}
    first: dict[int, int] = {}
    for op in sorted(program.with_bodies(set(segment.ops) - updates)):
        for v in program.ops[op].operands:
            first.setdefault(v, op)
    last = len(program.ops)
    groups.sort(key=lambda g: min(first.get(program.args[arg], last) for arg in g.args))
    ordered = [op for op in segment.ops if op not in updates]
    ordered += [op for group in groups for op in sorted(group.ops)]
    return [op for op in ordered if not _is_scalar(program, program.ops[op])]


def _is_scalar(program: Program, op: Op) -> bool:
    values = (*op.operands, *op.results)
    return not op.has_regions and not any(program.values[v].shape for v in values)


class _Shortening:
    """What is left out of a program, and what is read in its place."""

    def __init__(self, analysis: Analysis) -> None:
        self._program = analysis.frame.program
        self._owned = {
            op
            for segment in analysis.segments
            for op in segment.ops
            if not _is_scalar(self._program, self._program.ops[op])
        }
        self._top = [op for op in self._program.ops if op.parent < 0]
        self._gone: set[int] = set()  # top-level ops
        # What a repeat reads from its neighbour, and what a sum is without a part.
        self._handed: dict[int, int] = {}
        self._through: dict[int, int] = {}

    def leave_out(self, repeats: Sequence[Sequence[int]], middle: range) -> bool:
        """Leaves some repeats out; changes nothing if that cannot be done.

        Args:
            repeats: the top-level ops of each repeat of a stretch, in order.
            middle: which of them.
        """
        around = range(middle.start - 1, middle.stop + 1)
        forms = [[self._form(op) for op in repeats[number]] for number in around]
        if any(form != forms[0] for form in forms):
            return False
        before = set(self._gone), dict(self._handed), dict(self._through)
        self._gone.update(op for number in middle for op in repeats[number])
        places = {
            op: (number, place)
            for number, ops in enumerate(repeats)
            for place, op in enumerate(ops)
        }
        for op in self._top:
            if op.id in self._gone or not any(
                self._is_missing(v) and v not in before[1] for v in self._reads(op)
            ):
                continue
            found = None
            if op.id in places:
                found = self._handed_over(op, *places[op.id], repeats, middle)
            if found is not None:
                self._handed.update(found)
            elif not self._do_without(op):
                self._gone, self._handed, self._through = before
                return False
        return True

    def part(self) -> Part | None:
        """What is left; None if it reads something that is not."""
        program = self._program
        stay = {op.id for op in self._top if op.id not in self._gone}
        stay -= program.leaf_ops
        instead: dict[int, int] = {}
        stack = list(stay)
        while stack:
            for v in self._reads(program.ops[stack.pop()]):
                found = self._resolved(v)
                producer = program.values[found].producer
                if self._is_gone(found):
                    return None
                if found != v:
                    instead[v] = found
                if producer in program.leaf_ops and producer not in stay:
                    stay.add(producer)
                    stack.append(producer)
        ops = tuple(sorted(stay))
        reads = (instead.get(v, v) for op in ops for v in self._reads(program.ops[op]))
        arguments = set(program.args)
        results = {self._through_all(v): None for v in program.outputs}
        return Part(
            ops=ops,
            inputs=tuple(dict.fromkeys(v for v in reads if v in arguments)),
            outputs=tuple(
                v
                for v in results
                if program.values[v].producer >= 0 and not self._is_gone(v)
            ),
            instead=tuple(instead.items()),
        )

    def _handed_over(
        self,
        op: Op,
        number: int,
        place: int,
        repeats: Sequence[Sequence[int]],
        middle: range,
    ) -> dict[int, int] | None:
        """What its like, so many repeats away, reads in place of what is missing."""
        step = len(middle) if number < middle.start else -len(middle)
        others = repeats[number + step]
        if len(others) != len(repeats[number]):
            return None
        like = self._program.ops[others[place]]
        if self._form(like.id) != self._form(op.id):
            return None
        handed: dict[int, int] = {}
        for v, other in zip(self._reads(op), self._reads(like), strict=True):
            if not self._is_missing(v):
                continue
            found = self._through_all(other)
            producer = self._program.values[found].producer
            if self._is_gone(found) or producer >= op.id:
                return None
            if self._handed.get(v, found) != found:
                return None
            handed[v] = found
        return handed

    def _do_without(self, op: Op) -> bool:
        """Takes a part out of a sum, or leaves out what nothing that stays owns."""
        reads = self._reads(op)
        left = [v for v in reads if not self._is_missing(v)]
        if op.kind in _ACCUMULATIONS and len(left) == 1:
            self._through[op.results[0]] = self._through_all(left[0])
        elif op.id in self._owned:
            return False
        self._gone.add(op.id)
        return True

    def _is_gone(self, v: int) -> bool:
        producer = self._program.values[v].producer
        return producer >= 0 and self._program.top_level(producer) in self._gone

    def _is_missing(self, v: int) -> bool:
        return self._is_gone(v) and v not in self._through

    def _through_all(self, v: int) -> int:
        while v in self._through:
            v = self._through[v]
        return v

    def _resolved(self, v: int) -> int:
        while v in self._through or v in self._handed:
            v = self._through[v] if v in self._through else self._handed[v]
        return v

    def _reads(self, op: Op) -> tuple[int, ...]:
        """All that an op and the ops in its regions read."""
        inside = [op, *(self._program.ops[inner] for inner in op.body)]
        return tuple(v for one in inside for v in (*one.operands, *one.yields))

    def _form(self, op_id: int) -> tuple[object, ...]:
        """What ops that do the same have in common."""
        op = self._program.ops[op_id]
        values = [*self._reads(op), *op.results, *op.entries]
        types = tuple(str(self._program.values[v]) for v in values)
        inside = [op, *(self._program.ops[inner] for inner in op.body)]
        return (*((one.name, one.attributes) for one in inside), types)
