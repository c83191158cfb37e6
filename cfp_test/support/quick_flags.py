"""Flags of XLA in tests, and waits: programs run a few times, most of them once.

Without LLVM's optimizations, without an LLVM module for each fusion, and with one for
all the rest, compiling takes a quarter of the processor time. Programs are split over
devices and given memory as ever: the flags concern how machine code is made.
"""

from importlib.metadata import version

# XLA warns on standard error if virtual devices, which share processors, have not met
# after 20 seconds, and ends the process after 40: a busy machine may take longer. The
# limits are only there against hanging.
_FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1200 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
)
# Later releases do not know it, and end the process over what they do not know.
_FLAGS_OF_0_10 = "--xla_cpu_use_fusion_emitters=false"

QUICK_FLAGS = (
    f"{_FLAGS} {_FLAGS_OF_0_10}" if version("jaxlib").startswith("0.10.") else _FLAGS
)
