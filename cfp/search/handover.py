"""What moves where one segment reads what another makes or stores, and its price."""

from __future__ import annotations

from collections.abc import Sequence

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Layout
from cfp.program.graft import Spec
from cfp.program.graph import dtype_bytes
from cfp.search.estimate import Estimator


def between(analysis: Analysis, maker: int, reader: int) -> Sequence[int]:
    """Values that one segment makes or stores, and another reads."""
    return analysis.passing.get((maker, reader), ())


def handover_ms(
    estimator: Estimator, maker: Layout, reader: Layout, values: Sequence[int]
) -> float:
    """What it takes, by estimate, that one segment reads another's values."""
    program = maker.frame.program
    total = 0.0
    for v in values:
        have, want = maker.spec(v), _wanted(reader, v)
        if have is None or want is None or have == want:
            continue
        value = program.values[v]
        size = value.size_bytes
        if value.producer < 0:
            views = _views(maker, reader, v)
            if not views and maker.read_spec(v) == want:
                continue  # It is gathered so for the segment that stores it, too.
            types = (program.values[program.ops[op].results[0]].dtype for op in views)
            least = min(map(dtype_bytes, (value.dtype, *types)))
            size = size * least / dtype_bytes(value.dtype)
        total += estimator.terms.moves.cost_ms(size, have, (), want)
    return total


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
