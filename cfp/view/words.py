"""Short texts about a plan, and its throughput, which all views share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.analysis.strategies import Spec
from cfp.cost.described import TAKEN_SHARE, kind_of
from cfp.plan.parts import (
    VARIANTS_SECONDS,
    MoveFigure,
    StrategyFigures,
    roles_text,
    shape_of,
)
from cfp.plan.plan import Plan
from cfp.printable import counted, few, format_bytes, format_flops, mesh_text
from cfp.settings import COMPILED_AT_MOST

REMATERIALIZED = "rematerialized"
STORAGE_WORDS = {
    Storage.USED: "as used",
    Storage.OPTIMIZER: "as used, update sharded",
    Storage.SHARDED: "sharded, gathered before use",
    Storage.INNER: "sharded within each host, gathered before use",
    Storage.LARGEST: "sharded along their largest dims",
}
STRATEGIES = "strategy", "strategies"  # for `cfp.printable.counted`
SAME_MS = 0.0005  # Less does not show.
ALL_SECONDS = "planning_seconds"
NONE_CAN = "no kernel that may be used can compute it"
# Entries of `Plan.search` after `cfp verify`: the plan was measured; it was made for
# described devices; it was made for devices of another kind. `Plan.environment` is then
# of the verifying devices.
VERIFIED, WAS_DESCRIBED = "verified", "was_described"
OTHER_DEVICES = "other_devices"
# Entries of `Plan.search`: bytes of the allocator's reserve, and of a described device;
# pins by the first plan.
RESERVE_BYTES, DEVICE_BYTES = "reserve_bytes", "device_bytes"
PINNED_BY_FIRST = "pinned_by_first"


def storage_text(plan: Plan, index: int) -> str:
    """Describes a segment's usual storage, pins, kernels and rematerialization."""
    segment, own = plan.segments[index], plan.segments[index].parameters
    read = {name for row in plan.rows if row.segment == index for name in row.arguments}
    places = {i for i, name in enumerate(plan.arg_names) if name in read}
    others = (one for s in plan.segments for one in s.parameters if one not in own)
    tied = [one for one in others if one.argument in places]
    modes = [one.storage for one in own or tied]
    stored = max(dict.fromkeys(modes), key=modes.count, default=None)
    words = STORAGE_WORDS[stored] if stored else "none updated"
    if given := sum(one.argument in plan.pinned for one in own):
        further = ", update sharded" * (stored is not Storage.USED)
        # Alike segments may have unlike counts: a last one may own a final norm.
        words = f"pinned{further}" if given == len(own) else f"{words}, {given} pinned"
    words += f", {'some ' * bool(own)}tied to another segment" * bool(tied)
    kernels = [kernels_text(segment.kernels)] if segment.kernels else []
    return ", ".join([words, *kernels, *[REMATERIALIZED] * segment.rematerialized])


def parameters_text(stored: str) -> str:
    """Adds a noun to a text of `storage_text`, such as ``parameters as used``."""
    return f"parameters {stored}".replace("parameters none", "no parameters")


def kernels_text(kernels: SegmentKernels) -> str:
    """Lists the kernels of a segment: ``cudnn attention``; "" without any."""
    return ", ".join(f"{name} {kind}" for kind, name in kernels)


def strategy_text(strategy: StrategyFigures) -> str:
    """Describes a strategy: sharded dims, storage, kernels and rematerialization."""
    by_text: dict[str, list[str]] = {}
    for alike in strategy.blocks:
        by_text.setdefault(roles_text(alike.strategy), []).extend(alike.names)
    parts = [f"{few([*map(elided, names)])} {text}" for text, names in by_text.items()]
    if strategy.storage is not None:
        parts.append(f"parameters {STORAGE_WORDS[strategy.storage]}")
    parts += [kernels_text(strategy.kernels), REMATERIALIZED * strategy.rematerialized]
    return "; ".join(filter(None, parts))


def tensor_text(kind: str, spec: Spec) -> str:
    """Writes a tensor's type with the axes of its dims: ``f32[8/x,16]``."""
    pairs = zip(shape_of(kind), spec, strict=False)
    parts = ["/".join([str(size), *names]) for size, names in pairs]
    return f"{kind.partition('[')[0]}[{','.join(parts)}]"


def move_text(move: MoveFigure) -> str:
    """Describes a collective: ``all-reduce over x, 64.00 KiB in 2 calls, 0.120 ms``."""
    calls = f" in {move.count} calls" if move.count > 1 else ""
    took = "" if move.time_ms is None else f", {move.time_ms:.3f} ms"
    size = format_bytes(move.total_bytes)
    return f"{move.kind} over {','.join(move.axes)}, {size}{calls}{took}"


def moves_text(moves: Sequence[MoveFigure]) -> str:
    """Describes collectives: ``all-reduce over x, 4.00 MiB in each of 12 iterations``.

    Collectives below a KiB in each iteration are left out; "-" if none is left.
    """
    parts = [
        f"{move.kind} over {','.join(move.axes)}, {format_bytes(size)}"
        + (f" in each of {move.turns} iterations" if move.turns > 1 else "")
        for move in moves
        if (size := move.total_bytes // move.turns) >= 1024
    ]
    return "; ".join(parts) or "-"


def elided(name: str, width: int = 72) -> str:
    """Shortens a name of more than `width` characters in its middle."""
    half = (width - 3) // 2
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"


def sentence(text: str) -> str:
    """Capitalizes the first letter of a text."""
    return text[:1].upper() + text[1:]


# --------------------------------------------------------------- sources of the numbers


def title(plan: Plan) -> str:
    """Names a plan's winner, mesh and devices."""
    kind = plan.environment.get("device_kind", "")
    on = f"a mesh {mesh_text(plan.mesh_axes)} of" if plan.mesh_axes else "one"
    text = f"Plan {plan.winner!r} for {on} {kind or 'device'}"
    described = plan.environment.get("described")
    return f"{text}, as {described} is described" if described else text


def headline(plan: Plan) -> str:
    """Describes a plan in one line: its title, times and memory."""
    return "; ".join([title(plan), *figure_texts(plan)])


def figure_texts(plan: Plan) -> list[str]:
    """Lists times and memory of a plan; memory comes first if there is a budget."""
    memory = [*filter(None, [memory_text(plan)])]
    has_budget = plan.figures and plan.figures.budget_bytes
    return [*memory, *times(plan)] if has_budget else [*times(plan), *memory]


def times(plan: Plan) -> list[str]:
    """Lists the measured and the predicted time of a plan's step, or "time unknown"."""
    parts = []
    if (ms := plan.measured_ms) is not None:
        where = " in an earlier race" if plan.search.get("race_cached") else ""
        parts.append(f"{ms:.3f} ms per step, measured{where}")
    if plan.predicted_ms is not None:
        parts.append(f"{plan.predicted_ms:.3f} ms {predicted_how(plan)}")
    return parts or ["time unknown"]


def memory_text(plan: Plan) -> str:
    """Describes a plan's memory, fit in the budget, and source; "" if unknown."""
    if (size := _needed_bytes(plan)) is None:
        return ""
    how = "compiled" if plan.peak_bytes is not None else predicted_how(plan)
    text, budget = format_bytes(size), plan.figures and plan.figures.budget_bytes
    if budget:
        does = "may fit in" if beyond_text(plan) else "fits in"
        does = does if is_within_budget(plan) else "does not fit: needs"
        text = f"{does} {text} of {format_bytes(budget)}"
    return f"{text} on each device, {how}"


def _needed_bytes(plan: Plan) -> int | None:
    return plan.predicted_bytes if plan.peak_bytes is None else plan.peak_bytes


def is_within_budget(plan: Plan) -> bool:
    """True if a plan fits in the memory that it may use, or either is unknown."""
    size, budget = _needed_bytes(plan), plan.figures and plan.figures.budget_bytes
    return not (size and budget) or size <= budget


def beyond_text(plan: Plan) -> str:
    """Returns the most that a plan may need by its prediction's error; "" if it fits.

    Compiled memory has no error. If the prediction itself does not fit, the text is "".
    """
    budget = (plan.figures and plan.figures.budget_bytes) or 0
    size = 0 if plan.peak_bytes is not None else plan.predicted_bytes or 0
    most = int(size * COMPILED_AT_MOST)
    return format_bytes(most) if size <= budget < most else ""


def known_how(plan: Plan) -> str:
    """Returns "estimated" if a plan's strategies have estimates, else "measured"."""
    estimated = {"strategies_estimated", WAS_DESCRIBED} & plan.search.keys()
    return "estimated" if estimated else "measured"


def predicted_how(plan: Plan) -> str:
    """Returns "estimated", or "predicted" if the prediction is by measured segments."""
    # A plan may be measured on virtual devices, and its prediction estimated.
    is_estimate = "estimated" in (plan.rung, known_how(plan))
    return "estimated" if is_estimate else "predicted"


def summary_line(plan: Plan) -> str:
    """Counts measured, cached and failed strategies; lists seconds by pass, in all."""
    search, seconds, parts = plan.search, "_seconds", []
    if "strategies_measured" in search:
        failed = search.get("strategies_failed")
        parts.append(
            f"{counted(search['strategies_measured'], *STRATEGIES)} measured, "
            f"{search.get('strategies_cached', 0):.0f} from the cache"
            + (f", {failed:.0f} failed" if failed else "")
        )
    race = "compiling" if plan.rung == "estimated" else "race"
    race += " (from the cache)" * bool(search.get("race_cached"))
    passes = {
        race if key == "race_seconds" else key.removesuffix(seconds): round(value, 1)
        for key, value in search.items()
        if key.endswith(seconds) and key not in (ALL_SECONDS, "compile_seconds")
    }
    other = round(search.get(ALL_SECONDS, 0.0), 1) - sum(passes.values())
    passes |= {"other": other} if other >= 0.05 else {}
    if passes:
        parts.append(", ".join(f"{name} {n:.1f} s" for name, n in passes.items()))
    for name, what in ((ALL_SECONDS, "in all"), (VARIANTS_SECONDS, "for all variants")):
        parts += [f"{search[name]:.1f} s {what}"] if name in search else []
    # The seconds are of planning, before `cfp verify`.
    before = "before it was verified: " * (VERIFIED in search and bool(parts))
    return before + "; ".join(parts)


def is_sharded(plan: Plan) -> bool:
    """True if a plan shards a value, or a custom kernel or `shard_map` is sharded."""
    inside = plan.constraints
    specs = [*plan.arg_specs, *plan.output_specs]
    specs += [*inside.values.values(), *inside.uses.values()]
    return _shards_blocks(plan) or any(map(any, specs))


def runs_whole(plan: Plan) -> bool:
    """True if several devices run blocks, and shard no block, kernel or `shard_map`."""
    devices = prod(size for _, size in plan.mesh_axes)
    return devices > 1 and bool(plan.rows) and not _shards_blocks(plan)


def _shards_blocks(plan: Plan) -> bool:
    has_kernels = plan.figures is not None and bool(plan.figures.kernels)
    by_hand = plan.search.get("devices_by_hand", 1.0) > 1.0
    return has_kernels or by_hand or any(row.strategy for row in plan.rows)


def other_batches(plan: Plan, but: Collection[str] = ()) -> tuple[str, str, str] | None:
    """Returns texts: (devices, rows that they do not divide, batches that they do).

    None if they divide the rows, or the batch is unknown. Axes `but` do not count.
    """
    devices = prod(size for axis, size in plan.mesh_axes if axis not in but)
    samples = round(plan.search.get("batch_samples") or 0)
    if not (rows := round(plan.search.get("batch_rows", samples))) % devices:
        return None
    parts, down = max(1, samples // rows), rows // devices * devices
    sizes = [str(parts * n) for n in (down, down + devices) if n]
    whole = f"microbatches of {rows}" if parts > 1 else f"the batch of {rows}"
    return str(devices), whole, f"a batch of {' or '.join(sizes)}"


def unsearched_text(plan: Plan) -> str:
    """Explains why a plan has no strategies to compare; "" if it has some."""
    if not plan.rows:
        return "the step has no block to shard"
    if plan.figures and any(kind.options for kind in plan.figures.kinds):
        return ""
    if VERIFIED in plan.search:
        return "cfp verify chose the plan, and times whole steps only"
    return "the preset was given by name, and no strategy was measured"


def budget_text(plan: Plan) -> str:
    """Describes a budget with a reserve, or of a device of known memory; else ""."""
    budget = plan.figures and plan.figures.budget_bytes
    kind = kind_of(plan.environment.get("device_kind", ""))
    whole, reserve = kind.memory_bytes if kind else 0, plan.search.get(RESERVE_BYTES, 0)
    if is_described := "described" in plan.environment:
        whole = int(plan.search.get(DEVICE_BYTES, whole))
    if budget is None or not (reserve or whole):
        return ""
    how = ", more than" if budget > whole else " of"
    of = f"{how} the {format_bytes(whole)} of" if whole else " of"
    text = f"a plan may use {format_bytes(budget)}{of} each device"
    if reserve:
        asked, kept = map(format_bytes, (budget + reserve, reserve))
        return f"{text}: the budget of {asked} less {kept} that the allocator may add"
    is_usual = is_described and budget == int(TAKEN_SHARE * whole)
    share = ", JAX's default share (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    return text + share * is_usual


# Types in which a platform multiplies float32, for the rates in its device file.
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
        model_tflop: FLOPs of one step / 1e12, without rematerialized FLOPs.
        uncounted_loops: number of loops of unknown length, counted as one iteration.
        step_ms: the step time for the rates; None if unknown, and so are the rates.
        known_how: source of `step_ms`: "measured", "predicted" or "estimated".
        tflop_per_s: rate of each device; None with uncounted loops too.
        runs_whole: True if all devices compute the same.
        rate_share: share of the devices' nominal matrix rates for the products' types;
            None without a rate, for unknown devices, and for full float32 products.
        rate_dtypes: types of these rates, such as "float32 (TF32)".
        tokens_per_s: None if the batch has no tokens.
        samples_per_s: None if the batch has tokens or is unknown.
    """

    model_tflop: float
    uncounted_loops: int
    step_ms: float | None
    known_how: str
    tflop_per_s: float | None
    runs_whole: bool
    rate_share: float | None
    rate_dtypes: str
    tokens_per_s: float | None
    samples_per_s: float | None

    def __str__(self) -> str:
        flop = f"{format_flops(1e12 * self.model_tflop)} of the model"
        parts = [f"{flop} a step"]
        if self.uncounted_loops:
            loops = counted(self.uncounted_loops, "loop", "loops")
            parts = [f"{flop} with one iteration of {loops} of unknown length"]
        if self.tflop_per_s is not None:
            same = " of the devices, which all compute the same" * self.runs_whole
            where = f"on each{same or ' device'}"
            rate = f"{format_flops(1e12 * self.tflop_per_s)}/s {where}"
            if self.rate_share is not None:
                small = self.rate_share <= 5e-4
                percent = "under 0.1%" if small else f"{self.rate_share:.1%}"
                rate += f" ({percent} of its rate in {self.rate_dtypes})"
            parts.append(rate)
        rates = (("tokens", self.tokens_per_s), ("samples", self.samples_per_s))
        parts += [f"{n:,.0f} {name}/s" for name, n in rates if n is not None]
        has_unmeasured = len(parts) > 1 and self.known_how != "measured"
        return "; ".join(parts) + f", {self.known_how}" * has_unmeasured


def throughput(plan: Plan, step_ms: float | None = None) -> Throughput | None:
    """Computes a plan's throughput; None without products.

    Args:
        step_ms: measured time of a step; by default the plan's measured or predicted.
    """
    how = "measured"
    if step_ms is None and (step_ms := plan.measured_ms) is None:
        step_ms, how = plan.predicted_ms, predicted_how(plan)
    search, flops = plan.search, plan.search.get("model_flops", 0.0)
    if not flops:
        return None
    steps_per_s, is_whole = 1e3 / step_ms if step_ms else 0.0, runs_whole(plan)
    devices = 1 if is_whole else prod(size for _, size in plan.mesh_axes)
    tokens, samples = (search.get(f"batch_{n}") or 0.0 for n in ("tokens", "samples"))
    loops = round(search.get("uncounted_loops", 0.0))
    rate = (not loops) * flops * steps_per_s / devices / 1e12
    share, dtypes = _share_of_rate(plan, rate) if rate else (None, "")
    return Throughput(
        model_tflop=flops / 1e12,
        uncounted_loops=loops,
        step_ms=step_ms,
        known_how=how,
        tflop_per_s=rate or None,
        runs_whole=is_whole,
        rate_share=share,
        rate_dtypes=dtypes,
        tokens_per_s=tokens * steps_per_s or None,
        samples_per_s=(not tokens) * samples * steps_per_s or None,
    )


def _share_of_rate(plan: Plan, tflop_per_s: float) -> tuple[float | None, str]:
    """Returns the share of a device's nominal rates, and their types, or (None, "")."""
    environment, narrow = plan.environment, plan.search.get("narrow_share", 0.0)
    kind = kind_of(environment.get("device_kind", ""))
    shares = ("bfloat16", narrow), ("float32", 1.0 - narrow)
    used = {dtype: part for dtype, part in shares if part > 0}
    # By JAX's default precision; a product's own precision is unknown here.
    is_tf32 = environment.get("matmul_precision", "None") in _TF32
    is_tf32 &= "NVIDIA_TF32_OVERRIDE=0" not in environment.get("cuda", "")
    if kind is None or ("float32" in used and not is_tf32):
        return None, ""
    rates = {dtype: kind.specified(f"{dtype}_tflop_per_s") for dtype in used}
    share = sum(part * tflop_per_s / rates[dtype] for dtype, part in used.items())
    return share, " and ".join(_NAME[kind.platform].get(one, one) for one in used)
