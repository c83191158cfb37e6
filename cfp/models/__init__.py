"""Models to plan for, with their train steps. See `cfp.models.registry`.

Models need the extra `models` of the package; their names need nothing.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cfp.errors import CfpError

if TYPE_CHECKING:
    from cfp.models.registry import (
        MODELS,
        Model,
        build,
        find,
        initialise,
        logical_names,
    )

__all__ = ["MODELS", "Model", "build", "find", "initialise", "logical_names"]
NAMES = ("gpt", "moe", "bert", "llama")


def load(module: str) -> ModuleType:
    """Imports a module that needs the extra `models`.

    Raises:
      CfpError: the extra is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flax", "optax"):
            raise
        raise CfpError(
            f"{error.name} is not installed. Models by name and operators need it: "
            "pip install 'cfp[models]'."
        ) from error


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load("cfp.models.registry"), name)
