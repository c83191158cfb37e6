"""Gradients that JAX scatters: as they are written, and as cfp writes them.

    python -m cfp_test.bench scatters --out FILE.json [--seconds 300] [--tiny]

Times the gradient of a lookup for tables, tokens and how these are spread, and whole
steps of two Flax models that look up in bfloat16 what they keep in float32, as
`flax.linen.Embed` does, with `optax`'s cross-entropy. Each is compiled for one device:
as it is, with gradients of lookups in float32, and with words selected, too
(:mod:`cfp.program.replace`). They take turns with a state of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from cfp import platform
from cfp.program import replace
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import lower_step, planning_mesh
from cfp_test.bench.commit import commit

AXES = (("x", 1),)
_WARM_SECONDS, _TURNS = 3.0, 8
# Of the frequency of a text's r-th most frequent word, 1 / (r + 2.7).
_MANDELBROT = 2.7
_PADDED = 0.3
WAYS = ("as written", "in float32", "as cfp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A table of bfloat16 numbers, and the tokens that are looked up in it.

    Attributes:
        spread: "evenly" over the rows, "as words" of a text, or "padded": as words
            with three in ten the same.
    """

    rows: int
    width: int
    tokens: int
    spread: str

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.width}, {self.tokens} tokens {self.spread}"


def lookups(tiny: bool) -> list[Lookup]:
    """Lookups of which the gradient alone is timed."""
    tokens, width = (64, 8) if tiny else (12288, 4096)
    spreads = {32000: ("evenly", "as words", "padded")}
    return [
        Lookup(rows=rows, width=width, tokens=tokens, spread=spread)
        for rows in (2, 16, 256, 32000)
        for spread in spreads.get(rows, ("evenly",))
    ]


def words(rows: int, shape: tuple[int, ...], spread: str) -> np.ndarray:
    """Draws the rows that are looked up; row 0 stands for padding."""
    random = np.random.default_rng(0)
    if spread == "evenly":
        return random.integers(0, rows, shape).astype(np.int32)
    weights = 1 / (np.arange(rows) + 1 + _MANDELBROT)
    found = random.choice(rows, shape, p=weights / weights.sum())
    if spread == "padded":
        found[..., : round(_PADDED * shape[-1])] = 0
    return found.astype(np.int32)


class _Block(nn.Module):
    heads: int
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=x.dtype)(x)
        split = (self.heads, width // self.heads)
        q, k, v = (nn.DenseGeneral(split, dtype=x.dtype)(y) for _ in range(3))
        kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=self.causal, implementation=kernel
        )
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=x.dtype)(mixed)
        y = nn.LayerNorm(dtype=x.dtype)(x)
        return x + nn.Dense(width, dtype=x.dtype)(
            nn.gelu(nn.Dense(4 * width, dtype=x.dtype)(y))
        )


class Transformer(nn.Module):
    """A language model, or an encoder where tokens have one of two types."""

    vocab: int
    width: int
    layers: int
    heads: int
    types: int = 0

    @nn.compact
    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        kind = jnp.bfloat16
        x = nn.Embed(self.vocab, self.width, dtype=kind)(tokens)
        x += nn.Embed(tokens.shape[1], self.width, dtype=kind)(
            jnp.arange(tokens.shape[1])[None]
        )
        if self.types:
            x += nn.Embed(self.types, self.width, dtype=kind)(types)
        for _ in range(self.layers):
            x = _Block(self.heads, causal=not self.types)(x)
        return nn.Dense(self.vocab, dtype=kind)(nn.LayerNorm(dtype=kind)(x))


def step_of(
    model: Transformer, shape: tuple[int, int], spread: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step of a model, and arguments for it."""
    optimizer = optax.adamw(1e-4)
    tokens = jnp.asarray(words(model.vocab, shape, spread))
    types = jnp.asarray(words(max(model.types, 1), shape, "evenly"))
    params = jax.jit(model.init)(jax.random.key(0), tokens, types)
    state = params, jax.jit(optimizer.init)(params)

    def train_step(
        state: tuple[Any, Any], tokens: jax.Array, types: jax.Array
    ) -> tuple[tuple[Any, Any], jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits: Any = model.apply(params, tokens, types)
            logits = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens
            ).mean()

        params, moments = state
        loss, gradient = jax.value_and_grad(loss_of)(params)
        change, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, change), moments), loss

    return train_step, (state, tokens, types)


def models(tiny: bool) -> Iterator[tuple[str, Transformer, tuple[int, int], str]]:
    """The steps that are timed: a name, the model, batch and length, the spread."""
    sizes = {"vocab": 64, "width": 16, "layers": 1, "heads": 2}
    language, encoder = dict(sizes), {**sizes, "types": 2}
    shapes = [(2, 16), (2, 16)]
    if not tiny:
        language = {"vocab": 50304, "width": 2048, "layers": 8, "heads": 16}
        encoder = {"vocab": 30592, "width": 768, "layers": 12, "heads": 12, "types": 2}
        shapes = [(16, 1024), (64, 512)]
    yield "language model", Transformer(**language), shapes[0], "as words"
    for spread in ("evenly", "padded"):
        yield "encoder", Transformer(**encoder), shapes[1], spread


@contextmanager
def _written(way: str) -> Iterator[None]:
    left = {"as written": ("add_up_in_float32", "select_words")}
    left["in float32"] = ("select_words",)
    with ExitStack() as stack:
        for name in left.get(way, ()):
            stays = mock.patch.object(replace, name, return_value=False)
            stack.enter_context(stays)
        yield


def compiled(step: FlatStep, way: str) -> jax.stages.Compiled:
    """Compiles a step for one device, with some scatters as written."""
    mesh = planning_mesh(platform.make_mesh(AXES))
    everywhere = NamedSharding(mesh, PartitionSpec())
    with _written(way):
        lowering = lower_step(step, [everywhere] * len(step.avals), everywhere)
    return lowering.lowered.compile()


def in_turn_ms(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list]:
    """Samples of some functions in turn, milliseconds for each call."""
    samples: dict[str, list] = {name: [] for name in runs}
    warm = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < warm:
        for run in runs.values():
            jax.block_until_ready(run())
    for turn in range(_TURNS):
        for name in [*runs][:: 1 if turn % 2 == 0 else -1]:
            run = runs[name]
            jax.block_until_ready(run())
            begun = time.perf_counter()
            for _ in range(repeats):
                results = run()
            jax.block_until_ready(results)
            samples[name].append((time.perf_counter() - begun) * 1e3 / repeats)
    return samples


def time_lookup(one: Lookup) -> dict[str, Any]:
    """Times the gradient of one lookup, and compares two ways."""
    table = jnp.ones((one.rows, one.width), jnp.bfloat16)
    ids = jnp.asarray(words(one.rows, (one.tokens,), one.spread))
    gradient = jax.random.normal(
        jax.random.key(1), (one.tokens, one.width), jnp.bfloat16
    )

    def backward(table: jax.Array, ids: jax.Array, gradient: jax.Array) -> jax.Array:
        return jax.vjp(lambda table: table[ids], table)[1](gradient)[0]

    args = table, ids, gradient
    step = flatten_step(backward, args)
    made = {way: compiled(step, way) for way in WAYS[:2]}
    samples = in_turn_ms(
        {way: lambda run=run: run(*args) for way, run in made.items()}, 4
    )
    exact = jnp.zeros(table.shape).at[ids].add(gradient.astype(jnp.float32))
    off = {
        way: float(jnp.abs(run(*args)[0].astype(jnp.float32) - exact).max())
        for way, run in made.items()
    }
    return {"samples_ms": samples, "off": off, "largest": float(jnp.abs(exact).max())}


def time_step(
    model: Transformer, shape: tuple[int, int], spread: str
) -> dict[str, Any]:
    """Times a whole step in each way."""
    function, args = step_of(model, shape, spread)
    step = flatten_step(function, args, donate_argnums=(0,))
    count = len(jax.tree.leaves(args[0]))
    states, losses, temporary = {}, {}, {}
    runs: dict[str, Callable[[], Any]] = {}
    for way in WAYS:
        made = compiled(step, way)
        if (memory := made.memory_analysis()) is not None:
            temporary[way] = memory.temp_size_in_bytes
        states[way] = [jnp.copy(leaf) for leaf in jax.tree.leaves(args)]

        def run(way: str = way, made: Any = made) -> jax.Array:
            results = made(*states[way])
            states[way][:count] = results[:count]
            return results[count]

        runs[way], losses[way] = run, float(run())
    return {"samples_ms": in_turn_ms(runs, 4), "losses": losses, "temporary": temporary}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(args)
    end = time.monotonic() + given.seconds
    platform.select("cpu" if given.tiny else None, AXES)
    rows: list[dict[str, Any]] = []
    if given.out.exists():
        rows = json.loads(given.out.read_text())["rows"]

    def add(name: str, find: Callable[[], dict[str, Any]], **about: Any) -> None:
        known = {row["name"] for row in rows}
        if name in known or time.monotonic() > end:
            return
        rows.append({"name": name, **about, **find()})
        samples = rows[-1]["samples_ms"].items()
        print(name, {w: statistics.median(ms) for w, ms in samples}, flush=True)
        head = {"jax": jax.__version__, "commit": commit(), "rows": rows}
        given.out.write_text(json.dumps(head, indent=1) + "\n")

    for one in lookups(given.tiny):
        add(one.name, lambda one=one: time_lookup(one), what="gradient")
    for name, model, shape, spread in models(given.tiny):
        add(
            f"{name}, tokens {spread}",
            lambda model=model, shape=shape, spread=spread: time_step(
                model, shape, spread
            ),
            what="step",
        )


if __name__ == "__main__":
    main()
