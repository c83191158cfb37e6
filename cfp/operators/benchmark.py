"""Checks and times implementations, one row for each at each shape and type.

Correctness comes first: what is wrong is not timed. What is not available, refuses the
arguments, fails, does not fit into memory or was not reached in time is a row, too,
with its reason.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

import jax

from cfp.operators.cases import Shape, abstract, sample
from cfp.operators.environment import memory_limit
from cfp.operators.operator import Implementation, Operator, OperatorError
from cfp.operators.oracle import (
    Program,
    check,
    limit_of,
    oracle_program,
    program,
)
from cfp.operators.probe import first_line
from cfp.operators.roofline import bound_ms, peaks
from cfp.profiling.timing import measure
from cfp.units import format_bytes

MEASURED, WRONG, FAILED = "measured", "incorrect", "failed"
ABSENT, REFUSED, NO_MEMORY, NO_TIME = "absent", "refused", "no memory", "not reached"
STATES = (MEASURED, WRONG, FAILED, ABSENT, REFUSED, NO_MEMORY, NO_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass, forward or forward and backward, took.

    Attributes:
        samples_ms: every sample.
        median_ms: of these.
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
        state: one of `STATES`.
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
        """What tells rows apart."""
        return self.operator, self.implementation, self.shape, self.dtype

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """From plain data."""
        passes = {
            name: Pass(**{**one, "samples_ms": tuple(one["samples_ms"])})
            for name, one in data["passes"].items()
        }
        return cls(**{**data, "passes": passes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure.

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


class _TooLarge(Exception):
    """A program that would not fit."""


def run(
    operators: Sequence[Operator],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    settings: Settings,
    known: Sequence[Row] = (),
) -> Iterator[Row]:
    """Checks and times operators, the shapes of the first operator first.

    Args:
        operators: what to measure.
        shapes: at which.
        dtypes: and in which types.
        settings: how.
        known: rows of an earlier run; what they measured is not measured again.

    Yields:
        A row for each implementation as soon as it is known; none for known ones.
    """
    end = settings.clock() + settings.seconds
    done = {row.key for row in known if row.state != NO_TIME}
    for operator in operators:
        for shape in shapes:
            for dtype in dtypes:
                case = _Case(operator, shape, dtype, settings)
                for one in operator.implementations:
                    row = case.row(one)
                    if row.key in done:
                        continue
                    if row.state == NO_TIME and settings.clock() < end:
                        row = case.measured(row, one)
                    yield row


class _Case:
    """One operator at one shape and type; its arguments are made when needed."""

    def __init__(self, operator: Operator, shape: Shape, dtype: str, how: Settings):
        self._operator, self._shape, self._dtype, self._how = (
            operator,
            shape,
            dtype,
            how,
        )
        self._made: tuple[Any, Any] | None = None
        self._right: Any = None
        self._no_oracle: BaseException | None = None

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
        args = abstract(self._operator, self._shape, self._dtype)
        if reason := one.refuses(*args, **self._operator.options):
            return replace(row, state=REFUSED, reason=reason)
        return row

    def measured(self, row: Row, one: Implementation) -> Row:
        """The row of an implementation that was checked, and timed if it is right."""
        backward = not self._how.forward_only and one.differentiable
        try:
            return self._examined(replace(row, reason=""), one, backward)
        except _TooLarge as error:
            return replace(row, state=NO_MEMORY, reason=str(error))
        except Exception as error:  # Whatever a library raises is its row's reason.
            memory = "RESOURCE_EXHAUSTED" in str(error)
            return replace(
                row,
                state=NO_MEMORY if memory else FAILED,
                reason=f"{type(error).__name__}: {first_line(error)}",
                detail=traceback.format_exc(),
            )

    def _examined(self, row: Row, one: Implementation, backward: bool) -> Row:
        args, cotangent = self._arguments()
        right = self._expected(args, cotangent)
        whole = program(self._operator, one.call, backward=backward)
        compiled, seconds = _compile(whole, args, cotangent)
        limit_bytes = memory_limit()
        if limit_bytes and _needed(compiled) + _bytes_of(right) > limit_bytes:
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
            forward = program(self._operator, one.call, backward=False)
            compiled, seconds = _compile(forward, args, cotangent)
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
        if self._no_oracle is not None:
            raise self._no_oracle
        if self._right is None:
            backward = not self._how.forward_only
            try:
                compiled, _ = _compile(
                    oracle_program(self._operator, backward=backward), args, cotangent
                )
                self._right = compiled(args, cotangent)
            except _TooLarge as error:
                self._no_oracle = _TooLarge(f"the oracle in float32: {error}")
                raise self._no_oracle from error
        return self._right

    def _timed(self, compiled: Any, seconds: float, *, backward: bool) -> Pass:
        args, cotangent = self._arguments()

        def repeat(times: int) -> None:
            out = None
            for _ in range(times):
                out = compiled(args, cotangent)
            jax.block_until_ready(out)

        timing = measure(
            repeat,
            warmup_seconds=0.05,
            min_samples=3,
            budget_seconds=self._how.sample_seconds,
        )
        found = peaks(jax.devices()[0].device_kind)
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
        memory = compiled.memory_analysis()
        return Pass(
            samples_ms=timing.samples_ms,
            median_ms=timing.median_ms,
            compile_seconds=seconds,
            temp_bytes=memory.temp_size_in_bytes if memory else None,
            roofline_percent=percent,
        )


def _compile(function: Program, args: Any, cotangent: Any) -> tuple[Any, float]:
    """A compiled program that fits into memory, and the seconds that it took.

    Raises:
        _TooLarge: it does not fit.
    """
    started = time.perf_counter()
    compiled = jax.jit(function).lower(args, cotangent).compile()
    seconds = time.perf_counter() - started
    needed, limit = _needed(compiled), memory_limit()
    if limit is not None and needed > limit:
        raise _TooLarge(
            f"needs {format_bytes(needed)}, and {format_bytes(limit)} are there"
        )
    return compiled, seconds


def _needed(compiled: Any) -> int:
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


def _bytes_of(values: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(values) if isinstance(x, jax.Array))


def check_shapes(operators: Sequence[Operator], rows: Sequence[Row]) -> None:
    """Sees that every operator has an implementation that takes some shape.

    Raises:
        OperatorError: one has none.
    """
    for operator in operators:
        own = [row for row in rows if row.operator == operator.name]
        if own and all(row.state in (ABSENT, REFUSED) for row in own):
            told = "; ".join(f"{r.implementation}: {r.reason}" for r in own)
            raise OperatorError(
                f"No implementation of {operator.name} takes these shapes: {told}."
            )
