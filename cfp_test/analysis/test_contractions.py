"""Derived contractions, each with the one it is from, and the factors between."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cfp.analysis.contractions import find_members, is_contraction, number_values
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

MESH = make_mesh((("x", 4),))


def members(fn, *args):
    program, _ = trace(flatten_step(fn, args), MESH)
    blocks = find_members(program, number_values(program))
    return program, [[(m.factors, m.cotangent) for m in b] for b in blocks], blocks


def gradients(f):
    return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), argnums=(0, 1))


def test_matrix_product():
    _, found, _ = members(
        gradients(lambda x, w: x @ w), normal(0, 8, 16), normal(1, 16, 4)
    )
    # The product's factors: rows 0, columns 1, contracted 2.
    assert found == [[((0, 1, 2), -1), ((1, 2, 0), 0), ((0, 2, 1), 0)]]


def test_square_matrices_are_told_apart_by_factors():
    _, found, _ = members(
        gradients(lambda x, w: x @ w), normal(0, 8, 8), normal(1, 8, 8)
    )
    assert found == [[((0, 1, 2), -1), ((1, 2, 0), 0), ((0, 2, 1), 0)]]


def test_gradients_written_with_transposes():
    """Custom derivatives transpose what JAX's own would not."""

    def step(x, w, g):
        y = x @ w
        return y, x.T @ (g * y), (g * y) @ w.T, (w @ (g * y).T).T

    _, found, _ = members(step, normal(0, 8, 16), normal(1, 16, 4), normal(2, 8, 4))
    (block,) = found
    assert [c for _, c in block] == [-1, 1, 0, 1]
    assert block[1][0] == (2, 1, 0)
    assert block[2][0] == (0, 2, 1)
    assert block[3][0] == (2, 0, 1)


def test_gradients_of_which_vmap_moved_a_dim():
    """The members come second in the first product, and first in its gradient."""

    def loss(w, x):
        return jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"]).sum()

    w = {"a": normal(0, 4, 16, 32), "b": normal(1, 4, 32, 2)}
    step = jax.vmap(jax.grad(loss), in_axes=(0, None))
    program, found, blocks = members(step, w, normal(2, 32, 16))
    assert [len(block) for block in found] == [2, 3]
    anchor, gradient = (program.ops[member.op].rule for member in blocks[0])
    # Rows are what the gradient sums over; nothing else is.
    factors = blocks[0][1].factors
    assert {factors[f] for f in gradient.reduction} == {anchor.results[0][0][0]}


@pytest.mark.parametrize(
    "spec",
    ["bij,bjk->bik", "abij,bjk->abik", "ij,jkl->ikl", "bsd,dhe->bshe", "ijk,jkl->il"],
)
def test_einsums(spec):
    sizes = dict(zip("abijklsdhe", (2, 3, 4, 5, 6, 7, 8, 9, 10, 11), strict=True))
    left, right = (
        normal(i, *(sizes[c] for c in term))
        for i, term in enumerate(spec.split("->")[0].split(","))
    )
    program, found, blocks = members(
        gradients(lambda a, b: jnp.einsum(spec, a, b)), left, right
    )
    (block,) = found
    assert len(block) == 3
    anchor = program.ops[blocks[0][0].op].rule
    for member in blocks[0][1:]:
        rule = program.ops[member.op].rule
        assert sorted(member.factors) == list(range(len(anchor.sizes)))
        for factor, other in enumerate(member.factors):
            assert rule.sizes[factor] == anchor.sizes[other]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_convolutions(stride, window):
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    program, found, blocks = members(
        gradients(conv), normal(0, 4, 8, 8, 3), normal(1, window, window, 3, 5)
    )
    (block,) = found
    assert len(block) == 3
    anchor = program.ops[blocks[0][0].op].rule
    batch, out = anchor.results[0][0][0], anchor.results[0][3][0]
    (inner,) = anchor.reduction
    weight, image = sorted(
        (m for m in blocks[0][1:]),
        key=lambda m: program.values[program.ops[m.op].results[0]].shape,
        reverse=True,
    )
    for member in (weight, image):
        assert {batch, out, inner} <= set(member.factors)


@pytest.mark.parametrize("mode", [None, "clip", "fill", "wrap"])
def test_lookups_and_their_scatters(mode):
    """Whatever becomes of places that the table does not have."""

    def step(table, w, i):
        def loss(table, w):
            return jnp.sin(jnp.take(table, i, axis=0, mode=mode) @ w).sum()

        return jax.grad(loss, argnums=(0, 1))(table, w)

    program, found, blocks = members(
        step, normal(0, 32, 16), normal(1, 16, 4), jnp.arange(8)
    )
    kinds = [[program.ops[m.op].kind for m in block] for block in blocks]
    assert kinds == [["gather", "scatter"], ["dot_general"] * 3]
    lookup = program.ops[blocks[0][0].op].rule
    table_rows = lookup.operands[0][0][0]
    assert table_rows in lookup.reduction
    assert table_rows in found[0][1][0]


def test_a_scatter_follows_the_lookup_that_reads_the_same_clamped_places():
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def step(table, i):
        places = lax.clamp(0, i, 31)

        def loss(table):
            found = lax.gather(
                table,
                places,
                dims,
                (1, 16),
                mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
            )
            return jnp.sin(found).sum()

        return jax.grad(loss)(table)

    program, _, blocks = members(step, normal(0, 32, 16), jnp.arange(8)[:, None])
    [block] = [[program.ops[m.op].kind for m in block] for block in blocks]
    assert block == ["gather", "scatter"]


def test_shared_weights_make_two_blocks():
    def step(w, x):
        return jax.grad(lambda w: jnp.sin(jnp.sin(x @ w) @ w.T).sum())(w)

    _, found, _ = members(step, normal(0, 16, 4), normal(1, 8, 16))
    assert [len(block) for block in found] == [2, 3]


def test_what_is_a_contraction():
    def step(x, w):
        return x @ w, (x[:, :4] * w[:8]).sum(0), jnp.cumsum(x, 0), x * 2

    program, _ = trace(flatten_step(step, (normal(0, 8, 16), normal(1, 16, 4))), MESH)
    assert [op.kind for op in program.ops if is_contraction(op)] == ["dot_general"]
