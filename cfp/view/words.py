"""Short texts and sentences about a plan, which all renderers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.devices.device_kind import kind_of
from cfp.plan.figures import VARIANTS_SECONDS, OptionFigures
from cfp.plan.parts import MoveFigure, PlanSegment, TensorFigure, shape_of
from cfp.plan.plan import Plan
from cfp.printable import counted, mesh_text
from cfp.units import format_bytes, format_flops

REMATERIALIZED = "rematerialized"
STORAGE_WORDS = {
    Storage.USED: "as used",
    Storage.OPTIMIZER: "as used, update sharded",
    Storage.SHARDED: "sharded",
    Storage.LARGEST: "sharded along their largest dims",
}
_NONE_OF_ITS_OWN = "none of its own"
STRATEGIES = "strategy", "strategies"  # for `cfp.printable.counted`
SAME_MS = 0.0005  # Less does not show.
NAME_WIDTH = 72
MOST_NAMES = 4
ALL_SECONDS = "planning_seconds"
NONE_CAN = "no kernel that may be used can compute it"
IN_ALL, COMPILE = "in all", "compile"
# Entries of `Plan.search` after `cfp verify`, which has measured the plan: it was made
# for described devices; it was made for devices of another kind. The environment is
# that of the devices on which it was verified.
VERIFIED, WAS_DESCRIBED = "verified", "was_described"
OTHER_DEVICES = "other_devices"
# Of a budget that was asked for, what is held back for the allocator.
RESERVE_BYTES = "reserve_bytes"


def storage_text(segment: PlanSegment, *, short: bool = False) -> str:
    """Describes how a segment's parameters are stored, and what else it does."""
    stored = segment.shown_storage
    if short:
        words = str(stored or "-")
    else:
        words = STORAGE_WORDS[stored] if stored else _NONE_OF_ITS_OWN
        words += ", those of another segment" if segment.shared else ""
    kernels = [kernels_text(segment.kernels)] if segment.kernels else []
    return ", ".join([words, *kernels, *[REMATERIALIZED] * segment.rematerialized])


def parameters_text(stored: str) -> str:
    """Returns "parameters" and how they are stored; or that there are none."""
    if stored.startswith(_NONE_OF_ITS_OWN):
        return f"no parameters{stored.removeprefix('none')}"
    return f"parameters {stored}"


def kernels_text(kernels: SegmentKernels) -> str:
    """Describes the kernel of a segment's attentions; "" if there is none."""
    attention = " ".join(filter(None, (kernels.attention, kernels.spread)))
    return f"{attention} attention" if attention else ""


def tensor_text(tensor: TensorFigure) -> str:
    """A tensor with the axes behind the dims that they shard: ``f32[8/x,16]``."""
    parts = [
        "/".join([str(size), *names])
        for size, names in zip(shape_of(tensor.type), tensor.spec, strict=False)
    ]
    return f"{tensor.type.partition('[')[0]}[{','.join(parts)}]"


def move_text(move: MoveFigure) -> str:
    """A collective in short: ``all-reduce over x, 64 KiB in 2 calls, 0.12 ms``."""
    calls = f" in {move.count} calls" if move.count > 1 else ""
    took = "" if move.time_ms is None else f", {move.time_ms:.3f} ms"
    size = format_bytes(move.total_bytes)
    return f"{move.kind} over {','.join(move.axes)}, {size}{calls}{took}"


def moves_text(moves: Sequence[MoveFigure]) -> str:
    """``all-reduce over x, 4 MiB``; in a loop ``in each of 12 iterations`` behind it.

    Collectives below a kilobyte are left out.
    """
    parts = [
        f"{move.kind} over {','.join(move.axes)}, {format_bytes(size)}"
        + (f" in each of {move.turns} iterations" if move.turns > 1 else "")
        for move in moves
        if (size := move.total_bytes // move.turns) >= 1024
    ]
    return "; ".join(parts) or "-"


def elided(name: str, width: int = NAME_WIDTH) -> str:
    """A name, without its middle if it is very long: whole components, if they fit."""
    if len(name) <= width:
        return name
    half = (width - 3) // 2
    start, end = name[:half], name[-half:]
    # Cut at slashes, where most of what there is room for stays.
    if (cut := start.rfind("/") + 1) > half // 2:
        start = start[:cut]
    if 0 <= (cut := end.find("/")) < half // 2:
        end = end[cut:]
    return f"{start}...{end}"


def few(
    texts: Sequence[str],
    between: str = ", ",
    most: int = MOST_NAMES,
    width: int | None = None,
) -> str:
    """The first of some texts, each once, and how many more there are.

    Args:
        width: of each, which is elided to it.
    """
    texts = [*dict.fromkeys(texts)]
    shown = texts[:most]
    if width is not None:  # Some may look alike then: those count as more.
        shown = [*dict.fromkeys(elided(text, width) for text in shown)]
    more = len(texts) - len(shown)
    return between.join(shown) + (f" and {more} more" if more else "")


def common_prefix(names: Sequence[str]) -> str:
    """The module that all blocks stand in, with its slash, or nothing."""
    first = {name.partition("/")[0] for name in names}
    if len(first) == 1 and all("/" in name for name in names):
        return f"{first.pop()}/"
    return ""


# --------------------------------------------------------------- sources of the numbers

_PREDICTED = {"estimated": "estimated", "measured": "predicted"}


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    return "; ".join([title(plan), *figure_texts(plan)])


def title(plan: Plan) -> str:
    """Names a plan, its mesh and its devices."""
    kind = plan.environment.get("device_kind", "")
    on = f"a mesh {mesh_text(plan.mesh_axes)} of" if plan.mesh_axes else "one"
    text = f"Plan {plan.winner!r} for {on} {kind or 'device'}"
    described = plan.environment.get("described")
    return f"{text}, as {described} is described" if described else text


def figure_texts(plan: Plan) -> list[str]:
    """Lists the time and the memory of a plan, with their sources."""
    parts = []
    if (measured := measured_figure(plan)) is not None:
        text, how = measured
        parts.append(f"{text} per step, {how}")
        figures = plan.figures
        for one in figures.variants if figures and figures.variants_raced else ():
            if one.taken and one.step_ms is not None:
                parts.append(f"{one.step_ms:.3f} ms in the race of the variants")
    if plan.predicted_ms is not None:
        parts.append(f"{plan.predicted_ms:.3f} ms {predicted_how(plan)}")
    if (memory := memory_figure(plan)) is not None:
        size, how = memory
        parts.append(f"{format_bytes(size)} on each device" + (how and f", {how}"))
    return parts


def measured_figure(plan: Plan) -> tuple[str, str] | None:
    """A plan's measured step time and its source; None if there is none."""
    if (own_ms := plan.measured_ms) is None:
        return None
    cached, rough = bool(plan.search.get("race_cached")), is_rough(plan)
    where = " of ".join(["one turn"] * rough + ["an earlier race"] * cached)
    form = (".3g" if own_ms < 999.5 else ".0f") if rough else ".3f"
    if not where:
        return f"{own_ms:{form}} ms", "measured"
    count = sum(len(row.samples_ms) for row in plan.race if row.name == plan.winner)
    samples = f" ({counted(count, 'sample', 'samples')})" if count else ""
    return f"{own_ms:{form}} ms", f"measured in {where}{samples}"


def is_rough(plan: Plan) -> bool:
    """True if a plan's time is of one turn on virtual devices, whose times vary."""
    others = {WAS_DESCRIBED, VERIFIED} & plan.search.keys()
    return known_how(plan) == "estimated" and plan.rung == "measured" and not others


def predicted_how(plan: Plan) -> str:
    """Returns the source of a plan's predicted time."""
    return _PREDICTED[plan.rung]


def deviation_text(plan: Plan) -> str:
    """Returns a prediction's deviation; "" if unknown, or of virtual or other ones."""
    is_virtual = known_how(plan) == "estimated" and WAS_DESCRIBED not in plan.search
    is_compared = not is_virtual and OTHER_DEVICES not in plan.search
    if not is_compared or not plan.measured_ms or plan.predicted_ms is None:
        return ""
    return f"{plan.predicted_ms / plan.measured_ms - 1:+.1%} of the measured"


def memory_figure(plan: Plan) -> tuple[int, str] | None:
    """Returns bytes on each device and their source: "" if the plan's program has them.

    None if they are not known.
    """
    if plan.peak_bytes is not None:
        return plan.peak_bytes, ""
    if plan.predicted_bytes is None:
        return None
    return plan.predicted_bytes, "predicted" if plan.rung == "measured" else "estimated"


def known_how(plan: Plan) -> str:
    """Returns "estimated" or "measured": the source of strategies' times."""
    estimated = {"strategies_estimated", WAS_DESCRIBED} & plan.search.keys()
    return "estimated" if estimated else "measured"


def basis_text(plan: Plan) -> str:
    """Returns the basis of a plan's predicted time: ``by estimates``."""
    how = {"estimated": "by estimates", "measured": "by measured segments"}
    # A plan that raced on virtual devices is measured, its prediction is not.
    rung = known_how(plan) if plan.rung == "measured" else plan.rung
    return how[rung]


def rates_text(plan: Plan) -> str:
    """Returns the source of the rates that time a plan's collectives; "" if none do."""
    if all(move.time_ms is None for row in plan.rows for move in row.moves):
        return ""
    if described := plan.environment.get("described"):
        return f"of {described}, as it is described"
    if WAS_DESCRIBED in plan.search:
        return "of described devices"
    if known_how(plan) == "estimated":
        return "of virtual devices, which say nothing of GPUs"
    return "that were measured on these devices"


def unscattered_text(plan: Plan) -> str:
    """Says that the compiler made no reduce-scatters of those of a plan; "" if not."""
    if not plan.search.get("unscattered"):
        return ""
    return (
        "reduce-scatters: the compiled program has all-reduces in their place, of "
        "which each device keeps its part"
    )


def counts_text(search: Mapping[str, float]) -> str:
    """Counts the strategies that were measured; "" if none were."""
    if "strategies_measured" not in search:
        return ""
    failed = search.get("strategies_failed")
    return (
        f"{counted(search['strategies_measured'], *STRATEGIES)} measured, "
        f"{search.get('strategies_cached', 0):.0f} from the cache"
        + (f", {failed:.0f} failed" if failed else "")
    )


def summary_line(plan: Plan) -> str:
    """Summarizes measurements and the time of each pass; "" if nothing was measured."""
    search = plan.search
    seconds = ", ".join(
        f"{name} {value:.1f} s{note}"
        for name, value, note in pass_seconds(plan)
        if name not in (IN_ALL, COMPILE)
    )
    parts = [counts_text(search), seconds]
    if ALL_SECONDS in search:
        what = "tracing and compiling" if _has_compiled(plan) else "tracing"
        which = " for this variant" if VARIANTS_SECONDS in search else ""
        parts.append(f"{search[ALL_SECONDS]:.1f} s {IN_ALL}{which}, with {what}")
    if VARIANTS_SECONDS in search:
        every = search[VARIANTS_SECONDS]
        rest = max(0.0, every - search.get(ALL_SECONDS, every))
        more = f" ({rest:.1f} s more, to plan the others and to compare them)"
        parts.append(f"{every:.1f} s for all variants{more if rest else ''}")
    if (took := search.get(f"{COMPILE}_seconds")) is not None:
        parts.append(f"the plan's program compiled in {took:.1f} s, now or earlier")
    earlier = "before it was verified: " * ({VERIFIED, ALL_SECONDS} <= search.keys())
    return earlier + "; ".join(filter(None, parts))


def _has_compiled(plan: Plan) -> bool:
    """True if a program was compiled for a plan, whole or in part."""
    measured = "strategies_measured" in plan.search
    return measured or plan.peak_bytes is not None or has_raced(plan)


def pass_seconds(plan: Plan) -> Iterator[tuple[str, float, str]]:
    """Lists the seconds of each pass and in all, with a remark on them or "".

    Those of compiling the plan's program are a part of the race's, or of an earlier's.
    """
    for key, value in plan.search.items():
        if key.endswith("_seconds"):
            is_cached = key == "race_seconds" and plan.search.get("race_cached")
            name = IN_ALL if key == ALL_SECONDS else key.removesuffix("_seconds")
            note = ", from the cache" if is_cached else ""
            yield name, value, ", in the race or earlier" if name == COMPILE else note


def has_raced(plan: Plan) -> bool:
    """True if any candidate of a plan was run."""
    return any(row.samples_ms for row in plan.race)


def won_how(plan: Plan) -> str:
    """Says why what a plan chose was taken: by a race of several programs, or not."""
    if not has_raced(plan):
        return "it is part of what was chosen"
    ran = [row for row in plan.race if row.samples_ms]
    if len({row.samples_ms for row in ran if not row.note}) > 1:
        return "it won the race"
    and_fit = " and fit" * any(row.note for row in ran)
    return f"it is part of the only program that was timed{and_fit}"


def is_sharded(plan: Plan) -> bool:
    """True if an argument, a result, a block, a kernel or a value is sharded.

    By the plan, or in a region that the user sharded by hand.
    """
    inside = plan.constraints
    specs = [*plan.arg_specs, *plan.output_specs]
    specs += [*inside.values.values(), *inside.uses.values()]
    return _shards_blocks(plan) or any(map(any, specs))


def runs_whole(plan: Plan) -> bool:
    """True if every device of several runs all blocks of a plan in full.

    And there is no region besides that the user sharded by hand.
    """
    devices = prod(size for _, size in plan.mesh_axes)
    return devices > 1 and bool(plan.rows) and not _shards_blocks(plan)


def _shards_blocks(plan: Plan) -> bool:
    has_kernels = plan.figures is not None and bool(plan.figures.kernels)
    by_hand = plan.search.get("devices_by_hand", 1.0) > 1.0
    return has_kernels or by_hand or any(row.strategy for row in plan.rows)


# --------------------------------------------------------------------------- strategies


def unsearched_text(plan: Plan) -> str:
    """Explains why no strategies of a plan are known; "" if some are."""
    if not plan.rows:
        return "the step has no contraction to shard"
    if plan.figures and any(kind.options for kind in plan.figures.kinds):
        return ""
    if VERIFIED in plan.search:
        return "it is the fastest that cfp verify timed, which times whole steps alone"
    return "the strategy was asked for by name, and none was measured"


def runner_up(
    options: Sequence[OptionFigures], taken: OptionFigures, budget_bytes: int | None
) -> OptionFigures | None:
    """The best option beside the one taken, if any: one that fits, if any does."""
    return min(
        (option for option in options if option is not taken),
        key=lambda o: (
            bool(too_large_text(o, budget_bytes)),
            o.step_ms,
            o.memory_bytes,
        ),
        default=None,
    )


def too_large_text(option: OptionFigures, budget_bytes: int | None) -> str:
    """Returns the remark on an option that needs more memory than the budget."""
    over = budget_bytes is not None and option.memory_bytes > budget_bytes
    return ", which does not fit" if over else ""


def surprise_text(plan: Plan, taken: OptionFigures, runner: OptionFigures) -> str:
    """Explains why an option was taken though another is predicted to be faster."""
    if taken.step_ms - runner.step_ms <= SAME_MS:
        return ""
    return f"{won_how(plan)}, though another strategy was predicted to be faster"


# --------------------------------------------------------------------------- throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a step's computation.

    Attributes:
        model_tflop: of one step, as the program has them; rematerialized ones of the
            step or the plan do not count.
        step_ms: the time that the rates are of: measured if there is one.
        uncounted_loops: how many loops these are of one iteration of, since the
            program does not say how many it has.
        tflop_per_s: of each device, by its share of the model, or all of it; None
            where loops are not counted in full.
        runs_whole: whether all devices compute the same.
        rate_share: of the devices' nominal matrix rates, by the types of the products;
            None for kinds that are not shipped, and for products of float32 that are
            not computed in TF32, and where there is no rate.
        rate_dtypes: the types that these rates are of: "bfloat16", "float32 (TF32)" or
            both; "" where there is no share.
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
        share = ""
        if self.rate_share is not None:
            small = self.rate_share <= 5e-4
            percent = "under 0.1%" if small else f"{self.rate_share:.1%}"
            share = f" ({percent} of its rate in {self.rate_dtypes})"
        where = "on each of the devices, which all compute the same"
        where = where if self.runs_whole else "on each device"
        flop = f"{format_flops(1e12 * self.model_tflop)} of the model"
        if self.tflop_per_s is None:
            loops = counted(self.uncounted_loops, "loop", "loops")
            parts = [
                f"{flop} with one iteration of {loops} whose length the program does "
                "not say"
            ]
        else:
            rate = f"{format_flops(1e12 * self.tflop_per_s)}/s {where}{share}"
            parts = [f"{flop} a step", rate]
        rates = (("tokens", self.tokens_per_s), ("samples", self.samples_per_s))
        parts += [f"{n:,.0f} {name}/s" for name, n in rates if n is not None]
        return "; ".join(parts)


# Rates of a kind of device that are not of what their types say; see its file.
_RATES = {"float32": "float32 (TF32)"}
# Precisions of JAX's with which GPUs compute products of float32 in TF32: its names for
# the lowest, and for the one between.
_LOWEST = frozenset({"None", "default", "fastest", "bfloat16"})
_TF32 = _LOWEST | {"high", "bfloat16_3x", "tensorfloat32", "TF32_TF32_F32"}


def _is_tf32(environment: Mapping[str, str]) -> bool:
    """True if products of float32 are in TF32 with what a plan was made with.

    That is JAX's default precision: what a product asks for itself is not seen.
    """
    is_off = "NVIDIA_TF32_OVERRIDE=0" in environment.get("cuda", "")
    return environment.get("matmul_precision", "None") in _TF32 and not is_off


# Guess: some hundred kernels, each launched in some microseconds.
SHORT_STEP_MS = 1.0


def is_mostly_launches(plan: Plan) -> bool:
    """True if a step is estimated to be so short that launches decide its time."""
    if plan.rung != "estimated" or not plan.environment.get("described"):
        return False
    return plan.predicted_ms is not None and plan.predicted_ms < SHORT_STEP_MS


def throughput(plan: Plan, step_ms: float | None = None) -> Throughput | None:
    """A plan's throughput; None if no time of it is known, or nothing to compute.

    Args:
        step_ms: the time of a step; the measured one, or else the predicted one.
    """
    if step_ms is None:
        step_ms = plan.predicted_ms if plan.measured_ms is None else plan.measured_ms
    search, flops = plan.search, plan.search.get("model_flops", 0.0)
    if not step_ms or not flops:
        return None
    seconds = step_ms / 1e3
    is_whole = runs_whole(plan)
    devices = 1 if is_whole else prod(size for _, size in plan.mesh_axes)
    rate = flops / seconds / devices / 1e12
    tokens = search.get("batch_tokens")
    samples = search.get("batch_samples") if tokens is None else None
    narrow = search.get("narrow_share", 0.0)
    shares = {"bfloat16": narrow, "float32": 1.0 - narrow}
    used = {dtype: part for dtype, part in shares.items() if part > 0}
    share, kind = None, kind_of(plan.environment.get("device_kind", ""))
    loops = round(search.get("uncounted_loops", 0.0))
    is_known = "float32" not in used or _is_tf32(plan.environment)
    if kind is not None and is_known and not loops:
        share = rate * sum(
            part / kind.specified(f"{dtype}_tflop_per_s")
            for dtype, part in used.items()
        )
    return Throughput(
        model_tflop=flops / 1e12,
        uncounted_loops=loops,
        step_ms=step_ms,
        tflop_per_s=None if loops else rate,
        runs_whole=is_whole,
        rate_share=share,
        rate_dtypes=""
        if share is None
        else " and ".join(_RATES.get(dtype, dtype) for dtype in used),
        tokens_per_s=None if tokens is None else tokens / seconds,
        samples_per_s=None if samples is None else samples / seconds,
    )
