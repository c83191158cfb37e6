"""Reads a normalised module into a frozen :class:`~cfp.program.graph.Program`.

A program has two digests. `fingerprint` is of the structure: ops, types, attributes,
trip counts and indices. It keys plans and measurements, since other constants (a
learning rate, a table) change neither the best sharding nor the cost. `content`
includes all constants, and keys compiled programs.

An :class:`Outline` lists a program's operations in short, in a plan's file. Messages
use it to say where a step differs from the planned one.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir

from cfp.errors import PlanMismatch, is_installed
from cfp.printable import distinct_ends
from cfp.program import shardy
from cfp.program.graph import Manual, Op, Program, Spec, Value, inner_flops, reached
from cfp.program.rules import (
    Rule,
    correct_rule,
    elementwise_rule,
    passthrough_rule,
    rule_of,
)

# First operand with the indices at which an op reads or writes.
_FIRST_INDEX = {
    "stablehlo.dynamic_slice": 1,
    "stablehlo.dynamic_update_slice": 2,
    "stablehlo.gather": 1,
    "stablehlo.scatter": 1,
}
# Most elements of counters and indices; larger integer tensors are data.
_MOST_ELEMENTS = 16


def _is_counter_type(kind: ir.Type) -> bool:
    return (
        isinstance(kind, ir.RankedTensorType)
        and isinstance(kind.element_type, ir.IntegerType)
        and prod(kind.shape) <= _MOST_ELEMENTS
    )


def _content(module: ir.Module) -> str:
    """Digests functions, without locations, argument attributes, result attributes."""
    digest = hashlib.sha256()
    copy = shardy.copied(module, shardy.WITHOUT_LOCATIONS)
    for function in shardy.functions(copy.operation):
        for name in {"arg_attrs", "res_attrs"} & {*function.attributes}:
            del function.attributes[name]
        digest.update(shardy.bytecode(function))
    return digest.hexdigest()


def shaping_constants(function: ir.Operation) -> set[ir.Operation]:
    """Returns the constants whose values a program's `fingerprint` includes.

    These are integers, at most 16 in one constant. They reach a loop's condition, or
    indices at which an op reads or writes, through values that are such integers.
    """
    start: list[ir.Value] = []
    for op in shardy.walk(function):
        if op.name == "stablehlo.while":
            start.extend(shardy.returned(op.regions[0]))
        elif op.name in _FIRST_INDEX:
            start.extend(list(op.operands)[_FIRST_INDEX[op.name] :])

    def further(value: ir.Value) -> Iterator[ir.Value]:
        return (v for v in _made_of(value) if _is_counter_type(v.type))

    counters = reached((v for v in start if _is_counter_type(v.type)), further)
    owners = map(shardy.owner_of, counters)
    return {op for op in owners if op and op.name == "stablehlo.constant"}


def _made_of(value: ir.Value) -> Iterator[ir.Value]:
    """Yields values that make a value; for a loop's, the initial and the next one."""
    owner: Any = value.owner
    is_argument = isinstance(owner, ir.Block)
    op = (owner.owner if is_argument else owner).operation
    if op.name not in shardy.REGION_OPS:
        yield from () if is_argument else op.operands
        return
    if is_argument:
        place = ir.BlockArgument(value).arg_number
    else:
        place = ir.OpResult(value).result_number
    is_loop = op.name == "stablehlo.while"
    if is_loop:
        yield op.operands[place]
    for body in [*op.regions][is_loop:]:  # Without a loop's condition.
        yield shardy.returned(body)[place]


_QUOTED = re.compile(r'"([^"]+)"')
_SOURCE = re.compile(r'"([^"]+)":(\d+):\d+')
_FILE = re.compile(rb"[^\0<][^\0]*\.py(?=\0)")
_HERE = str(Path(__file__).parent)
# Modules that call the step: outer frames are not the step's.
_CALLERS = frozenset(
    str(Path(__file__).with_name(name)) for name in ("step.py", "trace.py")
)
_MAX_ATTRIBUTE_CHARS = 400


def read_program(module: ir.Module) -> Program:
    """Reads a module that :func:`cfp.program.shardy.normalise` has changed.

    Names of arguments and outputs are empty, and no argument is donated.
    """
    copy = shardy.copied(module, shardy.WITH_RULES)
    functions = {shardy.symbol_name(f): f for f in shardy.functions(copy.operation)}
    meshes = [o.operation for o in module.body if o.operation.name == "sdy.mesh"]
    axes = {name: n for one in meshes for name, n in shardy.mesh_axes(one).items()}
    text = shardy.bytecode(module.operation)
    return replace(
        _Reader(functions, axes, _file_names(text)).program(functions["main"]),
        text=text,
        content=_content(module),
        name=shardy.symbol_name(module.operation),
    )


class _Reader:
    """State of reading one function: values and ops in execution order."""

    def __init__(self, *inputs: Mapping[str, Any]) -> None:
        # Functions by name, for composites; {axis: size}; result of `_file_names`.
        self._functions, self._meshes, self._files = self._inputs = inputs
        self._kept: Set[ir.Operation] = frozenset()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._ids: dict[ir.Value, int] = {}
        self._types: dict[ir.Type, tuple[tuple[int, ...], str]] = {}
        self._rules: dict[ir.Attribute, Rule] = {}
        self._digests: dict[str, str] = {}

    def program(self, function: ir.Operation) -> Program:
        """Reads a function, or a region that the user sharded by hand."""
        self._kept = shaping_constants(function)
        block = function.regions[0].blocks[0]
        args = [self._new_value(a) for a in block.arguments]
        for opview in [*block.operations][:-1]:
            self._read_op(opview.operation, parent=-1, repeat=1)
        outputs = [self._ids[v] for v in shardy.returned(function.regions[0])]
        return Program(
            values=tuple(self.values),
            ops=tuple(self.ops),
            args=tuple(args),
            outputs=tuple(outputs),
            arg_names=("",) * len(args),
            output_names=("",) * len(outputs),
            alias=(None,) * len(args),
            text=b"",
        )

    def _new_value(self, value: ir.Value, producer: int = -1, origin: int = -1) -> int:
        index = len(self.values)
        shape, dtype = self._type(value.type)
        self.values.append(Value(index, shape, dtype, producer, origin))
        self._ids[value] = index
        return index

    def _type(self, kind: ir.Type) -> tuple[tuple[int, ...], str]:
        if kind not in self._types:
            if isinstance(kind, ir.RankedTensorType):
                self._types[kind] = tuple(kind.shape), str(kind.element_type)
            else:  # tokens and the like carry no data
                self._types[kind] = (), str(kind)
        return self._types[kind]

    def _read_op(self, op: ir.Operation, parent: int, repeat: int) -> None:
        operands = [self._ids[v] for v in op.operands]
        yields: list[int] = []
        entries: list[int] = []
        body_start = len(self.ops)
        trips = shardy.trip_count(op) if op.name == "stablehlo.while" else None
        if op.name in shardy.REGION_OPS:
            times = repeat * (1 if trips is None else trips)
            for number, region in enumerate(op.regions):
                (block,) = region.blocks
                for argument, origin in zip(block.arguments, operands, strict=False):
                    entries.append(self._new_value(argument, origin=origin))
                *inner, last = block.operations
                for opview in inner:
                    self._read_op(opview.operation, parent=-2, repeat=times)
                if number or op.name != "stablehlo.while":  # not the loop's condition
                    yields.extend(self._ids[v] for v in last.operation.operands)
        index = len(self.ops)
        body = tuple(range(body_start, index))
        for i in body:
            if self.ops[i].parent == -2:
                self.ops[i] = replace(self.ops[i], parent=index)
        results = [self._new_value(r, producer=index) for r in op.results]
        attributes = _attributes(op, index)
        alike = not op.regions and op.name not in _WITH_STRUCTURE
        self.ops.append(
            Op(
                id=index,
                name=op.name,
                operands=tuple(operands),
                results=tuple(results),
                rule=self._rule(op, operands, results),
                scope=shardy.location_name(op.location),
                source=_source(op, self._files) if op.name in _NAMED_SOURCE else "",
                parent=parent,
                repeat=repeat,
                attributes=attributes,
                structure=attributes if alike else self._structure(op, index),
                yields=tuple(yields),
                entries=tuple(entries),
                body=body,
                shardings=_manual_shardings(op),
                uncounted=op.name == "stablehlo.while" and trips is None,
                manual=self._manual(op),
            )
        )

    def _structure(self, op: ir.Operation, index: int) -> str:
        """Returns `Op.structure`; a composite's has its function's fingerprint."""
        if op.name != "stablehlo.composite":
            return _attributes(op, index, self._kept)
        name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
        if name not in self._digests:
            reader = _Reader(*self._inputs)
            self._digests[name] = reader.program(self._functions[name]).fingerprint
        return f"function={self._digests[name]}, {_attributes(op, index)}"

    def _manual(self, op: ir.Operation) -> Manual | None:
        """Reads one device's program of a manual computation; None for other ops."""
        if op.name != "sdy.manual_computation":
            return None
        program = _Reader(*self._inputs).program(op)
        # Devices along an axis that splits no value repeat each other's work.
        named = {axis for spec in _manual_shardings(op) for dim in spec for axis in dim}
        axes = named.intersection(_QUOTED.findall(str(op.attributes["manual_axes"])))
        return Manual(
            program=program,
            flops=inner_flops(program, shardy.program_ops(op)),
            devices=prod(self._meshes.get(axis, 1) for axis in axes),
        )

    def _rule(
        self, op: ir.Operation, operands: list[int], results: list[int]
    ) -> Rule | None:
        if op.name in shardy.REGION_OPS:
            return None
        if shardy.RULE in op.attributes:
            given = op.attributes[shardy.RULE]
            if (rule := self._rules.get(given)) is None:
                rule = self._rules[given] = rule_of(given)
            shapes = [self.values[v].shape for v in operands]
            return correct_rule(rule, op, shapes)
        shapes = [self.values[v].shape for v in (*operands, *results)]
        if op.name == "stablehlo.optimization_barrier":
            return passthrough_rule(shapes[: len(operands)])
        if op.name == SCAN and len(operands) == len(results) == 2:
            # An array and a sum before it make sums and the last one.
            dim = ir.IntegerAttr(op.attributes["dimension"]).value
            dims = tuple((d,) for d in range(len(shapes[0])))
            pair = dims, dims[:dim] + dims[dim + 1 :]
            return Rule(shapes[0], pair, pair, fixed=frozenset({dim}))
        is_elementwise = op.name.startswith("chlo.") and len(set(shapes)) == 1
        if is_elementwise and op.name != "chlo.top_k":
            return elementwise_rule(shapes[0], len(operands), len(results))
        return None


def _manual_shardings(op: ir.Operation) -> tuple[Spec, ...]:
    """Returns specs of a manual computation's operands, then results; else ()."""
    if op.name != "sdy.manual_computation":
        return ()
    sides = (op.attributes[name] for name in ("in_shardings", "out_shardings"))
    return tuple(spec for side in sides for spec in shardy.specs_of(side))


def _constant(op: ir.Operation, index: int) -> str:
    if (value := shardy.numbers_of(op)) is None:
        return str(op.get_asm(use_local_scope=True)).partition(" = ")[2]
    shape = op.results[0].type.shape
    is_long = prod(shape) > shardy.MOST_SMALL_ELEMENTS and not value.is_splat
    # A long constant differs from all others.
    return f"constant #{index}" if is_long else str(value)


# Ops without regions whose structure may differ from their attributes.
_WITH_STRUCTURE = frozenset({"stablehlo.constant", "stablehlo.composite"})

# Ops whose source lines are read, since messages name them. A line takes more time to
# read than the rest of an op.
_NAMED_SOURCE = frozenset(
    f"stablehlo.{kind}"
    for kind in (
        "dot_general convolution gather scatter custom_call sort while case if fft "
        "cholesky triangular_solve reduce_window select_and_scatter rng_bit_generator"
    ).split()
) | {"chlo.top_k", "sdy.manual_computation"}


def _file_names(text: bytes) -> dict[str, str]:
    """Maps Python files in bytecode, except of cfp.program, to `distinct_ends`."""
    paths = {path.decode(errors="replace") for path in _FILE.findall(text)}
    every = sorted(path for path in paths if not path.startswith(_HERE))
    return dict(zip(every, distinct_ends(every), strict=True))


def _source(op: ir.Operation | None, files: Mapping[str, str]) -> str:
    """Returns ``model.py:12`` of the user's innermost call, or a library's, or ""."""
    calls: list[str] = []
    # JAX traces a loop's body alone: a library's loop has the calls around it.
    while op is not None and op.name != "func.func":
        frames = _SOURCE.findall(str(op.location))
        for path, line in takewhile(lambda frame: frame[0] not in _CALLERS, frames):
            if path.endswith(".py") and not path.startswith(("<", _HERE)):
                calls.append(f"{files.get(path, Path(path).name)}:{line}")
                if not is_installed(path):
                    return calls[-1]
        op = op.parent if calls else None
    return calls[0] if calls else ""


def sources_of(program: Program, ops: Iterable[int]) -> Iterator[str]:
    """Yields `_source` of each op, such as ``model.py:12``; "" without one."""
    module = shardy.parsed(program.text)
    found = shardy.program_ops(shardy.main_function(module))
    known, files = dict[tuple[Any, Any], str](), _file_names(program.text)
    for op in (found[i] for i in ops):
        key = op.parent, getattr(op.location, "child_loc", op.location).attr
        known[key] = known.get(key) or _source(op, files)
        yield known[key]


def _attributes(
    op: ir.Operation, index: int, kept: Set[ir.Operation] | None = None
) -> str:
    # Ops in a loop or branch have attributes of their own.
    return "" if op.name in shardy.REGION_OPS else _text(op, index, {}, kept)


def _text(
    op: ir.Operation,
    index: int,
    names: dict[ir.Value, str],
    kept: Set[ir.Operation] | None,
) -> str:
    """Returns an op's attributes and regions as text; fills `names` of regions' values.

    Numbers of a short constant are in the text if it is in `kept`, or `kept` is None.
    """
    if op.name == "stablehlo.constant":
        return "" if kept is not None and op not in kept else _constant(op, index)
    parts = []
    for name in op.attributes:
        if name != shardy.RULE:
            text = str(op.attributes[name])
            if len(text) > _MAX_ATTRIBUTE_CHARS:
                text = hashlib.sha256(text.encode()).hexdigest()
            parts.append(f"{name}={text}")
    for region in op.regions:  # Only these tell a maximum from a sum.
        for block in region.blocks:
            inner = [f"({_named(block.arguments, names)})"]
            for opview in block:
                inside = opview.operation
                # All values from outside have one name.
                reads = [names.get(v, f"outside #{index}") for v in inside.operands]
                what = "; ".join((",".join(reads), _text(inside, index, names, kept)))
                made = _named(inside.results, names)
                inner.append(f"{made}={inside.name}({what})")
            parts.append(f"body={' '.join(inner)}")
    return ", ".join(parts)


def _named(values: Sequence[ir.Value], names: dict[ir.Value, str]) -> str:
    """Adds names of values to `names`, and returns the names with types."""
    for value in values:
        names[value] = f"%{len(names)}"
    return ",".join(f"{names[value]}:{value.type}" for value in values)


# From jax 0.12 on ``jax.numpy.cumsum`` is ``chlo.scan`` on GPUs, for which
# ``sdy-populate-op-sharding-rules`` has no rule. XLA shards it along all dims except
# the scanned one.
SCAN = "chlo.scan"
# Text of a scalar's conversion.
_OF_WEAK_TYPES = re.compile(r"\bconvert \w+\[\] -> ")


@dataclass(frozen=True, slots=True)
class Outline:
    """A program's operations in order, for a plan's file.

    Attributes:
        kinds: distinct kinds: name, types, and ``#`` with a digest of attributes.
        ops: for each operation the index of its kind and a digest of its operands'
            makers, such as ``0.3f 12.a0``.

    Raises:
        ValueError: `ops` is damaged, or has an index of no kind.
    """

    kinds: tuple[str, ...]
    ops: str

    def __post_init__(self) -> None:
        is_read = re.fullmatch(r"([0-9]{1,9}\.[0-9a-f]+(\s+|$))*", self.ops)
        if not is_read or any(kind >= len(self.kinds) for kind, _ in self.pairs()):
            raise ValueError(f"operations as KIND.DIGEST, KIND below {len(self.kinds)}")

    def pairs(self) -> list[tuple[int, int]]:
        """Returns `ops` as (kind's index, digest) pairs."""
        return [(int(k), int(d, 16)) for k, d in re.findall(r"(\d+)\.(\w+)", self.ops)]


def outline_of(program: Program) -> Outline:
    """Returns a program's outline."""
    kinds: dict[str, int] = {}
    ops = " ".join(
        f"{kinds.setdefault(kind, len(kinds))}.{reads:x}"
        for kind, reads in _described(program)
    )
    return Outline(tuple(kinds), ops)


def _described(program: Program) -> Iterator[tuple[str, int]]:
    places = {value: i for i, value in enumerate(program.args)}
    for op in program.ops:
        reads = [_origin(program, op, v, places) for v in op.reads]
        taken, made = (
            " ".join(str(program.values[v]) for v in some)
            for some in (op.operands, op.results)
        )
        attributes = zlib.crc32(op.structure.encode())
        yield (
            f"{op.kind} {taken} -> {made} #{attributes:08x}",
            zlib.crc32(repr(reads).encode()) & 0xFF,
        )


def _origin(program: Program, op: Op, value: int, places: Mapping[int, int]) -> Any:
    """Returns (ids back, result) of the maker, or ("argument", index; -1 of a loop)."""
    if (maker := program.maker(value)) is not None:
        return op.id - maker.id, value - maker.results[0]
    return "argument", places.get(value, -1)


def first_difference(program: Program, planned: Outline) -> str:
    """Describes the first operation that differs from the plan's, or that none does."""
    now, before_ops = [*_described(program)], planned.pairs()

    def place(i: int) -> str:
        op = program.ops[i]
        # A constant's line is that of its first reader, or of an op before it.
        readers = [r for v in op.results for r, _ in program.users[v]]
        first = i if op.operands else min(readers, default=i)
        where = next(filter(None, sources_of(program, range(first, -1, -1))), "")
        return f"operation {i + 1} of {len(now)}" + (f", at {where}" if where else "")

    for i, (kind, reads) in enumerate(now):
        if i >= len(before_ops):
            return f"{place(i)}: {_bare(kind)}, after the plan's last operation"
        number, planned_reads = before_ops[i]
        before = planned.kinds[number]
        if before != kind:
            same = _bare(before) == _bare(kind)
            how = "with other attributes" if same else f"planned was {_bare(before)}"
            return f"{place(i)}: {_bare(kind)}, {how}"
        if planned_reads != reads:
            return f"{place(i)}: {_bare(kind)}, which reads other values"
    if len(before_ops) > len(now):
        more = planned.kinds[before_ops[len(now)][0]]
        return f"the end after {len(now)} operations, planned was {_bare(more)}"
    return "no operation, but the order of results or a library function"


def _bare(kind: str) -> str:
    return " ".join(kind.rpartition(" #")[0].split())


# Other causes of a difference: {field of a plan: its name in messages}.
_CAUSES = {
    "platform": "platform",
    "device_kind": "kind of devices",
    "devices": "number of devices",
    "jax_version": "version of jax",
    "jaxlib_version": "version of jaxlib",
    "enable_x64": "jax_enable_x64",
    "matmul_precision": "jax_default_matmul_precision",
    "prng_impl": "jax_default_prng_impl",
    "threefry_partitionable": "jax_threefry_partitionable",
}


def other_program(
    program: Program,
    planned: Outline | None,
    planned_for: Mapping[str, str],
    here: Mapping[str, str],
) -> PlanMismatch:
    """Returns an error that lists how a step's program differs from the planned one.

    Args:
        planned: outline of the planned program; None if the plan has none.
        planned_for: {name in `_CAUSES`: value of the plan}; names may be absent.
        here: {name in `_CAUSES`: value of this process}.
    """
    lines = [
        f"  {name}: planned for {planned_for[part]}, here {here[part]}"
        for part, name in _CAUSES.items()
        if planned_for.get(part, here.get(part)) != here.get(part) and part in here
    ]
    difference = first_difference(program, planned) if planned is not None else ""
    lines += [f"  first difference: {difference}"] * bool(difference)
    if _OF_WEAK_TYPES.search(difference):
        lines.append(
            "A Python number has a weak type, and an array does not. Pass what the "
            "plan was made with, 0.1 or jnp.float32(0.1); a checkpoint restores "
            "arrays, so plan with arrays."
        )
    lines.append("Values of most constants, such as a learning rate, do not count.")
    remedy = "Pass the plan's step, microbatches, options and arguments, with equal "
    remedy += "fields that are no arrays (as train or eval mode); or plan again."
    if planned_for.get("platform", here.get("platform")) != here.get("platform"):
        lines[-1] += " Threefry's random numbers are other operations on each platform."
        remedy = "Use the plan on its own platform, or plan again."
    if planned_for.get("jax_version") not in (None, here.get("jax_version")):
        remedy = f"Install JAX {planned_for['jax_version']}, or plan again."
    text = "The step's program is not the one that was planned. Differences:"
    return PlanMismatch("\n".join([text, *lines, remedy]))
