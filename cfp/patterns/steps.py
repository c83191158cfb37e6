"""The stages of what is computed over parts of a vocabulary, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cfp.patterns.dims import NO_DIMS, Axes, Cut, Dims, resized_cut
from cfp.patterns.expression import Expr, widened

# The ways in which what a stage takes or makes is laid out.
ROWS, HIDDEN_ROWS, KERNEL, COLUMNS, ONE = "rows", "x", "kernel", "columns", "one"


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a stage reads or makes.

    Attributes:
        form: ROWS have an entry for each token, HIDDEN_ROWS a vector for each, COLUMNS
            an entry for each word, KERNEL a vector for each word, in either order;
            ONE is the same for all.
        shape: of the whole.
        dtype: element type as MLIR writes it.
        leaf: of an expression, if it is one.
        words_dim: of a KERNEL or of COLUMNS, the dim that words have.
        dims: of ROWS and HIDDEN_ROWS.
        used_as: the element type that it is converted to; "" if it stays as it is.
    """

    form: str
    shape: tuple[int, ...]
    dtype: str
    leaf: Expr | None = None
    words_dim: int = 0
    dims: Dims = NO_DIMS
    used_as: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage.

    Attributes:
        kind: "largest", "sum", "total", "pick", "argmax" or "products".
        takes: what it reads, in order.
        makes: what it makes, in order.
        wide: expressions: of what is reduced, or of what each product contracts.
        label: of a pick.
        clamped: of a pick, see `cfp.patterns.records.Reduction`.
        contractions: of products, for each (over, first, the place of the other
            operand among what it takes, or -1 of a sum).
    """

    kind: str
    takes: tuple[Array, ...]
    makes: tuple[Array, ...]
    wide: tuple[Expr, ...]
    label: Expr | None = None
    clamped: bool = False
    contractions: tuple[tuple[str, bool, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters that all stages share.

    Attributes:
        base: what is normalized, of the logits; None if no largest is taken.
        logits: their element type.
        tokens: sizes of their dims.
        words: of the vocabulary.
        chunks: how many parts.
        token_axes: for each dim of the tokens the mesh axes that it is spread over;
            empty on one device.
        word_axes: the same of words.
        first_word: the number of the first word.
        cuts: of tokens' dims, by the number of the leaf INSIDE.
        precision: of products; "" is the default.
    """

    base: Expr | None
    logits: str
    tokens: tuple[int, ...]
    words: int
    chunks: int
    token_axes: tuple[Axes, ...] = ()
    word_axes: Axes = ()
    first_word: int = 0
    cuts: tuple[Cut, ...] = ()
    precision: str = ""

    def alone(self) -> StageParameters:
        """The same on one device."""
        return replace(self, token_axes=(), word_axes=())

    def resized(
        self, sizes: Mapping[int, int], types: Mapping[str, str]
    ) -> StageParameters:
        """The same for other sizes and element types, on one device."""
        return replace(
            self.alone(),
            base=widened(self.base, types) if self.base else None,
            logits=types.get(self.logits, self.logits),
            tokens=tuple(sizes[n] for n in self.tokens),
            words=sizes[self.words],
            cuts=tuple(resized_cut(one, sizes) for one in self.cuts),
        )


def resized(step: Step, sizes: Mapping[int, int], types: Mapping[str, str]) -> Step:
    """A step for other sizes and element types, on one device."""

    def array(one: Array) -> Array:
        return replace(
            one,
            shape=tuple(sizes[n] for n in one.shape),
            dtype=types.get(one.dtype, one.dtype),
            leaf=widened(one.leaf, types) if one.leaf else None,
            dims=one.dims.resized(sizes),
            used_as=types.get(one.used_as, one.used_as),
        )

    return replace(
        step,
        takes=tuple(map(array, step.takes)),
        makes=tuple(map(array, step.makes)),
        wide=tuple(widened(one, types) for one in step.wide),
        label=widened(step.label, types) if step.label else None,
    )
