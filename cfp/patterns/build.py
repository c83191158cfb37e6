"""From a cross-entropy that was found to stages that compute it otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import Layout
from cfp.patterns.chunked import ChunkedCrossEntropy
from cfp.patterns.cross_entropy import PICK, SUM, CrossEntropy, Product, Reduction
from cfp.patterns.expression import LOGITS, SCALAR, TOKEN, VOCABULARY, Expr
from cfp.patterns.reading import Use
from cfp.patterns.steps import (
    COLUMNS,
    HIDDEN_ROWS,
    KERNEL,
    ONE,
    ROWS,
    Array,
    Axes,
    StageParameters,
    Step,
    row_axes,
)
from cfp.program.graph import Program
from cfp.program.replace import Replacement, Stage, is_in_order

NAME = "cross-entropy"
PREFIX = "vocabulary/"
_FORMS = {TOKEN: ROWS, VOCABULARY: COLUMNS, SCALAR: ONE}


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of tokens and vocabulary over the axes of a mesh.

    Attributes:
        tokens: for each of the tokens' dims its axes.
        words: the axes of the vocabulary.
    """

    tokens: tuple[Axes, ...] = ()
    words: Axes = ()

    def how(self, chunks: int) -> tuple[str, ...]:
        """As plans record it: how many parts, then ``axis=role``."""
        roles = [f"{a}=tokens{dim}" for dim, one in enumerate(self.tokens) for a in one]
        return (name_of(chunks), *roles, *(f"{a}=words" for a in self.words))


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
    if not is_chunked(first) or not {role for _, role in roles} <= {*names, "words"}:
        raise ValueError(f"cfp computes no cross-entropy by {', '.join(how)}")
    tokens = tuple(tuple(a for a, role in roles if role == name) for name in names)
    word_axes = tuple(a for a, role in roles if role == "words")
    return int(first.removeprefix(PREFIX)), Spread(tokens, word_axes)


def name_of(chunks: int) -> str:
    """Returns the name under which plans record a number of parts."""
    return f"{PREFIX}{chunks}"


def is_chunked(name: str) -> bool:
    """True if a recorded name stands for a number of parts."""
    number = name.removeprefix(PREFIX)
    return name.startswith(PREFIX) and number.isdecimal() and 1 < int(number) < 10_000


def spread_of(layout: Layout, found: CrossEntropy) -> Spread | None:
    """Returns a layout's spread; None if the hidden dim is sharded, or unknown."""
    op = layout.frame.program.ops[found.contraction]
    if op.id not in layout.axes or layout.unreduced(op):
        return None
    spec = layout.natural_spec(op, 0)
    assert spec is not None, "a contraction that is laid out has a sharding"
    return Spread(tuple(spec[:-1]), spec[-1])


def build(
    program: Program,
    found: CrossEntropy,
    chunks: int,
    spread: Spread | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Replacement | None:
    """Stages that compute a cross-entropy over parts of the vocabulary.

    Args:
        program: the program.
        found: what it takes the place of.
        chunks: how many parts.
        spread: what is spread over a mesh.
        sizes: of the mesh's axes.

    Returns:
        None if it cannot be so: tokens or words would be cut unevenly, or something is
        made too late to be read.
    """
    spread, sizes = spread or Spread(), sizes or {}
    builder = _Builder(program, found)
    op = program.ops[found.contraction]
    *tokens, words = program.values[op.results[0]].shape
    axes = spread.tokens or ((),) * len(tokens)
    dims = zip((*tokens, words), (*axes, spread.words), strict=True)
    if any(size % prod(sizes[a] for a in own) for size, own in dims):
        return None
    local = words // prod(sizes[a] for a in spread.words)
    if local < chunks or not builder.keeps_dims(tuple(tokens), axes):
        return None
    sheet = StageParameters(
        base=found.base,
        logits=program.values[op.results[0]].dtype,
        tokens=tuple(tokens),
        words=words,
        chunks=chunks,
        token_axes=axes if any(axes) else (),
        word_axes=spread.words,
    )
    stages, steps = builder.stages()
    if not all(is_in_order(program, stage) for stage in stages):
        return None
    functions = ChunkedCrossEntropy(
        steps, sheet, Spread(axes, spread.words).how(chunks)
    )
    return Replacement(NAME, found.contraction, stages, functions)


class _Builder:
    def __init__(self, program: Program, found: CrossEntropy):
        self._program, self._found = program, found
        self._reads = dict(found.reads)

    def keeps_dims(self, tokens: tuple[int, ...], axes: tuple[Axes, ...]) -> bool:
        """True if spread tokens keep their dims apart in all that they have."""
        found = self._found
        shapes = [self._shape(use) for leaf, use in found.reads if leaf.kind == TOKEN]
        shapes += [self._program.values[r.made].shape for r in found.reductions]
        for product in found.products:
            if product.over == "words":
                shapes.append(self._program.values[product.made].shape)
            elif product.other is not None:
                shapes.append(self._shape(product.other))
        try:
            for shape in shapes:
                row_axes(shape, tokens, axes)
        except ValueError:
            return False
        return True

    def stages(self) -> tuple[tuple[Stage, ...], tuple[Step, ...]]:
        """Returns each stage with the step that computes it."""
        found = [self._reduced(one) for one in self._found.reductions]
        if self._found.products:
            found.append(self._contracted())

        def first(pair: tuple[Stage, Step]) -> int:
            return min(self._program.values[v].producer for v in pair[0].makes)

        found.sort(key=first)
        return tuple(s for s, _ in found), tuple(s for _, s in found)

    # -- one stage -----------------------------------------------------------

    def _shape(self, use: Use) -> tuple[int, ...]:
        return self._program.values[self._program.ops[use[0]].operands[use[1]]].shape

    def _array(self, form: str, use: Use, words_dim: int = 0) -> Array:
        value = self._program.values[self._program.ops[use[0]].operands[use[1]]]
        return Array(form, value.shape, value.dtype, words_dim=words_dim)

    def _made(self, form: str, value: int, words_dim: int = 0) -> Array:
        record = self._program.values[value]
        return Array(form, record.shape, record.dtype, words_dim=words_dim)

    def _inputs(
        self, exprs: list[Expr], known: Expr | None = None
    ) -> tuple[list[Use], list[Array]]:
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
        uses: list[Use] = []
        arrays: list[Array] = []
        if any(one.kind == LOGITS for one in wanted):
            op = self._found.contraction
            uses = [(op, 0), (op, 1)]
            arrays = [
                self._array(HIDDEN_ROWS, (op, 0)),
                self._array(KERNEL, (op, 1), self._found.kernel_dim),
            ]
        for one in wanted:
            if one.kind == LOGITS:
                continue
            use = self._reads[one]
            shape = self._shape(use)
            last = len(shape) - 1 if one.kind == VOCABULARY else 0
            array = self._array(_FORMS[one.kind], use, last)
            uses.append(use)
            arrays.append(
                Array(array.form, array.shape, array.dtype, one, array.words_dim)
            )
        return uses, arrays

    def _reduced(self, one: Reduction) -> tuple[Stage, Step]:
        exprs = [one.wide] if one.label is None else [one.wide, one.label]
        base = self._found.base if one.kind == SUM else None
        uses, takes = self._inputs(exprs, base)
        step = Step(
            one.kind,
            tuple(takes),
            (self._made(ROWS, one.made),),
            (one.wide,),
            one.label,
            one.clamped and one.kind == PICK,
        )
        return Stage(tuple(uses), (one.made,)), step

    def _contracted(self) -> tuple[Stage, Step]:
        products = self._found.products
        exprs = [one.wide for one in products]
        uses, takes = self._inputs([Expr(LOGITS, ""), *exprs])
        contractions = []
        makes = []
        for one in products:
            place = -1
            if one.other is not None:
                place = len(uses)
                uses.append(one.other)
                form = KERNEL if one.over == "words" else HIDDEN_ROWS
                takes.append(self._array(form, one.other, one.other_dim))
            contractions.append((one.over, one.first, place))
            makes.append(self._product(one))
        step = Step(
            "products",
            tuple(takes),
            tuple(makes),
            tuple(exprs),
            contractions=tuple(contractions),
        )
        return Stage(tuple(uses), tuple(one.made for one in products)), step

    def _product(self, one: Product) -> Array:
        if one.over == "words":
            return self._made(HIDDEN_ROWS, one.made)
        if one.other is None:
            return self._made(COLUMNS, one.made)
        return self._made(KERNEL, one.made, 0 if one.first else 1)
