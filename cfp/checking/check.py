"""Checks a plan's steps against the same steps as written.

The reference runs on one device, without sharding. If one device has no room, a preset
shards it over all devices, in another way than the plan. If the step's code names
several devices, it runs on all of them with whole arguments.

Both sides compute in float32 at least, with the highest precision of matrix products,
so that only the order of sums differs. The check measures the effect of rounding: the
reference runs every step again from arguments that differ in their last bit. If the
plan's kernels compute in less than float32, the plan's step runs again with the last
bits of their operands and results moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import hypot, isfinite, sqrt
from operator import eq
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure

from cfp.analysis.layout import lay_out
from cfp.errors import CfpError, StepNotTraceable
from cfp.passes.analyze import analyze_step
from cfp.plan.execute import CompiledStep, LoweredStep, load_or_lower
from cfp.plan.plan import Plan
from cfp.presets.presets import presets
from cfp.printable import format_bytes
from cfp.profiling.builder import (
    CompilePool,
    compiled_bytes,
    default_threads,
    is_out_of_memory,
)
from cfp.profiling.record import MEMORY_SHARE
from cfp.program.calling import fixed, released
from cfp.program.constrain import Constraints
from cfp.program.memory import fetch, in_host, on_device, put
from cfp.program.step import FlatStep
from cfp.program.trace import OTHER_DEVICES
from cfp.program.widen import wide_dtype, with_dtype
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel

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

_MOST_SHOWN = 5

# -------------------------------------------------------------------------- distances


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

    def with_try(self, near: Leaf) -> Leaf:
        """The leaf, after one more result whose arguments differ in their last bits.

        Args:
            near: that result, beside the usual one of the same side.
        """
        tries = len(self.norms)  # The first norm is the reference's.
        # In terms of the reference's size: else a result that is wrong, and nothing but
        # rounding, would be taken for one of which nothing else can be expected.
        off = near.relative_l2 * (near.norms[0] or 1.0) / (self.norms[0] or 1.0)
        rounding = hypot(self.rounding * sqrt(tries - 1), off) / sqrt(tries)
        return replace(self, rounding=rounding, norms=(*self.norms, near.size))


class Differences(list[Leaf]):
    """Differences of all leaves, the largest first; its text has the largest few.

    Attributes:
        rounded: the leaves furthest from the step without FP8, by path: state relative
            to the step's change, other results relative to their norm.
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
    return Differences(differences)


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


# -------------------------------------------------------------------------- the check


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
        changes = self._changes(expected)
        rounded = self._rounded(expected, changes, tell)
        tell("running the plan's step, and comparing results")
        usual = self._results(self.planned, fresh)
        margin = NARROW_MARGIN if self.planned.narrow else ROUNDING_MARGIN
        how = {"tolerance": self.tolerance, "margin": margin}
        made = [
            replace(leaf, change=changes.get(leaf.path, 0.0), **how)
            for leaf in compare(usual, expected)
        ]
        # The runs to come are of the side that rounds most.
        usual = in_host(usual) if self.planned.perturbed else expected
        for seed in range(NUDGES):
            if self.agree(not Differences(made).failures):
                break
            tell(f"measuring rounding, run {seed + 1} of at most {NUDGES}")
            found = self._results(self._noisy, partial(nudge, seed=seed))
            near = {x.path: x for x in compare(found, usual)}
            made = [x.with_try(near[x.path]) for x in made]
        feed_back(self._args, expected, self.feedback)
        return Differences(made, rounded)

    @cached_property
    def _noisy(self) -> CompiledStep:
        """The step that tells what rounding does."""
        perturbed = self.planned.perturbed
        return perturbed().compile() if perturbed else self.reference.step

    def _changes(self, expected: Any) -> dict[str, float]:
        """Distances by which a step moves the state, by path in its result."""
        changes = {}
        for position, place in self.feedback.items():
            folder = "" if place is None else f"{place}/"
            for leaf in compare(self._args[position], _part(expected, place)):
                changes[f"{folder}{leaf.path}".rstrip("/")] = leaf.relative_l2
        return changes

    def _rounded(
        self, expected: Any, changes: Mapping[str, float], tell: Callable[[str], None]
    ) -> dict[str, float]:
        """The largest distances from the step without FP8: of state, and of others."""
        if (plain := self.reference.unrounded) is None:
            return {}
        tell("running the step without FP8")
        found = compare(expected, self._results(plain, fresh))
        off = sorted(
            (x.relative_l2 / (changes.get(x.path) or 1), x.path) for x in found
        )
        largest = {path in changes: (path, distance) for distance, path in sorted(off)}
        return dict(largest.values())

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
        args[position] = _part(result, place)


def _part(result: Any, place: int | None) -> Any:
    return result if place is None else result[place]


# ---------------------------------------------------------------------- the reference

# Presets of which a device holds part of the parameters and of the activations, the one
# that needs the least memory first.
_FRUGAL = (
    "fully_sharded",
    "tensor_sequence_parallel",
    "tensor_parallel",
    "expert_parallel",
)
# In place of a preset: a step that shards nothing but what its own code does.
AS_WRITTEN = "as written"


@dataclass(frozen=True, slots=True)
class Reference:
    """A compiled step to compare a plan's with.

    Attributes:
        step: in float32, or in float64 if the step computes so.
        preset: preset of its shardings, or `AS_WRITTEN`; "" on one device.
        unrounded: the same step without FP8; None without FP8, or on several devices.
    """

    step: CompiledStep
    preset: str = ""
    unrounded: CompiledStep | None = None


def reference_text(preset: str) -> str:
    """Names a reference: ``one device``, or by its preset."""
    if preset == AS_WRITTEN:
        return "the step as written on the same devices"
    return f"the preset {preset}" if preset else "one device"


def both_sides(
    plan: Plan,
    compiled: CompiledStep | None = None,
    tell: Callable[[str], None] = lambda _: None,
    agree: Callable[[bool], bool] = bool,
) -> tuple[CompiledStep, Reference]:
    """Compiles a plan's step, with the plan's compiler options, and its reference.

    Both compute in float32, or in float64 if the step does.

    Args:
        plan: bound to its step, on its mesh.
        compiled: the plan's step if it computes in float32 at least, with precise
            products.
        tell: called with a text about long work.
        agree: makes an answer the same in all processes of the mesh.

    Raises:
        CfpError: neither one device nor all of them have room for the check.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    device = mesh.local_devices[0]
    # With the plan's memory limit, too: in wider types more is rematerialized for it.
    lowered = plan.lower(wide=True, unwidened=compiled, environment=None)
    needs, limit = [], room_of(device)
    with CompilePool(default_threads(device.platform)) as pool:
        started = pool.start("the step under the plan, to be checked", lowered.compile)
        for name, reference in _references(plan, step, mesh):
            tell(f"compiling the reference of the check: {reference_text(name)}")
            found = _unless_too_large(reference)
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
        "There is no room for the check, which runs the step as written, "
        f"beside its state: needed {'; or '.join(needs)}, got {format_bytes(limit)}. "
        "Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, with which JAX takes more of "
        "a GPU; check a smaller model or batch; or leave out --check."
    )


def _references(
    plan: Plan, step: FlatStep, mesh: Mesh
) -> Iterator[tuple[str, LoweredStep]]:
    """Yields references by name, in order.

    First the step on one device, or as written on the devices that its code names. Then
    presets that shard arguments in another way, the one of least memory first; those
    that shard most of them alike come last.
    """
    # A step that fits one device by a memory limit is compared on it with the same.
    limits = {name: v for name, v in plan.options.items() if name == MEMORY_SHARE}
    name, alone = "", _mesh_of(mesh.local_devices[0])
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


def _unless_too_large(lowered: LoweredStep) -> CompiledStep | None:
    """Compiles a step; None if the compiler says that it cannot fit."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def needed_bytes(planned: CompiledStep, reference: CompiledStep) -> int:
    """Computes the memory of a device for the larger program; 0 if it is not known.

    The programs run one after the other. Arguments and results of the other program are
    in host memory, or on the devices of several processes.
    """
    sizes = [compiled_bytes(step.compiled) for step in (planned, reference)]
    shardings = (*reference.in_shardings, *reference.out_shardings)
    is_here = all(one.is_fully_addressable for one in shardings)
    beside = 0 if is_here else sizes[1].argument_bytes + sizes[1].output_bytes
    return beside + max(size.peak_bytes for size in sizes)


def room_of(device: Any) -> int:
    """Memory of a device, in bytes; 0 if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def compile_alone(step: FlatStep, device: Any) -> CompiledStep:
    """Compiles a step for one device, in float32."""
    return _lower_whole(step, _mesh_of(device)).compile()


def _mesh_of(device: Any) -> Mesh:
    return Mesh(np.array([device]), ("alone",))


def _lower_whole(
    step: FlatStep, mesh: Mesh, options: Mapping[str, str] | None = None
) -> LoweredStep:
    """Lowers a step for a mesh, with its arguments and results whole on each device."""
    results = tree_leaves(step.traced.out_info)
    ins, outs = ([((),) * len(x.shape) for x in of] for of in (step.avals, results))
    nothing = Constraints({}, {})
    return load_or_lower(step, mesh, None, ins, outs, nothing, options, wide=True)
