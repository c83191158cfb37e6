"""Compiles, runs and exports a step under a plan's shardings; places its arguments.

A race of this process or a file on disk may already have the executable.

Files are kept beside the measurements, in a folder that only the user can write. A
file's name is a digest of everything that compiling depends on: module, constraints,
options, devices, and versions of JAX, XLA and the driver. If a file cannot be read, the
step is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_leaves_with_path,
    tree_unflatten,
)

from cfp.analysis.strategies import Spec
from cfp.cost.described import DescribedMesh, slice_of
from cfp.errors import PlanMismatch, known_names
from cfp.kernels.kinds import resolved
from cfp.plan import parts
from cfp.plan.parts import by_argument, leaves_text, path_text, places_like, shape_of
from cfp.printable import counted
from cfp.profiling.builder import BuildEnvironment, Built, Job
from cfp.profiling.files import make_private_folder, open_private
from cfp.profiling.hlo import compile_right
from cfp.profiling.record import environment_parts, untuned_options
from cfp.program.calling import fixed, has_fixed, released, together
from cfp.program.constrain import Constraints, constrain, misfit, partition_spec, uneven
from cfp.program.dispatch import Dispatch, Look
from cfp.program.graph import Program
from cfp.program.jaxprs import (
    check_numbers,
    checks_numbers,
    compiler_settings,
    mesh_around,
    unchecked,
)
from cfp.program.memory import in_memory, put
from cfp.program.part import Signature, shardings, signature
from cfp.program.read import Outline, other_program
from cfp.program.replace import erase_unread
from cfp.program.step import FlatStep
from cfp.program.trace import Alarm, Lowering, lower_step, read_lowering
from cfp.program.widen import widened

# Size of all executables together; the least recently used go first. Guess.
_MOST_BYTES = 4 * 2**30
_SUFFIX = ".executable"


@dataclass(frozen=True, slots=True)
class Arguments:
    """A plan's argument leaves: paths, types, specs and memory kinds, and the mesh."""

    names: Sequence[str]
    types: Sequence[str]
    specs: Sequence[Spec]
    memory: Sequence[str]
    mesh: Mesh

    def sharding(self, i: int, dims: int) -> NamedSharding:
        """Returns the sharding of leaf `i`, an array of `dims` dims."""
        sharding = NamedSharding(self.mesh, partition_spec(self.specs[i], dims))
        return in_memory([sharding], [self.memory[i]])[0]


Axes = Sequence[tuple[str, int]]  # As of `Plan.mesh_axes`.


def device_difference(
    axes: Axes, environment: Mapping[str, str], devices: Sequence[Any] | DescribedMesh
) -> str:
    """Says how devices differ from a plan's in kind, TPU slice or number; else ""."""
    planned = {**environment, "devices": str(prod(size for _, size in axes))}
    here, names = _facts(devices), ("slice", "device_kind", "platform")
    if all(planned.get(n, here.get(n)) == here.get(n) for n in (*names, "devices")):
        return ""
    there = next((environment[name] for name in names if name in environment), "any")
    text = f" ({environment['described']})" if "described" in environment else ""
    found = here.get("slice") or here["device_kind"]
    devices = "device" if planned["devices"] == "1" else "devices"
    return (
        f"The plan is for {planned['devices']} {devices} of {there}{text}, and these "
        f"are {here['devices']} of {found}"
    )


def _facts(devices: Sequence[Any] | DescribedMesh) -> Mapping[str, str]:
    if isinstance(devices, DescribedMesh):
        return devices.environment
    return {
        "slice": slice_of(devices),
        "device_kind": ", ".join(sorted({one.device_kind for one in devices})),
        "platform": devices[0].platform,
        "devices": str(len(devices)),
    }


def check_devices(
    axes: Axes,
    environment: Mapping[str, str],
    devices: Sequence[Any] | DescribedMesh,
    draws: bool = False,
) -> None:
    """Raises PlanMismatch if devices differ (`device_difference`), or JAX's version.

    The error offers `other_devices`, except on another platform if the step `draws`.
    """
    differ = device_difference(axes, environment, devices)
    version, remedy = environment.get("jax_version", jax.__version__), ""
    here = _facts(devices)["platform"]
    if differ:
        remedy = "Use the plan's devices (cfp show --python needs none)"
        n = prod(size for _, size in axes)
        if (
            here == environment.get("platform", "cpu") == "cpu"
            and jax.device_count() < n
        ):
            remedy = "Set XLA_FLAGS=--xla_force_host_platform_device_count="
            remedy += f"{n} for as many virtual devices"
        remedy += ", or plan for these"
    elif version != jax.__version__:
        differ = f"The plan is for JAX {version}, and this is JAX {jax.__version__}"
        remedy = f"Install JAX {version}, or plan again"
    if differ:
        if not draws or environment.get("platform") in (None, here):
            remedy += "; to try the plan here all the same, on as many devices: "
            remedy += "plan.on(mesh, other_devices=True) or --other-devices"
        raise PlanMismatch(f"{differ}. {remedy}.")


def mesh_here(axes: Axes, environment: Mapping[str, str], draws: bool = False) -> Mesh:
    """Makes a plan's mesh of `jax.set_mesh`'s, else the first devices, once checked."""
    names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    around = mesh_around()
    devices = [*around.devices.flat] if around else jax.devices()[: prod(shape)]
    check_devices(axes, environment, devices, draws)
    explicit = environment.get("explicit_axes", "").split(",")
    own, auto = AxisType.Explicit, AxisType.Auto
    kinds = tuple(own if name in explicit else auto for name in names)
    if around:  # JAX requires the order of these devices, too.
        return Mesh(around.devices.reshape(shape), names, kinds)
    return jax.make_mesh(shape, names, kinds, devices=devices)


def made(
    arguments: Arguments,
    init_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs `init_fn` under jit; its result gets shardings of the equal argument(s).

    Raises:
        PlanMismatch: the result (or part of a tuple) has no argument's leaves.
    """

    def arrays(*args: Any, **kwargs: Any) -> Any:
        return fixed(together(init_fn(*args, **kwargs)))

    shape = jax.eval_shape(arrays, *args, **kwargs)
    leaves, tree = tree_flatten(shape)
    places = places_like(shape, arguments.names, arguments.types)
    pairs = zip(places, leaves, strict=True)
    shardings = [arguments.sharding(i, len(leaf.shape)) for i, leaf in pairs]
    jitted = jax.jit(arrays, out_shardings=tree_unflatten(tree, shardings))
    return released(jitted(*args, **kwargs))


def placed(arguments: Arguments, batch: Any, argument: str | None) -> Any:
    """Moves a batch to the sharding of an argument, as :meth:`cfp.Plan.place` says.

    Raises:
        PlanMismatch: no argument has this name or structure; a size or type differs.
    """
    entries, tree = tree_flatten_with_path(batch)
    paths = [path_text(path) for path, _ in entries]
    leaves = [x if isinstance(x, jax.Array) else _as_in_jax(x) for _, x in entries]
    known = by_argument(arguments.names)
    if argument is not None and argument not in known:
        raise PlanMismatch(
            f"The plan has no argument {argument!r} with arrays. "
            f"{known_names(argument, known)} Without argument=, plan.place takes the "
            "first argument of the batch's structure, shapes and types."
        )
    roots = [root for root in known if argument in (None, root)]
    columns = (zip(*known[root], strict=True) for root in roots)
    fits = [places for found, places in columns if [*found] == paths]
    if not fits:
        raise PlanMismatch(
            f"The batch, {leaves_text(tree_unflatten(tree, leaves))}, has the "
            "structure of none of these arguments. Pass one of them, whole: "
            f"{', '.join(roots)}."
        )
    misfits = [_misfits(arguments, places, leaves) for places in fits]
    exact = [places for places, wrong in zip(fits, misfits, strict=True) if not wrong]
    if len(fits) > 1 and not exact:
        raise _other_type(arguments, [wrong[0] for wrong in misfits])
    # Equal shapes may differ in type, as of labels and numbers.
    types = [str(leaf.dtype) for leaf in leaves]
    own = [kind.partition("[")[0] for kind in arguments.types]
    best = max(exact or fits, key=lambda places: types == [own[i] for i in places])
    return tree_unflatten(tree, [*map(partial(_placed, arguments), best, leaves)])


def _misfits(
    arguments: Arguments, places: Sequence[int], leaves: Sequence[Any]
) -> list[tuple[int, Any]]:
    """Returns (place, leaf) of leaves with neither the whole's nor the part's shape."""
    return [
        (i, leaf)
        for i, leaf in zip(places, leaves, strict=True)
        if leaf.shape not in (shape_of(arguments.types[i]), _part(arguments, i))
    ]


def _as_in_jax(leaf: Any) -> np.ndarray:
    """Returns an array with its dtype in JAX, which may have 32 bits instead of 64."""
    host = np.asarray(leaf)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


def _part(arguments: Arguments, i: int) -> tuple[int, ...]:
    """Returns the shape of the part of leaf `i` on this process's devices."""
    shape = shape_of(arguments.types[i])
    pieces = arguments.sharding(i, len(shape)).addressable_devices_indices_map(shape)
    ranges = [
        {piece[dim].indices(size)[:2] for piece in pieces.values() if piece is not None}
        for dim, size in enumerate(shape)
    ]
    return tuple(sum(end - start for start, end in found) for found in ranges)


def _placed(arguments: Arguments, i: int, leaf: Any) -> jax.Array:
    """Places a batch's leaf: a whole array, or in NumPy this process's part."""
    dtype, shape = arguments.types[i].partition("[")[0], shape_of(arguments.types[i])
    sharding, is_placed = arguments.sharding(i, len(shape)), isinstance(leaf, jax.Array)
    if str(leaf.dtype) != dtype or (is_placed and leaf.shape != shape):
        raise _other_type(arguments, [(i, leaf)])
    if is_placed:
        return put(leaf, sharding)
    try:
        return jax.make_array_from_process_local_data(sharding, leaf, shape)
    except ValueError as error:
        raise _other_type(arguments, [(i, leaf)]) from error


def _other_type(arguments: Arguments, tried: Sequence[tuple[int, Any]]) -> PlanMismatch:
    """Returns the error that names the tried leaves (place, leaf of the batch)."""
    remedy, found = "Pass the planned dtype and shape, or plan again.", []
    here = " in this process" * (jax.process_count() > 1)
    for i, leaf in tried:
        name, kind, part = arguments.names[i], arguments.types[i], _part(arguments, i)
        type_here = kind.partition("[")[0] + f"[{','.join(map(str, part))}]"
        found.append(f"{type_here} for {name}{here}, not {leaves_text(leaf)}")
        is_rows = leaf.shape < part == shape_of(kind) and leaf.shape[1:] == part[1:]
        if here and is_rows:
            pins = {name: arguments.mesh.axis_names[0]}
            remedy = f"The plan leaves {name} whole: pass all rows, or set {pins=}."
    return PlanMismatch(f"The plan expects {'; '.join(found)}. {remedy}")


@dataclass(frozen=True, slots=True)
class Executables:
    """Store of compiled programs as files in `folder`, which `put` makes."""

    folder: Path

    def key(
        self, text: bytes, mesh: Mesh, options: Mapping[str, str], step: FlatStep
    ) -> str:
        """Returns a digest of all inputs of compiling `text`, `Lowering.bare_text`."""
        devices = [*mesh.devices.flat]
        # JAX's types differ where the module's are equal: random keys, weak types.
        leaves = [*step.avals, *step.traced.jaxpr.out_avals]
        rest = (
            environment_parts(devices),
            [device.id for device in devices],
            mesh.axis_types,
            sorted(options.items()),
            [(str(leaf), leaf.weak_type) for leaf in leaves],
            step.donated,
            compiler_settings(),
        )
        return hashlib.sha256(text + repr(rest).encode()).hexdigest()

    def get(self, key: str, mesh: Mesh) -> jax.stages.Compiled | None:
        """Loads a key's executable; None if absent, unreadable or of another user."""
        path = self._path(key)
        if not _is_own(path):
            return None
        devices = [*mesh.devices.flat]
        try:
            program = pickle.loads(path.read_bytes())
            compiled = deserialize_and_load(
                *program, backend=devices[0].client, execution_devices=devices
            )
        except Exception:
            # Readers raise anything for a damaged file, or one of another build of XLA
            # with the same version. The step is compiled again, and the file rewritten.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # It may have been removed meanwhile.
            os.utime(path)
        return compiled

    def put(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Stores an executable, unless it exists or cannot be serialized or written."""
        if _is_own(self._path(key)):
            return
        try:
            data = pickle.dumps(serialize(compiled))
        except Exception:
            # Picklers raise anything for constants or effects that JAX cannot
            # serialize, and for kinds of keys with functions of this process.
            return
        try:
            make_private_folder(self.folder)
            part = self.folder / f"{key}.{os.getpid()}.part"
            with open_private(part, "wb") as file:
                file.write(data)
            part.replace(self._path(key))
            self._make_room()
        except OSError:
            return  # A full or read-only disk is no reason not to run the step.

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Removes least recently used files beyond the limit; the newest stays."""
        found = [(p.stat(), p) for p in self.folder.glob(f"*{_SUFFIX}")]
        total = sum(stat.st_size for stat, _ in found)
        for stat, path in sorted(found, key=lambda pair: pair[0].st_mtime)[:-1]:
            if total <= _MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size


def _is_own(path: Path) -> bool:
    """True if a file exists, and only its owner, this user, may write it."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


# --------------------------------------------------------------- the race's executable


@dataclass(frozen=True)
class ReusableExecutable:
    """A step's program that a race compiled, for use under the plan.

    Attributes:
        built: the executable over the step's argument leaves.
        content: digest of the step's program with the values of all constants.
    """

    built: Built
    job: Job = field(repr=False)
    mesh: Mesh = field(repr=False)
    content: str
    types: Signature = field(repr=False)

    def does(
        self,
        step: FlatStep,
        program: Program,
        ins: Sequence[NamedSharding],
        outs: Sequence[NamedSharding],
        constraints: Constraints,
        options: Mapping[str, str],
    ) -> bool:
        """True if compiled from all of these, with equal constants and donations."""
        job, types = self.job, self.types
        return (
            self.content == program.content
            and job.constraints == constraints
            and dict(job.options) == dict(options)
            and types == signature(program, job.part)
            and types.shardings(self.mesh, job.in_specs, job.out_specs)
            == (tuple(ins), tuple(outs))
            and set(job.donated) == {i for i, given in enumerate(step.donated) if given}
        )


def start_devices(devices: Sequence[Any]) -> list[Future[jax.Array]]:
    """Puts an array on each of this process's devices, from threads.

    The first array makes JAX reserve a GPU's memory, 1.3 s on an H100. Without threads
    JAX would do this for one device after another.
    """
    mine = [one for one in devices if one.process_index == jax.process_index()]
    threads = ThreadPoolExecutor(len(mine) or 1, "cfp-starting")
    started = [threads.submit(jax.device_put, 0, one) for one in mine]
    threads.shutdown(wait=False)
    return started


@dataclass(frozen=True)
class CompiledStep:
    """A step, compiled under a plan; called like the original function.

    Attributes:
        compiled: the compiled program over leaves of arguments and results.
        in_shardings, out_shardings: a sharding for each leaf.
        narrow: ops that compute in less than float32 though the step was lowered with
            ``wide=True``.
        perturbed: lowers the step with operands and results of narrow ops moved by half
            of their last bit; None without narrow ops.
        double: True if a wide step computes in float64 throughout.
        alarm: keeps exceptions of host callbacks; None if the step has no callbacks.
        raced: True if a race of this process compiled the step.
    """

    step: FlatStep
    compiled: jax.stages.Compiled
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    out_tree: Any
    narrow: tuple[str, ...] = ()
    perturbed: Callable[[], LoweredStep] | None = None
    double: bool = False
    alarm: Alarm | None = None
    raced: bool = False

    @cached_property
    def dispatch(self) -> Dispatch:
        """Object that checks argument leaves of calls, and moves them to shardings."""
        types = tuple(map(parts.type_text, self.step.avals))
        check = partial(parts.check_arguments, self.step.arg_names, types)
        return Dispatch(self.step, self.in_shardings, check)

    @cached_property
    def _has_fixed(self) -> bool:
        return has_fixed(tree_unflatten(self.out_tree, list(self.out_shardings)))

    def __repr__(self) -> str:
        name = getattr(self.step.fn, "__name__", "a step")
        arguments = counted(len(self.in_shardings), "argument", "arguments")
        results = counted(len(self.out_shardings), "result", "results")
        return f"CompiledStep of {name}: {arguments}, {results}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; arguments with other shardings move to those of the plan.

        A step with host callbacks is waited for, and raises their exceptions.
        """
        return self.run(self.look(args, kwargs))

    def look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Look:
        """Finds a call's leaves; raises PlanMismatch as :meth:`FlatStep.flatten`."""
        leaves = self.step.leaves_of(args, kwargs)
        if leaves is not None:
            look = self.dispatch.look(leaves)
            if self.dispatch.has_leaves(look):
                return look
        return self.dispatch.look(self.step.flatten(args, kwargs))

    def run(self, look: Look) -> Any:
        """Runs the step on leaves, as `Dispatch.look` gives them; returns a pytree."""
        placed = self.dispatch.place(look)
        is_checked = checks_numbers()
        try:
            with unchecked() if is_checked else nullcontext():
                results = self.compiled(*placed.leaves)
        except (RuntimeError, ValueError) as error:
            if "has been deleted" in str(error):  # JAX does not say which argument.
                self.dispatch.check_not_deleted(placed.leaves)
            raise
        self.dispatch.remember(placed, results)
        made = tree_unflatten(self.out_tree, results)
        if is_checked:
            leaves = tree_leaves_with_path(made)
            check_numbers([(keystr(path), x) for path, x in leaves])
        if self.alarm is not None:
            jax.block_until_ready(made)
            jax.effects_barrier()
            if (error := self.alarm.take()) is not None:
                raise error
        return released(made) if self._has_fixed else made

    def as_text(self) -> str:
        """Returns the compiled program as HLO text; "" if the platform has none."""
        return self.compiled.as_text() or ""


@dataclass(frozen=True)
class LoweredStep:
    """A step, lowered under a plan, with its executable if there is one.

    Attributes:
        compiled: executable of a race, of a file, or of `unwidened`; or None.
        keep: stores the executable for later processes. None without a folder, for
            several processes, for ``wide=True``, and with host callbacks.
    """

    lowering: Lowering = field(repr=False)
    options: Mapping[str, str]
    compiled: jax.stages.Compiled | None
    keep: Callable[[jax.stages.Compiled], None] | None
    make: Callable[[jax.stages.Compiled], CompiledStep]

    @unchecked()
    def compile(self, tell: Callable[[], None] = lambda: None) -> CompiledStep:
        """Returns the compiled step; without an executable calls `tell`, and compiles.

        Raises:
            CfpError: XLA's program may compute wrong results; see `compile_right`.
        """
        compiled = self.compiled
        if compiled is None:
            tell()
            compiled, _ = compile_right(self.lowering.lowered, self.options)
        if self.keep is not None:
            self.keep(compiled)
        return self.make(compiled)


@unchecked()
def load_or_lower(
    step: FlatStep,
    mesh: Mesh,
    fingerprint: str | None,
    arg_specs: Sequence[Spec],
    output_specs: Sequence[Spec],
    constraints: Constraints,
    options: Mapping[str, str] | None = None,
    *,
    wide: bool = False,
    perturbed: bool = False,
    unwidened: CompiledStep | None = None,
    raced: ReusableExecutable | None = None,
    planned: tuple[Outline | None, Mapping[str, str]] = (None, {}),
    environment: BuildEnvironment | None = None,
) -> LoweredStep:
    """Lowers a step under shardings with constraints; loads its executable, if stored.

    Args:
        fingerprint: digest of the planned program's structure; None skips the check.
        wide: True computes in float32 instead of narrower floats, with precise
            products; arguments and results have no narrower floats, either.
        perturbed: with `wide`, as for :func:`cfp.program.widen.widen`.
        unwidened: with `wide`, the same step compiled without it; used if widening
            changes nothing, and the step has no host callbacks.
        raced: without `wide`, a race's program; used if it `does` the same, and the
            step has no host callbacks.
        planned: operations and environment of the planned program, to name differences.
        environment: folder of tuned kernels and executables.

    Raises:
        PlanMismatch: the step's program or results, or the constraints do not fit.
    """
    like = step, mesh, fingerprint, arg_specs, output_specs, constraints, planned
    lowering, program, ins, outs = lower_constrained(*like)
    plain = not wide and not lowering.calls_host
    same = step, program, ins, outs, constraints, options or {}
    raced = raced if plain and raced is not None and raced.does(*same) else None
    narrow: tuple[str, ...] = ()
    again: Callable[[], LoweredStep] | None = None
    double = is_same = False
    platform = mesh.devices.flat[0].platform
    if wide:
        how = {"planned": planned, "environment": environment, "perturbed": True}
        again = partial(load_or_lower, *like[:-1], options, wide=True, **how)
        how = {"precise": platform != "cpu", "perturbed": perturbed}
        found = widened(step, lowering, ins, outs, **how)
        step, lowering, narrow = found.step, found.lowering, found.narrow
        double = found.double
        is_same = found.unchanged and not lowering.calls_host
    environment = environment or BuildEnvironment()
    how = {**environment.options(platform), **lowering.rewritten.options}
    how |= options or {}
    if wide:
        # A checking program runs a few times only: decisions.md, "A check runs untuned
        # programs".
        how |= untuned_options(platform)
    kept = _executables(mesh, environment) if plain else None
    key = kept.key(lowering.bare_text, mesh, how, step) if kept else ""
    compiled = raced.built.compiled if raced else None
    if is_same and unwidened is not None:
        compiled = unwidened.compiled
    if kept is not None and compiled is None:
        compiled = kept.get(key, mesh)
    make = partial(
        CompiledStep,
        step,
        in_shardings=ins,
        out_shardings=outs,
        out_tree=lowering.out_tree,
        narrow=narrow,
        perturbed=again if narrow else None,
        double=double,
        alarm=lowering.alarm if lowering.calls_host else None,
        raced=raced is not None,
    )
    keep = partial(kept.put, key) if kept is not None else None
    return LoweredStep(lowering, how, compiled, keep, make)


_Shardings = tuple[NamedSharding, ...]


def checked_shardings(
    step: FlatStep, mesh: Mesh, arg_specs: Sequence[Spec], output_specs: Sequence[Spec]
) -> tuple[_Shardings, _Shardings]:
    """Returns shardings of arguments and results; PlanMismatch if one does not fit."""
    ins = shardings(mesh, arg_specs, step.avals)
    results = tree_leaves(step.traced.out_info)
    if len(results) != len(output_specs):
        raise PlanMismatch(
            f"The step has {len(results)} results, and the planned step had "
            f"{len(output_specs)}. Pass the planned step, or plan again."
        )
    every = ("argument", step.avals, arg_specs), ("result", results, output_specs)
    for kind, avals, specs in every:
        for i, (aval, spec) in enumerate(zip(avals, specs, strict=True)):
            # Inside of a program, random keys have dims that JAX does not show.
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            if uneven(aval.shape, mesh, spec[: len(aval.shape)] if is_key else spec):
                raise PlanMismatch(
                    f"The plan shards {kind} {i}, {aval.dtype}{[*aval.shape]}, as "
                    f"{spec} on a mesh {dict(mesh.shape)}, whose axes do not fit. "
                    "The plan is for another step, or damaged. Plan again."
                )
    outs = shardings(mesh, output_specs, results)
    return in_memory(ins, step.memory_kinds), in_memory(outs, step.result_memory_kinds)


def lower_constrained(
    step: FlatStep,
    mesh: Mesh,
    fingerprint: str | None,
    arg_specs: Sequence[Spec],
    output_specs: Sequence[Spec],
    constraints: Constraints,
    planned: tuple[Outline | None, Mapping[str, str]],
) -> tuple[Lowering, Program, _Shardings, _Shardings]:
    """Lowers a step, and inserts constraints and replacements of ops.

    Returns the lowering, the step's program, and shardings of arguments and results;
    arguments and errors as of `load_or_lower`.
    """
    ins, outs = checked_shardings(step, mesh, arg_specs, output_specs)
    lowering = lower_step(step, ins, list(outs))
    program = read_lowering(step, lowering)
    if fingerprint is not None and program.fingerprint != fingerprint:
        here = dict(environment_parts([*mesh.devices.flat]))
        raise other_program(program, *planned, here)
    constraints = resolved(program, mesh, constraints)
    if (found := misfit(program, mesh, constraints)) is not None:
        raise PlanMismatch(
            f"The plan's constraints do not fit the step's program: {found}. The "
            "plan's file is damaged; plan again."
        )
    constrain(lowering.module, program, mesh, constraints)
    if constraints.replaced:
        erase_unread(lowering.module)
    return lowering, program, ins, outs


def _executables(mesh: Mesh, environment: BuildEnvironment) -> Executables | None:
    """Returns the store of executables; None without folder or for many processes."""
    alone = all(d.process_index == jax.process_index() for d in mesh.devices.flat)
    if environment.executables_dir is None or not alone or jax.process_count() > 1:
        return None
    return Executables(environment.executables_dir)
