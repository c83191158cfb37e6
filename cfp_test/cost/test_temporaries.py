"""Estimated memory of segments, beside that of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import Costs, segment_candidate
from cfp.cost.memory import is_in_memory, peak_bytes, steps_of, summed_in_two_orders
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.collectives import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.choices import estimate_kinds
from cfp.search.guided import estimate_options
from cfp.search.requests import whole_job
from cfp.settings import Replacing
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

LAYERS, ROWS, HIDDEN, WIDE, DEVICES = 6, 64, 32, 96, 4
FLOAT_BYTES = 4


def step(remat, params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss(params):
        h, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)
        return jnp.square(h).mean()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def kept_and_needed(remat, name):
    """Returns a preset's memory by estimate, and as compiled."""
    mesh = make_mesh((("x", DEVICES),))
    params = {"up": normal(0, LAYERS, HIDDEN, WIDE)}
    params["down"] = normal(1, LAYERS, WIDE, HIDDEN)
    flat = flatten_step(
        step,
        (remat, params, normal(2, ROWS, HIDDEN)),
        static_argnums=0,
        donate_argnums=1,
    )
    analysis = analyze(trace(flat, mesh)[0], tuple(mesh.shape.items()))
    rates = Rates.of_virtual_devices(mesh)
    choice = presets(analysis.frame)[name]
    found = estimate_options(
        estimate_kinds(analysis, rates),
        {name: choice},
        Costs(analysis, rates),
        per_kind=1,
        budget_bytes=None,
        replacing=Replacing(),
    )
    kept = needed = 0
    for segment in analysis.segments:
        key = segment_candidate(analysis, segment.index, choice)
        options = found.problem.options[segment.kind]
        [option] = [o for o in options if o.candidate == key]
        kept += option.residual_bytes
        needed = max(needed, kept + option.temp_bytes)
    job = whole_job(analysis, choice, (), name)
    built = build(analysis.frame.program, mesh, job, BuildEnvironment())
    assert isinstance(built, Built)
    return kept, needed, built.temp_bytes


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("name", ["data_parallel", "fully_sharded"])
def test_a_loop_needs_its_gradients_and_one_iteration(remat, name):
    kept, needed, compiled = kept_and_needed(remat, name)
    inputs = LAYERS * ROWS * HIDDEN * FLOAT_BYTES // DEVICES
    wide = LAYERS * ROWS * WIDE * FLOAT_BYTES // DEVICES
    assert kept >= inputs + (0 if remat else wide)
    # All layers' gradients, stacked; sharded where the state is.
    gradients = 2 * LAYERS * HIDDEN * WIDE * FLOAT_BYTES
    if name == "fully_sharded":
        gradients //= DEVICES
    layer = (4 * ROWS * WIDE // DEVICES + 4 * HIDDEN * WIDE) * FLOAT_BYTES
    assert kept + gradients <= needed <= kept + gradients + 2 * layer
    assert needed == pytest.approx(compiled, rel=0.35)


def scores_step(turned, params, x):
    """A softmax over the last dim of scores that one product gives in another order."""

    def loss(params):
        spec = "qd,kd->kq" if turned == 1 else "qd,kd->qk"
        scores = jnp.einsum(spec, x @ params["q"], x @ params["k"])
        for _ in range(turned):
            scores = jnp.tanh(scores.T)
        weights = jax.nn.softmax(scores)
        return jnp.square(jnp.einsum("qk,kd->qd", weights, x)).mean()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.mark.parametrize("turned", [0, 1, 2], ids=["as_it_lies", "once", "twice"])
def test_what_is_summed_and_read_in_two_orders_is_in_memory(turned):
    """The weights' gradient times the weights, of which a softmax sums rows."""
    rows, width = 48, 16
    params = {"q": normal(0, width, width), "k": normal(1, width, width)}
    args = (turned, params, normal(2, rows, width))
    flat = flatten_step(scores_step, args, static_argnums=0, donate_argnums=1)
    mesh = make_mesh((("x", 2),))
    analysis = analyze(trace(flat, mesh)[0], tuple(mesh.shape.items()))
    program = analysis.frame.program
    found = summed_in_two_orders(program)
    assert [program.values[v].shape for v in found] == [(rows, rows)] * (turned == 1)
    for v in found:
        op = program.ops[program.values[v].producer]
        assert op.kind == "multiply" and "transpose(" in op.scope


def test_transposes_with_a_reshape_between_them_do_not_cancel():
    def step(x):
        turned = x.T.reshape(12, 32).T.reshape(16, 24)
        return (x * turned).sum(axis=1)

    program, _ = trace(flatten_step(step, (normal(0, 16, 24),)), make_mesh((("x", 2),)))
    [v] = summed_in_two_orders(program)
    assert program.ops[program.values[v].producer].kind == "multiply"


def test_what_a_tensor_in_memory_is_made_of_is_free_behind_it():
    """Rows of a product in two orders are summed: it is read, not its factors."""
    rows = 48

    def step(x, y, w):
        product = (x @ y) * (y @ x).T
        return (product / product.sum(axis=1, keepdims=True)) @ w

    args = (normal(0, rows, rows), normal(1, rows, rows), normal(2, rows, 2))
    program, _ = trace(flatten_step(step, args), make_mesh((("x", 2),)))
    [v] = summed_in_two_orders(program)
    assert program.ops[program.values[v].producer].kind == "multiply"
    size = FLOAT_BYTES * rows * rows
    ops = [op.id for op in program.ops]
    steps = steps_of(program, ops, frozenset())
    peak = peak_bytes(steps, lambda v: program.values[v].size_bytes // size * size)
    # Both factors and the product; not these and the quotient.
    assert peak == 3 * size


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("readers", [2, 3])
def test_what_many_would_make_again_is_in_memory(readers, in_loop):
    """Two readers of a sum of three read six; or one is written, and read twice."""

    def step(a, b, c, ws):
        def layer(a, _):
            total = a + b + c
            made = [jnp.tanh(i * total) @ w for i, w in enumerate(ws[:readers])]
            return total, sum(one.sum() for one in made)

        return jax.lax.scan(layer, a, None, 2)[1] if in_loop else layer(a, None)[1]

    rows = 48
    a, b, c, *ws = (normal(i, rows, rows) for i in range(6))
    program, _ = trace(flatten_step(step, (a, b, c, ws)), make_mesh((("x", 2),)))
    added = [op for op in program.ops if op.kind == "add"]
    users = {op.results[0]: program.users[op.results[0]] for op in added}
    [v] = [
        v
        for v, uses in users.items()
        if any(program.ops[user].kind == "multiply" for user, _ in uses)
    ]
    # What a loop hands on has the loop's memory.
    assert is_in_memory(program, v) is (readers == 3 and not in_loop)


def test_levels_of_an_associative_scan_are_in_memory():
    """Other tensors are three of 0.5 MiB. For an H200 XLA needs 1.63 MiB in all."""

    def both(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    def step(params, x):
        decay, added = jax.nn.sigmoid(x @ params["a"]), x @ params["in"]
        _, h = jax.lax.associative_scan(both, (decay, added), axis=1)
        return h @ params["out"]

    params = {name: normal(i, 128, 128) for i, name in enumerate(("in", "a", "out"))}
    args = params, normal(3, 4, 256, 128)
    program, _ = trace(flatten_step(step, args), make_mesh((("x", 2),)))
    steps = steps_of(program, [op.id for op in program.ops], frozenset())
    sizes = {v: value.size_bytes for v, value in enumerate(program.values)}
    sizes |= dict.fromkeys(program.outputs, 0)
    peak = peak_bytes(steps, sizes.__getitem__)
    assert 1.63 * 2**20 <= peak <= 2 * 2**20
