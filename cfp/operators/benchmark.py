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
    check,
    limit_of,
    oracle_program,
    output,
    program,
    sample,
)
from cfp.operators.operator import Implementation, Operator, OperatorError
from cfp.operators.probe import memory_limit
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
    state: str
    reason: str = ""
    detail: str = ""
    errors: dict[str, float | None] = field(default_factory=dict)
    passes: dict[str, Pass] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Returns the key of a row."""
        return self.operator, self.implementation, self.shape, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        forward_only: without the backward pass.
        seconds: no implementation begins after so many.
        sample_seconds: for the samples of one pass, at most.
        clock: seconds, monotonic.
    """

    forward_only: bool = False
    seconds: float = float("inf")
    sample_seconds: float = 0.4
    clock: Callable[[], float] = time.perf_counter


def run(
    operators: Sequence[Operator],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    settings: Settings,
) -> Iterator[Row]:
    """Checks and times operators, the first shape of all operators first.

    Yields:
        A row for each implementation as soon as it is known.
    """
    end = settings.clock() + settings.seconds
    for shape, dtype, operator in product(shapes, dtypes, operators):
        case = _Case(operator, shape, dtype, settings)
        for one in operator.implementations:
            row = case.row(one)
            if row.state == NO_TIME and settings.clock() < end:
                row = case.measured(row, one)
            yield row


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


class _Case:
    """One operator at one shape and type.

    Arguments and the oracle's results, which are kept on the host, are made when the
    first implementation is measured.
    """

    def __init__(self, operator: Operator, shape: Shape, dtype: str, how: Settings):
        self._operator, self._shape, self._dtype = operator, shape, dtype
        self._how = how
        self._types = abstract(operator, shape, dtype)
        self._made: tuple[Any, Any] | None = None

    def row(self, one: Implementation) -> Row:
        """A row that says why an implementation cannot run, or that it has not."""
        row = Row(
            operator=self._operator.name,
            implementation=one.name,
            library=one.library,
            shape=str(self._shape),
            dtype=self._dtype,
            state=NO_TIME,
            reason=f"the budget of {self._how.seconds:g} s was spent",
        )
        if reason := one.probe():
            return replace(row, state=ABSENT, reason=reason)
        if reason := one.refuses(*self._types, **self._operator.options):
            return replace(row, state=REFUSED, reason=reason)
        return row

    def measured(self, row: Row, one: Implementation) -> Row:
        """The row of an implementation that was checked, and timed if it is right."""
        try:
            return self._examined(replace(row, reason=""), one)
        except TooLargeError as error:
            return replace(row, state=NO_MEMORY, reason=str(error))
        except Exception as error:  # Whatever a library raises is its row's reason.
            return replace(
                row,
                state=NO_MEMORY if _NO_MEMORY_WORD in str(error) else FAILED,
                reason=summary_of(error),
                detail=traceback.format_exc(),
            )

    def _examined(self, row: Row, one: Implementation) -> Row:
        backward = not self._how.forward_only
        args, right = self._begun(backward)
        limit = limit_of(self._dtype, jax.default_backend())
        passes = {}
        for name in ("both", "forward") if backward else ("forward",):
            function = program(self._operator, one.call, backward=name == "both")
            compiled, seconds = compile_program(function, *args)
            if not row.errors:
                found = check(compiled(*args), right, limit)
                # JSON has no infinities and no not-a-number.
                errors = {
                    n: e if isfinite(e) else None for n, e in found.errors.items()
                }
                row = replace(row, errors=errors)
                if found.wrong:
                    return replace(row, state=WRONG, reason=found.text())
            passes[name] = self._timed(compiled, seconds, backward=name == "both")
        return replace(row, state=MEASURED, passes=dict(reversed(passes.items())))

    def _begun(self, backward: bool) -> tuple[Any, Any]:
        """Arguments with the cotangent, and the oracle's results."""
        if self._made is None:
            args = sample(self._operator, self._shape, self._dtype)
            oracle = oracle_program(self._operator, backward=backward)
            try:
                compiled, _ = compile_program(oracle, *args)
            except TooLargeError as error:
                raise TooLargeError(f"the oracle in float32: {error}") from error
            self._made = args, jax.device_get(compiled(*args))
        return self._made

    def _timed(self, compiled: Any, seconds: float, *, backward: bool) -> Pass:
        assert self._made is not None
        timing = measure(
            repeater(compiled, *self._made[0]),
            replace(_TIMING, budget_seconds=self._how.sample_seconds),
        )
        device = kind_of(jax.devices()[0].device_kind)
        percent = None
        if device is not None:
            least = bound_ms(
                self._operator,
                self._types,
                self._shape,
                self._dtype,
                device,
                backward=backward,
            )
            percent = 100 * least / timing.median_ms
        return Pass(
            samples_ms=timing.samples_ms,
            median_ms=timing.median_ms,
            compile_seconds=seconds,
            temp_bytes=temp_bytes(compiled),
            roofline_percent=percent,
        )


def least_bytes(operator: Operator, args: Any, *, backward: bool) -> int:
    """Bytes that a pass must read and write, each once, by types of arguments."""
    moved = sum(map(_bytes, args)) + _bytes(output(operator, args))
    if backward:  # The arguments again, the cotangent, and a gradient for each float.
        pairs = zip(args, operator.arguments, strict=True)
        moved = 2 * moved + sum(_bytes(x) for x, one in pairs if one.kind == "float")
    return moved


def bound_ms(
    operator: Operator,
    args: Any,
    shape: Shape,
    dtype: str,
    device: DeviceKind,
    *,
    backward: bool,
) -> float:
    """The shortest time that a device's specification allows."""
    flops = operator.flops(shape.dims) * (3 if backward else 1)
    moved = least_bytes(operator, args, backward=backward)
    wide = "float32" if dtype == "float32" else "bfloat16"
    flops_per_ms = device.specified(f"{wide}_tflop_per_s") * 1e9
    bytes_per_ms = device.specified("memory_gb_per_s") * 1e6
    return max(flops / flops_per_ms, moved / bytes_per_ms)


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def check_shapes(operators: Sequence[Operator], rows: Sequence[Row]) -> None:
    """Sees that every operator has an implementation that takes some shape.

    Raises:
        OperatorError: one has none.
    """
    for operator in operators:
        own = [row for row in rows if row.operator == operator.name]
        if own and all(row.state in (ABSENT, REFUSED) for row in own):
            reasons = "; ".join(f"{r.implementation}: {r.reason}" for r in own)
            raise OperatorError(
                f"No implementation of {operator.name} takes these shapes: {reasons}."
            )
