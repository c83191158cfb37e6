"""Estimated memory of a program: state, residuals and temporaries; and bytes moved.

The estimates model XLA's fusion. Elementwise work is fused into its reader. Arguments,
and results and operands of heavy ops (such as products), are in memory. Residuals, kept
for the backward pass, may be fewer than the values it reads: fused work runs again.

Elementwise work has memory, too, if it combines tensors with different dim orders and
a reduction reads it, as in the backward pass of a softmax: a fusion that transposes one
tensor cannot reduce as well.

A kernel without products reads tensors in memory and writes one. So a softmax moves its
scores three times each way. Forward, one kernel reads them for the row's maximum;
another reads them, sums the exponentials and writes the weights. The backward pass
reads scores and the weights' gradient, and writes the scores' gradient.

A value with several reading kernels is written to memory if that moves fewer bytes than
computing it in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import compress
from math import ceil, prod

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Frame, Layout, SegmentKernels, lay_out
from cfp.analysis.presets import data_parallel
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import Spec
from cfp.kernels.kinds import proposals
from cfp.program.constrain import CHEAP, makeable, rematerializable
from cfp.program.graph import Op, Program, is_dequantized, searched_once

# Ops that hand a tensor on to a heavy reader.
_MOVING = frozenset({"convert", "reshape", "transpose"})


@searched_once
def turning_point(frame: Frame) -> int:
    """Id of the first contraction of the backward pass; if none, the number of ops."""
    derived = [m.op for b in frame.blocks for m in b.members if m.derived]
    return min(derived, default=len(frame.program.ops))


def can_rematerialize(frame: Frame, segment: Segment) -> bool:
    """True if backward ops of a segment read values that it could rematerialize."""
    return (
        rematerializable(frame.program, segment.ops, turning_point(frame)) is not None
    )


# --------------------------------------------------------------------- residuals


def residuals_under(
    layout: Layout, segment: Segment, remat: bool, kernels: SegmentKernels
) -> Set[int]:
    """Ids of values that a segment keeps for backward, given remat and kernels."""
    every = proposals(layout, segment.ops, kernels)
    gone = set[int]().union(*(o.site.between for o in every if not o.keeps_between))
    return residuals(layout.frame, segment.ops, remat) - gone


@searched_once
def residuals(frame: Frame, ops: tuple[int, ...], remat: bool = False) -> Set[int]:
    """Ids of values that `ops` keep for the backward pass; some are of earlier ops.

    Args:
        remat: True keeps only own results that other ops read. Of these, a value that
            a few cheap ops make from others or arguments stays only for opened loops.
    """
    program, turn = frame.program, turning_point(frame)
    mine = {op for op in ops if op < turn and op not in program.leaf_ops}
    made = [v for op in sorted(mine) for v in program.ops[op].results]
    if remat:
        inside = set(ops)
        read = {v for v in made if not {u for u, _ in program.users[v]} <= inside}
        # A loop keeps its operands, such as a cast of parameters, while it runs.
        entering = {v for loop in program.opened for v in program.ops[loop].operands}
        return read - makeable(program, read - entering).keys()
    read_late = [v for v in made if any(user >= turn for user, _ in program.users[v])]
    found = {v for v in read_late if _feeds_heavy(program, v, turn)}
    # Other values are recomputed from values in memory, which must be kept.
    stack = [v for v in read_late if v not in found]
    seen = {*program.args}
    seen |= {v for loop in program.opened for v in program.ops[loop].entries}
    while stack:
        v = stack.pop()
        producer = program.values[v].producer
        if v in seen or producer in program.leaf_ops:
            continue
        seen.add(v)
        op = program.ops[producer] if producer in mine else None
        if op is None or op.kind not in CHEAP or _feeds_heavy(program, v, 0):
            found.add(v)
        else:
            stack += op.operands
    return found


def _feeds_heavy(program: Program, v: int, first: int) -> bool:
    """True if a heavy op with id `first` or later reads a value, even cast or moved."""
    uses = uses_through(program, v, lambda op, _: op.kind in _MOVING)
    return any(
        op.id >= first and op.kind not in CHEAP and op.kind != "reduce"
        for op, _ in uses
    )


# ------------------------------------------------------------------------- bytes


def results_beside(frame: Frame) -> list[tuple[int, int | None]]:
    """Results that need device memory of their own: they reuse no donated argument's.

    Among them are copies: of undonated arguments, and of results returned twice. An
    argument in host memory has no memory to reuse.

    Returns:
        (index of the result, index of the argument that it equals or renews, or None).
    """
    program = frame.program
    positions = {v: position for position, v in enumerate(program.args)}
    renewed: dict[int, int] = {}
    for output, position in frame.renewed.items():
        # A value that renews two arguments reuses the first.
        renewed.setdefault(program.outputs[output], position)
    seen, found = set[int](), list[tuple[int, int | None]]()
    for place, v in enumerate(program.outputs):
        if any(program.output_memory[place : place + 1]):
            continue
        position = positions.get(v, renewed.get(v))
        donated = None
        if position is not None and not _is_in_host(program, position):
            donated = program.alias[position]
        is_new = v in seen or donated is None
        if (donated != place) if v in positions else is_new:
            found.append((place, position))
        seen.add(v)
    return found


def _is_in_host(program: Program, position: int) -> bool:
    return any(program.arg_memory[position : position + 1])


def host_bytes(layout: Layout, positions: Iterable[int]) -> tuple[int, int]:
    """Returns bytes per device of arguments: (in host memory, moved in a step).

    An argument in host memory is moved twice if its new value is returned there, too.
    """
    program = layout.frame.program
    returned = {*compress(program.outputs, program.output_memory)}
    kept = moved = 0
    for position in positions:
        if not _is_in_host(program, position):
            continue
        value = program.args[position]
        size = value_bytes(layout, value, layout.arg_spec(position))
        output = layout.frame.paired[position]
        is_back = output is not None and program.outputs[output] in returned
        kept += size
        moved += size * (2 if is_back else 1)
    return kept, moved


def fixed_bytes(analysis: Analysis) -> tuple[int, int]:
    """Data-parallel bytes per device of non-state (arguments, `results_beside`)."""
    frame, state = analysis.frame, analysis.frame.group_of_arg
    layout = lay_out(frame, data_parallel(frame))
    given = (p for p in range(len(frame.program.args)) if p not in state)
    beside = (place for place, p in results_beside(frame) if p not in state)
    return sum(argument_bytes(layout, p) for p in given), result_bytes(layout, beside)


def result_bytes(layout: Layout, places: Iterable[int] | None = None) -> int:
    """Bytes per device of the results numbered `places`; default: `results_beside`."""
    outputs = layout.frame.program.outputs
    places = dict(results_beside(layout.frame)) if places is None else places
    return sum(value_bytes(layout, outputs[p], layout.output_spec(p)) for p in places)


def argument_bytes(layout: Layout, position: int) -> int:
    """Bytes per device of argument number `position`; 0 if it is in host memory."""
    program = layout.frame.program
    if _is_in_host(program, position):
        return 0
    return value_bytes(layout, program.args[position], layout.arg_spec(position))


def accumulated_bytes(layout: Layout, segment: Segment) -> int:
    """Bytes per device of opened loops' array results that a segment makes."""
    program, inside = layout.frame.program, set(segment.ops)
    return sum(
        value_bytes(layout, result, layout.spec(result))
        for loop in map(program.ops.__getitem__, sorted(program.opened))
        for made, result in zip(loop.yields, loop.results, strict=True)
        if program.values[made].producer in inside and program.values[made].shape
    )


def value_bytes(layout: Layout, v: int, spec: Spec | None = None) -> int:
    """Bytes per device of a value; `spec` defaults to its first reader's or maker's."""
    spec = spec or layout.read_spec(v) or layout.spec(v) or ()
    size = layout.frame.program.values[v].size_bytes
    return ceil(size / spec_ways(spec, layout.frame.mesh))


# ------------------------------------------------------------------------- temporaries

# Ops run in program order. A tensor with own memory, or kept for the backward pass, is
# in memory from its maker to its last reader. A loop needs memory for its results, such
# as stacked gradients, and for one iteration.

# (tensors that an op makes, tensors not read after it).
Step = tuple[Sequence[int], Sequence[int]]


def peak_bytes(steps: Iterable[Step], size_of: Callable[[int], int]) -> int:
    """Most bytes in use at once during `steps`; `size_of` gives a tensor's bytes."""
    live = most = 0
    for made, freed in steps:
        live += sum(map(size_of, made))
        most = max(most, live)
        live -= sum(map(size_of, freed))
    return most


def steps_of(
    program: Program,
    ops: Iterable[int],
    held: Set[int],
    spans: Sequence[tuple[int, int]] = (),
) -> list[Step]:
    """Lists tensors in memory that `ops` of a segment or loop make and free, in order.

    The last reader in `ops` frees a tensor. A loop's results precede its body's.

    Args:
        held: tensors kept for the backward pass: in memory even if fused.
        spans: ranges of op ids that run as one kernel, whose operands stay until its
            end. Extra memory of the first span is tensor -1, of the second -2.
    """
    inside = set(ops)
    own = [span for span in spans if inside.issuperset(span)]
    made: dict[int, list[int]] = {op: [] for op in sorted(inside)}
    freed: dict[int, list[int]] = {op: [] for op in inside}
    for op in made.keys() - program.leaf_ops:
        for v in program.ops[op].results:
            if v in held or is_in_memory(program, v):
                made[op].append(v)
                read = max(op, _last_reader(program, v, inside))
                ends = (last for first, last in own if first <= read <= last)
                freed[max(ends, default=read)].append(v)
    for number, (first, last) in enumerate(spans, 1):
        if (first, last) in own:
            made[first].append(-number)
            freed[last].append(-number)
    steps: list[Step] = []
    for op, new in made.items():
        body = program.ops[op].body
        inner = [other for other in body if program.ops[other].parent == op]
        steps += [(new, ()), *steps_of(program, inner, held, spans), ((), freed[op])]
    return [step for step in steps if any(step)]


def _last_reader(program: Program, v: int, inside: Set[int]) -> int:
    """Id of the op in `inside` that last reads a tensor or fused work on it, or -1."""

    def own(op_id: int) -> int:
        while op_id >= 0 and op_id not in inside:
            op_id = program.ops[op_id].parent
        return op_id

    def is_fused(op: Op, w: int) -> bool:
        fuses = op.kind in FUSED and own(op.id) >= 0
        return fuses and not is_in_memory(program, w)

    uses = uses_through(program, v, is_fused)
    return max((own(op.id) for op, _ in uses), default=-1)


# ------------------------------------------------------------------------------- fusion

# Readers of these ops' results read the operand's memory.
_VIEWS = frozenset({"reshape", "transpose", "optimization_barrier"})
# Ops fused into their readers.
FUSED = CHEAP | _VIEWS | {"concatenate", "dynamic_slice", "pad", "reverse"}
# Ops whose operands may be fused into them.
_FUSING_OPERANDS = FUSED | {"reduce", "dynamic_update_slice"}

# Order of dims in which a tensor is read, without dims of size 1; () is the order in
# memory.
Order = tuple[int, ...]
_IN_MEMORY_ORDER: frozenset[Order] = frozenset({()})
# An order after a reshape: no transpose is known to undo it.
_LOST: Order = (-1,)


def uses_through(
    program: Program, v: int, goes_on: Callable[[Op, int], bool]
) -> Iterator[tuple[Op, int]]:
    """Yields uses of a value, and of results made of it, as (op, place in its `reads`).

    Args:
        goes_on: function (op, result); True if the result's uses count, too.
    """
    stack, seen = [v], {v}
    while stack:
        for user, index in program.users[stack.pop()]:
            op = program.ops[user]
            yield op, index
            fresh = [w for w in op.results if w not in seen and goes_on(op, w)]
            seen.update(fresh)
            stack += fresh


def is_in_memory(program: Program, v: int) -> bool:
    """True if a result has temporary memory: not if fused, a view or set in place.

    Many readers put a result in memory only if it is not returned.
    """
    return _is_written(program, v) or v in _find_shared(program)


@searched_once
def _find_shared(program: Program) -> frozenset[int]:
    """Ids of results in memory though their ops could be fused, as for many readers."""
    kernels = (program.ops[op] for op in _find_kernels(program))
    shared = (v for op in kernels if op.kind in FUSED for v in op.results)
    return frozenset(shared) - _kept(program)


def _is_written(program: Program, v: int) -> bool:
    return _has_memory(program, v) or v in summed_in_two_orders(program)


def _has_memory(program: Program, v: int) -> bool:
    """True if a tensor is in memory because of its producer's or a reader's kind."""
    op = program.ops[program.values[v].producer]
    if _is_view(program, op) or op.kind == "dynamic_update_slice":
        return False  # An update is written into a loop's carried value.
    if op.has_regions:
        # A value that a loop only passes on is read from the loop's operand.
        return bool(program.users[v])
    # Numbers after a loop's operands are its returned values, which have own memory.
    return op.kind not in FUSED or any(
        user.kind not in _FUSING_OPERANDS and index < len(user.operands)
        for user, index in uses_through(program, v, lambda op, _: _is_view(program, op))
    )


def _is_view(program: Program, op: Op) -> bool:
    """True if the op's readers read its operand: a view, or a dequantized tensor."""
    return op.kind in _VIEWS or is_dequantized(program, op)


@searched_once
def summed_in_two_orders(program: Program) -> frozenset[int]:
    """Ids of values in memory because two dim orders meet there before a reduce."""
    orders: dict[int, frozenset[Order]] = {}
    found = set()
    for op in program.ops:
        if op.id in program.leaf_ops:
            continue
        for v in op.results:
            if _has_memory(program, v):
                continue
            size = _elements(program, v)
            read = frozenset().union(
                *(
                    orders.get(w, _IN_MEMORY_ORDER)
                    for w in op.operands
                    # Smaller operands, such as a row's sum, do not count.
                    if _elements(program, w) == size
                    and program.values[w].producer not in program.leaf_ops
                )
            )
            if op.kind == "transpose":
                read = frozenset(_turned(op, order) for order in read)
            elif op.kind == "reshape" and _is_regrouped(program, op):
                read = frozenset(order and _LOST for order in read)
            if len({*map(bool, read)}) > 1:
                uses = uses_through(
                    program, v, lambda _, w: not _has_memory(program, w)
                )
                if any(user.kind == "reduce" for user, _ in uses):
                    found.add(v)
                    read = _IN_MEMORY_ORDER
            orders[v] = read
    return frozenset(found)


def _is_regrouped(program: Program, op: Op) -> bool:
    """True if a reshape does more than add or remove dims of size 1."""
    before, after = (
        [size for size in program.values[v].shape if size != 1]
        for v in (op.operands[0], op.results[0])
    )
    return before != after


def _elements(program: Program, v: int) -> int:
    return prod(program.values[v].shape)


def _turned(op: Op, order: Order) -> Order:
    """Order of a transpose's result, from its operand's; `_LOST` if it is unknown."""
    rule = op.known_rule
    before, after = (
        [f for f in map(rule.major, dims) if f is not None]
        for dims in (rule.operands[0], rule.results[0])
    )
    moved = tuple(map(before.index, after))
    if before == after:
        return order
    if order and len(order) != len(moved):
        return _LOST
    if order:
        moved = tuple(order[place] for place in moved)
    return () if moved == tuple(sorted(moved)) else moved


# Random bits are computed in the reading kernel, by twenty rounds of shifts. Shifting
# an element takes as long as reading this many bytes. H200: 0.27.
SHIFT_BYTES = 0.25
_SHIFTS = frozenset({"shift_left", "shift_right_logical"})

# Ops that read only as many elements of operand 0 as they make.
_IN_PART = frozenset({"slice", "dynamic_slice", "gather"})

# Bytes that a kernel reads, by tensor in memory; keys below 0 are shifts.
Reads = dict[int, float]


@searched_once
def moved_bytes(program: Program) -> Mapping[int, float]:
    """Unsharded bytes that each kernel moves in one run, by its last op's id.

    Products are kernels. A row reduction in another kernel has 0.0. Shifts add bytes.
    """
    kernels = _find_kernels(program)
    within = _sums_within_others(program, kernels)
    return {
        op: 0.0 if op in within else _written(program, op) + sum(reads.values())
        for op, reads in kernels.items()
    }


@searched_once
def _find_kernels(program: Program) -> Mapping[int, Reads]:
    users = program.users
    made_of: dict[int, Reads] = {}
    kernels: dict[int, Reads] = {}
    kept = _kept(program)
    for op in program.ops:
        if op.id in program.leaf_ops or op.has_regions:
            continue
        if kept.isdisjoint(op.results) and not any(map(users.__getitem__, op.results)):
            continue  # The compiler removes unused ops.
        reads: Reads = {}
        for w in op.operands[op.kind == "dynamic_update_slice" :]:
            for source, size in _read(program, op, w, made_of).items():
                reads[source] = max(size, reads.get(source, 0.0))
        if op.kind in _SHIFTS:
            reads[-1 - op.id] = SHIFT_BYTES * _elements(program, op.results[0])
        ends = {_elements(program, v) for v in (*op.results[:1], *op.operands[:1])}
        is_fused = (op.kind == "reduce" and len(ends) == 1) or (
            op.kind in FUSED
            and not any(
                _is_written(program, v) or _is_shared(program, v, reads)
                for v in op.results
            )
        )
        is_fused &= kept.isdisjoint(op.results)
        if is_fused:
            made_of.update(dict.fromkeys(op.results, reads))
        else:
            kernels[op.id] = reads
    return kernels


def _kept(program: Program) -> frozenset[int]:
    """Ids of values returned by the program, a loop's body or a branch."""
    yielded = (v for op in program.ops for v in op.yields)
    return frozenset((*program.outputs, *yielded))


def _read(
    program: Program, op: Op, w: int, made_of: Mapping[int, Reads]
) -> Mapping[int, float]:
    """Bytes that an op reads for its operand `w`, by id of the tensor in memory."""
    if program.is_leaf(_handed_in(program, w)):
        return {}
    found = made_of.get(w, {w: float(program.values[w].size_bytes)})
    if op.kind in _IN_PART and op.operands[0] == w:
        share = _elements(program, op.results[0]) / max(1, _elements(program, w))
        return {v: size * min(1.0, share) for v, size in found.items()}
    return found


def _handed_in(program: Program, v: int) -> int:
    """Id of the outermost value that loops pass on unchanged as `v`, or `v` itself."""
    while (origin := program.values[v].origin) >= 0 and any(
        v in program.ops[op].entered(place - len(program.ops[op].operands))
        for op, place in program.users[v]
    ):
        v = origin
    return v


def _is_shared(program: Program, v: int, reads: Reads) -> bool:
    """True if writing a value once moves fewer bytes than fusing it in each reader."""
    readers = len({user for user, _ in program.users[v]})
    once = sum(size for source, size in reads.items() if source >= 0)
    return (readers - 1) * once > (readers + 1) * program.values[v].size_bytes


def _written(program: Program, op_id: int) -> float:
    op = program.ops[op_id]
    # An update in place writes only the update, not the whole buffer.
    written = op.operands[1:2] if op.kind == "dynamic_update_slice" else op.results
    return float(sum(program.values[v].size_bytes for v in written))


def _sums_within_others(program: Program, kernels: Mapping[int, Reads]) -> set[int]:
    """Ids of row reductions that XLA fuses into readers, which read the rows, too."""
    readers: dict[int, list[int]] = defaultdict(list)
    rows: dict[int, set[int]] = {}
    for op_id, reads in kernels.items():
        op = program.ops[op_id]
        own = sum(program.values[v].size_bytes for v in op.results)
        for v in reads:
            readers[v].append(op_id)
        last_dim = op.known_rule.operands[0][-1:] if op.kind == "reduce" else ()
        if any(f in op.known_rule.reduction for dim in last_dim for f in dim):
            rows[op_id] = {v for v, size in reads.items() if size > own}
    found = set()
    for op_id, read in rows.items():
        users = [user for v in program.ops[op_id].results for user in readers[v]]
        if users and all(
            read <= kernels[user].keys() and rows.get(user) != read for user in users
        ):
            found.add(op_id)
    return found
