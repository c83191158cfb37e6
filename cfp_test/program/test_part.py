import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.analysis.layout import lay_out
from cfp.program.constrain import Constraints, partition_spec
from cfp.program.graph import numpy_dtype
from cfp.program.part import aval, cut_part, lower_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.programs.registry import PROGRAMS, programs_on
from cfp_test.support.checking import (
    difference,
    draw,
    evaluate,
    make_mesh,
    prepare,
    run_part,
    to_host,
)

SIZES = (("x", 4),)
MESH = make_mesh(SIZES)
X = jnp.arange(128.0).reshape(8, 16)
QUICK = (
    "mlp",
    "scan_mlp",
    "cond",
    "while",
    "dropout_raw_key",
    "pure_callback",
    "complex",
    "shard_map",
    "passed_through",
)


def read(fn, *args):
    return trace(flatten_step(fn, args), MESH)[0]


def test_partition_specs():
    P = jax.sharding.PartitionSpec
    assert partition_spec((("x",), (), ("y", "z"))) == P("x", None, ("y", "z"))
    assert partition_spec((("x",), (), ())) == P("x")
    assert partition_spec((("x",), ("y",)), rank=1) == P("x")
    assert partition_spec(()) == P()


@pytest.mark.parametrize(
    "dtype",
    "bool int4 int8 uint8 int32 uint32 bfloat16 float16 float32 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e4m3b11fnuz float8_e8m0fnu "
    "float4_e2m1fn".split(),
)
def test_dtypes_there_and_back(dtype):
    program = read(lambda x: x.astype(dtype), jnp.ones(4, "int16"))
    assert aval(program, program.outputs[0]) == jax.ShapeDtypeStruct((4,), dtype)


def test_no_such_dtype():
    with pytest.raises(ValueError, match="no numpy dtype"):
        numpy_dtype("!stablehlo.token")


def test_a_part_brings_its_constants_and_asks_for_the_rest():
    def step(x, w):
        y = jnp.tanh(x @ w) * 2.0
        return jnp.sin(y) + y, y.sum()

    program = read(step, X, jnp.ones((16, 4)))
    kinds = {op.kind: op.id for op in program.ops}
    part = cut_part(program, [kinds["multiply"]])
    assert [program.ops[i].kind for i in part.ops] == [
        "constant",
        "broadcast_in_dim",
        "multiply",
    ]
    assert part.inputs == program.ops[kinds["tanh"]].results
    assert part.outputs == program.ops[kinds["multiply"]].results


def test_outputs_are_what_others_read():
    program = read(lambda x: (jnp.sin(jnp.cos(x)), jnp.tanh(x)), X)
    cosine, sine, _ = (op.id for op in program.ops)
    assert cut_part(program, [cosine, sine]).outputs == program.ops[sine].results
    assert cut_part(program, [cosine]).outputs == program.ops[cosine].results


def test_a_loop_comes_whole():
    def step(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    program = read(step, X, jnp.ones((16, 16)))
    (loop,) = (op for op in program.ops if op.kind == "while")
    part = cut_part(program, [loop.id])
    assert set(part.inputs) == set(program.args)
    assert not set(part.ops) & set(loop.body)


def test_donated_inputs():
    program = read(lambda x, y: (x + y, x * y), X, X)
    part = cut_part(program, [op.id for op in program.ops])
    whole = ((), ())
    lowered = lower_part(
        program, part, MESH, Constraints({}, {}), [whole] * 2, [whole] * 2, donated=(1,)
    )
    # Two arrays: JAX does not survive giving away one that it also reads.
    x, y = (jax.device_put(v, jax.NamedSharding(MESH, jax.P())) for v in (X, X + 1))
    total, product = lowered.compile()(x, y)
    np.testing.assert_array_equal(total, X + (X + 1))
    np.testing.assert_array_equal(product, X * (X + 1))
    assert y.is_deleted()
    assert not x.is_deleted()


def test_calls_of_the_host_are_left_out():
    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: v + 1, shape, x) + x

    program = read(step, X)
    part = cut_part(program, [op.id for op in program.ops])
    whole = [((), ())]
    lowered = lower_part(program, part, MESH, Constraints({}, {}), whole, whole)
    np.testing.assert_array_equal(lowered.compile()(X)[0], X)


def ties(program, part) -> set[int]:
    """Values that depend on whether two floats are equal, one of them computed here.

    Another order of computing the one may change that.
    """
    made, found = set(), set()
    for op_id in part.ops:
        op = program.ops[op_id]
        exact = op.kind == "compare" and any(d in op.attributes for d in ("EQ", "NE"))
        floats = exact and program.values[op.operands[0]].dtype.startswith("f")
        if (floats and made & {*op.operands}) or found & {*op.operands}:
            found.update(op.results)
        made.update(op.results)
    return found


def check_parts(name: str, limit: int) -> None:
    """Cuts a program into parts by its blocks and at random, and runs each alone."""
    case = prepare(name, PROGRAMS[name], SIZES)
    program, rng = case.frame.program, random.Random(0)
    layout = lay_out(case.frame, draw(case.frame, 1))
    top = [op.id for op in program.ops if op.parent < 0]
    cuts = []
    for block in case.frame.blocks:
        ids = set(block.ops)
        cuts.append([i for i in top if i in ids or ids & set(program.ops[i].body)])
    cuts += [sorted(rng.sample(top, max(1, len(top) // n))) for n in (2, 4, 8)]
    if len(cuts) > limit:
        cuts = rng.sample(cuts, limit)
    parts = [cut_part(program, cut) for cut in cuts]
    known = evaluate(case, tuple({v for p in parts for v in (*p.inputs, *p.outputs)}))
    far = {}
    for part in parts:
        outputs = run_part(case, layout, part, known)
        uncertain = ties(program, part)
        for v, got in zip(part.outputs, outputs, strict=True):
            if v in uncertain:
                continue
            pair = to_host(got), to_host(known[v])
            distance = difference(*pair)
            # Sums of gradients may cancel.
            if not (distance <= case.tolerance or np.allclose(*pair, 0, atol=1e-6)):
                far[part.ops, v] = distance
    assert not far


@pytest.mark.parametrize("name", QUICK)
def test_parts_compute_what_the_whole_does(name):
    check_parts(name, limit=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", programs_on(SIZES))
def test_parts_of_all_programs(name):
    check_parts(name, limit=12)
