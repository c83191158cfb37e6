"""Gathers the numbers that a plan was chosen by, while the search's data are there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, lay_out
from cfp.attention.matching.matches import among, attentions, was_searched, way_of
from cfp.patterns.build import split
from cfp.plan.describe import block_moves
from cfp.plan.figures import (
    BlockFigures,
    Figures,
    KindFigures,
    LeftFigures,
    MoveFigure,
    OptionFigures,
    TensorFigure,
)
from cfp.plan.plan import Plan
from cfp.profiling.collectives import Rates
from cfp.report.words import candidate_words, kind_title, option_names
from cfp.search.assemble import picks_of
from cfp.search.problem import Option, Problem

# A block's anchor is drawn with what it reads, as far as people name it.
_MOST_OPERANDS = 2
# Parts of a source file's path that tell files apart, and nothing of the machine.
_PATH_PARTS = 2
_AS_WRITTEN = "it might be computed by a kernel, and the plan has none there"


def with_figures(
    plan: Plan,
    analysis: Analysis,
    choice: Choice,
    problem: Problem | None,
    rates: Rates | None,
) -> Plan:
    """The plan with its figures.

    Args:
        plan: the plan.
        analysis: of its program.
        choice: what it chose.
        problem: what was searched, if anything was.
        rates: of the devices, if they are known.
    """
    layout = lay_out(analysis.frame, choice)
    found = Figures(
        blocks=_blocks(analysis, layout, rates),
        left=_left(analysis, layout, choice),
    )
    if problem is not None:
        found = _searched(found, analysis, choice, problem)
    return replace(plan, figures=found)


def _left(
    analysis: Analysis, layout: Layout, choice: Choice
) -> tuple[LeftFigures, ...]:
    """Attentions that no kernel computes; none if none were looked for."""
    program, kernels = analysis.frame.program, dict(choice.kernels)
    found: Counter[tuple[str, str]] = Counter()
    if not was_searched(program):
        return ()
    for one in attentions(program).left_alone:
        found[short_source(one.source), one.reason] += 1
    for segment in analysis.segments:
        kernel = split(kernels.get(segment.index, ""))[0]
        for match in among(program, segment.ops):
            way: object = _AS_WRITTEN
            if kernel:
                way = way_of(program, match, kernel, layout.axes)
            if isinstance(way, str):
                found[short_source(match.found.source), way] += 1
    return tuple(
        LeftFigures(source=source, reason=reason, count=count)
        for (source, reason), count in found.items()
    )


# ----------------------------------------------------------------------------- blocks


def _blocks(
    analysis: Analysis, layout: Layout, rates: Rates | None
) -> tuple[BlockFigures, ...]:
    moves: dict[int, dict[tuple, list[tuple[int, int]]]]
    moves = defaultdict(lambda: defaultdict(list))
    for block, kind, axes, size, times in block_moves(analysis, layout):
        moves[block][kind, axes].append((size, times))
    return tuple(
        _block(analysis, layout, b, _move_figures(moves[b], rates))
        for segment in analysis.segments
        for b in segment.blocks
    )


def _block(
    analysis: Analysis, layout: Layout, index: int, moves: tuple[MoveFigure, ...]
) -> BlockFigures:
    program = analysis.frame.program
    op = program.ops[analysis.frame.blocks[index].anchor]

    def tensor(value: int, spec: Sequence[Sequence[str]] | None) -> TensorFigure:
        record = program.values[value]
        dims = spec if spec is not None else ((),) * len(record.shape)
        return TensorFigure(
            type=str(record), spec=tuple(tuple(names) for names in dims)
        )

    return BlockFigures(
        block=index,
        source=short_source(op.source),
        operands=tuple(
            tensor(value, layout.use_spec(op.id, place))
            for place, value in enumerate(op.operands[:_MOST_OPERANDS])
        ),
        result=tensor(op.results[0], layout.spec(op.results[0])),
        moves=moves,
    )


def _move_figures(
    moves: dict[tuple, list[tuple[int, int]]], rates: Rates | None
) -> tuple[MoveFigure, ...]:
    figures = [
        MoveFigure(
            kind=kind,
            axes=axes,
            count=sum(times for _, times in found),
            total_bytes=sum(times * size for size, times in found),
            time_ms=None
            if rates is None
            else sum(n * rates.collective_ms(kind, axes, size) for size, n in found),
        )
        for (kind, axes), found in moves.items()
    ]
    return tuple(sorted(figures, key=lambda move: (-move.total_bytes, move.kind)))


def short_source(source: str) -> str:
    """``file:line`` with the end of the file's path: ``models/mlp.py:12``."""
    return "/".join(PurePath(source).parts[-_PATH_PARTS:]) if source else ""


# ----------------------------------------------------------------------------- search


def _searched(
    found: Figures, analysis: Analysis, choice: Choice, problem: Problem
) -> Figures:
    picks = picks_of(analysis, problem, choice)
    names = option_names(analysis, problem.options)
    kinds = tuple(
        KindFigures(
            kind=kind,
            name=kind_title(analysis, kind),
            options=tuple(
                _option(analysis, problem, picks, kind, place, names[kind][place])
                for place in range(len(problem.options[kind]))
            ),
        )
        for kind in range(len(problem.options))
    )
    return replace(
        found,
        kinds=kinds,
        segment_kinds=problem.kinds,
        picks=tuple(picks or ()),
        reshard_ms=_reshard_ms(problem, picks) if picks else (),
        fixed_bytes=problem.fixed_bytes,
        budget_bytes=problem.budget_bytes,
    )


def _option(
    analysis: Analysis,
    problem: Problem,
    picks: list[int] | None,
    kind: int,
    place: int,
    name: str,
) -> OptionFigures:
    option: Option = problem.options[kind][place]
    # Where the plan was not measured in full, all kinds take their fastest option.
    base = picks or [
        min(range(len(rows)), key=lambda i: rows[i].time_ms)
        for rows in (problem.options[k] for k in problem.kinds)
    ]
    swapped = [
        place if k == kind else pick
        for k, pick in zip(problem.kinds, base, strict=True)
    ]
    taken = sum(
        (k, pick) == (kind, place)
        for k, pick in zip(problem.kinds, picks or (), strict=False)
    )
    return OptionFigures(
        name=name,
        words=candidate_words(analysis, kind, option.candidate),
        segment_ms=option.time_ms,
        state_bytes=option.state_bytes,
        residual_bytes=option.residual_bytes,
        temp_bytes=option.temp_bytes,
        step_ms=problem.cost_ms(swapped),
        memory_bytes=problem.memory_bytes(swapped),
        taken=taken,
    )


def _reshard_ms(problem: Problem, picks: list[int]) -> tuple[float, ...]:
    kinds = problem.kinds
    return tuple(
        matrix[picks[i]][picks[i + 1]]
        if (matrix := problem.edge_ms.get((kinds[i], kinds[i + 1]))) is not None
        else 0.0
        for i in range(len(picks) - 1)
    )
