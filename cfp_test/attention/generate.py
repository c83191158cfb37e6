"""Random steps with attention: what kernels make of them beside what is written.

A program is drawn from a seed: masks of positions, arguments, flags and branches;
biases, scales, dtypes and loops. It is an attention in other words, or changed in one
place so that it may be none. In both cases a kernel may take it if the results are
equal, or leave it::

    python -m cfp_test.attention.generate --count 2000 --seed 0 --jobs 2

Shapes use: batch, heads, queries, keys; layers where there is a loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cfp_test.attention.agreement import TOLERANCE, compare
from cfp_test.support.checking import make_mesh

LEAST = float(jnp.finfo(jnp.float32).min)
LAYERS = 3
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Term:
    """One of the masks.

    Attributes:
        kind: name of a mask in `MASKS`.
        how: ``and`` or ``or`` with the next mask; or how it hides scores.
        number: what scores are hidden by.
        choice: what chooses between it and the other: "" for nothing.
        other: name of another mask.
        before: whether arguments are those of the layer before, in a sliced loop.
    """

    kind: str
    how: str = "where"
    number: float = -1e9
    choice: str = ""
    other: str = "causal"
    before: bool = False


@dataclass(frozen=True)
class Bias:
    """Something that is added to the scores.

    Attributes:
        kind: name of a bias in `BIASES`.
        choice: what it depends on: "" for nothing.
        learnt: whether it has a gradient.
        before: as of `Term`.
    """

    kind: str
    choice: str = ""
    learnt: bool = False
    before: bool = False


@dataclass(frozen=True)
class Program:
    """A step with attention; each default is the plainest."""

    number: int = 0
    batch: int = 2
    queries: int = 32
    keys: int = 32
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    layout: str = "bqnd"
    scaled: str = "scores"
    weigh: str = "softmax"
    cap: float = 0.0
    masks: tuple[Term, ...] = ()
    biases: tuple[Bias, ...] = ()
    biases_last: bool = False
    loop: str = ""
    trains: bool = True
    changed: str = ""
    devices: int = 1

    @property
    def is_sliced(self) -> bool:
        return self.loop.startswith("slices")

    @property
    def stacked(self) -> int:
        """The number of layers' arguments."""
        return LAYERS + 1 if self.is_sliced else LAYERS if self.loop else 0


# ------------------------------------------------------------------- masks and biases


class Scope:
    """Arguments of a program as they are asked for, and their values in a layer.

    Attributes:
        program: what is built.
        random: draws the arguments.
        made: arguments by name, each with a dim of layers if there is a loop.
        given: values of a layer, by name, and of the one before it; None while the
            arguments are collected.
    """

    def __init__(
        self,
        program: Program,
        seed: int,
        given: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ):
        self.program = program
        self.random = np.random.default_rng([program.number, seed])
        self.made: dict[str, np.ndarray] = {}
        self.given = given
        self.asked = 0

    def argument(
        self,
        draw: Callable[[np.random.Generator], Any],
        before: bool,
        learnt: bool = False,
    ) -> Any:
        """An argument that a function draws for each layer."""
        name = f"{'w' if learnt else 'a'}{self.asked}"
        self.asked += 1
        if self.given is not None:
            return self.given[before][name]
        count = self.program.stacked
        drawn = [np.asarray(draw(self.random)) for _ in range(count or 1)]
        self.made[name] = np.stack(drawn) if count else drawn[0]
        return jnp.asarray(drawn[0])


def _away(p: Program) -> np.ndarray:
    return np.arange(p.queries)[:, None] - np.arange(p.keys)


def _constant(draw: Callable[[Program, np.random.Generator], np.ndarray]) -> Any:
    """A mask that is a constant of the step."""
    return lambda s, before: draw(s.program, np.random.default_rng(s.program.number))


def _positions(
    dtype: Any, see: Callable[[Any, Any], Any], compute: bool = True
) -> Callable[[Scope, bool], Any]:
    """A mask that the step makes of positions in a dtype."""

    def mask(s: Scope, before: bool) -> Any:
        q, k = jnp.arange(s.program.queries), jnp.arange(s.program.keys)
        return see(q.astype(dtype)[:, None], k.astype(dtype)[None])

    return mask


def _padding(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Any:
    """A mask of keys that is an argument."""

    def mask(s: Scope, before: bool) -> Any:
        p = s.program
        shape = lambda r: np.stack([draw(r, p.keys) for _ in range(p.batch)])  # noqa: E731
        return s.argument(shape, before)[:, None, None]

    return mask


def _pairs(dims: str, dtype: Any = bool) -> Any:
    def mask(s: Scope, before: bool) -> Any:
        p = s.program
        sizes = {"b": p.batch, "n": p.heads, "q": p.queries, "k": p.keys}
        shape = [sizes[x] for x in dims]
        m = s.argument(lambda r: (r.random(shape) < 0.7).astype(dtype), before)
        missing = [i for i, x in enumerate("bnqk") if x not in dims]
        return jnp.expand_dims(m, missing) > 0

    return mask


def _lengths(s: Scope, before: bool) -> Any:
    p = s.program
    n = s.argument(
        lambda r: r.integers(0, p.keys + 1, p.batch).astype(np.int32), before
    )
    return (jnp.arange(p.keys) < n[:, None])[:, None, None]


def _segments(s: Scope, before: bool) -> Any:
    p = s.program
    ids = s.argument(
        lambda r: np.sort(r.integers(0, 4, (p.batch, max(p.queries, p.keys))), -1),
        before,
    )
    return (ids[:, : p.queries, None] == ids[:, None, : p.keys])[:, None]


def _two_segments(s: Scope, before: bool) -> Any:
    p = s.program
    q = s.argument(
        lambda r: np.sort(r.integers(0, 4, (p.batch, p.queries)), -1), before
    )
    k = s.argument(lambda r: np.sort(r.integers(0, 4, (p.batch, p.keys)), -1), False)
    return (q[:, :, None] == k[:, None, :])[:, None]


def _counted_segments(s: Scope, before: bool) -> Any:
    p = s.program
    ends = s.argument(
        lambda r: r.random((p.batch, max(p.queries, p.keys))) < 0.15, before
    )
    ids = jnp.cumsum(ends, axis=1)
    return (ids[:, : p.queries, None] == ids[:, None, : p.keys])[:, None]


def _position_ids(s: Scope, before: bool) -> Any:
    p = s.program
    places = s.argument(
        lambda r: np.cumsum(r.integers(0, 2, (p.batch, max(p.queries, p.keys))), -1),
        before,
    )
    return (places[:, : p.queries, None] >= places[:, None, : p.keys])[:, None]


def _width(s: Scope, before: bool) -> Any:
    n = s.argument(lambda r: np.int32(r.integers(1, s.program.keys)), before)
    return (jnp.asarray(_away(s.program)) < n) & (jnp.asarray(_away(s.program)) >= 0)


def _turns(s: Scope, before: bool) -> Any:
    """A causal mask that a loop of so many turns moves."""
    n = s.argument(lambda r: np.int32(r.integers(1, 5)), before)
    start = jnp.asarray(_away(s.program))
    return lax.fori_loop(0, n, lambda i, x: x + 2, start) >= 0


def _registers(p: Program, r: np.random.Generator) -> np.ndarray:
    seen = _away(p) >= 0
    seen[:, r.integers(0, p.keys, 2)] = True
    return seen


def _pair(p: Program, r: np.random.Generator) -> np.ndarray:
    seen = _away(p) >= 0
    place = r.integers(0, p.queries), r.integers(0, p.keys)
    seen[place] = ~seen[place]
    return seen


def _jittered(p: Program, r: np.random.Generator) -> np.ndarray:
    return (_away(p) >= 0) & (_away(p) < r.integers(6, 9, (p.queries, 1)))


def _one_head(p: Program, r: np.random.Generator) -> np.ndarray:
    head = (np.arange(p.heads) == r.integers(0, p.heads))[:, None, None]
    return np.where(head, (_away(p) >= 0) & (_away(p) < 7), _away(p) >= 0)


def _one_sequence(p: Program, r: np.random.Generator) -> np.ndarray:
    one = (np.arange(p.batch) == r.integers(0, p.batch))[:, None, None, None]
    return (_away(p) >= 0) | one


# By name: masks that broadcast to [batch, heads, queries, keys].
CONSTANT_MASKS: dict[str, Any] = {
    "all": _constant(lambda p, r: np.ones((p.queries, p.keys), bool)),
    "causal": _constant(lambda p, r: _away(p) >= 0),
    "causal at the end": _constant(lambda p, r: _away(p) >= p.queries - p.keys),
    "window": _constant(lambda p, r: (_away(p) >= 0) & (_away(p) < 7)),
    "two sides": _constant(lambda p, r: abs(_away(p)) < 5),
    "later": _constant(lambda p, r: _away(p) <= 0),
    "strict": _constant(lambda p, r: _away(p) > 0),
    "before": _constant(lambda p, r: (_away(p) >= 3) & (_away(p) < 9)),
    "prefix": _constant(lambda p, r: (_away(p) >= 0) | (np.arange(p.keys) < 5)),
    "sinks": _constant(
        lambda p, r: (_away(p) >= 0) & ((_away(p) < 7) | (np.arange(p.keys) < 2))
    ),
    "dilated": _constant(lambda p, r: (_away(p) >= 0) & (_away(p) % 3 == 0)),
    "blocks": _constant(
        lambda p, r: np.arange(p.queries)[:, None] // 8 == np.arange(p.keys) // 8
    ),
    "random": _constant(lambda p, r: r.random((p.queries, p.keys)) < 0.6),
    "registers": _constant(_registers),
    "a pair": _constant(_pair),
    "jittered": _constant(_jittered),
    "one head": _constant(_one_head),
    "one sequence": _constant(_one_sequence),
    "few keys": _constant(lambda p, r: np.arange(p.keys)[None] < p.keys - 3),
}
POSITION_MASKS: dict[str, Any] = {
    "iota": _positions(jnp.int32, lambda q, k: q >= k),
    "iota, window": _positions(jnp.int32, lambda q, k: (q >= k) & (q - k < 6)),
    "iota, two sides": _positions(jnp.int32, lambda q, k: jnp.abs(q - k) < 6),
    "uint32": _positions(jnp.uint32, lambda q, k: q - k < 6),
    "uint32, sides": _positions(jnp.uint32, lambda q, k: q - k + 4 < 9),
    "uint8": _positions(jnp.uint8, lambda q, k: q * 9 >= k * 9),
    "int8": _positions(jnp.int8, lambda q, k: q * 5 - k * 5 >= 0),
    "int16": _positions(jnp.int16, lambda q, k: q * 999 >= k * 999),
    "bfloat16": _positions(jnp.bfloat16, lambda q, k: q + 250 >= k + 250),
    "float16": _positions(jnp.float16, lambda q, k: q * 3000 >= k * 3000),
    "e4m3": _positions(E4M3, lambda q, k: q >= k),
    "quotient": _positions(jnp.int32, lambda q, k: lax.div(q - k, jnp.int32(5)) == 0),
    "remainder": _positions(jnp.int32, lambda q, k: lax.rem(q - k, jnp.int32(5)) <= 0),
    "shift": _positions(jnp.int32, lambda q, k: q >> 3 == k >> 3),
    "xor": _positions(jnp.int32, lambda q, k: (q ^ k) & 2 == 0),
    "thirds": _positions(jnp.float32, lambda q, k: q / 3 >= k / 3),
    "minimum": _positions(jnp.int32, lambda q, k: (jnp.minimum(q, 20) >= k) | (q == k)),
    "chosen": _positions(jnp.int32, lambda q, k: jnp.where(q % 2 == 0, k <= q, k < 9)),
}
ARGUMENT_MASKS: dict[str, Any] = {
    "right padding": _padding(lambda r, n: np.arange(n) < r.integers(1, n + 1)),
    "left padding": _padding(lambda r, n: np.arange(n) >= r.integers(0, n)),
    "holes": _padding(lambda r, n: r.random(n) < 0.7),
    "maybe none": _padding(lambda r, n: np.arange(n) < r.integers(0, n)),
    "lengths": _lengths,
    "segments": _segments,
    "two segments": _two_segments,
    "counted segments": _counted_segments,
    "position ids": _position_ids,
    "width": _width,
    "turns": _turns,
    "pairs qk": _pairs("qk"),
    "pairs bqk": _pairs("bqk"),
    "pairs bnqk": _pairs("bnqk"),
    "pairs q": _pairs("q"),
    "pairs bq": _pairs("bq"),
    "pairs bqk of int32": _pairs("bqk", np.int32),
    "pairs bqk of float32": _pairs("bqk", np.float32),
}
MASKS = CONSTANT_MASKS | POSITION_MASKS | ARGUMENT_MASKS
FLAGS = ("", "b", "n", "q", "bn", "k")
CHOICES = (*(f"flag {x}".strip() for x in FLAGS), "cond", "switch", "number", "data")


def _chosen(s: Scope, choice: str, one: Any, other: Any, before: bool, q: Any) -> Any:
    """Chooses one of two values."""
    p = s.program
    if choice.startswith("flag"):
        dims = choice.removeprefix("flag").strip()
        sizes = {"b": p.batch, "n": p.heads, "q": p.queries, "k": p.keys}
        shape = [sizes[x] for x in dims]
        flag = s.argument(lambda r: r.random(shape) < 0.5, before)
        missing = [i for i, x in enumerate("bnqk") if x not in dims]
        return jnp.where(jnp.expand_dims(flag, missing) if dims else flag, one, other)
    one, other = (jnp.asarray(x) for x in (one, other))
    shape = jnp.broadcast_shapes(one.shape, other.shape)
    one, other = (jnp.broadcast_to(x, shape) for x in (one, other))
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


def _shaped(dims: str, kept: Callable[[Any], Any] = lambda x: x) -> Any:
    """A bias that is an argument."""

    def bias(s: Scope, one: Bias) -> Any:
        p = s.program
        sizes = {"b": p.batch, "n": p.heads, "q": p.queries, "k": p.keys}
        shape = [sizes[x] for x in dims]
        drawn = lambda r: r.normal(size=shape).astype(np.float32) * 2  # noqa: E731
        b = s.argument(drawn, one.before, one.learnt)
        return kept(
            jnp.expand_dims(b, [i for i, x in enumerate("bnqk") if x not in dims])
        )

    return bias


def _table(s: Scope, one: Bias) -> Any:
    p = s.program
    table = s.argument(
        lambda r: r.normal(size=(16, p.heads)).astype(np.float32),
        one.before,
        one.learnt,
    )
    away = jnp.arange(p.queries)[:, None] - jnp.arange(p.keys)
    far = 8 + (jnp.log(jnp.maximum(jnp.abs(away), 1) / 8.0) * 3).astype(jnp.int32)
    buckets = jnp.where(jnp.abs(away) < 8, jnp.abs(away), jnp.minimum(far, 15))
    return jnp.moveaxis(table[buckets], -1, 0)


def _slopes(s: Scope) -> Any:
    return jnp.asarray(2.0 ** -(1.0 + np.arange(s.program.heads)), jnp.float32)[
        :, None, None
    ]


def _entries(s: Scope, one: Bias) -> Any:
    p, bias = s.program, np.zeros((s.program.queries, s.program.keys), np.float32)
    places = np.random.default_rng(p.number).integers(0, min(bias.shape), (4, 2))
    bias[tuple(places.T)] = 3.0
    return bias


BIASES: dict[str, Any] = {
    "distances": lambda s, one: -_slopes(s) * np.abs(_away(s.program)),
    "distances of iotas": lambda s, one: (
        -_slopes(s)
        * jnp.abs(jnp.arange(s.program.queries)[:, None] - jnp.arange(s.program.keys))
    ),
    "distances of uint8": lambda s, one: (
        (
            jnp.arange(s.program.queries, dtype=jnp.uint8)[:, None]
            - jnp.arange(s.program.keys, dtype=jnp.uint8)
        ).astype(jnp.float32)
        * -0.01
    ),
    "keys' places": lambda s, one: -0.1 * np.arange(s.program.keys, dtype=np.float32),
    "queries' places": lambda s, one: (
        -0.1 * np.arange(s.program.queries, dtype=np.float32)[:, None]
    ),
    "four entries": _entries,
    "nqk": _shaped("nqk"),
    "qk": _shaped("qk"),
    "bnqk": _shaped("bnqk"),
    "bqk": _shaped("bqk"),
    "bk": _shaped("bk"),
    "n": _shaped("n"),
    "qk, e4m3": _shaped("qk", lambda b: b.astype(E4M3).astype(jnp.float32)),
    "qk, bfloat16": _shaped("qk", lambda b: b.astype(jnp.bfloat16).astype(jnp.float32)),
    "qk, transposed": _shaped(
        "qk",
        lambda b: b[..., ::-1, :] if b.shape[-1] != b.shape[-2] else b.swapaxes(-1, -2),
    ),
    "table": _table,
}
BIAS_CHOICES = ("flag", "flag n", "flag b", "flag q", "cond", "number", "factor")

# ------------------------------------------------------------------ weights and changes


def _softmax(s: Any) -> Any:
    return jax.nn.softmax(s, axis=-1)


def _exponentials(s: Any) -> Any:
    return jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))


def _by_hand(s: Any) -> Any:
    e = _exponentials(s)
    return e / e.sum(-1, keepdims=True)


def _by_inverse(s: Any) -> Any:
    e = _exponentials(s)
    return e * (1.0 / e.sum(-1, keepdims=True))


def _differentiated_largest(s: Any) -> Any:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


WEIGH: dict[str, Callable[[Any], Any]] = {
    "softmax": _softmax,
    "by hand": _by_hand,
    "by inverse": _by_inverse,
    "by logarithm": lambda s: jnp.exp(jax.nn.log_softmax(s, axis=-1)),
    "by logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
    "largest differentiated": _differentiated_largest,
    "late": _softmax,  # See `attend`.
}


def _straight(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: x + lax.stop_gradient(change(x) - x)


def _through(dtype: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def _at(x: Any, number: int, change: Callable[[Any], Any]) -> Any:
    """Changes one query and key of an array [batch, heads, queries, keys]."""
    r = np.random.default_rng(number)
    here = np.zeros(x.shape[-2:], bool)
    here[r.integers(0, here.shape[0]), r.integers(0, here.shape[1])] = True
    return jnp.where(here, change(x), x)


def _key(x: Any, number: int) -> Any:
    return np.arange(x.shape[-1]) == number % x.shape[-1]


@jax.custom_vjp
def _clipped_back(x):
    return x


_clipped_back.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@jax.custom_vjp
def _scaled_back(x):
    return x


_scaled_back.defvjp(lambda x: (x, None), lambda _, g: (g * 1.1,))

# Changes in one place, by what they change; each of (values, the program's number).
OF_SCORES: dict[str, Callable[[Any, int], Any]] = {
    "scores to e4m3": lambda x, n: _through(E4M3)(x),
    "scores to e5m2, straight": lambda x, n: _straight(_through(E5M2))(x),
    "scores to int": lambda x, n: _straight(_through(jnp.int32))(x),
    "scores clipped": lambda x, n: jnp.clip(x, -3.0, 3.0),
    "scores clipped far": lambda x, n: jnp.minimum(x, 8.0),
    "scores clipped at a key": lambda x, n: jnp.where(
        _key(x, n), jnp.minimum(x, 1.0), x
    ),
    "scores of a pair": lambda x, n: _at(x, n, lambda x: x + 2.0),
    "scores of a pair doubled": lambda x, n: _at(x, n, lambda x: x * 2.0),
    "scores of a pair stopped": lambda x, n: _at(x, n, lax.stop_gradient),
    "scores of a key doubled": lambda x, n: jnp.where(_key(x, n), 2 * x, x),
    "scores of a head halved": lambda x, n: (
        x * np.where(np.arange(x.shape[1]) == n % x.shape[1], 0.5, 1.0)[:, None, None]
    ),
    "scores of a sequence halved": lambda x, n: (
        x
        * np.where(np.arange(x.shape[0]) == n % x.shape[0], 0.5, 1.0)[
            :, None, None, None
        ]
    ),
    "scores less a mean": lambda x, n: x - 0.3 * x.mean(-2, keepdims=True),
    "scores less a row's mean": lambda x, n: x - x.mean(-1, keepdims=True),
    "scores' gradient clipped": lambda x, n: _clipped_back(x),
    "scores' gradient scaled": lambda x, n: _scaled_back(x),
    "scores' gradient stopped": lambda x, n: lax.stop_gradient(x),
    "scores leak": lambda x, n: jnp.maximum(x, 0.2 * x),
    "scores cubed": lambda x, n: x * x * x * 0.1,
    "scores turned": lambda x, n: jnp.roll(x, 1, -1),
    "scores reversed": lambda x, n: x[..., ::-1],
    "scores sorted": lambda x, n: jnp.sort(x, -1),
    "scores mixed": lambda x, n: x + 0.2 * x[:, ::-1],
    "scores by reduce_precision": lambda x, n: lax.reduce_precision(x, 8, 4),
}
OF_WEIGHTS: dict[str, Callable[[Any, int], Any]] = {
    "weights to e5m2": lambda x, n: _through(E5M2)(x),
    "weights to e4m3, straight": lambda x, n: _straight(_through(E4M3))(x),
    "weights to uint8": lambda x, n: _straight(
        lambda w: (w * 255).astype(jnp.uint8).astype(w.dtype) / 255
    )(x),
    "weights of a pair": lambda x, n: _at(x, n, lambda x: 0 * x),
    "weights of a pair stopped": lambda x, n: _at(x, n, lax.stop_gradient),
    "weights of a query zero": lambda x, n: (
        x * np.where(np.arange(x.shape[-2]) == n % x.shape[-2], 0.0, 1.0)[:, None]
    ),
    "weights scaled": lambda x, n: x * 1.02,
    "weights and a small number": lambda x, n: x + 1e-3,
    "weights squared": lambda x, n: (
        jnp.square(x) / jnp.square(x).sum(-1, keepdims=True)
    ),
    "weights twice": lambda x, n: _softmax(x * 4),
    "weights at random": lambda x, n: (
        x * np.random.default_rng(n).integers(0, 2, x.shape[-2:]) * 2
    ),
    "weights small ones zero": lambda x, n: jnp.where(x > 0.02, x, 0.0),
    "weights' gradient stopped": lambda x, n: lax.stop_gradient(x),
    "weights' gradient half": lambda x, n: 0.5 * x + 0.5 * lax.stop_gradient(x),
    "weights' gradient scaled": lambda x, n: _scaled_back(x),
    "weights turned": lambda x, n: jnp.roll(x, 1, -2),
    "weights of a head": lambda x, n: (
        x * np.where(np.arange(x.shape[1]) == n % x.shape[1], 0.9, 1.0)[:, None, None]
    ),
}
OF_SOFTMAX: dict[str, Callable[[Any], Any]] = {
    "over queries": lambda s: jax.nn.softmax(s, -2),
    "over heads": lambda s: jax.nn.softmax(s, 1),
    "one more": lambda s: jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True)),
    "sum at least one": lambda s: (
        jnp.exp(s) / jnp.maximum(jnp.exp(s).sum(-1, keepdims=True), 1.0)
    ),
    "norm of two": lambda s: (
        _exponentials(s) / jnp.sqrt(jnp.square(_exponentials(s)).sum(-1, keepdims=True))
    ),
    "base two": lambda s: jnp.exp2(s) / jnp.exp2(s).sum(-1, keepdims=True),
    "sum of another query": lambda s: (
        _exponentials(s) / jnp.roll(_exponentials(s).sum(-1, keepdims=True), 1, -2)
    ),
    "sum of some keys": lambda s: (
        _exponentials(s)
        / _exponentials(s)[..., : s.shape[-1] - 2].sum(-1, keepdims=True)
    ),
    "largest of some keys": lambda s: (
        jnp.exp(s - s[..., : s.shape[-1] - 2].max(-1, keepdims=True)) / 9.0
    ),
    "sum stopped": lambda s: (
        _exponentials(s) / lax.stop_gradient(_exponentials(s).sum(-1, keepdims=True))
    ),
    "sigmoids": jax.nn.sigmoid,
}
# In branches, by flags, and in results.
OTHER_CHANGES = (
    "uniform weights by a branch",
    "unmasked by a branch",
    "zero scores by a branch",
    "another scale by a flag",
    "weights returned",
    "scores returned",
    "largest score returned",
    "values of a key zero",
    "a learnt scale",
    "a scale of heads",
    "a scale of queries",
    "queries added again",
)
CHANGES = (*OF_SCORES, *OF_WEIGHTS, *OF_SOFTMAX, *OTHER_CHANGES)
SCALES = ("scores", "queries", "keys", "quotient", "after the bias", "no", "power")
LAYOUTS = ("bqnd", "bnqd", "merged", "qbnd")
LOOPS = ("", "unrolled", "scan", "scan again", "slices", "slices again")

# -------------------------------------------------------------------------- the program


def _masks(s: Scope, scores: Any, q: Any) -> Any:
    """Scores as masks leave them."""
    joined, how = None, ""
    for term in s.program.masks:
        seen = MASKS[term.kind](s, term.before)
        if term.choice:
            other = MASKS[term.other](s, False)
            seen = _chosen(s, term.choice, seen, other, term.before, q)
        if joined is not None:
            seen = joined & seen if how == "and" else joined | seen
        joined, how = (seen, term.how) if term.how in ("and", "or") else (None, "")
        number = jnp.asarray(
            max(term.number, float(jnp.finfo(scores.dtype).min))
            if np.isfinite(term.number)
            else term.number,
            scores.dtype,
        )
        if term.how == "where":
            scores = jnp.where(seen, scores, number)
        elif term.how == "hidden":
            scores = jnp.where(~jnp.asarray(seen), number, scores)
        elif term.how == "added":
            scores = scores + jnp.where(seen, jnp.zeros_like(number), number)
        elif term.how == "times":
            scores = scores + (1 - jnp.asarray(seen).astype(scores.dtype)) * number
    return scores if joined is None else jnp.where(joined, scores, -1e9)


def _biases(s: Scope, scores: Any, q: Any) -> Any:
    for one in s.program.biases:
        bias = jnp.asarray(BIASES[one.kind](s, one))
        if one.choice == "factor":
            bias = bias * s.argument(lambda r: np.float32(r.normal()), one.before)
        elif one.choice:
            bias = _chosen(s, one.choice, bias, jnp.zeros_like(bias), one.before, q)
        scores = scores + bias.astype(scores.dtype)
    return scores


def attend(s: Scope, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The output [batch, queries, heads, value_dim], and what else is returned."""
    p, wide = s.program, jnp.float32
    if p.kv_heads != p.heads:
        k, v = (jnp.repeat(x, p.heads // p.kv_heads, axis=2) for x in (k, v))
    first = q
    rate = {"no": 1.0, "power": 0.25}.get(p.scaled, p.head_dim**-0.5)
    if p.scaled == "queries":
        q = q * jnp.asarray(rate, q.dtype)
    if p.scaled == "keys":
        k = k * jnp.asarray(rate, k.dtype)
    if p.changed == "a learnt scale":
        q = q * s.argument(lambda r: np.float32(r.normal()), False, True).astype(
            q.dtype
        )
    scores = _product(p.layout, q, k).astype(wide)
    if p.scaled == "quotient":
        scores = scores / np.float32(p.head_dim**0.5)
    elif p.scaled in ("scores", "power"):
        scores = scores * rate
    if p.cap:
        scores = p.cap * jnp.tanh(scores / p.cap)
    scores = _changed_scores(s, scores)
    if not p.biases_last:
        scores = _biases(s, scores, first)
    if p.scaled == "after the bias":
        scores = scores * rate
    free = scores
    scores = _masks(s, scores, first)
    if p.biases_last:
        scores = _biases(s, scores, first)
    if p.changed == "unmasked by a branch":
        flag = s.argument(lambda r: r.random() < 0.5, False)
        scores = lax.cond(flag, lambda: scores, lambda: free)
    weights = OF_SOFTMAX.get(p.changed, WEIGH[p.weigh])(scores)
    if p.changed in OF_WEIGHTS:
        weights = OF_WEIGHTS[p.changed](weights, p.number)
    if p.changed == "uniform weights by a branch":
        flag = s.argument(lambda r: r.random() < 0.5, False)
        weights = lax.cond(flag, lambda w: w, lambda w: jnp.full_like(w, 0.1), weights)
    if p.changed == "values of a key zero":
        v = jnp.where(_key(v[:, :, 0, 0], p.number)[None, :, None, None], 0, v)
    if p.weigh == "late" and not p.changed:
        e = _exponentials(scores)
        total = e.sum(-1).swapaxes(1, 2)[..., None]
        out = (_mixed(p.layout, e, v.astype(wide)) / total).astype(v.dtype)
    else:
        out = _mixed(p.layout, weights.astype(v.dtype), v)
    if p.changed == "queries added again":
        out = out + first.sum(-1, keepdims=True)
    more = {
        "weights returned": weights,
        "scores returned": scores,
        "largest score returned": scores.max(-1),
    }
    return out, more.get(p.changed)


def _changed_scores(s: Scope, scores: Any) -> Any:
    p = s.program
    if p.changed in OF_SCORES:
        return OF_SCORES[p.changed](scores, p.number)
    if p.changed == "zero scores by a branch":
        flag = s.argument(lambda r: r.random() < 0.5, False)
        return lax.cond(flag, lambda: scores, lambda: jnp.zeros_like(scores))
    if p.changed == "another scale by a flag":
        flag = s.argument(lambda r: r.random() < 0.5, False)
        return scores * jnp.where(flag, 1.0, 0.5)
    sizes = {"a scale of heads": (p.heads, 1, 1), "a scale of queries": (p.queries, 1)}
    if p.changed in sizes:
        drawn = lambda r: r.normal(size=sizes[p.changed]).astype(np.float32)  # noqa: E731
        return scores * s.argument(drawn, False)
    return scores


def _product(layout: str, q: Any, k: Any) -> Any:
    """Scores [batch, heads, queries, keys] of [batch, tokens, heads, head_dim]."""
    if layout == "bnqd":
        q, k = (x.swapaxes(1, 2) for x in (q, k))
        return jnp.einsum("bnqd,bnkd->bnqk", q, k)
    if layout == "qbnd":
        q, k = (x.swapaxes(0, 1) for x in (q, k))
        return jnp.einsum("qbnd,kbnd->bnqk", q, k)
    if layout == "merged":
        b, n = q.shape[0], q.shape[2]
        q, k = (x.swapaxes(1, 2).reshape(b * n, x.shape[1], -1) for x in (q, k))
        return (q @ k.swapaxes(1, 2)).reshape(b, n, q.shape[1], k.shape[1])
    return jnp.einsum("bqnd,bknd->bnqk", q, k)


def _mixed(layout: str, weights: Any, v: Any) -> Any:
    if layout == "bnqd":
        return (weights @ v.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "qbnd":
        return jnp.einsum("bnqk,kbnd->qbnd", weights, v.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == "merged":
        b, n = weights.shape[:2]
        turned = v.swapaxes(1, 2).reshape(b * n, v.shape[1], -1)
        out = weights.reshape(b * n, *weights.shape[2:]) @ turned
        return out.reshape(b, n, *out.shape[1:]).swapaxes(1, 2)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def _layer(program: Program, x: Any, y: Any, learnt: Any, now: Any, before: Any) -> Any:
    """One layer: x with its attention added, and what else is returned."""
    w = learnt["layer"]
    p = program
    own = lambda z, n, d: (z @ w[d]).reshape(*z.shape[:2], n, -1)  # noqa: E731
    q, k, v = own(x, p.heads, "q"), own(y, p.kv_heads, "k"), own(y, p.kv_heads, "v")
    merge = lambda a, b: a | {n: t for n, t in b.items() if n != "layer"}  # noqa: E731
    values = merge(now, learnt), merge(before, learnt)
    out, more = attend(Scope(p, 0, values), q, k, v)
    return x + out.reshape(*x.shape[:2], -1) @ w["o"], more


def step_of(program: Program) -> Callable[..., Any]:
    """The step: results and gradients of what is learnt."""
    p = program

    def forward(learnt: Any, given: Any) -> Any:
        if not p.loop:
            values = {**learnt, **given}
            return attend(
                Scope(p, 0, (values, values)), learnt["q"], learnt["k"], learnt["v"]
            )
        x, y = learnt["x"], learnt["y"]
        stacks = {name: v for name, v in learnt.items() if name not in ("x", "y")}
        y = None if p.queries == p.keys else y

        def run(x: Any, i: Any, now: Any, before: Any) -> Any:
            own, mine = now
            return _layer(p, x, x if y is None else y, own, mine, {**mine, **before})

        if p.loop == "unrolled":
            for i in range(2):
                now = jax.tree.map(lambda a: a[i], (stacks, given))  # noqa: B023
                x, _ = run(x, i, now, {})
            return x, None
        wrap = jax.checkpoint if p.loop.endswith("again") else lambda f: f
        if not p.is_sliced:
            body = lambda x, now: (run(x, 0, now, {})[0], None)  # noqa: E731
            return lax.scan(wrap(body), x, (stacks, given))[0], None

        def sliced(x: Any, i: Any) -> Any:
            at = lambda t, i: jax.tree.map(  # noqa: E731
                lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), t
            )
            (own, mine), (others, last) = (
                at((stacks, given), i),
                at((stacks, given), i - 1),
            )
            del others["layer"]
            return run(x, i, (own, mine), {**last, **others})[0], None

        return lax.scan(wrap(sliced), x, jnp.arange(1, LAYERS + 1))[0], None

    def loss(learnt: Any, given: Any) -> Any:
        out, more = forward(learnt, given)
        places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(places)), (out, more)

    def train(learnt: Any, given: Any) -> Any:
        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(learnt, given)
        return gradients, out

    return train if p.trains else lambda *args: loss(*args)[1]


def inputs_of(program: Program, seed: int) -> tuple[Any, Any]:
    """Arrays that are learnt, and the others that enter."""
    p = program
    r = np.random.default_rng([p.number, seed, 1])
    size = (1.0, 2.0)[seed % 2]
    scope = Scope(p, seed)
    shapes = (
        (p.batch, p.queries, p.heads, p.head_dim),
        (p.batch, p.keys, p.kv_heads, p.head_dim),
        (p.batch, p.keys, p.kv_heads, p.value_dim),
    )
    q, k, v = (jnp.asarray(r.normal(size=x) * size, p.dtype) for x in shapes)
    jax.eval_shape(lambda: attend(scope, q, k, v)[0])
    learnt: dict[str, Any] = {n: x for n, x in scope.made.items() if n[0] == "w"}
    given = {n: x for n, x in scope.made.items() if n[0] == "a"}
    if not p.loop:
        return {**learnt, "q": q, "k": k, "v": v}, given
    wide = p.heads * p.head_dim
    sizes = {
        "q": (wide, wide),
        "k": (wide, p.kv_heads * p.head_dim),
        "v": (wide, p.kv_heads * p.value_dim),
        "o": (p.heads * p.value_dim, wide),
    }
    layer = {
        n: jnp.asarray(r.normal(size=(p.stacked, *x)) * (1.2 * wide**-0.5), p.dtype)
        for n, x in sizes.items()
    }
    x = jnp.asarray(r.normal(size=(p.batch, p.queries, wide)) * size, p.dtype)
    y = jnp.asarray(r.normal(size=(p.batch, p.keys, wide)) * size, p.dtype)
    return {**learnt, "x": x, "y": y, "layer": layer}, given


# ----------------------------------------------------------------------------- drawing


def draw(number: int) -> Program:
    """A random program."""
    r = random.Random(number)
    often = lambda share: r.random() < share  # noqa: E731
    heads = r.choice([1, 2, 4])
    tokens = r.choice([16, 24, 32, 48])
    loop = r.choice(LOOPS[1:]) if often(0.4) else ""
    dim = r.choice([4, 8])
    trains = not often(0.15)
    dtype = r.choice(["bfloat16", "float16"]) if often(0.12) else "float32"
    # Most programs have constants and arguments; hidden keys are hidden in some ways.
    kinds = [CONSTANT_MASKS, POSITION_MASKS, ARGUMENT_MASKS]
    numbers = [-1e9, -1e9, -1e9, LEAST, -1e4, -50.0, -np.inf]

    def term() -> Term:
        return Term(
            kind=r.choice([*r.choice(kinds)]),
            how=r.choice(
                ["where", "where", "and", "and", "or", "hidden", "added", "times"]
            ),
            number=r.choice(numbers),
            choice=r.choice(CHOICES) if often(0.25) else "",
            other=r.choice([*r.choice(kinds)]),
            before=loop.startswith("slices") and often(0.5),
        )

    def bias() -> Bias:
        return Bias(
            kind=r.choice([*BIASES]),
            choice=r.choice(BIAS_CHOICES) if often(0.25) else "",
            learnt=often(0.3),
            before=loop.startswith("slices") and often(0.5),
        )

    changed = r.choice(CHANGES) if often(0.4) else ""
    cross = often(0.15)
    batch = r.choice([1, 2, 3])
    return Program(
        number=number,
        batch=batch,
        queries=tokens,
        keys=tokens + r.choice([8, -8, 16]) if cross else tokens,
        heads=heads,
        kv_heads=r.choice([1, heads]) if often(0.3) else heads,
        head_dim=dim,
        value_dim=r.choice([4, 8]) if often(0.15) else dim,
        dtype=dtype,
        layout=r.choice(LAYOUTS),
        scaled=r.choice(SCALES),
        weigh=r.choice([*WEIGH]) if often(0.5) else "softmax",
        cap=3.0 if often(0.15) else 0.0,
        masks=tuple(term() for _ in range(r.choice([0, 1, 1, 1, 2, 2, 3]))),
        biases=tuple(bias() for _ in range(r.choice([0, 0, 0, 1, 1, 2]))),
        biases_last=often(0.2),
        loop="" if changed.endswith("returned") else loop,
        trains=trains,
        changed=changed,
        devices=2 if batch == 2 and often(0.2) else 1,
    )


# ---------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class Result:
    """A program's outcome.

    Attributes:
        taken: whether a kernel computes an attention of it.
        left: why one stays as it is written.
        wrong: what is wrong; "" for nothing.
    """

    program: Program
    taken: bool = False
    left: tuple[str, ...] = ()
    wrong: str = ""


def check(program: Program) -> Result:
    """Compares a program with what each kernel makes of it."""
    sets = [inputs_of(program, seed) for seed in range(2)]
    mesh = make_mesh((("x", program.devices),))
    exact = None
    if program.dtype != "float32":
        # What 16 bits round is measured by the same program without any.
        exact = jax.jit(step_of(dataclasses.replace(program, dtype="float32")))
    try:
        found = compare(step_of(program), *sets, mesh=mesh, exact=exact)
    except Exception as error:
        return Result(program, wrong=f"{type(error).__name__}: {error}"[:300])
    wrong = "" if found.worst <= TOLERANCE else f"off by {found.off}"
    return Result(program, bool(found.kernels), found.left, wrong)


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    plain = Program(number=program.number)
    for field in dataclasses.fields(Program):
        default = getattr(plain, field.name)
        if field.name != "number" and getattr(program, field.name) != default:
            yield dataclasses.replace(program, **{field.name: default})
    for name, empty in (("masks", Term("causal")), ("biases", Bias("qk"))):
        terms = getattr(program, name)
        for i, one in enumerate(terms):
            rest = terms[:i], terms[i + 1 :]
            yield dataclasses.replace(program, **{name: rest[0] + rest[1]})
            for field in dataclasses.fields(one):
                default = getattr(empty, field.name)
                if getattr(one, field.name) != default:
                    less = dataclasses.replace(one, **{field.name: default})
                    yield dataclasses.replace(
                        program, **{name: (*rest[0], less, *rest[1])}
                    )
    if program.kv_heads != program.heads:
        yield dataclasses.replace(program, kv_heads=program.heads)


def minimal(result: Result, most: int = 60) -> Result:
    """A program with as little as possible that is wrong still."""
    tried = 0
    again = True
    while again and tried < most:
        again = False
        for less in simpler(result.program):
            tried += 1
            if less.heads % less.kv_heads:
                continue
            found = check(less)
            if found.wrong:
                result, again = found, True
                break
            if tried >= most:
                break
    return result


def text_of(program: Program) -> str:
    """A program without what is as plain as by default."""
    plain = Program()
    fields = (
        f"{field.name}={getattr(program, field.name)!r}"
        for field in dataclasses.fields(Program)
        if getattr(program, field.name) != getattr(plain, field.name)
    )
    return f"Program({', '.join(fields)})"


def check_some(numbers: Sequence[int], planted: str = "") -> list[Result]:
    """Checks programs one after another, in a process of their own."""
    results = []
    for place, number in enumerate(numbers):
        results.append(check(draw(number)))
        if place % 50 == 49:
            jax.clear_caches()
    return results


def report(results: Sequence[Result], seconds: float) -> str:
    """The summary of a run."""
    equivalent = [one for one in results if not one.program.changed]
    changed = [one for one in results if one.program.changed]
    wrong = [one for one in results if one.wrong]
    taken = sum(one.taken for one in equivalent)
    why = Counter(
        reason
        for one in equivalent
        if not one.taken and not one.wrong
        for reason in one.left
    )
    lines = [
        f"{len(results)} programs: {len(wrong)} wrong; {taken} of {len(equivalent)} "
        f"equivalent ones taken ({taken / max(1, len(equivalent)):.0%}), "
        f"{sum(one.taken for one in changed)} of {len(changed)} changed ones; "
        f"{seconds:.0f} s",
        *(f"  left {count}: {reason}" for reason, count in why.most_common(25)),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks programs and prints those that are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--shrink", type=int, default=20, help="wrong ones to make small"
    )
    options = parser.parse_args(arguments)
    from cfp_test.support.quick_flags import QUICK_FLAGS

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=2"
    start = time.monotonic()
    numbers = range(options.seed, options.seed + options.count)
    parts = [numbers[i : i + 25] for i in range(0, len(numbers), 25)]
    results: list[Result] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for some in pool.map(check_some, parts):
            results += some
            for one in some:
                if one.wrong:
                    print(f"WRONG {text_of(one.program)}: {one.wrong}", flush=True)
        wrong = [one for one in results if one.wrong]
        for one in pool.map(minimal, wrong[: options.shrink]):
            print(f"MINIMAL {text_of(one.program)}: {one.wrong}", flush=True)
    print(report(results, time.monotonic() - start))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
