"""Plans an example as its user would, runs it twice, and checks every result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.presets import presets
from cfp.analysis.strategies import NONE
from cfp.api import run_passes
from cfp.checking.check import ROUNDING_MARGIN, nudge
from cfp.context import DetailedSettings
from cfp.passes import PlanOptions, analyze_step
from cfp.plan.parts import Detail, roles_text
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import MeshSizes, make_mesh

STEPS = 2
# One strategy of each kind of segment is measured beside the presets; no race.
QUICK = DetailedSettings(per_kind=1, in_context=False, race=False)
RACED = DetailedSettings(per_kind=1, in_context=False)


@dataclass(frozen=True)
class Sharded:
    """Parts that a plan shards, with their sizes.

    Attributes:
        arguments: argument leaves that some axis shards.
        blocks: blocks with work that some axis shards.
        words: how blocks are sharded, each way once, with how many blocks are.
    """

    arguments: int
    all_arguments: int
    blocks: int
    all_blocks: int
    words: tuple[str, ...]

    @property
    def anything(self) -> bool:
        """True if the devices do not all hold and compute the same."""
        return bool(self.arguments or self.blocks)

    @classmethod
    def of(cls, plan: cfp.Plan) -> Sharded:
        """Lists the parts that a plan shards."""
        ways = Counter(roles_text(row.strategy, Detail.ROLES) for row in plan.rows)
        whole = ways.pop("replicated", 0)
        return cls(
            arguments=sum(any(spec) for spec in plan.arg_specs),
            all_arguments=len(plan.arg_specs),
            blocks=len(plan.rows) - whole,
            all_blocks=len(plan.rows),
            words=tuple(f"{count} × {way}" for way, count in ways.most_common()),
        )


@dataclass(frozen=True)
class Checked:
    """Outcome of a program on a mesh.

    Attributes:
        winner: what the plan is called.
        sharded: what it shards.
        worst: the leaf that is furthest from one device's, with its step.
        relative_l2: how far that is.
        failed: leaves, with their step, further off than they may be.
        seconds: of planning, compiling and running.
    """

    name: str
    mesh: str
    winner: str
    sharded: Sharded
    worst: str
    relative_l2: float
    failed: Mapping[str, float]
    seconds: float


def check_program(
    name: str,
    make: Callable[[], Any],
    sizes: MeshSizes,
    cache: Path,
    settings: cfp.PlannerSettings = QUICK,
    sharding: bool = False,
) -> Checked:
    """Plans a program, runs it twice, and compares with one device.

    What has an argument's structure takes its place in the second step. A leaf may be
    off by 1e-5, or what the program says, or by what rounding explains: see
    ``cfp.checking.trial``.

    Args:
        name, make: the program.
        sizes: of the mesh's axes.
        cache: where measurements are kept.
        settings: of the planner.
        sharding: in place of what is planned take the preset that shards most. The
            examples are so small that to send anything often takes longer than to
            compute it everywhere.

    Raises:
        CfpError: it cannot be planned or run.
    """
    started = time.perf_counter()
    fn, args, *rest = make()
    options = dict(rest[0]) if rest else {}
    tolerance = options.pop("tolerance", 1e-5)
    kwargs = options.pop("kwargs", {})
    static = options.get("static_argnums", ())
    step, mesh = flatten_step(fn, args, kwargs, **options), make_mesh(sizes)
    preset = _sharding_most(step, mesh) if sharding else None
    how = PlanOptions(preset=preset, cache_dir=cache, settings=settings)
    plan = run_passes(analyze_step(step, mesh), how).plan
    planned, alone = plan.apply(fn), jax.jit(fn, static_argnums=static)
    state = _copy(args, static)
    expected_state = _copy(args, static)
    nudged_state = [
        arg if i in static else jax.tree.map(nudge, arg)
        for i, arg in enumerate(expected_state)
    ]
    distances, failed = {}, {}
    for number in range(STEPS):
        expected = alone(*expected_state, **kwargs)
        nudged = alone(*nudged_state, **kwargs)
        found = planned(*state, **kwargs)
        rounding = _distances(nudged, expected)
        for leaf, distance in _distances(found, expected).items():
            distances[f"{number}: {leaf}"] = distance
            if not distance <= max(tolerance, ROUNDING_MARGIN * rounding[leaf]):
                failed[f"{number}: {leaf}"] = distance
        state = _successors(args, found)
        expected_state = _successors(args, expected)
        nudged_state = _successors(nudged_state, nudged)
    worst = max(distances, key=distances.__getitem__, default="")
    return Checked(
        name=name,
        mesh=",".join(f"{axis}={size}" for axis, size in sizes),
        winner=plan.winner,
        sharded=Sharded.of(plan),
        worst=worst,
        relative_l2=distances.get(worst, 0.0),
        failed=failed,
        seconds=time.perf_counter() - started,
    )


def _sharding_most(step: FlatStep, mesh: Mesh) -> str:
    """The name of the preset that shards the most blocks over the most axes."""
    program, _ = trace(step, mesh)
    found = presets(analyze(program, tuple(mesh.shape.items())).frame)
    return max(found, key=lambda name: _shards(found[name]))


def _shards(choice: Choice) -> tuple[int, int]:
    """In how many places a choice shards work, and parameters."""
    work = sum(
        axis.inner != NONE or axis.exit != NONE
        for strategy in choice.blocks
        for axis in strategy
    )
    return work, sum(mode is Storage.SHARDED for mode in choice.storage)


def _copy(args: Sequence[Any], static: int | Sequence[int] = ()) -> list[Any]:
    """Arrays of their own, for what is donated is gone."""
    kept = (static,) if isinstance(static, int) else static
    return [a if i in kept else jax.tree.map(_fresh, a) for i, a in enumerate(args)]


def _fresh(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _successors(args: Sequence[Any], result: Any) -> list[Any]:
    """The next step's arguments: what came back in their structure, or they again."""
    parts = list(result) if isinstance(result, tuple | list) else []
    parts.append(result)
    types = [_types(part) for part in parts]
    following = []
    for arg in args:
        wanted = _types(arg)
        # A lone array of the same shape need not be the same thing.
        fits = len(wanted[1]) > 1 and wanted in types
        following.append(parts[types.index(wanted)] if fits else _copy([arg])[0])
    return following


def _types(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(x), getattr(x, "dtype", None)) for x in leaves]


def _distances(found: Any, expected: Any) -> dict[str, float]:
    return {d.path: d.relative_l2 for d in cfp.compare(found, expected)}
