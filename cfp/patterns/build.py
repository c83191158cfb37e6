"""From a cross-entropy that was found to stages that compute it otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cfp.analysis.layout import Layout
from cfp.patterns.chunked import Array, ChunkedCrossEntropy, StageParameters, Step
from cfp.patterns.cross_entropy import (
    ARGMAX,
    LARGEST,
    SUM,
    TOTAL,
    CrossEntropy,
    Reduction,
)
from cfp.patterns.expression import LOGITS, NO_DIMS, TOKEN, VOCABULARY, Axes, Expr
from cfp.patterns.reading import Read
from cfp.program.graph import Program
from cfp.program.replace import Replacement, Stage, Use, is_in_order

NAME = "cross-entropy"
PREFIX = "vocabulary/"


@dataclass(frozen=True, slots=True)
class Spread:
    """Axes over which each of the tokens' dims is spread, and the vocabulary."""

    tokens: tuple[Axes, ...] = ()
    words: Axes = ()

    def how(self, chunks: int) -> tuple[str, ...]:
        """As plans record it: how many parts, then ``axis=role``."""
        roles = [f"{a}=tokens{dim}" for dim, one in enumerate(self.tokens) for a in one]
        return (f"{PREFIX}{chunks}", *roles, *(f"{a}=words" for a in self.words))


def read_how(how: Sequence[str], rank: int) -> tuple[int, Spread]:
    """Parses the number of parts and the spread that a plan records.

    Args:
        how: see `Spread.how`.
        rank: how many dims tokens have.

    Raises:
        ValueError: it is something else.
    """
    first, *words = how
    roles = [(w.rpartition("=")[0], w.rpartition("=")[2]) for w in words]
    names = [f"tokens{dim}" for dim in range(rank)]
    number = first.removeprefix(PREFIX)
    known = first == PREFIX + number and number.isdecimal()
    in_parts = known and 1 < int(number) < 10_000
    if not in_parts or not {role for _, role in roles} <= {*names, "words"}:
        raise ValueError(f"cfp computes no cross-entropy by {', '.join(how)}")
    tokens = tuple(tuple(a for a, role in roles if role == name) for name in names)
    word_axes = tuple(a for a, role in roles if role == "words")
    return int(number), Spread(tokens, word_axes)


def spread_of(layout: Layout, found: CrossEntropy) -> Spread | None:
    """Returns a layout's spread; None if the hidden dim is sharded, or unknown."""
    op = layout.frame.program.ops[found.contraction]
    if op.id not in layout.axes or layout.unreduced(op):
        return None
    spec = layout.natural_spec(op, 0)
    assert spec is not None, "a contraction that is laid out has a sharding"
    place = found.head.words_dim
    return Spread((*spec[:place], *spec[place + 1 :]), spec[place])


def build(
    program: Program,
    found: CrossEntropy,
    chunks: int,
    spread: Spread | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Replacement | None:
    """Stages that compute a cross-entropy over parts of the vocabulary.

    Args:
        found: what it takes the place of.
        spread: what is spread over a mesh.

    Returns:
        None if it cannot be so: tokens or words would be cut unevenly, or something is
        made too late to be read.
    """
    spread, sizes = spread or Spread(), sizes or {}
    op = program.ops[found.contraction]
    shape = list(program.shape(op.results[0]))
    words = shape.pop(found.head.words_dim)
    axes = spread.tokens or ((),) * len(shape)
    dims = zip((*shape, words), (*axes, spread.words), strict=True)
    if any(size % prod(sizes[a] for a in own) for size, own in dims):
        return None
    local = words // prod(sizes[a] for a in spread.words)
    own = _split_axes(found.head.groups, axes, sizes)
    if local < chunks or own is None:
        return None
    sheet = StageParameters(
        base=found.base,
        logits=program.values[op.results[0]].dtype,
        tokens=found.head.tokens,
        words=words,
        chunks=chunks,
        token_axes=own,
        word_axes=spread.words,
        cuts=found.cuts,
        precision=found.head.precision,
    )
    stages, steps = _Builder(program, found).stages()
    if not all(is_in_order(program, stage) for stage in stages):
        return None
    if not all(_keeps_apart(step, own, sheet.tokens, sizes) for step in steps):
        return None
    functions = ChunkedCrossEntropy(
        steps, sheet, Spread(axes, spread.words).how(chunks)
    )
    return Replacement(NAME, found.contraction, stages, functions)


def passes(replacement: Replacement) -> int:
    """Counts how often a cross-entropy in parts makes its logits."""
    functions = replacement.functions
    assert isinstance(functions, ChunkedCrossEntropy), "a cross-entropy's functions"
    made = {LARGEST, TOTAL, ARGMAX, "products"}
    return sum(
        step.kind in made and any(one.has(LOGITS) for one in step.wide)
        for step in functions.steps
    )


def _split_axes(
    groups: Sequence[tuple[int, ...]], axes: Sequence[Axes], sizes: Mapping[str, int]
) -> tuple[Axes, ...] | None:
    """The axes of each tokens' dim, if those of the logits' dims are theirs."""
    found: list[Axes] = []
    for group, own in zip(groups, axes, strict=True):
        waiting = list(own)
        for size in group:
            taken: list[str] = []
            while waiting and size % sizes[waiting[0]] == 0:
                size //= sizes[waiting[0]]
                taken.append(waiting.pop(0))
            found.append(tuple(taken))
            if size > 1 and waiting:
                return None
        if waiting and prod(sizes[a] for a in waiting) > 1:
            return None
    return tuple(found)


def _keeps_apart(
    step: Step,
    axes: Sequence[Axes],
    tokens: Sequence[int],
    sizes: Mapping[str, int],
) -> bool:
    """True if spread tokens' dims are kept apart in all that a step has of them."""
    try:
        for one in (*step.takes, *step.makes):
            one.dims.axes(tokens, axes, sizes)
    except ValueError:
        return False
    return True


class _Builder:
    def __init__(self, program: Program, found: CrossEntropy):
        self._program, self._found = program, found
        self._reads = dict(found.reads)

    def stages(self) -> tuple[tuple[Stage, ...], tuple[Step, ...]]:
        """Returns each stage with the step that computes it."""
        found = [self._reduced(one) for one in self._found.reductions]
        if self._found.products:
            found.append(self._contracted())

        def first(pair: tuple[Stage, Step]) -> int:
            return min(self._program.values[v].producer for v in pair[0].makes)

        stages, steps = zip(*sorted(found, key=first), strict=True)
        return stages, steps

    # -- one stage -----------------------------------------------------------

    def _array(self, form: str, read: Read, **how: Any) -> tuple[Use, Array]:
        op, index = read.use
        value = self._program.ops[op].operands[index]
        return read.use, self._made(form, value, dims=read.dims, **how)

    def _made(self, form: str, value: int, **how: Any) -> Array:
        record = self._program.values[value]
        return Array(form, record.shape, record.dtype, **how)

    def _inputs(
        self, exprs: list[Expr], known: Expr | None = None
    ) -> list[tuple[Use, Array]]:
        """Returns what expressions read; vectors and kernel first."""
        wanted: dict[Expr, None] = {}

        def walk(one: Expr) -> None:
            if one == known:
                return
            if one.kind == LOGITS or one in self._reads:
                wanted[one] = None
            for arg in one.args:
                walk(arg)

        for one in exprs:
            walk(one)
        takes: list[tuple[Use, Array]] = []
        if any(one.kind == LOGITS for one in wanted):
            head = self._found.head
            vectors = Read((head.op, 1 - head.kernel), self._found.vectors)
            kernel = Read((head.op, head.kernel), NO_DIMS)
            takes = [
                self._array(TOKEN, vectors),
                self._array(VOCABULARY, kernel, words_dim=head.kernel_dim),
            ]
        for one in (one for one in wanted if one.kind != LOGITS):
            read = self._reads[one]
            place = read.dims.place or 0
            takes.append(self._array(one.kind, read, leaf=one, words_dim=place))
        return takes

    def _reduced(self, one: Reduction) -> tuple[Stage, Step]:
        exprs = [one.wide] if one.label is None else [one.wide, one.label]
        base = self._found.base if one.kind == SUM else None
        uses, takes = _apart(self._inputs(exprs, base))
        makes = (self._made(TOKEN, one.made, dims=one.dims),)
        step = Step(one.kind, takes, makes, (one.wide,), one.label, one.clamped)
        return Stage(uses, (one.made,)), step

    def _contracted(self) -> tuple[Stage, Step]:
        products = self._found.products
        exprs = [one.wide for one in products]
        inputs = self._inputs([Expr(LOGITS, ""), *exprs])
        contractions, makes = [], []
        first = min(self._program.values[one.made].producer for one in products)
        for one in products:
            over_words, dim, place = one.over == "words", one.words_dim, -1
            if one.other is not None:
                place = len(inputs)
                read, used_as = self._before(one.other, first)
                form, own = (VOCABULARY, dim) if over_words else (TOKEN, 0)
                inputs.append(self._array(form, read, words_dim=own, used_as=used_as))
            contractions.append((one.over, one.first, place))
            if over_words:
                makes.append(self._made(TOKEN, one.made, dims=one.dims))
            else:
                makes.append(self._made(VOCABULARY, one.made, words_dim=dim))
        uses, takes = _apart(inputs)
        how = tuple(contractions)
        step = Step("products", takes, tuple(makes), tuple(exprs), contractions=how)
        return Stage(uses, tuple(one.made for one in products)), step

    def _before(self, read: Read, first: int) -> tuple[Read, str]:
        """Reads what is converted, if that comes too late, behind an op.

        Returns:
            What to read, and the type to convert it to; "" if it is there.
        """
        op, index = read.use
        value = self._program.values[self._program.ops[op].operands[index]]
        if value.producer <= first:
            return read, ""
        maker = self._program.ops[value.producer]
        if maker.kind != "convert":
            return read, ""
        return Read((maker.id, 0), read.dims), value.dtype


def _apart(
    inputs: Sequence[tuple[Use, Array]],
) -> tuple[tuple[Use, ...], tuple[Array, ...]]:
    return tuple(use for use, _ in inputs), tuple(array for _, array in inputs)
