"""Compiles a program with a choice of shardings and compares it with one device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.analysis.analyze import build_frame
from cfp.analysis.layout import Choice, Frame, Layout, Storage, constraints, lay_out
from cfp.analysis.strategies import block_strategies
from cfp.checking.check import ROUNDING_MARGIN, nudge
from cfp.program.constrain import Constraints, constrain, partition_spec
from cfp.program.graph import Spec
from cfp.program.part import Part, aval, lower_part
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import lower_step, planning_mesh, trace

MeshSizes = tuple[tuple[str, int], ...]

# An output whose numbers all cancel to zero holds nothing but rounding errors; below
# this root mean square, differences count as none.
NOISE = 3e-7
# Nudges of the arguments by which a result's rounding is measured.
_DRAWS = 4


@dataclass(frozen=True)
class Case:
    """A program on a mesh."""

    name: str
    step: FlatStep
    mesh: Mesh
    frame: Frame
    leaves: tuple[Any, ...]
    tolerance: float

    @cached_property
    def alone(self) -> Callable[..., Any]:
        return jax.jit(self.step.flat_fn)

    @cached_property
    def expected(self) -> tuple[np.ndarray, ...]:
        """The results on one device; what only reads a program compiles nothing."""
        return tuple(map(to_host, jax.tree.leaves(self.alone(*self.leaves))))

    @cached_property
    def rounding(self) -> tuple[float, ...]:
        """The distance of each result if arguments change in their last bits.

        It is the largest of several draws: one changes some results hardly. It is 0
        for results that compare as a whole, such as integers.
        """
        draws = [[*self._nudged(seed)] for seed in range(_DRAWS)]
        return tuple(map(max, zip(*draws, strict=True)))

    def _nudged(self, seed: int) -> Iterator[float]:
        leaves = [
            nudge(x, seed) if isinstance(x, jax.Array) else x for x in self.leaves
        ]
        found = map(to_host, jax.tree.leaves(self.alone(*leaves)))
        for off in map(difference, found, self.expected):
            yield off if math.isfinite(off) else 0.0


def make_mesh(sizes: MeshSizes) -> Mesh:
    """A planning mesh over the first devices."""
    names = tuple(name for name, _ in sizes)
    shape = tuple(size for _, size in sizes)
    count = int(np.prod(shape))
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[:count])
    return planning_mesh(mesh)


def prepare(name: str, make: Callable[[], Any], sizes: MeshSizes) -> Case:
    """Traces and analyses an example."""
    fn, args, *rest = make()
    options = dict(rest[0]) if rest else {}
    tolerance = options.pop("tolerance", 1e-5)
    kwargs = options.pop("kwargs", {})
    step = flatten_step(fn, args, kwargs, **options)
    mesh = make_mesh(sizes)
    program, _ = trace(step, mesh)
    leaves = tuple(step.flatten(args, kwargs))
    frame = build_frame(program, tuple(mesh.shape.items()))
    return Case(name, step, mesh, frame, leaves, tolerance)


def draw(frame: Frame, seed: int) -> Choice:
    """A random strategy for every block and storage mode for every group."""
    rng = random.Random(seed)
    blocks = tuple(
        rng.choice(block_strategies(frame.program, block, frame.mesh))
        for block in frame.blocks
    )
    storage = tuple(rng.choice(list(Storage)) for _ in frame.groups)
    return Choice(blocks, storage)


def shardings(case: Case, layout: Layout) -> tuple[list[Any], list[Any]]:
    """The shardings of the arguments and of the outputs."""
    ins = [
        NamedSharding(case.mesh, partition_spec(layout.arg_spec(i), len(aval.shape)))
        for i, aval in enumerate(case.step.avals)
    ]
    outs = [
        NamedSharding(case.mesh, partition_spec(spec, np.ndim(value)))
        for spec, value in zip(layout.output_specs(), case.expected, strict=True)
    ]
    return ins, outs


def compile_choice(case: Case, choice: Choice) -> Callable[[], list[Any]]:
    """Compiles a case; what comes back runs it on fresh copies of the arguments."""
    layout = lay_out(case.frame, choice)
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrain(lowering.module, case.frame.program, case.mesh, constraints(layout))
    compiled = lowering.lowered.compile()

    def run() -> list[Any]:
        arrays = [jnp.copy(x) for x in case.leaves]  # what is donated is gone
        placed = [jax.device_put(x, s) for x, s in zip(arrays, ins, strict=True)]
        return jax.tree.leaves(compiled(*placed))

    run.compiled = compiled
    return run


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_host(x: Any) -> np.ndarray:
    """An array as NumPy has it, wide enough to be compared."""
    if is_key(x):
        # Its trailing dims are JAX's own: a view keeps the rank that users see.
        data = np.asarray(jax.random.key_data(x))
        return np.ascontiguousarray(data).view([("key", data.dtype, data.shape[-1:])])[
            ..., 0
        ]
    found = np.asarray(x)
    if found.dtype.kind == "V" or found.dtype == np.float16:  # bfloat16, float8
        return found.astype(np.float32)
    return found


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance; infinite where shapes, integers or NaNs differ."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return np.inf
    if got.dtype.kind not in "fc":
        return 0.0 if np.array_equal(got, expected) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return np.inf
    distance = np.linalg.norm(got[finite] - expected[finite])
    if not distance > NOISE * np.sqrt(got.size):
        return 0.0 if np.isfinite(distance) else np.inf
    return float(distance / (np.linalg.norm(expected[finite]) + 1e-30))


def differences(case: Case, outputs: list[Any]) -> dict[str, float]:
    """The outputs that are further off than the case and its rounding allow."""
    names = case.frame.program.output_names
    found = zip(names, map(to_host, outputs), case.expected, strict=True)
    off = {name: difference(got, expected) for name, got, expected in found}
    far = [name for name in names if not off[name] <= case.tolerance]
    rounding = dict(zip(names, case.rounding, strict=True)) if far else {}
    return {n: off[n] for n in far if not off[n] <= ROUNDING_MARGIN * rounding[n]}


def evaluate(case: Case, values: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Returns a program's inner values, by running all of it as one unsharded part."""
    program = case.frame.program
    top = tuple(op.id for op in program.ops if op.parent < 0)
    part = Part(top, tuple(program.args), values)
    ins, outs = (
        [((),) * len(program.values[v].shape) for v in some]
        for some in (program.args, values)
    )
    nothing = Constraints({}, {})
    lowered = lower_part(program, part, case.mesh, nothing, ins, outs)
    raw = [jax.random.key_data(x) if is_key(x) else x for x in case.leaves]
    avals = [aval(program, v) for v in program.args]
    everywhere = NamedSharding(case.mesh, PartitionSpec())
    arrays = [
        jax.device_put(jnp.asarray(x, a.dtype), everywhere)
        for x, a in zip(raw, avals, strict=True)
    ]
    outputs = lowered.compile()(*arrays)
    return dict(zip(values, map(np.asarray, outputs), strict=True))


def place(
    case: Case, layout: Layout, values: Sequence[int], arrays: Sequence[Any]
) -> list[jax.Array]:
    """Puts arrays where a layout has the values that they are."""
    return [
        jax.device_put(x, NamedSharding(case.mesh, partition_spec(spec_of(layout, v))))
        for v, x in zip(values, arrays, strict=True)
    ]


def spec_of(layout: Layout, value: int) -> Spec:
    """The sharding of a value, replicated where the compiler may decide.

    Arrays cannot be sharded unevenly, as values inside of a program are: neither are
    those of a part that is run alone.
    """
    shape, sizes = layout.frame.program.shape(value), dict(layout.frame.mesh)
    spec = layout.spec(value) or ((),) * len(shape)
    return tuple(
        axes if size % math.prod(sizes[axis] for axis in axes) == 0 else ()
        for size, axes in zip(shape, spec, strict=True)
    )


def run_part(
    case: Case,
    layout: Layout,
    part: Part,
    known: Mapping[int, np.ndarray],
    constrained: Constraints | None = None,
) -> list[np.ndarray]:
    """Compiles a part by itself and runs it on what the whole program computed."""
    lowered = lower_part(
        case.frame.program,
        part,
        case.mesh,
        constrained or constraints(layout),
        [spec_of(layout, v) for v in part.inputs],
        [spec_of(layout, v) for v in part.outputs],
    )
    inputs = place(case, layout, part.inputs, [known[v] for v in part.inputs])
    return [np.asarray(x) for x in lowered.compile()(*inputs)]
