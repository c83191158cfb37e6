"""Steps with attention as a kernel computes it, beside the steps as they are written.

Results are compared row by row, so that one query among many counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cfp.kernels import call, chunked, cudnn, plain
from cfp.kernels.problem import Mask, Scores, finite_bias
from cfp_test.kernels.replaced import Step

Array = jax.Array
KERNELS = ("cudnn", "chunked", "xla")
# Of rows of float32, and of rows of which something is computed in 16 bits.
TOLERANCE, NARROW_TOLERANCE = 1e-3, 0.03
# Of rows that cancel to zero, and of arrays that do, by the largest array.
NOISE, ZERO = 1e-2, 1e-6
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


def row_error(got: Any, expected: Any) -> float:
    """The largest error of a row, relative to that row and to the others."""
    sizes = np.linalg.norm(np.atleast_1d(expected), axis=-1)
    difference = np.linalg.norm(np.atleast_1d(got - expected), axis=-1)
    typical = np.sqrt(np.mean(np.square(sizes)))
    return float(np.max(difference / (sizes + 0.1 * typical + NOISE), initial=0.0))


def array_error(got: Any, expected: Any) -> float:
    """The relative error of an array: of numbers in 16 bits, whose rows differ more."""
    return float(np.linalg.norm(got - expected) / (np.linalg.norm(expected) + NOISE))


def _error(of: Callable[[Any, Any], float], got: Any, expected: Any) -> float:
    """The largest error of several arrays; infinite if one is not finite.

    Where each query sees one key, gradients of queries and keys are zero, or the
    rounding of their terms. So an array that is zero beside the largest one is compared
    by that one.
    """
    pairs = [
        [np.asarray(x, np.float64) for x in pair]
        for pair in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    ]
    largest = max(np.linalg.norm(wanted) for _, wanted in pairs)
    found = max(
        float(np.linalg.norm(one) / (largest + NOISE))
        if np.linalg.norm(wanted) <= ZERO * largest
        else of(one, wanted)
        for one, wanted in pairs
    )
    return found if np.isfinite(found) else np.inf


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _moved(x: Any) -> Any:
    """Numbers up or down by their last place in 16 bits, or by sixteen in 32."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    count = 16 if x.dtype.itemsize > 2 else 1
    signs = np.random.default_rng(0).choice([-count, count], x.shape)
    return x * (1 + signs * jnp.finfo(x.dtype).eps).astype(x.dtype)


def _as_cudnn(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None
) -> Array:
    """Computes as cuDNN does: a mask is a finite bias, and lengths hide the last keys.

    A query that sees no key by its position or by lengths has zeros.
    """
    lengths = mask.lengths(q.shape[0])
    if lengths is not None:
        is_padding = jnp.arange(k.shape[1]) >= lengths[:, None]
        mask = replace(
            mask,
            keys=None,
            query_segments=jnp.zeros(q.shape[:2], jnp.int32),
            key_segments=is_padding.astype(jnp.int32),
        )
    bias = None if bias is None else finite_bias(bias, q.dtype)
    return plain.whole(q, k, v, scores, mask, bias)


@contextmanager
def _cudnn_on_cpus() -> Iterator[None]:
    """Lets cuDNN's kernel be chosen as on GPUs, and computes it in another way."""
    refusal = cudnn.refusal
    with (
        patch.object(call, "platform_of", lambda mesh: "cuda"),
        patch.object(cudnn, "refusal", lambda problem, _: refusal(problem, "cuda")),
        patch.object(cudnn, "whole", _as_cudnn),
    ):
        yield


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
    as_written, off = jax.jit(fn), {}
    for kernel in KERNELS:
        with patch.object(chunked, "CHUNK", CHUNK), _cudnn_on_cpus():
            if (why := step.refusal(kernel)) is not None:
                left += (f"{kernel}: {why}",)
                continue
            planned, _ = step.with_kernel(kernel, wide=False)
        off[kernel] = 0.0
        for args in inputs:
            found, expected = planned(*args), as_written(*args)
            if not all(np.isfinite(x).all() for x in jax.tree.leaves(expected)):
                continue  # Nothing is to be had of a step that makes NaN.
            of = row_error if exact is None else array_error
            if exact is None:
                error = _error(of, found, expected)
            else:
                right = exact(*jax.tree.map(_widened, args))
                error = _error(of, found, right)
                error -= 2 * _error(of, expected, right) + NARROW_TOLERANCE
            if error > TOLERANCE:  # Steep softmaxes in a row magnify rounding.
                moved = as_written(*jax.tree.map(_moved, args))
                error -= 2 * _error(of, moved, expected)
            off[kernel] = max(off[kernel], error)
    return Outcome(len(sites.found), left, tuple(off), off)
