"""A step in float32 where it computes in less: what its ops are, and what they give."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.program import shardy
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step
from cfp.program.widen import wide_dtype, widen, widened, with_dtype
from cfp_test.support.covering import at_night

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
NARROW = ("bf16", "f16>", "f8")


def lowered(fn, *args, precise=False):
    """A step, widened, for one device."""
    step, lowering, *shardings = as_it_is(fn, *args)
    return widened(step, lowering, *shardings, precise=precise)


def as_it_is(fn, *args):
    """A step, lowered for one device, and its shardings."""
    step = flatten_step(fn, args)
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    results = jax.tree.leaves(step.traced.out_info)
    ins, outs = (
        [NamedSharding(mesh, PartitionSpec())] * len(leaves)
        for leaves in (step.avals, results)
    )
    return step, lower_step(step, ins, outs), ins, outs


def run(wide, *args):
    """Runs a widened step."""
    leaves = map(jnp.asarray, args)
    results = wide.lowering.lowered.compile()(
        *(with_dtype(x, wide_dtype(x.dtype)) for x in leaves)
    )
    return jax.tree.unflatten(wide.lowering.out_tree, results)


def in_loops(x):
    def body(carry, row):
        return carry + row @ carry, (carry * row).sum()

    carry, sums = jax.lax.scan(body, x, jnp.stack([x, x * 2]))
    branch = jax.lax.cond(x[0, 0] > 0, lambda v: v * 3, lambda v: v - 1, carry)
    return (
        branch,
        sums,
        jax.lax.while_loop(
            lambda v: v.sum() < 10, lambda v: v + jnp.abs(x), jnp.abs(x)
        ),
    )


def with_regions(x):
    pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
    return jnp.sort(x, axis=0), pooled, x.at[jnp.array([1, 1])].add(x[:2]), x.prod(0)


def with_constants(x):
    table = jnp.asarray(np.linspace(0, 1, 64).reshape(8, 8), x.dtype)
    return (x @ table).astype(jnp.float32) * 0.5 + 1, jnp.full((3,), -jnp.inf, x.dtype)


def with_rounding(x):
    return jax.lax.reduce_precision(x, 8, 4).astype(jnp.float8_e4m3fn).astype(x.dtype)


def with_gradients(x):
    @jax.checkpoint
    def loss(w):
        return jax.nn.softmax(jnp.tanh(w @ w.T)).astype(jnp.float32).var()

    return jax.value_and_grad(loss)(x)


FUNCTIONS = [in_loops, with_regions, with_constants, with_rounding, with_gradients]


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        *((fn, jnp.bfloat16) for fn in FUNCTIONS),
        (with_constants, jnp.float16),
        *at_night((fn, jnp.float16) for fn in FUNCTIONS if fn is not with_constants),
    ],
)
def test_it_computes_what_float32_does(fn, dtype):
    wide = lowered(fn, X.astype(dtype))
    assert wide.narrow == ()
    module = wide.lowering.lowered.as_text()
    left = [line for line in module.splitlines() if any(n in line for n in NARROW)]
    assert all("constant" in line or "convert %cst" in line for line in left), left
    exact = X.astype(dtype).astype(np.float32)
    if fn is with_rounding:
        expected = exact
    elif fn is with_constants:  # They are written down in less.
        table = jnp.linspace(0, 1, 64).reshape(8, 8).astype(dtype).astype(jnp.float32)
        expected = (exact @ table * 0.5 + 1, np.full(3, -np.inf, np.float32))
    else:
        expected = fn(jnp.asarray(exact))
    found = run(wide, X.astype(dtype))
    for have, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert have.dtype == jnp.float32
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


def test_products_are_precise():
    def step(x, y):
        algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        return x @ y, jnp.dot(x, y, precision=algorithm)

    _, lowering, *_ = as_it_is(step, X, X)
    widen(lowering.module)
    products = [one for one in lowering.text.splitlines() if "dot_general" in one]
    assert len(products) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    assert not any("algorithm" in line for line in products)


def test_what_computes_in_float32_is_the_same_program_on_cpus():
    """These have one precision of its products."""
    assert lowered(jnp.matmul, X, X).unchanged
    for x in (X.astype(jnp.bfloat16), X.astype(np.float16)):
        assert not lowered(jnp.matmul, X, x).unchanged
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    assert not lowered(partial(jnp.dot, precision=algorithm), X, X).unchanged


@pytest.mark.parametrize("precise", [False, True])
def test_products_of_float32_are_precise_where_devices_have_several_precisions(precise):
    wide = lowered(jnp.matmul, X, X, precise=precise)
    text = wide.lowering.lowered.as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == precise
    assert wide.unchanged == (not precise)


def test_code_from_elsewhere_keeps_its_types():
    seen = []

    def host(x):
        seen.append(x.dtype)
        return x

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(host, shape, x * 1.001, vmap_method="sequential")
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return {"there": y * 2, "here": x * 2, "bits": bits}

    x = X.astype(jnp.bfloat16)
    wide = lowered(step, x)
    assert {name.split()[0] for name in wide.narrow} == {
        "stablehlo.custom_call",
        "stablehlo.bitcast_convert",
    }
    found = run(wide, x)
    assert seen == [jnp.bfloat16]
    assert found["there"].dtype == found["here"].dtype == jnp.float32
    np.testing.assert_array_equal(found["here"], x.astype(np.float32) * 2)
    np.testing.assert_array_equal(found["bits"], x.view(np.uint16))


def test_what_is_wide_stays():
    def step(x, n, key):
        return x * 2, n + 1, jax.random.fold_in(key, 3), x.astype(jnp.complex64)

    args = X, np.arange(3), jax.random.key(1)
    found = run(lowered(step, *args), *args)
    assert [v.dtype for v in found] == [v.dtype for v in jax.eval_shape(step, *args)]


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("float8_e4m3fn", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("int4", "int4"),
        ("complex64", "complex64"),
    ],
)
def test_only_narrow_floats_become_wider(narrow, wide):
    assert wide_dtype(jnp.dtype(narrow)) == jnp.dtype(wide)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_kernels_read_and_return_is_moved_by_half_a_bit(dtype):
    """A function of the host stands for a kernel that computes in less."""

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, dtype)
        made = jax.pure_callback(lambda v: v, shape, x.astype(dtype))
        return made.astype(jnp.float32)

    one, lowering, *shardings = as_it_is(step, X)
    perturbed = widened(one, lowering, *shardings, precise=False, perturbed=True)
    assert len(perturbed.narrow) == 1
    moved = np.asarray(run(perturbed, X)) / X - 1
    half = float(jnp.finfo(dtype).eps) / 2
    # Moved as it is read, rounded, and moved as it is returned.
    assert np.abs(moved).max() <= 3.01 * half
    assert np.sqrt(np.square(moved).mean()) > half
    assert (moved > 0).any() and (moved < 0).any()
    exact = np.asarray(run(lowered(step, X), X)) / X - 1
    assert np.abs(exact).max() <= 1.01 * half


def perturbed(fn, *args):
    """Results of a step with kernels, with what these read and return moved."""
    one, lowering, *shardings = as_it_is(fn, *args)
    return run(widened(one, lowering, *shardings, precise=False, perturbed=True), *args)


def test_a_kernel_may_read_an_argument_and_return_several_types():
    """In a loop it reads what the loop carries."""

    @partial(jax.lax.composite, name="a.kernel")
    def kernel(x):
        return x * 2, x.astype(jnp.float32), jnp.int32(3)

    def step(x):
        first, second, number = kernel(x)
        carried, _ = jax.lax.scan(lambda c, _: (kernel(c)[0], None), x, None, 2)
        return first, second, number, carried

    x = jnp.asarray(X, jnp.bfloat16)
    moved, exact = perturbed(step, x), run(lowered(step, x), x)
    assert [v.dtype for v in moved] == [v.dtype for v in exact]
    assert moved[2] == exact[2] == 3
    for one, other, most in zip(moved, exact, (3, 2, None, 6), strict=True):
        if most is not None:
            off = np.abs(np.asarray(one) / np.asarray(other) - 1)
            assert 0 < off.max() <= (most + 0.1) * 2.0**-8


def with_tuples(lowering):
    """Has calls of several results return one tuple, as some kernels' libraries do."""
    with lowering.module.context, ir.Location.unknown():
        for op in shardy.walk(shardy.main_function(lowering.module)):
            if op.name != "stablehlo.custom_call" or len(op.results) < 2:
                continue
            with ir.InsertionPoint(op):
                call = ir.Operation.create(
                    op.name,
                    results=[ir.TupleType.get_tuple([r.type for r in op.results])],
                    operands=list(op.operands),
                    attributes={
                        name: op.attributes[name]
                        for name in op.attributes
                        if name != "sdy.sharding"
                    },
                )
                taken = [
                    ir.Operation.create(
                        "stablehlo.get_tuple_element",
                        results=[result.type],
                        operands=[call.results[0]],
                        attributes={
                            "index": ir.IntegerAttr.get(
                                ir.IntegerType.get_signless(32), index
                            )
                        },
                    ).results[0]
                    for index, result in enumerate(op.results)
                ]
            for result, one in zip(op.results, taken, strict=True):
                result.replace_all_uses_with(one)
            op.erase()
    return lowering


@pytest.mark.parametrize("reads", ["bfloat16", "float32"])
def test_a_kernel_may_return_a_tuple(reads):
    """Its parts are converted, and moved, as results are."""

    def step(x):
        shapes = [jax.ShapeDtypeStruct(x.shape, d) for d in (jnp.bfloat16, jnp.float32)]
        made = jax.pure_callback(
            lambda v: (v.astype(jnp.bfloat16), v.astype(jnp.float32)),
            shapes,
            x.astype(reads),
        )
        return made[0] * 2, made[1]

    one, lowering, *shardings = as_it_is(step, X)
    wide = widened(
        one, with_tuples(lowering), *shardings, precise=False, perturbed=True
    )
    assert "tuple<" in wide.lowering.text
    [name] = wide.narrow
    assert name.startswith("stablehlo.custom_call")
    first, second = run(wide, X)
    assert first.dtype == second.dtype == jnp.float32
    off = np.abs(np.asarray(first) / (2 * X) - 1)
    assert 0 < off.max() <= 3.1 * 2.0**-8


SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]


@pytest.mark.parametrize("dtype", SMALL)
def test_what_kernels_read_is_moved_within_what_there_is(dtype):
    """The largest numbers, infinity and zero stay; the smallest move by their bit."""
    info = jnp.finfo(dtype)
    most, least = float(info.max), float(info.smallest_normal)

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, dtype)
        kernel = partial(jax.pure_callback, lambda v: v, shape)
        return kernel(kernel(x.astype(dtype))).astype(jnp.float32)

    x = np.array([most, -most, 0, *np.linspace(most / 2, most, 29)], np.float32)
    moved = np.asarray(perturbed(step, x))
    assert list(moved[:3]) == [most, -most, 0]
    assert np.isfinite(moved).all() and (np.abs(moved) <= most).all()
    if dtype != "bfloat16":  # CPUs have no smaller numbers than its normal ones.
        tiny = np.linspace(0.3, 0.6, 32, dtype=np.float32) * least
        assert (np.asarray(perturbed(step, tiny)) != np.asarray(step(tiny))).any()
    if "e4m3" not in dtype:
        infinite = np.array([np.inf, -np.inf], np.float32)
        np.testing.assert_array_equal(perturbed(step, infinite), infinite)


def test_what_is_no_rounding_is_no_kernel():
    """Moves to another memory, and the bits of which random numbers are made."""
    x = jnp.asarray(X, jnp.bfloat16)
    noise = lowered(
        lambda key: jax.random.normal(key, (8, 8), x.dtype), jax.random.key(0)
    )
    assert noise.narrow == ()
    assert lowered(lambda x: x.view(jnp.uint16), x).narrow != ()
    _, lowering, *_ = as_it_is(in_host, x)
    assert widen(lowering.module) == ()
    [move] = [line for line in lowering.text.splitlines() if "annotate_device" in line]
    assert "tensor<8x8xf32>) -> tensor<8x8xf32>" in move


def in_host(x):
    return jax.device_put(x * 2, jax.memory.Space.Host)


def test_functions_that_a_kernel_calls_become_wider_too():
    """As those that pad its operands, which are no part of the user's program."""

    def step(x):
        return jax.jit(lambda v: jax.jit(jnp.tanh)(v) + v)(x) + jax.jit(jnp.tanh)(x)

    lowered = jax.jit(step).lower(jnp.asarray(X, jnp.bfloat16))
    module = lowered.compiler_ir("stablehlo")
    assert "call @" in str(module) and "bf16" in str(module)
    assert widen(module) == ()
    assert module.operation.verify()
    assert "call @" in str(module) and "bf16" not in str(module)
