"""Strategies: what each axis of the mesh does for an attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jax.sharding import PartitionSpec

from cfp.attention.kernels import Kernel
from cfp.attention.problem import AttentionProblem
from cfp.errors import CfpError

BATCH, HEADS = "batch", "heads"
ULYSSES, ALL_GATHER = "ulysses", "all_gather"
RING, ZIGZAG = "ring", "zigzag"

ROLES: Mapping[str, str] = {
    BATCH: "each rank has some sequences",
    HEADS: "each rank has some heads",
    ULYSSES: "tokens are sharded outside, heads inside; all-to-alls exchange them",
    ALL_GATHER: "tokens are sharded, keys and values gathered",
    RING: "tokens are sharded, keys and values go round",
    ZIGZAG: "a ring whose tokens are in zigzag order: causal masks are balanced",
}
_SPREAD = (ALL_GATHER, RING, ZIGZAG)

Given = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStrategy:
    """A role for some axes of a mesh; the others hold copies.

    Attributes:
      roles: (axis, role), in the mesh's order.
      sizes: (axis, devices along it) of the whole mesh.
    """

    roles: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, given: Given, sizes: Mapping[str, int]) -> AttentionStrategy:
        """Reads a strategy: {"axis": "role"}, or a role alone for a mesh of one axis.

        Raises:
          CfpError: an axis or a role does not exist.
        """
        if isinstance(given, str):
            given = dict.fromkeys(sizes, given) if len(sizes) == 1 else {"": given}
        given = given or {}
        unknown = [a for a in given if a not in sizes]
        if unknown or not set(given.values()) <= set(ROLES):
            wrong = {axis or "?": role for axis, role in given.items()}
            raise CfpError(
                f"There is no strategy {wrong} of an attention. Give axes of the mesh "
                f"({', '.join(sizes)}) a role ({', '.join(ROLES)})."
            )
        roles = tuple((axis, given[axis]) for axis in sizes if axis in given)
        return cls(roles=roles, sizes=tuple(sizes.items()))

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {role}" for axis, role in self.roles) or "none"

    def axes(self, *roles: str) -> tuple[str, ...]:
        return tuple(axis for axis, role in self.roles if role in roles)

    def parts(self, *roles: str) -> int:
        """Into how many parts some roles divide something."""
        sizes = dict(self.sizes)
        return prod(sizes[axis] for axis in self.axes(*roles))

    @property
    def spread(self) -> str | None:
        """The axis along which keys are gathered or go round, or None."""
        axes = self.axes(*_SPREAD)
        return axes[0] if axes else None

    @property
    def zigzag(self) -> bool:
        return bool(self.axes(ZIGZAG))

    @property
    def ring_ranks(self) -> int:
        """Devices of the ring or of the gathering; 1 without."""
        return self.parts(*_SPREAD)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that shard tokens outside: first the ring's, then Ulysses'."""
        return self.axes(*_SPREAD) + self.axes(ULYSSES)

    @property
    def token_multiple(self) -> int:
        """The number that the count of tokens must be a multiple of."""
        return self.parts(*_SPREAD, ULYSSES) * (2 if self.zigzag else 1)

    def filled(self, tokens: int) -> int:
        """A number of tokens, filled up to such a multiple."""
        return -(-tokens // self.token_multiple) * self.token_multiple

    def spec(self) -> PartitionSpec:
        """The sharding of q, k, v and the output: [batch, tokens, heads, head_dim]."""
        return PartitionSpec(
            self.axes(BATCH) or None, self.token_axes or None, self.axes(HEADS) or None
        )

    def segment_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Specs of the ids of queries and of keys inside: [batch, tokens]."""
        batch = self.axes(BATCH) or None
        return PartitionSpec(batch, self.axes(*_SPREAD) or None), PartitionSpec(batch)

    def bias_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec of a bias, with the heads of a rank inside."""
        heads = self.axes(HEADS) + self.axes(ULYSSES)
        return PartitionSpec(
            (self.axes(BATCH) or None) if shape[0] > 1 else None,
            (heads or None) if shape[1] > 1 else None,
        )

    def refusal(self, problem: AttentionProblem, kernel: Kernel) -> str | None:
        """Returns the reason why a problem and a kernel do not fit it, or None."""
        for roles, name in ((_SPREAD, "ring or gathering"), ((ULYSSES,), "Ulysses")):
            if len(self.axes(*roles)) > 1:
                return f"there is one axis for {name}, not {len(self.axes(*roles))}"
        if problem.batch % self.parts(BATCH):
            return (
                f"{problem.batch} sequences do not divide into {self.parts(BATCH)} "
                "parts"
            )
        if self.token_axes and problem.causal and problem.queries != problem.keys:
            return "a causal mask over sharded tokens has as many queries as keys"
        if self.spread is None:
            return None
        if problem.bias:
            return (
                "a bias or dense mask has a column for each key: keys stay together "
                "for it"
            )
        return self._refused_by(kernel, problem)

    def _refused_by(self, kernel: Kernel, problem: AttentionProblem) -> str | None:
        if kernel.any_positions:
            return None
        for unable, what in (
            (problem.window, "a window"),
            (problem.segments, "packed segments"),
            (problem.padded_keys, "padded keys"),
        ):
            if unable:
                return f"{kernel.name} computes no blocks with {what}"
        return None
