"""Arrays of the user's where a plan wants them: made there, or taken there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_unflatten

from cfp.analysis.strategies import Spec
from cfp.devices.described import DescribedMesh, slice_of
from cfp.errors import PlanMismatch, known_names
from cfp.plan.parts import by_argument, path_text, places_like, shape_of, type_text
from cfp.program.calling import fixed, released
from cfp.program.constrain import partition_spec
from cfp.program.memory import in_memory, put


@dataclass(frozen=True, slots=True)
class Arguments:
    """A plan's argument leaves: paths, types, shardings, memory kinds, on a mesh."""

    names: Sequence[str]
    types: Sequence[str]
    specs: Sequence[Spec]
    memory: Sequence[str]
    mesh: Mesh

    def sharding(self, i: int, dims: int) -> NamedSharding:
        """Returns the sharding of a leaf that has so many dims."""
        sharding = NamedSharding(self.mesh, partition_spec(self.specs[i], dims))
        return in_memory([sharding], [self.memory[i]])[0]


Axes = Sequence[tuple[str, int]]


def other_devices(
    axes: Axes, environment: Mapping[str, str], devices: Sequence[Any] | DescribedMesh
) -> str:
    """Says how devices differ from those that a plan is for; "" if they do not.

    Args:
        environment: what it was made for.
    """
    planned = {**environment, "devices": str(prod(size for _, size in axes))}
    here, names = _facts(devices), ("slice", "device_kind", "platform")
    if all(planned.get(n, here.get(n)) == here.get(n) for n in (*names, "devices")):
        return ""
    there = next((environment[name] for name in names if name in environment), "any")
    text = f" ({environment['described']})" if "described" in environment else ""
    found = here.get("slice") or here["device_kind"]
    return (
        f"The plan is for {planned['devices']} of {there}{text}, and these are "
        f"{here['devices']} of {found}"
    )


def _facts(devices: Sequence[Any] | DescribedMesh) -> Mapping[str, str]:
    """Facts of devices that a plan is held to, as its environment has them."""
    if isinstance(devices, DescribedMesh):
        return devices.environment
    return {
        "slice": slice_of(devices),
        "device_kind": ", ".join(sorted({one.device_kind for one in devices})),
        "platform": devices[0].platform,
        "devices": str(len(devices)),
    }


def check_devices(
    axes: Axes, environment: Mapping[str, str], devices: Sequence[Any] | DescribedMesh
) -> None:
    """Checks that a plan is for these devices, in kind and number, and for this JAX.

    Raises:
        PlanMismatch: it is for others.
    """
    differ = other_devices(axes, environment, devices)
    version, remedy = environment.get("jax_version", jax.__version__), ""
    if differ:
        remedy = "Use it on its devices (cfp show needs none), or plan these"
        if {_facts(devices)["platform"], environment.get("platform", "cpu")} == {"cpu"}:
            count = prod(size for _, size in axes)
            virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            remedy = f"Set {virtual} for as many virtual devices, or plan these"
    elif version != jax.__version__:
        differ = f"The plan is for JAX {version}, and this is JAX {jax.__version__}"
        remedy = f"Install JAX {version}, or plan again"
    if differ:
        is_known = environment.get("platform") in (None, _facts(devices)["platform"])
        without = "" if is_known else ", if the step draws no random numbers"
        raise PlanMismatch(
            f"{differ}. {remedy}; to try it here all the same{without}: "
            "plan.on(mesh, other_devices=True), in a command --other-devices."
        )


def mesh_here(axes: Axes, environment: Mapping[str, str]) -> Mesh:
    """A plan's mesh, of the first of the devices that are there.

    Args:
        environment: what it was made for.

    Raises:
        PlanMismatch: there are too few devices, or they are of another kind.
    """
    names = tuple(name for name, _ in axes)
    shape = tuple(size for _, size in axes)
    devices = jax.devices()[: prod(shape)]
    check_devices(axes, environment, devices)
    explicit = environment.get("explicit_axes", "").split(",")
    kinds = tuple(
        AxisType.Explicit if name in explicit else AxisType.Auto for name in names
    )
    return jax.make_mesh(shape, names, kinds, devices=devices)


def made(
    arguments: Arguments,
    init_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Initialises in the shardings of the arguments that the result looks like.

    Raises:
        PlanMismatch: it looks like none.
    """

    def arrays(*args: Any, **kwargs: Any) -> Any:
        return fixed(init_fn(*args, **kwargs))

    shape = jax.eval_shape(arrays, *args, **kwargs)
    leaves, tree = tree_flatten(shape)
    places = places_like(shape, arguments.names, arguments.types)
    shardings = [
        arguments.sharding(i, len(leaf.shape))
        for i, leaf in zip(places, leaves, strict=True)
    ]
    jitted = jax.jit(arrays, out_shardings=tree_unflatten(tree, shardings))
    return released(jitted(*args, **kwargs))


def placed(arguments: Arguments, batch: Any, argument: str | None) -> Any:
    """A batch of the host's on the devices, as one argument of the step has it.

    Args:
        batch: a pytree of arrays, as :meth:`cfp.Plan.place` takes it.
        argument: which argument it is; by default the first with its leaves.

    Raises:
        PlanMismatch: it looks like no argument, or an array has another size.
    """
    leaves, tree = tree_flatten_with_path(batch)
    paths = [path_text(path) for path, _ in leaves]
    known = by_argument(arguments.names)
    if argument is not None and argument not in known:
        raise PlanMismatch(
            f"The plan has no argument {argument!r} with arrays. "
            f"{known_names(argument, known)} Without argument= plan.place takes the "
            "first that the batch looks like."
        )
    roots = [root for root in known if argument in (None, root)]
    fits = [root for root in roots if [path for path, _ in known[root]] == paths]
    exact = [root for root in fits if _same_types(arguments, known[root], leaves)]
    if not fits:
        raise PlanMismatch(
            f"The batch of {len(paths)} leaves, first {paths[:3]}, looks like none "
            f"of the plan's arguments. Pass argument=, one of {', '.join(known)}, "
            "with the tree that the step takes there."
        )
    root = (exact or fits)[0]
    found = [
        _placed(arguments, i, leaf)
        for (_, i), (_, leaf) in zip(known[root], leaves, strict=True)
    ]
    return tree_unflatten(tree, found)


def _same_types(
    arguments: Arguments, known: Sequence[tuple[str, int]], leaves: Sequence[Any]
) -> bool:
    shapes = {i: shape_of(arguments.types[i]) for _, i in known}
    return all(
        np.shape(leaf) in (shape, _part(arguments.sharding(i, len(shape)), shape))
        for (_, leaf), (i, shape) in zip(leaves, shapes.items(), strict=True)
    )


def _part(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the part that a process passes for its own devices."""
    pieces = sharding.addressable_devices_indices_map(shape).values()
    ranges = [
        {piece[dim].indices(size)[:2] for piece in pieces if piece is not None}
        for dim, size in enumerate(shape)
    ]
    return tuple(sum(end - start for start, end in found) for found in ranges)


def _placed(arguments: Arguments, i: int, leaf: Any) -> jax.Array:
    """Makes one array of the batch, from all of it or this process's part."""
    dtype, shape = arguments.types[i].partition("[")[0], shape_of(arguments.types[i])
    sharding = arguments.sharding(i, len(shape))
    if isinstance(leaf, jax.Array):
        if leaf.shape != shape:
            raise _other_size(arguments, i, leaf)
        return put(leaf, sharding)
    part = np.asarray(leaf)
    # What NumPy has in 64 bits JAX has in 32, unless it is configured otherwise.
    if jax.dtypes.canonicalize_dtype(part.dtype) != dtype:
        raise _other_size(arguments, i, part)
    try:
        return jax.make_array_from_process_local_data(
            sharding, part.astype(dtype, copy=False), shape
        )
    except ValueError as error:
        raise _other_size(arguments, i, part) from error


def _other_size(arguments: Arguments, i: int, leaf: Any) -> PlanMismatch:
    many = jax.process_count() > 1
    return PlanMismatch(
        f"The array for {arguments.names[i]} is {type_text(leaf)}, and the "
        f"plan's{' part of this process' * many} {arguments.types[i]}. Pass a "
        "batch of the size that was planned, or plan again."
    )
