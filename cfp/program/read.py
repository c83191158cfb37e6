"""Reads a normalised module into a frozen :class:`~cfp.program.graph.Program`.

A program has two fingerprints: of its structure, and of all values. A learning rate, an
epsilon or a table changes the result of a step, but neither its best sharding nor its
cost. Plans and measurements therefore depend on structure: ops, types, attributes, and
the constants that decide how often a loop runs or which place is read or written. A
compiled program depends on the values of all constants.

A program's operations in short, to say where another one differs from it.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir

from cfp.errors import PlanMismatch, is_installed
from cfp.program import shardy
from cfp.program.graph import Manual, Op, Program, Spec, Value, inner_flops, reached
from cfp.program.rules import (
    Rule,
    correct_rule,
    elementwise_rule,
    passthrough_rule,
    rule_of,
)

# Operands at and behind this one say where an op reads or writes.
_FIRST_INDEX = {
    "stablehlo.dynamic_slice": 1,
    "stablehlo.dynamic_update_slice": 2,
    "stablehlo.gather": 1,
    "stablehlo.scatter": 1,
}
# Counters and indices are small; tables are data, whatever they are used for.
_MOST_ELEMENTS = 16


def _is_counter_type(kind: ir.Type) -> bool:
    """True if values of a type may count iterations or index a place."""
    return (
        isinstance(kind, ir.RankedTensorType)
        and isinstance(kind.element_type, ir.IntegerType)
        and prod(kind.shape) <= _MOST_ELEMENTS
    )


def _content(module: ir.Module) -> str:
    """A digest of a module, blind to names, locations and shardings."""
    digest = hashlib.sha256()
    copy = shardy.copied(module, shardy.WITHOUT_LOCATIONS)
    for function in shardy.functions(copy.operation):
        for name in {"arg_attrs", "res_attrs"} & {*function.attributes}:
            del function.attributes[name]
        digest.update(shardy.bytecode(function))
    return digest.hexdigest()


def shaping_constants(function: ir.Operation) -> set[ir.Operation]:
    """Finds the constants whose values are structure.

    These are small integers in a loop's condition, through its counters, and integers
    in the place that an op reads or writes.
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
    """Yields a value's inputs, in a loop those of the iteration before, too."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        loop = owner.owner.operation
        if loop.name == "stablehlo.while":
            place = ir.BlockArgument(value).arg_number
            yield loop.operands[place]
            yield shardy.returned(loop.regions[1])[place]
        return
    op = owner.operation
    if op.name not in shardy.REGION_OPS:
        yield from op.operands
        return
    place = ir.OpResult(value).result_number
    bodies = list(op.regions)
    if op.name == "stablehlo.while":
        yield op.operands[place]
        bodies = bodies[1:]
    for body in bodies:
        yield shardy.returned(body)[place]


_QUOTED = re.compile(r'"([^"]+)"')
_SOURCE = re.compile(r'"([^"]+)":(\d+):\d+')
_HERE = str(Path(__file__).parent)
# They call the step, and what was traced of it: frames beyond are those around it.
_CALLERS = frozenset(
    str(Path(__file__).with_name(name)) for name in ("step.py", "trace.py")
)
_MAX_ATTRIBUTE_CHARS = 400


def read_program(module: ir.Module) -> Program:
    """Reads a module after :func:`cfp.program.shardy.normalise`.

    Arguments and outputs have no names, and no argument is donated.
    """
    copy = shardy.copied(module, shardy.WITH_RULES)
    functions = {shardy.symbol_name(f): f for f in shardy.functions(copy.operation)}
    meshes = [o.operation for o in module.body if o.operation.name == "sdy.mesh"]
    axes = {name: n for one in meshes for name, n in shardy.mesh_axes(one).items()}
    return replace(
        _Reader(functions, axes).program(functions["main"]),
        text=shardy.bytecode(module.operation),
        content=_content(module),
        name=shardy.symbol_name(module.operation),
    )


class _Reader:
    """State of reading a module: values and ops in execution order."""

    def __init__(
        self, functions: Mapping[str, ir.Operation], meshes: Mapping[str, int]
    ) -> None:
        self._functions = functions  # By name: composites stand for some.
        self._meshes = meshes  # The sizes of axes.
        self._kept: Set[ir.Operation] = frozenset()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._ids: dict[ir.Value, int] = {}
        self._types: dict[ir.Type, tuple[tuple[int, ...], str]] = {}
        self._rules: dict[ir.Attribute, Rule] = {}
        self._digests: dict[str, str] = {}

    def program(self, function: ir.Operation) -> Program:
        """Reads a function, or a region that is sharded by hand."""
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
        known = self._types.get(kind)
        if known is None:
            if isinstance(kind, ir.RankedTensorType):
                known = tuple(kind.shape), str(kind.element_type)
            else:  # tokens and the like carry no data
                known = (), str(kind)
            self._types[kind] = known
        return known

    def _read_op(self, op: ir.Operation, parent: int, repeat: int) -> None:
        operands = [self._ids[v] for v in op.operands]
        yields: list[int] = []
        entries: list[int] = []
        body_start = len(self.ops)
        trips = _trip_count(op)
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
                source=_source(op.location) if op.name in _NAMED_SOURCE else "",
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
        """The text of an op without constants, and of a composite's function."""
        if op.name != "stablehlo.composite":
            return _attributes(op, index, self._kept)
        name = ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value
        if name not in self._digests:
            reader = _Reader(self._functions, self._meshes)
            self._digests[name] = reader.program(self._functions[name]).fingerprint
        return f"function={self._digests[name]}, {_attributes(op, index)}"

    def _manual(self, op: ir.Operation) -> Manual | None:
        """Reads what one device computes in a region that is sharded by hand."""
        if op.name != "sdy.manual_computation":
            return None
        program = _Reader(self._functions, self._meshes).program(op)
        # Devices along an axis that splits no value all compute the same.
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
            return scan_rule(op, shapes[0])
        is_elementwise = op.name.startswith("chlo.") and len(set(shapes)) == 1
        if is_elementwise and op.name != "chlo.top_k":
            return elementwise_rule(shapes[0], len(operands), len(results))
        return None


def _trip_count(op: ir.Operation) -> int | None:
    """The number of iterations of a counted loop; None where it is not known."""
    counter = shardy.counter_of(op) if op.name == "stablehlo.while" else None
    return None if counter is None else max(0, counter[1].stop - counter[1].start)


def _manual_shardings(op: ir.Operation) -> tuple[Spec, ...]:
    """Returns the specs of a manual computation's operands and results."""
    if op.name != "sdy.manual_computation":
        return ()
    sides = (op.attributes[name] for name in ("in_shardings", "out_shardings"))
    return tuple(spec for side in sides for spec in shardy.specs_of(side))


def _constant(op: ir.Operation, index: int) -> str:
    if (value := shardy.numbers_of(op)) is None:
        return str(op.get_asm(use_local_scope=True)).partition(" = ")[2]
    shape = op.results[0].type.shape
    is_long = prod(shape) > shardy.MOST_SMALL_ELEMENTS and not value.is_splat
    # What is not printed counts as different from everything else.
    return f"constant #{index}" if is_long else str(value)


# Besides ops with regions, those whose structure is not all that their attributes say.
_WITH_STRUCTURE = frozenset({"stablehlo.constant", "stablehlo.composite"})

# Source lines are wanted where a message names an op; reading one costs more
# than the rest of the op, so elementwise ops go without.
_NAMED_SOURCE = frozenset(
    f"stablehlo.{kind}"
    for kind in (
        "dot_general convolution gather scatter custom_call sort while case if fft "
        "cholesky triangular_solve reduce_window select_and_scatter rng_bit_generator"
    ).split()
) | {"chlo.top_k", "sdy.manual_computation"}


def _source(location: ir.Location) -> str:
    """``path:line`` of the innermost call in the user's own files, if there is one."""
    frames = _SOURCE.findall(str(location))
    calls = [
        (path, line)
        for path, line in takewhile(lambda frame: frame[0] not in _CALLERS, frames)
        if path.endswith(".py") and not path.startswith(("<", _HERE))
    ]
    own = [call for call in calls if not is_installed(call[0])]
    for path, line in own or calls:
        return f"{path}:{line}"
    return ""


def source_of(program: Program, op: int) -> str:
    """Returns ``path:line`` of the user's code of any op; or "".

    A program has lines for ops of some kinds only. Another op has the line of the last
    op before it.
    """
    module = shardy.parsed(program.text)
    found = shardy.program_ops(shardy.main_function(module))
    sources = (_source(one.location) for one in reversed(found[: op + 1]))
    return next(filter(None, sources), "")


def _attributes(
    op: ir.Operation, index: int, kept: Set[ir.Operation] | None = None
) -> str:
    # The ops of a loop or branch are read one by one.
    return "" if op.name in shardy.REGION_OPS else _text(op, index, {}, kept)


def _text(
    op: ir.Operation,
    index: int,
    names: dict[ir.Value, str],
    kept: Set[ir.Operation] | None,
) -> str:
    """The text of an op's computation, with values of kept constants (None: of all)."""
    if op.name == "stablehlo.constant":
        return "" if kept is not None and op not in kept else _constant(op, index)
    parts = []
    for name in op.attributes:
        if name != shardy.RULE:
            text = str(op.attributes[name])
            if len(text) > _MAX_ATTRIBUTE_CHARS:
                text = hashlib.sha256(text.encode()).hexdigest()
            parts.append(f"{name}={text}")
    for region in op.regions:  # a maximum and a sum differ in nothing else
        for block in region.blocks:
            inner = [f"({_named(block.arguments, names)})"]
            for opview in block:
                inside = opview.operation
                # What a value from outside is is never looked up.
                reads = [names.get(v, f"outside #{index}") for v in inside.operands]
                what = "; ".join((",".join(reads), _text(inside, index, names, kept)))
                made = _named(inside.results, names)
                inner.append(f"{made}={inside.name}({what})")
            parts.append(f"body={' '.join(inner)}")
    return ", ".join(parts)


def _named(values: Sequence[ir.Value], names: dict[ir.Value, str]) -> str:
    """Names the arguments of a block or the results of an op by order, with types."""
    for value in values:
        names[value] = f"%{len(names)}"
    return ",".join(f"{names[value]}:{value.type}" for value in values)


SCAN = "chlo.scan"


# From jax 0.12 on ``jax.numpy.cumsum`` is ``chlo.scan`` on GPUs, for which
# ``sdy-populate-op-sharding-rules`` has no rule. XLA shards it along all dims but the
# one that it goes over.
def scan_rule(op: ir.Operation, shape: tuple[int, ...]) -> Rule:
    """Returns the rule of a scan of one array: whole along the dim that it goes over.

    Args:
        op: the scan, of an array and what it starts with; its results are the array of
            sums and the last of them.
    """
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    dims = tuple((d,) for d in range(len(shape)))
    pair = dims, dims[:dim] + dims[dim + 1 :]
    return Rule(shape, pair, pair, fixed=frozenset({dim}))


# A scalar that is converted.
_OF_WEAK_TYPES = re.compile(r"\bconvert \w+\[\] -> ")


@dataclass(frozen=True, slots=True)
class Outline:
    """A program's operations in order, for a plan's file.

    Attributes:
        kinds: each kind once: name, types, and a digest of attributes behind a ``#``.
        ops: for each operation the number of its kind and a digest of its operands'
            operations, such as ``0.3f 12.a0``.
    """

    kinds: tuple[str, ...]
    ops: str

    def __post_init__(self) -> None:
        if any(not 0 <= kind < len(self.kinds) for kind, _ in self.pairs()):
            raise ValueError(f"an operation of none of {len(self.kinds)} kinds")

    def pairs(self) -> list[tuple[int, int]]:
        """The numbers in ``ops``.

        Raises:
            ValueError: the text is damaged.
        """
        texts = (op.partition(".") for op in self.ops.split())
        return [(int(kind), int(reads, 16)) for kind, _, reads in texts]


def outline_of(program: Program) -> Outline:
    """A program's outline."""
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
        attributes = zlib.crc32(op.structure.encode())
        yield (
            f"{_op_text(program, op)} #{attributes:08x}",
            zlib.crc32(repr(reads).encode()) & 0xFF,
        )


def _origin(program: Program, op: Op, value: int, places: Mapping[int, int]) -> Any:
    """A value as an operation reads it, wherever in a program that stands."""
    if (maker := program.maker(value)) is not None:
        return op.id - maker.id, value - maker.results[0]
    return "argument", places.get(value, -1)


def _op_text(program: Program, op: Op) -> str:
    """An operation's name and types: ``dot_general f32[8,4] f32[4,2] -> f32[8,2]``."""
    reads = " ".join(str(program.values[v]) for v in op.operands)
    made = " ".join(str(program.values[v]) for v in op.results)
    return f"{op.kind} {reads} -> {made}"


def first_difference(program: Program, planned: Outline) -> str:
    """The first operation of a program that is not the one planned, in words."""
    now, before_ops = [*_described(program)], planned.pairs()

    def place(i: int) -> str:
        op = program.ops[i]
        # A constant stands where it was made, which is no line of what reads it.
        readers = (
            [] if op.operands else [r for v in op.results for r, _ in program.users[v]]
        )
        where = source_of(program, min(readers, default=i))
        return f"operation {i + 1} of {len(now)}" + (f", at {where}" if where else "")

    for i, (kind, reads) in enumerate(now):
        if i >= len(before_ops):
            return f"{place(i)}: {_bare(kind)}, behind the end of the planned"
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
        return f"it ends after {len(now)} operations, planned was {_bare(more)}"
    return "no operation; the order of results, or a function of a library"


def _bare(kind: str) -> str:
    return " ".join(kind.rpartition(" #")[0].split())


# What a program follows from beside the step, as plans say it, and as users do.
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
    """The error that says in what a step's program differs from the one planned.

    Args:
        planned: the operations of the one planned; None if the plan does not say.
        planned_for: what that was made with: devices, versions, configuration.
        here: the same of this process.
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
            "A Python number, which is weakly typed, in place of an array, or the "
            "reverse, makes other types. Pass what the plan was made with, 0.1 or "
            "jnp.float32(0.1); a checkpoint restores arrays, so plan with these."
        )
    lines.append("Other values of constants, such as a learning rate, are no obstacle.")
    remedy = "Pass the step, microbatches, options and arguments of the plan, with "
    remedy += "the same in fields that are no arrays; or plan again."
    if planned_for.get("platform", here.get("platform")) != here.get("platform"):
        lines[-1] += (
            " JAX lowers some operations, such as random numbers, in another way for "
            "each platform."
        )
        remedy = "Use the plan on the platform that it is for."
    if planned_for.get("jax_version") not in (None, here.get("jax_version")):
        remedy = f"Install JAX {planned_for['jax_version']}, or plan again."
    text = "The step's program is not the one that was planned. What differs:"
    return PlanMismatch("\n".join([text, *lines, remedy]))
