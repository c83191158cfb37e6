"""Lookups in a table that is split by columns, whose results are exchanged for rows."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import AxisChoice, block_strategies, describe
from cfp.plan.describe import axis_roles
from cfp.plan.parts import roles_text
from cfp.profiling.hlo import collectives_in
from cfp_test.support.checking import compile_choice, differences, prepare

VOCABULARY, ROWS, COLUMNS = 64, 16, 32
AXES = {"x": 2, "y": 2, "z": 2}


def embedding():
    """A step of a table and a matrix: looked-up rows are normalized before both."""

    def loss(params, tokens):
        x = params["table"][tokens]
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return jnp.square(x @ params["w"]).sum()

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    random = np.random.default_rng(0)
    params = {
        "table": random.normal(size=(VOCABULARY, COLUMNS)).astype(np.float32),
        "w": random.normal(size=(COLUMNS, COLUMNS)).astype(np.float32),
    }
    tokens = random.integers(0, VOCABULARY, ROWS).astype(np.int32)
    return step, (params, tokens), {"donate_argnums": 0}


@cache
def on(*axes):
    """The step on a mesh, its lookup, and the other blocks split by rows."""
    case = prepare("embedding", embedding, tuple((axis, AXES[axis]) for axis in axes))
    frame = case.frame
    [lookup] = [b for b in frame.blocks if frame.program.ops[b.anchor].kind == "gather"]
    return case, lookup


def ran(case, lookup, strategy, storage):
    """Collectives and wrong results, with the other blocks split by rows."""
    frame, rows = case.frame, (AxisChoice(0),) * len(case.frame.mesh)
    blocks = tuple(strategy if one is lookup else rows for one in frame.blocks)
    run = compile_choice(case, Choice(blocks, (storage,) * len(frame.groups)))
    sent = collectives_in(run.compiled.as_text())
    return sent, differences(case, run())


def test_columns_are_exchanged_and_no_table_is_gathered_or_reduced():
    case, lookup = on("x")
    op = case.frame.program.ops[lookup.anchor]
    rows, columns = op.rule.results[0][0][0], op.rule.results[0][1][0]
    [strategy] = [
        one
        for one in block_strategies(case.frame.program, lookup, case.frame.mesh)
        if one == (AxisChoice(columns, rows),)
    ]
    assert describe(op, case.frame.mesh, strategy) == (
        "SR = RS x RR @ {0} (alltoall @ 0)"
    )
    roles = axis_roles(case.frame, op, strategy)
    assert roles_text(roles) == "x: columns (dim 1, size 32), exchanged for dim 0"
    sent, wrong = ran(case, lookup, strategy, Storage.USED)
    assert not wrong
    table_bytes, result_bytes = 4 * VOCABULARY * COLUMNS, 4 * ROWS * COLUMNS
    exchanged = Counter()
    for one in sent:
        exchanged[one.bytes] += one.count * (one.kind == "all-to-all")
    assert exchanged[result_bytes // 2] == 2, "forward, and the gradient's rows"
    assert max(one.bytes for one in sent) < table_bytes
    # Split by rows the table is whole on each device, and its gradient is summed.
    sent, wrong = ran(case, lookup, (AxisChoice(rows),), Storage.USED)
    assert not wrong
    assert sum(one.bytes for one in sent if one.kind == "all-reduce") >= table_bytes
