"""A training step under a rule table, through plain `jax.jit`."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_test.handwritten.tables import Table
from cfp.models import build, logical_names
from cfp.models.layers import RESIDUAL, Axes, Rules, TrainState, mesh_spec, sharded_by
from cfp.models.model import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """A lowered training step and where its arguments live.

    Attributes:
      lowered: takes and returns (state, batch) -> (state, metrics); donates the state.
      args: the arguments, abstract.
      shardings: those of the arguments, a tree like `args`.
      whole: names of dims that the table splits, but that do not split evenly here.
    """

    lowered: jax.stages.Lowered
    args: tuple[Any, Any]
    shardings: tuple[Any, Any]
    whole: tuple[str, ...]


def shard_step(
    model: str, options: dict[str, Scalar], table: Table, mesh: Mesh
) -> ShardedStep:
    """Lowers a model's training step under a table.

    A name whose dims an axis does not split evenly stays whole, in parameters and
    activations both, as a person would have it.

    Args:
      model: name in the zoo.
      options: as for `cfp.models.build`.
      table: the strategy.
      mesh: with the table's axes, their shardings left to the compiler.

    Raises:
      ValueError: the mesh has other axes, or the batch does not split.
    """
    if tuple(mesh.axis_names) != table.axes:
        raise ValueError(
            f"{table.name} is written for a mesh with the axes {table.axes}, got "
            f"{tuple(mesh.axis_names)}"
        )
    step, (state, batch) = build(model, **options)
    state_names, batch_names = logical_names(model, **options)
    whole = _uneven(state.params, state_names.params, table.params, mesh)
    keep = {name: None for one in whole for name in (one, f"act_{one}")}
    activations = {**table.activations, **keep}
    params = {**table.params, **keep}
    moments = params if table.optimizer is None else {**table.optimizer, **keep}
    if _uneven(batch, batch_names, activations, mesh):
        raise ValueError(
            f"{table.name} splits the batch over {dict(mesh.shape)}, which does not "
            f"split {options.get('batch')} sequences evenly"
        )

    shardings = (
        TrainState(
            _shardings(state_names.params, params, mesh),
            _shardings(state_names.opt_state, moments, mesh),
        ),
        _shardings(batch_names, activations, mesh),
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        step,
        in_shardings=shardings,
        out_shardings=(shardings[0], replicated),
        donate_argnums=0,
    )
    with sharded_by(mesh, activations):
        lowered = jitted.lower(state, batch)
    return ShardedStep(
        lowered=lowered, args=(state, batch), shardings=shardings, whole=whole
    )


def shard_largest(model: str, options: dict[str, Scalar], mesh: Mesh) -> ShardedStep:
    """Lowers a model's training step with each parameter sharded on its largest dim.

    The residual stream is sharded on the batch between layers; what is in between is
    left to XLA's propagation.

    Args:
      model: name in the zoo.
      options: as for `cfp.models.build`.
      mesh: of one axis.
    """
    [axis] = mesh.axis_names
    step, args = build(model, **options)

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        dims = [d for d, size in enumerate(leaf.shape) if size % mesh.size == 0]
        if leaf.ndim < 2 or not dims:
            return NamedSharding(mesh, PartitionSpec())
        dim = max(dims, key=lambda d: leaf.shape[d])
        return NamedSharding(mesh, PartitionSpec(*[None] * dim, axis))

    data = NamedSharding(mesh, PartitionSpec(axis))
    shardings = (jax.tree.map(sharding, args[0]), jax.tree.map(lambda _: data, args[1]))
    jitted = jax.jit(
        step,
        in_shardings=shardings,
        out_shardings=(shardings[0], NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    with sharded_by(mesh, {"act_batch": axis}, only=(RESIDUAL,)):
        lowered = jitted.lower(*args)
    return ShardedStep(lowered=lowered, args=args, shardings=shardings, whole=())


def _shardings(names: Any, rules: Rules, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, mesh_spec(spec, rules)), names)


def _uneven(tree: Any, names: Any, rules: Rules, mesh: Mesh) -> tuple[str, ...]:
    """The names of dims that the rules' axes do not split evenly."""
    found: set[str] = set()
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(names), strict=True):
        for size, name, axes in zip(
            leaf.shape, spec, mesh_spec(spec, rules), strict=True
        ):
            if size % _ways(axes, mesh):
                found.add(name)
    return tuple(sorted(found))


def _ways(axes: Axes, mesh: Mesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return prod(mesh.shape[name] for name in names)
