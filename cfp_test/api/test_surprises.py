"""A plan, or an error that helps, says what a user may not expect."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.view.remarks import remarks
from cfp.view.text import explain_text
from cfp_test.cli.cli_runner import run_batch

MB = 2**20


def train_step(w, x):
    def loss_fn(w):
        return ((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


W = {"up": shape(512, 2048), "down": shape(2048, 512)}


def planned(folder, rows=32, text="4xh100", fn=train_step, args=None, **more):
    args = args or (W, shape(rows, 512))
    mesh = cfp.described(text)
    return cfp.plan(fn, *args, mesh=mesh, cache_dir=folder, **more)


def remark(plan, words):
    return [one for one in remarks(plan) if words in one]


# ------------------------------------------------------------------------------ memory


def test_the_share_of_memory_is_said(tmp_path):
    [text] = remark(planned(tmp_path), "a plan may use")
    assert "60.00 GiB of the 80.00 GiB of each device" in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text
    [text] = remark(planned(tmp_path, memory_budget="20GiB"), "a plan may use")
    assert "19.88 GiB of the 80.00 GiB" in text and "JAX" not in text
    why = ": the budget of 20.00 GiB less 128.00 MiB that the allocator may add"
    assert text.endswith(why)
    said = " ".join(explain_text(planned(tmp_path, memory_budget="20GiB")).split())
    assert f"at most 19.88 GiB on each device{why}." in said


@pytest.mark.parametrize(
    ("preset", "mib"), [("data_parallel", 8), ("fully_sharded", 2)]
)
def test_donation_that_was_forgotten_is_said(tmp_path, preset, mib):
    """Two matrices of 4 MiB, on each device whole, or a quarter of them."""
    forgotten = planned(tmp_path, preset=preset)
    [text] = remark(forgotten, "the state is there twice")
    assert f"{mib}.00 MiB of each device are free" in text
    assert text.startswith("the state is there twice: donate w (donate_argnums, ")
    assert forgotten.search["undonated_bytes"] == mib * MB
    assert not remark(planned(tmp_path, preset=preset, donate_argnums=0), "twice")


def test_a_small_input_that_comes_back_is_not_worth_donating(tmp_path):
    def sample(w, x):
        return jax.lax.fori_loop(
            0, 3, lambda _, x: x - jnp.tanh(x @ w["up"]) @ w["down"], x
        )

    plan = planned(tmp_path, fn=sample, rows=8)
    assert plan.search["undonated_bytes"] == 4096
    assert plan.arg_names[plan.undonated[0]] == "x"
    assert not remark(plan, "twice")


def test_a_step_that_makes_no_state_has_nothing_to_donate(tmp_path):
    plan = planned(tmp_path, fn=lambda w, x: (x @ w["up"]).sum())
    assert not remark(plan, "twice")


# ------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("preset", [None, "fully_sharded", "tensor_parallel"])
def test_a_batch_that_does_not_divide_is_named(tmp_path, preset):
    [text] = remark(planned(tmp_path, rows=30, preset=preset), "does not divide")
    assert "x (30 over x=4)" in text
    assert not remark(planned(tmp_path, rows=32, preset=preset), "does not divide")


def scanned_step(w, xs):
    def body(h, x):
        return jnp.tanh(x @ w + h), None

    def loss(w):
        return jax.lax.scan(body, jnp.zeros(xs.shape[1:]), xs)[0].sum()

    return w - jax.grad(loss)(w)


@pytest.mark.parametrize("preset", [None, "tensor_parallel"])
def test_the_length_of_a_scan_is_no_batch_that_does_not_divide(tmp_path, preset):
    args = shape(64, 64), shape(3, 8, 64)
    plan = planned(tmp_path, fn=scanned_step, args=args, preset=preset)
    assert not remark(plan, "does not divide"), plan.uneven


# ---------------------------------------------------------------------------- a plan


def test_a_step_without_a_file_has_no_lines_of_cfp(tmp_path):
    """As in `python -c`: it was named by the line of cfp that traced it, first one
    and then another."""
    names = {"jax": jax, "jnp": jnp}
    exec(compile(inspect.getsource(attend), "<string>", "exec"), names)
    w = {name: shape(64, 4, 64) for name in "qkv"}
    own = ("pipeline.py", "api.py", "test_surprises.py")
    plan = planned(tmp_path, fn=names["attend"], args=(w, shape(8, 128, 64)))
    assert not [row.name for row in plan.rows if any(one in row.name for one in own)]


def test_storage_is_said_in_english(tmp_path):
    zero1 = planned(tmp_path, preset="zero1")
    assert "parameters as used, update sharded" in str(zero1)


def attend(w, x):
    def loss_fn(w):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return out.astype(jnp.float32).var()

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss


@pytest.mark.parametrize(
    ("dtype", "width", "said"),
    [(jnp.float32, 64, True), (jnp.float32, 68, False), (jnp.bfloat16, 64, False)],
)
def test_what_bfloat16_would_allow_is_said(tmp_path, dtype, width, said):
    """Not of heads that the kernel cannot compute in bfloat16 either."""
    w = {name: jax.ShapeDtypeStruct((64, 4, width), dtype) for name in "qkv"}
    args = w, jax.ShapeDtypeStruct((8, 128, 64), dtype)
    plan = planned(tmp_path, fn=attend, args=args)
    assert bool(remark(plan, "it would with q, k and v in bfloat16")) == said


def test_what_a_kernel_that_was_not_allowed_would_bring_is_said(tmp_path):
    w = {name: jax.ShapeDtypeStruct((64, 4, 64), jnp.bfloat16) for name in "qkv"}
    args = w, jax.ShapeDtypeStruct((8, 1024, 64), jnp.bfloat16)
    settings = cfp.PlannerSettings(attention=())
    plan = planned(tmp_path, fn=attend, args=args, settings=settings)
    [text] = remark(plan, "with cudnn's a step is estimated to take")
    less_ms = float(text.split("to take ")[1].split(" ms less")[0])
    assert 0.0 < less_ms < plan.predicted_ms and "--attention cudnn" in text
    usual = planned(tmp_path, fn=attend, args=args)
    assert not remark(usual, "that was asked for")
    assert usual.predicted_ms == pytest.approx(plan.predicted_ms - less_ms, rel=0.05)
    # To leave the choice out is not to ask for none, and an option would be refused.
    settings = cfp.PlannerSettings(choose=("sharding",))
    narrow = planned(tmp_path, fn=attend, args=args, settings=settings)
    assert remark(narrow, "chosen among sharding alone")
    assert not remark(narrow, "that was asked for") + remark(narrow, "--attention")


# ----------------------------------------------------------------------------- options


# A plan's step for commands, and one that takes something else.
_STEPS = """
import jax, jax.numpy as jnp

def arguments(rows, **more):
    sizes = {"up": (512, 2048), "down": (2048, 512), **more}
    shapes = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in sizes.items()}
    return shapes, jax.ShapeDtypeStruct((rows, 512), "float32")

def step(w, x):
    return w, x.sum()

def same():
    return step, arguments(32)

def other():
    return step, arguments(64, bias=(512,))
"""


def test_an_export_of_another_step_is_refused(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    cfp.plan(
        train_step,
        W,
        shape(32, 512),
        mesh=mesh,
        preset="zero1",
        settings=cfp.PlannerSettings(race=False),
        cache_dir=tmp_path,
    ).save(tmp_path / "plan.json")
    (tmp_path / "step.py").write_text(_STEPS)
    short, other = run_batch(
        [
            ["export", "plan.json", "-o", "x.jax"],
            ["export", "plan.json", "step.py:other", "-o", "y.jax"],
        ],
        tmp_path,
    )
    assert short.code == 2 and "TARGET" in short.err
    # What differs, as `cfp run` says it.
    assert other.code == 2 and not (tmp_path / "y.jax").exists()
    assert "  x: planned for float32[32,512], got float32[64,512]\n" in other.err
    assert "  w/bias: planned for nothing, got float32[512]\n" in other.err
    assert "cfp plan TARGET -o FILE" in other.err
