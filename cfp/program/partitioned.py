"""Ops of jax.experimental.custom_partitioning inside a step.

JAX lowers such an op to a call with the address of its callbacks. The address differs
between traces and processes. Here the call has a name instead, a digest of the
computations of op and callback, and callbacks are kept by name until the process ends.

An op is sharded by its own rule (``sharding_rule=``), an op without a rule replicated.
The rule of JAX's cuDNN attention omits keys; a table replaces it. For each factor of
the rule, ``partition`` is called once with the factor's dims sharded. If it raises or
changes the shardings, the factor is not sharded.

Before a module is compiled, :func:`bind` gives JAX's partitioner callbacks for the
module's mesh. They reshard the operands as the rule allows before the op's own
``partition`` is called.
"""

# pyright: reportPrivateImportUsage=false
# (of jax 0.12, which exports ClosedJaxpr in a way that pyright takes for private)

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callbacks
from jax._src import custom_partitioning as jax_partitioning
from jax._src import custom_partitioning_sharding_rule as jax_rules
from jax._src import debugging as jax_debugging
from jax._src.config import use_shardy_partitioner
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from cfp.errors import StepNotTraceable, summary_of
from cfp.program import shardy
from cfp.program.graph import PARTITIONED, Spec, axes_of, inner_flops
from cfp.program.jaxprs import equations
from cfp.program.read import read_program
from cfp.program.rules import Rule, rule_of

TARGET = "CustomSPMDPartitioning"
_CONFIG = "backend_config"
_PREFIX = "cfp"
# Lowering host callbacks requests the platform's runtime, and uses it only on TPUs.
_HOST_CALLS: tuple[tuple[Primitive, Callable[..., Any]], ...] = (
    (jax_callbacks.pure_callback_p, jax_callbacks.pure_callback_lowering),
    (jax_callbacks.io_callback_p, jax_callbacks.io_callback_lowering),
    (jax_debugging.debug_callback_p, jax_debugging.debug_callback_lowering),
    (jax_debugging.debug_print_p, jax_debugging.debug_print_lowering_rule),
)

OpDim = tuple[int, int]  # (number among operands and then results, dim)
Shape = jax.ShapeDtypeStruct
Dims = dict[OpDim, tuple[str, ...]]  # the mesh axes of each sharded dim


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor (dims of an op's tensors that are sharded alike) that may be sharded.

    Attributes:
        places: (tensor, dim) pairs; tensors are the operands, then the results.
        size: all allowed numbers of pieces divide it.
        is_sum: True if the op sums over the factor.
    """

    places: tuple[OpDim, ...]
    size: int
    is_sum: bool = False


@dataclass(frozen=True, eq=False)
class PartitionedCall:
    """A custom_partitioning op of a program.

    Attributes:
        whole: the op's computation on one device.
        partition: the user's callback, called with a mesh, operands and results.
        platforms: platforms that the op was lowered for.
        name: its name in modules: `label`, FLOPs, digest of computation and rule.
        factors: factors that the callback shards.
        refusals: distinct reasons why other factors are not sharded.
        rule: text of Shardy's rule for `factors`.
    """

    whole: ClosedJaxpr
    partition: Callable[..., Any]
    in_tree: Any
    out_tree: Any
    platforms: tuple[str, ...]
    name: str = ""
    factors: tuple[Factor, ...] = ()
    refusals: tuple[str, ...] = ()
    rule: str = ""

    @property
    def label(self) -> str:
        """Name of the function that custom_partitioning wraps, as an identifier."""
        return re.sub(r"\W", "_", str(self.whole.jaxpr.debug_info.func_name))

    @property
    def tensors(self) -> tuple[Shape, ...]:
        """Shapes of the operands, then of the results."""
        return _shapes((*self.whole.in_avals, *self.whole.out_avals))

    def partitioned(self, mesh: Mesh | AbstractMesh, dims: Dims) -> tuple[Any, ...]:
        """Calls the user's callback with these dims sharded; returns its result."""
        shaped = []
        for number, t in enumerate(self.tensors):
            parts = (dims.get((number, dim)) for dim in range(len(t.shape)))
            spec = PartitionSpec(*(p[0] if p and len(p) == 1 else p for p in parts))
            shaped.append(Shape(t.shape, t.dtype, sharding=NamedSharding(mesh, spec)))
        count = self.in_tree.num_leaves
        ins, outs = shaped[:count], shaped[count:]
        return self.partition(
            mesh, self.in_tree.unflatten(ins), self.out_tree.unflatten(outs)
        )

    def tried(self, mesh: AbstractMesh, dims: Dims) -> tuple[str, str]:
        """Returns (why the callback does not shard dims, ""), or ("", computation)."""
        try:
            _, lower, results, operands = self.partitioned(mesh, dims)
            kept = self.axes(operands, results)
            ins = zip(self.in_tree.flatten_up_to(operands), self.tensors, strict=False)
            pieces = [Shape(one.shard_shape(t.shape), t.dtype) for one, t in ins]
            trace = jax.make_jaxpr(lower, axis_env=[*mesh.shape.items()])
            made = trace(*self.in_tree.unflatten(pieces))
        except Exception as error:  # Users' callbacks raise any type.
            return summary_of(error), ""
        places = {(n, d): a for n, s in enumerate(kept) for d, a in enumerate(s) if a}
        if places != dims:
            return "its callback returns other shardings", ""
        [[axis], *_] = dims.values()
        text = f"{made} {[*_digests(made)]}"
        # Without addresses of Python's objects, and the axis' name.
        return "", re.sub(rf" at 0x[0-9a-f]+|{axis!r}", "", text)

    def axes(self, operands: Any, results: Any) -> list[Spec]:
        """Returns each tensor's mesh axes by dim, from trees of `NamedSharding` s."""
        leaves = self.in_tree.flatten_up_to(operands)
        leaves = [*leaves, *self.out_tree.flatten_up_to(results)]
        pairs = zip(leaves, self.tensors, strict=True)
        return [axes_of(one.spec, len(t.shape)) for one, t in pairs]


def _shapes(avals: Iterable[Any]) -> tuple[Shape, ...]:
    return tuple(Shape(a.shape, a.dtype) for a in avals)


def _digests(jaxpr: ClosedJaxpr) -> Iterator[str]:
    """Yields digests of a jaxpr's constants, and of those in inner jaxprs."""
    inner = jax.tree.leaves([[*e.params.values()] for e in equations(jaxpr.jaxpr)])
    for const in (x for one in (jaxpr, *inner) for x in getattr(one, "consts", ())):
        is_key = jax.dtypes.issubdtype(const.dtype, jax.dtypes.prng_key)
        numbers = np.asarray(jax.random.key_data(const) if is_key else const)
        yield hashlib.sha256(numbers.tobytes()).hexdigest()


# Calls by name, by name and mesh, and by description: kept until the process ends,
# since plans may be compiled at any time. Each holds one entry per different op.
_CALLS: dict[str, PartitionedCall] = {}
_BOUND: dict[str, Any] = {}
_DESCRIBED: dict[Any, PartitionedCall] = {}


def call_of(attributes: str) -> PartitionedCall | None:
    """Finds the call that attributes name; None without one lowered in this process."""
    found = PARTITIONED.search(attributes)
    return _CALLS.get(found[1]) if found else None


def traced_with_callbacks(
    fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]
) -> jax.stages.Traced:
    """Traces a function that may have custom_partitioning ops without sharding_rule.

    JAX refuses such ops with Shardy. The function is then traced without Shardy.
    """
    try:
        return jax.jit(fn).trace(*avals)
    except NotImplementedError as error:
        if "sharding_rule" not in str(error):
            raise
    with use_shardy_partitioner(False):
        return jax.jit(fn).trace(*avals)


# ------------------------------------------------------------------------------- rules

# Dims of operands, then results, of JAX's cuDNN attention, by the callback's name. "B"
# is sequences, "N" heads, "." not sharded, "****" the layout of queries.
_HEADS, _BIAS, _STATISTICS = "****", "BN..", "BN."
_INPUTS = (_HEADS, _HEADS, _HEADS, _BIAS, "B", "B", "B.", "B.", "", "")
_CUDNN = {
    "_dot_product_attention_fwd_partition": (*_INPUTS, _HEADS, _STATISTICS),
    "_dot_product_attention_bwd_partition": (
        *(*_INPUTS, _STATISTICS, _HEADS, _HEADS),
        *(_HEADS, _HEADS, _HEADS, _BIAS),
    ),
}
_CUDNN_MODULE = "jax._src.cudnn.fused_attention_stablehlo"


def factors_of_cudnn(
    partition: Callable[..., Any], static_args: Sequence[Any], tensors: Sequence[Shape]
) -> list[Factor]:
    """Returns factors of JAX's cuDNN attention, batch and heads; [] for other ops."""
    name = getattr(partition, "__name__", "")
    if getattr(partition, "__module__", "") != _CUDNN_MODULE or name not in _CUDNN:
        return []
    layout = ("BTNH", "BNTH")[static_args[5]]
    found, pairs = [], [*enumerate(zip(tensors, _CUDNN[name], strict=False))]
    for letter in "BN":
        places = tuple(
            (number, dim)
            for number, (tensor, letters) in pairs
            if len(letters) == len(tensor.shape)
            for dim, own in enumerate(layout if letters == _HEADS else letters)
            if own == letter and tensor.shape[dim] > 1
        )
        found.append(Factor(places, _common(tensors, places)))
    return found


def factors_of(rule: Rule | None, tensors: Sequence[Shape]) -> Iterator[Factor]:
    """Yields factors that may be sharded: summed ones, and those that results share."""
    if rule is None:
        return
    for factor, size in enumerate(rule.sizes):
        places, in_pieces = [], False
        for tensor, dims in enumerate((*rule.operands, *rule.results)):
            for dim, factors in enumerate(dims):
                if rule.major(factors) == factor and factor not in rule.fixed:
                    places.append((tensor, dim))
                    in_pieces |= bool(rule.fixed.intersection(factors))
        is_sum = factor in rule.reduction
        if is_sum or (len(places) > 1 and places[-1][0] >= len(rule.operands)):
            # The factor's size limits it only if a dim has another, fixed factor.
            common = _common(tensors, places, size if in_pieces else 0)
            yield Factor(tuple(places), common, is_sum)


def _common(tensors: Sequence[Shape], places: Iterable[OpDim], pieces: int = 0) -> int:
    """Returns the greatest common divisor of dims' sizes, and of `pieces`."""
    return math.gcd(pieces, *(tensors[tensor].shape[dim] for tensor, dim in places))


# --------------------------------------------------------------------------- lowering


def lowering_parameters(mesh: Mesh | AbstractMesh | None) -> mlir.LoweringParameters:
    """Returns JAX's lowering parameters that make custom_partitioning ops named calls.

    On one device (`mesh` is None or has size 1), and in a `shard_map` over all axes,
    the ops are inlined instead. For an `AbstractMesh`, host callbacks are lowered
    without the platform's runtime.
    """
    rules: Any = [(jax_partitioning.custom_partitioning_p, partial(_lower, mesh))]
    if isinstance(mesh, AbstractMesh):
        rules += [(op, partial(_without_runtime, rule)) for op, rule in _HOST_CALLS]
    return mlir.LoweringParameters(override_lowering_rules=tuple(rules))


def _without_runtime(rule: Callable[..., Any], context: Any, *values: Any, **how: Any):
    """Lowers a host callback on a machine without devices of the platform."""
    around = context.module_context
    (platform,) = around.platforms
    alone = around.replace(backend=SimpleNamespace(platform=platform))
    return rule(context.replace(module_context=alone), *values, **how)


def _lower(
    mesh: Mesh | AbstractMesh | None,
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
    manual = isinstance(around, mlir.SPMDAxisContext)
    manual = manual and {*around.manual_axes} == {*around.mesh.axis_names}
    if manual or mesh is None or mesh.size == 1:
        inside = mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)
        return inside(context, *values)
    results = [mlir.aval_to_ir_type(context.module_context, a) for a in call.out_avals]
    operands = [value.type for value in values]
    rule: Any = sharding_rule
    if callable(rule):
        rule = rule(*static_args, mesh, operands, results)
        rule, settings = rule if isinstance(rule, list | tuple) else (rule, {})
        if isinstance(rule, str):
            rule = jax_rules.str_to_sdy_sharding_rule(rule, **settings)
    if rule is not None:
        rule = rule_of(jax_rules.sdy_sharding_rule_to_mlir(rule, operands, results))
    platforms = tuple(context.module_context.platforms)
    bound = partial(partition, *static_args)
    new = PartitionedCall(call, bound, in_tree, out_tree, platforms)
    sizes = tuple(mesh.shape.items())
    key = str(call), partition, repr(static_args), in_tree, rule, platforms, sizes
    if (found := _DESCRIBED.get(key)) is None:
        factors = factors_of_cudnn(partition, static_args, new.tensors)
        factors = factors or factors_of(rule, new.tensors)
        found = _DESCRIBED[key] = _described(new, factors, mesh)
    made = stablehlo.CustomCallOp(
        results,
        values,
        TARGET,
        has_side_effect=False,
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(found.name),
    )
    made.attributes[shardy.RULE] = ir.Attribute.parse(found.rule)
    return list(made.results)


def _described(
    call: PartitionedCall, factors: Iterable[Factor], mesh: Mesh | AbstractMesh
) -> PartitionedCall:
    """Tries each factor with the callback; returns the named call, kept in `_CALLS`.

    A factor is tried over the mesh's first axis of size 2 or more, in as few pieces as
    divide it. So the result is equal for meshes of all sizes.
    """
    axis = next(name for name, size in mesh.shape.items() if size > 1)
    tried: dict[Factor, tuple[str, str]] = {}
    for factor in factors:
        ways = next((n for n in range(2, factor.size + 1) if factor.size % n == 0), 0)
        if ways:
            sizes = tuple(ways if name == axis else 1 for name in mesh.shape)
            shape = AbstractMesh(sizes, tuple(mesh.shape))
            tried[factor] = call.tried(shape, dict.fromkeys(factor.places, (axis,)))
    kept = tuple(factor for factor, (refusal, _) in tried.items() if not refusal)
    refusals = tuple(dict.fromkeys(why for why, _ in tried.values() if why))
    rule = str(_written(kept, call.tensors, call.in_tree.num_leaves))
    content, flops = _inside(call.whole, call.platforms)
    parts = content, rule, *tried.values(), call.in_tree, call.platforms
    digest = hashlib.sha256(repr([*map(str, parts)]).encode()).hexdigest()[:24]
    name = f"{_PREFIX}:{call.label}:{flops}:{digest}"
    _CALLS[name] = replace(call, name=name, factors=kept, refusals=refusals, rule=rule)
    return _CALLS[name]


def _written(
    factors: Sequence[Factor], tensors: Sequence[Shape], operands: int
) -> ir.Attribute:
    """Writes Shardy's rule; dims without these factors get factors of their own."""
    sizes = [factor.size for factor in factors]
    of = {place: n for n, one in enumerate(factors) for place in one.places}

    mappings = []
    for tensor, aval in enumerate(tensors):
        dims = []
        for place in ((tensor, dim) for dim in range(len(aval.shape))):
            known = [of[place]] if place in of else []
            rest = aval.shape[place[1]] // math.prod(sizes[n] for n in known)
            if rest > 1 or not known:
                sizes.append(rest)
                known.append(len(sizes) - 1)
            dims.append(sdy.DimMappingAttr.get(known))
        mappings.append(sdy.TensorMappingAttr.get(dims))
    return sdy.OpShardingRuleAttr.get(
        sizes,
        mappings[:operands],
        mappings[operands:],
        [n for n, factor in enumerate(factors) if factor.is_sum],
        [n for n in range(len(factors), len(sizes)) if sizes[n] > 1],
        is_custom=True,
    )


def _inside(call: ClosedJaxpr, platforms: tuple[str, ...]) -> tuple[str, int]:
    """Returns the digest of an op's computation on one device, and its FLOPs."""
    alone = jax.jit(jaxpr_as_fun(call), keep_unused=True)
    traced = alone.trace(*_shapes(call.in_avals))
    module = shardy.stablehlo(traced.lower(lowering_platforms=platforms))
    shardy.normalise(module)
    program = read_program(module)
    ops = shardy.program_ops(shardy.main_function(module))
    return program.content, inner_flops(program, ops)


# -------------------------------------------------------------------------- compiling


def bind(module: ir.Module, mesh: Mesh) -> None:
    """Registers a module's callbacks with JAX's partitioner, and renames its calls.

    Raises:
        StepNotTraceable: a custom_partitioning op was not lowered in this process.
    """
    for op in filter(is_call, shardy.every_op(module)):
        name = ir.StringAttr(op.attributes[_CONFIG]).value
        if "@" in name:
            continue
        if (call := _CALLS.get(name)) is None:
            raise StepNotTraceable(
                f"The program has a custom_partitioning op, {name!r}, whose callbacks "
                "are not in this process. Trace or plan the step here: its callbacks "
                "are Python functions, which a program's text does not hold."
            )
        where = tuple(mesh.shape.items()), [*mesh.devices.flat]
        digest = hashlib.sha256(repr(where).encode()).hexdigest()[:12]
        bound = f"{name}@{digest}"
        with module.context:
            op.attributes[_CONFIG] = ir.StringAttr.get(bound)
        info = jax_partitioning._ShardingCallbackInfo(
            None,
            partial(_partition, call),
            lambda sharding, _: NamedSharding(mesh, spec_of(sharding, mesh)),
            call.in_tree,
            call.out_tree,
            None,
            SimpleNamespace(platforms=call.platforms, backend=None),
            mesh,
            (),
        )
        # JAX keeps no callbacks alive.
        known = _BOUND.setdefault(bound, info)
        jax_partitioning._sharding_callbacks[bound.encode()] = known


def is_call(op: ir.Operation) -> bool:
    """True if an op is a call of a custom_partitioning op, by cfp's name."""
    if shardy.call_target(op) != TARGET:
        return False
    return ir.StringAttr(op.attributes[_CONFIG]).value.startswith(f"{_PREFIX}:")


def spec_of(sharding: Any, mesh: Mesh) -> PartitionSpec:
    """Converts an XLA sharding to a `PartitionSpec` of a mesh.

    Returns ``PartitionSpec()``, replicated, if no spec over whole axes describes it.
    """
    if not sharding.is_tiled():
        return PartitionSpec()
    sizes, shape = mesh.devices.shape, sharding.tile_assignment_dimensions()
    # The tensor's dims come first, then dims of devices with the same piece.
    behind = sharding.replicate_on_last_tile_dim() + len(sharding.subgroup_types())
    devices = np.argsort(sharding.tile_assignment_devices())
    pieces = np.indices(shape).reshape(len(shape), -1)[: len(shape) - behind, devices]
    spec = []
    for piece in pieces.reshape(-1, *sizes):
        steps = [
            int(piece.take(min(1, size - 1), axis).flat[0])
            for axis, size in enumerate(sizes)
        ]
        if not np.array_equal(np.tensordot(steps, np.indices(sizes), 1), piece):
            return PartitionSpec()
        names = sorted(zip(steps, mesh.axis_names, strict=True), reverse=True)
        spec.append(tuple(name for step, name in names if step))
    return PartitionSpec(*spec)


def _partition(call: PartitionedCall, mesh: Mesh, operands: Any, results: Any) -> Any:
    """Answers JAX's partitioner: mesh, function, shardings of results and operands."""
    given = jax.tree.map(lambda one: one.sharding, (operands, results))
    if dims := _sharded_dims(call, mesh, call.axes(*given)):
        return call.partitioned(mesh, dims)

    def alone(*trees: Any) -> Any:
        leaves = call.in_tree.flatten_up_to(trees)
        return call.out_tree.unflatten(jaxpr_as_fun(call.whole)(*leaves))

    whole = NamedSharding(mesh, PartitionSpec())
    return mesh, alone, *jax.tree.map(lambda _: whole, (results, operands))


def _sharded_dims(call: PartitionedCall, mesh: Mesh, given: Sequence[Spec]) -> Dims:
    """Returns {dim: axes}: a factor's dims get the axes of its first sharded dim.

    A factor stays whole if an earlier one has any of its axes, or if these do not
    divide it evenly.
    """
    found: Dims = {}
    used: set[str] = set()
    for factor in call.factors:
        wanted = (given[tensor][dim] for tensor, dim in factor.places)
        axes = next((names for names in wanted if names), ())
        ways = math.prod(mesh.shape[name] for name in axes)
        if axes and not used.intersection(axes) and factor.size % ways == 0:
            used.update(axes)
            found.update((place, axes) for place in factor.places)
    return found
