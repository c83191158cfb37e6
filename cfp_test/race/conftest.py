"""The small training step of the profiling room."""

from cfp_test.profiling.conftest import case, mesh, store

__all__ = ["case", "mesh", "store"]
