"""All example programs by name."""

import inspect
from collections.abc import Callable
from types import ModuleType

from cfp_test.programs import (
    control,
    convolution,
    dense,
    interface,
    libraries,
    numeric,
    routing,
    stacked,
    uneven,
)

MODULES: tuple[ModuleType, ...] = (
    dense,
    interface,
    stacked,
    uneven,
    control,
    convolution,
    routing,
    numeric,
    libraries,
)

PROGRAMS: dict[str, Callable] = {
    name.removesuffix("_step"): make
    for module in MODULES
    for name, make in inspect.getmembers(module, inspect.isfunction)
    if name.endswith("_step") and make.__module__ == module.__name__
}
