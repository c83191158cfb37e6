"""Lower bounds of time: contractions at the device's peak, each byte moved once.

The bytes are those of the arguments, the cotangent and the results: what an operator
cannot avoid. Contractions count as they are, so causal attention half; a backward pass
has twice those of the forward one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from cfp.devices.device_kind import kind, kinds
from cfp.operators.cases import Shape, output
from cfp.operators.operator import Operator
from cfp.operators.oracle import is_float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Specified rates of a device.

    Attributes:
        name: of the kind of device.
        flops_per_ms: by type.
        memory_bytes_per_ms: read plus written.
    """

    name: str
    flops_per_ms: Mapping[str, float]
    memory_bytes_per_ms: float


@cache
def peaks(device_kind: str) -> Peaks | None:
    """The peaks of a device, by the name that JAX gives its kind; None if unknown."""
    for name in sorted(set(kinds().values())):
        one = kind(name)
        if one.device_kind == device_kind:
            numbers = {key: number.value for key, number in one.numbers.items()}
            half = numbers["bfloat16_tflop_per_s"] * 1e9
            return Peaks(
                name=name,
                flops_per_ms={
                    "float32": numbers["float32_tflop_per_s"] * 1e9,
                    "bfloat16": half,
                    "float16": half,
                },
                memory_bytes_per_ms=numbers["memory_gb_per_s"] * 1e6,
            )
    return None


def least_bytes(operator: Operator, args: Any, *, backward: bool) -> int:
    """Bytes that a pass must read and write, each once.

    Args:
        operator: the operator.
        args: its arguments, or their shapes and types.
        backward: whether the backward pass follows the forward one.
    """
    out = output(operator, args)
    moved = sum(_bytes(x) for x in args) + _bytes(out)
    if backward:
        floats = [
            x for x, one in zip(args, operator.arguments, strict=True) if is_float(one)
        ]
        # The arguments again, the cotangent, and a gradient for each of them.
        moved += sum(_bytes(x) for x in args) + _bytes(out)
        moved += sum(_bytes(x) for x in floats)
    return moved


def bound_ms(
    operator: Operator,
    args: Any,
    shape: Shape,
    dtype: str,
    found: Peaks,
    *,
    backward: bool,
) -> float:
    """The shortest time that a device's specification allows."""
    flops = operator.flops(shape.dims) * (3 if backward else 1)
    moved = least_bytes(operator, args, backward=backward)
    return max(flops / found.flops_per_ms[dtype], moved / found.memory_bytes_per_ms)


def _bytes(x: Any) -> int:
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return abstract.size * abstract.dtype.itemsize
