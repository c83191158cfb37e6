"""Cost terms of a block (an anchor and the ops around it) under a strategy.

A value carried by a loop is one tensor seen at several points. All points share one
number (:attr:`cfp.analysis.flow.Flow.canonical`). So resharding between iterations, or
between a parameter and its loop, is priced like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from math import prod

from cfp.analysis.contractions import is_contraction
from cfp.analysis.flow import passes
from cfp.analysis.layout import Frame, Storage
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import (
    FactorAxes,
    Mesh,
    Spec,
    Strategy,
    reduced_axes,
    tensor_spec,
)
from cfp.cost.memory import moved_bytes
from cfp.profiling.collectives import Rates
from cfp.program.graph import Op, dtype_bytes, op_flops, product_dtype
from cfp.program.rules import Rule, padded_size
from cfp.settings import HOST_BYTES_PER_MS

Made = tuple[Spec, tuple[str, ...]]  # how a value comes: (sharding, unreduced axes)


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """Costs of one block, or one op, under one strategy.

    Attributes:
        matmul_ms: time of its contractions in a step, on one device.
        memory_ms: time of memory traffic in a step that contractions do not hide.
        makes: (sharding, unreduced axes) of each result, by canonical value number.
        reads: shardings of operands, by canonical number; none of scalars or constants.
    """

    matmul_ms: float
    memory_ms: float
    makes: Mapping[int, Made]
    reads: Mapping[int, tuple[Spec, ...]]


class Terms:
    """Estimates time terms of one program's blocks on one mesh, from `rates`."""

    def __init__(self, frame: Frame, rates: Rates) -> None:
        self.frame = frame
        self.rates = rates
        # Cached: thousands of strategies of a block share most of these terms.
        self.transition_ms = cache(self._transition_ms)
        self.move_ms = cache(self._move_ms)
        self._group_ms = cache(self._group_state_ms)
        self._gradient_ms = cache(self._one_gradient_ms)
        self._sizes = dict(frame.mesh)
        args = enumerate(frame.program.args)
        self.data = {self.same(v): i for i, v in args if i not in frame.group_of_arg}
        self._op = cache(self._op_terms)
        self._repeats: dict[int, int] = {}
        for op in frame.program.ops:
            if op.rule is not None and not self._only_fills(op):
                for v in map(self.same, op.results):
                    self._repeats[v] = max(op.repeat, self._repeats.get(v, 1))

    def _only_fills(self, op: Op) -> bool:
        """True for a dynamic_update_slice that only loops, branches, barriers read."""
        program = self.frame.program
        if op.kind != "dynamic_update_slice":
            return False
        users = (user for v in op.results for user, _ in program.users[v])
        return all(map(passes, (program.ops[user] for user in users)))

    def same(self, value: int) -> int:
        """Canonical number of a value, shared by a tensor's values in and at loops."""
        return self.frame.canonical.get(value, value)

    def turns(self, value: int) -> int:
        """Runs per step of the `Program.top_level` op that makes a value.

        For arguments: the most runs of a reader outside of updates; 1 without any.
        """
        program = self.frame.program
        producer = program.values[value].producer
        if producer >= 0:
            return program.turns(producer)
        readers = (op for op, _ in program.uses(value) if op not in self.frame.group_of)
        return max((program.turns(op) for op in readers), default=1)

    def block(self, block: int, strategy: Strategy) -> BlockTerms:
        """Cost terms of a block (by number) under a strategy."""
        sharded = self.frame.shardings[block].factor_axes(strategy)
        terms = [self._op(op, axes) for op, axes in sharded.items()]
        reads: dict[int, dict[Spec, None]] = {}
        for one in terms:
            for v, specs in one.reads.items():
                reads.setdefault(v, {}).update(dict.fromkeys(specs))
        return BlockTerms(
            sum(one.matmul_ms for one in terms),
            sum(one.memory_ms for one in terms),
            {v: made for one in terms for v, made in one.makes.items()},
            {v: tuple(specs) for v, specs in reads.items()},
        )

    def _op_terms(self, op_id: int, axes: FactorAxes) -> BlockTerms:
        program = self.frame.program
        op = program.ops[op_id]
        rule, sizes = op.known_rule, self._sizes
        unreduced = reduced_axes(rule, axes)
        makes = {
            self.same(v): (tensor_spec(rule, dims, axes, sizes), unreduced)
            for dims, v in zip(rule.results, op.results, strict=False)
        }
        reads: dict[int, tuple[Spec, ...]] = {}
        for dims, v in zip(rule.operands, op.operands, strict=False):
            value = program.values[v]
            if value.shape and value.producer not in program.leaf_ops:
                known = reads.get(self.same(v), ())
                reads[self.same(v)] = (*known, tensor_spec(rule, dims, axes, sizes))
        return BlockTerms(*self.compute_ms(op, axes), makes, reads)

    def compute_ms(self, op: Op, axes: FactorAxes) -> tuple[float, float]:
        """Returns an op's ms per step and device: (products, more time for memory)."""
        rule, program = op.known_rule, self.frame.program
        share = self._share(rule, axes)
        if is_contraction(op):
            flops = op_flops(program, op) / op.repeat * share
            products_ms = self.rates.matmul_ms(flops, product_dtype(program, op))
            # A product with large results for few FLOPs waits for memory.
            tensors = zip(
                (*rule.operands, *rule.results),
                (*op.operands, *op.results),
                strict=False,
            )
            touched = sum(
                program.values[v].size_bytes
                / spec_ways(tensor_spec(rule, dims, axes, self._sizes), self.frame.mesh)
                for dims, v in tensors
            )
            least_ms = max(self.rates.memory_ms(touched), self.rates.launch_ms)
            waits_ms = max(0.0, least_ms - products_ms)
            return op.repeat * products_ms, op.repeat * waits_ms
        moved = moved_bytes(program).get(op.id, 0.0)
        return 0.0, op.repeat * self.rates.memory_ms(moved * share)

    def manual_ms(self, op: Op) -> float:
        """Ms per step of a `shard_map` region on one device; 0 for other ops.

        Products and memory traffic count; communication does not.
        """
        if op.manual is None:
            return 0.0
        inner, total = op.manual.program, 0.0
        moved = moved_bytes(inner)
        for one in inner.ops:
            if one.manual is not None:
                total += self.manual_ms(one)
            elif is_contraction(one):
                flops, dtype = op_flops(inner, one), product_dtype(inner, one)
                total += self.rates.matmul_ms(flops, dtype)
            else:
                total += one.repeat * self.rates.memory_ms(moved.get(one.id, 0.0))
        return op.repeat * total

    def _share(self, rule: Rule, axes: FactorAxes) -> float:
        """Share of an op's work done by one device, padding included."""
        share = 1.0
        for size, names in zip(rule.sizes, axes, strict=True):
            ways = prod(self._sizes[a] for a in names)
            if size:  # An omitted operand may be an array without elements.
                share *= padded_size(size, ways) / (size * ways)
        return share

    def _transition_ms(
        self,
        size: float,
        have: Spec,
        unreduced: tuple[str, ...],
        want: Spec,
        group: int | None = None,
    ) -> float:
        """Estimates ms to reshard a tensor of `size` bytes once; see `transition`.

        With a storage `group`, small collectives share latency with groups like it.
        """
        count = 1 if group is None else self._alike_state[self._state_key(group)]
        steps = transition(size, have, unreduced, want, self.frame.mesh)
        return sum(self.rates.combined_ms(*step, count) for step in steps)

    @cached_property
    def gradients(self) -> Mapping[int, int]:
        """Storage group of each gradient, by canonical value number.

        Earlier values, back to a contraction's, count if as large and read once.
        """
        program = self.frame.program
        found: dict[int, int] = {}
        groups = self.frame.groups
        stack = [(v, group.index) for group in groups for v in group.gradients]
        while stack:
            v, group = stack.pop()
            found.setdefault(self.same(v), group)
            producer = program.values[v].producer
            op = program.ops[producer] if producer >= 0 else None
            if op is None or op.rule is None or is_contraction(op):
                continue
            count = prod(program.values[v].shape)
            stack += (
                (before, group)
                for before in op.operands
                if prod(program.values[before].shape) == count
                and len(program.users[before]) == 1
            )
        return found

    @cached_property
    def _alike_state(self) -> Counter[tuple[int, str]]:
        """Number of storage groups by (runs per step, dtype) of their parameter."""
        return Counter(map(self._state_key, range(len(self.frame.groups))))

    def _state_key(self, index: int) -> tuple[int, str]:
        program = self.frame.program
        main = program.args[self.frame.groups[index].args[0]]
        return self.turns(main), program.values[main].dtype

    def _move_ms(self, value: int, made: Made, wants: tuple[Spec, ...]) -> float:
        """Estimates ms per step to reshard a value to each of `wants`; 0 if none."""
        if not wants:
            return 0.0
        reads = self.frame.pinned_reads.get(self.data.get(value, -1), ())
        size, group = self.narrowed_bytes(value, reads), self.gradients.get(value)
        moves = [(*made, wants[0]), *((wants[0], (), want) for want in wants[1:])]
        total = sum(self.transition_ms(size, *move, group) for move in moves)
        return total * self._repeats.get(value, 1)

    # -- state ---------------------------------------------------------------

    def owned_groups(
        self, groups: Sequence[int], blocks: Sequence[BlockTerms]
    ) -> list[list[int]]:
        """Lists, for each block, the storage groups whose first reader it is.

        A group without reader is at its gradient's first maker, else the first block.
        """
        frame = self.frame
        owned: list[list[int]] = [[] for _ in blocks]
        for index in groups:
            group = frame.groups[index]
            args = {self.same(frame.program.args[a]) for a in group.args}
            gradients = set(map(self.same, group.gradients))
            readers = (i for i, t in enumerate(blocks) if args & t.reads.keys())
            makers = (i for i, t in enumerate(blocks) if gradients & t.makes.keys())
            owned[next(readers, next(makers, 0))].append(index)
        return owned

    def state_ms(
        self, groups: Sequence[int], terms: BlockTerms, mode: Storage
    ) -> tuple[float, float]:
        """Ms per step of groups: (updates, resharding of parameters and state)."""
        found = [self._group_ms(i, self.wanted(i, terms), mode) for i in groups]
        return sum(memory for memory, _ in found), sum(moves for _, moves in found)

    def _group_state_ms(
        self, index: int, wants: tuple[Spec, ...], mode: Storage
    ) -> tuple[float, float]:
        frame, program = self.frame, self.frame.program
        group = frame.groups[index]
        main = program.args[group.args[0]]
        used, wide = frame.stored_specs(group, mode, next(iter(wants), None))
        stored = used if mode in (Storage.USED, Storage.OPTIMIZER) else wide
        size = program.values[main].size_bytes
        read = self.turns(main), self.narrowed_bytes(main, group.reads)
        moves = [(1, size, wide, stored)]
        moves += [(*read, stored, want) for want in wants or (used,)]
        for pin in (frame.pins.get(a, wide) for a in group.args[1:]):
            moves += [(1, size, pin, wide), (1, size, wide, pin)]
        total = sum(n * self.transition_ms(b, a, (), z, index) for n, b, a, z in moves)
        kept = [a for a in group.args if any(program.arg_memory[a : a + 1])]
        state, hosted = (
            2 * sum(program.values[program.args[a]].size_bytes for a in args)
            for args in (group.args, kept)
        )
        updates, ways = group.ops or group.inner_ops[:1], spec_ways(wide, frame.mesh)
        turns = max(map(program.turns, updates), default=1)
        host_ms = hosted / HOST_BYTES_PER_MS / ways
        return turns * self.rates.memory_ms(state / ways) + host_ms, total

    def gradients_ms(
        self, groups: Iterable[int], terms: BlockTerms, mode: Storage
    ) -> float:
        """Estimates ms per step to reshard a block's gradients for their updates."""
        return sum(
            self._gradient_ms(index, v, made, self.wanted(index, terms), mode)
            for index in groups
            for v in self.frame.groups[index].gradients
            if (made := terms.makes.get(self.same(v))) is not None
        )

    def _one_gradient_ms(
        self, index: int, v: int, made: Made, wants: tuple[Spec, ...], mode: Storage
    ) -> float:
        program, group = self.frame.program, self.frame.groups[index]
        _, wide = self.frame.stored_specs(group, mode, next(iter(wants), None))
        targets, turns, value = [wide], self.turns(v), program.values[v]
        readers = [program.ops[user] for user, _ in program.users[v]]
        order: Sequence[int] = range(len(value.shape))
        if [op.kind for op in readers] == ["transpose"]:
            order = readers[0].integers("permutation")  # A transpose moves no data.
        have, sizes = (tuple(of[d] for d in order) for of in (made[0], value.shape))
        if len(have) != len(wide):
            # A loop makes the slices of a stacked gradient one by one.
            places = combinations(range(len(wide)), len(sizes))
            alike = (at for at in places if tuple(group.shape[d] for d in at) == sizes)
            targets = [tuple(wide[d] for d in at) for at in alike] or [have]
            turns = self._repeats.get(self.same(v), 1)
        moves = ((value.size_bytes, have, made[1], to, index) for to in targets)
        return turns * min(self.transition_ms(*move) for move in moves)

    def wanted(self, index: int, terms: BlockTerms) -> tuple[Spec, ...]:
        """Shardings in which a block reads a group's parameter; () if it does not."""
        main = self.frame.program.args[self.frame.groups[index].args[0]]
        return terms.reads.get(self.same(main), ())

    def narrowed_bytes(self, value: int, reads: Sequence[int]) -> int:
        """Bytes of a value in the narrowest dtype of it and its casts in `reads`."""
        program = self.frame.program
        casts = [program.ops[op] for op in reads if program.ops[op].kind == "convert"]
        found = (value, *(op.results[0] for op in casts))
        width = min(dtype_bytes(program.values[v].dtype) for v in found)
        return prod(program.shape(value)) * width


# --------------------------------------------------------- collectives of a resharding

# A collective: (kind, mesh axes, bytes).
Step = tuple[str, tuple[str, ...], float]


def transition(
    size_bytes: float, have: Spec, partial: tuple[str, ...], want: Spec, mesh: Mesh
) -> tuple[Step, ...]:
    """Estimates the collectives that reshard a tensor; () if local slices suffice.

    Args:
        size_bytes: bytes of the whole tensor.
        partial: axes over which the tensor still has to be summed.

    Returns:
        Steps (kind, axes, bytes). Bytes are an all-gather's output or a reduction's
        input, both on a device, or all inputs of a group in an all-to-all.
    """
    sizes = dict(mesh)

    def ways(names: Iterable[str]) -> int:
        return prod(sizes[name] for name in names)

    steps: list[Step] = []
    held = [list(names) for names in have]
    local = size_bytes / ways(name for names in held for name in names)
    scattered = []
    for name in partial:
        for names, target in zip(held, want, strict=True):
            if name in target and names == list(target[: len(names)]):
                scattered.append(name)
                names.append(name)
                break
    if scattered:
        steps.append(("reduce-scatter", tuple(scattered), local))
        local /= ways(scattered)
    if summed := tuple(name for name in partial if name not in scattered):
        # Devices with different pieces of the target sum only their own piece.
        taken = {name for names in held for name in names}
        for names, target in zip(held, want, strict=True):
            rest = target[len(names) :]
            if names == list(target[: len(names)]) and taken.isdisjoint(rest):
                local /= ways(rest)
                names += rest
        steps.append(("all-reduce", summed, local))
    gathered, moved, wanted = [], [], {name for names in want for name in names}
    for names, target in zip(held, want, strict=True):
        shared = 0
        while names[: shared + 1] == list(target[: shared + 1]) and shared < len(names):
            shared += 1
        for name in names[shared:]:
            elsewhere = name in wanted and name not in target
            (moved if elsewhere else gathered).append(name)
    if moved:
        steps.append(("all-to-all", tuple(moved), local * ways(moved)))
    if gathered:
        steps.append(("all-gather", tuple(gathered), local * ways(gathered)))
    return tuple(steps)
