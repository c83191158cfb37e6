"""Figures to judge a plan by: what a step computes, and how fast that is."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.view.remarks import remarks
from cfp.view.text import page_html, short_text
from cfp.view.words import throughput
from cfp_test.cli.cli_runner import run_batch
from cfp_test.support.golden import plan_text

BATCH, SEQ, WIDTH, WORDS = 8, 16, 32, 64


def make_step(dtype, again=False):
    def loss_fn(w, tokens):
        x = jnp.take(w["table"], tokens, axis=0).astype(dtype)

        def inner(x):
            return jnp.tanh(x @ w["up"].astype(dtype)) @ w["down"].astype(dtype)

        return (jax.checkpoint(inner) if again else inner)(x).sum().astype(float)

    def step(w, tokens):
        loss, grad = jax.value_and_grad(loss_fn)(w, tokens)
        return jax.tree.map(lambda a, b: a - b, w, grad), loss

    return step


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


W = {
    "table": shape(WORDS, WIDTH),
    "up": shape(WIDTH, WORDS),
    "down": shape(WORDS, WIDTH),
}
TOKENS = shape(BATCH, SEQ, dtype=jnp.int32)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("throughput")

    def of(dtype=jnp.bfloat16, again=False, args=(W, TOKENS), step=None):
        step = step or make_step(dtype, again)
        mesh = cfp.described("4xh100")
        return cfp.plan(step, *args, mesh=mesh, donate_argnums=0, cache_dir=folder)

    return of


def one_ms(plan):
    return throughput(replace(plan, measured_ms=1.0))


def test_flops_are_the_models(planned):
    """An op that the step computes again for its backward pass is not the model's."""
    plain, again = planned(), planned(again=True)
    assert plain.search["model_flops"] == again.search["model_flops"]
    products = 6 * 2 * BATCH * SEQ * WIDTH * WORDS
    assert plain.search["model_flops"] == products


def test_rates_follow_from_the_time(planned):
    plan = planned()
    found = one_ms(plan)
    assert found.runs_whole  # Each of the four computes all of it.
    assert found.tflop_per_s == pytest.approx(plan.search["model_flops"] / 1e9)
    assert found.tokens_per_s == BATCH * SEQ * 1000
    assert found.samples_per_s is None
    assert throughput(plan).step_ms == plan.predicted_ms
    assert throughput(plan, 2.0).tokens_per_s == BATCH * SEQ * 500


@pytest.mark.parametrize(("dtype", "rate"), [(jnp.bfloat16, 989.4), (float, 494.7)])
def test_the_share_is_of_the_rate_of_the_products_types(planned, dtype, rate):
    found = one_ms(planned(dtype))
    assert found.rate_share == pytest.approx(found.tflop_per_s / rate)


def test_a_batch_without_tokens_has_samples(planned):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(w)
        return w - grad, loss

    found = one_ms(planned(args=(shape(32, 32), shape(24, 32)), step=step))
    assert found.samples_per_s == 24_000 and found.tokens_per_s is None


def edges_step(w, x, edges):
    def loss(w):
        ends = jnp.tanh(x @ w)[edges[:, 0]] - x[edges[:, 1]]
        return (ends**2).mean()

    return w - 0.1 * jax.grad(loss)(w)


def sparse_step(w, values, places, y):
    """Rows of parameters that a sparse array's places name, one for each value."""

    def loss(w):
        made = (
            jnp.zeros(y.shape)
            .at[places[:, 0]]
            .add(values[:, None] * w["in"][places[:, 1]])
        )
        return ((made @ w["out"] - y) ** 2).mean()

    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))


def decode_step(state, w):
    """One token more for each sample, in a buffer that has room for many."""
    last = jax.lax.dynamic_slice(state["tokens"], (0, state["at"]), (8, 1))[:, 0]
    token = jnp.argmax(w["table"][last] @ w["table"].T, axis=1).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice(
        state["tokens"], token[:, None], (0, state["at"] + 1)
    )
    return {"tokens": tokens, "at": state["at"] + 1}


INTEGERS = {
    "edges": (edges_step, shape(64, 64), shape(256, 64), (8192, 2)),
    "sparse": (
        sparse_step,
        {"in": shape(64, 32), "out": shape(32, 32)},
        shape(512),
        (512, 2),
        shape(64, 32),
    ),
    "decoding": (
        decode_step,
        {"tokens": (8, 128), "at": ()},
        {"table": shape(64, 32)},
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_are_no_tokens_are_not_counted(planned, name):
    step, *given = INTEGERS[name]
    args = jax.tree.map(
        lambda one: shape(*one, dtype=jnp.int32) if type(one) is tuple else one,
        given,
        is_leaf=lambda one: type(one) is tuple,
    )
    found = planned(args=args, step=step).search
    assert "model_flops" in found and "batch_tokens" not in found


def test_tokens_are_the_rows_that_are_looked_up(planned):
    """A batch in parts, of which inputs are one token shorter than the rows."""

    def step(w, tokens):
        def part(total, rows):
            x = w["table"].astype(jnp.bfloat16)[rows[:, :-1]]
            return total + (x @ w["up"].astype(x.dtype)).sum(), None

        def loss(w, tokens):
            return jax.lax.scan(part, jnp.bfloat16(0), tokens)[0]

        grads = jax.grad(loss, argnums=0)(w, tokens)
        return jax.tree.map(lambda a, b: a - b, w, grads)

    args = W, shape(2, BATCH, SEQ + 1, dtype=jnp.int32)
    found = planned(args=args, step=step).search
    assert found["batch_tokens"] == 2 * BATCH * SEQ


def test_tokens_may_be_looked_up_one_by_one(planned):
    """As libraries whose modules know one sample have it, under `jax.vmap`."""

    def step(w, tokens):
        def loss(w):
            x = jax.vmap(jax.vmap(lambda row: w["table"][row]))(tokens)
            return jnp.tanh(x @ w["up"]).sum()

        return jax.tree.map(lambda a, b: a - b, w, jax.grad(loss)(w))

    found = planned(args=(W, TOKENS), step=step).search
    assert found["batch_tokens"] == BATCH * SEQ


def loop_step(steps):
    def step(w, x):
        many = 100 if steps is None else steps(x)
        return w - jax.lax.fori_loop(0, many, lambda _, h: jnp.tanh(h @ w), x).sum()

    return step


def test_a_loop_of_unknown_length_is_said_and_not_counted_as_whole(planned, tmp_path):
    args = shape(32, 32), shape(24, 32)
    once = 2 * 24 * 32 * 32
    known = planned(args=args, step=loop_step(None))
    assert known.uncounted == ()
    assert known.search["model_flops"] == 100 * once
    assert "of the model a step;" in str(one_ms(known))
    open_ended = planned(args=args, step=loop_step(lambda x: x[0, 0].astype(int)))
    open_ended.save(tmp_path / "plan.json")
    for plan in (open_ended, cfp.Plan.load(tmp_path / "plan.json")):
        found = one_ms(plan)
        assert plan.search["model_flops"] == once
        assert (found.tflop_per_s, found.rate_share) == (None, None)
        assert str(found).startswith(
            "49,152 FLOP of the model with one iteration of 1 loop of unknown length"
        )
        [said] = [one for one in remarks(plan) if one.startswith("loops of unknown")]
        assert "in predictions too: while at test_throughput.py:" in said


def test_samples_of_all_microbatches_count(planned):
    def step(w, x):
        def add(total, part):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w) ** 2))(w), None

        return w - jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    found = planned(args=(shape(32, 32), shape(6, 24, 32)), step=step).search
    assert found["batch_samples"] == 6 * 24


def test_samples_of_time_steps_count_once(planned):
    def step(w, x):
        def loss(w):
            def cell(h, part):
                return jnp.tanh(part @ w + h), None

            return jnp.sum(jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[0])

        return w - jax.grad(loss)(w)

    found = planned(args=(shape(32, 32), shape(6, 24, 32)), step=step).search
    assert found["batch_samples"] == 24


def branching(work):
    def step(w, x, flag):
        y = jax.lax.cond(flag, work, lambda y: y, jnp.tanh(x @ w))
        return w - y.sum()

    return step


@pytest.mark.parametrize(
    "work",
    [lambda y: y @ y.T @ y, lambda y: jnp.linalg.qr(y)[0], lambda y: jnp.sort(y)],
    ids=["product", "factors", "order"],
)
def test_a_branch_is_said_not_to_be_predicted_alone(work, planned):
    args = shape(32, 32), shape(32, 32), shape(dtype=bool)
    plan = planned(args=args, step=branching(work))
    [said] = [one for one in remarks(plan) if "count all branches" in one]
    assert "case at test_throughput.py:" in said and "timed" not in said
    plan = planned(args=args, step=branching(jnp.sin))
    assert plan.uncounted == ()


def test_other_kinds_have_no_share_and_no_time_no_figures(planned):
    plan = planned()
    unknown = replace(plan, environment={"device_kind": "cpu"})
    assert throughput(unknown).rate_share is None
    timeless = replace(plan, predicted_ms=None, race=())
    assert throughput(timeless).step_ms is None
    flops = str(throughput(plan)).partition(";")[0]
    assert str(throughput(timeless)) == flops and flops.endswith(
        "FLOP of the model a step"
    )
    assert f"time unknown\n  {flops}\n" in str(timeless)
    assert throughput(replace(plan, search={})) is None


def test_float32_is_told_as_what_its_rate_is_of(planned):
    plan = planned(float)
    assert one_ms(plan).rate_dtypes == "float32 (TF32)"
    tpu = one_ms(replace(plan, environment={"device_kind": "TPU v5 lite"}))
    assert tpu.rate_dtypes == "float32 (bfloat16)" and tpu.rate_share
    wide = {"matmul_precision": "highest"}, {"cuda": "NVIDIA_TF32_OVERRIDE=0"}
    for precise in ({"device_kind": "cpu"}, *wide):
        found = one_ms(replace(plan, environment=plan.environment | precise))
        assert (found.rate_share, found.rate_dtypes) == (None, "")
    names = "default fastest bfloat16 high bfloat16_3x tensorfloat32 TF32_TF32_F32"
    for name in names.split():
        same = plan.environment | {"matmul_precision": name}
        assert one_ms(replace(plan, environment=same)) == one_ms(plan), name
    narrow = planned(jnp.bfloat16)
    found = one_ms(replace(narrow, environment=narrow.environment | wide[0]))
    assert found.rate_dtypes == "bfloat16" and found.rate_share


def test_plan_and_run_print_them(tmp_path):
    target = ["gpt", "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8"]
    target += ["--vocab", "32", "--batch", "8", "--platform", "cpu", "--devices", "4"]
    plan, run, data = run_batch(
        [
            ["plan", *target, "--preset", "zero1", "--no-race", "-o", "plan.json"],
            ["run", *target, "--plan", "plan.json", "--steps", "1"],
            ["run", *target, "--plan", "plan.json", "--steps", "1", "--json"],
        ],
        tmp_path,
    )
    assert (plan.code, run.code, data.code) == (0, 0, 0), plan.err + run.err
    assert "FLOP/s on each device" in run.out and "tokens/s" in run.out
    found = json.loads(data.out)
    assert found["throughput"]["step_ms"] == found["median_ms"]


def test_rates_stand_in_texts_and_pages(planned, golden, tmp_path):
    plan = replace(planned(), predicted_ms=0.5)
    plans = {
        "0.5 ms, described": plan,
        "5 ms, described": replace(plan, predicted_ms=5.0),
        "0.5 ms, measured": replace(plan, measured_ms=0.5, rung="measured"),
    }
    texts = {"a small share": str(replace(throughput(plan), rate_share=2e-4))}
    for name, one in plans.items():
        told = [line for line in remarks(one) if "launches" in line]
        texts[name] = "\n".join([str(throughput(one)), *told])
        for text in (short_text(one), plan_text(one), page_html(one)):
            assert str(throughput(one)) in " ".join(text.split())
    golden("throughput", texts)
    html = page_html(plan)
    for words in ("Race", "(won)", ">measured<", "virtual devices", "Step, measured"):
        assert words not in html, words
    plan.save(tmp_path / "plan.json")
    assert throughput(cfp.Plan.load(tmp_path / "plan.json")) == throughput(plan)
