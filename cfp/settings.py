"""Constants that decide a plan, with their sources, and the defaults of platforms.

Efficiencies of devices are in `cfp/cost`, of kernels in their records, limits of text,
files and waiting in the modules that use them. A source is a measurement (most are in
docs/results/constants.md), an entry of docs/decisions.md, code, or the word "guess".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

# --------------------------------------------------------------- the profile pass

# Number of mixed presets (another preset on each mesh axis) to measure. decisions.md,
# "Mixed presets of several axes: six by estimate".
MIXED_PRESETS = 6
# Least time that a segment adds beside its neighbour, as a share of its time alone. On
# 4 H200 the segments of the presets added 0.45 to 1.0 of it.
LEAST_ADDED_SHARE = 0.4
# Share of the budget beyond which predicted memory may turn out not to fit: for
# measured segments, and for estimates, which are less exact. Guesses.
SAFE_MEMORY_SHARE = 0.9
SAFE_ESTIMATED_MEMORY_SHARE = 0.7
# A segment below this share of the estimated step is measured alone, not in a pair:
# times of pairs vary by about 1 %, and a pair takes two layers' share. Guess.
SMALL_SHARE = 0.03
# Time of a rematerialized segment, as a multiple of its time without, if no strategy of
# its kind is measured with. Of twelve segments of a transformer on 2 H200 eleven
# took 1.17 to 1.44 times as long; decisions.md, "Where memory decides, likely
# strategies are measured next".
REMATERIALIZED_TIME_EXPECTED = 1.25
# Least gain, as a share of a step, that is worth a round of measuring. Times of two
# races differ by about 1 %: decisions.md, "Programs within 1 % are a tie".
WORTH_HAVING = 0.02
# Strategies measured in a round, and unmeasured strategies of a kind in one search.
# Guess.
ROUND_SIZE = 8
# Share of a time budget for measuring if a race follows. In 14 plans without a time
# budget, measuring took 0.47 to 0.73 of all stages' time, 0.60 in the median
# (docs/results/planning_parts.md).
MEASURED_SHARE = 0.6

# Rate between host and device memory, either way: 0.8 of the specification of PCIe 5.0
# x16. Guess.
HOST_BYTES_PER_MS = 50e6

# --------------------------------------------------------------------- the search

# Temporary memory under XLA's memory limit, as a share of that without: usual and
# least. On 2 H200 0.74 and 0.77 for two plans of a transformer, and 0.6 and 0.73 if
# they rematerialize segments: docs/results/constants.md.
LIMITED_MEMORY = 0.75
LIMITED_MEMORY_AT_LEAST = 0.55
# Compiled-to-predicted ratios of memory of programs that rematerialize segments: a
# usual one, and the largest. decisions.md, "Under a budget plans of two predicted sizes
# race": 0.77 to 1.18.
COMPILED_TO_PREDICTED = 0.85
COMPILED_AT_MOST = 1.18

# ----------------------------------------------------------------------- the race

# Time of a step with XLA's memory limit, as a multiple of that without: 1.05 to 1.12 on
# 2 H200, docs/results/constants.md.
LIMITED_TIME = 1.1
# After this many compiled candidates that do not fit, only candidates known to fit are
# compiled; then at most as many smaller ones, or one if time is over. Guess.
MOST_REFUSED = 8
# A candidate slower than this multiple of the fastest leaves the race. The first limit
# is for the look before the turns (or the first turn without a look) and between two
# races, the second for each other turn. decisions.md, "Kernels are measured in place of
# written attention".
STAY_AFTER_LOOK = 1.04
STAY_AFTER_TURN = 1.02
# Candidates with at least two samples tie if their medians differ by at most this
# share: decisions.md, "Programs within 1 % are a tie".
ALIKE = 0.01
# Share of the leader's time from which all choices race with other options for
# collectives, if these did not overlap computation. On 2 H200 with NVLink no such
# options won in four models; without peer-to-peer access they did.
LONG_COLLECTIVES = 0.25
# Choices that race without a memory budget, the best by prediction. decisions.md,
# "Choices race with large collectives, and on slow links with other options".
MOST_RACED = 6


class ConstraintLevel(StrEnum):
    """Share of a plan's shardings to which the compiler is constrained.

    EVERYTHING constrains values throughout a step. ARGUMENTS constrains arguments and
    results: XLA shards other values, and may fuse and move more. ACTIVATIONS
    also constrains values that several blocks read. At each level, ops that XLA may
    shard wrongly are constrained. Results are the same up to rounding.
    """

    EVERYTHING = "everything"
    ACTIVATIONS = "activations"
    ARGUMENTS = "arguments"


class Dimension(StrEnum):
    """Kinds of choices in a plan; values are the names in ``choose``."""

    MESH = "mesh"
    SHARDING = "sharding"
    STORAGE = "storage"
    REMAT = "remat"
    KERNELS = "kernels"
    COMPILER_OPTIONS = "compiler_options"
    MICROBATCHES = "microbatches"
    HOST_MEMORY = "host_memory"


ALL_DIMENSIONS = frozenset(Dimension)


# Share of the time for all variants after which no further variant is estimated.
ESTIMATES_SHARE = 1 / 3

# ------------------------------------------------------------------------ platforms


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing:
    """Kernels that may replace parts of a step, such as attention written out.

    Attributes:
        kernels: names of kernels, the preferred first. Candidates have the first kernel
            that can compute parts of a segment.
        platform: JAX's name of the devices' platform; some kernels need a certain one.
    """

    kernels: tuple[str, ...] = ()
    platform: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformDefaults:
    """Settings that differ between platforms; a user's settings replace them.

    Attributes:
        estimates: True chooses by estimates, without a race, unless the user sets
            ``measure`` (described devices: always).
        estimate_reach: limit of a preset's estimated time, as a multiple of the best
            preset's; slower ones are measured only if memory is short or a strategy
            fails. decisions.md, "Presets far behind by estimate are not measured".
        reach: by constraint level, limit of a candidate's predicted time, as a multiple
            of the best that fits; slower candidates seldom race.
        levels: allowed constraint levels: presets race at the first, a leading preset
            at others. ACTIVATIONS is for choices that XLA's propagation made.
        rounds: largest number of turns of a race. Four are a guess.
        limits_memory: True if the compiler takes a memory limit.
        host_memory: True if host memory is separate from device memory.
        reserve_bytes: memory that the allocator may need beyond a program's memory.
        combined_bytes: largest size of a collective that the compiler combines from
            several independent ones.
        launch_ms: the least time of a kernel, however little it computes.
        compiler_options: named sets of XLA options that leaders may race with.
        first_options: one named set that all race with if no memory budget is given.
        slow_to_tune: by names of kernels, options that turn them off. Segments and
            candidates compile with all of these; without a memory budget, the plan by
            prediction also races without each.
        replacing: kernels that may compute parts of a step.
        replacing_for_memory: the kernels that may do so if memory is short.
    """

    estimates: bool = False
    estimate_reach: float = 1.25
    reach: Mapping[ConstraintLevel, float]
    levels: tuple[ConstraintLevel, ...] = tuple(ConstraintLevel)
    rounds: int = 4
    limits_memory: bool = False
    host_memory: bool = False
    reserve_bytes: int = 0
    combined_bytes: int = 0
    launch_ms: float = 0.0
    compiler_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    first_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    slow_to_tune: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    replacing: Replacing = Replacing()
    replacing_for_memory: Replacing = Replacing()

    @property
    def shared_options(self) -> dict[str, str]:
        """Options that segments and candidates begin with; none for estimates."""
        every = () if self.estimates else self.slow_to_tune.values()
        return {name: value for off in every for name, value in off.items()}


# decisions.md, "One rule admits candidates to the race". Without peer-to-peer access,
# a sharding by hand was predicted at 1.23 times the plan's time, and was faster.
_REACH = {
    ConstraintLevel.EVERYTHING: 1.1,
    ConstraintLevel.ACTIVATIONS: 1.25,
    ConstraintLevel.ARGUMENTS: 1.2,
}

NO_LATENCY_HIDING: Mapping[str, str] = {
    "xla_gpu_enable_latency_hiding_scheduler": "False"
}

# Which options are fastest depends on program, plan and links: decisions.md, "Choices
# race with large collectives, and on slow links with other options".
_LARGE_COLLECTIVES: Mapping[str, str] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": str(2**28)
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
_GPU = PlatformDefaults(
    reach=_REACH,
    limits_memory=True,
    host_memory=True,
    # XLA's allocator does not split a free block of which less than this would stay,
    # and counts all of it as used: decisions.md, "A budget leaves 128 MiB for the
    # allocator".
    reserve_bytes=128 * 2**20,
    # The default of XLA's passes for GPUs that combine all-reduces, all-gathers and
    # reduce-scatters: xla/debug_options_flags.cc, xla_gpu_*_combine_threshold_bytes.
    combined_bytes=30 * 2**20,
    launch_ms=0.002,  # Guess.
    compiler_options={
        "large collectives": _LARGE_COLLECTIVES,
        "no latency hiding": NO_LATENCY_HIDING,
    },
    first_options={"large collectives": _LARGE_COLLECTIVES},
    # decisions.md, "Only the plan by prediction races with Triton's products".
    slow_to_tune={"Triton": {"xla_gpu_enable_triton_gemm": "False"}},
)
# Virtual devices share processors: their times vary more and say nothing about GPUs,
# and most time goes to compiling. Guesses.
_CPU = PlatformDefaults(
    estimates=True,
    estimate_reach=inf,
    reach=dict.fromkeys(ConstraintLevel, 2.0),
    levels=(ConstraintLevel.EVERYTHING,),
    rounds=2,
    host_memory=True,  # Virtual devices stand for devices with their own memory.
)
_PLATFORMS = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "rocm": _GPU}


def defaults_of(platform: str) -> PlatformDefaults:
    """Returns defaults by JAX's name of a platform ("gpu"); general ones for others."""
    found = _PLATFORMS.get(platform, PlatformDefaults(reach=_REACH))
    return replace(found, replacing=Replacing(platform=platform))
