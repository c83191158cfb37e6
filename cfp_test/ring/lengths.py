"""Latency, memory and correctness of a LLaMA for each length and method.

Or of one layer's attention alone, with `--alone`, which is what published figures of
rings are of.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cfp
from cfp.kernels.ring import zigzag_order
from cfp.models import find
from cfp.models.layers import random_text
from cfp.models.model import Config
from cfp.profiling.builder import is_out_of_memory, reason_of
from cfp_test.kernels import decoder
from cfp_test.ring import checkpoint

TINY: Mapping[str, int] = {
    "vocab": 64,
    "hidden": 32,
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
}
# LLaMA-2-7B, beside the zoo's defaults.
LLAMA_7B: Mapping[str, int] = {"layers": 32, "kv_heads": 32, "ffn": 11008}
# A method's strategy of attention on the axes "r" and "u".
STRATEGIES: Mapping[str, Mapping[str, str]] = {
    "xla": {},
    "flash": {},
    "all_gather": {"r": "all_gather"},
    "ring": {"r": "ring"},
    "zigzag": {"r": "zigzag"},
    "ulysses": {"u": "ulysses"},
    "both": {"r": "ring", "u": "ulysses"},
}
# Heads do not divide into more parts, usually: the other axis takes the rest.
ULYSSES_OF_BOTH = 2
# Of attention alone, which is over before the next call has come: a step of a training
# calls it so, too.
_IN_A_ROW = 10


def config_of(options: argparse.Namespace, seq: int) -> Config:
    shape = dict(LLAMA_7B if options.model == "7b" else TINY)
    if options.layers:
        shape["layers"] = options.layers
    return find("llama").config(**shape, seq=seq, dtype=options.dtype)


def mesh_of(options: argparse.Namespace, method: str) -> Mesh:
    """Axes "r" and "u"; what a method does not spread is on one device."""
    strategy, count = STRATEGIES[method], options.devices
    sizes = {
        0: (1, 1),
        1: (1, count) if "u" in strategy else (count, 1),
        2: (count // ULYSSES_OF_BOTH, ULYSSES_OF_BOTH),
    }[len(strategy)]
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return Mesh(np.array(devices).reshape(sizes), ("r", "u"))


def params_of(options: argparse.Namespace, config: Config, mesh: Mesh) -> Any:
    """Parameters, on each device of a mesh."""
    everywhere = NamedSharding(mesh, P())
    # Without gradients nothing needs them in float32, which each call would convert.
    dtype = jnp.float32 if options.train else config.dtype

    def convert(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), params)

    if options.checkpoint:
        loaded = checkpoint.load(options.checkpoint, config)
        return jax.device_put(convert(loaded), everywhere)
    init = jax.jit(
        lambda key: convert(decoder.init_params(config, key)), out_shardings=everywhere
    )
    return init(jax.random.key(0))


def attention_of(
    options: argparse.Namespace, method: str, mesh: Mesh
) -> Callable[..., jax.Array]:
    """Attention of queries, keys and values as a method spreads it."""
    flash = options.implementation or ("chunked" if options.platform == "cpu" else None)
    return partial(
        cfp.attention,
        causal=True,
        mesh=mesh,
        strategy=STRATEGIES[method],
        implementation="xla" if method == "xla" else flash,
        zigzag_tokens=method == "zigzag",
    )


def attend_of(options: argparse.Namespace, method: str, mesh: Mesh) -> decoder.Attend:
    return decoder.plain_attend(attention_of(options, method, mesh))


def order_of(method: str, tokens: int, mesh: Mesh) -> np.ndarray:
    """Positions of the tokens as the method has them."""
    if method == "zigzag":
        return zigzag_order(tokens, mesh.shape["r"])
    return np.arange(tokens)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length and method, but of those out of memory at fewer tokens."""
    over: dict[str, int] = {}
    measure = _measured_alone if options.alone else _measured
    for seq in map(int, options.lengths.split(",")):
        right: np.ndarray | None = None
        for method in options.methods.split(","):
            row = {"method": method, "tokens": seq, "train": options.train}
            row["alone"] = options.alone
            if seq >= over.get(method, seq + 1):
                continue
            try:
                more, result = measure(options, method, seq)
            except (cfp.CfpError, jax.errors.JaxRuntimeError) as error:
                if is_out_of_memory(error):
                    over[method] = seq
                yield {**row, "status": reason_of(error)}
                continue
            right = result if right is None else right
            off = float(np.linalg.norm(result - right) / np.linalg.norm(right))
            yield {**row, "status": "measured", **more, "relative_l2": off}


def _measured(
    options: argparse.Namespace, method: str, seq: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of one length and method, and logits or gradients to compare."""
    config, mesh = config_of(options, seq), mesh_of(options, method)
    attend, order = attend_of(options, method, mesh), order_of(method, seq, mesh)
    positions = jnp.asarray(order)
    text = random_text(jax.random.key(1), 1, seq, config.vocab)
    spread = NamedSharding(mesh, P(None, ("r", "u")))
    batch = {name: jax.device_put(x[:, order], spread) for name, x in text.items()}
    params = params_of(options, config, mesh)

    def forward(params: Any, batch: Any) -> jax.Array:
        return decoder.apply(config, params, batch["tokens"], attend, positions)[0]

    def train(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return decoder.loss(config, params, batch, attend, positions)[0]

        return jax.grad(loss_of)(params)

    run = train if options.train else forward
    figures, result = _timed(options, run, (params, batch), seq)
    if options.train:
        # Of all gradients that which attention has the most to do with.
        grads = result["layer_0"]["attention"]["key"]
        return figures, np.asarray(grads, np.float32)
    back = np.argsort(order)
    return figures, np.asarray(result, np.float32)[:, back]


def _measured_alone(
    options: argparse.Namespace, method: str, seq: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of one layer's attention alone, and its output or gradients."""
    config, mesh = config_of(options, seq), mesh_of(options, method)
    attention, order = attention_of(options, method, mesh), order_of(method, seq, mesh)
    spread = NamedSharding(mesh, P(None, ("r", "u")))
    size = config.hidden // config.heads
    q, k, v, dout = (
        jax.device_put(
            jax.random.normal(jax.random.key(i), (1, seq, heads, size), config.dtype)[
                :, order
            ],
            spread,
        )
        for i, heads in enumerate(
            (config.heads, config.kv_heads, config.kv_heads, config.heads)
        )
    )

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v)

    def train(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(attention, q, k, v)[1](dout)

    run, args = (train, (q, k, v, dout)) if options.train else (forward, (q, k, v))
    figures, result = _timed(options, run, args, seq, _IN_A_ROW)
    back, kept = np.argsort(order), result[1] if options.train else result
    return figures, np.asarray(kept, np.float32)[:, back]


def _timed(
    options: argparse.Namespace,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    seq: int,
    in_a_row: int = 1,
) -> tuple[dict[str, Any], Any]:
    """Figures of a function, called so often before its results are waited for."""
    compiled = jax.jit(run).lower(*args).compile()
    result, samples = jax.block_until_ready(compiled(*args)), []
    for _ in range(options.repeats):
        start = time.perf_counter()
        for _ in range(in_a_row):
            last = compiled(*args)
        jax.block_until_ready(last)
        samples.append(1e3 * (time.perf_counter() - start) / in_a_row)
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    figures = {
        "ms": median(samples),
        "samples_ms": samples,
        "us_per_token": 1e3 * median(samples) / seq,
        "peak_bytes": peak + memory.output_size_in_bytes,
        "devices": jax.tree.leaves(args)[0].sharding.num_devices,
    }
    return figures, result


def crossovers(rows: Sequence[Mapping[str, Any]], base: str = "flash") -> list[str]:
    """From which length on each method beats one device, in words."""
    known = {
        (row["method"], row["tokens"]): row["ms"]
        for row in rows
        if row["status"] == "measured"
    }
    lengths = sorted({row["tokens"] for row in rows})
    said = []
    for method in dict.fromkeys(row["method"] for row in rows):
        if method in ("xla", base):
            continue
        wins = [
            n
            for n in lengths
            if (method, n) in known
            and known[method, n] < known.get((base, n), float("inf"))
        ]
        where = f"from {wins[0]} tokens on" if wins else "at none of these lengths"
        said.append(f"{method} is faster than {base} on one device {where}")
    return said


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Latency per token and peak memory against length, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    shown = (("us_per_token", "microseconds per token"), ("peak_bytes", "peak bytes"))
    for axis, (name, label) in zip(axes, shown, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [
                (row["tokens"], row[name])
                for row in rows
                if row["method"] == method and row["status"] == "measured"
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def generate(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens after a prompt, the whole sequence computed for each."""
    prompt = [int(token) for token in options.prompt.split(",")]
    mesh = mesh_of(options, options.method)
    whole = 2 * mesh.size  # Of which a length is a multiple, in zigzag order too.
    seq = -(-(len(prompt) + options.new) // whole) * whole
    config = config_of(options, seq)
    attend = attend_of(options, options.method, mesh)
    order = order_of(options.method, seq, mesh)
    params, back = params_of(options, config, mesh), np.argsort(order)

    @jax.jit
    def following(params: Any, tokens: jax.Array, count: jax.Array) -> jax.Array:
        logits, _ = decoder.apply(
            config, params, tokens[:, order], attend, jnp.asarray(order)
        )
        return jnp.argmax(logits[0, back][count - 1])

    step: Callable[..., Any] = following
    tokens, times = list(prompt), []
    # The first call compiles, for any count.
    nothing = jnp.zeros((1, seq), jnp.int32)
    jax.block_until_ready(step(params, nothing, jnp.asarray(len(prompt))))
    for _ in range(options.new):
        padded = jnp.asarray([tokens + [0] * (seq - len(tokens))], jnp.int32)
        start = time.perf_counter()
        tokens.append(int(step(params, padded, jnp.asarray(len(tokens)))))
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "method": options.method,
        "tokens": tokens,
        "prompt_tokens": len(prompt),
        "ms_per_token": median(times),
    }
