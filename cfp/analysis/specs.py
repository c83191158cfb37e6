"""What a sharding does to a tensor of a given shape."""

from __future__ import annotations

from collections.abc import Set

from cfp.analysis.strategies import Mesh, Spec


def spec_ways(spec: Spec, mesh: Mesh) -> int:
    """Into how many pieces a spec cuts a tensor."""
    sizes = dict(mesh)
    ways = 1
    for names in spec:
        for name in names:
            ways *= sizes[name]
    return ways


def even_spec(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> Spec:
    """A spec without the axes that do not divide their dim.

    Values inside of a program may be padded; arguments and results may not.
    """
    sizes = dict(mesh)
    dims = []
    for size, names in zip(shape, spec, strict=True):
        kept, ways = [], 1
        for name in names:
            if size % (ways * sizes[name]):
                break
            kept.append(name)
            ways *= sizes[name]
        dims.append(tuple(kept))
    return tuple(dims)


def extend_spec(
    spec: Spec,
    shape: tuple[int, ...],
    mesh: Mesh,
    whole_dims: Set[int] = frozenset(),
) -> Spec:
    """Shards a tensor over the axes that its spec leaves unused, where one fits.

    Each axis goes to the first dim that it divides, those in ``whole_dims`` apart.
    """
    used = {name for names in spec for name in names}
    dims = [list(names) for names in spec]
    sizes = dict(mesh)
    for name, size in mesh:
        if name in used:
            continue
        for dim, names in enumerate(dims):
            ways = size
            for other in names:
                ways *= sizes[other]
            if shape[dim] % ways == 0 and dim not in whole_dims:
                names.append(name)
                break
    return tuple(tuple(names) for names in dims)
