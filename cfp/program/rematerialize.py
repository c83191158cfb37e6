"""Rematerializes values in the backward pass that would otherwise be residuals.

Forward ops that a backward pass reads are cloned before it. The clones' operands go
through an ``optimization_barrier``, together with the gradients that enter. So XLA
neither merges the clones with the originals nor runs them early, and frees the
originals' results after the forward pass. Gradients are read behind the barrier, since
XLA drops unread operands of it. Arguments enter as stored, and are gathered again.
``jax.checkpoint`` does the same at tracing; here the program is differentiated already.
Values that depend on no argument stay outside of the barrier: the compiler would write
a broadcast constant to memory to pass it through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from jax.extend.mlir import ir

from cfp.program.graph import PARTITIONED, Program, reached
from cfp.program.shardy import clone_with, make_barrier, owner_of

# Another one where another program comes of it: what was measured does not count then.
VERSION = "3"
_CONSTRAINT = "sdy.sharding_constraint"
_NOT_REPEATABLE = ("custom_call", "rng")


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """Top-level ops to rematerialize, and the ops that read them, by id."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def rematerializable(
    program: Program,
    ops: Iterable[int],
    turn: int,
    within: Set[int] | None = None,
) -> Rematerialization | None:
    """Finds the part of some top-level ops that can be rematerialized, or None.

    Operands from elsewhere are rematerialized, too, if cheap ops make them of other
    operands.

    Args:
        ops: ids of the ops, such as those of a segment.
        turn: the id of the first op of the backward pass.
        within: ids of all ops of interest; by default the program's.
    """
    mine = set(ops)
    backward = tuple(op for op in sorted(mine) if op >= turn)
    forward = {op for op in mine if op < turn and repeatable(program, op)}
    reads = {v for op in backward for v in program.ops[op].operands}
    made = {v for op in forward for v in program.ops[op].results}
    if not made & reads:
        return None
    entering = {
        v
        for v in _read(program, reads, forward)
        if 0 <= (op := program.values[v].producer) < turn
        and op not in mine
        and op not in program.leaf_ops
    }
    forward.update(*makeable(program, entering, within).values())
    return Rematerialization(tuple(sorted(forward)), backward)


def _read(program: Program, values: Iterable[int], ops: Set[int]) -> set[int]:
    """Returns some values, with their operands that some ops make."""

    def before(v: int) -> Sequence[int]:
        producer = program.values[v].producer
        return program.ops[producer].operands if producer in ops else ()

    return {*reached(values, before)}


def repeatable(program: Program, op_id: int) -> bool:
    """True if an op repeats its result: no loop, no call, no random state.

    A custom_partitioning op has a known computation without effects.
    """
    op = program.ops[op_id]
    is_known = PARTITIONED.search(op.attributes) is not None
    return not op.has_regions and (is_known or op.kind not in _NOT_REPEATABLE)


def rematerialize(
    ops: Sequence[ir.Operation], wanted: Sequence[Rematerialization]
) -> dict[int, ir.Operation]:
    """Clones a program's constrained ops before the backward ops that read them.

    Returns:
        The clones by the numbers of their originals.
    """
    clones: dict[int, ir.Operation] = {}
    known: dict[ir.Operation, tuple[dict[ir.Operation, int], set[ir.Operation]]] = {}
    for one in wanted:
        parent = ops[one.backward[0]].parent
        assert parent is not None, "ops stand in the function, or in a loop"
        if parent.operation not in known:
            regions = parent.operation.regions
            body = [o.operation for r in regions for o in r.blocks[0].operations]
            place = {op: number for number, op in enumerate(body)}
            known[parent.operation] = place, _without_arguments(body)
        clones |= _Rematerializer(ops, one, *known[parent.operation]).run()
    return clones


def _without_arguments(body: Sequence[ir.Operation]) -> set[ir.Operation]:
    """The ops whose results are the same in every step, whatever the arguments."""
    never = {"func.call", *(f"stablehlo.{kind}" for kind in _NOT_REPEATABLE)}
    found: set[ir.Operation] = set()
    for op in body:
        repeats = not len(op.regions) and op.name not in never
        if repeats and all(owner_of(v) in found for v in op.operands):
            found.add(op)
    return found


class _Rematerializer:
    def __init__(
        self,
        ops: Sequence[ir.Operation],
        wanted: Rematerialization,
        place: dict[ir.Operation, int],
        fixed: set[ir.Operation],
    ) -> None:
        self.place = place
        self.fixed = fixed
        self.number = {ops[i]: i for i in wanted.forward if ops[i] in place}
        self.readers = [ops[i] for i in wanted.backward if ops[i] in place]

    def run(self) -> dict[int, ir.Operation]:
        reads = [v for reader in self.readers for v in reader.operands]
        clones = self._needed(filter(self._is_cloned, reads))
        if not clones:
            return {}
        found: dict[int, ir.Operation] = {}
        made: set[ir.Value] = {result for op in clones for result in op.results}
        outside = {
            operand: None
            for op in clones
            for operand in op.operands
            if operand not in made and owner_of(operand) not in self.fixed
        }
        signals = self._signals(made)
        entering = list(outside | signals)
        with ir.InsertionPoint(self.readers[0]):
            behind = make_barrier(entering).results if entering else ()
            mapping: dict[ir.Value, ir.Value] = dict(zip(entering, behind, strict=True))
            for op in clones:
                clone = clone_with(op, mapping)
                if op in self.number:
                    found[self.number[op]] = clone
        for reader in self.readers:
            for index, operand in enumerate(reader.operands):
                if operand in signals or operand in made:
                    reader.operands[index] = mapping[operand]
        return found

    def _is_cloned(self, value: ir.Value) -> bool:
        """True for what a forward op makes, and for a gathered argument.

        That is one in another sharding than it is stored in.
        """
        owner = maker = owner_of(value)
        while maker is not None and maker.name == _CONSTRAINT:
            maker = owner_of(maker.operands[0])
        return owner is not None if maker is None else maker in self.number

    def _needed(self, values: Iterable[ir.Value]) -> list[ir.Operation]:
        """The ops that some values take, in the order in which they stand."""

        def further(value: ir.Value) -> Iterable[ir.Value]:
            owner = owner_of(value)
            return filter(self._is_cloned, owner.operands if owner else ())

        owners = {owner_of(value) for value in reached(values, further)}
        return sorted(filter(None, owners), key=lambda op: self.place[op])

    def _signals(self, made: set[ir.Value]) -> dict[ir.Value, None]:
        """Returns values of the backward pass that readers need before the clones run.

        Without such a value the clones might run as soon as their originals.
        """
        turn = max(self.place[op] for op in self.number)
        end = self.place[self.readers[0]]
        return {
            operand: None
            for reader in self.readers
            for operand in reader.operands
            if (owner := owner_of(operand)) is not None
            and operand not in made
            and owner not in self.fixed
            and turn < self.place.get(owner, -1) < end
        }


# -------------------------------------------------------- values that need not be kept

# Fused into what reads them, and cheap to do twice.
CHEAP = frozenset(
    "abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil clamp compare "
    "convert cosine divide erf erf_inv exponential exponential_minus_one floor "
    "is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt "
    "power reduce_precision remainder reshape round_nearest_afz round_nearest_even "
    "rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine "
    "slice sqrt square subtract tan tanh transpose xor".split()
)
_CHEAP_OR_SUM = CHEAP | {"reduce"}
# A norm takes some twenty ops.
_MOST_OPS = 64


def makeable(
    program: Program, values: Iterable[int], within: Set[int] | None = None
) -> dict[int, set[int]]:
    """Finds values that cheap ops can compute from the others and from arguments.

    A norm, for one, is made of the residual stream that it reads.

    Args:
        values: ids of top-level values that are needed.
        within: ids of the ops that may be done again; None for all.

    Returns:
        For each such value the ids of the ops that make it.
    """
    rest = set(values)
    found = {}
    for v in sorted(rest, key=lambda v: program.values[v].producer, reverse=True):
        ops = _ops_from(program, v, rest - {v}, within)
        if ops is not None:
            found[v] = ops
            rest.discard(v)
    return found


def _ops_from(
    program: Program, v: int, known: Set[int], within: Set[int] | None
) -> set[int] | None:
    """Cheap ops that make a value of known ones, or None."""
    found: set[int] = set()
    stack = [v]
    while stack:
        w = stack.pop()
        op = program.maker(w)
        if w in known or op is None or op.id in found or program.is_leaf(w):
            continue
        is_cheap = op.kind in _CHEAP_OR_SUM and not op.has_regions
        if not is_cheap or not (within is None or op.id in within):
            return None
        found.add(op.id)
        if len(found) > _MOST_OPS:
            return None
        stack.extend(op.operands)
    return found
