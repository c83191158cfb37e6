"""Every implementation computes what its operator is: outputs and gradients.

What needs a GPU is checked in the same way where that is: ``python -m cfp.operators``.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from cfp.operators import OPERATORS, Refused
from cfp.operators.cases import (
    LIMITS,
    Shape,
    compare,
    oracle_program,
    program,
    refusal,
    sample,
)
from cfp_test.operators.compiling import SOON
from cfp_test.support.covering import at_night

# The second has sizes that divide nothing; the batch is one.
SHAPES = (
    Shape(batch=2, seq=16, hidden=32, heads=2, vocab=48),
    Shape(batch=1, seq=6, hidden=36, heads=3, vocab=41),
)
WAYS = tuple(zip(("float32", "bfloat16"), SHAPES, strict=True))
CASES = {
    turn: [
        (name, *WAYS[(number + turn) % len(WAYS)])
        for number, name in enumerate(OPERATORS)
    ]
    for turn in range(len(WAYS))
}


@pytest.mark.parametrize(
    ("name", "dtype", "shape"), [*CASES[0], *at_night(CASES[1])], ids=str
)
def test_all_implementations_agree_with_the_oracle(name, dtype, shape):
    operator = OPERATORS[name]
    args, cotangent = sample(operator, shape, dtype)
    calls = {
        name: program(operator, call)
        for name, call in operator.implementations.items()
        if not refusal(operator, name, shape, dtype)
    }
    assert set(operator.implementations) - set(calls) <= {"cudnn"}

    @functools.partial(jax.jit, compiler_options=SOON)
    def run_all(args, cotangent):
        right = oracle_program(operator)(args, cotangent)
        return right, {n: run(args, cotangent) for n, run in calls.items()}

    right, found = run_all(args, cotangent)
    for one, values in found.items():
        assert compare(values, right, LIMITS[dtype])[1] == "", one


def test_attention_of_two_dtypes_goes_to_what_takes_them():
    operator = OPERATORS["gpt_attention"]
    query, key, value = (
        jnp.ones((1, 128, 2, 64), dtype)
        for dtype in ("float32", "bfloat16", "bfloat16")
    )
    with pytest.raises(Refused, match="of one dtype"):
        operator.implementations["cudnn"](query, key, value)
    assert operator.by_first(query, key, value)[0] == "xla"
