"""Compares results of a plan's steps with the same steps without the plan.

The reference runs on one device, without sharding. If it does not fit there, a preset
shards it over all devices, differently from the plan. If the step's code names several
devices, it runs on the plan's mesh with unsharded arguments.

Kernels apart, both sides compute in float32 at least, with the highest precision of
matrix products, so that only the order of sums differs. If results differ too much, the
check measures the effect of rounding: it repeats the reference's step with arguments
changed in their last bit. If kernels of the plan compute in less than float32, it
repeats the plan's step instead, and changes the kernels' operands and results, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import hypot, inf, isfinite, sqrt
from operator import eq
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.errors import CfpError, StepNotTraceable
from cfp.passes import analyze_step
from cfp.plan.execute import CompiledStep, LoweredStep, load_or_lower
from cfp.plan.plan import Plan
from cfp.printable import counted, format_bytes
from cfp.profiling.builder import (
    CompilePool,
    compiled_bytes,
    default_threads,
    is_out_of_memory,
)
from cfp.profiling.record import MEMORY_SHARE
from cfp.program.calling import fixed, released, together
from cfp.program.constrain import Constraints
from cfp.program.memory import fetch, in_host, on_device, put
from cfp.program.step import FlatStep
from cfp.program.trace import OTHER_DEVICES
from cfp.program.widen import wide_dtype, with_dtype
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel

FULL_TOLERANCE = 1e-5
LOW_TOLERANCE = 1e-2
# For steps that compute in float64 throughout.
DOUBLE_TOLERANCE = 1e-12

# Largest distance that may ever pass; a leaf of zeros has distance 1.
MOST_ALLOWED = 0.5

# Allowed multiple of the distance that last-bit changes of the arguments cause.
# Optimizers that divide gradients by their size amplify rounding: with gradients near
# zero, no two orders of summation agree.
ROUNDING_MARGIN = 10.0

# The same if kernels compute in less than float32, for changes of half a last bit in
# their operands and results. decisions.md, "Rounding is measured where it happens".
NARROW_MARGIN = 2.0

# Allowed ratio of norms of a leaf that consists of rounding. The gradient of a bias
# before a normalization is zero, and was 11 times as large on four devices.
SIZE_MARGIN = 100.0

# If a step changes a leaf little, the allowed distance is the tolerance times this
# times the relative change. Otherwise a small step would hide its errors.
CHANGE_MARGIN = 1000.0

# Most repetitions to measure rounding before a check fails. If a single number of a
# leaf varies, one repetition may measure a hundredth of the effect.
NUDGES = 16

_MOST_SHOWN = 5

# -------------------------------------------------------------------------- distances


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Comparison of a leaf of a step's results with the reference's leaf.

    Attributes:
        relative_l2: L2 distance to the reference / its norm (if not 0); may be inf.
        size: L2 norm under the plan; numbers that are not finite count as 0.
        rounding: root mean square relative distance between usual results and those of
            repetitions with other last bits; 0 without repetitions.
        change: state's relative change in the step; None if no state, or same integers.
        norms: L2 norms of the reference, and of the repetitions.
        tolerance: distance that passes in a leaf that steps change enough.
        margin: allowed multiple of `rounding`.
    """

    path: str
    relative_l2: float
    size: float = 0.0
    rounding: float = 0.0
    change: float | None = None
    norms: tuple[float, ...] = ()
    tolerance: float = FULL_TOLERANCE
    margin: float = ROUNDING_MARGIN

    @property
    def _noise(self) -> float:
        return self.margin * self.rounding if isfinite(self.rounding) else 0.0

    @property
    def allowed(self) -> float:
        """Allowed `relative_l2`, by tolerance, change and rounding; at most 0.5."""
        share = min(1.0, CHANGE_MARGIN * (self.change or 0.0)) or 1.0
        return min(max(self.tolerance * share, self._noise), MOST_ALLOWED)

    @property
    def is_far(self) -> bool:
        """True if the distance exceeds the allowed one, or is NaN."""
        return not self.relative_l2 <= self.allowed

    @property
    def is_undecided(self) -> bool:
        """True if `is_far`, but mostly rounding, with a norm in the range of `norms`.

        Then `margin * rounding` is 0.5 or more, as for moments of a parameter whose
        gradient is zero. A factor of 100 widens the range on both sides.
        """
        if not (self.is_far and self.norms and self._noise >= MOST_ALLOWED):
            return False
        least, most = min(self.norms) / SIZE_MARGIN, max(self.norms) * SIZE_MARGIN
        return least <= self.size <= most

    def with_try(self, near: Leaf) -> Leaf:
        """Returns the leaf with one more repetition counted in `rounding` and `norms`.

        Args:
            near: comparison of the repetition with the usual result of the same side.
        """
        tries = len(self.norms)  # The first norm is the reference's.
        # Relative to the reference's norm. Otherwise a wrong result that consists of
        # rounding would excuse itself.
        off = near.relative_l2 * (near.norms[0] or 1.0) / (self.norms[0] or 1.0)
        rounding = hypot(self.rounding * sqrt(tries - 1), off) / sqrt(tries)
        return replace(self, rounding=rounding, norms=(*self.norms, near.size))


class Differences(list[Leaf]):
    """Comparisons of all leaves, the largest distance first; `str` lists the largest.

    Attributes:
        rounded: with `Reference.unrounded`, {path: the references' distance} of two
            leaves: the largest of changed state, over its change; and of others. Or {}.
    """

    def __init__(
        self,
        leaves: Iterable[Leaf] = (),
        rounded: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(sorted(leaves, key=lambda leaf: -leaf.relative_l2))
        self.rounded = rounded

    @property
    def failures(self) -> list[Leaf]:
        """Leaves that are far, and not undecided: see `Leaf`."""
        return [leaf for leaf in self if leaf.is_far and not leaf.is_undecided]

    @property
    def nearest(self) -> Leaf | None:
        """The leaf nearest its limit, or furthest beyond; None if all are undecided."""
        decided = [leaf for leaf in self if not leaf.is_undecided]
        return max(decided, key=lambda x: x.relative_l2 / x.allowed, default=None)

    def __str__(self) -> str:
        if not any(one.relative_l2 for one in self):
            return f"{counted(len(self), 'array is', 'arrays are')} equal."
        every = [f"{one.path or 'result'}: {one.relative_l2:.1e}" for one in self]
        lines, rest = every[:_MOST_SHOWN], self[_MOST_SHOWN:]
        more = (f"and {len(rest)} more, at most {x.relative_l2:.1e}" for x in rest[:1])
        return "\n".join(["Relative L2 distances, the largest first:", *lines, *more])


# Results of whole models are tens of gigabytes: they stay on the devices, and only
# norms come to the host.


def compare(found: Any, expected: Any) -> Differences:
    """Compares arrays and numbers by path; a NaN in one tree alone is infinitely far.

    Raises:
        CfpError: paths or shapes differ; types of containers and other leaves may.
    """
    have, want = _by_path(fixed(found)), _by_path(fixed(expected))
    odd = [f"{x or 'the result'} is not expected" for x in have if x not in want]
    odd += [f"{x or 'the result'} is not found" for x in want if x not in have]
    if odd:
        raise CfpError(f"Results of different structures cannot be compared: {odd[0]}.")
    differences = []
    for name, leaf in want.items():
        one, other = (jnp.asarray(on_device(x)) for x in (have[name], leaf))
        if one.shape != other.shape:
            raise CfpError(
                f"Arrays of different shapes cannot be compared: {name or 'result'}: "
                f"got {one.shape}, and {other.shape} is expected."
            )
        # One leaf at a time, so that moved copies are released at once.
        with jax.enable_x64(True):
            figures = _measured(*brought_together(one, other))
        distance, size, norm = map(float, figures)
        leaf = Leaf(path=name, relative_l2=distance, size=size, norms=(norm,))
        differences.append(leaf)
    return Differences(differences)


def _by_path(tree: Any, above: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Returns {path: array or number} of a pytree without its other leaves."""
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
    leaves = [x for x in tree_flatten_with_path(tree)[0] if isinstance(x[1], kinds)]
    return {keystr((*above, *p), simple=True, separator="/"): x for p, x in leaves}


def brought_together(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves `other`, if on one device, to the sharding of `one`; else vice versa.

    JAX splits an array by copies between devices, but joins shards through the host.
    """
    if other.sharding.num_devices == 1:
        return one, jax.device_put(other, one.sharding)
    return jax.device_put(one, other.sharding), other


@jax.jit
def _measured(have: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (`Leaf.relative_l2`, norm of `have`, norm of `want`)."""
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
    """Casts numbers and random keys to float64 or complex128: squares fit."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


# -------------------------------------------------------------------------- the check


@dataclass
class Check:
    """Runs a plan's step and a reference's step in turn, and compares their results.

    Both sides start every step from the reference's state, so that rounding of earlier
    steps does not add up. Between runs, that state and the reference's results are in
    host memory, if devices have it: a model that just fits the devices can be checked.

    Attributes:
        planned: the step under a plan.
        reference: the step to compare with.
        feedback: {position of a state argument: index of the result that replaces it};
            index None is the whole result.
        agree: makes an answer the same in all processes that run the check.
        given_tolerance: the user's tolerance; None for the default.
    """

    planned: CompiledStep
    reference: Reference
    feedback: Mapping[int, int | None]
    agree: Callable[[bool], bool] = bool
    given_tolerance: float | None = None
    _args: list[Any] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        """Given tolerance, or the default for the types that the step computes in."""
        if self.given_tolerance is not None:
            return self.given_tolerance
        usual = DOUBLE_TOLERANCE if self.planned.double else FULL_TOLERANCE
        return LOW_TOLERANCE if self.planned.narrow else usual

    def start(self, args: Sequence[Any]) -> None:
        """Copies the arguments, in float32 at least, to host memory if there is any."""
        self._args = list(args)
        # One leaf at a time: a device never holds a copy of the whole state.
        self._args = self._each(lambda leaf: in_host(fresh(self._on_reference(leaf))))

    def step(self, tell: Callable[[str], None] = lambda _: None) -> Differences:
        """Runs a step on both sides, compares results, and keeps the reference's state.

        If a leaf exceeds its allowed distance, rounding is measured by repetitions:
        until rounding explains the difference, or `NUDGES` times.

        Args:
            tell: called with a text about each run.
        """
        tell("running the reference")
        expected = in_host(self._results(self.reference.step, fresh))
        changes = self._changes(expected)
        rounded, lost = self._rounded(expected, changes, tell)
        tell("running the plan's step, and comparing results")
        usual = self._results(self.planned, fresh)
        margin = NARROW_MARGIN if self.planned.narrow else ROUNDING_MARGIN
        how: dict[str, Any] = {"tolerance": self.tolerance, "margin": margin}
        leaves = compare(usual, expected)
        made = [replace(x, change=changes.get(x.path), **how) for x in leaves]
        # Rounding is measured on the plan's side if its kernels round more.
        usual = in_host(usual) if self.planned.perturbed else expected
        for seed in range(NUDGES):
            if self.agree(not Differences(made).failures):
                break
            tell(f"measuring rounding, run {seed + 1} of at most {NUDGES}")
            found = self._results(self._noisy, partial(nudge, seed=seed))
            near = {x.path: x for x in compare(found, usual)}
            made = [x.with_try(near[x.path]) for x in made]
        made = [replace(x, relative_l2=inf) if x.path in lost else x for x in made]
        feed_back(self._args, expected, self.feedback)
        return Differences(made, rounded)

    @cached_property
    def _noisy(self) -> CompiledStep:
        """Step to repeat for rounding: `planned.perturbed` if any, or the reference."""
        perturbed = self.planned.perturbed
        return perturbed().compile() if perturbed else self.reference.step

    def _changes(self, expected: Any) -> dict[str, float]:
        """Returns {path in the result: `Leaf.change`}, without None."""
        expected = released(expected)
        parts = tree_flatten_with_path(expected, lambda node: node is not expected)[0]
        changes = {}
        for position, place in self.feedback.items():
            above, part = ((), expected) if place is None else parts[place]
            new = _by_path(part)
            paths = dict(zip(new, _by_path(part, above), strict=True))
            for x in compare(self._args[position], part):
                if x.relative_l2 or jnp.issubdtype(new[x.path].dtype, jnp.floating):
                    changes[paths[x.path]] = x.relative_l2
        return changes

    def _rounded(
        self, have: Any, changes: Mapping[str, float], tell: Callable[[str], None]
    ) -> tuple[dict[str, float], set[str]]:
        """Returns `Differences.rounded`, and paths finite only without precision."""
        if (plain := self.reference.unrounded) is None:
            return {}, set()
        tell("running the step without --precision")
        want = self._results(plain, fresh)
        found, have, want = compare(have, want), _by_path(have), _by_path(want)
        far = [x.path for x in found if not isfinite(x.relative_l2)]
        lost = {x for x in far if (np.isfinite(want[x]) > np.isfinite(have[x])).any()}
        off = [(x.relative_l2 / (changes.get(x.path) or 1), x.path) for x in found]
        largest = {bool(changes.get(p)): (p, ratio) for ratio, p in sorted(off)}
        return dict(largest.values()), lost

    def _results(self, step: CompiledStep, change: Callable[[Any], Any]) -> Any:
        """Runs a step on arguments whose leaves `change` maps; returns its results."""
        shardings = iter(step.in_shardings)
        # One leaf at a time: a second copy of the state would split free memory, and
        # neither part may have room for the step.
        args = self._each(lambda leaf: put(change(on_device(leaf)), next(shardings)))
        made = fixed(together(step(*args)))
        is_here = all(leaf.is_fully_addressable for leaf in tree_leaves(made))
        return made if is_here else jax.tree.map(self._on_reference, made)

    def _on_reference(self, leaf: Any) -> jax.Array:
        """Moves a whole array to the reference's device, unless it has several."""
        devices = self.reference.step.out_shardings[0].device_set
        if len(devices) > 1:
            return jnp.asarray(leaf)
        [device] = devices
        is_array = isinstance(leaf, jax.Array)
        return fetch(leaf, device) if is_array else jax.device_put(leaf, device)

    def _each(self, change: Callable[[Any], Any]) -> list[Any]:
        """Returns the arguments, nonstatic ones with leaves mapped by `change`."""
        step = self.reference.step.step
        leaves = map(change, step.flatten(self._args, {}))
        made = iter(released(tree_unflatten(step.in_tree, leaves))[0])
        static = {key for key, _ in step.static}
        return [a if i in static else next(made) for i, a in enumerate(self._args)]


def fresh(leaf: jax.Array) -> jax.Array:
    """Copies an array to device memory, floats at least in float32; safe to donate."""
    return with_dtype(jnp.copy(on_device(leaf)), wide_dtype(leaf.dtype))


@jax.jit
def nudge(x: jax.Array, seed: int = 0) -> jax.Array:
    """Changes floats by about their last bit, up or down at random; no other types."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # The default generator takes long to compile.
    key = jax.random.key(seed, impl="rbg")
    signs = jax.random.rademacher(key, x.shape, x.dtype)
    return (x * (1 + signs * jnp.finfo(x.dtype).eps)).astype(x.dtype)


def feed_back(args: list[Any], result: Any, feedback: Mapping[int, int | None]) -> None:
    """Replaces state arguments by a step's results, in place; see `Check.feedback`."""
    result = released(result)
    for position, place in feedback.items():
        args[position] = result if place is None else result[place]


# ---------------------------------------------------------------------- the reference

# Presets that shard both parameters and activations, by memory, least first.
_FRUGAL = (
    "fully_sharded",
    "tensor_sequence_parallel",
    "tensor_parallel",
    "expert_parallel",
)
# In place of a preset's name: only the step's own code shards.
AS_WRITTEN = "as written"


@dataclass(frozen=True, slots=True)
class Reference:
    """A compiled step to compare a plan's with.

    Attributes:
        step: computes in float32, or in float64 where the original does.
        preset: preset of its shardings, or `AS_WRITTEN`; "" on one device.
        unrounded: the step without `Plan.precision`, if given and on one device.
    """

    step: CompiledStep
    preset: str = ""
    unrounded: CompiledStep | None = None


def reference_text(preset: str) -> str:
    """Describes a reference for messages, such as "one device"."""
    if preset == AS_WRITTEN:
        return "the step as written on the same devices"
    return f"the preset {preset}" if preset else "one device"


def both_sides(
    plan: Plan,
    compiled: CompiledStep | None = None,
    tell: Callable[[str], None] = lambda _: None,
    agree: Callable[[bool], bool] = bool,
) -> tuple[CompiledStep, Reference]:
    """Compiles a plan's step and its first reference that fits, in float32 at least.

    Args:
        plan: bound to its step, on its mesh.
        compiled: the plan's compiled step; reused if a wide step would be the same.
        tell: called with a text about long work.
        agree: makes an answer the same in all processes of the mesh.

    Raises:
        CfpError: no reference fits in memory.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    device = mesh.local_devices[0]
    # Keeps the plan's memory limit: in wider types, XLA rematerializes more.
    lowered = plan.lower(wide=True, unwidened=compiled, environment=None)
    needs, limit = [], room_of(device)
    with CompilePool(default_threads(device.platform)) as pool:
        started = pool.start("the step under the plan, to be checked", lowered.compile)
        for name, reference in _references(plan, step, mesh):
            tell(f"compiling the reference of the check: {reference_text(name)}")
            try:
                found = reference.compile()
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found = None
            need = needed_bytes(started.result(), found) if found else None
            if agree(need is not None and need <= (limit or need)):
                assert found is not None
                is_rounded = step.precision and not name
                plain = replace(step, precision="")
                unrounded = compile_alone(plain, device) if is_rounded else None
                return started.result(), Reference(found, name, unrounded)
            size = f"about {format_bytes(need)}" if need else "too much"
            needs.append(f"{size} for {reference_text(name)}")
    raise CfpError(
        "There is no room for the check, which also runs the step without the plan: "
        f"needed {'; or '.join(needs)}, got {format_bytes(limit)}. On GPUs set XLA_"
        "PYTHON_CLIENT_MEM_FRACTION=0.92, check a smaller batch, or leave out --check."
    )


def _references(
    plan: Plan, step: FlatStep, mesh: Mesh
) -> Iterator[tuple[str, LoweredStep]]:
    """Yields (name, reference) in order of preference.

    First the step on one device, or as written on the mesh if its code names several
    devices. Then presets that shard arguments differently from the plan, least memory
    first. Presets that shard most arguments like the plan come last.
    """
    # A plan for one device may need its memory limit; so does the reference then.
    limits = {name: v for name, v in plan.options.items() if name == MEMORY_SHARE}
    name, alone = "", Mesh(np.array(mesh.local_devices[:1]), ("alone",))
    try:
        lowered = _lower_whole(step, alone, limits if mesh.size == 1 else {})
    except StepNotTraceable as error:
        if mesh.size == 1 or OTHER_DEVICES not in str(error):
            raise
        name, lowered = AS_WRITTEN, _lower_whole(step, mesh)
    yield name, lowered
    analysis = analyze_step(step, mesh).analysis
    program, known = analysis.frame.program, presets(analysis.frame)
    found = []
    for name in filter(known.__contains__, _FRUGAL):
        layout = lay_out(analysis.frame, known[name])
        specs = [*map(layout.arg_spec, range(len(program.args)))]
        found.append((sum(map(eq, specs, plan.arg_specs)), name, layout, specs))
    for alike, name, layout, ins in sorted(found, key=lambda x: 2 * x[0] > len(x[3])):
        if alike == len(ins):
            continue
        outs, everything = layout.output_specs(), ConstraintLevel.EVERYTHING
        inside = constraints_of(analysis, known[name], everything)
        where = step, mesh, program.fingerprint
        yield name, load_or_lower(*where, ins, outs, inside, wide=True)


def needed_bytes(planned: CompiledStep, reference: CompiledStep) -> int:
    """Bytes per device for the larger program; 0 if unknown.

    The programs run in turn. The reference's arguments and results are then in host
    memory. If several processes hold them, they stay on the devices, and count.
    """
    sizes = [compiled_bytes(step.compiled) for step in (planned, reference)]
    shardings = (*reference.in_shardings, *reference.out_shardings)
    is_here = all(one.is_fully_addressable for one in shardings)
    beside = 0 if is_here else sizes[1].argument_bytes + sizes[1].output_bytes
    return beside + max(size.peak_bytes for size in sizes)


def room_of(device: Any) -> int:
    """Memory limit of a device, in bytes; 0 if unknown."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def compile_alone(step: FlatStep, device: Any) -> CompiledStep:
    """Compiles a step for one device, in float32 at least."""
    return _lower_whole(step, Mesh(np.array([device]), ("alone",))).compile()


def _lower_whole(
    step: FlatStep, mesh: Mesh, options: Mapping[str, str] | None = None
) -> LoweredStep:
    """Lowers a step in float32 at least, with arguments and results replicated."""
    results = tree_leaves(step.traced.out_info)
    ins, outs = ([((),) * len(x.shape) for x in of] for of in (step.avals, results))
    nothing = Constraints({}, {})
    return load_or_lower(step, mesh, None, ins, outs, nothing, options, wide=True)
