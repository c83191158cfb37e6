"""Automatic sharding for JAX, measured on your own devices.

Public names are imported at their first use, so that `cfp doctor` runs without JAX.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfp.api import Fastest, Variant, plan, plan_fastest
    from cfp.checking.check import compare
    from cfp.context import PlannerSettings
    from cfp.cost.described import described
    from cfp.errors import (
        CfpError,
        MemoryBudgetError,
        NoSuchFile,
        NotBound,
        OptionError,
        PlanMismatch,
        ProcessError,
        StepNotTraceable,
    )
    from cfp.kernels.call import attention, attention_options
    from cfp.parallel import ParallelStep, parallelize
    from cfp.plan.plan import Plan
    from cfp.platform import join

    # Names that `plan(..., preset=...)` knows on a mesh of any shape.
    PRESETS: tuple[str, ...]

__all__ = [
    "PRESETS",
    "CfpError",
    "Fastest",
    "MemoryBudgetError",
    "NoSuchFile",
    "NotBound",
    "OptionError",
    "ParallelStep",
    "Plan",
    "PlanMismatch",
    "PlannerSettings",
    "ProcessError",
    "StepNotTraceable",
    "Variant",
    "attention",
    "attention_options",
    "compare",
    "described",
    "join",
    "parallelize",
    "plan",
    "plan_fastest",
]
# Where public names are defined; those that are not here are errors.
_HOMES = {
    "cfp.api": ("Fastest", "Variant", "plan", "plan_fastest"),
    "cfp.kernels.call": ("attention", "attention_options"),
    "cfp.cost.described": ("described",),
    "cfp.checking.check": ("compare",),
    "cfp.platform": ("join",),
    "cfp.parallel": ("ParallelStep", "parallelize"),
    "cfp.plan.plan": ("Plan",),
    "cfp.context": ("PlannerSettings",),
}
_HOME_OF = dict.fromkeys(__all__, "cfp.errors") | {
    name: home for home, names in _HOMES.items() for name in names
}
__version__ = "0.1.0"


class _Package(ModuleType):
    """The package's module, which imports a public name at the name's first use."""

    def __getattr__(self, name: str) -> Any:
        if name == "PRESETS":
            value = tuple(import_module("cfp.analysis.presets").PRESETS)
        elif name in _HOME_OF:
            value = getattr(import_module(_HOME_OF[name]), name)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a submodule as an attribute of its package. `cfp.plan` is the
        # function, whether or not the module of that name was imported.
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A step that is sent to another process may name cfp.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
