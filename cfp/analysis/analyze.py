"""The analyze pass: finds blocks, state and segments of a program on a mesh.

A block is usually a contraction with the ops that are sharded like it; a segment is a
run of blocks, which may repeat. The module also finds values that pass between segments
(a residual stream, a tied embedding, skips of a U-net), resolves pins, finds state that
may stay in host memory, and counts a step's FLOPs and samples.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.blocks import Block, find_blocks
from cfp.analysis.contractions import is_contraction, is_product, number_values
from cfp.analysis.flow import NEVER, Flow, first_downstream, passes
from cfp.analysis.layout import Frame
from cfp.analysis.segments import Segment, find_segments, open_loops
from cfp.analysis.storage import find_reads, find_storage, pair_outputs
from cfp.analysis.strategies import BlockSharding, Mesh, Spec
from cfp.errors import CfpError, known_names
from cfp.printable import counted
from cfp.program.graph import (
    Op,
    Program,
    axes_of,
    call_flops,
    op_flops,
    path_matches,
    product_dtype,
    searched_once,
)

# (segment that makes or stores, segment that reads)
Pair = tuple[int, int]


@dataclass(frozen=True)
class Analysis:
    """Result of the analyze pass: a frame of blocks and state, segments in order."""

    frame: Frame
    segments: tuple[Segment, ...]

    def __repr__(self) -> str:
        blocks = counted(len(self.frame.blocks), "block", "blocks")
        segments = counted(len(self.segments), "segment", "segments")
        kinds = counted(len(self.representatives), "kind", "kinds")
        mesh = dict(self.frame.mesh)
        return f"Analysis of {blocks} in {segments} of {kinds}, on a mesh {mesh}"

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """Indices of the measured segments, one for each kind, in order of kinds.

        The second of a kind with three or more, since the first and the last of a stack
        have other neighbours than the rest; otherwise the first.
        """
        found: dict[int, list[int]] = {}
        for segment in self.segments:
            found.setdefault(segment.kind, []).append(segment.index)
        return tuple(
            members[1] if len(members) > 2 else members[0]
            for _, members in sorted(found.items())
        )

    @cached_property
    def passing(self) -> Mapping[Pair, list[int]]:
        """{(maker, reader): ids of values} between segments; see `find_passing`."""
        return find_passing(self.frame, self.segments)


def analyze(
    program: Program,
    mesh: Mesh,
    pins: Mapping[int, Spec] | None = None,
    outer: Set[str] = frozenset(),
) -> Analysis:
    """Runs `build_frame` with these arguments, then `open_loops`, `find_segments`."""
    frame = open_loops(build_frame(program, mesh, pins, outer))
    return Analysis(frame, find_segments(frame))


def build_frame(
    program: Program,
    mesh: Mesh,
    pins: Mapping[int, Spec] | None = None,
    outer: Set[str] = frozenset(),
) -> Frame:
    """Finds the blocks and state of a program; leaves out mesh axes of size 1.

    Args:
        pins: {argument position: sharding} that the user fixed.
        outer: axes of the mesh along which devices are on different hosts.
    """
    axes = tuple((name, size) for name, size in mesh if size > 1)
    far = outer & {name for name, _ in axes}
    canonical, paired, groups, blocks = _blocks_and_state(program)
    block_of = [-1] * len(program.ops)
    alike: dict[Hashable, BlockSharding] = {}
    for block in blocks:
        for op in block.ops:
            block_of[op] = block.index
    group_of_arg = {a: g.index for g in groups for a in g.args}
    free = (pins or {}).keys() - group_of_arg.keys()
    return Frame(
        program=program,
        mesh=axes,
        outer=frozenset(far if len(far) < len(axes) else ()),
        blocks=blocks,
        groups=groups,
        paired=paired,
        renewed={o: position for position, o in enumerate(paired) if o is not None},
        canonical=canonical,
        shardings=tuple(
            BlockSharding(program, b, axes, canonical, alike) for b in blocks
        ),
        block_of=tuple(block_of),
        group_of={op: g.index for g in groups for op in (*g.ops, *g.inner_ops)},
        group_of_arg=group_of_arg,
        region_ops=tuple(op.id for op in program.ops if op.has_regions),
        barrier_ops=tuple(o.id for o in program.ops if passes(o) and not o.has_regions),
        pins=dict(pins or {}),
        pinned_reads={p: find_reads(Flow(program), program.args[p])[0] for p in free},
    )


@searched_once
def _blocks_and_state(program: Program) -> tuple[Any, ...]:
    """Returns `canonical`, `paired`, `groups`, `blocks` of `Frame`, for any mesh."""
    flow = Flow(program)
    paired = pair_outputs(flow)
    groups = find_storage(flow, paired)
    updates = {op for g in groups for op in (*g.ops, *g.inner_ops)}
    # State without an update, such as a cache or a hidden state, is no parameter.
    parameters = {
        position
        for group in groups
        for position in group.args
        if group.has_update
        or (output := paired[position]) is None
        or program.outputs[output] == program.args[position]
    }
    blocks = find_blocks(flow, number_values(program), updates, parameters)
    return flow.canonical, paired, groups, blocks


def find_passing(frame: Frame, segments: Sequence[Segment]) -> Mapping[Pair, list[int]]:
    """Returns {(maker, reader): ids of values that pass}, by indices of segments.

    Scalars, constants and reads behind a barrier do not count. An argument's maker is
    the segment that stores it, or else its first reader. Of readers of one kind, only
    the nearest before and the nearest behind the maker count: they mostly choose alike.
    """
    found: dict[Pair, list[int]] = {}
    place = {op: segment.index for segment in segments for op in segment.ops}
    for value, maker in _made(frame, segments, place):
        readers = _readers(frame, place, value)
        nearest: dict[tuple[bool, int], int] = {}
        for reader in sorted(readers, key=lambda index: abs(index - maker)):
            if reader != maker:
                nearest.setdefault((reader > maker, segments[reader].kind), reader)
        for reader in nearest.values():
            found.setdefault((maker, reader), []).append(value)
    return found


def _made(
    frame: Frame, segments: Sequence[Segment], place: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    program = frame.program
    for segment in segments:
        for op_id in segment.ops:
            if op_id not in program.leaf_ops:
                for value in program.ops[op_id].results:
                    if program.shape(value):
                        yield value, segment.index
    owner = {
        position: segment.index
        for segment in segments
        for group in segment.groups
        for position in frame.groups[group].args
    }
    for position, value in enumerate(program.args):
        if not program.shape(value):
            continue
        readers = _readers(frame, place, value)
        if readers:
            yield value, owner.get(position, min(readers))


def _readers(frame: Frame, place: Mapping[int, int], value: int) -> set[int]:
    """Returns indices of the segments that read a value, with no barrier between."""
    program = frame.program
    tops = (program.top_level(user) for user, _ in program.uses(value))
    return {place[op] for op in tops if op in place}


def update_blocks(frame: Frame) -> set[int]:
    """Returns indices of the blocks of an optimizer's update, without products.

    New state depends on such a block, and no product does. The block depends on
    gradients; or on no data (a weight's norm), and gradients join its results.
    """
    program, flow = frame.program, Flow(frame.program)
    ops = program.ops
    members = [one for block in frame.blocks for one in block.members]
    products = {one.op for one in members if is_product(ops[one.op])}
    before, _ = first_downstream(flow, products)
    made = [v for one in members if one.derived for v in ops[one.op].results]
    behind = _downstream(flow, made)
    pairs = [*zip(program.args, frame.paired, strict=True)]
    by_data = _downstream(flow, [v for v, output in pairs if output is None])
    state = {program.outputs[output] for _, output in pairs if output is not None}
    makers = {maker.id for value in state for maker in flow.makers(value)}
    found = set()
    for block in frame.blocks:
        if before[block.anchor] == NEVER:
            after = {block.anchor, *_downstream(flow, ops[block.anchor].results)}
            known = block.anchor in behind or block.anchor not in by_data
            if known and after & behind and after & makers:
                found.add(block.index)
    return found


def _downstream(flow: Flow, values: Sequence[int]) -> set[int]:
    """Returns ids of ops behind `values`; sees through loops, branches and barriers."""
    made = flow.made_of(values, lambda op: True)
    return {op.id for op, _ in flow.readers(*made)}


# -------------------------------------------------------------------------------- pins


def resolve_pins(
    pins: Mapping[str, PartitionSpec | NamedSharding | str],
    program: Program,
    mesh: Mesh,
    others: Mapping[str, int],
) -> dict[int, Spec]:
    """Turns pins {pattern: sharding} into {argument position: sharding}.

    A pattern is an argument's path, a path's end after a ``/``, or a glob of either. In
    ``params/*/kernel``, ``*`` matches ``/``, too. NNX's final ``/value`` is optional. A
    whole path matches that argument only. The last match wins. A string shards dim 0.
    `others` is {further name: position}, for patterns that match no path.

    Raises:
        CfpError: a pattern matches no argument, or its sharding does not fit one.
    """
    found: dict[int, Spec] = {}
    names = program.arg_names
    for pattern, sharding in pins.items():
        matches = [i for i, name in enumerate(names) if name == pattern]
        for pairs in ((name, i) for i, name in enumerate(names)), others.items():
            matches = matches or [i for one, i in pairs if path_matches(one, pattern)]
        if not matches:
            types = (str(program.values[arg]) for arg in program.args)
            like = {_like(n, pattern): t for n, t in zip(names, types, strict=True)}
            known = known_names(pattern, like, types=like)
            more = "`cfp analyze TARGET --json` lists all arguments."
            raise CfpError(f"The pin {pattern!r} matches no argument. {known} {more}")
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        spec = PartitionSpec(spec) if isinstance(spec, str) else spec
        for position in matches:
            found[position] = _fit(spec, program, position, mesh, pattern)
    return found


def _like(name: str, pattern: str) -> str:
    """Returns a path to suggest: `name`, or its last parts with the * of a glob."""
    parts = pattern.split("/")
    ends = name.removesuffix("/value").split("/")[-len(parts) :]
    if "*" not in pattern or len(ends) < len(parts):
        return name
    pairs = zip(parts, ends, strict=True)
    return "/".join(part if "*" in part else end for part, end in pairs)


def _fit(
    spec: PartitionSpec, program: Program, position: int, mesh: Mesh, pattern: str
) -> Spec:
    value, sizes = program.values[program.args[position]], dict(mesh)
    dims = [
        tuple(axis for axis in names if sizes.get(axis) != 1)
        for names in axes_of(spec, len(value.shape))
    ]
    used = [axis for names in dims for axis in names]
    wrong = ""
    if len(spec) > len(value.shape):
        wrong = f"the pin names {len(spec)} dims"
    elif unknown := [axis for axis in used if axis not in sizes]:
        wrong = f"the mesh has no axis {unknown[0]!r} of size 2 or more; it has {sizes}"
    elif twice := [axis for axis in used if used.count(axis) > 1]:
        wrong = f"the pin uses axis {twice[0]!r} twice"
    for dim, (size, names) in enumerate(zip(value.shape, dims, strict=False)):
        ways = prod(sizes.get(axis, 1) for axis in names)
        if size % ways:
            wrong = wrong or f"dim {dim} has size {size}, no multiple of {ways}"
    if wrong:
        raise CfpError(
            f"The pin {pattern!r} = {spec} does not fit "
            f"{program.arg_names[position]!r} {value}: {wrong}. Pin other dims or axes."
        )
    return tuple(dims)


# ---------------------------------------------------------------- state in host memory

# The host may keep state between steps that only its own update reads. Such state are
# moments of an optimizer, and float32 copies of parameters used in bfloat16.

# Smaller arrays are not worth a transfer. Guess: PCIe moves 1 MiB in 20 microseconds.
_LEAST_BYTES = 2**20

# {(argument position, index of the result that is its new value): bytes}.
HostState = Mapping[tuple[int, int], int]


def movable_state(frame: Frame) -> HostState:
    """Returns {(argument position, index of its output): bytes of the whole array}.

    Only its update reads such state. It has 1 MiB or more; the largest is first. State
    that is returned unchanged, or is in host memory already, is left out.
    """
    program, found = frame.program, dict[tuple[int, int], int]()
    for group in frame.groups:
        for argument in group.args:
            value, result = program.args[argument], frame.paired[argument]
            size = program.values[value].size_bytes
            is_kept = any(program.arg_memory[argument : argument + 1])
            if result is None or program.outputs[result] == value or is_kept:
                continue
            if argument not in group.read_args and size >= _LEAST_BYTES:
                found[argument, result] = size
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


def enough_state(frame: Frame, lacking_bytes: int) -> list[HostState]:
    """Returns sets of state to keep in host memory, the smaller set first.

    Args:
        lacking_bytes: memory that each device lacks. Each state frees its bytes divided
            by the number of devices.

    Returns:
        The fewest of the largest states that free enough; then all movable state. Only
        the latter, enough or not, if no fewer free enough; [] without movable state.
    """
    every, ways = movable_state(frame), prod(size for _, size in frame.mesh)
    moved = accumulate(size // ways for size in every.values())
    count = 1 + sum(size < lacking_bytes for size in moved)
    some = dict(islice(every.items(), count))
    return [some, every] if count < len(every) else [every][: bool(every)]


# ---------------------------------------------------------------------- work of a step

_NARROW = ("bf16", "f16", "f8")
_INTEGERS = ("i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
_LONG = ("cholesky", "custom_call", "fft", "sort", "triangular_solve")
# Ops that keep the rows of a table, or take some of them.
_ROWS_PASS = ("broadcast_in_dim", "convert", "dynamic_slice", "reshape", "slice")


def model_work(frame: Frame, batch: dict[int, int]) -> dict[str, float]:
    """Returns a step's FLOPs and batch as a plan's counts; {} without FLOPs.

    Args:
        batch: {position of an argument with a batch: 0 if its first dim has the
            samples, else 1}; see `cfp.analysis.roles.data_arguments`.

    Returns:
        All but the first two may be absent.
        ``model_flops``: of a step on all devices, without its own rematerialization;
        ``narrow_share``: share of FLOPs in floats of 16 or 8 bits, 0 to 1;
        ``NAME_share``: share of FLOPs in the `Precision` NAME that rewrote the step;
        ``NAME_saves_ms``: estimated ms of a step that NAME saves; may be negative;
        ``devices_by_hand``: most devices of a region sharded by hand, if over 1;
        ``batch_samples``: samples of the batch;
        ``batch_tokens``: most table rows of one lookup by the batch, if over samples;
        ``uncounted_loops``: number of `uncounted_loops`; one iteration of each counts.
    """
    program = frame.program
    flops = program_flops(program) - rematerialized_flops(program, frame.blocks)
    if not flops:
        return {}
    found: dict[str, float] = {"model_flops": float(flops)}
    found["narrow_share"] = _share(program, _NARROW)
    if one := program.rewritten.precision:
        share = found[f"{one.name}_share"] = _share(program, (one.element,))
        casts = [op for op in program.ops if op.kind == "convert"]
        made = [(program.values[op.results[0]], op.repeat) for op in casts]
        numbers = sum(prod(v.shape) * n for v, n in made if one.element in v.dtype)
        saved_ms = one.saved_ms * share * flops - one.quantized_ms * numbers
        found[f"{one.name}_saves_ms"] = saved_ms / prod(n for _, n in frame.mesh)
    regions = (op.manual for op in program.ops if op.manual and op.manual.flops)
    if (most := max((one.devices for one in regions), default=1)) > 1:
        found["devices_by_hand"] = float(most)
    if loops := uncounted_loops(program):
        found["uncounted_loops"] = float(len(loops))
    rows = [program.args[p] for p, rank in batch.items() if not rank]
    others = {program.shape(v) for p, v in enumerate(program.args) if p not in batch}
    if sizes := [_samples(program, v, others) for v in rows if program.shape(v)]:
        samples = max(set(sizes), key=sizes.count)
        found["batch_samples"] = float(samples)
        tables = [v for p, v in enumerate(program.args) if p not in batch]
        tokens = max(_looked_up(program, rows, tables), default=0)
        if tokens > samples:
            found["batch_tokens"] = float(tokens)
    return found


def _samples(program: Program, v: int, others: Set[tuple[int, ...]]) -> int:
    """Counts the samples in an argument of the batch: the size of its first dim.

    If all readers are loops' slices of single rows, the second dim's size counts: once
    for time steps, times the first for microbatches. A loop over time steps carries a
    value with that many rows, of a shape not in `others`.
    """
    first, *rest = program.shape(v)
    readers = [*Flow(program).readers(v)]
    if not rest or not all(
        op.kind == "dynamic_slice"
        and op.parent >= 0
        and program.shape(op.results[0])[0] == 1 < first
        for op, _ in readers
    ):
        return first
    loops = (program.ops[op.parent] for op, _ in readers)
    carried = {program.shape(c) for loop in loops for c in loop.results}
    carried -= {*others, (first, *rest)}
    carries_rows = any(shape[:1] == (rest[0],) for shape in carried)
    return rest[0] * (1 if carries_rows else first)


def uncounted_loops(program: Program) -> list[Op]:
    """Returns loops of unknown length with long work in them: see `_is_long`."""
    return [op for op in program.ops if op.uncounted and _is_long(program, op)]


def long_branches(program: Program) -> list[Op]:
    """Returns ``case`` and ``if`` ops with long work in them: see `_is_long`."""
    branches = (op for op in program.ops if op.kind in ("case", "if"))
    return [op for op in branches if _is_long(program, op)]


def _is_long(program: Program, op: Op) -> bool:
    """True if an op's regions hold a contraction, sort, FFT, call or matrix solver."""
    return any(
        is_contraction(one) or call_flops(one) > 0 or one.kind in _LONG
        for one in map(program.ops.__getitem__, op.body)
    )


def _looked_up(
    program: Program, rows: Iterable[int], tables: Iterable[int]
) -> Iterator[int]:
    """Yields the number of table rows that each counted lookup takes in one step.

    Counted are lookups of whole rows of `tables`, by integers made from integer `rows`
    of two dims or more; none in loops of unknown length. Both are ids of arguments.
    """
    values, flow = program.values, Flow(program)

    def is_index(v: int) -> bool:
        return values[v].dtype in _INTEGERS

    start = [v for v in rows if is_index(v) and len(values[v].shape) >= 2]
    index = {*flow.made_of(start, lambda op: all(map(is_index, op.results)))}
    table = {*flow.made_of(tables, lambda op: op.kind in _ROWS_PASS)}
    for op in program.ops:
        if op.kind != "gather" or op.operands[0] not in table:
            continue
        # The indices' last dim has one lookup's coordinates; the others count lookups.
        count = prod(values[op.operands[1]].shape[:-1])
        width = prod(values[op.operands[0]].shape[1:])
        is_row = width > 1 and prod(values[op.results[0]].shape) == count * width
        if is_row and op.operands[1] in index and not program.in_uncounted(op.id):
            yield count * op.repeat


def _share(program: Program, prefixes: tuple[str, ...]) -> float:
    """Share of FLOPs, 0 to 1, of products whose `product_dtype` has a prefix."""
    total = meant = 0.0
    for op in program.ops:
        if op.manual is not None:
            share = _share(op.manual.program, prefixes)
        elif is_contraction(op):
            share = float(product_dtype(program, op).startswith(prefixes))
        else:
            continue
        flops = model_flops(program, op)
        total += flops
        meant += share * flops
    return meant / total if total else 0.0


def program_flops(program: Program) -> int:
    """Counts operations of one step on all devices: two for each multiply-add.

    Only contractions and calls of known FLOPs count, in all cases of a branch. A loop
    of unknown length counts as one iteration. Ragged products: see `model_flops`.
    """
    every = (op for op in program.ops if is_contraction(op) or call_flops(op))
    return sum(model_flops(program, op) for op in every)


def rematerialized_flops(program: Program, blocks: Sequence[Block]) -> int:
    """Counts FLOPs of contractions that repeat an anchor, as in ``jax.checkpoint``."""
    again = [
        program.ops[member.op]
        for block in blocks
        for member in block.members[1:]  # The first is the anchor.
        if not member.derived
    ]
    return sum(model_flops(program, op) for op in again if is_contraction(op))


# -------------------------------------------------------------------- ragged products

# :func:`jax.lax.ragged_dot` multiplies each row by the matrix of its group. XLA
# multiplies every row by every matrix: it copies the rows once for each group, and
# masks rows of other groups by zeros. Only products with a row's own group count here.

_SAME = ("convert", "optimization_barrier")


def model_flops(program: Program, op: Op) -> int:
    """Returns `op_flops`, less a ragged product's FLOPs for masked rows."""
    if op.manual is not None:
        inner = op.manual.program
        saved = sum(
            op_flops(inner, one) - model_flops(inner, one)
            for one in inner.ops
            if one.manual is not None or is_contraction(one)
        )
        return (op.manual.flops - saved) * op.manual.devices * op.repeat
    flops = op_flops(program, op)
    if op.kind != "dot_general" or not is_contraction(op):
        return flops
    rule = op.known_rule
    groups = {
        rule.major(rule.operands[index][dim])
        for index, value in enumerate(op.operands)
        for dim in _group_dims(program, value)
    }
    return flops // prod(rule.sizes[factor] for factor in groups if factor is not None)


def _group_dims(program: Program, value: int) -> list[int]:
    """Returns a masked operand's dims that count a ragged product's groups, or []."""
    op, transposes = _source(program, value, _SAME)
    if op is None or op.kind != "select" or not program.is_leaf(op.operands[2]):
        return []
    mask, copies, _ = op.operands
    both = program.maker(mask)
    if both is None or both.kind != "and":
        return []
    bounds = [_bound_dims(program, one) for one in both.operands]
    fresh = _fresh_dims(program, copies)
    return _transposed([d for d in fresh if all(d in b for b in bounds)], transposes)


def _bound_dims(program: Program, value: int) -> list[int]:
    """Returns the dims that a computed value has before a broadcast and a comparison.

    [] unless `value` is the result of such a comparison with a constant.
    """
    op = program.maker(value)
    if op is None or op.kind != "compare":
        return []
    leaves = [program.is_leaf(v) for v in op.operands]
    if sorted(leaves) != [False, True]:
        return []
    bound = op.operands[leaves.index(False)]
    fresh, rank = _fresh_dims(program, bound), len(program.shape(bound))
    return [dim for dim in range(rank) if dim not in fresh] if fresh else []


def _fresh_dims(program: Program, value: int) -> list[int]:
    """Returns the dims that a broadcast adds, numbered as in the value; or []."""
    op, transposes = _source(program, value, ())
    if op is None or op.kind != "broadcast_in_dim":
        return []
    kept = op.integers("broadcast_dimensions")
    rank = len(program.shape(value))
    return _transposed([dim for dim in range(rank) if dim not in kept], transposes)


def _source(
    program: Program, value: int, same: Collection[str]
) -> tuple[Op | None, list[Op]]:
    """Follows a value upstream through transposes and ops of kinds `same`.

    Returns the op before them (None for an argument) and the transposes, last first.
    """
    transposes = []
    while (op := program.maker(value)) and op.kind in ("transpose", *same):
        transposes += [op] if op.kind == "transpose" else []
        value = op.operands[op.results.index(value)]
    return op, transposes


def _transposed(dims: list[int], transposes: list[Op]) -> list[int]:
    """Returns a set of dims after transposes (listed last first), in rising order."""
    for op in reversed(transposes):
        dims = [n for n, dim in enumerate(op.integers("permutation")) if dim in dims]
    return dims
