"""Choices, and the shardings that they give to values and their uses.

A :class:`Choice` has a strategy for each block (a contraction with the ops that are
sharded like it), and a storage mode for each storage group (a parameter and its state).
:class:`Layout` finds the sharding in which each value is made, and in which each op
reads it. If the two differ, the compiler reshards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import DimClasses, form_of, squeeze
from cfp.analysis.flow import passes
from cfp.analysis.storage import Storage, StorageGroup, even_spec, extend_spec
from cfp.analysis.strategies import (
    BlockSharding,
    FactorAxes,
    Mesh,
    Spec,
    Strategy,
    reduced_axes,
    split_axes,
    tensor_spec,
)
from cfp.printable import Name
from cfp.program.constrain import Constraints
from cfp.program.graph import Op, Program, searched_once

# (kind, kernel) pairs for parts of a segment: see `cfp.kernels.kinds`.
SegmentKernels = tuple[tuple[Name, Name], ...]
AS_WRITTEN: SegmentKernels = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy for each block and one storage mode for each storage group.

    Attributes:
        remat: indices of segments whose forward pass is computed again in the backward
            pass: only their inputs are kept.
        kernels: (segment index, its `SegmentKernels`); no entry without kernels.
    """

    blocks: tuple[Strategy, ...]
    storage: tuple[Storage, ...]
    remat: tuple[int, ...] = ()
    kernels: tuple[tuple[int, SegmentKernels], ...] = ()

    @property
    def all_kernels(self) -> set[tuple[str, str]]:
        """The (kind of kernels, kernel) pairs of all segments."""
        return {pair for _, kernels in self.kernels for pair in kernels}

    def kernels_of(self, segment: int) -> SegmentKernels:
        """Returns {kind of kernels: kernel} of a segment as pairs; () if as written."""
        return dict(self.kernels).get(segment, AS_WRITTEN)


@dataclass(frozen=True, slots=True)
class Frame:
    """Analysis of a program on a mesh, shared by all layouts.

    Attributes:
        mesh: (axis, size) pairs of size 2 or more.
        outer: axes between hosts; empty if all axes are.
        paired: for each argument the index of the output that is its new value, or
            None.
        canonical: result of `Flow.canonical`.
    """

    program: Program
    mesh: Mesh
    outer: frozenset[str]
    blocks: tuple[Block, ...]
    groups: tuple[StorageGroup, ...]
    paired: tuple[int | None, ...]
    renewed: Mapping[int, int]  # output -> the argument that it is the new value of
    canonical: Mapping[int, int]
    shardings: tuple[BlockSharding, ...]
    block_of: tuple[int, ...]  # op id -> block index, or -1
    group_of: Mapping[int, int]  # update op id -> group index
    group_of_arg: Mapping[int, int]  # argument position -> group index
    region_ops: tuple[int, ...]  # loops and branches
    barrier_ops: tuple[int, ...]
    pins: Mapping[int, Spec]  # argument position -> the sharding that the user fixed
    pinned_reads: Mapping[int, tuple[int, ...]]  # pinned, in no group -> find_reads
    looked_for: dict[tuple[Any, ...], Any] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )  # See `searched_once`.

    def stored_specs(
        self, group: StorageGroup, mode: Storage, wanted: Spec | None
    ) -> tuple[Spec, Spec]:
        """Returns shardings: (the parameter as blocks use it, state under this mode).

        SHARDED, INNER and LARGEST store a parameter without a pin like the state.
        `wanted` is the sharding in which the first block reads it, None if replicated:
        axes that do not divide are dropped. A pin replaces it.
        """
        first, whole = group.args[0], ((),) * len(group.shape)
        used = even_spec(wanted or whole, group.shape, self.mesh)
        used = self.pins.get(first, used)
        largest = mode is Storage.LARGEST and first not in self.pins
        if mode is Storage.USED or (largest and len(squeeze(group.shape)) < 2):
            return used, used
        kept = self.outer if mode is Storage.INNER else frozenset[str]()
        start, dims = whole if largest else used, group.whole_dims
        wide = extend_spec(start, group.shape, self.mesh, dims, kept, largest=largest)
        return used, wide

    def effective(self, mode: Storage, groups: Iterable[StorageGroup]) -> Storage:
        """Returns the mode, or another that stores these groups in the same way.

        USED replaces OPTIMIZER without updates, SHARDED replaces INNER without `outer`.
        """
        if mode is Storage.OPTIMIZER and not any(group.has_update for group in groups):
            return Storage.USED
        return Storage.SHARDED if mode is Storage.INNER and not self.outer else mode


class Layout:
    """The shardings that a choice gives to a program, or to some of its blocks.

    Attributes:
        value_spec: {value id: sharding in which the value is made}, without constants
            and values that are not laid out: see `spec`.
        axes: {id of a laid-out op: axes that split each factor}.
    """

    def __init__(
        self,
        frame: Frame,
        strategies: Mapping[int, Strategy],
        storage: Mapping[int, Storage],
    ) -> None:
        """Lays out the blocks and the storage groups whose indices are given."""
        self.frame = frame
        self.axes: dict[int, FactorAxes] = {}
        self.value_spec: dict[int, Spec] = {}
        for index, strategy in strategies.items():
            self.axes.update(frame.shardings[index].factor_axes(strategy))
        for index, mode in storage.items():
            self._lay_out_group(frame.groups[index], mode)
        for position, ops in frame.pinned_reads.items():
            self._lay_out_reads(ops, position, frame.pins[position])
        self._values()

    def spec(self, value: int) -> Spec | None:
        """Returns the sharding in which a value is made; None for a constant.

        Arguments neither stored nor pinned are made as first read. Other values that
        are not laid out are replicated, or sharded by hand.
        """
        if (known := self.value_spec.get(value)) is not None:
            return known
        program = self.frame.program
        if program.is_leaf(value):
            return None
        if (op := program.maker(value)) is None:
            shape = program.shape(value)
            found = self.read_spec(value) or ((),) * len(shape)
            is_argument = program.values[value].origin < 0
            return even_spec(found, shape, self.frame.mesh) if is_argument else found
        return self.natural_spec(op, op.results.index(value))

    def use_spec(self, op_id: int, index: int) -> Spec | None:
        """Returns the spec in which an op reads an operand; None if any will do.

        `index` is a place in `Op.reads`. A loop or branch reads values in the sharding
        of its results; any will do for barriers, constants and a branch's operands.
        Other ops that are not laid out read values replicated, or as sharded by hand.
        """
        op = self.frame.program.ops[op_id]
        if op.has_regions:
            count = len(op.operands)
            if op.kind == "while":
                return self.value_spec.get(op.results[index % count])
            place = (index - count) % max(1, len(op.results))
            return self.value_spec.get(op.results[place]) if index >= count else None
        if passes(op):  # A barrier.
            return None
        if op.id in self.axes and op.rule is not None:
            if index < len(op.rule.operands):
                return self._op_specs(op)[1][index]
            return None
        if op.shardings:
            return self._by_hand(op.shardings[index])
        if op.id in self.frame.program.leaf_ops:
            return None
        return ((),) * len(self.frame.program.values[op.operands[index]].shape)

    def _by_hand(self, spec: Spec) -> Spec:
        names = dict(self.frame.mesh)
        return tuple(tuple(a for a in dim if a in names) for dim in spec)

    def natural_spec(self, op: Op, index: int) -> Spec | None:
        """Returns a result's spec by its op, whatever reads it; None for constants."""
        if op.id in self.axes:
            return self._op_specs(op)[0][index]
        if op.shardings:
            return self._by_hand(op.shardings[len(op.operands) + index])
        if op.id in self.frame.program.leaf_ops:
            return None
        return ((),) * len(self.frame.program.shape(op.results[index]))

    def unreduced(self, op: Op) -> tuple[str, ...]:
        """Returns the axes over which an op's results are partial sums."""
        return self._op_specs(op)[2] if op.id in self.axes else ()

    def _op_specs(
        self, op: Op
    ) -> tuple[tuple[Spec, ...], tuple[Spec, ...], tuple[str, ...]]:
        rule, axes, known = op.rule, self.axes[op.id], self.frame.looked_for
        # Layouts and equal layers share them.
        if (found := known.get((id(rule), axes))) is None:
            assert rule is not None, "only ops with a rule have axes"
            sizes = dict(self.frame.mesh)
            made, read = (
                tuple(tensor_spec(rule, dims, axes, sizes) for dims in tensors)
                for tensors in (rule.results, rule.operands)
            )
            found = known[id(rule), axes] = made, read, reduced_axes(rule, axes)
        return found

    def output_specs(self) -> tuple[Spec, ...]:
        """Returns the sharding of each output of the program."""
        return tuple(map(self.output_spec, range(len(self.frame.program.outputs))))

    def output_spec(self, place: int) -> Spec:
        """An output's sharding: its argument's for new state, else as made but even."""
        if (position := self.frame.renewed.get(place)) is not None:
            return self.arg_spec(position)
        value = self.frame.program.outputs[place]
        shape = self.frame.program.shape(value)
        found = self.spec(value) or ((),) * len(shape)
        return even_spec(found, shape, self.frame.mesh)

    def arg_spec(self, position: int) -> Spec:
        """Returns the sharding of an argument of the program, by position."""
        value = self.frame.program.args[position]
        return self.spec(value) or ((),) * len(self.frame.program.shape(value))

    def stored_specs(
        self, group: StorageGroup, mode: Storage
    ) -> tuple[Spec, dict[int, Spec]]:
        """Returns (the mode's sharding of state, {argument position: sharding})."""
        first, pins = group.args[0], self.frame.pins
        wanted = self.read_spec(self.frame.program.args[first])
        used, wide = self.frame.stored_specs(group, mode, wanted)
        kept = {first, *group.read_args} if mode is Storage.OPTIMIZER else set[int]()
        return wide, {p: pins.get(p, used if p in kept else wide) for p in group.args}

    def _lay_out_group(self, group: StorageGroup, mode: Storage) -> None:
        frame, args = self.frame, self.frame.program.args
        wide, stored = self.stored_specs(group, mode)
        for position, spec in stored.items():
            self.value_spec[args[position]] = spec
        self._lay_out_reads(group.reads, group.args[0], stored[group.args[0]])
        # An argument and its new value are stored alike.
        places = (frame.paired[p] for p in group.args)
        new = (frame.program.outputs[o] for o in places if o is not None)
        values = (*(args[p] for p in group.args), *new)
        ops = (*group.ops, *group.inner_ops)
        self.axes.update(axes_as_stored(frame, ops, values, wide))

    def _lay_out_reads(self, ops: tuple[int, ...], position: int, spec: Spec) -> None:
        """Shards an argument's casts and slices as stored, if no less than before."""
        value = self.frame.program.args[position]
        for op_id, axes in axes_as_stored(self.frame, ops, (value,), spec).items():
            used = self.axes.get(op_id)
            if used is not None and sum(map(len, axes)) >= sum(map(len, used)):
                self.axes[op_id] = axes

    def read_spec(self, value: int) -> Spec | None:
        """Returns the spec in which a value's first reader reads it, or None.

        Readers are laid-out ops, not in updates, and regions sharded by hand. A reader
        that gathers the value counts only without others. A loop that is not opened
        reads the value as it carries it.
        """
        gathered = None
        program = self.frame.program
        values, uses = [value], list[tuple[int, int]]()
        while values or uses:
            if values:
                uses += sorted(program.users[values.pop()], reverse=True)
                continue
            user, index = uses.pop()
            op = program.ops[user]
            if op.kind == "while" and index < len(op.operands):
                if user not in program.opened:
                    return self._carried(op.results[index])
                values += op.entered(index)
            elif passes(op) and not op.has_regions:
                values.append(op.results[index])
            laid_out = user in self.axes and user not in self.frame.group_of
            if laid_out or op.shardings:
                spec = self.use_spec(user, index)
                if spec is not None and (
                    any(spec) or not (op.rule and op.rule.gathered)
                ):
                    return spec
                gathered = gathered or spec
        return gathered

    def _carried(self, result: int) -> Spec:
        """A loop result's sharding: its first reader's in the loop, or else as yielded.

        A value that an opened loop hands on unchanged keeps its initial sharding.
        """
        if result in self.value_spec:
            return self.value_spec[result]
        program = self.frame.program
        loop = program.ops[program.values[result].producer]
        place = loop.results.index(result)
        found = None
        if loop.id in program.opened and loop.yields[place] in loop.entries:
            # Sharded state stays sharded, and is gathered in every iteration.
            found = self.value_spec.get(loop.operands[place])
        for entry in loop.entered(place):
            found = found or self.read_spec(entry)
        found = found or self._made_spec(loop.yields[place])
        return found or ((),) * len(program.shape(result))

    def _branch_spec(self, result: int) -> Spec:
        """Returns a branch result's sharding: as read, else as stored, else as made."""
        if (spec := self.read_spec(result)) is not None:
            return spec
        program = self.frame.program
        for output, position in self.frame.renewed.items():
            if program.outputs[output] == result:
                return self.arg_spec(position)
        op = program.ops[program.values[result].producer]
        made = op.yielded(op.results.index(result))
        specs = [*filter(None, map(self._made_spec, made))]
        whole = ((),) * len(program.shape(result))
        return next(filter(any, specs), whole)

    def _made_spec(self, value: int) -> Spec | None:
        """Returns a value's spec as made, before barriers; None if not known yet."""
        while (op := self.frame.program.maker(value)) is not None:
            place = op.results.index(value)
            if op.id in self.axes:
                return self.natural_spec(op, place)
            if op.has_regions or not passes(op):
                break
            value = op.operands[place]
        return self.value_spec.get(value)  # Inner loops are laid out before.

    def _values(self) -> None:
        program = self.frame.program
        for op_id in self.frame.region_ops:
            op = program.ops[op_id]
            for result in op.results:
                is_loop = op.kind == "while"
                spec = (self._carried if is_loop else self._branch_spec)(result)
                self.value_spec[result] = spec
                entered = op.entered(op.results.index(result)) if is_loop else ()
                self.value_spec.update(dict.fromkeys(entered, spec))
        for op_id in sorted(self.axes):
            op = program.ops[op_id]
            specs, _, partial = self._op_specs(op)
            for result, natural in zip(op.results, specs, strict=True):
                if partial:
                    natural = self._scattered(result, natural)
                self.value_spec[result] = natural
        for position, spec in self.frame.pins.items():
            self.value_spec[program.args[position]] = spec
        for op_id in self.frame.barrier_ops:
            op = program.ops[op_id]
            for value, result in zip(op.operands, op.results, strict=True):
                if (spec := self.spec(value)) is not None:
                    self.value_spec[result] = spec

    def _scattered(self, value: int, natural: Spec) -> Spec:
        """Returns a partial sum's spec: its first reader's if finer than `natural`."""
        for user, index in sorted(self.frame.program.users[value]):
            wanted = self.use_spec(user, index) if user in self.axes else None
            if wanted is not None:
                pairs = zip(natural, wanted, strict=True)
                adds = all(want[: len(have)] == have for have, want in pairs)
                return wanted if adds else natural
        return natural


@searched_once
def lay_out(frame: Frame, choice: Choice) -> Layout:
    """Lays out a whole program by a choice's strategies and storage modes."""
    return Layout(
        frame, dict(enumerate(choice.blocks)), dict(enumerate(choice.storage))
    )


def constraints(layout: Layout, ops: Set[int] | None = None) -> Constraints:
    """Returns the constraints of a layout.

    Results of laid-out ops have one, and so has each use with another sharding. A
    result that is only transposed (a weight's gradient) may have it behind the
    transpose: the compiler then fuses product and transpose. Scalars have none.

    Args:
        ops: ids of the ops whose results and uses are constrained; all of them if None.
    """
    program = layout.frame.program
    values: dict[int, Spec] = {}
    for op_id in layout.axes:
        if ops is not None and op_id not in ops:
            continue
        for result in filter(program.shape, program.ops[op_id].results):
            if not _is_constrained_behind(layout, result, ops):
                values[result] = layout.value_spec[result]
    uses: dict[tuple[int, int], Spec] = {}
    for op in program.ops if ops is None else [program.ops[i] for i in ops]:
        for index, v in enumerate(op.reads):
            wanted = layout.use_spec(op.id, index) if program.shape(v) else None
            if wanted is not None and layout.spec(v) not in (None, wanted):
                uses[op.id, index] = wanted
    return Constraints(values, uses)


def _is_constrained_behind(layout: Layout, value: int, ops: Set[int] | None) -> bool:
    """True if the constraint behind a value's only reader, a transpose, suffices."""
    program = layout.frame.program
    readers = program.users[value]
    if len(readers) != 1:
        return False
    (user, index) = readers[0]
    loop = program.ops[program.values[value].producer].parent
    return (
        program.ops[user].kind == "transpose"
        and value not in program.outputs
        # In a branch, constraints of other branches could reach the product.
        and (loop < 0 or program.ops[loop].kind == "while")
        and user in layout.axes
        and (ops is None or user in ops)
        and layout.use_spec(user, index) == layout.value_spec[value]
    )


# ---------------------------------------------------------------------- storage groups


@searched_once
def axes_as_stored(
    frame: Frame, ops: tuple[int, ...], values: tuple[int, ...], spec: Spec
) -> dict[int, FactorAxes]:
    """Returns {op id: axes that split its factors} if `values` have the sharding."""
    known = frame.looked_for  # Equal layers share them.
    form = form_of(frame.program, frame.canonical, ops, values), spec
    if (found := known.get(form)) is None:
        found, marks = list[FactorAxes](), list[tuple[DimClasses, set[Hashable]]]()
        for name, size in frame.mesh:
            classes = DimClasses(frame.program, ops, (), frame.canonical, size)
            dims = [dim for dim, names in enumerate(spec) if name in names]
            mine = {classes.of_dim(value, dim) for value in values for dim in dims}
            marks.append((classes, mine))
        for op in ops:
            rule = frame.program.ops[op].known_rule
            factors = range(len(rule.sizes))
            splits = (
                [f for f in factors if classes.of_factor(op, f) in mine]
                for classes, mine in marks
            )
            found.append(split_axes(rule, frame.mesh, splits))
        known[form] = found
    return dict(zip(ops, found, strict=True))
