"""Attention found in programs, proved and replaced; what only looks like it is left."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import plainest, presets
from cfp.kernels.functions import Way
from cfp.kernels.matches import AttentionProposal, find, propose
from cfp.program.constrain import constrain
from cfp.program.replace import erase_unread
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step, planning_mesh, trace
from cfp_test.kernels.agreement import TOLERANCE, array_error, compare, gradients_of
from cfp_test.kernels.replaced import Step
from cfp_test.programs import attentive
from cfp_test.programs.common import normal
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import differences, prepare, shardings

SIZES = (("x", 4),)
SHAPE = (4, 16, 4, 8)


def found_in(fn, *args):
    mesh = planning_mesh(jax.make_mesh((4,), ("x",)))
    return find(trace(flatten_step(fn, args), mesh)[0])


def gradients(weigh):
    """Gradients of a mix by weights of scores."""

    def loss(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return (jnp.einsum("bhqk,bkhd->bqhd", weigh(scores), v) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def meaning_of(fn):
    q = jnp.ones(SHAPE)
    found = found_in(fn, q, q, q)
    assert not found.left_alone
    [match] = found.found.values()
    return match.meaning


def masked(scores, seen):
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))


PLACE = jnp.arange(16)
CAUSAL = PLACE[:, None] >= PLACE


@pytest.mark.parametrize(
    "weigh, expected",
    [
        (jax.nn.softmax, {"scale": 1.0, "causal": False}),
        (lambda s: jax.nn.softmax(s * 0.25), {"scale": 0.25}),
        (lambda s: jax.nn.softmax(s / jnp.sqrt(16)), {"scale": 0.25}),
        (lambda s: jax.nn.softmax(s * jax.lax.rsqrt(16.0)), {"scale": 0.25}),
        (lambda s: masked(s, jnp.tril(jnp.ones((16, 16), bool))), {"causal": True}),
        (
            lambda s: masked(s, (jnp.tril(jnp.ones((16, 16))) - jnp.tri(16, k=-5)) > 0),
            {"causal": True, "left": 4},
        ),
    ],
    ids=["full", "scaled", "root", "reciprocal root", "causal", "window"],
)
def test_what_is_computed_is_read_off(weigh, expected):
    meaning = meaning_of(gradients(weigh))
    assert {name: getattr(meaning, name) for name in expected} == expected


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s: jnp.exp(s) / (1.0 + jnp.exp(s).sum(-1, keepdims=True)),
        lambda s: jax.nn.softmax(s) * 1.01,
        lambda s: jax.nn.softmax(s) + 0.001 * s,
        lambda s: jax.nn.softmax(s**3),
        lambda s: jax.nn.softmax(s - 0.1 * s.mean(-2, keepdims=True)),
    ],
    ids=["one_more", "scaled_weights", "scores_twice", "cubed", "less_a_mean"],
)
def test_what_only_looks_like_it_is_left_alone(weigh):
    q = jnp.ones(SHAPE)
    found = found_in(gradients(weigh), q, q, q)
    assert not found.found
    assert found.left_alone
    assert found.left_alone[0].source.partition(":")[0] == "test_matching.py"


def test_features_in_two_dims_are_left_alone():
    """Kernels have one dim of features, and another one must not be lost."""

    def fn(q, k, v):
        q, k = (x.reshape(4, 16, 4, 2, 4) for x in (q, k))
        weights = jax.nn.softmax(jnp.einsum("bqhxd,bkhxd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    q = jnp.ones(SHAPE)
    found = found_in(fn, q, q, q)
    assert not found.found
    assert [one.reason for one in found.left_alone] == [
        "dims of a contraction or a mask are mixed up"
    ]


def test_scores_that_are_computed_again_are_another_attention():
    """A scan's backward pass has a kernel, though it computes no output again."""

    def loss(q, k, v):
        def layer(x, _):
            scores = masked(jnp.einsum("bqhd,bkhd->bhqk", x, k), CAUSAL)
            return jnp.einsum("bhqk,bkhd->bqhd", scores, v), None

        return (jax.lax.scan(jax.checkpoint(layer), q, None, 3)[0] ** 2).sum()

    q = jnp.ones(SHAPE)
    found = found_in(jax.grad(loss, argnums=(0, 1, 2)), q, q, q)
    assert not found.left_alone
    forward, backward = found.found.values()
    assert [one.core.is_backward for one in forward.passes] == [False]
    assert [one.core.is_backward for one in backward.passes] == [True]
    assert forward.meaning.causal
    assert backward.meaning.causal


def first_product(q, k, dtype=None):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype) * 0.25


def second_product(weights, v, dtype=None):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=dtype)


def wide_weights(q, k, v):
    return second_product(jax.nn.softmax(first_product(q, k).astype("float32")), v)


def wide_scores(q, k, v):
    return second_product(jax.nn.softmax(first_product(q, k, "float32")), v)


def wide_output(q, k, v):
    weights = jax.nn.softmax(first_product(q, k))
    return second_product(weights, v, "float32") * 2


def wide_queries(q, k, v):
    scores = first_product(q.astype("float32") * 0.3, k)
    return second_product(jax.nn.softmax(scores).astype(v.dtype), v)


def widened_queries(q, k, v):
    scores = first_product(q.astype("float32"), k.astype("float32"))
    return second_product(jax.nn.softmax(scores).astype(v.dtype), v)


def preferred(q, k, v):
    weights = jax.nn.softmax(first_product(q, k, "float32")).astype(v.dtype)
    return second_product(weights, v, "float32").astype(v.dtype)


def added(q, k, v):
    scores = first_product(q.astype("float32"), k.astype("float32"))
    scores += 0.3 * jnp.arange(16, dtype="float32")
    return second_product(jax.nn.softmax(scores).astype(v.dtype), v)


@pytest.mark.parametrize(
    "mix, wide, product",
    [
        (wide_weights, "v and the attention weights to bfloat16", second_product),
        (wide_scores, "v and the attention weights to bfloat16", second_product),
        (wide_output, "the output to bfloat16", second_product),
        (wide_queries, "q, k and v to bfloat16", first_product),
        (widened_queries, "", first_product),
        (preferred, "", first_product),
        (jax.checkpoint(preferred), "", first_product),
    ],
)
def test_the_wide_product_of_an_attention_is_named(mesh, mix, wide, product):
    """Widened bfloat16 is bfloat16; cuDNN takes no other product in float32."""
    args = [jnp.asarray(normal(n, *SHAPE), "bfloat16") for n in range(3)]
    step = gradients_of(mix, 3)
    for match in Step(step, args, mesh).attentions.found.values():
        file, _, line = match.source.rpartition(":")
        assert file.endswith("test_matching.py")
        assert int(line) == product.__code__.co_firstlineno + 1
        reason = AttentionProposal(match, Way("cudnn")).refusal({}, "cuda")
        assert (reason or "").rpartition("; to use it, cast ")[2] == wide
    found = compare(step, args, mesh=mesh, exact=step)
    assert bool(found.kernels) == (mix is not wide_output)  # None rounds an output.
    assert ("cudnn" in found.kernels) == (not wide)
    assert found.worst < TOLERANCE


@jax.custom_vjp
def exact_backward(q, k, v):
    return narrow_forward(q, k, v)[0]


def narrow_forward(q, k, v):
    short = [x.astype("bfloat16") for x in (q, k, v)]
    weights = jax.nn.softmax(first_product(*short[:2], "float32"))
    out = second_product(weights.astype("bfloat16"), short[2])
    return out, (q, k, v, weights)


def float32_backward(kept, dout):
    q, k, v, weights = kept
    dout = dout.astype("float32")
    dv = jnp.einsum("bhqk,bqhd->bkhd", weights, dout)
    found = jnp.einsum("bqhd,bkhd->bhqk", dout, v)
    found = weights * (found - jnp.sum(found * weights, -1, keepdims=True)) * 0.25
    dq = jnp.einsum("bhqk,bkhd->bqhd", found, k)
    return dq, jnp.einsum("bhqk,bqhd->bkhd", found, q), dv


exact_backward.defvjp(narrow_forward, float32_backward)


def test_a_backward_pass_in_float32_stays_in_float32(mesh):
    """Though its forward pass multiplies in bfloat16: keys are large, and cancel."""
    q, k, v = (jnp.asarray(normal(n, *SHAPE)) for n in range(3))
    step = Step(gradients_of(exact_backward, 3), (q / 100, k + 100, v), mesh)
    [match] = step.attentions.found.values()
    assert [one.core.is_backward for one in match.passes] == [False, True]
    assert match.problem.dtype == "float32"
    planned, _ = step.with_kernel("xla", wide=False)
    (got, *_), _ = planned(*step.args)
    (expected, *_), _ = jax.jit(step.fn)(*step.args)
    assert array_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("mix", [widened_queries, preferred])
def test_widened_values_that_loops_pass_on_are_bfloat16(mesh, mix):
    """JAX widens what is the same in all iterations before the loop."""

    def repeated(q, k, v):
        def layer(x, _):
            return (x + mix(x, k, v)).astype(x.dtype), None

        return jax.lax.scan(layer, q, length=2)[0]

    args = [jnp.asarray(normal(n, *SHAPE), "bfloat16") for n in range(3)]
    step = Step(gradients_of(repeated, 3), args, mesh)
    [match] = step.attentions.found.values()
    assert match.problem.dtype == "bfloat16"


def test_dtypes_may_differ_where_jax_promotes_none(mesh):
    def fn(q, k, v):
        weights = jax.nn.softmax(first_product(q, k, "float32"))
        return second_product(weights, v.astype("float32"))

    q = jnp.ones(SHAPE, "bfloat16")
    with jax.numpy_dtype_promotion("strict"):
        [match] = Step(fn, (q, q, q), mesh).attentions.found.values()
    assert match.problem.dtype == "float32"


def test_a_kernel_in_bfloat16_adds_no_bias_of_float32(mesh):
    q = jnp.ones(SHAPE, "bfloat16")
    [left] = Step(added, (q, q, q), mesh).attentions.left_alone
    assert left.reason == "a kernel would round a bias to bfloat16"


def test_weights_that_leave_are_left_alone():
    def fn(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights

    q = jnp.ones(SHAPE)
    found = found_in(fn, q, q, q)
    assert not found.found
    assert "returns" in found.left_alone[0].reason


def replaced(make, kernel):
    """A program with its attentions computed by a kernel, and what differs."""
    case = prepare("attention", make, SIZES)
    program, layout = (
        case.frame.program,
        lay_out(case.frame, plainest(presets(case.frame))),
    )
    found = []
    for match in find(program).found.values():
        one = propose(program, match, kernel, layout.axes)
        assert not isinstance(one, str)
        found += one.replacements(program)
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrained = dataclasses.replace(constraints(layout), replaced=tuple(found))
    constrain(lowering.module, program, case.mesh, constrained)
    erase_unread(lowering.module)
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    return found, differences(case, jax.tree.leaves(compiled(*arrays)))


def of_one_head():
    q, k, v = (normal(seed, 4, 16, 1, 8) for seed in range(3))
    return gradients(jax.nn.softmax), (q, k, v)


# Those of libraries are compared in each run in `test_replaced`, in several chunks.
@pytest.mark.parametrize(
    "make, kernel",
    [
        (PROGRAMS["transformer"], "chunked"),
        (of_one_head, "chunked"),
        *(
            pytest.param(make, kernel, marks=pytest.mark.nightly)
            for make, kernel in (
                (attentive.equinox_attention_step, "chunked"),
                (attentive.linen_attention_step, "chunked"),
                (attentive.haiku_attention_step, "chunked"),
                (attentive.nnx_attention_step, "chunked"),
                (attentive.gpt2_style_attention_step, "chunked"),
            )
        ),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_replaced_it_computes_the_same(make, kernel):
    found, far = replaced(make, kernel)
    assert found
    assert far == {}


def dropped(weigh, wrap=lambda f: f):
    """Matches a program where weights and a mask of random numbers are put together."""

    def step(q, k, v, key):
        def body(x, key):
            keep = jax.random.bernoulli(key, 0.9, (4, 4, 16, 16))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, x)
            return jnp.einsum("bhqk,bkhd->bqhd", weigh(scores, keep), v), None

        def loss(x):
            return (jax.lax.scan(wrap(body), x, jax.random.split(key, 3))[0] ** 2).sum()

        return jax.grad(loss)(k)

    q = jnp.ones(SHAPE)
    return found_in(step, q, q, q, jax.random.key(0))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["kept", "again"])
@pytest.mark.parametrize(
    "weigh",
    [
        lambda s, keep: jnp.where(keep, jax.nn.softmax(s) / 0.9, 0.0),
        lambda s, keep: jax.nn.softmax(s) * keep / 0.9,
    ],
    ids=["selected", "multiplied"],
)
def test_dropout_is_named_as_what_it_is(weigh, wrap):
    found = dropped(weigh, wrap)
    assert not found.found
    [reason] = {one.reason for one in found.left_alone}
    assert reason == "dropout: random numbers enter the scores or weights"


def test_what_is_random_elsewhere_is_no_dropout_of_weights():
    def step(q, k, v, key):
        def loss(q, k, v):
            keep = jax.random.bernoulli(key, 0.9, SHAPE)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q * keep, k)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            return ((mixed * keep) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    q = jnp.ones(SHAPE)
    assert len(found_in(step, q, q, q, jax.random.key(0)).found) == 1
    # A mask that is the same in every step drops nothing at random.
    [left] = found_in(
        gradients(lambda s: jax.nn.softmax(s) * CAUSAL), q, q, q
    ).left_alone
    assert "dropout" not in left.reason


# Only the softmax's argument, or what hides keys, is another one.
ARGUMENTS = {
    "infinite beyond 88": lambda s: jnp.log(jnp.exp(s)),
    "a number before the sum": lambda s: (s + 1e9) - 1e9,
    "as many heads as keys": lambda s: jnp.where(
        jnp.arange(16)[:, None, None] >= jnp.arange(16), s, -1e9
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_linear_or_the_attention_is_left(name):
    def infer(q, k, v):
        scores = ARGUMENTS[name](jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = [normal(seed, 4, 16, 16, 4) for seed in range(3)]
    step = Step(infer, args, planning_mesh(jax.make_mesh((4,), ("x",))))
    assert bool(step.attentions.found) == ("heads" in name)
    if step.attentions.found:
        planned, _ = step.with_kernel("xla")
        [difference] = cfp.compare(planned(*args), infer(*args))
        assert difference.relative_l2 < 1e-5


def of_all_flags(scores):
    """Softmax, doubled only where five arguments of the trace are true together."""
    weights = jax.nn.softmax(scores)
    doubled = 2 * weights
    for seed in range(5):
        is_on = normal(seed, 16, 1) > 0
        doubled = jnp.where(is_on, doubled, weights)
    return doubled


def test_each_state_of_masks_that_shows_keys_is_compared():
    def infer(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", of_all_flags(scores), v)

    q = jnp.ones(SHAPE)
    [left] = found_in(infer, q, q, q).left_alone
    assert "not that of a softmax" in left.reason


def test_weights_with_dims_of_their_own_are_left_alone():
    def infer(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        each = jnp.broadcast_to(weights[..., None], (*weights.shape, q.shape[-1]))
        return jnp.einsum("bhqkr,bkhr->bqh", each, v)

    q = jnp.ones(SHAPE)
    [left] = found_in(infer, q, q, q).left_alone
    assert "mixed up" in left.reason
