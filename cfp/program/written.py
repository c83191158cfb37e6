"""The ops that a replacement takes the place of, as a program of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding

from cfp.program import shardy
from cfp.program.constrain import values_by_id
from cfp.program.graph import Program
from cfp.program.part import Signature, aval
from cfp.program.replace import Replacement
from cfp.program.widen import wide_dtype, widen


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The ops between the operands and the results of a replacement.

    Attributes:
        inputs: given values: the reads, without reads that follow from others.
        foreign: inputs that are no reads, such as residuals of another loop.
        derived: reads that follow from the inputs.
        makes: results of the replacement.
    """

    program: Program
    replacement: Replacement
    inputs: tuple[int, ...]
    foreign: tuple[int, ...]
    derived: tuple[int, ...]
    makes: tuple[int, ...]

    def aval(self, value: int) -> jax.ShapeDtypeStruct:
        """The type of a value."""
        return aval(self.program, value)

    @property
    def text(self) -> str:
        """The function of `lower` as StableHLO text, without locations."""
        return str(shardy.stablehlo(self.lower()).operation.get_asm())

    def widened(self, *shardings: NamedSharding) -> jax.stages.Lowered:
        """Lowers with float32 in place of 16-bit floats, in inputs and results, too.

        Masks and positions are those of the step. Operands and results of external
        kernels keep their types.
        """
        module = shardy.stablehlo(self.lower(*shardings))
        widen(module, only_data=True)
        lowered = self._stand_in(shardings, wide_dtype)
        outer = shardy.stablehlo(lowered)
        with outer.context, ir.Location.unknown():
            body = ir.Module.parse(shardy.bytecode(module.operation))
            shardy.replace_body(outer, body)
        return lowered

    def _stand_in(
        self, shardings: Sequence[NamedSharding], dtype: Callable[[Any], Any]
    ) -> jax.stages.Lowered:
        """A lowered function of the inputs that makes zeros."""
        given, made = (
            tuple(
                jax.ShapeDtypeStruct(x.shape, dtype(x.dtype)) for x in map(self.aval, v)
            )
            for v in (self.inputs, self.derived + self.makes)
        )
        return Signature(given, made).lower(shardings)

    def lower(self, *shardings: NamedSharding) -> jax.stages.Lowered:
        """Lowers the ops as a function of the inputs that makes ``derived + makes``.

        Args:
            shardings: one for each input, if not all on one device.
        """
        outputs = self.derived + self.makes
        lowered = self._stand_in(shardings, jnp.dtype)
        module = shardy.stablehlo(lowered)
        block = shardy.main_block(module)
        with module.context, ir.Location.unknown():
            source = ir.Module.parse(self.program.text)
            ops = shardy.program_ops(shardy.main_function(source))
            arguments = shardy.main_block(source).arguments
            pairs = zip(ops, self.program.ops, strict=True)
            by_id = values_by_id(self.program, arguments, pairs)
            given = (by_id[v] for v in self.inputs)
            mapping: dict[ir.Value, ir.Value] = dict(
                zip(given, block.arguments, strict=True)
            )
            shardy.copy_symbols(module, source)
            *stale, last = [one.operation for one in block.operations]
            with ir.InsertionPoint(last):
                for op in sorted(_between(self.program, self.inputs, outputs)[0]):
                    for v in self.program.ops[op].operands:
                        mapping[by_id[v]] = mapping[by_id[_entering(self.program, v)]]
                    shardy.clone_with(ops[op], mapping)
            for place, v in enumerate(outputs):
                last.operands[place] = mapping[by_id[v]]
            for op in reversed(stale):
                op.erase()
        return lowered

    def replaced(self, mesh: Mesh, *reads: jax.Array) -> list[jax.Array]:
        """Computes ``makes`` by the replacement's functions.

        Args:
            reads: the values of ``inputs + derived``.
        """
        known = dict(zip(self.inputs + self.derived, reads, strict=True))
        made: list[jax.Array] = []
        kept: Sequence[jax.Array] = ()
        functions = self.replacement.functions.stages(mesh)
        for stage, function in zip(self.replacement.stages, functions, strict=True):
            own = [known[self.program.ops[op].operands[i]] for op, i in stage.reads]
            results = function(*own, *kept)
            made += results[: len(stage.makes)]
            kept = results[len(stage.makes) :]
        return made


def written(program: Program, replacement: Replacement) -> Written:
    """Finds the ops that a replacement takes the place of."""
    stages = replacement.stages
    uses = {program.ops[op].operands[i] for one in stages for op, i in one.reads}
    makes = tuple(v for one in stages for v in one.makes)
    inputs: list[int] = []
    derived: list[int] = []
    for v in sorted(uses, key=lambda v: program.values[v].producer):
        free = _between(program, inputs, [v])[1]
        (inputs if free else derived).append(v)
    foreign = sorted(_between(program, inputs, [*derived, *makes])[1])
    return Written(
        program=program,
        replacement=replacement,
        inputs=(*inputs, *foreign),
        foreign=tuple(foreign),
        derived=tuple(derived),
        makes=makes,
    )


def _between(
    program: Program, inputs: Collection[int], outputs: Collection[int]
) -> tuple[set[int], set[int]]:
    """Finds the ops that make values of others, and the values that no such op makes.

    Results of loops and branches, values that a loop changes, and arguments are such
    values.
    """
    ops: set[int] = set()
    free: set[int] = set()
    known = set(inputs)
    stack = [v for v in outputs if v not in known]
    while stack:
        v = _entering(program, stack.pop())
        if v in known:
            continue
        op = program.maker(v)
        if op is None or op.has_regions:
            free.add(v)
        elif op.id not in ops:
            ops.add(op.id)
            stack += [w for w in op.operands if w not in known]
    return ops, free


def _entering(program: Program, value: int) -> int:
    """The value that enters loops as an argument that they do not change."""
    while (origin := program.values[value].origin) >= 0:
        loop = next(op for op in program.ops if value in op.entries)
        place = loop.entries.index(value) % len(loop.operands)
        if loop.kind != "while" or loop.yields[place] not in loop.entered(place):
            return value
        value = origin
    return value
