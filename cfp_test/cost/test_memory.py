"""What a backward pass needs is read off the program."""

import jax
import jax.numpy as jnp

from cfp.analysis.analyze import analyze
from cfp.cost.memory import residuals
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.checking import make_mesh

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
    kept = residuals(analysis.frame, top)
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
