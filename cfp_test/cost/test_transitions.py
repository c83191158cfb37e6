"""Collectives of a change of sharding."""

import pytest

from cfp.cost.terms import transition

MESH = (("x", 4), ("y", 2))
R, X, Y, XY = (), ("x",), ("y",), ("x", "y")


@pytest.mark.parametrize(
    ("have", "partial", "want", "steps"),
    [
        ((X, R), (), (X, R), ()),
        ((R, R), (), (X, R), ()),  # a slice costs nothing
        ((X, R), (), (R, R), (("all-gather", X, 800.0),)),
        ((X, R), (), (R, X), (("all-to-all", X, 800.0),)),
        ((X, Y), (), (R, Y), (("all-gather", X, 400.0),)),
        ((XY, R), (), (X, R), (("all-gather", Y, 200.0),)),
        ((R, R), X, (R, R), (("all-reduce", X, 800.0),)),
        ((R, R), X, (R, X), (("reduce-scatter", X, 800.0),)),
        ((Y, R), X, (Y, X), (("reduce-scatter", X, 400.0),)),
        ((R, R), XY, (X, R), (("reduce-scatter", X, 800.0), ("all-reduce", Y, 200.0))),
        ((X, R), Y, (R, R), (("all-reduce", Y, 200.0), ("all-gather", X, 800.0))),
    ],
)
def test_steps(have, partial, want, steps):
    assert transition(800.0, have, partial, want, MESH) == steps
