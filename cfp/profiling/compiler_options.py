"""Compiler options that a file may contain, by name and value.

A plan or an exported record from elsewhere may hold any option of XLA. Some options
write files (``xla_dump_to``), load them, or change results
(``xla_gpu_enable_fast_min_max``). A file may only name options that are known to change
the schedule or the memory of a program, with a value of the option's type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

_SWITCH = re.compile("[Tt]rue|[Ff]alse")
_BYTES = re.compile("[0-9]{1,13}")
_PERCENT = re.compile("[1-9][0-9]?|100")
_LEVEL = re.compile("[0-3]")

# The percentage of what arguments leave of a device's memory that others may take.
MEMORY_SHARE = "xla_gpu_memory_limit_slop_factor"

# Trying kernels out takes a device and most of a compile. Untried, Triton's kernels for
# products are slow ones.
UNTUNED: Mapping[str, str] = MappingProxyType(
    {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}
)

# Which values each known option may have.
_KNOWN = {
    "xla_gpu_enable_latency_hiding_scheduler": _SWITCH,
    "xla_gpu_all_gather_combine_threshold_bytes": _BYTES,
    "xla_gpu_all_reduce_combine_threshold_bytes": _BYTES,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _BYTES,
    "xla_gpu_collective_permute_combine_threshold_bytes": _BYTES,
    "xla_gpu_enable_pipelined_all_gather": _SWITCH,
    "xla_gpu_enable_pipelined_all_reduce": _SWITCH,
    "xla_gpu_enable_pipelined_reduce_scatter": _SWITCH,
    "xla_gpu_enable_triton_gemm": _SWITCH,
    "xla_gpu_enable_while_loop_double_buffering": _SWITCH,
    MEMORY_SHARE: _PERCENT,
    "xla_backend_optimization_level": _LEVEL,
    # Without it programs need more memory, and compute the same.
    "xla_disable_hlo_passes": re.compile("rematerialization"),
}


def refused_option(options: Any, allowed: Collection[str] = ()) -> str | None:
    """Returns the reason why options of a file are refused; None if they may be used.

    Args:
        allowed: names of further options that the caller trusts, whatever their value.
    """
    if not isinstance(options, Mapping):
        return f"compiler options that are a {type(options).__name__}, not an object"
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"the compiler option {name!r:.80} = {value!r:.80}, which is no text"
        if name in allowed:
            continue
        known = _KNOWN.get(name)
        if known is None:
            return (
                f"the compiler option {name!r:.80}, which is not known to be harmless"
            )
        if not known.fullmatch(value):
            return f"{value!r:.80} for the compiler option {name}"
    return None
