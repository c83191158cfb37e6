"""Truncates a program: fewer repeats of its segments, which cost what the whole's do.

A step of 48 layers takes the compiler twelve times as long as one of 4. What timing it
shows (how layers, and what stands before and behind them, go together under a plan) the
truncated program shows as well. Of a stretch of segments that repeats, all but the
first and the last few are left out. The first repeat after the gap reads from the last
one before it, as every repeat reads from its neighbour. Whether a program can be
truncated is checked, op by op. Where something else depends on the repeats in between,
such as a loss on every layer's output, it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.strategies import Spec
from cfp.analysis.truncation import Truncation
from cfp.program.part import Part


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
class TruncatedProgram:
    """A program without the middle of its repeats.

    Attributes:
        part: what is left of it.
        segments: indices of the segments that are left.
    """

    part: Part
    segments: tuple[int, ...]


def treatments(analysis: Analysis, choice: Choice) -> tuple[int, ...]:
    """A number for each segment: the same for those that are equal and treated alike.

    By a choice, and by what the user pinned. A truncated program stands for the whole
    one if what was left out is like its neighbours in this.

    Args:
        analysis: of the whole program.
        choice: for the whole program.
    """
    frame, program = analysis.frame, analysis.frame.program
    pins = {program.args[position]: spec for position, spec in frame.pins.items()}
    again = set(choice.remat)

    def pinned(ops: tuple[int, ...]) -> list[tuple[str, Spec]]:
        inside = program.with_bodies(ops) if pins else ()
        read = {v for op in inside for v in program.ops[op].operands}
        return sorted((str(program.values[v]), pins[v]) for v in read & pins.keys())

    numbers: dict[tuple[object, ...], int] = {}
    found = []
    for segment in analysis.segments:
        how = (
            segment.kind,
            tuple(choice.blocks[b] for b in segment.blocks),
            tuple(choice.storage[g] for g in segment.groups),
            segment.index in again,
            dict(choice.kernels).get(segment.index, ""),
            tuple(pinned(segment.ops)),
        )
        found.append(numbers.setdefault(how, len(numbers)))
    return tuple(found)


def truncate_program(
    analysis: Analysis, kinds: Sequence[int], kept: int = 4
) -> TruncatedProgram | None:
    """Leaves the middle of every stretch of repeats out.

    Args:
        analysis: of the program.
        kinds: for each segment a number, equal for those that may stand for each other.
        kept: how many repeats of a stretch stay, 2 or more.

    Returns:
        What is left; None if no stretch has more, or none of them can be truncated.
    """
    if analysis.frame.program.opened:
        return None  # What a loop carries ties its repeats to all others.
    truncation = Truncation(analysis)
    left_out: set[int] = set()
    for stretch in find_stretches(kinds, kept):
        middle = stretch.middle(kept)
        repeats = [
            [op for index in stretch.repeat(number) for op in truncation.own_ops(index)]
            for number in range(stretch.count)
        ]
        if truncation.leave_out(repeats, middle):
            left_out.update(index for n in middle for index in stretch.repeat(n))
    part = truncation.part() if left_out else None
    if part is None:
        return None
    stay = [s.index for s in analysis.segments if s.index not in left_out]
    return TruncatedProgram(part, tuple(stay))


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
