"""Shardings of a storage group's own ops, given that of its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cfp.analysis.classes import DimClasses
from cfp.analysis.storage import StorageGroup
from cfp.analysis.strategies import FactorAxes, Mesh, Spec, legal_axes
from cfp.program.graph import Program


class GroupSharding:
    """Follows the sharding of a group's arguments through the ops of the group."""

    def __init__(
        self,
        program: Program,
        group: StorageGroup,
        mesh: Mesh,
        canonical: Mapping[int, int],
    ) -> None:
        self._program = program
        self._group = group
        self._mesh = mesh
        self._canonical = canonical
        self._classes: dict[tuple[bool, int], DimClasses] = {}
        self._known: dict[tuple[bool, Spec], dict[int, FactorAxes]] = {}

    def update_axes(self, spec: Spec) -> dict[int, FactorAxes]:
        """The axes that split the factors of the update ops.

        Args:
            spec: how the group's arguments are stored.
        """
        return self._axes(False, spec)

    def read_axes(self, spec: Spec) -> dict[int, FactorAxes]:
        """The same for the ops that bring the parameter to the blocks."""
        return self._axes(True, spec)

    def _axes(self, reads: bool, spec: Spec) -> dict[int, FactorAxes]:
        if (reads, spec) not in self._known:
            self._known[reads, spec] = self._follow(reads, spec)
        return self._known[reads, spec]

    def _follow(self, reads: bool, spec: Spec) -> dict[int, FactorAxes]:
        group, program = self._group, self._program
        ops = group.reads if reads else (*group.ops, *group.inner_ops)
        positions = group.args[:1] if reads else group.args
        marks: dict[str, set] = {}
        for name, size in self._mesh:
            classes = self._classes_for(reads, ops, size)
            marks[name] = {
                classes.of_dim(program.args[position], dim)
                for position in positions
                for dim, names in enumerate(spec)
                if name in names
            }
        found = {}
        for op_id in ops:
            rule = program.ops[op_id].rule
            assert rule is not None
            wanted: list[list[str]] = [[] for _ in rule.sizes]
            for name, size in self._mesh:
                classes = self._classes_for(reads, ops, size)
                for factor in range(len(rule.sizes)):
                    if classes.of_factor(op_id, factor) in marks[name]:
                        wanted[factor].append(name)
            found[op_id] = legal_axes(rule, wanted, dict(self._mesh))
        return found

    def _classes_for(self, reads: bool, ops: Iterable[int], size: int) -> DimClasses:
        if (reads, size) not in self._classes:
            self._classes[reads, size] = DimClasses(
                self._program, ops, (), self._canonical, size
            )
        return self._classes[reads, size]
