"""Ops that XLA gathers: held whole, named with their cost, and resharded behind."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import named_choices
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

AXES = (("x", 4),)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def trained(forward):
    def step(w, x):
        def loss(w):
            return jnp.mean(jnp.tanh(forward(w, x)) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    return step


def laid_out(step, *args):
    """The program, and its layout in data parallelism."""
    program, _ = trace(flatten_step(step, args), make_mesh(AXES))
    frame = analyze(program, AXES).frame
    return program, lay_out(frame, named_choices(frame)["data_parallel"])


def grouped(groups, w, x):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


# Groups, features of each, and how many results each has.
@pytest.mark.parametrize(
    ("groups", "features", "made"), [(8, 4, 4), (16, 2, 2), (32, 1, 1), (32, 1, 2)]
)
def test_grouped_convolutions_are_said_as_they_are_compiled(
    groups, features, made, tmp_path
):
    w, x = shape(3, 3, features, groups * made), shape(16, 8, 8, 32)
    step = trained(partial(grouped, groups))
    plan = cfp.plan(
        step,
        w,
        x,
        mesh=make_mesh(AXES),
        preset="data_parallel",
        cache_dir=tmp_path,
        settings=cfp.PlannerSettings(race=False),
    )
    named = [text for text in plan.replicated_ops if "convolution" in text]
    assert bool(named) == (features > 1)
    text = plan.compile_bound().as_text()
    # The forward pass is the convolution that makes whole or split batches.
    sizes = re.findall(r"= f32\[(\d+),8,8,\d+\]\S* convolution\(", text)
    assert sizes and set(sizes) == {"16" if features > 1 else "4"}
    program, layout = laid_out(step, w, x)
    tanh = next(op for op in program.ops if op.kind == "tanh")
    assert layout.value_spec[tanh.results[0]][0] == ("x",)


def test_whole_convolutions_are_named_with_their_cost(tmp_path):
    w, x = shape(3, 3, 64, 512), shape(64, 32, 32, 512)
    plan = cfp.plan(
        trained(partial(grouped, 8)),
        w,
        x,
        mesh=cfp.described("4xh100"),
        cache_dir=tmp_path,
    )
    [named] = [text for text in plan.replicated_ops if "convolution" in text]
    [cost] = re.findall(r"costs (?:at least )?([\d.]+) ms", named)
    assert 0.0 < float(cost) < plan.predicted_ms


@pytest.mark.parametrize("in_loop", [False, True])
def test_costs_that_the_steps_estimate_lacks_are_said(in_loop, tmp_path):
    """Alone and in a loop: the cost may exceed the estimate of the whole step."""

    def step(w, x):
        def once(_, h):
            return jnp.linalg.qr(h)[0]

        h = x @ w
        h = jax.lax.fori_loop(0, 20, once, h) if in_loop else once(0, h)
        return w - x.T @ h

    args, where = (shape(64, 64), shape(16384, 64)), cfp.described("4xh100")
    plan = cfp.plan(step, *args, mesh=where, cache_dir=tmp_path)
    [named] = [text for text in plan.replicated_ops if "costs" in text]
    assert named.startswith("while" if in_loop else "custom_call")
    [cost] = re.findall(r"costs (?:at least )?([\d.]+) ms", named)
    [share] = re.findall(r", (\d+)% of it beyond the step's estimate", named)
    assert float(cost) * (1 - int(share) / 100) < plan.predicted_ms
    assert float(cost) > plan.predicted_ms or not in_loop


def written(w, x):
    y = jnp.tanh(x @ w).at[:8].set(0.0)
    return jnp.sin(y) + y


def written_and_read(w, x):
    return (x.at[:8].set(0.0) + x * 2) @ w


def updated(w, x):
    y = jax.lax.dynamic_update_slice(jnp.tanh(x @ w), x[:1], (3, 0))
    return jnp.sin(y) + y


def added(w, x):
    return jnp.tanh(x @ w) + jnp.zeros(x.shape).at[:8].set(x[:8] * 2)


@pytest.mark.parametrize("forward", [written, written_and_read, updated, added])
def test_what_is_made_of_a_whole_value_is_sharded_behind_it(forward):
    program, layout = laid_out(trained(forward), shape(64, 64), shape(512, 64))
    assert layout.arg_spec(1) == (("x",), ())
    whole = [
        op.kind
        for op in program.ops
        if any(program.shape(v) == (512, 64) for v in op.results)
        and op.id not in program.leaf_ops
        and not any(map(any, map(layout.value_spec.get, op.results)))
    ]
    assert set(whole) <= {"scatter", "dynamic_update_slice"} and whole
