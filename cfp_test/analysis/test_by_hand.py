"""Work in regions that the user sharded by hand: FLOPs, estimates, what is said."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import cfp
from cfp.analysis.analyze import build_frame, model_work, program_flops
from cfp.cost.terms import Terms
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.view import words
from cfp.view.remarks import remarks
from cfp_test.support.checking import make_mesh

AXES = (("x", 2), ("y", 2))
TARGET = cfp.described("4xh100", x=2, y=2)
ROWS, WIDTH, WIDE = 4096, 1024, 4096


def ffn(x, a, b):
    return jax.nn.gelu(x @ a) @ b


def by_hand(body, rows=("x", "y")):
    return jax.shard_map(
        body,
        mesh=make_mesh(AXES),
        in_specs=(P(rows), P(), P()),
        out_specs=P(rows),
    )


def step_of(body, layers=1):
    def step(weights, x):
        def loss(weights):
            h, _ = lax.scan(lambda h, w: (body(h, *w), None), x, weights[:2])
            return ((h @ weights[2]) ** 2).mean()

        loss_value, gradients = jax.value_and_grad(loss)(weights)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        return new, loss_value

    shapes = ((layers, WIDTH, WIDE), (layers, WIDE, WIDTH), (WIDTH, 64))
    weights = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    return step, (weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16))


def frame_of(body, layers=1):
    step, args = step_of(body, layers)
    return build_frame(trace(flatten_step(step, args), make_mesh(AXES))[0], AXES)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [("x", "y"), "x"])
def test_products_in_regions_count_as_elsewhere(layers, rows):
    """As often as their loop runs; of a mesh's axes those that split something."""
    plain = frame_of(ffn, layers)
    manual = frame_of(by_hand(ffn, rows), layers)
    products = 2 * ROWS * WIDTH * WIDE
    assert program_flops(manual.program) == program_flops(plain.program)
    assert program_flops(manual.program) >= layers * 5 * products
    work = model_work(manual, {})
    assert work["devices_by_hand"] == (4 if rows == ("x", "y") else 2)
    assert work["narrow_share"] == model_work(plain, {})["narrow_share"] == 1.0
    assert "devices_by_hand" not in model_work(plain, {})


def test_ragged_products_in_regions_have_one_group_for_each_row():
    def product(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    shapes = ((64, 32), (4, 32, 16)), (4,)
    args = (
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes[0]),
        jax.ShapeDtypeStruct(shapes[1], jnp.int32),
    )
    program, _ = trace(flatten_step(by_hand(product), args), make_mesh(AXES))
    assert program_flops(program) == 2 * 64 * 32 * 16


def test_a_region_takes_the_time_of_one_devices_products():
    times = []
    for rows in (("x", "y"), "x"):
        frame = frame_of(by_hand(ffn, rows))
        terms = Terms(frame, TARGET.rates)
        times.append(sum(map(terms.manual_ms, frame.program.ops)))
    # By two devices it takes twice as long as by four.
    assert times[0] > TARGET.rates.matmul_ms(5 * 2 * ROWS * WIDTH * WIDE / 4, "bf16")
    assert times[1] == pytest.approx(2 * times[0], rel=0.2)


def test_an_estimate_has_the_time_of_regions_and_a_page_says_they_split(tmp_path):
    def planned(body):
        step, args = step_of(body, layers=3)
        options = {"mesh": TARGET, "cache_dir": tmp_path, "quiet": True}
        return cfp.plan(step, *args, donate_argnums=0, **options)

    plain, manual = planned(ffn), planned(by_hand(ffn))
    assert manual.predicted_ms >= 0.7 * plain.predicted_ms
    assert manual.search["model_flops"] == plain.search["model_flops"]
    assert not words.runs_whole(manual) and words.is_sharded(manual)
    text = " ".join(remarks(manual))
    assert "use one" not in text and "all compute the same" not in str(manual)
