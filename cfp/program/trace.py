"""Traces a step function, with arrays or shapes, into a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_unflatten

from cfp.errors import MeshError, PlanMismatch, StepNotTraceable
from cfp.program import shardy
from cfp.program.graph import Program
from cfp.program.read import read_program


@dataclass(frozen=True)
class FlatStep:
    """A step function seen as a function of its flat array arguments.

    Attributes:
        fn: the user's function.
        avals: shape and dtype of each array leaf of the arguments.
        donated: whether the user gives each leaf's memory away.
        arg_names: a path for each leaf, such as ``state/params/dense/kernel``.
        in_tree: the structure of ``(dynamic args, kwargs)``.
        static: static positional arguments, by position.
    """

    fn: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]
    arg_names: tuple[str, ...]
    in_tree: Any
    static: tuple[tuple[int, Any], ...]

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The array leaves of a call's arguments, which must fit the structure."""
        for position, value in self.static:
            got = args[position] if position < len(args) else None
            if type(got) is not type(value) or got != value:
                raise PlanMismatch(
                    f"Static argument {position} was {value!r} when the step was "
                    f"planned, and is {got!r} now. Plan again for the new value."
                )
        dynamic = _without_static(args, self.static)
        leaves, tree = tree_flatten((dynamic, kwargs))
        if tree != self.in_tree:
            raise StepNotTraceable(
                f"The arguments' structure changed: expected {self.in_tree}, "
                f"got {tree}."
            )
        return leaves

    @cached_property
    def flat_fn(self) -> Callable[..., Any]:
        """``fn`` as a function of flat leaves, under its own name."""

        def flat(*leaves: Any) -> Any:
            dynamic, kwargs = tree_unflatten(self.in_tree, leaves)
            args = list(dynamic)
            for position, value in self.static:
                args.insert(position, value)
            return self.fn(*args, **kwargs)

        flat.__name__ = flat.__qualname__ = getattr(self.fn, "__name__", "step")
        return flat

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """``flat_fn`` as JAX traced it: the user's Python code runs this one time.

        Raises:
            StepNotTraceable: JAX cannot trace the function.
        """
        try:
            return jax.jit(self.flat_fn).trace(*self.avals)
        except Exception as error:
            # Whatever the user's code raises while it is traced is the user's to mend.
            raise StepNotTraceable(
                f"JAX could not trace {self.flat_fn.__name__!r}: "
                f"{type(error).__name__}: {error}\n"
                "The step must be a function that jax.jit accepts; arguments that are "
                "not arrays belong in static_argnums."
            ) from error


def flatten_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> FlatStep:
    """Separates a call into its array leaves and everything else.

    Args:
        fn: the step function.
        args: arrays, ``jax.ShapeDtypeStruct`` s, or pytrees of them.
        kwargs: the same, by keyword.
        static_argnums: positions whose values are part of the program.
        donate_argnums: positions whose arrays the step may overwrite.

    Raises:
        StepNotTraceable: an argument leaf is neither an array nor a shape.
    """
    kwargs = kwargs or {}
    count = len(args)
    # Like jax.jit: a static argument that is left out has its default.
    static_positions = sorted(
        i for i in _positions(static_argnums, count) if 0 <= i < count
    )
    static = tuple((i, args[i]) for i in static_positions)
    dynamic = _without_static(args, static)
    positions = [i for i in range(count) if i not in static_positions]
    names = _argument_names(fn, count)
    flat, in_tree = tree_flatten_with_path((dynamic, kwargs))
    donate_positions = _positions(donate_argnums, count)
    beyond = [i for i in donate_positions if not 0 <= i < count]
    if beyond:
        raise StepNotTraceable(
            f"donate_argnums names positions {beyond}, but the call has {count} "
            "positional arguments."
        )
    avals, arg_names, donated = [], [], []
    for path, leaf in flat:
        if path[0].idx == 0:
            position = positions[path[1].idx]
            root, donate = names[position], position in donate_positions
        else:
            root, donate = str(path[1].key), False
        rest = jax.tree_util.keystr(path[2:], simple=True, separator="/")
        arg_names.append(f"{root}/{rest}" if rest else root)
        donated.append(donate)
        avals.append(abstract(leaf, arg_names[-1]))
    return FlatStep(fn, tuple(avals), tuple(donated), tuple(arg_names), in_tree, static)


def _positions(numbers: int | Sequence[int], count: int) -> set[int]:
    """Argument positions; negative ones count from the end."""
    wanted = [numbers] if isinstance(numbers, int) else numbers
    return {i + count if i < 0 else i for i in wanted}


def _without_static(
    args: Sequence[Any], static: tuple[tuple[int, Any], ...]
) -> tuple[Any, ...]:
    skipped = {position for position, _ in static}
    return tuple(a for i, a in enumerate(args) if i not in skipped)


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"arg{i}" for i in range(len(names), count)]


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument's leaf as JAX takes it.

    Raises:
        StepNotTraceable: it is no array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if isinstance(leaf, bool | int | float | complex):
        dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        return jax.ShapeDtypeStruct((), dtype, weak_type=True)
    raise StepNotTraceable(
        f"Argument {name!r} is a {type(leaf).__name__}, which is not an array. "
        "Pass arrays or jax.ShapeDtypeStruct, or name the argument's position in "
        "static_argnums."
    )


def planning_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes whose shardings the compiler may choose.

    Raises:
        MeshError: it has no axis of size above one.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"Expected a jax.sharding.Mesh, got {type(mesh).__name__}. "
            "Make one with jax.make_mesh((4,), ('x',))."
        )
    if all(size == 1 for size in mesh.shape.values()):
        raise MeshError(
            f"The mesh {dict(mesh.shape)} has no axis of size 2 or more, so there is "
            "nothing to shard over. Use more devices (on a CPU: "
            "--xla_force_host_platform_device_count=4, or cfp's --platform cpu)."
        )
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


@dataclass(frozen=True)
class Lowering:
    """A lowered and normalised step, ready to be annotated and compiled."""

    lowered: jax.stages.Lowered
    module: ir.Module
    out_tree: Any
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    erased_constraints: int

    @property
    def text(self) -> str:
        """The module as StableHLO text; large constants are left out."""
        return str(self.module.operation.get_asm(large_elements_limit=16))


def lower_step(
    step: FlatStep,
    in_shardings: Sequence[NamedSharding],
    out_shardings: Any,
) -> Lowering:
    """Lowers a step with these shardings and normalises the module in place.

    Args:
        step: the step.
        in_shardings: one for each argument leaf.
        out_shardings: one for all outputs, or a sequence with one for each leaf.

    Raises:
        StepNotTraceable: JAX cannot trace the function.
    """
    out_avals, out_tree = tree_flatten(step.traced.out_info)
    if isinstance(out_shardings, list | tuple):
        out_shardings = tree_unflatten(out_tree, list(out_shardings))
    run = jaxpr_as_fun(step.traced.jaxpr)

    # A function of its own: JAX keeps what it lowered for a function it has seen, and
    # hands out the same module again, with the constraints of an earlier plan in it.
    def replay(*leaves: Any) -> Any:
        return tree_unflatten(out_tree, run(*leaves))

    replay.__name__ = replay.__qualname__ = step.flat_fn.__name__
    jitted = jax.jit(
        replay,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        donate_argnums=tuple(i for i, d in enumerate(step.donated) if d),
        keep_unused=True,
    )
    lowered = jitted.lower(*step.avals)
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    erased = shardy.normalise(module)
    return Lowering(lowered, module, out_tree, tuple(out_avals), erased)


def trace(step: FlatStep, mesh: Mesh) -> tuple[Program, Lowering]:
    """Lowers a step for a mesh, all replicated, and reads its program.

    Nothing is allocated. The mesh is needed because some ops lower differently for
    several devices.

    Raises:
        StepNotTraceable: JAX cannot trace the function.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    lowering = lower_step(step, [replicated] * len(step.avals), replicated)
    return read_lowering(step, lowering), lowering


def read_lowering(step: FlatStep, lowering: Lowering) -> Program:
    """Reads the program of a lowered step."""
    paths, _ = tree_flatten_with_path(
        tree_unflatten(lowering.out_tree, list(range(len(lowering.out_avals))))
    )
    output_names = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths
    ]
    return read_program(
        lowering.module,
        arg_names=step.arg_names,
        output_names=output_names,
        alias=_aliases(lowering.module, step.donated),
        erased_constraints=lowering.erased_constraints,
    )


def _aliases(module: ir.Module, donated: Sequence[bool]) -> list[int | None]:
    """For each argument, the output that the compiler will write over it."""
    function = shardy.main_function(module)
    attributes = ir.ArrayAttr(function.attributes["arg_attrs"])
    found: list[int | None] = []
    for attribute in attributes:
        entry = ir.DictAttr(attribute)
        has = "tf.aliasing_output" in entry
        found.append(int(ir.IntegerAttr(entry["tf.aliasing_output"])) if has else None)
    assert len(found) == len(donated), "the lowering dropped or added arguments"
    return found
