"""Automatic sharding for JAX, measured on your own devices."""

from cfp.api import ParallelStep, parallelize, plan
from cfp.difference import compare
from cfp.errors import (
    CacheError,
    CfpError,
    CompilerError,
    DeviceError,
    MemoryBudgetError,
    MeshError,
    PinError,
    PlanMismatch,
    StepNotTraceable,
    TargetError,
)
from cfp.plan import Plan
from cfp.planner_parts import PlannerSettings
from cfp.presets import CLASSICS
from cfp.variants import Basis, Fastest, Outcome, Variant, plan_fastest

# Names that `plan(..., preset=...)` knows on a mesh of any shape.
PRESETS = tuple(CLASSICS)

__all__ = [
    "PRESETS",
    "Basis",
    "CacheError",
    "CfpError",
    "CompilerError",
    "DeviceError",
    "Fastest",
    "MemoryBudgetError",
    "MeshError",
    "Outcome",
    "ParallelStep",
    "PinError",
    "Plan",
    "PlanMismatch",
    "PlannerSettings",
    "StepNotTraceable",
    "TargetError",
    "Variant",
    "compare",
    "parallelize",
    "plan",
    "plan_fastest",
]
__version__ = "0.1.0"
