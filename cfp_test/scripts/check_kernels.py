"""Measures what a check allows where attention computes in bfloat16.

    python -m cfp_test.scripts.check_kernels FILE [--seeds 2] [--steps 3]

Steps of small models, in float32, with a flash attention in bfloat16 by functions of
the host, as kernels from elsewhere, beside the same with XLA's attention in float32.
Weights are scaled as if the model were wider: attention then averages tokens until they
have much in common. For each step: how many leaves fail, and of those further off than
always passes the largest distance in units of what rounding does. The same with an
attention that leaves out the first key, which has to fail.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

from cfp.checking.check import MOST_ALLOWED, NARROW_MARGIN, Check
from cfp.checking.reference import Reference, compile_alone
from cfp.models.layers import attending_by
from cfp.program.step import flatten_step
from cfp.targets import resolve

_SMALL = "--layers 4 --hidden 512 --heads 4 --batch 8 --vocab 2048 --dtype float32"
# Each with what its kernels are scaled by: 2.83 is the root of 4,096 over 512.
MODELS = (
    (f"bert {_SMALL} --seq 256", 2.83),
    (f"bert {_SMALL} --seq 256", 1.0),
    (f"gpt {_SMALL} --seq 128", 2.83),
)


def _rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, jnp.bfloat16)


def _weights(q: Any, k: Any, causal: bool, wrong: bool) -> np.ndarray:
    """Attention weights before they are divided by their sums; float32."""
    scores = np.einsum("bqhd,bkhd->bhqk", *(np.float32(x) for x in (q, k)))
    scores /= q.shape[-1] ** 0.5
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -1e30)
    if wrong:
        scores[..., 1:, 0] = -1e30
    return np.exp(scores - scores.max(-1, keepdims=True))


def _forward(q: Any, k: Any, v: Any, causal: bool, wrong: bool) -> np.ndarray:
    weights = _weights(q, k, causal, wrong)
    sums = np.moveaxis(weights.sum(-1, keepdims=True), 1, 2)
    out = np.einsum("bhqk,bkhd->bqhd", np.float32(_rounded(weights)), np.float32(v))
    return _rounded(out / sums)


def _backward(
    q: Any, k: Any, v: Any, out: Any, dout: Any, causal: bool, wrong: bool
) -> tuple[np.ndarray, ...]:
    """Gradients, of which the rows' sums are taken from the output as it is rounded."""
    weights = _weights(q, k, causal, wrong)
    weights /= weights.sum(-1, keepdims=True)
    q, k, v, out, dout = (np.float32(x) for x in (q, k, v, out, dout))
    rows = np.moveaxis((dout * out).sum(-1, keepdims=True), 1, 2)
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, v)
    dscores = np.float32(_rounded(weights * (dweights - rows))) / q.shape[-1] ** 0.5
    found = (
        np.einsum("bhqk,bkhd->bqhd", dscores, k),
        np.einsum("bhqk,bqhd->bkhd", dscores, q),
        np.einsum("bhqk,bqhd->bkhd", np.float32(_rounded(weights)), dout),
    )
    return tuple(map(_rounded, found))


def _called(function: Any, like: Any, *arrays: jax.Array, **how: bool) -> Any:
    """Calls a function of the host on arrays in bfloat16; its results in float32."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), like)
    narrow = (x.astype(jnp.bfloat16) for x in arrays)
    made = jax.pure_callback(functools.partial(function, **how), shapes, *narrow)
    return jax.tree.map(lambda x: x.astype(jnp.float32), made)


def flash(wrong: bool) -> Any:
    """An attention as of :func:`cfp.models.layers.attending_by`."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        return _called(_forward, q, q, k, v, causal=causal, wrong=wrong)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> Any:
        out = attend(q, k, v, causal)
        return out, (q, k, v, out)

    def backward(causal: bool, kept: Any, dout: jax.Array) -> Any:
        return _called(_backward, kept[:3], *kept, dout, causal=causal, wrong=wrong)

    attend.defvjp(forward, backward)
    return attend


def plain(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """XLA's attention, in float32."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def rows_of(words: str, scale: float, seeds: int, steps: int) -> list[dict[str, Any]]:
    """The steps of one model, from several random starts."""
    target = resolve(words.split()[0], words.split()[1:])

    def compiled(kernel: Any) -> Any:
        with attending_by(kernel):
            step = flatten_step(lambda *args: target.step(*args), target.args)
            return compile_alone(step, jax.devices()[0])

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf * scale if "kernel" in keystr(path) else leaf

    reference = Reference(compiled(plain))
    sides = {
        "right": compiled(flash(False)),
        "first key left out": compiled(flash(True)),
    }
    rows = []
    for name, side in sides.items():
        for seed in range(seeds):
            state, *rest = target.make_args(side.in_shardings, seed)
            state = state._replace(params=tree_map_with_path(scaled, state.params))
            check = Check(side, reference, {0: 0})
            check.start([state, *rest])
            for number in range(steps):
                found = check.step()
                far = [
                    (d.relative_l2 / found.rounding[d.path], d.relative_l2, d.path)
                    for d in found.differences
                    if d.relative_l2 > check.tolerance
                    and NARROW_MARGIN * found.rounding[d.path] < MOST_ALLOWED
                ]
                row = {"model": words, "scale": scale, "attention": name, "seed": seed}
                row |= {"step": number, "leaves": len(found.differences)}
                row |= {"further_off": len(far), "largest": max(far, default=None)}
                row["failures"] = len(found.failures(check.tolerance))
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    rows = [
        row
        for words, scale in MODELS
        for row in rows_of(words, scale, given.seeds, given.steps)
    ]
    data = {"jax": jax.__version__, "rows": rows}
    given.file.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
