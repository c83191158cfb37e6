"""Runs single ops sharded along the factors of their rules, against one device.

Each op of a program is taken by itself, with the inputs that it has there. One program
holds a copy of it for each sharding, so that all of them compile at once. A sharding is
wrong if the result is another than on one device. Constraints never change what a right
compiler computes, so a rule that claims too much shows in something else: what is
compiled moves data where by the rule every device has what it needs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding

from cfp.analysis.storage import even_spec
from cfp.analysis.strategies import FactorAxes, legal_axes, reduced_axes, tensor_spec
from cfp.program import shardy
from cfp.program.constrain import Constraints, partition_spec
from cfp.program.graph import Op, Program, Spec
from cfp.program.part import Part, Signature, aval, lower_part, numbered, whole
from cfp.program.read import read_program
from cfp_test.support.checking import difference, to_host

_COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    r"|ragged-all-to-all|collective-broadcast)(?:-start)?\("
)
_COPY = re.compile(r'op_name="[^"]*copy(\d+)_(\w+)')
# Of the largest relative distance, by the narrowest type among operands and results.
ALLOWED = {"bf16": 2e-2, "f16": 2e-3, "f8E4M3FN": 1e-1, "f8E5M2": 2e-1}
_ALLOWED = 1e-4
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one sharding of an op.

    Attributes:
        op: the kind of the op, and what it is applied to.
        kind: of the op.
        mesh: sizes of the mesh's axes.
        axes: for each factor the axes that split it.
        factors: the number of factors that may be split.
        difference: from one device; infinite where it did not compile.
        moved: collectives that the rule has no place for.
        larger: whether a device makes more of the result than the rule says.
        trouble: the error, where there was one.
        allowed: the difference that rounding explains.
        padded: whether a factor does not divide.
    """

    op: str
    kind: str
    mesh: tuple[int, ...]
    axes: FactorAxes
    factors: int
    difference: float
    moved: tuple[str, ...] = ()
    larger: bool = False
    trouble: str = ""
    allowed: float = _ALLOWED
    padded: bool = False

    @property
    def is_wrong(self) -> bool:
        """True if the result is not that of one device."""
        return not self.difference <= self.allowed


@dataclass(frozen=True)
class Single:
    """An op by itself, and what goes into it."""

    program: Program
    op: Op
    part: Part
    inputs: tuple[Any, ...]

    @cached_property
    def module(self) -> str:
        """A module that has this op alone."""
        with jax.enable_x64(True):
            lowered = _lower_on_one(self.program, self.part)
        return str(lowered.compiler_ir("stablehlo"))

    @property
    def digest(self) -> str:
        """The same for the same op on the same types, and on the same integers.

        Integers say where an op reads and writes, so other ones are another variant.
        """
        op = numbered(self.program, self.part).digest
        return f"{op} {list(self._integers.values())}"

    @property
    def text(self) -> str:
        """The op's kind, types, integers and attributes."""
        values = self.program.values
        types = ", ".join(
            f"{values[v]}{self._integers.get(v, '')}" for v in self.op.operands
        )
        made = ", ".join(str(values[v]) for v in self.op.results)
        return f"{self.op.kind} ({types}) -> ({made}) {self.op.attributes}"

    @cached_property
    def _integers(self) -> dict[int, str]:
        """Inputs that are integers: a few by their values, others by a checksum."""
        found = {}
        for v, x in zip(self.part.inputs, self.inputs, strict=True):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                few = x.tolist() if x.size <= _FEW else f"{crc32(x.tobytes()):08x}"
                found[v] = f" = {few}"
        return found


def shardings(op: Op, mesh: Mesh) -> list[FactorAxes]:
    """Every way to give each axis of a mesh one factor of an op, or none."""
    rule = op.rule
    assert rule is not None
    sizes = dict(mesh.shape)
    free = [f for f, size in enumerate(rule.sizes) if size > 1 and f not in rule.fixed]
    found: dict[FactorAxes, None] = {}
    for factors in product([None, *free], repeat=len(sizes)):
        wanted: list[list[str]] = [[] for _ in rule.sizes]
        for name, factor in zip(sizes, factors, strict=True):
            if factor is not None:
                wanted[factor].append(name)
        axes = legal_axes(rule, wanted, sizes)
        if any(axes):
            found[axes] = None
    return list(found)


def singles(program: Program, arguments: Sequence[Any]) -> list[Single]:
    """The ops of a program that have rules, with what they take in a run of it."""
    ops = [o for o in program.ops if o.parent < 0 and o.rule and any(o.rule.sizes)]
    parts = [_alone(program, op) for op in ops]
    wanted = list(dict.fromkeys(v for part in parts for v in part.inputs))
    found = dict(zip(wanted, _run_whole(program, wanted, arguments), strict=True))
    return [
        Single(program, op, part, tuple(found[v] for v in part.inputs))
        for op, part in zip(ops, parts, strict=True)
        if part.outputs
    ]


def _alone(program: Program, op: Op) -> Part:
    """An op and the scalar constants that it reads; all else comes from outside."""
    makers = {program.values[v].producer for v in op.operands}
    near = sorted(
        i
        for i in makers
        if i >= 0
        and program.ops[i].kind == "constant"
        and not program.values[program.ops[i].results[0]].shape
    )
    inside = {r for i in near for r in program.ops[i].results}
    inputs = tuple(dict.fromkeys(v for v in op.operands if v not in inside))
    return Part((*near, op.id), inputs, op.results)


def _run_whole(
    program: Program, wanted: Sequence[int], arguments: Sequence[Any]
) -> list[np.ndarray]:
    top = tuple(op.id for op in program.ops if op.parent < 0)
    part = Part(top, program.args, tuple(wanted))
    with jax.enable_x64(True):  # random bits are made of 64-bit integers
        lowered = _lower_on_one(program, part)
        return [np.asarray(x) for x in lowered.compile()(*arguments)]


def _lower_on_one(program: Program, part: Part) -> jax.stages.Lowered:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    ins, outs = (
        [((),) * len(program.values[v].shape) for v in values]
        for values in (part.inputs, part.outputs)
    )
    return lower_part(program, part, mesh, Constraints({}, {}), ins, outs)


Job = tuple[Single, FactorAxes]


def jobs(some: Sequence[Single], mesh: Mesh) -> list[Job]:
    """All shardings of some ops on a mesh."""
    return [(single, axes) for single in some for axes in shardings(single.op, mesh)]


def prove(some: Sequence[Job], mesh: Mesh, at_once: int = 96) -> Iterator[Outcome]:
    """Runs ops under shardings, many in one program.

    Args:
        some: ops and how they are sharded.
        mesh: real devices.
        at_once: the number of copies in a program.
    """
    for start in range(0, len(some), at_once):
        chunk = some[start : start + at_once]
        different = list(dict.fromkeys(id(single) for single, _ in chunk))
        ones = {id(single): single for single, _ in chunk}
        results, _ = _run([(ones[i], ()) for i in different], _first(mesh), {}, {})
        expected = {
            i: [*map(to_host, r)] for i, r in zip(different, results, strict=True)
        }
        yield from _prove_together(chunk, mesh, expected)


def _first(mesh: Mesh) -> Mesh:
    return Mesh(
        mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names
    )


def _prove_together(
    some: Sequence[Job], mesh: Mesh, expected: Mapping[int, Sequence[np.ndarray]]
) -> list[Outcome]:
    many, ops = copies(some, mesh)
    uses: dict[tuple[int, int], Spec] = {}
    values: dict[int, Spec] = {}
    for op_id, (single, axes) in zip(ops, some, strict=True):
        rule = single.op.rule
        assert rule is not None
        for i, dims in enumerate(rule.operands):
            if dims:
                uses[op_id, i] = tensor_spec(rule, dims, axes, dict(mesh.shape))
        for v, dims in zip(many.ops[op_id].results, rule.results, strict=True):
            if dims:
                values[v] = tensor_spec(rule, dims, axes, dict(mesh.shape))
    try:
        results, text = _run(some, mesh, uses, values)
    except jax.errors.JaxRuntimeError as error:
        if len(some) == 1:
            outcome = _outcome(*some[0], mesh, np.inf)
            return [replace(outcome, trouble=str(error).split("\n")[0])]
        half = len(some) // 2
        parts = some[:half], some[half:]
        return [o for part in parts for o in _prove_together(part, mesh, expected)]
    found = []
    collectives, largest = _collectives(text), _largest(text)
    for index, (single, axes) in enumerate(some):
        rule = single.op.rule
        assert rule is not None
        pairs = zip(results[index], expected[id(single)], strict=True)
        far = max(difference(to_host(got), one) for got, one in pairs)
        outcome = _outcome(single, axes, mesh, far)
        moved = () if outcome.padded else collectives.get(index, ())
        if reduced_axes(rule, axes):
            sums = {"all-reduce", "reduce-scatter"}
            # Of several tensors together what each device has reduced is gathered.
            sums |= {"all-gather"} if len(rule.results) > 1 else set()
            moved = tuple(n for n in moved if n not in sums)
        made = many.ops[ops[index]].results
        given = max(_local(many, v, values.get(v), mesh) for v in made)
        is_larger = not outcome.padded and largest.get(index, 0) > given
        found.append(replace(outcome, moved=moved, larger=is_larger))
    return found


def _outcome(single: Single, axes: FactorAxes, mesh: Mesh, far: float) -> Outcome:
    rule = single.op.rule
    assert rule is not None
    values = single.program.values
    types = {values[v].dtype for v in (*single.op.operands, *single.op.results)}
    sizes = dict(mesh.shape)
    ways = [int(np.prod([sizes[name] for name in names])) for names in axes]
    return Outcome(
        op=single.text,
        kind=single.op.kind,
        mesh=tuple(sizes.values()),
        axes=axes,
        factors=len(rule.sizes) - len(rule.fixed),
        difference=far,
        allowed=max(ALLOWED.get(name, _ALLOWED) for name in types),
        padded=any(size % n for size, n in zip(rule.sizes, ways, strict=True)),
    )


def begun(single: Single, axes: FactorAxes, mesh: Mesh) -> Outcome:
    """The outcome of what has not ended."""
    return _outcome(single, axes, mesh, np.inf)


def _run(
    some: Sequence[Job],
    mesh: Mesh,
    uses: Mapping[tuple[int, int], Spec],
    values: Mapping[int, Spec],
) -> tuple[list[list[Any]], str]:
    """Results of each copy, and the text of the compiled program."""
    with jax.enable_x64(True):
        return _run_wide(some, mesh, uses, values)


def _run_wide(
    some: Sequence[Job],
    mesh: Mesh,
    uses: Mapping[tuple[int, int], Spec],
    values: Mapping[int, Spec],
) -> tuple[list[list[Any]], str]:
    many, _ = copies(some, mesh)
    size = tuple(mesh.shape.items())
    taken = {
        many.ops[o].operands[i]: spec for (o, i), spec in reversed([*uses.items()])
    }

    def spec_of(v: int, known: Mapping[int, Spec]) -> Spec:
        shape = many.values[v].shape
        return even_spec(known.get(v, ((),) * len(shape)), shape, size)

    ins = [spec_of(v, taken) for v in many.args]
    outs = [spec_of(v, values) for v in many.outputs]
    constraints = Constraints(values, uses)
    compiled = lower_part(many, whole(many), mesh, constraints, ins, outs).compile()
    inputs = [x for single, _ in some for x in single.inputs]
    placed = [
        jax.device_put(x, NamedSharding(mesh, partition_spec(spec)))
        for x, spec in zip(inputs, ins, strict=True)
    ]
    # What fails as it runs fails here, and not where a result is read.
    flat = iter(jax.block_until_ready(compiled(*placed)))
    results = [[next(flat) for _ in single.part.outputs] for single, _ in some]
    return results, compiled.as_text() or ""


def _collectives(text: str) -> dict[int, tuple[str, ...]]:
    """Collectives of a compiled program, by the copy that they belong to."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if (kind := _COLLECTIVE.search(line)) is None:
            continue
        copy = _COPY.search(line)
        found[int(copy.group(1)) if copy else -1].append(kind.group(1))
    return {copy: tuple(kinds) for copy, kinds in found.items()}


_MADE = re.compile(r"= (\(.*?\)|\S+) ([\w-]+)\(")
_DIMS = re.compile(r"\w+\[([\d,]*)\]")
_OPCODES = {"dot_general": "dot"}  # Where HLO has another name.


def _largest(text: str) -> dict[int, int]:
    """The elements of the largest array that each copy's op makes on a device."""
    found: dict[int, int] = defaultdict(int)
    for line in text.splitlines():
        made, copy = _MADE.search(line), _COPY.search(line)
        if made is None or copy is None:
            continue
        number, kind = int(copy[1]), copy[2]
        if made[2] == _OPCODES.get(kind, kind.replace("_", "-")):
            sizes = (
                prod(map(int, dims.split(",")))
                for dims in _DIMS.findall(made[1])
                if dims
            )
            found[number] = max(found[number], *sizes, 0)
    return found


def _local(program: Program, value: int, spec: Spec | None, mesh: Mesh) -> int:
    """The elements of a value that each device has."""
    shape = program.values[value].shape
    every = spec or ((),) * len(shape)
    ways = [prod(mesh.shape[name] for name in names) for names in every]
    return prod(-(-size // n) for size, n in zip(shape, ways, strict=True))


def copies(some: Sequence[Job], mesh: Mesh) -> tuple[Program, list[int]]:
    """A program of ops, each with inputs and outputs of its own; and the ops' ids."""
    with jax.enable_x64(True):
        return _copies(some, mesh)


def _copies(some: Sequence[Job], mesh: Mesh) -> tuple[Program, list[int]]:
    types = Signature(
        tuple(aval(one.program, v) for one, _ in some for v in one.part.inputs),
        tuple(aval(one.program, v) for one, _ in some for v in one.part.outputs),
    )
    specs = [((),) * len(x.shape) for x in types.inputs]
    made = [((),) * len(x.shape) for x in types.outputs]
    module = types.lower(*types.shardings(mesh, specs, made)).compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    with module.context, ir.Location.unknown():
        block = shardy.main_function(module).regions[0].blocks[0]
        *stale, terminator = [o.operation for o in block.operations]
        arguments = iter(block.arguments)
        outputs: list[ir.Value] = []
        ids: list[int] = []
        for copy, (single, _) in enumerate(some):
            source = ir.Module.parse(single.module)
            origin = shardy.main_function(source).regions[0].blocks[0]
            *ops, returned = [o.operation for o in origin.operations]
            new = {old: next(arguments) for old in origin.arguments}
            for op in ops:
                with ir.InsertionPoint(terminator):
                    clone = op.clone()
                _rewire(clone, new)
                clone.location = ir.Location.name(f"copy{copy}_{single.op.kind}")
                new.update(zip(op.results, clone.results, strict=True))
            ids.append((ids[-1] if ids else -1) + len(ops))
            outputs += [new[v] for v in returned.operands]
        for place, value in enumerate(outputs):
            terminator.operands[place] = value
        for op in reversed(stale):
            op.erase()
        program = read_program(module)
    return program, ids


def _rewire(op: ir.Operation, new: dict[ir.Value, ir.Value]) -> None:
    for index, operand in enumerate(op.operands):
        if operand in new:
            op.operands[index] = new[operand]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rewire(inner.operation, new)


def backward(fn: Any, args: Sequence[Any]) -> Any:
    """A function's gradients with respect to its floating-point arguments."""
    taken = [
        i
        for i, x in enumerate(args)
        if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)
    ]

    def gradients(cotangents: Any, *values: Any) -> Any:
        def chosen(*some: Any) -> Any:
            every = list(values)
            for i, x in zip(taken, some, strict=True):
                every[i] = x
            return fn(*every)

        _, pull = jax.vjp(chosen, *(values[i] for i in taken))
        return pull(cotangents)

    return gradients
