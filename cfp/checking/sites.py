"""Compares each replaced part of a plan with the part as written, on the devices.

A proof comes before a replacement (:mod:`cfp.attention.matching`). This check is for
faults in the proof, in XLA and in the kernels. A part that is the same in several
layers is checked once, and a part that the store knows is not checked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from cfp.context import PlanContext
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord
from cfp.program.constrain import Constraints, partition_spec
from cfp.program.graph import Program
from cfp.program.trace import planning_mesh
from cfp.program.written import Written, written

# Rounding moves a row of results by less than the first share of its length and the
# usual one, and all results by less than the second share; by bytes of a number.
# Attention that is written out in bfloat16 rounds its own scores: rows of it are up to
# 0.1 off at usual numbers, and 0.5 at twice those, where a kernel is right.
_WITHIN = {2: (1.0, 0.1), 4: (1e-2, 1e-3), 8: (1e-6, 1e-7)}
_SCALES = (1.0, 0.01)  # Of the numbers that are drawn.


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCheck:
    """The comparison of one replaced part.

    Attributes:
        source: the line that the part is from.
        off: the largest error, as a share of what rounding may explain.
        reason: why the part was not compared; "" if it was.
    """

    name: str
    source: str
    kernel: str
    off: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        where = f"{self.name} at {self.source} by {self.kernel}"
        if self.reason:
            return f"{where} was not compared with the step: {self.reason}"
        return f"{where} was refused: it computes something else than the step"

    @property
    def is_wrong(self) -> bool:
        """True if more than rounding lies between both."""
        return not self.off <= 1


def check_sites(
    context: PlanContext, program: Program, constraints: Constraints
) -> list[SiteCheck]:
    """Compares the replaced parts of a plan: results and gradients.

    Numbers are drawn small and usual, masks of bools with few and with most keys, and
    what the program makes of constants is as the program makes it.
    """
    known: dict[str, SiteCheck] = {}
    for one in constraints.replaced:
        part = written(program, one)
        parts = (
            ("kind", "replaced part"),
            ("written", part.text),
            ("functions", repr(one.functions)),
            *context.environment,
        )
        key = ProfileKey(parts)
        if key.digest in known:
            continue
        source, kernel = program.ops[one.op].source, one.functions.how[0]
        site = SiteCheck(name=one.name, source=source, kernel=kernel)
        if any(part.aval(v).size > 1 for v in part.foreign):
            reason = "it needs what another loop keeps"
            known[key.digest] = replace(site, reason=reason)
            continue
        kept = context.store.get(key.digest)
        if kept is not None and kept.ok:
            known[key.digest] = site
            continue
        context.measure.tell(f"comparing a replaced part: {one.name}, {source}")
        started = time.perf_counter()
        found = _compare(context, part, constraints, site)
        known[key.digest] = found
        if not found.is_wrong and not found.reason:
            seconds = time.perf_counter() - started
            record = ProfileRecord(
                key=key.digest, parts=parts, status="ok", samples_ms=(1e3 * seconds,)
            )
            context.store.put(record)
    return [*known.values()]


def _compare(
    context: PlanContext,
    part: Written,
    constraints: Constraints,
    site: SiteCheck,
) -> SiteCheck:
    mesh = planning_mesh(context.devices)
    specs = {
        part.program.ops[op].operands[i]: spec
        for (op, i), spec in constraints.uses.items()
        if i < len(part.program.ops[op].operands)
    }
    shardings = [
        NamedSharding(mesh, partition_spec(specs.get(v, constraints.values.get(v, ()))))
        for v in part.inputs
    ]
    try:
        as_written = part.lower(*shardings).compile()
        replaced = jax.jit(lambda *x: part.replaced(mesh, *x))
        compare = jax.jit(_worst)
        draw = jax.jit(
            lambda key, scale: [*_drawn(part, key, scale)], out_shardings=shardings
        )
        worst = 0.0
        for number, scale in enumerate(_SCALES):
            inputs = draw(jax.random.key(number), scale)
            results = as_written(*inputs)
            split = len(part.derived)
            made = replaced(*inputs, *results[:split])
            off = float(np.asarray(compare(results[split:], made)))
            worst = off if np.isnan(off) else max(worst, off)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = "there is not enough memory for the part as written"
        return replace(site, reason=reason)
    return replace(site, off=worst)


def _drawn(part: Written, key: jax.Array, scale: jax.Array) -> Iterator[jax.Array]:
    for number, v in enumerate(part.inputs):
        own, aval = jax.random.fold_in(key, number), part.aval(v)
        if aval.dtype == jnp.bool_:
            mask = jax.random.bernoulli(own, jnp.clip(scale, 0.1, 0.9), aval.shape)
            # Some rows are all False.
            rows = (*aval.shape[:-1], 1) if aval.shape else ()
            yield mask & jax.random.bernoulli(key, 0.9, rows)
        elif jnp.issubdtype(aval.dtype, jnp.floating):
            numbers = scale * jax.random.normal(own, aval.shape, jnp.float32)
            yield numbers.astype(aval.dtype)
        else:
            most = max((*aval.shape, 2))
            yield jax.random.randint(own, aval.shape, 0, most).astype(aval.dtype)


def _worst(want: list[jax.Array], got: list[jax.Array]) -> jax.Array:
    """The largest error, of a row or of all, as a share of what rounding explains."""
    found = [jnp.zeros(())]
    for a, b in zip(want, got, strict=True):
        of_row, of_all = _WITHIN[a.dtype.itemsize]
        a, b = (x.astype(jnp.float32).reshape(-1, x.shape[-1]) for x in (a, b))
        length = jnp.linalg.norm(a, axis=-1)
        usual = jnp.sqrt(jnp.mean(length**2))
        error = jnp.linalg.norm(a - b, axis=-1) / (length + usual + 1e-30)
        found.append(jnp.max(jnp.where(error <= 4, error, jnp.inf)) / of_row)
        found.append(jnp.linalg.norm(a - b) / (jnp.linalg.norm(a) + 1e-30) / of_all)
    return jnp.max(jnp.stack(found))
