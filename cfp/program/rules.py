"""Sharding rules: how the dims of an op's operands and results share loop indices.

A rule names the loop indices of an op, its *factors*, and the factors of each dim of
each operand and result. Shardy computes most rules; a matrix product's is::

    ([i, k], [k, j])->([i, j]) {i=4, j=16, k=8} reduction={k}

Rules are corrected if XLA's partitioner cannot keep them. A correction removes factors
from the choice, or limits it. The compiler may still shard an op along a removed factor
if it is not constrained. Most such ops are *held*: constrained at every level.
`cfp_test/proving/faults.py` has a program for each fault of XLA that is corrected here;
``make prove`` looks for more in the installed jaxlib.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from math import prod
from types import MappingProxyType

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

# Most padding, as a ratio of sizes. XLA pads dims that do not divide by their pieces.
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
        fixed: factors along which the op is not sharded: Shardy's need_replication
            and permutation factors, and factors that a correction removes.
        gathered: fixed factors along which the compiler gathers operands, and along
            which users of the result may be sharded again.
        even: factors that may only be split into equal pieces, without padding.
        over_all: factors that may only be split over all axes of a mesh together.
        held: True if the op is constrained at every constraint level, since the
            compiler gets some shardings wrong; for products, on several axes only.
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
        """True if all factors are fixed or of size 1, so that the op is not sharded."""
        factors = range(len(self.sizes))
        return all(f in self.fixed or self.sizes[f] == 1 for f in factors)

    @property
    def closed(self) -> frozenset[int]:
        """Fixed factors along which a sharding does not continue behind the op."""
        return self.fixed - self.gathered

    def whole_along(self, factors: frozenset[int]) -> Rule:
        """Returns the rule with `factors` fixed, and `held`.

        Newly fixed factors are `gathered`, or if summed leave `reduction`.
        """
        return replace(
            self,
            fixed=self.fixed | factors,
            gathered=self.gathered | (factors - self.fixed - self.reduction),
            reduction=self.reduction - factors,
            held=True,
        )

    def major(self, dim: tuple[int, ...], before: int = 1) -> int | None:
        """Returns the major-most factor of size 2 or more, fixed or not; or None.

        Args:
            dim: the dim's factors, major to minor.
            before: pieces that the dim is cut into already: factors that are cut into
                single elements are skipped, if another one follows.
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
        """True if a factor's size allows `ways` pieces, fixed or not.

        Padding by up to a third is allowed for factors that are not in `even`, and
        share no dim with another factor of size 2 or more.
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

        A reshape that merges two dims has a minor factor behind a major one in its
        result. An operand split along the minor one must be gathered, unless the major
        one is split into single elements.

        Args:
            ways: {other factor: number of its pieces}.
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
        """Yields the factors by which a dim may be sharded, fixed ones included.

        These are its major factor, and the next one behind a factor that is split into
        single elements. `ways` is {factor: number of its pieces}.
        """
        for factor in dim:
            if self.sizes[factor] > 1:
                yield factor
                if ways.get(factor, 1) != self.sizes[factor]:
                    return


def padded_size(size: int, ways: int) -> int:
    """Returns the smallest multiple of `ways` that is at least `size`."""
    return -(-size // ways) * ways


def rule_of(attribute: ir.Attribute) -> Rule:
    """Converts Shardy's rule of an op, without corrections."""
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
    """Returns the rule of an op whose i-th result is its i-th operand (a barrier)."""
    sizes: list[int] = []
    dims = []
    for shape in shapes:
        first = len(sizes)
        sizes.extend(shape)
        dims.append(tuple((first + d,) for d in range(len(shape))))
    return Rule(tuple(sizes), tuple(dims), tuple(dims))


def elementwise_rule(shape: tuple[int, ...], operands: int, results: int) -> Rule:
    """Returns an elementwise op's rule; `operands` and `results` are their numbers."""
    dims = tuple((d,) for d in range(len(shape)))
    return Rule(shape, (dims,) * operands, (dims,) * results)


# ------------------------------------------------------------------------- corrections

# Ops whose padding XLA's partitioner masks, beside the elementwise ones. A scatter uses
# its indices' padding as indices (jaxlib 0.10.2 and 0.12, plain JAX too).
_PADDED_WELL = frozenset(
    {"broadcast_in_dim", "dot_general", "gather", "reduce", "reshape", "transpose"}
)
# Ops that an all-reduce may compute; `_LOGIC` for booleans only.
_SUMS = frozenset(
    f"stablehlo.{name}" for name in "add maximum minimum multiply".split()
)
_LOGIC = frozenset({"stablehlo.and", "stablehlo.or"})
_CONVOLUTION = re.compile(r"conv<\[(.*?)\]x\[(.*?)\]->\[(.*?)\]>")

# The first release of jaxlib that shards a Fourier transform.
_TRANSFORMS_SHARDED = (0, 12)


def correct_rule(
    rule: Rule, op: ir.Operation, shapes: Sequence[tuple[int, ...]]
) -> Rule | None:
    """Corrects Shardy's rule; None for custom calls that neither share nor sum factors.

    `shapes` are the operands'.
    """
    is_elementwise = len({*rule.operands, *rule.results}) <= 1
    if not (op.name.removeprefix("stablehlo.") in _PADDED_WELL or is_elementwise):
        rule = _unpadded(rule)
    if op.name == "stablehlo.convolution":
        return _convolution_rule(rule, op)
    if op.name == "stablehlo.scatter":
        # Several tensors, the indices, and an update for each tensor.
        return _scatter_rule(rule, op, shapes[len(shapes) // 2])
    if op.name == "stablehlo.dynamic_update_slice":
        # XLA would lose writes to dims that an update writes in part.
        dims = zip(rule.operands[0], *shapes[:2], strict=True)
        part = frozenset(f for dim, size, new in dims if new < size for f in dim)
        return rule.whole_along(part) if part else rule
    if op.name == "stablehlo.dot_general":
        # Products that sum over several dims, such as a weight's gradient, are held.
        summed = sum(rule.sizes[factor] > 1 for factor in rule.reduction)
        return replace(rule, held=True) if summed > 1 else rule
    if op.name == "stablehlo.fft":
        return _transform_rule(rule)
    if op.name == "stablehlo.select_and_scatter":
        return replace(rule, held=True)
    if op.name == "stablehlo.rng_bit_generator":  # All devices make all bits.
        return rule.whole_along(_factors(rule))
    if op.name == "stablehlo.slice":
        strides = [*ir.DenseI64ArrayAttr(op.attributes["strides"])]
        return replace(rule, held=True) if max(strides, default=1) > 1 else rule
    if op.name == "stablehlo.reduce":
        return _reduce_rule(rule, op)
    if op.name == "stablehlo.pad":
        return _pad_rule(rule, op)
    return _call_rule(rule) if op.name == "stablehlo.custom_call" else rule


@lru_cache(maxsize=4096)
def _unpadded(rule: Rule) -> Rule:
    return replace(rule, even=_factors(rule))


def _call_rule(rule: Rule) -> Rule | None:
    """Fixes a call's unsummed factors that one tensor has alone; None if all are."""
    tensors = (*rule.operands, *rule.results)
    seen = [{f for dim in dims for f in dim} for dims in tensors]
    alone = {f for f in range(len(rule.sizes)) if sum(f in s for s in seen) < 2}
    alone -= rule.reduction
    if len(alone) == len(rule.sizes):
        return None
    return replace(rule, fixed=rule.fixed | alone)


def _transform_rule(rule: Rule) -> Rule:
    """Makes a Fourier transform `held`; before jaxlib 0.12, all factors are `fixed`.

    XLA then gathers even dims that are not transformed (seen in 0.10.2 and 0.11.2).
    """
    rule = replace(_unpadded(rule), held=True)
    if (*map(int, version("jaxlib").split(".")[:2]),) >= _TRANSFORMS_SHARDED:
        return rule
    # Fixed, not gathered: elementwise work between two transforms is less than gathers.
    return replace(rule, fixed=_factors(rule), reduction=frozenset())


def _reduce_rule(rule: Rule, op: ir.Operation) -> Rule:
    """Makes reduced factors `fixed` in one-array reductions that no all-reduce does."""
    *ops, _ = (inner.operation.name for inner in op.regions[0].blocks[0].operations)
    is_logic = str(ir.ShapedType(op.operands[0].type).element_type) == "i1"
    sums = _SUMS | _LOGIC if is_logic else _SUMS
    is_kept = len(rule.results) > 1 or (len(ops) == 1 and ops[0] in sums)
    return rule if is_kept else rule.whole_along(rule.reduction)


def _pad_rule(rule: Rule, op: ir.Operation) -> Rule:
    """Makes dims with both interior padding and a negative edge padding `fixed`."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    padding = ([*ir.DenseI64ArrayAttr(op.attributes[name])] for name in names)
    cut = {
        factor
        for dim, low, high, inside in zip(rule.operands[0], *padding, strict=True)
        if inside and min(low, high) < 0
        for factor in dim
    }
    return replace(rule, fixed=rule.fixed | cut, held=True) if cut else rule


def _scatter_rule(rule: Rule, op: ir.Operation, indices: tuple[int, ...]) -> Rule:
    """Makes indexed dims `gathered` if a scatter has a single index vector.

    XLA makes it an update of a slice. Dims that are written in full, such as heads of a
    cache of keys, have their factors in the update, too, and may be sharded.
    """
    numbers = op.attributes["scatter_dimension_numbers"]
    dims = stablehlo.ScatterDimensionNumbers(numbers).scattered_dims_to_operand_dims
    if prod(indices) != len(dims):
        return rule
    written = rule.operands[: len(rule.results)]
    updates = rule.operands[len(rule.results) + 1 :]
    indexed = frozenset(f for tensor in written for d in dims for f in tensor[d])
    whole = {factor for tensor in updates for dim in tensor for factor in dim}
    # Shardy fixes indexed dims itself.
    return replace(rule, gathered=indexed - whole).whole_along(indexed - whole)


def _convolution_rule(rule: Rule, op: ir.Operation) -> Rule:
    """Makes spatial and minor factors of a convolution `fixed`, and the rule `held`.

    Spatial dims would need halos, since windows overlap. In a grouped convolution, not
    all operands have a minor factor. In the gradient of its kernel, the batch is
    sharded over all axes or none. All factors are `fixed` if groups have several
    features: XLA gathers them (jaxlib 0.10.2 to 0.12, plain jax.jit, too).
    """
    layouts = _layouts(op)
    unclean: set[int] = set()
    tensors = (*rule.operands, *rule.results)
    for labels, dims in zip(layouts, tensors, strict=True):
        for label, dim in zip(labels, dims, strict=True):
            major = rule.major(dim)
            unclean.update(f for f in dim if label.isdigit() or f != major)
    grouped = _count(op, "batch_group_count") > 1
    reduction = rule.reduction - unclean
    rule = replace(
        rule,
        fixed=rule.fixed | unclean,
        reduction=reduction,
        over_all=reduction if grouped else rule.over_all,
        held=True,
    )
    features = ir.ShapedType(op.operands[1].type).shape[layouts[1].index("i")]
    is_gathered = _count(op, "feature_group_count") > 1 < features
    return rule.whole_along(_factors(rule)) if is_gathered else rule


def _factors(rule: Rule) -> frozenset[int]:
    return frozenset(range(len(rule.sizes)))


def _layouts(op: ir.Operation) -> list[list[str]]:
    """Returns names of the dims of a convolution's input, kernel and result."""
    found = _CONVOLUTION.search(str(op.attributes["dimension_numbers"]))
    assert found is not None
    return [names.split(", ") for names in found.groups()]


# ---------------------------------------------------------------- grouped convolutions

# If XLA splits a convolution along its groups, it permutes the result's sharding by the
# inverse of the right permutation. Results are then wrong (jaxlib 0.10.2 to 0.12, plain
# ``jax.jit`` with ``in_shardings`` too: input in NCHW and result in NHWC). Layouts in
# which both permutations map the groups' dim alike are right. Other convolutions become
# one whose result is laid out like its input, and a transpose.

_SWAPPED = {"b": "f", "f": "b"}


def relayout(op: ir.Operation) -> None:
    """Replaces a grouped convolution that XLA would split wrongly; keeps other ops."""
    if op.name != "stablehlo.convolution":
        return
    batch_groups = _count(op, "batch_group_count") > 1
    if not batch_groups and _count(op, "feature_group_count") == 1:
        return
    own, kernel, made = _layouts(op)
    # Groups of the batch become features of the result.
    swapped = _SWAPPED if batch_groups else {}
    taken = [swapped.get(name, name) for name in own]
    if is_split_right(taken, made):
        return
    permutation = [taken.index(name) for name in made]
    kind = ir.RankedTensorType(op.results[0].type)
    shape = [kind.shape[made.index(name)] for name in taken]
    before, now, weights = (", ".join(names) for names in (own, taken, kernel))
    layout = f"#stablehlo.conv<[{before}]x[{weights}]->[{now}]>"
    with ir.InsertionPoint(op), op.location:
        convolution = op.clone()
        convolution.attributes["dimension_numbers"] = ir.Attribute.parse(layout)
        made_as_taken = ir.RankedTensorType.get(shape, kind.element_type)
        convolution.results[0].set_type(made_as_taken)
        transposed = stablehlo.transpose(convolution.results[0], permutation)
    op.results[0].replace_all_uses_with(transposed)
    op.erase()


def is_split_right(taken: Sequence[str], made: Sequence[str]) -> bool:
    """True if XLA splits a grouped convolution of these layouts correctly.

    Args:
        taken: the result's name for each dim of the input, such as ``("b", "f", "0")``.
        made: names of the result's dims.
    """
    return made.index(taken[made.index("f")]) == taken.index("f")


def _count(op: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value
