"""Checks and times implementations, one row for each at each shape and type.

An implementation with wrong results is not timed. One that is not available, refuses
the arguments, fails, does not fit into memory or was not reached in time is a row, too,
with its reason.

Rows have a lower bound of time: contractions at the device's peak, and each byte of the
arguments, the cotangent and the results moved once. Contractions count as they are, so
causal attention half; a backward pass has twice those of the forward one.

All programs of a case, an operator at one shape and type, are compiled before any of
them is timed: compilers take the processor, and on GPUs they time kernels of their own.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import jax
from jax import Array

from cfp.devices.device_kind import DeviceKind, kind_of
from cfp.errors import summary_of
from cfp.operators.cases import (
    Program,
    Shape,
    abstract,
    check,
    is_float,
    limit_of,
    oracle_program,
    output,
    program,
    sample,
)
from cfp.operators.operator import Implementation, Operator, OperatorError
from cfp.operators.probe import memory_limit
from cfp.profiling.compile_pool import CompilePool
from cfp.profiling.timing import ON_CPUS, measure
from cfp.units import format_bytes

Built = tuple[Any, float]  # A compiled program, and the seconds that it took.

# What a library's or a compiler's message has if memory is short.
NO_MEMORY_WORD = "RESOURCE_EXHAUSTED"


class TooLargeError(Exception):
    """A program that would not fit into memory."""


def compile_program(function: Callable[..., Any], *args: Any) -> Built:
    """Compiles a program that fits into memory.

    Args:
        args: its arguments, or their shapes and types.

    Raises:
        TooLargeError: it does not fit.
    """
    started = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - started
    needed, limit = needed_bytes(compiled), memory_limit()
    if limit is not None and needed > limit:
        raise TooLargeError(
            f"needs {format_bytes(needed)}, and {format_bytes(limit)} are there"
        )
    return compiled, seconds


def outcome(started: Future[Built], build: Callable[[], Built]) -> Built:
    """The outcome of compiling a program in a thread.

    Compilers that try kernels at the same time take each other's memory: where it was
    short the program is compiled again, alone.

    Raises:
        TooLargeError: it does not fit.
    """
    try:
        return started.result()
    except Exception as error:
        if NO_MEMORY_WORD not in str(error):
            raise
    return build()


def needed_bytes(compiled: Any) -> int:
    """Bytes that a program holds at most, with arguments and results."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def least_bytes(operator: Operator, args: Any, *, backward: bool) -> int:
    """Bytes that a pass must read and write, each once, by types of arguments."""
    out = output(operator, args)
    moved = sum(_bytes(x) for x in args) + _bytes(out)
    if backward:
        floats = [
            x for x, one in zip(args, operator.arguments, strict=True) if is_float(one)
        ]
        # The arguments again, the cotangent, and a gradient for each of them.
        moved += sum(_bytes(x) for x in args) + _bytes(out)
        moved += sum(_bytes(x) for x in floats)
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
    flops_per_ms = device.numbers[f"{wide}_tflop_per_s"].value * 1e9
    bytes_per_ms = device.numbers["memory_gb_per_s"].value * 1e6
    return max(flops / flops_per_ms, moved / bytes_per_ms)


def _bytes(x: Any) -> int:
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return abstract.size * abstract.dtype.itemsize


MEASURED, WRONG, FAILED = "measured", "incorrect", "failed"
ABSENT, REFUSED, NO_MEMORY, NO_TIME = "absent", "refused", "no memory", "not reached"


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


# An implementation's name, and whether the backward pass follows.
_Key = tuple[str, bool]
_ORACLE: _Key = ("the oracle", True)


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
        threads: so many programs are compiled at once.
        clock: seconds, monotonic.
    """

    forward_only: bool = False
    seconds: float = float("inf")
    sample_seconds: float = 0.4
    threads: int = 1
    clock: Callable[[], float] = time.perf_counter


def run(
    operators: Sequence[Operator],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    settings: Settings,
    known: Sequence[Row] = (),
) -> Iterator[Row]:
    """Checks and times operators, the first shape of all operators first.

    Args:
        known: rows of an earlier run; what they measured is not measured again.

    Yields:
        A row for each implementation as soon as it is known; none for known ones.
    """
    end = settings.clock() + settings.seconds
    done = {row.key for row in known if row.state != NO_TIME}
    with CompilePool(settings.threads) as pool:
        for shape in shapes:
            for dtype in dtypes:
                for operator in operators:
                    case = _Case(operator, shape, dtype, settings, pool)
                    yield from case.rows(done, end)


class _Case:
    """One operator at one shape and type; its arguments are made when needed."""

    def __init__(
        self,
        operator: Operator,
        shape: Shape,
        dtype: str,
        how: Settings,
        pool: CompilePool,
    ):
        self._operator, self._shape, self._dtype = operator, shape, dtype
        self._how, self._pool = how, pool
        self._types = abstract(operator, shape, dtype)
        self._built: dict[_Key, Callable[[], Built]] = {}
        self._made: tuple[Any, Any] | None = None
        self._right: Any = None

    def rows(
        self, done: Container[tuple[str, str, str, str]], end: float
    ) -> Iterator[Row]:
        """The rows of all implementations but those done; none begins after the end."""
        every = [(one, self._row(one)) for one in self._operator.implementations]
        rows = [(one, row) for one, row in every if row.key not in done]
        able = [one for one, row in rows if row.state == NO_TIME]
        is_built = self._build(able, end - self._how.clock()) if able else False
        for one, row in rows:
            if row.state == NO_TIME and is_built and self._how.clock() < end:
                row = self._measured(row, one)
            yield row

    def _build(self, able: Sequence[Implementation], seconds: float) -> bool:
        """Compiles all programs; false if that takes longer than so many seconds."""
        if seconds <= 0:
            return False
        both = not self._how.forward_only
        oracle = oracle_program(self._operator, backward=both)
        programs: dict[_Key, Program] = {_ORACLE: oracle}
        for one in able:
            for backward in {self._backward(one), False}:
                made = program(self._operator, one.call, backward=backward)
                programs[one.name, backward] = made
        args = self._types, output(self._operator, self._types)
        started = []
        for key, function in programs.items():
            build = partial(compile_program, function, *args)
            started.append(self._pool.start(str(key), build))
            self._built[key] = partial(outcome, started[-1], build)
        limit = None if seconds == float("inf") else seconds
        _, late = wait(started, limit)
        for one in late:
            one.cancel()
        return not late

    def _backward(self, one: Implementation) -> bool:
        return not self._how.forward_only and one.differentiable

    def _row(self, one: Implementation) -> Row:
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

    def _measured(self, row: Row, one: Implementation) -> Row:
        """The row of an implementation that was checked, and timed if it is right."""
        try:
            return self._examined(replace(row, reason=""), one, self._backward(one))
        except TooLargeError as error:
            return replace(row, state=NO_MEMORY, reason=str(error))
        except Exception as error:  # Whatever a library raises is its row's reason.
            memory = NO_MEMORY_WORD in str(error)
            return replace(
                row,
                state=NO_MEMORY if memory else FAILED,
                reason=summary_of(error),
                detail=traceback.format_exc(),
            )

    def _examined(self, row: Row, one: Implementation, backward: bool) -> Row:
        args, cotangent = self._arguments()
        right = self._expected(args, cotangent)
        compiled, seconds = self._built[one.name, backward]()
        limit_bytes = memory_limit()
        if limit_bytes and needed_bytes(compiled) + _bytes_of(right) > limit_bytes:
            right = self._right = jax.device_get(right)
        limit = limit_of(self._dtype, jax.default_backend())
        found = check(compiled(args, cotangent), right, limit)
        # JSON has no infinities and no not-a-number.
        errors = {n: e if isfinite(e) else None for n, e in found.errors.items()}
        row = replace(row, errors=errors)
        if found.wrong:
            return replace(row, state=WRONG, reason=found.text())
        passes = {}
        if backward:
            passes["both"] = self._timed(compiled, seconds, backward=True)
            compiled, seconds = self._built[one.name, False]()
        passes = {
            "forward": self._timed(compiled, seconds, backward=False),
            **passes,
        }
        reason = "" if one.differentiable else "the library has no backward pass"
        return replace(row, state=MEASURED, reason=reason, passes=passes)

    def _arguments(self) -> tuple[Any, Any]:
        if self._made is None:
            self._made = sample(self._operator, self._shape, self._dtype)
        return self._made

    def _expected(self, args: Any, cotangent: Any) -> Any:
        if self._right is None:
            try:
                compiled, _ = self._built[_ORACLE]()
            except TooLargeError as error:
                raise TooLargeError(f"the oracle in float32: {error}") from error
            self._right = compiled(args, cotangent)
        return self._right

    def _timed(self, compiled: Any, seconds: float, *, backward: bool) -> Pass:
        args, cotangent = self._arguments()

        timing = measure(
            repeater(compiled, args, cotangent),
            replace(
                ON_CPUS,
                warmup_seconds=0.05,
                max_samples=100,
                target_spread=0.005,
                budget_seconds=self._how.sample_seconds,
            ),
        )
        found = kind_of(jax.devices()[0].device_kind)
        percent = None
        if found is not None:
            least = bound_ms(
                self._operator,
                args,
                self._shape,
                self._dtype,
                found,
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


def _bytes_of(values: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(values) if isinstance(x, Array))


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
