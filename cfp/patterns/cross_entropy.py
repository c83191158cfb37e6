"""Finds cross-entropies: the ops that read the logits, forward and backward.

Every value computed from the logits must be one of four, each of which can be had
without them: the maximum of a row; a row's logit of its label; a row's sum, or a
contraction, of a value that is computed, element by element, from the logit and from
values of the token and of the vocabulary entry. Everything else, such as what is done
with a token's loss, stays as it is written. The order of dims does not matter: see
`cfp.patterns.expression`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from cfp.patterns.expression import (
    COMPARE,
    CONSTANT,
    INDEX,
    KINDS,
    LOGITS,
    NO_DIMS,
    OTHER,
    TOKEN,
    Cut,
    Dims,
    Expr,
    Split,
    at_label,
    is_argmax,
    is_constant,
    is_exponential,
    stripped,
)
from cfp.patterns.reading import Indexed, Read, Reader
from cfp.program.graph import Op, Program, reached
from cfp.program.replace import Different, LeftAlone

LARGEST, SUM, TOTAL, PICK, ARGMAX = "largest", "sum", "total", "pick", "argmax"


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction with something wide, or its sum over tokens.

    Attributes:
        wide: what is contracted, or summed.
        over: "words" or "tokens".
        first: whether the wide operand is the first of the two.
        other: the other operand; None of a sum.
        dims: of what a contraction over words makes.
        words_dim: of a contraction over words, the dim of the other operand that words
            have; otherwise that of the result.
    """

    made: int
    wide: Expr
    over: str
    first: bool
    other: Read | None
    dims: Dims = NO_DIMS
    words_dim: int = 0


@dataclass(frozen=True, slots=True)
class Reduction:
    """Something of each token, or its sum over some of the tokens' dims.

    Attributes:
        kind: LARGEST, SUM of exponentials, TOTAL of anything, PICK, or ARGMAX.
        wide: what is reduced.
        label: of a PICK, the token's word.
        clamped: whether a word out of range is the nearest; otherwise it has nothing.
    """

    made: int
    kind: str
    wide: Expr
    dims: Dims
    label: Expr | None = None
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """A contraction to a vocabulary.

    Attributes:
        op: the id of the op that makes the logits.
        kernel: which of its operands has a vector for each word.
        kernel_dim: the dim of that operand that words have.
        words_dim: the dim of the logits that words have.
        groups: for each other dim of the logits its size; its factors, if a reshape
            splits it; () if the size is one.
        precision: of the product, as the program has it; "" if it is the default.
    """

    op: int
    logits: int
    kernel: int
    kernel_dim: int
    words_dim: int
    groups: tuple[tuple[int, ...], ...]
    precision: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sizes of the tokens' dims, as `Dims` count them."""
        return tuple(size for one in self.groups for size in one)

    def dims(self, place: int) -> Dims:
        """The dims of an array with all tokens in order, and one other dim."""
        numbers = iter(range(len(self.tokens)))
        of = [tuple(next(numbers) for _ in one) for one in self.groups]
        return Dims((*of[:place], (OTHER,), *of[place:]))

    def split(self, split: Split) -> Head:
        """The same with two tokens' dims in the place of one."""
        groups, number = [], 0
        for one in self.groups:
            own: list[int] = []
            for size in one:
                own += split.sizes if number == split.dim else (size,)
                number += 1
            groups.append(tuple(own))
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A contraction to a vocabulary whose result need not be held.

    Attributes:
        head: the contraction.
        vectors: the dims of its operand that has a vector for each token.
        base: what is normalized: the logits, or what is computed of them; None if no
            largest is taken.
        reductions, products: what is made of it, in the program's order.
        reads: where leaves of expressions are read.
        indexed: gathers and scatters of words, by op.
        dims: of all values that have all tokens and words.
        cuts: the tokens that a slice kept, by number.
    """

    head: Head
    vectors: Dims
    base: Expr | None
    reductions: tuple[Reduction, ...]
    products: tuple[Product, ...]
    reads: tuple[tuple[Expr, Read], ...]
    indexed: tuple[tuple[int, Indexed], ...]
    dims: tuple[tuple[int, Dims], ...]
    cuts: tuple[Cut, ...]

    @property
    def contraction(self) -> int:
        """The id of the op that makes the logits."""
        return self.head.op


def find_cross_entropies(program: Program) -> list[CrossEntropy | LeftAlone]:
    """All cross-entropies of a program, and what only looks like one."""
    found: list[CrossEntropy | LeftAlone] = []
    seen: dict[int, str] = {}
    for op in program.ops:
        ways = [_follow(program, head) for head in _heads(program, op)]
        ways.sort(key=lambda one: one.rank, reverse=True)
        for one in ways[:1]:
            seen |= dict.fromkeys(one.seen, "" if one.what else one.reason)
            found += [one.what] if one.what is not None else []
    return found + _of_other_logits(program, seen)


def _of_other_logits(program: Program, seen: Mapping[int, str]) -> list[LeftAlone]:
    """Losses whose logits no contraction makes, or one that is in another loop.

    Args:
        seen: values that contractions were followed to, with the reason why there is
            no softmax; "" where there is one.
    """
    found = {}
    for op in program.ops:
        if op.kind != "reduce" or "stablehlo.maximum(%0,%1" not in op.attributes:
            continue
        value = program.values[op.operands[0]]
        dims = op.integers("dimensions")
        if len(dims) != 1 or value.id in seen or value.producer < 0:
            continue
        tokens = [n for dim, n in enumerate(value.shape) if dim != dims[0]]
        if value.shape[dims[0]] == 1 or prod(tokens) == 1:
            continue
        groups = tuple((n,) if n > 1 else () for n in tokens)
        head = Head(value.producer, value.id, 1, 0, dims[0], groups)
        one = _follow(program, head)
        if isinstance(one.what, LeftAlone) and one.what.is_loss:
            maker = program.ops[head.op]
            reason = _reason_before(program, value.id, seen) or _OTHER_LOGITS
            if maker.has_regions and reason == _OTHER_LOGITS:
                reason += _IN_LOOP
            found[head.op] = replace(one.what, reason=reason)
    return list(found.values())


def _reason_before(program: Program, value: int, seen: Mapping[int, str]) -> str:
    """The reason why a value that was computed from a contraction is none of its."""

    def made_of(v: int) -> tuple[int, ...]:
        op = program.maker(v)
        return op.operands if op is not None and op.kind in _ELEMENTWISE else ()

    reasons = (seen.get(one) for one in reached([value], made_of))
    return next(filter(None, reasons), "")


_ELEMENTWISE = KINDS | {"broadcast_in_dim", "pad", "reshape", "slice", "transpose"}
_OTHER_LOGITS = (
    "its logits are not computed element by element from the product of each token's "
    "vector with a matrix"
)
_IN_LOOP = (
    ": a loop makes them; return the vectors from the loop, and multiply behind it"
)


def _heads(program: Program, op: Op) -> list[Head]:
    """The ways to read a contraction as one to a vocabulary.

    It contracts a dim of what has vectors of tokens with a dim of a matrix. Of two
    matrices either may be the one with the words.
    """
    if op.kind != "dot_general" or op.rule is None or op.has_regions:
        return []
    shapes = [program.shape(v) for v in op.operands]
    result = program.shape(op.results[0])
    (batch, left), (_, right) = op.product_dims(0), op.product_dims(1)
    precision = _precision(op)
    if batch or len(left) != 1 or "+" in precision or len(result) < 2:
        return []
    found = []
    for kernel in (1, 0):
        if len(shapes[kernel]) != 2 or len(shapes[1 - kernel]) != len(result):
            continue
        place = len(result) - 1 if kernel else 0
        tokens = [size for dim, size in enumerate(result) if dim != place]
        if result[place] > 1 and prod(tokens) > 1:
            groups = tuple((size,) if size > 1 else () for size in tokens)
            kernel_dim, [value] = 1 - (left, right)[kernel][0], op.results
            found.append(
                Head(op.id, value, kernel, kernel_dim, place, groups, precision)
            )
    return found


_OF_ELEMENTS = (KINDS - {COMPARE}) | {"reshape", "broadcast_in_dim", "transpose"}
_KEPT_BY_LOOP = (
    "its loop keeps something over the vocabulary for the backward pass: wrap the "
    "loop's body in jax.checkpoint"
)


def _follow(program: Program, head: Head) -> _Finder:
    """Finds out what a contraction is."""
    while True:
        finder = _Finder(program, head)
        try:
            finder.what, finder.rank = finder.run(), 4
        except Split as split:
            head = head.split(split)
            continue
        except Different as error:
            finder.refuse(str(error))
        return finder


class _Finder:
    """A contraction's cross-entropy, or why there is none.

    Attributes:
        what: what it is; None if nothing of that kind.
        rank: of several ways to read a contraction the best has the highest one.
        seen: values that have all words.
        reason: why it is none.
    """

    def __init__(self, program: Program, head: Head):
        self.what: CrossEntropy | LeftAlone | None = None
        self.rank, self.reason, self.seen = 0, "", dict[int, Dims]()
        self._program, self._head = program, head
        self._op = program.ops[head.op]
        words = program.shape(head.logits)[head.words_dim]
        self._start = head.dims(head.words_dim)
        self._reader = Reader(program, head.logits, self._start, head.tokens, words)
        self._reductions: list[Reduction] = []
        self._products: list[Product] = []
        self._ends: set[int] = set()
        self._base: Expr | None = None
        self._gathered_at: set[int] = set()
        self._saw_exponential = False

    def refuse(self, reason: str) -> None:
        """Notes why it is none."""
        self.reason, saw_largest = reason, self._base is not None
        is_loss = (saw_largest or self._saw_exponential) and self._saw_label()
        if saw_largest or is_loss:
            self.what = LeftAlone(self._op.id, self._op.source, reason, is_loss)
            self.rank = 1 + is_loss + saw_largest

    def _saw_label(self) -> bool:
        """True if words are compared with labels, or taken at labels."""
        labels = self._gathered_at | self._reader.labels()
        # What depends on the logits is no label, such as the choices of a router.
        return bool(labels - self._program.made_of([self._head.logits], lambda _: True))

    def run(self) -> CrossEntropy:
        self._follow()
        self._reductions.sort(key=lambda one: self._maker(one.made))
        self._products.sort(key=lambda one: self._maker(one.made))
        self._reductions = _summed(self._reductions)
        exponentials = any(
            one.kind == SUM or (one.kind == TOTAL and one.wide.has("exponential"))
            for one in self._reductions
        )
        if not exponentials or not self._saw_label():
            raise Different("there is no softmax with labels")
        if self._program.values[self._head.logits].dtype == "f64":
            raise Different(
                "its logits are float64, and its parts are summed in float32"
            )
        self._refuse_comparisons()
        if self._op.kind != "dot_general":
            raise Different(_OTHER_LOGITS)
        reader = self._reader
        _, contracted = self._op.product_dims(1 - self._head.kernel)
        return CrossEntropy(
            head=self._head,
            vectors=self._head.dims(contracted[0]),
            base=self._base,
            reductions=tuple(self._reductions),
            products=tuple(self._products),
            reads=tuple(reader.reads.items()),
            indexed=tuple(reader.indexed.items()),
            dims=tuple(reader.wide()),
            cuts=tuple(reader.cuts),
        )

    def _refuse_comparisons(self) -> None:
        """Refuses to compare a label's logit with other logits of its token.

        In parts it is a product of its own, and differs from what it equals as written
        in the last bit.

        Raises:
            Different: the program compares them.
        """
        picked = self._derived(PICK)
        others = self._derived(LARGEST) | self.seen.keys()
        for op in self._program.ops:
            if op.kind != COMPARE or op.operands[0] == op.operands[1]:
                continue
            for one, other in (op.operands, op.operands[::-1]):
                if one in picked and other in others:
                    raise Different("a label's logit is compared with others")

    def _derived(self, kind: str) -> set[int]:
        """Values that are computed, element by element, of one kind of reductions."""
        start = [one.made for one in self._reductions if one.kind == kind]
        return self._program.made_of(start, lambda op: op.kind in _OF_ELEMENTS)

    def _maker(self, value: int) -> int:
        return self._program.values[value].producer

    def _follow(self) -> None:
        """Goes from the logits to all that reads them, and from labels' words, too."""
        if errors := self._follow_from(self._head.logits, self._start):
            raise errors[0]
        done: set[tuple[int, Dims]] = set()
        while more := [
            one
            for one in self._reader.wide_of_tokens()
            if one not in done and one[0] not in self.seen
        ]:
            for value, dims in sorted(more, key=lambda one: one[0]):
                done.add((value, dims))
                before = (list(self._reductions), list(self._products), set(self._ends))
                if self._follow_from(value, dims):
                    self._reductions, self._products, self._ends = before

    def _follow_from(self, start: int, start_dims: Dims) -> list[Different]:
        """Goes on from a value, and returns what is not understood."""
        program, reader = self._program, self._reader
        stack = [(start, start_dims)]
        ends: dict[tuple[int, int], tuple[int, Dims]] = {}
        errors: list[Different] = []
        while stack:
            value, dims = stack.pop()
            if value in self.seen:
                continue
            self.seen[value] = dims
            if value in program.outputs:
                errors.append(Different("something over the vocabulary is a result"))
            for user, index in program.users[value]:
                op = program.ops[user]
                try:
                    if op.parent != reader.parent or index >= len(op.operands):
                        is_kept = user == reader.parent
                        raise Different(_KEPT_BY_LOOP if is_kept else _passed(op))
                    self._saw_exponential |= op.kind == "exponential"
                    after = reader.follow(op, index, dims)
                except Different as error:
                    errors.append(error)
                    continue
                if after is None:
                    ends[user, index] = value, dims
                else:
                    stack.append((op.results[0], after))
        for (user, index), (value, dims) in sorted(ends.items()):
            if user not in self._ends:
                try:
                    self._end(program.ops[user], index, value, dims)
                except Different as error:
                    errors.append(error)
        return errors

    def _end(self, op: Op, index: int, value: int, dims: Dims) -> None:
        self._ends.add(op.id)
        if op.kind == "reduce" and index == 0 and len(op.operands) == 2:
            self._reduced(op, value, dims)
        elif op.kind == "reduce" and index == 0 and is_argmax(op):
            self._place_of_largest(op, value, dims)
        elif op.kind == "gather" and index == 0:
            self._gathered(op, value, dims)
        elif op.kind == "dot_general":
            self._contracted(op, index, value, dims)
        elif op.parent >= 0 and op.kind in ("dynamic_update_slice", "scatter"):
            raise Different(_KEPT_BY_LOOP)
        else:
            raise Different(f"{op.kind} reads something over the vocabulary")

    # -- of each token -------------------------------------------------------

    def _reduced(self, op: Op, value: int, dims: Dims) -> None:
        reduced = set(op.integers("dimensions"))
        start = self._program.values[op.operands[1]]
        initial = self._initial(op, 1)
        wide = self._reader.express(value, dims)
        body = op.attributes
        maximum = "stablehlo.maximum(%0,%1" in body
        added = "stablehlo.add(%0,%1" in body and is_constant(initial, 0.0)
        if start.shape or not (maximum or added):
            raise Different("a reduction is neither a sum nor the largest")
        kept = [dim for dim in range(len(dims.of)) if dim not in reduced]
        made = dims.picked(kept)
        if added and made.place is not None and not made.tokens:
            wide = self._reader.masked(wide, dims)
            self._products.append(
                Product(
                    op.results[0], wide, "tokens", True, None, words_dim=made.place
                ),
            )
        elif made.place is not None:
            raise Different("a reduction is over some of the tokens")
        elif maximum and is_constant(initial, float("-inf")):
            self._largest(op, wide, dims, made)
        elif added:
            self._added(op.results[0], wide, dims, made)
        else:
            raise Different("a largest has a least")

    def _added(self, result: int, wide: Expr, dims: Dims, made: Dims) -> None:
        """Adds a sum over words, and perhaps over tokens."""
        picked, whole = at_label(wide), len(made.tokens) == len(dims.tokens)
        is_sum = self._base is not None and is_exponential(wide, self._base)
        kind, label = (SUM if is_sum and whole else TOTAL), None
        if picked is not None:
            kind, (label, wide) = PICK, picked
        if not whole:
            wide = self._reader.masked(wide, dims)
        self._reductions.append(Reduction(result, kind, wide, made, label))

    def _initial(self, op: Op, index: int) -> Expr:
        """Returns the constant that a reduction begins with."""
        found = self._reader.small(op, index)
        if stripped(found).kind != CONSTANT:
            raise Different("a reduction begins with something computed")
        return found

    def _largest(self, op: Op, wide: Expr, dims: Dims, made: Dims) -> None:
        base = stripped(wide)
        if base.has(TOKEN, INDEX) or not base.has(LOGITS):
            raise Different("the largest is not one of logits")
        if len(made.tokens) != len(dims.tokens):
            raise Different("a largest is one of several tokens'")
        if self._base is not None and self._base != base:
            raise Different("there are two largest")
        self._base = base
        self._reductions.append(Reduction(op.results[0], LARGEST, wide, made))

    def _place_of_largest(self, op: Op, value: int, dims: Dims) -> None:
        largest, place = op.results
        reduced = op.integers("dimensions")
        index = self._reader.express(op.operands[1], dims)
        starts = [self._initial(op, number) for number in (2, 3)]
        if (
            self._program.users[largest]
            or largest in self._program.outputs
            or reduced != (dims.place,)
            or index.kind != INDEX
            or not is_constant(starts[0], float("-inf"))
            or not is_constant(starts[1], 0)
        ):
            raise Different("a reduction is no argmax over words")
        wide = self._reader.express(value, dims)
        made = dims.picked([dim for dim in range(len(dims.of)) if dim != dims.place])
        self._reductions.append(Reduction(place, ARGMAX, wide, made))

    def _gathered(self, op: Op, value: int, dims: Dims) -> None:
        self._gathered_at.add(op.operands[1])
        found = self._reader.at_words(op, dims)
        label = self._reader.leaf(TOKEN, found.label.use, found.label.dims)
        what = self._reader.express(value, dims)
        if what.has(INDEX):
            raise Different("a gather takes one of what labels made")
        self._reductions.append(
            Reduction(op.results[0], PICK, what, found.narrow, label, True)
        )

    # -- of all tokens -------------------------------------------------------

    def _contracted(self, op: Op, index: int, value: int, dims: Dims) -> None:
        batch, own = op.product_dims(index)
        others_batch, others = op.product_dims(1 - index)
        other = self._program.values[op.operands[1 - index]]
        if other.id == value:
            raise Different("the logits are multiplied with themselves")
        pairs = sorted(zip((*others_batch, *others), (*batch, *own), strict=True))
        paired = dims.picked([dim for _, dim in pairs])
        if dims.place in own and len(paired.of) == len(other.shape):
            self._summed_product(op, index, value, dims, paired)
            return
        if batch:
            raise Different("a contraction has a batch")
        if _precision(op) != self._head.precision:
            raise Different("its products have several precisions")
        wide = self._reader.express(value, dims)
        first, use = index == 0, (op.id, 1 - index)
        free = [dim for dim in range(len(dims.of)) if dim not in own]
        if own == (dims.place,) and len(other.shape) == 2:
            rows = [dims.of[dim] for dim in free]
            made = dims.made_of([*rows, (OTHER,)] if first else [(OTHER,), *rows])
            read = Read(use, Dims(((), ())))
            self._products.append(
                Product(op.results[0], wide, "words", first, read, made, others[0])
            )
            return
        of: list[tuple[int, ...]] = [(OTHER,)] * len(other.shape)
        for place, dim in zip(others, own, strict=True):
            of[place] = dims.of[dim]
        if free != [dims.place] or of.count((OTHER,)) != 1:
            raise Different("a contraction is over some of the tokens")
        wide = self._reader.masked(wide, dims)
        read = Read(use, dims.made_of(of))
        self._products.append(
            Product(
                op.results[0], wide, "tokens", first, read, words_dim=0 if first else 1
            )
        )

    def _summed_product(
        self, op: Op, index: int, value: int, dims: Dims, others: Dims
    ) -> None:
        """Adds a sum over words of products of two that have all words."""
        [result] = op.results
        dtype = self._program.values[result].dtype
        sides = [
            self._reader.express(value, dims),
            self._reader.express(op.operands[1 - index], others),
        ]
        args = [one.cast(dtype) for one in sides]
        batch, own = op.product_dims(index)
        rest = [dim for dim in range(len(dims.of)) if dim not in (*batch, *own)]
        made = dims.picked([*batch, *rest])
        self._added(result, Expr("multiply", dtype, tuple(args)), dims, made)


def _passed(op: Op) -> str:
    return f"{op.kind} takes something over the vocabulary into a loop, or out"


def _precision(op: Op) -> str:
    """The precision of a product's operands; "" if it is the default."""
    found = set(re.findall(r"stablehlo<precision (\w+)>", op.attributes))
    return "" if found <= {"DEFAULT"} else "+".join(sorted(found))


def _summed(reductions: Sequence[Reduction]) -> list[Reduction]:
    """Reductions in order; sums of exponentials before a largest are any totals."""
    found, known = [], False
    for one in reductions:
        known |= one.kind == LARGEST
        late = one.kind == SUM and not known
        found.append(replace(one, kind=TOTAL) if late else one)
    return found
