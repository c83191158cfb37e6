"""The order in which arrays have the tokens' dims.

A program may have logits as [tokens, words], [words, tokens], with the tokens' dims in
any order, merged, split, or cut. Everything is computed with one row for each token, in
the order that the logits' own dims have; `Dims` describes how an array has these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

A = TypeVar("A", jax.Array, np.ndarray)
Axes = tuple[str, ...]
# Of tokens' dims that have not all tokens: (dim, first token, end).
Cut = tuple[tuple[int, int, int], ...]
# In the place of a tokens' dim: the words, or what is contracted to make logits.
OTHER = -1


class Split(Exception):
    """A tokens' dim that has to be two."""

    def __init__(self, dim: int, sizes: tuple[int, int]):
        super().__init__(f"tokens' dim {dim} is two of sizes {sizes}")
        self.dim, self.sizes = dim, sizes


class Mixed(Exception):
    """Dims that are no whole ones of the tokens', and why."""


@dataclass(frozen=True, slots=True)
class Dims:
    """The tokens' dims that the dims of an array consist of.

    Attributes:
        of: for each dim of the array, the tokens' dims that it merges, in row-major
            order; none of a dim of size one. OTHER stands alone.
        cut: the tokens that it has, if these are not all.
    """

    of: tuple[tuple[int, ...], ...]
    cut: Cut = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens' dims that an array has."""
        return tuple(one for dim in self.of for one in dim if one != OTHER)

    @property
    def place(self) -> int | None:
        """The dim that is none of the tokens', if there is one."""
        return self.of.index((OTHER,)) if (OTHER,) in self.of else None

    def sizes(self, tokens: Sequence[int]) -> dict[int, int]:
        """The sizes of the tokens' dims in an array, which may be cut."""
        found = dict(enumerate(tokens))
        return found | {dim: end - first for dim, first, end in self.cut}

    def picked(self, dims: Sequence[int]) -> Dims:
        """The dims of an array that has some of these dims, in an order."""
        return self.made_of([self.of[dim] for dim in dims])

    def made_of(self, of: Sequence[tuple[int, ...]]) -> Dims:
        """Other dims of the same tokens."""
        there = {one for dim in of for one in dim}
        return Dims(tuple(of), tuple(one for one in self.cut if one[0] in there))

    def reshaped(
        self, before: Sequence[int], after: Sequence[int], tokens: Sequence[int]
    ) -> Dims:
        """The dims of an array after a reshape.

        Args:
            before: shape of the array that has these dims.
            after: shape of the other.
            tokens: sizes of the tokens' dims.

        Raises:
            Split: a tokens' dim is two of the other array.
            Mixed: a dim of the other array is part of what is no tokens' dim, or
                several of which one is none.
        """
        sizes = self.sizes(tokens)
        waiting = [
            (one, sizes.get(one, size))
            for dim, size in zip(self.of, before, strict=True)
            for one in dim
        ]
        waiting.reverse()
        of: list[tuple[int, ...]] = []
        for size in after:
            dim: list[int] = []
            while size > 1:
                one, own = waiting.pop()
                if size % own:
                    if one == OTHER or own % size or one in {c[0] for c in self.cut}:
                        raise Mixed("a reshape mixes words or tokens")
                    raise Split(one, (size, own // size))
                dim.append(one)
                size //= own
            if OTHER in dim and len(dim) > 1:
                raise Mixed("a reshape mixes words and tokens")
            of.append(tuple(dim))
        return self.made_of(of)

    def axes(
        self, tokens: Sequence[int], spread: Sequence[Axes], sizes: Mapping[str, int]
    ) -> list[Axes]:
        """The mesh axes of each dim of an array; none for OTHER.

        Args:
            tokens: sizes of the tokens' dims.
            spread: axes of each of them.
            sizes: of the axes.

        Raises:
            ValueError: a dim merges a spread tokens' dim behind another one, or it is
                cut.
        """
        if not any(spread):
            return [()] * len(self.of)
        if any(spread[dim] for dim, _, _ in self.cut):
            raise ValueError("a tokens' dim that is spread is cut")
        found: list[Axes] = []
        for dim in self.of:
            own: Axes = ()
            whole = False
            for one in dim:
                axes = spread[one] if one != OTHER else ()
                if axes and whole:
                    raise ValueError("the tokens' dims are not kept apart")
                own += axes
                whole |= one != OTHER and tokens[one] > prod(sizes[a] for a in axes)
            found.append(own)
        return found

    def resized(self, sizes: Mapping[int, int]) -> Dims:
        """The same of fewer tokens."""
        return replace(self, cut=resized_cut(self.cut, sizes))


NO_DIMS = Dims(())


def resized_cut(cut: Cut, sizes: Mapping[int, int]) -> Cut:
    """Cuts of fewer tokens: one is left before those that are there."""
    return tuple(
        (dim, min(first, 1), min(first, 1) + sizes[end - first])
        for dim, first, end in cut
    )


def to_rows(array: A, dims: Dims, tokens: Sequence[int]) -> A:
    """Arranges an array as one row for each token.

    Args:
        array: of some tokens' dims; others are as if it had been broadcast.
        dims: its dims.
        tokens: local sizes of the tokens' dims.

    Returns:
        [tokens, n], n being the size of the OTHER dim, or 1. What is cut off is zero.
    """
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    sizes = dims.sizes(tokens)
    shape = [
        sizes.get(one, size)
        for dim, size in zip(dims.of, array.shape, strict=True)
        for one in dim
    ]
    order = [one for dim in dims.of for one in dim]
    last = [order.index(OTHER)] if OTHER in order else []
    kept = sorted(one for one in order if one != OTHER)
    found = array.reshape(shape)
    found = found.transpose([*(order.index(one) for one in kept), *last])
    width = found.shape[-1] if last else 1
    found = found.reshape([sizes[d] if d in kept else 1 for d in sizes] + [width])
    ends = {dim: (first, tokens[dim] - end) for dim, first, end in dims.cut}
    found = xp.pad(found, [*(ends.get(d, (0, 0)) for d in sizes), (0, 0)])
    return xp.broadcast_to(found, (*tokens, width)).reshape(prod(tokens), width)


def from_rows(rows: A, dims: Dims, tokens: Sequence[int], shape: Sequence[int]) -> A:
    """Arranges rows as an array; the reverse of `to_rows`.

    Args:
        rows: [tokens, n].
        dims: of the array. Tokens' dims that it does not have are summed over.
        tokens: local sizes of the tokens' dims.
        shape: local shape of the array.
    """
    found: Any = rows.reshape(*tokens, rows.shape[-1])
    kept = {dim: slice(first, end) for dim, first, end in dims.cut}
    found = found[tuple(kept.get(d, slice(None)) for d in range(len(tokens)))]
    missing = tuple(d for d in range(len(tokens)) if d not in dims.tokens)
    found = found.sum(missing, keepdims=True) if missing else found
    order = [one if one != OTHER else len(tokens) for dim in dims.of for one in dim]
    rest = [d for d in range(found.ndim) if d not in order]
    return found.transpose([*order, *rest]).reshape(tuple(shape))


def inside(cut: Cut, tokens: Sequence[int]) -> jax.Array:
    """[tokens, 1]: true for tokens that are not cut off."""
    found = jnp.ones(tuple(tokens), bool)
    for dim, first, end in cut:
        place = jax.lax.broadcasted_iota(jnp.int32, tuple(tokens), dim)
        found &= (place >= first) & (place < end)
    return found.reshape(-1, 1)
