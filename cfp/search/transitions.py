"""What it costs to turn one sharding of a tensor into another."""

from __future__ import annotations

from dataclasses import dataclass, field

from cfp.analysis.strategies import Mesh, Spec
from cfp.profiling.collectives import Rates


@dataclass(frozen=True, slots=True)
class Transition:
    """The collectives between two shardings: (kind, axes, bytes) each."""

    steps: tuple[tuple[str, tuple[str, ...], float], ...]


def transition(
    size_bytes: float,
    have: Spec,
    partial: tuple[str, ...],
    want: Spec,
    mesh: Mesh,
) -> Transition:
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
    steps: list[tuple[str, tuple[str, ...], float]] = []

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
    return Transition(tuple(steps))


@dataclass(frozen=True, slots=True)
class TransitionCosts:
    """Milliseconds of transitions on one mesh, remembered."""

    rates: Rates
    mesh: Mesh
    _known: dict = field(default_factory=dict)

    def cost_ms(
        self, size_bytes: float, have: Spec, partial: tuple[str, ...], want: Spec
    ) -> float:
        """The estimated time of a transition."""
        if have == want and not partial:
            return 0.0
        key = (size_bytes, have, partial, want)
        found = self._known.get(key)
        if found is None:
            steps = transition(size_bytes, have, partial, want, self.mesh).steps
            found = sum(self.rates.collective_ms(*step) for step in steps)
            self._known[key] = found
        return found
