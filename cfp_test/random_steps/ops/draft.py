"""A program while it is drawn: what ops there are, and what tensors it has so far.

An op is registered with :func:`op`. It gets the draft and the shape of its input, draws
what it needs (weights, dims, sizes) and returns a function of the environment, a dict
of all arrays by name, and of the input. Outputs are kept around 1 in size, and kinks
and jumps away from numbers that several paths of a program compute alike: what then
differs between two compilations is an error, not a rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfp_test.programs.common import integers, normal

Shape = tuple[int, ...]
Env = dict[str, Any]
Node = Callable[[Env, jax.Array], jax.Array]
Maker = Callable[["Draft", Shape], Node]

# Many divide by 4 or 2, and many do not.
SIZES = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 16, 16, 20, 24, 32)
SHAPES = ((8, 16), (4, 6, 8), (16,), (12, 5), (7, 8), (2, 8, 4, 4), (8, 3, 10))
MAX_ELEMENTS = 2048
MAX_RANK = 4
MAX_NESTING = 2

OPS: dict[str, Maker] = {}
_APPLIES: dict[str, Callable[[Shape], bool]] = {}
_NESTS: set[str] = set()


def op(
    applies: Callable[[Shape], bool] = lambda shape: True, nests: bool = False
) -> Callable[[Maker], Maker]:
    """Registers an op kind under its function's name.

    Args:
        applies: whether it takes an input of a shape.
        nests: whether it draws ops of its own.
    """

    def register(maker: Maker) -> Maker:
        name = maker.__name__
        OPS[name] = maker
        _APPLIES[name] = applies
        if nests:
            _NESTS.add(name)
        return maker

    return register


def taken_by(kind: str) -> Callable[[Shape], bool]:
    """The predicate of the shapes that an op kind takes as they are."""
    return _APPLIES[kind]


def rank(low: int = 1, high: int = MAX_RANK) -> Callable[[Shape], bool]:
    """Returns True if an input has so many dims."""
    return lambda shape: low <= len(shape) <= high


@dataclass
class Draft:
    """Ops that have been drawn.

    Attributes:
        draw: where random numbers come from.
        mesh: the mesh for regions that are sharded by hand.
        weights, data: arrays by name.
        pool: names of tensors that ops may read a second time, with their shapes.
        kinds: the ops drawn so far, nested ones included.
        depth: how many ops this one is nested in.
        nesting: the most ops that one may be nested in.
    """

    draw: random.Random
    mesh: Mesh
    weights: dict[str, jax.Array] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    pool: dict[str, Shape] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    depth: int = 0
    nesting: int = MAX_NESTING

    # -- drawing -------------------------------------------------------------

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw.choice(list(options))

    def flip(self) -> bool:
        return self.draw.random() < 0.5

    def integer(self, low: int, high: int) -> int:
        return self.draw.randint(low, high)

    def order(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.sample(range(count), count))

    def dim(self, shape: Shape) -> int:
        return self.integer(0, len(shape) - 1)

    def size(self, rest: int = 1) -> int:
        """The size of a new dim next to dims of so many elements."""
        return self.pick([n for n in SIZES if n * rest <= MAX_ELEMENTS] or [1])

    # -- arrays --------------------------------------------------------------

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = normal(len(self.weights), *shape, scale=scale)
        return name

    def tensor(self, shape: Shape) -> str:
        """Another tensor of a shape: one of the program's, or a new weight."""
        known = [name for name, other in self.pool.items() if other == shape]
        if known and self.flip():
            return self.pick(known)
        return self.weight(*shape)

    def numbers(self, high: int, *shape: int) -> str:
        """Integers below ``high``, from the batch."""
        name = f"d{len(self.data)}"
        self.data[name] = integers(len(self.data), high, *shape)
        return name

    def key(self) -> str:
        """A random key, from the batch."""
        name = f"d{len(self.data)}"
        make = self.pick((jax.random.key, jax.random.PRNGKey))
        self.data[name] = make(len(self.data))
        return name

    # -- ops -----------------------------------------------------------------

    def node(self, shape: Shape) -> tuple[Node, Shape]:
        """Draws an op for an input of a shape; with it the shape of its output.

        All kinds come equally often. One that does not take the shape is led to.
        """
        inner = self.depth < self.nesting
        kind = self.pick([k for k in OPS if inner or k not in _NESTS])
        return self.node_of(shape, kind, OPS[kind], _APPLIES[kind])

    def node_of(
        self,
        shape: Shape,
        kind: str,
        maker: Maker,
        applies: Callable[[Shape], bool],
        shapes: Sequence[Shape] = SHAPES,
    ) -> tuple[Node, Shape]:
        """Draws an op of one kind; with it the shape of its output.

        Args:
            shape: of its input.
            kind: its name.
            maker: draws it.
            applies: whether it takes an input of a shape.
            shapes: those that an input is led to if it does not take it as it is.
        """
        self.kinds.append(kind)
        taken = shape
        if not applies(shape):
            taken = self.pick([s for s in shapes if applies(s)])
        lead = self._fit(shape, taken)
        self.depth += 1
        made = maker(self, taken)
        self.depth -= 1

        def run(env: Env, x: jax.Array) -> jax.Array:
            return made(env, lead(env, x))

        return run, self.shape_of(run, shape)

    def shape_of(self, node: Node, shape: Shape) -> Shape:
        """The shape of a node's output, which must be a tensor of floats."""
        pool = {name: jnp.zeros(other) for name, other in self.pool.items()}
        env = {**self.weights, **self.data, **pool}
        out = jax.eval_shape(node, env, jax.ShapeDtypeStruct(shape, jnp.float32))
        assert out.dtype == jnp.float32, (self.kinds, out)
        assert len(out.shape) <= MAX_RANK, (self.kinds, out)
        return out.shape

    def body(self, shape: Shape, target: Shape | None = None) -> Node:
        """Draws one or two ops, and leads their output back to a shape."""
        target = shape if target is None else target
        nodes: list[Node] = []
        for _ in range(self.integer(1, 2)):
            made, shape = self.node(shape)
            nodes.append(made)
        nodes.append(self._fit(shape, target))

        def run(env: Env, x: jax.Array) -> jax.Array:
            for made in nodes:
                x = made(env, x)
            return x

        return run

    def _fit(self, shape: Shape, target: Shape) -> Node:
        if shape == target:
            return lambda env, x: x
        count, wanted = prod(shape), prod(target)
        if count * wanted > MAX_ELEMENTS:
            return lambda env, x: jnp.resize(x, target)
        w = self.weight(count, wanted, scale=count**-0.5)
        return lambda env, x: (x.reshape(-1) @ env[w]).reshape(target)
