"""Parts of a product of parameters that run with all tests, and nightly."""

import itertools

import pytest

from cfp_test.support.covering import cover_pairs, cover_values

FACTORS = {"one": "abc", "other": range(5), "third": [True, False], "last": "xyz"}


@pytest.mark.parametrize(
    ("cover", "size", "most"), [(cover_values, 1, 5), (cover_pairs, 2, 20)]
)
def test_all_values_and_all_pairs_are_in_each_run(cover, size, most):
    names, rows = cover(**FACTORS).args
    assert names == tuple(FACTORS)
    assert [row.values for row in rows] == [*itertools.product(*FACTORS.values())]
    daily = [row.values for row in rows if not row.marks]
    assert len(daily) <= most
    for places in itertools.combinations(range(len(FACTORS)), size):
        values = [list(FACTORS[names[place]]) for place in places]
        met = {tuple(row[place] for place in places) for row in daily}
        assert met == set(itertools.product(*values))


def test_what_is_not_in_each_run_is_nightly():
    _, rows = cover_pairs(**FACTORS).args
    marks = {mark.name for row in rows for mark in row.marks}
    assert marks == {"nightly"}
