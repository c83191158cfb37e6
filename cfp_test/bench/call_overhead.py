"""Overhead of a call on the host, beside `jax.jit` with the same shardings.

    python cfp_test/bench/call_overhead.py --json docs/results/FILE.json
        [--leaves 10,100,1000] [--rounds 8] [--calls 10]

Two loops: training, in which a donated state comes back with each call, and evaluation,
in which the same weights are passed each time. The steps add one number to each array,
so that there are no collectives and next to nothing to compute. What is counted is the
processor time of the calling thread during the call; each call is waited for before the
next. The steps take turns. The page beside the JSON is made from it, which keeps the
runs with other versions of JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # Its page alone is made by other processes, too.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

import cfp
from cfp_test.results.pages import table

BASELINE = "jax.jit, compiled"


def train(state: Any, batch: jax.Array) -> Any:
    return jax.tree.map(lambda w: w + batch, state)


def evaluate(state: Any, batch: jax.Array) -> jax.Array:
    return sum(tree_leaves(state)) + batch


def made_state(leaves: int) -> dict[str, Any]:
    """A state with so many arrays, two to a layer; none stands in for a batch."""
    layers = {
        f"layer_{i}": {"bias": jnp.zeros(8), "scale": jnp.ones(8)}
        for i in range(leaves // 2)
    }
    return {**layers, **({"last": jnp.ones(8)} if leaves % 2 else {})}


def callers(fn: Callable[..., Any], state: Any, batch: Any) -> dict[str, Any]:
    """Ways to call a step under one plan, and the state and batch in its shardings."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    donated = (0,) if fn is train else ()
    with tempfile.TemporaryDirectory() as cache:
        step = cfp.parallelize(
            fn,
            mesh=mesh,
            quiet=True,
            preset="data_parallel",
            cache_dir=cache,
            settings=cfp.PlannerSettings(race=False),
            donate_argnums=donated,
        )
        step(state, batch)
    compiled = step.plan.compile(fn, state, batch)
    ins = step.plan.in_shardings
    how = {"in_shardings": ins, "out_shardings": step.plan.out_shardings}
    jitted: Any = jax.jit(fn, donate_argnums=donated, **how)
    return {
        BASELINE: jitted.lower(state, batch).compile(),
        "jax.jit": jitted,
        "cfp.parallelize": step,
        "cfp, compiled": compiled,
    } | {"": ins}


def measured(
    fn: Callable[..., Any], leaves: int, rounds: int, calls: int
) -> list[dict[str, Any]]:
    """A row for each way to call a step, with all samples in microseconds."""
    batch = jnp.ones(())
    ways = callers(fn, made_state(leaves - 1), batch)
    state, batch = jax.device_put((made_state(leaves - 1), batch), ways.pop(""))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            # The first calls of a turn follow another way's.
            for number in range(calls + 2):
                started = time.thread_time_ns()
                result = call(state, batch)
                spent = time.thread_time_ns() - started
                jax.block_until_ready(result)
                state = result if fn is train else state
                if turn and number > 1:
                    samples[name].append(spent / 1e3)
    return [
        {"loop": fn.__name__, "leaves": leaves, "way": name, "samples_us": list_}
        for name, list_ in samples.items()
    ]


def page(data: dict[str, Any]) -> str:
    """Writes the measurements, with each version of JAX, as Markdown."""
    return "\n".join(["# What a call costs on the host", "", *map(_run, data["runs"])])


def _run(data: dict[str, Any]) -> str:
    """The rows of one run."""
    base = {
        (row["loop"], row["leaves"]): median(row["samples_us"])
        for row in data["rows"]
        if row["way"] == BASELINE
    }
    rows = []
    for row in data["rows"]:
        half = median(row["samples_us"])
        rows.append(
            [
                row["loop"],
                row["leaves"],
                row["way"],
                f"{half:.1f}",
                f"{min(row['samples_us']):.1f}",
                f"{half / base[row['loop'], row['leaves']]:.2f}",
            ]
        )
    head = "loop | arguments | way | median µs | least µs | of compiled jax.jit"
    return "\n".join(
        [
            f"## jax {data['jax']}",
            "",
            f"{data['devices']}, two shared processor cores, {data['python']}, jax "
            f"{data['jax']}, {data['date']}. Processor time of the calling thread "
            f"during a call, {len(data['rows'][0]['samples_us'])} calls of each way, "
            "taking turns, each waited for. The ways run one step in the same "
            "shardings: in the loop `train` a donated state comes back with each call, "
            "in `evaluate` the same arrays are passed each time. What a call costs "
            "does not depend on how long the devices then compute. Made by "
            "`python cfp_test/bench/call_overhead.py --json FILE`. "
            "[JSON](call_overhead_cpu_202611.json)",
            "",
            table(head, rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--leaves", default="10,100,1000")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    run: dict[str, Any] = {
        "python": f"Python {sys.version.split()[0]}",
        "jax": jax.__version__,
        "devices": f"{len(jax.devices())} x {device}",
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    others = [one for one in known.get("runs", ()) if one["jax"] != jax.__version__]
    data = {"runs": [*others, run]}
    for leaves in map(int, options.leaves.split(",")):
        for fn in (train, evaluate):
            rows = measured(fn, leaves, options.rounds, options.calls)
            run["rows"] += rows
            options.json.write_text(json.dumps(data) + "\n")
            options.json.with_suffix(".md").write_text(page(data))
            for row in rows:
                print(fn.__name__, leaves, row["way"], median(row["samples_us"]))


if __name__ == "__main__":
    main()
