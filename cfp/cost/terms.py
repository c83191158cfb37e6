"""Cost terms of one block under a strategy: compute, moves, reads and results.

A value that a loop carries is one tensor seen at several points, and has one number
(:attr:`cfp.analysis.flow.Flow.canonical`). So reshardings between iterations, or
between a parameter and its loop, are priced like others.
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
        matmul_ms: time of its contractions on one device.
        memory_ms: time of memory traffic of its other ops.
        makes: shardings of results, by value.
        reads: shardings of operands, by value.
    """

    matmul_ms: float
    memory_ms: float
    makes: Mapping[int, Made]
    reads: Mapping[int, tuple[Spec, ...]]


class Terms:
    """Prices the blocks of one program on one mesh."""

    def __init__(self, frame: Frame, rates: Rates) -> None:
        self.frame = frame
        self.rates = rates
        # Thousands of a block's strategies differ in other ops than what these are of.
        self.transition_ms = cache(self._transition_ms)
        self.move_ms = cache(self._move_ms)
        self._group_ms = cache(self._group_state_ms)
        self._gradient_ms = cache(self._one_gradient_ms)
        self._sizes = dict(frame.mesh)
        args = enumerate(frame.program.args)
        self.data = {v for i, v in args if i not in frame.group_of_arg}
        self._op = cache(self._op_terms)
        self._repeats: dict[int, int] = {}
        for op in frame.program.ops:
            if op.rule is not None and not self._only_fills(op):
                for v in map(self.same, op.results):
                    self._repeats[v] = max(op.repeat, self._repeats.get(v, 1))

    def _only_fills(self, op: Op) -> bool:
        """True if an op writes into a buffer that only ops behind the loop read.

        A cache has readers in each iteration, and may be resharded in each.
        """
        program = self.frame.program
        if op.kind != "dynamic_update_slice":
            return False
        users = (user for v in op.results for user, _ in program.users[v])
        return all(map(passes, (program.ops[user] for user in users)))

    def same(self, value: int) -> int:
        """The value that stands for all points at which a tensor is seen."""
        return self.frame.canonical.get(value, value)

    def turns(self, value: int) -> int:
        """Counts the times that opened loops have a value resharded in one step."""
        program = self.frame.program
        producer = program.values[value].producer
        if producer >= 0:
            return program.turns(producer)
        readers = (op for op, _ in program.uses(value) if op not in self.frame.group_of)
        return max((program.turns(op) for op in readers), default=1)

    def block(self, block: int, strategy: Strategy) -> BlockTerms:
        """Cost terms of a block under a strategy."""
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
        """Computes the terms of one op under one sharding."""
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
        """Computes time of contractions, and time of memory traffic."""
        rule, program = op.known_rule, self.frame.program
        share = self._share(rule, axes)
        if is_contraction(op):
            flops = op_flops(program, op) / op.repeat * share
            dtype = product_dtype(program, op)
            products_ms = self.rates.matmul_ms(flops, dtype)
            # Scores are large beside what is multiplied for each of them.
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
        """Computes time of a hand-sharded region on one device; 0 for other ops.

        Products and memory traffic count, collectives inside do not.
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
        """The share of an op's work that one device does, padding included."""
        share = 1.0
        for size, names in zip(rule.sizes, axes, strict=True):
            ways = prod(self._sizes[a] for a in names)
            if size:  # an operand that is left out may be an array of no elements
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
        """Estimates the time of a transition of a tensor of so many bytes.

        Args:
            group: storage group of a parameter or its gradient; independent transitions
                of one computation are partly combined.
        """
        count = 1 if group is None else self._alike_state[self._state_key(group)]
        steps = transition(size, have, unreduced, want, self.frame.mesh)
        return sum(self.rates.combined_ms(*step, count) for step in steps)

    @cached_property
    def gradients(self) -> Mapping[int, int]:
        """Finds the storage group of every gradient, also of partial ones.

        A value of as many elements without other readers is on its way to a gradient:
        under :func:`jax.vmap` sums over one dim after another.
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
        """Counts the storage groups of one type that one computation reads."""
        return Counter(map(self._state_key, range(len(self.frame.groups))))

    def _state_key(self, index: int) -> tuple[int, str]:
        program = self.frame.program
        main = program.args[self.frame.groups[index].args[0]]
        return self.turns(main), program.values[main].dtype

    def _move_ms(self, value: int, made: Made, wants: tuple[Spec, ...]) -> float:
        """Estimates the time for readers to get a value in their shardings."""
        if not wants:
            return 0.0
        size = self.frame.program.values[value].size_bytes
        group = self.gradients.get(value)
        moves = [(*made, wants[0]), *((wants[0], (), want) for want in wants[1:])]
        total = sum(self.transition_ms(size, *move, group) for move in moves)
        return total * self._repeats.get(value, 1)

    # -- state ---------------------------------------------------------------

    def owned_groups(
        self, groups: Sequence[int], blocks: Sequence[BlockTerms]
    ) -> list[list[int]]:
        """For each of some blocks the storage groups that it reads first."""
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
        """Estimates the time to update groups, and to gather their parameters."""
        found = [self._group_ms(i, self.wanted(i, terms), mode) for i in groups]
        return sum(memory for memory, _ in found), sum(moves for _, moves in found)

    def _group_state_ms(
        self, index: int, wants: tuple[Spec, ...], mode: Storage
    ) -> tuple[float, float]:
        """Computes the time of one storage group."""
        frame, program = self.frame, self.frame.program
        group = frame.groups[index]
        main = program.args[group.args[0]]
        used, wide = frame.stored_specs(group, mode, next(iter(wants), None))
        size, moves = program.values[main].size_bytes, 0.0
        if mode is Storage.OPTIMIZER:
            moves = self.transition_ms(size, wide, (), used, index)
        elif mode is not Storage.USED:
            read = size * self.narrowed(group.reads, main)
            for want in wants or (used,):
                once = self.transition_ms(read, wide, (), want, index)
                moves += self.turns(main) * once
        kept = [a for a in group.args if any(program.arg_memory[a : a + 1])]
        state, hosted = (
            2 * sum(program.values[program.args[a]].size_bytes for a in args)
            for args in (group.args, kept)
        )
        updates, ways = group.ops or group.inner_ops[:1], spec_ways(wide, frame.mesh)
        turns = max(map(program.turns, updates), default=1)
        host_ms = hosted / HOST_BYTES_PER_MS / ways
        return turns * self.rates.memory_ms(state / ways) + host_ms, moves

    def gradients_ms(
        self, groups: Iterable[int], terms: BlockTerms, mode: Storage
    ) -> float:
        """Estimates the time to hand gradients that a block makes to their updates."""
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
            order = readers[0].integers("permutation")  # It moves nothing.
        have, sizes = (tuple(of[d] for d in order) for of in (made[0], value.shape))
        if len(have) != len(wide):
            # A loop makes a stack's gradients one by one.
            places = combinations(range(len(wide)), len(sizes))
            alike = (at for at in places if tuple(group.shape[d] for d in at) == sizes)
            targets = [tuple(wide[d] for d in at) for at in alike] or [have]
            turns = self._repeats.get(self.same(v), 1)
        moves = ((value.size_bytes, have, made[1], to, index) for to in targets)
        return turns * min(self.transition_ms(*move) for move in moves)

    def wanted(self, index: int, terms: BlockTerms) -> tuple[Spec, ...]:
        """The shardings in which a block reads a group's parameter."""
        main = self.frame.program.args[self.frame.groups[index].args[0]]
        return terms.reads.get(self.same(main), ())

    def narrowed(self, reads: Sequence[int], main: int) -> float:
        """Returns the factor by which a cast shrinks a parameter before its use."""
        program = self.frame.program
        whole = dtype_bytes(program.values[main].dtype)
        casts = [program.ops[op] for op in reads if program.ops[op].kind == "convert"]
        cast = [dtype_bytes(program.values[op.results[0]].dtype) for op in casts]
        return min([1.0, *(size / whole for size in cast)])


# --------------------------------------------------------- collectives of a resharding

# Of one collective: its kind, the axes that it goes over, and bytes.
Step = tuple[str, tuple[str, ...], float]


def transition(
    size_bytes: float,
    have: Spec,
    partial: tuple[str, ...],
    want: Spec,
    mesh: Mesh,
) -> tuple[Step, ...]:
    """The collectives that take a tensor from one sharding to another.

    Args:
        size_bytes: bytes of the whole tensor.
        partial: axes over which it still has to be summed.

    Returns:
        The steps. Bytes are those of the whole tensor in a group of devices: what an
        all-gather makes, what a reduce-scatter or an all-to-all starts from.
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
        # Devices that are to have other pieces sum their own alone.
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
