"""Frozen records of a program: its values and ops.

One list has the ops of all regions, in execution order. Ops in a loop or
branch come before the loop or branch, whose id is their ``Op.parent``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, wraps
from math import prod
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from cfp.program.rules import Rule

_FIRST_NUMBER = re.compile(r"\d+")
_NUMBERS = re.compile(r"-?\d+")
DIRECTION = re.compile(r"comparison_direction ([A-Z]{2})")

Spec = tuple[tuple[str, ...], ...]  # for each dim the mesh axes it is sharded over

_Node = TypeVar("_Node", bound=Hashable)
_Found = TypeVar("_Found")
_Of = ParamSpec("_Of")


def reached(
    start: Iterable[_Node], further: Callable[[_Node], Iterable[_Node]]
) -> Iterator[_Node]:
    """Yields the nodes of `start`, and all reached by `further`, once, depth first."""
    stack, seen = [*start], set[_Node]()
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            yield one
            stack += further(one)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: an op's result, or an argument of the program or of a loop's region.

    Attributes:
        producer: id of the op that makes it; -1 for an argument.
        origin: id of a loop argument's initial value; -1 for other values.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    producer: int = -1
    origin: int = -1

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor, unsharded."""
        return prod(self.shape) * dtype_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@lru_cache
def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of an MLIR type such as ``bf16``; 1 below 8 bits."""
    if dtype.startswith("complex<"):
        return 2 * dtype_bytes(dtype[8:-1])
    bits = _FIRST_NUMBER.search(dtype)
    return max(1, int(bits.group() if bits else "32") // 8)


@dataclass(frozen=True, slots=True)
class Manual:
    """One device's computation in a region that the user sharded by hand.

    Attributes:
        program: the region's ops, on one device's shards along manual axes. Other axes
            may split these further.
        flops: FLOPs of the products in one run on one device.
        devices: number of devices along manual axes that split an operand or a result.
    """

    program: Program
    flops: int
    devices: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op.

    Attributes:
        name: such as ``stablehlo.dot_general``.
        operands: value ids; initial values for a loop.
        yields: value ids that a loop's body returns; for a branch the values that each
            case returns, one case after another.
        entries: value ids of arguments of a loop's condition, then of its body.
        body: ids of the ops in the regions, also of those in inner regions.
        rule: sharding rule; None for opaque ops, loops and branches.
        scope: JAX's name stack, such as ``jit(step)/jvp(Net)/Dense_0/dot_general``.
        source: ``model.py:12``, the user's line, or a library's; "" for kinds that no
            message names.
        parent: id of the loop or branch around the op, or -1.
        repeat: runs in one step: the product of trip counts of loops around the op.
        attributes: as text; "" for loops, branches. Equal text means equal results.
        structure: `attributes` without constants, except for trip counts and indices;
            equal text means equal cost.
        shardings: for a region that the user sharded by hand, those of its operands and
            then of its results; () for other ops.
        uncounted: True for a loop of unknown length, which counts as one iteration.
        manual: computation of a region that the user sharded by hand, or None.
        kind: name without the dialect.
        has_regions: True for a loop or a branch, even without ops in the regions.
    """

    id: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    scope: str
    source: str
    parent: int
    repeat: int
    attributes: str
    structure: str
    yields: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    body: tuple[int, ...] = ()
    shardings: tuple[Spec, ...] = ()
    uncounted: bool = False
    manual: Manual | None = field(default=None, compare=False, repr=False)
    kind: str = field(init=False, compare=False, repr=False)
    has_regions: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Both are read a million times in a deep program.
        object.__setattr__(self, "kind", self.name.split(".", 1)[-1])
        object.__setattr__(self, "has_regions", bool(self.body or self.yields))

    @property
    def known_rule(self) -> Rule:
        """The op's rule; an AssertionError if it has none."""
        assert self.rule is not None, f"{self.name} has no rule"
        return self.rule

    @property
    def reads(self) -> tuple[int, ...]:
        """Ids of `operands`, then of `yields`."""
        return self.operands + self.yields

    def entered(self, place: int) -> tuple[int, ...]:
        """Returns the `entries` of a loop that operand `place` initializes."""
        return self.entries[place :: len(self.operands)]

    def yielded(self, place: int) -> tuple[int, ...]:
        """Returns the `yields` that a loop or branch returns as result `place`."""
        return self.yields[place :: len(self.results)]

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns the integers of an attribute, such as ``dimensions``; () without any.

        Forms: ``name=0``, ``name=array<i64: 0, 1>`` or ``name = [0, 1]``.
        """
        found = re.search(
            rf"\b{name} ?= ?(?:array<i64)?[:\[]?([-\d, ]*)", self.attributes
        )
        return tuple(map(int, _NUMBERS.findall(found[1]))) if found else ()

    @property
    def direction(self) -> str:
        """The direction of a comparison, such as EQ; AssertionError for other ops."""
        found = DIRECTION.search(self.attributes)
        assert found is not None, "a comparison has a direction"
        return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A precision in which products may be computed, if a user asks for it.

    Attributes:
        name: its name in settings, and in counts of `Plan.search`.
        pattern: regular expression of the setting's values.
        syntax: description of these values, for messages.
        rewrite: rewrites a module, given the setting's value, the arguments' paths, and
            the mesh. Returns {outcome: {path of a parameter: number of products}} of
            16-bit products; paths have * for numbers, and are "" without parameter.
        taken: outcome of rewritten products.
        element: first letters of the element types of quantized numbers.
        options: compiler options of programs with rewritten products.
        speedup: speed of products relative to 16-bit ones, quantizing included.
        saved_ms, quantized_ms: ms saved per FLOP, ms lost per number, on `devices`.
    """

    name: str
    pattern: str
    syntax: str
    rewrite: Callable[[Any, str, Sequence[str], Any], dict[str, dict[str, int]]]
    taken: str
    element: str
    options: Mapping[str, str]
    speedup: float
    saved_ms: float
    quantized_ms: float
    devices: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """Changes that cfp made to the step's program.

    Attributes:
        counts: {name in `Plan.search`: number of changes}.
        products: counts that `Precision.rewrite` returned.
        precision: of the rewritten products; None without any.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    precision: Precision | None = None

    @property
    def options(self) -> Mapping[str, str]:
        """Compiler options that the program needs."""
        return self.precision.options if self.precision else {}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step function's program.

    Attributes:
        args: value ids of the arguments, in flat order.
        outputs: value ids of the results, in flat order.
        arg_names, output_names: paths in the user's pytrees.
        alias: for each argument the index of the output that reuses its memory
            (a donated argument), or None.
        text: the normalised module as MLIR bytecode, with locations; empty in `Manual`.
        content: sha256 over all functions and constants, the key of compiled programs.
        name: name of the module, from the user's function.
        rewritten: cfp's changes to the step as JAX lowered it.
        given: for each argument the bytes of its example, if it is a concrete scalar or
            small mask; empty bytes for others. () if `trace` did not set it.
        arg_avals, output_avals: JAX's types of arguments and results, with the types of
            random keys and weak types.
        arg_memory, output_memory: kind of host memory of each, or "".
        opened: ids of loops whose bodies' ops count as top-level ops.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    args: tuple[int, ...]
    outputs: tuple[int, ...]
    arg_names: tuple[str, ...]
    output_names: tuple[str, ...]
    alias: tuple[int | None, ...]
    text: bytes
    content: str = ""
    name: str = "step"
    rewritten: Rewritten = Rewritten()
    given: tuple[bytes, ...] = ()
    arg_avals: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    output_avals: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    arg_memory: tuple[str, ...] = field(default=(), compare=False, repr=False)
    output_memory: tuple[str, ...] = field(default=(), compare=False, repr=False)
    opened: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the structure of all ops, the key of plans.

        Not included are shardings, except of regions sharded by hand, and constants,
        except for trip counts and indices; see `cfp.program.read`.
        """
        types = [str(self.values[v]) for v in self.args]
        digest = hashlib.sha256(repr((types, self.args, self.outputs)).encode())
        for op in self.ops:
            types = [str(self.values[v]) for v in op.results]
            links = (op.operands, op.yields, op.entries, op.results, op.parent)
            digest.update(repr((op.name, op.structure, *links, types)).encode())
        return digest.hexdigest()

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By value id, (op id, index) pairs of its readers; indices are of `reads`."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.values]
        for op in self.ops:
            for index, value in enumerate(op.reads):
                found[value].append((op.id, index))
        return tuple(tuple(u) for u in found)

    def entered(self, value: int) -> list[tuple[int, int]]:
        """Returns ids (initial value, argument) of a loop's argument, for each loop.

        The outermost loop comes first; [] for values that are no loop's argument.
        """
        found = []
        while (origin := self.values[value].origin) >= 0:
            found.append((origin, value))
            value = origin
        return found[::-1]

    @cached_property
    def looked_for(self) -> dict[tuple[Any, ...], Any]:
        """Cache of `searched_once`: {(function, *arguments): result}."""
        return {}

    @cached_property
    def leaf_ops(self) -> frozenset[int]:
        """Ids of constants, iotas and ops of these; no loop, branch, call or `rng`.

        They are cheap to repeat, so that their readers may be sharded differently.
        """
        depends = [v.producer == -1 for v in self.values]
        leaves = set()
        for op in self.ops:
            is_stateful = op.kind in ("custom_call", "rng", "infeed", "partition_id")
            reads = (depends[v] for v in op.reads)
            if op.has_regions or is_stateful or any(reads):
                for r in op.results:
                    depends[r] = True
            else:
                leaves.add(op.id)
        return frozenset(leaves)

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a whole value."""
        return self.values[value].shape

    def maker(self, value: int) -> Op | None:
        """Returns the op that makes a value; None for an argument."""
        producer = self.values[value].producer
        return self.ops[producer] if producer >= 0 else None

    def is_leaf(self, value: int) -> bool:
        """True if an op of `leaf_ops` makes the value."""
        return self.values[value].producer in self.leaf_ops

    def decides(self, value: int) -> bool:
        """True for a scalar that a loop or case index reads, also via other scalars."""

        def further(v: int) -> list[int]:
            users = () if self.shape(v) else self.users[v]
            return [result for user, _ in users for result in self.ops[user].results]

        return any(
            self.ops[user].kind == "while"
            or (self.ops[user].kind in ("if", "case") and index == 0)
            for v in reached([value], further)
            if not self.shape(v)
            for user, index in self.users[v]
        )

    def is_top_level(self, op: int) -> bool:
        """True if an op is in no loop or branch; loops in `opened` do not count."""
        parent = self.ops[op].parent
        return parent < 0 or parent in self.opened

    def top_level(self, op: int) -> int:
        """Returns the op, or the loop or branch around it, that `is_top_level`."""
        while not self.is_top_level(op):
            op = self.ops[op].parent
        return op

    def in_uncounted(self, op: int) -> bool:
        """True if a loop around an op has an unknown number of iterations."""
        outer = self.ops[op].parent
        return outer >= 0 and (self.ops[outer].uncounted or self.in_uncounted(outer))

    def turns(self, op: int) -> int:
        """Returns how often `top_level` of an op runs in one step."""
        return self.ops[self.top_level(op)].repeat

    def uses(self, value: int) -> list[tuple[int, int]]:
        """Returns `users` of a value; of a loop in `opened` those of its argument."""
        found: list[tuple[int, int]] = []
        for user, index in self.users[value]:
            op = self.ops[user]
            if user in self.opened and index < len(op.operands):
                entries = op.entered(index)
                found.extend(use for entry in entries for use in self.uses(entry))
            else:
                found.append((user, index))
        return found

    def with_bodies(self, ops: Iterable[int]) -> set[int]:
        """Returns ids of ops, and of all ops in their regions."""
        return {i for op in ops for i in (op, *self.ops[op].body)}


def axes_of(spec: PartitionSpec, rank: int) -> Spec:
    """Converts JAX's spec to the mesh axes of each of `rank` dims."""
    parts = (*spec, *(None,) * (rank - len(spec)))
    return tuple(
        () if p is None else (p,) if isinstance(p, str) else tuple(p) for p in parts
    )


_Searched = TypeVar("_Searched", bound=Any)


def searched_once(
    find: Callable[Concatenate[_Searched, _Of], _Found],
) -> Callable[Concatenate[_Searched, _Of], _Found]:
    """Decorator: caches results in the first argument's `looked_for`; no keywords."""

    @wraps(find)
    def search(searched: _Searched, *of: _Of.args, **none: _Of.kwargs) -> _Found:
        assert not none, "arguments are given by position"
        key = (search, *of)
        if key not in searched.looked_for:
            searched.looked_for[key] = find(searched, *of, **none)
        return searched.looked_for[key]

    return search


# ------------------------------------------------------------------------------ dtypes

_DTYPES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def numpy_dtype(element: str) -> np.dtype:
    """Returns the dtype of an MLIR element type; ValueError or TypeError if unknown."""
    if element in _DTYPES:
        return jnp.dtype(_DTYPES[element])
    if element[:2] in ("f8", "f6", "f4"):
        return jnp.dtype(f"float{element[1]}_{element[2:].lower()}")
    if element.startswith("ui"):
        return jnp.dtype(f"uint{element[2:]}")
    if element.startswith("i"):
        return jnp.dtype(f"int{element[1:]}")
    raise ValueError(f"no numpy dtype for {element!r}")


# A custom_partitioning op's call: see `cfp.program.partitioned`.
PARTITIONED = re.compile(r'backend_config="(cfp:\w*:(\d+):\w+)"')
# cuDNN's attention: its backward pass has five matrix products, its forward pass two.
_ATTENTION = "__cudnn$fmha"
_BACKWARD_TIMES = 2.5
_SCORES = ("cudnn_fmha_backend_config", "intermediate_tensor_shape", "dimensions")


def op_flops(program: Program, op: Op) -> int:
    """Counts FLOPs of a contraction or `call_flops` op in one step, on all devices."""
    if op.manual is not None or PARTITIONED.search(op.attributes):
        return call_flops(op) * op.repeat
    rule = op.known_rule
    if op.kind == "convolution":
        # The rule's spatial factors are sizes of the input, not counts of windows.
        result = program.shape(op.results[0])
        kernel = program.shape(op.operands[1])
        features = {f for dim in rule.operands[1] for f in dim}
        made = [f for dim in rule.results[0] for f in dim if f in features]
        window = prod(kernel) // max(1, prod(rule.sizes[f] for f in made))
        # Zeros of a dilated input are not multiplied.
        zeros = prod(op.integers("lhs_dilation"))
        return 2 * prod(result) * window * op.repeat // zeros
    # A complex product takes four real ones.
    is_complex = program.values[op.operands[0]].dtype.startswith("complex")
    return (8 if is_complex else 2) * prod(rule.sizes) * op.repeat


def is_dequantized(program: Program, op: Op) -> bool:
    """True if an op widens 8-bit floats, or multiplies widened ones, as by a scale."""
    if op.kind == "multiply":
        cast = program.maker(op.operands[0])
        return cast is not None and is_dequantized(program, cast)
    source = program.values[op.operands[0]] if op.kind == "convert" else None
    return source is not None and source.dtype.startswith("f8")


def product_dtype(program: Program, op: Op) -> str:
    """Returns the element type of a product's first operand, before dequantization."""
    value = op.operands[0]
    while (maker := program.maker(value)) and is_dequantized(program, maker):
        value = maker.operands[0]
    return program.values[value].dtype


def call_flops(op: Op) -> int:
    """Counts FLOPs of one run of a call, on all devices, by :func:`inner_flops`.

    Calls are custom_partitioning ops, and regions sharded by hand. 0 for other ops.
    """
    if op.manual is not None:
        return op.manual.flops * op.manual.devices
    found = PARTITIONED.search(op.attributes)
    return int(found[2]) if found else 0


def inner_flops(program: Program, ops: Sequence[ir.Operation]) -> int:
    """Counts FLOPs of one run of a program, also in regions sharded by hand.

    These are FLOPs of products, convolutions and cuDNN's attention, masked scores
    included. `ops` are the program's, as MLIR.
    """
    pairs = zip(program.ops, ops, strict=True)
    return sum(_inner_flops(program, record, op) for record, op in pairs)


def _inner_flops(program: Program, record: Op, op: ir.Operation) -> int:
    is_product = record.kind in ("dot_general", "convolution")
    if record.manual is not None or (is_product and record.rule is not None):
        return op_flops(program, record)
    if record.kind != "custom_call":
        return 0
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if not target.startswith(_ATTENTION):
        return 0
    found: Any = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    for name in _SCORES:
        found = found[name]
    scores = prod(map(int, found))
    q, _, v = (program.shape(v) for v in record.operands[:3])
    products = 2 * scores * (q[-1] + v[-1]) * record.repeat
    return int(products * (_BACKWARD_TIMES if "Backward" in target else 1))


def path_matches(path: str, pattern: str) -> bool:
    """True if a glob matches a path or its last parts, with or without its /value."""
    parts = path.split("/")
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    ends += [end.removesuffix("/value") for end in ends]
    # A path may have brackets, which have a meaning in globs.
    return any(end == pattern or fnmatchcase(end, pattern) for end in ends)
