"""Functions of an attention's sites as they are written, and as a kernel computes them.

For comparing both on devices: the same operands, and the same results, as gradients of
queries, keys and values, in the shapes and dtypes of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cfp.attention.matching.core import Core, Key
from cfp.attention.matching.found import ORDER, Tensor
from cfp.attention.matching.functions import Way, turned
from cfp.attention.matching.matches import Match, replacements
from cfp.attention.matching.meaning import Proved, in_order
from cfp.program.graph import Program, numpy_dtype
from cfp.program.replace import Replacement


@dataclass(frozen=True)
class Site:
    """One replacement of an attention: a pass, or a forward and its backward pass.

    Attributes:
        operands: shapes and dtypes, each value once, however often it is read.
        written, replaced: functions of these, each of all results of the passes; the
            operands of `written` are concrete arrays.
    """

    operands: tuple[jax.ShapeDtypeStruct, ...]
    written: Callable[..., list[Any]]
    replaced: Callable[..., list[Any]]


def sites(program: Program, match: Match, way: Way, mesh: Mesh) -> Iterator[Site]:
    """All sites of an attention that is written out."""
    by_results = {
        tuple(t.value for t in one.one.makes.values()): one for one in match.passes
    }
    for made in replacements(program, match, way):
        passes = [by_results[stage.makes] for stage in made.stages]
        shapes: dict[Key, jax.ShapeDtypeStruct] = {}
        for proved in passes:
            for key, tensor in _reads(proved):
                value = program.values[tensor.value]
                sizes = dict(zip(tensor.letters, value.shape, strict=True))
                shape = tuple(sizes[a] for a in _names(key))
                dtype = numpy_dtype(value.dtype)
                shapes.setdefault(key, jax.ShapeDtypeStruct(shape, dtype))
        yield Site(
            tuple(shapes.values()),
            partial(_written, [*shapes], passes),
            partial(_replaced, [*shapes], passes, made, mesh),
        )


def _reads(proved: Proved) -> Iterator[tuple[Key, Tensor]]:
    """Operands, masks and biases in the order of a stage, and what they are."""
    core, one = proved.core, proved.one
    for name in ("q", "k", "v"):
        yield core.roots[name], one.reads[name]
    for tensor, side in zip(proved.reads, proved.meaning.sides, strict=True):
        yield (core.values.number((tensor.value, ())), side.letters), tensor
    if one.is_backward:
        yield core.roots["dout"], one.reads["dout"]


def _names(key: Key) -> list[str]:
    return [a for a in ORDER if a in key[1]]


def _replaced(
    keys: Sequence[Key],
    passes: Sequence[Proved],
    made: Replacement,
    mesh: Mesh,
    *operands: Any,
) -> list[Any]:
    given, kept, results = dict(zip(keys, operands, strict=True)), [], []
    functions = made.functions.stages(mesh)
    for proved, stage, function in zip(passes, made.stages, functions, strict=True):
        reads = []
        for key, tensor in _reads(proved):
            value = proved.core.program.values[tensor.value]
            own = [a for a in tensor.letters if a in key[1]]
            pairs = zip(value.shape, tensor.letters, strict=True)
            sizes = [n if a in own else 1 for n, a in pairs]
            x = turned(given[key], _names(key), own).reshape(sizes)
            reads.append(
                jnp.broadcast_to(x, value.shape).astype(numpy_dtype(value.dtype))
            )
        found = [*function(*reads, *kept)]
        results += found[: len(stage.makes)]
        kept = found[len(stage.makes) :]
    return results


def _written(
    keys: Sequence[Key], passes: Sequence[Proved], *operands: Any
) -> list[Any]:
    given, results = dict(zip(keys, operands, strict=True)), []
    for proved in passes:
        core = proved.core
        known: dict[Key, Any] = {}
        sides: dict[int, np.ndarray] = {}
        for key, tensor in _reads(proved):
            sizes = iter(given[key].shape)
            shape = [next(sizes) if a in key[1] else 1 for a in ORDER]
            known[key] = given[key].reshape(shape)
            own = [a if a in key[1] else "" for a in tensor.letters]
            x = turned(np.asarray(given[key]), _names(key), own)
            sizes = iter(x.shape)
            same = core.values.same(tensor.value)
            sides[same] = x.reshape([next(sizes) if a else 1 for a in own])
        for key, side in core.sides.items():
            x = core.values.dense(side.node[0], sides)
            known[key] = jnp.asarray(in_order(x, side.letters))
        results += jax.jit(partial(_outputs, core))(known)
    return results


def _outputs(core: Core, known: Mapping[Key, Any]) -> list[Any]:
    """The results of a pass, in its order, shapes and dtypes."""
    found = core.outputs(core.run(known, jnp, cast=True), jnp)
    results = []
    for name, tensor in core.one.makes.items():
        value = core.program.values[tensor.value]
        names = [a for a in ORDER if a in tensor.letters]
        x = found[name].reshape([n for n in found[name].shape if n > 1])
        x = turned(x, names, tensor.letters).reshape(value.shape)
        results.append(x.astype(numpy_dtype(value.dtype)))
    return results
