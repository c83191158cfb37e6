"""The whole programs whose steps on 2 and 4 H200 stand in ``docs/results``.

Which programs they were can be said again for the presets, by name, constraint level
and compiler options. What a search had chosen is known only where a page kept its plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cfp.settings import ConstraintLevel, defaults_of

GPT = "gpt --layers 4 --hidden 4096 --heads 32 --batch 24 --seq 1024"
MOE = "moe --layers 4 --batch 64"
GPT_OF_TWO = "gpt --layers 4 --hidden 4096 --heads 32 --batch 12 --seq 1024"
MOE_OF_TWO = "moe --layers 4 --batch 32"
NARROW_GPT_OF_TWO = "gpt --layers 4 --hidden 2048 --heads 16 --batch 16 --seq 1024"
TINY = {
    "gpt": "gpt --layers 2 --hidden 64 --heads 4 --seq 32 --vocab 128 --batch 8",
    "moe": "moe --layers 2 --hidden 64 --heads 4 --seq 32 --vocab 128 --batch 8 "
    "--experts 4 --expert_group_size 32",
}

_COMBINED = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)


def _up_to(size: int) -> dict[str, str]:
    return dict.fromkeys(_COMBINED, str(size))


# Names of races, and of the comparison of options on ``planning_h200x4_202611.md``.
_BY_NAME = defaults_of("gpu").compiler_options
_NO_HIDING = _BY_NAME["no latency hiding"]
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "": {},
    **_BY_NAME,
    "nolhs": _NO_HIDING,
    "large": _BY_NAME["large collectives"],
    "huge": _up_to(1 << 31),
    "mid": _up_to(1 << 26),
    "small": _up_to(1 << 20),
    "nolhs_large": {**_NO_HIDING, **_BY_NAME["large collectives"]},
    "sol_off": {"xla_gpu_enable_analytical_sol_latency_estimator": "False"},
    "analytical": {"xla_gpu_enable_analytical_latency_estimator": "True"},
    "overlap2": {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"},
    "overlap4": {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
    "overlap8": {"xla_gpu_experimental_parallel_collective_overlap_limit": "8"},
    "notriton": {"xla_gpu_enable_triton_gemm": "False"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program.

    Attributes:
        devices: that it is for, on one mesh axis x.
        target: a model and its options, as on the command line.
        preset: a classic strategy, or the file name of a plan.
        level: how much of its layout the compiler is constrained to.
        options: names in `OPTIONS`.
        trace: whether to see which kernel takes how long.
    """

    devices: int
    target: str
    preset: str
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    options: str = ""
    trace: bool = False

    @property
    def name(self) -> str:
        """As recorded races and tables name it, with what the races leave out."""
        whole = self.level is not ConstraintLevel.ARGUMENTS
        level = "" if whole else ", arguments told"
        options = f", {self.options}" if self.options else ""
        return f"{self.preset}{level}{options}"

    @property
    def file(self) -> str:
        """A name for files."""
        words = f"{self.devices} {self.target.split()[0]} {self.name}".split()
        batch = (
            self.target.split("--batch ")[-1].split()[0]
            if "--batch" in self.target
            else ""
        )
        return "_".join([*words, *([f"b{batch}"] if batch else [])]).replace(",", "")


@dataclass(slots=True)
class _List:
    devices: int
    found: list[Case] = field(default_factory=list)

    def add(self, target: str, preset: str, **how: Any) -> None:
        case = Case(devices=self.devices, target=target, preset=preset, **how)
        if case not in self.found:
            self.found.append(case)


_CLASSICS = (
    "data_parallel",
    "fully_sharded",
    "tensor_parallel",
    "zero1",
    "tensor_sequence_parallel",
)
_RACED = ("no latency hiding", "large collectives")
_COMPARED = (
    "nolhs",
    "large",
    "sol_off",
    "small",
    "analytical",
    "huge",
    "mid",
    "overlap4",
    "nolhs_large",
    "notriton",
)


def cases(devices: int) -> list[Case]:
    """The recorded programs for 2 or 4 devices, those of most use first."""
    found = _List(devices)
    if devices == 4:
        _four(found)
    else:
        _two(found)
    return found.found


def _four(found: _List) -> None:
    for target, presets in ((GPT, _CLASSICS), (MOE, (*_CLASSICS, "expert_parallel"))):
        for preset in presets:
            found.add(target, preset, level=ConstraintLevel.ARGUMENTS, trace=True)
        for preset in presets:
            found.add(target, preset, trace=True)
    for options in _RACED:
        found.add(
            GPT, "fully_sharded", level=ConstraintLevel.ARGUMENTS, options=options
        )
        found.add(MOE, "expert_parallel", options=options)
    found.add(GPT, "fully_sharded", options="large collectives")
    for links in ("nvlink", "p2p_off"):
        found.add(GPT, f"gpt4_h200x4_202611_{links}.json")
        large = "large collectives"
        found.add(GPT, f"gpt4_h200x4_202611_{links}.json", options=large)
    for options in _COMPARED:
        found.add(GPT, "data_parallel", options=options)
        found.add(MOE, "data_parallel", options=options)
        if options not in ("nolhs", "large"):
            found.add(MOE, "expert_parallel", options=options)


def _two(found: _List) -> None:
    for preset in _CLASSICS:
        found.add(GPT_OF_TWO, preset, level=ConstraintLevel.ARGUMENTS, trace=True)
    for preset in _CLASSICS:
        found.add(GPT_OF_TWO, preset, trace=True)
    for preset in ("expert_parallel", "fully_sharded", "tensor_sequence_parallel"):
        found.add(MOE_OF_TWO, preset, trace=True)
        found.add(MOE_OF_TWO, preset, level=ConstraintLevel.ARGUMENTS, trace=True)
    for preset in ("data_parallel", "zero1", "tensor_parallel"):
        found.add(MOE_OF_TWO, preset, level=ConstraintLevel.ARGUMENTS)
    for options in _RACED:
        found.add(MOE_OF_TWO, "expert_parallel", options=options)
    for level in ConstraintLevel:
        for preset in _CLASSICS:
            found.add(NARROW_GPT_OF_TWO, preset, level=level)
    for options in _RACED:
        level = ConstraintLevel.ARGUMENTS
        found.add(NARROW_GPT_OF_TWO, "fully_sharded", level=level, options=options)


def tiny_cases(devices: int) -> list[Case]:
    """A few small programs, for virtual devices."""
    found = _List(devices)
    for model, preset in (("gpt", "fully_sharded"), ("moe", "expert_parallel")):
        found.add(TINY[model], preset, trace=True)
        found.add(TINY[model], "data_parallel", level=ConstraintLevel.ARGUMENTS)
    return found.found
