"""The analyze pass: makes blocks, state and segments of a program on a mesh.

Also finds the values that pass between segments, from the segment that makes or stores
them to readers. A chain of layers passes its residual stream to the next segment. A
tied embedding, an encoder's output and the skips of a U-net pass further.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.blocks import find_blocks
from cfp.analysis.contractions import is_product
from cfp.analysis.flow import NEVER, Flow, first_downstream, passes
from cfp.analysis.layout import Frame
from cfp.analysis.numbering import number_values
from cfp.analysis.segments import Segment, find_segments, open_loops
from cfp.analysis.storage import find_storage, pair_outputs
from cfp.analysis.strategies import BlockSharding, Mesh, Spec
from cfp.errors import CfpError, known_names
from cfp.printable import counted
from cfp.program.graph import Program, axes_of, path_matches, searched_once

# (segment that makes or stores, segment that reads)
Pair = tuple[int, int]


def find_passing(frame: Frame, segments: Sequence[Segment]) -> Mapping[Pair, list[int]]:
    """For each pair of segments the values that pass from the one to the other.

    An argument passes from the segment that stores it, or that reads it first, to all
    other readers. Of several readers of one kind only the nearest counts: they mostly
    choose alike, and a compiler reshards a value to one sharding once.
    """
    found: dict[Pair, list[int]] = {}
    place = {op: segment.index for segment in segments for op in segment.ops}
    for value, maker in _made(frame, segments, place):
        readers = _readers(frame, place, value)
        for reader in _nearest(segments, maker, readers):
            found.setdefault((maker, reader), []).append(value)
    return found


def _made(
    frame: Frame, segments: Sequence[Segment], place: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Values that may pass on, with the segments that they come from."""
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
    """Segments that read a value."""
    program = frame.program
    tops = (program.top_level(user) for user, _ in program.uses(value))
    return {place[op] for op in tops if op in place}


def _nearest(
    segments: Sequence[Segment], maker: int, readers: Iterable[int]
) -> Iterator[int]:
    """The readers that count: neighbours, and the nearest of each kind on each side."""
    seen: set[tuple[bool, int]] = set()
    for reader in sorted(readers, key=lambda index: abs(index - maker)):
        mark = reader > maker, segments[reader].kind
        if reader == maker or mark in seen:
            continue
        seen.add(mark)
        yield reader


def build_frame(
    program: Program,
    mesh: Mesh,
    pins: Mapping[int, Spec] | None = None,
    outer: Set[str] = frozenset(),
) -> Frame:
    """Finds the blocks and the state of a program.

    Args:
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
        group_of_arg={a: g.index for g in groups for a in g.args},
        region_ops=tuple(op.id for op in program.ops if op.has_regions),
        barrier_ops=tuple(o.id for o in program.ops if passes(o) and not o.has_regions),
        pins=dict(pins or {}),
    )


@searched_once
def _blocks_and_state(program: Program) -> tuple[Any, ...]:
    """The part of a frame that no mesh decides: equal values, pairs, state, blocks."""
    flow = Flow(program)
    paired = pair_outputs(flow)
    groups = find_storage(flow, paired)
    updates = {op for g in groups for op in (*g.ops, *g.inner_ops)}
    # What a step only hands on, such as a cache or a hidden state, is no parameter.
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


@dataclass(frozen=True)
class Analysis:
    """Result of the analyze pass: blocks and state, and segments in order."""

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
        """The segment of each kind that is measured: the second of three or more.

        The first and the last of a stack have other neighbours than the rest.
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
        """For pairs of segments what passes between them; see `find_passing`."""
        return find_passing(self.frame, self.segments)


def analyze(
    program: Program,
    mesh: Mesh,
    pins: Mapping[int, Spec] | None = None,
    outer: Set[str] = frozenset(),
) -> Analysis:
    """Finds the blocks, the state and the segments of a program on a mesh."""
    frame = open_loops(build_frame(program, mesh, pins, outer))
    return Analysis(frame, find_segments(frame))


def update_blocks(frame: Frame) -> set[int]:
    """Finds blocks without products that lie in the optimizer's update.

    No product reads their results, which reach the returned state. They read gradients,
    or meet gradients with values of the state alone, such as a weight's norm.
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
    """Finds the ops that compute with some values, directly or not."""
    made = flow.made_of(values, lambda op: True)
    return {op.id for op, _ in flow.readers(*made)}


# -------------------------------------------------------------------------------- pins


def resolve_pins(
    pins: Mapping[str, PartitionSpec | NamedSharding | str],
    program: Program,
    mesh: Mesh,
) -> dict[int, Spec]:
    """Turns pinned paths into shardings by argument position.

    A pattern is an argument's path, or a path's end after a ``/``, or a glob of either:
    ``state/params/*/kernel``. A whole path is that argument alone. Of several matching
    patterns the last wins.

    Raises:
        CfpError: a pattern matches no argument, or its sharding does not fit one.
    """
    found: dict[int, Spec] = {}
    names = program.arg_names
    for pattern, sharding in pins.items():
        matches = [i for i, name in enumerate(names) if name == pattern] or [
            i for i, name in enumerate(names) if path_matches(name, pattern)
        ]
        if not matches:
            known = known_names(pattern, [_like(name, pattern) for name in names])
            raise CfpError(f"The pin {pattern!r} matches no argument. {known}")
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        spec = PartitionSpec(spec) if isinstance(spec, str) else spec
        for position in matches:
            found[position] = _fit(spec, program, position, mesh, pattern)
    return found


def _like(name: str, pattern: str) -> str:
    """The end of a path that is as long as a pattern, with the pattern's wildcards."""
    parts = pattern.split("/")
    ends = name.removesuffix("/value").split("/")[-len(parts) :]
    if "*" not in pattern or len(ends) < len(parts):
        return name
    pairs = zip(parts, ends, strict=True)
    return "/".join(part if "*" in part else end for part, end in pairs)


def _fit(
    spec: PartitionSpec, program: Program, position: int, mesh: Mesh, pattern: str
) -> Spec:
    value = program.values[program.args[position]]
    name = program.arg_names[position]
    where = f"The pin {pattern!r} = {spec} does not fit {name!r} {value}"
    sizes = dict(mesh)
    if len(spec) > len(value.shape):
        raise CfpError(f"{where}: it names {len(spec)} dims.")
    dims = [
        tuple(axis for axis in names if sizes.get(axis) != 1)
        for names in axes_of(spec, len(value.shape))
    ]
    used: set[str] = set()
    for dim, names in enumerate(dims):
        for axis in names:
            if axis not in sizes:
                raise CfpError(
                    f"{where}: the mesh has no axis {axis!r} of size 2 or more; it "
                    f"has {sizes}."
                )
            if axis in used:
                raise CfpError(f"{where}: it uses axis {axis!r} twice.")
            used.add(axis)
        ways = prod(sizes[axis] for axis in names)
        if value.shape[dim] % ways:
            raise CfpError(
                f"{where}: dim {dim} of size {value.shape[dim]} does not divide by "
                f"{ways}."
            )
    return tuple(dims)


# -------------------------------------------------------------------- state in the host

# State that a step reads and writes once, and that the host may keep between steps.
# Found from the program's structure: an argument whose new value is a result, and which
# nothing reads but its own update. Moments of an optimizer are such state, and float32
# copies of parameters that the step computes with in bfloat16.

# What is smaller is not worth a transfer. Guess: PCIe moves it in 20 microseconds.
_LEAST_BYTES = 2**20


# Bytes of state, by the argument and the result that is its new value.
HostState = Mapping[tuple[int, int], int]


def movable_state(frame: Frame) -> HostState:
    """Finds the state that only its own update reads, the largest first."""
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
    """Chooses what to keep in the memory of the host, the least first.

    Args:
        lacking_bytes: memory that each device lacks. State counts as what one device
            has of it where all of them share it.

    Returns:
        So much of the largest as is lacking, and all that there is.
    """
    every, ways = movable_state(frame), prod(size for _, size in frame.mesh)
    moved = accumulate(size // ways for size in every.values())
    count = 1 + sum(size < lacking_bytes for size in moved)
    some = dict(islice(every.items(), count))
    return [some, every] if count < len(every) else [every][: bool(every)]
