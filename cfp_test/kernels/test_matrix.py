"""Every strategy computes what a float32 oracle does; CI takes a part of the matrix."""

import pytest

from cfp_test.kernels import matrix
from cfp_test.kernels.matrix import Cell
from cfp_test.support.covering import at_night


def cell(strategy, devices, mask, heads, dtype, **more):
    return Cell(
        strategy=strategy,
        devices=devices,
        mask=mask,
        heads=heads,
        dtype=dtype,
        **more,
    )


# Each value of the matrix at least once: each strategy, each mask, each kind of heads,
# both dtypes, 2, 4 and 8 devices, a length that does not divide, and chunks.
DAILY = (
    cell("batch", 2, "packed", "MQA", "bfloat16"),
    cell("heads", 4, "causal", "GQA uneven", "float32"),
    cell("ulysses", 4, "causal", "MHA uneven", "bfloat16"),
    cell("all_gather", 2, "full", "GQA", "float32", tokens=matrix.ODD_TOKENS),
    cell("ring", 8, "causal", "MQA", "float32"),
    cell("ring", 4, "window", "GQA", "bfloat16"),
    cell("ring", 2, "packed", "MHA", "float32", implementation="chunked"),
    cell("zigzag", 4, "causal", "GQA", "float32"),
    cell("ulysses x ring", 4, "full", "MQA", "float32"),
    cell("ulysses x zigzag", 4, "packed", "GQA", "bfloat16"),
)
MORE = (
    cell("ulysses", 8, "packed", "GQA", "float32"),
    cell("ulysses", 2, "full", "MHA", "float32", tokens=matrix.ODD_TOKENS),
    cell("all_gather", 4, "window", "MQA", "bfloat16"),
    cell("zigzag", 2, "full", "GQA", "bfloat16", tokens=matrix.ODD_TOKENS),
    cell("zigzag", 2, "window", "MHA", "float32"),
)


def check(cell):
    far = {
        name: distance
        for name, distance in matrix.distances(cell).items()
        if not distance <= matrix.ALLOWED[cell.dtype]
    }
    assert far == {}


@pytest.mark.parametrize("cell", [*DAILY, *at_night(MORE)], ids=lambda cell: cell.name)
def test_a_part_of_the_matrix(cell):
    check(cell)
