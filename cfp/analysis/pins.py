"""Pins: shardings of arguments that the user decides, by path."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.strategies import Mesh, Spec
from cfp.errors import PinError
from cfp.program.graph import Program


def resolve_pins(
    pins: Mapping[str, PartitionSpec | NamedSharding], program: Program, mesh: Mesh
) -> dict[int, Spec]:
    """Turns pinned paths into shardings by argument position.

    A pattern is an argument's path as cfp writes it, or a glob over that
    (``state/params/*/kernel``), or either for the end of it, from any ``/`` on. Where
    several patterns match, the last wins.

    Args:
        pins: shardings by pattern.
        program: whose arguments are meant.
        mesh: names and sizes of the mesh's axes.

    Raises:
        PinError: a pattern matches nothing, or its sharding does not fit what it
            matches; the message names the argument and says why.
    """
    found: dict[int, Spec] = {}
    for pattern, sharding in pins.items():
        matches = [
            i for i, name in enumerate(program.arg_names) if path_matches(name, pattern)
        ]
        if not matches:
            some = ", ".join(program.arg_names[:8])
            raise PinError(
                f"The pin {pattern!r} matches no argument. Paths look like: {some}."
            )
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        for position in matches:
            found[position] = _fit(spec, program, position, mesh, pattern)
    return found


def path_matches(path: str, pattern: str) -> bool:
    """True if a pattern is a path or the end of it, as it stands there, or its glob."""
    parts = path.split("/")
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    # A path may have brackets, which a glob takes for one of several letters.
    return any(end == pattern or fnmatchcase(end, pattern) for end in ends)


def _fit(
    spec: PartitionSpec, program: Program, position: int, mesh: Mesh, pattern: str
) -> Spec:
    value = program.values[program.args[position]]
    name = program.arg_names[position]
    where = f"The pin {pattern!r} = {spec} does not fit {name!r} {value}"
    sizes = dict(mesh)
    if len(spec) > len(value.shape):
        raise PinError(f"{where}: it names {len(spec)} dims.")
    dims: list[tuple[str, ...]] = []
    for entry in (*spec, *(None,) * (len(value.shape) - len(spec))):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        dims.append(tuple(axis for axis in names if sizes.get(axis) != 1))
    used: set[str] = set()
    for dim, names in enumerate(dims):
        ways = 1
        for axis in names:
            if axis not in sizes:
                raise PinError(
                    f"{where}: the mesh has no axis {axis!r} of size 2 or more; it "
                    f"has {sizes}."
                )
            if axis in used:
                raise PinError(f"{where}: it uses axis {axis!r} twice.")
            used.add(axis)
            ways *= sizes[axis]
        if value.shape[dim] % ways:
            raise PinError(
                f"{where}: dim {dim} of size {value.shape[dim]} does not divide by "
                f"{ways}."
            )
    return tuple(dims)
