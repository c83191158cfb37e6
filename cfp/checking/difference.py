"""Distances of two results of a step, leaf by leaf, computed on their devices.

Results of whole models are tens of gigabytes: they stay on the devices, and one number
of each leaf comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure

from cfp.program.fixed import fixed


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of a result from one device's: relative L2 of one leaf."""

    path: str
    relative_l2: float


def compare(found: Any, expected: Any) -> list[Difference]:
    """Relative L2 distances of all leaves, largest first; NaN counts as infinite.

    Args:
        found: a pytree of arrays, wherever they are.
        expected: the same structure and shapes.

    Raises:
        ValueError: structures or shapes differ.
    """
    pairs, tree = tree_flatten_with_path(fixed(expected))
    found = fixed(found)
    if tree_structure(found) != tree:
        raise ValueError("results of different structures cannot be compared")
    differences = []
    for (path, want), have in zip(pairs, tree_leaves(found), strict=True):
        name = keystr(path, simple=True, separator="/")
        have, want = jnp.asarray(have), jnp.asarray(want)
        if have.shape != want.shape:
            raise ValueError(
                f"results of different shapes cannot be compared: {name} is "
                f"{have.shape}, and {want.shape} expected"
            )
        # One after another: what is moved to be compared is let go of at once.
        distance = float(_relative_l2(*brought_together(have, want)))
        differences.append(Difference(name, distance))
    return sorted(differences, key=lambda d: -d.relative_l2)


def brought_together(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Puts two arrays on the same devices: those of the one that has several.

    JAX splits an array of one device there and copies the parts from device to device;
    to join parts it takes them through the host, many times slower.
    """
    if other.sharding.num_devices == 1:
        return one, jax.device_put(other, one.sharding)
    return jax.device_put(one, other.sharding), other


def norms(tree: Any) -> dict[str, float]:
    """L2 norms of all leaves, by path; what is not finite counts as 0."""
    return {
        keystr(path, simple=True, separator="/"): float(_size(jnp.asarray(leaf)))
        for path, leaf in tree_flatten_with_path(fixed(tree))[0]
    }


@jax.jit
def _size(x: jax.Array) -> jax.Array:
    a = _as_float(x)
    unit, scale = _norm(jnp.where(jnp.isfinite(a), a, 0))
    return unit * scale


@jax.jit
def _relative_l2(have: jax.Array, want: jax.Array) -> jax.Array:
    a, b = _as_float(have), _as_float(want)
    finite = jnp.isfinite(b)
    same = finite | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    unit, scale = _norm(jnp.where(finite, b, 0))
    error_unit, error = _norm(jnp.where(finite, a - b, 0))
    relative = jnp.where(
        scale > 0, (error_unit / unit) * (error / scale), error_unit * error
    )
    return jnp.where(same.all() & jnp.isfinite(error), relative, jnp.inf)


def _norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L2 norm, as a unit and how many of it.

    Squares, and the norm itself, may be too large or too small to hold.
    """
    size = jnp.abs(x)
    # The compiler may multiply by the reciprocal, which has to be held, too.
    most = float(jnp.finfo(size.dtype).max) ** 0.75
    unit = jnp.clip(size.max(initial=0), 1 / most, most)
    return unit, jnp.sqrt(jnp.square(size / unit).sum())


def _as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    # Types of 8 bits and less are promoted to nothing.
    return x if wide else x.astype(jnp.float32)
