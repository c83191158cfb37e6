"""Trains a small decoder in one of five ways, and saves what its attention saw."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
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
from cfp.models.train import random_text
from cfp.profiling.hlo import collectives_in
from cfp_test.attention.decoder import LlamaConfig, init_params, loss, taps
from cfp_test.ulysses.__main__ import LEARNING_RATE, row_of

TOKENS = P("dp", "sp")  # Of [batch, tokens, ...]: as they are outside of attention.
HEADS = P("dp", None, "sp")  # As they are inside.


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs some steps, saves arrays of the first, and returns a row of results."""
    config = LlamaConfig(
        vocab=options.vocab,
        seq=options.seq,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        dtype=options.dtype,
    )
    devices = np.array(jax.devices()[: options.sp * options.dp])
    mesh = Mesh(devices.reshape(options.dp, options.sp), ("dp", "sp"))
    attend = partial(_attend, options, mesh)
    params = init_params(config, jax.random.key(0))
    text = random_text(jax.random.key(1), options.batch, options.seq, options.vocab)
    batch = text
    if options.mode != "auto":
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(text, NamedSharding(mesh, TOKENS))

    def gradients(params: Any, batch: Any, tapped: Any) -> Any:
        return jax.value_and_grad(
            lambda params, tapped: loss(config, params, batch, attend, None, tapped),
            argnums=(0, 1),
            has_aux=True,
        )(params, tapped)

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        (value, _), (grads, _) = gradients(params, batch, None)
        new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        return new, value

    look = gradients if options.mode == "eager" else jax.jit(gradients)
    (_, seen), (_, of_taps) = look(params, batch, taps(config, options.batch))
    _save(folder, {**seen, **of_taps}, options.sp * options.dp)
    train, compiled = _trainer(options, mesh, step, params, batch)
    losses, times = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        params, value = jax.block_until_ready(train(params, batch))
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(float(value))
    row = {**row_of(options), "losses": losses, "step_ms": median(times)}
    return {**row, **_of_program(compiled)}


def _trainer(
    options: argparse.Namespace,
    mesh: Mesh,
    step: Callable[..., Any],
    params: Any,
    batch: Any,
) -> tuple[Callable[..., Any], Any]:
    """The step as it runs, and the program that it is, if it is one."""
    if options.mode == "eager":
        return step, None
    if options.mode == "auto":
        planned = cfp.plan(step, params, batch, mesh=mesh).compile_bound()
        return planned, planned.compiled
    compiled = jax.jit(step).lower(params, batch).compile()
    return compiled, compiled


def _attend(
    options: argparse.Namespace,
    mesh: Mesh,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One attention, and what is to be seen of it."""
    del layer
    call = partial(cfp.attention, causal=True, implementation=options.implementation)
    seen = {f"{n}.before": x for n, x in (("q", q), ("k", k), ("v", v))}
    if options.mode == "auto":
        out = call(q, k, v)
    elif options.mode == "ringattn":
        out = call(q, k, v, mesh=mesh, strategy={"dp": "batch", "sp": "ring"})
    else:
        exchange = _explicit if options.mode in ("eager", "compile") else _constrained
        q, k, v = (exchange(x, mesh, to_heads=True) for x in (q, k, v))
        seen |= {f"{n}.after": x for n, x in (("q", q), ("k", k), ("v", v))}
        if options.mode == "deepcompile":
            # The model's own attention; whatever is exchanged, the compiler inserts.
            out = call(q, k, v)
        else:
            out = call(q, k, v, mesh=mesh, strategy={"dp": "batch", "sp": "heads"})
        out = exchange(out, mesh, to_heads=False)
    return out, {**seen, "out": out}


def _explicit(x: jax.Array, mesh: Mesh, *, to_heads: bool) -> jax.Array:
    """An all-to-all in the model's code."""
    split, joined = (2, 1) if to_heads else (1, 2)
    before, after = (TOKENS, HEADS) if to_heads else (HEADS, TOKENS)
    return jax.shard_map(
        lambda x: jax.lax.all_to_all(x, "sp", split, joined, tiled=True),
        mesh=mesh,
        in_specs=before,
        out_specs=after,
    )(x)


def _constrained(x: jax.Array, mesh: Mesh, *, to_heads: bool) -> jax.Array:
    """A constraint, at which the compiler inserts what it takes."""
    before, after = (TOKENS, HEADS) if to_heads else (HEADS, TOKENS)
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, before))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, after))


def _of_program(compiled: Any) -> dict[str, Any]:
    if compiled is None:
        return {"temp_bytes": None, "bytes_by_collective": None}
    memory = compiled.memory_analysis()
    sent: Counter[str] = Counter()
    for one in collectives_in(compiled.as_text()):
        sent[one.kind] += one.bytes * one.count
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "bytes_by_collective": dict(sent),
    }


def _save(folder: Path, arrays: dict[str, jax.Array], ranks: int) -> None:
    """A file for each rank: its part of each array, and where it lies in the whole."""
    for old in folder.glob("rank*.npz"):
        old.unlink()
    for rank in range(ranks):
        saved: dict[str, Any] = {"names": np.array(sorted(arrays))}
        for name, array in arrays.items():
            shards = [s for s in array.addressable_shards if s.device.id == rank]
            if not shards:  # On one device: rank 0 has all of it.
                saved["names"] = saved["names"][saved["names"] != name]
                continue
            start = [place.start or 0 for place in shards[0].index]
            data = np.asarray(jnp.asarray(shards[0].data, jnp.float32))
            saved |= {
                f"{name}:data": data,
                f"{name}:start": np.array(start),
                f"{name}:shape": np.array(array.shape),
            }
        np.savez(folder / f"rank{rank}.npz", **saved)
