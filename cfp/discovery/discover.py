"""Finds a function's sharding rule by running it on parts of its operands.

First each part of each dim of each operand is changed alone, and it is noted which
parts of which results change: dims that go together, part by part, may be one factor.
Dims along which everything changes may still be summed over. What may be a factor is
tested by :class:`cfp.discovery.probe.Probe`, and is one if nothing differs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from cfp.discovery.probe import (
    Differs,
    Probe,
    Role,
    Shape,
    blocks,
    check_operand,
    parts_of,
)
from cfp.discovery.rule import Evidence, OpDim, Refusal, ShardingRule
from cfp.errors import CfpError

# So fine a factor is split, at most; finer parts are left out of the rule.
_MOST_PARTS = 16
# So many ways to combine dims are tried for one factor.
_MOST_COMBINATIONS = 64

Links = dict[OpDim, tuple[int, list[list[list[set[int]]]]]]


def discover_rules(fn: Callable[..., Any], *args: Any, seed: int = 0) -> ShardingRule:
    """Finds which dims of a function's operands may be sharded, by running it.

    The function is compiled and run on one device, for the arguments and for parts of
    them, with the arguments' numbers and with random ones. Dims may be sharded if the
    parts' results, put together or added up, are those of the whole, and no part's
    result changes with what another part holds. Where anything differs they may not.

    This is evidence, and no proof: what no input that was tried brings to light is not
    seen. See docs/performance.md for the limits.

    Args:
        fn: a kernel, or whatever contains one: of arrays or pytrees of them, by
            position. It has to take parts of its arguments, and to have no effects.
        args: examples, as small as the function allows: floating point numbers may be
            ``jax.ShapeDtypeStruct`` s; integers need values, of which others are drawn.
        seed: of random numbers.

    Returns:
        The rule; printed, it says what was tried and refused. ``rule.wrap(fn)`` is the
        function with it, which :func:`cfp.plan` shards.

    Raises:
        CfpError: an argument is none that other numbers can be drawn for.
    """
    leaves, tree = jax.tree.flatten(args)
    if not leaves:
        raise CfpError(
            "Expected a function with arguments, and an example of each: "
            "cfp.discover_rules(kernel, x, scale)."
        )
    avals, examples = [], []
    names = _names(fn, args)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            value = None
            aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        else:
            array = jnp.asarray(leaf)
            aval = jax.ShapeDtypeStruct(array.shape, array.dtype)
            is_plain = not jnp.issubdtype(array.dtype, jax.dtypes.extended)
            value = np.asarray(array) if is_plain else None
        check_operand(name, aval, value)
        avals.append(aval)
        examples.append(value)

    def flat(*operands: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(fn(*tree.unflatten(operands))))

    return _Discovery(Probe(flat, avals, examples, names, seed)).rule()


def _names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """The operands' names, as the function calls them."""
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args).arguments
        parameters = signature.parameters
        known = [
            name
            if parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL
            else ""
            for name in bound
        ]
    except (TypeError, ValueError):
        known = []
    known += [""] * (len(args) - len(known))
    return [
        (known[number] or f"argument {number}") + keystr(path)
        for number, arg in enumerate(args)
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]


@dataclass(slots=True)
class _Factor:
    """Dims that passed all tests."""

    dims: tuple[OpDim, ...]
    roles: tuple[Role, ...]
    parts: list[int]
    multiple: int

    def places(self, operands: int) -> list[OpDim]:
        """All dims, of results too."""
        made = [
            (operands + number, role.dim)
            for number, role in enumerate(self.roles)
            if role.dim is not None
        ]
        return [*self.dims, *made]


class _Discovery:
    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.shapes = [aval.shape for aval in probe.avals]
        self.factors: list[_Factor] = []
        self.why: dict[OpDim, str] = {}

    def rule(self) -> ShardingRule:
        """Tries what may be a factor."""
        links = self._links()
        for dims in self._linked(links):
            self._try(dims)
        self._explain(links)
        for place in self._open():
            for dims in islice(self._with_others(place), _MOST_COMBINATIONS):
                if self._try(dims, summed=True):
                    break
        self._check_together()
        return self._written()

    # ---------------------------------------------------------------------- candidates

    def _size(self, place: OpDim) -> int:
        return self.shapes[place[0]][place[1]]

    def _places(self) -> Iterator[OpDim]:
        for number, shape in enumerate(self.shapes):
            for dim, size in enumerate(shape):
                if size > 1:
                    yield number, dim

    def _open(self) -> list[OpDim]:
        claimed = {place for one in self.factors for place in one.dims}
        return [place for place in self._places() if place not in claimed]

    def _links(self) -> Links:
        found = {}
        for place in self._places():
            ways = next(
                n for n in range(2, self._size(place) + 1) if self._size(place) % n == 0
            )
            found[place] = ways, self.probe.changed(place, ways)
        return found

    def _linked(self, links: Links) -> Iterator[tuple[OpDim, ...]]:
        """Dims of operands that go with a dim of a result, part by part."""
        seen = set()
        for number, result in enumerate(self.probe.results):
            for dim in range(len(result.shape)):
                with_it: dict[int, list[OpDim]] = {}
                for place, (ways, changed) in links.items():
                    parts = [changed[part][number][dim] for part in range(ways)]
                    if all(parts) and all(at == {p} for p, at in enumerate(parts)):
                        with_it.setdefault(place[0], []).append(place)
                for dims in islice(product(*with_it.values()), _MOST_COMBINATIONS):
                    if dims and dims not in seen:
                        seen.add(dims)
                        yield dims

    def _with_others(self, place: OpDim) -> Iterator[tuple[OpDim, ...]]:
        """Yields a dim with dims of its size of other operands, the most first."""
        left = self._open()
        ways = []
        for number in range(len(self.shapes)):
            if number != place[0]:
                same = [p for p in left if p[0] == number]
                same = [p for p in same if self._size(p) == self._size(place)]
                ways.append([*same, None])
        for others in product(*ways):
            yield tuple(sorted([place, *(one for one in others if one is not None)]))

    # --------------------------------------------------------------------------- tests

    def _try(self, dims: tuple[OpDim, ...], summed: bool = False) -> bool:
        """Tests a factor: coarse parts, the finest that hold, and other sizes.

        Args:
            dims: of operands.
            summed: whether every result is to be a sum.
        """
        claimed = {place for one in self.factors for place in one.dims}
        if claimed.intersection(dims):
            return False
        units = math.gcd(*map(self._size, dims))
        numbers = [*blocks(units, _MOST_PARTS)]
        if not numbers:
            self.why[dims[0]] = f"{units} is not divided by 2 to {_MOST_PARTS}"
            return False
        try:
            coarse = numbers.pop()
            roles = self.probe.check(dims, coarse, self.shapes)
            has_dims = any(role.dim is not None for role in roles)
            if has_dims == summed or not (has_dims or any(r.is_sum for r in roles)):
                raise Differs("no result changes with it")
            parts = [coarse]
            for fine in numbers:
                try:
                    if self.probe.check(dims, fine, self.shapes) == roles:
                        parts.append(fine)
                        break
                except Differs:
                    continue
            multiple = units // parts[-1]
            # Two parts of three times the smallest that hold.
            larger = self._resized(dims, 6 * multiple / units)
            if self.probe.check(dims, 2, larger) != roles:
                raise Differs("results are put together in another way in other sizes")
        except Differs as error:
            for place in dims[:1] if summed else dims:
                self.why.setdefault(place, str(error))
            return False
        self.factors.append(_Factor(dims, roles, parts, multiple))
        return True

    def _resized(self, dims: Sequence[OpDim], by: float) -> list[Shape]:
        return [
            tuple(
                round(n * by) if (number, dim) in dims else n
                for dim, n in enumerate(shape)
            )
            for number, shape in enumerate(self.shapes)
        ]

    def _check_together(self) -> None:
        """Tests each factor on parts of all before it, as on meshes of several axes."""
        kept: list[_Factor] = []
        places: set[OpDim] = set()
        shapes = [*self.shapes]
        for factor in self.factors:
            try:
                if places.intersection(factor.places(len(shapes))):
                    raise Differs("a result's dim would be sharded twice")
                if kept and self.probe.check(factor.dims, factor.parts[0], shapes) != (
                    factor.roles
                ):
                    raise Differs("results are put together in another way in parts")
            except Differs as error:
                self.why[factor.dims[0]] = f"beside what else is sharded: {error}"
                continue
            kept.append(factor)
            places.update(factor.places(len(shapes)))
            shapes = parts_of(shapes, factor.dims, factor.parts[0])
        self.factors = kept

    # ------------------------------------------------------------------------- answers

    def _explain(self, links: Links) -> None:
        """Notes why dims go with none of a result."""
        for place, (ways, changed) in links.items():
            if place in self.why:
                continue
            if not any(at for part in changed for one in part for at in one):
                self.why[place] = "no result changes with it"
                continue
            for number, result in enumerate(self.probe.results):
                crossing = [
                    dim
                    for dim, n in enumerate(result.shape)
                    if n == self._size(place)
                    and any(changed[p][number][dim] - {p} for p in range(ways))
                ]
                if crossing:
                    self.why[place] = (
                        f"result {number} changes along dim {crossing[0]} in other "
                        "parts than the one that was changed"
                    )
                    break

    def _named(self, place: OpDim) -> str:
        return f"{self.probe.names[place[0]]} dim {place[1]}"

    def _written(self) -> ShardingRule:
        count = len(self.shapes)
        tensors = [*self.shapes, *(one.shape for one in self.probe.results)]
        letters = (chr(ord("a") + n) if n < 26 else f"z{n}" for n in range(10**6))
        of: dict[OpDim, str] = {}
        names = []
        by_place = {p: one for one in self.factors for p in one.places(count)}
        name_of: dict[int, str] = {}
        whole = []
        for number, shape in enumerate(tensors):
            for dim in range(len(shape)):
                factor = by_place.get((number, dim))
                if factor is None:
                    name = next(letters)
                    whole.append(name)
                elif id(factor) in name_of:
                    name = name_of[id(factor)]
                else:
                    name = name_of[id(factor)] = next(letters)
                    names.append((name, factor))
                of[number, dim] = name
        texts = [
            " ".join(of[number, dim] for dim in range(len(shape)))
            for number, shape in enumerate(tensors)
        ]
        refused = tuple(
            Refusal(
                what=self._named(place), why=self.why.get(place, "it is summed over")
            )
            for place in self._open()
        )
        probe = self.probe
        return ShardingRule(
            f"{', '.join(texts[:count])} -> {', '.join(texts[count:])}",
            whole=tuple(whole),
            sums=tuple(
                (name, number)
                for name, factor in names
                for number, role in enumerate(factor.roles)
                if role.is_sum
            ),
            multiples=tuple(
                (name, factor.multiple) for name, factor in names if factor.multiple > 1
            ),
            evidence=Evidence(
                runs=probe.runs,
                programs=len(probe.shapes),
                parts=tuple((name, tuple(factor.parts)) for name, factor in names),
                largest_error=probe.largest_error,
                refused=refused,
            ),
        )
