"""Trains a target under a plan, with the program that the race compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.errors import PlanMismatch
from cfp.plan.plan import Plan
from cfp.profiling.builder import Built, Job
from cfp.profiling.key import ProfileKey
from cfp.program.graph import Program
from cfp.program.signature import whole
from cfp.program.step import FlatStep
from cfp.runtime.execute import resolved
from cfp.targets import Target


def training_job(program: Program, plan: Plan, mesh: Mesh) -> Job:
    """A plan's whole program as the race ran it: what is donated goes back in.

    Raises:
        PlanMismatch: the plan is for another program.
    """
    if program.fingerprint != plan.fingerprint:
        raise PlanMismatch("The plan is for another program. Plan again.")
    part = whole(program)
    position = {v: i for i, v in enumerate(program.args)}
    specs = dict(zip(program.outputs, plan.output_specs, strict=True))
    place = {v: i for i, v in enumerate(part.outputs)}
    feedback = []
    for put, v in enumerate(part.inputs):
        output = program.alias[position[v]]
        made = None if output is None else place.get(program.outputs[output])
        if made is not None and made not in {got for _, got in feedback}:
            feedback.append((put, made))
            specs[part.outputs[made]] = plan.arg_specs[position[v]]
    return Job(
        key=ProfileKey((("what", "whole program, trained"),)),
        label=plan.winner,
        part=part,
        constraints=resolved(program, mesh, plan.constraints),
        in_specs=tuple(plan.arg_specs[position[v]] for v in part.inputs),
        out_specs=tuple(specs[v] for v in part.outputs),
        feedback=tuple(feedback),
        options=tuple(sorted(plan.options.items())),
    )


class Training:
    """A target's arguments under a plan, and the program that takes them.

    Args:
        target: what is trained.
        step: its step.
        program: the step's program.
        plan: on its mesh, and bound to the step.
        job, built: of the plan.
    """

    def __init__(
        self,
        target: Target,
        step: FlatStep,
        program: Program,
        plan: Plan,
        job: Job,
        built: Built,
    ) -> None:
        self._built, self._feedback = built, job.feedback
        position = {v: i for i, v in enumerate(program.args)}
        self._inputs = [position[v] for v in job.part.inputs]
        self._plan, self._target, self._step = plan, target, step
        fed = {self._inputs[put] for put, _ in job.feedback}
        # An argument is state or data as a whole.
        self.data: list[int] = []
        start = 0
        for tree in plan.in_shardings:
            leaves = range(start, start + len(jax.tree.leaves(tree)))
            start = leaves.stop
            if fed.isdisjoint(leaves):
                self.data += leaves
        self._loss = next(
            (
                job.part.outputs.index(v)
                for v, name in zip(program.outputs, program.output_names, strict=True)
                if "loss" in name.lower() and program.values[v].shape == ()
            ),
            None,
        )
        shardings = jax.tree.leaves(plan.in_shardings)
        self._fresh = jax.jit(
            self._make_data, out_shardings=[shardings[i] for i in self.data]
        )
        self.losses: list[jax.Array] = []

    def start(self, seed: int = 0) -> None:
        """Makes the first state."""
        wanted = self._plan.in_shardings
        made = self._target.make_args(jax.tree.map(spread, wanted, self._avals()), seed)
        dynamic = [a for i, a in enumerate(made) if i not in self._target.static]
        # Whole trees at once would be there twice.
        leaves = jax.tree.leaves(dynamic)
        del made, dynamic
        for i, sharding in enumerate(jax.tree.leaves(wanted)):
            leaves[i] = jax.device_put(leaves[i], sharding, donate=True)
        jax.block_until_ready(leaves)
        self._args = leaves

    def data_of(self, number: int) -> list[jax.Array]:
        """The data of a step, on the devices."""
        return jax.block_until_ready(self._fresh(number))

    def run(self, data: Sequence[jax.Array]) -> Any:
        """Launches a step."""
        for i, leaf in zip(self.data, data, strict=True):
            self._args[i] = leaf
        results = self._built.compiled(*(self._args[i] for i in self._inputs))
        for put, got in self._feedback:
            self._args[self._inputs[put]] = results[got]
        if self._loss is not None:
            self.losses.append(results[self._loss])
        return results

    def tokens(self) -> int | None:
        """Number of tokens that a step reads; None if nothing is called so."""
        names = self._step.arg_names
        found = [i for i in self.data if names[i].rpartition("/")[2] == "tokens"]
        return math.prod(self._step.avals[found[0]].shape) if found else None

    def _avals(self) -> Any:
        args, _ = jax.tree.unflatten(self._step.in_tree, self._step.avals)
        return args

    def _make_data(self, seed: jax.Array) -> list[jax.Array]:
        # Nothing of the state is kept here, so that none of it is computed.
        made = self._target.make_args(self._plan.in_shardings, seed)  # pyright: ignore
        leaves = self._step.flatten(made, {})
        return [leaves[i] for i in self.data]


def spread(sharding: NamedSharding, aval: jax.ShapeDtypeStruct) -> NamedSharding:
    """Over all devices, in whichever dim they divide: the same for every plan."""
    mesh = sharding.mesh
    even = (d for d, size in enumerate(aval.shape) if size % mesh.size == 0)
    dim = next(even, None)
    if dim is None:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, mesh.axis_names))
