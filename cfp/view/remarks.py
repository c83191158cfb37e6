"""Remarks on a plan: unsharded parts, unknown costs, and gains.

A remark is a template, and a function that finds the template's values in a plan. If
the function returns no values, the remark is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from math import prod

from cfp.plan.parts import UNPLANNED, Figures, Role
from cfp.plan.plan import Plan
from cfp.printable import counted, few, format_bytes, merged_alike
from cfp.program.trace import find_precision
from cfp.search.requests import UNMEASURED_STRATEGIES
from cfp.settings import COMPILED_AT_MOST, Dimension
from cfp.view import words

_WORTH_DONATING = 0.02  # Least share of a plan's memory for a remark.
_MORE_TIME = "give more by --time-budget or PlannerSettings(seconds=...)"
Values = str | tuple[str, ...]


def remarks(plan: Plan) -> Iterator[str]:
    """Yields remarks on costs and gains of a plan, without capital or full stop."""
    for values_of, template in _REMARKS:
        if values := values_of(plan):
            values = (values,) if isinstance(values, str) else values
            yield template.format(*values)


def unplanned_text(plan: Plan) -> str:
    """Says how many variants were not planned for lack of time; "" for none."""
    every = plan.figures.variants if plan.figures else ()
    late = sum(one.note.startswith(UNPLANNED) for one in every)
    text = f"time was over before {late} of {len(every)} variants could be planned"
    return f"{text}: {_MORE_TIME}" if late else ""


def _nothing_sharded(plan: Plan) -> Values:
    devices = prod(size for _, size in plan.mesh_axes)
    what = "all blocks run whole on each device"
    if devices > 1 and plan.arg_specs and not words.is_sharded(plan):
        what = "nothing is sharded"
    elif not words.runs_whole(plan):
        return ()
    _, rows, batch = words.other_batches(plan) or ("", "", "a larger batch")
    return what, str(devices), f", and do not divide {rows}" * bool(rows), batch


def _branches(plan: Plan) -> Values:
    texts = [text for text in plan.uncounted if not text.startswith("while")]
    mine = [row for row in plan.race if row.name == plan.winner]
    flags = few([f"{ms:.3f} ms with {flag}" for r in mine for flag, ms in r.flag_ms])
    timed = [ms for row in mine for ms in row.samples_ms]
    span = f" (samples of {min(timed):.3f} to {max(timed):.3f} ms)" if timed else ""
    how = f"timed with the branches that the timed steps took{span}; "
    how = f"{how}other branches may be slower; " if timed else ""
    how = f"measured {flags}; " if flags else how
    return (how, few(texts)) if texts else ()


def _estimates(plan: Plan) -> Values:
    if words.WAS_DESCRIBED in plan.search:
        return " of described devices" * (plan.rung == "measured")
    if plan.rung == "estimated" and "described" in plan.environment:
        small = 0.0 < (plan.predicted_ms or 0.0) < 1.0
        return ", and below 1 ms too low, since launches take longer" * small
    virtual = ", as times of virtual devices say little (--measure, measure=True: race)"
    is_virtual = plan.environment.get("platform") == "cpu"
    return virtual if is_virtual and words.known_how(plan) == "estimated" else ()


def _undonated(plan: Plan) -> Values:
    size = plan.search.get("undonated_bytes", 0)
    if size <= _WORTH_DONATING * (plan.peak_bytes or plan.predicted_bytes or 0):
        return ()
    roots = dict.fromkeys(plan.arg_names[i].split("/")[0] for i in plan.undonated)
    return format_bytes(size), few([*roots]) or "it"


def _in_host(plan: Plan) -> Values:
    if not plan.in_host:
        return ()
    search, parts = plan.search, [counted(len(plan.in_host), "argument", "arguments")]
    if (size := search.get("host_bytes")) is not None:
        parts += [f"{format_bytes(round(size))} a device, else no plan fits"]
    if (moved_ms := search.get("host_ms")) is not None:
        parts.append(f"moves take {moved_ms:.3f} ms of each step, estimated")
    names = few(merged_alike([plan.arg_names[i] for i, _ in plan.in_host]))
    return f"{'; '.join(parts)} ({names})"


def _pinned(plan: Plan) -> Values:
    names = few(merged_alike([plan.arg_names[i] for i in plan.pinned]))
    by_first = words.PINNED_BY_FIRST in plan.search
    source = "as in the step's first plan" if by_first else "by pins= (--pin)"
    return (source, names) if names else ()


_RINGS = {"ring", "zigzag"}


def _replaced(plan: Plan) -> Values:
    ops = {(one.name, one.op): one.functions.how for one in plan.constraints.replaced}
    counts: Counter[tuple[str, str]] = Counter()
    for (name, _), (first, *roles) in ops.items():
        rings = sorted({role.rpartition("=")[2] for role in roles} & _RINGS)
        counts[name, f"by {first}{''.join(f' in a {one}' for one in rings)}"] += 1
    return ", ".join(
        f"{counted(count, name, f'{name}s')} {how}"
        for (name, how), count in counts.items()
    )


def _chosen_among(plan: Plan) -> Values:
    chosen = plan.figures.chosen if plan.figures else ()
    return ", ".join(chosen) if len(chosen) < len(Dimension) else ()


def _gains(is_measured: bool) -> Callable[[Plan], Values]:
    """Makes a lister of measured gains if `is_measured`, else of predicted gains."""

    def values(plan: Plan) -> Values:
        parts = []
        for one in (plan.figures or Figures()).worth:
            is_sharding = one.name == Dimension.SHARDING
            is_whole = words.runs_whole(plan) or not words.is_sharded(plan)
            if one.is_measured is not is_measured or (is_sharding and is_whole):
                continue
            if one.without_ms is None:
                parts.append(f"{one.name}, without which nothing fits")
            elif abs(one.without_ms - one.with_ms) >= words.SAME_MS:
                plain = ", against data parallelism with any storage" * is_sharding
                parts.append(f"{one.name} {one.without_ms - one.with_ms:.3f} ms{plain}")
        return "; ".join(parts)

    return values


def _left(has_kernel: bool) -> Callable[[Plan], Values]:
    """Makes a lister of refused kernels if `has_kernel`, else of parts as written."""

    def values(plan: Plan) -> Values:
        every = plan.figures.left if plan.figures else ()
        refused = any(one.kernel for one in every)  # These give each kernel's reason.
        some = [o for o in every if not (refused and o.reason == words.NONE_CAN)]
        texts = defaultdict[str, list[str]](list)
        for one in some:
            if bool(one.kernel) == has_kernel:
                by = f"by {one.kernel}: " if one.kernel else ""
                at = f"{one.count} at {one.source}" if one.count > 1 else one.source
                texts[one.kind] += [f"{by}{one.reason}" + f" ({at})" * bool(one.source)]
        said = "not" if has_kernel else "as written:"
        return "; ".join(f"{kind} {said} {few(of, '; ')}" for kind, of in texts.items())

    return values


def _count(name: str, one: str, many: str) -> Callable[[Plan], Values]:
    """Returns a function that writes a count of `Plan.search`, or () if it is zero."""
    return lambda plan: counted(n, one, many) if (n := plan.search.get(name)) else ()


def precision_text(plan: Plan) -> str:
    """Counts `plan.products` in `plan.precision`, and as written; "" without any."""
    if (one := find_precision(plan.precision)) is None or not plan.products:
        return ""
    counts = {why: sum(of.values()) for why, of in plan.products.items()}
    every, taken = sum(counts.values()), counts.pop(one.taken, 0)
    text = f"computed {one.taken}: {taken} of {every} 16-bit products"
    if names := few([*plan.products.get(one.taken, ())]):
        figures = (f"{one.name}_{figure}" for figure in ("share", "saves_ms"))
        share, saved = (plan.search.get(figure, 0.0) for figure in figures)
        text += f" ({names}), {share:.0%} of all FLOPs"
        text += f", by estimate {saved:.1f} ms less on {one.devices}" * (saved >= 0.05)
    text += ", multiplied in 16 bits here" * (plan.environment.get("platform") == "cpu")
    left = []
    for why, count in counts.items():
        names = few([*filter(None, plan.products[why])])
        left.append(f"{count} ({why}{names and f': {names}'})")
    return f"{text}; as written: {', '.join(left)}" if left else text


def _crossing(plan: Plan) -> Values:
    across, sizes = plan.environment.get("crosses_hosts", ""), dict(plan.mesh_axes)
    totals = {side: [0, 0.0] for side in (True, False)}
    for move in (move for row in plan.rows for move in row.moves):
        groups = prod(sizes.values()) // prod(map(sizes.__getitem__, move.axes))
        total = totals[not {*across.split(",")}.isdisjoint(move.axes)]
        total[0] += move.total_bytes * groups
        total[1] += move.time_ms or 0.0
    texts = (f"{format_bytes(n)} and {ms:.3g} ms a step" for n, ms in totals.values())
    return (across, *texts) if across else ()


def _undivided(plan: Plan) -> Values:
    roles = (one for row in plan.rows for one in row.strategy)
    tensor = {r.axis for r in roles if r.role in (Role.COLUMNS, Role.CONTRACTED)}
    # Along an axis that shards each block evenly, such as by tokens, no work repeats.
    most = prod(size for _, size in plan.mesh_axes)
    even = [{r.axis for r in row.strategy if r.size % most == 0} for row in plan.rows]
    axes = () if plan.uneven else tensor.union(set.intersection(*even or [tensor]))
    found = None if _nothing_sharded(plan) else words.other_batches(plan, axes)
    text = "{} devices do not divide {}: some repeat work".format(*found or ("", ""))
    if plan.uneven:
        text = f"stored whole, since the mesh does not divide them: {few(plan.uneven)}"
    advice = f"; {found[-1]} would be divided" if found else ""
    return text + advice if plan.uneven or found else ()


_REMARKS: tuple[tuple[Callable[[Plan], Values], str], ...] = (
    (unplanned_text, "{}"),
    (
        _count(UNMEASURED_STRATEGIES, *words.STRATEGIES),
        f"time was too short to measure {{}}: {_MORE_TIME}; measurements are kept",
    ),
    (
        _nothing_sharded,
        "{}: {} devices are no faster than one for this step{}: use one, or {}",
    ),
    (
        _crossing,
        "collectives between hosts (along {}), estimated: {}; within hosts: {}",
    ),
    (lambda plan: "; ".join(plan.site_checks), "{}"),
    (
        lambda plan: few([one for one in plan.uncounted if one.startswith("while")]),
        "loops of unknown length, counted as one iteration, in predictions too: {}",
    ),
    (_branches, "{}predictions count all branches: {}"),
    (_estimates, "predictions are estimates{}"),
    (
        _undonated,
        "the state is in memory twice at a step's end, {} each on each device: donate "
        "{} (donate_argnums, --donate)",
    ),
    (words.budget_text, "{}"),
    (
        words.beyond_text,
        f"a compiled program may need up to {COMPILED_AT_MOST} times this memory, "
        "here {}: if devices have less, plan with a smaller --memory-budget "
        "(memory_budget=), or run cfp verify there",
    ),
    (_pinned, "pinned in all candidates, {}: {}"),
    (_in_host, "in host memory between steps: {}"),
    (_undivided, "{}"),
    (
        lambda plan: few(plan.split),
        "whole on each device, as a reshape puts consecutive rows into a microbatch: "
        "{}; x.reshape(-1, parts, ...).swapaxes(0, 1) frees this much memory of each "
        "device (docs/more-choices.md)",
    ),
    (
        lambda p: p.replicated_ops and (few(p.replicated_ops), words.times(p)[-1]),
        "ops that every device runs in full, so more devices save no time there: {}; "
        "the whole step: {} (docs/reading-plans.md)",
    ),
    (
        lambda plan: few(plan.figures.kernels) if plan.figures else (),
        "kernels that are sharded: {}",
    ),
    (
        lambda plan: few(plan.host_callbacks_skipped),
        "host callbacks that measuring did not call: {}",
    ),
    (
        _replaced,
        "replaced, in the same dtypes: {}; as written by --kernels none, or "
        "PlannerSettings(kernels=())",
    ),
    (_chosen_among, "chosen among {} alone, by choose= (--choose)"),
    (_gains(is_measured=True), "worth as measured: {}"),
    (_gains(is_measured=False), "worth by prediction: {}"),
    (_left(has_kernel=False), "{}"),
    (_left(has_kernel=True), "{}"),
    (
        _count("constraints_left_out", "sharding constraint", "sharding constraints"),
        "left out: {} of the step's own, since the plan decides",
    ),
    (precision_text, "{}"),
    (
        _count("wide_sums", "scatter", "scatters"),
        "summed in float32 instead of 16 bits: {} (gradients of lookups, sums of many "
        "rows)",
    ),
)
