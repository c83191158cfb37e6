"""Ops that have sharding rules: functions that JAX lowers to them, with their variants.

An entry names the ops that it shows, and yields its variants: a label, a function and
arguments. Sizes divide by four, or do not but are within a third of what does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Variants = Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class Entry:
    """Some ops and programs that have them.

    Attributes:
        name: of the entry.
        kinds: names of the ops, with their dialects.
        variants: a function that yields label, function and arguments.
        backward: whether the functions' gradients are proved, too.
    """

    name: str
    kinds: tuple[str, ...]
    variants: Callable[[], Variants]
    backward: bool = True


ENTRIES: dict[str, Entry] = {}
EVEN, ODD = (8, 4, 16), (7, 6, 3)


def entry(
    *kinds: str, backward: bool = True
) -> Callable[[Callable[[], Variants]], Any]:
    """Adds an entry; names without a dialect are StableHLO's."""

    def add(variants: Callable[[], Variants]) -> Callable[[], Variants]:
        full = tuple(k if "." in k else f"stablehlo.{k}" for k in kinds)
        name = variants.__name__
        ENTRIES[name] = Entry(name, full, variants, backward)
        return variants

    return add


def draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Random numbers: of a normal distribution, or small integers."""
    rng = np.random.default_rng((seed, *shape))
    kind = jnp.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if jnp.issubdtype(kind, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    if jnp.issubdtype(kind, jnp.floating):
        return jnp.asarray(rng.normal(size=shape), kind)
    low = 0 if jnp.issubdtype(kind, jnp.unsignedinteger) else -9
    return rng.integers(low, 10, shape).astype(kind)


def places(*shape: int, below: int, seed: int = 1) -> np.ndarray:
    """Random indices, of which some lie outside."""
    rng = np.random.default_rng((seed, *shape))
    return rng.integers(-2, below + 2, shape).astype(np.int32)


_UNARY: dict[str, Callable[..., Any]] = {
    "stablehlo.abs": lax.abs,
    "stablehlo.cbrt": lax.cbrt,
    "stablehlo.ceil": lax.ceil,
    "stablehlo.cosine": lax.cos,
    "stablehlo.exponential": lax.exp,
    "stablehlo.exponential_minus_one": lax.expm1,
    "stablehlo.floor": lax.floor,
    "stablehlo.is_finite": lax.is_finite,
    "stablehlo.log": lambda x: lax.log(lax.abs(x) + 1),
    "stablehlo.log_plus_one": lambda x: lax.log1p(lax.abs(x)),
    "stablehlo.logistic": lax.logistic,
    "stablehlo.negate": lax.neg,
    "stablehlo.round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod(0)),
    "stablehlo.round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod(1)),
    "stablehlo.rsqrt": lambda x: lax.rsqrt(lax.abs(x) + 1),
    "stablehlo.sign": lax.sign,
    "stablehlo.sine": lax.sin,
    "stablehlo.sqrt": lambda x: lax.sqrt(lax.abs(x) + 1),
    "stablehlo.tanh": lax.tanh,
    "chlo.acos": lambda x: lax.acos(lax.tanh(x)),
    "chlo.acosh": lambda x: lax.acosh(lax.abs(x) + 2),
    "chlo.asin": lambda x: lax.asin(lax.tanh(x)),
    "chlo.asinh": lax.asinh,
    "chlo.atan": lax.atan,
    "chlo.atanh": lambda x: lax.atanh(lax.tanh(x)),
    "chlo.bessel_i1e": lax.bessel_i1e,
    "chlo.cosh": lax.cosh,
    "chlo.digamma": lambda x: lax.digamma(lax.abs(x) + 1),
    "chlo.erf": lax.erf,
    "chlo.erf_inv": lambda x: lax.erf_inv(lax.tanh(x)),
    "chlo.erfc": lax.erfc,
    "chlo.lgamma": lambda x: lax.lgamma(lax.abs(x) + 1),
    "chlo.sinh": lax.sinh,
    "chlo.square": lax.square,
    "chlo.tan": lax.tan,
}


@entry(*_UNARY, "stablehlo.tan")
def unary() -> Variants:
    for name, fn in _UNARY.items():
        for shape in ((8, 4), (7, 6)):
            yield name, fn, (draw(*shape),)
        yield f"{name} bfloat16", fn, (draw(8, 3, dtype=jnp.bfloat16),)
    for fn in (lax.exp, lax.sin, lax.tanh, lax.neg, lax.tan):
        yield "complex", fn, (draw(8, 6, dtype=np.complex64),)


@entry("real", "imag", "complex", "reduce_precision", "bitcast_convert", "convert")
def types() -> Variants:
    for shape in ((8, 4), (7, 6)):
        yield (
            "real, imag",
            lambda x: (lax.real(x), lax.imag(x)),
            (draw(*shape, dtype=np.complex64),),
        )
        yield "complex", lax.complex, (draw(*shape), draw(*shape, seed=1))
        yield (
            "reduce_precision",
            lambda x: lax.reduce_precision(x, 5, 10),
            (draw(*shape),),
        )
        for dtype in (
            jnp.bfloat16,
            np.float16,
            np.int32,
            np.int8,
            bool,
            jnp.float8_e4m3fn,
        ):
            yield f"convert {dtype}", lambda x, d=dtype: x.astype(d), (draw(*shape),)
        yield (
            "bitcast same",
            lambda x: lax.bitcast_convert_type(x, np.int32),
            (draw(*shape),),
        )
        yield (
            "bitcast narrow",
            lambda x: lax.bitcast_convert_type(x, np.int16),
            (draw(*shape),),
        )
    yield (
        "bitcast wide",
        lambda x: lax.bitcast_convert_type(x, np.uint32),
        (draw(8, 6, 2, dtype=np.uint16),),
    )


_BINARY: dict[str, Callable[..., Any]] = {
    "stablehlo.add": lax.add,
    "stablehlo.atan2": lax.atan2,
    "stablehlo.divide": lax.div,
    "stablehlo.maximum": lax.max,
    "stablehlo.minimum": lax.min,
    "stablehlo.multiply": lax.mul,
    "stablehlo.power": lambda x, y: lax.pow(lax.abs(x) + 1, y),
    "stablehlo.remainder": lax.rem,
    "stablehlo.subtract": lax.sub,
    "stablehlo.compare": lax.lt,
    "chlo.next_after": lax.nextafter,
    "chlo.polygamma": lambda n, x: lax.polygamma(
        lax.round(lax.abs(n)) + 1, lax.abs(x) + 1
    ),
    "chlo.zeta": lambda x, q: lax.zeta(lax.abs(x) + 2, lax.abs(q) + 1),
}
_BITS: dict[str, Callable[..., Any]] = {
    "stablehlo.and": lax.bitwise_and,
    "stablehlo.or": lax.bitwise_or,
    "stablehlo.xor": lax.bitwise_xor,
    "stablehlo.shift_left": lax.shift_left,
    "stablehlo.shift_right_arithmetic": lax.shift_right_arithmetic,
    "stablehlo.shift_right_logical": lax.shift_right_logical,
}


@entry(*_BINARY, *_BITS, "not", "popcnt", "count_leading_zeros", "clamp", "select")
def binary() -> Variants:
    for shape in ((8, 4), (7, 6)):
        x, y = draw(*shape), draw(*shape, seed=1)
        for name, fn in _BINARY.items():
            yield name, fn, (x, y)
        i, j = draw(*shape, dtype=np.int32), abs(draw(*shape, dtype=np.int32, seed=1))
        for name, fn in _BITS.items():
            yield name, fn, (i, j)
        yield "not", lax.bitwise_not, (i,)
        yield "not of a bool", lax.bitwise_not, (draw(*shape, dtype=bool),)
        yield "popcnt", lax.population_count, (i,)
        yield "clz", lax.clz, (i,)
        yield "clamp", lax.clamp, (x - 1, y, x + 1)
        yield "clamp by scalars", lambda x: lax.clamp(-0.5, x, 0.5), (x,)
        yield "select", lax.select, (draw(*shape, dtype=bool), x, y)
        yield (
            "select by a scalar",
            lambda p, x, y: lax.select(p, x, y),
            (np.array(True), x, y),
        )
    for dtype in (jnp.bfloat16, np.float16, np.int8, np.uint32):
        yield (
            f"add {dtype}",
            lax.add,
            (draw(8, 3, dtype=dtype), draw(8, 3, dtype=dtype)),
        )


@entry("dot_general")
def products() -> Variants:
    dims = (
        ("matrices", (((1,), (0,)), ((), ())), "mk", "kn"),
        ("transposed", (((0,), (1,)), ((), ())), "km", "nk"),
        ("batched", (((2,), (1,)), ((0,), (0,))), "bmk", "bkn"),
        ("batch in the middle", (((2,), (0,)), ((1,), (2,))), "mbk", "knb"),
        ("two batches", (((3,), (3,)), ((0, 1), (1, 0))), "abmk", "bank"),
        ("two contracted", (((1, 2), (2, 0)), ((), ())), "mkl", "lnk"),
        ("outer", (((), ()), ((), ())), "m", "n"),
        ("vector", (((1,), (0,)), ((), ())), "mk", "k"),
        ("inner", (((0,), (0,)), ((), ())), "k", "k"),
    )
    sizes = (
        dict(m=8, n=4, k=16, l=4, a=4, b=8),
        dict(m=7, n=6, k=3, l=11, a=3, b=7),
        dict(m=8, n=7, k=6, l=8, a=2, b=4),
    )
    for (name, numbers, left, right), size in itertools.product(dims, sizes):
        x, y = draw(*(size[c] for c in left)), draw(*(size[c] for c in right), seed=1)
        yield name, partial(lax.dot_general, dimension_numbers=numbers), (x, y)
    matrices = (((1,), (0,)), ((), ()))
    for dtype, into in (
        (jnp.bfloat16, np.float32),
        (jnp.bfloat16, None),
        (np.float16, None),
        (np.int8, np.int32),
        (np.complex64, None),
    ):
        for m, k, n in ((8, 16, 4), (7, 6, 3)):
            yield (
                f"{dtype} into {into}",
                partial(
                    lax.dot_general,
                    dimension_numbers=matrices,
                    preferred_element_type=into,
                ),
                (draw(m, k, dtype=dtype), draw(k, n, dtype=dtype, seed=1)),
            )


@entry("dot_general", "stablehlo.reduce")
def ragged() -> Variants:
    for rows, inner, columns, groups in ((16, 8, 4, 4), (15, 7, 6, 3)):
        sizes = np.full(groups, rows // groups, np.int32)
        yield (
            "ragged_dot",
            lax.ragged_dot,
            (draw(rows, inner), draw(groups, inner, columns), sizes),
        )


@entry("convolution")
def convolutions() -> Variants:
    layouts = (
        ("NHWC", "HWIO", "NHWC"),
        ("NCHW", "OIHW", "NCHW"),
        ("NCHW", "HWIO", "NHWC"),
        ("CHWN", "IHWO", "HWNC"),
    )
    options = (
        {},
        {"window_strides": (2, 1)},
        {"lhs_dilation": (1, 2)},
        {"rhs_dilation": (2, 1)},
        {"padding": "VALID"},
        {"padding": [(2, 0), (0, -1)]},
    )
    groups = (
        ({}, 8, 4, 4, 8),
        ({}, 7, 3, 3, 6),
        ({"feature_group_count": 4}, 4, 8, 2, 8),
        ({"feature_group_count": 8}, 7, 8, 1, 16),
        ({"feature_group_count": 3}, 4, 6, 2, 3),
        ({"batch_group_count": 4}, 8, 4, 4, 8),
        ({"batch_group_count": 8}, 8, 3, 3, 8),
    )
    for index, (group, layout) in enumerate(itertools.product(groups, layouts)):
        count, n, c, i, o = group
        sizes = dict(zip("NCIOHW", (n, c, i, o, 8, 6), strict=True))
        x = draw(*(sizes[d] for d in layout[0]))
        w = draw(*((3 if d in "HW" else sizes[d]) for d in layout[1]), seed=1)
        for option in (
            options[index % len(options)],
            options[(index + 1) % len(options)],
        ):
            chosen = {"window_strides": (1, 1), "padding": "SAME", **option}
            if "lhs_dilation" in option:
                chosen["padding"] = [(1, 1), (1, 1)]
            fn = partial(
                lax.conv_general_dilated, dimension_numbers=layout, **chosen, **count
            )
            yield f"{layout} {count} {option}", fn, (x, w)
    for dtype in (jnp.bfloat16, np.float16):
        fn = partial(
            lax.conv_general_dilated,
            window_strides=(1,),
            padding="SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        yield (
            f"1d {dtype}",
            fn,
            (draw(4, 6, 8, dtype=dtype), draw(3, 8, 4, dtype=dtype)),
        )
    fn = partial(
        lax.conv_general_dilated,
        window_strides=(1, 2, 1),
        padding="SAME",
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )
    yield "3d", fn, (draw(4, 4, 5, 4, 4), draw(2, 2, 2, 4, 8))


@entry("reduce")
def reductions() -> Variants:
    for shape in ((8, 4, 16), (7, 6, 3)):
        for axes in ((0,), (1,), (0, 2), (0, 1, 2)):
            for name, fn in (
                ("sum", jnp.sum),
                ("max", jnp.max),
                ("min", jnp.min),
                ("prod", jnp.prod),
            ):
                yield f"{name} {axes}", partial(fn, axis=axes), (draw(*shape),)
            yield (
                f"any {axes}",
                partial(jnp.any, axis=axes),
                (draw(*shape, dtype=bool),),
            )
            yield (
                f"all {axes}",
                partial(jnp.all, axis=axes),
                (draw(*shape, dtype=bool),),
            )
            yield (
                f"int {axes}",
                partial(jnp.sum, axis=axes),
                (draw(*shape, dtype=np.int32),),
            )
        yield "argmax", partial(jnp.argmax, axis=1), (draw(*shape),)
        yield "argmin, first dim", partial(jnp.argmin, axis=0), (draw(*shape),)
        for how in (lax.bitwise_xor, lax.bitwise_and, lax.bitwise_or):
            yield (
                "bits",
                lambda x, h=how: lax.reduce(x, np.int32(0), h, (1,)),
                (draw(*shape, dtype=np.int32),),
            )
        yield (
            "two at once",
            lambda x, y: lax.reduce(
                (x, y),
                (np.float32(0), np.float32(0)),
                lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])),
                (0,),
            ),
            (draw(*shape), draw(*shape, seed=1)),
        )
    for dtype in (jnp.bfloat16, np.float16):
        yield (
            f"sum {dtype}",
            lambda x: lax.reduce(x, x.dtype.type(0), lax.add, (1,)),
            (draw(8, 8, dtype=dtype),),
        )


@entry(
    "transpose",
    "reshape",
    "broadcast_in_dim",
    "reverse",
    "concatenate",
    "pad",
    "slice",
    "iota",
)
def movements() -> Variants:
    for shape in ((8, 4, 16), (7, 6, 3)):
        x = draw(*shape)
        a, b, c = shape
        for order in itertools.permutations(range(3)):
            yield f"transpose {order}", partial(lax.transpose, permutation=order), (x,)
        for new in (
            (a * b, c),
            (a, b * c),
            (a * b * c,),
            (1, a, b, 1, c),
            (a, b // 2, 2, c),
            (b, a, c),
            (c, b, a),
            (2 * a, b // 2, c),
        ):
            yield f"reshape {new}", partial(lax.reshape, new_sizes=new), (x,)
        yield (
            "split a merged dim",
            lambda x: x.reshape(x.shape[0] // 4 if x.shape[0] % 4 == 0 else 3, -1),
            (draw(a * b),),
        )
        yield (
            "broadcast",
            partial(
                lax.broadcast_in_dim,
                shape=(5, a, b, 2, c),
                broadcast_dimensions=(1, 2, 4),
            ),
            (x,),
        )
        yield (
            "broadcast of ones",
            partial(lax.broadcast_in_dim, shape=(a, b), broadcast_dimensions=(0, 1)),
            (draw(a, 1),),
        )
        yield "iota", lambda x: x + lax.broadcasted_iota(np.float32, x.shape, 1), (x,)
        for dims in ((0,), (1, 2)):
            yield f"reverse {dims}", partial(lax.rev, dimensions=dims), (x,)
        for dim in range(3):
            yield (
                f"concatenate {dim}",
                lambda x, y, d=dim: lax.concatenate([x, y, x], d),
                (x, draw(*shape, seed=1)),
            )
        for config in (
            [(1, 2, 0), (0, 0, 0), (0, 0, 0)],
            [(0, 0, 0), (1, 0, 1), (0, 3, 0)],
            [(-1, 0, 0), (0, -1, 0), (0, 0, 0)],
            [(0, 1, 0)] * 3,
        ):
            yield (
                f"pad {config}",
                lambda x, c=config: lax.pad(x, np.float32(2), c),
                (x,),
            )
        for start, stop, step in (
            ((0, 0, 0), (a, 2, c), (1, 1, 1)),
            ((1, 0, 0), (a, b, c), (1, 1, 2)),
            ((2, 1, 0), (4, 3, c), (1, 1, 1)),
            ((0, 0, 0), (4, b, c), (1, 2, 1)),
            ((1, 0, 0), (a, b, c), (a - 1, 1, 1)),
        ):
            yield (
                f"slice {start} {stop} {step}",
                lambda x, s=start, e=stop, t=step: lax.slice(x, s, e, t),
                (x,),
            )


@entry("dynamic_slice", "dynamic_update_slice")
def places_at_run_time() -> Variants:
    for shape in ((8, 4, 16), (7, 6, 3)):
        x = draw(*shape)
        a, b, c = shape
        for size in ((1, b, c), (a, 1, 1), (a, 2, c), (2, b, 1), (a, b, c), (3, 3, c)):
            for start in ((0, 0, 0), (3, 1, 0), (-1, 9, 1), (99, -99, 0)):
                indices = tuple(np.int32(s) for s in start)
                yield (
                    f"read {size}",
                    lambda x, *i, s=size: lax.dynamic_slice(x, i, s),
                    (x, *indices),
                )
                yield (
                    f"write {size}",
                    lambda x, u, *i: lax.dynamic_update_slice(x, u, i),
                    (x, draw(*size, seed=1), *indices),
                )


_MODES = ("clip", "fill", "promise_in_bounds", "wrap")


def _take(x: Any, places: Any, mode: str) -> Any:
    if mode == "promise_in_bounds":  # jax.numpy.take has it no more from jax 0.12 on.
        return x.at[places].get(mode=mode)
    return jnp.take(x, places, axis=0, mode=mode)


@entry("gather")
def gathers() -> Variants:
    for rows, width, count in ((8, 4, 16), (7, 6, 3), (16, 8, 6)):
        x = draw(rows, width)
        for mode in _MODES:
            inside = (
                np.abs(places(count, below=rows)) % rows
                if mode == "promise_in_bounds"
                else places(count, below=rows)
            )
            yield (
                f"rows {mode}",
                partial(_take, mode=mode),
                (x, inside),
            )
        yield (
            "columns",
            lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
            (x, places(count, below=width)),
        )
        yield (
            "two dims of indices",
            lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
            (x, places(4, count, below=rows)),
        )
        yield (
            "one place",
            lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
            (x, np.int32(rows - 1)),
        )
        yield (
            "pairs",
            lambda x, i, j: x[i, j],
            (x, places(count, below=rows), places(count, below=width, seed=2)),
        )
        yield (
            "along",
            lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="clip"),
            (x, places(rows, count, below=width)),
        )
        yield (
            "along the first",
            lambda x, i: jnp.take_along_axis(x, i, axis=0, mode="clip"),
            (x, places(count, width, below=rows)),
        )
        yield (
            "batched",
            jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip")),
            (draw(4, rows, width), places(4, count, below=rows)),
        )
        windows = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
        yield (
            "windows",
            lambda x, i, n=windows: lax.gather(x, i, n, (2, 3), mode="clip"),
            (x, places(count, 2, below=rows)),
        )
    for dtype in (jnp.bfloat16, np.int32):
        yield (
            f"rows {dtype}",
            lambda x, i: x.at[i].get(mode="fill", fill_value=0),
            (draw(8, 4, dtype=dtype), places(6, below=8)),
        )
    ascending = np.arange(8, dtype=np.int32)
    yield (
        "sorted, unique",
        lambda x, i: x.at[i].get(indices_are_sorted=True, unique_indices=True),
        (draw(8, 4), ascending),
    )


@entry("scatter")
def scatters() -> Variants:
    for rows, width, count in ((8, 4, 16), (7, 6, 3), (16, 8, 6)):
        x, updates = draw(rows, width), draw(count, width, seed=1)
        for mode in ("clip", "drop"):
            for how in ("add", "max", "min", "mul"):
                yield (
                    f"{how} {mode}",
                    lambda x, i, u, h=how, m=mode: getattr(x.at[i], h)(u, mode=m),
                    (x, places(count, below=rows), updates),
                )
        unique = (
            np.random.default_rng(0)
            .permutation(rows)[: min(rows, count)]
            .astype(np.int32)
        )
        yield (
            "set",
            lambda x, i, u: x.at[i].set(u, unique_indices=True),
            (x, unique, draw(len(unique), width)),
        )
        yield (
            "one place",
            lambda x, i, u: x.at[i].set(u),
            (x, np.int32(rows - 1), draw(width)),
        )
        yield (
            "one place outside",
            lambda x, i, u: x.at[i].add(u),
            (x, np.int32(rows + 3), draw(width)),
        )
        yield (
            "columns",
            lambda x, i, u: x.at[:, i].add(u, mode="drop"),
            (x, places(count, below=width), draw(rows, count)),
        )
        yield (
            "pairs",
            lambda x, i, j, u: x.at[i, j].add(u),
            (
                x,
                places(count, below=rows),
                places(count, below=width, seed=2),
                draw(count),
            ),
        )
        yield (
            "batched",
            jax.vmap(lambda x, i, u: x.at[i].add(u)),
            (draw(4, rows, width), places(4, count, below=rows), draw(4, count, width)),
        )
        yield (
            "one number for all",
            lambda x, i: x.at[i].add(1.0),
            (x, places(count, below=rows)),
        )
        yield (
            "a cache's row, of one sequence",
            jax.vmap(lambda x, i, u: lax.dynamic_update_slice(x, u, (i, np.int32(0)))),
            (draw(1, rows, width), places(1, below=rows), draw(1, 1, width)),
        )
        yield (
            "a cache's row",
            jax.vmap(lambda x, i, u: lax.dynamic_update_slice(x, u, (i, np.int32(0)))),
            (draw(4, rows, width), places(4, below=rows), draw(4, 1, width)),
        )
        numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
        yield (
            "windows",
            lambda x, i, u, n=numbers: lax.scatter_add(x, i, u, n, mode="drop"),
            (x, places(count, 2, below=rows), draw(count, 2, 3)),
        )
    yield (
        "ints",
        lambda x, i, u: x.at[i].add(u),
        (draw(8, 4, dtype=np.int32), places(6, below=8), draw(6, 4, dtype=np.int32)),
    )
    yield (
        "bfloat16",
        lambda x, i, u: x.at[i].add(u),
        (
            draw(8, 4, dtype=jnp.bfloat16),
            places(6, below=8),
            draw(6, 4, dtype=jnp.bfloat16),
        ),
    )


@entry("sort", "chlo.top_k")
def orders() -> Variants:
    for shape in ((8, 4, 16), (7, 6, 3)):
        x = draw(*shape)
        for dim in range(3):
            yield f"sort {dim}", partial(lax.sort, dimension=dim), (x,)
            yield f"argsort {dim}", partial(jnp.argsort, axis=dim), (x,)
        yield (
            "two keys",
            lambda x, y: lax.sort((x, y), dimension=1, num_keys=2),
            (draw(*shape, dtype=np.int32), draw(*shape, dtype=np.int32, seed=1)),
        )
        yield "descending", partial(jnp.sort, descending=True), (x,)
        yield "top_k", lambda x: lax.top_k(x, 2), (x,)
        yield "top_k of one dim", lambda x: lax.top_k(x, 3), (draw(shape[2]),)


@entry("reduce_window", "select_and_scatter")
def windows() -> Variants:
    for shape in ((8, 8, 6, 4), (7, 8, 6, 3)):
        x = draw(*shape)
        for window, strides in (
            ((1, 2, 2, 1), (1, 2, 2, 1)),
            ((1, 3, 3, 1), (1, 1, 2, 1)),
            ((1, 2, 1, 1), (1, 1, 1, 1)),
        ):
            for padding in ("VALID", "SAME"):
                yield (
                    f"max {window}",
                    lambda x, w=window, s=strides, p=padding: lax.reduce_window(
                        x, -np.inf, lax.max, w, s, p
                    ),
                    (x,),
                )
                yield (
                    f"sum {window}",
                    lambda x, w=window, s=strides, p=padding: lax.reduce_window(
                        x, 0.0, lax.add, w, s, p
                    ),
                    (x,),
                )
        for dim in range(4):
            yield f"cumsum {dim}", partial(lax.cumsum, axis=dim), (x,)
        yield "cumsum, reverse", partial(lax.cumsum, axis=1, reverse=True), (x,)
        yield "cummax", partial(lax.cummax, axis=0), (x,)
        yield "cumlogsumexp", partial(lax.cumlogsumexp, axis=1), (x,)
        yield (
            "dilated",
            lambda x: lax.reduce_window(
                x,
                0.0,
                lax.add,
                (1, 2, 2, 1),
                (1, 1, 1, 1),
                "VALID",
                base_dilation=(1, 2, 1, 1),
                window_dilation=(1, 1, 2, 1),
            ),
            (x,),
        )


@entry("fft", "cholesky", "triangular_solve", "custom_call")
def algebra() -> Variants:
    for batch, size in ((8, 4), (7, 6)):
        x = draw(batch, size, size)
        for name in ("fft", "ifft"):
            yield name, getattr(jnp.fft, name), (draw(batch, size, dtype=np.complex64),)
        yield "fft of rows", jnp.fft.fft, (draw(batch, 3, size, dtype=np.complex64),)
        yield "rfft", jnp.fft.rfft, (draw(batch, size),)
        yield "irfft", jnp.fft.irfft, (draw(batch, size, dtype=np.complex64),)
        yield "fft2", jnp.fft.fft2, (draw(batch, 3, size, size, dtype=np.complex64),)
        spd = jnp.asarray(
            np.asarray(x) @ np.swapaxes(x, 1, 2) + 4 * np.eye(size, dtype=np.float32)
        )
        yield "cholesky", lambda x: lax.linalg.cholesky(x), (spd,)
        for left, lower, transposed in itertools.product((True, False), repeat=3):
            fn = partial(
                lax.linalg.triangular_solve,
                left_side=left,
                lower=lower,
                transpose_a=transposed,
            )
            yield (
                f"triangular_solve {left} {lower} {transposed}",
                fn,
                (
                    x + 4 * np.eye(size, dtype=np.float32),
                    draw(batch, size, size, seed=1),
                ),
            )
        yield "qr", lambda x: jnp.linalg.qr(x), (x,)
        yield "eigh", lambda x: jnp.linalg.eigvalsh(x), (spd,)
        yield "lu", lambda x: lax.linalg.lu(x)[0], (spd,)


@entry("optimization_barrier", "rng_bit_generator", backward=False)
def others() -> Variants:
    for shape in ((8, 4), (7, 6)):
        yield (
            "barrier",
            lambda x, y: lax.optimization_barrier((x, y)),
            (draw(*shape), draw(shape[0], seed=1)),
        )
        yield (
            "bits",
            lambda k, s=shape: lax.rng_bit_generator(k, s),
            (np.arange(4, dtype=np.uint32),),
        )


_NOT_LOWERED = "JAX lowers nothing to it"
_REGION = "its region is planned op by op"
_MANUAL = "stands in what a user sharded by hand"
_NO_DATA = "carries no data that could be split"
# Ops of entries that a release of jaxlib may not have in programs for CPUs, or without
# a rule.
ABSENT: dict[str, str] = {
    "fft": "jaxlib before 0.12 does not shard it",
    "rng_bit_generator": "each device makes all bits",
    **dict.fromkeys(("logistic", "asin", "lgamma"), "JAX lowers it to other ops"),
    **dict.fromkeys(
        ("cholesky", "triangular_solve"), "on CPUs JAX calls LAPACK instead of it"
    ),
    "top_k": "Shardy has no rule for it, so it stays whole",
    "iota": "it has no operands that could be sharded",
}
# Ops without an entry, with the reason.
WITHOUT: dict[str, str] = {
    **dict.fromkeys(("stablehlo.case", "stablehlo.if", "stablehlo.while"), _REGION),
    **dict.fromkeys(
        (
            f"stablehlo.{name}"
            for name in "all_gather all_reduce all_to_all collective_broadcast "
            "collective_permute collective_reduce reduce_scatter partition_id "
            "replica_id cross-replica-sum".split()
        ),
        _MANUAL,
    ),
    **dict.fromkeys(
        (
            f"stablehlo.{name}"
            for name in "after_all create_token constant return tuple "
            "get_tuple_element infeed outfeed send recv async_start async_done "
            "composite".split()
        ),
        _NO_DATA,
    ),
    **dict.fromkeys(
        (
            f"stablehlo.{name}"
            for name in "batch_norm_grad batch_norm_inference batch_norm_training "
            "broadcast dot einsum unary_einsum map torch_index_select rng "
            "dynamic_broadcast_in_dim dynamic_conv dynamic_gather dynamic_iota "
            "dynamic_pad dynamic_reshape real_dynamic_slice get_dimension_size "
            "set_dimension_size uniform_quantize uniform_dequantize".split()
        ),
        _NOT_LOWERED,
    ),
    **dict.fromkeys(
        (
            f"chlo.{name}"
            for name in "_asin_acos_kernel conj constant constant_like is_inf "
            "is_neg_inf is_pos_inf mulhi ragged_dot scan broadcast_add broadcast_and "
            "broadcast_atan2 broadcast_compare broadcast_complex broadcast_divide "
            "broadcast_maximum broadcast_minimum broadcast_multiply "
            "broadcast_next_after broadcast_or broadcast_polygamma broadcast_power "
            "broadcast_remainder broadcast_select broadcast_shift_left "
            "broadcast_shift_right_arithmetic broadcast_shift_right_logical "
            "broadcast_subtract broadcast_xor broadcast_zeta".split()
        ),
        _NOT_LOWERED,
    ),
}
