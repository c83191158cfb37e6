"""Which values a backward pass cannot do without, so that memory holds them till then.

A compiler keeps less than what a backward pass reads: elementwise work is done again
inside the fusion that reads it, from tensors that are in memory anyway. What has to be
there are results of heavy ops, what heavy ops read, and what enters from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cfp.analysis.layout import Layout
from cfp.analysis.segments import Segment
from cfp.attention.matching.graft import Way
from cfp.attention.matching.matches import (
    Match,
    among,
    keeps_scores,
    share_at_once,
    way_of,
)
from cfp.patterns.build import split
from cfp.patterns.sites import in_parts, no_longer_made
from cfp.program.graph import Op, Program
from cfp.program.makeable import CHEAP
from cfp.program.replace import Replacement

# Of these, what only moves a tensor: its reader reads the tensor itself.
_MOVING = frozenset({"convert", "reshape", "transpose"})


def kept_values(program: Program, ops: Sequence[int], turn: int) -> set[int]:
    """What some ops' forward pass must keep for the backward pass.

    Args:
        program: the program.
        ops: ids of top-level ops, such as those of a segment.
        turn: the id of the first op of the backward pass.
    """
    return _Kept(program, frozenset(ops), turn).find()


def kernel_sites(
    layout: Layout, ops: Sequence[int], kernel: str
) -> tuple[list[tuple[Match, Way]], tuple[Replacement, ...]]:
    """What a kernel computes of some ops.

    Args:
        layout: how they are spread.
        ops: top-level ops, such as those of a segment.
        kernel: of a segment's choice; "" computes nothing.

    Returns:
        Attentions, each with the way in which it is computed, and what takes the place
        of cross-entropies.
    """
    program = layout.frame.program
    attention, parts = split(kernel)
    matches = among(program, ops) if attention else []
    ways = [(one, way_of(program, one, attention, layout.axes)) for one in matches]
    found = [(one, way) for one, way in ways if isinstance(way, Way)]
    return found, in_parts(layout, ops, parts)


def unmade(layout: Layout, segment: Segment, kernel: str) -> set[int]:
    """Values of a segment that are not kept any more where a kernel computes it."""
    return _unmade(layout, *kernel_sites(layout, segment.ops, kernel))


def shares_made(layout: Layout, segment: Segment, kernel: str) -> dict[int, float]:
    """Of values that a kernel changes the part that is in memory while it computes."""
    attentions, losses = kernel_sites(layout, segment.ops, kernel)
    found = dict.fromkeys(_unmade(layout, attentions, losses), 0.0)
    sizes = dict(layout.frame.mesh)
    for match, way in attentions:
        share = share_at_once(match.problem, way, sizes)
        found |= dict.fromkeys(match.found.between, share)
    return found


def _unmade(
    layout: Layout,
    attentions: Sequence[tuple[Match, Way]],
    losses: Sequence[Replacement],
) -> set[int]:
    found = set(no_longer_made(layout.frame.program, losses))
    less = (match for match, way in attentions if not keeps_scores(way))
    return found.union(*(match.found.between for match in less))


class _Kept:
    def __init__(self, program: Program, ops: frozenset[int], turn: int) -> None:
        self._program = program
        self._ops = ops
        self._turn = turn
        self._args = frozenset(program.args)
        self._roots: dict[int, frozenset[int]] = {}

    def find(self) -> set[int]:
        found: set[int] = set()
        for op_id in sorted(self._ops):
            if op_id >= self._turn or op_id in self._program.leaf_ops:
                continue
            for v in self._program.ops[op_id].results:
                if not any(user >= self._turn for user, _ in self._program.users[v]):
                    continue
                if self._feeds_heavy(v, self._turn):
                    found.add(v)
                else:
                    found |= self._in_memory(v)
        return found

    def _in_memory(self, v: int) -> frozenset[int]:
        """The tensors in memory that a value can be made of without heavy ops."""
        # No functools.cache: recursion through it counts as C's, whose limit is low.
        if v not in self._roots:
            self._roots[v] = self._find_roots(v)
        return self._roots[v]

    def _find_roots(self, v: int) -> frozenset[int]:
        producer = self._program.values[v].producer
        if v in self._args or producer in self._program.leaf_ops:
            return frozenset()
        if producer not in self._ops or producer >= self._turn:
            return frozenset({v})
        op = self._program.ops[producer]
        if op.kind not in CHEAP or self._feeds_heavy(v, 0):
            return frozenset({v})
        return frozenset().union(*(self._in_memory(w) for w in op.operands))

    def _feeds_heavy(self, v: int, first: int) -> bool:
        """Whether a heavy op reads a value, at or behind some op."""
        uses = uses_through(self._program, v, lambda op, _: op.kind in _MOVING)
        return any(op.id >= first and _is_heavy(op) for op, _ in uses)


def uses_through(
    program: Program, v: int, goes_on: Callable[[Op, int], bool]
) -> Iterator[tuple[Op, int]]:
    """All uses of a value as (op, which operand), and of what is made of it on the way.

    Args:
        program: the program.
        v: the value.
        goes_on: whether uses of an op's result are looked for, too.
    """
    stack, seen = [v], {v}
    while stack:
        for user, index in program.users[stack.pop()]:
            op = program.ops[user]
            yield op, index
            fresh = [w for w in op.results if w not in seen and goes_on(op, w)]
            seen.update(fresh)
            stack += fresh


def _is_heavy(op: Op) -> bool:
    return op.kind not in CHEAP and op.kind != "reduce"
