"""Attention as it is found: contractions, and what their dims run over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Use = tuple[int, int]  # (op id, operand index)
Letters = tuple[str, ...]  # for each dim what it runs over; "" of size 1


class Different(Exception):
    """The reason why something that looks like attention is left alone."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or result of a contraction.

    Attributes:
        value: its id.
        use: by whom it is read; None for results.
        letters: what each of its dims runs over: "b0", "b1"... for batch and heads,
            "q0", "q1"... for queries and groups of heads, "k", "d", "e".
    """

    value: int
    use: Use | None
    letters: Letters


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass, in one place of the program.

    Attributes:
        reads: tensors by name: "q", "k", "v", "dout".
        makes: tensors by name: "out"; "dq", "dk", "dv".
    """

    reads: Mapping[str, Tensor]
    makes: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A mask or a bias that enters an attention.

    Attributes:
        parts: the values that it is made of, and their letters: one, or the segment
            ids of queries and those of keys.
        reads: what a kernel reads for each part: the part itself, or what is made of
            it where only that is there.
        uses: for each pass where it reads those.
    """

    parts: tuple[Tensor, ...]
    reads: tuple[Tensor, ...]
    uses: tuple[tuple[Use, ...], ...]

    @property
    def is_segments(self) -> bool:
        """Tell whether it compares ids of queries with ids of keys."""
        return len(self.parts) > 1


@dataclass(frozen=True, kw_only=True)
class Found:
    """A possible attention.

    Attributes:
        op: the contraction that makes the scores.
        scope, source: where it is from.
        sizes: of each letter.
        scores: the contraction's result.
        argument: the value whose softmax is taken, and its letters.
        inside: ids of the ops between the contractions.
        between: ids of the values between them, scores and weights and their gradients,
            wherever they are computed, so that none is made by a kernel.
        options: ways to see the masks and biases that enter, the best one first; each
            has all of them.
        sides: the one that is looked at.
        forward, backward: the passes; a backward pass has all three gradients.
    """

    op: int
    scope: str
    source: str
    sizes: Mapping[str, int]
    scores: Tensor
    argument: Tensor
    inside: frozenset[int]
    between: frozenset[int]
    options: tuple[tuple[Side, ...], ...]
    forward: tuple[Pass, ...]
    backward: Pass | None
    sides: tuple[Side, ...] = ()
    dots: Mapping[str, int] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes, the backward pass last."""
        return (*self.forward, *([self.backward] if self.backward else []))


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Something that looks like attention and is not replaced, with the reason."""

    op: int
    scope: str
    source: str
    reason: str
