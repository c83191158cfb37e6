"""Checks a plan's steps against the same steps as written.

The reference runs on one device, or sharded in another way (:mod:`cfp.checking.
reference`). Both sides compute in float32 at least, with the highest precision of
matrix products, so that only the order of sums differs. The check measures the effect
of rounding: the reference runs every step again from arguments that differ in their
last bit. If the plan's kernels compute in less than float32, the plan's step runs again
with the last bits of their operands and results moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import hypot, isfinite, sqrt
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure

from cfp.checking.reference import Reference
from cfp.program.calling import fixed, released
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
        relative_l2: distance to the reference, relative to its norm.
        size: L2 norm under the plan; numbers that are not finite count as 0.
        rounding: root mean square distance of results for arguments with other last
            bits, over several tries: of the reference's results, or of the plan's if
            its kernels compute in less. 0 without tries.
        change: distance to the state before the step; 0 for results that are no state.
        norms: L2 norms of the reference, and of the runs with other last bits.
        tolerance: distance that passes in a leaf that steps change enough.
        margin: allowed multiple of the effect of rounding.
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

    def with_try(self, near: Leaf, scale: float) -> Leaf:
        """The leaf, after one more result whose arguments differ in their last bits.

        Args:
            scale: of its distance, to be in terms of the reference's size.
        """
        tries = len(self.norms)  # The first norm is the reference's.
        before, now = self.rounding * sqrt(tries - 1), scale * near.relative_l2
        rounding = hypot(before, now) / sqrt(tries)
        return replace(self, rounding=rounding, norms=(*self.norms, near.size))


class Differences(list[Leaf]):
    """Differences of all leaves, the largest first; its text has the largest few.

    Attributes:
        rounded: the leaves furthest from the step without FP8, by path: state relative
            to the step's change, other results relative to their norm.
    """

    rounded: Mapping[str, float] = MappingProxyType({})

    @property
    def failures(self) -> list[Leaf]:
        """The leaves that are further off than they may be."""
        return [leaf for leaf in self if leaf.is_far and not leaf.is_undecided]

    @property
    def nearest(self) -> Leaf | None:
        """The leaf nearest to its limit, or furthest beyond.

        Leaves that rounding alone decides do not count.
        """
        decided = [leaf for leaf in self if not leaf.is_undecided]
        return max(decided, key=lambda x: x.relative_l2 / x.allowed, default=None)

    def __str__(self) -> str:
        lines = [f"{one.path or 'result'}: {one.relative_l2:.1e}" for one in self]
        more = len(lines) - _MOST_SHOWN
        lines[_MOST_SHOWN:] = [f"and {more} more, none larger"] if more > 0 else []
        return "\n".join(["Relative L2 distances, the largest first:", *lines])


_MOST_SHOWN = 5


@dataclass
class Check:
    """A plan's steps and a reference's, each from where the last one left off there.

    Both sides start every step from the reference's state, so that what a step does is
    not mixed up with what became of earlier roundings. Between runs that state and the
    reference's results are in the host's memory: beside them a model that just fits
    could not be checked.

    Attributes:
        planned: the step under a plan.
        reference: the step to compare it with.
        feedback: for each argument that is state the result that replaces it; None
            for all of it.
        agree: makes an answer the same in all processes that run the check.
        given_tolerance: in place of the one for what the plan's step computes in.
    """

    planned: CompiledStep
    reference: Reference
    feedback: Mapping[int, int | None]
    agree: Callable[[bool], bool] = bool
    given_tolerance: float | None = None
    _args: list[Any] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        """Relative L2 distance that always passes, larger if kernels use fewer bits."""
        if self.given_tolerance is not None:
            return self.given_tolerance
        usual = DOUBLE_TOLERANCE if self.planned.double else FULL_TOLERANCE
        return LOW_TOLERANCE if self.planned.narrow else usual

    def start(self, args: Sequence[Any]) -> None:
        """Copies the arguments, which the plan's step is about to overwrite."""
        self._args = list(args)
        # One after another: of all that is copied a device has one leaf at a time.
        self._args = self._each(lambda leaf: in_host(fresh(self._on_reference(leaf))))

    def step(self, tell: Callable[[str], None] = lambda _: None) -> Differences:
        """Runs a step on both sides.

        If a leaf exceeds the tolerance, rounding is measured until it explains the
        difference, as the mean square of few tries may be far too small.

        Args:
            tell: called with a text about each run.
        """
        tell("running the reference")
        expected = in_host(self._results(self.reference.step, fresh))
        before = compare(self._before(expected), expected)
        changes = {x.path: x.relative_l2 for x in before}
        rounded = self._rounded(expected, changes, tell)
        tell("running the plan's step, and comparing results")
        found = self._results(self.planned, fresh)
        is_narrow = self.planned.perturbed is not None
        made = Differences(
            replace(
                leaf,
                change=changes[leaf.path],
                tolerance=self.tolerance,
                margin=NARROW_MARGIN if self.planned.narrow else ROUNDING_MARGIN,
            )
            for leaf in compare(found, expected)
        )
        # The runs to come are of the side that rounds most.
        usual = in_host(found) if is_narrow else expected
        del found
        for seed in range(NUDGES + 1):
            if seed == NUDGES or self.agree(not made.failures):
                break
            tell(f"measuring rounding, run {seed + 1} of at most {NUDGES}")
            noisy, change = self._noisy, partial(nudge, seed=seed)
            near = {x.path: x for x in compare(self._results(noisy, change), usual)}
            # Distances are in terms of the reference's size: else a result that is
            # wrong, and nothing but rounding, would be taken for one of which nothing
            # else can be expected.
            made = Differences(
                x.with_try(
                    near[x.path],
                    (x.size or 1.0) / (x.norms[0] or 1.0) if is_narrow else 1.0,
                )
                for x in made
            )
        made.rounded = rounded
        feed_back(self._args, expected, self.feedback)
        return made

    @cached_property
    def _noisy(self) -> CompiledStep:
        """The step that tells what rounding does."""
        if self.planned.perturbed is None:
            return self.reference.step
        return self.planned.perturbed().compile()

    def _rounded(
        self, expected: Any, changes: Mapping[str, float], tell: Callable[[str], None]
    ) -> dict[str, float]:
        """The largest distances from the step without FP8: of state, and of others."""
        if (plain := self.reference.unrounded) is None:
            return {}
        tell("running the step without FP8")
        found = compare(expected, self._results(plain, fresh))
        off = sorted((d.relative_l2 / (changes[d.path] or 1), d.path) for d in found)
        return dict({changes[n] > 0: (n, distance) for distance, n in off}.values())

    def _results(self, step: CompiledStep, change: Callable[[Any], Any]) -> Any:
        """Results of a step for arguments like these, each where the step has it."""
        shardings = iter(step.in_shardings)
        # One after another: a whole state beside the changed one would leave its memory
        # in two parts, and neither may have room for what the step needs at once.
        args = self._each(lambda leaf: put(change(on_device(leaf)), next(shardings)))
        made = fixed(step(*args))
        is_here = all(leaf.is_fully_addressable for leaf in tree_leaves(made))
        return made if is_here else jax.tree.map(self._on_reference, made)

    def _on_reference(self, leaf: Any) -> jax.Array:
        """An array whole where the reference runs, unless that is sharded."""
        devices = self.reference.step.out_shardings[0].device_set
        if len(devices) > 1:
            return jnp.asarray(leaf)
        [device] = devices
        is_array = isinstance(leaf, jax.Array)
        return fetch(leaf, device) if is_array else jax.device_put(leaf, device)

    def _each(self, change: Callable[[Any], Any]) -> list[Any]:
        """Changes the leaves of the arguments that are not static."""
        static = {key for key, _ in self.reference.step.step.static}
        return [
            a if i in static else released(jax.tree.map(change, fixed(a)))
            for i, a in enumerate(self._args)
        ]

    def _before(self, result: Any) -> Any:
        """Replaces the state in a step's result by the state before the step."""
        for position, place in self.feedback.items():
            if place is None:
                return self._args[position]
        parts = dict(enumerate(result)) if self.feedback else {0: result}
        parts |= {place: self._args[i] for i, place in self.feedback.items()}
        leaves = [leaf for part in parts.values() for leaf in tree_leaves(fixed(part))]
        return jax.tree.unflatten(tree_structure(result), leaves)


def fresh(leaf: jax.Array) -> jax.Array:
    """Copies an array to memory of its own, in float32 at least.

    A moved array may share memory that a step is about to overwrite.
    """
    return with_dtype(jnp.copy(on_device(leaf)), wide_dtype(leaf.dtype))


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


def compare(found: Any, expected: Any) -> Differences:
    """Computes relative L2 distances of all leaves, largest first; NaN is infinite.

    Raises:
        ValueError: structures or shapes differ.
    """
    found, expected = fixed(found), fixed(expected)
    have, want = _by_path(found), _by_path(expected)
    if tree_structure(found) != tree_structure(expected):
        odd = [f"{x or 'the result'} is not expected" for x in have if x not in want]
        odd += [f"{x or 'the result'} is not found" for x in want if x not in have]
        odd += [f"{tree_structure(found)} in place of {tree_structure(expected)}"]
        raise ValueError(
            f"results of different structures cannot be compared: {odd[0]}"
        )
    differences = []
    for name, leaf in want.items():
        one, other = (jnp.asarray(on_device(x)) for x in (have[name], leaf))
        if one.shape != other.shape:
            raise ValueError(
                f"results of different shapes cannot be compared: {name} is "
                f"{one.shape}, and {other.shape} expected"
            )
        # One after another: what is moved to be compared is let go of at once.
        with jax.enable_x64(True):
            figures = _measured(*brought_together(one, other))
        distance, size, norm = map(float, figures)
        leaf = Leaf(path=name, relative_l2=distance, size=size, norms=(norm,))
        differences.append(leaf)
    return Differences(sorted(differences, key=lambda x: -x.relative_l2))


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def brought_together(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Puts two arrays on the same devices, those of the sharded one.

    JAX splits an array of one device by copies between devices, but joins parts through
    the host.
    """
    if other.sharding.num_devices == 1:
        return one, jax.device_put(other, one.sharding)
    return jax.device_put(one, other.sharding), other


# One program for both: it is compiled for each shape.
@jax.jit
def _measured(have: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    """Computes the relative L2 distance of two arrays, and the L2 norm of each."""
    a, b = _in_double(have), _in_double(want)
    same = jnp.isfinite(b) | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    error, size, norm = (
        jnp.sqrt(jnp.square(jnp.abs(jnp.where(jnp.isfinite(of), x, 0))).sum())
        for of, x in ((b, a - b), (a, a), (b, b))
    )
    relative = jnp.where(norm > 0, error / norm, error)
    is_known = same.all() & jnp.isfinite(error)
    return jnp.where(is_known, relative, jnp.inf), size, norm


def _in_double(x: jax.Array) -> jax.Array:
    """An array in 64 bits, in which no square of a float32 overflows."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)
