"""What it costs to turn one sharding of a tensor into another: by itself, and where
one segment reads what another makes or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cfp.analysis.layout import Layout
from cfp.analysis.strategies import Mesh, Spec
from cfp.profiling.collectives import Rates
from cfp.program.graph import dtype_bytes

# Of one collective: its kind, the axes that it goes over, and bytes.
Step = tuple[str, tuple[str, ...], float]


def transition(
    size_bytes: float,
    have: Spec,
    partial: tuple[str, ...],
    want: Spec,
    mesh: Mesh,
) -> tuple[Step, ...]:
    """The collectives that take a tensor from one sharding to another.

    Args:
        size_bytes: bytes of the whole tensor.
        have: how it is sharded now.
        partial: axes over which it still has to be summed.
        want: how it is to be sharded.
        mesh: the mesh.

    Returns:
        The steps. Bytes are those of the whole tensor in a group of devices: what an
        all-gather makes, what a reduce-scatter or an all-to-all starts from.
    """
    sizes = dict(mesh)
    steps: list[Step] = []

    def ways(names: list[str] | tuple[str, ...]) -> int:
        product = 1
        for name in names:
            product *= sizes[name]
        return product

    held = [list(names) for names in have]
    local = size_bytes / ways([n for names in held for n in names])
    scattered = []
    for name in partial:
        for dim, names in enumerate(want):
            if name in names and list(names[: len(held[dim])]) == held[dim]:
                scattered.append(name)
                held[dim].append(name)
                break
    if scattered:
        steps.append(("reduce-scatter", tuple(scattered), local))
        local /= ways(scattered)
    summed = tuple(name for name in partial if name not in scattered)
    if summed:
        steps.append(("all-reduce", summed, local))
    gathered, moved = [], []
    for dim, names in enumerate(held):
        target = list(want[dim])
        shared = 0
        while shared < min(len(names), len(target)) and names[shared] == target[shared]:
            shared += 1
        for name in names[shared:]:
            elsewhere = any(name in other for d, other in enumerate(want) if d != dim)
            (moved if elsewhere else gathered).append(name)
    if moved:
        steps.append(("all-to-all", tuple(moved), local * ways(moved)))
    if gathered:
        steps.append(("all-gather", tuple(gathered), local * ways(gathered)))
    return tuple(steps)


def transition_ms(
    rates: Rates,
    mesh: Mesh,
    size_bytes: float,
    have: Spec,
    partial: tuple[str, ...],
    want: Spec,
) -> float:
    """The estimated time of a transition; see :func:`transition`."""
    if have == want and not partial:
        return 0.0
    steps = transition(size_bytes, have, partial, want, mesh)
    return sum(rates.collective_ms(*step) for step in steps)


def reshard_ms(
    cost_ms: Callable[[float, Spec, tuple[str, ...], Spec], float],
    maker: Layout,
    reader: Layout,
    values: Sequence[int],
) -> float:
    """What it takes, by estimate, that one segment reads another's values.

    Args:
        cost_ms: of a transition, by bytes, sharding, unreduced axes, wanted sharding.
        maker, reader: how the segments are laid out.
        values: what passes.
    """
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
        total += cost_ms(size, have, (), want)
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
