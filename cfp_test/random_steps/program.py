"""Random steps: drawn from a seed, described by a few numbers, built from these."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cfp_test.programs.common import adam, normal
from cfp_test.random_steps.blocks import ALL_SHAPES, NARROW, NEXT, makers
from cfp_test.random_steps.ops import contracting, control, indexing, shaping, values
from cfp_test.random_steps.ops.draft import Draft, Node
from cfp_test.support.checking import MeshSizes, make_mesh

MODULES = (contracting, control, indexing, shaping, values)  # They fill OPS.

MESHES: tuple[MeshSizes, ...] = (
    (("x", 2),),
    (("x", 4),),
    (("x", 8),),
    (("x", 2), ("y", 2)),
    (("x", 4), ("y", 2)),
    (("x", 2), ("y", 4)),
    (("x", 3), ("y", 2)),
    (("x", 2), ("y", 2), ("z", 2)),
)
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": adam,
    "adamw": lambda: optax.adamw(1e-2, eps=1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam()),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-2),
    "lion": lambda: optax.lion(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-2),
}
NO_OPTIMIZER = "none"


@dataclass(frozen=True)
class Block:
    """A block of a step.

    Attributes:
        kind: its name, of `blocks.makers`.
        seed: decides everything else about it, and which tensor it reads.
    """

    kind: str
    seed: int


@dataclass(frozen=True)
class Spec:
    """A random step on a mesh: everything that decides it.

    Attributes:
        mesh: the mesh's axes.
        shape: of the step's data.
        blocks: one after another, with branches.
        optimizer: of `OPTIMIZERS`, or "none" for a forward pass.
        microbatches: over so many the gradients are summed by a scan.
        donated: whether the state is given away.
        echoes: whether the step returns an argument, and a result twice.
        host: whether the optimizer's state is in the memory of the host.
        remat: whether all blocks together are rematerialized.
        twist: a number that the loss is multiplied with. Two steps that differ in it
            alone have the same types everywhere.
    """

    mesh: MeshSizes
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    optimizer: str = "sgd"
    microbatches: int = 1
    donated: bool = False
    echoes: bool = False
    host: bool = False
    remat: bool = False
    twist: float = 1.0


@dataclass(frozen=True)
class Built:
    """A step that can be called.

    Attributes:
        fn, args: the step and its arguments.
        donated: positions of arguments that are given away.
        kinds: of all ops in it, nested ones included.
    """

    fn: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    donated: tuple[int, ...]
    kinds: tuple[str, ...]

    @property
    def narrow(self) -> bool:
        """True if it computes in less than float32 somewhere."""
        return bool(NARROW.intersection(self.kinds))


def draw_spec(seed: int) -> Spec:
    """Draws a step."""
    rng = random.Random(seed)
    kinds = list(makers())
    count = rng.choice((1, 1, 2, 2, 3))
    blocks = tuple(Block(rng.choice(kinds), rng.randrange(10**6)) for _ in range(count))
    optimizer = rng.choice((*OPTIMIZERS, NO_OPTIMIZER))
    trains = optimizer != NO_OPTIMIZER
    return Spec(
        mesh=rng.choice(MESHES),
        shape=rng.choice(ALL_SHAPES),
        blocks=blocks,
        optimizer=optimizer,
        microbatches=rng.choice((1, 1, 1, 2, 4)) if trains else 1,
        donated=rng.random() < 0.5,
        echoes=rng.random() < 0.2,
        host=trains and rng.random() < 0.1,
        remat=rng.random() < 0.15,
    )


def build(spec: Spec) -> Built:
    """Makes the step that a spec describes."""
    d = Draft(random.Random(0), make_mesh(spec.mesh), nesting=1)
    d.data["x"] = normal(99, *spec.shape, scale=1.0)
    d.pool["x"] = spec.shape
    graph: list[tuple[str, str, Node]] = []
    known = makers()
    for index, block in enumerate(spec.blocks):
        d.draw = random.Random(block.seed)
        source = list(d.pool)[-1] if d.draw.random() < 0.8 else d.pick(list(d.pool))
        maker, applies = known[block.kind]
        made, out = d.node_of(d.pool[source], block.kind, maker, applies, ALL_SHAPES)
        graph.append((f"t{index}", source, made))
        d.pool[f"t{index}"] = out
    if not d.weights:
        last = list(d.pool)[-1]
        w = d.weight(*d.pool[last])
        graph.append(("out", last, lambda e, x: x * e[w]))
    read = {source for _, source, _ in graph}
    ends = [name for name, _, _ in graph if name not in read]

    def forward(weights: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        env = {**weights, **batch}
        for name, source, node in graph:
            env[name] = node(env, env[source])
        states = {k.removeprefix(NEXT): env[k] for k in env if k.startswith(NEXT)}
        return {name: env[name] for name in ends}, states

    def loss(weights: Any, batch: Any) -> tuple[jax.Array, Any]:
        run = jax.checkpoint(forward) if spec.remat else forward
        found, states = run(weights, batch)
        total = jnp.float32(0)
        for y in found.values():
            target = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            total += (jnp.sin(y) * target).sum() / max(1, y.size) ** 0.5
        return spec.twist * total, (found, states)

    kinds = tuple(d.kinds)
    if spec.optimizer == NO_OPTIMIZER:

        def evaluate(weights: Any, batch: Any) -> Any:
            found, states = forward(weights, batch)
            made = {k: spec.twist * v for k, v in found.items()}, {**weights, **states}
            return (*made, batch["x"], made[0]) if spec.echoes else made

        return Built(evaluate, (d.weights, d.data), (0,) * spec.donated, kinds)
    return _training(spec, loss, d, kinds)


def _training(spec: Spec, loss: Any, d: Draft, kinds: tuple[str, ...]) -> Built:
    """A training step, with its state as the first argument."""
    tx = OPTIMIZERS[spec.optimizer]()
    params, data = d.weights, dict(d.data)
    opt = tx.init(params)
    if spec.microbatches > 1:
        x = data["x"]
        data["x"] = jnp.stack(
            [jnp.roll(x, i) + 0.1 * i for i in range(spec.microbatches)]
        )

    def gradients(params: Any, batch: Any) -> Any:
        grad = jax.grad(loss, has_aux=True)
        if spec.microbatches == 1:
            return grad(params, batch)

        def one(total: Any, x: Any) -> Any:
            found, rest = grad(params, {**batch, "x": x})
            return jax.tree.map(jnp.add, total, found), rest

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, (found, states) = jax.lax.scan(one, zeros, batch["x"])
        return total, (found, jax.tree.map(lambda s: s[-1], states))

    def train_step(state: Any, batch: Any) -> tuple[Any, ...]:
        params, opt = state["params"], state["opt"]
        if spec.host:
            opt = jax.device_put(opt, jax.memory.Space.Device)
        grads, (found, states) = gradients(params, batch)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        params = {**params, **states}
        if spec.host:
            opt = jax.device_put(opt, jax.memory.Space.Host)
        made = ({"params": params, "opt": opt, "step": state["step"] + 1}, found)
        if spec.echoes:
            made = (*made, batch["x"], grads, grads)
        return made

    if spec.host:
        everywhere = NamedSharding(d.mesh, PartitionSpec())
        opt = jax.device_put(opt, everywhere.with_memory_kind("pinned_host"))
    state = {"params": params, "opt": opt, "step": jnp.int32(3)}
    return Built(train_step, (state, data), (0,) * spec.donated, kinds)
