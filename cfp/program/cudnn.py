"""cuDNN's attention, as JAX calls it, traced on machines without cuDNN.

`jax.nn.dot_product_attention(implementation="cudnn")` asks for the version of cuDNN and
for the GPU while it is traced. A plan for GPUs that are not here takes neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.cudnn import fused_attention_stablehlo as fused

# That JAX's newest release asks for, and the oldest GPUs that have all layouts.
_VERSION = 91300
_CAPABILITY = (9, 0)
_ANSWERS = {
    "check_cudnn_version": lambda: _VERSION,
    "check_compute_capability": lambda least: _numbers(least) <= _CAPABILITY,
    "is_cuda_compute_capability_equal": lambda one: _numbers(one) == _CAPABILITY,
}


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _is_here() -> bool:
    try:
        fused.check_cudnn_version()
    except RuntimeError:
        return False
    return jax.default_backend() == "gpu"


@contextmanager
def cudnn_expected() -> Iterator[None]:
    """Has JAX trace its attention as for Hopper GPUs, if there is no cuDNN here.

    On CPU devices lowering then says that there is no such op.
    """
    if _is_here():
        yield
        return
    own = {name: getattr(fused, name) for name in _ANSWERS}
    try:
        for name, answer in _ANSWERS.items():
            setattr(fused, name, answer)
        yield
    finally:
        for name, function in own.items():
            setattr(fused, name, function)
