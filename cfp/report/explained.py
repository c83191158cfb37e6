"""Explanation of a search: other choices and their costs, and step time by memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext
from cfp.cost.choice import SegmentChoice
from cfp.passes.profile import profile_segments
from cfp.profiling.collectives import measure_rates, rate_keys
from cfp.profiling.key import ProfileKey
from cfp.profiling.rates import Rates
from cfp.report.figures import NO_PRESET, kind_title, option_names, strategy_figures
from cfp.report.plots import figure
from cfp.search.explain import Alternative, Explanation, KindExplanation
from cfp.search.problem import Assignment, Problem
from cfp.search.tradeoff import TradeOff
from cfp.units import format_bytes
from cfp.view.console import Fitted, new_table
from cfp.view.model import strategy_text
from cfp.view.words import SAME_MS

_HOW_TO_READ = (
    "Each line: what the whole step would take if all segments of the kind did so, and "
    "the others what goes best with it."
)


def explanation_view(
    analysis: Analysis,
    problem: Problem,
    found: Explanation,
    border: box.Box,
) -> RenderableType:
    """A table for each kind of segment, and what memory has to do with it."""
    names = option_names(analysis, problem.options)
    parts: list[RenderableType] = [Text("Why this plan", style="bold")]
    parts += map(Text, _headlines(problem, found))
    parts.append(Text(_HOW_TO_READ))
    for item in found.kinds:
        parts += [Text(), _kind_table(analysis, problem, found, item, names, border)]
        parts += map(Text, _left_out(item))
    return Group(*parts, Text(), *map(Text, memory_lines(found)))


def _headlines(problem: Problem, found: Explanation) -> Iterator[str]:
    best, plan = found.best, found.plan
    asked, reckoned = problem.budget_bytes, found.memory.budget_bytes
    if asked is not None and reckoned is not None and asked != reckoned:
        yield (
            f"By prediction nothing that was measured fits in {format_bytes(asked)}: "
            f"this is about a budget of {format_bytes(reckoned)}."
        )
    if plan is None:
        yield (
            "Parts of the plan that won the race have not been measured. This is the "
            f"best of those measured, by prediction: {_ms(best)}."
        )
    elif plan.cost_ms - best.cost_ms < SAME_MS:
        yield f"No choice of those measured is predicted to beat its {_ms(plan)}."
    else:
        yield (
            f"It won the race; the search had predicted {_ms(plan)} for it, and "
            f"{_ms(best)} for the best of those measured (*)."
        )


def _words(
    analysis: Analysis,
    kind: int,
    candidate: SegmentChoice,
    base: SegmentChoice | None = None,
) -> str:
    """A choice for a kind of segment in words; or in what it differs from another."""
    before = None if base is None else strategy_figures(analysis, kind, base)
    return strategy_text(strategy_figures(analysis, kind, candidate), before)


def _kind_table(
    analysis: Analysis,
    problem: Problem,
    found: Explanation,
    item: KindExplanation,
    names: list[list[str]],
    border: box.Box,
) -> Fitted:
    title = kind_title(analysis, item.kind)
    numbers = ("taken", "segment ms", "step ms", "more", "memory")
    headings = {"": "word", "choice": "text", **dict.fromkeys(numbers, "number")}
    table = new_table(border, title, {**headings, "in words": "text"})
    options = problem.options[item.kind]
    base = options[item.chosen[0].option].candidate
    count = sum(a.taken for a in item.chosen)
    best = {*zip(problem.kinds, found.best.picks, strict=True)}
    for alternative in (*item.chosen, *item.runners_up, *item.too_large):
        option = options[alternative.option]
        first = alternative is item.chosen[0]
        words = _words(analysis, item.kind, option.candidate, None if first else base)
        table.add_row(
            "*" if (item.kind, alternative.option) in best else "",
            names[item.kind][alternative.option],
            f"{alternative.taken} of {count}" if alternative.taken else "-",
            f"{option.time_ms:.3f}",
            *_outcome(alternative, found.best.cost_ms),
            words if first else f"but: {words}" if words else "the same",
            style="bold" if alternative.taken else None,
        )
    return Fitted(table)


def _outcome(alternative: Alternative, best_ms: float) -> tuple[str, str, str]:
    """The time of the step, what it is more than the best, and memory."""
    memory = format_bytes(alternative.memory_bytes)
    if alternative.cost_ms is None:
        return f"({alternative.unlimited_ms:.3f})", "does not fit", f"needs {memory}"
    more = alternative.cost_ms - best_ms
    share = f"+{more / best_ms:.1%}" if more >= SAME_MS and best_ms else "-"
    return f"{alternative.cost_ms:.3f}", share, memory


def _left_out(item: KindExplanation) -> Iterator[str]:
    if item.too_large:
        yield "(What does not fit: the time is what it would take without a budget.)"
    if item.others:
        yield f"and {item.others} more that would be slower, or do not fit"


def memory_lines(found: Explanation) -> Iterator[str]:
    """Describes the effect of the memory budget, and of more or less of it."""
    memory, best = found.memory, found.best
    step = format_bytes(memory.step_bytes)
    peak = format_bytes(memory.peak_bytes)
    if memory.budget_bytes is None:
        yield f"Memory: there is no budget. The best choice needs {peak}."
        if memory.peak_bytes > memory.step_bytes:
            yield f"With {step} less than that: {_against(memory.less, best)}."
        return
    budget = format_bytes(memory.budget_bytes)
    yield f"Memory: the best choice needs {peak} of {budget}."
    if memory.binds:
        free = memory.unlimited
        yield (
            f"Memory binds: without a budget the step would take {_ms(free)}, in "
            f"{format_bytes(free.memory_bytes)}."
        )
    else:
        yield "Memory does not bind: no faster choice needs more."
    yield f"With {step} more: {_against(memory.more, best)}."
    if memory.budget_bytes > memory.step_bytes:
        yield f"With {step} less: {_against(memory.less, best)}."


def _against(other: Any, best: Any) -> str:
    if other is None:
        return "nothing that was measured fits"
    change = other.cost_ms - best.cost_ms
    if abs(change) < SAME_MS:
        return f"{_ms(best)}, as now"
    word = "slower" if change > 0 else "faster"
    return f"{_ms(other)}, {abs(change) / best.cost_ms:.1%} {word}"


def _ms(solution: Any) -> str:
    return f"{solution.cost_ms:.3f} ms"


def explanation_data(
    analysis: Analysis, problem: Problem, found: Explanation
) -> dict[str, Any]:
    """The same as plain data: times in ms, memory in bytes on each device."""
    names = option_names(analysis, problem.options)
    memory = found.memory

    def as_data(solution: Any) -> dict[str, Any] | None:
        if solution is None:
            return None
        return {"step_ms": solution.cost_ms, "memory_bytes": solution.memory_bytes}

    def listed(kind: int, alternative: Alternative) -> dict[str, Any]:
        option = problem.options[kind][alternative.option]
        return {
            "choice": names[kind][alternative.option],
            "in_words": _words(analysis, kind, option.candidate),
            "taken": alternative.taken,
            "segment_ms": option.time_ms,
            "step_ms": alternative.cost_ms,
            "memory_bytes": alternative.memory_bytes,
            "unlimited_step_ms": alternative.unlimited_ms,
        }

    return {
        "plan": as_data(found.plan),
        "best": as_data(found.best),
        "kinds": [
            {
                "kind": item.kind,
                "segments": [s.index for s in analysis.segments if s.kind == item.kind],
                **{
                    name: [listed(item.kind, a) for a in alternatives]
                    for name, alternatives in (
                        ("chosen", item.chosen),
                        ("runners_up", item.runners_up),
                        ("too_large", item.too_large),
                    )
                },
                "others": item.others,
            }
            for item in found.kinds
        ],
        "memory": {
            "budget_bytes": memory.budget_bytes,
            "peak_bytes": memory.peak_bytes,
            "binds": memory.binds,
            "step_bytes": memory.step_bytes,
            "unlimited": as_data(memory.unlimited),
            "more": as_data(memory.more),
            "less": as_data(memory.less),
        },
    }


# ------------------------------------------------------- step time against memory

# For each kind of segment: how many of its segments take which option.
Taken = list[Counter[int]]


def trade_off_view(
    analysis: Analysis,
    problem: Problem,
    found: TradeOff,
    budget_bytes: int | None,
    border: box.Box,
    measured: bool = True,
) -> RenderableType:
    """The frontier as a table; below it what its names mean.

    Args:
        measured: whether segments were; otherwise they are estimated.
    """
    names = option_names(analysis, problem.options)
    source = "measured segments" if measured else "estimates"
    title = f"Step time against memory, both predicted from {source}"
    numbers = dict.fromkeys(("memory", "step ms", "rematerialized"), "number")
    changes = "what changes (kind of segment: choices)"
    table = new_table(border, title, {"": "word", **numbers, changes: "text"})
    within = best_within(found, budget_bytes)
    before: Taken | None = None
    for point in found.points:
        taken = _taken(problem, point)
        table.add_row(
            "*" if point == within else "",
            format_bytes(point.memory_bytes),
            f"{point.cost_ms:.3f}",
            str(rematerialized(problem, point) or "-"),
            _changes(names, before, taken),
            style="bold" if point == within else None,
        )
        before = taken
    lines = list(_notes(found, within, budget_bytes))
    legend = [
        *(
            f"  kind {kind}: {kind_title(analysis, kind)}"
            for kind in range(len(problem.options))
        ),
        *_meanings(analysis, problem, found, names),
    ]
    return Group(Fitted(table), *map(Text, lines), Text(), *map(Text, legend))


def best_within(found: TradeOff, budget_bytes: int | None) -> Assignment | None:
    """The fastest point that fits in a budget, if there is a budget and one does."""
    if budget_bytes is None:
        return None
    fitting = [p for p in found.points if p.memory_bytes <= budget_bytes]
    return fitting[-1] if fitting else None


def rematerialized(problem: Problem, point: Assignment) -> int:
    """Counts the segments that rematerialize their forward pass."""
    return sum(
        problem.options[kind][pick].candidate.remat
        for kind, pick in zip(problem.kinds, point.picks, strict=True)
    )


def _taken(problem: Problem, point: Assignment) -> Taken:
    found: Taken = [Counter() for _ in problem.options]
    for kind, pick in zip(problem.kinds, point.picks, strict=True):
        found[kind][pick] += 1
    return found


def _changes(names: list[list[str]], before: Taken | None, taken: Taken) -> str:
    """Lists the strategy of each kind, where it differs from the line above."""
    parts = [
        f"{kind}: {_mixture(names[kind], counts)}"
        for kind, counts in enumerate(taken)
        if before is None or before[kind] != counts
    ]
    # Equal segments may have changed places, which means nothing.
    return "; ".join(parts) or "the same, in another order"


def _mixture(names: list[str], counts: Counter[int]) -> str:
    if len(counts) == 1:
        return names[next(iter(counts))]
    return " + ".join(f"{n} x {names[option]}" for option, n in counts.most_common())


def _notes(
    found: TradeOff, within: Assignment | None, budget_bytes: int | None
) -> Iterator[str]:
    if not found.complete:
        yield "There may be more points between these (--points)."
    if budget_bytes is None:
        return
    budget = format_bytes(budget_bytes)
    if within is None:
        yield f"Nothing fits in the budget of {budget}."
    else:
        yield f"* the fastest within the budget of {budget}"


def _meanings(
    analysis: Analysis, problem: Problem, found: TradeOff, names: list[list[str]]
) -> Iterator[str]:
    """Lists the choices whose names are no preset's."""
    used = {
        pair
        for point in found.points
        for pair in zip(problem.kinds, point.picks, strict=True)
    }
    for kind, option in sorted(used):
        name = names[kind][option]
        if NO_PRESET in name:
            candidate = problem.options[kind][option].candidate
            words = _words(analysis, kind, candidate)
            yield f"  {name} of kind {kind}: {words}"


def trade_off_data(
    analysis: Analysis, problem: Problem, found: TradeOff, budget_bytes: int | None
) -> dict[str, Any]:
    """The same as plain data: times in ms, memory in bytes on each device."""
    names = option_names(analysis, problem.options)
    within = best_within(found, budget_bytes)
    return {
        "budget_bytes": budget_bytes,
        "complete": found.complete,
        "points": [
            {
                "memory_bytes": point.memory_bytes,
                "step_ms": point.cost_ms,
                "rematerialized": rematerialized(problem, point),
                "within_budget": point == within,
                "segments": [
                    {
                        "kind": kind,
                        "choice": names[kind][pick],
                        "in_words": _words(
                            analysis, kind, problem.options[kind][pick].candidate
                        ),
                    }
                    for kind, pick in zip(problem.kinds, point.picks, strict=True)
                ],
            }
            for point in found.points
        ],
    }


def plot_trade_off(
    problem: Problem, found: TradeOff, file: Path, budget_bytes: int | None
) -> None:
    """Draws the frontier: steps, since memory in between buys nothing.

    Args:
        budget_bytes: drawn as a line, if given.

    Raises:
        CfpError: matplotlib is not installed.
    """
    with figure(file) as axis:
        most = found.points[-1].memory_bytes
        unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        memory = [p.memory_bytes / size for p in found.points]
        times = [p.cost_ms for p in found.points]
        axis.step(memory, times, where="post", color="C0", linewidth=1)
        counts = [rematerialized(problem, p) for p in found.points]
        for again, label in (
            (False, "nothing rematerialized"),
            (True, "rematerializes"),
        ):
            mine = [i for i, n in enumerate(counts) if bool(n) == again]
            if mine:
                axis.plot(
                    [memory[i] for i in mine],
                    [times[i] for i in mine],
                    "o" if not again else "s",
                    color="C1" if again else "C0",
                    label=label,
                )
        if budget_bytes is not None:
            axis.axvline(
                budget_bytes / size, color="black", linewidth=0.8, label="budget"
            )
        axis.set_xlabel(f"{unit} of memory on each device, predicted")
        axis.set_ylabel("ms per step, predicted")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


# ---------------------------------------------------------------- missing measurements

_MOST_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Something that the store has no record of.

    Attributes:
        key: what it would be kept under.
        nearest: the stored key that differs in the fewest parts; None if there is
            none at all.
    """

    label: str
    key: ProfileKey
    nearest: ProfileKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Measurements that the profile pass would make.

    Attributes:
        misses: in the order in which it would.
        known: how many things are in the store.
        rates_known: whether the devices' rates are. If not, estimates follow from
            defaults, and some other strategies may be measured than are listed.
        complete: whether that is all. If not, more strategies may be measured: what
            follows from the times of those that are listed.
    """

    misses: tuple[Miss, ...]
    known: int
    rates_known: bool
    complete: bool


def find_misses(context: PlanContext, analysis: Analysis) -> Misses:
    """Looks everything up that the profile pass would, and measures nothing."""
    mesh, store = context.devices, context.store
    probes = rate_keys(mesh)
    answered = store.get_many([key.digest for key in probes.values()])
    rates_known = len(answered) == len(probes)
    rates = measure_rates(mesh, store) if rates_known else Rates.default(mesh)
    asked = {key.digest: (label, key) for label, key in probes.items()}
    found, _ = profile_segments(context, analysis, rates, measure=False)
    for item in found.requests:
        for job in item.jobs:
            asked.setdefault(job.key.digest, (job.label, job.key))
    answered = store.get_many(asked)
    complete = all(
        job.key.digest in answered for item in found.requests for job in item.jobs
    )
    stored = store.keys()
    return Misses(
        misses=tuple(
            Miss(label=label, key=key, nearest=key.nearest(stored))
            for digest, (label, key) in asked.items()
            if digest not in answered
        ),
        known=len(answered),
        rates_known=rates_known,
        complete=complete,
    )


def why_lines(found: Misses) -> Iterator[str]:
    """The misses as text, those of one cause together."""
    yield f"{found.known} answered by the store, {len(found.misses)} not."
    causes: dict[str, list[str]] = {}
    for miss in found.misses:
        stored: Sequence[ProfileKey] = [] if miss.nearest is None else [miss.nearest]
        causes.setdefault(miss.key.explain(stored), []).append(miss.label)
    for cause, labels in causes.items():
        yield ""
        yield from labels[:_MOST_LABELS]
        if len(labels) > _MOST_LABELS:
            yield f"and {len(labels) - _MOST_LABELS} more"
        yield from (f"  {line}" for line in cause.splitlines())
    if not found.rates_known:
        yield ""
        yield (
            "Which strategies are worth measuring follows from the devices' rates, "
            "which are not known yet: some may be others than these."
        )
    if not found.complete:
        yield ""
        yield (
            "Which other strategies are worth measuring follows from what these take."
        )


def why_data(found: Misses) -> dict[str, Any]:
    """The misses as plain data; `differing` has what was and what is, by part."""
    return {
        "known": found.known,
        "rates_known": found.rates_known,
        "complete": found.complete,
        "misses": [
            {
                "label": miss.label,
                "key": miss.key.digest,
                "differing": _differing(miss),
            }
            for miss in found.misses
        ],
    }


def _differing(miss: Miss) -> dict[str, list[str | None]] | None:
    if miss.nearest is None:
        return None
    was, now = dict(miss.nearest.parts), dict(miss.key.parts)
    return {
        name: [was.get(name), now.get(name)]
        for name in miss.key.differing(miss.nearest)
    }
