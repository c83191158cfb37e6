"""A small training step, and jobs that measure it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Job
from cfp.profiling.jobs import run_jobs
from cfp.profiling.record import ProfileKey
from cfp.profiling.runner import ON_CPUS, TimingOptions, place_of_parts
from cfp.profiling.store import ProfileStore
from cfp.program.constrain import Constraints
from cfp.program.graph import Program, Spec
from cfp.program.part import Part, cut_part
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace


@pytest.fixture(scope="module", autouse=True)
def steady_times():
    """Nothing: what measures is what is tested here, and each test says how."""


QUICK = replace(
    ON_CPUS,
    warmup_seconds=0.0,
    min_samples=2,
    max_samples=2,
    budget_seconds=0.05,
    min_sample_ms=0.01,
)


def train_step(state, x):
    """Two layers, momentum, and a count."""

    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, state["speed"], gradients)
    weights = jax.tree.map(lambda w, s: w - 0.1 * s, state["weights"], speed)
    return {"weights": weights, "speed": speed, "count": state["count"] + 1}, loss


@dataclass(frozen=True)
class Case:
    """A program, and its whole as a part."""

    program: Program
    mesh: Mesh
    part: Part

    def job(self, name: str = "whole", *, shard_batch: bool = True, **changes) -> Job:
        """A job that measures all of the program; equal names give equal keys."""
        program, part = self.program, self.part
        is_batch = {program.args[program.arg_names.index("x")]}

        def spec(value: int) -> Spec:
            shape = program.values[value].shape
            if value in is_batch and shard_batch:
                return (("x",), *((),) * (len(shape) - 1))
            return ((),) * len(shape)

        outputs = {value: place for place, value in enumerate(part.outputs)}
        feedback = tuple(
            (place, outputs[program.outputs[output]])
            for place, value in enumerate(part.inputs)
            if (output := program.alias[program.args.index(value)]) is not None
        )
        parts = (("test", name), ("mesh", "x=4"))
        fields = {
            "key": ProfileKey(parts),
            "label": name,
            "part": part,
            "constraints": Constraints({}, {}),
            "in_specs": tuple(spec(value) for value in part.inputs),
            "out_specs": tuple(spec(value) for value in part.outputs),
            "feedback": feedback,
        }
        return Job(**{**fields, **changes})


def profile(case: Case, jobs: list[Job], store: ProfileStore) -> Mapping[str, Any]:
    """Measures jobs that the store does not know; returns records by key."""
    where = case.program, case.mesh, BuildEnvironment()
    return run_jobs(place_of_parts(*where, timing=QUICK), jobs, store)


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    devices = jax.devices()[:4]
    return planning_mesh(jax.make_mesh((4,), ("x",), devices=devices))


@pytest.fixture(scope="session")
def case(mesh) -> Case:
    weights = {
        "up": jax.ShapeDtypeStruct((8, 16), jnp.float32),
        "down": jax.ShapeDtypeStruct((16, 8), jnp.float32),
    }
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = {"weights": weights, "speed": weights, "count": count}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = flatten_step(train_step, (state, x), donate_argnums=(0,))
    program, _ = trace(step, mesh)
    top = [op.id for op in program.ops if op.parent < 0]
    return Case(program, mesh, cut_part(program, top))


@pytest.fixture
def store(tmp_path: Path):
    with ProfileStore(tmp_path / "profiles.sqlite") as opened:
        yield opened


@pytest.fixture(scope="session")
def quick() -> TimingOptions:
    """As few samples as tell that something was timed."""
    return QUICK


@pytest.fixture
def live_arrays() -> Callable[[], int]:
    """Counts arrays on the devices that were not there when the test began."""
    before = {id(array) for array in jax.live_arrays()}
    return lambda: sum(id(array) not in before for array in jax.live_arrays())
