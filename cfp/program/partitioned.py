"""Ops of jax.experimental.custom_partitioning inside a step.

JAX lowers such an op to a call that carries the address of its callbacks: another one
in every trace and every process, and of no use once they are gone. Here the call has a
name that is made of what it computes instead, and callbacks are kept by that name as
long as the process lives. Its sharding rule is the one that its callbacks keep, see
`cfp.program.asked`. Before a module is compiled, :func:`bind` gives JAX's partitioner
the callbacks for the module's mesh. They put the op's operands into shardings that the
rule allows before the op's own ``partition`` sees them, so that it is not given what it
refuses.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callbacks
from jax._src import custom_partitioning as jax_partitioning
from jax._src import custom_partitioning_sharding_rule as jax_rules
from jax._src import debugging as jax_debugging
from jax._src.config import use_shardy_partitioner
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cfp.errors import StepNotTraceable
from cfp.program import shardy
from cfp.program.asked import (
    CallbackRule,
    Callbacks,
    Dims,
    Factor,
    factors_of,
    factors_of_cudnn,
    kept_rule,
    written,
)
from cfp.program.graph import PARTITIONED, Spec, axes_of, inner_flops
from cfp.program.jaxprs import closed_with, with_equations, with_inner
from cfp.program.read import read_program
from cfp.program.rules import rule_of

TARGET = "CustomSPMDPartitioning"
_CONFIG = "backend_config"
_PREFIX = "cfp"
_rule_in_mlir: Any = jax_rules.sdy_sharding_rule_to_mlir
_OF_SHARDINGS = "inspect_sharding"
# They ask for the runtime of the platform, of which TPUs' alone is used.
_HOST_CALLS: tuple[tuple[Primitive, Callable[..., Any]], ...] = (
    (jax_callbacks.pure_callback_p, jax_callbacks.pure_callback_lowering),
    (jax_callbacks.io_callback_p, jax_callbacks.io_callback_lowering),
    (jax_debugging.debug_callback_p, jax_debugging.debug_callback_lowering),
    (jax_debugging.debug_print_p, jax_debugging.debug_print_lowering_rule),
)


@dataclass(frozen=True, eq=False)
class PartitionedCall:
    """A custom_partitioning op of some program.

    Attributes:
        name: what stands in programs: equal for ops that compute the same.
        callbacks: the op's own.
        asked: the factors that the callbacks keep.
        rule: the same as Shardy writes it.
        whole: what it computes, on one device.
        platforms: that it was lowered for.
    """

    name: str
    callbacks: Callbacks
    asked: CallbackRule
    rule: str
    whole: ClosedJaxpr
    platforms: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the function that the user wrote."""
        return self.name.split(":")[1]


# By name, and by name and mesh: kept while the process lives, since what was planned
# may be compiled at any time. There are as many as there are different ops.
_CALLS: dict[str, PartitionedCall] = {}
_BOUND: dict[bytes, Any] = {}
_DESCRIBED: dict[Any, PartitionedCall] = {}
_LOCK = Lock()


def call_of(attributes: str) -> PartitionedCall | None:
    """The custom_partitioning op whose call has these attributes, if it is one."""
    found = PARTITIONED.search(attributes)
    return _CALLS.get(found[1]) if found else None


def traced_with_callbacks(
    fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]
) -> jax.stages.Traced:
    """Traces a function, with custom_partitioning ops that have callbacks alone.

    JAX refuses those since Shardy, which has no callbacks, propagates shardings. While
    Shardy is off, it keeps the callbacks; nothing is lowered then.
    """
    try:
        return jax.jit(fn).trace(*avals)
    except NotImplementedError as error:
        if "sharding_rule" not in str(error):
            raise
    with use_shardy_partitioner(False):
        return jax.jit(fn).trace(*avals)


# --------------------------------------------------------------------------- lowering


def lowering_parameters(mesh: Mesh | AbstractMesh | None) -> mlir.LoweringParameters:
    """Parameters of a lowering by which such ops are lowered as described above.

    For a mesh without devices calls of the host's functions are lowered, too.

    Args:
        mesh: the mesh that a program is lowered for; None if it has no arguments.
    """
    if mesh is None:
        return mlir.LoweringParameters()
    rules: Any = ((jax_partitioning.custom_partitioning_p, partial(_lower, mesh)),)
    if isinstance(mesh, AbstractMesh):
        rules += tuple(
            (op, partial(_without_runtime, rule)) for op, rule in _HOST_CALLS
        )
    return mlir.LoweringParameters(override_lowering_rules=rules)


def _without_runtime(rule: Callable[..., Any], context: Any, *values: Any, **how: Any):
    """Lowers a call of a function of the host on a machine without the platform."""
    around = context.module_context
    (platform,) = around.platforms
    alone = around.replace(backend=SimpleNamespace(platform=platform))
    return rule(context.replace(module_context=alone), *values, **how)


def _lower(
    mesh: Mesh | AbstractMesh,
    context: Any,
    *values: ir.Value,
    call: ClosedJaxpr,
    in_tree: Any,
    out_tree: Any,
    partition: Callable[..., Any],
    sharding_rule: Any,
    static_args: tuple[Any, ...],
    **_: Any,
) -> Sequence[ir.Value]:
    around = context.module_context.axis_context
    manual = isinstance(around, mlir.SPMDAxisContext) and set(
        around.manual_axes
    ) == set(around.mesh.axis_names)
    if manual or math.prod(mesh.shape.values()) == 1:
        inside = mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)
        return inside(context, *values)
    reads, makes = _shapes(call.in_avals), _shapes(call.out_avals)
    results = [
        ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in makes
    ]
    rule = _own_rule(mesh, sharding_rule, static_args, values, results)
    callbacks = Callbacks(
        partition=partial(partition, *static_args),
        operands=reads,
        results=makes,
        in_tree=in_tree,
        out_tree=out_tree,
    )
    platforms = tuple(context.module_context.platforms)
    what = (str(call), partition, static_args, in_tree, rule, platforms)
    where = (tuple(mesh.shape.items()), isinstance(mesh, AbstractMesh))
    factors = factors_of_cudnn(partition, static_args, callbacks.tensors)
    if factors is None:
        own = rule_of(ir.Attribute.parse(rule)) if rule else None
        factors = [*factors_of(own, callbacks.tensors)]
    describe = partial(_described, call, callbacks, factors, mesh, platforms)
    found = _known((*what, *where), describe)
    made = ir.Operation.create(
        "stablehlo.custom_call",
        results=results,
        operands=list(values),
        attributes={
            "call_target_name": ir.StringAttr.get(TARGET),
            "has_side_effect": ir.BoolAttr.get(False),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
            "called_computations": ir.ArrayAttr.get([]),
            _CONFIG: ir.StringAttr.get(found.name),
            shardy.RULE: ir.Attribute.parse(found.rule),
        },
    )
    return list(made.results)


def deferred(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose ops do not ask for devices while it is lowered.

    JAX refuses to lower custom_partitioning ops, what becomes one, and functions of the
    host for a mesh without devices. Here they are lowered without.
    """
    return closed_with(closed, _deferred)


def _deferred(jaxpr: Jaxpr) -> Jaxpr:
    return with_equations(jaxpr, _deferred_eqn)


def _deferred_eqn(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive not in prim_requires_devices_during_lowering:
        return with_inner(eqn, _deferred)
    if eqn.primitive.name == _OF_SHARDINGS:
        return eqn
    avals = tuple(v.aval for v in eqn.outvars)
    what = _Op(eqn.primitive, dict(eqn.params))
    return eqn.replace(primitive=_deferred_p, params={"op": what, "avals": avals})


@dataclass(frozen=True, eq=False)
class _Op:
    """An op of JAX's that is lowered later; it hides the op's parameters."""

    primitive: Primitive
    params: dict[str, Any]

    def __call__(self, *operands: Any) -> Any:
        made = self.primitive.bind(*operands, **self.params)
        return made if self.primitive.multiple_results else [made]


_deferred_p = Primitive("deferred")
_deferred_p.multiple_results = True
_deferred_p.def_abstract_eval(lambda *_, op, avals: list(avals))


mlir.register_lowering(
    _deferred_p,
    lambda context, *values, op, avals: mlir.lower_fun(op, multiple_results=True)(
        context, *values
    ),
)


def _own_rule(
    mesh: Mesh | AbstractMesh,
    given: Any,
    static_args: tuple[Any, ...],
    values: Sequence[ir.Value],
    results: Sequence[ir.Type],
) -> str | None:
    """The rule that comes with an op, as Shardy writes it; None if none does."""
    if given is None:
        return None
    rule: Any = given
    operands = [value.type for value in values]
    if callable(rule):
        rule = rule(*static_args, mesh, operands, list(results))
        settings: dict[str, Any] = {}
        if isinstance(rule, list | tuple) and len(rule) == 2:
            rule, settings = rule
        if isinstance(rule, str):
            rule = jax_rules.str_to_sdy_sharding_rule(rule, **settings)
    return str(_rule_in_mlir(rule, operands, list(results)))


def _known(
    key: tuple[Any, ...], describe: Callable[[], PartitionedCall]
) -> PartitionedCall:
    """The description of an op; made once for ops that are the same in all."""
    try:
        known = _DESCRIBED.get(key)
    except TypeError:  # a static argument cannot be hashed
        return describe()
    if known is None:
        known = _DESCRIBED[key] = describe()
    return known


def _described(
    call: ClosedJaxpr,
    callbacks: Callbacks,
    factors: Sequence[Factor],
    mesh: Mesh | AbstractMesh,
    platforms: tuple[str, ...],
) -> PartitionedCall:
    asked = kept_rule(callbacks, factors, mesh)
    text = str(written(asked, callbacks.tensors, len(callbacks.operands)))
    inside, flops = _inside(call, platforms)
    parts = (inside, text, asked.locals, asked.refusals, str(callbacks.in_tree))
    digest = hashlib.sha256(repr((*parts, platforms)).encode()).hexdigest()[:24]
    label = re.sub(r"\W", "_", str(call.jaxpr.debug_info.func_name))
    name = f"{_PREFIX}:{label}:{flops}:{digest}"
    found = PartitionedCall(name, callbacks, asked, text, call, platforms)
    with _LOCK:
        _CALLS[name] = found
    return found


def _shapes(avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)


def _inside(call: ClosedJaxpr, platforms: tuple[str, ...]) -> tuple[str, int]:
    """The digest of what an op computes on one device, and its FLOPs."""
    run = jaxpr_as_fun(call)

    def inside(*operands: jax.Array) -> Any:
        return run(*operands)

    traced = jax.jit(inside, keep_unused=True).trace(*_shapes(call.in_avals))
    module = shardy.stablehlo(traced.lower(lowering_platforms=platforms))
    shardy.normalise(module)
    names = [""] * len(call.in_avals)
    outputs = [""] * len(call.out_avals)
    program = read_program(
        module, arg_names=names, output_names=outputs, alias=[None] * len(names)
    )
    ops = shardy.program_ops(shardy.main_function(module))
    return program.content, inner_flops(program, ops)


# -------------------------------------------------------------------------- compiling


def bind(module: ir.Module, mesh: Mesh) -> None:
    """Has JAX's partitioner find the callbacks of a module's calls, in place.

    Args:
        module: a module of a program that was lowered in this process.

    Raises:
        StepNotTraceable: this process has not lowered the program.
    """
    for op, name in _calls_in(module):
        if "@" in name:
            continue
        call = _CALLS.get(name)
        if call is None:
            raise StepNotTraceable(
                f"The program has a custom_partitioning op, {name!r}, whose callbacks "
                "are not in this process. Expected a step that this process has "
                "traced. Trace or plan the step here: callbacks are Python functions, "
                "which a program's text does not hold."
            )
        devices = mesh.devices.flat
        where = (tuple(mesh.shape.items()), [(d.platform, d.id) for d in devices])
        digest = hashlib.sha256(repr(where).encode()).hexdigest()[:12]
        bound = f"{name}@{digest}"
        with module.context:
            op.attributes[_CONFIG] = ir.StringAttr.get(bound)
        _register(bound.encode(), call, mesh)


def is_call(op: ir.Operation) -> bool:
    """True if an op calls a custom_partitioning op, which has no effects."""
    if shardy.call_target(op) != TARGET:
        return False
    return ir.StringAttr(op.attributes[_CONFIG]).value.startswith(f"{_PREFIX}:")


def _calls_in(module: ir.Module) -> Iterator[tuple[ir.Operation, str]]:
    for op in filter(is_call, shardy.every_op(module)):
        yield op, ir.StringAttr(op.attributes[_CONFIG]).value


def _register(key: bytes, call: PartitionedCall, mesh: Mesh) -> None:
    callbacks = call.callbacks

    def named(sharding: Any, rank: int) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*_axes_in(sharding, mesh, rank)))

    with _LOCK:
        if key in _BOUND:
            return
        info = jax_partitioning._ShardingCallbackInfo(
            None,
            partial(_partition, call),
            named,
            callbacks.in_tree,
            callbacks.out_tree,
            None,
            SimpleNamespace(platforms=call.platforms, backend=None),
            mesh,
            (),
        )
        _BOUND[key] = info
        jax_partitioning._sharding_callbacks[key] = info


def _axes_in(sharding: Any, mesh: Mesh, rank: int) -> list[tuple[str, ...]]:
    """The axes of each dim of XLA's sharding; none where it uses a part of an axis."""
    if sharding is None or not sharding.is_tiled():
        return [()] * rank
    ways = sharding.tile_assignment_dimensions()
    tiles = np.unravel_index(np.argsort(sharding.tile_assignment_devices()), ways)
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    devices = np.unravel_index(np.arange(mesh.size), tuple(sizes.values()))
    places = dict(zip(sizes, devices, strict=True))

    def splits(names: tuple[str, ...], dim: int) -> bool:
        shape = tuple(sizes[name] for name in names)
        if not names or math.prod(shape) != ways[dim]:
            return False
        tile = np.ravel_multi_index(tuple(places[name] for name in names), shape)
        return bool((tile == tiles[dim]).all())

    orders = [
        names
        for count in range(len(sizes) + 1)
        for names in itertools.permutations(sizes, count)
    ]
    return [
        next((names for names in orders if splits(names, dim)), ())
        for dim in range(rank)
    ]


def _partition(call: PartitionedCall, mesh: Mesh, operands: Any, results: Any) -> Any:
    """Returns the per-device function of a call, as JAX's ``partition`` callback."""
    callbacks = call.callbacks
    given = (
        *callbacks.in_tree.flatten_up_to(operands),
        *callbacks.out_tree.flatten_up_to(results),
    )
    axes = [axes_of(one.sharding.spec, len(one.shape)) for one in given]
    dims = _settled(call, mesh, axes)
    ins, outs = callbacks.sharded(mesh, dims)
    if dims:
        return callbacks.partition(mesh, ins, outs)

    def alone(*trees: Any) -> Any:
        """Each device computes what one device alone does."""
        leaves = callbacks.in_tree.flatten_up_to(trees)
        return callbacks.out_tree.unflatten(jaxpr_as_fun(call.whole)(*leaves))

    return mesh, alone, *jax.tree.map(lambda one: one.sharding, (outs, ins))


def _settled(call: PartitionedCall, mesh: Mesh, given: Sequence[Spec]) -> Dims:
    """Shards all dims of a factor as the first of them that is, and no others."""
    found: Dims = {}
    used: set[str] = set()
    for factor in call.asked.factors:
        wanted = (given[tensor][dim] for tensor, dim in factor.places)
        axes = next((names for names in wanted if names), ())
        ways = math.prod(mesh.shape[name] for name in axes)
        if axes and not used.intersection(axes) and factor.size % ways == 0:
            used.update(axes)
            found.update((place, axes) for place in factor.places)
    return found
