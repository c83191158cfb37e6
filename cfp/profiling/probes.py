"""The small programs that time a mesh: collectives, matrix products, memory traffic.

A collective alone takes less than launching the program that it is in. So a program
holds a chain: a loop whose every turn needs what the turn before received, so that
nothing can be merged, moved out, or run side by side. The chain's time divided by its
length is that of one collective as it is inside a large program.

All-reduce and all-to-all give what they take, and follow each other directly. What an
all-gather or a reduce-scatter gives has another shape: one number of it is written into
their input, in place, which costs the same at every size. A chain of such writes alone
tells how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from cfp.profiling.inputs import InputKind
from cfp.profiling.key import Parts
from cfp.profiling.rates import KINDS, axis_groups

Step = Callable[[jax.Array], jax.Array]

_DTYPES = ("float32", "bfloat16")
_PRODUCTS = 5
_WRITES = 256
# Two in one turn of the loop need no copy where one cannot write over its input.
_TWO_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Probes of rates: programs long enough to hide caches and launches.

    Attributes:
      collective_bytes: of a group's tensor; see `Rates.collective_ms`.
      chain_bytes: what a chain of collectives goes through in all, about.
      longest_chain: even for the smallest of them. A multiple of two, as the shortest,
        which has two.
      matmul_width: of square matrices, by dtype.
      memory_bytes: what is read, and written.
      memory_passes: how often.
    """

    collective_bytes: tuple[int, ...]
    chain_bytes: int
    longest_chain: int
    matmul_width: Mapping[str, int]
    memory_bytes: int
    memory_passes: int

    def chain(self, size: int) -> int:
        """Returns the number of collectives of a size in a chain."""
        even = self.chain_bytes // size // 2 * 2
        return max(2, min(self.longest_chain, even))


SMALL = Sizes(
    collective_bytes=(1 << 14, 1 << 18, 1 << 22),
    chain_bytes=1 << 21,
    longest_chain=16,
    # Few CPUs multiply bfloat16 as fast as float32, and some are very slow.
    matmul_width={"float32": 512, "bfloat16": 256},
    memory_bytes=1 << 24,
    memory_passes=2,
)
# On 4 H200 with NVLink the chains take 1 to 10 ms.
LARGE = Sizes(
    collective_bytes=(1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 27, 1 << 29),
    chain_bytes=1 << 28,
    longest_chain=64,
    matmul_width={"float32": 4096, "bfloat16": 8192},
    memory_bytes=1 << 28,
    memory_passes=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A small program that does one thing over and over.

    Attributes:
      parts: what it is, as the beginning of a key.
      kind: its input, and its result.
      function: what each device does to its piece of the input: everything.
      count: how many of the thing it does.
      work: bytes or operations of one.
      writes: whether a number is written after each.
      reads: whether the input is read to the end, so that the result needs room.
    """

    parts: Parts
    kind: InputKind
    function: Step
    count: int
    work: float
    writes: bool = False
    reads: bool = False

    @property
    def label(self) -> str:
        return " ".join(value for _, value in self.parts)

    @property
    def inputs(self) -> tuple[InputKind, ...]:
        """All inputs: the result takes the memory of the last one."""
        return (self.kind, self.kind) if self.reads else (self.kind,)

    @property
    def feedback(self) -> tuple[tuple[int, int], ...]:
        """The result is the last input of the next run.

        So nothing is allocated while the clock runs: fresh memory costs a CPU more
        than a collective does.
        """
        return ((len(self.inputs) - 1, 0),)


def probes(mesh: Mesh, sizes: Sizes) -> Iterator[Probe]:
    """Everything that is to be known of a mesh."""
    for kind in KINDS:
        for group in axis_groups(mesh.shape.items()):
            for size in sizes.collective_bytes:
                yield _collective(kind, group, size, sizes.chain(size), mesh)
    yield _writes(mesh)
    for dtype in _DTYPES:
        yield _matmul(dtype, sizes.matmul_width[dtype], mesh)
    yield _memory(sizes, mesh)


def _collective(
    kind: str, axes: tuple[str, ...], size: int, count: int, mesh: Mesh
) -> Probe:
    ways = prod(mesh.shape[name] for name in axes)
    # A device's piece is cut again, into one for each of the others.
    elements = max(1, round(size / (4 * ways * ways))) * ways * ways
    function: Step
    if kind == "all-reduce":
        # Not two in one turn: a sum of equal numbers may be compiled to a product.
        function = partial(_repeat, partial(lax.psum, axis_name=axes), count, 1)
    elif kind == "all-to-all":
        swap = partial(
            lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
        )
        function = partial(_repeat, swap, count, _TWO_TURNS)
    else:
        move = lax.all_gather if kind == "all-gather" else lax.psum_scatter
        received = partial(move, axis_name=axes, tiled=True)
        function = partial(_repeat, partial(_with_write, received), count, 1)
    # Of what is reduced every device holds a whole tensor of its own.
    local = elements // ways if kind in ("all-gather", "all-to-all") else elements
    return Probe(
        parts=(
            ("what", "collective"),
            ("kind", kind),
            ("axes", ",".join(axes)),
            ("bytes", str(size)),
            ("chain", str(count)),
        ),
        # Over all axes, whatever the group: then groups of one size share inputs.
        kind=_floats(local, mesh),
        function=function,
        count=count,
        work=4.0 * elements,
        writes=kind in ("all-gather", "reduce-scatter"),
    )


def _writes(mesh: Mesh) -> Probe:
    def change(x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, x[-1:] - x[:1], (0,))

    return Probe(
        parts=(("what", "write"), ("chain", str(_WRITES))),
        kind=_floats(2, mesh),
        function=partial(_repeat, change, _WRITES, 1),
        count=_WRITES,
        work=1.0,
    )


def _matmul(dtype: str, width: int, mesh: Mesh) -> Probe:
    def multiply(x: jax.Array) -> jax.Array:
        # The first outside of the loop, which then needs no copy of its input.
        by_x = partial(lax.dot, rhs=x)
        return _repeat(lambda y: by_x(y), _PRODUCTS - 1, _TWO_TURNS, by_x(x))

    return Probe(
        parts=(
            ("what", "matmul"),
            ("dtype", dtype),
            ("width", str(width)),
            ("chain", str(_PRODUCTS)),
        ),
        kind=InputKind((width * mesh.size, width), dtype, (mesh.axis_names, ()), True),
        function=multiply,
        count=_PRODUCTS,
        work=2.0 * width**3,
        reads=True,
    )


def _memory(sizes: Sizes, mesh: Mesh) -> Probe:
    def change(x: jax.Array) -> jax.Array:
        return jnp.float32(0.01) - x

    size, count = sizes.memory_bytes, sizes.memory_passes
    return Probe(
        parts=(("what", "memory"), ("bytes", str(size)), ("chain", str(count))),
        kind=_floats(size // 4, mesh),
        function=partial(_repeat, change, count, 1),
        count=count,
        work=2.0 * size,  # Read and written.
    )


def _floats(local: int, mesh: Mesh) -> InputKind:
    """So many on each device."""
    return InputKind((local * mesh.size,), "float32", (mesh.axis_names,), True)


def _repeat(step: Step, count: int, turns: int, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, value: step(value), x, unroll=turns)


def _with_write(collective: Step, x: jax.Array) -> jax.Array:
    # From the last device's piece: the first one's could be had without a collective.
    return lax.dynamic_update_slice(x, collective(x)[-1:], (0,))
