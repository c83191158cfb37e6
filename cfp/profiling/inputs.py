"""Makes random-looking arguments for a program, each shard on its device.

Values affect times. Zeros, and numbers of one sign, take less power than usual numbers,
so that clocks stay higher. NaN and infinite values slow some kernels down. Token ids
below 128 would read only 128 rows of an embedding, which stay in a cache, and its
gradient would add into as few rows. So integers that select rows of a tensor range over
all its rows, and integers compared with ``0, 1, 2, ...`` over all these numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.record import untuned_options
from cfp.program.constrain import partition_spec
from cfp.program.graph import Op, Program, Spec, reached
from cfp.program.memory import auto_mesh
from cfp.program.part import Part, aval, is_key, key_name, signature

_EQUAL = "comparison_direction EQ"
# Ops whose result is about as large as some operands, with the operands' positions.
_SAME = {
    "add": (0, 1),
    "and": (0, 1),
    "broadcast_in_dim": (0,),
    "clamp": (1,),
    "convert": (0,),
    "copy": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "maximum": (0, 1),
    "minimum": (0, 1),
    "not": (0,),
    "or": (0, 1),
    "reshape": (0,),
    "select": (1, 2),
    "slice": (0,),
    "subtract": (0,),
    "transpose": (0,),
}


def counts(program: Program, ops: tuple[int, ...]) -> dict[int, int]:
    """Returns {value id: fewest rows} of row numbers (`_picks`) and their `sources`."""
    found: dict[int, int] = {}
    for op_id in program.with_bodies(ops):
        for value, count in _picks(program, program.ops[op_id]):
            for source in sources(program, value):
                found[source] = min(count, found.get(source, count))
    return found


def _picks(program: Program, op: Op) -> list[tuple[int, int]]:
    """Lists (value, rows): indices of a gather or scatter, or comparands of an iota."""
    if op.kind in ("gather", "scatter"):
        is_gather = op.kind == "gather"
        dims = op.integers(
            "start_index_map" if is_gather else "scatter_dims_to_operand_dims"
        )
        shape = program.values[op.operands[0]].shape
        # A scatter's operands are n arrays, then the indices, then n updates.
        indices = op.operands[1 if is_gather else len(op.operands) // 2]
        return [(indices, min(shape[d] for d in dims))] if dims else []
    if op.kind == "compare" and _EQUAL in op.attributes:
        one, other = op.operands
        sizes = (_counted(program, one), _counted(program, other))
        return [(v, n) for v, n in ((one, sizes[1]), (other, sizes[0])) if n]
    return []


def _counted(program: Program, value: int) -> int:
    """Returns the length of an iota among a value's `sources`; 0 without one."""
    for source in sources(program, value):
        op = program.maker(source)
        if op is not None and op.kind == "iota":
            [dim] = op.integers("iota_dimension")
            return program.values[source].shape[dim]
    return 0


def sources(program: Program, value: int) -> set[int]:
    """Returns ids of a value, and of values upstream with numbers about as large.

    The ops between are casts, slices, reshapes, additions and the like (`_SAME`).
    """

    def before(v: int) -> Iterable[int]:
        one = program.values[v]
        if one.producer < 0:
            return [one.origin] if one.origin >= 0 else []
        op = program.ops[one.producer]
        if op.kind == "concatenate":
            return op.operands
        return [op.operands[i] for i in _SAME.get(op.kind, ())]

    return {*reached([value], before)}


# Limits of positive floats: even 8-bit types have them as numbers above zero and at
# most 0.02. Signed floats lie between the larger and its negative.
_SMALLEST_FLOAT = 0.002
_LARGEST_FLOAT = 0.0199
_INTEGER_BITS = 7


@dataclass(frozen=True, slots=True)
class InputKind:
    """Properties from which an input is made.

    Attributes:
      shape: shape of the global array.
      dtype: name of its type in numpy and JAX.
      signed: True for floats of both signs, False for floats above zero.
      count: for integers that select rows, the number of rows; otherwise 0.
      given: bytes of the value, if `Program.given` has them; else empty.
      key: implementation of random keys, whose data has this shape and dtype; else "".
      memory: memory kind of the host; "" on the device.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    signed: bool = False
    count: int = 0
    given: bytes = b""
    key: str = ""
    memory: str = ""


def input_kinds(
    program: Program, part: Part, specs: Sequence[Spec]
) -> tuple[InputKind, ...]:
    """Returns the kinds of a part's inputs, in order, under shardings `specs`."""
    avals = [aval(program, value) for value in part.inputs]
    positive = above_zero(program, part.ops)
    picking = counts(program, part.ops)
    given = dict(zip(program.args, program.given, strict=False))
    types = signature(program, part)
    memories = types.memory[0] or ("",) * len(avals)
    return tuple(
        InputKind(
            array.shape,
            str(array.dtype),
            spec,
            value not in positive,
            picking.get(value, 0) if jnp.issubdtype(array.dtype, jnp.integer) else 0,
            given.get(value, b""),
            key_name(seen.dtype) if is_key(seen.dtype) else "",
            memory,
        )
        for value, array, seen, memory, spec in zip(
            part.inputs, avals, types.inputs, memories, specs, strict=True
        )
    )


def make_inputs(
    kinds: Sequence[InputKind], mesh: Mesh, donated: Collection[int] = ()
) -> list[jax.Array]:
    """Makes one array for each kind.

    Floats lie between -0.02 and 0.02, so that results of many layers stay finite. For
    logarithms, powers, roots and divisors they are positive. Scalar integers are 1.
    Integers that select rows range over all rows; others are 0 to 127, or less for
    narrow types. Booleans are mixed; scalars are True. Given values take precedence.

    Args:
      kinds: kinds of the arrays; equal ones share an array.
      donated: positions of donated arguments, which share no array.
    """
    keys = [(kind, i if i in donated else -1) for i, kind in enumerate(kinds)]
    made = {key: generator(key[0], mesh)() for key in dict.fromkeys(keys)}
    return [made[key] for key in keys]


@lru_cache(maxsize=4096)
def generator(kind: InputKind, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles a function without arguments that makes an array of a kind; cached."""
    options = untuned_options(mesh.devices.flat[0].platform)
    # Otherwise 64-bit types would become 32-bit ones.
    with jax.enable_x64(True):
        made = jax.eval_shape(partial(_made, kind))
        # Random keys have further dims inside of a program.
        spec = partition_spec(kind.spec, len(made.shape))
        sharding = NamedSharding(auto_mesh(mesh), spec)
        if kind.memory:
            sharding = sharding.with_memory_kind(kind.memory)
        lowered = jax.jit(partial(_made, kind), out_shardings=sharding).lower()
    return lowered.compile(compiler_options=options or None)


def _made(kind: InputKind) -> jax.Array:
    dtype = jnp.dtype(kind.dtype)
    if kind.given:
        return jnp.asarray(np.frombuffer(kind.given, dtype).reshape(kind.shape))
    values = random_values(kind.shape, dtype, kind.signed, kind.count)
    return jax.random.wrap_key_data(values, impl=kind.key) if kind.key else values


def random_values(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    signed: bool = False,
    count: int = 0,
    salt: int = 0,
) -> jax.Array:
    """Makes small random numbers; `make_inputs` has their ranges.

    Args:
      signed: True for floats of both signs, False for floats above zero.
      count: for integers that select rows, the number of rows; otherwise 0.
      salt: seed, below 2**32.
    """
    bits = hashed_bits(shape, salt)
    if dtype == jnp.bool_:
        return bits >> 31 != 0 if shape else jnp.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if not shape:
            return jnp.ones((), dtype)
        largest = int(jnp.iinfo(dtype).max)
        if count:
            most = jnp.uint32(min(count, largest + 1, 2**31))
            return lax.convert_element_type((bits >> 1) % most, dtype)
        kept = min(_INTEGER_BITS, largest.bit_length())
        return lax.convert_element_type(bits >> (32 - kept), dtype)
    smallest = -_LARGEST_FLOAT if signed else _SMALLEST_FLOAT
    width = jnp.float32((_LARGEST_FLOAT - smallest) / 2**24)
    floats = (bits >> 8).astype(jnp.float32) * width + jnp.float32(smallest)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.float64 if dtype == jnp.complex128 else jnp.float32
        real = lax.convert_element_type(floats, part)
        return lax.complex(real, real)
    return lax.convert_element_type(floats, dtype)


def hashed_bits(shape: tuple[int, ...], salt: int = 0) -> jax.Array:
    """Hashes each element's indices to 32 bits (uint32) that look random.

    Unlike `jax.random`, it compiles to a few elementwise operations, which every device
    computes for its own shard.

    Args:
      salt: seed, below 2**32.
    """
    bits = jnp.full(shape, 0x9E3779B9 ^ salt, jnp.uint32)
    for dim in range(len(shape)):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim)
        bits = (bits ^ index) * jnp.uint32(0x85EBCA6B + 2 * dim)
        bits = bits ^ (bits >> 15)
    bits = bits * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 13)


# ---------------------------------------------------- inputs that must not be negative

# Operands of square roots (second moments) and divisors must be positive; otherwise
# results are NaN. Other inputs have both signs, as in training: products of positive
# numbers take less power, so that a cooler device would seem faster.

# Positions of operands that must be above zero.
_DOMAINS = {"sqrt": 0, "rsqrt": 0, "cbrt": 0, "log": 0, "power": 0, "divide": 1}
# Ops for which signs of the result do not follow from signs of the operands.
_BARRIERS = frozenset(
    {"dot_general", "convolution", "exponential", "logistic", "abs", "square"}
)


def above_zero(program: Program, ops: tuple[int, ...]) -> frozenset[int]:
    """Returns ids of values to keep above zero, or some of `ops` may give NaN."""
    every = (program.ops[op_id] for op_id in program.with_bodies(ops))
    first = [op.operands[_DOMAINS[op.kind]] for op in every if op.kind in _DOMAINS]

    def before(v: int) -> Iterable[int]:
        value = program.values[v]
        if value.producer >= 0:
            return _operands(program.ops[value.producer], v)
        return [value.origin] if value.origin >= 0 else []

    return frozenset(reached(first, before))


def _operands(op: Op, v: int) -> tuple[int, ...]:
    """Returns an op's operands, or its bodies' yields of `v`; () if no sign passes."""
    is_square = op.kind == "multiply" and op.operands[0] == op.operands[1]
    if op.kind in _BARRIERS or is_square:
        return ()
    if not op.has_regions:
        return op.operands
    each = len(op.results)
    place = op.results.index(v)
    return tuple(w for i, w in enumerate(op.yields) if i % each == place)
