"""Fully sharded within hosts and replicated across: results, and what is sent where."""

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Choice, Storage, lay_out
from cfp.analysis.presets import presets
from cfp.plan.describe import block_moves
from cfp.profiling.hlo import collectives_in
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import Case, compile_choice, differences, make_mesh

SIZES = (("x", 2), ("y", 4))
WIDTH, ROWS = 32, 64


def train_step(state, rows):
    """A step of a perceptron by Adam; its layers are in a loop."""
    params, moments = state

    def loss_of(params):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        x, _ = jax.lax.scan(layer, rows @ params["first"], params["layers"])
        return jnp.mean((x @ params["last"] + params["bias"] - rows) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    changes, moments = optax.adam(1e-2).update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), loss


def arguments(rows):
    def draw(*shape):
        count = jnp.arange(jnp.prod(jnp.array(shape)), dtype=jnp.float32)
        return jnp.sin(count).reshape(shape) / 8

    layers = {"up": draw(3, WIDTH, 4 * WIDTH), "down": draw(3, 4 * WIDTH, WIDTH)}
    matrices = {name: draw(WIDTH, WIDTH) for name in ("first", "last")}
    params = {**matrices, "layers": layers, "bias": draw(6 * WIDTH)[:WIDTH]}
    return (params, optax.adam(1e-2).init(params)), draw(rows, WIDTH)


def case_of(rows):
    """The step on two hosts of four devices."""
    args = arguments(rows)
    step, mesh = flatten_step(train_step, args), make_mesh(SIZES)
    frame = analyze(trace(step, mesh)[0], SIZES, outer={"x"}).frame
    return Case("perceptron", step, mesh, frame, tuple(step.flatten(args, {})), 1e-5)


@pytest.fixture(scope="module")
def case():
    return case_of(ROWS)


@pytest.fixture(scope="module")
def ran(case):
    return compile_choice(case, presets(case.frame)["hsdp"])


def test_results_are_those_of_one_device(case, ran):
    assert differences(case, ran()) == {}


def sent_by(ran):
    """Bytes by kind of collective and size of its groups."""
    sent: dict[tuple[str, int], int] = {}
    for one in collectives_in(ran.compiled.as_text()):
        place = one.kind, one.group_size
        sent[place] = sent.get(place, 0) + one.bytes * one.count
    return sent


def weights_of(case):
    program = case.frame.program
    return sum(
        program.values[program.args[group.args[0]]].size_bytes
        for group in case.frame.groups
        if len(group.shape) > 1
    )


def test_pieces_are_gathered_within_and_their_gradients_summed_across(case, ran):
    """On CPUs a reduce-scatter is an all-reduce of which a part is taken."""
    sent, weights = sent_by(ran), weights_of(case)
    # The bias's gradient is no product: its pieces are summed over all, as the loss is.
    assert sent.pop(("all-reduce", 8)) == 4 * (WIDTH + 1)
    assert sent.keys() == {("all-gather", 4), ("all-reduce", 4), ("all-reduce", 2)}
    assert weights <= sent["all-gather", 4] <= 2.1 * weights
    assert sent["all-reduce", 4] == pytest.approx(weights, rel=0.01)
    assert sent["all-reduce", 2] == pytest.approx(weights / 4, rel=0.01)


def test_pieces_are_summed_across_where_rows_are_too_few_to_divide_within():
    """Each device of a host has all of a gradient, and sums a piece of its own."""
    case = case_of(SIZES[0][1])
    choice = presets(case.frame)["hsdp"]
    ran = compile_choice(case, choice)
    assert differences(case, ran()) == {}
    sent, weights = sent_by(ran), weights_of(case)
    assert sent.keys() == {("all-gather", 4), ("all-reduce", 2)}
    assert sent["all-reduce", 2] == pytest.approx(weights / 4, rel=0.01)
    analysis = analyze(case.frame.program, SIZES, outer={"x"})
    moves = block_moves(analysis, lay_out(analysis.frame, choice))
    summed = [n * turns for _, kind, axes, n, turns in moves if kind == "all-reduce"]
    assert sum(summed) == pytest.approx(weights / 4, rel=0.01)


def test_parameters_and_moments_are_stored_alike_on_every_host(case):
    layout = lay_out(case.frame, presets(case.frame)["hsdp"])
    for group in case.frame.groups:
        for position in group.args:
            spec = layout.arg_spec(position)
            names = [axis for axes in spec for axis in axes]
            assert names == ["y"], case.frame.program.arg_names[position]
    rows = case.frame.program.arg_names.index("rows")
    assert layout.arg_spec(rows) == (("x", "y"), ())


@pytest.mark.parametrize("outer", [set(), {"x", "y"}, {"z"}])
def test_it_is_no_preset_where_hosts_have_no_axis_of_their_own(case, outer):
    frame = analyze(case.frame.program, SIZES, outer=outer).frame
    assert frame.outer == frozenset()
    found = presets(frame)
    assert "hsdp" not in found and "fully_sharded" in found
    assert Storage.INNER not in {s for one in found.values() for s in one.storage}


def test_what_tensor_parallelism_shards_within_hosts_is_not_sharded_further(case):
    frame = case.frame
    used = presets(frame)["x=data,y=tensor"]
    inner = Choice(used.blocks, (Storage.INNER,) * len(frame.groups))
    every = Choice(used.blocks, (Storage.SHARDED,) * len(frame.groups))
    specs = [lay_out(frame, one) for one in (used, inner, every)]
    up = frame.program.arg_names.index("state/0/layers/up")
    plain, within, further = (one.arg_spec(up) for one in specs)
    assert plain == within == ((), ("y",), ())
    assert {axis for axes in further for axis in axes} == {"x", "y"}
