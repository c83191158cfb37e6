"""State that a step reads and writes once, and that the host may keep between steps.

Found from the program's structure: an argument whose new value is a result, and which
nothing reads but its own update. Moments of an optimizer are such state, and float32
copies of parameters that the step computes with in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import Frame

# What is smaller is not worth a transfer. Guess: PCIe moves it in 20 microseconds.
_LEAST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """An argument that may be in the memory of the host between steps.

    Attributes:
        result: which result is its new value.
        size_bytes: of the whole array.
    """

    argument: int
    result: int
    size_bytes: int


def movable_state(frame: Frame) -> list[HostState]:
    """Finds the state that only its own update reads, the largest first."""
    program, found = frame.program, []
    for group in frame.groups:
        for argument, result in zip(group.args, group.outputs, strict=True):
            size = program.values[program.args[argument]].size_bytes
            is_kept = any(program.arg_memory[argument : argument + 1])
            if (
                result is not None
                and argument not in group.read_args
                and program.outputs[result] != program.args[argument]
                and not is_kept
                and size >= _LEAST_BYTES
            ):
                found.append(
                    HostState(argument=argument, result=result, size_bytes=size)
                )
    return sorted(found, key=lambda one: (-one.size_bytes, one.argument))


def enough_state(frame: Frame, lacking_bytes: int) -> list[list[HostState]]:
    """Chooses what to keep in the memory of the host, the least first.

    Args:
        lacking_bytes: memory that each device lacks. State counts as what one device
            has of it where all of them share it.

    Returns:
        So much of the largest as is lacking, and all that there is.
    """
    every = movable_state(frame)
    ways = prod(size for _, size in frame.mesh)
    some, left = list[HostState](), lacking_bytes
    for one in every:
        if left <= 0:
            break
        some.append(one)
        left -= one.size_bytes // ways
    return (
        [some, every]
        if left <= 0 and len(some) < len(every)
        else [every][: bool(every)]
    )
