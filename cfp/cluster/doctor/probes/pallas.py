"""A kernel in Pallas, compiled for the device and run on it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cfp.cluster.doctor.probes.answer import answer

# A block of this size fits the shared memory of any GPU, and one group of warps.
_ROWS, _COLUMNS, _BLOCK = 1024, 128, 64


def _no_parameters() -> None:
    """Pallas chooses its compiler: Triton in older releases of JAX, Mosaic in newer."""


def _triton() -> Any:
    return import_module("jax.experimental.pallas.triton").CompilerParams()


COMPILERS: dict[str, Callable[[], Any]] = {
    "its own choice": _no_parameters,
    "Triton": _triton,
}


def find() -> dict[str, Any]:
    """How far the result is from XLA's, by the first compiler that works."""
    reasons = []
    for name, parameters in COMPILERS.items():
        try:
            return {"compiler": name, "difference": _run(parameters())}
        except Exception as error:
            # Compilers and drivers raise errors that have no type in common.
            reasons.append((name, error))
    name, error = reasons[0]
    raise RuntimeError(f"{name}: {type(error).__name__}: {error}")


def _run(parameters: Any) -> float:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = jnp.exp(x[...]) * y[...]

    block = pallas.BlockSpec((_BLOCK, _COLUMNS), lambda row: (row, 0))
    shape = jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32)
    run = pallas.pallas_call(
        kernel,
        out_shape=shape,
        grid=(_ROWS // _BLOCK,),
        in_specs=[block, block],
        out_specs=block,
        compiler_params=parameters,
    )
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, shape.shape) for key in keys)
    return float(jnp.abs(jax.jit(run)(x, y) - jnp.exp(x) * y).max())


if __name__ == "__main__":
    answer(find)
