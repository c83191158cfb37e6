"""The dtypes of MLIR's element types."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def numpy_dtype(element: str) -> np.dtype:
    """The dtype of an MLIR element type."""
    if element in _DTYPES:
        return jnp.dtype(_DTYPES[element])
    if element[:2] in ("f8", "f4"):
        return jnp.dtype(f"float{element[1]}_{element[2:].lower()}")
    if element.startswith("ui"):
        return jnp.dtype(f"uint{element[2:]}")
    if element.startswith("i"):
        return jnp.dtype(f"int{element[1:]}")
    raise ValueError(f"no numpy dtype for {element!r}")
