"""Arithmetic of shardings on tensors of given shapes."""

from __future__ import annotations

from collections.abc import Set

from cfp.analysis.numbering import squeeze
from cfp.analysis.storage import Storage, StorageGroup
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
    *,
    largest: bool = False,
) -> Spec:
    """Shards a tensor over the axes that its spec leaves unused, where one fits.

    Each axis goes to the first dim that it divides, or to the largest, those in
    ``whole_dims`` apart.
    """
    used = {name for names in spec for name in names}
    dims = [list(names) for names in spec]
    sizes = dict(mesh)
    for name, size in mesh:
        if name in used:
            continue
        for dim in sorted(range(len(dims)), key=lambda d: -shape[d] if largest else d):
            names, ways = dims[dim], size
            for other in names:
                ways *= sizes[other]
            if shape[dim] % ways == 0 and dim not in whole_dims:
                names.append(name)
                break
    return tuple(tuple(names) for names in dims)


def stored_spec(
    group: StorageGroup,
    mode: Storage,
    used: Spec,
    mesh: Mesh,
    is_pinned: bool,
) -> Spec:
    """The widest sharding of a storage group.

    Args:
        group: what is stored.
        mode: how.
        used: how the first block that reads its parameter wants it.
        mesh: the mesh.
        is_pinned: whether the user has said how its parameter is sharded.
    """
    if mode is Storage.USED:
        return used
    largest = mode is Storage.LARGEST and not is_pinned
    if largest and len(squeeze(group.shape)) < 2:
        return used
    used = ((),) * len(group.shape) if largest else used
    return extend_spec(used, group.shape, mesh, group.whole_dims, largest=largest)
