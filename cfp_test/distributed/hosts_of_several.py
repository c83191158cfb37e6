"""A program whose every process has a host of its own, by name; it shards within.

    python -m cfp_test.distributed.hosts_of_several FOLDER

Each joins the others, plans a step by the preset hsdp, runs it twice, and prints its
losses, how its weights are stored, and the collectives of more than a few numbers.
"""

import os
import socket
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import cfp
from cfp.profiling.hlo import collectives_in

ROWS, WIDTH = 16, 8


def train_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a linear model."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def numbers(rows: int) -> np.ndarray:
    """Weights, or a batch."""
    return np.sin(np.arange(rows * WIDTH, dtype=np.float32)).reshape(rows, WIDTH)


def main(folder: Path) -> None:
    """Plans, runs and says so."""
    socket.gethostname = lambda: f"host {os.environ['CFP_PROCESS_ID']}"
    cfp.join(join_seconds=600, lost_seconds=600)
    hosts = jax.process_count()
    mesh = jax.make_mesh((hosts, jax.device_count() // hosts), ("x", "y"))
    shapes = [
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (WIDTH, ROWS)
    ]
    where = {"mesh": mesh, "cache_dir": folder / "cache"}
    plan = cfp.plan(train_step, *shapes, preset="hsdp", **where)
    w = plan.init(lambda: jnp.asarray(numbers(WIDTH)))
    mine = np.split(numbers(ROWS), hosts)[jax.process_index()]
    run = plan.apply(train_step)
    for _ in range(2):
        w, loss = run(w, plan.place(mine, argument="batch"))
        print("LOSS", float(loss), flush=True)
    compiled = plan.compile(train_step, *shapes).as_text()
    sent = {(c.kind, c.group_size, c.bytes) for c in collectives_in(compiled)}
    print("PLAN", plan.arg_specs[0], *sorted(s for s in sent if s[2] > 16), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
