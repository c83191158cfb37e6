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
from cfp.program.graph import axes_of
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

    def sharded(self, mesh: Mesh | AbstractMesh, dims: Dims) -> tuple[Any, Any]:
        """Operands and results with the shardings of some dims."""
        shaped = []
        for number, t in enumerate(self.tensors):
            parts = (dims.get((number, dim)) for dim in range(len(t.shape)))
            spec = PartitionSpec(*(p[0] if p and len(p) == 1 else p for p in parts))
            shaped.append(Shape(t.shape, t.dtype, sharding=NamedSharding(mesh, spec)))
        count = len(self.operands)
        ins, outs = shaped[:count], shaped[count:]
        return self.in_tree.unflatten(ins), self.out_tree.unflatten(outs)

    def local_program(self, mesh: AbstractMesh, dims: Dims) -> str:
        """The program of one device, as text, where some dims are sharded.

        Raises:
            Refused: a callback raises, or answers with what does not fit together.
        """
        count = len(self.operands)
        try:
            _, local, out, ins = self.partition(mesh, *self.sharded(mesh, dims))
            answered = [
                *self.in_tree.flatten_up_to(ins),
                *self.out_tree.flatten_up_to(out),
            ]
            pairs = [*zip(answered, self.tensors, strict=True)]
            kept = [axes_of(sharding.spec, len(t.shape)) for sharding, t in pairs]
            tiles = [Shape(one.shard_shape(t.shape), t.dtype) for one, t in pairs]
            closed = jax.make_jaxpr(local, axis_env=list(mesh.shape.items()))(
                *self.in_tree.unflatten(tiles[:count])
            )
        except Exception as error:  # Callbacks raise whatever they like.
            raise Refused(summary_of(error)) from error
        places = {(n, d): a for n, s in enumerate(kept) for d, a in enumerate(s) if a}
        if places != dims:
            raise Refused("its operands are to be whole along that dim")
        made: list[Any] = [*closed.out_avals]
        found = [(tuple(a.shape), a.dtype) for a in made]
        wanted = [(t.shape, t.dtype) for t in tiles[count:]]
        if found != wanted:
            raise Refused(f"it computes {found} on one device, where {wanted} belong")
        return _ADDRESS.sub("", str(closed)) + _constants(closed)


def _constants(value: Any) -> str:
    """The digests of arrays that a program holds, which its text leaves out."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        inside = [*getattr(value, "consts", ())]
        for eqn in value.eqns:
            inside += [*eqn.invars, *eqn.params.values()]
        value = (*inside, *getattr(value, "jaxpr", value).outvars)
    if isinstance(value, Literal):
        return _constants(value.val)
    if isinstance(value, tuple | list):
        return "".join(map(_constants, value))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return f"{array.dtype}{hashlib.sha256(array.tobytes()).hexdigest()}"
    return ""


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor that may be sharded.

    Attributes:
        places: its dims.
        size: they are split into so many pieces at most.
        is_sum: true if it is summed over.
    """

    places: tuple[OpDim, ...]
    size: int
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class CallbackRule:
    """A rule as an op's callbacks keep it.

    Attributes:
        factors: those that may be sharded.
        refusals: why others may not, each once.
        locals: what computes each on one device, as text.
    """

    factors: tuple[Factor, ...]
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
        found.append(Factor(places, _common(tensors, places)))
    return found


def factors_of(rule: Rule | None, tensors: Sequence[Shape]) -> Iterator[Factor]:
    """Yields the factors that a rule lets be sharded."""
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
            yield Factor(tuple(places), common, is_sum)


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
    found: dict[Factor, str] = {}
    refusals: dict[str, None] = {}
    for factor in factors:
        ways = next((n for n in range(2, factor.size + 1) if factor.size % n == 0), 0)
        if not ways:
            continue
        sizes = tuple(ways if name == axis else 1 for name in mesh.shape)
        shape = AbstractMesh(sizes, tuple(mesh.shape))
        dims: Dims = dict.fromkeys(factor.places, (axis,))
        try:
            found[factor] = callbacks.local_program(shape, dims)
        except Refused as error:
            refusals[str(error)] = None
    return CallbackRule(tuple(found), tuple(refusals), tuple(found.values()))


def written(asked: CallbackRule, tensors: Sequence[Shape], count: int) -> ir.Attribute:
    """A rule as Shardy has it; dims that may not be sharded have factors alone."""
    sizes = [factor.size for factor in asked.factors]
    shared = len(sizes)
    of = {place: n for n, one in enumerate(asked.factors) for place in one.places}

    def factors(place: OpDim, whole: int) -> list[int]:
        known = [of[place]] if place in of else []
        rest = whole // sizes[of[place]] if known else whole
        if known and rest == 1:
            return known
        sizes.append(rest)
        return [*known, len(sizes) - 1]

    mappings = [
        sdy.TensorMappingAttr.get(
            [
                sdy.DimMappingAttr.get(factors((tensor, dim), whole))
                for dim, whole in enumerate(aval.shape)
            ]
        )
        for tensor, aval in enumerate(tensors)
    ]
    return sdy.OpShardingRuleAttr.get(
        sizes,
        mappings[:count],
        mappings[count:],
        [n for n, factor in enumerate(asked.factors) if factor.is_sum],
        [n for n in range(shared, len(sizes)) if sizes[n] > 1],
        is_custom=True,
    )
