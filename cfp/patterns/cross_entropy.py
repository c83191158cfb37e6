"""Finds cross-entropies: the ops that read the logits, forward and backward.

Every value computed from the logits must be one of four, each of which can be had
without them: the maximum of a row; a row's sum of exponentials of the logits less
something of the token; a row's logit of its label; or a contraction with a value that
is computed, element by element, from the logit and from values of the token and of the
vocabulary entry. Everything else, such as what is done with a token's loss, stays as it
is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cfp.patterns.expression import (
    COMPARE,
    CONVERT,
    INDEX,
    LOGITS,
    SELECT,
    TOKEN,
    Expr,
    is_constant,
    stripped,
)
from cfp.patterns.reading import KINDS, Reader, Unread, Use, numbers
from cfp.program.graph import Op, Program


def at_label(expr: Expr) -> tuple[Expr, Expr] | None:
    """The label, and what stands there, of what is zero at all other words."""
    kind, args = expr.kind, expr.args
    if kind == COMPARE and expr.detail == "EQ":
        label = _label(args)
        return (label, Expr("constant", "i1", detail="true")) if label else None
    if kind == SELECT and is_constant(args[2], 0.0) and args[0].kind == COMPARE:
        found = at_label(args[0])
        return (found[0], args[1]) if found else None
    if kind in (CONVERT, "negate"):
        found = at_label(args[0])
        if found is None:
            return None
        return found[0], Expr(kind, expr.dtype, (found[1],), expr.detail)
    if kind in ("multiply", "divide"):
        for place in (0, 1) if kind == "multiply" else (0,):
            if (found := at_label(args[place])) is not None:
                parts = list(args)
                parts[place] = found[1]
                return found[0], Expr(kind, expr.dtype, tuple(parts))
    return None


def _label(args: Sequence[Expr]) -> Expr | None:
    one, other = (stripped(arg) for arg in args)
    if one.kind == TOKEN:
        one, other = other, one
    return other if one.kind == INDEX and other.kind == TOKEN else None


def is_exponential(expr: Expr, base: Expr) -> bool:
    """True if it grows by exp(d) where the base grows by d."""
    kind, args = expr.kind, expr.args
    if kind in (CONVERT, "negate"):
        return is_exponential(args[0], base)
    if kind == "multiply":
        return any(
            is_exponential(args[i], base) and not args[1 - i].has(LOGITS, INDEX)
            for i in (0, 1)
        )
    if kind == "divide":
        return is_exponential(args[0], base) and not args[1].has(LOGITS, INDEX)
    return kind == "exponential" and _is_shifted(args[0], base)


def _is_shifted(expr: Expr, base: Expr) -> bool:
    """True if it is the base plus something of the token."""
    if stripped(expr) == base or expr == base:
        return True
    kind, args = expr.kind, expr.args
    if kind == CONVERT:
        return _is_shifted(args[0], base)
    per_token = [not arg.has(LOGITS, INDEX, "vocabulary") for arg in args]
    if kind == "subtract":
        return _is_shifted(args[0], base) and per_token[1]
    if kind == "add":
        return any(_is_shifted(args[i], base) and per_token[1 - i] for i in (0, 1))
    return False


LARGEST, SUM, PICK = "largest", "sum", "pick"


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction with something wide, or its sum over tokens.

    Attributes:
        made: the value.
        wide: what is contracted, or summed.
        over: "words" or "tokens".
        first: whether the wide operand is the first of the two.
        other: where the other operand is read; None of a sum.
        other_dim: the dim of the other operand that words or hidden have.
    """

    made: int
    wide: Expr
    over: str
    first: bool
    other: Use | None
    other_dim: int = 0


@dataclass(frozen=True, slots=True)
class Reduction:
    """Something of each token.

    Attributes:
        made: the value.
        kind: LARGEST, SUM or PICK.
        wide: what is reduced.
        label: of a PICK, the token's word.
        clamped: whether a word out of range is the nearest; otherwise it has nothing.
    """

    made: int
    kind: str
    wide: Expr
    label: Expr | None = None
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A contraction to a vocabulary whose result need not be held.

    Attributes:
        contraction: the id of the op that makes the logits.
        base: what is normalized: the logits, or what is computed of them.
        kernel_dim: the dim of the kernel that words have.
        reductions, products: what is made of it, in the program's order.
        reads: where leaves of expressions are read.
        ops: all that goes, the contraction and what reads it included.
    """

    contraction: int
    base: Expr
    kernel_dim: int
    reductions: tuple[Reduction, ...]
    products: tuple[Product, ...]
    reads: tuple[tuple[Expr, Use], ...]
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A contraction that a softmax follows, and why it stays.

    Attributes:
        contraction: the op's id.
        reason: why.
        op: the op that it is for, or -1.
        is_loss: whether it takes a label's word out of logits, as losses do and the
            softmaxes of routers do not.
    """

    contraction: int
    reason: str
    op: int = -1
    is_loss: bool = False


def find_cross_entropies(program: Program) -> list[CrossEntropy | LeftAlone]:
    """All cross-entropies of a program, and what only looks like one."""
    found = []
    for op in program.ops:
        if (dim := _kernel_dim(op)) is None:
            continue
        finder = _Finder(program, op, dim)
        try:
            one = finder.run()
        except Unread as error:
            if finder.saw_largest:
                reason, is_loss = error.reason, finder.saw_label
                found.append(LeftAlone(op.id, reason, error.op, is_loss))
            elif _cuts_tokens(program, op, error.op):
                found.append(LeftAlone(op.id, _CUT, error.op, True))
        else:
            found.append(one)
    return found


_CUT = (
    "its logits are cut along tokens, as by logits[:, :-1]: cut what they are computed "
    "of, or shift the labels and give the last one no weight"
)


def _cuts_tokens(program: Program, op: Op, cut: int) -> bool:
    """Tell whether a softmax is of logits that were cut along tokens.

    Args:
        program: the program.
        op: the contraction that makes the logits.
        cut: the op that may do so.
    """
    if cut < 0 or program.ops[cut].kind != "slice":
        return False
    [before], [after] = (
        [program.values[v].shape for v in vs]
        for vs in (op.results, program.ops[cut].results)
    )
    return before[-1:] == after[-1:] and any(
        one.kind == "exponential" and program.values[one.results[0]].shape == after
        for one in program.ops
    )


def _kernel_dim(op: Op) -> int | None:
    """The dim of the kernel that a contraction's last dim comes from; None of others.

    It contracts the last dim of its first operand, [..., hidden], with a dim of a
    matrix.
    """
    if op.kind != "dot_general" or op.rule is None or op.has_regions:
        return None
    left, right = op.rule.operands
    [result] = op.rule.results
    default = "precision HIGH" not in op.attributes
    if len(right) != 2 or len(left) < 2 or len(result) != len(left) or not default:
        return None
    if numbers(op.attributes, "lhs_batching_dimensions"):
        return None
    contracted = numbers(op.attributes, "lhs_contracting_dimensions")
    others = numbers(op.attributes, "rhs_contracting_dimensions")
    if contracted != (len(left) - 1,) or len(others) != 1:
        return None
    return 1 - others[0]


class _Finder:
    def __init__(self, program: Program, op: Op, kernel_dim: int):
        self._program, self._op, self._kernel_dim = program, op, kernel_dim
        self._reader = Reader(program, op.results[0])
        self._reductions: list[Reduction] = []
        self._products: list[Product] = []
        self._ends: set[int] = set()
        self._reached: set[int] = set()
        self._seen: set[int] = set()
        self._base: Expr | None = None

    @property
    def saw_largest(self) -> bool:
        """True if a row's maximum was found, which a softmax begins with."""
        return self._base is not None

    @property
    def saw_label(self) -> bool:
        """True if a label's word is taken out of logits."""
        return any(one.kind == PICK for one in self._reductions)

    def run(self) -> CrossEntropy:
        self._follow()
        self._reductions.sort(key=lambda one: self._maker(one.made))
        self._products.sort(key=lambda one: self._maker(one.made))
        kinds = [one.kind for one in self._reductions]
        if self._base is None or SUM not in kinds or PICK not in kinds:
            raise Unread("there is no softmax with labels")
        first = kinds.index(LARGEST)
        if SUM in kinds[:first]:
            raise Unread("a sum of exponentials comes before the largest logit")
        return CrossEntropy(
            contraction=self._op.id,
            base=self._base,
            kernel_dim=self._kernel_dim,
            reductions=tuple(self._reductions),
            products=tuple(self._products),
            reads=tuple(self._reader.reads.items()),
            ops=tuple(
                sorted(
                    {self._op.id} | self._ends | self._reader.ops | self._reached,
                )
            ),
        )

    def _maker(self, value: int) -> int:
        return self._program.values[value].producer

    def _follow(self) -> None:
        """Goes from the logits to all that reads them, and from labels' words, too.

        What is computed of labels alone may also be read elsewhere; it stays then.
        """
        self._follow_from(self._op.results[0])
        done: set[int] = set()
        while more := set(self._reader.wide_of_tokens()) - self._seen - done:
            for value in sorted(more):
                done.add(value)
                before = (list(self._reductions), list(self._products), set(self._ends))
                try:
                    self._follow_from(value)
                except Unread:
                    self._reductions, self._products, self._ends = before

    def _follow_from(self, start: int) -> None:
        program, reader = self._program, self._reader
        stack = [start]
        ends: dict[tuple[int, int], int] = {}
        while stack:
            value = stack.pop()
            if value in self._seen:
                continue
            self._seen.add(value)
            if value in program.outputs:
                raise Unread("something that has all words is a result")
            for user, index in program.users[value]:
                op = program.ops[user]
                if op.parent != reader.parent or index >= len(op.operands):
                    raise Unread("something that has all words goes elsewhere", user)
                goes_on = op.kind in KINDS or op.kind in (
                    "reshape",
                    "broadcast_in_dim",
                )
                if goes_on and reader.is_wide(op.results[0]):
                    self._reached.add(user)
                    stack.append(op.results[0])
                else:
                    ends[user, index] = value
        for (user, index), value in sorted(ends.items()):
            if user not in self._ends:
                self._end(program.ops[user], index, value)

    def _end(self, op: Op, index: int, value: int) -> None:
        self._ends.add(op.id)
        if op.kind == "reduce" and index == 0 and len(op.operands) == 2:
            self._reduced(op, value)
        elif op.kind == "gather" and index == 0:
            self._gathered(op, value)
        elif op.kind == "dot_general":
            self._contracted(op, index, value)
        else:
            raise Unread(f"{op.kind} reads something that has all words", op.id)

    # -- of each token -------------------------------------------------------

    def _reduced(self, op: Op, value: int) -> None:
        rank = len(self._program.values[value].shape)
        dims = numbers(op.attributes, "dimensions")
        start = self._program.values[op.operands[1]]
        initial = self._scalar(op.operands[1])
        wide = self._reader.express(value)
        body = op.attributes
        maximum = "stablehlo.maximum(%0,%1" in body
        added = "stablehlo.add(%0,%1" in body and is_constant(initial, 0.0)
        if start.shape or not (maximum or added):
            raise Unread("a reduction is neither a sum nor the largest", op.id)
        if added and dims == tuple(range(rank - 1)):
            self._products.append(
                Product(op.results[0], wide, "tokens", True, None),
            )
        elif dims != (rank - 1,):
            raise Unread("a reduction is over some of the tokens", op.id)
        elif maximum and is_constant(initial, float("-inf")):
            self._largest(op, wide)
        elif (picked := at_label(wide)) is not None:
            label, what = picked
            self._reductions.append(Reduction(op.results[0], PICK, what, label))
        elif added and is_exponential(wide, self._base_of(wide)):
            self._reductions.append(Reduction(op.results[0], SUM, wide))
        else:
            raise Unread("a sum over words is not one of exponentials", op.id)

    def _scalar(self, value: int) -> Expr:
        self._reader.ops.add(self._maker(value))
        maker = self._program.ops[self._maker(value)] if value >= 0 else None
        while maker is not None and maker.kind == "convert":
            self._reader.ops.add(maker.id)
            maker = self._program.ops[self._maker(maker.operands[0])]
        if maker is None or maker.kind != "constant":
            raise Unread("a reduction begins with something computed")
        self._reader.ops.add(maker.id)
        from_text = self._reader.express(maker.results[0])
        return from_text

    def _largest(self, op: Op, wide: Expr) -> None:
        base = stripped(wide)
        if base.has(TOKEN, INDEX) or not base.has(LOGITS):
            raise Unread("the largest is not one of logits", op.id)
        if self._base is not None and self._base != base:
            raise Unread("there are two largest", op.id)
        self._base = base
        self._reductions.append(Reduction(op.results[0], LARGEST, wide))

    def _base_of(self, wide: Expr) -> Expr:
        """Returns the normalized logits: the ones whose maximum was taken."""
        if self._base is None:
            raise Unread("a sum of exponentials comes before the largest logit")
        return self._base

    def _gathered(self, op: Op, value: int) -> None:
        if not self._reader.at_words(op, value, op.results[0], op.operands[1]):
            raise Unread("a gather takes no one word of each token", op.id)
        label = self._reader.leaf(TOKEN, op.id, 1)
        what = self._reader.express(value)
        if what.has(INDEX):
            raise Unread("a gather takes one of what labels made", op.id)
        self._reductions.append(Reduction(op.results[0], PICK, what, label, True))

    # -- of all tokens -------------------------------------------------------

    def _contracted(self, op: Op, index: int, value: int) -> None:
        names = ("lhs", "rhs") if index == 0 else ("rhs", "lhs")
        if numbers(op.attributes, "lhs_batching_dimensions"):
            raise Unread("a contraction has a batch", op.id)
        own, others = (
            numbers(op.attributes, f"{name}_contracting_dimensions") for name in names
        )
        rank = len(self._program.values[value].shape)
        other = self._program.values[op.operands[1 - index]].shape
        wide = self._reader.express(value)
        reached = self._reader.program.values[op.operands[1 - index]]
        if reached.id == value or "precision HIGH" in op.attributes:
            raise Unread("a contraction is no plain product", op.id)
        if own == (rank - 1,) and len(other) == 2 and index == 0:
            over, dim = "words", others[0]
        elif own == tuple(range(rank - 1)) and others == own and len(other) == rank:
            over, dim = "tokens", rank - 1
        else:
            raise Unread("a contraction is over some of the tokens", op.id)
        use = (op.id, 1 - index)
        self._products.append(Product(op.results[0], wide, over, index == 0, use, dim))
