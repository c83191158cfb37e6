"""Replaces ops by functions (kernels), and rewrites slow scatters.

A :class:`Replacement` has functions that compute some values of a program. JAX lowers
them, with `jax.shard_map` if each device runs them by itself. Readers of the old values
then read the functions' results. `cfp.kernels.kinds` has the protocol of proposals.
Functions are hashable. Measurements are stored under their ``repr``, which includes a
library's version if results or times depend on it.

A replacement has *stages*, such as forward and backward. A stage reads *uses*, (op id,
operand index): the value that the op reads there, constrained and perhaps
rematerialized. Its function returns the values that it makes, then residuals, which are
further arguments of the next stage. A backward stage in another loop is a replacement
of its own, without residuals. All reads of a stage are made before its first result, in
one body (`is_in_order`).

Two kinds of scatters, the gradients of most models' first and last layers, are slow on
GPUs:

- *Rows of a table.* GPUs have no atomic 16-bit sum, and retry it after conflicts. Sums
  of many rows into one use float32 instead, and round once: 12,288 tokens of 2 types
  took 43 ms on an H200, and 0.2 ms in float32 (``docs/results/scatters.md``).
- *One word of each token*, as in a cross-entropy's gradient. A scatter needs a buffer,
  sharded like any lookup. A comparison that selects the word gives equal numbers, and
  is fused into its reader.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh

from cfp.program import shardy
from cfp.program.graph import Program, numpy_dtype
from cfp.program.partitioned import is_call

_SYMBOL = re.compile(r'@("[^"]*"|[\w$.-]+)')
_EMPTY_MESH = re.compile(r"\s*sdy\.mesh @\w+ = <\[\]>")
_MESH = re.compile(r"\s*sdy\.mesh @[^=]+= ")
_CONSTRAINT = "sdy.sharding_constraint"
_STAY = ("send", "recv", "outfeed", "infeed")

Function = Callable[..., Sequence[jax.Array]]
Use = tuple[int, int]  # (op id, operand index)
_Site = TypeVar("_Site")


class Different(Exception):
    """Raised with the reason why a candidate for replacement does not qualify."""


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A candidate for replacement that does not qualify.

    Attributes:
        op: id of the candidate's main op.
        source: ``path:line`` of the user's code, or "".
        reason: why it does not qualify.
    """

    op: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sites(Generic[_Site]):
    """Replaceable sites of a program, by op id, and candidates that do not qualify."""

    found: Mapping[int, _Site]
    left_alone: tuple[LeftAlone, ...] = ()

    def among(self, program: Program, ops: Collection[int]) -> list[_Site]:
        """Returns sites of ops whose `Program.top_level` is in `ops`."""
        inside = set(ops)
        found = self.found.items()
        return [one for op, one in found if program.top_level(op) in inside]

    def reason(self, op: int) -> str:
        """Returns why an op is in `left_alone`, or "no such site" if it is not."""
        return next((x.reason for x in self.left_alone if x.op == op), "no such site")


class Functions(Protocol):
    """Functions that compute the stages of a replacement; hashable."""

    @property
    def how(self) -> tuple[str, ...]:
        """Words that record the functions in a plan's file; the first is the kernel."""
        ...

    def stages(self, mesh: Mesh) -> Sequence[Function]:
        """Functions of the stages, from reads and residuals to results and residuals.

        Args:
            mesh: mesh of all devices; the functions take and return whole arrays.
        """
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan file's record of functions, until they are found again in the program."""

    how: tuple[str, ...]

    def stages(self, mesh: Mesh) -> Sequence[Function]:
        """Raises AssertionError; `cfp.kernels.kinds.resolved` finds the functions."""
        raise AssertionError("a plan file's kernels must be resolved before use")


@dataclass(frozen=True, slots=True)
class Stage:
    """Operands (op id, index) that one function reads, and ids of values it makes."""

    reads: tuple[Use, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Functions that replace ops.

    Attributes:
        name: name of the kernel.
        op: id of an op that distinguishes replacements of one name.
        stages: inputs and outputs of the functions, in the program's order; () until
            a plan file's record is resolved.
    """

    name: str
    op: int
    stages: tuple[Stage, ...]
    functions: Functions = field(hash=False)

    def translated(
        self, values: Mapping[int, int], ops: Mapping[int, int]
    ) -> Replacement | None:
        """Returns the replacement in other ids; None if an id has no translation."""
        used = {op for stage in self.stages for op, _ in stage.reads} | {self.op}
        made = {v for stage in self.stages for v in stage.makes}
        if not used <= ops.keys() or not made <= values.keys():
            return None
        stages = tuple(
            Stage(
                tuple((ops[op], index) for op, index in stage.reads),
                tuple(values[v] for v in stage.makes),
            )
            for stage in self.stages
        )
        return replace(self, op=ops[self.op], stages=stages)


def is_in_order(program: Program, stage: Stage) -> bool:
    """True if a stage's ops have one parent, and all its reads precede its results."""
    makers = [program.values[v].producer for v in stage.makes]
    if not makers or min(makers) < 0:
        return False
    first = min(makers)
    parents = {program.ops[op].parent for op in makers}
    parents |= {program.ops[op].parent for op, _ in stage.reads}
    read = (program.ops[op].operands[index] for op, index in stage.reads)
    return len(parents) == 1 and all(program.values[v].producer < first for v in read)


_Instance = Sequence[ir.Operation] | Mapping[int, ir.Operation]  # of ops, by id


@dataclass(frozen=True)
class Replacer:
    """Replaces ops of a module by functions.

    Replaced ops stay, unread, so that ids stay valid; `erase_unread` removes them.

    Attributes:
        module: module with the program's ops, constraints, and rematerialized ops.
        ops: the program's ops, by id.
        clones: {id of an op: its rematerialized clone}.
        mesh_name: symbol of the mesh in the module.
    """

    module: ir.Module
    ops: Sequence[ir.Operation]
    clones: Mapping[int, ir.Operation]
    program: Program
    mesh: Mesh
    mesh_name: str

    def replace(self, one: Replacement) -> None:
        """Replaces the results of stages; in clones, those of stages cloned in full."""
        if not one.stages:
            raise AssertionError(f"recorded kernel {one.name} was not resolved")
        kept: list[ir.Value] = []
        again: list[ir.Value] = []  # Rematerialized residuals.
        latest: ir.Operation | None = None  # The op behind them.
        for number, stage in enumerate(one.stages):
            makers = [self.program.values[v].producer for v in stage.makes]
            used = {*makers, *(op for op, _ in stage.reads)}
            is_cloned, first = used <= self.clones.keys(), min(makers)
            if latest is None:
                again = kept
            # Backward stages read rematerialized residuals, forward ones the originals.
            elif not is_cloned:
                own = self.ops[first]
                if own.block == latest.block and latest.is_before_in_block(own):
                    kept = again
            kept = self._put(one, number, self.ops, kept)
            latest = None
            if is_cloned:
                again = self._put(one, number, self.clones, again)
                latest = self.clones[first].operation

    def _put(
        self,
        one: Replacement,
        number: int,
        instance: _Instance,
        kept: Sequence[ir.Value],
    ) -> list[ir.Value]:
        """Replaces the values that a stage makes; returns the stage's residuals."""
        stage = one.stages[number]
        reads = [*(instance[op].operands[index] for op, index in stage.reads), *kept]
        types = tuple(aval_of(value.type) for value in reads)
        text = _lowered(one.functions, number, types, self.mesh, self.mesh_name)
        with ir.InsertionPoint(
            instance[min(self.program.values[v].producer for v in stage.makes)]
        ):
            results = shardy.graft(text, reads, self.module)
        for v, result in zip(stage.makes, results, strict=False):
            maker = self.program.values[v].producer
            old = instance[maker].results[self.program.ops[maker].results.index(v)]
            if result.type != old.type:
                raise AssertionError(f"{one.name} made {result.type}, not {old.type}")
            old.replace_all_uses_with(result)
        return results[len(stage.makes) :]


# ------------------------------------------------------------------- what JAX lowers


@lru_cache(maxsize=256)
def _lowered(
    functions: Functions,
    number: int,
    types: tuple[jax.ShapeDtypeStruct, ...],
    mesh: Mesh,
    mesh_name: str,
) -> str:
    """Returns a stage's module as text, its functions but main named by a digest."""
    function = functions.stages(mesh)[number]
    platform = mesh.devices.flat[0].platform
    traced = jax.jit(function, keep_unused=True).trace(*types)
    lowered = traced.lower(
        lowering_platforms=("cuda" if platform == "gpu" else platform,)
    )
    module = shardy.stablehlo(lowered)
    # Replicated values may have a mesh without axes, which the other mesh replaces.
    lines = [line for line in str(module).split("\n") if not _EMPTY_MESH.match(line)]
    # Newer JAX has a mesh twice, with devices and without.
    meshes = [number for number, line in enumerate(lines) if _MESH.match(line)]
    if len({_MESH.sub("", lines[number]) for number in meshes}) > 1:
        raise AssertionError("a stage has more than one mesh")
    text = "\n".join(line for n, line in enumerate(lines) if n not in meshes[1:])
    known = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
    names = {shardy.symbol_name(op.operation): mesh_name for op in known}
    prefix = hashlib.sha256(text.encode()).hexdigest()[:12]
    for opview in module.body.operations:
        op = opview.operation
        if op.name == "func.func" and shardy.symbol_name(op) != "main":
            names[shardy.symbol_name(op)] = f"cfp_{prefix}_{shardy.symbol_name(op)}"

    def written(match: re.Match[str]) -> str:
        name = match[1].strip('"')
        return f'@"{names[name]}"' if name in names else match[0]

    return _SYMBOL.sub(written, text)


def aval_of(kind: ir.Type) -> jax.ShapeDtypeStruct:
    """Returns a tensor type's shape and dtype; raises ValueError for other types."""
    tensor = ir.RankedTensorType(kind)
    return jax.ShapeDtypeStruct(tensor.shape, numpy_dtype(str(tensor.element_type)))


# ------------------------------------------------------------------------ unread ops


def erase_unread(module: ir.Module) -> None:
    """Removes unread pure ops of main, last first; loops, branches, most calls stay."""
    for op in reversed(shardy.program_ops(shardy.main_function(module))):
        is_pure = op.name.startswith(("stablehlo.", "chlo.", _CONSTRAINT))
        if not is_pure or op.name.endswith(_STAY) or op.name in shardy.REGION_OPS:
            continue
        if op.name == "stablehlo.custom_call" and not is_call(op):
            continue  # It may have effects.
        if not any(list(result.uses) for result in op.results):
            op.erase()


# ---------------------------------------------------------------------------- scatters

_SCATTER = "stablehlo.scatter"
_NARROW = ("bf16", "f16")
# Updates per place from which sums use float32. A mixture of experts adds to a token's
# place once for each of the token's experts.
_MANY = 8


def rewrite_scatters(module: ir.Module) -> int:
    """Rewrites scatters that are slow on GPUs in a normalised module, on any platform.

    Returns the number of sums changed from 16-bit to float32, without selects.
    """
    function = shardy.main_function(module)
    tables = {tuple(one.type.shape) for one in shardy.main_block(module).arguments}
    scatters = [op for op in shardy.walk(function) if op.name == _SCATTER]
    with module.context, ir.Location.unknown():
        left = [op for op in scatters if not select_words(op)]
        return sum(add_up_in_float32(op, tables) for op in left)


def add_up_in_float32(op: ir.Operation, tables: Collection[tuple[int, ...]]) -> bool:
    """Makes a scatter's sum float32 if it may add many 16-bit rows to one row of zeros.

    Returns True if it did. Rows may be many if a row of the result gets over `_MANY`
    updates on average, or the result has an argument's shape, in `tables`: in a table's
    gradient, tokens repeat. Other scatters stay: tokens that are put back in order
    rarely meet, and devices would send twice as much.
    """
    if str(op.results[0].type.element_type) not in _NARROW:
        return False
    unique = "unique_indices"  # Optional.
    is_unique = unique in op.attributes and ir.BoolAttr(op.attributes[unique]).value
    if is_unique or not _adds_to_zeros(op):
        return False
    if tuple(op.results[0].type.shape) not in tables and not _many_meet(op):
        return False
    wide, kind = ir.F32Type.get(), op.results[0].type
    with ir.InsertionPoint(op), op.location:
        zeros, updates = (shardy.converted(op.operands[i], wide) for i in (0, 2))
        scatter = op.clone()
        scatter.operands[0], scatter.operands[2] = zeros, updates
        [body] = scatter.regions[0].blocks
        added = body.operations[0].operation.results
        for value in (*body.arguments, *added, *scatter.results):
            value.set_type(shardy.of_element(value.type, wide))
        narrowed = shardy.converted(scatter.results[0], kind.element_type)
    shardy.forward(op, [narrowed])
    return True


def select_words(op: ir.Operation) -> bool:
    """Replaces a scatter that adds one number to each row of zeros by a select.

    Returns True if it did. Other scatters stay, and all without batching dims.
    """
    if not _picks_words(op):
        return False
    zeros, *pair = op.operands
    kind = ir.RankedTensorType(op.results[0].type)
    *tokens, _ = kind.shape
    with ir.InsertionPoint(op), op.location:
        kinds = [ir.RankedTensorType.get(tokens, v.type.element_type) for v in pair]
        rows = map(stablehlo.reshape, kinds, pair)
        of_word, word = (shardy.spread(row, kind.shape) for row in rows)
        words = stablehlo.iota(of_word.type, len(tokens))
        equal = stablehlo.ComparisonDirectionAttr.get("EQ")
        is_its = stablehlo.compare(of_word, words, equal)
        selected = stablehlo.select(is_its, word, zeros)
    shardy.forward(op, [selected])
    return True


def _many_meet(op: ir.Operation) -> bool:
    updates = op.operands[2].type.shape
    window = prod(updates[dim] for dim in _dims(op).update_window_dims)
    places = prod(op.results[0].type.shape) / max(1, window)
    return prod(updates) / max(1, window) > _MANY * places


def _picks_words(op: ir.Operation) -> bool:
    """True if a scatter with batching dims adds one number to each row of zeros."""
    if len(op.results[0].type.shape) < 2 or not _adds_to_zeros(op):
        return False
    _, places, updates = op.operands
    *tokens, words = op.results[0].type.shape
    dims, batching = _dims(op), [*range(len(tokens))]
    index = ir.IntegerType(ir.RankedTensorType(places.type).element_type)
    return (
        not dims.update_window_dims
        and [*dims.scattered_dims_to_operand_dims] == [len(tokens)]
        and [*dims.input_batching_dims] == batching
        and [*dims.scatter_indices_batching_dims] == batching
        and prod(updates.type.shape) == prod(places.type.shape) == prod(tokens)
        and words <= 2 ** (index.width - (not index.is_unsigned))
    )


def _adds_to_zeros(op: ir.Operation) -> bool:
    """True if a scatter of one array adds its updates to float zeros."""
    element = ir.RankedTensorType(op.results[0].type).element_type
    if len(op.operands) != 3 or not isinstance(element, ir.FloatType):
        return False
    if not is_zero(op.operands[0]):
        return False
    added = [one.operation.name for one in op.regions[0].blocks[0].operations]
    return added == ["stablehlo.add", "stablehlo.return"]


def _dims(op: ir.Operation) -> stablehlo.ScatterDimensionNumbers:
    return stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])


def is_zero(value: ir.Value) -> bool:
    """True if a value is a constant of zeros only, or broadcast from one."""
    maker = shardy.owner_of(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = shardy.owner_of(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant":
        return False
    numbers: Any = shardy.numbers_of(maker)
    if numbers is None or not numbers.is_splat:
        return False
    return numbers.get_splat_value().value == 0
