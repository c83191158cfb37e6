"""The reference of a check: the step as written, in float32.

The reference runs on one device, without sharding. If one device has no room, a preset
shards it over all devices, in another way than the plan. If the step's code names
several devices, it runs on all of them with whole arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cfp.analysis.layout import lay_out
from cfp.errors import CfpError, StepNotTraceable
from cfp.passes.analyze import analyze_step
from cfp.plan.plan import Plan
from cfp.presets.presets import presets
from cfp.printable import format_bytes
from cfp.profiling.builder import (
    CompilePool,
    compiled_bytes,
    default_threads,
    is_out_of_memory,
)
from cfp.profiling.record import MEMORY_SHARE
from cfp.program.constrain import Constraints
from cfp.program.step import FlatStep
from cfp.program.trace import OTHER_DEVICES
from cfp.runtime.execute import CompiledStep, LoweredStep, load_or_lower
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel

# Presets of which a device holds part of the parameters and of the activations, the one
# that needs the least memory first.
_FRUGAL = (
    "fully_sharded",
    "tensor_sequence_parallel",
    "tensor_parallel",
    "expert_parallel",
)


# In place of a preset: a step that shards nothing but what its own code does.
AS_WRITTEN = "as written"


@dataclass(frozen=True, slots=True)
class Reference:
    """A compiled step to compare a plan's with.

    Attributes:
        step: in float32, or in float64 if the step computes so.
        preset: preset of its shardings, or `AS_WRITTEN`; "" on one device.
        unrounded: the same step without FP8; None without FP8, or on several devices.
    """

    step: CompiledStep
    preset: str = ""
    unrounded: CompiledStep | None = None


def reference_text(preset: str) -> str:
    """Names a reference: ``one device``, or by its preset."""
    if preset == AS_WRITTEN:
        return "the step as written on the same devices"
    return f"the preset {preset}" if preset else "one device"


def needed_bytes(planned: CompiledStep, reference: CompiledStep) -> int:
    """Computes the memory of a device for the larger program; 0 if it is not known.

    The programs run one after the other. Arguments and results of the other program are
    in host memory, or on the devices of several processes.
    """
    sizes = [compiled_bytes(step.compiled) for step in (planned, reference)]
    shardings = (*reference.in_shardings, *reference.out_shardings)
    is_here = all(one.is_fully_addressable for one in shardings)
    beside = 0 if is_here else sizes[1].argument_bytes + sizes[1].output_bytes
    return beside + max(size.peak_bytes for size in sizes)


def room_of(device: Any) -> int:
    """Memory of a device, in bytes; 0 if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def both_sides(
    plan: Plan,
    compiled: CompiledStep | None = None,
    tell: Callable[[str], None] = lambda _: None,
    agree: Callable[[bool], bool] = bool,
) -> tuple[CompiledStep, Reference]:
    """Compiles a plan's step, with the plan's compiler options, and its reference.

    Both compute in float32, or in float64 if the step does.

    Args:
        plan: bound to its step, on its mesh.
        compiled: the plan's step if it computes in float32 at least, with precise
            products.
        tell: called with a text about long work.
        agree: makes an answer the same in all processes of the mesh.

    Raises:
        CfpError: neither one device nor all of them have room for the check.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    device = mesh.local_devices[0]
    # With the plan's memory limit, too: in wider types more is rematerialized for it.
    lowered = plan.lower(wide=True, unwidened=compiled, environment=None)
    with CompilePool(default_threads(device.platform)) as pool:
        started = pool.start("the step under the plan, to be checked", lowered.compile)
        needs, limit = [], room_of(device)
        for name, lower in _references(plan):
            tell(f"compiling the reference of the check: {reference_text(name)}")
            found = _unless_too_large(lower)
            planned = started.result()
            need = needed_bytes(planned, found) if found is not None else 0
            fits = found is not None and need <= (limit or need)
            if agree(fits) and found is not None:
                plain = replace(step, precision="")
                is_rounded = step.precision and not name
                unrounded = compile_alone(plain, device) if is_rounded else None
                return planned, Reference(found, name, unrounded)
            size = f"about {format_bytes(need)}" if need else "too much"
            needs.append(f"{size} for {reference_text(name)}")
    raise no_room("; or ".join(needs), format_bytes(limit))


def _references(plan: Plan) -> Iterator[tuple[str, Callable[[], LoweredStep]]]:
    """Yields names of references with functions that lower them, in order.

    First the step on one device, or as written on the devices that its code names. Then
    presets with other shardings of the arguments: the most different first, and among
    equals those of least memory.
    """
    step, mesh = plan.step, plan.mesh
    assert step is not None and mesh is not None
    # A step that fits one device by a memory limit is compared on it with the same.
    limit = {name: v for name, v in plan.options.items() if name == MEMORY_SHARE}
    alone = _mesh_of(mesh.local_devices[0])
    try:
        lowered = _lower_whole(step, alone, limit if mesh.size == 1 else {})
        yield "", lambda: lowered
    except StepNotTraceable as error:
        if mesh.size == 1 or OTHER_DEVICES not in str(error):
            raise
        yield AS_WRITTEN, partial(_lower_whole, step, mesh, {})
    analysis = analyze_step(step, mesh).analysis
    program, known = analysis.frame.program, presets(analysis.frame)
    layouts = {n: lay_out(analysis.frame, known[n]) for n in _FRUGAL if n in known}
    specs = {
        n: [*map(one.arg_spec, range(len(program.args)))] for n, one in layouts.items()
    }
    alike = {n: sum(map(eq, specs[n], plan.arg_specs)) for n in layouts}
    for name in sorted(layouts, key=lambda n: 2 * alike[n] > len(program.args)):
        if alike[name] < len(program.args):
            yield (
                name,
                partial(
                    load_or_lower,
                    step,
                    mesh,
                    program.fingerprint,
                    specs[name],
                    layouts[name].output_specs(),
                    constraints_of(analysis, known[name], ConstraintLevel.EVERYTHING),
                    wide=True,
                ),
            )


def _unless_too_large(lower: Callable[[], LoweredStep]) -> CompiledStep | None:
    """Compiles a step; None where the compiler says that it cannot fit."""
    try:
        return lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def no_room(needed: str, got: str) -> CfpError:
    """The error of a check that does not fit in memory."""
    return CfpError(
        "There is no room for the check, which runs the step as written, "
        f"beside its state: needed {needed}, got {got.strip().splitlines()[0]}. "
        "Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, with which JAX takes more of "
        "a GPU; check a smaller model or batch; or leave out --check."
    )


def compile_alone(step: FlatStep, device: Any) -> CompiledStep:
    """Compiles a step for one device, in float32."""
    return _lower_whole(step, _mesh_of(device), {}).compile()


def _mesh_of(device: Any) -> Mesh:
    return Mesh(np.array([device]), ("alone",))


def _lower_whole(step: FlatStep, mesh: Mesh, options: Mapping[str, str]) -> LoweredStep:
    """Lowers a step for a mesh, with its arguments and results whole on each device."""
    results = jax.tree.leaves(step.traced.out_info)
    ins, outs = ([((),) * len(x.shape) for x in of] for of in (step.avals, results))
    nothing = Constraints({}, {})
    return load_or_lower(step, mesh, None, ins, outs, nothing, options, wide=True)
