"""Programs that need a little more memory than they may: what the compiler can do.

XLA schedules what hides latency, and keeps what that makes, as far as a device's memory
allows; what does not fit it rematerializes by itself, less of it and cheaper than a
whole segment. It goes by the device's memory, unless it gets a memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from cfp.context import MemoryBudget
from cfp.profiling.record import CompiledBytes
from cfp.settings import LIMITED_MEMORY_AT_LEAST, NO_LATENCY_HIDING

# The percentage of what arguments leave of a device's memory that others may take.
MEMORY_SHARE = "xla_gpu_memory_limit_slop_factor"


def may_fit(memory: MemoryBudget, size: CompiledBytes) -> bool:
    """Whether a program may fit, if the compiler saves what it can.

    Args:
        memory: what it has to fit into.
        size: what it needs otherwise; a failure to compile needs nothing.
    """
    least = size.peak_bytes - (1.0 - LIMITED_MEMORY_AT_LEAST) * size.temp_bytes
    return 0 < least <= memory.budget_bytes


def limit_options(
    memory: MemoryBudget, size: CompiledBytes
) -> Mapping[str, Mapping[str, str]]:
    """Compiler options with which a program may fit, by name, the fastest first.

    Args:
        memory: what it has to fit into.
        size: what it needs without them.

    Returns:
        Nothing where the compiler takes no limit.
    """
    fixed = size.peak_bytes - size.temp_bytes
    most = memory.device_bytes or 0
    if not memory.limits_memory or most <= max(fixed, memory.budget_bytes):
        return {}
    percent_bytes = (most - fixed) / 100
    asked = (memory.budget_bytes - fixed) / percent_bytes
    # It is a whole number, more than a gigabyte, and the compiler misses it by some
    # percent, to either side: with a little less more programs fit.
    shares = dict.fromkeys(max(1, n) for n in (round(asked), int(0.9 * asked)))
    limits: list[Mapping[str, str]] = [{MEMORY_SHARE: str(n)} for n in shares]
    if min(shares) * percent_bytes >= size.temp_bytes:
        limits = [{}]  # So much is what it needs anyway.
    names = ("within the budget", "well within the budget")
    found = {name: o for name, o in zip(names, limits, strict=False) if o}
    return found | {
        "within the budget, no latency hiding": {**limits[-1], **NO_LATENCY_HIDING}
    }
