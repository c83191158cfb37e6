"""A plan, or an error that helps, says what a user may not expect."""

import inspect
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.view.remarks import remarks
from cfp_test.cli.cli_runner import environment, run_batch


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


def scanned_step(w, xs):
    def body(h, x):
        return jnp.tanh(x @ w + h), None

    def loss(w):
        return jax.lax.scan(body, jnp.zeros(xs.shape[1:]), xs)[0].sum()

    return w - jax.grad(loss)(w)


def sampled(w, x):
    return jax.lax.fori_loop(
        0, 3, lambda _, x: x - jnp.tanh(x @ w["up"]) @ w["down"], x
    )


def heads(dtype, width=64):
    w = {name: jax.ShapeDtypeStruct((64, 4, width), dtype) for name in "qkv"}
    return {"fn": attend, "args": (w, jax.ShapeDtypeStruct((8, 128, 64), dtype))}


SCANNED = {"fn": scanned_step, "args": (shape(64, 64), shape(3, 8, 64))}


def test_what_a_user_may_not_expect_is_remarked(tmp_path, golden):
    """Memory, donation, rows that do not divide, kernels; times are left out."""
    cases = {
        "a search": {},
        "a budget": {"memory_budget": "20GiB"},
        "whole state that is not donated": {"preset": "data_parallel"},
        "a quarter of it": {"preset": "fully_sharded"},
        "donated": {"preset": "fully_sharded", "donate_argnums": 0},
        "a small input that comes back": {"fn": sampled, "rows": 8},
        "no new state": {"fn": lambda w, x: (x @ w["up"]).sum()},
        "30 rows": {"rows": 30, "preset": "fully_sharded"},
        "30 rows, split by tensors": {"rows": 30, "preset": "tensor_parallel"},
        "a scan of three": SCANNED,
        "a scan of three, split by tensors": {**SCANNED, "preset": "tensor_parallel"},
        "attention in float32": heads(jnp.float32),
        "attention that no type helps": heads(jnp.float32, 68),
        "attention in bfloat16": heads(jnp.bfloat16),
    }
    texts = {}
    for name, how in cases.items():
        found = [r for r in remarks(planned(tmp_path, **how)) if " ms" not in r]
        texts[name] = "\n".join(found)
    golden("remarks", texts)


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


def attend(w, x):
    def loss_fn(w):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return out.astype(jnp.float32).var()

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), loss


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
    assert "  w/bias: not in the plan, got float32[512]\n" in other.err
    assert "or plan again." in other.err


def test_a_warning_of_planning_is_at_the_line_of_the_call(tmp_path):
    args = {n: jnp.ones(one.shape) for n, one in W.items()}, jnp.ones((32, 512))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    how = {"cache_dir": tmp_path, "preset": "data_parallel", "quiet": True}
    how |= {"mesh": mesh, "settings": cfp.PlannerSettings(race=False)}
    step = jax.jit(train_step, donate_argnums=0)
    with pytest.warns(UserWarning, match="jax.jit around the step donates") as caught:
        cfp.plan(step, *args, **how)
    with pytest.warns(UserWarning, match="jax.jit around the step donates") as again:
        cfp.parallelize(step, **how)(*args)
    assert {one.filename for one in (*caught, *again)} == {__file__}


def test_a_preset_that_does_not_fit_says_so_and_names_one_size(tmp_path):
    line = "plan gpt --layers 2 --for 2xh100 --preset data_parallel -o plan.json"
    [done] = run_batch([[*line.split(), "--memory-budget", "1GiB"]], tmp_path)
    assert done.code == 1 and (tmp_path / "plan.json").exists()
    assert "It does not fit. A search may find a plan that fits" in done.out
    size = re.search(r"does not fit: needs (\d+\.\d+ GiB) of", done.out)
    assert size is not None and f" {size[1]}|" in done.out


def test_a_command_runs_where_its_output_is_closed():
    command = [sys.executable, "-m", "cfp", "--version"]
    shell = f"{shlex.join(command)} >&-"
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
