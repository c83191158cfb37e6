"""A plan in a few lines, and what of its blocks and its race stands in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from math import prod
from textwrap import TextWrapper
from typing import TYPE_CHECKING

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.devices.device_kind import memory_of
from cfp.plan.figures import VariantFigures, WorthFigures
from cfp.plan.parts import INDIVISIBLE, NOT_CHOSEN, AxisRole, PlanRow, PlanSegment, Role
from cfp.plan.throughput import throughput, throughput_text
from cfp.printable import (
    columns,
    distinct_ends,
    merged_alike,
    merged_name,
    span_text,
)
from cfp.race.programs import RaceRow
from cfp.settings import Dimension
from cfp.units import format_bytes

if TYPE_CHECKING:
    from cfp.plan.plan import Plan

REMATERIALIZED = "rematerialized"
STORAGE_WORDS = {
    Storage.USED: "as used",
    Storage.OPTIMIZER: "as used, optimizer state sharded",
    Storage.SHARDED: "sharded",
    Storage.LARGEST: "sharded along their largest dims",
}

# Of a GPU's memory what JAX takes by default, and what the driver leaves of that.
_USUAL_SHARE = 0.70, 0.76
# What a short text has room for.
_MOST_REPEATS = 4
_MOST_NAMES = 4


def storage_text(segment: PlanSegment) -> str:
    """Says how a segment's parameters are stored, and what else it does."""
    storage = segment.storage
    return _with_more(segment, "-" if storage is None else STORAGE_WORDS[storage])


def storage_name(segment: PlanSegment) -> str:
    """Says the same as `storage_text` with the short name of the storage."""
    return _with_more(segment, str(segment.storage or "-"))


def _with_more(segment: PlanSegment, stored: str) -> str:
    kernels = [kernels_text(segment.kernels)] if segment.kernels else []
    again = [REMATERIALIZED] if segment.rematerialized else []
    return ", ".join([stored, *kernels, *again])


def kernels_text(kernels: SegmentKernels) -> str:
    """Says what computes the attentions and cross-entropies of a segment."""
    attention = " ".join(filter(None, (kernels.attention, kernels.spread)))
    count = kernels.vocabulary_parts
    words = [f"{attention} attention"] if attention else []
    words += [f"cross-entropy in {count} parts of the vocabulary"] if count else []
    return " and ".join(words)


class Detail(Enum):
    """Detail in which a text says what axes shard."""

    ROLES = "x: rows"
    DIMS = "x: rows (dim 0)"
    SIZES = "x: rows (dim 0 of 8)"


def roles_text(roles: Sequence[AxisRole], detail: Detail = Detail.SIZES) -> str:
    """Describes the roles of axes in a block: ``x: rows (dim 0 of 8)``."""
    parts = []
    for one in roles:
        is_contracted = one.role is Role.CONTRACTED
        where = [] if is_contracted else [f"dim {one.dim}"]
        where += [f"of {one.size}"] if detail is Detail.SIZES else []
        text = f"{one.axis}: {one.role}"
        text += f" ({' '.join(where)})" if where and detail is not Detail.ROLES else ""
        if one.scattered_dim is not None:
            text += f", scattered to dim {one.scattered_dim}"
        parts.append(text)
    return "; ".join(parts) or "replicated"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Segments that a table shows once.

    Attributes:
        first: index of the first segment.
        period: how many segments make up one repeat.
        count: how often they stand there, back to back.
        rows: the blocks of each repeat, repeat by repeat.
    """

    first: int
    period: int
    count: int
    rows: tuple[tuple[PlanRow, ...], ...]


def collapse(plan: Plan) -> list[Repeat]:
    """Finds segments that are alike and stand back to back.

    Alike are segments of one kind whose blocks are sharded and stored alike.
    """
    found = groupby(plan.rows, key=lambda row: row.segment)
    segments = [tuple(rows) for _, rows in found]
    marks = [
        (
            plan.segments[rows[0].segment].alike,
            *((row.op, row.strategy) for row in rows),
        )
        for rows in segments
    ]
    repeats = []
    at = 0
    while at < len(segments):
        period, count = _longest_repeat(marks, at)
        parts = tuple(
            tuple(row for s in segments[i : i + period] for row in s)
            for i in range(at, at + period * count, period)
        )
        repeats.append(Repeat(segments[at][0].segment, period, count, parts))
        at += period * count
    return repeats


def _longest_repeat(marks: Sequence[tuple], at: int) -> tuple[int, int]:
    """(period, count) of the repeat that covers most from here on; (1, 1) if none."""
    best = (1, 1)
    for period in range(1, (len(marks) - at) // 2 + 1):
        count = 1
        unit = marks[at : at + period]
        while marks[at + period * count : at + period * (count + 1)] == unit:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def common_prefix(names: Sequence[str]) -> str:
    """The module that all blocks stand in, with its slash, or nothing."""
    first = {name.partition("/")[0] for name in names}
    if len(first) == 1 and all("/" in name for name in names):
        return f"{first.pop()}/"
    return ""


def best_variants(plan: Plan) -> list[RaceRow]:
    """Returns each candidate's fastest variant, the fastest candidate first.

    A variant's name is the candidate's, a comma, and in what it differs. Candidates
    that came out as one program stand there once, under the winner's name if they won.
    """
    programs: dict[object, RaceRow] = {}
    for row in _best_of_each(plan):
        programs.setdefault(row.samples_ms or row.name, row)
    return sorted(programs.values(), key=_place)


def other_names(plan: Plan, row: RaceRow) -> list[str]:
    """Under which names the program of a row raced, too."""
    return [
        other.name
        for other in sorted(_best_of_each(plan), key=_place)
        if other.name != row.name
        and row.samples_ms
        and other.samples_ms == row.samples_ms
    ]


def slower_variants(plan: Plan) -> int:
    """Counts variants that were slower than another of the same candidate."""
    return len(plan.race) - len(_best_of_each(plan))


def _best_of_each(plan: Plan) -> list[RaceRow]:
    """Returns each candidate's fastest variant, the winner first."""
    ranked = sorted(
        plan.race,
        key=lambda row: (row.name != plan.winner, *_place(row)),
    )
    found: dict[str, RaceRow] = {}
    for row in ranked:
        found.setdefault(row.name.partition(", ")[0], row)
    return [*found.values()]


def won_a_tie(plan: Plan) -> bool:
    """True if the winner's figure is not the least: the simplest of a tie."""
    rows = [row for row in best_variants(plan) if not row.note]
    times = {r.name: r.time_ms for r in rows if r.time_ms is not None}
    figures = times or {r.name: r.predicted_ms for r in rows}
    own = figures.get(plan.winner)
    return own is not None and any(ms < own for ms in figures.values() if ms)


def _place(row: RaceRow) -> tuple[bool, float, float]:
    """Sort key: rows that could not win come last, though they may have a time."""
    times = (row.time_ms, row.predicted_ms)
    first, second = (float("inf") if ms is None else ms for ms in times)
    return bool(row.note), first, second


def is_sharded(plan: Plan) -> bool:
    """True if the plan shards an argument, a result, a block, a kernel or a value."""
    inside = plan.constraints
    if plan.figures is not None and plan.figures.kernels:
        return True
    specs = [*plan.arg_specs, *plan.output_specs]
    specs += [*inside.values.values(), *inside.uses.values()]
    return any(row.strategy for row in plan.rows) or any(any(spec) for spec in specs)


def remarks(plan: Plan) -> list[str]:
    """Lists what a plan does not shard, keep or know, though users may expect it."""
    found = []
    devices = prod(size for _, size in plan.mesh_axes)
    if devices > 1 and plan.arg_specs and not is_sharded(plan):
        found.append(
            f"nothing is sharded: {devices} devices are no faster than one for this "
            "step, and every device runs in full what one would"
        )
    crossing = plan.environment.get("crosses_hosts")
    if crossing:
        found.append(f"goes from host to host: {crossing}")
    if "adapted" in plan.search:
        found.append("carried over from the plan of another program" + _still(plan))
    if "strategies_estimated" in plan.search and plan.rung == "measured":
        raced = sum(bool(row.samples_ms) for row in plan.race)
        alone = "nothing" if plan.measured_ms is None else "only the plan's own step"
        found.append(
            "predictions are estimates: on virtual devices plans are chosen by them; "
            f"{'only the race' if raced > 1 else alone} was timed "
            "(measure=True, --measure: more)"
        )
    ties = plan.search.get("ties", 0)
    if ties:
        others = "others were" if ties > 1 else "other was"
        within = f"{plan.search.get('tie_spread', 0.0):.1%}"
        found.append(
            f"a tie: {ties:.0f} {others} as fast, within {within}; the simplest of "
            "them is the plan"
        )
    if undonated := plan.search.get("undonated_bytes", 0):
        found.append(
            "the state is there twice: donate it (donate_argnums, --donate), and "
            f"{format_bytes(undonated)} of each device are free"
        )
    found += _budget_remarks(plan)
    if text := in_host_text(plan):
        found.append(text)
    if plan.uneven:
        found.append(
            f"whole, since the mesh does not divide it: {_few(plan.uneven, ', ')}"
        )
    if plan.replicated_ops:
        found.append(
            "every device runs in full (of all bytes made): "
            f"{_few(plan.replicated_ops, ', ')}"
        )
        foreign = [text for text in plan.replicated_ops if text.startswith("custom_")]
        reasons = (INDIVISIBLE, NOT_CHOSEN)
        if not all(any(why in text for why in reasons) for text in foreign):
            found.append(
                "a kernel is sharded by a rule that it brings: cfp.discover_rules "
                "finds one by running it; or custom_partitioning with sharding_rule=, "
                "or shard_map; see docs/performance.md"
            )
    if plan.figures and plan.figures.kernels:
        found.append(f"kernels that are sharded: {_few(plan.figures.kernels, ', ')}")
    if plan.figures and plan.figures.loops:
        found.append(
            f"communicated in loops that compute no products: "
            f"{_few(plan.figures.loops, '; ')}"
        )
    if plan.host_callbacks_skipped:
        found.append(
            "not called while it was measured: "
            f"{_few(plan.host_callbacks_skipped, ', ')}"
        )
    if text := replaced_text(plan):
        found.append(text)
    found += _worth_remarks(plan)
    found += _attention_remarks(plan)
    count = plan.search.get("constraints_left_out", 0)
    if count:
        what = f"{count:.0f} of the step's own sharding constraints"
        found.append(f"left out: {what}, since the plan decides")
    return found


def _budget_remarks(plan: Plan) -> list[str]:
    """Describes the share of a device's memory that a plan may use."""
    budget = plan.figures.budget_bytes if plan.figures else None
    if budget is None:
        return []
    text = f"a plan may use {format_bytes(budget)}"
    whole = memory_of(plan.environment.get("device_kind", ""))
    if whole is None or budget > whole:
        return [f"{text} of each device"]
    by_default = _USUAL_SHARE[0] <= budget / whole <= _USUAL_SHARE[1]
    why = ", what JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
    return [f"{text} of the {format_bytes(whole)} of each device{why * by_default}"]


def in_host_text(plan: Plan) -> str:
    """Says what a plan keeps in the memory of the host, and its cost; "" if nothing.

    What that frees is on each device; the time is what copies take one after another.
    """
    if not plan.in_host:
        return ""
    names = _few(merged_alike([plan.arg_names[i] for i, _ in plan.in_host]), ", ")
    size = plan.search.get("host_bytes")
    text = f"in the memory of the host between steps: {len(plan.in_host)} arguments"
    if size is not None:
        text += f", {format_bytes(round(size))} for each device"
    text += f" ({names})" + (", without which nothing fits" if size is not None else "")
    if (moved_ms := plan.search.get("host_ms")) is not None:
        text += f"; to move it and back takes up to {moved_ms:.3f} ms, estimated"
    if (unfit_ms := plan.search.get("unfit_ms")) is not None:
        text += f"; the fastest that does not fit: {unfit_ms:.3f} ms, predicted"
    return text


# How each part of a step stays as it is written: an option, and a setting.
_AS_WRITTEN = {
    "attention": ("--attention none", "attention=()"),
    "cross-entropy": ("--cross-entropy 0", "cross_entropy=0"),
}


def replaced_text(plan: Plan) -> str:
    """Describes what the plan replaces in the step; "" if nothing."""
    ops = {(one.name, one.op): one.functions.how for one in plan.constraints.replaced}
    counts = Counter((name, _way_words(how)) for (name, _), how in ops.items())
    if not counts:
        return ""
    parts = [
        f"{count} {name if count == 1 else _PLURALS.get(name, name)} {how}"
        for (name, how), count in counts.items()
    ]
    names = [name for name in _AS_WRITTEN if any(n.startswith(name) for n, _ in counts)]
    options = " and ".join(_AS_WRITTEN[name][0] for name in names)
    settings = ", ".join(_AS_WRITTEN[name][1] for name in names)
    return (
        f"replaced, in the same dtypes: {', '.join(parts)}; as written by {options}, "
        f"or PlannerSettings({settings})"
    )


def _worth_remarks(plan: Plan) -> list[str]:
    """Describes what a plan was chosen among, and the gain of each kind of choice."""
    if plan.figures is None:
        return []
    found = []
    chosen = plan.figures.chosen
    if chosen and len(chosen) < len(Dimension):
        what = ", ".join(chosen)
        found.append(f"chosen among {what} alone, as choose= (--choose) asks")
    for one in plan.figures.variants:
        this = " (this one)" if one.taken else ""
        found.append(f"variant {one.name}: {_or_estimate(one)}{this}")
    worth = [one for one in plan.figures.worth if _is_worth_something(one)]
    if not is_sharded(plan):
        worth = [one for one in worth if one.name != Dimension.SHARDING]
    for how, is_measured in (("as measured", True), ("by prediction", False)):
        mine = [one for one in worth if one.is_measured is is_measured]
        if parts := [_worth_text(one) for one in mine]:
            found.append(f"worth {how}: {'; '.join(parts)}")
    return found


def _or_estimate(one: VariantFigures) -> str:
    known = one.estimated_ms not in (None, one.step_ms)
    estimate = f"estimated at {one.estimated_ms:.3f} ms" if known else ""
    time = f"{one.step_ms:.3f} ms" if one.step_ms is not None else ""
    return ", ".join(filter(None, (time, estimate))) or one.note or "not timed"


def _is_worth_something(one: WorthFigures) -> bool:
    """More than what prints as zero."""
    return one.without_ms is None or abs(one.without_ms - one.with_ms) >= 0.0005


def _worth_text(one: WorthFigures) -> str:
    if one.without_ms is None:
        return f"{one.name}, without which nothing fits"
    return f"{one.name} {one.without_ms - one.with_ms:.3f} ms"


_PLURALS = {
    "attention": "attentions",
    "attention gradient": "gradients of attentions",
    "cross-entropy": "cross-entropies",
}


def _way_words(how: Sequence[str]) -> str:
    first, *roles = how
    _, is_vocabulary, parts = first.partition("vocabulary/")
    if is_vocabulary:
        return f"in {parts} parts of the vocabulary"
    rings = {role for role in (one.rpartition("=")[2] for one in roles)} & _RINGS
    return f"by {first}{''.join(f' in a {ring}' for ring in sorted(rings))}"


_RINGS = {"ring", "zigzag"}


def _attention_remarks(plan: Plan) -> list[str]:
    """Says which kernels do not compute attentions, and why."""
    if plan.figures is None:
        return []
    left = plan.figures.left
    refused = [f"by {one.kernel}: {one.reason}" for one in plan.figures.refused]
    found = []
    for name in dict.fromkeys(one.name for one in left):
        reasons = [one.reason for one in left if one.name == name]
        found.append(f"{name} as written: {_few(reasons, '; ')}")
    return found + ([f"attention not {_few(refused, '; ')}"] if refused else [])


def _still(plan: Plan) -> str:
    """Describes what is not yet known of a plan that was carried over."""
    if plan.measured_ms is not None:
        return ""
    known = plan.predicted_ms is not None
    how = "not measured" if known else "neither measured nor predicted"
    return f", and {how}: cfp verify times it"


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    return "; ".join([_title(plan), *_figures(plan)])


def _title(plan: Plan) -> str:
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh_axes)
    kind = plan.environment.get("device_kind", "")
    text = f"Plan {plan.winner!r} for a mesh {mesh}" + (f" of {kind}" if kind else "")
    described = plan.environment.get("described")
    return f"{text}, as {described} is described" if described else text


_HOW = {
    "estimated": "estimated",
    "one device": "predicted on one device",
    "measured": "predicted",
}


def _figures(plan: Plan) -> list[str]:
    parts = []
    if plan.measured_ms is not None:
        parts.append(f"{plan.measured_ms:.3f} ms per step, measured")
    if plan.predicted_ms is not None:
        parts.append(f"{plan.predicted_ms:.3f} ms {_HOW[plan.rung]}")
    if plan.peak_bytes is not None:
        parts.append(f"{format_bytes(plan.peak_bytes)} on each device")
    elif plan.predicted_bytes is not None and plan.rung != "measured":
        is_compiled = {"compiled", "memory_compiled"} & plan.search.keys()
        how = "as compiled" if is_compiled else "estimated"
        size = format_bytes(plan.predicted_bytes)
        parts.append(f"{size} on each device, {how}")
    return parts


# ---------------------------------------------------------------------- a few lines


def short_text(plan: Plan) -> str:
    """Returns the most important facts about a plan in a few lines."""
    figures = "; ".join(_figures(plan)) or "neither predicted nor measured"
    lines = [_title(plan), f"  {figures}", f"  chosen: {_chosen_text(plan)}"]
    if (rates := throughput(plan)) is not None:
        lines.insert(2, f"  {throughput_text(rates)}")
    repeats = collapse(plan)
    prefix = common_prefix([row.name for row in plan.rows])
    lines += [_repeat_text(plan, repeat, prefix) for repeat in repeats[:_MOST_REPEATS]]
    if len(repeats) > _MOST_REPEATS:
        lines.append(f"  and {len(repeats) - _MOST_REPEATS} more runs of segments")
    sharded = sum(any(spec) for spec in plan.arg_specs)
    lines.append(f"  arguments: {sharded} of {len(plan.arg_specs)} are sharded")
    lines += [f"  {remark}" for remark in remarks(plan)]
    lines.append('  more: plan.save("plan.json"), then: cfp show plan.json')
    wrap = TextWrapper(
        width=columns(),
        subsequent_indent=" " * 4,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(wrap.fill(line) for line in lines)


def why_text(plan: Plan) -> str:
    """Says why a plan was chosen, and what came next; "" if it was not searched for."""
    ran = [row for row in best_variants(plan) if row.time_ms is not None]
    others = [row for row in ran if row.name != plan.winner and not row.note]
    twins = [n for r in ran if r.name == plan.winner for n in other_names(plan, r)]
    same = f"; {' and '.join(twins)} gave the same program" if twins else ""
    if others:
        own = next((row.time_ms for row in ran if row.name == plan.winner), None)
        beside = "" if own is None else f", against {own:.3f} ms"
        after = " or ".join([others[0].name, *other_names(plan, others[0])])
        place = "as fast as the fastest" if won_a_tie(plan) else "the fastest"
        return (
            f"Why: it is {place} of {len(ran)} programs that were timed{same}. "
            f"Next: {after}, {others[0].time_ms:.3f} ms{beside}."
        )
    if ran:
        return f"Why: no other program was timed{same}."
    if plan.predicted_ms is not None:
        place = "as good as the best" if won_a_tie(plan) else "the best"
        return f"Why: it is {place} by prediction; no whole step was timed."
    return ""


def _chosen_text(plan: Plan) -> str:
    """Describes how the plan was chosen."""
    able = (row for row in best_variants(plan) if not row.note)
    ran = [row for row in able if row.time_ms is not None]
    twins = [n for r in ran if r.name == plan.winner for n in other_names(plan, r)]
    same = f", the same program as {' and '.join(twins)}" if twins else ""
    others = [row for row in ran if row.name != plan.winner]
    if others:
        what = "the whole step"
        against = ""
        if "segments_raced" in plan.search:
            # The plan's own time is of another run, that of the whole step.
            what = f"{plan.search['segments_raced']:.0f} of its segments"
            own = [row.time_ms for row in ran if row.name == plan.winner]
            against = "".join(f", against {ms:.3f} ms there" for ms in own)
        next_one = f"; next, {others[0].name}: {others[0].time_ms:.3f} ms{against}"
        place = "as fast as the fastest" if won_a_tie(plan) else "the fastest"
        return f"{place} of {len(ran)} raced on {what}{same}{next_one}"
    if ran:
        return f"timed on the whole step, by itself{same}"
    if "adapted" in plan.search:
        return "from the plan of another program"
    compiled = [row for row in plan.race if row.peak_bytes and not row.note]
    if "compiled" in plan.search and compiled:
        place = "as fast as the fastest" if won_a_tie(plan) else "the fastest"
        count = len({row.name for row in compiled})
        what = f"of {count} programs that were compiled for all devices"
        if plan.rung == "one device":
            what += ", and whose computation one device ran"
        return f"{place} by prediction {what}"
    if "memory_compiled" in plan.search:
        return "by estimates, the first that fits when compiled; nothing was run"
    if plan.predicted_ms is not None and plan.rung == "estimated":
        return "by estimates; nothing was measured or compiled"
    if plan.predicted_ms is not None:
        return "by prediction, without a race"
    return "by its name"


def _repeat_text(plan: Plan, repeat: Repeat, prefix: str) -> str:
    """Describes briefly how the blocks of some segments are sharded."""
    modules: list[str] = []
    ways: dict[str, list[str]] = {}
    paths = [
        merged_name([twin.name.removeprefix(prefix) for twin in twins])
        for twins in zip(*repeat.rows, strict=True)
    ]
    hows = [roles_text(row.strategy, Detail.ROLES) for row in repeat.rows[0]]
    alike = Counter(zip(paths, hows, strict=True))
    ends = distinct_ends([path for path, _ in alike])
    for ((path, way), count), end in zip(alike.items(), ends, strict=True):
        module, _, inside = path.partition("/")
        number, _, deeper = inside.partition("/")
        module += f"/{number}" if deeper and number[:1].isdigit() else ""  # blocks/0
        modules += [module] if inside else []
        ways.setdefault(way, []).append(end + f" ({count} blocks)" * (count > 1))
    where = f" ({_few(modules, ', ')})" if modules else ""
    sharded = _few([f"{_few(names, ', ')} {way}" for way, names in ways.items()], "; ")
    stored = [storage_text(plan.segments[row.segment]) for row in repeat.rows[0]]
    numbers = span_text([row.segment for part in repeat.rows for row in part])
    return f"  segment {numbers}{where}: {sharded}; parameters {_few(stored, ' or ')}"


def _few(texts: Sequence[str], between: str) -> str:
    """The first of some texts, each once, and how many more there are."""
    texts = [*dict.fromkeys(texts)]
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return between.join(texts[:_MOST_NAMES]) + more
