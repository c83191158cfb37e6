"""Traces a step function, with arrays or shapes, into a program.

XLA runs a function of the host for one device, or for each. If it raises, that device
stops, and the others wait for it in their next collective: on virtual CPU devices the
process aborts after 40 seconds, without the exception. So a planned step calls such
functions through a guard. The guard stores the exception, the devices continue with
zeros, and the exception is raised at the step's end.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax._src.config import jax_ragged_dot_use_ragged_dot_instruction
from jax._src.export import _export
from jax.export import DisabledSafetyCheck
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten

from cfp.errors import CfpError, StepNotTraceable
from cfp.program import shardy
from cfp.program.calling import given_bytes
from cfp.program.fp8 import use_precision
from cfp.program.graph import Program, Rewritten
from cfp.program.jaxprs import check_settings, deferred, with_equations
from cfp.program.memory import auto_mesh, in_memory, on_auto_mesh, placed_avals
from cfp.program.partitioned import lowering_parameters
from cfp.program.read import read_program
from cfp.program.replace import rewrite_scatters
from cfp.program.step import FlatStep


def planning_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes whose shardings the compiler may choose.

    Raises:
        CfpError: it is no mesh of devices.
    """
    check_settings()
    if not isinstance(mesh, Mesh):
        raise CfpError(
            f"Expected a jax.sharding.Mesh, got {type(mesh).__name__}. "
            "Make one with jax.make_mesh((4,), ('x',))."
        )
    if mesh.empty:
        raise CfpError(
            "The mesh has no devices. Make one with jax.make_mesh((4,), ('x',)), or "
            "leave it out: cfp takes all devices then."
        )
    return auto_mesh(mesh)


_ORDERED = (
    "Leave out ordered=True (of jax.debug.print, jax.debug.callback, io_callback): cfp "
    "shards only what may happen in any order."
)
OTHER_DEVICES = (
    "A mesh in the step's code, of with_sharding_constraint or shard_map, has other "
    "devices than the mesh that it is planned for: plan for the same mesh."
)
_INSPECTED = (
    "The step calls jax.debug.inspect_array_sharding, and when it is traced no "
    "sharding is chosen yet. Leave the call out, and save the plan: cfp "
    "show PLAN --explain says how the step's blocks are sharded."
)
_FOR_GPUS = (
    "Virtual CPU devices have no such op: plan for GPUs that are not here, with mesh="
    'cfp.described("4xh100"), or --for 4xh100.'
)
# Words of JAX's errors, and what to do about them.
_ADVICE = {
    "ordered": _ORDERED,
    "require devices to be present": _INSPECTED,  # Only its op is left as it is.
    "incompatible devices": OTHER_DEVICES,
}


def _advice(said: str, of_no_devices: bool) -> str:
    """Advice on an error of lowering a step."""
    for words, advice in _ADVICE.items():
        if words in said.lower():
            return advice
    advice = "Plain jax.jit does not, either."
    if of_no_devices:
        advice = "For devices that are here, with mesh= or --mesh, JAX may lower it."
    return f"{advice} {_FOR_GPUS}" if "not found for platform cpu" in said else advice


# ------------------------------------------------ functions of the host that are called

_NAME, _RESULTS = "callback", "result_avals"


def host_calls(program: Program) -> tuple[str, ...]:
    """Returns a program's calls of host functions: kind and ``file:line``."""
    found = []
    for op in program.ops:
        if op.kind == "custom_call" and _NAME in op.attributes:
            how = op.scope.rpartition("/")[2].rstrip(":") or op.kind
            found.append(f"{how} at {op.source}" if op.source else how)
    return tuple(dict.fromkeys(found))


class Alarm:
    """The first exception of the step's host functions, until it is taken.

    The functions run in threads of the runtime.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._error: Exception | None = None

    def take(self) -> Exception | None:
        """The exception, if there was one; it is forgotten here."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def guard(
        self, function: Callable[..., Any], results: Sequence[Any]
    ) -> Callable[..., Any]:
        """A function that calls another one, and returns zeros where that raises.

        Args:
            function: of flat arrays, as JAX keeps it.
            results: shapes and types of the arrays that it returns.
        """

        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:  # whatever it is, it is raised again later
                with self._lock:
                    self._error = self._error or error
                return tuple(np.zeros(one.shape, one.dtype) for one in results)

        return guarded


def guarded(closed: ClosedJaxpr, alarm: Alarm) -> ClosedJaxpr:
    """A traced step whose functions of the host raise nothing into the devices."""

    def guard(eqn: JaxprEqn) -> JaxprEqn:
        called = eqn.params.get(_NAME)
        if not (eqn.primitive.name.endswith(_NAME) and callable(called)):
            return eqn
        calls = alarm.guard(called, eqn.params.get(_RESULTS, ()))
        return eqn.replace(params={**eqn.params, _NAME: calls})

    return with_equations(closed, guard)


# ----------------------------------------------------------------------------- lowering


@dataclass(frozen=True)
class Lowering:
    """A lowered and normalised step, ready to be annotated and compiled.

    Attributes:
        alarm: has what functions of the host raise while the step runs.
    """

    lowered: jax.stages.Lowered
    module: ir.Module
    out_tree: Any
    rewritten: Rewritten
    alarm: Alarm = field(default_factory=Alarm)

    @property
    def text(self) -> str:
        """The module as StableHLO text; large constants are left out."""
        return str(self.module.operation.get_asm(large_elements_limit=16))

    @property
    def bare_text(self) -> bytes:
        """The module as bytecode, without what says where it comes from."""
        bare = shardy.copied(self.module, shardy.WITHOUT_LOCATIONS)
        return shardy.bytecode(bare.operation)

    @property
    def calls_host(self) -> bool:
        """True if the program calls functions of the host while it runs."""
        return any(map(shardy.calls_host, shardy.every_op(self.module)))


def lower_step(
    step: FlatStep, in_shardings: Sequence[NamedSharding], out_shardings: Any
) -> Lowering:
    """Lowers a step with these shardings and normalises the module in place.

    The compiled program takes and returns flat leaves.

    Args:
        in_shardings: one for each argument leaf.
        out_shardings: one for all outputs, or a sequence with one for each leaf.

    Raises:
        StepNotTraceable: JAX cannot trace the function, or not lower it for several
            devices.
    """
    check_settings()
    out_tree = tree_structure(step.traced.out_info)
    in_shardings = in_memory(in_shardings, step.memory_kinds)
    if any(kinds := step.result_memory_kinds):
        if isinstance(out_shardings, NamedSharding):
            out_shardings = [out_shardings] * len(kinds)
        out_shardings = [*in_memory(out_shardings, kinds)]
    alarm = Alarm()
    lowered = _lowered(step, in_shardings, out_shardings, alarm)
    module = shardy.stablehlo(lowered)
    # Tokens keep the order.
    if len(shardy.main_block(module).arguments) > len(step.avals):
        raise StepNotTraceable(f"The step has effects in a fixed order. {_ORDERED}")
    if "InspectSharding" in map(shardy.call_target, shardy.every_op(module)):
        raise StepNotTraceable(_INSPECTED)
    erased, wide = shardy.normalise(module), rewrite_scatters(module)
    mesh = in_shardings[0].mesh if in_shardings else None
    products = use_precision(module, step.precision, step.arg_names, mesh)
    rewritten = Rewritten(erased_constraints=erased, wide_sums=wide, products=products)
    return Lowering(lowered, module, out_tree, rewritten, alarm)


def _lowered(
    step: FlatStep, in_shardings: Sequence[NamedSharding], outs: Any, alarm: Alarm
) -> jax.stages.Lowered:
    # The caller's mesh gives results their types of axes, and none inside the step.
    avals = placed_avals(step.avals, [*map(on_auto_mesh, in_shardings)])
    mesh = in_shardings[0].mesh if in_shardings else None
    of_no_devices = isinstance(mesh, AbstractMesh)
    device = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", "cuda")
    closed = guarded(step.traced.jaxpr, alarm)
    run = jaxpr_as_fun(deferred(closed) if of_no_devices else closed)

    # A function of its own: JAX keeps what it lowered for a function it has seen, and
    # hands out the same module again, with the constraints of an earlier plan in it.
    def replay(*leaves: Any) -> list[Any]:
        return run(*leaves)

    replay.__name__ = replay.__qualname__ = step.flat_fn.__name__
    jitted = jax.jit(
        replay,
        in_shardings=in_shardings,
        out_shardings=outs,
        donate_argnums=tuple(i for i, d in enumerate(step.donated) if d),
        keep_unused=True,
    )
    # ``chlo.ragged_dot`` has no sharding rule: JAX writes products of masked operands,
    # as XLA would later.
    is_kept = "ragged_dot" in os.environ.get("XLA_FLAGS", "")
    try:
        with jax_ragged_dot_use_ragged_dot_instruction(is_kept):
            return jitted.trace(*avals).lower(
                lowering_platforms=(platform,) if of_no_devices else None,
                _private_parameters=lowering_parameters(mesh),
            )
    except Exception as error:
        # Ops and libraries refuse platforms with errors that have no type in common.
        advice = _advice(str(error), of_no_devices)
        raise StepNotTraceable(
            f"JAX does not lower {step.flat_fn.__name__!r} for several devices: "
            f"{type(error).__name__}: {step.with_paths(str(error))}\n{advice}"
        ) from error


def trace(step: FlatStep, mesh: Mesh | AbstractMesh) -> tuple[Program, Lowering]:
    """Lowers a step for a mesh, all replicated, and reads its program.

    Nothing is allocated. Some ops lower differently for several devices.

    Raises:
        StepNotTraceable: JAX cannot trace the function.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    lowering = lower_step(step, [replicated] * len(step.avals), replicated)
    program = read_lowering(step, lowering)
    given = tuple(
        given_bytes(leaf, aval.dtype)
        for leaf, aval in zip(step.examples, step.avals, strict=True)
    )
    return replace(program, given=given), lowering


def read_lowering(step: FlatStep, lowering: Lowering) -> Program:
    """Reads the program of a lowered step."""
    paths, _ = tree_flatten_with_path(
        tree_unflatten(lowering.out_tree, range(lowering.out_tree.num_leaves))
    )
    results = tuple(
        jax.ShapeDtypeStruct(made.shape, made.dtype, weak_type=made.weak_type)
        for made in step.traced.jaxpr.out_avals
    )
    return replace(
        read_program(lowering.module),
        arg_names=step.arg_names,
        output_names=tuple(keystr(p, simple=True, separator="/") for p, _ in paths),
        alias=_aliases(lowering.module, step.donated),
        rewritten=lowering.rewritten,
        arg_avals=step.avals,
        output_avals=results,
        arg_memory=step.memory_kinds,
        output_memory=step.result_memory_kinds,
    )


def _aliases(module: ir.Module, donated: Sequence[bool]) -> tuple[int | None, ...]:
    """For each argument, the output that the compiler will write over it."""
    function = shardy.main_function(module)
    attributes = ir.ArrayAttr(function.attributes["arg_attrs"])
    found: list[int | None] = []
    for attribute in attributes:
        entry = ir.DictAttr(attribute)
        has = "tf.aliasing_output" in entry
        found.append(int(ir.IntegerAttr(entry["tf.aliasing_output"])) if has else None)
    assert len(found) == len(donated), "the lowering dropped or added arguments"
    return tuple(found)


def exported(step: FlatStep, lowering: Lowering) -> jax.export.Exported:
    """Exports a lowered step with all that was changed in its module.

    JAX exports what it lowers itself; by no public name it takes a lowering.
    """
    targets = {shardy.call_target(op) for op in shardy.every_op(lowering.module)}
    checks = [DisabledSafetyCheck.custom_call(name) for name in sorted(targets - {""})]
    name = step.flat_fn.__name__
    closed = step.traced.jaxpr
    return _export._export_lowered(lowering.lowered, closed, name, checks)
