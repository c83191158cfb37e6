"""Small programs that show the faults of XLA's partitioner in plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A program that shows a fault.

    Attributes:
        program: the body of a module: a function ``f``, shapes of its arguments and how
            they are sharded over the mesh. In it, ``place(x, *spec)`` is a sharding
            constraint.
        mesh: sizes of the axes ``x``, ``y`` and ``z``.
        shows: what the program comes to: wrong numbers, an error, or the end of the
            process.
    """

    program: str
    mesh: tuple[int, ...]
    shows: Literal["wrong", "error", "abort"] = "wrong"


TRIED = ("0.10", "0.12")  # releases of jaxlib, in order
# Only the older one of these has these.
MENDED = (
    "Fourier transforms whose result is sharded along a transformed dim end "
    "the process",
    "a scatter to a single place writes into shards that do not have it",
)


def faults(release: str | None = None) -> tuple[str, ...]:
    """The faults of a release of jaxlib; of the installed one, if none is given.

    A release that was not tried is taken for the last one tried before it.
    """
    tried = [
        one for one in TRIED if numbers(one) <= numbers(release or version("jaxlib"))
    ]
    if not tried:
        return ()
    return tuple(name for name in SHOWN if tried[-1] == TRIED[0] or name not in MENDED)


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


SHOWN: Mapping[str, Shown] = {
    "grouped convolutions whose result has other dims first are wrong": Shown(
        program="""
def f(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", feature_group_count=8,
        dimension_numbers=("NCHW", "HWIO", "NHWC"))

shapes = (4, 8, 5, 5), (2, 2, 1, 16)
specs = P(None, "x"), P(None, None, None, "x")
""",
        mesh=(4,),
    ),
    (
        "gradients of grouped convolutions' kernels are wrong where some of "
        "several axes shard the batch"
    ): Shown(
        program="""
def f(x, w):
    return jax.grad(lambda w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC")).sum())(w)

shapes = (8, 5, 5, 4), (2, 2, 1, 8)
specs = P("x"), P()
""",
        mesh=(2, 2),
    ),
    (
        "gradients of convolutions' kernels are wrong, or end the process, where "
        "some of several axes shard space"
    ): Shown(
        program="""
def f(x, dy):
    return lax.conv_general_dilated(
        place(x, None, "x"), place(dy, None, "x"), (1, 1), ((1, 1), (1, 1)),
        dimension_numbers=("CHWN", "IHWO", "HWNC"))

shapes = (4, 8, 8, 8), (4, 8, 8, 8)
specs = P(), P()
""",
        mesh=(2, 2),
    ),
    (
        "products over several dims, sharded along different ones of these by "
        "several axes, sum the wrong pairs"
    ): Shown(
        program="""
def f(x, y):
    return jnp.einsum("abcd,abce->de", x, y)

shapes = (4, 4, 4, 8), (4, 4, 4, 8)
specs = P("y", "x"), P("y", None, "x")
""",
        mesh=(2, 2),
    ),
    (
        "sums that only some of their axes scatter to a batch dim that another "
        "axis shards are wrong"
    ): Shown(
        program="""
def f(x, y):
    x, y = place(x, "x", None, ("y", "z")), place(y, "x", ("y", "z"))
    return place(jnp.einsum("bmk,bkn->bmn", x, y), ("x", "z"))

shapes = (8, 8, 8), (8, 8, 8)
specs = P(), P()
""",
        mesh=(2, 2, 2),
    ),
    (
        "reductions of a sharded dim by logic on integers, or by several ops, do "
        "not compile"
    ): Shown(
        program="""
def f(x):
    bits = (x * 100).astype(int)
    return lax.reduce(bits, 0, lax.bitwise_xor, (0,)).astype(float)

shapes = ((8,),)
specs = (P("x"),)
""",
        mesh=(2,),
        shows="error",
    ),
    "pads that cut off and spread a sharded dim end the process": Shown(
        program="""
def f(x):
    return lax.pad(x, 0.0, ((-1, 0, 1),))

shapes = ((8,),)
specs = (P("x"),)
""",
        mesh=(4,),
        shows="abort",
    ),
    "a write of one place outside of a sharded dim is lost": Shown(
        program="""
def f(x, piece):
    return lax.dynamic_update_slice(x, piece, (jnp.int32(9),))

shapes = (8,), (1,)
specs = P("x"), P()
""",
        mesh=(4,),
    ),
    (
        "slices of every n-th row read other rows where n is more than a device has"
    ): Shown(
        program="""
def f(x):
    return x[1::3]

shapes = ((2,),)
specs = (P("x"),)
""",
        mesh=(2,),
    ),
    (
        "Fourier transforms whose result is sharded along a transformed dim end "
        "the process"
    ): Shown(
        program="""
def f(x):
    return place(jnp.fft.fft(x), None, None, "x").real

shapes = ((1, 1, 8),)
specs = (P(),)
""",
        mesh=(4,),
        shows="abort",
    ),
    "Fourier transforms with a dim that does not divide do not run on CPUs": Shown(
        program="""
def f(x):
    return place(jnp.fft.fft(place(x, None, "x")), None, "x").real

shapes = ((8, 3, 4),)
specs = (P(),)
""",
        mesh=(4,),
        shows="error",
    ),
    "a scatter to a single place writes into shards that do not have it": Shown(
        program="""
def f(x, u):
    i = 6 + (u[0] > 9).astype(int)
    x = place(x, None, "x")
    write = jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u[None], (i, 0)))
    return place(write(x[None], u[None], i[None])[0], "y")

shapes = (8, 4), (4,)
specs = P(), P()
""",
        mesh=(2, 2),
    ),
    "scatters of indices that do not divide write to where their padding says": Shown(
        program="""
def f(x):
    i = 3 + (x > 9).astype(int)
    return jnp.zeros((8, 2)).at[place(i, "y")].add(1.0)

shapes = ((7,),)
specs = (P(),)
""",
        mesh=(2, 2),
    ),
    (
        "gradients of the largest in windows that overlap are wrong where a dim "
        "of the windows is sharded"
    ): Shown(
        program="""
def f(x):
    return jax.grad(lambda x: (lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID") ** 2).sum())(x)

shapes = ((8, 4),)
specs = (P("x"),)
""",
        mesh=(2,),
    ),
}
