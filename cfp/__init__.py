"""Automatic sharding for JAX, measured on your own devices.

The public names are loaded when they are first asked for: so `cfp doctor` works where
JAX is missing or broken.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfp.api import ParallelStep, parallelize, plan
    from cfp.attention.call import attention
    from cfp.attention.options import attention_options
    from cfp.checking.difference import compare
    from cfp.devices.described import described
    from cfp.devices.joining import join
    from cfp.errors import (
        AttentionError,
        CacheError,
        CfpError,
        CompilerError,
        DeviceError,
        MemoryBudgetError,
        MeshError,
        PinError,
        PlanFileError,
        PlanMismatch,
        ProcessError,
        StepNotTraceable,
        TargetError,
    )
    from cfp.plan.adapt import adapt
    from cfp.plan.plan import Plan
    from cfp.planner_settings import PlannerSettings
    from cfp.variants import Basis, Fastest, Outcome, Variant, plan_fastest

    # Names that `plan(..., preset=...)` knows on a mesh of any shape.
    PRESETS: tuple[str, ...]

# Where each public name is defined.
_HOMES = {
    "cfp.plan.adapt": ("adapt",),
    "cfp.api": ("ParallelStep", "parallelize", "plan"),
    "cfp.attention.call": ("attention",),
    "cfp.attention.options": ("attention_options",),
    "cfp.devices.described": ("described",),
    "cfp.checking.difference": ("compare",),
    "cfp.errors": (
        "AttentionError",
        "CacheError",
        "CfpError",
        "CompilerError",
        "DeviceError",
        "MemoryBudgetError",
        "MeshError",
        "PinError",
        "PlanFileError",
        "PlanMismatch",
        "ProcessError",
        "StepNotTraceable",
        "TargetError",
    ),
    "cfp.devices.joining": ("join",),
    "cfp.plan.plan": ("Plan",),
    "cfp.planner_settings": ("PlannerSettings",),
    "cfp.variants": ("Basis", "Fastest", "Outcome", "Variant", "plan_fastest"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PRESETS",
    "AttentionError",
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
    "PlanFileError",
    "PlanMismatch",
    "PlannerSettings",
    "ProcessError",
    "StepNotTraceable",
    "TargetError",
    "Variant",
    "adapt",
    "attention",
    "attention_options",
    "compare",
    "described",
    "join",
    "parallelize",
    "plan",
    "plan_fastest",
]
__version__ = "0.1.0"


class _Package(ModuleType):
    """This package as a module that finds its public names when asked."""

    def __getattr__(self, name: str) -> Any:
        if name == "PRESETS":
            value = tuple(import_module("cfp.presets.presets").PRESETS)
        elif name in _HOME_OF:
            value = getattr(import_module(_HOME_OF[name]), name)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a submodule as an attribute of its package. `cfp.plan` is the
        # function, whether or not the module of that name was imported.
        if name in _HOME_OF and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A step that is sent to another process may name cfp.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
