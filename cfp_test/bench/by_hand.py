"""Plans beside an expert's shardings by hand, timed in turn in one process.

    python -m cfp_test.bench.by_hand gpt --rounds 8 --json out.jsonl

By hand, each parameter is sharded on its largest dim (fsdp), or not at all (dp), and
the activations between layers on the batch; the attention is cuDNN's on GPUs. cfp plans
the same step as written ("plan: written"), with the model's own call of cuDNN's kernel
("plan: kernel"), or choosing shardings alone ("plan: sharding").

One line of JSON for each model: every sample, seconds of planning, memory as compiled,
losses of the same ten steps, and clocks and power while each way ran.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cfp
from cfp_test.bench.decoder import MODELS, Decoder, make_step

STEPS = 5  # in a row, for one sample


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the step, compiled.

    Attributes:
        run: the compiled step.
        shardings: of its state and its tokens.
        about: what is known of it, for the record.
    """

    run: Callable[..., Any]
    shardings: tuple[Any, Any]
    about: dict[str, Any]


def _peak_bytes(compiled: Any) -> int:
    """Memory of one device that a compiled program needs at most."""
    sizes = compiled.memory_analysis()
    used = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    return used + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


def by_hand(sizes: Decoder, mesh: Mesh, how: str) -> Way:
    """The step sharded by hand: "fsdp" or "dp"."""
    step, (state, tokens) = make_step(sizes)
    count = mesh.size

    def sharding_of(leaf: Any) -> NamedSharding:
        whole = how == "dp" or leaf.ndim < 2
        dims = [d for d in range(leaf.ndim) if leaf.shape[d] % count == 0]
        if whole or not dims:
            return NamedSharding(mesh, PartitionSpec())
        largest = max(dims, key=lambda d: leaf.shape[d])
        spec = ["x" if d == largest else None for d in range(leaf.ndim)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = (
        jax.tree.map(sharding_of, state),
        NamedSharding(mesh, PartitionSpec("x")),
    )
    activations = NamedSharding(mesh, PartitionSpec("x", None, None))

    def constrained(state: Any, tokens: jax.Array) -> Any:
        constrain = partial(jax.lax.with_sharding_constraint, shardings=activations)
        return step(state, tokens, constrain)

    started = time.perf_counter()
    compiled = (
        jax.jit(
            constrained,
            in_shardings=shardings,
            out_shardings=(shardings[0], NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
        )
        .lower(state, tokens)
        .compile()
    )
    seconds = time.perf_counter() - started
    about = {"compile_s": seconds, "peak_bytes": _peak_bytes(compiled)}
    return Way(run=compiled, shardings=shardings, about=about)


def planned(
    sizes: Decoder, mesh: Mesh, settings: cfp.PlannerSettings, preset: str | None = None
) -> Way:
    """The step as cfp plans it."""
    step, args = make_step(sizes)

    def train_step(state: Any, tokens: jax.Array) -> Any:
        return step(state, tokens)

    notes: list[tuple[float, str]] = []
    started = time.perf_counter()

    def note(event: Any) -> None:
        if isinstance(event, str):
            notes.append((round(time.perf_counter() - started, 2), event))

    with tempfile.TemporaryDirectory() as folder:
        plan = cfp.plan(
            train_step,
            *args,
            mesh=mesh,
            donate_argnums=0,
            preset=preset,
            cache_dir=folder,
            settings=replace(settings, progress=note),
        )
        seconds = time.perf_counter() - started
        compiled = plan.compile(train_step, *args)
        first = time.perf_counter() - started
    race = json.loads(plan.to_json()).get("race", [])
    about = {
        "planning_s": seconds,
        "ready_s": first,
        "winner": plan.winner,
        "predicted_ms": plan.predicted_ms,
        "measured_ms": plan.measured_ms,
        "peak_bytes": max(
            (row["peak_bytes"] for row in race if row["name"] == plan.winner), default=0
        ),
        "candidates": race,
        "log": notes,
        "text": repr(plan),
    }
    return Way(run=compiled, shardings=plan.in_shardings, about=about)


def make_state(sizes: Decoder, shardings: tuple[Any, Any]) -> tuple[Any, jax.Array]:
    """The same state and tokens for every way, of the same random numbers."""
    _, (state, tokens) = make_step(sizes)

    def numbers(seed: jax.Array) -> Any:
        params, moments = state
        keys = iter(jax.random.split(seed, len(jax.tree.leaves(params))))

        def make(leaf: Any) -> jax.Array:
            if leaf.ndim < 2:
                return jnp.ones(leaf.shape, leaf.dtype)
            return 0.02 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

        def zero(leaf: Any) -> jax.Array:
            return jnp.zeros(leaf.shape, leaf.dtype)

        return jax.tree.map(make, params), jax.tree.map(zero, moments)

    made = jax.jit(numbers, out_shardings=shardings[0])(jax.random.key(0))
    words = jax.random.randint(jax.random.key(1), tokens.shape, 0, sizes.vocabulary)
    return made, jax.device_put(words, shardings[1])


@contextmanager
def watching() -> Iterator[dict[str, list[float]]]:
    """Clocks in MHz and power in watts of the first GPU, four times a second."""
    seen: dict[str, list[float]] = {"mhz": [], "watts": []}
    if jax.devices()[0].platform != "gpu":
        yield seen
        return
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "-i", "0", "-lms", "250"]
    query += ["--format=csv,noheader,nounits"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            mhz, watts = line.split(",")
            seen["mhz"].append(float(mhz))
            seen["watts"].append(float(watts))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seen
    finally:
        process.terminate()
        reader.join()


def time_in_turn(
    sizes: Decoder, ways: dict[str, Way], rounds: int, warm_up: int = 3
) -> dict[str, dict[str, Any]]:
    """Milliseconds a step of each way, a sample a round, and the losses of steps."""
    found: dict[str, dict[str, Any]] = {
        name: {"samples_ms": [], "mhz": [], "watts": []} for name in ways
    }
    names = list(ways)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            way = ways[name]
            state, tokens = make_state(sizes, way.shardings)
            losses = []
            for _ in range(warm_up):
                state, loss = way.run(state, tokens)
                losses.append(loss)
            jax.block_until_ready(state)
            with watching() as seen:
                started = time.perf_counter()
                for _ in range(STEPS):
                    state, loss = way.run(state, tokens)
                    losses.append(loss)
                jax.block_until_ready((state, loss))
                elapsed = time.perf_counter() - started
            found[name]["samples_ms"].append(elapsed / STEPS * 1e3)
            found[name]["losses"] = [float(np.asarray(loss)) for loss in losses]
            found[name]["mhz"] += seen["mhz"]
            found[name]["watts"] += seen["watts"]
            del state, tokens, loss, losses
    return found


def compare(model: str, ways: list[str], rounds: int) -> dict[str, Any]:
    """All ways of one model, compiled, checked against each other, and timed."""
    sizes = MODELS[model]
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
    on_gpu = jax.devices()[0].platform == "gpu"
    kernel = replace(sizes, attention="cudnn" if on_gpu else "xla")
    default = cfp.PlannerSettings()
    makers: dict[str, Callable[[], Way]] = {
        "hand: fsdp": lambda: by_hand(kernel, mesh, "fsdp"),
        "hand: dp": lambda: by_hand(kernel, mesh, "dp"),
        "plan: written": lambda: planned(sizes, mesh, default),
        "plan: kernel": lambda: planned(kernel, mesh, default),
        "plan: sharding": lambda: planned(
            sizes, mesh, cfp.PlannerSettings(attention=())
        ),
    }
    made: dict[str, Way] = {}
    failed: dict[str, str] = {}
    for name in ways:
        print(f"{model}: {name}", flush=True)
        try:
            made[name] = makers[name]()
        except Exception as error:  # one way that fails is a row of the record
            failed[name] = f"{type(error).__name__}: {error}"
            print(failed[name], flush=True)
        else:
            about = made[name].about
            print({k: about[k] for k in about if k not in ("log", "candidates")})
    timed = time_in_turn(sizes, made, rounds)
    rows = {}
    for name, way in made.items():
        samples = timed[name]["samples_ms"]
        rows[name] = {
            "median_ms": statistics.median(samples),
            **timed[name],
            **way.about,
        }
        spread = f"{min(samples):.2f} to {max(samples):.2f}"
        print(
            f"{model} {name}: {rows[name]['median_ms']:.2f} ms ({spread})", flush=True
        )
    return {
        "model": model,
        "sizes": {name: getattr(sizes, name) for name in Decoder.__slots__},
        "devices": count,
        "device_kind": jax.devices()[0].device_kind,
        "p2p_disabled": os.environ.get("NCCL_P2P_DISABLE") == "1",
        "jax": jax.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ways": rows,
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", default="hand: fsdp,plan: written,plan: kernel")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    for model in given.models:
        row = compare(model, given.ways.split(","), given.rounds)
        with given.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
