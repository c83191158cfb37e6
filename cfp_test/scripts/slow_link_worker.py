"""One of two processes on both sides of a link: plans a step, or times plans of it.

    python cfp_test/scripts/slow_link_worker.py plan FOLDER NAME
    python cfp_test/scripts/slow_link_worker.py time FOLDER NAME NAME ...

Each has two devices of a mesh x=2,y=2, made by JAX's helper for hybrid meshes: x lies
between the processes, y inside of them. Process 0 prints a line of JSON.
"""

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils

import cfp
from cfp.plan.plan import Plan
from cfp.profiling.collectives import known_rates
from cfp.profiling.hlo import collectives_in
from cfp.profiling.processes import Agreement
from cfp.profiling.store import open_store, store_path

LAYERS, WIDTH, ROWS = 3, 256, 512
ROUNDS, STEPS = 5, 4
SIZES = (2**16, 2**20, 2**22)
State = dict[str, dict[str, jax.Array]]


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
    """A step of a small network, with momentum."""

    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for i in range(LAYERS):
            x = jnp.tanh(x @ weights[f"layer{i}"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["weights"])
    speed = jax.tree.map(lambda v, g: 0.9 * v + g, state["speed"], grads)
    weights = jax.tree.map(lambda w, v: w - 0.1 * v, state["weights"], speed)
    return {"weights": weights, "speed": speed}, loss


def make_state(key: jax.Array) -> State:
    """Weights at random, at rest."""
    keys = jax.random.split(key, LAYERS)
    weights = {
        f"layer{i}": jax.random.normal(keys[i], (WIDTH, WIDTH)) / WIDTH**0.5
        for i in range(LAYERS)
    }
    return {"weights": weights, "speed": jax.tree.map(jnp.zeros_like, weights)}


def make_mesh() -> jax.sharding.Mesh:
    """x between the processes, y inside."""
    devices = mesh_utils.create_hybrid_device_mesh(
        (1, 2), (2, 1), jax.devices(), process_is_granule=True
    )
    return jax.sharding.Mesh(devices, ("x", "y"))


def arguments() -> tuple:
    """The step's, as shapes."""
    state = jax.eval_shape(make_state, jax.random.key(0))
    array = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return state, {"x": array, "y": array}


def plan(mesh: jax.sharding.Mesh, folder: Path, name: str) -> dict:
    """Plans, and says what was measured of each axis."""
    cache = folder / f"cache-{name}"
    started = time.perf_counter()
    made = cfp.plan(
        train_step, *arguments(), mesh=mesh, donate_argnums=0, cache_dir=cache
    )
    seconds = time.perf_counter() - started
    if jax.process_index() == 0:
        made.save(folder / f"{name}.json")
    with open_store(store_path(cache), Agreement.of(mesh)) as store:
        rates = known_rates(mesh, store)
    assert rates is not None
    return {
        "name": name,
        "plan_seconds": round(seconds, 1),
        "winner": made.winner,
        "predicted_ms": made.predicted_ms,
        "measured_ms": made.measured_ms,
        "race": [{"name": r.name, "time_ms": r.time_ms} for r in made.race],
        "shardings": {
            n: [list(axes) for axes in spec]
            for n, spec in zip(made.arg_names, made.arg_specs, strict=True)
        },
        "all_reduce_ms": {
            axis: {
                str(size): rates.collective_ms("all-reduce", (axis,), size)
                for size in SIZES
            }
            for axis in mesh.axis_names
        },
    }


def timed(mesh: jax.sharding.Mesh, folder: Path, names: list[str]) -> dict:
    """Times plans in turn, A B, B A, A B, in one program."""
    steps, states, batches, sent = {}, {}, {}, {}
    rows = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    for name in names:
        made = Plan.load(folder / f"{name}.json", mesh=mesh)
        made = made.bind(train_step, *arguments())
        compiled = made.compile_bound()
        steps[name], states[name] = compiled, made.init(make_state, jax.random.key(0))
        batches[name] = jax.tree.map(
            lambda s: jax.make_array_from_callback(rows.shape, s, lambda i: rows[i]),
            made.in_shardings[1],
        )
        found = Counter[str]()
        for one in collectives_in(compiled.as_text()):
            found[f"{one.kind} of {one.bytes} bytes, {one.group_size} devices"] += (
                one.count
            )
        sent[name] = dict(found)
    samples: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 1):
        for name in names[:: 1 if turn % 2 else -1]:
            for _ in range(STEPS):
                started = time.perf_counter()
                states[name], loss = steps[name](states[name], batches[name])
                jax.block_until_ready((states[name], loss))
                if turn:  # The first opens connections.
                    samples[name].append((time.perf_counter() - started) * 1e3)
            losses[name].append(float(loss))
    return {
        "samples_ms": samples,
        "median_ms": {n: statistics.median(found) for n, found in samples.items()},
        "losses": losses,
        "collectives": sent,
    }


def main(mode: str, folder: Path, names: list[str]) -> None:
    """Joins the other process, and does what was asked for."""
    cfp.join(join_seconds=300)
    mesh = make_mesh()
    across = [d.process_index for d in mesh.devices[:, 0]]
    inside = [d.process_index for d in mesh.devices[0]]
    assert (across, inside) == ([0, 1], [0, 0])
    row = plan(mesh, folder, names[0]) if mode == "plan" else timed(mesh, folder, names)
    if jax.process_index() == 0:
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
