"""Masks, biases and flags of random attentions: constants, positions and arguments.

Shapes use: batch, heads, queries, keys, "bnqk" for short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Draw = Callable[[np.random.Generator], Any]


class Scope:
    """Arguments of a program: drawn as they are asked for, or those of a layer.

    Attributes:
        asked: how many arguments were asked for.
        made: arguments by name, each with a dim of layers if there is a loop; "w" is
            the first letter of those with gradients.
    """

    def __init__(
        self,
        sizes: Any,
        seed: int = 0,
        given: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ):
        """Collects arguments, or takes those of this layer and of the one before.

        Args:
            sizes: has a number, batch, heads, queries, keys and the layers stacked.
        """
        self.sizes = sizes
        self.made: dict[str, np.ndarray] = {}
        self._random = np.random.default_rng([sizes.number, seed])
        self._given = given
        self.asked = 0

    def argument(self, draw: Draw, before: bool = False, learnt: bool = False) -> Any:
        name = f"{'w' if learnt else 'a'}{self.asked}"
        self.asked += 1
        if self._given is not None:
            return self._given[before][name]
        count = self.sizes.stacked
        drawn = [np.asarray(draw(self._random)) for _ in range(count or 1)]
        self.made[name] = np.stack(drawn) if count else drawn[0]
        return jnp.asarray(drawn[0])

    def array(
        self,
        dims: str,
        draw: Callable[[Any, tuple[int, ...]], Any],
        before: bool = False,
        learnt: bool = False,
    ) -> Any:
        """An argument of some of the dims "bnqk", as these four."""
        p = self.sizes
        sizes = {"b": p.batch, "n": p.heads, "q": p.queries, "k": p.keys}
        shape = tuple(sizes[x] for x in dims)
        x = self.argument(lambda r: draw(r, shape), before, learnt)
        return jnp.expand_dims(x, [i for i, d in enumerate("bnqk") if d not in dims])

    @property
    def away(self) -> np.ndarray:
        """Positions of queries less those of keys."""
        return np.arange(self.sizes.queries)[:, None] - np.arange(self.sizes.keys)

    @property
    def constants(self) -> np.random.Generator:
        return np.random.default_rng(self.sizes.number)


Mask = Callable[[Scope, bool], Any]


def _fixed(see: Callable[[Any, Any], Any]) -> Mask:
    """A constant, by positions of queries and keys."""

    def mask(s: Scope, before: bool) -> Any:
        q, k = np.arange(s.sizes.queries)[:, None], np.arange(s.sizes.keys)[None]
        return np.broadcast_to(see(q, k), (s.sizes.queries, s.sizes.keys))

    return mask


def _counted(dtype: Any, see: Callable[[Any, Any], Any]) -> Mask:
    """A mask that the step computes of positions in a dtype."""

    def mask(s: Scope, before: bool) -> Any:
        q, k = (jnp.arange(n).astype(dtype) for n in (s.sizes.queries, s.sizes.keys))
        return see(q[:, None], k[None])

    return mask


def _some(change: Callable[[Scope, np.ndarray, np.random.Generator], Any]) -> Mask:
    """A causal constant with exceptions."""
    return lambda s, before: change(s, s.away >= 0, s.constants)


def _registers(s: Scope, seen: np.ndarray, r: np.random.Generator) -> np.ndarray:
    return seen | np.isin(np.arange(s.sizes.keys), r.integers(0, s.sizes.keys, 2))


def _pair(s: Scope, seen: np.ndarray, r: np.random.Generator) -> np.ndarray:
    place = r.integers(0, s.sizes.queries), r.integers(0, s.sizes.keys)
    seen[place] = ~seen[place]
    return seen


def _jittered(s: Scope, seen: np.ndarray, r: np.random.Generator) -> np.ndarray:
    return seen & (s.away < r.integers(6, 9, (s.sizes.queries, 1)))


def _of_one(dim: int) -> Any:
    """A window in one head, or in one sequence."""

    def change(s: Scope, seen: np.ndarray, r: np.random.Generator) -> np.ndarray:
        count = (s.sizes.batch, s.sizes.heads)[dim]
        one = np.arange(count) == r.integers(0, count)
        one = one.reshape((-1, 1, 1, 1) if dim == 0 else (-1, 1, 1))
        return np.where(one, seen & (s.away < 7), seen)

    return change


def _padding(see: Callable[[Any, Any], Any]) -> Mask:
    """Keys by their positions and a random number for each sequence."""

    def draw(r: np.random.Generator, shape: tuple[int, ...]) -> Any:
        numbers = r.integers(0, shape[1], (shape[0], 1))
        return see(np.arange(shape[1]), numbers)

    return lambda s, before: s.array("bk", draw, before)


def _pairs(dims: str, dtype: Any = bool) -> Mask:
    draw = lambda r, shape: (r.random(shape) < 0.7).astype(dtype)  # noqa: E731
    return lambda s, before: s.array(dims, draw, before) > 0


def _lengths(s: Scope, before: bool) -> Any:
    p = s.sizes
    n = s.argument(lambda r: r.integers(0, p.keys + 1, p.batch), before)
    return (jnp.arange(p.keys) < n[:, None])[:, None, None]


def _ids(compare: Callable[[Any, Any], Any], two: bool, draw: Any) -> Mask:
    """A comparison of ids of queries with those of keys."""

    def mask(s: Scope, before: bool) -> Any:
        p = s.sizes
        shape = p.batch, max(p.queries, p.keys)
        q = k = s.argument(lambda r: draw(r, shape), before)
        if two:
            k = s.argument(lambda r: draw(r, shape))
        q, k = q[:, : p.queries, None], k[:, None, : p.keys]
        return compare(q, k)[:, None]

    return mask


def _sorted(r: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.sort(r.integers(0, 4, shape), axis=-1)


def _ends(s: Scope, before: bool) -> Any:
    """Documents, by the tokens that end them."""
    p = s.sizes
    shape = p.batch, max(p.queries, p.keys)
    ids = jnp.cumsum(s.argument(lambda r: r.random(shape) < 0.15, before), axis=1)
    return (ids[:, : p.queries, None] == ids[:, None, : p.keys])[:, None]


def _width(s: Scope, before: bool) -> Any:
    n = s.argument(lambda r: np.int32(r.integers(1, s.sizes.keys)), before)
    return (jnp.asarray(s.away) < n) & (s.away >= 0)


def _turns(s: Scope, before: bool) -> Any:
    """A causal mask that a loop of an argument's turns moves."""
    n = s.argument(lambda r: np.int32(r.integers(1, 5)), before)
    return lax.fori_loop(0, n, lambda i, x: x + 2, jnp.asarray(s.away)) >= 0


FIXED: dict[str, Mask] = {
    "all": _fixed(lambda q, k: True),
    "causal": _fixed(lambda q, k: q >= k),
    "window": _fixed(lambda q, k: (q >= k) & (q - k < 7)),
    "two sides": _fixed(lambda q, k: abs(q - k) < 5),
    "later": _fixed(lambda q, k: q <= k),
    "strict": _fixed(lambda q, k: q > k),
    "before": _fixed(lambda q, k: (q - k >= 3) & (q - k < 9)),
    "prefix": _fixed(lambda q, k: (q >= k) | (k < 5)),
    "sinks": _fixed(lambda q, k: (q >= k) & ((q - k < 7) | (k < 2))),
    "dilated": _fixed(lambda q, k: (q >= k) & ((q - k) % 3 == 0)),
    "blocks": _fixed(lambda q, k: q // 8 == k // 8),
    "few keys": _fixed(lambda q, k: k < k.size - 3),
    "random": _some(lambda s, seen, r: r.random(seen.shape) < 0.6),
    "registers": _some(_registers),
    "a pair": _some(_pair),
    "jittered": _some(
        lambda s, seen, r: seen & (s.away < r.integers(6, 9, (len(seen), 1)))
    ),
    "one head": _some(_of_one(1)),
    "one sequence": _some(_of_one(0)),
}
COUNTED: dict[str, Mask] = {
    "iota": _counted(jnp.int32, lambda q, k: q >= k),
    "iota, window": _counted(jnp.int32, lambda q, k: (q >= k) & (q - k < 6)),
    "iota, two sides": _counted(jnp.int32, lambda q, k: jnp.abs(q - k) < 6),
    "uint32": _counted(jnp.uint32, lambda q, k: q - k < 6),
    "uint32, sides": _counted(jnp.uint32, lambda q, k: q - k + 4 < 9),
    "uint8": _counted(jnp.uint8, lambda q, k: q * 9 >= k * 9),
    "int8": _counted(jnp.int8, lambda q, k: q * 5 - k * 5 >= 0),
    "int16": _counted(jnp.int16, lambda q, k: q * 999 >= k * 999),
    "bfloat16": _counted(jnp.bfloat16, lambda q, k: q + 250 >= k + 250),
    "float16": _counted(jnp.float16, lambda q, k: q * 3000 >= k * 3000),
    "e4m3": _counted(E4M3, lambda q, k: q >= k),
    "quotient": _counted(jnp.int32, lambda q, k: lax.div(q - k, jnp.int32(5)) == 0),
    "remainder": _counted(jnp.int32, lambda q, k: lax.rem(q - k, jnp.int32(5)) <= 0),
    "shift": _counted(jnp.int32, lambda q, k: q >> 3 == k >> 3),
    "xor": _counted(jnp.int32, lambda q, k: (q ^ k) & 2 == 0),
    "thirds": _counted(jnp.float32, lambda q, k: q / 3 >= k / 3),
    "selected": _counted(jnp.int32, lambda q, k: jnp.where(q % 2 == 0, k <= q, k < 9)),
}
ARGUMENTS: dict[str, Mask] = {
    "right padding": _padding(lambda k, n: k <= n),
    "left padding": _padding(lambda k, n: k >= n),
    "maybe none": _padding(lambda k, n: k < n),
    "a hole": _padding(lambda k, n: k != n),
    "lengths": _lengths,
    "segments": _ids(lambda q, k: q == k, False, _sorted),
    "two segments": _ids(lambda q, k: q == k, True, _sorted),
    "position ids": _ids(lambda q, k: q >= k, False, _sorted),
    "ends": _ends,
    "width": _width,
    "turns": _turns,
    "pairs qk": _pairs("qk"),
    "pairs bqk": _pairs("bqk"),
    "pairs nqk": _pairs("nqk"),
    "pairs bnqk": _pairs("bnqk"),
    "pairs q": _pairs("q"),
    "pairs bq": _pairs("bq"),
    "pairs bqk of int32": _pairs("bqk", np.int32),
    "pairs bqk of float32": _pairs("bqk", np.float32),
}
MASKS = FIXED | COUNTED | ARGUMENTS

Biased = Callable[[Scope, bool, bool], Any]


def _shaped(dims: str, kept: Callable[[Any], Any] = lambda x: x) -> Biased:
    """A bias that is an argument."""
    draw = lambda r, shape: r.normal(size=shape).astype(np.float32) * 2  # noqa: E731
    return lambda s, before, learnt: kept(s.array(dims, draw, before, learnt))


def _through(dtype: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def _slopes(s: Scope) -> np.ndarray:
    rates = 2.0 ** -(1.0 + np.arange(s.sizes.heads, dtype=np.float32))
    return rates[:, None, None]


def _table(s: Scope, before: bool, learnt: bool) -> Any:
    """A number for each bucket of distances and head."""
    shape = 16, s.sizes.heads
    table = s.argument(
        lambda r: r.normal(size=shape).astype(np.float32), before, learnt
    )
    away = abs(s.away)
    far = 8 + (np.log(np.maximum(away, 1) / 8) * 3).astype(int)
    return jnp.moveaxis(table[np.where(away < 8, away, np.minimum(far, 15))], -1, 0)


def _entries(s: Scope, before: bool, learnt: bool) -> Any:
    bias = np.zeros(s.away.shape, np.float32)
    bias[tuple(s.constants.integers(0, min(bias.shape), (2, 4)))] = 3.0
    return bias


def _bytes(s: Scope, before: bool, learnt: bool) -> Any:
    q, k = (jnp.arange(n, dtype=jnp.uint8) for n in s.away.shape)
    return (q[:, None] - k).astype(jnp.float32) * -0.01


SHAPES = ("nqk", "qk", "bnqk", "bqk", "bk", "n")
BIASES: dict[str, Biased] = {
    "distances": lambda s, *_: -_slopes(s) * np.abs(s.away).astype(np.float32),
    "distances of iotas": lambda s, *_: (
        -_slopes(s)
        * jnp.abs(jnp.arange(s.sizes.queries)[:, None] - jnp.arange(s.sizes.keys))
    ),
    "distances of uint8": _bytes,
    "places of keys": lambda s, *_: -0.1 * np.arange(s.sizes.keys, dtype=np.float32),
    "four entries": _entries,
    **{dims: _shaped(dims) for dims in SHAPES},
    "qk, e4m3": _shaped("qk", _through(E4M3)),
    "qk, bfloat16": _shaped("qk", _through(jnp.bfloat16)),
    "qk, turned": _shaped("qk", lambda b: b[..., ::-1, :]),
    "table": _table,
}

# ---------------------------------------------------------------------- what chooses

FLAGS = tuple(f"flag {dims}".strip() for dims in ("", "b", "n", "q", "bn", "k"))
CHOICES = (*FLAGS, "cond", "switch", "number", "data")


def chosen(s: Scope, choice: str, one: Any, other: Any, before: bool, q: Any) -> Any:
    """Chooses one of two values, by an argument or by what queries are."""
    if choice.startswith("flag"):
        dims = choice.removeprefix("flag").strip()
        flag = s.array(dims, lambda r, shape: np.asarray(r.random(shape) < 0.5), before)
        return jnp.where(flag if dims else flag.reshape(()), one, other)
    one, other = jnp.broadcast_arrays(one, other)
    if choice == "cond":
        flag = s.argument(lambda r: r.random() < 0.5, before)
        return lax.cond(flag, lambda: one, lambda: other)
    if choice == "switch":
        which = s.argument(lambda r: np.int32(r.integers(0, 3)), before)
        neutral = jnp.ones_like(one) if one.dtype == bool else jnp.zeros_like(one)
        return lax.switch(which, [lambda: one, lambda: other, lambda: neutral])
    if choice == "number":
        which = s.argument(lambda r: np.int32(r.integers(0, 4)), before)
        return jnp.where(which % 2 == 0, one, other)
    assert choice == "data", choice
    return jnp.where(q.ravel()[0] > 0, one, other)
