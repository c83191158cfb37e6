"""Anchors, the contractions derived from them, classes of dims, and value numbers.

An *anchor* is a contraction that derives from no other, or a lookup. A lookup needs a
table that no contraction computes (an embedding), or a result at least as large as the
table (edges that look up their nodes). Differentiation of ``C = A B`` makes
``dB = A^T dC`` and ``dA = dC B^T``. These *derived* contractions share one operand with
the anchor, and their other operand, the cotangent, has the dims of ``C``. Both facts
identify them, and map their factors to the anchor's.

Values with equal *numbers* count as equal: see `Numbers`. Numbers see through casts,
barriers, rematerialization, and stacks that a forward loop writes and a backward loop
reads.

*Classes* are dims of a block's tensors that must be sharded together. All dims of one
factor of an op are in one class, unless the op is a contraction: the block's strategy
decides there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

from cfp.program.graph import Op, Program, call_flops
from cfp.program.rules import Dims, Rule

Permutation = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A block's contraction, gather or scatter; in a block without any, the largest op.

    Attributes:
        op: the op's id.
        factors: the anchor's factor for each factor of the op, or -1.
        cotangent: index of the operand that is the cotangent of the anchor's result;
            -1 for the anchor and its rematerializations.
    """

    op: int
    factors: tuple[int, ...]
    cotangent: int = -1

    @property
    def derived(self) -> bool:
        """True for gradients' members; False for the anchor and rematerializations."""
        return self.cotangent >= 0


def is_contraction(op: Op) -> bool:
    """True for dots, convolutions, and other ops that sum a factor of two operands.

    Not: gathers, scatters, reduces, calls of unknown FLOPs, ops without a rule.
    """
    if op.rule is None:
        return False
    if op.kind == "custom_call":
        return call_flops(op) > 0
    if op.kind in ("dot_general", "convolution"):
        return True
    for factor in op.rule.reduction:
        holders = sum(any(factor in dim for dim in dims) for dims in op.rule.operands)
        if holders >= 2 and op.kind not in ("scatter", "reduce", "gather"):
            return True
    return False


def is_product(op: Op) -> bool:
    """True if an op is a contraction or a gather."""
    return is_contraction(op) or op.kind == "gather"


def find_members(program: Program, numbers: Numbers) -> list[list[Member]]:
    """Returns each block's contractions, gathers and scatters, the anchor first."""
    return _Finder(program, numbers).run()


Candidates = list[tuple[int, Member]]  # (block, member), the latest block first


class _Finder:
    def __init__(self, program: Program, numbers: Numbers) -> None:
        self.program = program
        self.numbers = numbers
        self.blocks: list[list[Member]] = []
        self.by_result: dict[int, int] = {}
        # {number of a tensor: (block whose anchor reads it, operand index) pairs}.
        self.by_operand: dict[int, list[tuple[int, int]]] = {}

    def run(self) -> list[list[Member]]:
        computed = _made_by_contractions(self.program)
        derived: list[Candidates] = []
        for op in self.program.ops:
            if op.id in self.program.leaf_ops or op.rule is None:
                continue
            if not (is_product(op) or op.kind == "scatter"):
                continue
            again = self.by_result.get(self.numbers[op.results[0]])
            if again is not None:
                block = self.blocks[again]
                block.append(Member(op.id, block[0].factors))
                continue
            is_made = op.kind == "gather" and computed[op.operands[0]]
            if is_made and not self._spreads(op):
                continue
            # The second product of ``(x @ w) @ w.T`` has the structure of a derivative
            # of the first, but JAX's scope names a forward pass. A scatter follows the
            # gather of its rows in either pass.
            is_backward = "transpose(" in op.scope
            is_forward = "jvp(" in op.scope and not is_backward
            is_later = is_forward and op.kind != "scatter"
            candidates = [] if is_later else self._candidates(op)
            if not candidates and is_backward:
                candidates = self._candidates(op, moved=True)
            if candidates:
                derived.append(candidates)
                continue
            # A product of two tensors to a scalar, such as a norm, is only a reduction.
            is_number = not self.program.shape(op.results[0])
            if op.kind != "scatter" and not (op.kind == "dot_general" and is_number):
                self._anchor(op)
        for block, member in self._resolve(derived):
            self.blocks[block].append(member)
        return self.blocks

    def _spreads(self, op: Op) -> bool:
        """True for a forward gather that adds dims and is no smaller than its table."""
        # With new dims sharded, a gathered table costs less than a reduced result.
        if "transpose(" in op.scope:
            return False
        own, new = ({f for d in dims for f in d} for dims in op.known_rule.operands[:2])
        sizes = [op.known_rule.sizes[f] for f in new - own - op.known_rule.fixed]
        table, result = op.operands[0], op.results[0]
        size = self.program.values[result].size_bytes
        return prod(sizes) > 1 and size >= self.program.values[table].size_bytes

    def _anchor(self, op: Op) -> None:
        block = len(self.blocks)
        self.blocks.append([Member(op.id, tuple(range(len(op.known_rule.sizes))))])
        self.by_result[self.numbers[op.results[0]]] = block
        for index, operand in enumerate(op.operands[:2]):
            base, _ = self._view(operand)
            self.by_operand.setdefault(base, []).append((block, index))

    def _view(self, value: int) -> tuple[int, Permutation]:
        """Returns the number of a value, or of the one it views, and dims' order."""
        number = self.numbers[value]
        rank = len(squeeze(self.program.shape(value)))
        return self.numbers.views.get(number, (number, tuple(range(rank))))

    def _read(self, op: Op, index: int) -> int:
        """Returns an operand's value; a scatter's indices before a clamp of its own."""
        value = op.operands[index]
        before = self.program.maker(value)
        if op.kind == "scatter" and index == 1 and before is not None:
            # If the gather read clamped indices, too, they are known.
            is_known = self._view(value)[0] in self.by_operand
            if before.kind == "clamp" and not is_known:
                return before.operands[1]
        return value

    def _candidates(self, op: Op, moved: bool = False) -> Candidates:
        """Returns (block, member) pairs of blocks that an op may be derived from.

        `moved` allows cotangents whose dims vmap has moved.
        """
        found = []
        for shared, cotangent in [(1, 2)] if op.kind == "scatter" else [(0, 1), (1, 0)]:
            if cotangent >= len(op.operands):
                continue
            base, _ = self._view(self._read(op, shared))
            for block, index in reversed(self.by_operand.get(base, [])):
                anchor = self.program.ops[self.blocks[block][0].op]
                factors = self._factor_map(op, shared, cotangent, anchor, index, moved)
                if factors is not None:
                    found.append((block, Member(op.id, factors, cotangent)))
        return found

    def _factor_map(
        self, op: Op, shared: int, cotangent: int, anchor: Op, index: int, moved: bool
    ) -> tuple[int, ...] | None:
        """Maps a contraction's factors to the anchor's; None if not derived from it."""
        rule, base = op.known_rule, anchor.known_rule
        mine = self._sharing(op, shared)
        theirs = self._sharing(anchor, index)
        result = _factors(base, base.results[0])
        shared_factors: dict[int, int] = {}
        if not _align(shared_factors, rule, mine, base, theirs):
            return None
        read = _factors(rule, rule.operands[cotangent])
        before = self._sharing(op, cotangent)  # As read, then before a transpose.
        for dims in (read, before) if before != read else (read,):
            if moved:
                dims = _in_order(shared_factors, dims, result)
            found = dict(shared_factors)
            is_aligned = _align(found, rule, dims, base, result)
            if is_aligned and self._fits(found, op, anchor, index):
                return tuple(found.get(f, -1) for f in range(len(rule.sizes)))
        return None

    def _sharing(self, op: Op, index: int) -> list[int]:
        """Returns an operand's major factors, in the order of the viewed tensor."""
        factors = _factors(op.known_rule, op.known_rule.operands[index])
        _, order = self._view(self._read(op, index))
        if len(order) != len(factors):
            return factors
        return [f for _, f in sorted(zip(order, factors, strict=True))]

    def _fits(self, found: dict[int, int], op: Op, anchor: Op, index: int) -> bool:
        """True if the result has the factors of the anchor's other operand.

        Scatters and convolutions always fit, as the sizes of their windows change;
        `found` gets their factors if all match.
        """
        rule, base = op.known_rule, anchor.known_rule
        other = base.operands[1 - index]
        produced = _factors(rule, rule.results[0])
        if op.kind in ("scatter", "convolution"):
            more = dict(found)
            if _align(more, rule, produced, base, _factors(base, other)):
                found.update(more)
            return True
        return {found.get(f, -1) for f in produced} == set(_factors(base, other))

    def _resolve(self, derived: list[Candidates]) -> list[tuple[int, Member]]:
        """Picks one of its candidate blocks for each derived contraction.

        Query, key and value projections have equal derived contractions. A cotangent
        belongs to one anchor: another contraction that reads it may have one candidate.
        Others take the first candidate, of a block that is not taken if possible.
        """
        owner: dict[int, int] = {}

        def cotangent(member: Member) -> int:
            value = self.program.ops[member.op].operands[member.cotangent]
            return self._view(value)[0]

        for candidates in derived:
            if len({block for block, _ in candidates}) == 1:
                owner.setdefault(cotangent(candidates[0][1]), candidates[0][0])
        taken = set(owner.values())
        found = []
        for candidates in derived:
            known = [c for c in candidates if owner.get(cotangent(c[1])) == c[0]]
            free = [c for c in candidates if c[0] not in taken]
            block, member = (known or free or candidates)[0]
            owner.setdefault(cotangent(member), block)
            taken.add(block)
            found.append((block, member))
        return found


def _made_by_contractions(program: Program) -> list[bool]:
    """Returns by value id: True if a contraction may be upstream, in this iteration."""
    made = [False] * len(program.values)
    for op in program.ops:
        for v in op.reads:
            for outside, inside in program.entered(v):
                made[inside] |= made[outside]
        flag = is_contraction(op) or any(made[v] for v in op.reads)
        for result in op.results:
            made[result] = flag
    return made


def _factors(rule: Rule, dims: Dims) -> list[int]:
    """Returns the dims' major factors, except closed ones and dims of size 1."""
    majors = (rule.major(dim) for dim in dims)
    return [f for f in majors if f is not None and f not in rule.closed]


def _in_order(found: dict[int, int], mine: list[int], theirs: list[int]) -> list[int]:
    """Orders `mine` as `theirs`; `found` maps mine to theirs, others fill gaps."""
    known = {found[f]: f for f in mine if f in found}
    rest = iter([f for f in mine if f not in found])
    ordered = [known[f] if f in known else next(rest, None) for f in theirs]
    return [f for f in (*ordered, *rest) if f is not None]


def _align(
    found: dict[int, int], rule: Rule, mine: list[int], base: Rule, theirs: list[int]
) -> bool:
    """Adds pairs to `found`, maybe not all; False if lengths, sizes or pairs clash."""
    if len(mine) != len(theirs):
        return False
    for factor, other in zip(mine, theirs, strict=True):
        if rule.sizes[factor] != base.sizes[other]:
            return False
        if found.setdefault(factor, other) != other:
            return False
    return len(set(found.values())) == len(found)


def major_factors(
    rule: Rule, dims: Dims, axis_size: int, before: int = 1
) -> list[tuple[int, int]]:
    """Returns (dim, factor) pairs along which an axis can split a tensor.

    Args:
        before: pieces that other axes split a dim into. In a dim of several factors,
            the axis then splits the first factor that they do not use up.
    """
    found = []
    for dim, factors in enumerate(dims):
        factor = rule.major(factors, before)
        if factor is None or factor in rule.closed:
            continue
        if rule.splits(factor, axis_size):
            found.append((dim, factor))
    return found


def form_of(
    program: Program,
    canonical: Mapping[int, int],
    ops: Iterable[int],
    values: Iterable[int] = (),
) -> Hashable:
    """Returns a key that is equal for ops of equal rules, connected alike.

    Equal layers have equal keys. A key includes the places of `values` in the layer.
    """
    places: dict[int, int] = {}

    def place(value: int) -> int:
        found = places.setdefault(canonical.get(value, value), len(places))
        return ~found if program.is_leaf(value) else found

    every = (program.ops[op] for op in ops)
    tensors = (
        (o.rule, *(tuple(map(place, v)) for v in (o.operands, o.results)))
        for o in every
    )
    return (*tensors, *map(place, values))


class DimClasses:
    """Classes of dims that some ops shard together, for one axis size.

    A dim is a pair (value id, dim number). `canonical` is `Flow.canonical`.
    """

    def __init__(
        self,
        program: Program,
        ops: Iterable[int],
        members: tuple[Member, ...],
        canonical: Mapping[int, int],
        axis_size: int,
        before: int = 1,
    ) -> None:
        self._before = before
        self._program = program
        self._canonical = canonical
        self._sets = UnionFind()
        self._size = axis_size
        contractions = {m.op for m in members}
        for op_id in ops:
            if op_id not in contractions:
                self._join(program.ops[op_id])
        if members:
            anchor = program.ops[members[0].op]
            for member in members:
                if member.derived:
                    self._join_cotangent(anchor, member)

    def of_dim(self, value: int, dim: int) -> Hashable:
        """Returns the class of a tensor's dim, as a key."""
        return self._sets.find(self._dim(value, dim))

    def of_factor(self, op: int, factor: int) -> Hashable:
        """Returns the class of an op's factor, as a key."""
        return self._sets.find((~op, factor))

    def _join(self, op: Op) -> None:
        rule, program = op.rule, self._program
        if rule is None:
            return
        both = (op.operands, rule.operands), (op.results, rule.results)
        for values, tensors in both:
            for value, dims in zip(values, tensors, strict=False):
                if program.is_leaf(value):
                    continue
                for dim, factor in major_factors(rule, dims, self._size, self._before):
                    self._sets.union(self._dim(value, dim), (~op.id, factor))

    def _join_cotangent(self, anchor: Op, member: Member) -> None:
        """Joins a cotangent's dims with the dims of the anchor's result."""
        base, op = anchor.rule, self._program.ops[member.op]
        assert base is not None and op.rule is not None
        place = {base.major(dims): dim for dim, dims in enumerate(base.results[0])}
        value = op.operands[member.cotangent]
        for dim, factors in enumerate(op.rule.operands[member.cotangent]):
            factor = op.rule.major(factors)
            if factor is not None and member.factors[factor] in place:
                self._sets.union(
                    self._dim(anchor.results[0], place[member.factors[factor]]),
                    self._dim(value, dim),
                )

    def _dim(self, value: int, dim: int) -> tuple[int, int]:
        return self._canonical.get(value, value), dim


# ------------------------------------------------------------------------ value numbers

_SAME = frozenset({"convert", "optimization_barrier", "reduce_precision"})
_UNIT_VIEWS = frozenset({"reshape", "broadcast_in_dim"})
_PURE = frozenset({"constant", "iota"})


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of values: equal ones mean equal tensors, up to dtype and unit dims.

    There are two exceptions. Slices of one stack in two loops may have one number at
    unlike indices. A branch's result has the number its non-constant cases share.

    Attributes:
        of: a number for each value id.
        views: {number of a transposed or reversed view: (viewed number, its dim for
            each dim of the view)}, without dims of size 1.
    """

    of: tuple[int, ...]
    views: dict[int, tuple[int, Permutation]]

    def __getitem__(self, value: int) -> int:
        return self.of[value]


def number_values(program: Program) -> Numbers:
    """Numbers a program's values; equal tensors may get different numbers."""
    return _Numbering(program).run()


class _Numbering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = [-1] * len(program.values)
        self.table: dict[tuple, int] = {}
        self.stacked: dict[int, int] = {}  # number of a stack -> number of its slices
        self.slices: dict[tuple[int, ...], int] = {}  # (slice, *index) -> its number
        self.sliced: set[tuple[int, int]] = set()  # (loop, number of its slice)
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
        loops = [op for op in self.program.ops if op.kind == "while"]
        body_args = chain(*(op.entries[len(op.operands) :] for op in loops))
        yields = chain(*(op.yields for op in loops))
        return {a for a, y in zip(body_args, yields, strict=True) if a == y}

    def _bind(self, value: int, invariant: set[int]) -> int:
        """Returns a value's number; an invariant argument has its initial value's."""
        if self.numbers[value] < 0:
            origin = self.program.values[value].origin
            is_known = value in invariant
            number = self._bind(origin, invariant) if is_known else self.fresh()
            self.numbers[value] = number
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
            kept = [dim for dim, size in enumerate(shapes[0]) if size != 1]
            dims = op.integers("permutation")
            order = tuple(kept.index(dim) for dim in dims if dim in kept)
            numbers[op.results[0]] = self._transposed(operands[0], order)
        elif op.kind == "reverse":
            found = self.intern(("reverse", operands[0], op.attributes))
            as_read = operands[0], tuple(range(len(squeeze(shapes[0]))))
            self.views[found] = self.views.get(operands[0], as_read)
            numbers[op.results[0]] = found
        elif op.parent >= 0 and op.kind == "dynamic_slice":
            numbers[op.results[0]] = self._sliced(op, operands)
        elif op.kind == "slice" and (piece := self._piece(op)) is not None:
            numbers[op.results[0]] = piece
        elif _is_opaque(op):
            for result in op.results:
                numbers[result] = self.fresh()
        else:
            for index, result in enumerate(op.results):
                shape = self.program.shape(result)
                key = (op.name, op.attributes, operands, shapes, shape, index)
                numbers[result] = self.intern(key)
            if op.kind == "concatenate":
                self.joined[numbers[op.results[0]]] = op

    def _sliced(self, op: Op, operands: tuple[int, ...]) -> int:
        """Numbers a stack's slice; in one loop, unlike indices have unlike numbers."""
        stack, *at = operands
        own = self.stacked.get(stack, self.intern(("slice", stack, op.attributes)))
        is_other = (op.parent, own) in self.sliced
        number = self.intern(("slice", own, *at)) if is_other else own
        number = self.slices.setdefault((own, *at), number)
        self.sliced.add((op.parent, number))
        return number

    def _piece(self, op: Op) -> int | None:
        """Returns the value number of the joined operand that a slice is, or None."""
        whole = self.joined.get(self.numbers[op.operands[0]])
        if whole is None or {*op.integers("strides")} != {1}:
            return None
        starts, limits = op.integers("start_indices"), op.integers("limit_indices")
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
        dims = list(op.integers("broadcast_dimensions"))  # [] for a reshape
        return squeeze(source) == squeeze(target) and dims == sorted(dims)

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

    def _number_regions(self, op: Op) -> None:
        """Numbers a loop's or branch's values, like an earlier equal one's, if any."""
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
        return [v for o in self._with_body(op) for v in (*o.entries, *o.results)]

    def _form(self, op: Op) -> tuple | None:
        """Returns a key that equal loops or branches share; None for uncertain ones."""
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
            if update is not None and update.kind == "dynamic_update_slice":
                if update.operands[0] == arg:
                    self.stacked[number] = self.numbers[update.operands[1]]


def _is_opaque(op: Op) -> bool:
    """True for ``rng`` and ops without rule and regions, except constants and iotas."""
    unknown = op.rule is None and op.kind not in _PURE and not op.has_regions
    return op.kind == "rng" or unknown


def _identity(order: Permutation) -> Permutation:
    return tuple(range(len(order)))


def squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


# ----------------------------------------------------------------------- disjoint sets


class UnionFind:
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """Returns the representative of an item's set."""
        parent = self._parent
        root = item
        while (above := parent.get(root, root)) != root:
            root = above
        while item != root:
            parent[item], item = root, parent.get(item, item)
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        """Joins the sets of two items; the second's representative stays."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[a] = b
