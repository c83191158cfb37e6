"""Text and JSON files with the result of the analyze pass.

Words and line formats follow the artifact of the CFP paper: ``Parallel Block 3:``,
``Strategy RS = RS x SS``.
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
from cfp.printable import counted
from cfp.program.graph import Op, Program

GLOBAL_FOLDER = "debug_analysis_global"
_LONGEST_ATTRIBUTES = 160
_DEFAULT_PRECISION = re.compile(r"(, )?precision_config=\[[^\]]*DEFAULT>\]")
_BODY = re.compile(r"(, )?body=.*")
_DIMENSION_NUMBERS = re.compile(r"dot_dimension_numbers=#stablehlo\.dot<(.*?)>")


def dump_analysis(folder: Path, analysis: Analysis, module: str) -> list[Path]:
    """Writes an analysis and its module's StableHLO text, as `write_files` does."""
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
    """Writes {file name: text} into a folder, made if missing; returns the paths.

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
    """Yields the lines of a block: members with their plans, then other ops.

    The i-th number of a plan is the number of the member's strategy, in the order of
    the strategy map, under the block's i-th strategy.
    """
    program = frame.program
    yield f"Parallel Block {block.index}:"
    for member in block.members:
        yield f"    {op_line(program, program.ops[member.op])}"
        numbers = plan_numbers(frame, block, member)
        yield "    Plan: " + "".join(f"{number}, " for number in numbers)
    contractions = {member.op for member in block.members}
    for op_id in block.ops:
        if op_id not in contractions:
            yield f"    {op_line(program, program.ops[op_id])}"


def segment_records(analysis: Analysis) -> list[dict]:
    """Returns one JSON object for each segment (a run of blocks, which may repeat)."""
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
    """Returns ops that run replicated: without a rule, and not sharded by hand.

    Constants, loops and branches are left out.
    """
    rest = (op for op in program.ops if op.rule is None and not op.shardings)
    return [op for op in rest if not op.has_regions and op.id not in program.leaf_ops]


# One and several `opaque_ops`, for `counted`.
OPAQUE = tuple(f"{op} without a sharding rule, run replicated" for op in ("op", "ops"))


def opaque_lines(program: Program) -> Iterator[str]:
    """Yields the count of `opaque_ops`, then lines: op, runs x result bytes, source."""
    found = opaque_ops(program)
    yield counted(len(found), *OPAQUE)
    for op in found:
        size = sum(program.values[v].size_bytes for v in op.results)
        source = f", {op.source}" if op.source else ""
        yield f"{op_line(program, op)}: {op.repeat} x {size} bytes{source}"


# ---------------------------------------------------------------------- strategies


def strategy_map(frame: Frame, block: Block) -> Iterator[str]:
    """Yields the line of each member of a block, followed by its strategies."""
    program = frame.program
    for member in block.members:
        op = program.ops[member.op]
        yield f"Instruction {op.id}: {op_line(program, op, typed=True)}"
        for strategy in op_strategies(frame, block, member):
            yield f"Strategy {describe(op, frame.mesh, strategy)}"
        yield ""


def op_strategies(frame: Frame, block: Block, member: Member) -> list[Strategy]:
    """Returns a member's strategies in terms of its own factors.

    A derived member (of a gradient) has all its own, without exits; see `plan_numbers`.
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
    """Returns indices in `op_strategies` by block strategy; no split's if none fits."""
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
    """Formats an op on one line, with its place in the user's model, if known.

    Args:
        typed: operands have types, and ``%KIND.ID`` replaces ``ID KIND.ID`` in front.
    """
    operands = [
        f"{program.values[v]} %" * typed + value_name(program, v) for v in op.operands
    ]
    results = " ".join(str(program.values[v]) for v in op.results)
    name = f"{op.kind}.{op.id}"
    start = f"%{name}" if typed else f"{op.id} {name}"
    text = f"{start} = {results} {op.kind}({', '.join(operands)})"
    attributes = _DEFAULT_PRECISION.sub("", _BODY.sub("", op.attributes))
    attributes = _DIMENSION_NUMBERS.sub(r"\1", attributes)
    # Constants have no operands; their attributes are their values.
    if attributes and op.operands and len(attributes) <= _LONGEST_ATTRIBUTES:
        text += f", {attributes}"
    place = scope_path(op.scope) if op.scope else ""
    return f"{text}  # {place}" if place else text


def value_name(program: Program, value: int) -> str:
    """Returns an argument's path, ``carried.ID`` in a loop, or ``KIND.ID[#RESULT]``."""
    if (op := program.maker(value)) is not None:
        place = op.results.index(value)
        return f"{op.kind}.{op.id}" + (f"#{place}" if place else "")
    if program.values[value].origin >= 0:
        return f"carried.{value}"
    return program.arg_names[program.args.index(value)]


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
