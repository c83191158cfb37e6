"""Constants that decide a plan, with their sources, and the defaults of platforms.

Shares of a device's rates stand in `cfp/devices` and `cfp/cost`, shares of a kernel in
its record. A source is a page of docs/results, an entry of docs/decisions.md, or the
word "guess"; docs/results/constants.md lists the measured ones. Limits of text, files
or patience stand in the modules that use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

# --------------------------------------------------------------- the profile pass

# Mixed presets of several axes that are measured. decisions.md, "Mixed presets of
# several axes: six by estimate".
MIXED_PRESETS = 6
# What a segment adds to its neighbour is at least this share of what it takes alone. On
# 4 H200 the parts of the presets added 0.45 to 1.0 of it.
LEAST_ADDED_SHARE = 0.4
# Of the budget: predicted memory beyond this may turn out not to fit. Guesses, for
# measured segments, and for estimates, which know less of what the compiler keeps.
SAFE_MEMORY_SHARE = 0.9
SAFE_ESTIMATED_MEMORY_SHARE = 0.7
# Segments that are estimated to take a smaller share of a step are measured alone only:
# times of pairs vary by about 1 %, and a pair takes two layers' share. Guess.
SMALL_SHARE = 0.03
# Rematerialization takes so many times as long as without it, where nothing
# of the kind has been measured. Of twelve segments of a transformer on 2 H200 eleven
# took 1.17 to 1.44 times as long; decisions.md, "Where memory decides, likely
# strategies are measured next".
REMATERIALIZED_TIME_EXPECTED = 1.25
# A smaller share of a step is not worth a round of measuring, nor distinguished in two
# races, whose times differ by about 1 %: decisions.md, "Programs within 1 % are a tie".
WORTH_HAVING = 0.02
# Strategies in a round, and unmeasured ones of a kind that are in a search at
# once. Guess.
ROUND_SIZE = 8
# Of a budget of time so much goes to measuring, where a race follows: of 14 plans
# without one it took 0.47 to 0.73 of what their stages took, 0.60 in the median
# (docs/results/planning_parts.md).
MEASURED_SHARE = 0.6

# Between the memory of the host and a device, either way: 0.8 of what PCIe 5.0 x16 is
# specified for. Guess.
HOST_BYTES_PER_MS = 50e6

# --------------------------------------------------------------------- the search

# What the compiler leaves of temporaries under a memory limit, usually and at least.
# On 2 H200 0.74 and 0.77 for two plans of a transformer, and 0.6 and 0.73 where they
# rematerialize segments: docs/results/constants.md.
LIMITED_MEMORY = 0.75
LIMITED_MEMORY_AT_LEAST = 0.55
# The compiled-to-predicted ratio of memory of some programs that compute segments
# again. decisions.md, "Under a budget plans of two predicted sizes race": 0.77 to 1.18.
COMPILED_TO_PREDICTED = 0.85

# ----------------------------------------------------------------------- the race

# How many times as long a step takes with the memory limit: 1.05 to 1.12 on 2 H200,
# docs/results/constants.md.
LIMITED_TIME = 1.1
# Candidates that are compiled and do not fit, until no others are, but for those known
# to fit; then as many smaller ones at most, or one where time is over. Guess.
MOST_REFUSED = 8
# Where no kernel is tuned yet, so many candidates are compiled before all others, and
# so many side by side. One H200 had the first of 18 after 86 s and all
# after 96, compiled six at once and beside another model; with three first, alone,
# after 10, 14 and 19 s, and the other 15 after 55 s, six at once: as many seconds each
# as one by one, since one GPU tunes for all. With fewer begun, fewer are late.
TUNED_FIRST = 1
TUNING_AT_ONCE = 2
# What is slower than this many times the fastest is left out: after the look before the
# turns, or the first turn where there is no look, and between two races; and after each
# other turn. decisions.md, "Kernels are measured in place of written attention".
STAY_AFTER_LOOK = 1.04
STAY_AFTER_TURN = 1.02
# Programs of a race whose medians differ by no more than this share are a tie, of two
# samples on: decisions.md, "Programs within 1 % are a tie".
ALIKE = 0.01
# Choices that race where no budget was asked for, the best by prediction. decisions.md,
# "Choices race with large collectives, the leader with other options".
MOST_RACED = 6


class ConstraintLevel(StrEnum):
    """Share of a plan's shardings to which the compiler is constrained.

    With constraints on every value, XLA does what the plan says. With those of
    arguments and results alone, its own propagation fills in the rest, and may fuse and
    move more; with those of activations, what several blocks read stays as the plan has
    it. All compute the same; which is faster is measured.
    """

    EVERYTHING = "everything"
    ACTIVATIONS = "activations"
    ARGUMENTS = "arguments"


class Dimension(StrEnum):
    """Kinds of choices that a plan is made of, by the names that users give."""

    MESH = "mesh"
    SHARDING = "sharding"
    STORAGE = "storage"
    REMAT = "remat"
    KERNELS = "kernels"
    COMPILER_OPTIONS = "compiler_options"
    MICROBATCHES = "microbatches"
    HOST_MEMORY = "host_memory"


ALL_DIMENSIONS = frozenset(Dimension)


# Of the time for all variants, what their estimates have.
ESTIMATES_SHARE = 1 / 3

# ------------------------------------------------------------------------ platforms


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing:
    """Kernels that may compute what a step has there otherwise.

    Attributes:
        kernels: names of kernels, the preferred first: of each candidate the first
            that can.
        platform: of the devices, by JAX's name: a kernel may run on some only.
    """

    kernels: tuple[str, ...] = ()
    platform: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformDefaults:
    """Settings that differ between platforms; a user's settings replace them.

    Attributes:
        estimates: whether choices are made by estimates, and nothing races, unless
            measuring is asked for; a race does not go on until it is clear what is
            faster.
        estimate_reach: presets that are estimated to take this many times as long as
            the best of them are not measured. decisions.md, "Presets far
            behind by estimate are not measured".
        reach: candidates that are predicted to take this many times as long as the best
            that fits are not raced, by constraint level.
        levels: constraint levels of presets: all race at the first, the leader at each.
        rounds: turns of a race that decides, at most. Four are a guess.
        limits_memory: whether the compiler takes a memory limit.
        host_memory: whether what is in the memory of the host is none of a device's.
        reserve_bytes: what the allocator may add to what a program needs.
        combined_bytes: up to so many bytes the compiler makes one collective of several
            that do not depend on each other.
        launch_ms: the least time of a kernel, however little it computes.
        compiler_options: what the leader is raced with, too, by name.
        first_options: what all race with where no budget was asked for, by name.
        replacing: kernels that may compute parts of a step.
        replacing_for_memory: the same where memory decides.
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
    replacing: Replacing = Replacing()
    replacing_for_memory: Replacing = Replacing()


# On 2 H200 predictions were off by 8 % at most, and with arguments alone constrained,
# for which the same prediction stands, steps were up to 8 % faster (decisions.md,
# "One rule admits candidates to the race").
# With activations constrained only propagation's own choice is raced, which is one
# program: on 2 H100 with NCCL_P2P_DISABLE=1 what people shard by hand was predicted at
# 1.23 times the plan's time, and was faster.
_REACH = {
    ConstraintLevel.EVERYTHING: 1.1,
    ConstraintLevel.ACTIVATIONS: 1.25,
    ConstraintLevel.ARGUMENTS: 1.2,
}

NO_LATENCY_HIDING: Mapping[str, str] = {
    "xla_gpu_enable_latency_hiding_scheduler": "False"
}

# Which options are fastest depends on program, plan and links: on 4 H200 without
# peer-to-peer access, hiding latency slows data parallelism down (134.6 ms a step,
# 115.3 without) and speeds fully sharded parameters up. decisions.md, "Choices
# race with large collectives, the leader with other options".
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
        "large collectives, no Triton": {
            **_LARGE_COLLECTIVES,
            "xla_gpu_enable_triton_gemm": "False",
        },
    },
    first_options={"large collectives": _LARGE_COLLECTIVES},
)
# Virtual devices share processors: times say nothing about those of GPUs, vary more,
# and are estimated worse; and building is what takes the time. Guesses.
_CPU = PlatformDefaults(
    estimates=True,
    estimate_reach=inf,
    reach=dict.fromkeys(ConstraintLevel, 2.0),
    levels=(ConstraintLevel.EVERYTHING,),
    rounds=2,
    host_memory=True,  # They stand for devices with memory of their own.
)
_PLATFORMS = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "rocm": _GPU}


def defaults_of(platform: str) -> PlatformDefaults:
    """Returns the settings of a platform, by JAX's name for it."""
    found = _PLATFORMS.get(platform, PlatformDefaults(reach=_REACH))
    return replace(found, replacing=Replacing(platform=platform))
