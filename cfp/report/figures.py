"""Gathers the numbers that a plan was chosen by, while the search's data are there."""

from __future__ import annotations

from dataclasses import replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.plan.drawn import block_figures
from cfp.plan.figures import (
    Figures,
    KindFigures,
    OptionFigures,
)
from cfp.plan.plan import Plan
from cfp.profiling.collectives import Rates
from cfp.report.words import candidate_words, kind_title, option_names
from cfp.search.assemble import picks_of
from cfp.search.problem import Option, Problem


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
    found = Figures(blocks=block_figures(analysis, choice, rates))
    if problem is not None:
        found = _searched(found, analysis, choice, problem)
    return replace(plan, figures=found)


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
