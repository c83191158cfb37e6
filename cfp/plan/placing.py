"""Makes state and places batches in a plan's shardings; checks a plan's devices."""

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
    """A plan's argument leaves: paths, types, specs and memory kinds, and the mesh."""

    names: Sequence[str]
    types: Sequence[str]
    specs: Sequence[Spec]
    memory: Sequence[str]
    mesh: Mesh

    def sharding(self, i: int, dims: int) -> NamedSharding:
        """Returns the sharding of leaf `i`, an array of `dims` dims."""
        sharding = NamedSharding(self.mesh, partition_spec(self.specs[i], dims))
        return in_memory([sharding], [self.memory[i]])[0]


Axes = Sequence[tuple[str, int]]


def other_devices(
    axes: Axes, environment: Mapping[str, str], devices: Sequence[Any] | DescribedMesh
) -> str:
    """Describes how devices differ from the planned devices; "" if they do not.

    Args:
        axes, environment: the plan's mesh axes, and its devices and versions.
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
    """Returns device facts that must equal those in a plan's environment."""
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
    """Checks a plan's kind and number of devices, and its version of JAX.

    Raises:
        PlanMismatch: the devices or this JAX differ.
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
    """Makes a plan's mesh of the first devices of this process's JAX.

    Raises:
        PlanMismatch: too few devices are there, or of another kind, or another JAX.
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
    """Runs `init_fn`; its result has the shardings of the argument of its structure.

    Raises:
        PlanMismatch: the result has the structure and types of no argument.
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
    """Moves a batch from the host to the sharding of an argument of the step.

    Args:
        batch: a pytree of arrays, as :meth:`cfp.Plan.place` takes it.
        argument: the argument's name; by default the first with the batch's structure.

    Raises:
        PlanMismatch: no argument has this structure, or an array has another size.
    """
    leaves, tree = tree_flatten_with_path(batch)
    paths = [path_text(path) for path, _ in leaves]
    known = by_argument(arguments.names)
    if argument is not None and argument not in known:
        raise PlanMismatch(
            f"The plan has no argument {argument!r} with arrays. "
            f"{known_names(argument, known)} Without argument=, plan.place takes the "
            "first argument of the batch's structure."
        )
    roots = [root for root in known if argument in (None, root)]
    fits = [root for root in roots if [path for path, _ in known[root]] == paths]
    exact = [root for root in fits if _same_types(arguments, known[root], leaves)]
    if not fits:
        raise PlanMismatch(
            f"The batch of {len(paths)} leaves, first {paths[:3]}, has the structure "
            "of none of the plan's arguments. Pass one of them as the step takes it: "
            f"{', '.join(known)}."
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
    """Returns the shape of a process's part of an array, for its own devices."""
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
    # JAX stores NumPy's 64-bit types in 32 bits, unless configured otherwise.
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
        f"The array for {arguments.names[i]} is {type_text(leaf)}; the plan expects "
        f"{'the part of this process of ' * many}{arguments.types[i]}. Pass a "
        "batch of the planned size, or plan again."
    )
