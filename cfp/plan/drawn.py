"""Each block of a plan as it is drawn: tensors, shardings, and what follows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, lay_out
from cfp.plan.describe import block_moves
from cfp.plan.figures import BlockFigures, MoveFigure, TensorFigure
from cfp.profiling.collectives import Rates

# A block's anchor is drawn with what it reads, as far as people name it.
_MOST_OPERANDS = 2
# Parts of a source file's path that tell files apart, and nothing of the machine.
_PATH_PARTS = 2


def block_figures(
    analysis: Analysis, choice: Choice, rates: Rates | None
) -> tuple[BlockFigures, ...]:
    """Returns each block's tensors and collectives under a choice.

    Args:
        analysis: of the program.
        choice: for all of it.
        rates: of the devices, if they are known: collectives have no times else.
    """
    layout = lay_out(analysis.frame, choice)
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
