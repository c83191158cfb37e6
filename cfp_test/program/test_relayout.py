"""Grouped convolutions are right however they are laid out and sharded."""

import itertools

import jax
import numpy as np
import pytest

from cfp.program.rules import is_split_right
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.proving.engine import jobs, prove, singles
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

MESHES = [make_mesh((("x", 4),)), make_mesh((("x", 2), ("y", 2)))]
LAYOUTS = ("NHWC", "NCHW", "CHWN", "HWNC")
FEATURES = ({"N": 4, "C": 8}, {"I": 1, "O": 16}, {"feature_group_count": 8})
BATCH = ({"N": 8, "C": 4}, {"I": 4, "O": 8}, {"batch_group_count": 8})
ALL_PAIRS = [*itertools.product(LAYOUTS, LAYOUTS)]
QUICK = [("NCHW", "NHWC"), ("CHWN", "HWNC")]
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.nightly)
    for pair in ALL_PAIRS
]


def convolution(taken, kernel, made, groups=FEATURES, **options):
    """A grouped convolution with small windows, and the shapes that it takes."""
    spatial = [name for name in taken if name not in "NC"]
    sizes, kernel_sizes, count = groups

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            options.get("window_strides", (1,) * len(spatial)),
            [(1, 0)] * len(spatial),
            lhs_dilation=options.get("lhs_dilation"),
            rhs_dilation=options.get("rhs_dilation"),
            dimension_numbers=(taken, kernel, made),
            **count,
        )

    shapes = [sizes.get(c, 5) for c in taken], [kernel_sizes.get(c, 2) for c in kernel]
    return convolve, [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]


def check(convolve, avals):
    """Proves all shardings of a convolution; returns how many there are."""
    tried = 0
    for mesh in MESHES:
        program, _ = trace(flatten_step(convolve, avals), mesh)
        draws = zip(jax.random.split(jax.random.key(0)), avals, strict=True)
        inputs = [jax.random.normal(key, aval.shape) for key, aval in draws]
        some = [s for s in singles(program, inputs) if s.op.kind == "convolution"]
        assert len(some) == 1
        found = [*prove(jobs(some, mesh), mesh)]
        tried += len(found)
        assert [one for one in found if one.is_wrong] == []
    return tried


@pytest.mark.parametrize(("taken", "made"), PAIRS)
def test_groups_of_features(taken, made):
    assert check(*convolution(taken, "HWIO", made)) >= 8  # the groups, and the batch


@pytest.mark.parametrize(("taken", "made"), PAIRS)
def test_groups_of_the_batch(taken, made):
    assert check(*convolution(taken, "OIHW", made, BATCH)) >= 2


TRANSPOSED = ("CNW", "IOW", "WCN"), {"lhs_dilation": (2,)}
DILATED = ("NCHWD", "OIHWD", "NHWDC"), {"rhs_dilation": (2, 1, 2)}
STRIDED = ("NWC", "WIO", "NCW"), {"window_strides": (2,)}


@pytest.mark.parametrize(
    ("way", "groups"),
    [
        *((TRANSPOSED, FEATURES), (DILATED, BATCH)),
        *at_night([(TRANSPOSED, BATCH), (DILATED, FEATURES)]),
        *at_night((STRIDED, groups) for groups in (FEATURES, BATCH)),
    ],
)
def test_other_dims_strides_and_dilations(way, groups):
    layouts, options = way
    check(*convolution(*layouts, groups, **options))


def test_what_is_split_right_stays_as_it_is():
    right = {pair: is_right(*pair) for pair in ALL_PAIRS}
    assert sum(right.values()) == 10
    for (taken, made), expected in right.items():
        convolve, avals = convolution(taken, "HWIO", made)
        program, _ = trace(flatten_step(convolve, avals), MESHES[0])
        kinds = [op.kind for op in program.ops]
        assert ("transpose" in kinds) is not expected


def is_right(taken, made):
    names = str.maketrans("NC", "bf")
    return is_split_right(taken.translate(names), made.translate(names))
