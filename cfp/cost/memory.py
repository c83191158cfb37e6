"""What arguments take on each device, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Frame, Layout, Storage, lay_out
from cfp.analysis.segments import Segment
from cfp.analysis.specs import spec_ways
from cfp.cost.kept import kept_values, unmade
from cfp.presets.classics import preset
from cfp.program.makeable import makeable
from cfp.program.recompute import recomputable


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """What a segment keeps on each device at least, apart from its temporaries."""

    state_bytes: int
    residual_bytes: int


def segment_bytes(
    segment: Segment, layout: Layout, remat: bool = False, kernel: str = ""
) -> SegmentBytes:
    """State, and values that live from the forward to the backward pass.

    Of a segment that is computed again only what others read is kept, and of what a
    kernel computes what it returns.
    """
    frame = layout.frame
    groups = (frame.groups[index] for index in segment.groups)
    state = sum(argument_bytes(layout, p) for group in groups for p in group.args)
    held = held_values(frame, segment, remat) - unmade(layout, segment, kernel)
    residual = sum(value_bytes(layout, v) for v in held)
    return SegmentBytes(state_bytes=state, residual_bytes=residual)


def held_values(frame: Frame, segment: Segment, remat: bool = False) -> set[int]:
    """Values of a segment that live from the forward to the backward pass."""
    program = frame.program
    turn = turning_point(frame)
    if not remat:
        return kept_values(program, segment.ops, turn)
    mine = set(segment.ops)
    read = {
        v
        for op_id in segment.ops
        if op_id < turn and op_id not in program.leaf_ops
        for v in program.ops[op_id].results
        if any(user not in mine for user, _ in program.users[v])
    }
    return read - makeable(program, read).keys()


def argument_bytes(layout: Layout, position: int) -> int:
    """What an argument takes on each device."""
    program = layout.frame.program
    size = program.values[program.args[position]].size_bytes
    return ceil(size / spec_ways(layout.arg_spec(position), layout.frame.mesh))


def value_bytes(layout: Layout, v: int) -> int:
    """What a value takes on each device.

    As its reader has it: what is gathered in the forward pass stays so.
    """
    spec = layout.read_spec(v) or layout.spec(v) or ()
    size = layout.frame.program.values[v].size_bytes
    return ceil(size / spec_ways(spec, layout.frame.mesh))


def turning_point(frame: Frame) -> int:
    """The id of the first op of the backward pass; behind all ops if there is none."""
    derived = [m.op for b in frame.blocks for m in b.members if m.derived]
    return min(derived, default=len(frame.program.ops))


def can_recompute(frame: Frame, segment: Segment) -> bool:
    """Whether a segment keeps anything that it might compute again instead."""
    return recomputable(frame.program, segment.ops, turning_point(frame)) is not None


def fixed_bytes(analysis: Analysis, values: Iterable[int]) -> int:
    """Arguments that are no state, such as a batch, as data parallelism has them.

    Args:
        analysis: of the program.
        values: which of its arguments.

    Returns:
        What they take on each device.
    """
    frame = analysis.frame
    roles = ("data",) * len(frame.mesh)
    layout = lay_out(frame, preset(frame, roles, Storage.USED))
    counted = set(values)
    return sum(
        argument_bytes(layout, position)
        for position, value in enumerate(frame.program.args)
        if value in counted and position not in frame.group_of_arg
    )
