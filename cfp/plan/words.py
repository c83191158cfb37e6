"""Sentences and short texts about a plan that tables, lines and pages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cfp.plan.figures import MoveFigure, OptionFigures, TensorFigure
from cfp.units import format_bytes

if TYPE_CHECKING:
    from cfp.plan.plan import Plan

_NAME_WIDTH = 72
_ALL = "planning_seconds"
_SAME_MS = 0.0005  # Less does not show.


def known_how(plan: Plan) -> str:
    """Returns "estimated" or "measured": the source of strategies' times."""
    return "estimated" if "strategies_estimated" in plan.search else "measured"


def basis_text(plan: Plan) -> str:
    """Returns the basis of a plan's predicted time: ``by estimates``."""
    if "adapted" in plan.search:
        return "by the time of the plan that it was carried over from"
    how = {"estimated": "by estimates", "measured": "by measured segments"}
    # A plan that raced on virtual devices is measured, its prediction is not.
    rung = known_how(plan) if plan.rung == "measured" else plan.rung
    return how.get(rung, f"on {rung}")


def scale_text(search: Mapping[str, float], measured_ms: float | None) -> str:
    """Describes the part of the step that was timed, if not all of it.

    Args:
        search: what a plan says of how it was found.
        measured_ms: the plan's own time, or None.
    """
    if "segments_raced" not in search:
        return ""
    raced, total = search["segments_raced"], search["segments"]
    whole = "-" if measured_ms is None else f"{measured_ms:.1f} ms"
    return (
        f"Timed with {raced:.0f} of {total:.0f} segments (the winner), since others "
        f"repeat these, and scaled to all. The winner, timed whole: {whole}."
    )


def summary_line(plan: Plan) -> str:
    """Summarizes measurements and the time of each pass; "" if nothing was measured."""
    search = plan.search
    parts = []
    if "strategies_measured" in search:
        counts = (
            f"{search['strategies_measured']:.0f} strategies measured, "
            f"{search.get('strategies_cached', 0):.0f} from the cache"
        )
        if search.get("strategies_failed"):
            counts += f", {search['strategies_failed']:.0f} failed"
        parts.append(counts)
    seconds = [
        f"{name.removesuffix('_seconds')} {value:.1f} s"
        for name, value in search.items()
        if name.endswith("_seconds") and name != _ALL
    ]
    if seconds:
        cached = ", from the cache" if search.get("race_cached") else ""
        parts.append(", ".join(seconds) + cached)
    if _ALL in search:
        parts.append(f"{search[_ALL]:.1f} s in all, with tracing and compiling")
    return "; ".join(parts)


# --------------------------------------------------------------------------- figures


def tensor_text(tensor: TensorFigure) -> str:
    """A tensor with the axes behind the dims that they shard: ``f32[8/x,16]``."""
    head, _, dims = tensor.type.rstrip("]").partition("[")
    sizes = dims.split(",") if dims else []
    parts = [
        size + "".join(f"/{name}" for name in names)
        for size, names in zip(sizes, tensor.spec, strict=False)
    ]
    return f"{head}[{','.join(parts)}]"


def move_text(move: MoveFigure) -> str:
    """A collective in short: ``all-reduce over x, 64 KiB in 2 calls, 0.12 ms``."""
    calls = f" in {move.count} calls" if move.count > 1 else ""
    took = "" if move.time_ms is None else f", {move.time_ms:.3f} ms"
    size = format_bytes(move.total_bytes)
    return f"{move.kind} over {','.join(move.axes)}, {size}{calls}{took}"


def runner_up(
    options: Sequence[OptionFigures], taken: OptionFigures, budget_bytes: int | None
) -> OptionFigures:
    """The best option beside the one taken: one that fits, if any does."""
    others = [option for option in options if option is not taken]
    return min(
        others,
        key=lambda o: (
            bool(too_large_text(o, budget_bytes)),
            o.step_ms,
            o.memory_bytes,
        ),
    )


def too_large_text(option: OptionFigures, budget_bytes: int | None) -> str:
    """Returns the remark on an option that needs more memory than the budget."""
    over = budget_bytes is not None and option.memory_bytes > budget_bytes
    return ", which does not fit" if over else ""


def has_raced(plan: Plan) -> bool:
    """True if any candidate of a plan was run."""
    return any(row.samples_ms for row in plan.race)


def rates_text(plan: Plan) -> str:
    """Returns the source of the rates by which a plan's collectives are timed."""
    if described := plan.environment.get("described"):
        return f"of {described}, as it is described"
    if known_how(plan) == "estimated":
        return "of virtual devices, which say nothing of GPUs"
    return "that were measured on these devices"


def surprise_text(
    taken: OptionFigures, runner: OptionFigures, raced: bool = True
) -> str:
    """Explains why an option was taken though another is predicted to be faster."""
    if taken.step_ms - runner.step_ms <= _SAME_MS:
        return ""
    if not raced:
        return "it is part of what was chosen, though another is predicted to be faster"
    return "it won the race, though another strategy was predicted to be faster"


def elided(name: str, width: int = _NAME_WIDTH) -> str:
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
