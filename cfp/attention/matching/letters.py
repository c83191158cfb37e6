"""Letters for the dims of contractions, by what they run over.

"b0", "b1"... are batch and heads, "q0", "q1"... queries and groups of heads, "k" keys,
"d" and "e" the features of keys and of values; "" is a dim of size 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from cfp.analysis.unionfind import UnionFind
from cfp.attention.matching.found import Different, Letters, Tensor
from cfp.attention.matching.view import View
from cfp.program.graph import Op
from cfp.program.rules import Rule


class Dims:
    """Dims of tensors that run over the same; those of size 1 do not count."""

    def __init__(self, view: View) -> None:
        """No dim is known yet."""
        self.view = view
        self._same = UnionFind()

    def join(self, op: Op) -> None:
        """Joins dims of an op's operands and results."""
        assert op.rule is not None
        tensors = zip(
            (*op.operands, *op.results),
            (*op.rule.operands, *op.rule.results),
            strict=False,
        )
        by_factor: dict[int, tuple[int, int]] = {}
        for v, dims in tensors:
            if self.view.is_leaf(v):
                continue
            for d, factors in enumerate(dims):
                major = op.rule.major(factors)
                if major is None:
                    continue
                node = self._node(v, d)
                if major in by_factor:
                    self._same.union(node, by_factor[major])
                by_factor.setdefault(major, node)

    def of(self, v: int, d: int) -> Hashable:
        """Returns the class of dims that a tensor's dim belongs to."""
        return self._same.find(self._node(v, d))

    def _node(self, v: int, d: int) -> tuple[int, int]:
        shape = self.view.program.values[v].shape
        return self.view.numbers.of[v], sum(n > 1 for n in shape[:d])


def majors_of(rule: Rule, dims: tuple[tuple[int, ...], ...]) -> list[int | None]:
    """The factors by which dims may be sharded."""
    return [rule.major(factors) for factors in dims]


class Lettering:
    """Letters of the dims of an attention's tensors."""

    def __init__(self, dims: Dims, names: Mapping[Hashable, str]) -> None:
        """Takes the letters of what dims run over."""
        self._dims, self._names = dims, names

    def of_value(self, v: int) -> Letters:
        """Returns the letters of a value between the contractions."""
        shape = self._dims.view.program.values[v].shape
        return tuple(
            self._names.get(self._dims.of(v, d), "?") if n > 1 else ""
            for d, n in enumerate(shape)
        )

    def _factors(self, op: Op, weights: int | None) -> dict[int, str]:
        """The letters of a contraction's factors, by the operand that is known."""
        assert op.rule is not None
        if weights is None:
            v, dims = op.results[0], op.rule.results[0]
        else:
            v, dims = op.operands[weights], op.rule.operands[weights]
        majors = majors_of(op.rule, dims)
        pairs = zip(majors, self.of_value(v), strict=True)
        return {f: letter for f, letter in pairs if f is not None and letter}

    def operand(
        self, op: Op, index: int, other: str, weights: int | None = None
    ) -> Tensor:
        """An operand; ``other`` names the dim that the known tensor does not have."""
        assert op.rule is not None
        known = self._factors(op, weights)
        names = _named(majors_of(op.rule, op.rule.operands[index]), known, other)
        return Tensor(op.operands[index], (op.id, index), names)

    def of_result(
        self, op: Op, weights: int | None = None, other: str = "e"
    ) -> Letters:
        """A contraction's result."""
        assert op.rule is not None
        known = self._factors(op, weights)
        return _named(majors_of(op.rule, op.rule.results[0]), known, other)

    def of_operand(self, op: Op, index: int) -> Letters:
        """Returns the letters of an operand, by the result of the op that reads it."""
        assert op.rule is not None
        result = dict(
            zip(
                majors_of(op.rule, op.rule.results[0]),
                self.of_value(op.results[0]),
                strict=True,
            )
        )
        majors = majors_of(op.rule, op.rule.operands[index])
        return tuple("" if f is None else result.get(f, "?") for f in majors)


def aligned(letters: Letters, shape: tuple[int, ...]) -> Letters:
    """The letters of a value that equals another one but for dims of size 1.

    Args:
        letters: of the other one.
        shape: of the value.
    """
    names = iter([x for x in letters if x])
    return tuple(next(names) if n > 1 else "" for n in shape)


def _named(majors: list[int | None], known: dict[int, str], other: str) -> Letters:
    names = tuple("" if f is None else known.get(f, other) for f in majors)
    if len({n for n in names if n}) < sum(bool(n) for n in names) or "?" in names:
        raise Different("dims of a contraction are mixed up")
    return names
