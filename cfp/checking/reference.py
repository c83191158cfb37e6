"""The step that a plan's is compared with: as written, in float32.

It runs on one device, which shards nothing. Where one device has no room for it, it is
sharded over all, by a preset that shards its arguments in another way than the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cfp.analysis.layout import lay_out
from cfp.errors import DeviceError
from cfp.passes.pipeline import analyze_step
from cfp.plan.plan import Plan
from cfp.presets.presets import presets
from cfp.profiling.compile_pool import CompilePool, default_threads
from cfp.program.constrain import Constraints
from cfp.program.graph import Spec
from cfp.program.step import FlatStep
from cfp.runtime.execute import CompiledStep, compile_step, load_or_lower
from cfp.search.jobs import constraints_of
from cfp.settings import ConstraintLevel
from cfp.units import format_bytes

# Presets of which a device holds part of the parameters and of the activations, the one
# that needs the least memory first.
_FRUGAL = (
    "fully_sharded",
    "tensor_sequence_parallel",
    "tensor_parallel",
    "expert_parallel",
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A compiled step to compare a plan's with.

    Attributes:
        step: in float32, or in float64 what computes in that.
        preset: what shards it over the plan's devices; "" where it runs on one.
    """

    step: CompiledStep
    preset: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a device that a check takes, in bytes.

    Attributes:
        needed_bytes: for the larger of both programs and its arguments.
        limit_bytes: what there is; 0 where nobody knows.
    """

    needed_bytes: int
    limit_bytes: int

    @property
    def is_there(self) -> bool:
        """True if the device has that much, or if nobody knows how much it has."""
        return not self.limit_bytes or self.needed_bytes <= self.limit_bytes


def room_for(planned: CompiledStep, reference: CompiledStep) -> Room | None:
    """Memory of a device for both programs; None where a program does not say.

    Args:
        planned: the step under a plan, which is compared.
    """
    ours, theirs = (s.compiled.memory_analysis() for s in (planned, reference))
    if ours is None or theirs is None:
        return None
    # They run one after another. Where other processes have parts of the reference's
    # arguments and results these stay on the devices meanwhile.
    beside = 0
    if not all(one.is_fully_addressable for one in reference.in_shardings):
        beside = theirs.argument_size_in_bytes + theirs.output_size_in_bytes
    largest = max(
        s.argument_size_in_bytes
        + s.temp_size_in_bytes
        + s.output_size_in_bytes
        - s.alias_size_in_bytes
        for s in (ours, theirs)
    )
    device = min(reference.in_shardings[0].addressable_devices, key=lambda d: d.id)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return Room(beside + largest, limit)


def both_sides(
    plan: Plan, compiled: CompiledStep | None = None
) -> tuple[CompiledStep, Reference]:
    """Compiles a plan's step, with the plan's compiler options, and its reference.

    Both compute in float32, or in float64 what does so anyway.

    Args:
        plan: bound to its step, on its mesh.
        compiled: its step as it is, if it is there: the plan's side where it computes
            in no less than float32, with precise products.

    Raises:
        DeviceError: neither one device nor all of them have room for the check.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    device = mesh.local_devices[0]
    lowered = load_or_lower(
        step,
        mesh,
        plan.fingerprint,
        plan.arg_specs,
        plan.output_specs,
        plan.constraints,
        # A memory limit, too: in wider types more is rematerialized for it, not less.
        plan.options,
        wide=True,
        unwidened=compiled,
    )
    with CompilePool(default_threads(device.platform)) as pool:
        started = pool.start("the step under the plan, to be checked", lowered.compile)
        alone = compile_alone(step, device)
        planned = started.result()
    lacking = room_for(planned, alone)
    if lacking is None or lacking.is_there:
        return planned, Reference(alone)
    needs = f"about {format_bytes(lacking.needed_bytes)} on one device"
    if (sharded := _sharded(plan)) is not None:
        room = room_for(planned, sharded.step)
        if room is None or room.is_there:
            return planned, sharded
        needs += (
            f"; or about {format_bytes(room.needed_bytes)} on each, where "
            f"{sharded.preset} shards it"
        )
    raise no_room(needs, format_bytes(lacking.limit_bytes))


def no_room(needed: str, got: str) -> DeviceError:
    """The error of a check that does not fit in memory."""
    return DeviceError(
        "There is no room for the check: the step runs in float32, as it is written, "
        "beside its state.",
        expected=needed,
        got=got.strip().splitlines()[0],
        attempt="XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, with which JAX takes more of a "
        "GPU; a smaller batch, or fewer layers, for a plan that is checked; or a run "
        "without --check",
    )


def _sharded(plan: Plan) -> Reference | None:
    """Compiles the step under another preset than the plan; None if there is none."""
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    analysis = analyze_step(step, mesh).analysis
    frame = analysis.frame
    known = presets(frame)
    for name in _FRUGAL:
        if name not in known:
            continue
        layout = lay_out(frame, known[name])
        arguments = [layout.arg_spec(i) for i in range(len(frame.program.args))]
        if arguments == list(plan.arg_specs):
            continue
        compiled = compile_step(
            step,
            mesh,
            frame.program.fingerprint,
            arguments,
            layout.output_specs(),
            constraints_of(analysis, known[name], ConstraintLevel.EVERYTHING),
            wide=True,
        )
        return Reference(compiled, name)
    return None


def compile_alone(step: FlatStep, device: Any) -> CompiledStep:
    """Compiles a step for one device, in float32."""

    def whole(leaves: Iterable[Any]) -> list[Spec]:
        return [((),) * len(leaf.shape) for leaf in leaves]

    mesh = Mesh(np.array([device]), ("alone",))
    return compile_step(
        step,
        mesh,
        None,
        whole(step.avals),
        whole(jax.tree.leaves(step.traced.out_info)),
        Constraints({}, {}),
        wide=True,
    )
