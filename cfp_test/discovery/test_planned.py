"""Kernels whose rule was discovered, in plans and under plain JAX: really sharded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cfp
from cfp.program import partitioned
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.discovery import kernels
from cfp_test.discovery.kernels import BATCH, ROWS_OF_BLOCK, WIDTH
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

MESH = make_mesh((("x", 4),))
QUICK = cfp.PlannerSettings(race=False)


@functools.cache
def rules():
    """Rules of the norm and of its gradients, found once."""
    x, scale = jnp.ones((16, WIDTH)), jnp.ones(WIDTH)
    forward = cfp.discover_rules(kernels.rms_norm, x, scale)
    backward = cfp.discover_rules(kernels.rms_norm_backward, x, scale, x)
    return forward, backward


def step_of(is_wrapped):
    """The training step, its kernels with their rules or as they are."""
    if not is_wrapped:
        return kernels.training(kernels.rms_norm, kernels.rms_norm_backward)
    forward, backward = rules()
    return kernels.training(
        forward.wrap(kernels.rms_norm), backward.wrap(kernels.rms_norm_backward)
    )


def hlo_of(plan, step, args):
    return plan.compile(step, *args).as_text()


def loop_rows(text):
    """Rows of the arrays that interpreted kernels write into, block by block."""
    shapes = re.findall(rf"f32\[(\d+),{WIDTH}\][^ ]* dynamic-update-slice\(", text)
    return {int(rows) for rows in shapes}


def assert_as_one_device(plan, step, args):
    expected = jax.jit(step)(*args)
    found = plan.apply(step)(*args)
    for got, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "batch"),
    [(None, 4096), *at_night([("data_parallel", BATCH)])],
    ids=["plan", "preset"],
)
def test_a_discovered_kernel_is_planned_and_runs_on_parts(preset, batch, tmp_path):
    step, args = step_of(is_wrapped=True), kernels.arguments(batch)
    how = {"mesh": MESH, "cache_dir": tmp_path, "settings": QUICK, "quiet": True}
    plan = cfp.plan(step, *args, preset=preset, **how)
    text = hlo_of(plan, step, args)
    assert loop_rows(text) == {batch // 4}
    assert "all-gather" not in text and "all-reduce" in text
    assert "custom_call" not in str(plan)  # Nothing that every device runs in full.
    assert_as_one_device(plan, step, args)


def test_without_the_rule_every_device_runs_the_kernel_in_full(tmp_path):
    step, args = step_of(is_wrapped=False), kernels.arguments()
    how = {"mesh": MESH, "cache_dir": tmp_path, "settings": QUICK, "quiet": True}
    plan = cfp.plan(step, *args, preset="data_parallel", **how)
    assert BATCH in loop_rows(hlo_of(plan, step, args))
    assert_as_one_device(plan, step, args)


def test_a_refused_kernel_stays_whole_and_right(tmp_path):
    rule = cfp.discover_rules(kernels.running_sum, jnp.ones((8, WIDTH)))
    assert "a" in rule.whole
    scan = rule.wrap(kernels.running_sum)

    def step(w, x):
        return scan(x @ w)

    args = (jnp.eye(WIDTH), kernels.arguments()[1])
    how = {"mesh": MESH, "cache_dir": tmp_path, "settings": QUICK, "quiet": True}
    plan = cfp.plan(step, *args, preset="data_parallel", **how)
    text = hlo_of(plan, step, args)
    assert loop_rows(text) <= {BATCH}
    assert_as_one_device(plan, step, args)


def test_plain_jax_shards_it_as_well():
    forward, _ = rules()
    norm = jax.jit(forward.wrap(kernels.rms_norm))
    x = jax.device_put(
        jax.random.normal(jax.random.key(0), (BATCH, WIDTH)),
        NamedSharding(MESH, P("x")),
    )
    scale = jnp.full(WIDTH, 2.0)
    text = norm.lower(x, scale).compile().as_text()
    assert loop_rows(text) == {BATCH // 4} and "all-gather" not in text
    found = norm(x, scale)
    assert found.sharding.spec[0] == "x"
    np.testing.assert_allclose(found, kernels.rms_norm_written(x, scale), rtol=1e-5)


def sums(fn, rule_args, args, shardings):
    """A function under plain JAX by its discovered rule: compiled text and results."""
    op = jax.jit(cfp.discover_rules(fn, *rule_args).wrap(fn))
    args = [
        jax.device_put(one, NamedSharding(MESH, spec))
        for one, spec in zip(args, shardings, strict=True)
    ]
    return op.lower(*args).compile().as_text(), op(*args)


def test_sums_over_parts_are_added_up():
    keys = jax.random.split(jax.random.key(1))
    x, y = jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (16, 4))
    text, found = sums(lambda x, y: x @ y, (x, y), (x, y), (P(None, "x"), P("x", None)))
    assert "all-reduce" in text and "f32[8,4]{1,0} dot(" in text.replace(" %", " ")
    assert "all-gather" not in text
    np.testing.assert_allclose(found, x @ y, rtol=1e-4, atol=1e-5)


def test_one_result_in_parts_and_one_added_up():
    x, scale = kernels.arguments()[1], jnp.ones(WIDTH)
    args = (x, scale, x + 1)
    text, found = sums(kernels.rms_norm_backward, args, args, (P("x"), P(), P("x")))
    assert "all-reduce" in text and "all-gather" not in text
    for got, wanted in zip(found, kernels.rms_norm_backward(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def call_of(op, *shapes, mesh=MESH):
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program, _ = trace(flatten_step(lambda *args: op(*args), avals), mesh)
    calls = [partitioned.call_of(one.attributes) for one in program.ops]
    (rule,) = (one.rule for one in program.ops if one.kind == "custom_call")
    return next(call for call in calls if call is not None), rule


@pytest.mark.parametrize(("rows", "pieces"), [(32, 16), (6, 3), (7, 1)])
def test_factors_have_as_many_pieces_as_the_kernel_has_blocks(rows, pieces):
    """Each device has all of the rest of each dim: no part ends inside of a block."""
    forward, _ = rules()
    call, rule = call_of(forward.wrap(kernels.rms_norm), (rows, WIDTH), (WIDTH,))
    assert call.asked.sizes == ((pieces,) if pieces > 1 else ())
    if pieces > 1:
        factor = rule.operands[0][0][0]
        assert rule.sizes[factor] == pieces == rows // ROWS_OF_BLOCK
        assert not rule.splits(factor, 2 * pieces)
    else:
        assert rule is None  # Nothing of it may be sharded.


def test_a_device_has_whole_blocks_on_a_mesh_of_more_devices_than_blocks():
    forward, _ = rules()
    norm = jax.jit(forward.wrap(kernels.rms_norm))
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))  # Two blocks on four devices.
    split = jax.device_put(x, NamedSharding(MESH, P("x")))
    np.testing.assert_allclose(
        norm(split, jnp.ones(WIDTH)), kernels.rms_norm_written(x, 1.0), rtol=1e-5
    )


def test_a_sum_over_one_operand_is_a_factor():
    rule = cfp.discover_rules(lambda x: (x * x).sum(0), jnp.ones((8, 4)))
    call, read = call_of(rule.wrap(lambda x: (x * x).sum(0)), (8, 4))
    assert call.asked.groups == (((0, 0),), ((0, 1), (1, 0)))
    assert [read.sizes[factor] for factor in read.reduction] == [8]


def test_equal_rules_of_one_function_are_one_op():
    forward, _ = rules()
    again = cfp.ShardingRule(
        forward.text, whole=forward.whole, multiples=forward.multiples
    )
    before = len(partitioned._DESCRIBED)
    names = {
        call_of(rule.wrap(kernels.rms_norm), (64, WIDTH), (WIDTH,))[0].name
        for rule in (forward, again)
    }
    assert len(names) == 1 and len(partitioned._DESCRIBED) <= before + 1


def test_other_dims_than_the_rule_has_are_refused():
    forward, _ = rules()
    with pytest.raises(cfp.CfpError, match="other arguments than its rule"):
        call_of(forward.wrap(lambda x, y: x + y), (8, 4), (8, 4))
