"""Sharding rules of custom_partitioning ops, validated by the ops' own callbacks.

Factors are those of the rule that comes with an op (``sharding_rule=``). The rule of
JAX's cuDNN attention says nothing of keys: its factors are a table. An op without a
rule is replicated. As callbacks need not keep what a rule promises, each factor is
tried once: ``partition`` is asked for the op with the factor's dims sharded, and a
factor that it refuses, or does not keep, is left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    Literal,
)
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cfp.errors import summary_of
from cfp.program.rules import Rule

_ADDRESS = re.compile(r"0x[0-9a-f]+")

OpDim = tuple[int, int]  # (number among operands and then results, dim)
Shape = jax.ShapeDtypeStruct
Dims = dict[OpDim, tuple[str, ...]]  # the mesh axes of each sharded dim


class Refused(Exception):
    """The callbacks of an op do not take a sharding."""


@dataclass(frozen=True, eq=False)
class Callbacks:
    """A custom_partitioning op's callbacks, its static arguments bound.

    Attributes:
        partition: of a mesh, operands and results with shardings.
        operands, results: shapes and dtypes, flat.
    """

    partition: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    in_tree: Any
    out_tree: Any

    @property
    def tensors(self) -> tuple[Shape, ...]:
        """The operands, then the results."""
        return (*self.operands, *self.results)

    def partitioned(self, mesh: Mesh | AbstractMesh, dims: Dims) -> tuple[Dims, str]:
        """The dims that the op keeps sharded of those it is asked for.

        Returns:
            The sharded dims of operands and results, and the program of one device as
            text.

        Raises:
            Refused: a callback raises, or answers with what does not fit together.
        """
        count = len(self.operands)
        try:
            _, local, out, ins = self.partition(mesh, *self.sharded(mesh, dims))
            shardings = (
                *self.in_tree.flatten_up_to(ins),
                *self.out_tree.flatten_up_to(out),
            )
            kept = _kept(self.tensors, shardings)
            tiles = [_tile(t, kept, i, mesh) for i, t in enumerate(self.tensors)]
            closed = jax.make_jaxpr(local, axis_env=list(mesh.shape.items()))(
                *self.in_tree.unflatten(tiles[:count])
            )
        except Exception as error:  # Callbacks raise whatever they like.
            raise Refused(summary_of(error)) from error
        made: list[Any] = [*closed.out_avals]
        found = [(tuple(a.shape), a.dtype) for a in made]
        wanted = [(t.shape, t.dtype) for t in tiles[count:]]
        if found != wanted:
            raise Refused(f"it computes {found} on one device, where {wanted} belong")
        return kept, _ADDRESS.sub("", str(closed)) + _constants(closed)

    def sharded(self, mesh: Mesh | AbstractMesh, dims: Dims) -> tuple[Any, Any]:
        """Operands and results with the shardings of some dims."""
        shaped = [
            Shape(
                t.shape,
                t.dtype,
                sharding=NamedSharding(mesh, spec_of(dims, number, len(t.shape))),
            )
            for number, t in enumerate(self.tensors)
        ]
        count = len(self.operands)
        return self.in_tree.unflatten(shaped[:count]), self.out_tree.unflatten(
            shaped[count:]
        )


def _constants(value: Any) -> str:
    """The digests of arrays that a program holds, which its text leaves out."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        inside = [*getattr(value, "consts", ())]
        for eqn in value.eqns:
            inside += [*eqn.invars, *eqn.params.values()]
        return "".join(
            map(_constants, (*inside, *getattr(value, "jaxpr", value).outvars))
        )
    if isinstance(value, Literal):
        return _constants(value.val)
    if isinstance(value, tuple | list):
        return "".join(map(_constants, value))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return f"{array.dtype}{hashlib.sha256(array.tobytes()).hexdigest()}"
    return ""


def spec_of(dims: Dims, tensor: int, rank: int) -> PartitionSpec:
    """The sharding of a tensor, with an entry for each of its dims."""
    parts = (dims.get((tensor, dim), ()) for dim in range(rank))
    return PartitionSpec(
        *(None if not p else p[0] if len(p) == 1 else p for p in parts)
    )


def _kept(tensors: Sequence[Shape], shardings: Sequence[Any]) -> Dims:
    """The sharded dims of what a callback answers with."""
    found: Dims = {}
    for number, (tensor, sharding) in enumerate(zip(tensors, shardings, strict=True)):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(f"expected a NamedSharding, got {sharding!r}")
        for dim, names in enumerate(sharding.spec):
            if names is None:
                continue
            if not isinstance(names, str | tuple):
                raise ValueError(f"expected axes of the mesh, got {names!r}")
            axes = (names,) if isinstance(names, str) else names
            if axes and dim < len(tensor.shape):
                found[number, dim] = axes
    return found


def _tile(
    tensor: Shape, dims: Dims, number: int, mesh: Mesh | AbstractMesh
) -> jax.ShapeDtypeStruct:
    """The part of a tensor that one device has."""
    shape = []
    for dim, size in enumerate(tensor.shape):
        ways = math.prod(mesh.shape[a] for a in dims.get((number, dim), ()))
        if size % ways:
            raise ValueError(f"{ways} devices cannot share a dim of size {size}")
        shape.append(size // ways)
    return Shape(tuple(shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class CallbackRule:
    """A rule as an op's callbacks keep it.

    Attributes:
        groups: for each factor that may be sharded its dims.
        sizes: of these factors: dims are split into so many pieces at most.
        reduction: those of them that are summed over.
        refusals: why others may not, each once.
        locals: what computes each on one device, as text.
    """

    groups: tuple[tuple[OpDim, ...], ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int]
    refusals: tuple[str, ...]
    locals: tuple[str, ...]


# Dims of the tensors of JAX's cuDNN attention that a letter stands for, "B" sequences
# and "N" heads, which its own rule leaves out: operands, then results. "*" is a dim of
# the layout of queries. By the name of the callback.
_HEADS, _BIAS, _STATISTICS = "****", "BN..", "BN."
_INPUTS = (_HEADS, _HEADS, _HEADS, _BIAS, "B", "B", "B.", "B.", "", "")
_CUDNN = {
    "_dot_product_attention_fwd_partition": (*_INPUTS, _HEADS, _STATISTICS),
    "_dot_product_attention_bwd_partition": (
        *(*_INPUTS, _STATISTICS, _HEADS, _HEADS),
        *(_HEADS, _HEADS, _HEADS, _BIAS),
    ),
}
_CUDNN_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_CUDNN_LAYOUTS = ("BTNH", "BNTH")
_CUDNN_LAYOUT_ARGUMENT = 5  # Of the static ones.

Factor = tuple[tuple[OpDim, ...], int, bool]


def factors_of_cudnn(
    partition: Callable[..., Any], static_args: Sequence[Any], tensors: Sequence[Shape]
) -> list[Factor] | None:
    """The factors of an op of JAX's cuDNN attention; None of any other op."""
    name = getattr(partition, "__name__", "")
    if getattr(partition, "__module__", "") != _CUDNN_MODULE or name not in _CUDNN:
        return None
    layout = _CUDNN_LAYOUTS[static_args[_CUDNN_LAYOUT_ARGUMENT]]
    found = []
    for letter in "BN":
        places = tuple(
            (number, dim)
            for number, (tensor, letters) in enumerate(
                zip(tensors, _CUDNN[name], strict=False)
            )
            if len(letters) == len(tensor.shape)
            for dim, own in enumerate(layout if letters == _HEADS else letters)
            if own == letter and tensor.shape[dim] > 1
        )
        found.append((places, _common(tensors, places), False))
    return found


def factors_of(rule: Rule | None, tensors: Sequence[Shape]) -> Iterator[Factor]:
    """Yields the dims of each factor that a rule lets be sharded, its size, and
    whether it is summed over.
    """
    if rule is None:
        return
    for factor, size in enumerate(rule.sizes):
        places, in_pieces = [], False
        for tensor, dims in enumerate((*rule.operands, *rule.results)):
            for dim, factors in enumerate(dims):
                if rule.major(factors) == factor and factor not in rule.fixed:
                    places.append((tensor, dim))
                    in_pieces |= bool(rule.fixed.intersection(factors))
        is_sum = factor in rule.reduction
        if is_sum or (len(places) > 1 and places[-1][0] >= len(rule.operands)):
            # Dims alone limit it, unless pieces of them are to stay whole.
            common = _common(tensors, places, size if in_pieces else 0)
            yield tuple(places), common, is_sum


def _common(tensors: Sequence[Shape], places: Iterable[OpDim], pieces: int = 0) -> int:
    """The number of pieces that some dims can be split into, all of them."""
    return math.gcd(pieces, *(tensors[tensor].shape[dim] for tensor, dim in places))


def kept_rule(
    callbacks: Callbacks, factors: Iterable[Factor], mesh: Mesh | AbstractMesh
) -> CallbackRule:
    """Those of some factors that an op's callbacks take, each tried once.

    Args:
        mesh: its axes' names are what the callbacks may know. Sizes are put in their
            place that divide a factor, so that the answer is one for meshes of all
            sizes.
    """
    axis = next(name for name, size in mesh.shape.items() if size > 1)
    found: list[Factor] = []
    texts, refusals = [], {}
    for places, size, is_sum in factors:
        ways = next((n for n in range(2, size + 1) if size % n == 0), 0)
        if not ways:
            continue
        sizes = [ways if name == axis else 1 for name in mesh.shape]
        dims: Dims = dict.fromkeys(places, (axis,))
        try:
            kept, text = callbacks.partitioned(
                AbstractMesh(tuple(sizes), tuple(mesh.shape)), dims
            )
        except Refused as error:
            refusals[str(error)] = None
            continue
        if kept != dims:
            refusals["its operands are to be whole along that dim"] = None
            continue
        found.append((places, size, is_sum))
        texts.append(text)
    return CallbackRule(
        tuple(places for places, _, _ in found),
        tuple(size for _, size, _ in found),
        frozenset(n for n, (_, _, is_sum) in enumerate(found) if is_sum),
        tuple(refusals),
        tuple(texts),
    )


def written(asked: CallbackRule, tensors: Sequence[Shape], count: int) -> ir.Attribute:
    """A rule as Shardy has it; dims that may not be sharded have factors alone."""
    sizes = [*asked.sizes]
    of = {place: n for n, group in enumerate(asked.groups) for place in group}

    def new(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    def factors(place: OpDim, whole: int) -> list[int]:
        if (shared := of.get(place)) is None:
            return [new(whole)]
        rest = whole // sizes[shared]
        return [shared, new(rest)] if rest > 1 else [shared]

    mappings = [
        sdy.TensorMappingAttr.get(
            [
                sdy.DimMappingAttr.get(factors((tensor, dim), whole))
                for dim, whole in enumerate(aval.shape)
            ]
        )
        for tensor, aval in enumerate(tensors)
    ]
    own = [n for n in range(len(asked.sizes), len(sizes)) if sizes[n] > 1]
    return sdy.OpShardingRuleAttr.get(
        sizes,
        mappings[:count],
        mappings[count:],
        sorted(asked.reduction),
        own,
        is_custom=True,
    )
