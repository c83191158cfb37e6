"""Sums that XLA's partitioner gets wrong are no strategies of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.analyze import build_frame
from cfp.analysis.strategies import NONE, block_strategies
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

AXES = (("x", 2), ("y", 2), ("z", 2))


def product(x, y):
    return jnp.einsum("bmk,bkn->bmn", x, y)


def test_no_strategy_scatters_part_of_a_sum_to_a_sharded_batch():
    step = flatten_step(product, (jnp.ones((8, 8, 8)), jnp.ones((8, 8, 8))))
    frame = build_frame(trace(step, make_mesh(AXES))[0], AXES)
    (block,) = frame.blocks
    rule = frame.program.ops[block.anchor].rule
    tensors = (*rule.operands, *rule.results)
    (batch,) = (f for f in range(4) if all((f,) in dims for dims in tensors))
    (summed,) = rule.reduction
    found = block_strategies(frame.program, block, AXES)
    exits = [
        [choice.exit for choice in strategy if choice.inner == summed]
        for strategy in found
        if batch in {choice.inner for choice in strategy}
    ]
    assert [batch, batch] in exits and [batch] in exits
    assert not any(len(one) > 1 and one.count(batch) == 1 for one in exits)


def rows(x, ids):
    return jnp.take(x, ids, axis=1)


ROWS = (np.ones((2, 4), np.float32), np.array([1, 3, 0, 2]))


def test_plain_jax_cuts_slices_that_are_too_large():
    """A failure means that jaxlib is mended, and the correction may go."""
    mesh = make_mesh(AXES)
    ins = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("z", "y"), ("y",))]
    out = NamedSharding(mesh, PartitionSpec("z", ("x", "y")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Slice dim size 2"):
        jax.jit(rows, in_shardings=ins, out_shardings=out)(*ROWS)


def test_no_strategy_of_a_gather_is_one_that_does_not_compile():
    step = flatten_step(rows, ROWS)
    frame = build_frame(trace(step, make_mesh(AXES))[0], AXES)
    [block] = [b for b in frame.blocks if frame.program.ops[b.anchor].kind == "gather"]
    rule = frame.program.ops[block.anchor].rule
    (beside,), (indexed,) = rule.operands[0]
    (ids,) = rule.operands[1][0]
    found = [
        {(one.inner, one.exit) for one in strategy}
        for strategy in block_strategies(frame.program, block, AXES)
    ]
    scattered = (indexed, ids)
    assert {scattered, (ids, NONE), (NONE, NONE)} in found
    assert {scattered, (beside, NONE), (NONE, NONE)} in found
    assert {scattered, (ids, NONE), (beside, NONE)} not in found
