"""Attention as it is found: contractions, and what their dims run over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cfp.program.replace import Use

# What the dims of a tensor run over: "b0", "b1"... batch and heads, "q0", "q1"...
# queries and groups of heads, "k" keys, "d" and "e" the features of keys and of values;
# "" is a dim of size 1.
Letters = tuple[str, ...]
ORDER = ("b0", "b1", "b2", "b3", "q0", "q1", "q2", "q3", "k", "d", "e")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or result of a contraction; `use` is who reads it, None of results."""

    value: int
    use: Use | None
    letters: Letters


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass: tensors that it reads and makes, by name."""

    reads: Mapping[str, Tensor]
    makes: Mapping[str, Tensor]

    @property
    def is_backward(self) -> bool:
        """True if gradients are made."""
        return "dout" in self.reads


@dataclass(frozen=True, kw_only=True)
class Found:
    """The place of an attention in a program.

    Attributes:
        op: the contraction that makes the scores.
        source: the line that it is from.
        scores: what it makes.
        sizes: of each letter.
        between: ids of the values between contractions, scores, weights and their
            gradients, so that none is made by a kernel.
        forward, backward: the passes; a backward pass has all three gradients.
        ops: all ops that belong to it.
    """

    op: int
    source: str
    scores: Tensor
    forward: tuple[Pass, ...]
    backward: Pass | None
    sizes: Mapping[str, int] = field(default_factory=dict)
    between: frozenset[int] = frozenset()
    ops: frozenset[int] = frozenset()


def aligned(letters: Letters, shape: tuple[int, ...]) -> Letters:
    """Letters of a value that equals one with these letters, but for dims of size 1."""
    names = iter([x for x in letters if x])
    return tuple(next(names) if n > 1 else "" for n in shape)
