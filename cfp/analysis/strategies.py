"""Strategies: for each mesh axis, the factor along which a block is sharded, if any.

A block is its anchor, usually a contraction, with ops sharded like it. A strategy
gives each mesh axis at most one *inner* factor of the anchor, along which the block's
contractions are split. A contracted factor may have an *exit*: the factor of the result
that the reduction scatters to (none: an all-reduce). A lookup in a table split by
columns may have an exit, too: it exchanges columns for rows by an all-to-all. A table
sharded with its state is then not gathered, and its gradient not reduced.

Strategies follow from sharding rules: see `cfp.program.read` and `cfp.program.rules`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import prod

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import DimClasses, form_of, major_factors
from cfp.program.graph import Op, Program, Spec
from cfp.program.rules import Dims, Rule

NONE = -1
Mesh = tuple[tuple[str, int], ...]  # (axis name, size) pairs
FactorAxes = tuple[tuple[str, ...], ...]  # for each factor the axes that split it


@dataclass(frozen=True, slots=True, order=True)
class AxisChoice:
    """An axis's factors of the anchor: `inner` split, `exit` scattered to; -1: none."""

    inner: int = NONE
    exit: int = NONE


Strategy = tuple[AxisChoice, ...]  # one choice for each mesh axis


def axis_choices(rule: Rule, axis_size: int) -> list[AxisChoice]:
    """Returns all choices of an axis of this size by a rule; the last: no split."""
    splittable = [
        f
        for f, size in enumerate(rule.sizes)
        if size > 1 and rule.splits(f, axis_size) and f not in rule.closed
    ]
    majors = set()
    for dims in (*rule.operands, *rule.results):
        majors.update(f for _, f in major_factors(rule, dims, axis_size))
    in_result = [f for _, f in major_factors(rule, rule.results[0], axis_size)]
    choices = [AxisChoice(f) for f in in_result]
    for f in splittable:
        if f in rule.reduction and f in majors:
            choices.append(AxisChoice(f))
            choices.extend(AxisChoice(f, e) for e in in_result)
    columns, rows = _looked_up(rule)
    pairs = product(in_result, repeat=2)
    choices += [AxisChoice(f, e) for f, e in pairs if f in columns and e in rows]
    return [*choices, AxisChoice()]


def _looked_up(rule: Rule) -> tuple[set[int], set[int]]:
    """Returns factors of a lookup's columns and indices; for other ops empty sets."""
    if len(rule.operands) != 2:
        return set(), set()
    table, indices = ({f for dim in dims for f in dim} for dims in rule.operands)
    if not rule.reduction & table - indices:
        return set(), set()
    return table - indices - rule.reduction, indices - table


def block_strategies(program: Program, block: Block, mesh: Mesh) -> list[Strategy]:
    """Returns all strategies of a block: the product of its axes' choices.

    Combinations that cannot split a factor, or that XLA gets wrong, are left out. Axes
    of equal size count as different, since their links may differ.
    """
    anchor = program.ops[block.anchor]
    rule = anchor.known_rule
    options = [axis_choices(rule, size) for _, size in mesh]
    return [
        strategy
        for strategy in product(*options)
        if splits_together(rule, mesh, strategy)
        and not _splits_wrongly(rule, anchor.kind == "gather", strategy)
    ]


def splits_together(rule: Rule, mesh: Mesh, strategy: Sequence[AxisChoice]) -> bool:
    """True if each factor can be split by all axes that choose it together."""
    ways: dict[int, int] = {}
    for (_, size), choice in zip(mesh, strategy, strict=True):
        for factor in (choice.inner, choice.exit):
            if factor != NONE:
                ways[factor] = ways.get(factor, 1) * size
    return all(rule.splits(factor, count) for factor, count in ways.items())


def _splits_wrongly(rule: Rule, is_gather: bool, strategy: Strategy) -> bool:
    """True for strategies that XLA's partitioner gets wrong, on three axes or more.

    Sums are wrong, as of ``bmk,bkn->bmn`` with b sharded over x, k over y and z, and b
    of the result over x and z. Gathers do not compile if the sum scatters to a dim of
    the indices that another axis shards, and a third axis shards another dim of the
    table: its slices are cut too large (jaxlib 0.10.2 and 0.12, plain jax.jit, too).
    """
    tensors = (*rule.operands, *rule.results)
    factors = [{f for dim in dims for f in dim} for dims in tensors]
    exits = [choice.exit for choice in strategy if choice.inner in rule.reduction]
    split = {choice.inner for choice in strategy}
    batch = set.intersection(*factors)
    if any(0 < exits.count(factor) < len(exits) for factor in batch & split):
        return True
    beside = split & factors[0] - factors[1] - rule.reduction if is_gather else set()
    return bool(beside and split.intersection(exits) & factors[1])


class BlockSharding:
    """Shardings of a block's ops under each strategy; equal blocks share the work."""

    def __init__(
        self,
        program: Program,
        block: Block,
        mesh: Mesh,
        canonical: Mapping[int, int],
        alike: dict[Hashable, BlockSharding],
    ) -> None:
        self.program = program
        self.block = block
        self.mesh = mesh
        self._members = {m.op: m for m in block.members}
        self._ops = [op for op in block.ops if program.ops[op].rule is not None]
        self._classes_of = cache(
            lambda size, before: DimClasses(
                program, block.ops, block.members, canonical, size, before
            )
        )
        self._is_behind = cache(self._find_behind)
        self._factors = cache(self._factors_split)
        self._axes = cache(self._axes_in_order)
        places = {op: place for place, op in enumerate(block.ops)}
        members = ((places[m.op], m.factors, m.cotangent) for m in block.members)
        form = form_of(program, canonical, block.ops), *members
        self._first = alike.setdefault(form, self)

    def factor_axes(self, strategy: Strategy) -> dict[int, FactorAxes]:
        """Returns {id of an op with a rule: axes that split each factor}."""
        return dict(zip(self._ops, self._first._axes(strategy), strict=True))

    def _axes_in_order(self, strategy: Strategy) -> list[FactorAxes]:
        splits = [
            self._factors(i, choice, self._ways_before(strategy, i))
            for i, choice in enumerate(strategy)
        ]
        return [
            split_axes(self.program.ops[op].known_rule, self.mesh, factors)
            for op, *factors in zip(self._ops, *splits, strict=True)
        ]

    def _ways_before(self, strategy: Strategy, axis: int) -> int:
        """Returns the number of pieces into which earlier axes cut this axis's dims."""
        choice, ways = strategy[axis], 1
        for (_, size), other in zip(self.mesh[:axis], strategy, strict=False):
            if NONE not in (other.inner, choice.inner) and (
                other == choice or self._is_behind(other, choice)
            ):
                ways *= size
        return ways

    def _find_behind(self, first: AxisChoice, second: AxisChoice) -> bool:
        """True if in some dim the second choice's factor is next behind the first's."""
        classes = self._classes_of(1, 1)
        one, other = (self._mark(classes, choice) for choice in (first, second))
        for op_id in self._ops:
            rule = self.program.ops[op_id].known_rule
            for dims in (*rule.operands, *rule.results):
                for dim in dims:
                    found = [classes.of_factor(op_id, factor) for factor in dim]
                    if any(a in one and b in other for a, b in pairwise(found)):
                        return True
        return False

    def _factors_split(
        self, axis: int, choice: AxisChoice, before: int
    ) -> list[tuple[int, ...]]:
        """Returns each op's factors that an axis splits after `before` pieces."""
        if choice.inner == NONE:
            return [()] * len(self._ops)
        classes = self._classes_of(self.mesh[axis][1], before)
        marked, found = self._mark(classes, choice), list[tuple[int, ...]]()
        for op in self._ops:
            if (member := self._members.get(op)) is not None:
                own = [factor == choice.inner for factor in member.factors]
            else:
                factors = range(len(self.program.ops[op].known_rule.sizes))
                own = [classes.of_factor(op, factor) in marked for factor in factors]
            found.append(tuple(factor for factor, is_own in enumerate(own) if is_own))
        return found

    def _mark(self, classes: DimClasses, choice: AxisChoice) -> set[Hashable]:
        """Returns the classes of dims that an axis shards in non-contractions."""
        program = self.program
        anchor = program.ops[self.block.anchor]
        result = anchor.results[0]
        outer = choice.inner if choice.exit == NONE else choice.exit
        tail, marked = set(), set()
        for dim, factors in enumerate(anchor.known_rule.results[0]):
            tail.add(classes.of_dim(result, dim))
            if anchor.known_rule.major(factors) == outer:
                marked.add(classes.of_dim(result, dim))
        for op_id, member in self._members.items():
            op = program.ops[op_id]
            mine = {f for f, g in enumerate(member.factors) if g == choice.inner}
            tensors = zip(
                (*op.operands, *op.results),
                (*op.known_rule.operands, *op.known_rule.results),
                strict=False,
            )
            for value, dims in tensors:
                for dim, factors in enumerate(dims):
                    if op.known_rule.major(factors) in mine:
                        marked |= {classes.of_dim(value, dim)} - tail
        return marked


def split_axes(rule: Rule, mesh: Mesh, splits: Iterable[Iterable[int]]) -> FactorAxes:
    """Returns the `legal_axes` of factors; `splits` has each axis's wanted factors."""
    wanted: list[list[str]] = [[] for _ in rule.sizes]
    for (name, _), factors in zip(mesh, splits, strict=True):
        for factor in factors:
            wanted[factor].append(name)
    return legal_axes(rule, wanted, dict(mesh))


def legal_axes(
    rule: Rule, wanted: list[list[str]], sizes: dict[str, int]
) -> FactorAxes:
    """Returns each factor's `wanted` axes without axes that the op cannot use.

    Axes must split the factor (see `Rule.splits`), also in results. Fixed factors get
    none. An axis goes to one factor. Factors in `rule.over_all` get all axes or none.
    """
    used: set[str] = set()
    found: list[tuple[str, ...]] = [()] * len(wanted)
    split: dict[int, int] = {}
    # Factors behind others in a result come after them.
    behind = {
        f for f, names in enumerate(wanted) if names and not rule.splits_results(f)
    }
    for factor in sorted(range(len(wanted)), key=lambda f: f in behind):
        names = wanted[factor]
        if factor in behind and not rule.splits_results(factor, split):
            names = []
        kept: list[str] = []
        ways = 1
        for name in names:
            fits = rule.splits(factor, ways * sizes[name])
            if name not in used and fits and factor not in rule.fixed:
                kept.append(name)
                used.add(name)
                ways *= sizes[name]
        if factor in rule.over_all and len(kept) < len(sizes):
            used.difference_update(kept)
            kept = []
        found[factor] = tuple(kept)
        split[factor] = prod(sizes[name] for name in kept)
    return tuple(found)


def tensor_spec(
    rule: Rule, dims: Dims, axes: FactorAxes, sizes: Mapping[str, int]
) -> Spec:
    """Returns the sharding of an operand or result whose dims have these factors."""
    if all(len(factors) == 1 for factors in dims):
        return tuple(axes[factor] for (factor,) in dims)
    ways = {f: prod(sizes[name] for name in names) for f, names in enumerate(axes)}
    return tuple(
        tuple(name for f in rule.exposed(factors, ways) for name in axes[f])
        for factors in dims
    )


def reduced_axes(rule: Rule, axes: FactorAxes) -> tuple[str, ...]:
    """Returns the axes over which an op's results are partial sums."""
    return tuple(a for f in sorted(rule.reduction) for a in axes[f])


def describe(op: Op, mesh: Mesh, strategy: Strategy) -> str:
    """Writes a strategy as Alpa does: ``RS = RS x SS @ {1,0} (allreduce @ 1)``.

    S and R are sharded and replicated dims of result and operands. The braces hold the
    numbers of the mesh axes of each sharded factor, in the order of operands' dims.
    """
    rule = op.known_rule
    number = {name: str(i) for i, (name, _) in enumerate(mesh)}
    splits = ([c.inner] if c.inner != NONE else [] for c in strategy)
    axes = split_axes(rule, mesh, splits)
    made = list(axes)
    for (name, _), choice in zip(mesh, strategy, strict=True):
        if choice.exit != NONE:
            made[choice.exit] = (*made[choice.exit], name)
            if choice.inner not in rule.reduction:
                made[choice.inner] = tuple(n for n in made[choice.inner] if n != name)

    def letters(dims: Dims, axes: FactorAxes = axes) -> str:
        spec = tensor_spec(rule, dims, axes, dict(mesh))
        return "".join("S" if names else "R" for names in spec)

    order: dict[int, None] = {}
    for dims in (*rule.operands, *rule.results):
        order.update((f, None) for dim in dims for f in dim if axes[f])
    used = ",".join(number[a] for f in order for a in axes[f])
    text = f"{letters(rule.results[0], tuple(made))} = "
    text += " x ".join(map(letters, rule.operands))
    text += f" @ {{{used}}}"
    reduced = reduced_axes(rule, axes)
    if reduced:
        scattered = any(c.exit != NONE and c.inner in rule.reduction for c in strategy)
        kind = "reducescatter" if scattered else "allreduce"
        text += f" ({kind} @ {','.join(number[a] for a in reduced)})"
    exchanged = [
        number[name]
        for (name, _), choice in zip(mesh, strategy, strict=True)
        if choice.exit != NONE and choice.inner not in rule.reduction
    ]
    if exchanged:
        text += f" (alltoall @ {','.join(exchanged)})"
    return text
