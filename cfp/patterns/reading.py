"""Reads wide values of a program, a row for each token and a column for each word."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod

from cfp.patterns.expression import (
    COMPARE,
    CONVERT,
    INDEX,
    KINDS,
    LOGITS,
    SCALAR,
    SELECT,
    TOKEN,
    VOCABULARY,
    Expr,
    constant,
    is_constant,
)
from cfp.program.graph import Op, Program

_NUMBERS = re.compile(r"-?\d+")
_DIRECTION = re.compile(r"comparison_direction ([A-Z]{2})")
Use = tuple[int, int]


class Unread(Exception):
    """Something that is not understood, and why; `op` is where."""

    def __init__(self, reason: str, op: int = -1):
        super().__init__(reason)
        self.reason, self.op = reason, op


def numbers(text: str, name: str) -> tuple[int, ...]:
    """The numbers of an attribute such as ``name = [0, 1]``; () if it is not there."""
    match = re.search(rf"\b{name} ?= ?(?:array<i64)?[:\[]?([-\d, ]*)", text)
    return tuple(map(int, _NUMBERS.findall(match[1]))) if match else ()


@dataclass
class Reader:
    """Makes expressions of wide values.

    Attributes:
        program: the program.
        logits: the value that all begins with.
        reads: where leaves are read, by the leaf.
        ops: the ops that were read.
    """

    program: Program
    logits: int
    reads: dict[Expr, Use] = field(default_factory=dict)
    ops: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        value = self.program.values[self.logits]
        *tokens, self.words = value.shape
        self.tokens = tuple(tokens)
        self.rows = prod(tokens)
        self.parent = self.program.ops[value.producer].parent
        self._known: dict[int, Expr] = {
            self.logits: Expr(LOGITS, value.dtype),
        }
        self._leaves: dict[tuple[str, int], Expr] = {}

    def is_wide(self, value: int) -> bool:
        """True if a value has a row for each token and a column for each word."""
        *tokens, last = self.program.values[value].shape or (0,)
        return last == self.words and prod(tokens) == self.rows and bool(tokens)

    def wide_of_tokens(self) -> list[int]:
        """The wide values known that are computed of what tokens have."""
        return [v for v, expr in self._known.items() if expr.has(TOKEN)]

    def express(self, value: int) -> Expr:
        """Returns the expression of a wide value.

        Raises:
            Unread: of something that is no expression.
        """
        if value not in self._known:
            self._known[value] = self._expressed(value)
        return self._known[value]

    def _expressed(self, value: int) -> Expr:
        record = self.program.values[value]
        if record.producer < 0:
            raise Unread("an argument has a column for each word")
        op = self.program.ops[record.producer]
        if op.parent != self.parent and op.id not in self.program.leaf_ops:
            raise Unread(f"{op.kind} is in another loop", op.id)
        self.ops.add(op.id)
        if op.kind in KINDS and all(self.is_wide(v) for v in op.operands):
            return elementwise(op, record.dtype, [self.express(v) for v in op.operands])
        if op.kind == "reshape" and self.is_wide(op.operands[0]):
            return self.express(op.operands[0])
        if op.kind == "constant":
            if (found := constant(op.attributes, record.dtype)) is not None:
                return found
        if op.kind == "iota":
            if numbers(op.attributes, "iota_dimension") == (len(record.shape) - 1,):
                return Expr(INDEX, record.dtype)
        if op.kind == "broadcast_in_dim":
            return self._broadcast(op)
        if op.kind == "scatter":
            return self._scattered(op)
        raise Unread(f"{op.kind} is no elementwise op", op.id)

    def _broadcast(self, op: Op) -> Expr:
        [operand] = op.operands
        record = self.program.values[operand]
        dims = numbers(op.attributes, "broadcast_dimensions")
        if self.is_wide(operand):
            return self.express(operand)
        if prod(record.shape) == 1:
            return self._small(op, operand)
        last = len(self.program.values[op.results[0]].shape) - 1
        if record.shape[-1:] == (self.words,) and dims[-1] == last:
            if prod(record.shape) == self.words:
                return self._columns(op, operand)
        elif prod(record.shape) == self.rows:
            return self.leaf(TOKEN, op.id, 0)
        raise Unread("a value is of some of the tokens", op.id)

    def _small(self, op: Op, operand: int) -> Expr:
        """A scalar: a constant, or one that is read."""
        value = operand
        types: list[str] = []
        while (producer := self.program.values[value].producer) >= 0:
            maker = self.program.ops[producer]
            self_made = maker.kind in ("convert", "reshape", "broadcast_in_dim")
            if maker.kind == "constant":
                record = self.program.values[value]
                if (found := constant(maker.attributes, record.dtype)) is None:
                    break
                self.ops.add(producer)
                for dtype in reversed(types):
                    if dtype != found.dtype:
                        found = Expr(CONVERT, dtype, (found,))
                return found
            if not self_made:
                break
            types.append(self.program.values[value].dtype)
            value = maker.operands[0]
        return self.leaf(SCALAR, op.id, 0)

    def _columns(self, op: Op, operand: int) -> Expr:
        """A row for all tokens: the numbers of words, or one that is read."""
        value, ops = operand, []
        while (producer := self.program.values[value].producer) >= 0:
            maker = self.program.ops[producer]
            ops.append(producer)
            if maker.kind == "iota":
                dim = numbers(maker.attributes, "iota_dimension")
                shape = self.program.values[value].shape
                if dim == (len(shape) - 1,):
                    self.ops.update(ops)
                    return Expr(INDEX, self.program.values[operand].dtype)
                break
            if maker.kind not in ("broadcast_in_dim", "reshape"):
                break
            value = maker.operands[0]
        return self.leaf(VOCABULARY, op.id, 0)

    def _scattered(self, op: Op) -> Expr:
        """Something of each token at one word, and zero elsewhere."""
        operand, indices, updates = op.operands
        base = self.express(operand) if self.is_wide(operand) else None
        zero = base is not None and is_constant(base, 0.0)
        adds = "stablehlo.add(%0,%1" in op.attributes
        if not (zero and adds and self.at_words(op, operand, updates, indices)):
            raise Unread("a scatter is not one of zeros to one word of a token", op.id)
        label = self.leaf(TOKEN, op.id, 1)
        update = self.leaf(TOKEN, op.id, 2)
        assert base is not None
        index = Expr(INDEX, label.dtype)
        is_label = Expr(COMPARE, "i1", (index, label), "EQ")
        return Expr(SELECT, base.dtype, (is_label, update, base))

    def at_words(self, op: Op, wide: int, narrow: int, indices: int) -> bool:
        """True if a gather or scatter has one word for each token, in their order."""
        shape = self.program.values[wide].shape
        batch = tuple(range(len(shape) - 1))
        rows = [self.program.values[v].shape for v in (narrow, indices)]
        text = op.attributes
        names = (
            ("operand_batching_dims", "start_indices_batching_dims", "start_index_map")
            if op.kind == "gather"
            else (
                "input_batching_dims",
                "scatter_indices_batching_dims",
                "scatter_dims_to_operand_dims",
            )
        )
        return (
            numbers(text, names[0]) == batch
            and numbers(text, names[1]) == batch
            and numbers(text, names[2]) == (len(batch),)
            and not numbers(text, "offset_dims")
            and not numbers(text, "update_window_dims")
            and all(prod(one) == self.rows for one in rows)
        )

    def leaf(self, kind: str, op: int, index: int) -> Expr:
        """A leaf that an op reads as an operand."""
        value = self.program.ops[op].operands[index]
        if (kind, value) not in self._leaves:
            dtype = self.program.values[value].dtype
            found = Expr(kind, dtype, number=len(self._leaves))
            self._leaves[kind, value] = found
            self.reads[found] = (op, index)
        return self._leaves[kind, value]


def elementwise(op: Op, dtype: str, args: list[Expr]) -> Expr:
    """An op of elements."""
    detail = ""
    if op.kind == COMPARE:
        match = _DIRECTION.search(op.attributes)
        if match is None:
            raise Unread("a comparison without a direction", op.id)
        detail = match[1]
    if op.kind == CONVERT and args[0].dtype == dtype:
        return args[0]
    return Expr(op.kind, dtype, tuple(args), detail)
