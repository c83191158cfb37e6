"""Finds the ops between the contractions of an attention, and equal values.

The search starts at a contraction that makes scores. It follows the readers of results
through barriers, loops and stacks. It ends at the contractions that make the output,
and the gradients of queries, keys and values. All ops between must be in a closed list.

Equality of values: a value has an id and an iteration, since a loop stacks
values, and another loop's body reads them at an index. Two values are equal if the same
ops make them from equal values, at the same index. Otherwise they count as different.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from cfp.program.graph import Op, Program, reached, searched_once
from cfp.program.part import Constants, NotConstant
from cfp.program.replace import Different

At = tuple[tuple[int, int], ...]  # (loop, number of an index) pairs
Node = tuple[int, At]  # A value in given iterations of the loops around it.
FLOATS = frozenset({"f32", "bf16", "f16"})
_HERE: At = ()


class Values:
    """Equality of a program's values: equal results of `number` prove it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._constants = Constants(program)
        self._numbers: dict[Node, int] = {}
        self._table: dict[tuple, int] = {}
        self._loop_of: dict[int, int] = {}  # Keys: arguments of loops' bodies.
        self._passed_on: set[int] = set()
        self._counters: dict[int, frozenset[int]] = {}
        self.known: dict[tuple, Any] = {}  # Proofs and windows, for equal layers.
        self._held: dict[int, int] = {}  # Clamped indices: {number: places}.
        for op in program.ops:
            if op.has_regions:
                self._loop_of.update(dict.fromkeys(op.entries, op.id))
            if op.kind == "while":
                entries = op.entries[len(op.operands) :]
                same = zip(op.entries, entries, op.yields, strict=False)
                for first, entry, yielded in same:
                    if entry == yielded:
                        self._passed_on |= {first, entry}
                self._counters[op.id] = self._counters_of(op)

    @cached_property
    def _leaves(self) -> dict[int, bool]:
        """{value id of a constant: True if an iota enters}."""
        found: dict[int, bool] = {}
        for op in filter(_is_pure, self.program.ops):
            reads = [found.get(self.same(v)) for v in op.operands]
            if None not in reads:
                found |= dict.fromkeys(op.results, op.kind == "iota" or any(reads))
        return found

    def is_leaf(self, v: int) -> bool:
        """True if pure ops make a value from constants and iotas alone."""
        return self.same(v) in self._leaves

    def array(self, v: int) -> np.ndarray:
        """Evaluates a value or raises NotConstant; dims of equal numbers may be 1."""
        return self._constants.value(v, self.same)

    def number_of_constant(self, v: int) -> float | None:
        """The number that fills a constant, or None; may miss slices and reshapes."""
        if self._leaves.get(self.same(v), True):
            return None
        try:
            found = self.array(v)
        except NotConstant:
            return None
        return float(found.reshape(-1)[0]) if found.size == 1 else None

    def parent(self, v: int) -> int:
        """Id of the innermost loop or branch around a value; -1 without."""
        op = self.program.maker(v)
        return op.parent if op is not None else self._loop_of.get(v, -1)

    def same(self, v: int) -> int:
        """Id of a value's original: see `source`; the iteration is left out."""
        return self.source((v, _HERE))[0]

    @cached_property
    def _standing(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for value in self.program.values:
            found.setdefault(self.same(value.id), []).append(value.id)
        return found

    def standing(self, v: int) -> list[int]:
        """Ids of all values with the same original: see `source`."""
        return self._standing[self.same(v)]

    def readers(self, v: int) -> Iterator[tuple[Op, int, int]]:
        """Yields readers of all `standing`, but barriers and loops that pass them on.

        Yields:
            (op, index in `op.reads`, id of the value read there).
        """
        for w in self.standing(v):
            for user, index in self.program.users[w]:
                op = self.program.ops[user]
                if op.kind == "optimization_barrier":
                    continue
                if op.kind == "while":
                    if self.same(op.results[index % len(op.operands)]) == self.same(v):
                        continue
                yield op, index, w

    def _counters_of(self, loop: Op) -> frozenset[int]:
        """Value ids of the body's arguments that count 0, 1, 2... in a counted loop."""
        found = set[int]()
        entries = loop.entries[len(loop.operands) :]
        for start, entry, v in zip(loop.operands, entries, loop.yields, strict=True):
            step = self.program.maker(v)
            if loop.uncounted or step is None or step.kind != "add":
                continue
            if step.operands[0] != entry or self._integer(step.operands[1]) != 1:
                continue
            if self._integer(start) == 0:
                found.add(entry)
        return frozenset(found)

    def _integer(self, v: int) -> int | None:
        """The number of a scalar integer constant; None for others."""
        value = self.program.values[v]
        if value.shape or not value.dtype.startswith(("i", "ui")):
            return None
        try:
            return int(self._constants.value(v, self._before_loops))
        except NotConstant:
            return None

    def _before_loops(self, v: int) -> int:
        while v in self._passed_on:
            v = self.program.values[v].origin
        return v

    def trips(self, loop: Op) -> int:
        """Number of a loop's iterations; 1 if unknown, 0 if its body has no ops."""
        inner = [i for i in loop.body if self.program.ops[i].parent == loop.id]
        return self.program.ops[inner[0]].repeat // max(1, loop.repeat) if inner else 0

    # -- originals ---------------------------------------------------------------------

    def source(self, node: Node) -> Node:
        """Original of a node that barriers, loops or stacks pass on; else the node."""
        program = self.program
        v, at = node
        while True:
            op = program.maker(v)
            if op is None and v in self._passed_on:
                v = program.values[v].origin
            elif op is None:
                break
            elif op.kind == "optimization_barrier":
                v = op.operands[op.results.index(v)]
            elif op.kind == "while":
                place = op.results.index(v)
                if op.entries[len(op.operands) + place] != op.yields[place]:
                    break
                v = op.operands[place]
            elif op.kind == "dynamic_slice":
                stacked = self._stacked(op, at)
                if stacked is None:
                    break
                v, at = stacked
            else:
                break
        around = set(self._around(v)) if at else set()
        return v, tuple(pair for pair in at if pair[0] in around)

    def _around(self, v: int) -> Iterator[int]:
        """Yields the loops and branches around a value."""
        parent = self.parent(v)
        while parent >= 0:
            yield parent
            parent = self.program.ops[parent].parent

    def _stacked(self, op: Op, at: At) -> Node | None:
        """The value that a loop stacked and a slice reads; None for other slices."""
        base, outer = self.source((op.operands[0], at))
        loop = self.program.maker(base)
        if loop is None or loop.kind != "while":
            return None
        update = self.update_of(loop, loop.results.index(base))
        if update is None:
            return None
        shape = self.program.shape(update.operands[1])
        starts = map(self._integer, op.operands[2:])
        if op.integers("slice_sizes") != shape or any(n != 0 for n in starts):
            return None
        index = self._index(self.number((op.operands[1], at)), self.trips(loop))
        return update.operands[1], (*outer, (loop.id, index))

    def update_of(self, loop: Op, place: int) -> Op | None:
        """The op that stacks iterations' values in order in result `place`, or None."""
        update = self.program.maker(loop.yields[place])
        entry = loop.entries[len(loop.operands) + place]
        if update is None or update.kind != "dynamic_update_slice":
            return None
        stack, part, index, *rest = update.operands
        whole, shape = self.program.shape(stack), self.program.shape(part)
        fits = shape == (1, *whole[1:]) and whole[0] == self.trips(loop)
        starts = map(self._integer, rest)
        is_next = index in self._counters[loop.id] and all(n == 0 for n in starts)
        return update if stack == entry and fits and is_next else None

    def _index(self, number: int, count: int) -> int:
        """Number of index `number`, as clamped to an array of `count` places."""
        key = ("index", number, count)
        if number in self._held and self._held[number] == count:
            return number
        found = self._table.setdefault(key, len(self._table))
        self._held[found] = count
        return found

    # -- numbers -----------------------------------------------------------------------

    def number(self, node: Node) -> int:
        """Number of a node (value, iterations); equal numbers prove equal values."""
        stack = [self.source(node)]
        while stack:
            v, at = one = stack[-1]
            op = self.program.maker(v)
            if one in self._numbers:
                stack.pop()
                continue
            key: tuple = ("value", v, at)
            if op is None and v in self._counters.get(self._loop_of.get(v, -1), ()):
                numbers = dict(at)
                if (index := numbers.get(self._loop_of[v])) is not None:
                    self._numbers[one] = index
                    continue
            elif op is not None and _is_pure(op):
                reads = [self.source((x, at)) for x in op.operands]
                missing = [x for x in reads if x not in self._numbers]
                if missing:
                    stack += missing
                    continue
                made = self.program.values[v]
                inputs = [self._numbers[x] for x in reads]
                if op.kind == "dynamic_slice":
                    places = self.program.shape(op.operands[0])
                    for d, size in enumerate(op.integers("slice_sizes")):
                        count = places[d] - size + 1
                        inputs[d + 1] = self._index(inputs[d + 1], count)
                inputs = tuple(inputs)
                place = op.results.index(v)
                key = (op.name, op.attributes, inputs, made.shape, made.dtype, place)
            self._numbers[one] = self._table.setdefault(key, len(self._table))
        return self._numbers[self.source(node)]


def _is_pure(op: Op) -> bool:
    """True only if operands and attributes determine the result."""
    is_known = op.rule is not None or op.kind in ("constant", "iota")
    return is_known and not op.has_regions and op.kind not in ("rng", "custom_call")


@searched_once
def values_of(program: Program) -> Values:
    """The program's `Values`, cached."""
    return Values(program)


# Ops that may be between contractions, see `Region.is_closed`.
ELEMENTWISE = frozenset(
    {
        *("add", "subtract", "multiply", "divide", "negate", "maximum"),
        *("exponential", "log", "select"),
    }
)
VIEWS = frozenset({"broadcast_in_dim", "convert", "reshape", "transpose"})
LARGEST, SUM = "stablehlo.maximum(%0,%1; )", "stablehlo.add(%0,%1; )"
_LEAST = float("-inf")
_MOST_OPS = 400
_ENDS = frozenset({"dot_general", "reduce", "exponential"})
_CAPPED = "scores or weights go through tanh, such as a soft cap"
_READS = "reads the scores or the weights"
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})


def where(op: Op) -> str:
    """Source line of an op for messages; else its scope, or "an unknown line"."""
    return op.source or op.scope or "an unknown line"


@dataclass
class Region:
    """The ops that follow a contraction which may make scores; empty before `grow`.

    Attributes:
        scores: the contraction.
        inside: ids of the ops between contractions.
        members: ids of scores, and of values that ops in `inside` make.
        sinks: {contraction's id: index of the operand that is a member}.
        stacks: ids of values in which loops stack members.
    """

    values: Values
    scores: Op
    inside: dict[int, None] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    sinks: dict[int, int] = field(default_factory=dict)
    stacks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.program = self.values.program
        self.size = prod(self.program.shape(self.scores.results[0]))

    def has(self, v: int) -> bool:
        """True for a member, and for values that pass it on."""
        return self.values.same(v) in self.members

    def grow(self) -> None:
        """Fills the attributes by following the readers of scores.

        Raises:
            Different: the ops that follow are too many or not provable, or the program
                returns a member.
        """
        stack = [*self.scores.results]
        while stack:
            v = stack.pop()
            if v not in self.members:
                self.members.add(v)
                stack += self._made_of(v)
            if len(self.inside) > _MOST_OPS:
                raise Different("too many ops depend on the scores")

    def _made_of(self, v: int) -> Iterator[int]:
        program = self.program
        if not {*program.outputs}.isdisjoint(self.values.standing(v)):
            raise Different(
                "the step returns the scores, the weights, or values made from them"
            )
        for op, index, w in self.values.readers(v):
            if op.kind == "dot_general":
                if self.sinks.setdefault(op.id, index) != index:
                    raise Different("both operands of a contraction come from scores")
            elif op.kind == "dynamic_update_slice" and index == 1:
                self._add_stack(op, v)
            elif op.parent != self.values.parent(w):
                raise Different("a branch or another loop reads the scores or weights")
            elif op.kind == "tanh":
                raise Different(_CAPPED)
            elif not self.is_closed(op):
                raise Different(f"{op.kind} at {where(op)} {_READS}")
            else:
                self.inside[op.id] = None
                yield from op.results

    def _add_stack(self, update: Op, v: int) -> None:
        """Adds the stack of `v`; Different if anything but slices of `v` reads it."""
        program, values, [made] = self.program, self.values, update.results
        loop = program.ops[update.parent] if update.parent >= 0 else None
        yields = loop.yields if loop is not None and loop.kind == "while" else ()
        place = yields.index(made) if made in yields else -1
        if loop is None or place < 0 or values.update_of(loop, place) is not update:
            raise Different("the scores or weights are written into an array")
        stack = loop.results[place]
        if not {*program.outputs}.isdisjoint(values.standing(stack)):
            raise Different("the step returns the scores or weights")
        for op, _, w in (*values.readers(stack), *values.readers(made)):
            is_slice = op.kind == "dynamic_slice" and values.same(op.results[0]) == v
            if not is_slice and (w != made or op is not loop):
                raise Different(f"{op.kind} at {where(op)} {_READS}, stacked")
        self.stacks |= {stack, made, update.operands[0]}

    # -- a closed list of ops ----------------------------------------------------------

    def is_closed(self, op: Op) -> bool:
        """True if attention may have the op, with its values, between contractions."""
        program = self.program
        dtypes = {program.values[v].dtype for v in op.results}
        if op.rule is None or not dtypes <= FLOATS:
            return False
        if op.kind == "reduce":
            start = self.values.number_of_constant(op.operands[-1])
            is_one = len(op.results) == 1
            largest = LARGEST in op.attributes and start == _LEAST
            return is_one and (largest or (SUM in op.attributes and start == 0.0))
        if op.kind == "maximum":  # With -inf, as in a softmax; not a clip.
            return any(self.values.number_of_constant(x) == _LEAST for x in op.operands)
        if op.kind == "select":
            return not self.has(op.operands[0])
        if op.kind == "convert":
            return program.values[op.operands[0]].dtype in FLOATS
        return op.kind in ELEMENTWISE | VIEWS


def contractions(values: Values, v: int, size: int) -> Iterator[Op]:
    """Yields contractions of `size` elements that make a value.

    The search stays at values of that size, and ends at reduces and exponentials.
    """
    program = values.program

    def before(v: int) -> Iterator[int]:
        op = program.maker(v)
        if op is not None and op.rule is not None and op.kind not in _ENDS:
            yield from map(values.same, op.operands if is_whole(v) else ())

    def is_whole(v: int) -> bool:
        is_whole = prod(program.shape(v)) == size and not values.is_leaf(v)
        return is_whole and program.values[v].dtype != "i1"

    for one in islice(reached([values.same(v)], before), _MOST_OPS):
        op = program.maker(one)
        if op is not None and op.kind == "dot_general" and is_whole(one):
            yield op


def scores_of(values: Values, exponential: Op) -> Op | None:
    """A contraction with a batch dim that may make an exponential's scores, or None."""
    [v], size = exponential.operands, prod(values.program.shape(exponential.results[0]))
    if (dot := next(contractions(values, v, size), None)) is None:
        return None
    left, right, out = (
        {dot.known_rule.major(f) for f in dims} - {None}
        for dims in (*dot.known_rule.operands[:2], dot.known_rule.results[0])
    )
    # A batch dim, such as sequences or heads.
    return dot if left & right & out else None


def has_dropout(region: Region) -> bool:
    """True if an op between contractions seems to depend on random numbers."""
    program, values = region.program, region.values

    def before(v: int) -> Iterable[int]:
        op = program.maker(v)
        is_end = op is None or op.has_regions or op.kind in (*_ENDS, "custom_call")
        return () if op is None or is_end else map(values.same, op.operands)

    reads = (v for i in region.inside for v in program.ops[i].operands)
    start = [values.same(v) for v in reads if not region.has(v)]
    makers = map(program.maker, islice(reached(start, before), _MOST_OPS))
    return any(op is not None and op.kind in _RANDOM for op in makers)
