"""Arguments and results of steps: structures, dtypes, constants, sizes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cfp_test.programs.common import normal, squares, training


def scalars_step():
    """No array at all."""

    def train_step(a, b):
        return a * b + 1.0, jnp.sin(b)

    return train_step, (jnp.float32(2.0), jnp.float32(3.0))


def elementwise_step():
    """No contraction: one block, anchored by the largest op."""

    def train_step(x, y):
        z = jnp.tanh(x + y.T) * 2
        return z, z.sum(0), jnp.exp(-y)

    return train_step, (normal(0, 16, 8), normal(1, 8, 16))


def passed_through_step():
    """Outputs that are inputs, constants, and one another."""

    def train_step(w, x, unused):
        y = x @ w
        return w, y, y, x, jnp.ones((8, 8)), jnp.arange(8), unused, 3.0, y

    return train_step, (normal(0, 16, 8), normal(1, 8, 16), normal(2, 8))


def no_outputs_needed_step():
    """Nothing depends on the arguments."""

    def train_step(x):
        return jnp.arange(16.0).reshape(4, 4) @ jnp.ones((4, 8))

    return train_step, (normal(0, 8),)


class _State(NamedTuple):
    kernel: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Batch:
    x: jax.Array
    y: jax.Array
    kind: str = dataclasses.field(metadata={"static": True}, default="mean")


def structures_step():
    """NamedTuples, dataclasses, static arguments, keywords and Python numbers."""

    def train_step(state, batch, activation, rate, *, scale):
        def loss(kernel):
            return squares(activation(batch.x @ kernel), batch.y) * scale["loss"]

        grad = jax.grad(loss)(state.kernel)
        return _State(state.kernel - rate * grad, state.count + 1), batch.kind == "mean"

    state = _State(normal(0, 16, 8), jnp.int32(0))
    batch = _Batch(normal(1, 8, 16), normal(2, 8, 8))
    options = {"static_argnums": (2,), "kwargs": {"scale": {"loss": 2.0}}}
    return train_step, (state, batch, jnp.tanh, 0.1), options


def donated_step():
    """State that the step overwrites, in another order than it came."""

    def train_step(state, x):
        grads = jax.grad(lambda w: squares(jnp.tanh(x @ w["a"]) @ w["b"]))(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        w = jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], m)
        return {"loss": x.sum(), "m": m, "w": w}

    w = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    m = jax.tree.map(jnp.zeros_like, w)
    return train_step, ({"w": w, "m": m}, normal(2, 8, 16)), {"donate_argnums": (0,)}


def complex_step():
    def train_step(w, x):
        def loss(w):
            y = x @ w
            return jnp.mean(jnp.abs(y) ** 2 + y.real * y.imag)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * jnp.conj(grad), value

    def random(seed, *shape):
        return jax.lax.complex(normal(seed, *shape), normal(seed + 1, *shape))

    return train_step, (random(0, 16, 8), random(2, 8, 16))


def low_precision_step():
    """bfloat16 and float16 compute from float32 state."""

    def loss(p, x):
        y = jnp.tanh(x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16))
        y = y.astype(jnp.float16) @ p["b"].astype(jnp.float16)
        return squares(y.astype(jnp.float32))

    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}
    step, args = training(loss, params, normal(2, 16, 16))
    return step, args, {"tolerance": 2e-2}


def int8_step():
    """Inference with quantised weights."""

    def serve(w, scale, x):
        steps = jnp.round(x * 64).astype(jnp.int8)
        y = jax.lax.dot_general(
            steps, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )
        return y.astype(jnp.float32) * scale, y.argmax(-1)

    w = jax.random.randint(jax.random.key(0), (16, 32), -99, 99, jnp.int8)
    return serve, (w, jnp.ones(32) / 64, normal(1, 8, 16))


def small_integers_step():
    """Bits, bytes and words of several widths."""

    def train_step(a, b, flags):
        c = (a ^ b) << 1
        d = jax.lax.population_count(c)
        return jnp.where(flags, c, b), d.sum(), jnp.packbits(flags.reshape(-1)), ~flags

    a = jnp.arange(32, dtype=jnp.uint8).reshape(4, 8)
    flags = jnp.arange(32).reshape(4, 8) % 3 == 0
    return train_step, (a, a[::-1], flags)


def empty_step():
    """Arrays without elements, and dims of size one."""

    def train_step(w, none, one):
        y = one @ w
        rest = none @ w
        return w + y.sum(), rest, jnp.concatenate([y, rest]), none.sum(0)

    return train_step, (normal(0, 16, 8), jnp.zeros((0, 16)), normal(1, 1, 16))


def constants_step():
    """Large arrays that the function closes over."""
    table, kernel = normal(0, 64, 16), np.asarray(normal(1, 16, 32))

    def loss(p, x):
        return squares(jnp.tanh((x @ table) @ kernel) @ p["w"])

    return training(loss, {"w": normal(2, 32, 8)}, normal(3, 8, 64))


def host_arrays_step():
    """NumPy arguments, of dtypes that JAX narrows."""

    def train_step(w, x, n):
        return w + 0.1 * x.T @ (x @ w) / n, x.astype(jnp.float32).sum()

    rng = np.random.default_rng(0)
    return train_step, (rng.normal(size=(16, 8)), rng.normal(size=(8, 16)), np.int64(3))


def serving_step():
    """Decoding one token with a cache of keys and values."""
    params = {n: normal(i, 16, 4, 4) for i, n in enumerate("qkv")}
    params["o"] = normal(3, 4, 4, 16)

    def serve(p, cache, x, position):
        q = jnp.einsum("bd,dhe->bhe", x, p["q"])
        k = jnp.einsum("bd,dhe->bhe", x, p["k"])[:, None]
        v = jnp.einsum("bd,dhe->bhe", x, p["v"])[:, None]
        keys = jax.lax.dynamic_update_slice(cache["k"], k, (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(cache["v"], v, (0, position, 0, 0))
        scores = jnp.einsum("bhe,bthe->bht", q, keys)
        scores = jnp.where(jnp.arange(8) <= position, scores, -1e9)
        out = jnp.einsum("bht,bthe->bhe", jax.nn.softmax(scores), values)
        return {"k": keys, "v": values}, jnp.einsum("bhe,hed->bd", out, p["o"])

    cache = {"k": normal(4, 8, 8, 4, 4), "v": normal(5, 8, 8, 4, 4)}
    args = (params, cache, normal(6, 8, 16), jnp.int32(3))
    return serve, args, {"donate_argnums": (1,)}


def decoding_step(rows=1, length=8, features=16, heads=4):
    """Decodes a token a row, each row at a position of its own."""
    size = features // heads
    params = {n: normal(i, features, heads, size) for i, n in enumerate("qkv")}
    params["o"] = normal(3, heads, size, features)

    def write(cache, new, position):
        return jax.lax.dynamic_update_slice(cache, new[None], (position, 0, 0))

    def serve(p, cache, x, positions):
        q, k, v = (jnp.einsum("bd,dhe->bhe", x, p[n]) for n in "qkv")
        keys = jax.vmap(write)(cache["k"], k, positions)
        values = jax.vmap(write)(cache["v"], v, positions)
        scores = jnp.einsum("bhe,bthe->bht", q, keys)
        seen = jnp.arange(length) <= positions[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        out = jnp.einsum("bht,bthe->bhe", weights, values)
        return {"k": keys, "v": values}, jnp.einsum("bhe,hed->bd", out, p["o"])

    shape = (rows, length, heads, size)
    cache = {"k": normal(4, *shape), "v": normal(5, *shape)}
    positions = jnp.arange(3, 3 + rows, dtype=jnp.int32)
    args = (params, cache, normal(6, rows, features), positions)
    return serve, args, {"donate_argnums": (1,)}


def batched_decoding_step():
    """Decodes a token in each of several rows."""
    return decoding_step(rows=4)
