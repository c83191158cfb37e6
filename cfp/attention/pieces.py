"""The pieces of work of a rank in each step of a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from cfp.attention.kernels import Kernel
from cfp.attention.mask import Mask, Scores, may_meet
from cfp.attention.order import local_positions

_ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The spread of a sequence over a mesh axis, and the kernel of its blocks.

    Attributes:
      axis: of the mesh.
      ranks: devices along it.
      zigzag: whether tokens are in zigzag order.
      gather: whether keys and values are gathered at once; otherwise they rotate.
      kernel: of one block.
      scores: how products become scores.
      mask: of the whole sequence, by position, without segments.
      plays: the rank that one device plays by itself: its blocks stay where they are,
        and results are wrong, but the computation is that rank's. None is no play.
    """

    axis: str
    ranks: int
    zigzag: bool
    gather: bool
    kernel: Kernel
    scores: Scores
    mask: Mask
    plays: int | None = None

    @property
    def rank(self) -> jax.Array:
        """Returns this device's rank, [] int32."""
        if self.plays is not None:
            return jnp.asarray(self.plays, jnp.int32)
        return lax.axis_index(self.axis)

    @property
    def in_one(self) -> bool:
        """True if gathered keys are one block: the kernel masks it as it has to be."""
        simple = not self.mask.by_position
        return self.gather and (simple or self.kernel.any_positions)

    def steps(self, tokens: int) -> int:
        """Blocks of keys that a rank may see, its own first.

        Args:
          tokens: of a rank.
        """
        if self.in_one:
            return 1
        left = self.mask.left
        if self.zigzag or not self.mask.causal or left is None:
            return self.ranks
        # The nearest key of the block s ranks back is s * tokens - (tokens - 1) away.
        return min(self.ranks, (left + tokens - 1) // tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The work of a rank in a step: some of its queries with some of the keys there.

    Attributes:
      when: [] bool, whether it is this piece; None if it always is.
      queries: of the rank, the second half in zigzag order, or all.
      keys: of the step's block, the first half in zigzag order, or all.
      mask: of these.
    """

    when: jax.Array | None
    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All steps of a rank.

    Attributes:
      ring: how tokens are spread.
      queries: tokens of a rank.
      keys: tokens of a rank.
      query_segments: [batch, queries] of the rank, or None.
      key_segments: [batch, ranks * keys], or None.
      rank: [] int32.
    """

    ring: Ring
    queries: int
    keys: int
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    rank: jax.Array

    @classmethod
    def of(
        cls,
        ring: Ring,
        q: jax.Array,
        k: jax.Array,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
    ) -> Pieces:
        return cls(
            ring=ring,
            queries=q.shape[1],
            keys=k.shape[1],
            query_segments=query_segments,
            key_segments=key_segments,
            rank=ring.rank,
        )

    def of_step(self, step: int | jax.Array) -> tuple[Piece, ...]:
        """One piece; or two, the second for ranks that the first is not for.

        Args:
          step: a number, or one that a loop counts, which is not 0.
        """
        ring, mask = self.ring, self.ring.mask
        if not mask.by_position:
            return (self._piece(step),)
        bounded = mask.left is not None or mask.right is not None
        bounded = bounded or mask.keys is not None
        if ring.in_one:
            return (self._located(step, when=None),)
        if isinstance(step, int) and step == 0:
            # Queries and keys are at the same positions: only distances matter, or in
            # zigzag order which comes first.
            alike = not bounded if ring.zigzag else mask.keys is None
            if alike and self.queries == self.keys:
                return (self._piece(step, mask),)
            return (self._located(step, when=None),)
        if not mask.causal:
            return (self._located(step),)
        earlier = self.rank >= step  # The step's block comes from an earlier rank.
        make = self._located if bounded else self._piece
        if not ring.zigzag:
            return (make(step, when=earlier),)
        first, second = slice(0, self.keys // 2), slice(self.queries // 2, None)
        return (make(step, when=earlier, keys=first), make(step, queries=second))

    def _piece(
        self,
        step: int | jax.Array,
        mask: Mask | None = None,
        when: jax.Array | None = None,
        queries: slice = _ALL,
        keys: slice = _ALL,
    ) -> Piece:
        mask = self.ring.mask.without_positions() if mask is None else mask
        mask = replace(
            mask,
            query_segments=_cut(self.query_segments, queries),
            key_segments=_cut(self._segments_of(step), keys),
        )
        return Piece(when=when, queries=queries, keys=keys, mask=mask)

    def _located(
        self,
        step: int | jax.Array,
        when: jax.Array | bool | None = True,
        queries: slice = _ALL,
        keys: slice = _ALL,
    ) -> Piece:
        ring = self.ring
        if ring.in_one:
            of_keys = local_positions(self.rank * 0, 1, ring.ranks * self.keys, False)
        else:
            source = (self.rank - step) % ring.ranks
            of_keys = local_positions(source, ring.ranks, self.keys, ring.zigzag)
        of_queries = local_positions(self.rank, ring.ranks, self.queries, ring.zigzag)
        mask = replace(
            ring.mask, query_positions=of_queries[queries], key_positions=of_keys[keys]
        )
        meets = None if when is None else may_meet(mask, of_queries, of_keys)
        if isinstance(when, jax.Array):
            meets = when
        return self._piece(step, mask, meets, queries, keys)

    def _segments_of(self, step: int | jax.Array) -> jax.Array | None:
        if self.key_segments is None or self.ring.in_one:
            return self.key_segments
        source = (self.rank - step) % self.ring.ranks
        return lax.dynamic_slice_in_dim(
            self.key_segments, source * self.keys, self.keys, axis=1
        )


def _cut(segments: jax.Array | None, where: slice) -> jax.Array | None:
    return None if segments is None else segments[:, where]
