"""Attention to keys that are spread over devices: a ring, or keys gathered at once.

Each rank (device along the axis) keeps its queries. In a ring, keys and values rotate:
a step sends them to the next rank by a collective-permute, issued before the step's
computation, which does not depend on it. Results of steps are combined by their
log-sum-exp in float32. The backward pass rotates keys and values again; each rank has
its rows' whole output and log-sum-exp. Gradients that other ranks compute travel with
keys and values in float32; their sums return in the type of the keys. Liu et al., "Ring
Attention with Blockwise Transformers for Near-Infinite Context", 2023.

`spread_attention` runs inside a `jax.shard_map` that is manual in the axis.

In zigzag order the sequence has two chunks for each rank: rank i has chunk i and chunk
2 * ranks - 1 - i. Then a causal mask gives every rank the same work in every step.
Whole models run in this order: convert tokens, labels, positions and segment ids once,
where batches are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from cfp.errors import CfpError
from cfp.kernels.chunked import Partial, merge, nothing_yet
from cfp.kernels.problem import ALL_GATHER, AttentionStrategy, Mask, Scores, may_meet
from cfp.kernels.registry import Kernel


def zigzag_order(length: int, ranks: int) -> np.ndarray:
    """Natural positions, [length] int32, of the tokens in zigzag order.

    Raises:
      CfpError: the length is no multiple of 2 * ranks.
    """
    if length % (2 * ranks):
        raise CfpError(
            f"The length {length} is no multiple of 2 * ranks, {2 * ranks}. Pad tokens."
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * ranks, -1)
    mine = [chunks[[rank, 2 * ranks - 1 - rank]] for rank in range(ranks)]
    return np.concatenate(mine).reshape(-1)


def to_zigzag(x: Array, ranks: int) -> Array:
    """Reorders tokens, along dim 1, to `zigzag_order`."""
    return jnp.take(x, zigzag_order(x.shape[1], ranks), axis=1)


def from_zigzag(x: Array, ranks: int) -> Array:
    """Reorders tokens in zigzag order, along dim 1, to their natural order."""
    return jnp.take(x, np.argsort(zigzag_order(x.shape[1], ranks)), axis=1)


def local_positions(rank: Array, ranks: int, count: int, zigzag: bool) -> Array:
    """Natural positions of a rank's `count` tokens, [count] int32."""
    index = jnp.arange(count, dtype=jnp.int32)
    if not zigzag:
        return rank * count + index
    half, last = count // 2, 2 * ranks - 1 - rank
    return jnp.concatenate([rank * half + index[:half], last * half + index[:half]])


@dataclass(frozen=True, slots=True)
class Rows:
    """Selection of all tokens of a block, or of one half.

    Attributes:
      half: 0 or 1, as [] int32 if it depends on the rank; None for all tokens.
      count: number of selected tokens.
    """

    half: int | Array | None
    count: int

    def of(self, x: Array, dim: int = 1) -> Array:
        """The selected tokens, along `dim`, of an array of a block's tokens."""
        if self.half is None:
            return x
        return lax.dynamic_slice_in_dim(x, self.half * self.count, self.count, dim)

    def spread(self, part: Array, fill: float = 0.0) -> Array:
        """Undoes `of` along dim 1, with a fill for other tokens.

        The expression has no update in place, so that XLA can fuse it into its reader.
        """
        if self.half is None:
            return part
        other = jnp.full_like(part, fill)
        halves = (jnp.where(self.half == n, part, other) for n in range(2))
        return jnp.concatenate([*halves], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A sequence sharded over a mesh axis, and the kernel for its blocks.

    Attributes:
      axis: name of the mesh axis.
      ranks: number of devices along the axis.
      zigzag: True if tokens are in zigzag order.
      gather: True if keys and values are gathered at once; otherwise they rotate.
      mask: mask of the whole sequence, by position, without segments.
    """

    axis: str
    ranks: int
    zigzag: bool
    gather: bool
    kernel: Kernel
    scores: Scores
    mask: Mask

    @classmethod
    def of(
        cls, strategy: AttentionStrategy, kernel: Kernel, scores: Scores, mask: Mask
    ) -> Ring:
        """The ring or gathering of a strategy; AssertionError if it has none."""
        assert strategy.spread is not None, "tokens are sharded"
        return cls(
            axis=strategy.spread,
            ranks=strategy.ring_ranks,
            zigzag=strategy.zigzag,
            gather=bool(strategy.axes(ALL_GATHER)),
            kernel=kernel,
            scores=scores,
            mask=mask,
        )

    @property
    def rank(self) -> Array:
        """This device's rank, [] int32."""
        return lax.axis_index(self.axis)

    def rotated(self, x: Any, ahead: int) -> Any:
        """Sends arrays `ahead` ranks ahead in the ring; returns the received arrays."""
        if ahead % self.ranks == 0:
            return x
        path = [(rank, (rank + ahead) % self.ranks) for rank in range(self.ranks)]
        return lax.ppermute(x, self.axis, path)

    @property
    def in_one(self) -> bool:
        """True if keys are gathered, and the kernel can mask them all as one block."""
        return self.gather and (not self.mask.by_position or self.kernel.any_positions)

    def steps(self, tokens: int) -> int:
        """Number of steps over blocks of `tokens` keys a rank may see; 1 if in_one."""
        if self.in_one:
            return 1
        left = self.mask.left
        if self.zigzag or not self.mask.causal or left is None:
            return self.ranks
        # The nearest key of the block s ranks back is s * tokens - (tokens - 1) away.
        return min(self.ranks, (left + tokens - 1) // tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a rank's work in a step: attention of some queries to some keys.

    Attributes:
      when: [] bool, False only if no key is visible; None to compute always.
      queries: selected queries of the rank.
      keys: selected keys of the step's block.
    """

    when: Array | None
    queries: Rows
    keys: Rows
    mask: Mask


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a rank's work. Step s has the keys of rank - s, or all if in_one.

    Attributes:
      queries: number of a rank's queries.
      keys: number of a rank's keys.
      query_segments: segment ids [batch, queries] of the rank, or None.
      key_segments: segment ids [batch, ranks * keys] of all ranks, or None.
      rank: [] int32.
    """

    ring: Ring
    queries: int
    keys: int
    query_segments: Array | None
    key_segments: Array | None
    rank: Array

    def of_step(self, step: int | Array) -> tuple[Piece, ...]:
        """Pieces of a step; a traced step must not be 0."""
        ring, mask = self.ring, self.ring.mask
        if not mask.by_position:
            return (self._piece(step),)
        if ring.in_one:
            return (self._located(step, always=True),)
        if isinstance(step, int) and step == 0:
            # Queries and keys have the same positions, so local positions do as well;
            # in zigzag order only if no distance is bounded.
            alike = not self._bounded if ring.zigzag else mask.keys is None
            if alike and self.queries == self.keys:
                return (self._piece(step, mask),)
            return (self._located(step, always=True),)
        if not mask.causal:
            return (self._located(step),)
        make = self._located if self._bounded else self._piece
        earlier = self.rank >= step  # The step's block comes from an earlier rank.
        if not ring.zigzag:
            return (make(step, when=earlier),)
        # The second half of the queries sees the first half of the keys. Besides, for
        # keys of an earlier rank the first halves of queries and keys meet, and for
        # keys of a later rank the second halves.
        queries, keys = self.queries // 2, self.keys // 2
        at = jnp.where(earlier, 0, 1)
        return (
            make(step, queries=Rows(1, queries), keys=Rows(0, keys)),
            make(step, queries=Rows(at, queries), keys=Rows(at, keys)),
        )

    def of_own(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Pieces of step 0: (pieces to compute first, pieces that may come last)."""
        pieces, half = self.of_step(0), self.keys // 2
        mask = pieces[0].mask
        if not self.ring.zigzag or not mask.causal or mask.query_positions is not None:
            return pieces, ()
        first, second = Rows(0, half), Rows(1, half)
        return (self._piece(0, queries=second, keys=first),), tuple(
            self._piece(0, self.ring.mask, queries=rows, keys=rows)
            for rows in (first, second)
        )

    @property
    def _bounded(self) -> bool:
        mask = self.ring.mask
        return not (mask.left is None and mask.right is None and mask.keys is None)

    def _piece(
        self,
        step: int | Array,
        mask: Mask | None = None,
        when: Array | None = None,
        queries: Rows | None = None,
        keys: Rows | None = None,
    ) -> Piece:
        mask = self.ring.mask.without_positions() if mask is None else mask
        queries, keys = queries or Rows(None, self.queries), keys or self._all_keys
        segments = self.query_segments, self._segments_of(step)
        mask = replace(
            mask,
            query_segments=None if segments[0] is None else queries.of(segments[0]),
            key_segments=None if segments[1] is None else keys.of(segments[1]),
        )
        return Piece(when=when, queries=queries, keys=keys, mask=mask)

    def _located(
        self,
        step: int | Array,
        when: Array | None = None,
        queries: Rows | None = None,
        keys: Rows | None = None,
        always: bool = False,
    ) -> Piece:
        """A piece whose mask has positions.

        Without `when` and `always` it is computed if a query may see a key.
        """
        ring = self.ring
        queries, keys = queries or Rows(None, self.queries), keys or self._all_keys
        if ring.in_one:
            of_keys = local_positions(self.rank * 0, 1, ring.ranks * self.keys, False)
        else:
            source = (self.rank - step) % ring.ranks
            of_keys = local_positions(source, ring.ranks, self.keys, ring.zigzag)
        of_queries = local_positions(self.rank, ring.ranks, self.queries, ring.zigzag)
        where = queries.of(of_queries, 0), keys.of(of_keys, 0)
        if when is None and not always:
            when = may_meet(ring.mask, *where)
        mask = replace(ring.mask, query_positions=where[0], key_positions=where[1])
        return self._piece(step, mask, when, queries, keys)

    @property
    def _all_keys(self) -> Rows:
        ranks = self.ring.ranks if self.ring.in_one else 1
        return Rows(None, self.keys * ranks)

    def _segments_of(self, step: int | Array) -> Array | None:
        if self.key_segments is None or self.ring.in_one:
            return self.key_segments
        source = (self.rank - step) % self.ring.ranks
        return lax.dynamic_slice_in_dim(
            self.key_segments, source * self.keys, self.keys, axis=1
        )


Step = int | Array  # An array is not 0.
KeysValues = Array | tuple[Array, Array]  # Stacked, or two arrays.


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def spread_attention(
    q: Array,
    k: Array,
    v: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    ring: Ring,
) -> Array:
    """Computes attention of a rank's queries to the keys of all ranks.

    Args:
      q: [batch, queries of this rank, heads, head_dim].
      k: [batch, keys of this rank, kv_heads, head_dim]; v is like k.
      query_segments: [batch, queries of this rank] int32, or None.
      key_segments: [batch, keys of all ranks] int32, in the order of ranks; or None.

    Returns:
      The output, with the shape and dtype of q.
    """
    return forward(q, k, v, query_segments, key_segments, ring)[0]


Residuals = tuple[Any, ...]


def forward(
    q, k, v, query_segments, key_segments, ring: Ring
) -> tuple[Array, Residuals]:
    """Forward pass of `spread_attention`.

    Returns:
      The output, and residuals for `backward`: the arrays, the output and its
      log-sum-exp over all keys, [batch, queries, heads] float32.
    """

    def attend(so_far: Partial, piece: Piece, kv: KeysValues) -> Partial:
        keys, values = piece.keys.of(kv[0]), piece.keys.of(kv[1])
        rows = piece.queries
        out, lse = ring.kernel.module.attend(
            rows.of(q), keys, values, ring.scores, piece.mask
        )
        return merge(so_far, (rows.spread(out), rows.spread(lse, -jnp.inf)))

    pieces = Pieces(
        ring, q.shape[1], k.shape[1], query_segments, key_segments, ring.rank
    )

    def compute(step: Step, so_far: Partial, kv: KeysValues) -> Partial:
        return _run(pieces.of_step(step), attend, so_far, kv)

    last = ring.steps(q.shape[1]) - 1
    if ring.gather:
        gathered = _gathered(jnp.stack([k, v]), ring)

        def add_block(step: Step, so_far: Partial) -> Partial:
            return compute(step, so_far, _block(gathered, step, ring))

        so_far = lax.fori_loop(1, last + 1, add_block, add_block(0, nothing_yet(q)))
    else:

        def go_on(step: Step, carried: tuple[KeysValues, Partial]) -> Any:
            kv, so_far = carried
            following = ring.rotated(kv, 1)
            return following, compute(step, so_far, kv)

        # A loop keeps two blocks in memory. Unrolled, XLA may send all blocks at once.
        carried = (k, v), nothing_yet(q)
        if last > 0:
            carried = lax.fori_loop(1, last, go_on, go_on(0, carried))
        so_far = compute(last, carried[1], carried[0])
    out, lse = so_far
    out = out.astype(q.dtype)
    return out, (q, k, v, query_segments, key_segments, out, lse)


def backward(ring: Ring, kept: Residuals, dout: Array) -> tuple[Any, ...]:
    """Gradients (dq, dk, dv, None, None) of the arrays of `spread_attention`."""
    # Rotated arrays must differ from the forward pass's. Otherwise XLA merges equal
    # transfers, and keeps all blocks in memory until the backward pass. A barrier is
    # not enough, since XLA removes it early. So values and keys are one array here.
    q, k, v, query_segments, key_segments, out, lse = kept
    q, k, v, out, lse, dout = lax.optimization_barrier((q, k, v, out, lse, dout))

    def add(so_far: Sequence[Array], piece: Piece, kv: KeysValues) -> tuple[Array, ...]:
        queries, keys = piece.queries, piece.keys
        rows = tuple(queries.of(x) for x in (q, out, lse, dout))
        v, k = keys.of(kv[0]), keys.of(kv[1])
        gradients = ring.kernel.module.gradients
        dq, dk, dv = gradients(rows, k, v, ring.scores, piece.mask)
        more = queries.spread(dq), keys.spread(dv), keys.spread(dk)
        return tuple(
            x + one.astype(jnp.float32) for x, one in zip(so_far, more, strict=True)
        )

    pieces = Pieces(
        ring, q.shape[1], k.shape[1], query_segments, key_segments, ring.rank
    )

    def compute(step: Step, dq: Array, kv: Array) -> tuple[Array, ...]:
        """Returns dq with this step added, and the step's [dv, dk] as one array."""
        nothing = jnp.zeros(kv.shape[1:], jnp.float32)
        dq, *made = _run(pieces.of_step(step), add, (dq, nothing, nothing), kv)
        return dq, jnp.stack(made)

    last = ring.steps(q.shape[1]) - 1
    dq = jnp.zeros(q.shape, jnp.float32)
    kv = jnp.stack([v, k])
    if ring.gather:
        gathered = _gathered(kv, ring)

        def add_block(step: Step, carried: tuple[Array, ...]) -> Any:
            dq, total = carried
            dq, dkv = compute(step, dq, _block(gathered, step, ring))
            return dq, _with_block(total, dkv, step, ring)

        carried = dq, jnp.zeros(gathered.shape, jnp.float32)
        carried = lax.fori_loop(1, last + 1, add_block, add_block(0, carried))
        dq, dkv = carried[0], _scattered(carried[1], ring)
    else:

        def go_on(step: Step, carried: tuple[Array, ...]) -> Any:
            kv, dq, dkv = carried
            following, arrived = ring.rotated(kv, 1), ring.rotated(dkv, 1)
            dq, more = compute(step, dq, kv)
            return following, dq, arrived + more

        # Other ranks' gradients of a block travel with it. The own rank's part stays;
        # it is computed partly while keys leave, partly while gradients arrive.
        begin, end = pieces.of_own()
        following = ring.rotated(kv, 1)
        nothing = jnp.zeros(k.shape, jnp.float32)
        made = _run(begin, add, (dq, nothing, nothing), (v, k))
        if last > 0:
            dq, *own = made
            others = jnp.zeros(kv.shape, jnp.float32)
            kv, dq, others = lax.fori_loop(1, last, go_on, (following, dq, others))
            others = ring.rotated(others, 1) if last > 1 else others
            dq, more = compute(last, dq, kv)
            # The sums are complete, so k's dtype is enough.
            arrived = ring.rotated((others + more).astype(k.dtype), -last)
            made = dq, own[0] + arrived[0], own[1] + arrived[1]
        dq, *dkv = _run(end, add, made, (v, k))
    dv, dk = (x.astype(k.dtype) for x in dkv)
    return dq.astype(q.dtype), dk, dv, None, None


spread_attention.defvjp(forward, backward)


def _run(
    pieces: Sequence[Piece], compute: Callable[..., Any], so_far: Any, kv: KeysValues
) -> Any:
    """Folds pieces into `so_far` by `compute`; those with a False `when` do not run."""
    for piece in pieces:
        go: Callable[[Any], Any] = partial(compute, piece=piece, kv=kv)
        if piece.when is not None:
            go = partial(lax.cond, piece.when, go, lambda so_far: so_far)
        so_far = go(so_far)
    return so_far


def _gathered(kv: Array, ring: Ring) -> Array:
    """Gathers [2, batch, keys, ...] along keys if in_one, else along a new dim 0."""
    axis = 2 if ring.in_one else 0
    return lax.all_gather(kv, ring.axis, axis=axis, tiled=ring.in_one)


def _scattered(dkv: Array, ring: Ring) -> Array:
    """Sums the gradients of `_gathered` over ranks; each rank keeps its own part."""
    axis = 2 if ring.in_one else 0
    return lax.psum_scatter(dkv, ring.axis, scatter_dimension=axis, tiled=ring.in_one)


def _block(gathered: Array, step: Step, ring: Ring) -> Array:
    if ring.in_one:
        return gathered
    source = (ring.rank - step) % ring.ranks
    return lax.dynamic_index_in_dim(gathered, source, keepdims=False)


def _with_block(total: Array, block: Array, step: Step, ring: Ring) -> Array:
    if ring.in_one:
        return block
    source = (ring.rank - step) % ring.ranks
    return lax.dynamic_update_index_in_dim(total, block, source, axis=0)
