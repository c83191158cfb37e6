"""Products in FP8 of adversarial numbers, beside their bound by a float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# |q(a) - a| <= u |a| + e max|A|: u and e of forward operands and of cotangents.
ROUNDING = {"float8_e4m3fn": (2.0**-4, 2.0**-17), "float8_e5m2": (2.0**-3, 2.0**-31)}
_FORWARD, _GRADIENT = ROUNDING
# What sums of products lose at most: H200's products in FP8 add up in 14 bits.
_SUMS = 2.0**-10

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A product beside the oracle's.

    Attributes:
        share: the largest error by its bound, of the numbers that have one.
        finite: the share of numbers that the oracle has finite.
        wrong: how many are finite in one of both alone.
    """

    share: float
    finite: float
    wrong: int


def step(weights: jax.Array, turn: jax.Array, x: jax.Array, c: jax.Array) -> Any:
    """A product and both gradients of it; its cotangent is `c` with columns moved.

    Args:
        turn: a permutation, the last layer, which stays as it is.
    """

    def loss(weights: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = (x + more) @ weights
        return jnp.sum((y @ turn).astype(jnp.float32) * c.astype(jnp.float32)), y

    differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (value, y), gradients = differentiate(weights, jnp.zeros_like(x))
    return value, turn, y, *gradients


def _outlier(a: np.ndarray) -> np.ndarray:
    a[5] *= 1e4
    return a


def _one(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def put(a: np.ndarray) -> np.ndarray:
        a[5, 3] = value
        return a

    return put


def _times(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: a * scale


# What is done to the weights, the rows and the cotangent.
CASES: dict[str, dict[int, Callable[[np.ndarray], np.ndarray]]] = {
    "as drawn": {},
    "outliers in x": {1: _outlier},
    "outliers in all": {0: _outlier, 1: _outlier, 2: _outlier},
    "zeros in x": {1: _times(0.0)},
    "zeros in all": {0: _times(0.0), 1: _times(0.0), 2: _times(0.0)},
    "an infinity in x": {1: _one(np.inf)},
    "an infinity in the weights": {0: _one(-np.inf)},
    "an infinity in the gradient": {2: _one(np.inf)},
    "a NaN in x": {1: _one(np.nan)},
    "gradients of 1e-8": {2: _times(1e-8)},
    "a scaled loss": {2: _times(1e-8 * 2.0**24)},
    "a large scale": {2: _times(2.0**12)},
    "small weights": {0: _times(1e-6)},
}


def arguments(case: str, dtype: Any, sizes: tuple[int, int, int]) -> list[jax.Array]:
    """The arguments of `step`, for rows, summed numbers and columns."""
    rows, summed, columns = sizes
    random = np.random.default_rng(0)
    shapes = ((summed, columns), (rows, summed), (rows, columns))
    arrays = [random.standard_normal(shape) for shape in shapes]
    arrays[0] /= summed**0.5
    for place, change in CASES[case].items():
        arrays[place] = change(arrays[place])
    turn = np.eye(columns)[random.permutation(columns)]
    weights, x, c = (jnp.asarray(a, jnp.float32).astype(dtype) for a in arrays)
    return [weights, jnp.asarray(turn, dtype), x, c]


def checked(run: Callable[..., Any], args: list[jax.Array]) -> Iterator[Checked]:
    """Compares the three products of `step` with products in float64.

    Args:
        run: the step, rewritten.
    """
    weights, turn, x, c = args
    cotangent = jax.jit(lambda c, turn: c @ turn.T)(c, turn)
    a, b, g = (np.asarray(one).astype(np.float64) for one in (x, weights, cotangent))
    *_, y, of_weights, of_x = run(*args)
    yield _checked(y, (a, _FORWARD), (b, _FORWARD))
    yield _checked(of_weights, (a.T, _FORWARD), (g, _GRADIENT))
    yield _checked(of_x, (g, _GRADIENT), (b.T, _FORWARD))


def _checked(
    got: jax.Array, left: tuple[np.ndarray, str], right: tuple[np.ndarray, str]
) -> Checked:
    info = jnp.finfo(got.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        want = left[0] @ right[0]
        a, of_a = _rounding(*left, float(info.smallest_normal))
        b, of_b = _rounding(*right, float(info.smallest_normal))
        bound = a @ of_b + of_a @ b + of_a @ of_b + _SUMS * (a @ b)
        bound += float(info.eps) * np.abs(want) + float(info.smallest_normal)
        error = np.abs(np.asarray(got).astype(np.float64) - want)
    is_finite = np.isfinite(want)
    # Beyond the largest of the dtype one may be infinite, and the other not.
    is_sure = ~is_finite | (np.abs(want) + bound < float(info.max))
    is_wrong = (np.isfinite(np.asarray(got)) != is_finite) & is_sure
    has_bound = is_finite & is_sure & ~is_wrong
    shares = error[has_bound] / bound[has_bound]
    return Checked(
        share=float(shares.max(initial=0.0)),
        finite=float(is_finite.mean()),
        wrong=int(is_wrong.sum()),
    )


def _rounding(a: np.ndarray, kind: str, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes, and how far rounding moves each number at most.

    Numbers that are not finite count as zeros: what they meet has no bound.
    """
    magnitudes = np.where(np.isfinite(a), np.abs(a), 0.0)
    relative, of_largest = ROUNDING[kind]
    # A scale is no smaller than the normal numbers of the dtype.
    fixed = max(of_largest * magnitudes.max(initial=0.0), least * 2.0**-10)
    return magnitudes, relative * magnitudes + fixed
