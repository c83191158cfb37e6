"""How much is built at once, and whether beside what runs."""

import os

from cfp.profiling.key import GPU_PLATFORMS

_MOST_THREADS = 24


def default_threads(platform: str) -> int:
    """How many builds at once leave a machine usable, and each other in peace."""
    cores = os.cpu_count() or 1
    if platform == "cpu" and cores <= 4:
        return 1  # The devices are these cores.
    share = cores // 4 if platform == "cpu" else cores * 3 // 8
    return max(1, min(_MOST_THREADS, share))


def overlaps(platform: str) -> bool:
    """Whether building leaves the devices in peace, so that others may be timed."""
    return platform != "cpu" and platform not in GPU_PLATFORMS
