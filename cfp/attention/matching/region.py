"""Finds the ops between the contractions of an attention: rule 1.

The search starts at a contraction that makes scores. It follows their readers through
barriers, loops and stacks, up to the contractions that read results: the mix of values,
and the gradients of queries, keys and values. All ops on the way are in a closed list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from cfp.attention.matching.values import FLOATS, Values
from cfp.program.graph import Op, reached
from cfp.program.replace import Different

# Rule 1: the ops that may stand between contractions; `_is_closed` says how.
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
_CAPPED = "its scores are capped by tanh, which cuDNN's kernel does not"
_READS = "reads the scores or the weights"
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})


def where(op: Op) -> str:
    """The line of an op, for messages."""
    return op.source or op.scope or "no line"


@dataclass
class Region:
    """The ops behind one contraction that may make scores.

    Attributes:
        scores: the contraction.
        inside: ids of the ops between contractions.
        members: their values, and scores, before these are passed on.
        sinks: contractions that read members, each with the operand's index.
        stacks: values in which loops stack members.
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
        """True of a member, or what it is passed on as."""
        return self.values.same(v) in self.members

    def grow(self) -> None:
        """Follows scores.

        Raises:
            Different: something else reads them, or is done with them.
        """
        stack = [*self.scores.results]
        while stack:
            v = stack.pop()
            if v not in self.members:
                self.members.add(v)
                stack += self._made_of(v)
            if len(self.inside) > _MOST_OPS:
                raise Different("much is computed of the scores besides a softmax")

    def _made_of(self, v: int) -> Iterator[int]:
        program = self.program
        if not {*program.outputs}.isdisjoint(self.values.standing(v)):
            raise Different(
                "the step returns the scores, the weights, or what is computed of them"
            )
        for op, index, w in self.values.readers(v):
            if op.kind == "dot_general":
                if self.sinks.setdefault(op.id, index) != index:
                    raise Different("a contraction reads two tensors of the attention")
            elif op.kind == "dynamic_update_slice" and index == 1:
                self._add_stack(op, v)
            elif op.parent != self.values.parent(w):
                raise Different("a branch or another loop reads its scores or weights")
            elif op.kind == "tanh":
                raise Different(_CAPPED)
            elif not self.is_closed(op):
                raise Different(f"{op.kind} at {where(op)} {_READS}")
            else:
                self.inside[op.id] = None
                yield from op.results

    def _add_stack(self, update: Op, v: int) -> None:
        """Adds a stack of a member that a loop makes, and whose slices are read."""
        program, values, [made] = self.program, self.values, update.results
        loop = program.ops[update.parent] if update.parent >= 0 else None
        yields = loop.yields if loop is not None and loop.kind == "while" else ()
        place = yields.index(made) if made in yields else -1
        if loop is None or place < 0 or values.update_of(loop, place) is not update:
            raise Different("its scores or weights are written into an array")
        stack = loop.results[place]
        if not {*program.outputs}.isdisjoint(values.standing(stack)):
            raise Different("the step returns its scores or weights")
        for op, _, w in (*values.readers(stack), *values.readers(made)):
            is_slice = op.kind == "dynamic_slice" and values.same(op.results[0]) == v
            if not is_slice and (w != made or op is not loop):
                raise Different(f"{op.kind} at {where(op)} reads its stacked scores")
        self.stacks |= {stack, made, update.operands[0]}

    # -- rule 1: a closed list of ops --------------------------------------------------

    def is_closed(self, op: Op) -> bool:
        """True if an op is in the list of provable ops."""
        program = self.program
        dtypes = {program.values[v].dtype for v in op.results}
        if op.rule is None or not dtypes <= FLOATS:
            return False
        if op.kind == "reduce":
            start = self.values.number_of_constant(op.operands[-1])
            is_one = len(op.results) == 1
            largest = LARGEST in op.attributes and start == _LEAST
            return is_one and (largest or (SUM in op.attributes and start == 0.0))
        if op.kind == "maximum":  # of a softmax's largest score, which is no clip
            return any(self.values.number_of_constant(x) == _LEAST for x in op.operands)
        if op.kind == "select":
            return not self.has(op.operands[0])
        if op.kind == "convert":
            return program.values[op.operands[0]].dtype in FLOATS
        return op.kind in ELEMENTWISE | VIEWS


def contractions(values: Values, v: int, size: int) -> Iterator[Op]:
    """The contractions of a size that a value is computed of, position by position."""
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
    """The contraction whose result a softmax may be of."""
    [v], size = exponential.operands, prod(values.program.shape(exponential.results[0]))
    dot = next(contractions(values, v, size), None)
    return dot if dot is not None and _is_batched(dot) else None


def has_dropout(region: Region) -> bool:
    """True if random numbers enter between contractions."""
    program, values = region.program, region.values

    def before(v: int) -> Iterable[int]:
        op = program.maker(v)
        is_end = op is None or op.has_regions or op.kind in (*_ENDS, "custom_call")
        return () if op is None or is_end else map(values.same, op.operands)

    reads = (v for i in region.inside for v in program.ops[i].operands)
    start = [values.same(v) for v in reads if not region.has(v)]
    makers = map(program.maker, islice(reached(start, before), _MOST_OPS))
    return any(op is not None and op.kind in _RANDOM for op in makers)


def _is_batched(dot: Op) -> bool:
    """True if a contraction does the same for each sequence or head."""
    left, right, out = (
        {dot.known_rule.major(f) for f in dims} - {None}
        for dims in (*dot.known_rule.operands[:2], dot.known_rule.results[0])
    )
    return bool(left & right & out)
