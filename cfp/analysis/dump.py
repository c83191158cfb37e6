"""Writes the result of the analyze pass for people and scripts.

Words and line formats are those of CFP's artifact: ``Parallel Block 3:``,
``ParallelBlocks sequence: (14, 22) mapped to (0, 8)``, ``Strategy RS = RS x SS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from cfp.analysis.analyze import Analysis
from cfp.analysis.blocks import Block
from cfp.analysis.contractions import Member
from cfp.analysis.flow import scope_path
from cfp.analysis.layout import Frame
from cfp.analysis.strategies import (
    NONE,
    AxisChoice,
    Strategy,
    axis_choices,
    block_strategies,
    describe,
    splits_together,
)
from cfp.errors import CfpError
from cfp.program.graph import Op, Program

GLOBAL_FOLDER = "debug_analysis_global"
_LONGEST_ATTRIBUTES = 160
_DEFAULT_PRECISION = re.compile(r"(, )?precision_config=\[[^\]]*DEFAULT>\]")
_BODY = re.compile(r"(, )?body=.*")
_DIMENSION_NUMBERS = re.compile(r"dot_dimension_numbers=#stablehlo\.dot<(.*?)>")


def dump_analysis(folder: Path, analysis: Analysis, module: str) -> list[Path]:
    """Writes an analysis into a folder, which is made if it is missing.

    Raises:
        CfpError: the folder cannot be written.
    """
    frame = analysis.frame
    texts = {
        "program.mlir": module,
        "strategy_map.txt": _lines(
            line for block in frame.blocks for line in strategy_map(frame, block)
        ),
        "parallel_blocks.txt": _lines(
            line for block in frame.blocks for line in block_lines(frame, block)
        ),
        "segments.json": json.dumps(segment_records(analysis), indent=1) + "\n",
        "opaque_ops.txt": _lines(opaque_lines(frame.program)),
    }
    return write_files(folder, texts)


def write_files(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Writes texts into a folder, by file name.

    Raises:
        CfpError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CfpError(
            f"Cannot write to {folder}: {error.strerror or error}. Name another "
            "folder with --workdir, or make this one writable."
        ) from error
    return [folder / name for name in texts]


# ------------------------------------------------------------------ blocks, segments


def block_lines(frame: Frame, block: Block) -> Iterator[str]:
    """A block: its contractions, each with its plans, then its other ops.

    A plan's i-th number says which of the op's own strategies (as they stand in the
    strategy map) goes with the block's i-th.
    """
    program = frame.program
    yield f"Parallel Block {block.index}:"
    contractions = set()
    for member in block.members:
        contractions.add(member.op)
        yield f"    {op_line(program, program.ops[member.op])}"
        numbers = plan_numbers(frame, block, member)
        yield "    Plan: " + "".join(f"{number}, " for number in numbers)
    for op_id in block.ops:
        if op_id not in contractions:
            yield f"    {op_line(program, program.ops[op_id])}"


def segment_records(analysis: Analysis) -> list[dict]:
    """The segments as plain data."""
    frame = analysis.frame
    names = frame.program.arg_names
    return [
        {
            "index": segment.index,
            "kind": segment.kind,
            "blocks": [segment.start, segment.end],
            "representative": segment.index in analysis.representatives,
            "names": [frame.blocks[b].name for b in segment.blocks],
            "strategies": [
                len(block_strategies(frame.program, frame.blocks[b], frame.mesh))
                for b in segment.blocks
            ],
            "ops": len(segment.ops),
            "state": [names[a] for g in segment.groups for a in frame.groups[g].args],
        }
        for segment in analysis.segments
    ]


def opaque_ops(program: Program) -> list[Op]:
    """Ops without a sharding rule that work on data: each runs replicated."""
    return [
        op
        for op in program.ops
        if op.rule is None and not op.has_regions and op.id not in program.leaf_ops
    ]


def opaque_lines(program: Program) -> Iterator[str]:
    """The opaque ops: how often each runs, what it makes, and where it comes from."""
    found = opaque_ops(program)
    yield f"{len(found)} ops have no sharding rule and run replicated"
    for op in found:
        size = sum(program.values[v].size_bytes for v in op.results)
        source = f", {op.source}" if op.source else ""
        yield f"{op_line(program, op)}: {op.repeat} x {size} bytes{source}"


# ---------------------------------------------------------------------- strategies


def strategy_map(frame: Frame, block: Block) -> Iterator[str]:
    """Every contraction of a block with the strategies it has."""
    program = frame.program
    for member in block.members:
        op = program.ops[member.op]
        yield f"Instruction {op.id}: {op_line(program, op, typed=True)}"
        for strategy in op_strategies(frame, block, member):
            yield f"Strategy {describe(op, frame.mesh, strategy)}"
        yield ""


def op_strategies(frame: Frame, block: Block, member: Member) -> list[Strategy]:
    """A contraction's own strategies: over its own factors.

    Where a derived contraction leaves partial sums, what follows decides where they
    go: so it has no exits to choose from.
    """
    if not member.derived:
        return block_strategies(frame.program, block, frame.mesh)
    rule = frame.program.ops[member.op].known_rule
    per_axis = [
        [c for c in axis_choices(rule, size) if c.exit == NONE]
        for _, size in frame.mesh
    ]
    every = product(*per_axis)
    return [one for one in every if splits_together(rule, frame.mesh, one)]


def plan_numbers(frame: Frame, block: Block, member: Member) -> list[int]:
    """For each strategy of a block the number of the contraction's own."""
    strategies = block_strategies(frame.program, block, frame.mesh)
    if not member.derived:
        return list(range(len(strategies)))
    own = {s: i for i, s in enumerate(op_strategies(frame, block, member))}
    replicated = own[(AxisChoice(),) * len(frame.mesh)]
    back = {anchor: f for f, anchor in enumerate(member.factors) if anchor != NONE}
    return [
        own.get(
            tuple(AxisChoice(back.get(choice.inner, NONE)) for choice in strategy),
            replicated,
        )
        for strategy in strategies
    ]


# ----------------------------------------------------------------------------- ops


def op_line(program: Program, op: Op, *, typed: bool = False) -> str:
    """An op on one line, with its number and its place in the user's model.

    Args:
        typed: as in the strategy map: every operand with its type, the number left
            out.
    """
    operands = [value_name(program, v) for v in op.operands]
    if typed:
        operands = [
            f"{program.values[v]} %{name}"
            for v, name in zip(op.operands, operands, strict=True)
        ]
    results = " ".join(str(program.values[v]) for v in op.results)
    name = f"{op.kind}.{op.id}"
    start = f"%{name}" if typed else f"{op.id} {name}"
    text = f"{start} = {results} {op.kind}({', '.join(operands)})"
    attributes = _DEFAULT_PRECISION.sub("", _BODY.sub("", op.attributes))
    attributes = _DIMENSION_NUMBERS.sub(r"\1", attributes)
    # Of a constant the attributes are its value.
    if attributes and op.operands and len(attributes) <= _LONGEST_ATTRIBUTES:
        text += f", {attributes}"
    place = scope_path(op.scope) if op.scope else ""
    return f"{text}  # {place}" if place else text


def value_name(program: Program, value: int) -> str:
    """A value's name: an argument's path, or the op that makes it."""
    if (op := program.maker(value)) is not None:
        place = op.results.index(value)
        return f"{op.kind}.{op.id}" + (f"#{place}" if place else "")
    if program.values[value].origin >= 0:
        return f"carried.{value}"
    return program.arg_names[program.args.index(value)]


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
