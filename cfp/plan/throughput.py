"""Figures to judge a plan by: FLOPs, their rate, tokens or samples a second."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from cfp.devices.device_kind import kind_of

if TYPE_CHECKING:
    from cfp.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a step's computation.

    Attributes:
        model_tflop: of one step, as the program has them; rematerialized ones of the
            step or the plan do not count.
        step_ms: the time that the rates are of: measured if there is one.
        tflop_per_s: of each device.
        rate_share: of the devices' nominal matrix rates, by the types of the products;
            None for kinds that are not shipped.
        rate_dtypes: the types that these rates are of: "bfloat16", "float32" or both.
        tokens_per_s: None where the batch does not show tokens.
        samples_per_s: None where it does, or the batch is not known.
    """

    model_tflop: float
    step_ms: float
    tflop_per_s: float
    rate_share: float | None
    rate_dtypes: str
    tokens_per_s: float | None
    samples_per_s: float | None


def throughput(plan: Plan, step_ms: float | None = None) -> Throughput | None:
    """A plan's throughput; None if no time of it is known, or nothing to compute.

    Args:
        plan: the plan.
        step_ms: the time of a step; the measured one, or else the predicted one.
    """
    if step_ms is None:
        step_ms = plan.predicted_ms if plan.measured_ms is None else plan.measured_ms
    flops = plan.search.get("model_flops", 0.0)
    if not step_ms or not flops:
        return None
    seconds = step_ms / 1e3
    rate = flops / seconds / prod(size for _, size in plan.mesh_axes) / 1e12
    tokens = plan.search.get("batch_tokens")
    samples = plan.search.get("batch_samples") if tokens is None else None
    return Throughput(
        model_tflop=flops / 1e12,
        step_ms=step_ms,
        tflop_per_s=rate,
        rate_share=_rate_share(plan, rate),
        rate_dtypes=_rate_dtypes(plan),
        tokens_per_s=None if tokens is None else tokens / seconds,
        samples_per_s=None if samples is None else samples / seconds,
    )


def _rate_share(plan: Plan, tflop_per_s: float) -> float | None:
    known = kind_of(plan.environment.get("device_kind", ""))
    if known is None:
        return None
    narrow = plan.search.get("narrow_share", 0.0)
    wide_rate = known.numbers["float32_tflop_per_s"].value
    narrow_rate = known.numbers["bfloat16_tflop_per_s"].value
    return tflop_per_s * (narrow / narrow_rate + (1.0 - narrow) / wide_rate)


def _rate_dtypes(plan: Plan) -> str:
    narrow = plan.search.get("narrow_share", 0.0)
    found = (("bfloat16", narrow > 0.0), ("float32", narrow < 1.0))
    return " and ".join(name for name, is_there in found if is_there)


def throughput_text(found: Throughput) -> str:
    """The same in a line."""
    share = ""
    if found.rate_share is not None:
        percent = f"{found.rate_share:.1%}" if found.rate_share > 5e-4 else "under 0.1%"
        share = f" ({percent} of its rate in {found.rate_dtypes})"
    parts = [
        f"{_flop_text(found.model_tflop)} of the model a step",
        f"{_flop_text(found.tflop_per_s)}/s on each device{share}",
    ]
    if found.tokens_per_s is not None:
        parts.append(f"{found.tokens_per_s:,.0f} tokens/s")
    if found.samples_per_s is not None:
        parts.append(f"{found.samples_per_s:,.0f} samples/s")
    return "; ".join(parts)


def _flop_text(tflop: float) -> str:
    return f"{tflop:.3g} TFLOP" if tflop >= 0.1 else f"{1e3 * tflop:.3g} GFLOP"


def throughput_data(plan: Plan, step_ms: float | None = None) -> dict[str, Any] | None:
    """The same as plain data; None if it is not known."""
    found = throughput(plan, step_ms)
    return None if found is None else asdict(found)
