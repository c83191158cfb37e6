"""Logical names of dims, and what they mean on a mesh, for sharding models by hand.

Every dim of a parameter has a name, and so has every dim of the activations that a
person would care to shard. Rules map names to axes of a mesh, as in MaxText:

    parameters   vocab, position, embed, heads, kv_heads, head_dim, mlp, experts,
                 norm, layers, and a few that are never sharded
    activations  act_batch, act_seq, act_residual_seq, act_embed, act_heads,
                 act_kv_heads, act_head_dim, act_mlp, act_vocab, act_groups,
                 act_group, act_experts, act_expert_groups, act_capacity

The residual stream's sequence has a name of its own, so that it can be sharded where
the one inside attention and MLPs is not (Megatron's sequence parallelism).

Parameters of flax models carry their names by `flax.linen.with_logical_partitioning`,
and activations go through `constrain`. Without rules both are without effect; what
rules leave in a program, cfp's planner takes out.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]  # What is not in it stays whole.

TOKENS = ("act_batch", "act_seq")
RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
HEADS = ("act_batch", "act_seq", "act_heads", "act_head_dim")
INNER = ("act_batch", "act_seq", "act_mlp")
LOGITS = ("act_batch", "act_seq", "act_vocab")


@dataclass(frozen=True, slots=True)
class _Active:
    mesh: Mesh
    rules: Rules
    only: tuple[tuple[str, ...], ...]


_active: ContextVar[_Active | None] = ContextVar("logical_rules", default=None)


@contextlib.contextmanager
def sharded_by(
    mesh: Mesh, rules: Rules, only: tuple[tuple[str, ...], ...] = ()
) -> Iterator[None]:
    """Has all models that are traced meanwhile constrain their activations.

    Args:
      mesh: of axes whose shardings the compiler may choose (AxisType.Auto).
      rules: from names to axes of the mesh.
      only: the activations to constrain, by the names of their dims; all if empty.
    """
    token = _active.set(_Active(mesh, rules, only))
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """An activation, sharded as the active rules say, if there are any.

    As `flax.linen.with_logical_constraint`, which needs a mesh set for the whole
    process, under which flax's own layers then constrain their parameters, too.
    """
    active = _active.get()
    if active is None or (active.only and names not in active.only):
        return x
    spec = mesh_spec(PartitionSpec(*names), active.rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(active.mesh, spec))


def mesh_spec(names: PartitionSpec, rules: Rules) -> PartitionSpec:
    """The sharding that rules give to a tensor with dims of these names.

    An axis goes to the first dim that asks for it.
    """
    used: set[str] = set()
    found: list[Axes] = []
    for name in names:
        axes = rules.get(name) if isinstance(name, str) else None
        wanted = (axes,) if isinstance(axes, str) else axes or ()
        found.append(axes if used.isdisjoint(wanted) else None)
        if found[-1] is not None:
            used.update(wanted)
    return PartitionSpec(*found)
