"""Checks and times implementations, one row for each at each shape and type.

An implementation with wrong results is not timed. One that is not available, refuses
the arguments, fails, does not fit into memory or was not reached in time is a row, too,
with its reason.

Rows have a lower bound of time: contractions at the device's peak, and each byte of the
arguments, the cotangent and the results moved once. Contractions count as they are, so
causal attention half; a backward pass has twice those of the forward one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import isfinite
from typing import Any

import jax

from cfp.devices.device_kind import DeviceKind, kind_of
from cfp.errors import summary_of
from cfp.operators.cases import (
    Program,
    Shape,
    abstract,
    compare,
    limit_of,
    oracle_program,
    output,
    program,
    sample,
)
from cfp.operators.operator import Implementation, Operator
from cfp.profiling.timing import ON_CPUS, measure
from cfp.units import format_bytes

MEASURED, WRONG, FAILED = "measured", "incorrect", "failed"
ABSENT, REFUSED, NO_MEMORY, NO_TIME = "absent", "refused", "no memory", "not reached"
# The word of libraries and compilers that lack memory.
_NO_MEMORY_WORD = "RESOURCE_EXHAUSTED"
_TIMING = replace(
    ON_CPUS, warmup_seconds=0.05, max_samples=100, target_spread=0.005
)  # For GPUs as well: an operator is as short as a launch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Times of one pass, forward or forward and backward.

    Attributes:
        compile_seconds: tracing, lowering and compiling.
        temp_bytes: the most that the program holds besides arguments and results.
        roofline_percent: the shortest time that the device's specification allows, as
            a part of the median; None for devices without one.
    """

    samples_ms: tuple[float, ...]
    median_ms: float
    compile_seconds: float
    temp_bytes: int | None
    roofline_percent: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation at one shape and type.

    Attributes:
        state: `MEASURED`, or one of the reasons beside it why there is no time.
        reason: why it was not measured; empty if it was.
        detail: the whole traceback of what failed.
        errors: relative differences from the oracle, by name; None for what is no
            number.
        passes: by "forward" and "both".
    """

    operator: str
    implementation: str
    library: str
    shape: str
    dtype: str
    state: str = MEASURED
    reason: str = ""
    detail: str = ""
    errors: dict[str, float | None] = field(default_factory=dict)
    passes: dict[str, Pass] = field(default_factory=dict)


def run(
    operators: Sequence[Operator],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    *,
    forward_only: bool = False,
    seconds: float = float("inf"),
    sample_seconds: float = 0.4,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Checks and times operators, the first shape of all operators first.

    Args:
        forward_only: without the backward pass.
        seconds: no implementation begins after so many.
        sample_seconds: for the samples of one pass, at most.
        clock: seconds, monotonic.

    Yields:
        A row for each implementation as soon as it is known.
    """
    end = clock() + seconds
    for shape, dtype, operator in product(shapes, dtypes, operators):
        case = _Case(operator, shape, dtype, not forward_only, sample_seconds)
        # Arguments and the oracle's results are made for the first that is measured.
        begin = cache(case.begin)
        for name, one in operator.implementations.items():
            row = Row(
                operator=operator.name,
                implementation=name,
                library=one.library,
                shape=str(shape),
                dtype=dtype,
            )
            if reason := one.probe():
                yield replace(row, state=ABSENT, reason=reason)
            elif reason := one.refuses(*case.types, **operator.options):
                yield replace(row, state=REFUSED, reason=reason)
            elif clock() >= end:
                reason = f"the budget of {seconds:g} s was spent"
                yield replace(row, state=NO_TIME, reason=reason)
            else:
                yield case.measured(row, one, begin)


class TooLargeError(Exception):
    """A program that would not fit into memory."""


def compile_program(function: Program, *args: Any) -> tuple[Any, float]:
    """Compiles a program that fits into memory.

    Returns:
        The program, and the seconds that this took.

    Raises:
        TooLargeError: it does not fit.
    """
    started = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - started
    memory, limit = compiled.memory_analysis(), memory_limit()
    if memory is not None and limit is not None:
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
        needed += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        if needed > limit:
            raise TooLargeError(
                f"needs {format_bytes(needed)}, and {format_bytes(limit)} are there"
            )
    return compiled, seconds


def memory_limit() -> int | None:
    """Bytes that programs may take on the first device; None if it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def temp_bytes(compiled: Any) -> int | None:
    """The most that a program holds besides arguments and results, if that is known."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes if memory else None


def repeater(compiled: Any, *args: Any) -> Callable[[int], None]:
    """A function that runs a program so many times, and waits for the last."""

    def repeat(times: int) -> None:
        out = None
        for _ in range(times):
            out = compiled(*args)
        jax.block_until_ready(out)

    return repeat


@dataclass(frozen=True, slots=True)
class _Case:
    """One operator at one shape and type."""

    operator: Operator
    shape: Shape
    dtype: str
    backward: bool
    sample_seconds: float

    @property
    def types(self) -> tuple[Any, ...]:
        return abstract(self.operator, self.shape, self.dtype)

    def begin(self) -> tuple[Any, Any]:
        """Arguments with the cotangent, and the oracle's results on the host."""
        args = sample(self.operator, self.shape, self.dtype)
        oracle = oracle_program(self.operator, backward=self.backward)
        try:
            compiled, _ = compile_program(oracle, *args)
        except TooLargeError as error:
            raise TooLargeError(f"the oracle in float32: {error}") from error
        return args, jax.device_get(compiled(*args))

    def measured(self, row: Row, one: Implementation, begin: Callable[[], Any]) -> Row:
        """The row of an implementation that was checked, and timed if it is right."""
        try:
            return self._examined(row, one, *begin())
        except TooLargeError as error:
            return replace(row, state=NO_MEMORY, reason=str(error))
        except Exception as error:  # Whatever a library raises is its row's reason.
            return replace(
                row,
                state=NO_MEMORY if _NO_MEMORY_WORD in str(error) else FAILED,
                reason=summary_of(error),
                detail=traceback.format_exc(),
            )

    def _examined(self, row: Row, one: Implementation, args: Any, right: Any) -> Row:
        passes = {}
        for name in ("both", "forward") if self.backward else ("forward",):
            backward = name == "both"
            function = program(self.operator, one.call, backward=backward)
            compiled, seconds = compile_program(function, *args)
            if not row.errors:
                limit = limit_of(self.dtype, jax.default_backend())
                errors, wrong = compare(compiled(*args), right, limit)
                # JSON has no infinities and no not-a-number.
                kept = {n: e if isfinite(e) else None for n, e in errors.items()}
                row = replace(row, errors=kept)
                if wrong:
                    return replace(row, state=WRONG, reason=wrong)
            how = replace(_TIMING, budget_seconds=self.sample_seconds)
            timing = measure(repeater(compiled, *args), how)
            device, percent = kind_of(jax.devices()[0].device_kind), None
            if device is not None:
                least = bound_ms(
                    self.operator, self.shape, self.dtype, device, backward=backward
                )
                percent = 100 * least / timing.median_ms
            passes[name] = Pass(
                samples_ms=timing.samples_ms,
                median_ms=timing.median_ms,
                compile_seconds=seconds,
                temp_bytes=temp_bytes(compiled),
                roofline_percent=percent,
            )
        return replace(row, passes=dict(reversed(passes.items())))


def bound_ms(
    operator: Operator,
    shape: Shape,
    dtype: str,
    device: DeviceKind,
    *,
    backward: bool,
) -> float:
    """The shortest time that a device's specification allows."""
    flops = operator.flops(shape.dims) * (3 if backward else 1)
    args = abstract(operator, shape, dtype)
    moved = sum(map(_bytes, args)) + _bytes(output(operator, args))
    if backward:  # The arguments again, the cotangent, and a gradient for each float.
        pairs = zip(args, operator.arguments, strict=True)
        moved = 2 * moved + sum(_bytes(x) for x, one in pairs if one.kind == "float")
    wide = "float32" if dtype == "float32" else "bfloat16"
    flops_per_ms = device.specified(f"{wide}_tflop_per_s") * 1e9
    bytes_per_ms = device.specified("memory_gb_per_s") * 1e6
    return max(flops / flops_per_ms, moved / bytes_per_ms)


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
