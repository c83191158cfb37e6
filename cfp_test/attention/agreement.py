"""Steps with attention as a kernel computes it, beside the steps as they are written.

Results are compared row by row, so that one query among many counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cfp.attention import chunked
from cfp_test.attention.replaced import Step

Array = jax.Array
KERNELS = ("chunked", "xla")
# Of rows of float32, and of rows of which something is computed in 16 bits.
TOLERANCE, NARROW_TOLERANCE = 1e-3, 0.25
# Of rows that cancel to zero.
NOISE = 1e-2
CHUNK = 32


@dataclass(frozen=True)
class Outcome:
    """An attention's step, taken by kernels or left.

    Attributes:
        taken: how many attentions kernels compute.
        left: why others stay as they are written.
        kernels: which kernels computed them.
        off: the largest error of a row of results, by kernel.
    """

    taken: int
    left: tuple[str, ...]
    kernels: tuple[str, ...]
    off: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.off.values(), default=0.0)


def gradients_of(
    mix: Callable[..., Array], counted: int, wide: bool = False
) -> Callable[..., Any]:
    """A step of an attention: its output, and gradients of the first arguments.

    Args:
        mix: makes an array of arguments.
        counted: how many arguments have gradients.
    """

    def loss(*args: Any) -> tuple[Array, Array]:
        out = mix(*args)
        places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(places)), out

    def step(*args: Any) -> Any:
        (_, out), gradients = jax.value_and_grad(loss, range(counted), has_aux=True)(
            *args
        )
        return gradients, out

    return step


def row_error(got: Any, expected: Any, rounding: float = 0.0) -> float:
    """The largest error of a row, relative to that row and to the others.

    Numbers that the step as written makes infinite or NaN are not compared.

    Args:
        rounding: what rows differ by in 16 bits where what is left is a difference of
            equal numbers, as the gradient of a query that sees one key.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, expected) else np.inf
    got, expected = (np.atleast_1d(x).astype(np.float64) for x in (got, expected))
    finite = np.isfinite(expected)
    difference = np.linalg.norm(np.where(finite, got - expected, 0.0), axis=-1)
    sizes = np.linalg.norm(np.where(finite, expected, 0.0), axis=-1)
    typical = np.sqrt(np.mean(np.square(sizes)))
    found = np.max(difference / (sizes + 0.1 * typical + rounding + NOISE), initial=0.0)
    return float(found) if np.isfinite(found) else np.inf


def _error(got: Any, expected: Any, rounding: float = 0.0) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(row_error(*pair, rounding) for pair in pairs)


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def compare(
    fn: Callable[..., Any],
    *inputs: Sequence[Any],
    mesh: Mesh,
    exact: Callable[..., Any] | None = None,
) -> Outcome:
    """Compares a step with the same step whose attention each possible kernel computes.

    Args:
        inputs: arguments of one shape, the first those that the step is traced with.
        exact: computes the same in float32, of these arguments in float32. An error
            then counts as far as it is larger than twice that of the step itself.
    """
    step = Step(fn, inputs[0], mesh)
    sites = step.attentions
    left = tuple(sorted({one.reason for one in sites.left_alone}))
    if not sites.found:
        return Outcome(0, left, (), {})
    refused = {kernel: step.refusal(kernel) for kernel in KERNELS}
    left += tuple(sorted({why for why in refused.values() if why}))
    kernels = tuple(kernel for kernel, why in refused.items() if why is None)
    plain, off = jax.jit(fn), {}
    for kernel in kernels:
        with patch.object(chunked, "CHUNK", CHUNK):
            planned, _ = step.with_kernel(kernel, wide=False)
        off[kernel] = 0.0
        for args in inputs:
            found, expected = planned(*args), plain(*args)
            if exact is None:
                error = _error(found, expected)
            else:
                right = exact(*jax.tree.map(_widened, args))
                error = _error(found, right, 0.3) - 2 * _error(expected, right, 0.3)
                error = max(0.0, error - NARROW_TOLERANCE)
            off[kernel] = max(off[kernel], error)
    return Outcome(len(sites.found), left, kernels, off)
