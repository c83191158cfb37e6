"""Ops of jax.experimental.custom_partitioning, as kernels of libraries are."""

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from cfp_test.programs.common import normal, squares, training

ROWS, TOKENS, HEADS, DEPTH = 8, 16, 4, 8
WIDTH = HEADS * DEPTH
RULE = "b q n d, b k n d, b k n d -> b q n d"
# Like that of JAX's cuDNN attention, which does not say what keys have to be.
RULE_OF_QUERIES = "b q n d, b1 k1 n1 d1, b2 k2 n2 d2 -> b q n d"


def attend(q, k, v):
    """Computes what the kernels below do."""
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / DEPTH**0.5
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)


def _padded(one):
    spec = one.sharding.spec
    return (*spec, *(None,) * (one.ndim - len(spec)))


def _lenient(mesh, args, result):
    batch, _, heads, _ = _padded(args[0])
    one = NamedSharding(mesh, PartitionSpec(batch, None, heads, None))
    return mesh, attend, one, (one, one, one)


def _strict(mesh, args, result):
    """Like that of JAX's cuDNN attention: it asks for what its rule does not say."""
    specs = {_padded(one) for one in args}
    if len(specs) > 1:
        raise ValueError("query, key and value should have the same sharding")
    _, tokens, _, depth = specs.pop()
    if tokens or depth:
        raise ValueError("sharding of tokens and depth is not allowed")
    return mesh, attend, args[0].sharding, tuple(one.sharding for one in args)


def _refusing(mesh, args, result):
    raise ValueError("this op is not to be partitioned")


def _infer(mesh, args, result):
    return args[0].sharding


OPS = {
    "rule": (_lenient, _infer, RULE),
    "strict": (_strict, _infer, RULE_OF_QUERIES),
    "callbacks": (_lenient, _infer, None),
    "partition": (_lenient, None, None),
    "refusing": (_refusing, _infer, RULE),
}


def kernel(name):
    """A new op of one of these kinds, not differentiable."""
    partition, infer, rule = OPS[name]

    @custom_partitioning
    def own_attention(q, k, v):
        return attend(q, k, v)

    own_attention.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule
    )
    return own_attention


def differentiable(op):
    """An op whose backward pass is plain JAX."""

    @jax.custom_vjp
    def attention(q, k, v):
        return op(q, k, v)

    attention.defvjp(
        lambda *args: (op(*args), args),
        lambda args, gradient: jax.vjp(attend, *args)[1](gradient),
    )
    return attention


def weights(seed):
    names = ("q", "k", "v", "o")
    found = {name: normal(seed + i, WIDTH, WIDTH) for i, name in enumerate(names)}
    found["up"] = normal(seed + 4, WIDTH, 2 * WIDTH)
    return found | {"down": normal(seed + 5, 2 * WIDTH, WIDTH)}


def layer(attention, w, x):
    """A layer of a transformer."""
    q, k, v = ((x @ w[c]).reshape(*x.shape[:2], HEADS, DEPTH) for c in "qkv")
    x = x + attention(q, k, v).reshape(x.shape) @ w["o"]
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def model_of(name, layers=3, scanned=False, rematerialized=False):
    """A training step of some layers whose attention is a kernel.

    Args:
        name: of the op, among :data:`OPS`.
        layers: how many.
        scanned: whether they are one loop.
        rematerialized: whether they are under `jax.checkpoint`.
    """
    attention = differentiable(kernel(name))

    def one(x, w):
        return layer(attention, w, x)

    one = jax.checkpoint(one) if rematerialized else one
    params = [weights(10 * i) for i in range(1, layers + 1)]
    if scanned:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def loss(p, batch):
        x = batch["x"]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, p)
        else:
            for w in p:
                x = one(x, w)
        return squares(x, batch["y"])

    batch = {"x": normal(2, ROWS, TOKENS, WIDTH), "y": normal(3, ROWS, TOKENS, WIDTH)}
    return training(loss, params, batch)


def partitioned_kernel_step():
    """Attention by an op that says how it is sharded."""
    return model_of("rule", rematerialized=True)
