"""Variants of a step, planned by several processes, one of which is interrupted.

    python -m cfp_test.distributed.variants_of_several FOLDER PLACE

Process 1 is interrupted at that place: ``tracing`` the second variant, before it is
planned, or ``running`` a program.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cfp
from cfp import variants as room
from cfp.profiling import followers


def interrupt_at(place: str) -> None:
    """Has Ctrl-C come before something is done for the second time."""
    # Of what a shell runs in the background it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    owner, name, most = {
        "tracing": (room, "analyze_step", 2),
        "running": (followers, "execute_here", 2),
    }[place]
    usual: Callable[..., Any] = getattr(owner, name)
    done = []

    def interrupted(*args: Any, **how: Any) -> Any:
        done.append(name)
        if len(done) == most:
            signal.raise_signal(signal.SIGINT)
        return usual(*args, **how)

    setattr(owner, name, interrupted)


def main(folder: str, place: str) -> None:
    """Plans two variants."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    cfp.join(lost_seconds=600)
    mesh = jax.make_mesh((2,), ("x",))
    w = jax.ShapeDtypeStruct((6, 6), jnp.float32)
    variants = [
        cfp.Variant(
            name=f"{rows} rows",
            fn=step,
            args=(w, jax.ShapeDtypeStruct((rows, 6), jnp.float32)),
            mesh=mesh,
        )
        for rows in (12, 24)
    ]
    if os.environ["CFP_PROCESS_ID"] == "1":
        interrupt_at(place)
    cfp.plan_fastest(
        variants,
        preset="data_parallel",
        cache_dir=folder,
        settings=cfp.PlannerSettings(seconds=600.0, measure=True),
    )
    print("PLANNED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
