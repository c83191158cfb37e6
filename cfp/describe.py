"""Says in words what a choice does to each block of a program."""

from __future__ import annotations

from collections import Counter

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Frame, Layout, lay_out
from cfp.analysis.strategies import NONE, Strategy
from cfp.plan_parts import PlanRow
from cfp.program.graph import Op, Program
from cfp.search.problem import Problem
from cfp.search.transitions import transition
from cfp.units import format_bytes


def plan_rows(
    analysis: Analysis, choice: Choice, problem: Problem | None
) -> tuple[PlanRow, ...]:
    """One row for each block: what is sharded, and what must be communicated."""
    frame = analysis.frame
    layout = lay_out(frame, choice)
    moved = block_collectives(analysis, layout)
    rows = []
    for segment in analysis.segments:
        modes = [choice.storage[g] for g in segment.groups]
        storage = str(max(set(modes), key=modes.count)) if modes else "-"
        remat = segment.index in choice.remat
        if remat:
            storage += ", recomputed"
        time_ms = _segment_ms(
            problem, segment.kind, choice, list(segment.blocks), modes, remat
        )
        for b in segment.blocks:
            block = frame.blocks[b]
            op = frame.program.ops[block.anchor]
            rows.append(
                PlanRow(
                    block=b,
                    segment=segment.index,
                    kind=segment.kind,
                    name=block.name,
                    op=op_text(frame.program, op),
                    sharded=strategy_text(frame, op, choice.blocks[b]),
                    storage=storage,
                    collectives=_collective_text(moved[b]),
                    segment_ms=time_ms,
                )
            )
    return tuple(rows)


def _segment_ms(
    problem: Problem | None,
    kind: int,
    choice: Choice,
    blocks: list[int],
    modes: list,
    remat: bool,
) -> float | None:
    if problem is None:
        return None
    strategies = tuple(choice.blocks[b] for b in blocks)
    for option in problem.options[kind]:
        same_storage = not modes or option.candidate.storage in modes
        same = option.candidate.strategies, option.candidate.remat
        if same == (strategies, remat) and same_storage:
            return option.time_ms
    return None


def op_text(program: Program, op: Op) -> str:
    """An op with its shapes: ``dot_general f32[8,16] x f32[16,4] -> f32[8,4]``."""
    operands = " x ".join(str(program.values[v]) for v in op.operands[:2])
    return f"{op.kind} {operands} -> {program.values[op.results[0]]}"


def strategy_text(frame: Frame, op: Op, strategy: Strategy) -> str:
    """A strategy in words: ``x: rows (dim 0 of 8)``."""
    rule = op.rule
    assert rule is not None
    parts = []
    for (axis, _), choice in zip(frame.mesh, strategy, strict=True):
        if choice.inner == NONE:
            continue
        factor = choice.inner
        holders = [
            i for i, dims in enumerate(rule.operands) if any(factor in d for d in dims)
        ]
        size = rule.sizes[factor]
        if factor in rule.reduction:
            text = f"contracted (of {size})"
            if choice.exit != NONE:
                text += f", scattered to dim {_result_dim(op, choice.exit)}"
        else:
            if len(op.operands) < 2 or len(holders) > 1:
                role = "batch"
            else:
                role = "rows" if holders == [0] else "columns"
            text = f"{role} (dim {_result_dim(op, factor)} of {size})"
        parts.append(f"{axis}: {text}")
    return "; ".join(parts) or "replicated"


def _result_dim(op: Op, factor: int) -> int:
    assert op.rule is not None
    return next((d for d, dim in enumerate(op.rule.results[0]) if factor in dim), -1)


def block_collectives(analysis: Analysis, layout: Layout) -> list[Counter]:
    """For each block the collectives that a layout calls for: (kind -> bytes) sums.

    As Shardy would place them; XLA may merge or replace some.
    """
    frame = analysis.frame
    program = frame.program
    owner = dict(enumerate(frame.block_of))
    for segment in analysis.segments:
        for group in segment.groups:
            for op_id in frame.groups[group].ops:
                owner.setdefault(op_id, -1)
                if owner[op_id] < 0:
                    owner[op_id] = _group_block(frame, group, segment.start)
    found = [Counter() for _ in frame.blocks]
    done: set[tuple] = set()
    for op in program.ops:
        partial = layout.unreduced(op)
        for index, v in enumerate(op.results):
            block = owner.get(op.id, -1)
            natural = layout.natural_spec(op, index)
            spec = layout.spec(v)
            if block >= 0 and partial and natural is not None and spec is not None:
                _count(found[block], frame, v, natural, partial, spec)
        for index, v in enumerate(op.operands):
            want, have = layout.use_spec(op.id, index), layout.spec(v)
            block = owner.get(op.id, -1)
            if want is None or have is None or want == have or block < 0:
                continue
            if (v, want) not in done:
                done.add((v, want))
                _count(found[block], frame, v, have, (), want)
    return found


def _group_block(frame: Frame, group: int, default: int) -> int:
    program = frame.program
    for position in frame.groups[group].args:
        for user, _ in program.users[program.args[position]]:
            if frame.block_of[user] >= 0:
                return frame.block_of[user]
    return default


def _count(counter: Counter, frame: Frame, v: int, have, partial, want) -> None:
    value = frame.program.values[v]
    if not value.shape:
        return
    steps = transition(value.size_bytes, have, partial, want, frame.mesh).steps
    for kind, axes, size in steps:
        counter[kind, ",".join(axes)] += int(size)


def _collective_text(counter: Counter) -> str:
    """``all-reduce x 4.00 MiB``; collectives below a kilobyte are left out."""
    parts = [
        f"{kind} {axes} {format_bytes(size)}"
        for (kind, axes), size in sorted(counter.items(), key=lambda item: -item[1])
        if size >= 1024
    ]
    return ", ".join(parts) or "-"
