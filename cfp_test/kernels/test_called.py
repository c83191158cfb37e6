"""Attention that a kernel of the step's own computes: its heads and sequences.

The kernel is JAX's cuDNN attention. Off GPUs it is traced as there, and run by XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

import cfp
from cfp.analysis.layout import Choice, Storage, lay_out
from cfp.analysis.presets import presets
from cfp.analysis.strategies import AxisChoice
from cfp.context import open_context
from cfp.passes import analyze_step
from cfp.plan.describe import compose_plan
from cfp.profiling.hlo import collectives_in
from cfp.program import shardy
from cfp.program.partitioned import call_of
from cfp.program.step import flatten_step
from cfp.program.widen import widen
from cfp.race.race import race
from cfp.search.guided import Candidate, Solution
from cfp_test.kernels.called import cudnn_on_cpus
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

BATCH, TOKENS, HEADS, HEAD_DIM, HIDDEN = 2, 64, 4, 8, 24
MESH = (("x", 4),)
CLOSE = 2e-2  # Relative, of gradients through bfloat16.


@pytest.fixture(scope="module", autouse=True)
def cudnn():
    with pytest.MonkeyPatch.context() as patcher, cudnn_on_cpus(patcher):
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


def is_called(op):
    return op.kind == "custom_call" and call_of(op.attributes) is not None


def planned_by_heads(step, args, folder):
    """A plan by hand: tokens are sharded over x, and heads in the attention."""
    mesh = make_mesh(MESH)
    analysis = analyze_step(flatten_step(step, args), mesh).analysis
    frame, strategies = analysis.frame, []
    for block in frame.blocks:
        op = frame.program.ops[block.anchor]
        rule = op.known_rule
        majors = [*map(rule.major, rule.results[0])]
        chosen = [f for f in majors if rule.sizes[f] == TOKENS]
        if is_called(op):
            chosen = [rule.major(rule.operands[0][2])]
        strategies.append((AxisChoice([*chosen, -1][0]),))
    choice = Choice(tuple(strategies), (Storage.USED,) * len(frame.groups))
    solution = Solution([Candidate("by hand", choice)])
    settings = cfp.PlannerSettings(race=False)
    with open_context(mesh, folder, None, settings) as context:
        outcome = race(context, analysis, solution)
        plan = compose_plan(analysis, mesh, {}, outcome)
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


def test_heads_are_exchanged_for_tokens_around_the_kernel(tmp_path):
    """Ulysses: the kernel is the step's own, on some heads and all tokens."""
    step, args = step_of(by_cudnn, is_causal=True), arguments()
    plan = planned_by_heads(step, args, tmp_path)
    assert not plan.constraints.replaced
    made = plan.compile(step, *args)
    # Of queries, keys and values, and of the output; the same of their gradients.
    found = collectives_in(made.as_text())
    moved = sum(one.count for one in found if one.kind == "all-to-all")
    assert moved >= 4 and kinds(made) <= {"all-to-all", "all-reduce"}, found
    assert_near(made(*args), written_out(HEADS, True))


@pytest.mark.parametrize("preset, dim", [("tensor_parallel", 2), ("data_parallel", 0)])
def test_presets_shard_heads_or_sequences_as_before(preset, dim):
    args = arguments(batch=4)
    mesh = make_mesh(MESH)
    step = flatten_step(step_of(by_cudnn, is_causal=True), args)
    frame = analyze_step(step, mesh).analysis.frame
    layout = lay_out(frame, presets(frame)[preset])
    called = [op for op in frame.program.ops if is_called(op)]
    assert len(called) == 2
    for op in called:
        factor = op.known_rule.major(op.known_rule.operands[0][dim])
        assert layout.axes[op.id][factor] == ("x",)


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
def ahead(kv_heads):
    """A plan of a decoder with one long sequence for four GPUs."""
    hidden, tokens, wide = 512, 65536, 128
    shapes = {"q": (hidden, HEADS, wide), "out": (HEADS, wide, hidden)}
    shapes |= dict.fromkeys("kv", (hidden, kv_heads, wide))
    shapes |= {"up": (hidden, 4 * hidden), "down": (4 * hidden, hidden)}
    weights = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    args = [weights, weights], jax.ShapeDtypeStruct((1, tokens, hidden), jnp.float32)
    return cfp.plan(decoder, *args, mesh=cfp.described("4xh200"), quiet=True)


def sharded_dims(plan, name):
    """The dims of results that rows of a plan shard, of blocks with some name."""
    rows = [row for row in plan.rows if name in row.name]
    assert rows, [row.name for row in plan.rows]
    return {tuple(role.dim for role in row.strategy) for row in rows}


def test_one_long_sequence_with_heads_is_exchanged_for_them():
    """Ulysses by itself: tokens sharded around, heads in the step's own kernel."""
    plan = ahead(HEADS)
    assert not plan.constraints.replaced
    assert sharded_dims(plan, "custom_partitioning") == {(2,)}
    assert all("over x" in text for text in plan.figures.kernels)
    assert sharded_dims(plan, "1/q") == sharded_dims(plan, "up") == {(1,)}


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
