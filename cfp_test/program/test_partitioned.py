"""custom_partitioning ops: the rules that their callbacks keep, and plans with them."""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client  # pyright: ignore
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import cfp
from cfp.analysis.analyze import analyze, program_flops
from cfp.context import DetailedSettings
from cfp.errors import StepNotTraceable
from cfp.plan.parts import NOT_CHOSEN
from cfp.program import partitioned
from cfp.program.constrain import Constraints, constrain
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step, trace
from cfp_test.cli.cli_runner import environment
from cfp_test.programs.kernels import (
    DEPTH,
    HEADS,
    ROWS,
    TOKENS,
    kernel,
    model_of,
)
from cfp_test.support.checking import make_mesh
from cfp_test.support.forking import quick_python

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
SHAPE = jax.ShapeDtypeStruct((ROWS, TOKENS, HEADS, DEPTH), jnp.float32)


def calls_of(fn, args, mesh):
    """A program, and the custom_partitioning calls in it."""
    program, _ = trace(flatten_step(fn, args), mesh)
    found = [partitioned.call_of(op.attributes) for op in program.ops]
    return program, [call for call in found if call is not None]


def places_of(call):
    return tuple(factor.places for factor in call.factors)


def groups_of(op, *shapes, sizes=MESHES["x2y2"]):
    _, (call,) = calls_of(lambda *args: op(*args), shapes, make_mesh(sizes))
    return places_of(call), call.refusals


# ------------------------------------------------------------------------------ rules


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_rows_and_heads_are_one_factor_each_and_tokens_are_whole(sizes):
    groups, _ = groups_of(kernel("rule"), SHAPE, SHAPE, SHAPE, sizes=sizes)
    rows, heads = groups
    assert rows == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert heads == ((0, 2), (1, 2), (2, 2), (3, 2))


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("refusing", ("ValueError: this op is not to be partitioned",)),
        # Its rule does not say that keys are sharded as queries are.
        ("strict", ("ValueError: query, key and value should have the same sharding",)),
        ("callbacks", ()),
        ("partition", ()),
    ],
)
def test_what_refuses_and_what_has_no_rule_has_no_factor(name, reasons):
    groups, refusals = groups_of(kernel(name), SHAPE, SHAPE, SHAPE)
    assert (groups, refusals) == ((), reasons)


def test_a_factor_that_is_summed_over():
    @custom_partitioning
    def product(x, y):
        return x @ y

    def partition(mesh, args, result):
        rows, inner = (*args[0].sharding.spec, None, None)[:2]

        def local(x, y):
            return jax.lax.psum(x @ y, inner) if inner else x @ y

        ins = (
            NamedSharding(mesh, PartitionSpec(rows, inner)),
            NamedSharding(mesh, PartitionSpec(inner, None)),
        )
        return mesh, local, NamedSharding(mesh, PartitionSpec(rows, None)), ins

    product.def_partition(
        partition=partition,
        sharding_rule="i k, k j -> i j",
        reduction_factors=("k",),
    )
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (4, 6)))
    program, (call,) = calls_of(product, (x, y), make_mesh(MESHES["x2y2"]))
    assert places_of(call) == (((0, 0), (2, 0)), ((0, 1), (1, 0)))
    (op,) = (op for op in program.ops if op.kind == "custom_call")
    assert op.rule is not None
    assert [op.rule.sizes[f] for f in op.rule.reduction] == [4]
    assert program_flops(program) == 2 * 8 * 4 * 6


@pytest.mark.parametrize("name", ["rule", "strict"])
def test_an_axis_that_a_reshape_spreads_over_two_dims(name):
    """XLA shards rows by a half of the axis and heads by the other one."""
    op, mesh = kernel(name), make_mesh(MESHES["x4"])

    def step(x):
        x = x.reshape(TOKENS, 2, HEADS, DEPTH).transpose(1, 0, 2, 3)
        return op(x, jnp.sin(x), jnp.cos(x))

    x = jax.random.normal(jax.random.key(0), (TOKENS, 2 * HEADS, DEPTH))
    flat = flatten_step(step, (x,))
    program, _ = trace(flat, mesh)
    spread = NamedSharding(mesh, PartitionSpec(None, "x"))
    lowering = lower_step(flat, (spread,), [None])
    constrain(lowering.module, program, mesh, Constraints({}, {}))
    got = lowering.lowered.compile()(jax.device_put(x, spread))
    assert distance(step, (x,), got) < 1e-5


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (PartitionSpec("x", None, "z"), (4, 4, 4)),
        (PartitionSpec(("y", "x"), None, "z"), (8, 4, 4)),
        (PartitionSpec(("z", "x", "y")), (8, 4)),
        (PartitionSpec(None, "y"), (4, 4, 4)),
        (PartitionSpec(), (4, 4)),
    ],
)
def test_axes_of_shardings_are_read_again(spec, shape):
    """From XLA's notation, which has tiles of devices and no names."""
    mesh = make_mesh((("x", 2), ("y", 2), ("z", 2)))
    given = NamedSharding(mesh, spec)
    hlo = given._to_xla_hlo_sharding(len(shape))
    found = NamedSharding(mesh, partitioned.spec_of(hlo, mesh))
    assert found.is_equivalent_to(given, len(shape))


@pytest.mark.parametrize(("order", "axis"), [((0, 1, 2), "x"), ((2, 0, 1), "z")])
@pytest.mark.parametrize("kinds", [["MANUAL"], ["MANUAL", "REPLICATED"]])
def test_devices_with_the_same_piece_are_no_dim(order, axis, kinds):
    mesh = make_mesh((("x", 2), ("y", 2), ("z", 2)))
    tiles = (2, 4) if len(kinds) == 1 else (2, 2, 2)
    types = [getattr(xla_client.OpSharding.Type, kind) for kind in kinds]
    hlo = xla_client.HloSharding.iota_tile(tiles, (2, 2, 2), order, types)
    assert partitioned.spec_of(hlo, mesh) == PartitionSpec((axis,))


def test_an_axis_in_parts_is_whole():
    """Two dims by halves of an axis of four, and pieces in the reverse order."""
    mesh, of = make_mesh((("x", 4),)), xla_client.HloSharding
    assert partitioned.spec_of(of.iota_tile((2, 2)), mesh) == PartitionSpec()
    assert partitioned.spec_of(of.iota_tile((4, 1)), mesh) == PartitionSpec(("x",), ())
    turned = of.iota_tile((4,), (2, 2), (1, 0))
    assert partitioned.spec_of(turned, mesh) == PartitionSpec()


def test_names_are_the_same_in_every_trace_and_on_every_mesh():
    names = set()
    for sizes in (*MESHES.values(), (("x", 2),)):
        _, calls = calls_of(kernel("strict"), (SHAPE,) * 3, make_mesh(sizes))
        names.update(call.name for call in calls)
    assert len(names) == 1


# ------------------------------------------------------------------------------ plans


def scaled_by(factor):
    """An op whose callback differs from its computation, to see which one is called."""

    @custom_partitioning
    def op(x):
        return x * 2.0

    def partition(mesh, args, result):
        scale = factor if callable(factor) else lambda x: x * factor
        return mesh, scale, result.sharding, (args[0].sharding,)

    op.def_partition(partition, sharding_rule="i j -> i j")
    return op


def test_callbacks_of_equal_computations_are_kept_apart(tmp_path):
    ops = [scaled_by(2.0), scaled_by(6.0)]
    x, mesh = jnp.ones((8, 8)), make_mesh((("x", 2),))
    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
    both = cfp.parallelize(lambda x: [op(x) for op in ops], **how)
    alone = [cfp.parallelize(op, **how) for op in ops]
    for found in (both(x), [step(x) for step in alone]):
        assert [float(one.max()) for one in found] == [2.0, 6.0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_callbacks_with_other_constants_are_kept_apart(wrapped, tmp_path):
    """Also with constants of inner functions, and with random keys."""
    x, mesh, key = jnp.ones((8, 8)), make_mesh((("x", 2),)), jax.random.key(0)

    def times(table):
        def factor(x):
            return x * jnp.take(table, 1000) * (jax.random.bits(key) >= 0)

        return scaled_by(jax.jit(factor) if wrapped else factor)

    ops = [times(jnp.ones(2000).at[1000].set(n)) for n in (2.0, 6.0)]
    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
    found = cfp.parallelize(lambda x: [op(x) for op in ops], **how)(x)
    assert [float(one.max()) for one in found] == [2.0, 6.0]


def distance(fn, args, got):
    """The largest difference from what one device computes."""
    step = flatten_step(fn, args)
    alone = jax.jit(jaxpr_as_fun(step.traced.jaxpr))
    wanted = alone(*jax.tree.leaves(args))
    pairs = zip(jax.tree.leaves(got), wanted, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "how", "mesh"),
    [
        ("rule", {}, "x2y2"),
        ("strict", {"scanned": True}, "x4"),
        ("callbacks", {"rematerialized": True}, "x2y2"),
        ("refusing", {}, "x4"),
        *(
            pytest.param(*other, marks=pytest.mark.nightly)
            for other in (
                ("strict", {"scanned": True}, "x2y2"),
                ("callbacks", {"rematerialized": True}, "x4"),
            )
        ),
    ],
)
def test_planned_steps_compute_the_same(name, how, mesh):
    step, args = model_of(name, layers=2, **how)
    run = cfp.parallelize(step, mesh=make_mesh(MESHES[mesh]), quiet=True)
    assert distance(step, args, run(*args)) < 1e-5


def test_sharded_heads_are_those_of_the_kernel():
    step, args = model_of("rule", layers=1)
    plan = cfp.plan(
        step, *args, mesh=make_mesh((("x", 2),)), preset="tensor_parallel", quiet=True
    )
    run = plan.compile(step, *args)
    text = run.as_text()
    assert distance(step, args, run(*args)) < 1e-5
    assert f"f32[{ROWS},{HEADS // 2},{TOKENS},{TOKENS}]" in text
    assert f"f32[{ROWS},{HEADS},{TOKENS},{TOKENS}]" not in text
    assert not re.findall(r" (?:all-gather|all-to-all|collective-permute)\(", text)


def loss_kernel():
    """An op that computes a loss by a product, of rows and columns that it may split.

    Its backward pass is plain JAX.
    """

    def whole(x, w):
        return ((x @ w) ** 2).sum()

    @custom_partitioning
    def own_loss(x, w):
        return whole(x, w)

    def partition(mesh, args, result):
        rows, columns = args[0].sharding.spec[0], args[1].sharding.spec[1]
        axes = tuple(one for one in (rows, columns) if one is not None)

        def local(x, w):
            return jax.lax.psum(whole(x, w), axes) if axes else whole(x, w)

        specs = PartitionSpec(rows, None), PartitionSpec(None, columns)
        ins = tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, local, NamedSharding(mesh, PartitionSpec()), ins

    own_loss.def_partition(
        partition=partition,
        sharding_rule="i k, k j -> ",
        reduction_factors=("i", "j"),
        need_replication_factors=("k",),
    )
    loss = jax.custom_vjp(own_loss)
    loss.defvjp(
        lambda x, w: (own_loss(x, w), (x, w)),
        lambda args, one: jax.tree.map(
            lambda d: one * d, jax.grad(whole, (0, 1))(*args)
        ),
    )
    return loss


def test_a_kernel_that_returns_a_number_is_a_block_and_is_sharded():
    """A product of two whole tensors that is none is a sum, and no block."""
    loss = loss_kernel()

    def step(weights, x):
        def total(weights):
            return loss(jnp.tanh(x @ weights["up"]), weights["head"])

        value, gradients = jax.value_and_grad(total)(weights)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    shapes = {"up": (32, 64), "head": (64, 48)}
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        name: 0.1 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    args = weights, jax.random.normal(keys[2], (16, 32))
    mesh = make_mesh((("x", 2),))
    program, _ = calls_of(step, args, mesh)
    assert program_flops(program) >= 2 * 16 * 48 * 64
    (op,) = (one for one in program.ops if one.kind == "custom_call")
    assert program.values[op.results[0]].shape == ()
    analysis = analyze(program, (("x", 2),))
    assert op.id in {block.anchor for block in analysis.frame.blocks}
    plan = cfp.plan(step, *args, mesh=mesh, preset="data_parallel", quiet=True)
    run = plan.compile(step, *args)
    assert distance(step, args, run(*args)) < 1e-4
    # Each device has a half of the rows, and nothing is gathered for it.
    assert "f32[8,48]" in run.as_text() and "f32[16,48]" not in run.as_text()
    assert not re.findall(r" (?:all-gather|all-to-all)\(", run.as_text())
    planned = cfp.parallelize(step, mesh=mesh, quiet=True)
    assert distance(step, args, planned(*args)) < 1e-4


def test_a_refusing_op_is_named():
    step, args = model_of("refusing", layers=1)
    plan = cfp.plan(step, *args, mesh=make_mesh(MESHES["x4"]), quiet=True)
    (named,) = (text for text in plan.replicated_ops if "custom_partitioning" in text)
    assert "own_attention at kernels.py" in named
    assert "% of all FLOPs" in named
    assert "this op is not to be partitioned" in named


@custom_partitioning
def halved_refused(x):
    return jnp.tanh(x)


def _refuses_parts(mesh, args, result):
    """Columns that are split call what no compiler knows."""
    spec = (*args[0].sharding.spec, None, None)[:2]

    def local(x):
        if spec[1] is None:
            return jnp.tanh(x)
        return jax.ffi.ffi_call(
            "no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(x)

    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return mesh, local, sharding, (sharding,)


halved_refused.def_partition(partition=_refuses_parts, sharding_rule="i j -> i j")


def refused_when_split(weights, x):
    return (halved_refused(x @ weights["up"]) @ weights["down"]).sum(0)


REFUSED = (
    {"up": jnp.ones((64, 4096)), "down": jnp.ones((4096, 64))},
    jnp.ones((1, 64)),
)


@pytest.mark.parametrize("measure", [None, True], ids=["estimated", "measured"])
def test_a_kernel_that_refuses_when_compiled_is_a_candidate_that_failed(
    measure, tmp_path
):
    """There is one row, so that columns are split or nothing is."""
    settings = DetailedSettings(measure=measure, per_kind=3, reach=100.0)
    how = {"mesh": make_mesh((("x", 2),)), "quiet": True, "cache_dir": tmp_path}
    plan = cfp.plan(refused_when_split, *REFUSED, settings=settings, **how)
    run = plan.compile(refused_when_split, *REFUSED)
    np.testing.assert_allclose(
        run(*REFUSED), jax.jit(refused_when_split)(*REFUSED), rtol=1e-5
    )
    assert "no_such_kernel" not in run.as_text()
    if measure is None:
        failed = [row for row in plan.race if "no_such_kernel" in row.note]
        assert failed and all(row.time_ms is None for row in failed)
    with pytest.raises(cfp.CfpError, match="no_such_kernel"):
        cfp.plan(refused_when_split, *REFUSED, preset="tensor_parallel", **how).compile(
            refused_when_split, *REFUSED
        )


_LOADED = """
import sys
import jax
import cfp
from cfp_test.support.checking import make_mesh
from cfp_test.program.test_partitioned import distance
from cfp_test.programs.kernels import model_of

step, args = model_of("strict", layers=2)
plan = cfp.Plan.load(sys.argv[1]).on(make_mesh((("x", 2), ("y", 2))))
print("distance", distance(step, args, plan.compile(step, *args)(*args)))
"""


def test_a_plan_is_saved_and_runs_in_another_process(tmp_path):
    step, args = model_of("strict", layers=2)
    plan = cfp.plan(step, *args, mesh=make_mesh(MESHES["x2y2"]), quiet=True)
    plan.save(tmp_path / "plan.json")
    done = subprocess.run(
        [quick_python(), "-c", _LOADED, str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=True,
        env=environment(
            JAX_PLATFORMS="cpu",
            XLA_FLAGS="--xla_force_host_platform_device_count=8",
        ),
    )
    assert float(done.stdout.split()[-1]) < 1e-5


@pytest.mark.explained("Callbacks are not in this process")
def test_a_process_without_the_callbacks_says_so(monkeypatch):
    mesh = make_mesh(MESHES["x4"])
    step = flatten_step(kernel("rule"), (SHAPE,) * 3)
    _, lowering = trace(step, mesh)
    monkeypatch.setattr(partitioned, "_CALLS", {})
    with pytest.raises(StepNotTraceable, match="callbacks are not in this process"):
        partitioned.bind(lowering.module, mesh)


# ------------------------------------------------------------------------------ cuDNN


@pytest.fixture
def cudnn(monkeypatch):
    """JAX's cuDNN attention where there is no cuDNN: it is traced, and never run."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(
        fused, "is_cuda_compute_capability_equal", lambda capability: False
    )


def attention_step(q, k, v, *bias):
    def loss(*tensors):
        made = jax.nn.dot_product_attention(
            *tensors, is_causal=True, implementation="cudnn"
        )
        return made.astype(jnp.float32).sum()

    return jax.grad(loss, tuple(range(3 + len(bias))))(q, k, v, *bias)


@pytest.mark.explained("MLIR translation rule ... not found for platform cpu")
def test_cudnn_attention_is_traced_without_cudnn_for_gpus_that_are_not_here():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    args = [jax.ShapeDtypeStruct((8, 128, 4, 256), jnp.bfloat16)] * 3
    step = flatten_step(attention_step, args)
    program, _ = trace(step, AbstractMesh((4,), ("x",)))
    assert [op.name for op in program.ops].count("stablehlo.custom_call") == 2
    with pytest.raises(RuntimeError, match="not detected"):
        fused.check_cudnn_version()
    with pytest.raises(StepNotTraceable, match=r"platform cpu(.|\n)*--for"):
        trace(step, make_mesh((("x", 4),)))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("bias", [None, 1, 8], ids=["no_bias", "bias", "biases"])
def test_rules_of_cudnn_attention(cudnn, heads, bias):
    n, of_keys = heads
    shapes = [(8, 128, n, 64), (8, 128, of_keys, 64), (8, 128, of_keys, 64)]
    shapes += [(bias, n, 128, 128)] if bias else []
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    mesh = AbstractMesh((2, 2), ("x", "y"))
    program, calls = calls_of(attention_step, args, mesh)
    forward, backward = calls
    with_rows, with_heads = ((3, 0),) * (bias == 8), ((3, 1),) * bool(bias)
    assert places_of(forward) == (
        ((0, 0), (1, 0), (2, 0), *with_rows, (10, 0), (11, 0)),
        ((0, 2), (1, 2), (2, 2), *with_heads, (10, 2), (11, 1)),
    )
    # Of the backward pass: statistics, the result, its cotangent; then gradients.
    results = [(13, 0), (14, 0), (15, 0)] + [(16, 0)] * (bias == 8)
    rows = ((0, 0), (1, 0), (2, 0), *with_rows, (10, 0), (11, 0), (12, 0), *results)
    results = [(13, 2), (14, 2), (15, 2)] + [(16, 1)] * bool(bias)
    columns = ((0, 2), (1, 2), (2, 2), *with_heads, (10, 1), (11, 2), (12, 2))
    assert places_of(backward) == (rows, (*columns, *results))
    scores = 8 * n * 128 * 128
    assert program_flops(program) == int(3.5 * 2 * scores * (64 + 64))


def test_a_decoder_with_cudnn_attention_is_planned_for_devices_that_are_not_here(cudnn):
    def attention(q, k, v):
        narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
        made = jax.nn.dot_product_attention(*narrow, implementation="cudnn")
        return made.astype(jnp.float32)

    from cfp_test.programs import kernels

    w = kernels.weights(1)
    args = (w, jnp.ones((ROWS, 2 * TOKENS, HEADS * DEPTH)))

    def step(w, x):
        def loss(w):
            return (kernels.layer(attention, w, x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients), value

    plan = cfp.plan(step, *args, mesh=cfp.described("4xh200"), quiet=True)
    # It is so small that nothing is gained by sharding it.
    assert all(NOT_CHOSEN in text for text in plan.replicated_ops)
    assert "sharding_rule=" not in str(plan)
    assert "custom_partitioning" in str(plan)
