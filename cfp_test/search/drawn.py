"""Search problems for tests: made up by hypothesis, or by hand."""

from hypothesis import strategies as st

from cfp.analysis.layout import Storage
from cfp.cost.costs import SegmentChoice
from cfp.search.solver import Option, Problem

MIB = 2**20


def option(time_ms, state, residual, temp):
    return Option(
        candidate=SegmentChoice((), Storage.USED),
        time_ms=time_ms,
        state_bytes=state * MIB,
        residual_bytes=residual * MIB,
        temp_bytes=temp * MIB,
    )


BUDGETS = st.one_of(st.none(), st.integers(1, 120))
NO_BUDGET = st.none()
# Sums of the latter are exact, so that equal is equal.
ANY = st.floats(0.1, 100.0)
EXACT = st.integers(0, 80).map(lambda eighths: eighths / 8)


@st.composite
def problems(draw, budgets=BUDGETS, times=ANY):
    size = st.integers(0, 12)
    options = st.builds(option, times, size, size, size)
    moves = st.one_of(st.just(0.0), times)
    kinds = draw(st.integers(1, 3))
    found = tuple(
        tuple(draw(st.lists(options, min_size=1, max_size=4))) for _ in range(kinds)
    )
    edges = {
        (a, b): [[draw(moves) for _ in found[b]] for _ in found[a]]
        for a in range(kinds)
        for b in range(kinds)
        if draw(st.booleans())
    }
    budget = draw(budgets)
    places = draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=5))
    far = {
        (i, j): [[draw(moves) for _ in found[places[j]]] for _ in found[places[i]]]
        for i in range(len(places))
        for j in range(i + 2, len(places))
        if draw(st.integers(0, 2)) == 0
    }
    return Problem(
        kinds=tuple(places),
        far_ms=far,
        options=found,
        edge_ms=edges,
        fixed_bytes=draw(st.integers(0, 5)) * MIB,
        budget_bytes=None if budget is None else budget * MIB,
    )
