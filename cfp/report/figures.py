"""Gathers the numbers that a plan was chosen by, while the search's data are there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, lay_out
from cfp.attention.matching.matches import among, attentions, was_searched, way_of
from cfp.patterns.build import split
from cfp.plan.drawn import block_figures, short_source
from cfp.plan.figures import (
    Figures,
    KindFigures,
    LeftFigures,
    OptionFigures,
)
from cfp.plan.plan import Plan
from cfp.profiling.collectives import Rates
from cfp.report.words import candidate_words, kind_title, option_names
from cfp.search.choices import picks_of
from cfp.search.problem import Option, Problem

_AS_WRITTEN = "it might be computed by a kernel, and the plan has none there"


def with_figures(
    plan: Plan,
    analysis: Analysis,
    choice: Choice,
    problem: Problem | None,
    rates: Rates | None,
) -> Plan:
    """The plan with its figures.

    Args:
        plan: the plan.
        analysis: of its program.
        choice: what it chose.
        problem: what was searched, if anything was.
        rates: of the devices, if they are known.
    """
    layout = lay_out(analysis.frame, choice)
    found = Figures(
        blocks=block_figures(analysis, choice, rates),
        left=_left(analysis, layout, choice),
    )
    if problem is not None:
        found = _searched(found, analysis, choice, problem)
    return replace(plan, figures=found)


def _left(
    analysis: Analysis, layout: Layout, choice: Choice
) -> tuple[LeftFigures, ...]:
    """Attentions that no kernel computes; none if none were looked for."""
    program, kernels = analysis.frame.program, dict(choice.kernels)
    found: Counter[tuple[str, str]] = Counter()
    if not was_searched(program):
        return ()
    for one in attentions(program).left_alone:
        found[short_source(one.source), one.reason] += 1
    for segment in analysis.segments:
        kernel = split(kernels.get(segment.index, ""))[0]
        for match in among(program, segment.ops):
            way: object = _AS_WRITTEN
            if kernel:
                way = way_of(program, match, kernel, layout.axes)
            if isinstance(way, str):
                found[short_source(match.found.source), way] += 1
    return tuple(
        LeftFigures(source=source, reason=reason, count=count)
        for (source, reason), count in found.items()
    )


# ----------------------------------------------------------------------------- search


def _searched(
    found: Figures, analysis: Analysis, choice: Choice, problem: Problem
) -> Figures:
    picks = picks_of(analysis, problem, choice)
    names = option_names(analysis, problem.options)
    kinds = tuple(
        KindFigures(
            kind=kind,
            name=kind_title(analysis, kind),
            options=tuple(
                _option(analysis, problem, picks, kind, place, names[kind][place])
                for place in range(len(problem.options[kind]))
            ),
        )
        for kind in range(len(problem.options))
    )
    return replace(
        found,
        kinds=kinds,
        segment_kinds=problem.kinds,
        picks=tuple(picks or ()),
        reshard_ms=_reshard_ms(problem, picks) if picks else (),
        fixed_bytes=problem.fixed_bytes,
        budget_bytes=problem.budget_bytes,
    )


def _option(
    analysis: Analysis,
    problem: Problem,
    picks: list[int] | None,
    kind: int,
    place: int,
    name: str,
) -> OptionFigures:
    option: Option = problem.options[kind][place]
    # Where the plan was not measured in full, all kinds take their fastest option.
    base = picks or [
        min(range(len(rows)), key=lambda i: rows[i].time_ms)
        for rows in (problem.options[k] for k in problem.kinds)
    ]
    swapped = [
        place if k == kind else pick
        for k, pick in zip(problem.kinds, base, strict=True)
    ]
    taken = sum(
        (k, pick) == (kind, place)
        for k, pick in zip(problem.kinds, picks or (), strict=False)
    )
    return OptionFigures(
        name=name,
        words=candidate_words(analysis, kind, option.candidate),
        segment_ms=option.time_ms,
        state_bytes=option.state_bytes,
        residual_bytes=option.residual_bytes,
        temp_bytes=option.temp_bytes,
        step_ms=problem.cost_ms(swapped),
        memory_bytes=problem.memory_bytes(swapped),
        taken=taken,
    )


def _reshard_ms(problem: Problem, picks: list[int]) -> tuple[float, ...]:
    kinds = problem.kinds
    return tuple(
        matrix[picks[i]][picks[i + 1]]
        if (matrix := problem.edge_ms.get((kinds[i], kinds[i + 1]))) is not None
        else 0.0
        for i in range(len(picks) - 1)
    )
