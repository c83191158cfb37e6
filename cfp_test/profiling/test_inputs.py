import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import plainest, presets
from cfp.profiling.inputs import (
    InputKind,
    generator,
    input_kinds,
    make_inputs,
)
from cfp.program.part import cut_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import whole_job

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4"]


def make(mesh, shape, dtype, spec=None):
    spec = spec if spec is not None else ((),) * len(shape)
    [array] = make_inputs([InputKind(shape, dtype, spec)], mesh)
    assert array.shape == shape
    assert array.dtype == jnp.dtype(dtype)
    return array


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 48), (1024,), (2, 3, 4, 5), ()])
def test_floats_are_small_and_positive(mesh, dtype, shape):
    values = np.asarray(make(mesh, shape, dtype).astype(jnp.float32), np.float64)
    assert values.min() > 0
    assert values.max() <= 0.02
    if values.size > 100:
        # Spread over the range, as far as the type has numbers there.
        assert values.mean() == pytest.approx(0.011, rel=0.1)
        assert values.std() == pytest.approx(0.0179 / 12**0.5, rel=0.15)


def test_floats_differ_between_elements(mesh):
    values = np.asarray(make(mesh, (64, 64), "float32"))
    assert len(np.unique(values)) > 4000
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_small(mesh, dtype):
    values = np.asarray(make(mesh, (32, 32), dtype).astype(jnp.int32))
    most = min(127, int(jnp.iinfo(dtype).max))
    assert values.min() == 0
    assert values.max() == most
    assert len(np.unique(values)) == most + 1
    assert make(mesh, (), dtype).astype(jnp.int32) == 1


def test_booleans_are_mixed(mesh):
    values = np.asarray(make(mesh, (32, 32), "bool"))
    assert 0.4 < values.mean() < 0.6
    assert bool(make(mesh, (), "bool"))


def test_complex_and_wide_types(mesh):
    values = np.asarray(make(mesh, (16, 16), "complex64"))
    assert np.real(values).min() > 0 and np.imag(values).max() <= 0.02
    with jax.enable_x64(True):
        kinds = [InputKind((8,), name, ((),)) for name in ("float64", "int64")]
        dtypes = [str(array.dtype) for array in make_inputs(kinds, mesh)]
    assert dtypes == ["float64", "int64"]


def test_pieces_are_made_where_they_belong(mesh):
    array = make(mesh, (16, 8), "float32", ((), ("x",)))
    assert array.sharding == NamedSharding(mesh, PartitionSpec(None, "x"))
    assert {piece.data.shape for piece in array.addressable_shards} == {(16, 2)}
    # The same numbers, however they are sharded.
    whole = make(mesh, (16, 8), "float32")
    np.testing.assert_array_equal(np.asarray(array), np.asarray(whole))


def test_nothing_is_made_whole_and_then_cut(mesh):
    kind = InputKind((1024, 1024), "float32", (("x",), ()))
    compiled = generator(kind, mesh)
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == 1024 * 1024
    assert memory.temp_size_in_bytes < 1024
    assert "all-" not in compiled.as_text()


def test_equal_kinds_share_an_array_unless_donated(mesh):
    kind = InputKind((8, 8), "float32", (("x",), ()))
    other = InputKind((8, 8), "float32", ((), ("x",)))
    a, b, c, d, e = make_inputs([kind, kind, kind, other, kind], mesh, {1, 4})
    assert a is c
    assert len({id(array) for array in (a, b, d, e)}) == 4
    pointers = {
        array.addressable_shards[0].data.unsafe_buffer_pointer() for array in (a, b, e)
    }
    assert len(pointers) == 3


def test_generators_are_compiled_once(mesh):
    kind = InputKind((24, 8), "bfloat16", (("x",), ()))
    assert generator(kind, mesh) is generator(kind, mesh)
    same = InputKind((24, 8), "bfloat16", (("x",), ()))
    assert generator(same, mesh) is generator(kind, mesh)


def test_kinds_of_a_program(case):
    job = case.job()
    kinds = input_kinds(case.program, job.part, job.in_specs)
    assert InputKind((), "int32", (), signed=True) in kinds
    assert InputKind((8, 8), "float32", (("x",), ()), signed=True) in kinds
    assert kinds.count(InputKind((8, 16), "float32", ((), ()), signed=True)) == 2


def test_only_what_a_root_is_taken_of_is_all_positive(mesh):
    def step(x, weights, moment):
        gradient = jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(weights)
        moment = 0.9 * moment + 0.1 * gradient**2

        def body(total, row):
            return total + row, jnp.log(row)

        total, logs = jax.lax.scan(body, jnp.zeros(8), moment)
        return weights - gradient / jnp.sqrt(moment), moment, total, logs

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program, _ = trace(flatten_step(step, (square, square, square)), mesh)
    part = cut_part(program, [op.id for op in program.ops if op.parent < 0])
    specs = [((), ())] * len(part.inputs)
    kinds = input_kinds(program, part, specs)
    signed = {v: kind.signed for v, kind in zip(part.inputs, kinds, strict=True)}
    assert [signed[v] for v in program.args] == [True, True, False]
    arrays = make_inputs(kinds, mesh)
    smallest = [float(jnp.min(array)) for array in arrays]
    assert [low > 0 for low in smallest] == [not kind.signed for kind in kinds]
    assert all(abs(float(jnp.mean(a))) < 0.02 for a in arrays)


def skipping(state, mask, flag, count, rate):
    """A branch by a predicate, another by a counter, a mask, and a number."""
    kept = jax.lax.cond(flag, lambda x: x * rate, lambda x: x @ x, state)
    every = jax.lax.cond(count % 4 == 0, jnp.sin, jnp.cos, kept)
    return jnp.where(mask, every, 0.0), count + 1


def inputs_of(mesh, *args):
    program, _ = trace(flatten_step(skipping, args), mesh)
    part = cut_part(program, [op.id for op in program.ops if op.parent < 0])
    specs = [((),) * len(program.values[v].shape) for v in part.inputs]
    arrays = make_inputs(input_kinds(program, part, specs), mesh)
    names = dict(zip(program.args, program.arg_names, strict=True))
    found = zip(part.inputs, arrays, strict=True)
    return program, {names[v]: np.asarray(array) for v, array in found}


def test_predicates_and_scalars_are_as_the_caller_gave_them(mesh):
    mask = np.arange(64).reshape(8, 8) % 3 == 0
    state = jnp.full((8, 8), 5.0)
    _, found = inputs_of(mesh, state, mask, False, jnp.int32(12), 0.25)
    assert found["flag"] == np.False_
    assert found["count"] == 12
    assert found["rate"] == 0.25
    assert np.array_equal(found["mask"], mask)
    assert np.abs(found["state"]).max() < 0.02  # made up, as other arrays are


def test_what_was_not_given_is_made_up(mesh):
    shapes = jax.eval_shape(
        lambda: (jnp.zeros((8, 8)), jnp.zeros((8, 8), bool), False, jnp.int32(0), 0.5)
    )
    gone = jnp.int32(12)
    gone.delete()
    for count in (shapes[3], gone):
        _, found = inputs_of(mesh, *shapes[:3], count, shapes[4])
        assert found["flag"] == np.True_
        assert found["count"] == 1
        assert 0.4 < found["mask"].mean() < 0.8


def test_a_large_mask_is_made_up(mesh):
    program, _ = trace(
        flatten_step(lambda m: m.sum(), (np.zeros((512, 256), bool),)), mesh
    )
    assert program.given == (b"",)


def test_records_know_the_values_that_decide(mesh):
    """A branch's predicate and a counter that is tested are found, a rate is not."""
    sizes = tuple(mesh.shape.items())

    def key(flag, count, rate):
        args = (jnp.ones((8, 8)), np.ones((8, 8), bool), flag, count, rate)
        program, _ = trace(flatten_step(skipping, args), mesh)
        analysis = analyze(program, sizes)
        choice = plainest(presets(analysis.frame))
        return whole_job(analysis, choice, (), "a").key.digest

    known = key(False, 12, 0.25)
    assert key(False, 12, 0.5) == known
    assert key(True, 12, 0.25) != known
    assert key(False, 13, 0.25) != known
