"""Value numbering: equal numbers mean equal tensors, up to dtype and unit dims.

Rematerialized code computes values twice, in loops too; a backward loop reads what the
forward loop stacked. Numbers see through both, through casts and through barriers, so
that an op of the backward pass can be matched with the op it was differentiated from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cfp.program.graph import Op, Program

_SAME = frozenset({"convert", "optimization_barrier", "reduce_precision"})
_UNIT_VIEWS = frozenset({"reshape", "broadcast_in_dim"})
_PURE = frozenset({"constant", "iota"})

Permutation = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The value numbers of a program.

    Attributes:
        of: a number for each value id.
        views: for numbers that are transposed or reversed views: the viewed number, and
            for each dim of the view the other's dim, without dims of size 1.
    """

    of: tuple[int, ...]
    views: dict[int, tuple[int, Permutation]]

    def __getitem__(self, value: int) -> int:
        return self.of[value]


def number_values(program: Program) -> Numbers:
    """Numbers a program's values; equal for values that are equal by construction."""
    return _Numbering(program).run()


def squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


class _Numbering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = [-1] * len(program.values)
        self.table: dict[tuple, int] = {}
        self.stacked: dict[int, int] = {}  # number of a stack -> number of its slices
        self.flat: dict[int, tuple[int, tuple[int, ...]]] = {}  # reshapes
        self.joined: dict[int, Op] = {}  # number of a concatenation -> its op
        self.regions: dict[tuple, Op] = {}  # form of a loop or branch -> the first
        self.permuted: dict[int, tuple[int, Permutation]] = {}  # transposes only
        self.views: dict[int, tuple[int, Permutation]] = {}  # and reverses

    def fresh(self) -> int:
        return self.intern(("fresh", len(self.table)))

    def intern(self, key: tuple) -> int:
        return self.table.setdefault(key, len(self.table))

    def run(self) -> Numbers:
        for value in self.program.args:
            self.numbers[value] = self.fresh()
        invariant = self._invariant_entries()
        for op in self.program.ops:
            for v in op.reads:
                self._bind(v, invariant)
            if op.has_regions:
                self._number_regions(op)
            else:
                self._number(op)
        numbers = tuple(n if n >= 0 else self.fresh() for n in self.numbers)
        return Numbers(numbers, self.views)

    def _invariant_entries(self) -> set[int]:
        """Loop-body arguments that every iteration passes on unchanged."""
        found = set()
        for op in self.program.ops:
            if op.kind != "while":
                continue
            body_args = op.entries[len(op.operands) :]
            for arg, yielded in zip(body_args, op.yields, strict=True):
                if arg == yielded:
                    found.add(arg)
        return found

    def _bind(self, value: int, invariant: set[int]) -> int:
        """The number of a value that may be the argument of a loop's body."""
        if self.numbers[value] < 0:
            origin = self.program.values[value].origin
            known = value in invariant
            self.numbers[value] = (
                self._bind(origin, invariant) if known else self.fresh()
            )
        return self.numbers[value]

    def _number(self, op: Op) -> None:
        numbers = self.numbers
        if op.kind in _SAME:
            for result, operand in zip(op.results, op.operands, strict=False):
                numbers[result] = numbers[operand]
            return
        operands = tuple(numbers[v] for v in op.operands)
        shapes = tuple(self.program.shape(v) for v in op.operands)
        if op.kind in _UNIT_VIEWS and self._only_units(op):
            numbers[op.results[0]] = operands[0]
        elif op.kind == "reshape":
            shape = self.program.shape(op.results[0])
            numbers[op.results[0]] = self._reshaped(operands[0], shapes[0], shape)
        elif op.kind == "transpose":
            order = _squeezed_order(op.integers("permutation"), shapes[0])
            numbers[op.results[0]] = self._transposed(operands[0], order)
        elif op.kind == "reverse":
            rank = len(squeeze(shapes[0]))
            numbers[op.results[0]] = self._reversed(operands[0], rank, op.attributes)
        elif op.parent >= 0 and op.kind == "dynamic_slice":
            # The iteration's slice of a stack, whatever the order of iteration.
            stack = operands[0]
            number = self.stacked.get(stack)
            if number is None:
                number = self.intern(("slice", stack, op.attributes))
            numbers[op.results[0]] = number
        elif op.kind == "slice" and (piece := self._piece(op)) is not None:
            numbers[op.results[0]] = piece
        elif _is_opaque(op):
            for result in op.results:  # what an opaque op does is not known
                numbers[result] = self.fresh()
        else:
            for index, result in enumerate(op.results):
                shape = self.program.shape(result)
                key = (op.name, op.attributes, operands, shapes, shape, index)
                numbers[result] = self.intern(key)
            if op.kind == "concatenate":
                self.joined[numbers[op.results[0]]] = op

    def _piece(self, op: Op) -> int | None:
        """Returns the number of a concatenated piece that a slice takes in full."""
        whole = self.joined.get(self.numbers[op.operands[0]])
        if whole is None:
            return None
        starts, limits = (
            op.integers(name) for name in ("start_indices", "limit_indices")
        )
        shape = self.program.shape(op.operands[0])
        if shape != self.program.shape(whole.results[0]):
            return None
        cut = [d for d, size in enumerate(shape) if (starts[d], limits[d]) != (0, size)]
        offset = 0
        for piece in whole.operands:
            sizes = self.program.shape(piece)
            same = [d for d, size in enumerate(shape) if sizes[d] != size]
            if cut == same and len(cut) == 1:
                end = offset + sizes[cut[0]]
                if (starts[cut[0]], limits[cut[0]]) == (offset, end):
                    return self.numbers[piece]
                offset = end
        return None

    def _only_units(self, op: Op) -> bool:
        """True if a reshape or broadcast only adds or drops dims of size 1."""
        source = self.program.shape(op.operands[0])
        target = self.program.shape(op.results[0])
        if squeeze(source) != squeeze(target):
            return False
        if op.kind == "reshape":
            return True
        dims = op.integers("broadcast_dimensions")
        return list(dims) == sorted(dims)

    def _reshaped(
        self, number: int, source: tuple[int, ...], target: tuple[int, ...]
    ) -> int:
        base, shape = self.flat.get(number, (number, squeeze(source)))
        if squeeze(target) == shape:
            return base
        found = self.intern(("reshape", base, squeeze(target)))
        self.flat[found] = (base, shape)
        return found

    def _transposed(self, number: int, order: Permutation) -> int:
        base, inner = self.permuted.get(number, (number, _identity(order)))
        order = tuple(inner[d] for d in order)
        if order == _identity(order):
            return base
        found = self.intern(("transpose", base, order))
        self.permuted[found] = (base, order)
        seen, inner = self.views.get(base, (base, _identity(order)))
        self.views[found] = (seen, tuple(inner[d] for d in order))
        return found

    def _reversed(self, number: int, rank: int, attributes: str) -> int:
        found = self.intern(("reverse", number, attributes))
        self.views[found] = self.views.get(number, (number, tuple(range(rank))))
        return found

    def _number_regions(self, op: Op) -> None:
        """Numbers a loop or branch, and all in it, like an equal one before it."""
        form = self._form(op)
        before = op if form is None else self.regions.setdefault(form, op)
        if before is not op:
            pairs = zip(self._made_in(op), self._made_in(before), strict=True)
            for mine, other in pairs:
                self.numbers[mine] = self.numbers[other]
        elif op.kind == "while":
            self._number_loop(op)
        else:
            self._number_branches(op)

    def _with_body(self, op: Op) -> list[Op]:
        return [*(self.program.ops[inner] for inner in op.body), op]

    def _made_in(self, op: Op) -> list[int]:
        """The values of a loop or branch: of its regions, and what it returns."""
        return [v for o in self._with_body(op) for v in (*o.entries, *o.results)]

    def _form(self, op: Op) -> tuple | None:
        """Returns a key that equal loops or branches share.

        None if an op in it is unknown, or the value that a loop tests, which no op
        reads.
        """
        inside = self._with_body(op)
        users = self.program.users
        unread = Counter(
            o.parent for o in inside if not any(users[v] for v in o.results)
        )
        loops = [o.id for o in inside if o.kind == "while"]
        if any(map(_is_opaque, inside)) or any(unread[loop] != 1 for loop in loops):
            return None
        place = {v: -1 - i for i, v in enumerate(self._made_in(op))}

        def known(v: int) -> tuple:
            value = self.program.values[v]
            return place.get(v, self.numbers[v]), value.shape, value.dtype

        return tuple(
            (
                o.name,
                o.attributes,
                len(o.operands),
                *map(known, (*o.operands, *o.yields, *o.results)),
            )
            for o in inside
        )

    def _number_branches(self, op: Op) -> None:
        """A branch's result is what the one branch yields that yields no constant."""
        program = self.program
        for place, result in enumerate(op.results):
            found = {
                self.numbers[v] for v in op.yielded(place) if not program.is_leaf(v)
            }
            self.numbers[result] = found.pop() if len(found) == 1 else self.fresh()

    def _number_loop(self, op: Op) -> None:
        body_args = op.entries[len(op.operands) :]
        for arg, yielded, operand, result in zip(
            body_args, op.yields, op.operands, op.results, strict=True
        ):
            if arg == yielded:
                self.numbers[result] = self.numbers[operand]
                continue
            self.numbers[result] = number = self.fresh()
            update = self.program.maker(yielded)
            if update is None or update.kind != "dynamic_update_slice":
                continue
            if update.operands[0] == arg:
                self.stacked[number] = self.numbers[update.operands[1]]


def _is_opaque(op: Op) -> bool:
    """True if an op's effect is unknown."""
    unknown = op.rule is None and op.kind not in _PURE and not op.has_regions
    return op.kind == "rng" or unknown


def _identity(order: Permutation) -> Permutation:
    return tuple(range(len(order)))


def _squeezed_order(order: Permutation, shape: tuple[int, ...]) -> Permutation:
    """A permutation of dims, with the dims of size 1 left out and renumbered."""
    place = {}
    for dim, size in enumerate(shape):
        if size != 1:
            place[dim] = len(place)
    return tuple(place[d] for d in order if d in place)
