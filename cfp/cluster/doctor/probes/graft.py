"""Cuts a part out of a program, compiles it as a program of its own, and runs it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cfp.cluster.doctor.probes.answer import answer

_ROWS, _WIDTH, _INNER = 32, 64, 128


def find() -> dict[str, Any]:
    """Returns the difference from NumPy's result, and the compile time."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from cfp.program.constrain import Constraints
    from cfp.program.graft import cut_part, lower_part
    from cfp.program.step import flatten_step
    from cfp.program.trace import trace

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    draw = np.random.default_rng(0).standard_normal
    shapes = ((_ROWS, _WIDTH), (_WIDTH, _INNER), (_INNER, _WIDTH))
    x, up, down = (draw(shape).astype(np.float32) / 8 for shape in shapes)
    mesh = Mesh(np.array(jax.local_devices()), ("x",))
    ways = mesh.devices.size if _ROWS % mesh.devices.size == 0 else 1
    if ways == 1:
        mesh = Mesh(np.array(jax.local_devices()[:1]), ("x",))
    with jax.default_matmul_precision("highest"):
        program, _ = trace(flatten_step(step, (x, up, down)), mesh)
    last = max(op.id for op in program.ops if op.kind == "tanh")
    part = cut_part(program, [op.id for op in program.ops if op.id <= last])
    sharded = (("x",), ()) if ways > 1 else ((), ())
    values = dict(zip(program.args, (x, up, down), strict=True))
    inputs = [values[value] for value in part.inputs]
    specs = [sharded if value == program.args[0] else ((), ()) for value in part.inputs]
    lowered = lower_part(
        program, part, mesh, Constraints({}, {}), specs, [sharded] * len(part.outputs)
    )
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    placed = [
        jax.device_put(value, sharding)
        for value, sharding in zip(inputs, compiled.input_shardings[0], strict=True)
    ]
    (result,) = compiled(*placed)
    difference = float(np.abs(np.asarray(result) - np.tanh(x @ up)).max())
    return {"difference": difference, "compile_s": compile_s, "devices": ways}


if __name__ == "__main__":
    answer(find)
