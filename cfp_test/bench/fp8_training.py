"""Trains a GPT of 115 M parameters in bfloat16 and with FP8 products, on one GPU.

    python -m cfp_test.bench fp8_training --out FILE.json [--seeds 0 1 2] [--steps 1000]
        [--precision fp8:1024] [--tiny]
    python -m cfp_test.bench fp8_training --out FILE.json --draw FIGURE.png

The text is Python's own standard library, byte by byte, with one file of twenty held
out. The step is planned once in each precision, and trains all seeds. A seed gives the
first parameters and the batches, the same in both. The file has the loss of each step
and of the held-out text; it is written after each seed. ``--draw`` draws a file, and
trains nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cfp

WIDE = {"layers": 9, "width": 1024, "heads": 16, "batch": 16, "seq": 1024}
TINY = {"layers": 2, "width": 32, "heads": 2, "batch": 4, "seq": 32}
HELD_OUT_EVERY = 20
HELD_OUT_BATCHES = 20
LAST = 100  # Steps whose mean loss is compared.
GROUP = 20  # Steps of one point in the picture.


def library_text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's sources: to train with, and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    away = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [p for p in sorted(root.rglob("*.py")) if away.isdisjoint(p.parts)]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, path in enumerate(files):
        parts[number % HELD_OUT_EVERY == 0].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"".join(one), np.uint8) for one in parts)
    return train, held_out


def batches(text: np.ndarray, seed: int, batch: int, seq: int) -> Callable[[], Any]:
    """Draws batches of a text, [batch, seq + 1], always the same for a seed."""
    drawn = np.random.default_rng(seed)

    def draw() -> np.ndarray:
        starts = drawn.integers(0, len(text) - seq - 1, batch)
        return np.stack([text[i : i + seq + 1] for i in starts]).astype(np.int32)

    return draw


def initial(key: jax.Array, layers: int, width: int, seq: int) -> dict[str, Any]:
    """Parameters in float32, by GPT-2's rules."""
    keys = iter(jax.random.split(key, 4 * layers + 3))

    def weight(*shape: int, scale: float = 1.0) -> jax.Array:
        return 0.02 * scale * jax.random.normal(next(keys), shape)

    into = (2 * layers) ** -0.5
    return {
        "bytes": weight(256, width),
        "places": weight(seq, width),
        "head": weight(width, 256),
        "norm": jnp.ones(width),
        "layers": [
            {
                "qkv": weight(width, 3 * width),
                "out": weight(width, width, scale=into),
                "up": weight(width, 4 * width),
                "down": weight(4 * width, width, scale=into),
                "norms": jnp.ones((2, width)),
            }
            for _ in range(layers)
        ],
    }


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale * gain).astype(x.dtype)


def loss_of(params: dict[str, Any], text: jax.Array, heads: int) -> jax.Array:
    """Mean cross entropy of the next byte, computed in bfloat16."""
    tokens, labels = text[:, :-1], text[:, 1:]
    places = params["places"][: tokens.shape[1]]
    x = (params["bytes"][tokens] + places).astype(jnp.bfloat16)
    for of in params["layers"]:
        w = {name: one.astype(jnp.bfloat16) for name, one in of.items()}
        qkv = norm(x, of["norms"][0]) @ w["qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.reshape(x.shape) @ w["out"]
        x = x + jax.nn.gelu(norm(x, of["norms"][1]) @ w["up"]) @ w["down"]
    x = norm(x, params["norm"])
    logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def training(steps: int, heads: int) -> tuple[optax.GradientTransformation, Any]:
    """AdamW with a cosine schedule, and a step of it."""
    warm_up = max(steps // 20, 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-4, warm_up, steps, 6e-5)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)
    )

    def train_step(state: Any, text: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, text, heads)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return optimizer, train_step


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains every seed in both precisions; returns what the file has."""
    sizes = TINY if args.tiny else WIDE
    shape = sizes["batch"], sizes["seq"]
    heads, mesh = sizes["heads"], jax.make_mesh((1,), ("x",))
    optimizer, train_step = training(args.steps, heads)
    evaluate = jax.jit(partial(loss_of, heads=heads))
    make = partial(
        initial, layers=sizes["layers"], width=sizes["width"], seq=sizes["seq"]
    )

    @jax.jit
    def start(seed: jax.Array) -> Any:
        params = make(jax.random.key(seed))
        return params, optimizer.init(params)

    text, held_out = library_text()
    count = sum(a.size for a in jax.tree.leaves(jax.eval_shape(start, 0)[0]))
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "sizes": {**sizes, "parameters": count, "text_bytes": len(text)},
        "precision": args.precision,
        "runs": [],
    }
    for name, precision in (("bfloat16", None), ("FP8", args.precision)):
        with tempfile.TemporaryDirectory() as work:
            plan = cfp.plan(
                train_step,
                jax.eval_shape(start, 0),
                jax.ShapeDtypeStruct((shape[0], shape[1] + 1), jnp.int32),
                mesh=mesh,
                donate_argnums=0,
                precision=precision,
                cache_dir=work,
                quiet=True,
            )
            step = plan.compile(
                train_step,
                jax.eval_shape(start, 0),
                jax.ShapeDtypeStruct((shape[0], shape[1] + 1), jnp.int32),
                donate_argnums=0,
            )
        print(f"{name}: {plan.products}", flush=True)
        for seed in args.seeds:
            draw = batches(text, seed, *shape)
            state, losses = start(seed), []
            begun = time.perf_counter()
            for _ in range(args.steps):
                state, loss = step(state, draw())
                losses.append(loss)
            losses = [round(float(one), 4) for one in losses]
            took = time.perf_counter() - begun
            unseen = batches(held_out, 0, *shape)
            params = state[0]
            of_unseen = [float(evaluate(params, unseen())) for _ in range(held(args))]
            del state, params
            row = {
                "precision": name,
                "seed": seed,
                "ms_a_step": round(took * 1e3 / args.steps, 2),
                "losses": losses,
                "last": statistics.mean(losses[-LAST:]),
                "held_out": statistics.mean(of_unseen),
                "products": {k: sum(v.values()) for k, v in plan.products.items()},
            }
            result["runs"].append(row)
            shown = {k: v for k, v in row.items() if k not in ("losses", "products")}
            print(shown, flush=True)
            args.out.write_text(json.dumps(result))
    return result


def held(args: argparse.Namespace) -> int:
    return 2 if args.tiny else HELD_OUT_BATCHES


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """Draws the losses of a result, and FP8's less bfloat16's."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    def grouped(losses: list[float]) -> np.ndarray:
        whole = losses[: len(losses) // GROUP * GROUP]
        return np.asarray(whole).reshape(-1, GROUP).mean(1)

    runs = {(one["precision"], one["seed"]): one["losses"] for one in result["runs"]}
    seeds = sorted({seed for _, seed in runs})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for number, seed in enumerate(seeds):
        wide, fp8 = (grouped(runs[name, seed]) for name in ("bfloat16", "FP8"))
        at = GROUP * (np.arange(len(wide)) + 0.5)
        color = f"C{number}"
        left.plot(at, wide, color=color, label=f"seed {seed}, bfloat16")
        left.plot(at, fp8, color=color, linestyle="--", label=f"seed {seed}, FP8")
        right.plot(at, fp8 - wide, color=color, label=f"seed {seed}")
    left.set(xlabel="step", ylabel="loss", ylim=(None, 3.5))
    right.set(xlabel="step", ylabel="loss in FP8 less that in bfloat16")
    for one in (left, right):
        one.grid(alpha=0.3)
        one.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precision", default="fp8:1024")
    parser.add_argument("--tiny", action="store_true", help="sizes that take no time")
    parser.add_argument("--draw", type=Path, help="a picture of the file, to write")
    args = parser.parse_args()
    if args.draw:
        draw_curves(json.loads(args.out.read_text()), args.draw)
    else:
        run(args)


if __name__ == "__main__":
    main()
