"""Arrays in host memory, on meshes with explicit axes, and on several processes.

Functions read the memory and the sharding of arrays, and move arrays to others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_flatten, tree_unflatten

from cfp.program.jaxprs import inner_jaxprs

# The memory kind of `jax.memory.Space.Host`.
HOST = "pinned_host"
_OF_THE_HOST = (HOST, "unpinned_host")

_S = TypeVar("_S", bound=Sharding)


def has_host_memory(device: Any) -> bool:
    """True if a device can use pinned memory of its host."""
    return any(memory.kind == HOST for memory in device.addressable_memories())


def memory_kind(leaf: Any) -> str:
    """Returns the kind of host memory of `leaf.sharding`; "" without."""
    return host_kind(getattr(leaf, "sharding", None))


def result_memory_kinds(jaxpr: Jaxpr, argument_kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns for each result the kind of its host memory, "" for device memory.

    JAX's types have the kind, with two exceptions: arguments that are returned
    unchanged, and out_shardings of an inner jax.jit.
    """
    kinds = {
        id(var): kind for var, kind in zip(jaxpr.invars, argument_kinds, strict=True)
    }
    for eqn in jaxpr.eqns:
        given = [kinds.get(id(var), "") for var in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            kinds.update((id(v), k) for v, k in zip(eqn.outvars, given, strict=True))
        for inner in inner_jaxprs(eqn):
            takes = len(inner.invars)
            if len(inner.outvars) != len(eqn.outvars) or takes > len(given):
                continue
            # A branch's index, and a loop's constants, come first.
            found = result_memory_kinds(inner, given[len(given) - takes :])
            for var, kind in zip(eqn.outvars, found, strict=True):
                kinds[id(var)] = kinds.get(id(var)) or kind
        if (shardings := eqn.params.get("out_shardings")) is not None:
            for var, sharding in zip(eqn.outvars, shardings, strict=True):
                kinds[id(var)] = host_kind(sharding) or kinds.get(id(var), "")
    spaces = [getattr(var.aval, "memory_space", None) for var in jaxpr.outvars]
    return tuple(
        HOST if space == jax.memory.Space.Host else kinds.get(id(var), "")
        for var, space in zip(jaxpr.outvars, spaces, strict=True)
    )


def on_device(tree: Any) -> Any:
    """Moves `jax.Array` leaves in host memory to device memory; keeps other leaves."""

    def moved(leaf: Any) -> Any:
        there = memory_kind(leaf) and leaf.sharding.with_memory_kind("device")
        return jax.device_put(leaf, there) if there else leaf

    return jax.tree.map(moved, tree)


def in_host(tree: Any) -> Any:
    """Moves each `jax.Array` of a pytree to pinned host memory; keeps other leaves.

    Unchanged: deleted arrays, arrays with shards on other processes' devices, and
    arrays on devices without pinned host memory.
    """

    def moved(leaf: Any) -> Any:
        is_here = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        if not is_here or leaf.is_deleted():  # It was donated to a step.
            return leaf
        if not all(map(has_host_memory, leaf.sharding.device_set)):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST))

    return jax.tree.map(moved, tree)


def host_kind(sharding: Any) -> str:
    """Returns the kind of host memory of a sharding; "" for device memory or None."""
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind in _OF_THE_HOST else ""


def with_leaves_in(tree: Any, which: Collection[int], space: Any) -> Any:
    """Moves some leaves of a pytree, given by flat indices, to a `jax.memory.Space`."""
    if not which:
        return tree
    leaves, structure = tree_flatten(tree)
    moved = [
        jax.device_put(leaf, space) if i in which else leaf
        for i, leaf in enumerate(leaves)
    ]
    return tree_unflatten(structure, moved)


def is_explicit(sharding: Any) -> TypeGuard[NamedSharding]:
    """True if the mesh of a sharding has an explicit axis."""
    is_named = isinstance(sharding, NamedSharding)
    return is_named and AxisType.Explicit in sharding.mesh.axis_types


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with all axis types Auto."""
    return Mesh(mesh.devices, mesh.axis_names)


def mesh_of_results(mesh: Mesh, explicit: Iterable[NamedSharding | None]) -> Mesh:
    """Returns `mesh` if `explicit` has a sharding or ``jax.set_mesh`` an explicit axis.

    Otherwise returns `auto_mesh` of it. `explicit` has shardings on explicit axes.
    """
    around = jax.sharding.get_abstract_mesh().axis_types
    return mesh if any(explicit) or AxisType.Explicit in around else auto_mesh(mesh)


def on_auto_mesh(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding on `auto_mesh`; itself if its mesh is abstract."""
    mesh = sharding.mesh
    return sharding.update(mesh=auto_mesh(mesh)) if isinstance(mesh, Mesh) else sharding


def in_memory(shardings: Sequence[_S], kinds: Sequence[str]) -> tuple[_S, ...]:
    """Returns shardings in kinds of memory; "" and an empty `kinds` change nothing."""
    pairs: Any = zip(shardings, kinds or [""] * len(shardings), strict=True)
    return tuple(one.with_memory_kind(kind) if kind else one for one, kind in pairs)


def placed_avals(
    avals: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Adds to types the shardings in host memory, or on meshes with explicit axes."""
    return tuple(
        aval.update(sharding=sharding)
        if sharding.memory_kind in _OF_THE_HOST or is_explicit(sharding)
        else aval
        for aval, sharding in zip(avals, shardings, strict=True)
    )


# ------------------------------------------------------- whole arrays: put and fetch


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Moves a whole array to a sharding, also over several processes.

    All processes pass equal arrays, or one `jax.Array` that is over several.
    """
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if sharding.is_fully_addressable or not is_here:
        return jax.device_put(leaf, sharding)
    # Here `jax.device_put` would compare values of all processes, by collectives that
    # need equally many devices in each.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data, impl = np.asarray(jax.random.key_data(leaf)), jax.random.key_impl(leaf)
        wrap = partial(jax.random.wrap_key_data, impl=impl)
        return jax.jit(wrap, out_shardings=sharding)(data)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index]
    )


def fetch(leaf: jax.Array, device: Any) -> jax.Array:
    """Copies a whole array, which may be sharded, to one device of this process.

    All processes with shards of the array call this, each with its own `jax.Device`.
    A sharded array in device memory is first copied whole to all devices of its mesh.
    """
    mesh = getattr(leaf.sharding, "mesh", None)
    if mesh is not None and not leaf.is_fully_replicated and not memory_kind(leaf):
        leaf = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, device)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = fetch(jax.random.key_data(leaf), device)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_replicated:
        return jax.device_put(leaf.addressable_data(0), device)
    return jax.device_put(multihost_utils.process_allgather(leaf, tiled=True), device)


def _same(leaf: jax.Array) -> jax.Array:
    """Returns the array; JAX would compile a new lambda at each call."""
    return leaf
