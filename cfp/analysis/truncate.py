"""Truncates a program: removes repeats of its segments, and keeps its costs comparable.

A step of 48 layers takes the compiler twelve times as long as one of 4. The truncated
program shows the same in a race: how layers, and the ops before and after them, go
together under a plan. Of a stretch of segments that repeats, all but the first and the
last few are removed.

Ops are removed one by one, and a program that depends on a removed repeat in another
way, such as by a loss on every layer's output, cannot be truncated:

- An op that stays and reads from a removed repeat reads from the repeat that its
  counterpart reads from: the first repeat after the gap reads from the last one before
  it, as every repeat reads from its neighbour.
- Sums over all repeats lose the removed terms; of a value made once for all repeats,
  each takes its own slice.
- A layer may rematerialize in its backward pass with another layer's weights, which
  costs the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.strategies import Spec
from cfp.program.graph import Op, Program
from cfp.program.signature import Part

# What a chain of these adds up does without any one of what it adds.
_ACCUMULATIONS = frozenset({"add", "and", "or", "maximum", "minimum"})


class Truncation:
    """Removal of repeats, with substitutes for the values that are then missing."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._program = analysis.frame.program
        self._owner = {
            op: segment.index
            for segment in analysis.segments
            for op in segment.ops
            if not _is_scalar(self._program, self._program.ops[op])
        }
        for barrier in analysis.frame.barrier_ops:
            self._assign(self._program.ops[barrier])
        stored = [self._program.args[a] for a in analysis.frame.group_of_arg]
        casts = [op for group in analysis.frame.groups for op in group.reads]
        stored += [v for op in casts for v in self._program.ops[op].results]
        self._stored = {*map(self._canonical, stored)}
        self._top = [op for op in self._program.ops if op.parent < 0]
        self._form = cache(self._form_of)
        self._gone: set[int] = set()  # top-level ops
        # What a repeat reads from its neighbour, and what a sum is without a part.
        self._substitutes: dict[int, int] = {}
        self._through: dict[int, int] = {}

    def _assign(self, barrier: Op) -> None:
        """A barrier, in which nothing is computed, goes with what reads it first.

        What most read it is not the same for all layers: what the gradient of the
        last one is read by goes with the head.
        """
        users = (
            self._program.top_level(user)
            for v in barrier.results
            for user, _ in self._program.users[v]
        )
        first = min((op for op in users if op in self._owner), default=-1)
        if barrier.parent < 0 and first >= 0:
            self._owner.setdefault(barrier.id, self._owner[first])

    def own_ops(self, index: int) -> list[int]:
        """A segment's ops in an order that is the same for all segments of a kind.

        The updates of its parameters stand in the order in which it reads these: in the
        program they may stand in the order of names, of which `layer_10` comes before
        `layer_9`. What computes with scalars alone belongs to no segment: it ties
        repeats together, costs nothing, and may stand with either of two neighbours.
        """
        frame, program = self._analysis.frame, self._program
        own = sorted(op for op, owner in self._owner.items() if owner == index)
        groups = [frame.groups[g] for g in self._analysis.segments[index].groups]
        updates = {op for group in groups for op in group.ops}
        first: dict[int, int] = {}
        for op in sorted(program.with_bodies(set(own) - updates)):
            for v in program.ops[op].operands:
                first.setdefault(v, op)
        last = len(program.ops)
        groups.sort(
            key=lambda g: min(first.get(program.args[arg], last) for arg in g.args)
        )
        ordered = [op for op in own if op not in updates]
        ordered += [op for group in groups for op in sorted(group.ops)]
        return [op for op in ordered if op in self._owner]

    def leave_out(self, repeats: Sequence[Sequence[int]], middle: range) -> bool:
        """Leaves the middle of repeats, as their ops, out, if that can be done."""
        before = set(self._gone), dict(self._substitutes), dict(self._through)
        around = range(middle.start - 1, middle.stop + 1)
        # A round moves an op at least, and none moves twice.
        for _ in repeats[around.start]:
            if not self._are_alike(repeats, around):
                break
            early = self._try(repeats, middle)
            if early is None:
                break
            if not early:
                return True
            self._restore(before)
            moved = self._moved(repeats, around, early)
            if moved is None:
                break
            repeats = moved
        self._restore(before)
        return False

    def _restore(self, state: tuple[set[int], dict[int, int], dict[int, int]]) -> None:
        gone, substitutes, through = state
        self._gone, self._substitutes, self._through = (
            set(gone),
            {**substitutes},
            {**through},
        )

    def _are_alike(self, repeats: Sequence[Sequence[int]], around: range) -> bool:
        forms = [[self._form(op) for op in repeats[number]] for number in around]
        return all(form == forms[0] for form in forms)

    def _try(
        self, repeats: Sequence[Sequence[int]], middle: range
    ) -> list[tuple[int, int]] | None:
        """Leaves repeats out, as far as that goes.

        Returns:
            The reads, by place of the op and number of the operand, of what in the
            repeat that is read instead is made later than it is read: nothing if all
            goes well, and None if it goes wrong otherwise.
        """
        settled = set(self._substitutes)
        self._gone.update(op for number in middle for op in repeats[number])
        places = {
            op: (number, place)
            for number, ops in enumerate(repeats)
            for place, op in enumerate(ops)
        }
        early: list[tuple[int, int]] = []
        for op in self._top:
            if op.id in self._gone or not any(
                self._is_missing(v) and v not in settled for v in self._reads(op)
            ):
                continue
            found = None
            number, place = places.get(op.id, (-1, -1))
            if place >= 0:
                found = self._substitutes_for(op, number, place, repeats, middle)
            if found is not None:
                substitutes, late = found
                if late and not middle.start - 1 <= number <= middle.stop:
                    return None
                self._substitutes.update(substitutes)
                early += [(place, index) for index in late]
            elif not self._do_without(op):
                return None
        return early

    def _moved(
        self,
        repeats: Sequence[Sequence[int]],
        around: range,
        early: Sequence[tuple[int, int]],
    ) -> list[list[int]] | None:
        """Repeats, each with what its ops read that came too late; None if they differ.

        A layer's values may be rematerialized with the layer before it, whose they are.

        Args:
            around: the repeats that are alike.
            early: places of ops in them, and numbers of operands.
        """
        program = self._program
        joins: dict[int, list[int]] = {}
        for number in around:
            ops = [(program.ops[repeats[number][place]], i) for place, i in early]
            made = [program.values[self._reads(op)[i]].producer for op, i in ops]
            if min(made) < 0:
                return None
            joins[number] = [*dict.fromkeys(program.top_level(op) for op in made)]
        first = repeats[around.start]
        leaves = {first.index(op) for op in joins[around.start + 1] if op in first}
        moved = [list(ops) for ops in repeats]
        for number in around:
            own = repeats[number]
            if not leaves or any(op in own for op in joins[number]):
                return None
            moved[number] = [op for i, op in enumerate(own) if i not in leaves]
            moved[number] += joins[number]
        taken = {op for ops in joins.values() for op in ops}
        for number in {*range(len(repeats))} - {*around}:
            moved[number] = [op for op in moved[number] if op not in taken]
        return moved

    def part(self) -> Part | None:
        """Returns what is left; None if it is no program, or an op lost its use.

        An op whose readers were all left out has no use any more: the compiler leaves
        it out, too, and what is left costs less than it should.
        """
        program = self._program
        results = {self._through_all(v): None for v in program.outputs}
        made = {program.values[v].producer for v in results}
        leaves = {op for op in program.leaf_ops if program.ops[op].parent < 0}
        stay = {op.id for op in self._top if op.id not in self._gone}
        stay -= leaves - made
        instead: dict[int, int] = {}
        stack = list(stay)
        while stack:
            op = program.ops[stack.pop()]
            for v in self._reads(op):
                found = self._resolved(v)
                producer = program.values[found].producer
                if self._is_gone(found) or producer >= op.id:
                    return None
                if found != v:
                    instead[v] = found
                if producer in leaves and producer not in stay:
                    stay.add(producer)
                    stack.append(producer)
        ops = tuple(sorted(stay))
        useful = self._useful([op.id for op in self._top], program.outputs, {})
        useless = useful - self._useful(ops, results, instead)
        if not useless.isdisjoint(self._owner.keys() & stay):
            return None
        reads = (instead.get(v, v) for op in ops for v in self._reads(program.ops[op]))
        arguments = set(program.args)
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

    def _useful(
        self, ops: Sequence[int], results: Iterable[int], instead: Mapping[int, int]
    ) -> set[int]:
        """Returns those ops that some results depend on."""
        wanted = set(results)
        found: set[int] = set()
        for op in (self._program.ops[op] for op in reversed(ops)):
            if not wanted.isdisjoint(op.results):
                found.add(op.id)
                wanted.update(instead.get(v, v) for v in self._reads(op))
        return found

    def _substitutes_for(
        self,
        op: Op,
        number: int,
        place: int,
        repeats: Sequence[Sequence[int]],
        middle: range,
    ) -> tuple[dict[int, int], list[int]] | None:
        """Finds substitutes for an op's missing operands, from its twin's operands.

        And the numbers of operands of which that is made too late.
        """
        step = len(middle) if number < middle.start else -len(middle)
        others = repeats[number + step]
        if len(others) != len(repeats[number]):
            return None
        like = self._program.ops[others[place]]
        if self._form(like.id) != self._form(op.id):
            return None
        substitutes: dict[int, int] = {}
        late: list[int] = []
        pairs = zip(self._reads(op), self._reads(like), strict=True)
        for index, (v, other) in enumerate(pairs):
            if not self._is_missing(v):
                continue
            found = self._through_all(other)
            known = substitutes.get(v, self._substitutes.get(v, found))
            if self._is_gone(found) or known != found:
                return None
            if self._program.values[found].producer >= op.id:
                late.append(index)
            substitutes[v] = found
        return substitutes, late

    def _do_without(self, op: Op) -> bool:
        """Takes a part out of a sum, or leaves out what nothing that stays owns."""
        reads = self._reads(op)
        left = [v for v in reads if not self._is_missing(v)]
        if op.kind in _ACCUMULATIONS and len(left) == 1:
            self._through[op.results[0]] = self._through_all(left[0])
        elif op.id in self._owner:
            return False
        self._gone.add(op.id)
        return True

    def _is_gone(self, v: int) -> bool:
        op = self._program.maker(v)
        return op is not None and self._program.top_level(op.id) in self._gone

    def _is_missing(self, v: int) -> bool:
        return self._is_gone(v) and v not in self._through

    def _through_all(self, v: int) -> int:
        while v in self._through:
            v = self._through[v]
        return v

    def _resolved(self, v: int) -> int:
        while v in self._through or v in self._substitutes:
            v = self._through[v] if v in self._through else self._substitutes[v]
        return v

    def _reads(self, op: Op) -> tuple[int, ...]:
        """All that an op and the ops in its regions read."""
        inside = [op, *(self._program.ops[inner] for inner in op.body)]
        return tuple(v for one in inside for v in one.reads)

    def _form_of(self, op_id: int) -> tuple[object, ...]:
        """A key that ops doing the same share."""
        op = self._program.ops[op_id]
        values = [*self._reads(op), *op.results, *op.entries]
        types = tuple(str(self._program.values[v]) for v in values)
        inside = [op, *(self._program.ops[inner] for inner in op.body)]
        return (*((one.name, self._attributes(one)) for one in inside), types)

    def _attributes(self, op: Op) -> tuple[object, ...]:
        """An op's attributes, without those that make no difference.

        Such as where a slice is cut, a layer's key out of the keys of all: along the
        dims that it cuts nothing is sharded. Of stacked state it does make a difference
        how many layers there are: all of it is updated.
        """
        if op.kind != "slice" or self._canonical(op.operands[0]) in self._stored:
            return (op.structure,)
        return (op.integers("strides"),)

    def _canonical(self, v: int) -> int:
        """One value for all that are one tensor: behind barriers, and in loops."""
        return self._analysis.frame.canonical.get(v, v)


def _is_scalar(program: Program, op: Op) -> bool:
    values = (*op.operands, *op.results)
    return not op.has_regions and not any(program.shape(v) for v in values)


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
    """A program without the middle of its repeats, and the segments left."""

    part: Part
    segments: tuple[int, ...]


def treatments(analysis: Analysis, choice: Choice) -> tuple[int, ...]:
    """A number for each segment: the same for those that are equal and treated alike.

    By a choice, and by what the user pinned. A truncated program stands for the whole
    one if what was left out is like its neighbours in this.
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
            choice.kernels_of(segment.index),
            tuple(pinned(segment.ops)),
        )
        found.append(numbers.setdefault(how, len(numbers)))
    return tuple(found)


def truncate_program(
    analysis: Analysis, kinds: Sequence[int], kept: int = 4
) -> TruncatedProgram | None:
    """Leaves the middle of every stretch of repeats out.

    Args:
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
