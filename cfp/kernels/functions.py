"""Functions that replace a proved attention by kernels, with masks and biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from operator import and_, or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from cfp.errors import PlanMismatch
from cfp.kernels.call import attention
from cfp.kernels.problem import NO_MASK, ROLES, finite_bias, padded, visible
from cfp.kernels.registry import KERNELS

# Names of a tensor's dims, see `core.ORDER`; "" is a dim of size 1.
Letters = tuple[str, ...]


def placed(x: Any, have: Sequence[str], want: Sequence[str]) -> Any:
    """Transposes dims named `have` to the order `want`, with size 1 for new names."""
    names = [a for a in have if a]
    x = x.reshape([n for n, a in zip(x.shape, have, strict=True) if a])
    x = x.transpose([names.index(a) for a in want if a in names])
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if a in names else 1 for a in want])


# Kinds of sides (inputs of an attention besides q, k, v): numbers of keys of sequences;
# states of a mask; addends of scores.
LENGTHS, MASK, BIAS = "lengths", "mask", "bias"
# Outputs of a query that sees no key: the mean of all values, or NaN.
MEAN, NAN = "mean", "nan"


@dataclass(frozen=True, slots=True)
class SideMeaning:
    """A mask, bias or lengths that a kernel reads.

    Attributes:
        letters: names of the dims along which it may vary.
        factor: factor of a bias.
    """

    kind: str
    letters: Letters = ()
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Meaning:
    """The attention that a pass computes.

    Attributes:
        tokens: letter of the queries; other "q" letters are groups of heads.
        heads: letter of the key heads, or "".
        scale, causal: as in `cfp.attention`.
        left: number of visible keys before a query; None has no bound.
        sides: inputs besides q, k and v.
        visible: combinations of the masks' states that show a key.
        by_key: True if all sides, if any, hide keys from all queries and heads alike.
        empty: MEAN or NAN, the output of a query without keys; "" if each sees one.
        passes_hidden: True if gradients of a query without keys pass to all scores.
    """

    tokens: str
    heads: str
    scale: float
    causal: bool = False
    left: int | None = None
    sides: tuple[SideMeaning, ...] = ()
    visible: tuple[tuple[float, ...], ...] = ()
    by_key: bool = True
    empty: str = ""
    passes_hidden: bool = False


NAME = "attention"
_MASKED = -1e30
Shaped = tuple[tuple[int, ...], str, Letters]  # shape, dtype, and letters


@dataclass(frozen=True, slots=True)
class Way:
    """A kernel's name, and roles of mesh axes as (axis, role) pairs."""

    implementation: str
    roles: tuple[tuple[str, str], ...] = ()

    @property
    def how(self) -> tuple[str, ...]:
        """Words in plans: the implementation, then ``axis=role`` for each role."""
        return (self.implementation, *(f"{axis}={role}" for axis, role in self.roles))

    @classmethod
    def read(cls, how: Sequence[str]) -> Way:
        """Reads words of `how`; raises PlanMismatch for an unknown kernel or role."""
        implementation, *words = how
        roles = tuple((w.rpartition("=")[0], w.rpartition("=")[2]) for w in words)
        if implementation not in KERNELS or any(role not in ROLES for _, role in roles):
            raise PlanMismatch(
                f"This cfp does not know attention by {', '.join(how)}. Plan again."
            )
        return cls(implementation, roles)


@dataclass(frozen=True, slots=True)
class PassShapes:
    """Shapes, dtypes and letters of dims of a pass's operands and results.

    Attributes:
        reads: q, k, v and sides; in a backward pass then the output's gradient.
        makes: the output; in a backward pass dq, dk and dv.
        out: the output of the forward computation.
    """

    is_backward: bool
    reads: tuple[Shaped, ...]
    makes: tuple[Shaped, ...]
    out: Shaped


@dataclass(frozen=True, slots=True)
class AttentionFunctions:
    """Functions of a replacement, see `cfp.program.replace`.

    Attributes:
        meaning, way: the attention, and its kernel with the roles of axes.
        sizes: (letter, size) pairs.
        passes: shapes for each stage.
        dtype: name of the dtype to compute in.
        precision: precision of matrix products, by JAX's name.
        jax_version: part of the repr, under which measurements are stored.
    """

    meaning: Meaning
    way: Way
    sizes: tuple[tuple[str, int], ...]
    passes: tuple[PassShapes, ...]
    dtype: str
    precision: str = "default"
    jax_version: str = jax.__version__

    @property
    def how(self) -> tuple[str, ...]:
        return self.way.how

    def stages(self, mesh: Mesh) -> Sequence[Any]:
        """One function for each stage, see `cfp.program.replace`."""

        def stage(one: PassShapes) -> Any:
            compute = self._compute(mesh, one)

            def run(*reads: Array) -> list[Array]:
                # Both passes compute in one dtype, or residuals would not fit.
                given = [*(x.astype(self.dtype) for x in reads[:3]), *reads[3:]]
                with jax.default_matmul_precision(self.precision):
                    if one.is_backward:
                        return _backward(compute, one, given)
                    return _forward(compute, one, given, len(self.passes) > 1)

            return run

        return [stage(one) for one in self.passes]

    def _compute(self, mesh: Mesh, one: PassShapes) -> Any:
        """Makes a function of q, k, v, sides; its output has the program's dims."""

        def compute(q: Array, k: Array, v: Array, *rest: Array) -> Any:
            sizes, orders = dict(self.sizes), self._orders
            reads = zip((q, k, v), one.reads, "qkv", strict=False)
            q4, k4, v4 = (
                _spread(x, letters, orders[name], sizes)
                for x, (_, _, letters), name in reads
            )
            own, wide = v4.shape[-1], max(q4.shape[-1], v4.shape[-1])
            # Zeros add nothing to products.
            q4, k4, v4 = (padded(x, {3: wide}) for x in (q4, k4, v4))
            sides = self._sides(one.reads[3:], rest, sizes)
            out = _attend(q4, k4, v4, mesh, self.way, self.meaning, sides)
            if self.meaning.empty:
                out = _filled(out, (q4, k4, v4), self.meaning, sides)
            out = out[..., :own]
            names = [x for group in orders["out"] for x in group]
            out = out.reshape([sizes[name] for name in names])
            return placed(out, names, one.out[2])

        return compute

    @property
    def _orders(self) -> dict[str, list[list[str]]]:
        """Letters of each dim, [batch, tokens, heads, head_dim], of q, k, v and out."""
        meaning, letters = self.meaning, sorted(name for name, _ in self.sizes)
        batch = [x for x in letters if x[0] == "b" and x != meaning.heads]
        groups = [x for x in letters if x[0] == "q" and x != meaning.tokens]
        kv_heads = [meaning.heads] if meaning.heads else []
        of_queries = [batch, [meaning.tokens], [*kv_heads, *groups]]
        of_keys = [batch, ["k"], kv_heads]
        return {
            "q": [*of_queries, ["d"]],
            "k": [*of_keys, ["d"]],
            "v": [*of_keys, ["e"]],
            "out": [*of_queries, ["e"]],
        }

    def _sides(
        self, shapes: Sequence[Shaped], rest: Sequence[Array], sizes: Mapping[str, int]
    ) -> dict[str, Array]:
        """Given sides by kind, in kernels' dims; masks as one, True if visible."""
        meaning = self.meaning
        batch, tokens, heads, _ = self._orders["q"]
        own = {a for side in meaning.sides for a in side.letters}
        dense = [x if own & {*x} else [] for x in (batch, heads)]
        dense += [[] if meaning.by_key else tokens, ["k"]]
        found: dict[str, Array] = {}
        masks: list[Array] = []
        for side, x, (_, _, letters) in zip(meaning.sides, rest, shapes, strict=False):
            for d, letter in enumerate(letters):
                if letter not in side.letters:  # The side is constant along this dim.
                    x = jax.lax.slice_in_dim(x, 0, 1, axis=d)
            kept = tuple(a if a in side.letters else "" for a in letters)
            groups = [batch] if side.kind == LENGTHS else dense
            x = _spread(x, kept, groups, sizes)
            masks += [x] if side.kind == MASK else []
            is_bias = side.kind == BIAS
            found[side.kind] = (side.factor * x).astype(jnp.float32) if is_bias else x
        if masks:
            found[MASK] = shown(masks, meaning.visible)
        return found


def common(dtypes: Iterable[str]) -> str:
    """Name of a dtype that holds all: float32 if they differ, however JAX promotes."""
    first, *others = {*dtypes}
    return "float32" if others else first


def shown(masks: Sequence[Any], visible: Iterable[tuple[float, ...]]) -> Any:
    """Boolean array, True where masks' states are in `visible`; neither is empty."""

    def has(x: Any, state: float) -> Any:
        if x.dtype == bool:
            return x if state else ~x
        return x == x.dtype.type(state)

    each = [reduce(and_, map(has, masks, states)) for states in visible]
    return reduce(or_, each)


def _forward(
    compute: Any, one: PassShapes, reads: Sequence[Array], keeps_residuals: bool
) -> list[Array]:
    if not keeps_residuals:
        return _cast([compute(*reads)], one.makes)
    made, pull = jax.vjp(compute, *reads)
    return [*_cast([made], one.makes), *tree_leaves(pull)]


def _backward(compute: Any, one: PassShapes, given: Sequence[Array]) -> list[Array]:
    count = len(one.reads)
    *inputs, dout = given[:count]
    kept = given[count:]

    def pulled(*reads: Array) -> Any:
        return jax.vjp(compute, *reads)[1]

    if kept:
        shapes = jax.eval_shape(pulled, *inputs)
        pull = tree_unflatten(tree_structure(shapes), kept)
    else:
        pull = pulled(*inputs)
    result = jax.eval_shape(compute, *inputs)
    dout = placed(dout, one.reads[-1][2], one.out[2])
    grads = pull(dout.astype(result.dtype))
    return [
        placed(grad, read[2], made[2]).astype(jnp.dtype(made[1]))
        for grad, read, made in zip(grads, one.reads, one.makes, strict=False)
    ]


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mesh: Mesh,
    way: Way,
    meaning: Meaning,
    sides: Mapping[str, Array],
) -> Array:
    window = None if meaning.left is None else (meaning.left, 0)
    more: dict[str, Any] = {}
    mask, bias = sides.get(MASK), sides.get(BIAS)
    if LENGTHS in sides:
        # At least one key: `_filled` replaces results of sequences without keys.
        more["key_lengths"] = jnp.clip(sides[LENGTHS], 1, k.shape[1])
    takes_ids = meaning.by_key and KERNELS[way.implementation].any_positions
    if mask is not None and takes_ids:
        ids = jnp.zeros(q.shape[:2], jnp.int32)
        is_key = jnp.broadcast_to(mask[:, 0, 0], k.shape[:2])
        more["segment_ids"] = ids, is_key.astype(jnp.int32) - 1
    elif mask is not None:
        bias = jnp.where(mask, 0.0 if bias is None else bias, _MASKED)
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], k.shape[1]))
    if bias is not None:
        more["bias"] = finite_bias(bias, q.dtype)

    how = {"causal": meaning.causal, "window": window, "scale": meaning.scale}
    compute = partial(attention, implementation=way.implementation, **how)
    if way.roles:
        return compute(q, k, v, mesh=mesh, strategy=dict(way.roles), **more)
    return jax.shard_map(
        lambda q, k, v, more: compute(q, k, v, **more),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(q, k, v, more)


def _filled(
    out: Array,
    read: tuple[Array, Array, Array],
    meaning: Meaning,
    sides: Mapping[str, Array],
) -> Array:
    """Replaces the output of queries that see no key by the program's output.

    This is the mean of all values, or NaN if the program hides keys by infinity. With
    `passes_hidden`, gradients pass to the scores as in a softmax of equal scores.
    """
    q, k, v = read
    group = q.shape[2] // v.shape[2]
    by_place = replace(NO_MASK, causal=meaning.causal, left=meaning.left)
    if LENGTHS in sides:
        seen = (sides[LENGTHS] > 0)[:, None, None, None]
    else:
        allowed = visible(by_place, q.shape[1], k.shape[1])
        mask = sides[MASK] if allowed is None else sides[MASK] & allowed
        seen = jnp.swapaxes(mask.any(axis=-1), 1, 2)[..., None]
    wide = v.astype(jnp.float32)
    fill = jnp.mean(wide, axis=1, keepdims=True)
    away = jax.lax.stop_gradient(wide - fill)
    fill = jnp.repeat(fill, group, axis=2)
    if meaning.passes_hidden:
        both = jnp.einsum("bkhd,bkhe->bhde", k.astype(jnp.float32), away) / k.shape[1]
        both = jnp.repeat(both, group, axis=1) * meaning.scale
        more = jnp.einsum("bqhd,bhde->bqhe", q.astype(jnp.float32), both)
        fill = fill + more - jax.lax.stop_gradient(more)
    if meaning.empty == NAN:
        fill = fill * jnp.where(seen.all(axis=1, keepdims=True), 1.0, jnp.nan)
    return jnp.where(seen, out, fill.astype(out.dtype))


def _cast(arrays: Sequence[Array], made: Sequence[Shaped]) -> list[Array]:
    return [
        x.reshape(shape).astype(jnp.dtype(dtype))
        for x, (shape, dtype, _) in zip(arrays, made, strict=True)
    ]


def _spread(
    x: Array,
    letters: Letters,
    groups: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
) -> Array:
    """Broadcasts an array to the letters of `groups`; each group becomes one dim."""
    wanted = [a for group in groups for a in group]
    x = placed(x, letters, wanted)
    x = jnp.broadcast_to(x, [sizes[a] for a in wanted])
    return x.reshape([prod(sizes[a] for a in group) for group in groups])
