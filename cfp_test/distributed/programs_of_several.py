"""A program that several processes run in the tests, and how it is made to fail.

    python -m cfp_test.distributed.programs_of_several FOLDER [FAULT [PROCESS]]

Each joins the others, plans a small step, runs it, and prints its plan. A fault meets
the process of that number: ``die-planning``, ``die-compiling`` and ``die-step`` end it
by a signal at that point, ``raise-planning`` by an error; the others have it come as
something else than the rest.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cfp
from cfp.profiling import collectives, followers
from cfp.profiling.collectives import ProbeSizes
from cfp.profiling.coordination import Coordination
from cfp.program.jaxprs import open_channel

ROWS, WIDTH = 12, 6


def end() -> None:
    """Ends this process without any word."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a linear model."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def other_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Another program of the same arguments."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w)))(w)
    return w - 0.1 * grad, loss


def break_planning(fault: str) -> None:
    """Has something go wrong in the middle of planning."""
    if fault in ("die-planning", "raise-planning"):

        def broken(*_: Any) -> Any:
            if fault == "die-planning":
                end()
            raise MemoryError("no room left in this process")

        for name in ("order", "orders"):
            setattr(Coordination, name, broken)
    if fault == "die-compiling":
        followers.build_here = lambda *_: end()
    if fault == "other-jax":
        jax.__version__ = "0.9.9"


def main(folder: Path, fault: str) -> None:
    """Plans, runs and says so."""
    # Little is measured, and quickly.
    collectives.SMALL = ProbeSizes(
        collective_bytes=(1 << 10,),
        chain_bytes=1 << 12,
        longest_chain=2,
        matmul_width={"float32": 32, "bfloat16": 32},
        memory_bytes=1 << 12,
        memory_passes=2,
    )
    break_planning(fault)
    seconds = int(os.environ.get("TEST_JOIN_SECONDS", "600"))
    lost = int(os.environ.get("TEST_LOST_SECONDS", "30"))
    cfp.join(join_seconds=seconds, lost_seconds=lost)
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("x",))
    if fault == "other-mesh":
        mesh = jax.make_mesh((1, count), ("y", "x"))
    step = other_step if fault == "other-program" else train_step
    shapes = [
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    ]
    plan = cfp.plan(
        step, *shapes, mesh=mesh, preset="data_parallel", cache_dir=folder / "cache"
    )
    measured = cfp.plan(
        step,
        *shapes,
        mesh=mesh,
        cache_dir=folder / "cache",
        settings=cfp.PlannerSettings(per_kind=1, others=0, measure=True),
    )
    if (channel := open_channel()) is not None and channel.process == 0:
        assert channel.below("cfp") == {}, (
            "messages are deleted once all have read them"
        )
    w = plan.init(lambda key: jax.random.normal(key, (WIDTH, WIDTH)), jax.random.key(0))
    rows = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 100
    first = sum(d.process_index < jax.process_index() for d in mesh.devices.flat)
    each = ROWS // count
    mine = rows[each * first :][: each * jax.local_device_count()]
    run = plan.apply(step)
    for number in range(3):
        if fault == "die-step" and number == 1:
            end()
        w, loss = run(w, plan.place(mine, argument="batch"))
        print("LOSS", float(loss), flush=True)
    # A loop of one's own, or the step that plans itself, is no other.
    again = cfp.parallelize(
        step, mesh=mesh, quiet=True, preset="data_parallel", cache_dir=folder / "cache"
    )
    again(w, plan.place(mine, argument="batch"))
    print("PLAN", again.plan.winner, plan.arg_specs, measured.measured_ms, flush=True)


if __name__ == "__main__":
    words = sys.argv[2:]
    mine = len(words) > 1 and os.environ["CFP_PROCESS_ID"] == words[1]
    main(Path(sys.argv[1]), words[0] if mine else "")
