"""Sharding rules of kernels, and functions that carry them.

A rule names the loop indices (factors) of a function by the dims that share them, as in
``b s h, h -> b s h``. The function becomes a ``jax.experimental.custom_partitioning``
op: each device runs it on its part of the operands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from cfp.errors import CfpError

OpDim = tuple[int, int]  # (number among operands and then results, dim)
Names = tuple[tuple[str, ...], ...]  # for each tensor the factors of its dims

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Dims that are not sharded.

    Attributes:
        what: the dims, in words.
        why: what differed, or what the function said of a part.
    """

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Runs from which a rule was found.

    Attributes:
        runs: how often the function was run.
        programs: for how many combinations of shapes it was compiled.
        parts: (factor, the numbers of parts into which it was split).
        largest_error: the largest difference of parts from the whole that counted as
            rounding, relative to the largest number of the part.
        refused: what is not sharded.
    """

    runs: int
    programs: int
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    largest_error: float = 0.0
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Sharding rule of a function. Its `repr` makes it again, without running anything.

    Attributes:
        text: the factors of each dim of operands and results, such as
            ``"a b, b -> a b"``. The leaves of pytrees stand in a row.
        whole: factors that are not sharded.
        sums: (factor, number of a result that lacks it): where the factor is sharded,
            the result is the sum of what the devices compute.
        multiples: (factor, n): each device's part is a multiple of n units. A factor
            has as many units as the greatest common divisor of its dims' sizes.
        evidence: how it was found; None if it was written down.

    Raises:
        CfpError: the text is no rule, or the rest does not belong to it.
    """

    text: str
    whole: tuple[str, ...] = field(default=(), kw_only=True)
    sums: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    multiples: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    evidence: Evidence | None = field(
        default=None, kw_only=True, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        sides = self.text.split("->")
        names = [name for side in sides for name in side.replace(",", " ").split()]
        wrong = [name for name in names if not _NAME.fullmatch(name)]
        if len(sides) != 2 or wrong:
            raise CfpError(
                "This is not a sharding rule.",
                expected="the factors of all operands and results, as in "
                "'a b, b -> a b'",
                got=repr(self.text),
                attempt="cfp.discover_rules, which finds rules and prints them",
            )
        _, results = self.tensors
        known = dict(self.multiples).keys() | dict(self.sums).keys() | {*self.whole}
        summed = [
            f"({factor!r}, {number})"
            for factor, number in self.sums
            if not 0 <= number < len(results) or factor in results[number]
        ]
        if unknown := sorted(known - {*names}) + summed:
            raise CfpError(
                "The rule names what it does not have.",
                expected=f"factors of {self.text!r}, and sums of results that lack "
                "the factor",
                got=", ".join(unknown),
                attempt="cfp.discover_rules, which finds rules and prints them",
            )

    @property
    def tensors(self) -> tuple[Names, Names]:
        """Factors of each dim of each operand, and of each result."""
        operands, results = (
            tuple(tuple(tensor.split()) for tensor in side.split(","))
            for side in self.text.split("->")
        )
        return operands, results

    @property
    def factors(self) -> dict[str, tuple[OpDim, ...]]:
        """The dims of each factor that may be sharded."""
        operands, results = self.tensors
        found: dict[str, list[OpDim]] = {}
        for number, dims in enumerate((*operands, *results)):
            for dim, name in enumerate(dims):
                if name not in self.whole:
                    found.setdefault(name, []).append((number, dim))
        read = {name for dims in operands for name in dims}
        return {name: tuple(at) for name, at in found.items() if name in read}

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function that is sharded by this rule.

        Args:
            fn: the function, of arrays or pytrees of them, by position. Like all ops of
                ``custom_partitioning`` what comes back has no derivative: where one is
                wanted, wrap what stands inside of ``jax.custom_vjp``.

        Returns:
            A function that computes the same; ``fn`` itself if nothing may be sharded.
        """
        if not self.factors:
            return fn
        op = custom_partitioning(fn)
        op.def_partition(_Partition(self, fn), sharding_rule=_SizedRule(self))
        return op

    def sized(
        self, shapes: Sequence[Sequence[int]], axes: Sequence[int] = ()
    ) -> tuple[str, dict[str, Any]]:
        """Writes the rule for operands and results of some shapes, for JAX.

        Args:
            shapes: of the operands, and then of the results.
            axes: sizes of the mesh's axes. JAX has no words for half of an axis, which
                Shardy would take where a factor has fewer pieces than the axis.

        Returns:
            Arguments of ``str_to_sdy_sharding_rule``.
        """
        operands, results = self.tensors
        _check(shapes, (*operands, *results), self.text)
        # Where dims are larger than the factor, what is left is a factor of its own.
        of: dict[OpDim, tuple[str, int]] = {}
        for name, places in self.factors.items():
            count = self._splittable(name, [shapes[t][d] for t, d in places])
            in_pieces = any(shapes[t][d] != count for t, d in places)
            is_half = any(1 < math.gcd(count, size) < size for size in axes)
            if count > 1 and not (in_pieces and is_half):
                of.update((place, (name, count)) for place in places)
        sizes: dict[str, int] = {}
        plain: set[str] = set()
        whole: list[str] = []
        texts = []
        for number, shape in enumerate(shapes):
            words = []
            for dim, size in enumerate(shape):
                rest = f"w{number}_{dim}"
                name, count = of.get((number, dim), (rest, size))
                if count == size:
                    words.append(name)
                    plain.add(name)
                else:
                    words.append(f"({name} {rest})")
                    sizes |= {name: count, rest: size // count}
                if name == rest or count != size:
                    whole.append(rest)
            texts.append(" ".join(words))
        text = f"{', '.join(texts[: len(operands)])} -> "
        text += ", ".join(texts[len(operands) :])
        used = {name for name, _ in of.values()}
        made = {name for dims in results for name in dims}
        settings: dict[str, Any] = {
            "reduction_factors": tuple(sorted(used - made)),
            "need_replication_factors": tuple(whole),
        }
        settings |= {name: n for name, n in sizes.items() if name not in plain}
        return text, settings

    def settled(self, mesh: Any, given: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """Chooses axes for factors, near the shardings of operands and results."""
        found: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for name, places in self.factors.items():
            count = self._splittable(name, [given[t].shape[d] for t, d in places])
            for tensor, dim in places:
                axes = _axes(given[tensor], dim)
                ways = math.prod(mesh.shape[axis] for axis in axes)
                if axes and count % ways == 0 and not used.intersection(axes):
                    found[name] = axes
                    used.update(axes)
                    break
        return found

    def _splittable(self, name: str, sizes: Sequence[int]) -> int:
        """Counts pieces of a factor that are never split; 1 if it is one piece."""
        units, multiple = math.gcd(*sizes), dict(self.multiples).get(name, 1)
        return units // multiple if units % multiple == 0 else 1

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.text
        multiples, found = dict(self.multiples), self.evidence
        parts = dict(found.parts) if found else {}
        for name in self.factors:
            line = f"  {name}: may be sharded"
            if multiples.get(name, 1) > 1:
                line += f", in parts that are multiples of {multiples[name]}"
            if summed := [
                str(number) for factor, number in self.sums if factor == name
            ]:
                line += f"; the parts' results {', '.join(summed)} are added up"
            if name in parts:
                line += f"; tried in {', '.join(map(str, parts[name]))} parts"
            yield line
        if not self.factors:
            yield "  nothing may be sharded"
        if found is None:
            return
        for one in found.refused:
            yield f"  not sharded: {one.what}: {one.why}"
        error = found.largest_error
        equal = (
            "results equal bit by bit"
            if not error
            else f"differences up to {error:.1e}"
        )
        yield (
            f"  from {found.runs} runs of {found.programs} programs, with {equal}; "
            "on numbers that were not tried it may not hold"
        )


@dataclass(frozen=True)  # JAX refers to it weakly.
class _Partition:
    """The callback of JAX's partitioner; equal for equal rules and functions."""

    rule: ShardingRule
    fn: Callable[..., Any]

    def __call__(self, mesh: Any, args: Any, result: Any) -> Any:
        ins, in_tree = jax.tree.flatten(args)
        outs, out_tree = jax.tree.flatten(result)
        rule, given = self.rule, (*ins, *outs)
        axes = rule.settled(mesh, given)
        operands, results = rule.tensors
        shardings = [
            NamedSharding(
                mesh, PartitionSpec(*(axes.get(name) or None for name in dims))
            )
            for dims in (*operands, *results)
        ]

        def local(*parts: Any) -> Any:
            leaves = jax.tree.leaves(self.fn(*parts))
            for name, number in rule.sums:
                if name in axes:
                    leaves[number] = jax.lax.psum(leaves[number], axes[name])
            return out_tree.unflatten(leaves)

        return (
            mesh,
            local,
            out_tree.unflatten(shardings[len(ins) :]),
            in_tree.unflatten(shardings[: len(ins)]),
        )


@dataclass(frozen=True)  # JAX refers to it weakly.
class _SizedRule:
    """A rule as JAX asks for it, with the types of an op."""

    rule: ShardingRule

    def __call__(self, mesh: Any, operands: Any, results: Any) -> Any:
        shapes = [tuple(one.shape) for one in (*operands, *results)]
        return self.rule.sized(shapes, tuple(mesh.shape.values()))


def _axes(given: Any, dim: int) -> tuple[str, ...]:
    sharding = given.sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    names = spec[dim] if dim < len(spec) else None
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def _check(shapes: Sequence[Sequence[int]], names: Names, text: str) -> None:
    ranks, wanted = [len(shape) for shape in shapes], [len(dims) for dims in names]
    if ranks != wanted:
        raise CfpError(
            "A function is called with other arguments than its rule is for.",
            expected=f"operands and results with the dims of {text!r}",
            got=f"shapes {', '.join(str(tuple(shape)) for shape in shapes)}",
            attempt="cfp.discover_rules with arguments like these",
        )
