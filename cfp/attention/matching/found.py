"""Attention in a program: its contractions, and names of their dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
