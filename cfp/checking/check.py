"""Checks a plan's steps against the same steps as they are written.

These run on one device, or, where it has no room for them, sharded in another way
(:mod:`cfp.checking.reference`). Both compute in float32 where the step computes in
less, with the highest precision of matrix products: what is left to differ is the order
of sums in float32. It is measured, not guessed: the reference runs every step again,
from arguments that differ in their last bit. Where the plan's kernels compute in less,
the plan's step does, with the last bits of what they read and return moved, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure

from cfp.checking.reference import Reference
from cfp.program.fixed import fixed, released
from cfp.program.memory import fetch, in_host, on_device, put
from cfp.program.widen import wide_dtype, with_dtype
from cfp.runtime.execute import CompiledStep

FULL_TOLERANCE = 1e-5
LOW_TOLERANCE = 1e-2
# Of steps that compute in float64 throughout.
DOUBLE_TOLERANCE = 1e-12

# Whatever is asked for, and whatever rounding does: a leaf of zeros is off by 1.
MOST_ALLOWED = 0.5

# An optimizer that divides gradients by their own size makes large what was rounding:
# where a gradient is all but zero, no two orders of summation agree. So a leaf may be
# off by this many times what the last bit of the arguments does to it.
ROUNDING_MARGIN = 10.0

# Where kernels compute in less, a leaf may be off by so many times what half of the
# last bit of all that they read and return does to it: they round by up to as much.
# decisions.md, "Rounding is measured where it happens".
NARROW_MARGIN = 2.0

# What is nothing but rounding may be larger or smaller by as much: the gradient of a
# bias before a normalization, which is zero, was 11 times as large on four devices.
SIZE_MARGIN = 100.0

# Where a step hardly changes a leaf of the state, it may be off by less: by this many
# times the tolerance, of the change. Otherwise a small step would hide what it does
# wrong.
CHANGE_MARGIN = 1000.0

# From how many arguments in their neighbourhood rounding is measured, at most, before a
# check fails. Where it is one number of a leaf that varies, one try may happen to be a
# hundred times too small.
NUDGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of a step's results under a plan, beside the reference's.

    Attributes:
        relative_l2: distance from the reference's, relative to its norm, as the others.
        size: L2 norm under the plan.
        rounding: distance of results for arguments whose last bits are others, as a
            root mean square of several tries: of the reference's, or of the plan's if
            kernels of it compute in less. 0 where nothing had to be tried.
        change: distance of the state before the step; 0 for what is no state.
        norms: L2 norms of the reference, and of the runs that tell what rounding does.
        tolerance: what always passes in a leaf that steps change enough.
        margin: how many times what rounding does is allowed.
    """

    path: str
    relative_l2: float
    size: float = 0.0
    rounding: float = 0.0
    change: float = 0.0
    norms: tuple[float, ...] = ()
    tolerance: float = FULL_TOLERANCE
    margin: float = ROUNDING_MARGIN

    @property
    def _noise(self) -> float:
        return self.margin * self.rounding if isfinite(self.rounding) else 0.0

    @property
    def allowed(self) -> float:
        """The allowed distance, less than that of a leaf of zeros."""
        share = min(1.0, CHANGE_MARGIN * self.change) or 1.0
        return min(max(self.tolerance * share, self._noise), MOST_ALLOWED)

    @property
    def is_far(self) -> bool:
        """True if the leaf is further off than allowed; a not-a-number is."""
        return not self.relative_l2 <= self.allowed

    @property
    def is_undecided(self) -> bool:
        """True if rounding alone decides a leaf, and it is about as large as it was.

        Such as the moments of a parameter whose gradient is zero: there is nothing to
        compare but their size.
        """
        if not (self.is_far and self.norms and self._noise >= MOST_ALLOWED):
            return False
        least, most = min(self.norms) / SIZE_MARGIN, max(self.norms) * SIZE_MARGIN
        return least <= self.size <= most


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step under a plan, and its reference: all leaves, the furthest off first.

    Attributes:
        rounded: what is furthest from the step without FP8, by path: of the state by
            what the step changes, of all else relative.
    """

    leaves: tuple[Leaf, ...] = ()
    rounded: Mapping[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[Leaf]:
        """The leaves that are further off than they may be."""
        return [leaf for leaf in self.leaves if leaf.is_far and not leaf.is_undecided]

    @property
    def nearest(self) -> Leaf | None:
        """The leaf nearest to how far off it may be, or furthest beyond.

        Not of those that rounding alone decides.
        """
        decided = [leaf for leaf in self.leaves if not leaf.is_undecided]
        return max(decided, key=lambda x: x.relative_l2 / x.allowed, default=None)


class Check:
    """A plan's steps and a reference's, each from where the last one left off there.

    Both sides start every step from the reference's state, so that what a step does is
    not mixed up with what became of earlier roundings. Between runs that state and the
    reference's results are in the host's memory: beside them a model that just fits
    could not be checked.

    Attributes:
        tolerance: relative L2 distance that always passes: more than float32's where
            the step calls kernels that compute in less.
    """

    def __init__(
        self,
        planned: CompiledStep,
        reference: Reference,
        feedback: Mapping[int, int | None],
        agree: Callable[[bool], bool] = bool,
        tolerance: float | None = None,
    ) -> None:
        """Takes both sides as :func:`cfp.checking.reference.both_sides` compiles them.

        Args:
            planned: the step under a plan.
            reference: the step to compare it with.
            feedback: for each argument that is state the result that replaces it; None
                for all of it.
            agree: makes an answer the same in all processes that run the check.
            tolerance: in place of the one for what the plan's step computes in.
        """
        self.planned = planned
        self.reference = reference
        self._feedback = feedback
        self._agree = agree
        self._static = {key for key, _ in reference.step.step.static}
        self._args: list[Any] = []
        self._perturbed: CompiledStep | None = None
        self._margin = NARROW_MARGIN if planned.narrow else ROUNDING_MARGIN
        usual = DOUBLE_TOLERANCE if planned.double else FULL_TOLERANCE
        usual = LOW_TOLERANCE if planned.narrow else usual
        self.tolerance = usual if tolerance is None else tolerance

    def start(self, args: Sequence[Any]) -> None:
        """Copies the arguments, which the plan's step is about to overwrite."""
        self._args = list(args)
        shardings = iter(self.reference.step.in_shardings)

        # One after another: of all that is copied a device has one leaf at a time.
        def kept(leaf: Any) -> Any:
            leaf, sharding = self._beside_reference(leaf), next(shardings)
            if sharding.is_fully_addressable:
                leaf = jax.device_put(leaf, sharding)
            return in_host(fresh(leaf))

        self._args = self._each(partial(jax.tree.map, kept))

    def step(self, tell: Callable[[str], None] = lambda _: None) -> Comparison:
        """Runs a step on both sides.

        Rounding is measured where leaves are further off than always passes, until it
        explains the difference: of few tries the mean square may be far too small.

        Args:
            tell: called with what is being done.
        """
        tell("running the reference")
        expected = self._reference(fresh)
        own = {d.path: d.size for d in compare(expected, expected)}
        expected = in_host(expected)  # The other runs need the room.
        before = compare(self._before(expected), expected)
        changed = {d.path: d.relative_l2 for d in before}
        rounded = self._rounded(expected, changed, tell)
        tell("running the plan's step, and comparing results")
        found = self._under_plan(self.planned, fresh)
        differences = compare(found, expected)
        # The runs to come are of the side that rounds most. Their distances are in
        # terms of the reference's size: else a result that is wrong, and nothing but
        # rounding, would be taken for one of which nothing else can be expected.
        is_narrow = self.planned.perturbed is not None
        usual = in_host(found) if is_narrow else expected
        del found
        near: dict[str, list[Difference]] = {path: [] for path in own}

        def leaf(d: Difference) -> Leaf:
            scale = (d.size or 1.0) / (own[d.path] or 1.0) if is_narrow else 1.0
            squares = [one.relative_l2**2 for one in near[d.path]]
            return Leaf(
                path=d.path,
                relative_l2=d.relative_l2,
                size=d.size,
                rounding=scale * sqrt(sum(squares) / max(len(squares), 1)),
                change=changed[d.path],
                norms=(own[d.path], *(one.size for one in near[d.path])),
                tolerance=self.tolerance,
                margin=self._margin,
            )

        for seed in range(NUDGES + 1):
            made = Comparison(tuple(map(leaf, differences)), rounded)
            if seed == NUDGES or self._agree(not made.failures):
                break
            tell(f"measuring rounding, run {seed + 1} of at most {NUDGES}")
            for d in compare(self._nudged(seed, tell), usual):
                near[d.path].append(d)
        feed_back(self._args, expected, self._feedback)
        return made

    def _rounded(
        self, expected: Any, changed: Mapping[str, float], tell: Callable[[str], None]
    ) -> dict[str, float]:
        """The largest distances from the step without FP8: of state, and of others."""
        if (plain := self.reference.unrounded) is None:
            return {}
        tell("running the step without FP8")
        found = compare(expected, on_device(plain(*self._each(fresh))))
        off = sorted((d.relative_l2 / (changed[d.path] or 1), d.path) for d in found)
        return dict({changed[n] > 0: (n, distance) for distance, n in off}.values())

    def _under_plan(self, step: CompiledStep, change: Callable[[Any], Any]) -> Any:
        """Results of a step under the plan for arguments like these.

        The arguments are where the plan has them: whole copies take more room.
        """
        shardings = iter(self.planned.in_shardings)

        def placed(leaf: Any) -> jax.Array:
            return put(change(leaf), next(shardings))

        made = on_device(fixed(step(*self._each(partial(jax.tree.map, placed)))))
        if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(made)):
            return made
        return self._beside_reference(made)

    def _reference(self, change: Callable[[Any], Any]) -> Any:
        """Results of the reference's step for arguments like these."""
        return on_device(self.reference.step(*self._each(change)))

    def _beside_reference(self, tree: Any) -> Any:
        """A tree's arrays whole where the reference runs, unless it is sharded."""
        tree, devices = fixed(tree), self.reference.step.out_shardings[0].device_set
        if len(devices) > 1:
            return jax.tree.map(jnp.asarray, tree)
        [device] = devices

        def moved(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return fetch(leaf, device)
            return jax.device_put(leaf, device)

        return jax.tree.map(moved, tree)

    def _nudged(self, seed: int, tell: Callable[[str], None]) -> Any:
        """Results for arguments near these, of the side that rounds most."""

        def near(leaf: Any) -> jax.Array:
            return nudge(on_device(leaf), seed=seed)

        # One after another: a whole state beside the changed one would leave its memory
        # in two parts, and neither may have room for what the step needs at once.
        if self.planned.perturbed is None:
            return self._reference(partial(jax.tree.map, near))
        if self._perturbed is None:
            tell("compiling the plan's step with its kernels' values perturbed")
            self._perturbed = self.planned.perturbed()
        return self._under_plan(self._perturbed, near)

    def _each(self, change: Callable[[Any], Any]) -> list[Any]:
        return [
            a if i in self._static else released(change(fixed(a)))
            for i, a in enumerate(self._args)
        ]

    def _before(self, result: Any) -> Any:
        """A step's result with the state as it was before; the rest as it is."""
        for position, place in self._feedback.items():
            if place is None:
                return self._args[position]
        parts = dict(enumerate(result)) if self._feedback else {0: result}
        parts |= {place: self._args[i] for i, place in self._feedback.items()}
        leaves = [leaf for part in parts.values() for leaf in jax.tree.leaves(part)]
        return jax.tree.unflatten(jax.tree.structure(result), leaves)


def fresh(tree: Any) -> Any:
    """Arrays in devices' memory of their own, in float32 if they are in less.

    What is moved alone may share memory with what a step is about to overwrite.
    """

    def copied(leaf: Any) -> jax.Array:
        return with_dtype(jnp.copy(on_device(leaf)), wide_dtype(leaf.dtype))

    return jax.tree.map(copied, tree)


@jax.jit
def nudge(x: jax.Array, seed: int = 0) -> jax.Array:
    """Moves every float of an array one bit up or down, at random."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # JAX's own generator takes long to compile.
    key = jax.random.key(seed, impl="rbg")
    signs = jax.random.rademacher(key, x.shape, x.dtype)
    return (x * (1 + signs * jnp.finfo(x.dtype).eps)).astype(x.dtype)


def feed_back(args: list[Any], result: Any, feedback: Mapping[int, int | None]) -> None:
    """Puts what a step returned in place of the arguments that are state."""
    for position, place in feedback.items():
        args[position] = result if place is None else result[place]


# --------------------------------------------------------------------------- distances

# Results of whole models are tens of gigabytes: they stay on the devices, and one
# number of each leaf comes back.


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of a result from the reference's, of one leaf.

    Attributes:
        size: the result's L2 norm; what is not finite counts as 0.
    """

    path: str
    relative_l2: float
    size: float = field(default=0.0, compare=False)


class Differences(list[Difference]):
    """Differences of all leaves, the largest first; as text the largest few."""

    def __str__(self) -> str:
        lines = [f"{one.path or 'result'}: {one.relative_l2:.1e}" for one in self]
        more = len(lines) - _MOST_SHOWN
        lines[_MOST_SHOWN:] = [f"and {more} more, none larger"] if more > 0 else []
        return "\n".join(["Relative L2 distances, the largest first:", *lines])


_MOST_SHOWN = 5


def compare(found: Any, expected: Any) -> Differences:
    """Relative L2 distances of all leaves, largest first; NaN counts as infinite.

    Raises:
        ValueError: structures or shapes differ.
    """
    found, expected = fixed(found), fixed(expected)
    pairs, tree = tree_flatten_with_path(expected)
    if tree_structure(found) != tree:
        raise ValueError(
            "results of different structures cannot be compared: "
            f"{_first_difference(found, expected)}"
        )
    differences = []
    for (path, want), have in zip(pairs, tree_leaves(found), strict=True):
        name = keystr(path, simple=True, separator="/")
        have, want = (jnp.asarray(on_device(leaf)) for leaf in (have, want))
        if have.shape != want.shape:
            raise ValueError(
                f"results of different shapes cannot be compared: {name} is "
                f"{have.shape}, and {want.shape} expected"
            )
        # One after another: what is moved to be compared is let go of at once.
        distance, size = _measured(*brought_together(have, want))
        differences.append(Difference(name, float(distance), float(size)))
    return Differences(sorted(differences, key=lambda d: -d.relative_l2))


def _first_difference(found: Any, expected: Any) -> str:
    """Names the first leaf, in order of paths, that only one of two pytrees has."""
    paths = [
        [keystr(path, simple=True, separator="/") for path, _ in leaves]
        for leaves, _ in map(tree_flatten_with_path, (found, expected))
    ]
    for have, want in itertools.zip_longest(*paths):
        if have != want:
            is_more = want is None or (have is not None and have not in paths[1])
            name, what = (have, "not expected") if is_more else (want, "not found")
            return f"{name or 'the result'} is {what}"
    return f"{tree_structure(found)} in place of {tree_structure(expected)}"


def brought_together(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Puts two arrays on the same devices: those of the one that has several.

    JAX splits an array of one device there and copies the parts from device to device;
    to join parts it takes them through the host.
    """
    if other.sharding.num_devices == 1:
        return one, jax.device_put(other, one.sharding)
    return jax.device_put(one, other.sharding), other


# One program for both: it is compiled for each shape.
@jax.jit
def _measured(have: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The relative L2 distance of two arrays, and the first's L2 norm."""
    a, b = _as_float(have), _as_float(want)
    finite = jnp.isfinite(b)
    same = finite | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    unit, scale = _norm(jnp.where(finite, b, 0))
    error_unit, error = _norm(jnp.where(finite, a - b, 0))
    relative = jnp.where(
        scale > 0, (error_unit / unit) * (error / scale), error_unit * error
    )
    distance = jnp.where(same.all() & jnp.isfinite(error), relative, jnp.inf)
    own_unit, own = _norm(jnp.where(jnp.isfinite(a), a, 0))
    return distance, own_unit * own


def _norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L2 norm, as a unit and how many of it, so that no square overflows."""
    size = jnp.abs(x)
    # The compiler may multiply by the reciprocal, which has to be held, too.
    most = float(jnp.finfo(size.dtype).max) ** 0.75
    unit = jnp.clip(size.max(initial=0), 1 / most, most)
    return unit, jnp.sqrt(jnp.square(size / unit).sum())


def _as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    # Types of 8 bits and less are promoted to nothing.
    return x if wide else x.astype(jnp.float32)
