"""The strategy that draws whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st
from jax.sharding import Mesh

from cfp_test.generated import contracting, control, indexing, shaping, values
from cfp_test.generated.draft import OPS, SHAPES, Draft, Node
from cfp_test.programs.common import adam, normal

MODULES = (contracting, control, indexing, shaping, values)  # They fill OPS.
OPTIMIZERS = {
    "adam": adam(),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), adam()),
}


@dataclass(frozen=True)
class Generated:
    """A step that was drawn.

    Attributes:
        fn, args: the step and its arguments.
        kinds: the ops in it, of :data:`OPS`.
        donated: whether the state is given away.
    """

    fn: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kinds: tuple[str, ...]
    donated: bool

    def __call__(self) -> tuple[Any, ...]:
        """As the example programs give theirs."""
        return self.fn, self.args, {"donate_argnums": (0,) if self.donated else ()}


@st.composite
def steps(draw: Any, mesh: Mesh, most: int = 5) -> Generated:
    """Draws a step: a graph of ops on some data, with weights that it trains.

    Args:
        draw: Hypothesis's.
        mesh: the mesh for regions that are sharded by hand.
        most: the most ops at top level.
    """
    d = Draft(draw, mesh)
    shape = d.pick(SHAPES)
    d.data["x"] = normal(99, *shape, scale=1.0)
    d.pool["x"] = shape
    graph: list[tuple[str, str, Node]] = []
    for index in range(d.integer(2, most)):
        # Mostly a chain, with branches.
        source = list(d.pool)[-1] if d.flip() else d.pick(list(d.pool))
        made, out = d.node(d.pool[source])
        graph.append((f"t{index}", source, made))
        d.pool[f"t{index}"] = out
    if not d.weights:
        w = d.weight(*d.pool[graph[-1][0]])
        graph.append(("out", graph[-1][0], lambda e, x: x * e[w]))
    read = {source for _, source, _ in graph}
    ends = [name for name, _, _ in graph if name not in read]

    def forward(weights: Any, batch: Any) -> dict[str, jax.Array]:
        env = {**weights, **batch}
        for name, source, node in graph:
            env[name] = node(env, env[source])
        return {name: env[name] for name in ends}

    kind = d.pick((*OPTIMIZERS, "none"))
    kinds, donated = tuple(d.kinds), d.flip()
    if kind == "none":
        return Generated(forward, (d.weights, d.data), kinds, donated=False)
    tx = OPTIMIZERS[kind]

    def loss(weights: Any, batch: Any) -> tuple[jax.Array, Any]:
        found = forward(weights, batch)
        total = jnp.float32(0)
        for y in found.values():
            target = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            total += (jnp.sin(y) * target).sum() / max(1, y.size) ** 0.5
        return total, found

    def train_step(state: Any, batch: Any) -> tuple[Any, ...]:
        grads, found = jax.grad(loss, has_aux=True)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, found

    state = {"params": d.weights, "opt": tx.init(d.weights)}
    return Generated(train_step, (state, d.data), kinds, donated)


def all_kinds() -> tuple[str, ...]:
    """Every op kind that a step may have."""
    return tuple(OPS)
