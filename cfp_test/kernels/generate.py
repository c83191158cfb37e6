"""Random steps with attention: what kernels make of them beside what is written.

A program is drawn from a seed: masks of positions, arguments, flags and branches;
biases, scales, dtypes and loops. It is an attention in other words, or changed in one
place so that it may be none. In both cases a kernel may take it if the results are
equal, or leave it::

    python -m cfp_test.kernels.generate --count 2000 --seed 0 --jobs 2

With ``--planted`` one rule of the proof is off: some programs must be wrong then.

Shapes use: batch, queries, keys, heads, head_dim; layers where there is a loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cfp_test.kernels.agreement import TOLERANCE, compare
from cfp_test.kernels.changes import (
    OF_SCORES,
    OF_SOFTMAX,
    OF_WEIGHTS,
    WEIGH,
    exponentials,
    mutated,
)
from cfp_test.kernels.entering import (
    ARGUMENTS,
    BIASES,
    CHOICES,
    COUNTED,
    FIXED,
    MASKS,
    SHAPES,
    Scope,
    chosen,
)
from cfp_test.kernels.planted import FAULTS
from cfp_test.support.checking import make_mesh
from cfp_test.support.quick_flags import QUICK_FLAGS

LEAST = float(jnp.finfo(jnp.float32).min)
LAYERS = 3
HOWS = ("where", "where", "and", "and", "or", "hidden", "added", "times", "product")
SMALLER = (-1e4, -1e3, -200.0, -50.0, -np.inf)
SCALES = ("scores", "queries", "keys", "quotient", "after the bias", "no", "power")
LAYOUTS = ("bqnd", "bnqd", "qbnd", "keys first", "merged", "five dims")
ROUNDED = ("scores bfloat16", "scores float16", "weights bfloat16", "weights float16")
GROUPS = ("repeat", "tile", "reshape", "reshape, tiled")
LOOPS = (
    *("unrolled", "twice", "carried", "branches", "branches again"),
    *("scan", "scan again", "scan with a policy", "slices", "slices again"),
)
SAME = ("k v", "q k", "q k v")
FROZEN = ("q", "k", "v", "q k", "k v")


@dataclass(frozen=True)
class Term:
    """One of the masks.

    Attributes:
        kind: name of a mask.
        how: ``and`` or ``or`` with the next mask; or how it hides scores.
        number: hides scores.
        choice: name of a choice between it and the other; "" for none.
        other: name of another mask.
        before: True if arguments are those of the layer before, in a loop of slices.
        again: True if its arguments are those of the one before it.
        learnt: True if the number is an argument with a gradient.
    """

    kind: str
    how: str = "where"
    number: float = -1e9
    choice: str = ""
    other: str = "causal"
    before: bool = False
    again: bool = False
    learnt: bool = False


@dataclass(frozen=True)
class Bias:
    """Numbers that are added to the scores, as of `Term`."""

    kind: str
    choice: str = ""
    before: bool = False
    again: bool = False
    learnt: bool = False


@dataclass(frozen=True)
class Program:
    """A step with attention; each default is the plainest."""

    number: int = 0
    batch: int = 2
    queries: int = 32
    keys: int = 32
    heads: int = 2
    kv_heads: int = 2
    group: str = "repeat"
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    rounded: str = ""
    layout: str = "bqnd"
    scaled: str = "scores"
    weigh: str = "softmax"
    cap: float = 0.0
    masks: tuple[Term, ...] = ()
    biases: tuple[Bias, ...] = ()
    biases_last: bool = False
    loop: str = ""
    same: str = ""
    frozen: str = ""
    trains: bool = True
    changed: str = ""

    @property
    def is_sliced(self) -> bool:
        return self.loop.startswith("slices")

    @property
    def stacked(self) -> int:
        """The number of layers' arguments; 0 for one that is not stacked."""
        return 0 if self.loop in ("", "twice", "carried") else LAYERS + self.is_sliced


# -------------------------------------------------------------------------- the program


def _masks(s: Scope, scores: Any, q: Any) -> Any:
    """Scores as masks leave them."""
    joined, how, asked = None, "", s.asked
    least = float(jnp.finfo(scores.dtype).min)
    for term in s.sizes.masks:
        asked = s.asked = asked if term.again else s.asked
        seen = MASKS[term.kind](s, term.before)
        if term.choice:
            other = MASKS[term.other](s, False)
            seen = chosen(s, term.choice, seen, other, term.before, q)
        if joined is not None:
            seen = joined & seen if how == "and" else joined | seen
        joined, how = (seen, term.how) if term.how in ("and", "or") else (None, "")
        number = term.number if np.isinf(term.number) else max(term.number, least)
        number = jnp.asarray(number, scores.dtype)
        if term.learnt:
            number = s.argument(lambda r: np.float32(-r.random()), learnt=True)
        kept = jnp.asarray(seen).astype(scores.dtype)
        match term.how:
            case "where":
                scores = jnp.where(seen, scores, number)
            case "hidden":
                scores = jnp.where(~jnp.asarray(seen), number, scores)
            case "added":
                scores = scores + jnp.where(seen, jnp.zeros_like(number), number)
            case "times":
                scores = scores + (1 - kept) * number
            case "product":
                scores = scores * kept + jnp.maximum(number, least) * (1 - kept)
    return scores if joined is None else jnp.where(joined, scores, -1e9)


def _biases(s: Scope, scores: Any, q: Any) -> Any:
    asked = s.asked
    for one in s.sizes.biases:
        asked = s.asked = asked if one.again else s.asked
        bias = jnp.asarray(BIASES[one.kind](s, one.before, one.learnt))
        if one.choice == "factor":
            bias = bias * s.argument(lambda r: np.float32(r.normal()), one.before)
        elif one.choice:
            none = jnp.zeros_like(bias)
            bias = chosen(s, one.choice, bias, none, one.before, q)
        scores = scores + bias.astype(scores.dtype)
    return scores


def _flag(s: Scope) -> Any:
    return s.argument(lambda r: r.random() < 0.5)


# Changes that read arguments, or other values: of the scope and scores or weights.
ENTERING: dict[str, Callable[[Scope, Any], Any]] = {
    "scores or zeros": lambda s, x: lax.cond(_flag(s), lambda: x, lambda: 0 * x),
    "a scale by a flag": lambda s, x: x * jnp.where(_flag(s), 1.0, 0.5),
    "a learnt scale": lambda s, x: (
        x * s.argument(lambda r: np.float32(r.normal()), learnt=True)
    ),
    "a scale of heads": lambda s, x: x * s.array("n", lambda r, n: r.random(n) + 0.5),
    "a scale of queries": lambda s, x: x * s.array("q", lambda r, n: r.random(n) + 0.5),
    "a scale of keys": lambda s, x: x * s.array("k", lambda r, n: r.random(n) + 0.5),
}
AFTER: dict[str, Callable[[Scope, Any], Any]] = {
    "weights or uniform": lambda s, w: lax.cond(
        _flag(s), lambda: w, lambda: jnp.full_like(w, 0.1)
    ),
    "weights dropped by an argument": lambda s, w: (
        w * s.array("bnqk", lambda r, n: r.random(n) < 0.9)
    ),
    "weights of keys": lambda s, w: w * s.array("k", lambda r, n: r.random(n) < 0.9),
}
IN_GRADIENT = ("other keys in the gradient", "other values in the gradient")
OTHERS = (
    *("masks or none", "weights returned", "scores returned", "largest returned"),
    *("queries added again", "values of a key zero", *IN_GRADIENT),
)
MUTATED = "mutated"
CHANGES = (*OF_SCORES, *OF_WEIGHTS, *OF_SOFTMAX, *ENTERING, *AFTER, *OTHERS)


def attend(s: Scope, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The output [batch, queries, heads, value_dim], and what else is returned."""
    p, first = s.sizes, q
    shared = p.heads // p.kv_heads
    if shared > 1 and p.group == "repeat":
        k, v = (jnp.repeat(x, shared, axis=2) for x in (k, v))
    elif shared > 1 and p.group == "tile":
        k, v = (jnp.tile(x, (1, 1, shared, 1)) for x in (k, v))
    rate = {"no": 1.0, "power": 0.25}.get(p.scaled, p.head_dim**-0.5)
    q = q * jnp.asarray(rate, q.dtype) if p.scaled == "queries" else q
    k = k * jnp.asarray(rate, k.dtype) if p.scaled == "keys" else k
    layout = p.group if k.shape[2] != q.shape[2] else p.layout
    product, mixed = partial(_product, layout), partial(_mixed, layout)
    if p.changed == IN_GRADIENT[0]:
        product = partial(_with_others, product)
    if p.changed == IN_GRADIENT[1]:
        mixed = partial(_with_others, mixed)
    scores = product(q, k).astype(jnp.float32)
    if p.scaled == "quotient":
        scores = scores / np.float32(p.head_dim**0.5)
    elif p.scaled in ("scores", "power"):
        scores = scores * rate
    scores = p.cap * jnp.tanh(scores / p.cap) if p.cap else scores
    scores = OF_SCORES.get(p.changed, lambda x, _: x)(scores, p.number)
    scores = ENTERING.get(p.changed, lambda _, x: x)(s, scores)
    scores = scores if p.biases_last else _biases(s, scores, first)
    scores = scores * rate if p.scaled == "after the bias" else scores
    free = scores
    scores = _masks(s, scores, first)
    scores = _biases(s, scores, first) if p.biases_last else scores
    if p.changed == "masks or none":
        masked = scores
        scores = lax.cond(_flag(s), lambda: masked, lambda: free)
    if p.changed == "values of a key zero":
        v = v.at[:, p.number % p.keys].set(0)
    scores = _rounded(scores, p.rounded, "scores")
    weights = OF_SOFTMAX.get(p.changed, WEIGH[p.weigh])(scores)
    weights = mutated(scores, p.number) if p.changed == MUTATED else weights
    weights = _rounded(weights, p.rounded, "weights")
    weights = OF_WEIGHTS.get(p.changed, lambda x, _: x)(weights, p.number)
    weights = AFTER.get(p.changed, lambda _, x: x)(s, weights)
    if p.weigh == "late" and not p.changed:
        weights = exponentials(scores)
        total = weights.sum(-1).swapaxes(1, 2)[..., None]
        out = (mixed(weights, v.astype(jnp.float32)) / total).astype(v.dtype)
    else:
        out = mixed(weights.astype(v.dtype), v)
    if p.changed == "queries added again":
        out = out + first.sum(-1, keepdims=True)
    more = {"weights returned": weights, "scores returned": scores}
    more["largest returned"] = scores.max(-1)
    return out, more.get(p.changed)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_others(multiply: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """A product whose gradient is that with another right operand."""
    return multiply(x, y)


_with_others.defvjp(
    lambda multiply, x, y: (multiply(x, y), (x, 1.25 * y)),
    lambda multiply, kept, g: jax.vjp(multiply, *kept)[1](g),
)


def _rounded(x: Any, rounded: str, what: str) -> Any:
    """Numbers by way of 16 bits, if these are what is rounded."""
    dtype = rounded.removeprefix(what).strip()
    return x.astype(dtype).astype(x.dtype) if rounded.startswith(what) else x


def _merged(x: Any) -> Any:
    """[batch, tokens, heads, dim] as [batch * heads, tokens, dim]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _product(layout: str, q: Any, k: Any) -> Any:
    """Scores [batch, heads, queries, keys]."""
    if layout == "bnqd":
        return q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)
    if layout == "qbnd":
        return jnp.einsum("qbnd,kbnd->bnqk", q.swapaxes(0, 1), k.swapaxes(0, 1))
    if layout == "merged":
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        return (_merged(q) @ _merged(k).swapaxes(1, 2)).reshape(shape)
    if layout == "keys first":
        return jnp.einsum("bknd,bqnd->bnkq", k, q).swapaxes(2, 3)
    if layout == "five dims":
        return jnp.einsum("wbqnd,wbknd->wbnqk", q[None], k[None])[0]
    if layout.startswith("reshape"):
        of = ("hg", "gh")["tiled" in layout]
        shape = (k.shape[2], -1) if of == "hg" else (-1, k.shape[2])
        q = q.reshape(*q.shape[:2], *shape, q.shape[3])
        scores = jnp.einsum(f"bq{of}d,bkhd->b{of}qk", q, k)
        return scores.reshape(q.shape[0], -1, *scores.shape[3:])
    return jnp.einsum("bqnd,bknd->bnqk", q, k)


def _mixed(layout: str, weights: Any, v: Any) -> Any:
    if layout == "bnqd":
        return (weights @ v.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "qbnd":
        return jnp.einsum("bnqk,kbnd->qbnd", weights, v.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == "merged":
        out = weights.reshape(-1, *weights.shape[2:]) @ _merged(v)
        return out.reshape(*weights.shape[:3], -1).swapaxes(1, 2)
    if layout == "keys first":
        return jnp.einsum("bnkq,bknd->bqnd", weights.swapaxes(2, 3), v)
    if layout == "five dims":
        return jnp.einsum("wbnqk,wbknd->wbqnd", weights[None], v[None])[0]
    if layout.startswith("reshape"):
        of = ("hg", "gh")["tiled" in layout]
        shape = (v.shape[2], -1) if of == "hg" else (-1, v.shape[2])
        weights = weights.reshape(weights.shape[0], *shape, *weights.shape[2:])
        out = jnp.einsum(f"b{of}qk,bkhd->bq{of}d", weights, v)
        return out.reshape(*out.shape[:2], -1, out.shape[4])
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


def _layer(p: Program, x: Any, y: Any, now: Any, before: Any) -> Any:
    """Adds an attention of a layer's own queries, keys and values."""
    project = lambda x, n, w: (x @ w).reshape(*x.shape[:2], n, -1)  # noqa: E731
    heads = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads}
    made = {n: project(x if n == "q" else y, heads[n], now[n]) for n in "qkv"}
    out, _ = attend(Scope(p, given=(now, before)), *_held(p, made))
    return x + out.reshape(*x.shape[:2], -1) @ now["o"]


def _held(p: Program, made: dict[str, Any]) -> list[Any]:
    """Queries, keys and values: some are the same, or have no gradient."""
    first, *others = p.same.split() or ["q"]
    made = made | {name: made[first] for name in others}
    return [lax.stop_gradient(made[n]) if n in p.frozen else made[n] for n in "qkv"]


def _moved(x: Any) -> Any:
    """An argument in the next turn of a loop that carries it."""
    return jnp.roll(x, 1, -1) if x.ndim else ~x if x.dtype == bool else x + 1


def _forward(p: Program, learnt: Any, given: Any) -> Any:
    if p.loop == "carried":
        made = [learnt[name] for name in "qkv"]

        def turn(carry: Any, _: Any) -> Any:
            q, given = carry
            values = {**learnt, **given}
            out, _ = attend(Scope(p, given=(values, values)), q, *made[1:])
            return (
                0.5 * q + out.mean(-1, keepdims=True),
                jax.tree.map(_moved, given),
            ), out

        outs = lax.scan(turn, (made[0], given), None, length=LAYERS)[1]
        return outs.sum(0), None
    if not p.stacked:
        values = {**learnt, **given}
        out, more = attend(Scope(p, given=(values, values)), *_held(p, learnt))
        if p.loop == "twice":  # With the same keys and values, and other queries.
            made = _held(p, learnt | {"q": learnt["q"] * 0.5 + out.mean()})
            out = out + attend(Scope(p, given=(values, values)), *made)[0]
        return out, more
    x, y = learnt["x"], learnt["y"]
    stacks = {**given, **{n: w for n, w in learnt.items() if n not in "xy"}}
    cross = p.queries != p.keys

    def run(x: Any, now: Any, before: Any) -> Any:
        return _layer(p, x, y if cross else x, now, before)

    def at(i: Any) -> Any:
        take = lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False)  # noqa: E731
        return jax.tree.map(take, stacks)

    def scanned(x: Any, now: Any) -> Any:
        return run(x, now, now), None

    def branched(x: Any, now: Any) -> Any:
        return lax.cond(now["flag"], lambda: run(x, now, now), lambda: 0.5 * x), None

    def sliced(x: Any, i: Any) -> Any:
        return run(x, at(i), at(i - 1)), None

    if p.loop == "unrolled":
        return run(run(x, at(0), at(0)), at(1), at(1)), None
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    wrap: Callable[[Any], Any] = lambda f: f  # noqa: E731
    if p.loop.endswith("again"):
        wrap = jax.checkpoint
    elif p.loop.endswith("policy"):
        wrap = partial(jax.checkpoint, policy=policy)
    if p.is_sliced:
        return lax.scan(wrap(sliced), x, jnp.arange(1, LAYERS + 1))[0], None
    if p.loop.startswith("branches"):
        stacks["flag"] = jnp.arange(LAYERS) % 2 == 0
        return lax.scan(wrap(branched), x, stacks)[0], None
    return lax.scan(wrap(scanned), x, stacks)[0], None


def step_of(p: Program) -> Callable[..., Any]:
    """The step: results and gradients of arguments with gradients."""

    def loss(learnt: Any, given: Any) -> Any:
        out, more = _forward(p, learnt, given)
        places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(places)), (out, more)

    def train(learnt: Any, given: Any) -> Any:
        # Not the loss: numbers cancel in it, and it follows from the results.
        return jax.grad(loss, has_aux=True)(learnt, given)

    return train if p.trains else lambda *args: loss(*args)[1]


def inputs_of(p: Program, seed: int) -> tuple[Any, Any]:
    """Arguments with gradients, and others."""
    r, scope = np.random.default_rng([p.number, seed, 1]), Scope(p, seed)

    def drawn(*shape: int, scale: float = 1.0 + seed % 2) -> Any:
        return jnp.asarray(r.normal(size=shape) * scale, p.dtype)

    q = drawn(p.batch, p.queries, p.heads, p.head_dim)
    k = drawn(p.batch, p.keys, p.kv_heads, p.head_dim)
    v = drawn(p.batch, p.keys, p.kv_heads, p.value_dim)
    jax.eval_shape(lambda: attend(scope, q, k, v)[0])
    learnt: dict[str, Any] = {n: x for n, x in scope.made.items() if n[0] == "w"}
    given = {n: x for n, x in scope.made.items() if n[0] == "a"}
    if not p.stacked:
        return learnt | {"q": q, "k": k, "v": v}, given
    wide, narrow = p.heads * p.head_dim, p.kv_heads * p.head_dim
    shapes = {"q": (wide, wide), "k": (wide, narrow)}
    shapes |= {
        "v": (wide, p.kv_heads * p.value_dim),
        "o": (p.heads * p.value_dim, wide),
    }
    for name, shape in shapes.items():
        learnt[name] = drawn(p.stacked, *shape, scale=1.2 * wide**-0.5)
    learnt["x"], learnt["y"] = (drawn(p.batch, n, wide) for n in (p.queries, p.keys))
    return learnt, given


# ----------------------------------------------------------------------------- drawing


def draw(number: int) -> Program:
    """A random program; little is unusual in six of ten."""
    r = random.Random(number)
    unusual = 0.15 if r.random() < 0.6 else 1.0

    def often(share: float) -> bool:
        return r.random() < share

    def rarely(share: float) -> bool:
        return r.random() < share * unusual

    def kind() -> str:
        return r.choice([*r.choice([FIXED, COUNTED, ARGUMENTS])])

    def before() -> bool:
        return loop.startswith("slices") and often(0.5)

    def term() -> Term:
        return Term(
            kind=kind(),
            how=r.choice(HOWS) if rarely(1.0) else r.choice(HOWS[:4]),
            number=r.choice(SMALLER) if rarely(0.15) else number_of_all,
            choice=r.choice(CHOICES) if rarely(0.25) else "",
            other=kind(),
            before=before(),
            learnt=rarely(0.03),
        )

    def bias() -> Bias:
        return Bias(
            kind=r.choice([*BIASES]),
            choice=r.choice([*CHOICES, "factor"]) if rarely(0.25) else "",
            learnt=rarely(0.15),
            before=before(),
        )

    changed = r.choice(CHANGES) if often(0.35) else MUTATED if often(0.15) else ""
    loop = r.choice(LOOPS) if often(0.4) and not changed.endswith("returned") else ""
    masks = r.choice([0, 1, 1, 1, 2, 2, 3] if rarely(1.0) else [0, 1, 1, 1, 2])
    biases = r.choice([0, 0, 0, 1, 1, 2] if rarely(1.0) else [0, 0, 0, 1])
    number_of_all = r.choice([-1e9, LEAST])
    heads, tokens = r.choice([1, 2, 4]), r.choice([16, 24, 32, 48])
    dim, batch = r.choice([4, 8]), r.choice([1, 2, 3])
    if heads == batch == 1 and not rarely(0.3):  # Nothing is batched then.
        batch = 2
    if rarely(0.05):  # Sizes tell dims apart; here they do not.
        heads = tokens = dim = batch = 8
    same = r.choice(SAME) if rarely(0.08) and not loop else ""
    kv_heads = heads
    if often(0.4) and "q" not in same:
        kv_heads = r.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
    is_cross = often(0.15) and "q" not in same

    def repeated(terms: list[Any]) -> tuple[Any, ...]:
        """Terms, the last one twice at times: of this layer, and of the one before."""
        if terms and often(0.6 if loop.startswith("slices") else 0.04):
            kinds = [*ARGUMENTS] if isinstance(terms[-1], Term) else [*SHAPES]
            last = terms[-1] = dataclasses.replace(terms[-1], kind=r.choice(kinds))
            terms.append(dataclasses.replace(last, before=not last.before, again=True))
        return tuple(terms)

    return Program(
        number=number,
        batch=batch,
        queries=tokens,
        keys=tokens + r.choice([8, -8, 16]) if is_cross and tokens > 8 else tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=r.choice([4, 8]) if rarely(0.1) and not same else dim,
        group=r.choice(GROUPS),
        dtype=r.choice(["bfloat16", "float16"]) if often(0.25) else "float32",
        rounded=r.choice(ROUNDED) if rarely(0.06) else "",
        layout=r.choice(LAYOUTS) if rarely(0.4) else r.choice(LAYOUTS[:2]),
        scaled=r.choice(SCALES) if rarely(1.0) else r.choice(SCALES[:4]),
        weigh=r.choice([*WEIGH]) if rarely(0.3) else "softmax",
        cap=3.0 if rarely(0.08) else 0.0,
        masks=repeated([term() for _ in range(masks)]),
        biases=repeated([bias() for _ in range(biases)]),
        biases_last=rarely(0.1),
        loop=loop,
        same=same,
        frozen=r.choice(FROZEN) if rarely(0.05) else "",
        trains=not often(0.15),
        changed=changed,
    )


# ---------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class Result:
    """A program's outcome.

    Attributes:
        is_taken: True if a kernel computes an attention of it.
        left: why one stays as it is written.
        wrong: an error; "" for none.
    """

    program: Program
    is_taken: bool = False
    left: tuple[str, ...] = ()
    wrong: str = ""


def check(program: Program) -> Result:
    """Compares a program with what each kernel makes of it."""
    exact = None
    if program.dtype != "float32" or program.rounded:
        wide = dataclasses.replace(program, dtype="float32", rounded="")
        exact = jax.jit(step_of(wide))
    try:
        sets = [inputs_of(program, seed) for seed in range(2)]
        mesh = make_mesh((("x", 1),))
        found = compare(step_of(program), *sets, mesh=mesh, exact=exact)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("UNIMPLEMENTED"):
            return Result(program, wrong=f"{error}"[:300])
        # XLA has no product of bfloat16 with sums in float32 in some loops on CPUs.
        return Result(program, left=(f"not run: {error}",))
    except Exception as error:
        return Result(program, wrong=f"{type(error).__name__}: {error}"[:300])
    wrong = "" if found.worst <= TOLERANCE else f"off by {found.off}"
    return Result(program, bool(found.kernels), found.left, wrong)


def _plainer(one: Any, plain: Any) -> Iterator[Any]:
    """The same with one field as by default."""
    for field in dataclasses.fields(one):
        default = getattr(plain, field.name)
        if field.name != "number" and getattr(one, field.name) != default:
            yield dataclasses.replace(one, **{field.name: default})


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    yield from _plainer(program, Program(number=program.number))
    yield dataclasses.replace(program, kv_heads=program.heads)
    for name, plain in (("masks", Term("causal")), ("biases", Bias("qk"))):
        terms = getattr(program, name)
        for i, one in enumerate(terms):
            for less in ((), *((x,) for x in _plainer(one, plain))):
                some = (*terms[:i], *less, *terms[i + 1 :])
                yield dataclasses.replace(program, **{name: some})


def minimal(result: Result, most: int = 60) -> Result:
    """A program with as little as possible that is wrong still."""
    tried, seen = 0, {result.program}
    candidates = simpler(result.program)
    while (less := next(candidates, None)) is not None and tried < most:
        if less in seen or less.heads % less.kv_heads:
            continue
        seen.add(less)
        tried += 1
        if (found := check(less)).wrong:
            result, candidates = found, simpler(less)
    return result


def text_of(program: Program) -> str:
    """A program without fields that are as by default."""

    def text(one: Any, plain: Any) -> str:
        fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
        words = []
        for name, value in fields.items():
            if value == getattr(plain, name) and name != "kind":
                continue
            if isinstance(value, tuple):
                value = "".join(f"{text(x, type(x)(''))}, " for x in value)
                words.append(f"{name}=({value.rstrip()})")
            else:
                words.append(f"{name}={value!r}")
        return f"{type(one).__name__}({', '.join(words)})"

    return text(program, Program())


def check_some(numbers: Sequence[int], planted: str = "") -> list[Result]:
    """Checks programs one after another, with a fault in the proof."""
    jax.clear_caches()
    with FAULTS[planted]() if planted else nullcontext():
        return [check(draw(number)) for number in numbers]


def report(results: Sequence[Result], seconds: float) -> str:
    """The summary of a run."""
    equivalent = [one for one in results if not one.program.changed]
    changed = [one for one in results if one.program.changed]
    taken = sum(one.is_taken for one in equivalent)
    left = [one for one in equivalent if not one.is_taken and not one.wrong]
    why = Counter(reason for one in left for reason in one.left)
    lines = [
        f"{len(results)} programs, {sum(bool(one.wrong) for one in results)} wrong; "
        f"taken: {taken} of {len(equivalent)} equivalent ones "
        f"({taken / max(1, len(equivalent)):.0%}), "
        f"{sum(one.is_taken for one in changed)} of {len(changed)} changed ones; "
        f"{seconds:.0f} s",
        *(f"  left {count}: {reason}" for reason, count in why.most_common(25)),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks programs and prints those that are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minimal", type=int, default=20, help="wrong ones made small")
    parser.add_argument("--planted", default="", choices=["", *FAULTS], help="a fault")
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=2"
    start = time.monotonic()
    numbers = range(options.seed, options.seed + options.count)
    results: list[Result] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        parts = [numbers[i : i + 25] for i in range(0, len(numbers), 25)]
        for some in pool.map(partial(check_some, planted=options.planted), parts):
            results += some
            for one in some:
                if one.wrong:
                    print(f"wrong: {text_of(one.program)}: {one.wrong}", flush=True)
        wrong = [one for one in results if one.wrong]
        small = [] if options.planted else wrong[: options.minimal]
        for one in pool.map(minimal, small):
            print(f"minimal: {text_of(one.program)}: {one.wrong}", flush=True)
    print(report(results, time.monotonic() - start))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
