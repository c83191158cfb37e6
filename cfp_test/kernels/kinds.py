"""Attentions whose masks, biases or weights a rewrite may take for other ones.

Shapes use: batch, tokens, heads, head_dim; layers where there are several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, TOKENS, HEADS, HEAD_DIM, LAYERS = 2, 64, 4, 8, 3
LEAST = float(jnp.finfo(jnp.float32).min)
HIDDEN = -1e9


def causal_of(tokens: int) -> np.ndarray:
    return np.tri(tokens, dtype=bool)


def window_of(tokens: int, width: int) -> np.ndarray:
    """Causal, of so many keys."""
    return np.tri(tokens, dtype=bool) & ~np.tri(tokens, k=-width, dtype=bool)


CAUSAL, LOCAL = causal_of(TOKENS), window_of(TOKENS, 9)
PLACE = np.arange(TOKENS)


def scores_of(q, k, scale=0.5):
    return jnp.einsum("bqnd,bknd->bnqk", q, k) * scale


def mix(weights, v):
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def softmax(s):
    return jax.nn.softmax(s, axis=-1)


def masked(q, k, v, mask, hidden=HIDDEN, scale=0.5):
    return mix(softmax(jnp.where(mask, scores_of(q, k, scale), hidden)), v)


@dataclass(frozen=True)
class Kind:
    """A program of one kind.

    Attributes:
        attend: makes the output of queries, keys, values and what enters.
        entering: what enters, once or several times.
        gradients: arguments that have a gradient.
        tokens, heads, batch: of queries, keys and values.
        scale: of their numbers.
        dtype: of their numbers.
        narrow: whether something is computed in 16 bits.
    """

    attend: Callable[..., jax.Array]
    entering: tuple[tuple[Any, ...], ...] = ((),)
    gradients: int = 3
    tokens: int = TOKENS
    heads: int = HEADS
    batch: int = BATCH
    scale: float = 1.0
    dtype: Any = jnp.float32

    def inputs(self) -> list[tuple[Any, ...]]:
        """Arguments, with each of what enters."""
        shape = self.batch, self.tokens, self.heads, HEAD_DIM
        random = np.random.default_rng(0)
        own = tuple(
            jnp.asarray(random.normal(size=shape) * self.scale, self.dtype)
            for _ in range(3)
        )
        return [(*own, *map(jnp.asarray, one)) for one in self.entering]


def layered(body):
    """Runs a body over layers, of inputs x and weights for queries, keys, values."""

    def attend(x, y, z, weights, *others, wrap=lambda f: f):
        def layer(x, stacked):
            w, *others = stacked
            q, k, v = (jnp.einsum("btnd,de->btne", x, w[i]) for i in range(3))
            return x + body(q, k, v, *others), None

        return lax.scan(wrap(layer), x + y * z, (weights, *others))[0]

    return attend


def again(attend):
    """The same, computed again in the backward pass."""
    return lambda *args: attend(*args, wrap=jax.checkpoint)


def drawn(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale


WEIGHTS = drawn(11, LAYERS, 3, HEAD_DIM, HEAD_DIM, scale=0.4)
TRUE, FALSE = np.bool_(True), np.bool_(False)
BOTH = ((TRUE,), (FALSE,))


def over(shape):
    """A flag of some dims of [batch, heads, queries, keys], as those four."""
    return lambda flag: jnp.expand_dims(
        flag, [i for i, x in enumerate("bnqk") if x not in shape]
    )


def chosen(shape):
    """One of two masks for each entry of a flag."""
    return lambda q, k, v, flag: masked(
        q, k, v, jnp.where(over(shape)(flag), LOCAL, CAUSAL)
    )


def alternating(count):
    return np.arange(count) % 2 == 0


def two_outputs(q, k, v, flag):
    s = scores_of(q, k)
    near = mix(softmax(jnp.where(LOCAL, s, HIDDEN)), v)
    return jnp.where(flag, near, mix(softmax(jnp.where(CAUSAL, s, HIDDEN)), v))


FLAGS = {
    "scalar": Kind(chosen(""), BOTH),
    "scalar, traced as false": Kind(chosen(""), BOTH[::-1]),
    "of sequences": Kind(chosen("b"), ((alternating(BATCH),), (~alternating(BATCH),))),
    "of heads": Kind(chosen("n"), ((alternating(HEADS),),)),
    "of queries": Kind(chosen("q"), ((alternating(TOKENS),), (PLACE == 40,))),
    "of keys": Kind(chosen("k"), ((PLACE < 20,), (PLACE > 50,))),
    "of a sequence's queries": Kind(chosen("bq"), ((drawn(1, BATCH, TOKENS) > 0,),)),
    "where of scores": Kind(
        lambda q, k, v, flag: mix(
            softmax(
                jnp.where(
                    flag,
                    jnp.where(LOCAL, scores_of(q, k), HIDDEN),
                    jnp.where(CAUSAL, scores_of(q, k), HIDDEN),
                )
            ),
            v,
        ),
        BOTH,
    ),
    "added masks": Kind(
        lambda q, k, v, flag: mix(
            softmax(
                scores_of(q, k)
                + jnp.where(flag, np.where(LOCAL, 0, -1e9), np.where(CAUSAL, 0, -1e9))
            ),
            v,
        ),
        BOTH,
    ),
    "added by a factor": Kind(
        lambda q, k, v, share: mix(
            softmax(
                jnp.where(CAUSAL, scores_of(q, k), HIDDEN)
                + share * np.where(LOCAL, 0.0, -1e9)
            ),
            v,
        ),
        ((np.float32(1),), (np.float32(0),)),
    ),
    "whether there is a mask": Kind(
        lambda q, k, v, flag: masked(q, k, v, CAUSAL | flag), BOTH
    ),
    "and with a flag of heads": Kind(
        lambda q, k, v, flag: masked(q, k, v, CAUSAL & (LOCAL | over("n")(flag))),
        ((alternating(HEADS),),),
    ),
    "from the data": Kind(
        lambda q, k, v: masked(q, k, v, jnp.where(q[0, 0, 0, 0] > 0, LOCAL, CAUSAL))
    ),
    "a width that enters": Kind(
        lambda q, k, v, width: masked(
            q, k, v, CAUSAL & (PLACE[:, None] - PLACE < width)
        ),
        ((np.int32(9),), (np.int32(30),), (np.int32(100),)),
    ),
    "an output of two": Kind(two_outputs, BOTH),
    "layers in a scan": Kind(
        layered(lambda q, k, v, flag: masked(q, k, v, jnp.where(flag, LOCAL, CAUSAL))),
        ((WEIGHTS, alternating(LAYERS)),),
        gradients=4,
    ),
    "layers in a scan, computed again": Kind(
        again(
            layered(
                lambda q, k, v, flag: masked(q, k, v, jnp.where(flag, LOCAL, CAUSAL))
            )
        ),
        ((WEIGHTS, alternating(LAYERS)),),
        gradients=4,
    ),
    "layers in a scan, by their number": Kind(
        again(
            layered(
                lambda q, k, v, i: masked(q, k, v, jnp.where(i % 2 == 0, LOCAL, CAUSAL))
            )
        ),
        ((WEIGHTS, np.arange(LAYERS)),),
        gradients=4,
    ),
    "layers in a scan, added": Kind(
        again(
            layered(
                lambda q, k, v, flag: mix(
                    softmax(
                        scores_of(q, k)
                        + jnp.where(
                            flag, np.where(LOCAL, 0, -1e9), np.where(CAUSAL, 0, -1e9)
                        )
                    ),
                    v,
                )
            )
        ),
        ((WEIGHTS, alternating(LAYERS)),),
        gradients=4,
    ),
    "layers in a scan, widths": Kind(
        again(
            layered(
                lambda q, k, v, width: masked(
                    q, k, v, CAUSAL & (PLACE[:, None] - PLACE < width)
                )
            )
        ),
        ((WEIGHTS, np.array([4, 64, 9])),),
        gradients=4,
    ),
}


# --------------------------------------------------------------- slices of one stack


def in_chunks(body, wrap=lambda f: f):
    """Sums what a body makes of the chunk at a loop's index and of the one before."""

    def attend(q, k, v, *stacks):
        def at(stack, i):
            return lax.dynamic_index_in_dim(stack, i, keepdims=False)

        def one(total, i):
            now = [at(stack, i) for stack in stacks]
            before = [at(stack, i - 1) for stack in stacks]
            return total + body(q * (1 + 0.1 * i), k, v, now, before), None

        return lax.scan(wrap(one), jnp.zeros_like(q), jnp.arange(1, LAYERS + 1))[0]

    return attend


def same(a, b):
    return (a[:, :, None] == b[:, None, :])[:, None]


IDS = np.stack(
    [(PLACE[None] + 7 * i) // (9 + 4 * i) + np.zeros((BATCH, 1), int) for i in range(4)]
)
PADDING = np.stack(
    [PLACE[None] < np.array([[60 - 9 * i], [33 + 9 * i]]) for i in range(4)]
)
BIASES = drawn(3, LAYERS + 1, HEADS, TOKENS, TOKENS, scale=2.0)


def shifted(q, k, v, ids):
    """Ids of this chunk for queries, of the one before for keys, in a scan."""

    def one(total, pair):
        return total + masked(
            q, k, v, same(pair[0], pair[1]) | np.eye(TOKENS, dtype=bool)
        ), None

    return lax.scan(jax.checkpoint(one), jnp.zeros_like(q), (ids[1:], ids[:-1]))[0]


def sliding_chunks(q, k, v):
    """Queries of a chunk with keys of the same and of the one before."""
    size = 16
    parts = [x.reshape(BATCH, TOKENS // size, size, HEADS, HEAD_DIM) for x in (q, k, v)]
    q, k, v = (jnp.moveaxis(x, 1, 0) for x in parts)
    inside = causal_of(size)

    def one(_, i):
        here = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (q, k, v)]
        last = [
            lax.dynamic_index_in_dim(x, jnp.maximum(i - 1, 0), keepdims=False)
            for x in (k, v)
        ]
        s = jnp.where(inside, scores_of(here[0], here[1]), HIDDEN)
        t = jnp.where((i > 0) & ~inside, scores_of(here[0], last[0]), HIDDEN)
        w = softmax(jnp.concatenate([t, s], -1))
        return None, mix(w[..., :size], last[1]) + mix(w[..., size:], here[2])

    out = lax.scan(one, None, jnp.arange(TOKENS // size))[1]
    return jnp.moveaxis(out, 0, 1).reshape(BATCH, TOKENS, HEADS, HEAD_DIM)


def crossed_values(q, k, v, stack):
    """Keys of this chunk, values of the one before."""

    def one(total, i):
        now = lax.dynamic_index_in_dim(stack, i, keepdims=False)
        before = lax.dynamic_index_in_dim(stack, i - 1, keepdims=False)
        return total + masked(q, k + now, v + before, CAUSAL), None

    return lax.scan(one, jnp.zeros_like(q), jnp.arange(1, LAYERS + 1))[0]


def scores_of_two(q, k, v, stack):
    """The sum of scores with the keys of two chunks; and both from one stack."""

    def one(total, i):
        now = lax.dynamic_index_in_dim(stack, i, keepdims=False)
        before = lax.dynamic_index_in_dim(stack, i - 1, keepdims=False)
        s = jnp.einsum("bqnd,bknd->bnqk", now, before)
        return total + mix(softmax(jnp.where(CAUSAL, s, HIDDEN)), before), None

    return lax.scan(one, q * k * v, jnp.arange(1, LAYERS + 1))[0]


def summed_scores(q, k, v, stack):
    def one(total, i):
        now = lax.dynamic_index_in_dim(stack, i, keepdims=False)
        before = lax.dynamic_index_in_dim(stack, i - 1, keepdims=False)
        s = jnp.maximum(scores_of(q, now), scores_of(q, before))
        return total + mix(softmax(jnp.where(CAUSAL, s, HIDDEN)), v + k), None

    return lax.scan(one, jnp.zeros_like(q), jnp.arange(1, LAYERS + 1))[0]


def online_rows(q, k, v, stack):
    """The largest score of the chunk before where that of this one belongs."""

    def one(total, i):
        now = lax.dynamic_index_in_dim(stack, i, keepdims=False)
        before = lax.dynamic_index_in_dim(stack, i - 1, keepdims=False)
        e = jnp.exp(scores_of(q, k + now) * 0.3)
        other = jnp.exp(scores_of(q, k + before) * 0.3).sum(-1, keepdims=True)
        return total + mix(e / other, v), None

    return lax.scan(one, jnp.zeros_like(q), jnp.arange(1, LAYERS + 1))[0]


STACK = drawn(5, LAYERS + 1, BATCH, TOKENS, HEADS, HEAD_DIM, scale=0.7)
EYE = np.eye(TOKENS, dtype=bool)
SLICES = {
    "ids": Kind(
        in_chunks(
            lambda q, k, v, now, before: masked(q, k, v, same(now[0], before[0]) | EYE)
        ),
        ((IDS,),),
    ),
    "ids, computed again": Kind(
        in_chunks(
            lambda q, k, v, now, before: masked(q, k, v, same(now[0], before[0]) | EYE),
            jax.checkpoint,
        ),
        ((IDS,),),
    ),
    "ids that match alone": Kind(
        in_chunks(
            lambda q, k, v, now, before: masked(q, k, v, same(now[0], before[0] % 4)),
            jax.checkpoint,
        ),
        ((IDS % 4,),),
    ),
    "ids of a scan": Kind(shifted, ((IDS,),)),
    "paddings": Kind(
        in_chunks(
            lambda q, k, v, now, before: masked(
                q, k, v, now[0][:, None, :, None] & before[0][:, None, None, :] | EYE
            ),
            jax.checkpoint,
        ),
        ((PADDING,),),
    ),
    "paddings of keys": Kind(
        in_chunks(
            lambda q, k, v, now, before: masked(
                q, k, v, (now[0] & before[0])[:, None, None] & CAUSAL
            ),
            jax.checkpoint,
        ),
        ((PADDING,),),
    ),
    "paddings, without and": Kind(
        in_chunks(
            lambda q, k, v, now, before: (
                masked(q, k, v, now[0][:, None, None])
                - masked(q, k, v, before[0][:, None, None])
            ),
            jax.checkpoint,
        ),
        ((PADDING,),),
    ),
    "biases": Kind(
        in_chunks(
            lambda q, k, v, now, before: mix(
                softmax(scores_of(q, k) + now[0] - before[0]), v
            ),
            jax.checkpoint,
        ),
        ((BIASES,),),
    ),
    "biases that have gradients": Kind(
        in_chunks(
            lambda q, k, v, now, before: mix(
                softmax(scores_of(q, k) + now[0] - before[0]), v
            ),
        ),
        ((BIASES,),),
        gradients=4,
    ),
    "biases, two attentions": Kind(
        in_chunks(
            lambda q, k, v, now, before: (
                mix(softmax(scores_of(q, k) + now[0]), v)
                - mix(softmax(scores_of(q, k) + before[0]), v)
            ),
            jax.checkpoint,
        ),
        ((BIASES,),),
    ),
    "scores of two chunks": Kind(sliding_chunks),
    "keys and values": Kind(crossed_values, ((STACK,),), gradients=4),
    "queries and keys of a stack": Kind(scores_of_two, ((STACK,),), gradients=4),
    "the larger of two": Kind(summed_scores, ((STACK,),)),
    "sums of another chunk": Kind(online_rows, ((STACK,),)),
}

# -------------------------------------------------------------------------- branches


def switched(q, k, v, which):
    made = [
        lambda: jnp.asarray(CAUSAL),
        lambda: jnp.asarray(LOCAL),
        lambda: jnp.ones_like(CAUSAL),
    ]
    return masked(q, k, v, lax.switch(which, made))


KEYS = PLACE[None] < np.array([[50], [21]])
ONE_BIAS = drawn(4, HEADS, TOKENS, TOKENS, scale=2.0)
ONES = np.ones((BATCH, 1, TOKENS, TOKENS), bool)
BRANCHES = {
    "a mask or ones": Kind(
        lambda q, k, v, flag, keys: masked(
            q,
            k,
            v,
            lax.cond(
                flag, lambda: CAUSAL & keys[:, None, None], lambda: jnp.asarray(ONES)
            ),
        ),
        ((TRUE, KEYS), (FALSE, KEYS)),
    ),
    "ones or a mask": Kind(
        lambda q, k, v, flag, keys: masked(
            q,
            k,
            v,
            lax.cond(
                flag, lambda: jnp.asarray(ONES), lambda: CAUSAL & keys[:, None, None]
            ),
        ),
        ((TRUE, KEYS), (FALSE, KEYS)),
    ),
    "causal or ones": Kind(
        lambda q, k, v, flag: masked(
            q,
            k,
            v,
            lax.cond(flag, lambda: jnp.asarray(CAUSAL), lambda: jnp.ones_like(CAUSAL)),
        ),
        BOTH,
    ),
    "a bias or zeros": Kind(
        lambda q, k, v, flag, bias: mix(
            softmax(
                scores_of(q, k)
                + lax.cond(flag, lambda: bias, lambda: jnp.zeros_like(bias))
            ),
            v,
        ),
        ((TRUE, ONE_BIAS), (FALSE, ONE_BIAS)),
    ),
    "a constant bias or zeros": Kind(
        lambda q, k, v, flag: mix(
            softmax(
                scores_of(q, k)
                + lax.cond(
                    flag,
                    lambda: jnp.asarray(ONE_BIAS),
                    lambda: jnp.zeros(ONE_BIAS.shape),
                )
            ),
            v,
        ),
        BOTH,
    ),
    "weights or uniform": Kind(
        lambda q, k, v, flag: mix(
            lax.cond(
                flag,
                lambda w: w,
                lambda w: jnp.full_like(w, 1 / TOKENS),
                softmax(jnp.where(CAUSAL, scores_of(q, k), HIDDEN)),
            ),
            v,
        ),
        BOTH,
    ),
    "scores or zeros": Kind(
        lambda q, k, v, flag: mix(
            softmax(lax.cond(flag, lambda s: s, jnp.zeros_like, scores_of(q, k))), v
        ),
        BOTH,
    ),
    "scores, masked or not": Kind(
        lambda q, k, v, flag: mix(
            softmax(
                lax.cond(
                    flag,
                    lambda s: jnp.where(CAUSAL, s, HIDDEN),
                    lambda s: s,
                    scores_of(q, k),
                )
            ),
            v,
        ),
        BOTH,
    ),
    "whole attentions": Kind(
        lambda q, k, v, flag: lax.cond(
            flag,
            lambda: masked(q, k, v, CAUSAL),
            lambda: masked(q, k, v, LOCAL, scale=0.3),
        ),
        BOTH,
    ),
    "a scale": Kind(
        lambda q, k, v, flag: masked(
            q, k, v, CAUSAL, scale=lax.cond(flag, lambda: 0.2, lambda: 0.7)
        ),
        BOTH,
    ),
    "one of three": Kind(switched, ((np.int32(0),), (np.int32(1),), (np.int32(2),))),
    "in a scan": Kind(
        again(
            layered(
                lambda q, k, v, flag: masked(
                    q,
                    k,
                    v,
                    lax.cond(
                        flag, lambda: jnp.asarray(LOCAL), lambda: jnp.asarray(CAUSAL)
                    ),
                )
            )
        ),
        ((WEIGHTS, alternating(LAYERS)),),
        gradients=4,
    ),
}

# -------------------------------------------------------------------------- converts


def straight(change):
    """A change of numbers with the gradient of none."""
    return lambda x: x + lax.stop_gradient(change(x) - x)


def through(dtype):
    return lambda x: x.astype(dtype).astype(x.dtype)


def weighed(change, mask=CAUSAL):
    return lambda q, k, v: mix(
        change(softmax(jnp.where(mask, scores_of(q, k), HIDDEN))), v
    )


def scored(change, mask=CAUSAL):
    return lambda q, k, v: mix(
        softmax(jnp.where(mask, change(scores_of(q, k)), HIDDEN)), v
    )


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
CONVERTS = {
    "weights to e4m3": Kind(weighed(through(E4M3))),
    "weights to e5m2": Kind(weighed(through(E5M2))),
    "weights to e4m3, straight": Kind(weighed(straight(through(E4M3)))),
    "weights to e4m3fnuz": Kind(weighed(through(jnp.float8_e4m3fnuz))),
    "scores to e5m2": Kind(scored(through(E5M2))),
    "scores to e4m3, straight": Kind(scored(straight(through(E4M3)))),
    "products in e4m3": Kind(
        lambda q, k, v: masked(through(E4M3)(q), through(E4M3)(k), v, CAUSAL)
    ),
    "scores to int": Kind(scored(straight(through(jnp.int32)))),
    "scores to int8": Kind(scored(straight(lambda s: through(jnp.int8)(s * 8) / 8))),
    "scores to int, without gradient": Kind(scored(through(jnp.int32))),
    "weights to uint8": Kind(
        weighed(straight(lambda w: (w * 255).astype(jnp.uint8).astype(w.dtype) / 255))
    ),
    "weights by reduce_precision": Kind(
        weighed(lambda w: lax.reduce_precision(w, 5, 3))
    ),
    "scores by reduce_precision": Kind(scored(lambda s: lax.reduce_precision(s, 8, 2))),
    "scores rounded": Kind(scored(straight(jnp.round))),
    "scores to bool": Kind(scored(straight(through(bool)))),
    "a mask to int, truncated": Kind(
        lambda q, k, v, m: masked(
            q, k, v, CAUSAL & (m.astype(jnp.int32) > 0)[:, None, None]
        ),
        ((np.where(KEYS, 1.0, 0.5).astype(np.float32),),),
    ),
    "a bias to int8, wrapped": Kind(
        lambda q, k, v, b: mix(
            softmax(scores_of(q, k) + b.astype(jnp.int8).astype(jnp.float32) * 0.05), v
        ),
        ((np.arange(HEADS * TOKENS * TOKENS).reshape(HEADS, TOKENS, TOKENS) % 301,),),
    ),
    "a bias in e4m3": Kind(
        lambda q, k, v, b: mix(softmax(scores_of(q, k) + through(E4M3)(b)), v),
        ((ONE_BIAS,),),
    ),
    "a constant bias in e5m2": Kind(
        lambda q, k, v: mix(
            softmax(scores_of(q, k) + through(E5M2)(jnp.asarray(ONE_BIAS))), v
        )
    ),
    "values in e5m2": Kind(lambda q, k, v: masked(q, k, through(E5M2)(v), CAUSAL)),
    "an output in e4m3": Kind(
        lambda q, k, v: masked(through(E4M3)(masked(q, k, v, CAUSAL)), k, v, LOCAL)
    ),
}

# ------------------------------------------------------------------- narrow positions

LONG = 320  # Tokens: more than 8 bits count.


def positions(mask, tokens=LONG, **more):
    """An attention with a mask of positions that the step itself makes."""
    return Kind(
        lambda q, k, v: masked(q, k, v, mask(jnp.arange(tokens))),
        tokens=tokens,
        heads=2,
        batch=1,
        **more,
    )


def biased(bias, tokens=LONG, **more):
    return Kind(
        lambda q, k, v: mix(
            softmax(
                jnp.where(
                    causal_of(tokens),
                    scores_of(q, k) + bias(jnp.arange(tokens)),
                    HIDDEN,
                )
            ),
            v,
        ),
        tokens=tokens,
        heads=2,
        batch=1,
        **more,
    )


def away(place):
    return place[:, None] - place


POSITIONS = {
    "a window by uint32": positions(lambda p: away(p).astype(jnp.uint32) < 40),
    "differences of uint32": positions(lambda p: away(p.astype(jnp.uint32)) < 40),
    "two sides by uint32": positions(lambda p: (away(p) + 20).astype(jnp.uint32) <= 40),
    "uint8": positions(lambda p: p.astype(jnp.uint8)[:, None] >= p.astype(jnp.uint8)),
    "differences of uint8": positions(lambda p: away(p.astype(jnp.uint8)) < 40),
    "differences of int8": positions(lambda p: away(p.astype(jnp.int8)) >= 0),
    "bfloat16": positions(
        lambda p: p.astype(jnp.bfloat16)[:, None] >= p.astype(jnp.bfloat16), 700
    ),
    "iota of bfloat16": positions(
        lambda p: (
            jnp.arange(600, dtype=jnp.bfloat16)[:, None]
            > jnp.arange(600, dtype=jnp.bfloat16) - 1
        ),
        600,
    ),
    "a window of bfloat16": positions(
        lambda p: (away(p) >= 0) & (away(p.astype(jnp.bfloat16)) < 260), 600
    ),
    "e4m3": positions(lambda p: p.astype(E4M3)[:, None] >= p.astype(E4M3)),
    "float16 overflows": positions(
        lambda p: (away(p) >= 0) & jnp.isfinite(jnp.square(away(p.astype(jnp.float16))))
    ),
    "int16 overflows": positions(
        lambda p: (
            (p.astype(jnp.int16) * p.astype(jnp.int16))[:, None]
            >= p.astype(jnp.int16) * p.astype(jnp.int16)
        )
    ),
    "int32 overflows": positions(
        lambda p: (away(p) >= 0) & (away(p) * jnp.int32(10_000_000) >= 0)
    ),
    "quotients of negatives": positions(lambda p: lax.div(away(p), jnp.int32(7)) == 0),
    "remainders of negatives": positions(
        lambda p: (
            (lax.rem(away(p), jnp.int32(7)) <= 0) & (away(p) >= 0)
            | (lax.rem(away(p), jnp.int32(50)) == -3)
        )
    ),
    "shifts": positions(lambda p: (p[:, None] >> 5 == p >> 5) & (away(p) >= 0)),
    "shifts of uint8": positions(
        lambda p: (p.astype(jnp.uint8) << 1)[:, None] >= (p.astype(jnp.uint8) << 1)
    ),
    "an xor": positions(lambda p: jnp.bitwise_count(p[:, None] ^ p) % 2 == 0),
    "thirds in float32": positions(
        lambda p: (p / 3 * 3)[:, None] >= p.astype(jnp.float32)
    ),
    "a bias of bfloat16 distances": biased(
        lambda p: -0.05 * away(p.astype(jnp.bfloat16)).astype(jnp.float32), 600
    ),
    "a bias of uint8 distances": biased(
        lambda p: -0.1 * away(p.astype(jnp.uint8)).astype(jnp.float32)
    ),
    "a bias of logarithms of buckets": biased(
        lambda p: (
            -0.5
            * jnp.log2(1.0 + jnp.abs(away(p))).astype(jnp.int32).astype(jnp.float32)
        )
    ),
}

# ----------------------------------------------------------- queries that see no key


def hiding(mask, hidden):
    return lambda q, k, v, *m: masked(q, k, v, mask(*m), hidden)


def adding(mask, hidden, also=lambda s: s):
    return lambda q, k, v, *m: mix(
        softmax(also(scores_of(q, k)) + jnp.where(mask(*m), 0.0, hidden)), v
    )


def causal_keys(m):
    return CAUSAL & m[:, None, None]


def pairs(m):
    return m[:, None, :, None] & m[:, None, None, :]


LEFT = PLACE[None] >= np.array([[11], [30]])
RIGHT = PLACE[None] < np.array([[64], [30]])
NONE = np.array([[True], [False]]) & np.ones((1, TOKENS), bool)
STRICT = np.tri(TOKENS, k=-1, dtype=bool)


def later(low, high):
    return (PLACE[:, None] - PLACE >= low) & (PLACE[:, None] - PLACE < high)


def zeroed(q, k, v, m):
    seen = causal_keys(m)
    w = softmax(jnp.where(seen, scores_of(q, k), HIDDEN))
    return mix(jnp.where(seen, w, 0.0), v)


def zeroed_rows(q, k, v, m):
    seen = causal_keys(m)
    w = softmax(jnp.where(seen, scores_of(q, k), HIDDEN))
    return mix(jnp.where(seen.any(-1, keepdims=True), w, 0.0), v)


EMPTY_ROWS = {
    "padded pairs, -1e9": Kind(hiding(pairs, -1e9), ((RIGHT,),)),
    "padded pairs, the least": Kind(hiding(pairs, LEAST), ((RIGHT,),)),
    "padded pairs, -1e4": Kind(hiding(pairs, -1e4), ((RIGHT,),)),
    "left padding, -1e9": Kind(hiding(causal_keys, -1e9), ((LEFT,),)),
    "left padding, the least": Kind(hiding(causal_keys, LEAST), ((LEFT,),)),
    "left padding, -1e4": Kind(hiding(causal_keys, -1e4), ((LEFT,),)),
    "left padding, added -1e9": Kind(adding(causal_keys, -1e9), ((LEFT,),)),
    "left padding, added -1e4": Kind(adding(causal_keys, -1e4), ((LEFT,),)),
    "left padding, added -100": Kind(adding(causal_keys, -100.0), ((LEFT,),)),
    "left padding, added the least": Kind(adding(causal_keys, LEAST), ((LEFT,),)),
    "left padding, causal selected": Kind(
        adding(lambda m: m[:, None, None], -1e9, lambda s: jnp.where(CAUSAL, s, -1e9)),
        ((LEFT,),),
    ),
    "left padding, two sums": Kind(
        adding(
            lambda m: m[:, None, None], -1e9, lambda s: s + np.where(CAUSAL, 0, -1e9)
        ),
        ((LEFT,),),
    ),
    "left padding, two numbers": Kind(
        lambda q, k, v, m: mix(
            softmax(
                jnp.where(
                    m[:, None, None], jnp.where(CAUSAL, scores_of(q, k), -1e9), -2e9
                )
            ),
            v,
        ),
        ((LEFT,),),
    ),
    "left padding, zeros after": Kind(zeroed, ((LEFT,),)),
    "left padding, rows of zeros": Kind(zeroed_rows, ((LEFT,),)),
    "a sequence without keys": Kind(
        hiding(lambda m: m[:, None, None], -1e9), ((NONE,),)
    ),
    "a sequence without keys, added": Kind(
        adding(lambda m: m[:, None, None], -1e9), ((NONE,),)
    ),
    "lengths of zero": Kind(
        hiding(lambda n: (PLACE < n[:, None])[:, None, None], -1e9),
        ((np.array([0, 40]),), (np.array([64, 1]),)),
    ),
    "infinity, and no NaN": Kind(
        lambda q, k, v, m: mix(
            jax.nn.softmax(scores_of(q, k), axis=-1, where=causal_keys(m)), v
        ),
        ((LEFT,),),
    ),
    "strictly causal, -1e9": Kind(hiding(lambda: STRICT, -1e9)),
    "strictly causal, added -1e4": Kind(adding(lambda: STRICT, -1e4)),
    "keys before alone, -1e9": Kind(hiding(lambda: later(5, 20), -1e9)),
    "keys before alone, the least": Kind(hiding(lambda: later(5, 20), LEAST)),
    "hidden by a score of their size": Kind(hiding(lambda: CAUSAL, -3.0)),
    "hidden by -30": Kind(hiding(lambda: CAUSAL, -30.0), scale=4.0),
    "hidden by zero": Kind(hiding(lambda: CAUSAL, 0.0)),
    "hidden by -10, added": Kind(adding(lambda: CAUSAL, -10.0)),
    "segments, a query of none": Kind(
        hiding(lambda a, b: same(a, b), -1e9),
        ((IDS[0], IDS[0] % 3),),
    ),
    "left padding in a scan": Kind(
        again(layered(lambda q, k, v, m: masked(q, k, v, causal_keys(m)))),
        ((WEIGHTS, np.stack([LEFT, LEFT[::-1], RIGHT])),),
        gradients=4,
    ),
}

# ------------------------------------------------------- exceptions at few positions

FAR, MANY = 384, 8
FAR_PLACE = np.arange(FAR)
FAR_CAUSAL, FAR_LOCAL = causal_of(FAR), window_of(FAR, 33)
ONE_HEAD = (np.arange(MANY) == 5)[:, None, None]
MIDDLE_HEADS = ((np.arange(MANY) == 3) | (np.arange(MANY) == 4))[:, None, None]


def changed(base, *where, value):
    """A mask with other entries."""
    made = base.copy()
    for place in where:
        made[place] = value
    return made


def far(mask, **more):
    """An attention of many positions with a constant mask."""
    settings = dict(tokens=FAR, heads=MANY, batch=1) | more
    return Kind(lambda q, k, v: masked(q, k, v, mask), **settings)


def far_scores(change, **more):
    settings = dict(tokens=FAR, heads=MANY, batch=1) | more
    return Kind(
        lambda q, k, v: mix(
            softmax(jnp.where(FAR_CAUSAL, change(scores_of(q, k)), HIDDEN)), v
        ),
        **settings,
    )


def far_weights(change, **more):
    settings = dict(tokens=FAR, heads=MANY, batch=1) | more
    return Kind(
        lambda q, k, v: mix(
            change(softmax(jnp.where(FAR_CAUSAL, scores_of(q, k), HIDDEN))), v
        ),
        **settings,
    )


def four_entries(shape=(FAR, FAR)):
    bias = np.zeros(shape, np.float32)
    for q, k in ((100, 33), (201, 200), (333, 7), (371, 370)):
        bias[..., q, k] = 4.0
    return bias


JITTERED = (FAR_PLACE[:, None] - FAR_PLACE >= 0) & (
    FAR_PLACE[:, None] - FAR_PLACE < (30 + (FAR_PLACE * 7919) % 3)[:, None]
)
CLS = changed(FAR_LOCAL, np.s_[180, :], np.s_[:, 180], value=True)
EXCEPTIONS = {
    "registers": far(changed(FAR_CAUSAL, np.s_[:, 190:194], value=True)),
    "registers of a window": far(changed(FAR_LOCAL, np.s_[:, 190:194], value=True)),
    "a token in the middle that sees and is seen": far(CLS),
    "one that is seen, of a causal mask": far(
        changed(FAR_CAUSAL, np.s_[:, 201], value=True)
    ),
    "one that sees, of a causal mask": far(
        changed(FAR_CAUSAL, np.s_[201, :], value=True)
    ),
    "dead keys": far(
        changed(FAR_CAUSAL, np.s_[:, 101:104], value=False) | np.eye(FAR, dtype=bool)
    ),
    "dead steps": far(
        changed(FAR_CAUSAL, np.s_[:, 101:104], np.s_[101:104, :], value=False)
        | np.eye(FAR, dtype=bool)
    ),
    "a pair that is hidden": far(changed(FAR_CAUSAL, np.s_[300, 77], value=False)),
    "a pair that is seen": far(changed(FAR_CAUSAL, np.s_[201, 305], value=True)),
    "a pair without a mask": far(
        changed(np.ones((FAR, FAR), bool), np.s_[300, 77], value=False)
    ),
    "jittered windows": far(JITTERED),
    "a wider window of some queries": far(
        np.where((FAR_PLACE % 97 == 50)[:, None], window_of(FAR, 34), FAR_LOCAL)
    ),
    "a window of one head": far(np.where(ONE_HEAD, FAR_LOCAL, FAR_CAUSAL)),
    "no mask of one head": far(FAR_CAUSAL | ONE_HEAD),
    "a window of one sequence": far(
        np.where((np.arange(6) == 3)[:, None, None, None], FAR_LOCAL, FAR_CAUSAL),
        batch=6,
        heads=2,
    ),
    "a clip of middle heads": far_scores(
        lambda s: jnp.where(MIDDLE_HEADS, jnp.clip(s, -2.0, 2.0), s)
    ),
    "a clip that few scores reach": far_scores(lambda s: jnp.minimum(s, 5.0)),
    "a clip of large scores": far_scores(lambda s: jnp.clip(s, -30.0, 30.0), scale=4.0),
    "a cap of one head": far_scores(
        lambda s: jnp.where(ONE_HEAD, 2 * jnp.tanh(s / 2), s)
    ),
    "a scale of one key": far_scores(
        lambda s: s * np.where(FAR_PLACE == 211, 2.0, 1.0)
    ),
    "a scale of one query": far_scores(
        lambda s: s * np.where(FAR_PLACE == 211, 2.0, 1.0)[:, None]
    ),
    "a scale of one head": far_scores(lambda s: s * np.where(ONE_HEAD, 2.0, 1.0)),
    "a bias of four entries": far_scores(lambda s: s + four_entries()),
    "a bias of four entries of a head": far_scores(
        lambda s: s + ONE_HEAD * four_entries()
    ),
    "a bias of one key": far_scores(lambda s: s + np.where(FAR_PLACE == 211, 3.0, 0.0)),
    "weights dropped at one pair": far_weights(
        lambda w: (
            w * changed(np.ones((FAR, FAR), np.float32), np.s_[300, 299], value=0.0)
        )
    ),
    "weights of one head halved": far_weights(
        lambda w: w * np.where(ONE_HEAD, 0.5, 1.0)
    ),
    "weights of one query zero": far_weights(
        lambda w: w * np.where(FAR_PLACE == 211, 0.0, 1.0)[:, None]
    ),
    "a gradient of one head stopped": far_scores(
        lambda s: jnp.where(ONE_HEAD, lax.stop_gradient(s), s)
    ),
    "a gradient of a pair stopped": far_scores(
        lambda s: jnp.where(four_entries() > 0, lax.stop_gradient(s), s)
    ),
    "set at one pair": far_scores(lambda s: s.at[:, :, 300, 77].set(5.0)),
    "added at one pair": far_scores(lambda s: s.at[:, 2, 300, 77].add(5.0)),
    "by a slice": far_scores(lambda s: s.at[:, :, 190:200, :].multiply(2.0)),
}


# ----------------------------------------------------------------- other gradients


def microbatches(q, k, v):
    """Sums over halves of the batch, in a loop."""

    def one(total, part):
        return total + masked(*part, CAUSAL), None

    parts = tuple(x.reshape(2, 1, *x.shape[1:]) for x in (q, k, v))
    return lax.scan(one, jnp.zeros_like(q[:1]), parts)[0]


def of_each(q, k, v):
    """One sequence at a time, by vmap."""
    one = lambda q, k, v: masked(q[None], k[None], v[None], CAUSAL)[0]  # noqa: E731
    return jax.vmap(one)(q, k, v)


def penalized(q, k, v):
    """An output with the gradient of another loss in it."""
    slope = jax.grad(lambda q: jnp.square(masked(q, k, v, CAUSAL)).sum())(q)
    return masked(q, k, v, CAUSAL) + 0.1 * slope


def moved(q, k, v):
    """An output and its derivative in a direction."""
    attend = lambda q: masked(q, k, v, CAUSAL)  # noqa: E731
    out, change = jax.jvp(attend, (q,), (jnp.cos(q),))
    return out + change


@jax.custom_vjp
def own_gradient(q, k, v):
    return masked(q, k, v, CAUSAL)


def _own_backward(kept, g):
    _, pull = jax.vjp(lambda *x: masked(*x, CAUSAL), *kept)
    dq, dk, dv = pull(g)
    return dq * 2.0, dk, jnp.clip(dv, -0.5, 0.5)


own_gradient.defvjp(lambda *x: (masked(*x, CAUSAL), x), _own_backward)


def shared_keys(q, k, v):
    """Two attentions with the same keys and values, and other masks."""
    return masked(q, k, v, CAUSAL) + masked(q * 0.5, k, v, LOCAL)


def shared_scores(q, k, v):
    """Two mixes by the weights of one softmax."""
    w = softmax(jnp.where(CAUSAL, scores_of(q, k), HIDDEN))
    return mix(w, v) + mix(w, jnp.sin(v))


def twice_mixed(q, k, v):
    w = softmax(jnp.where(CAUSAL, scores_of(q, k), HIDDEN))
    return mix(w, mix(w, v))


def of_both_directions(q, k, v):
    """Weights over keys, and over queries, of the same scores."""
    s = scores_of(q, k)
    return mix(softmax(s), v) + mix(softmax(s.swapaxes(2, 3)), v)


def stacked_bools(q, k, v, numbers):
    """A bias of bools that a loop stacks, of two turns."""
    stack = lax.scan(lambda c, x: (c, x > 0), 0, numbers)[1]
    now, before = (lax.dynamic_slice_in_dim(stack, i, 1) for i in (2, 1))
    bias = jnp.where(now, 2.0, 0.0) - jnp.where(before, 2.0, 0.0)
    return mix(softmax(jnp.where(CAUSAL, scores_of(q, k) + bias[:, None], HIDDEN)), v)


def product_with_bias(q, k, v, bias):
    """Scores and a bias, and a product that is zero at some of their values."""
    s = scores_of(q, k)
    return mix(softmax(s + bias + 0.2 * s * bias * (s - 1)), v)


def turned_bools(q, k, v, mask):
    """A bias of bools, and of the same ones with queries and keys exchanged."""
    bias = jnp.where(mask, 2.0, 0.0)
    bias = bias - bias.swapaxes(-1, -2)
    return mix(softmax(jnp.where(CAUSAL, scores_of(q, k) + bias, HIDDEN)), v)


def inferred(attend):
    """The same without a gradient that tells anything."""
    return lambda *args: lax.stop_gradient(attend(*args))


def frozen(*names):
    def attend(q, k, v):
        held = zip("qkv", (q, k, v), strict=True)
        return masked(
            *(lax.stop_gradient(x) if n in names else x for n, x in held), CAUSAL
        )

    return attend


SQUARE = dict(batch=8, tokens=8, heads=8)  # As many as dims of a head.
EIGHTS = np.arange(8) % 3 > 0
GRADIENTS = {
    "microbatches": Kind(microbatches),
    "of each sequence": Kind(of_each),
    "a gradient in the output": Kind(penalized),
    "a derivative in the output": Kind(moved),
    "its own gradient": Kind(own_gradient),
    "shared keys": Kind(shared_keys),
    "weights of two mixes": Kind(shared_scores),
    "mixed twice": Kind(twice_mixed),
    "both directions": Kind(of_both_directions),
    "stacked bools": Kind(stacked_bools, ((BIASES[:, 0],),)),
    "stacked bools, inferred": Kind(inferred(stacked_bools), ((BIASES[:, 0],),)),
    "a product with a bias": Kind(product_with_bias, ((ONE_BIAS,),)),
    "a product with a bias, inferred": Kind(
        inferred(product_with_bias), ((ONE_BIAS,),)
    ),
    "turned bools": Kind(turned_bools, ((BIASES[0, 0] > 0,),)),
    "turned bools, inferred": Kind(inferred(turned_bools), ((BIASES[0, 0] > 0,),)),
    "frozen queries": Kind(frozen("q")),
    "frozen keys": Kind(frozen("k")),
    "frozen queries and keys": Kind(frozen("q", "k")),
    "frozen values": Kind(frozen("v")),
    "one array": Kind(lambda q, k, v: masked(q, q, q, CAUSAL)),
    "keys that are values": Kind(lambda q, k, v: masked(q, k, k, CAUSAL)),
    "transposed sizes": Kind(
        lambda q, k, v: masked(q, k, v, causal_of(8).T | EIGHTS[:, None, None]),
        **SQUARE,
    ),
    "a flag of heads, as many as sequences": Kind(
        lambda q, k, v, f: masked(q, k, v, causal_of(8) | f[:, None, None]),
        ((EIGHTS,),),
        **SQUARE,
    ),
    "a flag of sequences, as many as heads": Kind(
        lambda q, k, v, f: masked(q, k, v, causal_of(8) | f[:, None, None, None]),
        ((EIGHTS,),),
        **SQUARE,
    ),
    "queries and keys turned": Kind(
        lambda q, k, v: masked(
            q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), causal_of(8)
        ),
        **SQUARE,
    ),
    "heads and dims turned": Kind(
        lambda q, k, v: masked(q.swapaxes(2, 3), k.swapaxes(2, 3), v, causal_of(8)),
        **SQUARE,
    ),
    "heads of another order": Kind(lambda q, k, v: masked(q[:, :, ::-1], k, v, CAUSAL)),
    "keys of another order": Kind(
        lambda q, k, v: masked(q, k[:, ::-1], v[:, ::-1], CAUSAL)
    ),
    "keys of another order than values": Kind(
        lambda q, k, v: masked(q, k[:, ::-1], v, CAUSAL)
    ),
    "keys of the next sequence": Kind(
        lambda q, k, v: masked(q, jnp.roll(k, 1, 0), v, CAUSAL)
    ),
}

ALL = {
    "flags": FLAGS,
    "slices": SLICES,
    "branches": BRANCHES,
    "converts": CONVERTS,
    "positions": POSITIONS,
    "empty rows": EMPTY_ROWS,
    "exceptions": EXCEPTIONS,
    "gradients": GRADIENTS,
}
