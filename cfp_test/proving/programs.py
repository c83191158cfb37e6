"""The programs of the catalogue, as ops by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.proving.catalogue import ENTRIES
from cfp_test.proving.engine import Single, backward, singles
from cfp_test.support.checking import MeshSizes, make_mesh

Function = tuple[Callable[..., Any], Sequence[Any]]
MESHES: tuple[MeshSizes, ...] = ((("x", 4),), (("x", 2), ("y", 2)))


@lru_cache
def mesh_of(sizes: MeshSizes) -> Mesh:
    """A mesh of virtual devices."""
    return make_mesh(sizes)


def singles_of(name: str, most: int | None = None) -> list[Single]:
    """The different ops of an entry's programs, forward and backward.

    Args:
        name: of the entry.
        most: the number of variants to look at; all, if not given.
    """
    entry = ENTRIES[name]
    found: dict[str, Single] = {}
    for _, fn, args in list(entry.variants())[:most]:
        for one in _singles(fn, args):
            found.setdefault(one.digest, one)
        if entry.backward and (gradient := _gradient(fn, args)) is not None:
            for one in _singles(*gradient):
                found.setdefault(one.digest, one)
    return list(found.values())


def _gradient(fn: Callable[..., Any], args: Sequence[Any]) -> Function | None:
    """A function's gradients and what they take; None where JAX has none."""
    made = jax.eval_shape(fn, *args)
    if not all(_is_inexact(x) for x in jax.tree.leaves(made)):
        return None
    if not any(_is_inexact(jnp.asarray(x)) for x in args):
        return None
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), made)
    gradients = backward(fn, args)
    try:
        jax.eval_shape(gradients, ones, *args)
    except NotImplementedError:
        return None
    return gradients, (ones, *args)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _singles(fn: Callable[..., Any], args: Sequence[Any]) -> list[Single]:
    step = flatten_step(fn, args)
    program, _ = trace(step, mesh_of(MESHES[-1]))
    return singles(program, step.flatten(args, {}))
