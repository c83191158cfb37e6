"""Arguments that share memory, although they are different arrays.

``jax.device_put`` copies nothing that is where it should be already: what it returns is
another array over the same buffers. If a step may overwrite one of two such arguments,
XLA ends the process (jaxlib 0.10.2 on virtual CPU devices: "Attempt to donate the same
buffer twice"). Weights and the moving average that begins with them are such arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding


class Apart:
    """Gives arguments memory of their own where a step may overwrite what they share.

    To ask an array for its buffers waits for whatever makes it. So only those are
    asked that can share any: two arrays of one type whose pieces have one shape, one of
    them to be overwritten, and one of them not known from the step's latest call.
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
        self._group_of = {
            i: group
            for group in alike.values()
            if len(group) > 1 and any(self._donated[i] for i in group)
            for i in group
        }

    def separate(self, leaves: list[jax.Array], unknown: Iterable[int]) -> list[int]:
        """Puts copies into a list of placed leaves, where memory is shared.

        Args:
            leaves: all of them.
            unknown: which may share memory with others; of the rest no two do.

        Returns:
            Which leaves are copies now.
        """
        groups = {id(group): group for i in unknown if (group := self._group_of.get(i))}
        copied = []
        for group in groups.values():
            first: dict[tuple[int, int], int] = {}
            for i in group:
                owners = {first.setdefault(b, i) for b in _buffers(leaves[i])} - {i}
                if any(self._donated[i] or self._donated[other] for other in owners):
                    leaves[i] = jnp.copy(leaves[i])
                    copied.append(i)
        return copied


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
