"""From a cross-entropy that was found to stages that compute it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Sheet,
    Step,
    row_axes,
)
from cfp.program.graph import Program
from cfp.program.replace import Replacement, Stage, is_in_order

NAME = "cross-entropy"
_FORMS = {TOKEN: ROWS, VOCABULARY: COLUMNS, SCALAR: ONE}


def build(
    program: Program,
    found: CrossEntropy,
    chunks: int,
    layout: Layout | None = None,
) -> Replacement | None:
    """Stages that compute a cross-entropy over parts of the vocabulary.

    Args:
        program: the program.
        found: what takes the place of.
        chunks: how many parts.
        layout: how tokens and words are spread; on one device, if None.

    Returns:
        None if it cannot be so: tokens or words would be cut unevenly, the hidden dim
        is spread, or something is made too late to be read.
    """
    builder = _Builder(program, found, layout)
    spread = builder.spread()
    if spread is None:
        return None
    token_axes, word_axes = spread
    op = program.ops[found.contraction]
    *tokens, words = program.values[op.results[0]].shape
    parts = words // prod(builder.sizes[a] for a in word_axes)
    if parts < chunks or not builder.keeps_dims(tuple(tokens), token_axes):
        return None
    sheet = Sheet(
        base=found.base,
        logits=program.values[op.results[0]].dtype,
        tokens=tuple(tokens),
        words=words,
        chunks=chunks,
        token_axes=token_axes if any(token_axes) else (),
        word_axes=word_axes,
    )
    stages, steps = builder.stages(token_axes, word_axes)
    if not all(is_in_order(program, stage) for stage in stages):
        return None
    functions = ChunkedCrossEntropy(steps, sheet)
    return Replacement(NAME, found.contraction, stages, functions)


class _Builder:
    def __init__(self, program: Program, found: CrossEntropy, layout: Layout | None):
        self._program, self._found, self._layout = program, found, layout
        self._reads = dict(found.reads)
        self.sizes = dict(layout.frame.mesh) if layout is not None else {}

    def spread(self) -> tuple[tuple[Axes, ...], Axes] | None:
        """The axes of each of the tokens' dims, and those of words."""
        op = self._program.ops[self._found.contraction]
        shape = self._program.values[op.results[0]].shape
        if self._layout is None or op.id not in self._layout.axes:
            return ((),) * (len(shape) - 1), ()
        if self._layout.unreduced(op):
            return None
        spec = self._layout.natural_spec(op, 0)
        assert spec is not None, "a contraction that is laid out has a sharding"
        for size, axes in zip(shape, spec, strict=True):
            if size % prod(self.sizes[a] for a in axes):
                return None
        return tuple(spec[:-1]), spec[-1]

    def keeps_dims(self, tokens: tuple[int, ...], axes: tuple[Axes, ...]) -> bool:
        """Whether all that tokens have keeps their dims apart, if they are spread."""
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

    def stages(
        self, token_axes: tuple[Axes, ...], word_axes: Axes
    ) -> tuple[tuple[Stage, ...], tuple[Step, ...]]:
        """What each stage reads and makes, and what it does."""
        found = [self._reduced(one) for one in self._found.reductions]
        if self._found.products:
            found.append(self._contracted(token_axes, word_axes))

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
        """What expressions are computed of; the vectors and the kernel first."""
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

    def _contracted(
        self, token_axes: tuple[Axes, ...], word_axes: Axes
    ) -> tuple[Stage, Step]:
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
            makes.append(self._product(one, token_axes, word_axes))
        step = Step(
            "products",
            tuple(takes),
            tuple(makes),
            tuple(exprs),
            contractions=tuple(contractions),
        )
        return Stage(tuple(uses), tuple(one.made for one in products)), step

    def _product(
        self, one: Product, token_axes: tuple[Axes, ...], word_axes: Axes
    ) -> Array:
        if one.over == "words":
            return self._made(HIDDEN_ROWS, one.made)
        if one.other is None:
            return self._made(COLUMNS, one.made)
        made = self._made(KERNEL, one.made, 0 if one.first else 1)
        return Array(
            made.form,
            made.shape,
            made.dtype,
            words_dim=made.words_dim,
            scattered=self._scattered(one.made, made.words_dim, token_axes, word_axes),
        )

    def _scattered(
        self, value: int, words_dim: int, token_axes: tuple[Axes, ...], words: Axes
    ) -> tuple[Axes, ...]:
        """The token axes over which the layout wants a sum scattered, by dim."""
        if self._layout is None:
            return ()
        spec = self._layout.spec(value)
        if spec is None:
            return ()
        rows = {a for axes in token_axes for a in axes}
        found: list[Axes] = []
        shape = self._program.values[value].shape
        for dim, axes in enumerate(spec):
            own = words if dim == words_dim else ()
            extra = axes[len(own) :]
            ways = prod(self.sizes[a] for a in axes)
            if axes[: len(own)] != own or not set(extra) <= rows or shape[dim] % ways:
                return ()
            found.append(extra)
        return tuple(found)


def chunk_counts(words: int, least: int = 512) -> tuple[int, ...]:
    """How many parts are worth trying, with so many words in each at least."""
    return tuple(n for n in (8,) if words // n >= least)


def by_contraction(
    founds: Mapping[int, CrossEntropy] | list[CrossEntropy],
) -> Callable[[int], CrossEntropy | None]:
    """Looks a cross-entropy up by its contraction."""
    table = (
        {one.contraction: one for one in founds} if isinstance(founds, list) else founds
    )
    return table.get
