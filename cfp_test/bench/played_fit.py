"""Finds the constants of predicted steps.

    python -m cfp_test.bench.played_fit

Of the steps of two H200 on ``docs/results/played_h200x2_202611.md`` and
``played_links_h200x2_202611.md``: in a run with NVLink, in another with it, and in that
without peer-to-peer access. Steps of four H200 have no part in them.
"""

from __future__ import annotations

import itertools
import json
import statistics

from cfp.cost.step_time import Constants
from cfp_test.bench import played_links_page, played_page

_COSTS = [k / 20 for k in range(6, 21)]


def loss(constants: Constants) -> float:
    """The mean error of the three runs, each of which counts as much."""
    rates = played_page.rates_of()
    first = json.loads(played_page.FILE.read_text())
    second = json.loads(played_links_page.FILE.read_text())
    found = played_page.pairs(first, rates, played_page.median_ms)
    runs = [
        played_page.errors(found, rates, constants),
        *(
            [one.error for one in played_links_page.steps(second, links, constants)]
            for links in ("two", "off")
        ),
    ]
    return statistics.fmean(statistics.fmean(map(abs, errors)) for errors in runs)


def fit() -> Constants:
    """The costs of hidden collectives of the least loss, and the sustained rate."""
    rates = played_page.rates_of()
    found = played_page.pairs(json.loads(played_page.FILE.read_text()), rates)
    tried = (
        Constants(slowed_by=cost, slowed_by_all_reduce=of_sums)
        for cost, of_sums in itertools.product(_COSTS, _COSTS)
        if of_sums <= cost
    )
    best = min(tried, key=loss)
    return Constants(
        sustained=played_page.sustained_of(found, rates),
        slowed_by=best.slowed_by,
        slowed_by_all_reduce=best.slowed_by_all_reduce,
    )


if __name__ == "__main__":
    print(fit())
