"""Trains a small decoder in one of five ways, and saves what its attention saw."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cfp
from cfp.models import find
from cfp.models.layers import random_text
from cfp.models.model import Config
from cfp.profiling.builder import reason_of
from cfp.profiling.hlo import collectives_in
from cfp_test.kernels.decoder import init_params, loss, taps
from cfp_test.ulysses.__main__ import LEARNING_RATE, row_of

TOKENS = P("dp", "sp")  # Of [batch, tokens, ...]: as they are outside of attention.
HEADS = P("dp", None, "sp")  # As they are inside.
COMPILED = ("compile", "deepcompile", "ringattn")
_COMPILES = 8  # At a time.


@dataclass(frozen=True)
class Training:
    """A decoder's training step in one of the ways, before anything is compiled."""

    options: argparse.Namespace
    config: Config
    mesh: Mesh

    @classmethod
    def of(cls, options: argparse.Namespace) -> Training:
        config = find("llama").config(
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
        return cls(options, config, mesh)

    def gradients(self, params: Any, batch: Any, tapped: Any) -> Any:
        attend = partial(attend_in_mode, self.options, self.mesh)
        return jax.value_and_grad(
            lambda params, tapped: loss(
                self.config, params, batch, attend, None, tapped
            ),
            argnums=(0, 1),
            has_aux=True,
        )(params, tapped)

    def step(self, params: Any, batch: Any) -> tuple[Any, jax.Array]:
        (value, _), (grads, _) = self.gradients(params, batch, None)
        new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        return new, value

    def make(self) -> tuple[Any, Any]:
        """Makes parameters and a batch."""
        options = self.options
        params = init_params(self.config, jax.random.key(0))
        text = random_text(jax.random.key(1), options.batch, options.seq, options.vocab)
        return params, text

    def placed(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """Puts arguments where the mode has them; of auto they stay on one device."""
        if self.options.mode == "auto":
            return params, batch
        everywhere, spread = (NamedSharding(self.mesh, spec) for spec in (P(), TOKENS))
        return jax.device_put(params, everywhere), jax.device_put(batch, spread)

    def compiled(self) -> Any:
        """Compiles the step from shapes alone."""
        everywhere, spread = (NamedSharding(self.mesh, spec) for spec in (P(), TOKENS))
        params, batch = (
            jax.tree.map(
                lambda x, s=sharding: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=s
                ),
                part,
            )
            for part, sharding in zip(
                jax.eval_shape(self.make), (everywhere, spread), strict=True
            )
        )
        return jax.jit(self.step).lower(params, batch).compile()


def run_all(
    wanted: Sequence[argparse.Namespace],
    file: Path | None,
    seconds: float | None,
    *,
    by_length: bool,
) -> int:
    """Runs all that a file has no row of; returns the exit code.

    Steps are compiled beside each other first, and run one after another.

    Args:
        wanted: options of each run.
        file: for rows.
        seconds: after which no run begins.
        by_length: whether arrays are saved in a folder for each length.
    """
    began = time.perf_counter()
    rows = json.loads(file.read_text()) if file and file.exists() else []
    rows = [row for row in rows if row["status"] == "ok"]  # The others run again.
    known = {(row["mode"], row["seq"]) for row in rows}
    wanted = [one for one in wanted if (one.mode, one.seq) not in known]
    failed = False
    with ThreadPoolExecutor(_COMPILES) as pool:
        ahead = {
            (one.mode, one.seq): pool.submit(Training.of(one).compiled)
            for one in wanted
            if one.mode in COMPILED
        }
        wait(ahead.values())
    for one in wanted:
        start = time.perf_counter()
        if seconds is not None and start - began > seconds:
            print(f"{one.mode} of {one.seq} tokens: no time was left", flush=True)
            failed = True
            continue
        folder = one.dump / (str(one.seq) if by_length else "") / one.mode
        folder.mkdir(parents=True, exist_ok=True)
        try:
            row = run(one, folder, ahead.get((one.mode, one.seq)))
        except (cfp.CfpError, jax.errors.JaxRuntimeError) as error:
            row, failed = {**row_of(one), "status": reason_of(error)}, True
        row["total_s"] = round(time.perf_counter() - start, 2)
        (folder / "row.json").write_text(json.dumps(row, indent=1) + "\n")
        print(json.dumps(row), flush=True)
        rows.append(row)
        if file is not None:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def run(
    options: argparse.Namespace, folder: Path, ahead: Future[Any] | None
) -> dict[str, Any]:
    """Runs some steps, saves arrays of the first, and returns a row of results."""
    training = Training.of(options)
    params, batch = training.placed(*training.make())
    if not options.no_save:
        gradients = training.gradients
        look = gradients if options.mode == "eager" else jax.jit(gradients)
        tapped = taps(training.config, options.batch)
        (_, seen), (_, of_taps) = look(params, batch, tapped)
        _save(folder, {**seen, **of_taps}, options.sp * options.dp)
    train, compiled = _trainer(training, ahead, params, batch)
    losses, times = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        params, value = jax.block_until_ready(train(params, batch))
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(float(value))
    row = {**row_of(options), "status": "ok", "losses": losses}
    row |= {"step_ms": median(times), "samples_ms": times}
    return {**row, **_of_program(compiled)}


def _trainer(
    training: Training, ahead: Future[Any] | None, params: Any, batch: Any
) -> tuple[Callable[..., Any], Any]:
    """The step as it runs, and the program that it is, if it is one."""
    if ahead is not None:
        compiled = ahead.result()
        return compiled, compiled
    if training.options.mode == "eager":
        return training.step, None
    planned = cfp.plan(training.step, params, batch, mesh=training.mesh).compile_bound()
    return planned, planned.compiled


def attend_in_mode(
    options: argparse.Namespace,
    mesh: Mesh,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One attention, and what is to be seen of it."""
    del layer
    call = partial(_attention_of, options.implementation)
    seen = {f"{n}.before": x for n, x in (("q", q), ("k", k), ("v", v))}
    if options.mode == "auto":
        out = call()(q, k, v)
    elif options.mode == "ringattn":
        out = call(mesh, "ring")(q, k, v)
    else:
        exchange = _explicit if options.mode in ("eager", "compile") else _constrained
        q, k, v = (exchange(x, mesh, to_heads=True) for x in (q, k, v))
        seen |= {f"{n}.after": x for n, x in (("q", q), ("k", k), ("v", v))}
        if options.mode == "deepcompile":
            # The model's own attention; whatever is exchanged, the compiler inserts.
            out = call()(q, k, v)
        else:
            out = call(mesh, "heads")(q, k, v)
        out = exchange(out, mesh, to_heads=False)
    return out, {**seen, "out": out}


# Op by op, a function that is new at each call would be compiled at each call.
@cache
def _attention_of(
    implementation: str | None, mesh: Mesh | None = None, way: str | None = None
) -> Callable[..., jax.Array]:
    """Attention as one op, on one device or in a way on the axis `sp`."""
    spread = (
        {} if mesh is None else {"mesh": mesh, "strategy": {"dp": "batch", "sp": way}}
    )
    given = {"causal": True, "implementation": implementation, **spread}
    return jax.jit(partial(cfp.attention, **given))


def _explicit(x: jax.Array, mesh: Mesh, *, to_heads: bool) -> jax.Array:
    """An all-to-all in the model's code."""
    return _exchange(mesh, to_heads)(x)


@cache
def _exchange(mesh: Mesh, to_heads: bool) -> Callable[[jax.Array], jax.Array]:
    split, joined = (2, 1) if to_heads else (1, 2)
    before, after = (TOKENS, HEADS) if to_heads else (HEADS, TOKENS)
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.all_to_all(x, "sp", split, joined, tiled=True),
            mesh=mesh,
            in_specs=before,
            out_specs=after,
        )
    )


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
