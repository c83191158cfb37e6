"""Rates of a step's computation, by which users judge a plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cfp.devices.device_kind import kind_of
from cfp.plan.plan import Plan
from cfp.printable import counted, format_flops
from cfp.view.words import runs_whole

# Rates of float32 are of other products, by the kind's platform; see its file.
_NAME = {"gpu": {"float32": "float32 (TF32)"}, "tpu": {"float32": "float32 (bfloat16)"}}
# JAX's precisions with which GPUs compute products of float32 in TF32.
_TF32 = frozenset(
    {"None", "default", "fastest", "bfloat16"}
    | {"high", "bfloat16_3x", "tensorfloat32", "TF32_TF32_F32"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a step's computation.

    Attributes:
        model_tflop: of one step, without what the step or the plan rematerializes.
        uncounted_loops: loops of unknown length, of which one iteration is counted.
        step_ms: the time that the rates are of: measured if there is one.
        tflop_per_s: of each device; None if loops are not counted in full.
        runs_whole: whether all devices compute the same.
        rate_share: of the devices' nominal matrix rates, by the types of the products;
            None for kinds that are not shipped, and float32 that is not TF32.
        rate_dtypes: the types that these rates are of, such as "float32 (TF32)".
        tokens_per_s: None where the batch does not show tokens.
        samples_per_s: None where it does, or the batch is not known.
    """

    model_tflop: float
    uncounted_loops: int
    step_ms: float
    tflop_per_s: float | None
    runs_whole: bool
    rate_share: float | None
    rate_dtypes: str
    tokens_per_s: float | None
    samples_per_s: float | None

    def __str__(self) -> str:
        flop = f"{format_flops(1e12 * self.model_tflop)} of the model"
        if self.tflop_per_s is None:
            loops = counted(self.uncounted_loops, "loop", "loops")
            unknown = f"{loops} whose length the program does not say"
            parts = [f"{flop} with one iteration of {unknown}"]
        else:
            same = " of the devices, which all compute the same" * self.runs_whole
            where = f"on each{same or ' device'}"
            rate = f"{format_flops(1e12 * self.tflop_per_s)}/s {where}"
            if self.rate_share is not None:
                small = self.rate_share <= 5e-4
                percent = "under 0.1%" if small else f"{self.rate_share:.1%}"
                rate += f" ({percent} of its rate in {self.rate_dtypes})"
            parts = [f"{flop} a step", rate]
        rates = (("tokens", self.tokens_per_s), ("samples", self.samples_per_s))
        parts += [f"{n:,.0f} {name}/s" for name, n in rates if n is not None]
        return "; ".join(parts)


def throughput(plan: Plan, step_ms: float | None = None) -> Throughput | None:
    """Computes a plan's throughput; None without a time or without products.

    Args:
        step_ms: time of a step; by default the measured one, or the predicted one.
    """
    if step_ms is None:
        step_ms = plan.predicted_ms if plan.measured_ms is None else plan.measured_ms
    search, flops = plan.search, plan.search.get("model_flops", 0.0)
    if not step_ms or not flops:
        return None
    seconds, is_whole = step_ms / 1e3, runs_whole(plan)
    devices = 1 if is_whole else prod(size for _, size in plan.mesh_axes)
    rate = flops / seconds / devices / 1e12
    tokens, samples = search.get("batch_tokens"), search.get("batch_samples")
    loops = round(search.get("uncounted_loops", 0.0))
    share, dtypes = (None, "") if loops else _share_of_rate(plan, rate)
    return Throughput(
        model_tflop=flops / 1e12,
        uncounted_loops=loops,
        step_ms=step_ms,
        tflop_per_s=None if loops else rate,
        runs_whole=is_whole,
        rate_share=share,
        rate_dtypes=dtypes,
        tokens_per_s=tokens and tokens / seconds,
        samples_per_s=samples / seconds if samples and tokens is None else None,
    )


def _share_of_rate(plan: Plan, tflop_per_s: float) -> tuple[float | None, str]:
    """The share of a device's nominal rate, and the types of products it is of."""
    environment, narrow = plan.environment, plan.search.get("narrow_share", 0.0)
    kind = kind_of(environment.get("device_kind", ""))
    shares = ("bfloat16", narrow), ("float32", 1.0 - narrow)
    used = {dtype: part for dtype, part in shares if part > 0}
    # In JAX's default precision: what a product asks for itself is not seen.
    is_tf32 = environment.get("matmul_precision", "None") in _TF32
    is_tf32 &= "NVIDIA_TF32_OVERRIDE=0" not in environment.get("cuda", "")
    if kind is None or ("float32" in used and not is_tf32):
        return None, ""
    share = sum(
        part * tflop_per_s / kind.specified(f"{dtype}_tflop_per_s")
        for dtype, part in used.items()
    )
    return share, " and ".join(_NAME[kind.platform].get(one, one) for one in used)
