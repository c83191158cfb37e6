"""All example programs by name."""

import inspect
from collections.abc import Callable
from types import ModuleType

from cfp_test.programs import (
    control,
    convolution,
    dense,
    distant,
    interface,
    kernels,
    libraries,
    numeric,
    recipes,
    routing,
    stacked,
)

MODULES: tuple[ModuleType, ...] = (
    dense,
    distant,
    interface,
    kernels,
    stacked,
    control,
    convolution,
    routing,
    numeric,
    libraries,
    recipes,
)

PROGRAMS: dict[str, Callable] = {
    name.removesuffix("_step"): make
    for module in MODULES
    for name, make in inspect.getmembers(module, inspect.isfunction)
    if name.endswith("_step") and make.__module__ == module.__name__
}


def programs_on(mesh: tuple[tuple[str, int], ...]) -> list[str]:
    """Names of the programs that run on a mesh: almost all."""
    return [n for n, make in PROGRAMS.items() if getattr(make, "mesh", mesh) == mesh]
