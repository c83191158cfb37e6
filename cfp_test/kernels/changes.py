"""Ways to make weights of scores, and changes in one place after which they are others.

Shapes use: batch, heads, queries, keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cfp_test.kernels.entering import E4M3, E5M2

# Of (values, the program's number).
Change = Callable[[Any, int], Any]


def softmax(s: Any) -> Any:
    return jax.nn.softmax(s, axis=-1)


def exponentials(s: Any) -> Any:
    return jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))


def _share(e: Any) -> Any:
    return e / e.sum(-1, keepdims=True)


def _by_inverse(s: Any) -> Any:
    return exponentials(s) * (1.0 / exponentials(s).sum(-1, keepdims=True))


WEIGH: dict[str, Callable[[Any], Any]] = {
    "softmax": softmax,
    "by hand": lambda s: _share(exponentials(s)),
    "by inverse": _by_inverse,
    "by logarithm": lambda s: jnp.exp(jax.nn.log_softmax(s, axis=-1)),
    "by logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
    "largest differentiated": lambda s: _share(jnp.exp(s - s.max(-1, keepdims=True))),
    "late": softmax,  # Normalized after values are mixed.
}


def _straight(change: Callable[[Any], Any]) -> Change:
    """A change with the gradient of none."""
    return lambda x, _: x + lax.stop_gradient(change(x) - x)


def _through(dtype: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def _one(x: Any, number: int, dims: str) -> np.ndarray:
    """True at one place of some of the dims "bnqk"."""
    random, found = np.random.default_rng(number), np.ones((1, 1, 1, 1), bool)
    for i, size in enumerate(x.shape):
        here = (np.arange(size) == random.integers(0, size)) | ("bnqk"[i] not in dims)
        found = found & here.reshape([-1 if j == i else 1 for j in range(4)])
    return found


def _at(dims: str, change: Callable[[Any], Any]) -> Change:
    """A change at one query, key, head or sequence, or at a pair."""
    return lambda x, number: jnp.where(_one(x, number, dims), change(x), x)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _backward(x: Any, change: Callable[[Any], Any]) -> Any:
    return x


_backward.defvjp(lambda x, change: (x, None), lambda change, _, g: (change(g),))


def _clip(g: Any) -> Any:
    return jnp.clip(g, -0.05, 0.05)


def _more(g: Any) -> Any:
    return g * 1.1


def _matrix(number: int, size: int) -> np.ndarray:
    random = np.random.default_rng(number).normal(size=(size, size))
    return (np.eye(size) + 0.2 * random).astype(np.float32)


OF_SCORES: dict[str, Change] = {
    "scores to e4m3": lambda x, _: _through(E4M3)(x),
    "scores to e5m2, straight": _straight(_through(E5M2)),
    "scores to int": _straight(_through(jnp.int32)),
    "scores by reduce_precision": lambda x, _: lax.reduce_precision(x, 8, 4),
    "scores clipped": lambda x, _: jnp.clip(x, -3.0, 3.0),
    "scores clipped far": lambda x, _: jnp.minimum(x, 8.0),
    "scores clipped at a key": _at("k", lambda x: jnp.minimum(x, 1.0)),
    "scores of a pair": _at("qk", lambda x: x + 2.0),
    "scores of a pair, a head": _at("nqk", lambda x: x + 2.0),
    "scores of a pair doubled": _at("qk", lambda x: x * 2.0),
    "scores of a pair stopped": _at("qk", lax.stop_gradient),
    "scores of a key doubled": _at("k", lambda x: x * 2.0),
    "scores of a query doubled": _at("q", lambda x: x * 2.0),
    "scores of a head halved": _at("n", lambda x: x * 0.5),
    "scores of a sequence halved": _at("b", lambda x: x * 0.5),
    "scores less a mean": lambda x, _: x - 0.3 * x.mean(-2, keepdims=True),
    "scores less a row's mean": lambda x, _: x - x.mean(-1, keepdims=True),
    "scores' gradient clipped": lambda x, _: _backward(x, _clip),
    "scores' gradient scaled": lambda x, _: _backward(x, _more),
    "scores' gradient stopped": lambda x, _: lax.stop_gradient(x),
    "scores leak": lambda x, _: jnp.maximum(x, 0.2 * x),
    "scores cubed": lambda x, _: x * x * x * 0.1,
    "scores mixed over heads": lambda x, n: jnp.einsum(
        "bnqk,nm->bmqk", x, _matrix(n, x.shape[1])
    ),
    "scores mixed over queries": lambda x, n: _matrix(n, x.shape[2]) @ x,
    "scores turned": lambda x, _: jnp.roll(x, 1, -1),
    "scores reversed": lambda x, _: x[..., ::-1],
    "scores sorted": lambda x, _: jnp.sort(x, -1),
    "scores of heads mixed": lambda x, _: x + 0.2 * x[:, ::-1],
    "scores a constant by a row": lambda x, _: x + x.max(-1, keepdims=True),
}
OF_WEIGHTS: dict[str, Change] = {
    "weights to e5m2": lambda x, _: _through(E5M2)(x),
    "weights to e4m3, straight": _straight(_through(E4M3)),
    "weights to uint8": _straight(lambda w: _through(jnp.uint8)(w * 255) / 255),
    "weights of a pair": _at("qk", lambda x: 0 * x),
    "weights of a pair stopped": _at("qk", lax.stop_gradient),
    "weights of a query zero": _at("q", lambda x: 0 * x),
    "weights of a head": _at("n", lambda x: 0.9 * x),
    "weights scaled": lambda x, _: x * 1.02,
    "weights and a small number": lambda x, _: x + 1e-3,
    "weights squared": lambda x, _: _share(jnp.square(x)),
    "weights twice": lambda x, _: softmax(x * 4),
    "weights at random": lambda x, n: (
        x * np.random.default_rng(n).integers(0, 2, x.shape[-2:]) * 2
    ),
    "weights small ones zero": lambda x, _: jnp.where(x > 0.02, x, 0.0),
    "weights' gradient stopped": lambda x, _: lax.stop_gradient(x),
    "weights' gradient half": lambda x, _: 0.5 * x + 0.5 * lax.stop_gradient(x),
    "weights' gradient scaled": lambda x, _: _backward(x, _more),
    "weights mixed over heads": lambda x, n: jnp.einsum(
        "bnqk,nm->bmqk", x, _matrix(n, x.shape[1])
    ),
    "weights mixed over keys": lambda x, n: x @ _matrix(n, x.shape[3]),
    "weights turned": lambda x, _: jnp.roll(x, 1, -2),
}


def _bounded(s: Any) -> Any:
    return jnp.exp(s) / jnp.maximum(jnp.exp(s).sum(-1, keepdims=True), 1.0)


def _with_sum(s: Any, change: Callable[[Any], Any]) -> Any:
    e = exponentials(s)
    return e / change(e.sum(-1, keepdims=True))


def mutated(s: Any, number: int) -> Any:
    """A softmax of which each step may be another one of the same ops."""
    r = random.Random(number)

    def one_of(usual: Callable[[], Any], *others: Callable[[], Any]) -> Any:
        return r.choice(others)() if r.random() < 0.3 else usual()

    axis = one_of(lambda: -1, lambda: -2, lambda: 1)
    largest = one_of(
        lambda: lax.stop_gradient(s.max(-1, keepdims=True)),
        lambda: s.max(-1, keepdims=True),
        lambda: s.max(axis, keepdims=True),
        lambda: s.mean(-1, keepdims=True),
        lambda: lax.stop_gradient(s.max()),
        lambda: 0.5 * s.max(-1, keepdims=True),
    )
    e = one_of(
        lambda: jnp.exp(s - largest),
        lambda: jnp.exp(s) / jnp.exp(largest),
        lambda: jnp.exp((s - largest) * 0.5),
        lambda: jnp.exp(s - largest) + 0.01,
        lambda: jnp.exp(s - largest) * s,
        lambda: jnp.exp(s - largest) * jnp.exp(largest - s),
    )
    total = one_of(
        lambda: e.sum(-1, keepdims=True),
        lambda: e.sum(axis, keepdims=True),
        lambda: jnp.exp(s - largest).sum(-1, keepdims=True),
        lambda: e.sum(-1, keepdims=True) + e.max(-1, keepdims=True),
        lambda: (e * e).sum(-1, keepdims=True),
        lambda: e.sum(-1, keepdims=True) + 1e-2,
    )
    weights = one_of(
        lambda: e / total,
        lambda: e * (1.0 / total),
        lambda: e / total * (total / (total + 0.0)),
        lambda: jnp.where(s > largest - 9.0, e / total, 0.0),
        lambda: jnp.where(e > 0, e / total, 0.0),
        lambda: e / total - lax.stop_gradient(e / total) + e / (2 * total),
    )
    return one_of(
        lambda: weights,
        lambda: weights * 1.0 + 0.0 * total,
        lambda: weights + 0.1 * (weights - weights.mean(-1, keepdims=True)),
        lambda: weights + 0.0 * s,
        lambda: jnp.maximum(weights, 0.0),
        lambda: weights / weights.sum(-1, keepdims=True),
    )


OF_SOFTMAX: dict[str, Callable[[Any], Any]] = {
    "over queries": lambda s: jax.nn.softmax(s, -2),
    "over heads": lambda s: jax.nn.softmax(s, 1),
    "one more": lambda s: jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True)),
    "sum at least one": _bounded,
    "norm of two": lambda s: jnp.sqrt(_share(jnp.square(exponentials(s)))),
    "base two": lambda s: _share(jnp.exp2(s)),
    "sum of another query": lambda s: _with_sum(s, lambda t: jnp.roll(t, 1, -2)),
    "sum of a head": lambda s: _with_sum(s, lambda t: t[:, :1]),
    "sum stopped": lambda s: _with_sum(s, lax.stop_gradient),
    "sum of some keys": lambda s: (
        exponentials(s) / exponentials(s)[..., :-2].sum(-1, keepdims=True)
    ),
    "sigmoids": jax.nn.sigmoid,
}
