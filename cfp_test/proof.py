"""Runs single ops sharded along the factors of their rules, against one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from cfp.analysis.specs import even_spec
from cfp.analysis.strategies import FactorAxes, legal_axes, tensor_spec
from cfp.program.graft import (
    Constraints,
    aval,
    cut_part,
    lower_part,
    partition_spec,
)
from cfp.program.graph import Op, Program
from cfp_test.checking import difference, to_host


@dataclass(frozen=True)
class Wrong:
    """A sharding under which an op computes something else."""

    op: str
    axes: FactorAxes
    difference: float


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


def prove(
    program: Program,
    op: Op,
    mesh: Mesh,
    inputs: Sequence[Any],
    wanted: Sequence[FactorAxes] | None = None,
) -> Iterator[Wrong]:
    """The shardings under which an op is wrong, or does not compile.

    Args:
        program: the program.
        op: one of its ops at the top level, with a rule.
        mesh: real devices.
        inputs: of the part that has this op alone.
        wanted: the shardings to try; all of them, if not given.
    """
    rule = op.rule
    assert rule is not None
    part = cut_part(program, [op.id])
    size = tuple(mesh.shape.items())
    whole = tuple(((),) * len(program.values[v].shape) for v in part.inputs)
    outs = tuple(((),) * len(program.values[v].shape) for v in part.outputs)
    first = mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim)
    alone = Mesh(first, mesh.axis_names)
    none = Constraints({}, {})
    one = lower_part(program, part, alone, none, whole, outs).compile()
    expected = [to_host(x) for x in one(*inputs)]
    for axes in wanted if wanted is not None else shardings(op, mesh):
        uses = {
            (op.id, i): tensor_spec(rule, dims, axes)
            for i, dims in enumerate(rule.operands)
            if dims
        }
        values = {
            v: tensor_spec(rule, dims, axes)
            for v, dims in zip(op.results, rule.results, strict=True)
            if dims
        }
        ins = [
            even_spec(
                next((s for (_, i), s in uses.items() if op.operands[i] == v), w),
                program.values[v].shape,
                size,
            )
            for v, w in zip(part.inputs, whole, strict=True)
        ]
        makes = [
            even_spec(values.get(v, w), program.values[v].shape, size)
            for v, w in zip(part.outputs, outs, strict=True)
        ]
        lowered = lower_part(program, part, mesh, Constraints(values, uses), ins, makes)
        got = lowered.compile()(
            *(
                jax.device_put(x, NamedSharding(mesh, partition_spec(s)))
                for x, s in zip(inputs, ins, strict=True)
            )
        )
        worst = max(
            difference(to_host(g), e) for g, e in zip(got, expected, strict=True)
        )
        if worst > 1e-4:
            yield Wrong(f"{op.kind} {op.attributes}", axes, worst)


def random_inputs(program: Program, op: Op, seed: int = 0) -> list[Any]:
    """Numbers for the inputs of an op: small integers where it reads integers."""
    part = cut_part(program, [op.id])
    found = []
    for i, v in enumerate(part.inputs):
        kind = aval(program, v)
        key = jax.random.key(seed + i)
        if jnp.issubdtype(kind.dtype, jnp.floating):
            found.append(jax.random.normal(key, kind.shape).astype(kind.dtype))
        elif kind.dtype == bool:
            found.append(jax.random.bernoulli(key, 0.5, kind.shape))
        else:
            found.append(jax.random.randint(key, kind.shape, 0, 4).astype(kind.dtype))
    return found
