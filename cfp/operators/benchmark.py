"""Checks and times each implementation of operators at each shape and type.

Each (implementation, shape, type) gives a row. A row without times has a reason: the
implementation refused, failed, lacked memory, was wrong or was not reached in time.

The lower bound of a pass is the larger of two times: of contractions at the device's
peak, and of moving each array once. Causal attention counts half. A backward pass has
twice the forward pass's contractions. It moves arguments, cotangent and gradients.
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

from cfp.cost.described import DeviceKind, kind_of
from cfp.errors import summary_of
from cfp.operators.cases import (
    Shape,
    abstract,
    compare,
    limit_of,
    oracle_program,
    output,
    program,
    refusal,
    sample,
)
from cfp.operators.operator import Operator
from cfp.profiling.builder import is_out_of_memory
from cfp.profiling.runner import ON_CPUS, measure

MEASURED, WRONG, FAILED = "measured", "incorrect", "failed"
REFUSED, NO_MEMORY, NO_TIME = "refused", "no memory", "not reached"
# GPUs use the CPU's settings too, since an operator is as short as a kernel launch.
TIMING = replace(
    ON_CPUS,
    warmup_seconds=0.05,
    max_samples=100,
    target_spread=0.005,
    budget_seconds=0.4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Measurements of one program, forward or forward and backward.

    Attributes:
        compile_seconds: time of tracing, lowering and compiling.
        temp_bytes: temporary memory of the compiled program; None if unknown.
        roofline_percent: lower bound of time (`bound_ms`) as a percentage of the
            median; None for devices without a specification.
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
        state: `MEASURED`, or the kind of failure (`WRONG`, `REFUSED` and so on).
        reason: why the implementation was not measured; "" if it was.
        detail: traceback of an exception; "" without one.
        errors: relative differences to the oracle by result; None if not finite.
        passes: measurements by "forward" and "both" (forward and backward).
    """

    operator: str
    implementation: str
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
) -> Iterator[Row]:
    """Checks and times operators, the first shape of all operators first.

    Args:
        forward_only: True leaves out the backward pass.
        seconds: time limit; implementations not begun by then get `NO_TIME` rows.

    Yields:
        One row for each shape, type and implementation, once measured or skipped.
    """
    end = time.perf_counter() + seconds
    for shape, dtype, operator in product(shapes, dtypes, operators):
        case = _Case(operator, shape, dtype, not forward_only)
        # Cached: arguments and the oracle's results serve all implementations.
        begin = cache(case.begin)
        for name in operator.implementations:
            row = Row(
                operator=operator.name,
                implementation=name,
                shape=str(shape),
                dtype=dtype,
            )
            if time.perf_counter() < end:
                yield case.measured(row, begin)
            else:
                reason = f"the budget of {seconds:g} s was spent"
                yield replace(row, state=NO_TIME, reason=reason)


@dataclass(frozen=True, slots=True)
class _Case:
    operator: Operator
    shape: Shape
    dtype: str
    backward: bool

    def begin(self) -> tuple[Any, Any]:
        """Returns ((arguments, cotangent), the oracle's results on the host)."""
        args = sample(self.operator, self.shape, self.dtype)
        oracle = oracle_program(self.operator, backward=self.backward)
        return args, jax.device_get(jax.jit(oracle)(*args))

    def measured(self, row: Row, begin: Callable[[], Any]) -> Row:
        """Checks, then times an implementation; any error becomes its row's reason."""
        call = self.operator.implementations[row.implementation]
        try:
            case = self.operator, row.implementation, self.shape, self.dtype
            if reason := refusal(*case):
                return replace(row, state=REFUSED, reason=reason)
            return self._examined(row, call, *begin())
        except Exception as error:  # Any error of a library becomes the row's reason.
            return replace(
                row,
                state=NO_MEMORY if is_out_of_memory(error) else FAILED,
                reason=summary_of(error),
                detail=traceback.format_exc(),
            )

    def _examined(
        self, row: Row, call: Callable[..., Any], args: Any, right: Any
    ) -> Row:
        passes = {}
        for name in ("both", "forward") if self.backward else ("forward",):
            function = program(self.operator, call, backward=name == "both")
            started = time.perf_counter()
            compiled = jax.jit(function).lower(*args).compile()
            seconds = time.perf_counter() - started
            if not row.errors:
                limit = limit_of(self.dtype, jax.default_backend())
                errors, wrong = compare(compiled(*args), right, limit)
                # JSON has no infinities and no not-a-number.
                kept = {n: e if isfinite(e) else None for n, e in errors.items()}
                row = replace(row, errors=kept)
                if wrong:
                    return replace(row, state=WRONG, reason=wrong)
            timing = measure(_repeater(compiled, args), TIMING)
            device, percent = kind_of(jax.devices()[0].device_kind), None
            if device is not None:
                least = bound_ms(
                    *(self.operator, self.shape, self.dtype, device),
                    backward=name == "both",
                )
                percent = 100 * least / timing.median_ms
            memory = compiled.memory_analysis()
            passes[name] = Pass(
                samples_ms=timing.samples_ms,
                median_ms=timing.median_ms,
                compile_seconds=seconds,
                temp_bytes=memory.temp_size_in_bytes if memory else None,
                roofline_percent=percent,
            )
        return replace(row, passes=dict(reversed(passes.items())))


def _repeater(compiled: Any, args: Any) -> Callable[[int], None]:
    def repeat(times: int) -> None:
        out = None
        for _ in range(times):
            out = compiled(*args)
        jax.block_until_ready(out)

    return repeat


def bound_ms(
    operator: Operator, shape: Shape, dtype: str, device: DeviceKind, *, backward: bool
) -> float:
    """Lower bound of a pass in ms, by nominal rates; `backward` includes forward."""
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
