"""The stages of what is computed over parts of a vocabulary, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cfp.patterns.expression import Expr, widened

Axes = tuple[str, ...]
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
    """

    form: str
    shape: tuple[int, ...]
    dtype: str
    leaf: Expr | None = None
    words_dim: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One stage.

    Attributes:
        kind: "largest", "sum", "pick" or "products".
        takes: what it reads, in order.
        makes: what it makes, in order.
        wide: expressions: of what is reduced, or of what each product contracts.
        label: of a pick.
        clamped: of a pick, see `cfp.patterns.cross_entropy.Reduction`.
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
        base: what is normalized, of the logits.
        logits: their element type.
        tokens: sizes of their dims.
        words: of the vocabulary.
        chunks: how many parts.
        token_axes: for each dim of the tokens the mesh axes that it is spread over;
            empty on one device.
        word_axes: the same of words.
        first_word: the number of the first word.
    """

    base: Expr
    logits: str
    tokens: tuple[int, ...]
    words: int
    chunks: int
    token_axes: tuple[Axes, ...] = ()
    word_axes: Axes = ()
    first_word: int = 0

    def alone(self) -> StageParameters:
        """The same on one device."""
        return replace(self, token_axes=(), word_axes=())

    def resized(
        self, sizes: Mapping[int, int], types: Mapping[str, str]
    ) -> StageParameters:
        """The same for other sizes and element types, on one device."""
        return replace(
            self.alone(),
            base=widened(self.base, types),
            logits=types.get(self.logits, self.logits),
            tokens=tuple(sizes[n] for n in self.tokens),
            words=sizes[self.words],
        )


def resized(step: Step, sizes: Mapping[int, int], types: Mapping[str, str]) -> Step:
    """A step for other sizes and element types, on one device."""

    def array(one: Array) -> Array:
        return replace(
            one,
            shape=tuple(sizes[n] for n in one.shape),
            dtype=types.get(one.dtype, one.dtype),
            leaf=widened(one.leaf, types) if one.leaf else None,
        )

    return replace(
        step,
        takes=tuple(map(array, step.takes)),
        makes=tuple(map(array, step.makes)),
        wide=tuple(widened(one, types) for one in step.wide),
        label=widened(step.label, types) if step.label else None,
    )


def row_axes(
    shape: Sequence[int], tokens: Sequence[int], axes: Sequence[Axes]
) -> list[Axes]:
    """The axes of each dim of something that has an entry or a vector for each token.

    Raises:
        ValueError: its dims are not those of the tokens, and these are spread.
    """
    if not any(axes):
        return [()] * len(shape)
    found: list[Axes] = []
    waiting = list(zip(tokens, axes, strict=True))
    for size in shape:
        while waiting and waiting[0][0] == 1 and size != 1:
            waiting.pop(0)
        if waiting and waiting[0][0] == size:
            found.append(waiting.pop(0)[1])
        else:
            found.append(())
            if size != 1 and waiting:
                raise ValueError("the tokens' dims are not kept apart")
    if any(axes for _, axes in waiting):
        raise ValueError("the tokens' dims are not kept apart")
    return found
