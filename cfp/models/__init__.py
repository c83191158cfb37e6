"""Models to plan for, with their train steps. See `cfp.models.registry`.

Models need the extra `models` of the package; their names need nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cfp.errors import CfpError

if TYPE_CHECKING:
    from cfp.models.model import Model
    from cfp.models.registry import MODELS, build, find, initialise, logical_names

__all__ = ["MODELS", "Model", "build", "find", "initialise", "logical_names"]
NAMES = ("gpt", "moe", "bert", "llama")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("cfp.models.registry"), name)
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise CfpError(
            "optax is not installed, and models by name need it: "
            "pip install 'cfp[models]'."
        ) from error
