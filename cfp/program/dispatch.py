"""Passes a call's arguments to a compiled step at little cost.

In a training loop a step takes its last results, and a batch. Last results, and
arguments passed before and not overwritten, have the right type, sharding and memory. A
step keeps weak references to these expected arrays, and examines only other objects.

Of arguments that share memory, later ones are copied if the step may overwrite one
(:class:`Apart`), such as weights and a moving average that begins with them:
``jax.device_put`` may return another array over the same buffers. Otherwise XLA ends
the process (jaxlib 0.10.2 on virtual CPU devices: "Attempt to donate the same buffer
twice").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import compress
from operator import call, is_not, methodcaller
from typing import Any, NamedTuple
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import tree_structure, treedef_is_leaf

from cfp.errors import PlanMismatch
from cfp.program.memory import put
from cfp.program.step import FlatStep, abstract


class Apart:
    """Copies arguments that share memory which a step may overwrite.

    Reading an array's buffers waits for its computation. So buffers are read only in
    groups of arrays with shards of equal type and shape. A group has a donated array,
    and one that is unknown from the step's latest call.
    """

    def __init__(
        self,
        avals: Sequence[jax.ShapeDtypeStruct],
        shardings: Sequence[Sharding],
        donated: Sequence[bool],
    ) -> None:
        """Takes for each argument leaf its type, its sharding, and if it is donated."""
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
        """Copies leaves that share donated memory with earlier ones; returns indices.

        Args:
            unknown: indices of leaves that may share memory with any leaf; no two of
                the others do.
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
    """Returns (shape, dtype) of an array's shards; for random keys, of their data."""
    shape, dtype = tuple(sharding.shard_shape(tuple(aval.shape))), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        shape, dtype = (*shape, *data.shape), data.dtype
    return shape, jnp.dtype(dtype)


def _buffers(array: jax.Array) -> set[tuple[int, int]]:
    """Returns (device id, address) of each shard in this process, except empty ones."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return {
        (shard.device.id, shard.data.unsafe_buffer_pointer())
        for shard in array.addressable_shards
        if shard.data.size
    }


_LOOKS = "shape", "dtype", "weak_type"

# Returns the array that is expected at an index, or None.
_Expected = Callable[[], Any]

_is_deleted = methodcaller("is_deleted")

# For an array that was donated to another step, JAX ends the process until 0.11.0, and
# raises an error from 0.11.2 on. So each call checks before (docs/decisions.md, "A call
# asks for deleted arguments only where JAX does not").
_ASKS_FIRST = jax.__version_info__ < (0, 11, 2)


def _nothing() -> None:
    """Returns None, in place of a weak reference to an array."""


class _Memory(NamedTuple):
    """Weak references after a call, to arrays that do not share donated memory.

    Attributes:
        expected: for each argument leaf the array that needs no examination.
        kept: for each argument leaf the passed array, if not donated, moved or copied.
        results: results of the step.
        order: for each argument leaf the index in ``kept + results`` of `expected`.
        foreign: indices of argument leaves that were new, not donated, and no results.
    """

    expected: Sequence[_Expected]
    kept: Sequence[_Expected]
    results: Sequence[_Expected]
    order: Sequence[int]
    foreign: frozenset[int]


class Look(NamedTuple):
    """A call's argument leaves; `new` has indices of unexpected leaves."""

    leaves: Sequence[Any]
    new: Sequence[int]
    memory: _Memory


class Placed(NamedTuple):
    """The argument leaves of a call in the step's shardings.

    Attributes:
        leaves: passed arrays, or copies.
        changed: indices of `Look.new`, and of leaves that were copied.
        kept: indices in `changed` of passed arrays that the step does not overwrite.
        memory: references of the last call, for `remember` to update.
    """

    leaves: Sequence[jax.Array]
    changed: Collection[int]
    kept: frozenset[int]
    memory: _Memory


class Dispatch:
    """Checks arguments of a compiled step's calls, and moves them to its shardings."""

    def __init__(
        self,
        step: FlatStep,
        shardings: Sequence[NamedSharding],
        check: Callable[[FlatStep], None],
    ) -> None:
        """`check` gets the step with a call's other types, and raises PlanMismatch."""
        self._step, self._check = step, check
        self._shardings = tuple(shardings)
        self._apart = Apart(step.avals, self._shardings, step.donated)
        self._all = range(len(step.avals))
        # Type, shape and dtype of each index's last leaf of the right type.
        self._looks: list[Any] = [None for _ in self._all]
        # Replaced as a whole, so that several threads may call the step.
        nothing = (_nothing,) * len(step.avals)
        self._memory = _Memory(nothing, nothing, (), self._all, frozenset())

    def look(self, leaves: Sequence[Any]) -> Look:
        """Finds the leaves that are not the array expected at their index."""
        memory = self._memory
        there = map(call, memory.expected)
        return Look(leaves, [*compress(self._all, map(is_not, there, leaves))], memory)

    def has_leaves(self, look: Look) -> bool:
        """True if each new leaf is a leaf for JAX, too, and not a container."""
        leaves = look.leaves
        return all(treedef_is_leaf(tree_structure(leaves[i])) for i in look.new)

    def has_types(self, look: Look) -> bool:
        """True if the new leaves have the planned shapes, dtypes and weak types."""
        for i in look.new:
            leaf = look.leaves[i]
            looks = type(leaf), *(getattr(leaf, name, None) for name in _LOOKS)
            if looks != self._looks[i]:
                if not treedef_is_leaf(tree_structure(leaf)):
                    return False
                if abstract(leaf, self._step.arg_names[i]) != self._step.avals[i]:
                    return False
                self._looks[i] = looks
        return True

    def place(self, look: Look) -> Placed:
        """Moves leaves to the step's shardings, and copies shared donated memory.

        Raises:
            PlanMismatch: a leaf is deleted, a ShapeDtypeStruct, or of another type.
            StepNotTraceable: a leaf is a tracer or no array.
        """
        leaves, new, memory = look
        placed, changed = leaves, new
        kept: frozenset[int] = frozenset()
        if new:
            placed = list(leaves)
            for i in new:
                placed[i] = self._placed(i, leaves)
            there = {i for i in new if placed[i] is leaves[i]}
            memory, strange = self._looked_up(look, there)
            copied = self._apart.separate(placed, strange)
            changed = {*new, *copied}
            donated = self._step.donated
            kept = frozenset(i for i in there.difference(copied) if not donated[i])
        if _ASKS_FIRST:
            self.check_not_deleted(placed)
        return Placed(placed, changed, kept, memory)

    def check_not_deleted(self, leaves: Sequence[jax.Array]) -> None:
        """Raises PlanMismatch if an argument is deleted, as by donation to a step."""
        if any(map(_is_deleted, leaves)):
            raise self._gone([*map(_is_deleted, leaves)].index(True))

    def remember(self, placed: Placed, results: Sequence[jax.Array]) -> None:
        """Stores a call's arguments and results as expected by the next call."""
        memory = placed.memory
        kept = memory.kept
        if placed.changed:
            kept = list(kept)
            for i in placed.changed:
                kept[i] = ref(placed.leaves[i]) if i in placed.kept else _nothing
        made = [*map(ref, results)]
        known = [*kept, *made]
        expected = [*map(known.__getitem__, memory.order)]
        self._memory = memory._replace(expected=expected, kept=kept, results=made)

    def _placed(self, i: int, leaves: Sequence[Any]) -> jax.Array:
        leaf, names, aval = leaves[i], self._step.arg_names, self._step.avals[i]
        is_array = isinstance(leaf, jax.Array)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise PlanMismatch(
                f"Argument {names[i]!r} is a ShapeDtypeStruct. Call steps with arrays."
            )
        found = abstract(leaf, names[i])  # First: a tracer has no `is_deleted`.
        if is_array and leaf.is_deleted():
            raise self._gone(i)
        if (found.shape, found.dtype) != (aval.shape, aval.dtype):
            self._check(replace(self._step, avals=tuple(map(abstract, leaves, names))))
        if is_array and leaf.sharding == self._shardings[i]:
            return leaf
        if isinstance(leaf, np.ndarray) and self._shardings[i].is_fully_addressable:
            leaf = np.asarray(leaf, aval.dtype)
        elif not is_array:
            leaf = jnp.asarray(leaf, aval.dtype)
        return put(leaf, self._shardings[i])

    def _gone(self, i: int) -> PlanMismatch:
        return PlanMismatch(
            f"The array of argument {self._step.arg_names[i]!r} is gone: it was "
            "donated to a step (donate_argnums) or deleted. Return its new value from "
            "the step and pass the value to the next call, or do not donate it."
        )

    def _looked_up(self, look: Look, there: set[int]) -> tuple[_Memory, Sequence[int]]:
        """Returns updated references, and indices of new leaves that may share memory.

        If leaf i was the last call's result j, the next may expect its result j at i.
        `there` has indices of new leaves that were not moved.
        """
        _, new, memory = look
        results = memory.results
        if memory.foreign.issuperset(new) and 4 * len(new) <= len(results):
            return memory, new
        order, foreign, strange = list(memory.order), set(memory.foreign), []
        place = {id(one()): j for j, one in enumerate(results, len(order))}
        for i in new:
            order[i] = i
        taken = set(order)
        for i in new:
            j = place.get(id(look.leaves[i])) if i in there else None
            if j is None or j in taken:
                strange.append(i)
                if not self._step.donated[i]:
                    foreign.add(i)
            else:
                order[i] = j
                taken.add(j)
                foreign.discard(i)
        return memory._replace(order=order, foreign=frozenset(foreign)), strange
