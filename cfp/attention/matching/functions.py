"""The functions that take the place of an attention that was found.

The oracle of proofs is attention by the textbook, with dims by their letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from cfp.attention.call import attention
from cfp.attention.kernels import KERNELS
from cfp.attention.matching.found import Letters
from cfp.attention.problem import (
    NO_MASK,
    Mask,
    bounds,
    finite_bias,
    segments_of,
    visible,
)
from cfp.attention.strategy import ROLES
from cfp.errors import PlanMismatch

Named = tuple[np.ndarray, list[str]]  # an array, and the letters of its dims


def real(letters: Sequence[str]) -> list[str]:
    """The letters of dims that are not of size 1."""
    return [letter for letter in letters if letter]


def squeezed(x: Any, letters: Sequence[str]) -> Any:
    """An array without the dims that have no letter."""
    return x.reshape([n for n, letter in zip(x.shape, letters, strict=True) if letter])


def turned(x: Any, have: Sequence[str], want: Sequence[str]) -> Any:
    """An array with its dims in another order; dims of size 1 are left out."""
    names = real(have)
    return squeezed(x, have).transpose([names.index(a) for a in real(want)])


def placed(x: Any, have: Sequence[str], want: Sequence[str]) -> Any:
    """An array with a dim for each of some letters, of size 1 for those it lacks."""
    x = turned(x, have, [a for a in want if a in have])
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if a in have else 1 for a in want])


ORDER = ("b0", "b1", "b2", "b3", "q0", "q1", "q2", "q3", "k", "d", "e")


def index(letter: str) -> int:
    """The number of a letter, as `numpy.einsum` takes it."""
    return ORDER.index(letter)


PADDING, SEGMENTS, MASK, BIAS = "padding", "segments", "mask", "bias"


@dataclass(frozen=True, slots=True)
class SideMeaning:
    """The effect of a mask or bias that enters.

    Attributes:
        kind: PADDING hides keys from all queries, SEGMENTS those of other ids than the
            query's, MASK is for pairs of queries and keys, BIAS is added to the scores.
        above: whether keys are seen where what is read is above the level, or below.
        level: between what is read where a key is seen and where it is not.
        letters: what the dims of what a mask is made of run over: a key is seen if it
            is along any of the dims that are read besides.
        same: whether queries and keys have the same ids.
        factor: what a bias is multiplied with.
    """

    kind: str
    above: bool = True
    level: float = 0.5
    letters: Letters = ()
    same: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Meaning:
    """The attention that was inferred from ops.

    Attributes:
        tokens: the letter of the queries; the other "q" letters are groups of heads.
        scale, softcap: as in `cfp.attention`.
        causal, left, right: the mask by position.
        sides: what enters besides.
        fills: whether a query that sees no key has the mean of all values, as where all
            its scores are made the same large negative number; otherwise it has zeros,
            where the step may have anything.
        rounds_bias: whether the dtype of queries would round what is added to scores.
    """

    tokens: str
    scale: float
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    sides: tuple[SideMeaning, ...] = ()
    fills: bool = False
    rounds_bias: bool = False

    @property
    def by_position(self) -> Mask:
        """The mask by position."""
        return replace(NO_MASK, causal=self.causal, left=self.left, right=self.right)

    @property
    def same_segments(self) -> bool:
        """Tell whether queries and keys have the same segment ids, and no padding."""
        return len(self.sides) == 1 and self.sides[0].same

    @property
    def is_dense(self) -> bool:
        """Tell whether what enters is as large as scores, or as rows of them."""
        return any(side.kind in (MASK, BIAS) for side in self.sides)


class Reference:
    """An attention that means something, of some arrays."""

    def __init__(
        self,
        meaning: Meaning,
        given: Mapping[str, Named],
        at: Mapping[str, np.ndarray],
        biases: Sequence[Named] = (),
        masks: Sequence[Named] = (),
        ids: Sequence[tuple[Named, Named]] = (),
    ) -> None:
        """Takes what it is computed of.

        Args:
            given: "q", "k", "v", and "dout" for gradients.
            at: for each letter the coordinates that there are.
            masks: true where a key is seen.
            ids: of queries and of keys, equal where a key is seen.
        """
        self.meaning, self.given, self.at = meaning, given, at
        self.biases, self.masks, self.ids = biases, masks, ids
        names = {x for _, letters in given.values() for x in letters}
        self.rows = [x for x in ORDER if x in names and x not in ("k", "d", "e")]
        self.pairs = [*self.rows, *(["k"] if "k" in names else [])]

    def _sum(self, *terms: Named, out: list[str]) -> np.ndarray:
        args: list = []
        for x, letters in terms:
            args += [x, [*map(index, letters)]]
        return np.einsum(*args, [*map(index, out)], optimize=True)

    def _placed(self, named: Named) -> np.ndarray:
        """An array with a dim for each of those of the scores."""
        return placed(*named, self.pairs)

    def visible(self) -> np.ndarray:
        """Returns which keys each query sees."""
        seen, ends = np.ones([1] * len(self.pairs), bool), (self.meaning.tokens, "k")
        if {*ends} <= {*self.pairs}:
            q, k = (self._placed((self.at[a], [a])) for a in ends)
            for allowed in bounds(self.meaning.by_position, q, k):
                seen = seen & allowed
        for mask in self.masks:
            seen = seen & self._placed(mask)
        for queries, keys in self.ids:
            seen = seen & (self._placed(queries) == self._placed(keys))
        return seen

    def results(self) -> dict[str, Named]:
        """Output and gradients, each with the letters of its dims."""
        meaning, given = self.meaning, self.given
        q, k, v = given["q"], given["k"], given["v"]
        raw = meaning.scale * self._sum(q, k, out=self.pairs)
        slope = np.full((), meaning.scale)
        x = raw
        if meaning.softcap is not None:
            x = meaning.softcap * np.tanh(raw / meaning.softcap)
            slope = meaning.scale * (1 - np.tanh(raw / meaning.softcap) ** 2)
        for bias in self.biases:
            x = x + self._placed(bias)
        seen = np.broadcast_to(self.visible(), x.shape)
        empty = ~seen.any(axis=-1, keepdims=True) & meaning.fills
        x = np.where(empty, 0.0, np.where(seen, x, -np.inf))
        weights = np.exp(x - x.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        p = (weights, self.pairs)
        out = [*self.rows, "e"]
        found = {"out": (self._sum(p, v, out=out), out)}
        if "dout" not in given:
            return found
        dout = given["dout"]
        dp = self._sum(dout, v, out=self.pairs)
        dx = weights * (dp - (weights * dp).sum(axis=-1, keepdims=True))
        ds = (np.where(empty, 0.0, dx * slope), self.pairs)
        found["dv"] = (self._sum(p, dout, out=v[1]), v[1])
        found["dq"] = (self._sum(ds, k, out=q[1]), q[1])
        found["dk"] = (self._sum(ds, q, out=k[1]), k[1])
        return found


NAME = "attention"
_MASKED = -1e30
_NO_SEGMENT = -(2**31)  # The id of keys that are hidden from all queries.
Shaped = tuple[tuple[int, ...], str, Letters]  # shape, dtype, and letters


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute an attention: the kernel, and (axis, role) pairs."""

    implementation: str
    roles: tuple[tuple[str, str], ...] = ()

    @property
    def how(self) -> tuple[str, ...]:
        """As plans record it: the implementation, then ``axis=role``."""
        return (self.implementation, *(f"{axis}={role}" for axis, role in self.roles))

    @classmethod
    def read(cls, how: Sequence[str]) -> Way:
        """From what plans record.

        Raises:
            PlanMismatch: it is something else.
        """
        implementation, *words = how
        roles = tuple((w.rpartition("=")[0], w.rpartition("=")[2]) for w in words)
        if implementation not in KERNELS or any(role not in ROLES for _, role in roles):
            raise PlanMismatch(f"cfp computes no attention by {', '.join(how)}.")
        return cls(implementation, roles)

    def __str__(self) -> str:
        spread = [role for _, role in self.roles if role in ("ring", "zigzag")]
        return " ".join((self.implementation, *spread))


@dataclass(frozen=True, slots=True)
class PassShapes:
    """A pass of an attention, by what it reads and makes.

    Attributes:
        reads: queries, keys, values, masks and biases; of a backward pass the gradient
            of the output last.
        makes: the output, or the gradients.
        out: the output that its function computes.
    """

    is_backward: bool
    reads: tuple[Shaped, ...]
    makes: tuple[Shaped, ...]
    out: Shaped

    @property
    def sides(self) -> tuple[Shaped, ...]:
        """The masks and biases."""
        return self.reads[3:-1] if self.is_backward else self.reads[3:]


@dataclass(frozen=True, slots=True)
class AttentionFunctions:
    """The functions of a replacement, see `cfp.program.replace`.

    Attributes:
        meaning, way: what is computed, and how.
        heads: the letter that keys have their heads by, or "".
        passes: one for each stage.
        precision: of matrix products, as JAX names it.
        jax_version: kernels and their times may depend on it.
    """

    meaning: Meaning
    way: Way
    heads: str
    passes: tuple[PassShapes, ...]
    precision: str = "default"
    jax_version: str = jax.__version__

    @property
    def how(self) -> tuple[str, ...]:
        """See `Way.how`."""
        return self.way.how

    def stages(self, mesh: Mesh) -> Sequence[Any]:
        """A function for each stage, see `cfp.program.replace`."""

        def stage(one: PassShapes) -> Any:
            compute = self._compute(mesh, one)

            def run(*given: Array) -> list[Array]:
                with jax.default_matmul_precision(self.precision):
                    if one.is_backward:
                        return _backward(compute, one, given)
                    return _forward(compute, one, given, len(self.passes) > 1)

            return run

        return [stage(one) for one in self.passes]

    def _compute(self, mesh: Mesh, one: PassShapes) -> Any:
        """The attention of what a pass reads, in the dims that it reads."""
        q_letters, k_letters, v_letters = (letters for _, _, letters in one.reads[:3])
        out_shape, _, out_letters = one.out

        def compute(q: Array, k: Array, v: Array, *rest: Array) -> Any:
            sizes = self._sizes(one)
            dtype = jnp.result_type(q, k, v)
            q4 = _spread(q.astype(dtype), q_letters, self._order(sizes, "q"), sizes)
            k4 = _spread(k.astype(dtype), k_letters, self._order(sizes, "k"), sizes)
            order = self._order(sizes, "k", "e")
            v4 = _spread(v.astype(dtype), v_letters, order, sizes)
            more = self._more(one.sides, rest, sizes)
            out = _attend(q4, k4, v4, mesh, self.way, self.meaning, more)
            if self.meaning.fills:
                out = _filled(out, v4, self.meaning, more)
            names = [x for group in self._order(sizes, "q", "e") for x in group]
            out = out.reshape([sizes[name] for name in names])
            return turned(out, tuple(names), out_letters).reshape(out_shape)

        return compute

    def _sizes(self, one: PassShapes) -> dict[str, int]:
        found: dict[str, int] = {}
        for shape, _, letters in (*one.reads, *one.makes):
            found.update((x, n) for x, n in zip(letters, shape, strict=True) if x)
        found.setdefault("k", 1)
        found.setdefault(self.meaning.tokens, 1)
        return found

    def _order(
        self, sizes: Mapping[str, int], of: str, features: str = "d"
    ) -> list[list[str]]:
        """The letters of [batch, tokens, heads, head_dim], each dim by its parts.

        Args:
            of: "q" for queries, "k" for keys and values.
        """
        batch = sorted(x for x in sizes if x[0] == "b" and x != self.heads)
        heads = [self.heads] if self.heads else []
        if of == "k":
            return [batch, ["k"], heads, [features]]
        tokens = self.meaning.tokens
        groups = sorted(x for x in sizes if x[0] == "q" and x != tokens)
        return [batch, [tokens], [*heads, *groups], [features]]

    def _more(
        self, sides: Sequence[Shaped], rest: Sequence[Array], sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """Segment ids or a bias, of the masks and biases that enter."""
        if not sides:
            return {}
        read = zip(rest, [letters for _, _, letters in sides], strict=True)
        given = [
            (side, [*islice(read, 2 if side.kind == SEGMENTS else 1)])
            for side in self.meaning.sides
        ]
        order = self._order(sizes, "q")
        if self.meaning.is_dense:
            return {"bias": _bias(given, order, sizes)}
        batch, [tokens], *_ = order
        groups = [batch, [tokens]], [batch, ["k"]]
        queries, keys = (
            jnp.zeros([product(sizes, one) for one in own], jnp.int32) for own in groups
        )
        for side, parts in given:
            if side.kind == SEGMENTS:
                queries, keys = (
                    _spread(x.astype(jnp.int32), names, own, sizes)
                    for (x, names), own in zip(parts, groups, strict=True)
                )
        if self.meaning.same_segments:
            return {"segment_ids": queries}
        for side, parts in given:
            if side.kind == PADDING:
                shown = _spread(*_seen(side, *parts[0]), groups[1], sizes)
                keys = jnp.where(shown, keys, _NO_SEGMENT)
        return {"segment_ids": (queries, keys)}


def _seen(side: SideMeaning, x: Array, letters: Letters) -> tuple[Array, Letters]:
    """A mask that is true where a key is seen, in the dims that it is made of."""
    if x.dtype == jnp.bool_:
        x = x if side.above else ~x
    else:
        level = jnp.asarray(side.level, x.dtype)
        x = x > level if side.above else x < level
    more = tuple(d for d, a in enumerate(letters) if a and a not in side.letters)
    left = tuple(a for d, a in enumerate(letters) if d not in more)
    return x.any(axis=more), left


def _bias(
    given: Sequence[tuple[SideMeaning, Sequence[tuple[Array, Letters]]]],
    order: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
) -> Array:
    """[1 or batch, 1 or heads, query, key], of all masks and biases that enter."""
    batch, [tokens], heads, _ = order
    read = {a for _, parts in given for _, letters in parts for a in letters}
    groups = [
        [*batch] if read & {*batch} else [],
        [*heads] if read & {*heads} else [],
        [tokens],
        ["k"],
    ]

    def whole(x: Array, letters: Letters) -> Array:
        return _spread(x, letters, groups, sizes)

    total: Any = 0.0
    dtypes = [parts[0][0].dtype for side, parts in given if side.kind == BIAS]
    dtype = jnp.result_type(jnp.float32, *dtypes)
    for side, parts in given:
        if side.kind == BIAS:
            x, letters = parts[0]
            total = total + side.factor * whole(x.astype(dtype), letters)
    for side, parts in given:
        if side.kind == SEGMENTS:
            (queries, q_letters), (keys, k_letters) = parts
            shown = whole(queries, q_letters) == whole(keys, k_letters)
        elif side.kind in (MASK, PADDING):
            shown = whole(*_seen(side, *parts[0]))
        else:
            continue
        total = jnp.where(shown, total, _MASKED)
    return total


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
    dout = turned(dout, one.reads[-1][2], one.out[2]).reshape(result.shape)
    grads = pull(dout.astype(result.dtype))
    return [
        turned(grad, read[2], made[2]).reshape(made[0]).astype(jnp.dtype(made[1]))
        for grad, read, made in zip(grads, one.reads, one.makes, strict=False)
    ]


def _attend(q, k, v, mesh: Mesh, way: Way, meaning: Meaning, more: Mapping) -> Any:
    window = None
    if meaning.left is not None or meaning.right is not None:
        window = (meaning.left, meaning.right)

    def compute(q: Array, k: Array, v: Array, **rest: Any) -> Array:
        bias = rest.get("bias")
        if bias is not None and bias.dtype != q.dtype and not meaning.rounds_bias:
            rest["bias"] = finite_bias(bias, q.dtype)
        return attention(
            q,
            k,
            v,
            causal=meaning.causal,
            window=window,
            softcap=meaning.softcap,
            scale=meaning.scale,
            implementation=way.implementation,
            **rest,
        )

    if way.roles:
        return compute(q, k, v, mesh=mesh, strategy=dict(way.roles), **more)
    whole = PartitionSpec()
    return jax.shard_map(
        lambda q, k, v, more: compute(q, k, v, **more),
        mesh=mesh,
        in_specs=(whole, whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(q, k, v, dict(more))


def _filled(out: Array, v: Array, meaning: Meaning, more: Mapping[str, Any]) -> Array:
    """The output, with the mean of all values for queries that see no key."""
    queries, keys = out.shape[1], v.shape[1]
    query_ids, key_ids = segments_of(more.get("segment_ids"))
    mask = meaning.by_position
    mask = replace(mask, query_segments=query_ids, key_segments=key_ids)
    allowed = visible(mask, queries, keys)
    if (bias := more.get("bias")) is not None:
        shown = bias > _MASKED / 2
        allowed = shown if allowed is None else shown & allowed
    assert allowed is not None, "a mask enters"
    seen = jnp.swapaxes(allowed.any(axis=-1), 1, 2)[..., None]
    mean = jnp.mean(v, axis=1, keepdims=True, dtype=jnp.float32).astype(out.dtype)
    mean = jnp.repeat(mean, out.shape[2] // v.shape[2], axis=2)
    return jnp.where(seen, out, mean)


def _cast(arrays: Sequence[Array], made: Sequence[Shaped]) -> list[Array]:
    return [
        x.reshape(shape).astype(jnp.dtype(dtype))
        for x, (shape, dtype, _) in zip(arrays, made, strict=True)
    ]


def product(sizes: Mapping[str, int], names: Sequence[str]) -> int:
    """Returns the product of some letters' sizes."""
    return prod(sizes[name] for name in names)


def _spread(
    x: Array,
    letters: Letters,
    groups: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
) -> Array:
    """An array with a dim for each group of letters, repeated along those it lacks."""
    wanted = [a for group in groups for a in group]
    x = placed(x, letters, wanted)
    x = jnp.broadcast_to(x, [sizes[a] for a in wanted])
    return x.reshape([product(sizes, group) for group in groups])
