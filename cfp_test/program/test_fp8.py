"""Products in FP8: which ones, what they compute, and that plans compute the same."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cfp
from cfp.checking.check import Check, both_sides
from cfp.cost.described import described
from cfp.errors import OptionError
from cfp.plan.plan import Plan
from cfp.program.fp8 import (
    _SLOWER,
    TAKEN,
    _has_fp8_products,
    _lowered,
    quantize,
)
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step
from cfp_test.program import fp8_oracle
from cfp_test.program.fp8_oracle import ROUNDING

WIDTH, TOKENS, LAYERS = 32, 64, 3
LEAST = int(_SLOWER[1])  # FLOPs for each quantized number.


def layer(x, w):
    up, down = (one.astype(x.dtype) for one in (w["up"], w["down"]))
    return x + jnp.tanh(x @ up) @ down


def experts(x, w):
    grouped = x.reshape(4, -1, WIDTH)
    up, down = (one.astype(x.dtype) for one in (w["up"], w["down"]))
    hidden = jnp.tanh(jnp.einsum("etd,edf->etf", grouped, up))
    return x + jnp.einsum("etf,efd->etd", hidden, down).reshape(x.shape)


def ragged(x, w):
    sizes = jnp.array([8, 24, 0, 32])
    up, down = (one.astype(x.dtype) for one in (w["up"], w["down"]))
    hidden = jnp.tanh(jax.lax.ragged_dot(x, up, sizes))
    return x + jax.lax.ragged_dot(hidden, down, sizes)


@jax.custom_vjp
def own_layer(x, w):
    return layer(x, w)


own_layer.defvjp(
    lambda x, w: (layer(x, w), (x, w)), lambda kept, g: jax.vjp(layer, *kept)[1](g)
)


def unrolled(f, x, layers):
    for i in range(LAYERS):
        x = f(x, jax.tree.map(lambda a, i=i: a[i], layers))
    return x


def scanned(f, x, layers):
    return jax.lax.scan(lambda x, w: (f(x, w), None), x, layers)[0]


def train(f, over, params, x, y, dtype=jnp.bfloat16, scale=1.0):
    def loss(params):
        out = over(f, x.astype(dtype), params["layers"])
        logits = (out @ params["head"].astype(dtype)).astype(jnp.float32)
        return scale * jnp.mean((logits - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g / scale, params, grads), value


def arguments(count=None):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    lead = (LAYERS, *([count] if count else []))
    shapes = {"up": (*lead, WIDTH, 2 * WIDTH), "down": (*lead, 2 * WIDTH, WIDTH)}
    layers = {k: jax.random.normal(next(keys), s) / 6 for k, s in shapes.items()}
    head = jax.random.normal(next(keys), (WIDTH, WIDTH)) / 6
    batch = [jax.random.normal(next(keys), (TOKENS, WIDTH)) for _ in range(2)]
    return {"layers": layers, "head": head}, *batch


def lowered(step, args, precision="fp8:16"):
    flat = flatten_step(step, args, precision=precision)
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    lowering = lower_step(flat, [whole] * len(flat.avals), whole)

    def run(*args):
        leaves = lowering.lowered.compile()(*jax.tree.leaves(args))
        return jax.tree.unflatten(lowering.out_tree, leaves)

    return lowering, run


def counts_of(lowering):
    products = lowering.rewritten.products
    return {reason: sum(by_path.values()) for reason, by_path in products.items()}


# Of each layer two products of the forward pass, and of each two gradients; the first
# layer's input has none. What is rematerialized is computed once more; of a custom
# gradient that computes its layer again, only the first product is needed.
PROGRAMS = {
    "unrolled": (layer, unrolled, None, 6 * LAYERS - 1),
    "scanned": (layer, scanned, None, 6),
    "rematerialized": (jax.checkpoint(layer), unrolled, None, 7 * LAYERS - 1),
    "rematerialized in a scan": (jax.checkpoint(layer), scanned, None, 7),
    "custom gradient": (own_layer, unrolled, None, 6 * LAYERS - 1),
    "experts": (experts, unrolled, 4, 6 * LAYERS - 1),
    "ragged": (ragged, unrolled, 4, 6 * LAYERS - 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_takes_products_of_parameters_and_their_gradients(name):
    f, over, count, expected = PROGRAMS[name]
    lowering, run = lowered(partial(train, f, over), arguments(count))
    counts = counts_of(lowering)
    assert counts.pop(TAKEN) == expected
    unclear = counts.pop("which operand is the gradient is not clear", 0)
    assert unclear == LAYERS * (f is own_layer)
    assert counts == {"last layer": 3}
    text = lowering.text
    assert text.count("f8E5M2") and text.count("f8E4M3FN")
    got, loss = run(*arguments(count))
    want, expected_loss = jax.jit(partial(train, f, over))(*arguments(count))
    assert float(loss) == pytest.approx(float(expected_loss), rel=2e-2)
    start = arguments(count)[0]
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, start)), strict=True):
        assert np.linalg.norm(a - b) <= 0.15 * np.linalg.norm(b - c)


def tied(x, w):
    up = w["up"].astype(x.dtype)
    return x + jnp.tanh(x @ up) @ up.T


def branching(x, w):
    return jax.lax.cond(x[0, 0] > 0, layer, lambda x, w: -tied(x, w), x, w)


def manual(x, w):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole)(x, w)


MORE = {f.__name__: (f, unrolled, None, 0) for f in (tied, branching, manual)}


@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_without_rounding_nothing_changes(name, monkeypatch):
    f, over, count, _ = (PROGRAMS | MORE)[name]
    for kind in ("_FORWARD", "_GRADIENT"):
        monkeypatch.setattr(f"cfp.program.fp8.{kind}", "bfloat16")
    monkeypatch.setattr("cfp.program.fp8._EXPONENT", {"bfloat16": 7})
    step, args = partial(train, f, over), arguments(count)
    lowering, run = lowered(step, args)
    assert counts_of(lowering)[TAKEN] >= 6
    (got, _), (want, _) = run(*args), jax.jit(step)(*args)
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, args[0])), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b - c)


def carried(lowering, element):
    """The shapes of this type that each loop carries, of three layers or more."""
    loops = re.findall(r"stablehlo\.while\(.*\) : (.*)", lowering.text)
    shape = rf"tensor<{LAYERS}x(\d+x[\dx]+)x{element}>"
    return [Counter(re.findall(shape, types)) for types in loops]


def with_wide_stacks(monkeypatch, make):
    with monkeypatch.context() as patch:
        patch.setattr("cfp.program.fp8._stacks", lambda taken: {})
        return make()


def sublayers(x, w):
    """A layer with a product of what a loop of its own makes."""
    inner = {name: jnp.stack([one, one / 2]) for name, one in w.items()}
    return layer(scanned(layer, x, inner), w)


# A layer's input and its weights. What tanh makes is read by its gradient, too.
STACKED = {
    "a layer": (layer, None, ["64x32", "32x64", "64x32"]),
    "custom gradient": (own_layer, None, ["64x32"]),
    "experts": (experts, 4, ["4x16x32", "4x32x64", "4x64x32"]),
    "a loop inside": (sublayers, None, ["64x32", "32x64", "64x32"]),
    "rematerialized": (jax.checkpoint(layer), None, []),
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_what_a_scan_keeps_for_products_alone_is_in_fp8(name, dtype, monkeypatch):
    f, count, stacked = STACKED[name]
    step, args = partial(train, f, scanned, dtype=dtype), arguments(count)
    narrow, _ = lowered(step, args)
    wide, _ = with_wide_stacks(monkeypatch, lambda: lowered(step, args))
    assert narrow.module.operation.verify()
    of_first, *_, of_last = carried(narrow, "f8E4M3FN")[:: 2 if f is sublayers else 1]
    assert of_first == of_last >= Counter(stacked)
    element = "bf16" if dtype == jnp.bfloat16 else "f16"
    before, after = (carried(one, element)[0] for one in (wide, narrow))
    assert before - after == of_first and not carried(wide, "f8E4M3FN")[0]
    # The same scale and rounding, if XLA rounds the numbers themselves, as written.
    exact = {"xla_allow_excess_precision": False}
    got, want = (
        one.lowered.compile(exact)(*jax.tree.leaves(args)) for one in (narrow, wide)
    )
    for a, b in zip(got, want, strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.parametrize("start", ["zeros", "ones"])
@pytest.mark.parametrize("reader", ["products", "a sum"])
def test_stacks_of_other_loops(start, reader):
    """A loop that may leave rows as they were, and one whose rows others read."""

    def step(w, head, x):
        def fill(i, stack):
            row = jnp.tanh(x * (i + 1))
            return jax.lax.dynamic_update_index_in_dim(stack, row, 2 * i, 0)

        def read(i, total):
            row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return total + row @ w + (row if reader == "a sum" else 0)

        stack = getattr(jnp, start)((4, TOKENS, WIDTH), x.dtype)
        stack = jax.lax.fori_loop(0, 2, fill, stack)
        return w, head, jax.lax.fori_loop(0, 4, read, jnp.zeros_like(x)) @ head

    w = jax.random.normal(jax.random.key(2), (WIDTH, WIDTH), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(3), (TOKENS, WIDTH), jnp.bfloat16)
    lowering, run = lowered(step, (w, w, x))
    assert counts_of(lowering)[TAKEN] == 1
    is_narrow = "tensor<4x64x32xf8E4M3FN>" in lowering.text
    assert is_narrow == (start == "zeros" and reader == "products")
    got, want = run(w, w, x)[-1], jax.jit(step)(w, w, x)[-1]
    error = np.linalg.norm(np.asarray(got - want, np.float32))
    assert error <= 0.1 * np.linalg.norm(np.asarray(want, np.float32))


def test_planning_counts_stacks_in_fp8(monkeypatch):
    def predicted():
        settings = {"precision": "fp8:16", "preset": "data_parallel"}
        step, args = partial(train, layer, scanned), arguments()
        plan = cfp.plan(step, *args, mesh=described("2xh200"), **settings)
        return plan.predicted_bytes

    # A byte for each number: half of the inputs, and all weights.
    stacked = LAYERS * (TOKENS * WIDTH // 2 + 2 * 2 * WIDTH**2)
    of_scales = LAYERS * 3 * 4
    saved = with_wide_stacks(monkeypatch, predicted) - predicted()
    assert saved >= stacked - of_scales


def test_numbers_of_64_bits_may_be_on():
    _lowered.cache_clear()
    with jax.enable_x64(True):
        lowering, _ = lowered(partial(train, layer, scanned), arguments())
    assert counts_of(lowering)[TAKEN] == 6


def quantized(x, kind):
    number, scale = jax.jit(quantize, static_argnums=1)(x, kind)
    assert np.isfinite(scale) and scale > 0
    return np.asarray(number, np.float64) * float(scale)


@pytest.mark.parametrize("kind", ROUNDING)
@given(
    seed=st.integers(0, 2**16),
    exponent=st.integers(-26, 30),
    outlier=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_rounding_is_within_its_bound(kind, seed, exponent, outlier):
    x = np.random.default_rng(seed).standard_normal((8, 8)) * 2.0**exponent
    x[3, 4] += outlier * 2.0**exponent
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    relative, of_largest = ROUNDING[kind]
    error = np.abs(quantized(jnp.asarray(x, jnp.bfloat16), kind) - x)
    assert (error <= relative * np.abs(x) + of_largest * np.abs(x).max()).all()


@pytest.mark.parametrize("kind", ROUNDING)
def test_zeros_infinities_and_nans_keep_what_they_are(kind):
    assert (quantized(jnp.zeros((4, 4), jnp.bfloat16), kind) == 0).all()
    x = jnp.ones((4, 4), jnp.bfloat16).at[1, 2].set(jnp.inf).at[3, 0].set(jnp.nan)
    assert (np.isfinite(quantized(x, kind)) == np.isfinite(np.asarray(x))).all()


def odd_arguments(kind):
    params, x, y = arguments()
    if kind == "outliers":
        x = x.at[5].multiply(1e4)
    elif kind == "zeros":
        x = jnp.zeros_like(x)
    elif kind == "infinity":
        x = x.at[5, 3].set(jnp.inf)
    return params, x, y


@pytest.mark.parametrize("kind", ["outliers", "zeros", "infinity"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_no_new_nans(kind, dtype):
    step = partial(train, layer, unrolled, dtype=dtype)
    args = odd_arguments(kind)
    got, want = lowered(step, args)[1](*args), jax.jit(step)(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert not (np.isfinite(b) & ~np.isfinite(a)).any()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (jnp.bfloat16, 1e-8),
        (jnp.bfloat16, 2.0**12),
        (jnp.float16, 2.0**-6),  # Smaller scales would be zeros.
        (jnp.float16, 2.0**8),
    ],
)
def test_small_gradients_and_scaled_losses(dtype, scale):
    step = partial(train, layer, unrolled, dtype=dtype, scale=scale)
    args = arguments()
    start = jax.tree.leaves(args[0])
    (got, _), (want, _) = lowered(step, args)[1](*args), jax.jit(step)(*args)
    for a, b, c in zip(*map(jax.tree.leaves, (got, want)), start, strict=True):
        assert np.linalg.norm(a - b) <= 0.15 * np.linalg.norm(b - c)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_products_of_adversarial_numbers_are_within_their_bound(dtype):
    sizes = (TOKENS, WIDTH, 48)
    plain = fp8_oracle.arguments("as drawn", dtype, sizes)
    lowering, run = lowered(fp8_oracle.step, plain)
    assert counts_of(lowering) == {TAKEN: 3, "last layer": 2}
    for case in fp8_oracle.CASES:
        for one in fp8_oracle.checked(run, fp8_oracle.arguments(case, dtype, sizes)):
            assert one.wrong == 0 and one.share <= 1, case


@pytest.mark.parametrize("shape", [(0, WIDTH), (TOKENS, 0)])
def test_products_of_empty_arrays_stay(shape):
    def step(w, x):
        return jax.grad(lambda w: (x @ w).sum())(w)

    args = jnp.ones((shape[1], WIDTH), jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    lowering, run = lowered(step, args)
    assert TAKEN not in lowering.rewritten.products
    assert (run(*args) == 0).all()


def test_xla_merges_no_products_of_a_program_with_fp8():
    whole, _ = lowered(partial(train, layer, unrolled), arguments())
    none, _ = lowered(partial(train, layer, unrolled), arguments(), "fp8:4096")
    names = {"xla_gpu_enable_triton_gemm", "xla_gpu_dot_merger_threshold_mb"}
    assert whole.rewritten.options.keys() == names
    assert none.rewritten.options == {}


def test_a_loop_condition_reads_a_parameter():
    def step(w, head, x):
        def goes_on(state):
            return jnp.max(state[1] @ state[2] @ head) > 1

        halved = jax.lax.while_loop(
            goes_on, lambda s: (s[0] + 1, s[1] / 2, s[2]), (0, x, w)
        )
        return w, head, halved[0], halved[1] @ head

    args = (jnp.eye(WIDTH, dtype=jnp.bfloat16),) * 2
    args = *args, jnp.full((TOKENS, WIDTH), 8, jnp.bfloat16)
    lowering, run = lowered(step, args)
    assert counts_of(lowering)[TAKEN] == 1
    *_, count, out = run(*args)
    assert count == 3 and (out == 1).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_of_the_rounded_numbers(transposed):
    def step(first, last, x):
        def loss(first):
            h = x @ (first.T if transposed else first)
            return jnp.vdot(h @ last, x).astype(jnp.float32)

        value, gradient = jax.value_and_grad(loss)(first)
        return value, gradient, last

    keys = jax.random.split(jax.random.key(1), 3)
    first = jax.random.normal(keys[0], (32, 32), jnp.bfloat16) / 6
    last = jax.random.permutation(keys[1], jnp.eye(32, dtype=jnp.bfloat16))  # Exact.
    x = jax.random.normal(keys[2], (64, 32), jnp.bfloat16)
    _, got, _ = lowered(step, (first, last, x))[1](first, last, x)
    # In float64, of the same numbers rounded: x, and the gradient of the first product.
    gradient = quantized(jax.jit(lambda x, w: x @ w.T)(x, last), "float8_e5m2")
    want = quantized(x, "float8_e4m3fn").T @ gradient
    want = want.T if transposed else want
    error = np.abs(np.asarray(got, np.float64) - want)
    assert error.max() <= 2.0**-8 * np.abs(want).max()


def attention_step(width, tokens, shares):
    """A step with products of one width, three of one activation or none.

    They are followed by a wide one and the head.
    """
    names = "aqkvo" if shares else "ao"
    shapes = dict.fromkeys(names, (width, width))
    shapes |= {"wide": (width, 8 * width), "head": (8 * width, 64)}

    def step(params, x):
        def loss(params):
            w = {name: one.astype(jnp.bfloat16) for name, one in params.items()}
            h = jnp.tanh(x @ w["a"])
            if shares:
                h = sum(jnp.tanh(h @ w[name]) for name in "qkv")
            h = jnp.tanh(jnp.tanh(h @ w["o"]) @ w["wide"])
            return ((h @ w["head"]).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(params)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {name: array(one, jnp.float32) for name, one in shapes.items()}
    return step, (params, array((tokens, width), jnp.bfloat16))


def products_on(devices, step, args, precision="fp8"):
    flat = flatten_step(step, args, precision=precision)
    whole = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
    products = lower_step(flat, [whole] * len(flat.avals), whole).rewritten.products
    paths = {
        why: [name.rpartition("/")[2] for name in of] for why, of in products.items()
    }
    return {why: {*names} for why, names in paths.items()}


SLOWER = "quantizing takes longer than it saves"
EVERY = {*"aqkvo", "wide"}


# FLOPs for each quantized number: 3 x width of a product with its two gradients, 4.5 x
# if three share what they read, 2 x without the gradient of what it reads.
@pytest.mark.parametrize(
    ("width", "tokens", "shares", "taken"),
    [
        (4096, 8192, True, EVERY),
        (4096, 8192, False, {"a", "o", "wide"}),
        (LEAST // 64 * 16, 2**18, True, EVERY - {*"ao"}),
        (LEAST // 64 * 16, 2**18, False, {"wide"}),
        (LEAST // 128 * 16, 2**18, True, set()),
        (8192, 512, True, set()),
    ],
)
def test_a_product_pays_by_its_flops_for_each_quantized_number(
    width, tokens, shares, taken
):
    step, args = attention_step(width, tokens, shares)
    products = products_on(described("2xh200").abstract, step, args)
    assert products.get(TAKEN, set()) == taken
    others = (EVERY if shares else {"a", "o", "wide"}) - taken
    assert products.get(SLOWER, set()) == others
    forced = products_on(described("2xh200").abstract, step, args, "fp8:16")
    assert SLOWER not in forced and forced[TAKEN] == taken | others


@pytest.mark.parametrize("devices", ["8xa100", "v5e-8", "cpu"])
def test_devices_without_fp8_products_get_the_step_as_written(devices):
    mesh = (
        jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
        if devices == "cpu"
        else described(devices).abstract
    )
    step, args = attention_step(4096, 8192, True)
    without = "the devices have no FP8 products"
    products = products_on(mesh, step, args)
    assert TAKEN not in products and products[without] == EVERY
    # A least size asks for the rounding, too.
    assert products_on(mesh, step, args, "fp8:512")[TAKEN] == EVERY


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ("8.0", False),
        ("8.6", False),
        ("8.9", True),
        ("9.0", True),
        ("12.0", True),
        ("gfx942", False),
    ],
)
def test_gpus_have_fp8_products_since_ada(capability, has):
    device = SimpleNamespace(compute_capability=capability)
    assert _has_fp8_products(SimpleNamespace(devices=np.array([device]))) is has


def fp8_plan(tmp_path, precision="fp8:16", over=unrolled, args=None):
    step, args = partial(train, layer, over), args or arguments()
    settings = cfp.PlannerSettings(precision=precision, race=False)
    return cfp.plan(
        step,
        *args,
        mesh=jax.make_mesh((4,), ("x",)),
        preset="fully_sharded",
        cache_dir=tmp_path,
        settings=settings,
        quiet=True,
    )


def test_a_plan_computes_what_one_device_does(tmp_path):
    plan = fp8_plan(tmp_path)
    step, args = partial(train, layer, unrolled), arguments()
    assert "in FP8: 17 of 20" in str(plan) and "params/layers/up" in str(plan)
    assert 0.8 < plan.search["fp8_share"] < 1
    assert "ms less on H200s" not in str(plan)  # Too little.
    # Of a GPT that was measured on two H200: docs/fp8.md.
    search = {**plan.search, "fp8_saves_ms": 17.84}
    assert "by estimate 17.8 ms less on H200s" in str(replace(plan, search=search))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").bind(step, *args)
    want = lowered(step, args)[1](*args)
    got = loaded.apply(step)(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 2e-2 * np.abs(b).max()


def listed(f, x, layers):
    for one in layers:
        x = f(x, one)
    return x


@pytest.mark.parametrize("over", [listed, scanned])
def test_weights_are_gathered_as_bytes(over, tmp_path):
    params, *batch = arguments()
    if over is listed:
        layers = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(3)]
        params["layers"] = layers
    plan = fp8_plan(tmp_path, over=over, args=(params, *batch))
    step = partial(train, layer, over)
    text = plan.compile(step, params, *batch).as_text()
    gathered = Counter(re.findall(r" (\w+)\[[\d,]*\]\S* all-gather", text))
    # CPUs have no collectives of FP8. The head stays.
    narrow = gathered["f8e4m3fn"] + gathered["f16"]
    assert narrow == (2 * LAYERS if over is listed else 2)
    assert gathered.total() == narrow + 1


@pytest.mark.parametrize("over", [unrolled, scanned])
def test_a_check_is_against_the_same_rounded_products(over, tmp_path):
    planned, reference = both_sides(fp8_plan(tmp_path, over=over))
    assert planned.as_text().count("f8e4m3fn") and not planned.narrow
    check = Check(planned, reference, {0: 0})
    check.start(arguments())
    made = check.step()
    assert not made.failures
    assert max(leaf.relative_l2 for leaf in made) <= 1e-3
    of_loss, of_state = sorted(made.rounded.values())
    assert 1e-4 <= of_loss <= 2e-2 <= of_state <= 0.2


def test_a_check_fails_if_fp8_alone_makes_nans(monkeypatch, tmp_path):
    def broken(x, kind):
        number, scale = quantize(x, kind)
        return number, scale * jnp.nan

    monkeypatch.setattr("cfp.program.fp8.quantize", broken)
    _lowered.cache_clear()
    planned, reference = both_sides(fp8_plan(tmp_path))
    _lowered.cache_clear()
    params, x, y = arguments()
    for batch, fails in ((x, True), (x * jnp.nan, False)):
        check = Check(planned, reference, {0: 0})
        check.start((params, batch, y))
        made = check.step()
        assert all(np.isinf(leaf.relative_l2) for leaf in made.failures)
        assert len(made.failures) == (len(made) if fails else 0)


@pytest.mark.parametrize("factor", [2.0, 1024.0, 2.0**40])
@pytest.mark.parametrize("power", [None, -60, -100, -120])
def test_small_products_times_a_constant_stay_finite(factor, power):
    def step(w, x):
        y = ((x @ w["a"]) * jnp.asarray(factor, x.dtype)) @ w["b"]
        return y, jax.tree.map(lambda w: w * 2, w), jnp.tanh(y) @ w["head"]

    x = jnp.ones((WIDTH, WIDTH), jnp.bfloat16) * (2.0**power if power else 0.0)
    w = {name: jnp.ones_like(x) for name in ("a", "b", "head")}
    lowering, run = lowered(step, (w, x))
    assert counts_of(lowering)[TAKEN] == 2
    y = np.asarray(run(w, x)[0], np.float32)
    if not power or power < -80:
        assert (y == 0).all()
    else:
        want = np.asarray(jax.jit(step)(w, x)[0], np.float32)
        assert np.abs(y - want).max() <= 2.0**-3 * want.max()


# Steps in which every array is square, so that no size tells what is a parameter.
def sum_of_squares(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def network(w, x):
    return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["head"]


def gradients(w, x):
    return jax.value_and_grad(lambda w: sum_of_squares(network(w, x)))(w)


def frozen(w, x, base):
    def loss(w):
        return sum_of_squares(network(w, jnp.tanh(x @ base)))

    return jax.value_and_grad(loss)(w)


def ids(w, x, table):
    return (x @ table).astype(jnp.int32), gradients(w, x)


def attending(w, q, k, v):
    def loss(w):
        scores = jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(q.dtype)
        return sum_of_squares(network(w, scores @ v))

    return jax.value_and_grad(loss)(w)


def penalized(w, x):
    def loss(w):
        return sum_of_squares(network(w, x)) + sum_of_squares(w["a"].T @ w["a"])

    return jax.value_and_grad(loss)(w)


def preconditioned(w, x):
    loss, g = gradients({k: w[k] for k in ("a", "b", "head")}, x)
    momentum = w["momentum"] * 0.9 + g["a"]
    return {**g, "momentum": momentum}, w["momentum"] @ momentum, loss


def two_heads(w, x):
    def loss(w):
        h = jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"])
        return sum_of_squares(h @ w["head"]) + sum_of_squares(h @ w["second"])

    return jax.value_and_grad(loss)(w)


def evaluated(w, x, other):
    return gradients(w, x), sum_of_squares(network(w, other))


def teaching(w, x):
    loss, g = gradients(w["student"], x)
    teacher = jax.tree.map(lambda t, s: t * 0.9 + s * 0.1, w["teacher"], w["student"])
    return g, teacher, loss, sum_of_squares(network(w["teacher"], x))


def precise(w, x):
    def loss(w):
        h = jnp.dot(jnp.tanh(x @ w["a"]), w["b"], precision="highest")
        return sum_of_squares(jnp.tanh(h) @ w["head"])

    return jax.value_and_grad(loss)(w)


def none_returned(w, x):
    return network(w, x)


WEIGHTS = dict.fromkeys(("a", "b", "head"), (WIDTH, WIDTH))
USUAL = {TAKEN: {"w/a": 2, "w/b": 3}, "last layer": {"w/head": 3}}
STAYS = "not of a parameter and the batch"
PRECISE = "the step asks for a higher precision"
SQUARES = {
    gradients: (1, WEIGHTS, USUAL),
    frozen: (2, WEIGHTS, {**USUAL, STAYS: {"": 1}}),
    ids: (2, WEIGHTS, {**USUAL, STAYS: {"": 1}}),
    attending: (3, WEIGHTS, {**USUAL, STAYS: {"": 2}}),
    penalized: (1, WEIGHTS, {**USUAL, STAYS: {"": 3}}),
    preconditioned: (
        1,
        {**WEIGHTS, "momentum": (WIDTH, WIDTH)},
        {**USUAL, STAYS: {"": 1}},
    ),
    two_heads: (
        1,
        {**WEIGHTS, "second": (WIDTH, WIDTH)},
        {TAKEN: USUAL[TAKEN], "last layer": {"w/head": 3, "w/second": 3}},
    ),
    evaluated: (2, WEIGHTS, {TAKEN: {"w/a": 3, "w/b": 4}, "last layer": {"w/head": 4}}),
    teaching: (
        1,
        {"student": WEIGHTS, "teacher": WEIGHTS},
        {
            TAKEN: {
                "w/student/a": 2,
                "w/student/b": 3,
                "w/teacher/a": 1,
                "w/teacher/b": 1,
            },
            "last layer": {"w/student/head": 3, "w/teacher/head": 1},
        },
    ),
    precise: (
        1,
        WEIGHTS,
        {**USUAL, TAKEN: {"w/a": 2}, PRECISE: {"w/b": 3}},
    ),
    none_returned: (1, WEIGHTS, {STAYS: {"": 3}}),
}


def squares(step):
    count, shapes, expected = SQUARES[step]
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    params = jax.tree.map(array, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return (params, *[array((WIDTH, WIDTH))] * count), expected


@pytest.mark.parametrize("step", SQUARES, ids=lambda step: step.__name__)
def test_parameters_and_last_layers_are_told_by_what_depends_on_what(step):
    args, expected = squares(step)
    assert dict(lowered(step, args)[0].rewritten.products) == expected


# Steps with float32 parameters, and products of what is none beside theirs.
def entropy(h, w):
    logits = (h @ w.astype(h.dtype)).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()


def table(w, x, other):
    def loss(w):
        z = x @ other
        return entropy(jnp.tanh(x @ w["a"].astype(x.dtype) + z), w["head"]), z

    return jax.value_and_grad(loss, has_aux=True)(w)


def delta(w, x, base):
    def loss(w):
        h = x
        for name in "ab":
            h = jnp.tanh(h @ base[name] + h @ w[name].astype(x.dtype))
        return entropy(h, w["head"])

    return jax.value_and_grad(loss)(w)


def gate(w, x, base):
    def loss(w):
        h = jnp.tanh(x @ w["a"].astype(x.dtype)) * jnp.tanh(x @ base)
        return entropy(jnp.tanh(h @ w["b"].astype(x.dtype)), w["head"])

    return jax.value_and_grad(loss)(w)


def query(w, x, base):
    def loss(w):
        scores = (x @ w["a"].astype(x.dtype)) @ (x @ base).T
        return entropy(jax.nn.softmax(scores) @ x, w["head"])

    return jax.value_and_grad(loss)(w)


def hidden(w, x):
    h = jnp.tanh(x @ w["a"].astype(x.dtype))
    return jnp.tanh(h @ w["b"].astype(x.dtype))


def distilled(w, x, teacher):
    def loss(w):
        outs = [hidden(p, x) @ p["head"].astype(x.dtype) for p in (w, teacher)]
        return sum_of_squares(outs[0] - outs[1])

    return jax.value_and_grad(loss)(w)


def updated(w, x, teacher):
    loss, g = distilled(w, x, teacher)
    return jax.tree.map(lambda p, g: p - g, w, g), loss


def attending_itself(w, x):
    def loss(w):
        h = jnp.tanh(x @ w["a"].astype(x.dtype))
        h = jnp.tanh(h @ h.T / 8 + h @ w["b"].astype(x.dtype))
        return entropy(h, w["head"])

    return jax.value_and_grad(loss)(w)


def model(w, x):
    return entropy(hidden(w, x), w["head"])


whole = jax.checkpoint(model)
head = jax.checkpoint(entropy)


def rematerialized(w, x):
    return jax.grad(whole)(w, x)


def rematerialized_head(w, x):
    return jax.grad(lambda w: head(hidden(w, x), w["head"]))(w)


def value_not_returned(w, x):
    return jax.value_and_grad(whole)(w, x)[1]


def accumulated(w, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(whole)(w, x)), None

    zeros = jax.tree.map(jnp.zeros_like, w)
    return jax.lax.scan(add, zeros, jnp.stack([x, 2 * x]))[0]


def mapped(w, x):
    both = jnp.stack([x, 2 * x])
    return jax.grad(lambda w: jax.vmap(partial(whole, w))(both).mean())(w)


def by_map(w, x):
    both = jnp.stack([x, 2 * x])
    return jax.grad(lambda w: jax.lax.map(partial(whole, w), both).mean())(w)


def algorithm(w, x):
    def loss(w):
        first = jnp.dot(x, w["a"].astype(x.dtype), precision="BF16_BF16_F32")
        return entropy(jnp.tanh(first), w["head"])

    return jax.grad(loss)(w)


THREE = dict.fromkeys(("a", "b", "head"), (WIDTH, WIDTH))
TWO = {name: THREE[name] for name in ("a", "head")}
SQUARE = (WIDTH, WIDTH)
LAST = {"last layer": {"w/head": 3}}
FIRST, BOTH = {TAKEN: {"w/a": 2}}, {TAKEN: {"w/a": 2, "w/b": 3}}
AGAIN = {TAKEN: {"w/a": 3, "w/b": 4}, "last layer": {"w/head": 4}}
DOUBTS = {
    table: (TWO, [SQUARE], FIRST | LAST | {STAYS: {"": 1}}),
    delta: (THREE, [{"a": SQUARE, "b": SQUARE}], BOTH | LAST | {STAYS: {"": 3}}),
    gate: (THREE, [SQUARE], BOTH | LAST | {STAYS: {"": 1}}),
    query: (TWO, [SQUARE], FIRST | LAST | {STAYS: {"": 5}}),
    distilled: (THREE, [THREE], BOTH | LAST | {STAYS: {"": 3}}),
    attending_itself: (THREE, [], BOTH | LAST | {STAYS: {"": 3}}),
    rematerialized: (THREE, [], BOTH | LAST),
    rematerialized_head: (THREE, [], BOTH | LAST),
    value_not_returned: (THREE, [], BOTH | LAST),
    accumulated: (THREE, [], BOTH | LAST),
    mapped: (THREE, [], BOTH | LAST),
    by_map: (THREE, [], AGAIN),
    algorithm: (TWO, [], {PRECISE: {"w/a": 2}} | LAST),
}


def doubt(step, dtype=jnp.bfloat16):
    shapes, others, expected = DOUBTS[step]
    rows = WIDTH if step is attending_itself else TOKENS

    def arrays(shapes, dtype):
        array = partial(jax.ShapeDtypeStruct, dtype=dtype)
        return jax.tree.map(array, shapes, is_leaf=lambda x: isinstance(x, tuple))

    batch = arrays((rows, WIDTH), jnp.bfloat16)
    return (arrays(shapes, jnp.float32), batch, *arrays(others, dtype)), expected


@pytest.mark.parametrize("step", DOUBTS, ids=lambda step: step.__name__)
def test_only_parameters_count_and_last_layers_stay(step):
    args, expected = doubt(step)
    assert dict(lowered(step, args)[0].rewritten.products) == expected


def test_of_arguments_of_one_dtype_only_a_new_value_tells_the_parameter():
    args, expected = doubt(distilled, jnp.float32)
    assert dict(lowered(updated, args)[0].rewritten.products) == expected
    products = lowered(distilled, args)[0].rewritten.products
    assert products[TAKEN] == {"w/b": 3} and products["last layer"] == {"w/head": 3}


def test_an_algorithm_by_default_stays():
    args, _ = squares(gradients)
    with jax.default_matmul_precision("BF16_BF16_F32"):
        products = lowered(gradients, args)[0].rewritten.products
    assert products == {PRECISE: {"w/a": 2, "w/b": 3, "w/head": 3}}


def test_a_parameter_that_reads_the_batch_is_left_out_with_its_gradient():
    args, _ = squares(gradients)
    products = lowered(gradients, args, "fp8:16,-w/a")[0].rewritten.products
    assert products["left out"] == {"w/a": 2} and products[TAKEN] == {"w/b": 3}


def test_what_fp8_saves_is_estimated_from_products_and_quantized_numbers(tmp_path):
    step, args = attention_step(4096, 8192, True)
    plan = cfp.plan(
        step, *args, mesh=described("2xh200"), precision="fp8", preset="data_parallel"
    )
    # a and the head's products have no gradient of what they read.
    squares, wide = (4 * 3 + 2) * 4096**2, 3 * 8 * 4096**2
    numbers = 8192 * 4096 * (1 + 1 + 1 + 3 + 1 + 1 + 1 + 8) + (5 + 8) * 4096**2
    saved = 2 * 8192 * (squares + wide) * 0.71e-12 - numbers * 1.65e-9
    assert plan.search["fp8_saves_ms"] == pytest.approx(saved / 2, rel=1e-3)
    assert f"by estimate {saved / 2:.1f} ms less on H200s" in str(plan)


def test_products_are_left_out_by_path(tmp_path):
    products = fp8_plan(tmp_path, "fp8:16,-layers/up,-params/h*").products
    assert {why: [*of] for why, of in products.items()} == {
        TAKEN: ["params/layers/down"],
        "left out": ["params/layers/up"],
        "last layer": ["params/head"],
    }
    with pytest.raises(OptionError, match="'layers/upper', which matches no"):
        fp8_plan(tmp_path, "fp8,-layers/upper")


def test_an_unknown_precision_is_refused():
    for text in ("int8", "fp8:", "fp8:0", "fp8:x", "fp8,up", "fp8,-"):
        with pytest.raises(OptionError, match="Give fp8; fp8:512"):
            cfp.PlannerSettings(precision=text)
