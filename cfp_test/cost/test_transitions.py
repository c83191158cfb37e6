"""Collectives of a change of sharding."""

import pytest

from cfp.cost.terms import Terms, transition
from cfp.profiling.collectives import KINDS, Rates
from cfp_test.analysis.generating import GENERATING, LAYERS, ROWS, TOKENS
from cfp_test.support.checking import prepare

RATES = Rates(
    mesh=(("x", 4),),
    curves={(kind, ("x",)): ((1, 1e-3), (1_000, 1.0)) for kind in KINDS},
    matmul_flops_per_ms={"float32": 1e6},
    memory_bytes_per_ms=1e6,
)
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("written first", {4: {TOKENS}, 2: {1}}),  # Caches; the tokens.
        ("one token, scanned layers", {4: {LAYERS}, 5: {1}}),  # A layer's cache; all.
    ],
)
def test_what_is_written_in_a_loop_is_resharded_as_often_as_it_is_read(name, expected):
    frame = prepare(name, GENERATING[name], (("x", 4),)).frame
    terms, program = Terms(frame, RATES), frame.program
    found = {}
    for op in program.ops:
        shape = program.shape(op.results[0]) if op.results else ()
        if op.kind == "dynamic_update_slice" and ROWS in shape:
            have = tuple(("x",) if d == 0 else () for d in range(len(shape)))
            want = ((),) * len(shape)
            value = terms.same(op.results[0])
            size = program.values[value].size_bytes
            total = terms.move_ms(value, (have, ()), (want,))
            turns = total / terms.transition_ms(size, have, (), want)
            found.setdefault(len(shape), set()).add(round(turns))
    assert found == expected
