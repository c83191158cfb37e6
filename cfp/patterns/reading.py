"""Reads wide values of a program: those that have all tokens and all words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from cfp.patterns.expression import (
    COMPARE,
    CONSTANT,
    CONVERT,
    INDEX,
    INSIDE,
    KINDS,
    LOGITS,
    OTHER,
    SCALAR,
    SELECT,
    TOKEN,
    VOCABULARY,
    Cut,
    Dims,
    Expr,
    constant,
    is_constant,
)
from cfp.program.evaluate import Evaluator, NotEvaluated
from cfp.program.graph import Op, Program
from cfp.program.replace import Different, Use

# Of what batches operands and indices, of what is indexed, and of windows.
_NAMES_OF_GATHER = (
    *("operand_batching_dims", "start_indices_batching_dims"),
    *("start_index_map", "offset_dims"),
)
_NAMES_OF_SCATTER = (
    *("input_batching_dims", "scatter_indices_batching_dims"),
    *("scatter_dims_to_operand_dims", "update_window_dims"),
)
# Indices that are looked at to see that they count: of 2,048 sequences of 2,048 tokens.
_MOST_COUNTED = 2**22


@dataclass(frozen=True, slots=True)
class Read:
    """An operand that is read from outside, and its dims."""

    use: Use
    dims: Dims


@dataclass(frozen=True, slots=True)
class Indexed:
    """A gather or scatter of one word of each token.

    Attributes:
        wide: the dims of what has all words.
        label: where the words' numbers are read.
        narrow: the dims of what has one entry for each token.
    """

    wide: Dims
    label: Read
    narrow: Dims


@dataclass
class Reader:
    """Makes expressions of wide values.

    Attributes:
        start: its dims.
        words: size of the vocabulary.
        reads: where leaves are read, by the leaf.
        indexed: gathers and scatters that were read, by op.
        cuts: of tokens' dims, see `Dims.cut`; leaves INSIDE number them.
    """

    program: Program
    logits: int
    start: Dims
    tokens: tuple[int, ...]
    words: int
    reads: dict[Expr, Read] = field(default_factory=dict)
    indexed: dict[int, Indexed] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)

    def __post_init__(self) -> None:
        value = self.program.values[self.logits]
        self.parent = self.program.ops[value.producer].parent
        self._known: dict[tuple[int, Dims], Expr] = {
            (self.logits, self.start): Expr(LOGITS, value.dtype),
        }
        self._leaves: dict[tuple[str, int, Dims], Expr] = {}
        self._followed: dict[int, Dims] = {self.logits: self.start}

    def follow(self, op: Op, index: int, dims: Dims) -> Dims | None:
        """Returns the dims of an op's result if that has all words, too; or None.

        Raises:
            Different: the result has the same words, but its tokens are other ones.
            Split: see `Dims.reshaped`.
        """
        after = self._passed(op, index, dims)
        if after is not None:
            known = self._followed.setdefault(op.results[0], after)
            if known != after:
                raise Different("tokens are combined with others of them")
        return after

    def _passed(self, op: Op, index: int, dims: Dims) -> Dims | None:
        if not op.results:
            return None
        before, after = (
            self.program.shape(v) for v in (op.operands[index], op.results[0])
        )
        if op.kind in KINDS:
            return dims
        if op.kind == "reshape":
            return dims.reshaped(before, after, self.tokens)
        if op.kind == "transpose":
            return dims.picked(op.integers("permutation"))
        if op.kind == "broadcast_in_dim" and prod(before) == prod(after):
            of: list[tuple[int, ...]] = [()] * len(after)
            places = op.integers("broadcast_dimensions")
            for own, place in zip(dims.of, places, strict=True):
                of[place] = own
            return dims.made_of(of)
        if op.kind == "slice":
            return self._sliced(op, dims, before)
        if op.kind == "pad" and index == 0:
            return self._padded(op, dims, before, after)
        if op.kind == "dot_general":
            found = self._multiplied(op, index)
            return None if found is None else dims.picked(found)
        return None

    def _sliced(self, op: Op, dims: Dims, before: Sequence[int]) -> Dims:
        """Without some of the first or last tokens."""
        first, end, steps = (
            op.integers(name) for name in ("start_indices", "limit_indices", "strides")
        )
        cut = dict((one, (one, a, b)) for one, a, b in dims.cut)
        for own, a, b, step, size in zip(
            dims.of, first, end, steps, before, strict=True
        ):
            if (a, b) == (0, size):
                continue
            if own == (OTHER,) and b - a == 1:
                raise Different("one word's logit is taken")
            if own == (OTHER,):
                raise Different(
                    "its logits are cut along the vocabulary: mask what is cut off "
                    "with -inf"
                )
            # All logits are made: that is a waste where most are cut off.
            if len(own) != 1 or own[0] in cut or step != 1 or b - a < max(2, size / 2):
                raise Different(
                    "its logits are cut along tokens: cut what they are computed of"
                )
            cut[own[0]] = (own[0], a, b)
        return Dims(dims.of, tuple(sorted(cut.values())))

    def _padded(
        self, op: Op, dims: Dims, before: Sequence[int], after: Sequence[int]
    ) -> Dims | None:
        """With the tokens that were cut off, which are zero."""
        low, high, inner = (
            op.integers(name)
            for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
        )
        cut = list(dims.cut)
        for own, a, b, size in zip(dims.of, low, high, after, strict=True):
            if (a, b) == (0, 0):
                continue
            whole = (own[0], a, size - b) if len(own) == 1 else None
            if whole not in cut:
                return None
            cut.remove(whole)
        return None if any(inner) else Dims(dims.of, tuple(cut))

    def _multiplied(self, op: Op, index: int) -> list[int] | None:
        """The dims of the wide operand that a product that sums nothing has in turn."""
        own, contracted = op.product_dims(index)
        others, _ = op.product_dims(1 - index)
        other = self.program.shape(op.operands[1 - index])
        if contracted or len(others) != len(other):
            return None
        rank = len(self.program.shape(op.operands[index]))
        return [*own, *(dim for dim in range(rank) if dim not in own)]

    def wide_of_tokens(self) -> list[tuple[int, Dims]]:
        """The wide values known that are computed of what tokens have."""
        return [key for key, expr in self._known.items() if expr.has(TOKEN)]

    def wide(self) -> list[tuple[int, Dims]]:
        """The values known that have all tokens and all words, and their dims."""
        return [*{*self._known, *self._followed.items()}]

    def labels(self) -> set[int]:
        """Values of tokens that words are compared with."""
        leaves = {
            leaf
            for expr in self._known.values()
            for one in expr.walk()
            if one.kind == COMPARE and one.detail == "EQ" and one.has(INDEX)
            for leaf in one.walk()
            if leaf.kind == TOKEN
        }
        uses = [self.reads[leaf].use for leaf in leaves]
        return {self.program.ops[op].operands[index] for op, index in uses}

    def express(self, value: int, dims: Dims) -> Expr:
        """Returns the expression of a wide value.

        Raises:
            Different: of something that is no expression.
        """
        if self._followed.get(value, dims) != dims:
            raise Different("tokens are combined with others of them")
        key = value, dims
        if key not in self._known:
            self._known[key] = self._expressed(value, dims)
        return self._known[key]

    def _expressed(self, value: int, dims: Dims) -> Expr:
        record, op = self.program.values[value], self.program.maker(value)
        if op is None:
            raise Different("an argument has a column for each word")
        if op.parent != self.parent and op.id not in self.program.leaf_ops:
            raise Different(f"{op.kind} is in another loop")
        before = self.program.shape(op.operands[0]) if op.operands else ()
        if op.kind in KINDS:
            args = [self._operand(op, index, dims) for index in range(len(op.operands))]
            if op.kind == CONVERT:
                return args[0].cast(record.dtype)
            detail = op.direction if op.kind == COMPARE else ""
            return Expr(op.kind, record.dtype, tuple(args), detail)
        if op.kind == "reshape":
            own = dims.reshaped(record.shape, before, self.tokens)
            return self.express(op.operands[0], own)
        if op.kind == "transpose":
            order = op.integers("permutation")
            own = dims.picked([order.index(dim) for dim in range(len(order))])
            return self.express(op.operands[0], own)
        if op.kind == "constant":
            if (found := constant(op.attributes, record.dtype)) is not None:
                return found
        if op.kind == "iota":
            if op.integers("iota_dimension") == (dims.place,):
                return Expr(INDEX, record.dtype)
        if op.kind == "broadcast_in_dim":
            return self._broadcast(op, dims)
        if op.kind == "scatter":
            return self._scattered(op, dims)
        if op.kind == "pad":
            return self._uncut(op, dims)
        if op.kind == "dot_general":
            return self._product(op, dims)
        if op.kind == "slice":
            own = Dims(dims.of, self._cut_before(op, dims))
            if self._sliced(op, own, before) == dims:
                return self.express(op.operands[0], own)
        raise Different(
            f"something over the vocabulary, by {op.kind}, is not computed from the "
            "logits element by element"
        )

    def _operand(self, op: Op, index: int, dims: Dims) -> Expr:
        value = op.operands[index]
        if self.program.shape(value) == ():
            return self.small(op, index)
        return self.express(value, dims)

    def _cut_before(self, op: Op, dims: Dims) -> Cut:
        """Returns the cuts there were before a slice."""
        first, end = (op.integers(name) for name in ("start_indices", "limit_indices"))
        here = {
            (own[0], a, b)
            for own, a, b in zip(dims.of, first, end, strict=True)
            if len(own) == 1
        }
        return tuple(one for one in dims.cut if one not in here)

    def _uncut(self, op: Op, dims: Dims) -> Expr:
        """Expresses padding: zero for tokens that were cut off."""
        value, _ = op.operands
        low = op.integers("edge_padding_low")
        inside = self.program.shape(value)
        cut = [
            (own[0], a, a + size)
            for own, a, size, full in zip(
                dims.of,
                low,
                inside,
                self.program.shape(op.results[0]),
                strict=True,
            )
            if size != full and len(own) == 1
        ]
        own = Dims(dims.of, tuple(sorted({*dims.cut, *cut})))
        after = self.program.shape(op.results[0])
        if self._padded(op, own, inside, after) != dims:
            raise Different("words or tokens are added")
        if not is_constant(self.small(op, 1), 0.0):
            raise Different("tokens are added that are not zero")
        return self.masked(self.express(value, own), own)

    def masked(self, expr: Expr, dims: Dims) -> Expr:
        """An expression that is zero for tokens that dims cut off."""
        if not dims.cut:
            return expr
        if dims.cut not in self.cuts:
            self.cuts.append(dims.cut)
        is_inside = Expr(INSIDE, "i1", number=self.cuts.index(dims.cut))
        zero = Expr(CONSTANT, expr.dtype, detail="0")
        return Expr(SELECT, expr.dtype, (is_inside, expr, zero))

    def _product(self, op: Op, dims: Dims) -> Expr:
        """A product of something wide with something of each token."""
        for index in (0, 1):
            order = self._multiplied(op, index)
            rank = len(self.program.shape(op.operands[index]))
            if order is None or rank != len(dims.of):
                continue
            own = dims.picked([order.index(dim) for dim in range(rank)])
            batch, other = op.product_dims(index)[0], op.product_dims(1 - index)[0]
            if any(own.of[dim] == (OTHER,) for dim in batch):
                continue
            pairs = sorted(zip(other, batch, strict=True))
            row = own.picked([dim for _, dim in pairs])
            kind = TOKEN if batch else SCALAR
            leaf = self.leaf(kind, (op.id, 1 - index), row)
            dtype = self.program.values[op.results[0]].dtype
            args = [self.express(op.operands[index], own), leaf]
            return Expr("multiply", dtype, tuple(one.cast(dtype) for one in args))
        raise Different(
            "the logits are combined with something else over the vocabulary that a "
            "product makes, such as another model's logits"
        )

    def _broadcast(self, op: Op, dims: Dims) -> Expr:
        [operand] = op.operands
        shape = self.program.shape(operand)
        after = self.program.shape(op.results[0])
        places = op.integers("broadcast_dimensions")
        own = dims.made_of(
            [
                dims.of[place] if size == after[place] else ()
                for place, size in zip(places, shape, strict=True)
            ]
        )
        if prod(shape) == 1:
            return self.small(op, 0)
        if own.place is None:
            return self.leaf(TOKEN, (op.id, 0), own)
        if set(own.tokens) == set(dims.tokens):
            return self.express(operand, own)
        if not own.tokens:
            return self._columns(op, operand, own)
        raise Different("something over the vocabulary is of some of the tokens")

    def small(self, op: Op, index: int) -> Expr:
        """A scalar: a constant, or one that is read."""
        value = op.operands[index]
        types: list[str] = []
        while (maker := self.program.maker(value)) is not None:
            if maker.kind == "constant":
                record = self.program.values[value]
                if (found := constant(maker.attributes, record.dtype)) is None:
                    break
                for dtype in reversed(types):
                    found = found.cast(dtype)
                return found
            if maker.kind not in ("convert", "reshape", "broadcast_in_dim"):
                break
            types.append(self.program.values[value].dtype)
            value = maker.operands[0]
        rank = len(self.program.shape(op.operands[index]))
        return self.leaf(SCALAR, (op.id, index), Dims(((),) * rank))

    def _columns(self, op: Op, operand: int, dims: Dims) -> Expr:
        """A row for all tokens: the numbers of words, or one that is read."""
        value = operand
        while (maker := self.program.maker(value)) is not None:
            if maker.kind == "iota":
                [dim] = maker.integers("iota_dimension")
                if self.program.shape(value)[dim] == self.words:
                    return Expr(INDEX, self.program.values[operand].dtype)
                break
            if maker.kind not in ("broadcast_in_dim", "reshape", "transpose"):
                break
            value = maker.operands[0]
        return self.leaf(VOCABULARY, (op.id, 0), dims)

    def _scattered(self, op: Op, dims: Dims) -> Expr:
        """Something of each token at one word, and zero elsewhere."""
        operand = op.operands[0]
        base = self.express(operand, dims)
        adds = "stablehlo.add(%0,%1" in op.attributes
        if not (is_constant(base, 0.0) and adds):
            raise Different("a scatter is not one of zeros to one word of a token")
        found = self.at_words(op, dims)
        label = self.leaf(TOKEN, found.label.use, found.label.dims)
        update = self.leaf(TOKEN, (op.id, 2), found.narrow)
        index = Expr(INDEX, label.dtype)
        is_label = Expr(COMPARE, "i1", (index, label), "EQ")
        return Expr(SELECT, base.dtype, (is_label, update, base))

    def at_words(self, op: Op, dims: Dims) -> Indexed:
        """Reads a gather or a scatter that has one word of each token.

        Args:
            dims: of its first operand.

        Raises:
            Different: it has something else.
        """
        is_gather = op.kind == "gather"
        names = _NAMES_OF_GATHER if is_gather else _NAMES_OF_SCATTER
        batching, index_batching, mapped, window = map(op.integers, names)
        unread = Different(f"a {op.kind} has not one word of each token")
        shapes = [self.program.shape(v) for v in (op.operands[1], op.operands[0])]
        (indices, wide) = shapes
        [vector] = op.integers("index_vector_dim") or (0,)
        own: dict[int, tuple[int, ...]] = {}
        for place, dim in zip(index_batching, batching, strict=True):
            own[place] = dims.of[dim]
        label = None
        for number, dim in enumerate(mapped):
            if dims.of[dim] == (OTHER,):
                label = number
            elif wide[dim] > 1:
                place = self._counted(op, number, vector, wide[dim])
                if place is None or place in own:
                    raise unread
                own[place] = dims.of[dim]
        rest = {*range(len(wide))} - {*batching, *mapped}
        of = [own.get(place, ()) for place in range(len(indices))]
        fits = all(
            one or size == 1 or place == vector
            for place, (one, size) in enumerate(zip(of, indices, strict=True))
        )
        if label is None or not fits or any(wide[dim] > 1 for dim in rest):
            raise unread
        if sorted(one for dim in of for one in dim) != sorted(dims.tokens):
            raise unread
        narrow_value = op.results[0] if is_gather else op.operands[2]
        shape = self.program.shape(narrow_value)
        rows = iter([one for place, one in enumerate(of) if place != vector])
        narrow = [() if dim in window else next(rows) for dim in range(len(shape))]
        if any(shape[dim] > 1 for dim in window):
            raise unread
        use = self._component(op, label, vector)
        if use is None:
            raise unread
        found = Indexed(dims, Read(use, dims.made_of(of)), dims.made_of(narrow))
        self.indexed[op.id] = found
        return found

    def _component(self, op: Op, number: int, vector: int) -> Use | None:
        """The operand that has one component of what indexes."""
        value = self.program.values[op.operands[1]]
        if vector == len(value.shape) or value.shape[vector] == 1:
            return (op.id, 1)
        maker = self.program.maker(value.id)
        if maker is None or maker.kind != "concatenate":
            return None
        sizes = [self.program.shape(v)[vector] for v in maker.operands]
        if maker.integers("dimension") != (vector,) or max(sizes) > 1:
            return None
        return (maker.id, number)

    def _counted(self, op: Op, number: int, vector: int, size: int) -> int | None:
        """The dim along which one component of what indexes counts from 0, if any."""
        use = self._component(op, number, vector)
        if use is None or use[0] == op.id:
            return None
        value = self.program.ops[use[0]].operands[use[1]]
        shape = self.program.shape(value)

        if size ** sum(one == size for one in shape) > _MOST_COUNTED:
            return None

        def coordinates(v: int, dim: int) -> np.ndarray:
            """All along a dim that may count, since any may be another; else ends."""
            here = self.program.shape(v)[dim]
            every = np.arange(here)
            return every if here == size else np.unique(every[[0, -1]])

        try:
            [found] = self._evaluator.run([value], {}, coordinates)
        except NotEvaluated:
            return None
        for dim in range(len(shape)):
            along = [-1 if d == dim else 1 for d in range(len(shape))]
            counted = coordinates(value, dim).reshape(along)
            if shape[dim] == size and np.array_equal(found, found * 0 + counted):
                return dim
        return None

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.program)

    def leaf(self, kind: str, use: Use, dims: Dims) -> Expr:
        """A leaf that is read as an operand."""
        value = self.program.ops[use[0]].operands[use[1]]
        key = kind, value, dims
        if key not in self._leaves:
            dtype = self.program.values[value].dtype
            found = Expr(kind, dtype, number=len(self._leaves))
            self._leaves[key] = found
            self.reads[found] = Read(use, dims)
        return self._leaves[key]
