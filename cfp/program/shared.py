"""Arguments that share memory, although they are different arrays.

``jax.device_put`` copies nothing that is where it should be already: what it returns is
another array over the same buffers. If a step may overwrite one of two such arguments,
XLA ends the process (jaxlib 0.10.2 on virtual CPU devices: "Attempt to donate the same
buffer twice"). Weights and the moving average that begins with them are such arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.tree_util import tree_leaves


class Apart:
    """Gives arguments memory of their own where a step may overwrite what they share.

    To ask an array for its buffers waits for whatever makes it. So only those are
    asked that can share any: two arrays of one type whose pieces have one shape, one of
    them to be overwritten, and not both results of the step itself.
    """

    def __init__(
        self,
        avals: Sequence[jax.ShapeDtypeStruct],
        shardings: Sequence[Sharding],
        donated: Sequence[bool],
    ) -> None:
        """Takes each argument leaf's type, sharding, and whether it is overwritten."""
        self._donated = tuple(donated)
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, (aval, sharding) in enumerate(zip(avals, shardings, strict=True)):
            alike[_piece(aval, sharding)].append(i)
        self._groups = [
            group
            for group in alike.values()
            if len(group) > 1 and any(self._donated[i] for i in group)
        ]
        self._made: WeakValueDictionary[int, jax.Array] = WeakValueDictionary()

    def __call__(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves, each where the step takes it, with copies of some."""
        found = list(leaves)
        for group in self._groups:
            if all(self._is_result(leaves[i]) for i in group):
                if len({id(leaves[i]) for i in group}) == len(group):
                    continue
            first: dict[tuple[int, int], int] = {}
            for i in group:
                owners = {first.setdefault(b, i) for b in _buffers(leaves[i])} - {i}
                if any(self._donated[i] or self._donated[other] for other in owners):
                    found[i] = jnp.copy(leaves[i])
        return found

    def remember(self, results: Any) -> None:
        """Notes what the step returned: no two of these share memory."""
        self._made = WeakValueDictionary(
            {id(leaf): leaf for leaf in tree_leaves(results)}
        )

    def _is_result(self, leaf: jax.Array) -> bool:
        return self._made.get(id(leaf)) is leaf


def _piece(aval: jax.ShapeDtypeStruct, sharding: Sharding) -> Any:
    """Type and shape of what a device holds of an array; keys by their numbers'."""
    shape, dtype = tuple(sharding.shard_shape(tuple(aval.shape))), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        shape, dtype = (*shape, *data.shape), data.dtype
    return shape, jnp.dtype(dtype)


def _buffers(array: jax.Array) -> set[tuple[int, int]]:
    """(device, address) of each piece that is in this process."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return {
        (shard.device.id, shard.data.unsafe_buffer_pointer())
        for shard in array.addressable_shards
        if shard.data.size
    }
