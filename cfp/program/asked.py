"""Sharding rules of custom_partitioning ops, validated by the ops' own callbacks.

A rule that comes with an op (``sharding_rule=``) is a promise that its ``partition``
callback need not keep: the rule of JAX's cuDNN attention says nothing of keys, and
``partition`` refuses queries, keys and values that are sharded in different ways. So
each factor is tried: ``partition`` is asked for the op with the factor's dims sharded,
and the dims that it keeps, in operands and results, are one factor. Where it refuses
them, the dims that stand at the same place in other operands are sharded as well, and
dims of the same size in operands that the rule links to nothing. Without a rule each
dim of each operand is tried.
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
        infer: of a mesh, operands with shardings, and results; None if there is none.
        operands, results: shapes and dtypes, flat.
    """

    partition: Callable[..., Any]
    infer: Callable[..., Any] | None
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
            The sharded dims of operands and results, and what computes them on one
            device, as text.

        Raises:
            Refused: a callback raises, or answers with what does not fit together.
        """
        count = len(self.operands)
        try:
            operands = self.in_tree.unflatten(
                self._sharded(mesh, dims, 0, self.operands)
            )
            results = self._sharded(mesh, dims, count, self.results)
            if self.infer is not None:
                plain = self.out_tree.unflatten(list(self.results))
                inferred = self.infer(mesh, operands, plain)
                results = [
                    Shape(r.shape, r.dtype, sharding=s)
                    for r, s in zip(
                        self.results, self.out_tree.flatten_up_to(inferred), strict=True
                    )
                ]
            _, local, out, ins = self.partition(
                mesh, operands, self.out_tree.unflatten(results)
            )
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

    def _sharded(
        self,
        mesh: Mesh | AbstractMesh,
        dims: Dims,
        first: int,
        tensors: Sequence[Shape],
    ) -> list[Shape]:
        return [
            Shape(
                t.shape,
                t.dtype,
                sharding=NamedSharding(mesh, spec_of(dims, number, len(t.shape))),
            )
            for number, t in enumerate(tensors, first)
        ]


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


class Asking:
    """Finds the factors that an op's callbacks let be sharded.

    Args:
        rule: what came with the op.
        mesh: its axes' names are what the callbacks may know. Sizes are put in
            their place that divide a factor, so that the answer is one for meshes of
            all sizes.
    """

    def __init__(
        self, callbacks: Callbacks, rule: Rule | None, mesh: Mesh | AbstractMesh
    ) -> None:
        self.callbacks = callbacks
        self.rule = rule
        self.mesh = mesh
        self.axes = [name for name, size in mesh.shape.items() if size > 1]
        self.count = len(callbacks.operands)
        self.claimed: set[OpDim] = set()
        self.pieces = 0  # of the factor that is tried
        self.refusals: dict[str, None] = {}

    def run(self) -> CallbackRule:
        """Tries every factor."""
        groups: list[tuple[OpDim, ...]] = []
        sizes: list[int] = []
        texts: list[str] = []
        reduction = set()
        for seed, is_sum, pieces in self._seeds():
            if self.claimed.intersection(seed):
                continue
            self.pieces = pieces
            found = self._grown(seed)
            if found is None:
                continue
            kept, text = found
            has_result = any(tensor >= self.count for tensor, _ in kept)
            if not (has_result or is_sum) or not self._together(groups, kept):
                continue
            if not has_result:
                reduction.add(len(groups))
            groups.append(tuple(sorted(kept)))
            sizes.append(self._common(kept))
            texts.append(text)
            self.claimed.update(kept)
        return CallbackRule(
            tuple(groups),
            tuple(sizes),
            frozenset(reduction),
            tuple(self.refusals),
            tuple(texts),
        )

    def _size(self, place: OpDim) -> int:
        return self.callbacks.tensors[place[0]].shape[place[1]]

    def _common(self, places: Iterable[OpDim]) -> int:
        """The size of a factor with these dims, of the pieces that its rule allows."""
        return math.gcd(self.pieces, *map(self._size, places))

    def _seeds(self) -> Iterator[tuple[tuple[OpDim, ...], bool, int]]:
        """Yields dims that may be one factor, whether it is summed over, and its size.

        The size is 0 where the dims alone limit it: a rule may leave pieces of them
        whole, as factors behind it that need replication.
        """
        rule = self.rule
        if rule is None:
            for tensor, aval in enumerate(self.callbacks.operands):
                for dim, size in enumerate(aval.shape):
                    if size > 1:
                        yield ((tensor, dim),), False, 0
            return
        by_factor: dict[int, list[OpDim]] = {}
        in_pieces: set[int] = set()
        for tensor, dims in enumerate((*rule.operands, *rule.results)):
            for dim, factors in enumerate(dims):
                factor = rule.major(factors)
                if factor is not None and factor not in rule.fixed:
                    by_factor.setdefault(factor, []).append((tensor, dim))
                    if rule.fixed.intersection(factors):
                        in_pieces.add(factor)
        self.free = {p for found in by_factor.values() if len(found) < 2 for p in found}
        for factor, places in by_factor.items():
            is_sum = factor in rule.reduction
            if (len(places) > 1 or is_sum) and places[0][0] < self.count:
                size = rule.sizes[factor] if factor in in_pieces else 0
                yield tuple(places), is_sum, size

    def _is_free(self, place: OpDim) -> bool:
        """True if a dim may join a factor: the rule, if there is one, is silent."""
        if place in self.claimed:
            return False
        return self.rule is None or place in self.free or self._is_linked(place)

    def _is_linked(self, place: OpDim) -> bool:
        """True if a rule links an operand's dim to a result and to no other operand.

        Such a dim of a key may yet have to be sharded as that of the query is.
        """
        rule = self.rule
        assert rule is not None
        factor = rule.major(rule.operands[place[0]][place[1]])
        readers = sum(any(factor in dim for dim in dims) for dims in rule.operands)
        return factor is not None and factor not in rule.fixed and readers == 1

    def _grown(self, seed: tuple[OpDim, ...]) -> tuple[set[OpDim], str] | None:
        """The dims that are sharded together with a factor's; None if none can be."""
        try:
            return self._asked(seed)
        except Refused as error:
            reason = str(error)
        first = seed[0]
        size = self._size(first)
        rank = len(self.callbacks.operands[first[0]].shape)
        wider = list(seed)
        taken = {tensor for tensor, _ in seed}
        for tensor, aval in enumerate(self.callbacks.operands):
            place = (tensor, first[1])
            if tensor in taken or len(aval.shape) != rank or not self._is_free(place):
                continue
            if self._size(place) > 1 and size % self._size(place) == 0:
                wider.append(place)
        try:
            kept, text = self._asked(tuple(wider))
        except Refused as error:
            self.refusals[reason or str(error)] = None
            return None
        sizes = {self._size(place) for place in kept}
        for tensor, aval in enumerate(self.callbacks.operands):
            if any(tensor == t for t, _ in kept):
                continue
            for dim, other in enumerate(aval.shape):
                place = (tensor, dim)
                if other not in sizes or not self._is_free(place):
                    continue
                try:
                    more, more_text = self._asked((*kept, place))
                except Refused:
                    continue
                if kept < more:
                    kept, text = more, more_text
                    break
        return kept, text

    def _asked(self, places: Sequence[OpDim]) -> tuple[set[OpDim], str]:
        """Returns the dims that stay sharded where each axis of the mesh shards them.

        Raises:
            Refused: an axis cannot, or the first of these dims is not kept.
        """
        found: tuple[set[OpDim], str] | None = None
        for axis in self.axes:
            ways = _least_divisor(self._common(places))
            mesh = self._with_sizes(ways)
            dims: Dims = {place: (axis,) for place in places}
            kept, text = self._answer(mesh, dims)
            places_kept = set(kept)
            if places[0] not in kept or set(kept.values()) != {(axis,)}:
                raise Refused("its operands are to be whole along that dim")
            if found is not None and found[0] != places_kept:
                raise Refused("each axis of the mesh would shard something else")
            found = found or (places_kept, text)
        assert found is not None, "a mesh for planning has an axis"
        return found

    def _answer(self, mesh: AbstractMesh, dims: Dims) -> tuple[Dims, str]:
        """As on a mesh without devices, or on the one that is there."""
        try:
            return self.callbacks.partitioned(mesh, dims)
        except Refused:
            if isinstance(self.mesh, AbstractMesh):
                raise
            return self.callbacks.partitioned(self.mesh, dims)

    def _with_sizes(self, ways: int) -> AbstractMesh:
        names = tuple(self.mesh.shape)
        sizes = (ways if name in self.axes else 1 for name in names)
        return AbstractMesh(tuple(sizes), names)

    def _together(self, groups: Sequence[Sequence[OpDim]], kept: set[OpDim]) -> bool:
        """True if a factor may be sharded while each of the others is."""
        if len(self.axes) < 2:
            return True
        one, other = self.axes[:2]
        for group in groups:
            ways = _least_divisor(self._common(kept))
            if any(self._size(place) % ways for place in group):
                continue
            dims: Dims = {place: (one,) for place in group}
            dims.update({place: (other,) for place in kept})
            try:
                found, _ = self._answer(self._with_sizes(ways), dims)
            except Refused as error:
                self.refusals[str(error)] = None
                return False
            if found != dims:
                return False
        return True


def _least_divisor(size: int) -> int:
    """The smallest number above one that divides another."""
    if size < 2:
        raise Refused("these dims have no divisor in common")
    return next(n for n in range(2, size + 1) if size % n == 0)


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
