"""Parameters of tests: some combinations in each run, all of them nightly."""

import itertools
from collections.abc import Collection, Iterable

import pytest

Factors = dict[str, list[object]]
Row = tuple[int, ...]  # For each factor, the place of a value.


def at_night(cases: Iterable[object]) -> list[object]:
    """Marks cases of a test as nightly: those that walk the path of another case.

    Args:
        cases: a value each, or for several arguments a tuple.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly
        )
        for case in cases
    ]


def cover_values(**factors: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test so that each value is in some row of each run.

    For factors of which one does not change what the test may find of another.

    Args:
        factors: the values of each argument of the test.
    """
    known = {name: list(values) for name, values in factors.items()}
    sizes = [len(values) for values in known.values()]
    turns = range(max(sizes))
    return _parametrize(known, {tuple(turn % size for size in sizes) for turn in turns})


def cover_pairs(**factors: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test so that any two values of two factors meet in each run.

    Args:
        factors: the values of each argument of the test, three arguments at least.
    """
    known = {name: list(values) for name, values in factors.items()}
    places = (range(len(values)) for values in known.values())
    rows = list(itertools.product(*places))
    missing, daily = set().union(*map(_pairs, rows)), set()
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        daily.add(best)
        missing -= _pairs(best)
    return _parametrize(known, daily)


def _pairs(row: Row) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def _parametrize(factors: Factors, daily: Collection[Row]) -> pytest.MarkDecorator:
    rows = itertools.product(*map(enumerate, factors.values()))
    return pytest.mark.parametrize(
        tuple(factors),
        [
            pytest.param(
                *(value for _, value in row),
                marks=()
                if tuple(place for place, _ in row) in daily
                else pytest.mark.nightly,
            )
            for row in rows
        ],
    )
