"""Compares each part of a step that a kernel replaces with the original, on devices.

A replacement is proved first (:mod:`cfp.kernels.proof`). This check finds faults
in the proof, in XLA and in the kernels. A part that several layers share is checked
once, and passing results are stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cfp.context import PlanContext
from cfp.profiling.builder import CompilePool, is_out_of_memory
from cfp.profiling.record import ProfileKey, ProfileRecord, untuned_options
from cfp.profiling.tasks import InFlight
from cfp.program.constrain import Constraints, partition_spec
from cfp.program.graph import Program
from cfp.program.trace import planning_mesh
from cfp.program.widen import Written, wide_dtype, written

_SCALES = (1.0, 0.1)  # Standard deviations of random inputs.
_ROUNDINGS = 8  # Allowed roundings of a kernel, such as of weights and output.


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCheck:
    """Comparison of one replaced part; if wrong or not compared, its text says so.

    Attributes:
        source: file and line of the part in the step.
        kernel: name of the replacing kernel.
        off: largest error / allowed error; 0 if not compared now.
        reason: why the part was not compared; "" if it was.
    """

    name: str
    source: str
    kernel: str
    off: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        where = f"{self.name} at {self.source or 'an unknown line'} by {self.kernel}"
        if self.reason:
            return f"{where} was not compared with the step: {self.reason}"
        return f"{where} was refused: it computes something else than the step"

    @property
    def is_wrong(self) -> bool:
        """True if the error exceeds the allowed one, or is NaN."""
        return not self.off <= 1


def check_sites(
    context: PlanContext,
    program: Program,
    constraints: Constraints,
    in_flight: InFlight,
) -> list[SiteCheck]:
    """Compares each different replaced part, with its gradients, with the original.

    Equal parts have one result, with `off` 0 if they passed before. Described devices
    and several processes give none. Inputs are random, of two scales; masks have few or
    most keys. Constants are the program's.
    """
    known: dict[str, SiteCheck] = {}
    mesh = context.mesh
    if not isinstance(mesh, Mesh) or len(mesh.local_devices) < mesh.size:
        return []
    for one in constraints.replaced:
        part = written(program, one)
        parts = (
            ("kind", "replaced part beside and along float32"),
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
            known[key.digest] = replace(site, reason="it reads another loop's values")
            continue
        if kept := context.measure.known(context.store, [key.digest]).get(key.digest):
            known[key.digest] = replace(site, reason=kept.reason)
            continue
        context.measure.tell(f"comparing a replaced part: {one.name}, {source}")
        started = time.perf_counter()
        with in_flight.doing(key, site.name, "run"):
            found = _compare(context, part, constraints, site, in_flight)
        known[key.digest] = found
        if not found.is_wrong and not found.reason:
            seconds = time.perf_counter() - started
            record = ProfileRecord(
                key=key.digest, parts=parts, status="ok", samples_ms=(1e3 * seconds,)
            )
            context.store.put(record, replace=True)
    return [*known.values()]


def _compare(
    context: PlanContext,
    part: Written,
    constraints: Constraints,
    site: SiteCheck,
    in_flight: InFlight,
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
    split = len(part.derived)
    # Tuning took ten seconds on an H200 for two runs.
    options = untuned_options(context.defaults.replacing.platform) or None
    try:
        lowered = [part.lower(*shardings), part.widened(*shardings)]
        with CompilePool(2) as pool:
            begun = [
                pool.start(site.name, partial(one.compile, compiler_options=options))
                for one in lowered
            ]
            as_written, as_meant = (one.result() for one in begun)
        replaced = jax.jit(lambda *x: part.replaced(mesh, *x))
        placed = partial(jax.jit, out_shardings=shardings)
        widen = placed(lambda xs: [x.astype(wide_dtype(x.dtype)) for x in xs])
        kinds = [part.aval(v).dtype for v in part.inputs]
        floats = [one for one in kinds if jnp.issubdtype(one, jnp.floating)]
        # GPUs multiply float32 numbers in TF32, with 11 bits.
        rounding = max(2.0**-11, *(float(jnp.finfo(one).eps) for one in floats))
        compare = jax.jit(partial(_worst, rounding))
        draw = placed(lambda key, scale: [*_drawn(part, key, scale)])
        offs: list[float] = []
        for number, scale in enumerate(_SCALES):
            if in_flight.is_closed:
                raise CancelledError  # Planning was interrupted meanwhile.
            inputs = draw(jax.random.key(number), scale)
            results = as_written(*inputs)
            truth = as_meant(*widen(inputs))[split:]
            made = replaced(*inputs, *results[:split])
            offs.append(float(np.asarray(compare(truth, results[split:], made))))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return replace(site, reason="there is not enough memory for it as written")
    return replace(site, off=float(np.max(offs)))


def _drawn(part: Written, key: jax.Array, scale: jax.Array) -> Iterator[jax.Array]:
    largest = max(n for v in part.inputs for n in (*part.aval(v).shape, 2))
    for number, v in enumerate(part.inputs):
        own, aval = jax.random.fold_in(key, number), part.aval(v)
        if aval.dtype == jnp.bool_:
            mask = jax.random.bernoulli(own, jnp.clip(scale, 0.1, 0.9), aval.shape)
            # Some rows are all False at the small scale only, since they may give NaN.
            rows = jnp.arange(prod(aval.shape[:-1])) % 8 == 1
            is_empty = rows.reshape(*aval.shape[:-1], 1) & (scale < 1)
            yield mask & ~is_empty if aval.shape else mask
        elif jnp.issubdtype(aval.dtype, jnp.floating):
            numbers = scale * jax.random.normal(own, aval.shape, jnp.float32)
            yield numbers.astype(aval.dtype)
        else:
            most = jnp.where(scale < 1, 4, largest)
            yield jax.random.randint(own, aval.shape, 0, most).astype(aval.dtype)


def _worst(
    rounding: float,
    truth: list[jax.Array],
    written: list[jax.Array],
    made: list[jax.Array],
) -> jax.Array:
    """Largest error of `made` relative to the allowed error; `truth` has wide types.

    Allowed are, for each row, twice the sum of: the original's error in the row, its
    root mean square over rows, and a kernel's rounding. The error's projection on the
    true values may be twice the sum of the original's and one rounding.
    """
    found = [jnp.zeros(())]
    for true, own, other in zip(truth, written, made, strict=True):
        is_nan = jnp.isnan(true)
        other = jnp.where(is_nan & jnp.isnan(other), 0, other)
        true, own = (jnp.where(is_nan, 0, x) for x in (true, own))
        size, error, off = map(_row_norms, (true, own - true, other - true))
        kernel = _ROUNDINGS * rounding * jnp.maximum(size, _usual(size))
        row = error + _usual(error) + kernel
        found.append(jnp.max(off / (2 * row + 1e-30)))
        along, own_along = (abs(jnp.sum((x - true) * true)) for x in (other, own))
        every = own_along + rounding * jnp.sum(true * true)
        found.append(along / (2 * every + 1e-30))
    return jnp.max(jnp.stack(found))


def _row_norms(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x.astype(jnp.float32).reshape(-1, x.shape[-1]), axis=-1)


def _usual(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))
