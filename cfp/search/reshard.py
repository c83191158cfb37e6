"""Which reshardings between segments are worth measuring.

The search adds to the times of two neighbouring segments what the values between them
take to be handed over, priced by the curves of collectives. The compiler may do
otherwise than the curves assume: in several steps, or by gathering all. Where that
matters, the handover is measured: tensor by tensor, as forward and backward passes hand
over at different times. Equal moves are one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cfp.analysis.analyze import Analysis
from cfp.errors import DeviceError
from cfp.profiling.collectives import Rates
from cfp.profiling.moves import Move
from cfp.search.costs import Costs, measured_options
from cfp.search.effort import Explored
from cfp.search.problem import Option
from cfp.settings import RESHARD_IS_WORTH, RESHARDS_MEASURED


def moves_between_measured(
    analysis: Analysis, rates: Rates, found: Explored
) -> list[Move]:
    """The moves that are worth it between the segments as they were measured.

    None if some segment could not be measured at all, as the search will say.
    """
    costs = Costs(analysis, rates)
    try:
        options = measured_options(costs, found.wanted, found.records)
    except DeviceError:
        return []
    return moves_worth_measuring(costs, options)


def moves_worth_measuring(
    costs: Costs,
    options: Sequence[Sequence[Option]],
    most: int = RESHARDS_MEASURED,
    share: float = RESHARD_IS_WORTH,
) -> list[Move]:
    """The most expensive moves whose price may decide what is chosen.

    Args:
        costs: of the program's segments, by the curves.
        options: for each kind of segment what may be chosen.
        most: how many, at most.
        share: of the times of both segments, for a handover to matter.

    Returns:
        Moves, the most expensive first.
    """
    prices: dict[Move, float] = {}
    seen = set()
    for left, right in pairwise(costs.analysis.segments):
        if (left.kind, right.kind) in seen:
            continue
        seen.add((left.kind, right.kind))
        pairs = [
            (costs.handover(left.index, right.index, a.candidate, b.candidate), a, b)
            for a in options[left.kind]
            for b in options[right.kind]
        ]
        best_ms = min(
            a.time_ms + b.time_ms + sum(price for _, price in moves)
            for moves, a, b in pairs
        )
        for moves, a, b in pairs:
            alone_ms = a.time_ms + b.time_ms
            if alone_ms >= best_ms and sum(price for _, price in moves) > 0:
                continue  # Were it free, others would still be as fast.
            for move, price in moves:
                if price > share * alone_ms and costs.can_measure(move):
                    prices[move] = max(price, prices.get(move, 0.0))
    return sorted(prices, key=lambda move: -prices[move])[:most]
