"""Benefit of an injection: the step's time and memory, before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from cfp.profiling.timing import interleave
from cfp.units import format_bytes

# A difference below this share is none.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Time and memory of a step, before and after.

    Attributes:
        before_ms, after_ms: medians.
        before_bytes, after_bytes: the most that the programs hold besides arguments and
            results; None where the compiler does not say.
    """

    before_ms: float
    after_ms: float
    before_bytes: int | None
    after_bytes: int | None

    @property
    def faster(self) -> bool:
        """True if the step is faster by one percent or more."""
        return self.after_ms <= (1 - _LEAST_SHARE) * self.before_ms

    @property
    def smaller(self) -> bool:
        """True if it needs less memory by one percent or more."""
        if self.before_bytes is None or self.after_bytes is None:
            return False
        return self.after_bytes <= (1 - _LEAST_SHARE) * self.before_bytes

    @property
    def is_worth_it(self) -> bool:
        """True if time or memory is better."""
        return self.faster or self.smaller

    def text(self) -> str:
        """The verdict in a sentence."""
        if self.is_worth_it:
            gains = [
                name
                for name, better in (("time", self.faster), ("memory", self.smaller))
                if better
            ]
            verdict = f"worth it for {' and '.join(gains)}"
        else:
            verdict = "not worth it: neither faster nor smaller by one percent"
        sizes = [
            "unknown" if size is None else format_bytes(size)
            for size in (self.before_bytes, self.after_bytes)
        ]
        return (
            f"{self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after; memory "
            f"besides arguments and results {sizes[0]} before, {sizes[1]} after: "
            f"{verdict}."
        )

    __str__ = text


def worth(
    before: Callable[..., Any] | jax.stages.Compiled,
    after: Callable[..., Any] | jax.stages.Compiled,
    *args: Any,
    rounds: int = 10,
    seconds: float = 20.0,
) -> Worth:
    """Times a step with and without injection, in turn.

    Args:
        before, after: the step with the original model, and with the injected one;
            functions, or programs compiled for `args` already.
        args: of both.
        rounds: how many samples each gets, at most.
        seconds: that timing may take.
    """
    compiled = {
        name: step
        if isinstance(step, jax.stages.Compiled)
        else jax.jit(step).lower(*args).compile()
        for name, step in (("before", before), ("after", after))
    }

    def runner(program: Any) -> Callable[[int], None]:
        def repeat(times: int) -> None:
            out = None
            for _ in range(times):
                out = program(*args)
            jax.block_until_ready(out)

        return repeat

    timings = interleave(
        {name: runner(one) for name, one in compiled.items()},
        rounds,
        warmup_seconds=0.2,
        budget_seconds=seconds,
    )
    sizes = {name: one.memory_analysis() for name, one in compiled.items()}
    temp = {
        name: one.temp_size_in_bytes if one else None for name, one in sizes.items()
    }
    return Worth(
        before_ms=timings["before"].median_ms,
        after_ms=timings["after"].median_ms,
        before_bytes=temp["before"],
        after_bytes=temp["after"],
    )
