"""Sharding rules: how the dims of an op's operands and results share loop indices.

A rule names the loop indices of an op, its *factors*, and says which factors each
dim of each operand and result runs over. Shardy computes the rules, and writes them,
for example for a matrix product, as::

    ([i, k], [k, j])->([i, j]) {i=4, j=16, k=8} reduction={k}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

# Padding by more than this costs more than it spreads. XLA pads what does not divide.
_MOST_PADDING = 4 / 3

_NONE: Mapping[int, int] = MappingProxyType({})
Dims = tuple[tuple[int, ...], ...]  # for each dim its factors, major to minor


@dataclass(frozen=True, slots=True)
class Rule:
    """An op's factors.

    Attributes:
        sizes: the size of each factor.
        operands: for each operand, for each dim, its factors, major to minor.
        results: the same for each result.
        reduction: factors that are summed over: sharding one leaves the result
            unreduced until a collective completes it.
        fixed: factors along which the op cannot run sharded without halo exchange
            or gathering (Shardy's need_replication and permutation factors).
        gathered: those of them along which the compiler gathers what comes in, and
            what is made of the result may be sharded as before.
        even: factors that may only be split into equal pieces, without padding.
        over_all: factors that may only be split over all axes of a mesh together.
        held: whether the compiler, left to choose, may shard the op in a way that it
            gets wrong, so that the op is constrained at every constraint level.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    even: frozenset[int] = frozenset()
    over_all: frozenset[int] = frozenset()
    held: bool = False

    @property
    def is_whole(self) -> bool:
        """True if no dim of the op's tensors may be sharded."""
        factors = range(len(self.sizes))
        return all(f in self.fixed or self.sizes[f] == 1 for f in factors)

    @property
    def closed(self) -> frozenset[int]:
        """Factors along which nothing is sharded behind the op as before it."""
        return self.fixed - self.gathered

    def whole_along(self, factors: frozenset[int]) -> Rule:
        """The rule of an op that the compiler gathers along some more factors."""
        return replace(
            self,
            fixed=self.fixed | factors,
            gathered=self.gathered | (factors - self.fixed - self.reduction),
            reduction=self.reduction - factors,
            held=True,
        )

    def major(self, dim: tuple[int, ...], before: int = 1) -> int | None:
        """The factor by which a dim may be sharded: its major-most one of size > 1.

        Args:
            before: number of ways in which it is sharded already: the factors that
                these fill are left out, if one is behind them.
        """
        found = None
        for factor in dim:
            size = self.sizes[factor]
            if size > 1:
                found = factor
                if before == 1 or before % size:
                    break
                before //= size
        return found

    def splits(self, factor: int, ways: int) -> bool:
        """True if a factor may be split into so many parts.

        Padding by a small share is allowed, in ops that tolerate padding and whose dims
        have no other factor.
        """
        size = self.sizes[factor]
        if size % ways == 0:
            return True
        padded = padded_size(size, ways)
        if factor in self.even or padded > _MOST_PADDING * size:
            return False
        tensors = (*self.operands, *self.results)
        return all(
            self.sizes[other] == 1
            for dims in tensors
            for dim in dims
            if factor in dim
            for other in dim
            if other != factor
        )

    def splits_results(self, factor: int, ways: Mapping[int, int] = _NONE) -> bool:
        """True if splitting a factor splits every result that has it.

        A reshape that merges dims has the minor one behind another in its result. An
        operand split along the minor one must be gathered, unless the other is split
        into single elements.

        Args:
            ways: number of ways in which other factors are split.
        """
        return all(
            factor in self.exposed(dim, ways)
            for dims in self.results
            for dim in dims
            if factor in dim
        )

    def exposed(
        self, dim: tuple[int, ...], ways: Mapping[int, int] = _NONE
    ) -> Iterator[int]:
        """Returns the factors by which a dim may be sharded.

        These are its major factor, and the next one behind a factor that is split into
        single elements.

        Args:
            ways: number of ways in which factors are split.
        """
        for factor in dim:
            if self.sizes[factor] > 1:
                yield factor
                if ways.get(factor, 1) != self.sizes[factor]:
                    return


def padded_size(size: int, ways: int) -> int:
    """The smallest size that divides so many ways and holds ``size``."""
    return -(-size // ways) * ways


def rule_of(attribute: ir.Attribute) -> Rule:
    """Reads a rule that Shardy has for an op."""
    found = sdy.OpShardingRuleAttr(attribute)

    def tensors(mappings: Iterable[ir.Attribute]) -> tuple[Dims, ...]:
        dims = (sdy.TensorMappingAttr(one).dim_mappings for one in mappings)
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in tensor)
            for tensor in dims
        )

    return Rule(
        sizes=tuple(found.factor_sizes),
        operands=tensors(found.operand_mappings),
        results=tensors(found.result_mappings),
        reduction=frozenset(found.reduction_factors),
        fixed=frozenset(found.need_replication_factors)
        | frozenset(found.permutation_factors),
    )


def passthrough_rule(shapes: Iterable[tuple[int, ...]]) -> Rule:
    """The rule of an op whose i-th result is its i-th operand (a barrier)."""
    sizes: list[int] = []
    dims = []
    for shape in shapes:
        first = len(sizes)
        sizes.extend(shape)
        dims.append(tuple((first + d,) for d in range(len(shape))))
    return Rule(tuple(sizes), tuple(dims), tuple(dims))


def elementwise_rule(shape: tuple[int, ...], operands: int, results: int) -> Rule:
    """The rule of an op whose operands and results all have one shape."""
    dims = tuple((d,) for d in range(len(shape)))
    return Rule(shape, (dims,) * operands, (dims,) * results)
