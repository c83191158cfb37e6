"""Attention that a kernel of the step's own computes: rings, gathering and Ulysses.

The kernel is JAX's cuDNN attention. Off GPUs it is traced as there, and run by XLA.
"""

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AbstractMesh, AxisType

import cfp
from cfp.analysis.layout import Choice, SegmentKernels, Storage, lay_out
from cfp.analysis.strategies import AxisChoice
from cfp.attention import chunked
from cfp.attention.kernels import KERNELS
from cfp.attention.matching.called import (
    GRADIENT,
    called_attentions,
    dims_over,
    replacement_of,
    with_token_factors,
)
from cfp.attention.matching.functions import NAME, Way
from cfp.attention.matching.matches import attentions
from cfp.context import open_context
from cfp.cost.terms import Terms
from cfp.passes.pipeline import analyze_step, decide
from cfp.presets.presets import presets
from cfp.profiling.hlo import collectives_in
from cfp.program import shardy
from cfp.program.graph import call_flops
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.program.widen import widen
from cfp.solution import Candidate, Solution
from cfp_test.attention.called import cudnn_on_cpus
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import cover_values

BATCH, TOKENS, HEADS, HEAD_DIM, HIDDEN, CHUNK = 2, 64, 4, 8, 24, 16
MESHES = {"x=4": (("x", 4),), "x=2,y=2": (("x", 2), ("y", 2))}
CLOSE = 2e-2  # Relative, of gradients through bfloat16.


@pytest.fixture(scope="module", autouse=True)
def cudnn():
    with pytest.MonkeyPatch.context() as patcher, cudnn_on_cpus(patcher):
        with patch.object(chunked, "CHUNK", CHUNK):
            yield


def by_cudnn(q, k, v, layout, **how):
    """The kernel, on [batch, tokens, heads, head_dim]."""
    if layout == "BTNH":
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    mask = fused.MaskType.CAUSAL if how.get("is_causal") else fused.MaskType.NO_MASK
    scale = how.get("scale") or HEAD_DIM**-0.5
    made: Any = fused.dot_product_attention(
        *turned, scale=scale, mask_type=mask, qkv_layout="BNTH"
    )
    return made.swapaxes(1, 2)


def by_hand(q, k, v, layout, **how):
    """The same, written out, in float32."""
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, implementation="xla", **how)


def loss_of(attend, layout="BTNH", **how):
    def loss(params, x):
        q, k, v = (
            jnp.einsum("bsm,mhd->bshd", x, params[name]).astype(jnp.bfloat16)
            for name in ("q", "k", "v")
        )
        mixed = attend(q, k, v, layout, **how).astype(jnp.float32)
        return jnp.square(jnp.einsum("bshd,hdm->bsm", mixed, params["out"]) - x).mean()

    return loss


def step_of(attend, layout="BTNH", **how):
    loss = loss_of(attend, layout, **how)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradients), gradients, value

    return step


def arguments(kv_heads=HEADS, batch=BATCH, tokens=TOKENS):
    shapes = {"q": (HIDDEN, HEADS, HEAD_DIM), "out": (HEADS, HEAD_DIM, HIDDEN)}
    shapes |= dict.fromkeys(("k", "v"), (HIDDEN, kv_heads, HEAD_DIM))
    params = {n: 0.3 * normal(i, *shape) for i, (n, shape) in enumerate(shapes.items())}
    return params, normal(9, batch, tokens, HIDDEN)


def planned(step, args, mesh, in_attention, folder, kernels):
    """A plan by hand: tokens are sharded over x.

    Args:
        in_attention: what each axis shards in the attention: "T", "N" or "B".
        kernels: of all segments.
    """
    mesh = make_mesh(MESHES[mesh])
    analysis = analyze_step(flatten_step(step, args), mesh).analysis
    frame = analysis.frame
    program, called = frame.program, called_attentions(frame.program)
    strategies = []
    for block in frame.blocks:
        rule = program.ops[block.anchor].rule
        if block.anchor in called:
            one = called[block.anchor]
            dims = rule.operands[0]
            chosen = [rule.major(dims[one.place(letter)]) for letter in in_attention]
        else:
            tokens = [
                f for f in map(rule.major, rule.results[0]) if rule.sizes[f] == TOKENS
            ]
            chosen = [*tokens, -1][:1] + [-1] * (len(in_attention) - 1)
        strategies.append(tuple(AxisChoice(factor) for factor in chosen))
    choice = Choice(tuple(strategies), (Storage.USED,) * len(frame.groups))
    of_segments = tuple((s.index, kernels) for s in analysis.segments if kernels)
    solution = Solution([Candidate("by hand", replace(choice, kernels=of_segments))])
    settings = cfp.PlannerSettings(race=False)
    with open_context(mesh, folder, None, settings) as context:
        plan, _ = decide(context, analysis, solution)
    return plan


def assert_near(found, expected, tolerance=CLOSE):
    worst = cfp.compare(found, expected)[0]
    assert worst.relative_l2 < tolerance, worst


@functools.cache
def written_out(kv_heads, is_causal):
    step = step_of(by_hand, is_causal=is_causal)
    return jax.jit(step)(*arguments(kv_heads))


def kinds(made):
    return {one.kind for one in collectives_in(made.as_text())}


@cover_values(
    sharded=[
        ("x=4", "T", ""),
        ("x=4", "T", "ring"),
        ("x=4", "T", "zigzag"),
        ("x=2,y=2", "TN", "ring"),
        ("x=2,y=2", "TB", ""),
    ],
    is_causal=[True, False],
    # In this order any two of mask, heads and layout meet.
    shape=[
        (HEADS, "BTNH"),
        (HEADS // 2, "BTNH"),
        (HEADS // 2, "BNTH"),
        (HEADS, "BNTH"),
    ],
)
def test_tokens_are_sharded_by_a_ring_or_gathered(sharded, is_causal, shape, tmp_path):
    (mesh, in_attention, spread), (kv_heads, layout) = sharded, shape
    step, args = step_of(by_cudnn, layout, is_causal=is_causal), arguments(kv_heads)
    kernels = SegmentKernels(attention="chunked", spread=spread)
    plan = planned(step, args, mesh, in_attention, tmp_path, kernels)
    assert [one.name for one in plan.constraints.replaced] == [NAME, GRADIENT]
    for one in plan.constraints.replaced:
        assert {"chunked", f"x={spread or 'all_gather'}"} <= {*one.functions.how}
    made = plan.compile(step, *args)
    assert "CustomSPMDPartitioning" not in made.as_text()
    assert ("collective-permute" in kinds(made)) == (spread != "")
    assert_near(made(*args), written_out(kv_heads, is_causal))


def test_heads_are_exchanged_for_tokens_around_the_kernel(tmp_path):
    """Ulysses: the kernel is the step's own, on some heads and all tokens."""
    step, args = step_of(by_cudnn, is_causal=True), arguments()
    plan = planned(step, args, "x=4", "N", tmp_path, None)
    assert not plan.constraints.replaced
    made = plan.compile(step, *args)
    # Of queries, keys and values, and of the output; the same of their gradients.
    found = collectives_in(made.as_text())
    moved = sum(one.count for one in found if one.kind == "all-to-all")
    assert moved >= 4 and kinds(made) <= {"all-to-all", "all-reduce"}, found
    assert_near(made(*args), written_out(HEADS, True))


@pytest.mark.parametrize(
    "preset, words", [("tensor_parallel", "heads"), ("data_parallel", "sequences")]
)
def test_presets_shard_heads_or_sequences_as_before(preset, words):
    args = arguments(batch=4)
    mesh = make_mesh(MESHES["x=4"])
    step = flatten_step(step_of(by_cudnn, is_causal=True), args)
    frame = analyze_step(step, mesh).analysis.frame
    layout = lay_out(frame, presets(frame)[preset])
    for op, one in called_attentions(frame.program).items():
        assert dims_over(frame.program, one, layout.axes[op]) == {"x": words}


def test_tokens_without_another_kernel_are_gathered_and_right(tmp_path):
    step, args = step_of(by_cudnn, is_causal=True), arguments()
    plan = planned(step, args, "x=4", "T", tmp_path, None)
    made = plan.compile(step, *args)
    assert "all-gather" in kinds(made)
    assert_near(made(*args), written_out(HEADS, True))


@pytest.mark.parametrize("is_again", [False, True], ids=["kept", "checkpoint"])
def test_passes_in_two_loops_are_replaced_one_by_one(is_again, tmp_path):
    """The log-sum-exp goes from one loop to the other: nothing is computed again."""

    def step_by(attend):
        def forward(x, params):
            q, k, v = (
                jnp.einsum("bsm,mhd->bshd", x, params[n]).astype(jnp.bfloat16)
                for n in ("q", "k", "v")
            )
            mixed = attend(q, k, v, "BTNH", is_causal=True).astype(jnp.float32)
            return x + 0.1 * jnp.einsum("bshd,hdm->bsm", mixed, params["out"]), None

        layer = jax.checkpoint(forward) if is_again else forward

        def total(params, x):
            return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

        return jax.value_and_grad(total)

    params, x = arguments()
    args = jax.tree.map(lambda w: jnp.stack([w, -w]), params), x
    step = step_by(by_cudnn)
    kernels = SegmentKernels(attention="chunked", spread="ring")
    plan = planned(step, args, "x=4", "T", tmp_path, kernels)
    names = [one.name for one in plan.constraints.replaced]
    assert sorted(names) == [NAME] * (1 + is_again) + [GRADIENT]
    made = plan.compile(step, *args)
    assert "CustomSPMDPartitioning" not in made.as_text()
    assert_near(made(*args), jax.jit(step_by(by_hand))(*args))


def test_it_is_the_same_behind_its_file(tmp_path):
    step, args = step_of(by_cudnn, is_causal=True), arguments()
    kernels = SegmentKernels(attention="chunked", spread="ring")
    plan = planned(step, args, "x=4", "T", tmp_path, kernels)
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=make_mesh(MESHES["x=4"]))
    expected = [one.functions.how for one in plan.constraints.replaced]
    assert [one.functions.how for one in loaded.constraints.replaced] == expected
    assert_near(loaded.apply(step)(*args), written_out(HEADS, True))
    with pytest.raises(cfp.PlanMismatch):
        loaded.apply(step_of(by_hand, is_causal=True))(*args)


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "how, why",
    [
        ({"bias": jnp.zeros((1, HEADS, TOKENS, TOKENS), jnp.bfloat16)}, "a bias"),
        ({"mask": jnp.ones((1, 1, TOKENS, TOKENS), bool)}, "a bias or a mask as one"),
        ({"local_window_size": (8, 0), "is_causal": True}, "a sliding window"),
        ({"query_seq_lengths": jnp.full(BATCH, 9, jnp.int32)}, "lengths of sequences"),
    ],
)
def test_what_a_kernel_computes_besides_is_left_to_it(how, why):
    def attend(q, k, v, layout):
        if "query_seq_lengths" in how:
            how["key_value_seq_lengths"] = how["query_seq_lengths"]
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)

    assert_left_alone(step_of(attend), arguments(), f"with {why}")


def test_dropout_is_left_to_the_kernel():
    def attend(q, k, v, layout):
        return fused.dot_product_attention(q, k, v, dropout_rate=0.1)

    assert_left_alone(step_of(attend), arguments(), "with dropout")


def test_other_queries_than_keys_are_left_to_the_kernel():
    def attend(q, k, v, layout):
        return by_cudnn(q, k[:, ::2], v[:, ::2], layout)

    assert_left_alone(step_of(attend), arguments(), f"{TOKENS} queries and 32 keys")


def assert_left_alone(step, args, why):
    flat = flatten_step(step, args)
    program = trace(flat, AbstractMesh((4,), ("x",)))[0]
    found = attentions(program)
    assert not found.found
    assert len(found.left_alone) == 2 and all(why in o.reason for o in found.left_alone)
    assert with_token_factors(program) is program


# -------------------------------------------------------------- without the devices


def decoder(weights, x):
    """Layers of attention and a feed-forward net, on one sequence."""

    def layer(x, w):
        q, k, v = (
            jnp.einsum("bsm,mhd->bshd", x, w[n]).astype(jnp.bfloat16) for n in "qkv"
        )
        mixed = by_cudnn(q, k, v, "BTNH", is_causal=True).astype(jnp.float32)
        x = x + jnp.einsum("bshd,hdm->bsm", mixed, w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(weights):
        return jnp.square(functools.reduce(layer, weights, x)).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@functools.cache
def ahead(kv_heads, kernels=None):
    """A plan of a decoder with one long sequence for four GPUs."""
    hidden, tokens, wide = 512, 65536, 128
    shapes = {"q": (hidden, HEADS, wide), "out": (HEADS, wide, hidden)}
    shapes |= dict.fromkeys("kv", (hidden, kv_heads, wide))
    shapes |= {"up": (hidden, 4 * hidden), "down": (4 * hidden, hidden)}
    weights = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    args = [weights, weights], jax.ShapeDtypeStruct((1, tokens, hidden), jnp.float32)
    settings = cfp.PlannerSettings(attention=kernels)
    mesh = cfp.described("4xh200")
    return cfp.plan(decoder, *args, mesh=mesh, settings=settings, quiet=True)


def sharded_dims(plan, name):
    """The dims of results that rows of a plan shard, of blocks with some name."""
    rows = [row for row in plan.rows if name in row.name]
    assert rows, [row.name for row in plan.rows]
    return {tuple(role.dim for role in row.strategy) for row in rows}


def test_one_long_sequence_is_sharded_for_devices_that_are_not_here():
    """One sequence, and one key head: tokens are all that can be sharded."""
    plan = ahead(1)
    names = sorted(one.name for one in plan.constraints.replaced)
    assert names == [NAME] * 2 + [GRADIENT] * 2
    ways = {one.functions.how for one in plan.constraints.replaced}
    assert ways <= {("cudnn", "x=ring"), ("cudnn", "x=all_gather")}
    assert dict(zip(plan.arg_names, plan.arg_specs, strict=True))["x"][1] == ("x",)
    assert sharded_dims(plan, "custom_partitioning") == {(1,)}
    assert all("over x (tokens)" in text for text in plan.figures.kernels)
    assert "2 attentions by cudnn, 2 gradients of attentions by cudnn" in " ".join(
        str(plan).split()
    )
    whole = ahead(1, ())
    assert not whole.constraints.replaced
    assert plan.predicted_ms < 0.6 * whole.predicted_ms


def test_one_long_sequence_with_heads_is_exchanged_for_them():
    """Ulysses by itself: tokens sharded around, heads in the step's own kernel."""
    plan = ahead(HEADS)
    assert not plan.constraints.replaced
    assert sharded_dims(plan, "custom_partitioning") == {(2,)}
    assert all("over x (heads)" in text for text in plan.figures.kernels)
    assert sharded_dims(plan, "1/q") == sharded_dims(plan, "up") == {(1,)}


@pytest.mark.parametrize("kernel", ["cudnn", "chunked"])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_a_ring_of_the_same_kernel_is_lowered_for_gpus(kernel, is_backward):
    flat = flatten_step(step_of(by_cudnn, is_causal=True), arguments())
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    program = trace(flat, mesh)[0]
    [one] = [
        one
        for one in called_attentions(program).values()
        if one.call.is_backward == is_backward
    ]
    made = replacement_of(program, one, Way(kernel, (("x", "ring"),)))
    values = (program.ops[op].operands[place] for op, place in made.stages[0].reads)
    dtypes = {"bf16": jnp.bfloat16, "f32": jnp.float32}
    shapes = [
        jax.ShapeDtypeStruct(value.shape, dtypes[value.dtype])
        for value in (program.values[v] for v in values)
    ]
    function = made.functions.stages(mesh)[0]
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "collective_permute" in text
    target = "__cudnn$fmhaSoftmax" + "Backward" * is_backward
    assert (f"@{target}(" in text) == (kernel == "cudnn")


def test_its_time_is_estimated_as_the_kernels():
    plan_mesh = cfp.described("4xh200")
    args = arguments(HEADS, 4, 4096)
    flat = flatten_step(step_of(by_cudnn, is_causal=True), args)
    analysis = analyze_step(flat, plan_mesh).analysis
    frame = analysis.frame
    rates = plan_mesh.rates
    terms = Terms(frame, rates)
    for op, one in called_attentions(frame.program).items():
        rule = frame.program.ops[op].rule
        # Under a causal mask it computes half of its products.
        flops = call_flops(frame.program.ops[op]) / 2
        alone = rates.matmul_ms(flops, "bf16") / KERNELS["cudnn"].matmul_share

        def time_ms(letter, spread=None, one=one, op=op, rule=rule):
            axes = [()] * len(rule.sizes)
            if letter:
                axes[rule.major(rule.operands[0][one.place(letter)])] = ("x",)
            way = Way("cudnn", (("x", spread),)) if spread else None
            return terms.attention_ms(one, tuple(axes), way)

        assert time_ms("") == pytest.approx((alone, 0.0))
        assert time_ms("B") == time_ms("N") == pytest.approx((alone / 4, 0.0))
        # What it is not made for it gathers, and computes in full.
        products, moves = time_ms("T")
        assert products == pytest.approx(alone) and moves > 0.0
        products, moves = time_ms("T", "zigzag")
        assert products == pytest.approx(alone / 4) and moves > 0.0
        # The last of four ranks sees 4 of 4 blocks, where 2.5 are the mean; by blocks
        # that are masked in halves it is 7/4.
        assert time_ms("T", "ring")[0] == pytest.approx(7 / 4 * alone / 4)


def test_a_check_moves_what_the_kernels_read_and_return():
    """Lowered for CUDA: q, k, v and out; backward these, dout, and gradients."""

    def loss(*qkv):
        return by_cudnn(*qkv, "BTNH").astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, HEAD_DIM), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, x, x)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    shardy.normalise(module)
    narrow = widen(module, perturbed=True)
    assert [one.rpartition("$")[2] for one in narrow] == [
        "fmhaSoftmax",
        "fmhaSoftmaxBackward",
    ]
    assert module.operation.verify()
    assert str(module).count("stablehlo.bitcast_convert") == (3 + 1) + (5 + 3)
