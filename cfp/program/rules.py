"""Sharding rules: how the dims of an op's operands and results share loop indices.

A rule names the loop indices of an op, its *factors*, and says which factors each
dim of each operand and result runs over. Shardy computes the rules; this module
reads its notation, for example for a matrix product::

    ([i, k], [k, j])->([i, j]) {i=4, j=16, k=8} reduction={k}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_BODY = re.compile(r"\((.*?)\)\s*->\s*\((.*?)\)\s*(?:\{([^}]*)\})?(.*)$", re.DOTALL)
_TENSOR = re.compile(r"\[([^\]]*)\]")
# Padding by more than this costs more than it spreads. XLA pads what does not divide.
_MOST_PADDING = 4 / 3
_SET = re.compile(r"(reduction|need_replication|permutation)=\{([^}]*)\}")

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
    even: frozenset[int] = frozenset()
    over_all: frozenset[int] = frozenset()
    held: bool = False

    def major(self, dim: tuple[int, ...]) -> int | None:
        """The factor by which a dim may be sharded: its major-most one of size > 1."""
        for factor in dim:
            if self.sizes[factor] > 1:
                return factor
        return None

    def splits(self, factor: int, ways: int) -> bool:
        """True if a factor may be split into so many parts.

        What does not divide is padded, where that is little, and in ops that take
        padding well and in which the factor has its dims to itself.
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

    def splits_results(self, factor: int) -> bool:
        """True if splitting a factor splits every result that has it.

        A reshape that merges dims has the minor one behind another in its result:
        what comes in split along it can only be gathered.
        """
        return all(
            self.major(dim) == factor
            for dims in self.results
            for dim in dims
            if factor in dim
        )


def padded_size(size: int, ways: int) -> int:
    """The smallest size that divides so many ways and holds ``size``."""
    return -(-size // ways) * ways


@lru_cache(maxsize=65536)
def parse_rule(text: str) -> Rule:
    """Reads Shardy's notation.

    Args:
        text: a printed ``#sdy.op_sharding_rule<...>`` attribute, or what stands
            between its angle brackets.

    Raises:
        ValueError: the text is not a sharding rule.
    """
    inner = text[text.find("<") + 1 : text.rfind(">")] if "<" in text else text
    match = _BODY.match(inner.strip())
    if match is None:
        raise ValueError(f"not a sharding rule: {text!r}")
    operand_text, result_text, size_text, kinds = match.groups()
    names: dict[str, int] = {}
    sizes: list[int] = []
    for item in filter(None, (s.strip() for s in (size_text or "").split(","))):
        name, size = item.split("=")
        names[name.strip()] = len(sizes)
        sizes.append(int(size))

    def tensors(text: str) -> tuple[Dims, ...]:
        return tuple(
            tuple(
                tuple(names[f] for f in _FACTOR.findall(dim))
                for dim in filter(None, (d.strip() for d in body.split(",")))
            )
            for body in _TENSOR.findall(text)
        )

    sets = {
        kind: frozenset(names[f] for f in _FACTOR.findall(members))
        for kind, members in _SET.findall(kinds)
    }
    none: frozenset[int] = frozenset()
    return Rule(
        sizes=tuple(sizes),
        operands=tensors(operand_text),
        results=tensors(result_text),
        reduction=sets.get("reduction", none),
        fixed=sets.get("need_replication", none) | sets.get("permutation", none),
    )


def passthrough_rule(
    operand_shapes: tuple[tuple[int, ...], ...],
    result_shapes: tuple[tuple[int, ...], ...],
) -> Rule:
    """The rule of an op whose i-th result is its i-th operand (a barrier)."""
    sizes: list[int] = []
    dims = []
    for shape in operand_shapes:
        first = len(sizes)
        sizes.extend(shape)
        dims.append(tuple((first + d,) for d in range(len(shape))))
    assert operand_shapes == result_shapes
    return Rule(tuple(sizes), tuple(dims), tuple(dims))


def elementwise_rule(shape: tuple[int, ...], operands: int, results: int) -> Rule:
    """The rule of an op whose operands and results all have one shape."""
    dims = tuple((d,) for d in range(len(shape)))
    return Rule(shape, (dims,) * operands, (dims,) * results)
