"""Computes `Plan.figures`: the numbers by which a search chose the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import starmap
from math import inf

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, SegmentKernels, Storage, lay_out
from cfp.analysis.presets import named_choices, plainest, presets
from cfp.cost.costs import SegmentChoice, segment_candidate
from cfp.kernels.kinds import KINDS, Kind
from cfp.plan.describe import axis_roles, sharded_kernels
from cfp.plan.parts import (
    AlikeBlocks,
    AxisRole,
    Figures,
    KindFigures,
    LeftFigures,
    OptionFigures,
    StrategyFigures,
    WorthFigures,
    roles_text,
)
from cfp.plan.plan import Plan
from cfp.printable import distinct_ends, merged_name, span_text
from cfp.race.programs import RaceOutcome, kernels_not_timed
from cfp.search.choices import picks_of
from cfp.search.guided import Candidate, prediction_of
from cfp.search.requests import UNMEASURED_STRATEGIES
from cfp.search.solver import Option, Problem, solve
from cfp.settings import ALL_DIMENSIONS, Dimension, Replacing
from cfp.view.words import NONE_CAN, REMATERIALIZED, kernels_text


def with_figures(
    plan: Plan,
    analysis: Analysis,
    outcome: RaceOutcome,
    replacing: Replacing,
    dimensions: Set[Dimension] = ALL_DIMENSIONS,
    budget_bytes: int | None = None,
) -> Plan:
    """Returns the plan of a race's winner with `Plan.figures`: the numbers behind it.

    Args:
        replacing: kernels that were allowed; used only if the outcome has no profiles.
        dimensions: kinds of choices that were left to the search.
    """
    assert outcome.winner is not None, "it has a plan"
    choice, problem = outcome.winner.choice, outcome.solution.problem
    profiles = outcome.solution.profiles
    replacing = profiles.replacing if profiles else replacing
    failed = profiles.failed_kernels if profiles else kernels_not_timed(outcome)
    layout = lay_out(analysis.frame, choice)
    left = Counter(
        (kind.NAME, *row)
        for kind in KINDS
        for row in _left(kind, analysis, layout, choice, replacing, failed, problem)
    )
    found = Figures(
        kernels=sharded_kernels(layout),
        budget_bytes=budget_bytes,
        chosen=tuple(str(one) for one in Dimension if one in dimensions),
        left=tuple(
            LeftFigures(kind=kind, source=source, reason=reason, count=n, kernel=kernel)
            for (kind, kernel, source, reason), n in left.items()
        ),
    )
    if problem is not None:
        found = _searched(found, analysis, choice, problem)
        # Options that all candidates share are no choice.
        shared = outcome.solution.candidates[0].options
        raced = [(one.without(shared, one.name), ms) for one, ms in outcome.raced]
        known = worth(analysis, problem, raced)
        if profiles is None or UNMEASURED_STRATEGIES in profiles.counts:
            # The best step without a choice may use an unmeasured strategy.
            known = tuple(one for one in known if one.without_ms is not None)
        own, best = prediction_of(analysis, problem, choice).time_ms, solve(problem)
        if not raced and best and (own or inf) > best.cost_ms * (1 + 1e-9):
            # Gains of the best by prediction, which did not fit, are not the plan's.
            known = ()
        found = replace(found, worth=known)
    return replace(plan, figures=found)


def _left(
    kind: Kind,
    analysis: Analysis,
    layout: Layout,
    choice: Choice,
    replacing: Replacing,
    failed: Mapping[SegmentKernels, str],
    problem: Problem | None,
) -> Iterator[tuple[str, str, str]]:
    """Yields (kernel, source, reason) if kernels are allowed or used; may repeat.

    Kernel "": why the part uses none. Else: why this preferred one cannot compute it.
    """
    program = analysis.frame.program
    was_searched = (kind.find,) in program.looked_for
    if not was_searched or not (replacing.kernels or choice.kernels):
        return
    where = dict(analysis.frame.mesh), replacing.platform
    rows = kind.variants(replacing.kernels)
    for one in kind.find(program).left_alone:
        yield "", one.source, one.reason
    for segment in analysis.segments:
        taken = dict(choice.kernels_of(segment.index)).get(kind.NAME, "")
        names = next((row for row in rows if taken in row), rows[0])
        preferred = names[: names.index(taken)] if taken in names else names
        for site in kind.find(program).among(program, segment.ops):
            source, reasons = site.source, dict[str, str | None]()
            own = taken and kind.propose(program, site, taken, layout.axes)
            if taken and isinstance(own, str):
                yield "", source, own
                continue
            for name in preferred:
                one = kind.propose(program, site, name, layout.axes)
                reasons[name] = one if isinstance(one, str) else one.refusal(*where)
            yield from ((name, source, why) for name, why in reasons.items() if why)
            if not taken:
                able = [name for name, reason in reasons.items() if reason is None]
                options = problem.options[segment.kind] if problem else None
                yield "", source, _unused(kind.NAME, able, failed, options)


def _unused(
    kind: str,
    able: Sequence[str],
    failed: Mapping[SegmentKernels, str],
    options: Sequence[Option] | None,
) -> str:
    """Explains why a part uses none of `able`, the kernels that can compute it."""
    if not able:
        return NONE_CAN
    for name in able:
        if why := failed.get(((kind, name),)):
            return f"{name} {why.partition(chr(10))[0]}"
    text = f"{' or '.join(able)} can compute it; "
    if options is None:
        return f"{text}nothing was searched for this plan"
    times = {True: inf, False: inf}
    for one in options:
        has_it = kind in dict(one.candidate.kernels)
        times[has_it] = min(times[has_it], one.time_ms)
    if times[True] == inf:
        return f"{text}no strategy was tried with a kernel"
    without = f", {times[False]:.3f} ms without" if times[False] < inf else ""
    return f"{text}a segment takes {times[True]:.3f} ms with a kernel{without}"


# ----------------------------------------------------------------------------- search


def _searched(
    found: Figures, analysis: Analysis, choice: Choice, problem: Problem
) -> Figures:
    picks = picks_of(analysis, problem, choice)
    # If a part of the plan was not measured, others are compared with the fastest.
    base = picks or [
        min(range(len(rows)), key=lambda i: rows[i].time_ms)
        for rows in (problem.options[k] for k in problem.kinds)
    ]
    names = option_names(analysis, problem.options)

    def figures_of(kind: int, place: int, option: Option) -> OptionFigures:
        pairs = zip(problem.kinds, base, strict=True)
        swapped = [place if k == kind else pick for k, pick in pairs]
        taken = [*zip(problem.kinds, picks or (), strict=False)].count((kind, place))
        return OptionFigures(
            name=names[kind][place],
            strategy=strategy_figures(analysis, kind, option.candidate),
            segment_ms=option.time_ms,
            state_bytes=option.state_bytes,
            residual_bytes=option.residual_bytes,
            temp_bytes=option.temp_bytes,
            step_ms=problem.cost_ms(swapped),
            memory_bytes=problem.memory_bytes(swapped),
            taken=taken,
        )

    kinds = tuple(
        KindFigures(
            name=kind_title(analysis, kind),
            options=tuple(figures_of(kind, *one) for one in enumerate(options)),
        )
        for kind, options in enumerate(problem.options)
    )
    return replace(
        found,
        kinds=kinds,
        segment_kinds=problem.kinds,
        picks=tuple(picks or ()),
        fixed_bytes=problem.fixed_bytes,
    )


# ------------------------------------------------------------ worth of kinds of choices


def worth(
    analysis: Analysis, problem: Problem, raced: Sequence[tuple[Candidate, float]] = ()
) -> tuple[WorthFigures, ...]:
    """Computes the best step time with and without each kind of choice (kernels, ...).

    Times are measured if some, not all, raced programs lack the kind, else predicted.
    Kinds that no option has, and unmeasured compiler options, are left out. "Without
    sharding" is all data parallel.
    """
    plain = plainest(presets(analysis.frame))
    kinds = [segment.kind for segment in analysis.segments]

    def parts_of(choice: Choice) -> list[tuple[int, SegmentChoice]]:
        return [
            (k, segment_candidate(analysis, i, choice)) for i, k in enumerate(kinds)
        ]

    shared = {(kind, one.strategies) for kind, one in parts_of(plain)}
    # For each kind of choice: True if a segment's option does without it.
    goes_without: Mapping[str, Callable[[int, SegmentChoice], bool]] = {
        "sharding": lambda kind, one: (kind, one.strategies) in shared,
        "storage": lambda _, one: one.storage is Storage.USED,
        "rematerialization": lambda _, one: not one.remat,
        "kernels": lambda _, one: not one.kernels,
    }
    found = []
    for name in (*goes_without, "compiler options"):
        lacks = goes_without.get(name)
        without = [
            ms
            for one, ms in raced
            if (all(starmap(lacks, parts_of(one.choice))) if lacks else not one.options)
        ]
        times = None
        is_measured = 0 < len(without) < len(raced)
        if is_measured:
            times = min(ms for _, ms in raced), min(without)
        elif lacks:
            kept = [
                [i for i, o in enumerate(row) if lacks(kind, o.candidate)]
                for kind, row in enumerate(problem.options)
            ]
            times = _predicted(problem, kept)
        if times is not None:
            found.append(
                WorthFigures(
                    name=name,
                    with_ms=times[0],
                    without_ms=times[1],
                    is_measured=is_measured,
                )
            )
    return tuple(found)


def _predicted(
    problem: Problem, kept: Sequence[Sequence[int]]
) -> tuple[float, float | None] | None:
    """Returns (best ms, best of `kept` or None); None if all are kept or none fits."""
    if [*map(len, kept)] == [*map(len, problem.options)]:
        return None
    if (best := solve(problem)) is None:
        return None
    without = solve(problem.among(kept)) if all(kept) else None
    return best.cost_ms, without and without.cost_ms


# ----------------------------------------------------- names and words for choices


def option_names(
    analysis: Analysis, options: Sequence[Sequence[Option]]
) -> list[list[str]]:
    """Names each option of each kind of segment.

    The name is the first preset with the same strategies and storage, or a number:
    ``strategy 7 (no preset)``. Kernels and rematerialization are added in parentheses.
    """
    by_name = named_choices(analysis.frame)
    found = []
    for kind, index in enumerate(analysis.representatives):
        names: dict[tuple, str] = {}
        for name, choice in by_name.items():
            part = segment_candidate(analysis, index, choice)
            names.setdefault((part.strategies, part.storage), name)
        texts = []
        for number, option in enumerate(options[kind], 1):
            candidate = option.candidate
            alike = candidate.strategies, candidate.storage
            name = names.setdefault(alike, f"strategy {number}")
            also = ["no preset" * (name not in by_name)]
            also += [kernels_text(candidate.kernels), REMATERIALIZED * candidate.remat]
            text = ", ".join(filter(None, also))
            texts.append(f"{name} ({text})" if text else name)
        found.append(texts)
    return found


def kind_title(analysis: Analysis, kind: int) -> str:
    """Names segments of a kind: ``Segments 1-4: layer_0-3/up to layer_0-3/down``."""
    segments = [s for s in analysis.segments if s.kind == kind]
    blocks = analysis.frame.blocks
    span = span_text([s.index for s in segments])
    text = f"Segment{'s' * (len(segments) > 1)} {span}"
    ends = [
        merged_name([blocks[s.blocks[place]].name for s in segments])
        for place in (0, -1)
        if segments[0].blocks
    ]
    names = " to ".join(dict.fromkeys(ends))
    return f"{text}: {names}" if names else text


def strategy_figures(
    analysis: Analysis, kind: int, candidate: SegmentChoice
) -> StrategyFigures:
    """Describes a choice for a kind of segment, with the blocks grouped by sharding."""
    frame = analysis.frame
    segment = analysis.segments[analysis.representatives[kind]]
    groups = [frame.groups[g] for g in segment.groups]
    # Equal roles may differ in sizes, which the text has: both are the key.
    alike: dict[tuple[str, tuple[AxisRole, ...]], list[str]] = {}
    names = distinct_ends([frame.blocks[b].name for b in segment.blocks])
    for name, b, own in zip(names, segment.blocks, candidate.strategies, strict=True):
        strategy = axis_roles(frame, frame.program.ops[frame.blocks[b].anchor], own)
        alike.setdefault((roles_text(strategy), strategy), []).append(name)
    return StrategyFigures(
        blocks=tuple(
            AlikeBlocks(names=tuple(members), strategy=strategy)
            for (_, strategy), members in alike.items()
        ),
        storage=frame.effective(candidate.storage, groups) if groups else None,
        kernels=candidate.kernels,
        rematerialized=candidate.remat,
    )
