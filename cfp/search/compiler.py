"""Compiler options that are worth a race.

Which of them is fastest depends on the program, the plan and the links between the
devices: on 4 H200 without peer-to-peer access, hiding latency slows data parallelism
down (134.6 ms a step, 115.3 ms without) and speeds fully sharded parameters up.
"""

from __future__ import annotations

from collections.abc import Mapping

from cfp.profiling.key import GPU_PLATFORMS

Options = Mapping[str, str]

_LARGE = str(2**28)
NO_LATENCY_HIDING: Options = {"xla_gpu_enable_latency_hiding_scheduler": "False"}
_ON_GPUS: dict[str, Options] = {
    "no latency hiding": NO_LATENCY_HIDING,
    "large collectives": {
        "xla_gpu_all_gather_combine_threshold_bytes": _LARGE,
        "xla_gpu_all_reduce_combine_threshold_bytes": _LARGE,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _LARGE,
    },
}


def variants(platform: str) -> Mapping[str, Options]:
    """The options to try on a platform, by name, beside the default ones."""
    return _ON_GPUS if platform in GPU_PLATFORMS else {}
