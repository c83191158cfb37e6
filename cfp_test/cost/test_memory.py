"""A backward pass's residuals are read off the program."""

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import Costs, segment_candidate
from cfp.cost.memory import residuals
from cfp.profiling.builder import Built, build
from cfp.profiling.collectives import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import whole_job
from cfp_test.support.checking import make_mesh

ROWS, WIDTH, WIDE = 16, 8, 32
SIZES = (("x", 4),)


def kept_shapes(loss):
    """Shapes and makers of all that the gradient of a loss keeps."""

    def step(weights, x):
        return jax.grad(loss)(weights, x)

    weights = {
        "up": jax.ShapeDtypeStruct((WIDTH, WIDE), jnp.float32),
        "down": jax.ShapeDtypeStruct((WIDE, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    program, _ = trace(flatten_step(step, (weights, x)), make_mesh(SIZES))
    analysis = analyze(program, SIZES)
    top = [op.id for op in program.ops if op.parent < 0]
    kept = residuals(analysis.frame, tuple(top))
    return sorted(
        (program.values[v].shape, program.ops[program.values[v].producer].kind)
        for v in kept
    )


def test_elementwise_work_is_done_again_and_products_are_kept():
    def loss(weights, x):
        wide = jax.nn.gelu(x @ weights["up"])
        return jnp.sum(jnp.tanh(wide @ weights["down"]))

    # Of a dozen tensors that gelu's derivative reads, its argument is enough; what
    # the second product reads is in memory anyway.
    assert [kind for shape, kind in kept_shapes(loss) if shape == (ROWS, WIDE)] == [
        "dot_general",
        "multiply",
    ]


def test_what_is_moved_on_its_way_to_a_product_is_kept_as_it_was():
    def loss(weights, x):
        wide = jnp.sin(x @ weights["up"]).astype(jnp.bfloat16)
        return jnp.sum(jnp.square(wide.astype(jnp.float32) @ weights["down"]))

    kinds = {kind for shape, kind in kept_shapes(loss) if shape == (ROWS, WIDE)}
    assert "dot_general" in kinds  # for the cosine, which is not kept itself
    assert "cosine" not in kinds


def test_arguments_are_no_residuals():
    def loss(weights, x):
        return jnp.sum(x @ weights["up"])

    assert kept_shapes(loss) == []


def test_a_long_chain_of_cheap_ops_is_done_again():
    def loss(weights, x):
        h = x @ weights["up"]
        for _ in range(2000):
            h = -h  # None of these but the last is read by the backward pass.
        return jnp.sum(jnp.square(jnp.sin(h) @ weights["down"]))

    kinds = [kind for shape, kind in kept_shapes(loss) if shape == (ROWS, WIDE)]
    assert kinds == ["dot_general", "sine"]


# --------------------------------------------------------------------------- results

POINTER_BYTES = 8  # of each result, where a program has several


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


WEIGHTS = {"up": shape(WIDTH, WIDE), "down": shape(WIDE, WIDTH)}
STATE, BATCH = (WEIGHTS, WEIGHTS), shape(ROWS, WIDTH)


def forward(weights, x):
    inner = jnp.tanh(x @ weights["up"])
    return inner @ weights["down"], inner


def train(state, x):
    """Momentum."""
    weights, speed = state

    def loss(weights):
        made, inner = forward(weights, x)
        return jnp.sum(made**2), inner

    (value, inner), grads = jax.value_and_grad(loss, has_aux=True)(weights)
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
    weights = jax.tree.map(lambda w, s: w - 0.1 * s, weights, speed)
    return (weights, speed), value, inner


def train_only(state, x):
    return train(state, x)[0]


def train_and_more(state, x):
    """One result twice, and an argument as it is."""
    state, value, inner = train(state, x)
    return state, value, inner, state[0]["up"], x


STEPS = {
    "donated": (train, (STATE, BATCH), 0),
    "nothing else": (train_only, (STATE, BATCH), 0),
    "not donated": (train, (STATE, BATCH), ()),
    "evaluation": (forward, (WEIGHTS, BATCH), ()),
    "handed back": (train_and_more, (STATE, BATCH), ()),
}


def analysis_and_costs(name):
    mesh = make_mesh(SIZES)
    step, args, donated = STEPS[name]
    flat = flatten_step(step, args, {}, donate_argnums=donated)
    analysis = analyze(trace(flat, mesh)[0], SIZES)
    return mesh, analysis, Costs(analysis, Rates.of_virtual_devices(mesh))


def throughout_bytes(analysis, costs, choice):
    """Lists the memory of a choice from the first op to the last."""
    parts = (
        (segment.kind, segment_candidate(analysis, segment.index, choice))
        for segment in analysis.segments
    )
    states = (costs.least_bytes(*part).state_bytes for part in parts)
    return costs.fixed_bytes + sum(states)


@pytest.mark.parametrize("storage", ["data_parallel", "zero1", "fully_sharded"])
@pytest.mark.parametrize("name", STEPS)
def test_arguments_and_results_are_known_to_the_byte(name, storage):
    mesh, analysis, costs = analysis_and_costs(name)
    choice = presets(analysis.frame).get(storage)
    if choice is None:
        assert name == "evaluation"  # It has no state to store in another way.
        return
    job = whole_job(analysis, choice, (), name)
    built = build(analysis.frame.program, mesh, job)
    assert isinstance(built, Built), built.reason
    count = len(job.part.outputs)
    pointers = POINTER_BYTES * count if count > 1 else 0
    held = built.argument_bytes + built.output_bytes - built.alias_bytes
    assert throughout_bytes(analysis, costs, choice) == held - pointers
    assert costs.least_peak_bytes(choice) <= built.peak_bytes


def test_state_that_is_not_donated_is_there_twice():
    _, donated, costs = analysis_and_costs("donated")
    choice = presets(donated.frame)["data_parallel"]
    _, kept, kept_costs = analysis_and_costs("not donated")
    state = 2 * 2 * WIDTH * WIDE * 4
    more = throughout_bytes(kept, kept_costs, choice)
    assert more - throughout_bytes(donated, costs, choice) == state


def test_a_result_is_no_residual():
    """The backward pass reads what the step returns: it is in memory once."""

    def kept(name):
        _, analysis, costs = analysis_and_costs(name)
        choice = presets(analysis.frame)["data_parallel"]
        return sum(
            costs.least_bytes(
                segment.kind, segment_candidate(analysis, segment.index, choice)
            ).residual_bytes
            for segment in analysis.segments
        )

    rows = ROWS // SIZES[0][1]
    assert kept("nothing else") - kept("donated") == rows * WIDE * 4
