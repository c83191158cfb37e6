"""Programs that need a little more memory than they may: what the compiler can do.

XLA schedules what hides latency, and keeps what that makes, as far as a device's memory
allows; what does not fit it computes again by itself, less of it and cheaper than a
whole segment. It goes by the device's memory, unless it is told of a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cfp.profiling.key import GPU_PLATFORMS
from cfp.profiling.record import CompiledBytes
from cfp.search.compiler import NO_LATENCY_HIDING, Options
from cfp.search.problem import Option, Problem

# What the compiler left of temporaries that it was told to reduce: 0.74 and 0.77 for
# two plans of a GPT on 2 H200, and 0.6 and 0.73 where they compute segments again.
LEFT = 0.75
LEFT_AT_LEAST = 0.55
# What some programs with segments computed again needed of what was predicted, with
# nothing told: 0.77 and 0.85 of a mixture of experts, 0.84 to 1.18 of transformers.
TURNED_OUT = 0.85
# The percentage of what arguments leave of a device's memory that others may take.
MEMORY_SHARE = "xla_gpu_memory_limit_slop_factor"


def squeezed(problem: Problem, left: float = LEFT) -> Problem:
    """The problem with as much memory as the compiler is hoped to make do with.

    Args:
        problem: with what it takes if it is told nothing.
        left: the share of what is no state.
    """

    def less(option: Option) -> Option:
        return replace(
            option,
            residual_bytes=round(left * option.residual_bytes),
            temp_bytes=round(left * option.temp_bytes),
        )

    options = tuple(tuple(map(less, of_kind)) for of_kind in problem.options)
    return replace(problem, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a program has to fit into.

    Attributes:
        budget_bytes: what it may need of a device's memory.
        device_bytes: memory that the compiler reckons with, or None if unknown.
        platform: of the devices.
        reserve_bytes: what is there besides, since the allocator may add it.
    """

    budget_bytes: int
    device_bytes: int | None
    platform: str
    reserve_bytes: int = 0

    def may_do(self, compiled: CompiledBytes) -> bool:
        """Whether a program may fit, its compiler told of the budget.

        Args:
            compiled: what it needs otherwise; a failure to compile needs nothing.
        """
        least = compiled.peak_bytes - (1.0 - LEFT_AT_LEAST) * compiled.temp_bytes
        return 0 < least <= self.budget_bytes

    def options(self, compiled: CompiledBytes) -> Mapping[str, Options]:
        """Compiler options with which a program may fit, by name, the fastest first.

        Args:
            compiled: what it needs without them.
        """
        fixed = compiled.peak_bytes - compiled.temp_bytes
        most = self.device_bytes or 0
        if self.platform not in GPU_PLATFORMS or most <= max(fixed, self.budget_bytes):
            return {}
        percent_bytes = (most - fixed) / 100
        asked = (self.budget_bytes - fixed) / percent_bytes
        # It is a whole number, more than a gigabyte, and the compiler misses it by some
        # percent, to either side: what is told a little more often fits as well.
        shares = dict.fromkeys(max(1, n) for n in (round(asked), int(0.9 * asked)))
        told = [{MEMORY_SHARE: str(share)} for share in shares]
        if min(shares) * percent_bytes >= compiled.temp_bytes:
            told = [{}]  # So much is what it needs anyway.
        names = ("within the budget", "well within the budget")
        found = {name: o for name, o in zip(names, told, strict=False) if o}
        return found | {
            "within the budget, no latency hiding": {**told[-1], **NO_LATENCY_HIDING}
        }
