"""What moves where one segment reads what another makes or stores, and its price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Layout
from cfp.profiling.moves import Move
from cfp.program.graft import Spec, numpy_dtype
from cfp.program.graph import dtype_bytes
from cfp.search.estimate import Estimator


def between(analysis: Analysis, maker: int, reader: int) -> Sequence[int]:
    """Values that one segment makes or stores, and another reads."""
    return analysis.passing.get((maker, reader), ())


def handover(
    estimator: Estimator, maker: Layout, reader: Layout, values: Sequence[int]
) -> tuple[tuple[Move, float], ...]:
    """What moves where one segment reads another's values, and estimated ms."""
    program = maker.frame.program
    found = []
    for v in values:
        have, want = maker.spec(v), _wanted(reader, v)
        if have is None or want is None or have == want:
            continue
        value = program.values[v]
        dtype, size = value.dtype, value.size_bytes
        if value.producer < 0:
            views = _views(maker, reader, v)
            if not views and maker.read_spec(v) == want:
                continue  # It is gathered so for the segment that stores it, too.
            types = (program.values[program.ops[op].results[0]].dtype for op in views)
            dtype = min([dtype, *types], key=dtype_bytes)
            size = size * dtype_bytes(dtype) / dtype_bytes(value.dtype)
        price = estimator.terms.moves.cost_ms(size, have, (), want)
        found.append((Move(value.shape, str(numpy_dtype(dtype)), have, want), price))
    return tuple(found)


def _wanted(reader: Layout, value: int) -> Spec | None:
    """How a segment reads a value: in its blocks, or else in an update of state."""
    spec = reader.read_spec(value)
    if spec is None:
        for user, index in sorted(reader.frame.program.users[value]):
            if reader.covers(user):
                return reader.use_spec(user, index)
    return spec


def _views(maker: Layout, reader: Layout, value: int) -> list[int]:
    """Ops by which a segment casts or transposes a parameter before it is gathered."""
    frame = maker.frame
    group = frame.group_of_arg.get(frame.program.args.index(value))
    if group is None or maker.spec(value) == maker.read_spec(value):
        return []  # It is stored as it is used.
    users = {user for user, _ in frame.program.users[value] if reader.covers(user)}
    return sorted(users & {*frame.groups[group].reads})


def total_ms(
    moves: Iterable[tuple[Move, float]], moved_ms: Mapping[Move, float] | None = None
) -> float:
    """The time of moves: as measured, or as estimated where they were not."""
    return sum((moved_ms or {}).get(move, price) for move, price in moves)
