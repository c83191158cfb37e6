"""One GPU plays one of four: a program for four devices is compiled and run on it."""

from __future__ import annotations

from typing import Any

from cfp.cluster.doctor.probes.answer import answer

_DEVICES = 4


def find() -> dict[str, Any]:
    """The devices that JAX believes to have, and the collectives of the program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # Slices × hosts × devices of a host. Read when the backend starts.
    jax.config.update("jax_mock_gpu_topology", f"1x{_DEVICES}x1")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    aval = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = (
        jax.jit(step, in_shardings=(rows, whole), out_shardings=whole)
        .lower(aval, aval)
        # It would wait for kernels that the other processes should have tuned.
        .compile(compiler_options={"xla_gpu_shard_autotuning": False})
    )

    def made(sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(
            aval.shape,
            sharding,
            lambda at: np.full(np.empty(aval.shape, np.bool_)[at].shape, 0.01, "f4"),
        )

    result = compiled(made(rows), made(whole))
    result.addressable_data(0).block_until_ready()
    text = compiled.as_text()
    assert text is not None, "XLA prints what it compiled"
    return {
        "devices": jax.device_count(),
        "local": jax.local_device_count(),
        "all_reduces": text.count(" all-reduce(") + text.count(" all-reduce-start("),
    }


if __name__ == "__main__":
    answer(find)
