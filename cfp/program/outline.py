"""A program's operations in short, to say where another one differs from it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cfp.errors import PlanMismatch
from cfp.program.graph import Op, Program
from cfp.program.read import source_of

# A scalar that is converted.
_OF_WEAK_TYPES = re.compile(r"\bconvert \w+\[\] -> ")


@dataclass(frozen=True, slots=True)
class Outline:
    """A program's operations in order, for a plan's file.

    Attributes:
        kinds: each kind once: name, types, and a digest of attributes behind a ``#``.
        ops: for each operation the number of its kind and a digest of its operands'
            operations, such as ``0.3f 12.a0``.
    """

    kinds: tuple[str, ...]
    ops: str

    def __post_init__(self) -> None:
        if any(not 0 <= kind < len(self.kinds) for kind, _ in self.pairs()):
            raise ValueError(f"an operation of none of {len(self.kinds)} kinds")

    def pairs(self) -> list[tuple[int, int]]:
        """The numbers in ``ops``.

        Raises:
            ValueError: the text is damaged.
        """
        texts = (op.partition(".") for op in self.ops.split())
        return [(int(kind), int(reads, 16)) for kind, _, reads in texts]


def outline_of(program: Program) -> Outline:
    """A program's outline."""
    kinds: dict[str, int] = {}
    ops = " ".join(
        f"{kinds.setdefault(kind, len(kinds))}.{reads:x}"
        for kind, reads in _described(program)
    )
    return Outline(tuple(kinds), ops)


def _described(program: Program) -> Iterator[tuple[str, int]]:
    places = {value: i for i, value in enumerate(program.args)}
    for op in program.ops:
        reads = [_origin(program, op, v, places) for v in op.reads]
        attributes = zlib.crc32(op.structure.encode())
        yield (
            f"{_text(program, op)} #{attributes:08x}",
            zlib.crc32(repr(reads).encode()) & 0xFF,
        )


def _origin(program: Program, op: Op, value: int, places: Mapping[int, int]) -> Any:
    """A value as an operation reads it, wherever in a program that stands."""
    if (maker := program.maker(value)) is not None:
        return op.id - maker.id, value - maker.results[0]
    return "argument", places.get(value, -1)


def _text(program: Program, op: Op) -> str:
    """An operation's name and types: ``dot_general f32[8,4] f32[4,2] -> f32[8,2]``."""
    reads = " ".join(str(program.values[v]) for v in op.operands)
    made = " ".join(str(program.values[v]) for v in op.results)
    return f"{op.kind} {reads} -> {made}"


def first_difference(program: Program, planned: Outline) -> str:
    """The first operation of a program that is not the one planned, in words."""
    now, before_ops = [*_described(program)], planned.pairs()

    def place(i: int) -> str:
        op = program.ops[i]
        # A constant stands where it was made, which is no line of what reads it.
        readers = (
            [] if op.operands else [r for v in op.results for r, _ in program.users[v]]
        )
        where = source_of(program, min(readers, default=i))
        return f"operation {i + 1} of {len(now)}" + (f", at {where}" if where else "")

    for i, (kind, reads) in enumerate(now):
        if i >= len(before_ops):
            return f"{place(i)}: {_bare(kind)}, behind the end of the planned"
        number, planned_reads = before_ops[i]
        before = planned.kinds[number]
        if before != kind:
            same = _bare(before) == _bare(kind)
            how = "with other attributes" if same else f"planned was {_bare(before)}"
            return f"{place(i)}: {_bare(kind)}, {how}"
        if planned_reads != reads:
            return f"{place(i)}: {_bare(kind)}, which reads other values"
    if len(before_ops) > len(now):
        more = planned.kinds[before_ops[len(now)][0]]
        return f"it ends after {len(now)} operations, planned was {_bare(more)}"
    return "no operation; the order of results, or a function of a library"


def _bare(kind: str) -> str:
    return " ".join(kind.rpartition(" #")[0].split())


# What a program follows from beside the step, as plans say it, and as users do.
_CAUSES = {
    "platform": "platform",
    "device_kind": "kind of devices",
    "devices": "number of devices",
    "jax_version": "version of jax",
    "jaxlib_version": "version of jaxlib",
    "enable_x64": "jax_enable_x64",
    "matmul_precision": "jax_default_matmul_precision",
    "prng_impl": "jax_default_prng_impl",
    "threefry_partitionable": "jax_threefry_partitionable",
}


def other_program(
    program: Program,
    planned: Outline | None,
    planned_for: Mapping[str, str],
    here: Mapping[str, str],
) -> PlanMismatch:
    """The error that says in what a step's program differs from the one planned.

    Args:
        planned: the operations of the one planned; None if the plan does not say.
        planned_for: what that was made with: devices, versions, configuration.
        here: the same of this process.
    """
    lines = [
        f"  {name}: planned for {planned_for[part]}, here {here[part]}"
        for part, name in _CAUSES.items()
        if planned_for.get(part, here.get(part)) != here.get(part) and part in here
    ]
    difference = ""
    if planned is not None:
        difference = first_difference(program, planned)
        lines.append(f"  first difference: {difference}")
    else:
        lines.append("  operations: the plan does not say which it was made for")
    if _OF_WEAK_TYPES.search(difference):
        lines.append(
            "A Python number, which is weakly typed, in place of an array, or the "
            "reverse, makes other types. Pass what the plan was made with, 0.1 or "
            "jnp.float32(0.1); a checkpoint restores arrays, so plan with these."
        )
    lines.append("Other values of constants, such as a learning rate, are no obstacle.")
    remedy = "Pass the step, arguments, microbatches and options of the plan, or "
    remedy += "plan again."
    if planned_for.get("platform", here.get("platform")) != here.get("platform"):
        lines[-1] += (
            " JAX lowers some operations, such as random numbers, in another way for "
            "each platform."
        )
        remedy = "Use the plan on the platform that it is for."
    if planned_for.get("jax_version") not in (None, here.get("jax_version")):
        remedy = f"Install JAX {planned_for['jax_version']}, or plan again."
    text = "The step's program is not the one that was planned. What differs:"
    return PlanMismatch("\n".join([text, *lines, remedy]))
