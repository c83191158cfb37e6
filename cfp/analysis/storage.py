"""State: the arguments that a step updates, and the ops that update them.

A *storage group* is usually a parameter with its optimizer state, and the ops that
compute their new values: elementwise ones, and norms. A group can be stored and updated
in shards independently of the blocks that use the parameter (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod

from cfp.analysis.contractions import UnionFind, is_contraction, squeeze
from cfp.analysis.flow import NEVER, Flow, first_downstream, passes
from cfp.analysis.strategies import Mesh, Spec
from cfp.program.graph import Op, Program, is_dequantized, reached

_VIEWS = frozenset({"transpose", "reshape", "convert"})
_WRITES = _VIEWS | {"broadcast_in_dim", "dynamic_update_slice"}
_LOOKUPS = frozenset({"gather", "scatter"})
_ROUNDS = frozenset({"abs", "is_finite", "select", "multiply", "reduce"})


class Storage(StrEnum):
    """Storage of a parameter and its optimizer state between steps.

    USED: sharded as blocks use the parameter. OPTIMIZER: the parameter as used, its
    state and update sharded further (ZeRO-1). SHARDED: all of it sharded further, and
    gathered before use (ZeRO-3, fully sharded data parallel). INNER: the same along
    axes within a host only (HSDP). LARGEST: matrices sharded along their largest dims,
    as by hand (or the first dim, see `extend_spec`); the rest as used.
    """

    USED = "used"
    OPTIMIZER = "optimizer"
    SHARDED = "sharded"
    INNER = "inner"
    LARGEST = "largest"


# Modes that are tried for every strategy.
USUAL_STORAGE = (Storage.USED, Storage.OPTIMIZER, Storage.SHARDED, Storage.INNER)


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """Arguments that are stored alike, such as a parameter and its optimizer state.

    Attributes:
        args: argument positions, the parameter first: an argument that ops outside of
            the update read, if any.
        ops: ids of the top-level update ops.
        gradients: ids of values that enter the update, no scalars and no constants.
        shape: shape of the parameter.
        inner_ops: ids of update ops in loops and branches, such as sums of gradients.
        reads: ids of ops between the parameter and the blocks: casts, transposes,
            reshapes, slices in a loop, and roundings to a lower `Plan.precision`.
        whole_dims: dims that a loop slices or writes in slices; not sharded further.
        read_args: the part of ``args`` that ops outside of the update read.
        has_update: True if the update has a value that may be sharded further than the
            parameter. False for a decoding cache, and for weights returned unchanged.
    """

    index: int
    args: tuple[int, ...]
    ops: tuple[int, ...]
    gradients: tuple[int, ...]
    shape: tuple[int, ...]
    inner_ops: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    whole_dims: frozenset[int] = frozenset()
    read_args: frozenset[int] = frozenset()
    has_update: bool = True


def find_storage(
    flow: Flow, paired: tuple[int | None, ...]
) -> tuple[StorageGroup, ...]:
    """Returns storage groups; scalars are in none. `pair_outputs` returns `paired`."""
    return _Finder(flow, paired).run()


class _Finder:
    """Walks from each new value of state upstream, through elementwise ops."""

    def __init__(self, flow: Flow, paired: tuple[int | None, ...]) -> None:
        self.flow, self.paired = flow, paired
        self.program = program = flow.program
        outputs = {program.outputs[o] for o in paired if o is not None}
        self._find_leads(outputs)
        handed_on = {*filter(self._is_handed_on, outputs)}
        if handed_on:
            self._find_leads(outputs - handed_on)
        self.arg_position = {v: i for i, v in enumerate(program.args)}
        self.owner: dict[int, int] = {}  # update op -> an argument position
        self.sets = UnionFind()  # of argument positions
        self.members: set[int] = set()

    def _find_leads(self, outputs: Set[int]) -> None:
        """Finds ops and values that lead to a product or lookup, not by new state."""
        program, flow = self.program, self.flow
        targets = {
            op.id for op in program.ops if op.kind in _LOOKUPS or is_contraction(op)
        }
        news = {flow.canonical.get(v, v) for v in outputs}
        ends = outputs | {v for v, w in flow.canonical.items() if w in news}
        self.leads, self.leads_value = first_downstream(flow, targets, ends)
        carried = flow.entered.keys() | flow.entry_place.keys()
        self.leads_before, _ = first_downstream(flow, targets, outputs | ends - carried)

    def _is_handed_on(self, output: int) -> bool:
        """True if new state, made without a gradient, reaches a product or lookup."""
        program = self.program
        new = (v for op in self.flow.makers(output) for v in op.results)
        is_read = any(
            self._leads_on(program.ops[user], index)
            for value in new
            if program.shape(value) and not program.is_leaf(value)
            for user, index in program.users[value]
        )
        return is_read and not is_gradient(program, output)

    def run(self) -> tuple[StorageGroup, ...]:
        program = self.program
        for position, output in enumerate(self.paired):
            shape = self._shape(position)
            if output is None or not shape:
                continue
            self.members.add(position)
            if squeeze(shape):  # Single elements are not followed.
                self._walk(position, program.outputs[output])
        return self._collect()

    def _shape(self, position: int) -> tuple[int, ...]:
        return self.program.shape(self.program.args[position])

    def _leads_on(self, user: Op, index: int) -> bool:
        """True if operand `index` of `user` leads to a product or lookup by `user`."""
        if not passes(user):
            return self.leads[user.id] != NEVER
        inside = self.flow.becomes(user.id, index) if index < len(user.operands) else ()
        return any(self.leads_value[v] != NEVER for v in inside)

    def _walk(self, position: int, output: int) -> None:
        shape = self._shape(position)
        stack, seen = [(output, squeeze(shape))], set()
        while stack:
            v, inner = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            value = self.program.values[v]
            if v in self.arg_position:
                if value.shape == shape:
                    self.members.add(self.arg_position[v])
                    self.sets.union(self.arg_position[v], position)
                continue
            sources = self.flow.sources(v)
            if sources:
                stack.extend((s, inner) for s in sources)
                continue
            op = self.program.ops[value.producer]
            if not self._updates(op, inner):
                continue
            if op.id in self.owner:
                # A vector that is combined with a table cannot be stored as the table.
                if self._shape(self.owner[op.id]) == shape:
                    self.sets.union(self.owner[op.id], position)
                continue
            self.owner[op.id] = position
            if op.kind == "dynamic_update_slice":
                piece = squeeze(self.program.shape(op.operands[1]))
                stack.append((op.operands[0], inner))
                stack.append((op.operands[1], piece))
            elif op.kind in _VIEWS:
                source = squeeze(self.program.shape(op.operands[0]))
                stack.append((op.operands[0], source))
            else:
                stack.extend((operand, inner) for operand in op.operands)

    def _updates(self, op: Op, shape: tuple[int, ...]) -> bool:
        """True if an op may be part of an update: elementwise on tensors of `shape`.

        It leads to no product or lookup. Dims of size 1 do not count. Casts, views,
        broadcasts, a loop's writes of slices into its stack count as elementwise.
        """
        program = self.program
        if op.rule is None or op.rule.reduction or len(op.results) != 1:
            return False
        if op.id in program.leaf_ops or self._leads(op):
            return False
        if op.kind == "dynamic_update_slice":
            return op.parent >= 0 and self._stacks(op)
        if op.rule.fixed or squeeze(program.shape(op.results[0])) != shape:
            return False
        if op.kind in _VIEWS:
            source = squeeze(program.shape(op.operands[0]))
            single = len(program.users[op.operands[0]]) == 1
            return (single or source == shape) and sorted(source) == sorted(shape)
        return op.kind == "broadcast_in_dim" or all(
            squeeze(program.shape(v)) in (shape, ()) or program.is_leaf(v)
            for v in op.operands
        )

    def _leads(self, op: Op) -> bool:
        """True if an op is a product or lookup, or reaches one not by new state."""
        leads = self.leads if op.parent >= 0 else self.leads_before
        return leads[op.id] != NEVER

    def _stacks(self, op: Op) -> bool:
        place = self.flow.entry_place.get(op.operands[0])
        if place is None:
            return False
        return self.program.ops[place[0]].yields[place[1]] == op.results[0]

    def _collect(self) -> tuple[StorageGroup, ...]:
        args: dict[Hashable, list[int]] = {}
        for position in sorted(self.members):
            args.setdefault(self.sets.find(position), []).append(position)
        ops: dict[Hashable, set[int]] = {key: set() for key in args}
        for op, position in self.owner.items():
            ops[self.sets.find(position)].add(op)
        return tuple(
            self._group(index, positions, ops[key])
            for index, (key, positions) in enumerate(args.items())
        )

    def _group(
        self, index: int, positions: list[int], inside: set[int]
    ) -> StorageGroup:
        program = self.program
        readers = {
            p: [op.id for op, _ in self.flow.readers(program.args[p])]
            for p in positions
        }
        outside = frozenset(p for p in positions if not inside.issuperset(readers[p]))
        positions.sort(key=lambda p: (p not in outside, p))
        shape = program.shape(program.args[positions[0]])
        entering = self._entering(positions, inside)
        inside |= self._statistics(positions, inside, entering, squeeze(shape))
        reads, whole = find_reads(self.flow, program.args[positions[0]], inside)
        return StorageGroup(
            index=index,
            args=tuple(positions),
            ops=tuple(i for i in sorted(inside) if program.ops[i].parent < 0),
            gradients=tuple(entering),
            shape=shape,
            inner_ops=tuple(i for i in sorted(inside) if program.ops[i].parent >= 0),
            reads=reads,
            whole_dims=whole | self._stacked_dims(inside, len(shape)),
            read_args=outside,
            has_update=not outside.issuperset(positions[1:])
            or any(program.ops[i].kind not in _WRITES for i in inside),
        )

    def _stacked_dims(self, inside: set[int], rank: int) -> frozenset[int]:
        """Returns dims along which loops write a group's tensors slice by slice."""
        found = set()
        for op_id in inside:
            op = self.program.ops[op_id]
            if op.kind == "dynamic_update_slice":
                whole, piece = (self.program.shape(v) for v in op.operands[:2])
                if len(whole) == rank:
                    found |= {d for d in range(rank) if whole[d] != piece[d]}
        return frozenset(found)

    def _entering(self, positions: list[int], inside: set[int]) -> list[int]:
        program = self.program
        values = {program.args[p] for p in positions}
        entering: dict[int, None] = {}
        for op_id in sorted(inside):
            for v in program.ops[op_id].operands:
                if not program.shape(v) or v in values:
                    continue
                makers = list(self.flow.makers(v))
                if not makers or any(
                    op.id not in inside and op.id not in program.leaf_ops
                    for op in makers
                ):
                    # Arguments of the group that are carried into a loop do not count.
                    if values.isdisjoint(reached([v], self.flow.sources)):
                        entering[v] = None
        return list(entering)

    def _statistics(
        self,
        positions: list[int],
        inside: set[int],
        entering: list[int],
        shape: tuple[int, ...],
    ) -> set[int]:
        """Claims other ops on gradients and state alone, as for norms; returns ids."""
        program = self.program
        known = {program.args[p] for p in positions} | set(entering)
        known.update(r for op in inside for r in program.ops[op].results)
        found: set[int] = set()
        stack = [v for v in known if squeeze(program.shape(v)) == shape]
        while stack:
            for user, _ in program.users[stack.pop()]:
                op = program.ops[user]
                if user in inside or user in found or user in self.owner:
                    continue
                if not self._summarises(op, known, shape):
                    continue
                found.add(user)
                result = op.results[0]
                known.add(result)
                if squeeze(program.shape(result)) == shape:
                    stack.append(result)
        self.owner.update(dict.fromkeys(found, positions[0]))
        return found

    def _summarises(self, op: Op, known: set[int], shape: tuple[int, ...]) -> bool:
        program = self.program
        if op.rule is None or op.rule.fixed or op.parent >= 0 or len(op.results) != 1:
            return False
        if self._leads(op) or op.kind in _LOOKUPS or is_contraction(op):
            return False
        result = squeeze(program.shape(op.results[0]))
        if result != shape and op.kind not in ("reduce", *_VIEWS):
            return False
        if op.kind in _VIEWS and sorted(result) != sorted(shape):
            return False
        return all(
            v in known or not program.shape(v) or program.is_leaf(v)
            for v in op.operands
        )


def find_reads(
    flow: Flow, value: int, inside: Set[int] = frozenset()
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Returns `StorageGroup.reads` of `value`, none `inside`, and dims loops slice."""
    program = flow.program
    found, whole = set[int](), set[int]()
    # In a lower precision, shards are rounded before they are gathered.
    rounds = _ROUNDS if program.rewritten.precision else ()
    rank = len(program.shape(value))
    stack: list[tuple[int, tuple[int | None, ...]]] = [(value, (*range(rank),))]
    while stack:
        v, dims = stack.pop()
        for op, index in flow.readers(v):
            if op.id in inside or op.id in found or index or op.rule is None:
                continue
            if op.kind == "dynamic_slice" and op.parent >= 0:
                shapes = map(program.shape, (op.operands[0], op.results[0]))
                sizes = zip(dims, *shapes, strict=True)
                whole.update(d for d, a, b in sizes if a != b and d is not None)
            elif op.kind not in (*_VIEWS, *rounds) or is_dequantized(program, op):
                continue
            found.add(op.id)
            if op.kind != "reduce":
                stack.append((op.results[0], _carried_dims(op, dims)))
    return tuple(sorted(found)), frozenset(whole)


def _carried_dims(op: Op, dims: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns the parameter's dim, or None, for each dim of a view's result."""
    rule = op.known_rule
    of_factor = dict(zip(map(rule.major, rule.operands[0]), dims, strict=True))
    of_factor[None] = None  # Dims of size 1.
    return tuple(map(of_factor.get, map(rule.major, rule.results[0])))


def is_gradient(program: Program, value: int, ends: Set[int] = frozenset()) -> bool:
    """True if a walk upstream meets an op of a backward pass, by its scope.

    Contractions, gathers, scatters, and values of `ends` (not `value`) end the walk.
    """
    stack, seen = [value], {*ends} - {value}
    while stack:
        v = stack.pop()
        op = program.maker(v)
        if v in seen or op is None or program.is_leaf(v):
            continue
        seen.add(v)
        if "transpose(" in op.scope:
            return True
        if op.has_regions:
            stack += op.yielded(op.results.index(v))
        elif not is_contraction(op) and op.kind not in _LOOKUPS:
            stack += op.operands
    return False


def pair_outputs(flow: Flow) -> tuple[int | None, ...]:
    """Returns for each argument the index of the output that is its new value, or None.

    Both have equal types, and equal paths below their roots; an output may lack a root.
    If the output lies deeper (`checkify` returns state so), or the argument's path is
    its root, the output must also update it elementwise (see `_renews`). Other
    arguments take the output that donation gives them: JAX matches these by type alone.
    """
    program = flow.program
    paired: list[int | None] = [None] * len(program.args)
    taken: set[int] = set()
    by_path: dict[tuple, list[int]] = {}
    for index, name in enumerate(program.output_names):
        value, parts = program.values[program.outputs[index]], name.split("/")
        for start in range(len(parts) + 1):
            key = start > 1, "/".join(parts[start:]), value.shape, value.dtype
            by_path.setdefault(key, []).append(index)
    for is_deep, (index, name) in product((False, True), enumerate(program.arg_names)):
        value, tail = program.values[program.args[index]], name.partition("/")[2]
        key = is_deep, tail, value.shape, value.dtype
        for candidate in by_path.get(key, ()) if paired[index] is None else ():
            is_sure = tail and not is_deep
            if candidate not in taken and (
                is_sure or _renews(flow, program.args[index], candidate)
            ):
                paired[index] = candidate
                taken.add(candidate)
                break
    for index, output in enumerate(program.alias):
        if paired[index] is None and output is not None and output not in taken:
            paired[index] = output
            taken.add(output)
    return tuple(paired)


def _renews(flow: Flow, arg: int, output: int) -> bool:
    """True if the output with this index is `arg`, or is made from it elementwise.

    In the second case it is also made from results of ops that are not elementwise,
    such as a gradient: ``arg + 1`` and the sum of two arguments renew nothing.
    """
    program = flow.program
    if program.outputs[output] == arg:
        return True
    shape = squeeze(program.shape(arg))
    stack, seen = [program.outputs[output]], set()
    reached = entered = False
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        reached = reached or v == arg
        sources = flow.sources(v)
        stack.extend(sources)
        op = program.maker(v)
        if sources or op is None or program.is_leaf(v):
            continue
        plain = op.rule is not None and not (op.rule.reduction or op.rule.fixed)
        if plain and squeeze(program.shape(op.results[0])) == shape:
            stack.extend(op.operands)
        elif program.shape(v):
            entered = True
    return reached and entered


def spec_ways(spec: Spec, mesh: Mesh) -> int:
    """Returns the number of pieces into which a spec cuts a tensor."""
    sizes = dict(mesh)
    return prod(sizes[name] for names in spec for name in names)


def even_spec(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> Spec:
    """Keeps each dim's axes before the first that splits it unevenly."""
    sizes = dict(mesh)
    dims = []
    for size, names in zip(shape, spec, strict=True):
        kept, ways = [], 1
        for name in names:
            if size % (ways * sizes[name]):
                break
            kept.append(name)
            ways *= sizes[name]
        dims.append(tuple(kept))
    return tuple(dims)


def extend_spec(
    spec: Spec,
    shape: tuple[int, ...],
    mesh: Mesh,
    whole_dims: Set[int] = frozenset(),
    without: Set[str] = frozenset(),
    *,
    largest: bool = False,
) -> Spec:
    """Adds a spec's unused axes, each on the first dim that it splits evenly, if any.

    Args:
        whole_dims: dims that get no more axes.
        without: axes that are not added.
        largest: try larger dims first, unless the product of the dims before the
            largest equals it and all unused axes together divide the first: then
            gradients need no transpose.
    """
    used = {*without, *(name for names in spec for name in names)}
    dims = [list(names) for names in spec]
    sizes = dict(mesh)
    order = [*range(len(dims))]
    free = [dim for dim in order if dim not in whole_dims and shape[dim] > 1]
    if largest and free:
        most = max(free, key=lambda dim: shape[dim])
        before = prod(shape[dim] for dim in free if dim < most)
        ways = prod(size for name, size in mesh if name not in used)
        if before != shape[most] or shape[free[0]] % ways:
            order.sort(key=lambda dim: -shape[dim])
    for name, size in mesh:
        if name in used:
            continue
        for dim in order:
            names = dims[dim]
            ways = size * prod(sizes[other] for other in names)
            if shape[dim] % ways == 0 and dim not in whole_dims:
                names.append(name)
                break
    return tuple(tuple(names) for names in dims)
