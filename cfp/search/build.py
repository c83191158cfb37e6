"""The search problem over some options of a program's segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cfp.cost.costs import Costs
from cfp.search.problem import Option, Problem


def build_problem(
    costs: Costs, options: Sequence[Sequence[Option]], budget_bytes: int | None
) -> Problem:
    """The search problem over some options of every kind of segment.

    Args:
        costs: of the program's segments.
        options: for each kind what may be chosen.
        budget_bytes: memory of one device, or None.
    """
    analysis = costs.analysis
    segments, kinds = analysis.segments, [s.kind for s in analysis.segments]
    candidates = [[option.candidate for option in row] for row in options]
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for left, right in pairwise(segments):
        pairs.setdefault((left.kind, right.kind), (left.index, right.index))
    far = {
        (a, b): costs.reshardings_ms(a, b, candidates[kinds[a]], candidates[kinds[b]])
        for a, b in sorted({(min(pair), max(pair)) for pair in analysis.passing})
        if b > a + 1
    }
    return Problem(
        kinds=tuple(kinds),
        options=tuple(map(tuple, options)),
        edge_ms={
            (a, b): costs.reshardings_ms(*pair, candidates[a], candidates[b])
            for (a, b), pair in pairs.items()
        },
        far_ms={pair: rows for pair, rows in far.items() if any(map(any, rows))},
        fixed_bytes=costs.fixed_bytes,
        budget_bytes=budget_bytes,
    )
