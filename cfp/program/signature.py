"""Types of what a program takes and returns, and functions that have just these types.

Such a function is lowered in the place of a part of a program, whose ops then become
its body. Types of a whole step say more than its StableHLO: keys of random numbers are
integers there, and numbers that take the type of whatever they meet have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding

from cfp.program.constrain import partition_spec
from cfp.program.graph import Program, Spec, numpy_dtype
from cfp.program.memory import in_memory, placed_avals
from cfp.program.part import Part

Avals = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Types of a program's inputs and outputs, in their order.

    Attributes:
        inputs, outputs: the types.
        memory: of the inputs and of the outputs, the memory of the host that each is
            in, or ""; empty if none is.
    """

    inputs: Avals
    outputs: Avals
    memory: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def shardings(
        self, mesh: Mesh, in_specs: Sequence[Spec], out_specs: Sequence[Spec]
    ) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Specs as shardings of the inputs, and of the outputs."""
        ins, outs = self.memory
        return (
            in_memory(shardings(mesh, in_specs, self.inputs), ins),
            in_memory(shardings(mesh, out_specs, self.outputs), outs),
        )

    def lower(
        self,
        in_shardings: Sequence[NamedSharding] | None = None,
        out_shardings: Sequence[NamedSharding] | None = None,
        donate_argnums: Sequence[int] = (),
    ) -> jax.stages.Lowered:
        """Lowers a function of these types, whose body is to be replaced."""

        def stand_in(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            # One zero for each type: tracing hundreds takes longer than the rest.
            zeros = {one: _zero(one) for one in dict.fromkeys(self.outputs)}
            return tuple(zeros[one] for one in self.outputs)

        if in_shardings is None or out_shardings is None:
            return jax.jit(stand_in, keep_unused=True).lower(*self.inputs)
        jitted = jax.jit(
            stand_in,
            keep_unused=True,
            in_shardings=tuple(in_shardings),
            out_shardings=tuple(out_shardings),
            donate_argnums=tuple(donate_argnums),
        )
        return jitted.lower(*placed_avals(self.inputs, in_shardings))


def aval(program: Program, value: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value as JAX writes them."""
    record = program.values[value]
    return jax.ShapeDtypeStruct(record.shape, numpy_dtype(record.dtype))


def signature(program: Program, part: Part) -> Signature:
    """Types of a part's inputs and outputs; of a whole program those of its step."""
    if part.is_whole(program) and program.arg_avals:
        memory = (program.arg_memory, program.output_memory)
        return Signature(program.arg_avals, program.output_avals, memory)
    return Signature(
        tuple(aval(program, v) for v in part.inputs),
        tuple(aval(program, v) for v in part.outputs),
    )


def shardings(
    mesh: Mesh, specs: Sequence[Spec], avals: Avals
) -> tuple[NamedSharding, ...]:
    """Specs as shardings of values of these types.

    Inside of a program keys of random numbers have dims that JAX does not show.
    """
    return tuple(
        NamedSharding(mesh, partition_spec(spec, len(one.shape)))
        for spec, one in zip(specs, avals, strict=True)
    )


def is_key(dtype: Any) -> bool:
    """True of the types of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_name(dtype: Any) -> str:
    """The name, or what else JAX knows it by, of the kind of a key's type."""
    found = []

    def look() -> jax.Array:
        key = lax.full((), 0, dtype)
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look)
    return found[0]


def _zero(one: jax.ShapeDtypeStruct) -> jax.Array:
    zero = lax.full(one.shape, 0, one.dtype)
    if not one.weak_type:
        return zero
    return primitives.convert_element_type_p.bind(
        zero, new_dtype=one.dtype, weak_type=True, sharding=None
    )
