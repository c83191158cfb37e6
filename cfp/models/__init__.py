"""Models to plan for, with their train steps. See `cfp.models.registry`."""

from cfp.models.registry import (
    MODELS,
    Model,
    build,
    find,
    initialise,
    logical_names,
)

__all__ = ["MODELS", "Model", "build", "find", "initialise", "logical_names"]
