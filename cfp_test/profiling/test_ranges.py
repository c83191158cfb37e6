"""Integers that pick rows are made to pick all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.profiling.inputs import counts, input_kinds, make_inputs
from cfp.program.part import cut_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace

VOCAB, OTHER = 1000, 77
TABLE = jax.ShapeDtypeStruct((VOCAB, 8), jnp.float32)
IDS = jax.ShapeDtypeStruct((64, 64), jnp.int32)


def loss(table, ids):
    rows = table[ids] @ table.T
    return jnp.take_along_axis(jax.nn.log_softmax(rows), ids[..., None], -1).mean()


USES = {
    "index": (lambda t, i: t[i].sum(), VOCAB),
    "take": (lambda t, i: jnp.take(t, i, axis=0).sum(), VOCAB),
    "another dim": (lambda t, i: jnp.take(t.T, i, axis=1).sum(), VOCAB),
    "labels and their gradient": (jax.grad(loss), VOCAB),
    "one-hot": (lambda t, i: (jax.nn.one_hot(i, OTHER) @ t[:OTHER]).sum(), OTHER),
    "shifted": (lambda t, i: t[i[:, :-1].reshape(-1)].sum(), VOCAB),
    "of two tables": (lambda t, i: t[i].sum() + t[:OTHER][i].sum(), OTHER),
    "in a loop": (
        lambda t, i: jax.lax.scan(lambda c, row: (c + t[row].sum(), None), 0.0, i)[0],
        VOCAB,
    ),
    "update": (lambda t, i: t.at[i].add(1.0), VOCAB),
    "no index": (lambda t, i: t.sum() * i.sum(), None),
}


def read(step, mesh):
    return trace(flatten_step(step, (TABLE, IDS)), mesh)[0]


@pytest.mark.parametrize("name", USES)
def test_what_picks_rows_is_found(name, mesh):
    step, count = USES[name]
    program = read(step, mesh)
    top = tuple(op.id for op in program.ops if op.parent < 0)
    assert counts(program, top).get(program.args[1]) == count
    assert program.args[0] not in counts(program, top)


def test_ids_are_of_the_whole_vocabulary(mesh):
    program = read(loss, mesh)
    part = cut_part(program, [op.id for op in program.ops if op.parent < 0])
    specs = [((),) * len(program.values[v].shape) for v in part.inputs]
    kinds = input_kinds(program, part, specs)
    arrays = make_inputs(kinds, mesh)
    [ids] = [a for a in arrays if a.dtype == jnp.int32]
    values = np.asarray(ids)
    assert values.min() >= 0 and values.max() < VOCAB
    # 4096 numbers out of 1000 leave one in sixty out.
    assert len(np.unique(values)) > 0.95 * VOCAB
    assert values.mean() == pytest.approx(VOCAB / 2, rel=0.05)
