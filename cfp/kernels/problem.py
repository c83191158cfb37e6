"""Attention problem (shapes, mask, scale, soft cap) and strategy (roles of mesh axes).

Shapes use: batch, query (queries), key (keys), heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod, sqrt
from operator import and_, contains
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from cfp.errors import CfpError

if TYPE_CHECKING:
    from cfp.kernels.registry import Kernel

# Position of keys that only fill up a block; no real key has it.
BEYOND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Formula from products qk to scores: softcap * tanh(scale * qk / softcap).

    Attributes:
      scale: factor of the products of queries and keys.
      softcap: bound of a score, or None: scale * qk. Bias and mask come after it.
    """

    scale: float
    softcap: float | None = None


def _static() -> Any:
    return field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Conditions by which a query sees a key; all must hold.

    Attributes:
      causal: True if key position <= query position.
      left: key position >= query position - left; None has no bound.
      right: key position <= query position + right; None has no bound.
      keys: key position < keys, others are padding; None has no padding.
      query_positions: [query] int32, rising; 0, 1, 2... if None.
      key_positions: [key] int32, rising; 0, 1, 2... if None.
      query_segments: [batch, query] int32, or None: a query sees keys of its own
        segment only.
      key_segments: [batch, key] int32, or None like `query_segments`.
      key_lengths: [batch] int32: number of keys of each sequence, in place of `keys`.
        Only cuDNN reads it; other kernels take segments.
    """

    causal: bool = _static()
    left: int | None = _static()
    right: int | None = _static()
    keys: int | None = _static()
    query_positions: Array | None = None
    key_positions: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    key_lengths: Array | None = None

    @property
    def by_position(self) -> bool:
        """True if `causal`, `left`, `right` or `keys` limits what a query sees."""
        bounds = (self.left, self.right, self.keys)
        return self.causal or any(bound is not None for bound in bounds)

    def lengths(self, batch: int) -> Array | None:
        """`key_lengths`, by default `keys` for each sequence; None if both are None."""
        if self.key_lengths is not None:
            return jnp.asarray(self.key_lengths, jnp.int32)
        return None if self.keys is None else jnp.full(batch, self.keys, jnp.int32)

    def without_positions(self) -> Mask:
        """The mask with its segments and key lengths alone."""
        return replace(
            NO_MASK,
            query_segments=self.query_segments,
            key_segments=self.key_segments,
            key_lengths=self.key_lengths,
        )


NO_MASK = Mask(causal=False, left=None, right=None, keys=None)


def positions_of(given: Array | None, count: int) -> Array:
    """The given positions, by default 0, 1, 2..., as [count] int32."""
    return jnp.arange(count, dtype=jnp.int32) if given is None else given


def visible(mask: Mask, queries: int, keys: int) -> Array | None:
    """True at seen keys, [1 or batch, 1, query, key]; None without a condition.

    `Mask.key_lengths` is ignored.
    """
    allowed = None
    if mask.by_position:
        query = positions_of(mask.query_positions, queries)[:, None]
        key = positions_of(mask.key_positions, keys)[None, :]
        allowed = reduce(and_, bounds(mask, query, key))
        allowed = jnp.broadcast_to(allowed, (queries, keys))[None, None]
    if mask.query_segments is not None and mask.key_segments is not None:
        same = mask.query_segments[:, :, None] == mask.key_segments[:, None, :]
        allowed = same[:, None] if allowed is None else allowed & same[:, None]
    return allowed


def may_meet(mask: Mask, query: Array, key: Array) -> Array:
    """False ([] bool) only if no query of a block can see a key, by their positions.

    The test uses the ranges of positions, so it may be True for an invisible block.
    """
    first, last = jnp.min(query), jnp.max(query)
    lowest, highest = jnp.min(key), jnp.max(key)
    meets = jnp.asarray(True)
    if mask.causal:
        meets &= lowest <= last
    if mask.left is not None:
        meets &= first - highest <= mask.left
    if mask.right is not None:
        meets &= lowest - last <= mask.right
    if mask.keys is not None:
        meets &= lowest < mask.keys
    return meets


def bounds(mask: Mask, query: Any, key: Any) -> list[Any]:
    """Conditions on positions as boolean arrays; `query` and `key` broadcast."""
    return [
        *([key <= query] if mask.causal else []),
        *([] if mask.left is None else [key >= query - mask.left]),
        *([] if mask.right is None else [key <= query + mask.right]),
        *([] if mask.keys is None else [key < mask.keys]),
    ]


Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """Sizes and options of one attention, on all devices or on one.

    Attributes:
      heads: number of query heads, a multiple of kv_heads.
      kv_heads: number of key and value heads.
      causal: True hides keys after the query.
      left: number of visible positions before the query; None has no bound.
      right: number of visible positions after the query; None has no bound.
      segments: True if tokens have segment ids, or `hides_keys`.
      hides_keys: True if keys are hidden from all queries of a sequence alike.
      bias: True if there is a bias, or a mask [query, key].
      rounds_bias: True if there is a bias of another dtype than `dtype`.
      rounds_output: True if the step keeps the output in a wider dtype.
      scale: factor of the products of queries and keys.
      softcap: bound of a score, or None.
      padded_keys: True if a strategy pads keys that need a mask.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = False
    left: int | None = None
    right: int | None = None
    segments: bool = False
    hides_keys: bool = False
    bias: bool = False
    rounds_bias: bool = False
    rounds_output: bool = False
    scale: float
    softcap: float | None = None
    padded_keys: bool = False

    @property
    def scores(self) -> Scores:
        return Scores(scale=self.scale, softcap=self.softcap)

    def mask(self) -> Mask:
        """The mask of whole sequences in natural order, without segments."""
        return replace(NO_MASK, causal=self.causal, left=self.left, right=self.right)


def problem_of(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float | None,
    window: Window = None,
    segment_ids: Any = None,
    key_lengths: Any = None,
    bias: Any = None,
    softcap: float | None = None,
) -> AttentionProblem:
    """Describes a call of `cfp.attention`; arrays may be ShapeDtypeStructs.

    Raises:
      CfpError: arrays do not fit together, or ids and key lengths are given.
    """
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    fits = (
        all(len(shape) == 4 and min(shape) > 0 for shape in shapes)
        and shapes[1] == shapes[2]
        and shapes[0][0] == shapes[1][0]
        and shapes[0][3] == shapes[1][3]
        and shapes[0][2] % shapes[1][2] == 0
    )
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise CfpError(
            "Queries, keys and values do not fit together: "
            f"{', '.join(f'{x.dtype}{list(x.shape)}' for x in (q, k, v))}. Pass q "
            "[batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, "
            "head_dim], of one dtype, heads a multiple of kv_heads."
        )
    batch, queries, heads, head_dim = shapes[0]
    keys, kv_heads = shapes[1][1:3]
    left, right = window if isinstance(window, tuple) else (window, window)
    if causal:
        right = None  # The causal mask hides these keys.
    query_ids, key_ids = segments_of(segment_ids)
    for name, x, shape in (
        ("segment_ids=(of_queries, ...)", query_ids, (batch, queries)),
        ("segment_ids=(..., of_keys)", key_ids, (batch, keys)),
        ("key_lengths", key_lengths, (batch,)),
    ):
        if x is not None and (tuple(x.shape) != shape or x.dtype.kind not in "biu"):
            raise CfpError(
                f"{name} does not fit the queries and keys: {x.dtype}{list(x.shape)}. "
                f"Pass int32{list(shape)}."
            )
    if key_lengths is not None and query_ids is not None:
        raise CfpError(
            "Key lengths came with segment ids. Give padding a segment id of its own."
        )
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise CfpError(
            f"The bias is of {bias.dtype}. Pass floats that are added to the scores, "
            "such as jnp.where(mask, 0.0, -1e9)."
        )
    sizes = (1, batch), (1, heads), (queries,), (keys,)
    if bias is not None and (
        len(bias.shape) != 4 or not all(map(contains, sizes, bias.shape))
    ):
        raise CfpError(
            f"The bias of shape {list(bias.shape)} does not fit the scores. Pass "
            f"one of shape [1 or {batch}, 1 or {heads}, {queries}, {keys}], such as "
            "bias[None, None]."
        )
    return AttentionProblem(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=str(q.dtype),
        causal=causal,
        left=left,
        right=right,
        segments=query_ids is not None or key_lengths is not None,
        hides_keys=key_lengths is not None,
        bias=bias is not None,
        rounds_bias=bias is not None and bias.dtype != q.dtype,
        scale=1 / sqrt(head_dim) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
    )


def padded(x: Any, sizes: Mapping[int, int]) -> Any:
    """Appends zeros to an array along dims, {dim: new size}; None stays None."""
    if x is None:
        return None
    more = [(0, sizes.get(d, n) - n) for d, n in enumerate(x.shape)]
    return jnp.pad(x, more) if any(map(any, more)) else x


def finite_bias(bias: Array, dtype: Any) -> Array:
    """Casts a bias; values below half the dtype's minimum are raised to that half."""
    least = float(jnp.finfo(dtype).min) / 2
    return jnp.maximum(bias, jnp.asarray(least, bias.dtype)).astype(dtype)


def segments_of(segment_ids: Any) -> tuple[Any, Any]:
    """Returns (ids of queries, ids of keys) from one array, a pair or None."""
    return segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2


BATCH, HEADS = "batch", "heads"
ULYSSES, ALL_GATHER = "ulysses", "all_gather"
RING, ZIGZAG = "ring", "zigzag"

ROLES = (BATCH, HEADS, ULYSSES, ALL_GATHER, RING, ZIGZAG)  # docs/attention.md
_SPREAD = (ALL_GATHER, RING, ZIGZAG)

Given = str | Mapping[str, str] | None
AxisSizes = Mapping[str, int]  # {mesh axis: number of devices}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStrategy:
    """Roles of mesh axes in an attention; axes without a role hold copies.

    Attributes:
      roles: (axis, role) pairs, in the mesh's order.
      sizes: (axis, number of devices) for all axes of the mesh.
    """

    roles: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, given: Given, sizes: AxisSizes) -> AttentionStrategy:
        """Makes a strategy from {axis: role}, None (no roles), or the only axis's role.

        Raises:
          CfpError: an axis or role is unknown, or one role has no mesh of one axis.
        """
        if isinstance(given, str):
            given = dict.fromkeys(sizes, given) if len(sizes) == 1 else {"": given}
        given = given or {}
        unknown = [a for a in given if a not in sizes]
        if unknown or not set(given.values()) <= set(ROLES):
            raise CfpError(
                f"The strategy {given.get('', given)} does not fit the mesh "
                f"{dict(sizes)}. Pass mesh= and {{axis: role}}, with roles among "
                f"{', '.join(ROLES)}."
            )
        roles = tuple((axis, given[axis]) for axis in sizes if axis in given)
        return cls(roles=roles, sizes=tuple(sizes.items()))

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {role}" for axis, role in self.roles) or "none"

    def axes(self, *roles: str) -> tuple[str, ...]:
        return tuple(axis for axis, role in self.roles if role in roles)

    def parts(self, *roles: str) -> int:
        """Number of devices along all axes with these roles."""
        sizes = dict(self.sizes)
        return prod(sizes[axis] for axis in self.axes(*roles))

    @property
    def spread(self) -> str | None:
        """The axis along which keys are gathered or rotate in a ring, or None."""
        return next(iter(self.axes(*_SPREAD)), None)

    @property
    def zigzag(self) -> bool:
        return bool(self.axes(ZIGZAG))

    @property
    def ring_ranks(self) -> int:
        """Number of devices of the ring or gathering; 1 without."""
        return self.parts(*_SPREAD)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that shard arguments' tokens: ring or gathering first, then Ulysses."""
        return self.axes(*_SPREAD) + self.axes(ULYSSES)

    @property
    def token_multiple(self) -> int:
        """Divisor of the number of tokens, after padding."""
        return self.parts(*_SPREAD, ULYSSES) * (2 if self.zigzag else 1)

    def filled(self, tokens: int) -> int:
        """A number of tokens, rounded up to a multiple of `token_multiple`."""
        return -(-tokens // self.token_multiple) * self.token_multiple

    def spec(self) -> PartitionSpec:
        """The sharding of q, k, v and the output: [batch, tokens, heads, head_dim]."""
        return PartitionSpec(
            self.axes(BATCH) or None, self.token_axes or None, self.axes(HEADS) or None
        )

    def segment_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Specs of query ids, by batch and `spread`, and of key ids, by batch alone."""
        batch = self.axes(BATCH) or None
        return PartitionSpec(batch, self.axes(*_SPREAD) or None), PartitionSpec(batch)

    def bias_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Shards batch and heads, unless 1, of a bias [batch, heads, queries, keys]."""
        heads = self.axes(HEADS) + self.axes(ULYSSES)
        return PartitionSpec(
            (self.axes(BATCH) or None) if shape[0] > 1 else None,
            (heads or None) if shape[1] > 1 else None,
        )

    def refusal(self, problem: AttentionProblem, kernel: Kernel) -> str | None:
        """Reason against the strategy, or None; the kernel itself may still refuse."""
        for roles, name in ((_SPREAD, "ring or gathering"), ((ULYSSES,), "Ulysses")):
            if len(self.axes(*roles)) > 1:
                return f"{len(self.axes(*roles))} axes are for {name}, and one may be"
        batch, parts = problem.batch, self.parts(BATCH)
        if batch % parts:
            return f"{batch} sequences do not divide into {parts} parts"
        if self.token_axes and problem.causal and problem.queries != problem.keys:
            return "a causal mask over sharded tokens needs as many queries as keys"
        if self.spread is None:
            return None
        columns = "a bias or dense mask has a column for each key"
        if problem.bias:
            return f"{columns}, so keys cannot be sharded"
        return self._refused_by(kernel, problem)

    def _refused_by(self, kernel: Kernel, problem: AttentionProblem) -> str | None:
        if kernel.any_positions:
            return None
        least = self.token_multiple // self.parts(ULYSSES)
        sizes = [self.filled(n) // least for n in (problem.queries, problem.keys)]
        for unable, what in (
            ((problem.left, problem.right) != (None, None), "a window"),
            (problem.segments, "segments or key lengths"),
            (problem.padded_keys, "padded keys"),
            (any(n % 2 for n in sizes), "odd numbers of tokens"),
        ):
            if unable:
                return f"{kernel.name} cannot compute blocks of keys with {what}"
        return None
