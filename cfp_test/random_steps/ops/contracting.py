"""Contractions: products, convolutions, attention, decompositions."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from cfp_test.random_steps.ops.draft import MAX_ELEMENTS, Draft, Node, Shape, op, rank


@op(rank())
def dense(d: Draft, shape: Shape) -> Node:
    w = d.weight(shape[-1], d.size(prod(shape[:-1])), scale=shape[-1] ** -0.5)
    if d.flip():
        return lambda e, x: x @ e[w]
    b = d.weight(d.weights[w].shape[1])
    return lambda e, x: x @ e[w] + e[b]


@op(rank())
def einsum(d: Draft, shape: Shape) -> Node:
    """Any dim contracted, any dim a batch dim of the weight, any order of results."""
    letters = "abcd"[: len(shape)]
    summed = d.dim(shape)
    terms = [letters[summed], "z"]
    left = [c for c in letters if c != letters[summed]]
    if left and d.flip():
        terms.append(d.pick(left))
    sizes = dict(zip(letters, shape, strict=True))
    sizes["z"] = d.size(prod(shape) // shape[summed])
    terms = [terms[i] for i in d.order(len(terms))]
    result = [*left, "z"]
    result = [result[i] for i in d.order(len(result))]
    w = d.weight(*(sizes[c] for c in terms), scale=shape[summed] ** -0.5)
    spec = f"{letters},{''.join(terms)}->{''.join(result)}"
    return lambda e, x: jnp.einsum(spec, x, e[w])


@op(rank(2, 4))
def dot_general(d: Draft, shape: Shape) -> Node:
    """Batch dims wherever they stand; one or more dims contracted."""
    order = d.order(len(shape))
    batch = order[: d.integer(0, len(shape) - 1)]
    summed = order[len(batch) :][: d.integer(1, 2)]
    kept = prod(shape) // prod(shape[i] for i in summed)
    places = [*batch, *summed, None]
    free = d.size(kept)
    places = [places[i] for i in d.order(len(places))]
    sizes = tuple(free if i is None else shape[i] for i in places)
    if prod(sizes) > MAX_ELEMENTS:
        places.remove(None)
        sizes = tuple(shape[i] for i in places)
    w = d.tensor(sizes)
    numbers = (
        (summed, tuple(places.index(i) for i in summed)),
        (batch, tuple(places.index(i) for i in batch)),
    )
    scale = prod(shape[i] for i in summed) ** -0.5
    return lambda e, x: lax.dot_general(x, e[w], numbers) * scale


@op(rank(1, 3))
def outer(d: Draft, shape: Shape) -> Node:
    w = d.weight(d.size(prod(shape)))
    return lambda e, x: x[..., None] * e[w]


@op(rank())
def tied(d: Draft, shape: Shape) -> Node:
    """A weight that is used twice, once transposed."""
    w = d.weight(shape[-1], d.size(prod(shape[:-1])), scale=shape[-1] ** -0.5)
    return lambda e, x: jnp.tanh(x @ e[w]) @ e[w].T


@op(lambda s: len(s) == 3 and prod(s) * s[1] <= 4 * MAX_ELEMENTS)
def attention(d: Draft, shape: Shape) -> Node:
    _, length, hidden = shape
    heads, causal = d.pick((1, 2, 4)), d.flip()
    q, k, v = (d.weight(hidden, heads, 4, scale=hidden**-0.5) for _ in range(3))
    out = d.weight(heads, 4, hidden, scale=0.5 * heads**-0.5)
    mask = jnp.tril(jnp.ones((length, length), bool))

    def run(e, x):
        scores = jnp.einsum(
            "bshe,bthe->bhst", jnp.tensordot(x, e[q], 1), jnp.tensordot(x, e[k], 1)
        )
        if causal:
            scores = jnp.where(mask, scores, -1e9)
        mixed = jax.nn.softmax(scores / 2, axis=-1)
        return jnp.einsum(
            "bhst,bthe,hed->bsd", mixed, jnp.tensordot(x, e[v], 1), e[out]
        )

    return run


def _windows(d: Draft, sizes: Shape) -> dict:
    """Draws a window over dims of these sizes."""
    window = tuple(d.integer(1, min(3, n)) for n in sizes)
    return {
        "window": window,
        "strides": tuple(d.integer(1, 2) for _ in sizes),
        "padding": d.pick(("SAME", "VALID")),
    }


@op(rank(3, 4))
def convolution(d: Draft, shape: Shape) -> Node:
    """One or two spatial dims, strides, dilation, groups of channels."""
    channels = shape[-1]
    moves = _windows(d, shape[1:-1])
    groups = d.pick([g for g in (1, 1, 2, 4, channels) if channels % g == 0])
    out = groups * d.integer(1, max(1, min(8, MAX_ELEMENTS // prod(shape)) // groups))
    w = d.weight(*moves["window"], channels // groups, out)
    dims = ("NWC", "WIO", "NWC") if len(shape) == 3 else ("NHWC", "HWIO", "NHWC")
    scale = (prod(moves["window"]) * channels / groups) ** -0.5
    dilation = tuple(
        d.integer(1, 2) if 2 * k - 1 <= n else 1
        for k, n in zip(moves["window"], shape[1:-1], strict=True)
    )

    def run(e, x):
        return scale * lax.conv_general_dilated(
            x,
            e[w],
            moves["strides"],
            moves["padding"],
            rhs_dilation=dilation,
            dimension_numbers=dims,
            feature_group_count=groups,
        )

    return run


@op(lambda s: len(s) >= 2 and s[-2] <= 8)
def cholesky(d: Draft, shape: Shape) -> Node:
    """Whitens: a decomposition, then a triangular system."""
    eye = jnp.eye(shape[-2])

    def run(e, x):
        square = x @ jnp.swapaxes(x, -1, -2) / shape[-1] + eye
        return lax.linalg.triangular_solve(
            lax.linalg.cholesky(square), x, left_side=True, lower=True
        )

    return run
