"""Collectives that turn one sharding of a tensor into another."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from cfp.analysis.strategies import Mesh, Spec

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

    def ways(names: Iterable[str]) -> int:
        return prod(sizes[name] for name in names)

    steps: list[Step] = []
    held = [list(names) for names in have]
    local = size_bytes / ways(name for names in held for name in names)
    scattered = []
    for name in partial:
        for names, target in zip(held, want, strict=True):
            if name in target and names == list(target[: len(names)]):
                scattered.append(name)
                names.append(name)
                break
    if scattered:
        steps.append(("reduce-scatter", tuple(scattered), local))
        local /= ways(scattered)
    summed = tuple(name for name in partial if name not in scattered)
    if summed:
        steps.append(("all-reduce", summed, local))
    gathered, moved, wanted = [], [], {name for names in want for name in names}
    for names, target in zip(held, want, strict=True):
        shared = 0
        while names[: shared + 1] == list(target[: shared + 1]) and shared < len(names):
            shared += 1
        for name in names[shared:]:
            elsewhere = name in wanted and name not in target
            (moved if elsewhere else gathered).append(name)
    if moved:
        steps.append(("all-to-all", tuple(moved), local * ways(moved)))
    if gathered:
        steps.append(("all-gather", tuple(gathered), local * ways(gathered)))
    return tuple(steps)
