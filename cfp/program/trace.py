"""Lowers a traced step for a mesh, and reads its program.

XLA runs a host callback for one device, or for each. If it raises, its device stops,
and the others wait in their next collective. Virtual CPU devices abort the process, by
default after 40 seconds, without the exception. So a planned step guards callbacks:
devices continue with zeros, and the exception is raised at the step's end.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
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

from cfp.errors import CfpError, OptionError, StepNotTraceable
from cfp.program import shardy
from cfp.program.calling import given_bytes
from cfp.program.fp8 import FP8
from cfp.program.graph import Precision, Program, Rewritten
from cfp.program.jaxprs import check_settings, deferred, with_equations
from cfp.program.memory import auto_mesh, in_memory, on_auto_mesh, placed_avals
from cfp.program.partitioned import lowering_parameters
from cfp.program.read import read_program
from cfp.program.replace import rewrite_scatters
from cfp.program.step import FlatStep

# Precisions by name; then a pattern of the setting's values.
PRECISIONS: Mapping[str, Precision] = {one.name: one for one in (FP8,)}
PRECISION = "|".join(["", *(one.pattern for one in PRECISIONS.values())])
# Devices in words, such as 8xh100 or v5e-16, as `cfp.described` takes them.
_CLUSTER = re.compile(r"(\d+x)+[A-Za-z][\w-]*|[A-Za-z]\w*[:-]\d[\dx]*")


def find_precision(given: str) -> Precision | None:
    """Finds the precision of a setting, such as "fp8" of "fp8:512"; None for "".

    Raises:
        OptionError: the setting has another name or syntax.
    """
    if not re.fullmatch(PRECISION, given):
        known = "; or ".join(one.syntax for one in PRECISIONS.values())
        raise OptionError(f"Unknown precision {given!r}. Give {known}.")
    return PRECISIONS.get(re.split("[:,]", given)[0])


def planning_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with all axis types Auto.

    Raises:
        CfpError: `mesh` is no `jax.sharding.Mesh`, or has no devices; or Shardy or jit
            is turned off.
    """
    check_settings()
    if not isinstance(mesh, Mesh):
        made = "jax.make_mesh((4,), ('x',))"
        if isinstance(mesh, str) and _CLUSTER.fullmatch(mesh):
            made = f"cfp.described({mesh!r})"
        raise CfpError(
            f"The mesh must be a jax.sharding.Mesh, got {mesh!r}. Pass one, for "
            f"example {made}."
        )
    if mesh.empty:
        raise CfpError(
            "The mesh has no devices. Make one with jax.make_mesh((4,), ('x',)), or "
            "pass no mesh to use all devices."
        )
    return auto_mesh(mesh)


_ORDERED = (
    "Leave out ordered=True (of jax.debug.print, jax.debug.callback, io_callback): cfp "
    "shards only unordered effects."
)
OTHER_DEVICES = (
    "jax.set_mesh, or a mesh in the step's code (with_sharding_constraint, shard_map), "
    "has other devices than the plan's mesh. Plan and run on one mesh."
)
_INSPECTED = (
    "The step calls jax.debug.inspect_array_sharding, but no sharding is chosen while "
    "it is traced. Remove the call, save the plan, and see the shardings by cfp show "
    "PLAN --explain."
)
_FOR_GPUS = (
    "Virtual CPU devices do not have the op: plan for described GPUs, with mesh="
    'cfp.described("4xh100") or --for 4xh100.'
)
# {words of JAX's errors: advice}.
_ADVICE = {
    "ordered": _ORDERED,
    "require devices to be present": _INSPECTED,  # Other such ops are deferred.
    "incompatible devices": OTHER_DEVICES,
}


def _advice(said: str, of_no_devices: bool) -> str:
    """Returns advice on what JAX `said` when lowering failed; never ""."""
    for words, advice in _ADVICE.items():
        if words in said.lower():
            return advice
    advice = "Try jax.jit(step).lower(...) without cfp."
    if of_no_devices:
        advice = "JAX may lower it for this machine's devices, with mesh= or --mesh."
    return f"{advice} {_FOR_GPUS}" if "not found for platform cpu" in said else advice


# ------------------------------------------------ functions of the host that are called

_NAME, _RESULTS = "callback", "result_avals"


def host_calls(program: Program) -> tuple[str, ...]:
    """Returns distinct host callbacks: ``KIND at FILE:LINE``, or ``KIND``."""
    found = []
    for op in program.ops:
        if op.kind == "custom_call" and _NAME in op.attributes:
            how = op.scope.rpartition("/")[2].rstrip(":") or op.kind
            found.append(f"{how} at {op.source}" if op.source else how)
    return tuple(dict.fromkeys(found))


class Alarm:
    """The first exception of a step's host callbacks, which run in other threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._error: Exception | None = None

    def take(self) -> Exception | None:
        """Returns the exception, or None, and forgets it."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def guard(
        self, function: Callable[..., Any], results: Sequence[Any]
    ) -> Callable[..., Any]:
        """Wraps a callback: on errors returns zeros like `results`, keeps the first."""

        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:  # It is raised at the step's end.
                with self._lock:
                    self._error = self._error or error
                return tuple(np.zeros(one.shape, one.dtype) for one in results)

        return guarded


def guarded(closed: ClosedJaxpr, alarm: Alarm) -> ClosedJaxpr:
    """Returns the step with its callbacks guarded by `Alarm.guard`."""

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
    """A lowered and normalised step, ready for constraints and compilation.

    Attributes:
        module: the module of `lowered`; changes to it are compiled.
        out_tree: pytree structure of the step's results.
        alarm: keeps exceptions of host callbacks while the step runs.
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
        """The module as bytecode, without locations and the step's name."""
        bare = shardy.copied(self.module, shardy.WITHOUT_LOCATIONS)
        del bare.operation.attributes["sym_name"]
        return shardy.bytecode(bare.operation)

    @property
    def calls_host(self) -> bool:
        """True if the module has host callbacks."""
        return any(map(shardy.calls_host, shardy.every_op(self.module)))


def lower_step(
    step: FlatStep, in_shardings: Sequence[NamedSharding], out_shardings: Any
) -> Lowering:
    """Lowers a step with these shardings, normalises and rewrites its module.

    Some scatters then sum in float32, and some products have the step's `precision`.
    The compiled program takes and returns flat leaves.

    Args:
        in_shardings: one for each argument leaf.
        out_shardings: one for all outputs, or a sequence with one for each leaf.

    Raises:
        StepNotTraceable: JAX cannot trace or lower it, or it has ordered effects.
        OptionError: the step's `precision` is unknown, or its paths match no argument.
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
    # Tokens of ordered effects are further arguments.
    if len(shardy.main_block(module).arguments) > len(step.avals):
        raise StepNotTraceable(f"The step has effects in a fixed order. {_ORDERED}")
    if "InspectSharding" in map(shardy.call_target, shardy.every_op(module)):
        raise StepNotTraceable(_INSPECTED)
    erased, wide = shardy.normalise(module), rewrite_scatters(module)
    counts = {"constraints_left_out": erased, "wide_sums": wide}
    one, products = find_precision(step.precision), {}
    if one and in_shardings:
        given = step.precision, step.arg_names, in_shardings[0].mesh
        products = one.rewrite(module, *given)
    taken = one if one and one.taken in products else None
    rewritten = Rewritten(counts=counts, products=products, precision=taken)
    return Lowering(lowered, module, out_tree, rewritten, alarm)


def _lowered(
    step: FlatStep, in_shardings: Sequence[NamedSharding], outs: Any, alarm: Alarm
) -> jax.stages.Lowered:
    # Explicit axes of the caller's mesh count for results, not inside of the step.
    avals = placed_avals(step.avals, [*map(on_auto_mesh, in_shardings)])
    mesh = in_shardings[0].mesh if in_shardings else None
    of_no_devices = isinstance(mesh, AbstractMesh)
    device = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", "cuda")
    closed = guarded(step.traced.jaxpr, alarm)
    run = jaxpr_as_fun(deferred(closed) if of_no_devices else closed)

    # A new function, since JAX caches modules by function: a cached one may have an
    # earlier plan's constraints.
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
    # ``chlo.ragged_dot`` has no sharding rule. JAX writes products of masked operands
    # instead, as XLA would later.
    is_kept = "ragged_dot" in os.environ.get("XLA_FLAGS", "")
    try:
        with jax_ragged_dot_use_ragged_dot_instruction(is_kept):
            return jitted.trace(*avals).lower(
                lowering_platforms=(platform,) if of_no_devices else None,
                _private_parameters=lowering_parameters(mesh),
            )
    except Exception as error:
        # Ops and libraries raise many types.
        advice = _advice(str(error), of_no_devices)
        raise StepNotTraceable(
            f"JAX does not lower {step.flat_fn.__name__!r}: "
            f"{type(error).__name__}: {step.with_paths(str(error))}\n{advice}"
        ) from error


def trace(step: FlatStep, mesh: Mesh | AbstractMesh) -> tuple[Program, Lowering]:
    """Lowers a step for a mesh, all replicated, and reads its program.

    Nothing is allocated. The mesh matters: some ops lower differently for several
    devices.

    Raises:
        StepNotTraceable, OptionError: as for `lower_step`.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    lowering = lower_step(step, [replicated] * len(step.avals), replicated)
    program = read_lowering(step, lowering)
    pairs = zip(step.examples, step.avals, strict=True)
    given = tuple(given_bytes(leaf, aval.dtype) for leaf, aval in pairs)
    return replace(program, given=given), lowering


def read_lowering(step: FlatStep, lowering: Lowering) -> Program:
    """Reads the program of a lowered step; `Program.given` stays empty."""
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
    """Returns for each argument the output that JAX lets overwrite it, or None."""
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
    """Exports a lowered step and changes of its module, as a function of flat leaves.

    JAX's public API exports only what it lowers itself.
    """
    targets = {shardy.call_target(op) for op in shardy.every_op(lowering.module)}
    checks = [DisabledSafetyCheck.custom_call(name) for name in sorted(targets - {""})]
    closed, name = step.traced.jaxpr, step.flat_fn.__name__
    return _export._export_lowered(lowering.lowered, closed, name, checks)
