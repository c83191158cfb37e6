"""Resharding one tensor, measured and kept."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.profiling import moves
from cfp.profiling.builder import Built
from cfp.profiling.inputs import make_inputs
from cfp.profiling.key import environment_parts
from cfp.profiling.moves import Move, known_moves, measure_moves
from cfp.program.graft import partition_spec
from cfp.program.trace import planning_mesh

ROWS, COLUMNS, WHOLE = (("x",), ()), ((), ("x",)), ((), ())
ROWS_TO_COLUMNS = Move((16, 32), "float32", ROWS, COLUMNS)


@pytest.fixture(autouse=True)
def fast(monkeypatch, quick):
    monkeypatch.setattr(moves, "_TIMING", quick)


@pytest.fixture(scope="module")
def square():
    devices = jax.devices()[:4]
    return planning_mesh(jax.make_mesh((2, 2), ("x", "y"), devices=devices))


@pytest.fixture(scope="module")
def where(square):
    return environment_parts(list(square.devices.flat))


def built_of(move, mesh):
    built = moves._build(move.key(mesh, ()), move, mesh)
    assert isinstance(built, Built)
    return built


@pytest.mark.parametrize(
    ("have", "want", "kinds"),
    [
        (ROWS, COLUMNS, {"all-to-all"}),
        (ROWS, WHOLE, {"all-gather"}),
        (WHOLE, ROWS, set()),
    ],
)
def test_the_program_is_the_collective_that_the_move_needs(square, have, want, kinds):
    built = built_of(Move((16, 32), "bfloat16", have, want), square)
    assert {c.kind for c in built.collectives} == kinds
    assert built.alias_bytes == built.output_bytes


specs = st.permutations(["x", "y", None, None]).map(
    lambda names: tuple((name,) if name else () for name in names[:2])
)


@settings(max_examples=12, deadline=None)
@given(have=specs, want=specs)
def test_what_comes_out_is_what_went_in(square, have, want):
    move = Move((8, 4), "float32", have, want)
    inputs = make_inputs(move.inputs, square, donated=[1])
    before = np.asarray(inputs[0])
    [after] = built_of(move, square).compiled(*inputs)
    np.testing.assert_array_equal(np.asarray(after), before)
    assert after.sharding.is_equivalent_to(
        jax.NamedSharding(square, partition_spec(want)), 2
    )


def test_moves_are_measured_once_and_known_to_all(square, store, where, live_arrays):
    back = Move((16, 32), "float32", COLUMNS, ROWS)
    assert known_moves([ROWS_TO_COLUMNS, back], square, store, where) == {}
    events = []
    found = measure_moves(
        [ROWS_TO_COLUMNS, back, ROWS_TO_COLUMNS],
        square,
        store,
        where,
        progress=events.append,
    )
    assert list(found) == [ROWS_TO_COLUMNS, back]
    assert all(ms > 0 for ms in found.values())
    assert (events[-1].total, events[-1].cached, len(store)) == (2, 0, 2)
    again = measure_moves([back], square, store, where, progress=events.append)
    assert again == {back: found[back]}
    assert events[-1].cached == 1
    assert known_moves([back], square, store, where) == again
    assert live_arrays() == 0


def test_keys_tell_moves_and_places_apart(square, where):
    other = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    different = [
        ROWS_TO_COLUMNS,
        Move((16, 32), "float32", COLUMNS, ROWS),
        Move((16, 32), "bfloat16", ROWS, COLUMNS),
        Move((32, 16), "float32", ROWS, COLUMNS),
    ]
    keys = {move.key(square, where).digest for move in different}
    keys |= {ROWS_TO_COLUMNS.key(other, where).digest}
    keys |= {ROWS_TO_COLUMNS.key(square, (*where, ("jax", "other"))).digest}
    assert len(keys) == 6


def test_a_move_that_fails_is_left_out(square, store, where, monkeypatch):
    def crash(built, *_, **__):
        return built.record("crashed", reason="boom")

    monkeypatch.setattr(moves, "execute", crash)
    assert measure_moves([ROWS_TO_COLUMNS], square, store, where) == {}
    [record] = store.records()
    assert record.status == "crashed"
    assert known_moves([ROWS_TO_COLUMNS], square, store, where) == {}
