"""Collectives of blocks, as plans tell them."""

import cfp
from cfp_test.cost import recurrent


def test_the_gradient_of_a_table_is_told_with_its_lookup():
    """The ops that make it stand in the backward pass of a layer."""
    plan = cfp.plan(
        recurrent.step,
        *recurrent.arguments(64),
        mesh=cfp.described("8xh100"),
        preset="zero1",
        quiet=True,
    )
    sent = [
        sum(move.total_bytes for move in one.moves if move.kind == "reduce-scatter")
        for one in sorted(plan.rows, key=lambda one: one.block)
    ]
    width, words = recurrent.WIDTH, recurrent.WORDS
    kernels = [4 * width * width] * (3 * recurrent.LAYERS)
    assert sent == [4 * words * width, *kernels]
