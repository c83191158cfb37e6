"""Pallas kernels without a rule, interpreted, and a training step of one."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS_OF_BLOCK = 2
BATCH, WIDTH = 32, 16


def by_rows(body, results, *operands):
    """Runs a kernel's body on blocks of rows; vectors are whole in each."""

    def spec(shape):
        if len(shape) == 1:
            return pl.BlockSpec(shape, lambda i: (0,))
        return pl.BlockSpec((ROWS_OF_BLOCK, *shape[1:]), lambda i: (i, 0))

    return pl.pallas_call(
        body,
        out_shape=jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), results
        ),
        grid=(operands[0].shape[0] // ROWS_OF_BLOCK,),
        in_specs=[spec(one.shape) for one in operands],
        out_specs=jax.tree.map(lambda one: spec(one.shape), results),
        interpret=True,
    )(*operands)


def rms_norm(x, scale):
    """Normalizes each row."""

    def body(x, scale, out):
        value = x[...]
        mean = (value * value).mean(-1, keepdims=True)
        out[...] = value * jax.lax.rsqrt(mean + 1e-6) * scale[...]

    return by_rows(body, x, x, scale)


def rms_norm_written(x, scale):
    """Computes what the kernel does."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rms_norm_backward(x, scale, gradient):
    """Gradients of the kernel."""
    return jax.vjp(rms_norm_written, x, scale)[1](gradient)


def softmax_over_rows(x):
    """Depends on every row, in each."""

    def body(x, out):
        out[...] = jax.nn.softmax(x[...], axis=0)

    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


def running_sum(x):
    """Scans over the rows: each block adds what the blocks before it left."""

    def body(x, out, carried):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carried[...] = jnp.zeros_like(carried)

        out[...] = jnp.cumsum(x[...], axis=0) + carried[...]
        carried[...] += x[...].sum(0, keepdims=True)

    block = pl.BlockSpec((ROWS_OF_BLOCK, x.shape[1]), lambda i: (i, 0))
    out, _ = pl.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype),
        ),
        grid=(x.shape[0] // ROWS_OF_BLOCK,),
        in_specs=[block],
        out_specs=(block, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))),
        interpret=True,
    )(x)
    return out


def with_position(x):
    """Adds the number of its row to each: another one in a part."""

    def body(x, out):
        first = pl.program_id(0) * ROWS_OF_BLOCK
        rows = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        out[...] = x[...] + rows.astype(x.dtype)

    return by_rows(body, x, x)


def training(norm, backward):
    """A step of two layers, each with a norm that has a gradient of its own."""

    @jax.custom_vjp
    def normalize(x, scale):
        return norm(x, scale)

    normalize.defvjp(
        lambda *args: (norm(*args), args),
        lambda args, gradient: backward(*args, gradient),
    )

    def step(params, x):
        def loss(params):
            h = x
            for layer in params:
                h = h + jnp.tanh(normalize(h, layer["scale"]) @ layer["w"])
            return (h * h).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(batch=BATCH):
    """Parameters and a batch."""
    keys = jax.random.split(jax.random.key(3), 3)
    params = [
        {"scale": jnp.ones(WIDTH), "w": jax.random.normal(key, (WIDTH, WIDTH)) / 4}
        for key in keys[:2]
    ]
    return params, jax.random.normal(keys[2], (batch, WIDTH))
